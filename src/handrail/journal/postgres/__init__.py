"""The journal in a PostgreSQL database, which many machines can share. Needs `pip install 'handrail[postgres]'`."""
