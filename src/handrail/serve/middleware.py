"""`Guard`: what every request has to pass before a route sees it, and what every answer carries.

Plain ASGI around the app: nothing here waits for a stream, or holds one back.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import RequestRefused
from handrail.ids import NewId, random_id
from handrail.serve.limits import Limits, Rate
from handrail.serve.metrics import Metrics
from handrail.serve.principals import Principals
from handrail.serve.refusals import INCIDENT, response

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("handrail.serve")

PRINCIPAL, BEGAN = "handrail.principal", "handrail.began"
"""Where in a request's scope it stands who it is by, and when it came."""

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_SAFE = ("GET", "HEAD")
_METHODS = (*_SAFE, "POST", "DELETE")
_CLOSE = (b"connection", b"close")
_DRAIN_SECONDS = 1.0


def is_static(path: str) -> bool:
    """The page and its files: the same for everybody, and nothing in them is anybody's."""
    return path == "/" or path.startswith("/assets/")


def is_open(path: str) -> bool:
    """What is answered without knowing who asks."""
    return is_static(path) or path in ("/health", "/login")


class Guard:
    """Hosts, origins, principals, rates, sizes and times, in this order; then the app."""

    def __init__(
        self,
        app: App,
        *,
        principals: Principals,
        metrics: Metrics,
        limits: Limits,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        stopping: Callable[[], bool] = lambda: False,
        clock: Clock = SYSTEM_CLOCK,
        new_id: NewId = random_id,
    ) -> None:
        self._app = app
        self._principals = principals
        self._metrics = metrics
        self._limits = limits
        self._hosts = frozenset(_host(each.lower()) for each in hosts)
        self._origins = frozenset(each.lower().rstrip("/") for each in origins)
        self._stopping = stopping
        self._clock = clock
        self._new_id = new_id
        self._rate = Rate(limits.requests_per_second, limits.burst, clock=clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[BEGAN], scope[INCIDENT] = self._clock.monotonic(), self._new_id()[:8]
        answer = _Answer(scope, send, self._metrics, self._cors(scope))
        try:
            request = Request(scope)
            self._check_request(request)
            if self._is_preflight(request):
                await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, answer.send)
                return
            receive = await self._let_in(request, receive)
            await self._app(scope, receive, answer.send)
        except RequestRefused as refused:
            self._metrics.refuse(refused.kind)
            await self._refuse(refused, scope, receive, answer)
        except Exception:
            log.exception("request %s %s failed (%s)", scope["method"], _route(scope), scope[INCIDENT])
            if not answer.began:  # nothing of the app's was reached
                said = f"the server failed at this; its log says more, under {scope[INCIDENT]}"
                await response(RequestRefused(500, "ServerError", said))(scope, receive, answer.send)
        finally:
            self._metrics.request(_route(scope), _method(scope), answer.status)

    # What is looked at.

    def _check_request(self, request: Request) -> None:
        """Where it is for and where it comes from: before anything is done for it."""
        headers = request.scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > self._limits.header_bytes:
            raise RequestRefused(
                431,
                "HeadersTooLarge",
                f"the headers are over {self._limits.header_bytes} bytes. Send fewer, or shorter ones.",
            )
        names = [name for name, _ in headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            raise RequestRefused(
                400, "BadRequest", "the body is both chunked and counted. Send it in one of these ways."
            )
        if names.count(b"host") != 1 or not self._is_ours(request):
            raise RequestRefused(
                403,
                "HostRefused",
                "this server is not called that. Use the address it printed, or start it with --allow-host NAME.",
            )
        if request.method not in _METHODS and request.method != "OPTIONS":
            raise _method_refused()
        if is_static(request.scope["path"]) and request.method in _SAFE:
            return
        origin = request.headers.get("origin")
        if origin is not None and not self._is_allowed(request, origin):
            raise RequestRefused(
                403, "OriginRefused", "not from this origin. Start the server with --allow-origin ORIGIN."
            )
        if origin is None and request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise RequestRefused(
                403,
                "OriginRefused",
                "not from another site's page. Open the server's own, or start it with --allow-origin ORIGIN.",
            )

    async def _let_in(self, request: Request, receive: Receive) -> Receive:
        """Who it is by, whether that is too often, and what it brings."""
        path, method = request.scope["path"], request.method
        if method == "OPTIONS" or (method == "HEAD" and not is_static(path)):
            raise _method_refused()
        if not is_open(path):
            principal = request.scope[PRINCIPAL] = await self._principals.of(request)
            wait = self._rate.take(principal)
            if wait:
                raise RequestRefused(
                    429,
                    "TooManyRequests",
                    "too many requests came at once. Wait as long as `Retry-After` says.",
                    retry_after=wait,
                )
        if method in _SAFE:
            return receive
        if self._stopping():
            raise RequestRefused(
                503, "Stopping", "the server is stopping; nothing is lost. Try again soon.", retry_after=5.0
            )
        if method == "POST":
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise RequestRefused(415, "NotJson", "send JSON, with `Content-Type: application/json`")
        return _replayed(await self._body(request, receive), receive)

    async def _body(self, request: Request, receive: Receive) -> bytes:
        limit = self._limits.body_bytes
        declared = request.headers.get("content-length", "")
        too_large = RequestRefused(413, "BodyTooLarge", f"the body is over {limit} bytes. Send less at once.")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise too_large
        parts = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise RequestRefused(400, "BodyMissing", "the body ended early. Send all of it.")
                    parts += message.get("body", b"")
                    if len(parts) > limit:
                        raise too_large
                    if not message.get("more_body"):
                        return bytes(parts)
        except TimeoutError:
            raise RequestRefused(
                408,
                "BodyTooSlow",
                f"the body was not there after {self._limits.body_seconds:g} seconds. Send it at once.",
            ) from None

    # Hosts and origins.

    def _is_ours(self, request: Request) -> bool:
        """Is it for a name of this server? A page elsewhere can point a name of its own at this address."""
        host = request.headers["host"].lower()
        if host in self._hosts:
            return True
        name, port = _split(host)
        if name is None or name in self._hosts:
            return name is not None
        server: Any = request.scope.get("server")
        own = server[1] if server else None
        if own is not None and (port or (443 if request.scope.get("scheme") == "https" else 80)) != own:
            return False
        return name == "localhost" or _is_address(name, server[0] if server else "")

    def _is_allowed(self, request: Request, origin: str) -> bool:
        own = f"{request.scope.get('scheme', 'http')}://{request.headers['host']}".lower()
        return origin.lower() in (own, *self._origins)

    def _cors(self, scope: Scope) -> Sequence[tuple[bytes, bytes]]:
        """What lets pages of an origin that was named read the answer."""
        if not self._origins:
            return ()
        origin = next((value for name, value in scope["headers"] if name == b"origin"), b"")
        allowed = origin.decode("latin-1").lower() in self._origins
        return ((b"vary", b"origin"), *(((b"access-control-allow-origin", origin),) if allowed else ()))

    def _is_preflight(self, request: Request) -> bool:
        return (
            request.method == "OPTIONS"
            and request.headers.get("origin", "").lower() in self._origins
            and "access-control-request-method" in request.headers
        )

    async def _refuse(self, refused: RequestRefused, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """Say no, and take what is still coming for a moment, so that the client gets to read it."""
        if answer.began:
            return
        made = response(refused)
        if scope["method"] in _SAFE and refused.status not in (400, 431):
            await made(scope, receive, answer.send)
            return
        await answer.send(
            {
                "type": "http.response.start",
                "status": made.status_code,
                "headers": [*made.raw_headers, _CLOSE],
            }
        )
        await answer.send({"type": "http.response.body", "body": bytes(made.body), "more_body": True})
        left = 4 * self._limits.body_bytes
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b"")) or 1
                    if message["type"] != "http.request" or not message.get("more_body"):
                        break
        except TimeoutError:
            pass
        await answer.send({"type": "http.response.body", "body": b"", "more_body": False})


_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, DELETE",
    "access-control-allow-headers": "authorization, content-type, last-event-id",
    "access-control-max-age": "600",
}


class _Answer:
    """Passes an answer on, with the headers that each one carries, and counts it."""

    def __init__(
        self, scope: Scope, send: Send, metrics: Metrics, more: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self._send = send
        self._metrics = metrics
        self._more = more
        self.began = False
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.began = True
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            if not any(name == b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*headers, *HEADERS, *self._more]}
        else:
            self._metrics.bytes += len(message.get("body", b""))
        await self._send(message)


def _method_refused() -> RequestRefused:
    return RequestRefused(
        405, "MethodRefused", "not with this method. The addresses take GET, POST or DELETE, each its own."
    )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A body that was read already, then whatever else comes: that the client has gone."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _route(scope: Scope) -> str:
    """The address as it is declared, never as it was asked for."""
    return getattr(scope.get("route"), "path", "") or "none"


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "other"


def _host(name: str) -> str:
    """A host as it is compared: an IPv6 address in brackets."""
    try:
        return f"[{name}]" if ipaddress.ip_address(name).version == 6 else name
    except ValueError:
        return name


def _split(host: str) -> tuple[str | None, int | None]:
    """`[::1]:80` as `[::1]` and 80; no name where it is not a host."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host, None
    if not port.isdecimal() or len(port) > 5 or (":" in name and not name.startswith("[")):
        return None, None
    return name, int(port)


def _is_address(name: str, server: Any) -> bool:
    """Is it the loopback, or the very address that the connection came in at?"""
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or str(address) == str(server).partition("%")[0]
