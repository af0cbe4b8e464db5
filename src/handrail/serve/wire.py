"""`Wire`: a connection as uvicorn serves it, bounded: how many there are, how slowly they speak and read.

What is refused here never reaches the app: a client that sends nothing must cost nothing.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from handrail.serve.limits import Limits
from handrail.serve.metrics import Metrics
from handrail.serve.middleware import HEADERS
from handrail.serve.refusals import body

_HEALTH = b"GET /health "
_LAST_SECONDS = 1.0
"""How long a reader has for what is on its way to it when the server stops."""


def wire(limits: Limits, metrics: Metrics) -> type[H11Protocol]:
    """The protocol of a server with these limits, for uvicorn's `http=`."""

    class Wire(_Wire):
        pass

    Wire.limits, Wire.metrics = limits, metrics
    return Wire


def canned(status: int, reason: str, kind: str, message: str, *more: str) -> bytes:
    """A whole answer, as bytes."""
    said = json.dumps(body(kind, message)).encode()
    lines = [
        f"HTTP/1.1 {status} {reason}",
        "content-type: application/json",
        f"content-length: {len(said)}",
        "cache-control: no-store",
        "connection: close",
        *more,
        *(f"{name.decode()}: {value.decode()}" for name, value in HEADERS),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + said


_FULL = canned(
    503,
    "Service Unavailable",
    "TooManyConnections",
    "the server has as many connections as it takes. Try again soon.",
    "retry-after: 5",
)
_BAD = canned(
    400, "Bad Request", "BadRequest", "this is no HTTP request that can be read. Speak HTTP/1.1, without TLS."
)
_SLOW = canned(
    408, "Request Timeout", "HeadersTooSlow", "the request was not there in time. Send it at once."
)


class _Wire(H11Protocol):
    """One connection.

    Past the limit it is only told so, in answer to its first request; `/health` is answered even then.
    """

    limits: Limits
    metrics: Metrics
    _over = False
    _first: bytes | None = None
    _waits: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        many = len(self.connections)
        self._over = many > self.limits.connections
        if many > 10 * self.limits.connections + 100:
            self.metrics.refuse("TooManyConnections")
            transport.abort()
            return
        self._first = b"" if self._over else None
        self._await_request(self.limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        if self._first is not None:
            self._first += data
            if b"\r\n\r\n" not in self._first and len(self._first) <= self.limits.header_bytes:
                return
            data, self._first = self._first, None
            if not data.startswith(_HEALTH):
                self.metrics.refuse("TooManyConnections")
                self._say(_FULL)
                return
        if self.transport.is_closing():
            return
        if not self._answers:
            self._await_request(self.limits.header_seconds, again=False)
        super().data_received(data)
        if self._over and self._answers:
            self.cycle.keep_alive = False

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # a whole request is there
            self._waits = _cancelled(self._waits)

    def send_400_response(self, msg: str) -> None:
        self.metrics.refuse("BadRequest")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self._answers:
            self._say(_BAD)
        else:  # in the middle of an answer: there is nothing more to be said
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waits = _cancelled(self._waits)
        self._stalled = _cancelled(self._stalled)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(_LAST_SECONDS, self.transport.abort)

    @property
    def _answers(self) -> bool:
        """Is a request being answered?"""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    # Readers.

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.limits.write_seconds, self._let_go, "ReaderStalled")

    def resume_writing(self) -> None:
        self._stalled = _cancelled(self._stalled)
        super().resume_writing()

    def _let_go(self, kind: str) -> None:
        self.metrics.refuse(kind)
        self.transport.abort()

    # Speakers.

    def _await_request(self, seconds: float, again: bool = True) -> None:
        """Give it so long to say what it wants; not longer for saying it byte by byte."""
        if self._waits is None or again:
            self._waits = _cancelled(self._waits)
            self._waits = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._waits = None
        if not self.transport.is_closing():
            self.metrics.refuse("HeadersTooSlow")
            self._say(_SLOW)

    def _say(self, answer: bytes) -> None:
        self._waits = _cancelled(self._waits)
        self.transport.write(answer)
        self.transport.close()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
