"""AG-UI: the events of a run as a client reads them, and what it sends as a run takes it."""
