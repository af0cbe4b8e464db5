"""Random ids, random numbers, and the trace and span ids of runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from hashlib import blake2b

NewId = Callable[[], str]
"""A function that returns a new id. Tests pass one that numbers its ids."""


def random_id() -> str:
    """Return 128 random bits as hexadecimal digits, which are safe in URLs and file names."""
    return secrets.token_hex(16)


Chance = Callable[[], float]
"""A function that returns a number from 0 to 1. Tests pass one that returns a number of their choice."""


def random_fraction() -> float:
    """Return a random number from 0 up to, but not including, 1."""
    return secrets.randbits(53) / (1 << 53)


def trace_of(run_id: str) -> str:
    """Return the trace id of a run that was given none. It is derived from the run's id, so it stays the same when the run is resumed."""
    return blake2b(run_id.encode(errors="surrogatepass"), digest_size=16, person=b"trace").hexdigest()


def span_of(run_id: str) -> str:
    """Return the span id of a run, derived from its id. A nested run has an id of its own, and so its own span."""
    return blake2b(run_id.encode(errors="surrogatepass"), digest_size=8, person=b"span").hexdigest()
