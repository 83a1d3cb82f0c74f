"""Jobs with Spark: `python -m seqgate.jobs.<name>`, and commands of `seqgate`."""
