"""What a cursor is, and how it moves."""
