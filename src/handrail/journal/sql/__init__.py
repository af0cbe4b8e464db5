"""What a journal's roles do in a database: the same tables and statements, in SQLite and in PostgreSQL."""
