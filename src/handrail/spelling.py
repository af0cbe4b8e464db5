"""Finds the known name that is closest to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_LONGEST = 100
_MOST = 500


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar enough.

    Names come from models, so the time for comparisons is bounded: long names are skipped, and at most the first
    few hundred known names are compared.
    """
    import difflib  # only errors need it

    if len(name) > _LONGEST:
        return None
    compared = (each for each in known if len(each) <= _LONGEST)
    return next(
        iter(difflib.get_close_matches(name, list(islice(compared, _MOST)), n=1, cutoff=cutoff)), None
    )
