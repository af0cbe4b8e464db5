"""Random ids, random numbers, and the trace and span ids of runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from hashlib import blake2b

from handrail.errors import DefinitionError

NewId = Callable[[], str]
"""A function that returns a new id. Tests pass one that numbers its ids."""


def random_id() -> str:
    """Return 128 random bits as hexadecimal digits, which are safe in URLs and file names."""
    return secrets.token_hex(16)


MOST_ID = 512
"""Maximum number of characters in the id of a session or a run, and in the name of a principal."""


def why_unfit(id: object) -> str:
    """Return what is wrong with the id of a session or a run, or with the name of a principal; "" if it can be used."""
    if not isinstance(id, str):
        return f"{id!r:.80} is not a string"
    if not id or id.isspace():
        return f"{id!r:.80} is blank"
    if len(id) > MOST_ID:
        return f"{id[:40]!r}… has {len(id)} characters"
    if not id.isprintable():
        bad = next(each for each in id if not each.isprintable())
        return f"{id!r:.80} contains {bad!r}, which can't be printed"
    return ""


def check_id(what: str, id: object) -> None:
    """Raise `DefinitionError` if an id can't be used. `what` says whose id it is, such as "session id"."""
    problem = why_unfit(id)
    if problem:
        raise DefinitionError(
            f"the {what} {problem}. Pass 1 to {MOST_ID} printable characters, such as 'conv-1'."
        )


Chance = Callable[[], float]
"""A function that returns a number from 0 to 1. Tests pass one that returns a number of their choice."""


def random_fraction() -> float:
    """Return a random number from 0 up to, but not including, 1."""
    return secrets.randbits(53) / (1 << 53)


def trace_of(run_id: str) -> str:
    """Return the trace id of a run that was given none. It is derived from the run's id, so it stays the same when the run is resumed."""
    return blake2b(run_id.encode(errors="surrogatepass"), digest_size=16, person=b"trace").hexdigest()


def spawned_id(place_id: str) -> str:
    """Return the id of the background run that is begun at a place in a run. It is derived, so it stays the same after a crash."""
    return blake2b(place_id.encode(errors="surrogatepass"), digest_size=16, person=b"spawned").hexdigest()


def span_of(run_id: str) -> str:
    """Return the span id of a run, derived from its id. A nested run has an id of its own, and so its own span."""
    return blake2b(run_id.encode(errors="surrogatepass"), digest_size=8, person=b"span").hexdigest()
