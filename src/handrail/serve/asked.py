"""What a request asks for, by its address."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request

from handrail.errors import RequestRefused
from handrail.serve.guarding import PRINCIPAL
from handrail.serve.naming import ID, ID_IN_WORDS
from handrail.serve.thread import Thread
from handrail.serve.threads import Threads

_MOST = 200


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


def before_of(request: Request) -> float | None:
    """`?before=`: a time in ISO 8601, UTC unless it says otherwise; here as seconds since 1970."""
    given = request.query_params.get("before")
    if given is None:
        return None
    try:
        at = datetime.fromisoformat(given.replace(" ", "+"))
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise RequestRefused(422, "BadTime", "`before` is a time, such as 2026-05-31T12:00:00Z") from None
