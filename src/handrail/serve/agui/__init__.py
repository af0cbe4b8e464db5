"""AG-UI support: translates a run's events to AG-UI events, and a client's input to messages and answers."""
