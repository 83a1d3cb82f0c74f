"""What Seqgate runs: one folder a service, and what they all stand on."""
