"""The number of examples for a property test that limits the number of its profile (see conftest.py)."""

from __future__ import annotations

from hypothesis import settings


def at_most(count: int) -> int:
    """Return this number of examples, or the profile's if that is smaller, so that `count` applies to deep runs.

    A count without this function would also apply to ordinary runs and to further Pythons, whose profiles have few examples.
    """
    return min(count, settings().max_examples)
