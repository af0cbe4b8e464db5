"""What a request asks for, by its address."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from starlette.requests import Request

from handrail.errors import RequestRefused
from handrail.records import Mark
from handrail.serve.middleware import PRINCIPAL
from handrail.serve.naming import ID, ID_IN_WORDS
from handrail.serve.thread import Thread
from handrail.serve.threads import Threads

_MOST = 200
_LONGEST_SEARCH = 200


def thread_of(threads: Threads, request: Request) -> Thread:
    """The thread an address names, of whoever the request is by: another's can't be named."""
    return threads.thread(request.scope[PRINCIPAL], checked_id(request.path_params["id"]))


def checked_id(given: object) -> str:
    if not isinstance(given, str) or not ID.fullmatch(given):
        raise RequestRefused(422, "BadId", f"an id has {ID_IN_WORDS}")
    return given


def limit_of(request: Request) -> int:
    """`?limit=`: 50, and at most 200."""
    given = request.query_params.get("limit", "50")
    if not (given.isascii() and given.isdecimal()) or len(given) > 6 or not int(given):
        raise RequestRefused(422, "BadLimit", f"`limit` is a number from 1 to {_MOST}")
    return min(int(given), _MOST)


def before_of(request: Request) -> Mark | None:
    """`?before=`: the `next` of a page, or a time in ISO 8601, UTC unless it says otherwise; here as a mark."""
    given = request.query_params.get("before")
    if given is None:
        return None
    at, slash, id = given.partition("/")
    try:
        if slash:
            number = float(at)
            if not math.isfinite(number):
                raise ValueError
            return number, id[1:] if id.startswith("/") else f"{request.scope[PRINCIPAL]}/{id}"
        time = datetime.fromisoformat(given.replace(" ", "+"))
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), ""
    except (ValueError, OverflowError):
        raise RequestRefused(
            422, "BadTime", "`before` is the `next` of a page, or a time, such as 2026-05-31T12:00:00Z"
        ) from None


def mark_of(request: Request, mark: Mark) -> str:
    """Where a page ended, for `?before=`: exactly, since several may have been changed at one time.

    A page may end at a session that is no thread's: its id is then given whole.
    """
    at, session_id = mark
    mine = f"{request.scope[PRINCIPAL]}/"
    return f"{at!r}/{session_id.removeprefix(mine) if session_id.startswith(mine) else f'/{session_id}'}"


def words_of(request: Request) -> str:
    """`?find=`: words to look for."""
    given = request.query_params.get("find", "")
    if len(given) > _LONGEST_SEARCH:
        raise RequestRefused(422, "BadSearch", f"`find` has at most {_LONGEST_SEARCH} characters")
    return given
