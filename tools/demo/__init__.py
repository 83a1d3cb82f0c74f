"""A year of flights through crashes, and the proof that each is stored once."""
