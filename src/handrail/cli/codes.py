"""The exit codes that scripts read."""

from __future__ import annotations

DONE, FAILED, USAGE, NOT_APPROVED, LIMIT, WAITS, CANCELLED, TERMINATED = 0, 1, 2, 3, 4, 5, 130, 143

CODES = (
    (DONE, "done"),
    (FAILED, "the run failed, or its answer was cut off, refused or incomplete"),
    (USAGE, "the command line or a worker's file is wrong; nothing ran"),
    (NOT_APPROVED, "the run ended, and something it wanted to do was not approved"),
    (LIMIT, "its deadline or budget was spent"),
    (WAITS, "the run is parked: it waits for an answer (handrail runs answer)"),
    (CANCELLED, "cancelled by Ctrl-C; what was under way was undone (143: by SIGTERM)"),
)
