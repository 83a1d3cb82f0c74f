"""Spark jobs: `python -m seqgate.jobs.<name>`, and commands of `seqgate`."""
