"""The rules of deduplication, as functions on values."""
