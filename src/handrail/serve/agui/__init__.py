"""AG-UI: a run's events as AG-UI events, and a client's input as messages and answers for a run."""
