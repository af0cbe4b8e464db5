"""Journals: the durable record of runs, in SQLite or PostgreSQL."""
