"""Identifiers and chance. Random ids are unguessable; everything below a run counts from the run's own."""

from __future__ import annotations

import secrets
from collections.abc import Callable

NewId = Callable[[], str]
"""Makes one fresh identifier. Injected wherever one is made, so that tests can number theirs."""


def random_id() -> str:
    """128 bits nobody can guess, safe in a URL and in a file's name."""
    return secrets.token_hex(16)


Chance = Callable[[], float]
"""A number from 0 to 1. Injected wherever something is left to chance, so that tests can choose."""


def random_fraction() -> float:
    """Any number from 0 up to, not including, 1."""
    return secrets.randbits(53) / (1 << 53)
