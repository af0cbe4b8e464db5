"""The parts of a request: the prefix and the path in its address, its JSON body, and the ids and options in its URL.

`Bodies` reads every body that a server takes. A route declares what it takes by being a `BodyRoute`. All others take next to
nothing, so a route that forgets it takes too little, never too much.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
import pydantic_core
from starlette.requests import HTTPConnection, Request
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Message, Receive, Scope

from handrail.concurrency.threads import run_in_thread
from handrail.errors import DefinitionError
from handrail.journal.records import Mark, Order, When
from handrail.schema.size import MOST_VALUES, count_values
from handrail.serve.limits import Quota
from handrail.serve.refusals import RequestRefused

PRINCIPAL, PERSON, STARTED = "handrail.principal", "handrail.person", "handrail.started"
"""The keys in a request's scope for the sender's name, the sender as a `Person`, and the time of arrival."""

ID = re.compile(r"[A-Za-z0-9._:~-]{1,128}")
"""Matches valid thread ids, and valid run ids of AG-UI clients."""
ID_RULE = "1 to 128 letters, digits and . _ : ~ -"
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+)*")
_MAX_DEPTH = 64
_MAX_PAGE = 200
_MAX_SEARCH = 200
_ERROR_PATH = re.compile(r" - at `\$(.*)`$")
_ON_LOOP = 16 * 1024
"""Bodies of up to this many bytes are parsed on the event loop, because a thread would take longer."""
_HELD = 64 * 2**20
"""Maximum bytes of bodies that the unanswered requests of one sender hold."""

T = TypeVar("T")


# --- the prefix ---------------------------------------------------------------------------------------


def parse_prefix(text: str) -> str:
    """Return a prefix without a slash at its end, "" for none. Raises `DefinitionError` if it is not a path."""
    prefix = text.rstrip("/")
    if not _PREFIX.fullmatch(prefix):
        raise DefinitionError(
            f"{text!r} is not a prefix. Give the path that comes before the app's own paths, such as /agents."
        )
    return prefix


def placed(scope: Scope, prefix: str) -> Scope:
    """Return a request's scope in which `root_path` is the app's prefix and `path` begins with it, as ASGI specifies.

    `prefix` is the configured one. If it is "", the app has the prefix that its server names, such as where it is mounted. It
    makes no difference whether a proxy has removed the prefix from the path or passes it on.
    """
    root = scope.get("root_path", "").rstrip("/")
    outer = scope.get("app_root_path", "").rstrip(
        "/"
    )  # what a proxy in front of all mounted apps has removed
    path = _below(scope["path"], root, root.removeprefix(outer), prefix)
    root = prefix or root
    return {**scope, "path": root + path, "root_path": root, "app_root_path": root}


def _below(path: str, *prefixes: str) -> str:
    """Return what follows the first of the prefixes that a path has. A path that has none is returned as it is."""
    for prefix in prefixes:
        if prefix and (path == prefix or path.startswith(f"{prefix}/")):
            return path.removeprefix(prefix)
    return path


def route_path(request: HTTPConnection) -> str:
    """Return a request's path below the app's prefix. It is "" for the prefix itself, without a slash at its end."""
    return request.scope["path"].removeprefix(request.scope.get("root_path", ""))


def prefix_of(request: HTTPConnection) -> str:
    """Return the app's prefix as it is written in an address, "" for none."""
    return quote(request.scope.get("root_path", ""))


# --- reading bodies -----------------------------------------------------------------------------------


class BodyLimit(NamedTuple):
    """The largest body that a route takes."""

    size: int
    """Maximum bytes."""
    values: int = MOST_VALUES
    """Maximum number of JSON values, including those inside lists and objects."""


SMALL = BodyLimit(4096)
"""The limit of every route that declares none, such as `/login`, which takes bodies without credentials."""


class BodyRoute(Route):
    """A route that takes larger bodies than `SMALL`."""

    def __init__(self, path: str, endpoint: Callable[..., Any], *, body: BodyLimit, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.body = body


class Bodies:
    """Reads the bodies of requests to `routes`, each within `seconds` and the limit of its route."""

    def __init__(self, routes: Sequence[BaseRoute], *, seconds: float) -> None:
        self._larger = [each for each in routes if isinstance(each, BodyRoute)]
        self._seconds = seconds
        most = max([_HELD, *(2 * each.body.size for each in self._larger)])
        self.held = Quota(
            most,
            "TooManyBytes",
            f"your unanswered requests hold {{held}} bytes, and the limit is {most}. Wait for their responses.",
        )
        """The bytes that the unanswered requests of each sender hold."""

    def limit_of(self, request: Request) -> BodyLimit:
        """Return the limit of the route that a request leads to."""
        for route in self._larger:
            if route.matches(request.scope)[0] is Match.FULL:
                return route.body
        return SMALL

    async def read(self, request: Request, receive: Receive, sender: str, answered: ExitStack) -> bytes:
        """Return a request's body. Until `answered` is closed, its bytes count towards what its sender may hold.

        Raises `RequestRefused` if the body is too large or too slow, has too many values, or does not arrive whole, or if the
        sender's unanswered requests hold too much.
        """
        size, values = self.limit_of(request)
        declared = request.headers.get("content-length", "")
        too_large = RequestRefused(413, "BodyTooLarge", f"the body is larger than {size} bytes. Send less.")
        if declared.isdecimal() and int(declared[:20]) > size:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise RequestRefused(
                            400,
                            "BodyMissing",
                            "the connection closed before the whole body arrived. Send the request again.",
                        )
                    chunk = message.get("body", b"")
                    if len(body) + len(chunk) > size:
                        raise too_large
                    if chunk:
                        self.held.take(sender, len(chunk))
                        answered.callback(self.held.give_back, sender, len(chunk))
                        body += chunk
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise RequestRefused(
                408,
                "BodyTooSlow",
                f"the body did not arrive within {self._seconds:g} seconds. Send it faster.",
            ) from None
        whole = bytes(body)
        if await run_parse(whole, lambda data: count_values(data, values)) > values:
            raise RequestRefused(
                413, "BodyTooLarge", f"the body contains more than {values:,} values. Send fewer."
            )
        return whole


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns a body that was already read, which it then forgets, and then passes on messages."""
    left: list[bytes] = [body]

    async def again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return again


async def parse_body(request: Request, parse: Callable[[bytes], T]) -> T:
    """Parse a request's body, which `Bodies` has read, as `run_parse` does.

    The request does not keep the body, because its response may be a stream that lasts for hours.
    """
    return await run_parse(b"".join([chunk async for chunk in request.stream() if chunk]), parse)


async def run_parse(body: bytes, parse: Callable[[bytes], T]) -> T:
    """Return `parse(body)`. A large body is parsed in a thread, so `parse` must be thread-safe."""
    return parse(body) if len(body) <= _ON_LOOP else await run_in_thread(lambda: parse(body))


# --- parsing bodies -----------------------------------------------------------------------------------


class FileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file in a request. Its bytes are sent in base64."""

    name: str
    data: bytes


class MessageBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that sends a message."""

    text: str
    attachments: list[FileBody] = []


class SendBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that says something to a run while it works."""

    text: str
    when: When = "next step"
    id: str | None = None


class EditBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that edits a message to a run."""

    text: str | None = None
    when: When | None = None


class OrderBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that orders a run to do something before its next step, or continues it."""

    order: Order | Literal["continue"]
    text: str = ""


class AnswerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that answers a question."""

    question_id: str
    digest: str
    outcome: Literal["answered", "declined", "cancelled"] = "answered"
    value: Any = None
    reason: str = ""


class VoteBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that votes on another person's question."""

    question_id: str
    digest: str
    approved: bool
    reason: str = ""


class LoginBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a sign-in request: the code of a link, a token, or a name and a password.

    With the link from a sign-in provider comes the secret that the page got when it began the sign-in.
    """

    token: str = ""
    link: str = ""
    secret: str = ""
    name: str = ""
    password: str = ""


class EmptyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that takes no data. It is empty or an empty object."""


async def read(request: Request, kind: type[T]) -> T:
    """Parse a request's body as a value of `kind`. Raises `RequestRefused` as `parse` does."""
    return await parse_body(request, lambda data: parse(data, kind))


def parse(data: bytes, kind: type[T]) -> T:
    """Parse a body as a value of `kind`.

    Raises `RequestRefused` if `parse_json` does, or if the body does not fit `kind`. In the second case the refusal
    points to one of the problems.
    """
    value: Any = parse_json(data) if data or kind is not EmptyBody else {}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = _ERROR_PATH.search(str(error))
        where = found[1] if found else ""
        what = str(error)[: found.start()] if found else str(error)
        pointer = re.sub(r"\[(\d+)\]|\.", lambda part: "/" + (part[1] or ""), where)
        raise RequestRefused(
            422, "BodyUnfit", f"the body is invalid: {what}", fields=[(pointer, what)]
        ) from None


def parse_json(data: bytes) -> Any:
    """Parse a JSON body strictly. Raises `RequestRefused` if the body is not valid JSON.

    Duplicate names in an object, infinite numbers, NaN, integers of more than 64 bits, lone surrogates and more than
    64 levels of nesting are refused too.
    """
    try:
        pydantic_core.from_json(data, allow_inf_nan=False)  # checks UTF-8, surrogates, NaN and extreme depth
        value: Any = json.loads(
            data,
            object_pairs_hook=_parse_object,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise RequestRefused(400, "BadJson", f"the body is not valid JSON: {why}") from None
    if _is_deeper(value, _MAX_DEPTH):
        raise RequestRefused(
            400, "BadJson", f"the body has more than {_MAX_DEPTH} levels of nesting. Send a flatter body."
        )
    return value


def _parse_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object contains the same name twice")
    return made


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large for a 64-bit float")
    return value


def _parse_int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise ValueError("an integer needs more than 64 bits")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether a value has more than this many levels of nesting. Works without recursion."""
    here: list[Any] = [value]
    for _ in range(levels + 1):
        inner: list[Any] = []
        for each in here:
            if isinstance(each, dict):
                inner.extend(each.values())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # plain JSON
            elif isinstance(each, list):
                inner.extend(each)  # pyright: ignore[reportUnknownArgumentType]  # plain JSON
        if not inner:
            return False
        here = inner
    return True


# --- URLs ---------------------------------------------------------------------------------------------


def check_id(value: object) -> str:
    """Return the value if it is a valid id. Raises `RequestRefused` otherwise."""
    if not isinstance(value, str) or not ID.fullmatch(value):
        raise RequestRefused(422, "BadId", f"the id is invalid. An id consists of {ID_RULE}")
    return value


def limit_of(request: Request) -> int:
    """Return the value of `?limit=`, or 50 if it is absent. A value above 200 becomes 200.

    Raises `RequestRefused` if it is not a positive whole number of at most six digits.
    """
    text = request.query_params.get("limit", "50")
    if not (text.isascii() and text.isdecimal()) or len(text) > 6 or not int(text):
        raise RequestRefused(422, "BadLimit", f"`limit` must be a number from 1 to {_MAX_PAGE}")
    return min(int(text), _MAX_PAGE)


def days_of(request: Request) -> int:
    """Return the value of `?days=`, or 7 if it is absent. Raises `RequestRefused` if it is not a number from 1 to 366."""
    text = request.query_params.get("days", "7")
    if not (text.isascii() and text.isdecimal()) or len(text) > 3 or not 0 < int(text) <= 366:
        raise RequestRefused(422, "BadNumber", "`days` must be a number from 1 to 366")
    return int(text)


def before_of(request: Request) -> Mark | None:
    """Return the value of `?before=` as a mark, or None if it is absent.

    The value is the `next` of an earlier page, or a time in ISO 8601, in UTC by default. Raises `RequestRefused` for any
    other value.
    """
    text = request.query_params.get("before")
    if text is None:
        return None
    at, slash, id = text.partition("/")
    try:
        if slash:
            number = float(at)
            if not math.isfinite(number):
                raise ValueError
            return number, id[1:] if id.startswith("/") else f"{request.scope[PRINCIPAL]}/{id}"
        time = datetime.fromisoformat(text.replace(" ", "+"))
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), ""
    except (ValueError, OverflowError):
        raise RequestRefused(
            422, "BadTime", "`before` must be the `next` of a page, or a time such as 2026-05-31T12:00:00Z"
        ) from None


def format_mark(request: Request, mark: Mark) -> str:
    """Format the mark at which a page ended, as a value for `?before=`.

    The value contains a thread id too, because several threads may have changed at the same time. If the page ended at a
    session that is not one of the principal's threads, the value contains the whole session id.
    """
    at, session_id = mark
    mine = f"{request.scope[PRINCIPAL]}/"
    return f"{at!r}/{session_id.removeprefix(mine) if session_id.startswith(mine) else f'/{session_id}'}"


def search_of(request: Request) -> str:
    """Return the value of `?find=`, the text to search for, or "" if it is absent. Raises `RequestRefused` if it is too long."""
    text = request.query_params.get("find", "")
    if len(text) > _MAX_SEARCH:
        raise RequestRefused(422, "BadSearch", f"`find` can have at most {_MAX_SEARCH} characters")
    return text
