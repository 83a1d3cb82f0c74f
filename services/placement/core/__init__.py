"""Decisions about places, as values."""
