"""The cursor service: durable cursors, which record how far a topic has been acknowledged."""
