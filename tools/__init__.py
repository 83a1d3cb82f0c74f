"""What is run and never imported by what we publish: stack, demo, bench, dev."""
