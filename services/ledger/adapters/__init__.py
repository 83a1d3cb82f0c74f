"""One external system each: SQLite, the dedup service, and memory as the reference for tests."""
