"""Redrives of many dead letters, and replays of stretches of the log."""
