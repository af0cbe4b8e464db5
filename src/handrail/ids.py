"""Random ids and random numbers. Ids are unguessable; those inside a run are derived from the run's id."""

from __future__ import annotations

import secrets
from collections.abc import Callable

NewId = Callable[[], str]
"""Makes a new id. Injected wherever one is made, so that tests can number theirs."""


def random_id() -> str:
    """Return 128 random bits in hex, safe in a URL and in a file name."""
    return secrets.token_hex(16)


Chance = Callable[[], float]
"""Returns a number from 0 to 1. Injected wherever something is random, so that tests can choose it."""


def random_fraction() -> float:
    """Return a random number from 0 up to, but not including, 1."""
    return secrets.randbits(53) / (1 << 53)
