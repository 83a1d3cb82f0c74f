"""The ledger service: topics, and their publish and read paths."""
