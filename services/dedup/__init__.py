"""The dedup service: decides which of a producer's messages are new."""
