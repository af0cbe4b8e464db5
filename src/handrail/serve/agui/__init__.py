"""AG-UI: what Handrail's events are in its words, and what its requests ask for."""
