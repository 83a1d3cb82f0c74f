"""Stores for cursors."""
