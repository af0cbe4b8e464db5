"""Spelling: the known name that a misspelt one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_LONGEST = 100
_MOST = 500


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like a name, or None.

    Comparing takes time in proportion to both, and names come from models: a long name has no likeness, and only
    the first few hundred known ones are compared.
    """
    import difflib  # errors only

    if len(name) > _LONGEST:
        return None
    compared = (each for each in known if len(each) <= _LONGEST)
    return next(
        iter(difflib.get_close_matches(name, list(islice(compared, _MOST)), n=1, cutoff=cutoff)), None
    )
