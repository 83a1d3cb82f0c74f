"""The cursor service: how far somebody has come in a topic, kept durably."""
