"""One external system each: Redis, a policy file, and memory as the reference for tests."""
