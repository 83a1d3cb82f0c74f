"""Copies a stopped installation's stores from SQLite to PostgreSQL."""
