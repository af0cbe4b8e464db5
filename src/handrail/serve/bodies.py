"""Request bodies: how large each may be, and how it is read and parsed.

`Bodies` reads every body that a server takes. A route declares what it takes by being a `BodyRoute`. All others take next to
nothing, so a route that forgets it takes too little, never too much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Message, Receive

from handrail.concurrency.threads import run_in_thread
from handrail.schema.size import MOST_VALUES, count_values
from handrail.serve.refusals import RequestRefused

T = TypeVar("T")

_ON_LOOP = 16 * 1024
"""Bodies of up to this many bytes are parsed on the event loop, because a thread would take longer."""
_HELD = 64 * 2**20
"""Maximum bytes of bodies that the unanswered requests of one sender hold."""


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
        self._held: dict[str, int] = {}
        """The bytes that the unanswered requests of each sender hold."""
        self._most_held = max([_HELD, *(2 * each.body.size for each in self._larger)])

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
        held = _Held(self._held, sender, self._most_held)
        answered.callback(held.give_back)
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
                    held.take(len(chunk))
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


class _Held:
    """What one request holds of its sender's bytes."""

    def __init__(self, held: dict[str, int], sender: str, most: int) -> None:
        self._held, self._sender, self._most = held, sender, most
        self._mine = 0

    def take(self, size: int) -> None:
        before = self._held.get(self._sender, 0)
        if before + size > self._most:
            raise RequestRefused(
                429,
                "TooManyBytes",
                f"your unanswered requests hold {before} bytes, and the limit is {self._most}. Wait for their responses.",
                retry_after=5.0,
            )
        self._held[self._sender] = before + size
        self._mine += size

    def give_back(self) -> None:
        left = self._held.get(self._sender, 0) - self._mine
        self._mine = 0
        if left:
            self._held[self._sender] = left
        else:
            self._held.pop(self._sender, None)


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
