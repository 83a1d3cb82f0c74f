"""The rules of cursors: their state, and how they move."""
