"""A limit on the Hypothesis examples of a single property test, in addition to that of the profile (see conftest.py)."""

from __future__ import annotations

from hypothesis import settings


def at_most(count: int) -> int:
    """Return `count`, or the profile's number of examples if that is smaller.

    With `max_examples=count` alone, a test would run `count` examples even in the profiles that have fewer.
    """
    return min(count, settings().max_examples)
