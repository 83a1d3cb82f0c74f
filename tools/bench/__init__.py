"""What Seqgate can do on this machine, beside what the machine allows."""
