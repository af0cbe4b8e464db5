"""AG-UI: the translation of a run's events to AG-UI events, and of a client's input to messages and answers."""
