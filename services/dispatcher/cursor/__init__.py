"""A subscription's cursor, as the holder of its lease reads and changes it."""
