"""`GuardMiddleware`: checks every request before it reaches a route, and adds headers to every response.

It is plain ASGI middleware, so streams pass through it unbuffered.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.ids import NewId, random_id
from handrail.serve.access_log import AccessLog
from handrail.serve.limits import Limits, Rate
from handrail.serve.metrics import BYTES_SENT, REQUESTS, Metrics, refuse
from handrail.serve.principals import Principals
from handrail.serve.refusals import INCIDENT, RequestRefused, error_response, server_error

log = logging.getLogger("handrail.serve")

PRINCIPAL, PERSON, STARTED = "handrail.principal", "handrail.person", "handrail.started"
"""The keys in a request's scope for the sender's name, the sender as a `Person`, and the time of arrival."""

RESOURCE_METADATA = "/.well-known/oauth-protected-resource"
"""The beginning of the path at which an MCP server says which issuer it trusts."""
CALLBACK = "/oidc/callback"
"""The path to which a sign-in provider sends a browser back. Other sites may link only to it, the page and its files."""
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
_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, DELETE",
    "access-control-allow-headers": "authorization, content-type, last-event-id, mcp-protocol-version, mcp-session-id, "
    "mcp-method, mcp-name",
    "access-control-max-age": "600",
}
_SAFE = ("GET", "HEAD")
_METHODS = (*_SAFE, "POST", "DELETE")
_CLOSE = (b"connection", b"close")
_DRAIN_SECONDS = 1.0


def _takes_files(path: str) -> bool:
    """Return whether the body of a request to this path may contain attachments."""
    return path == "/agent" or (path.startswith("/threads/") and path.endswith("/messages"))


def is_static(path: str) -> bool:
    """Return whether a path is the page or one of its files, which are public and the same for everyone."""
    return path == "/" or path.startswith("/assets/")


def is_open(path: str) -> bool:
    """Return whether a path is served without authentication."""
    return (
        is_static(path)
        or path in ("/health", "/login", "/oidc/login", CALLBACK)
        or path.startswith(RESOURCE_METADATA)
    )


class GuardMiddleware:
    """Checks load, headers, origin, principal, rate and body, in this order, and then calls the app."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        principals: Principals,
        metrics: Metrics,
        limits: Limits,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        stopping: Callable[[], bool] = lambda: False,
        clock: Clock = SYSTEM_CLOCK,
        new_id: NewId = random_id,
        access: AccessLog | None = None,
    ) -> None:
        self._access = access
        self._app = app
        self._principals = principals
        self._metrics = metrics
        self._limits = limits
        self._hosts = frozenset(_normalize_host(each.lower()) for each in hosts)
        self._origins = frozenset(each.lower().rstrip("/") for each in origins)
        self._stopping = stopping
        self._clock = clock
        self._new_id = new_id
        self._rate = Rate(limits.requests_per_second, limits.burst, clock=clock)
        self._in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._in_progress += 1
            try:
                await self._serve(scope, receive, send)
            finally:
                self._in_progress -= 1
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[STARTED], scope[INCIDENT] = self._clock.monotonic(), self._new_id()[:8]
        answer = _Sender(send, self._metrics, self._cors(scope))
        try:
            request = Request(scope)
            self._check_load(request)
            self._check_headers(request)
            self._check_origin(request)
            if self._is_preflight(request):
                await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, answer.send)
                return
            receive = await self._admit(request, receive)
            await self._app(scope, receive, answer.send)
        except RequestRefused as refused:
            refuse(self._metrics, refused.kind)
            await self._refuse(refused, scope, receive, answer)
        except Exception:
            log.exception("request %s %s failed (%s)", scope["method"], _route(scope), scope[INCIDENT])
            if not answer.started:
                await error_response(server_error(scope[INCIDENT]))(scope, receive, answer.send)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.add(REQUESTS, route=_route(scope), method=method, status=str(answer.status))
            if self._access is not None:
                self._access.write(self._line(scope, method, answer))

    def _line(self, scope: Scope, method: str, answer: _Sender) -> dict[str, Any]:
        """Return the access log entry for a request."""
        return {
            "at": self._clock.now().isoformat(),
            "address": scope["client"][0] if scope.get("client") else "",
            "who": scope.get(PRINCIPAL, ""),
            "method": method,
            "route": _route(scope),
            "status": answer.status,
            "bytes": answer.sent,
            "seconds": round(self._clock.monotonic() - scope[STARTED], 4),
        }

    # The checks.

    def _check_load(self, request: Request) -> None:
        if self._in_progress > self._limits.connections and request.scope["path"] != "/health":
            raise RequestRefused(
                503,
                "TooManyConnections",
                "the server has too many requests in progress. Try again soon.",
                retry_after=5.0,
            )

    def _check_headers(self, request: Request) -> None:
        headers = request.scope["headers"]
        if sum([len(name) + len(value) for name, value in headers]) > self._limits.header_bytes:
            raise RequestRefused(
                431,
                "HeadersTooLarge",
                f"the headers are larger than {self._limits.header_bytes} bytes. Send fewer or shorter headers.",
            )
        names = [name for name, _ in headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            raise RequestRefused(
                400,
                "BadRequest",
                "the request has both `Transfer-Encoding` and `Content-Length`. Send one of them.",
            )
        if names.count(b"host") != 1 or not self._is_our_host(request):
            raise RequestRefused(
                403,
                "HostRefused",
                "the `Host` header is missing, is repeated, or does not name this server. Use the address that the server "
                "printed, or start it with --allow-host NAME.",
            )
        if request.method not in _METHODS and request.method != "OPTIONS":
            raise _method_refused()

    def _check_origin(self, request: Request) -> None:
        path = request.scope["path"]
        if (is_static(path) or path == CALLBACK) and request.method in _SAFE:
            return
        origin = request.headers.get("origin")
        if origin is not None and not self._is_allowed_origin(request, origin):
            raise RequestRefused(
                403,
                "OriginRefused",
                "requests from this origin are not allowed. Start the server with --allow-origin ORIGIN.",
            )
        if origin is None and request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise RequestRefused(
                403,
                "OriginRefused",
                "requests from another site's page are not allowed. Open the server's own page.",
            )

    async def _admit(self, request: Request, receive: Receive) -> Receive:
        """Authenticate the request, apply the rate limit and read the body, as far as its path and method require.

        Returns a `receive` that replays the body, if it was read. Raises `RequestRefused` if one of the checks fails.
        """
        path, method = request.scope["path"], request.method
        if method == "OPTIONS" or (method == "HEAD" and not is_static(path)):
            raise _method_refused()
        if not is_open(path):
            person = request.scope[PERSON] = await self._principals.of(request)
            request.scope[PRINCIPAL] = person.name
            wait = self._rate.take(person.name)
            if wait:
                raise RequestRefused(
                    429,
                    "TooManyRequests",
                    "too many requests at once. Try again after the time in the `Retry-After` header.",
                    retry_after=wait,
                )
        if method in _SAFE:
            return receive
        if self._stopping():
            raise RequestRefused(
                503, "Stopping", "the server is stopping. No run is lost. Try again soon.", retry_after=5.0
            )
        if method == "POST":
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise RequestRefused(
                    415, "NotJson", "the body is not declared as JSON. Send `Content-Type: application/json`."
                )
        return _replay(await self._read_body(request, receive), receive)

    async def _read_body(self, request: Request, receive: Receive) -> bytes:
        limit = self._limits.body_bytes
        if request.method == "POST" and _takes_files(request.scope["path"]):
            limit += self._limits.attachment_bytes * 4 // 3  # in base64
        declared = request.headers.get("content-length", "")
        too_large = RequestRefused(413, "BodyTooLarge", f"the body is larger than {limit} bytes. Send less.")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise RequestRefused(
                            400,
                            "BodyMissing",
                            "the connection closed before the whole body arrived. Send the request again.",
                        )
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise RequestRefused(
                408,
                "BodyTooSlow",
                f"the body did not arrive within {self._limits.body_seconds:g} seconds. Send it faster.",
            ) from None

    async def _refuse(self, refused: RequestRefused, scope: Scope, receive: Receive, answer: _Sender) -> None:
        """Send the refusal, unless a response has begun.

        For a method other than GET and HEAD, and for the statuses 400, 431 and 503, the connection is closed. Before
        that, a limited part of the body, if any, is read for up to a second. Without this, a client that is still
        sending the body might not get the refusal.
        """
        if answer.started:
            return
        made = error_response(refused)
        if scope["method"] in _SAFE and refused.status not in (400, 431, 503):
            await made(scope, receive, answer.send)
            return
        headers = [*made.raw_headers, _CLOSE]
        await answer.send({"type": "http.response.start", "status": made.status_code, "headers": headers})
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

    # Hosts and origins.

    def _is_our_host(self, request: Request) -> bool:
        """Return whether the request's `Host` header names this server.

        This protects against DNS rebinding, where a foreign site points its own host name at this server's address.
        """
        host = request.headers["host"].lower()
        if host in self._hosts:
            return True
        name, port = _split_host(host)
        if name is None or name in self._hosts:
            return name is not None
        server: Any = request.scope.get("server")
        own = server[1] if server else None
        if own is not None and (port or (443 if request.scope.get("scheme") == "https" else 80)) != own:
            return False
        return name == "localhost" or _is_own_address(name, str(server[0]) if server else "")

    def _is_allowed_origin(self, request: Request, origin: str) -> bool:
        own = f"{request.scope.get('scheme', 'http')}://{request.headers['host']}".lower()
        return origin.lower() in (own, *self._origins)

    def _cors(self, scope: Scope) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers that let pages from allowed origins read the response."""
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


class _Sender:
    """Sends a response, adds the headers that every response has, and counts the body's bytes."""

    def __init__(self, send: Send, metrics: Metrics, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._send = send
        self._metrics = metrics
        self._more = more
        self.started = False
        self.status = 0
        self.sent = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            if not any(name == b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*headers, *HEADERS, *self._more]}
        else:
            self.sent += len(message.get("body", b""))
            self._metrics.add(BYTES_SENT, len(message.get("body", b"")))
        await self._send(message)


def _method_refused() -> RequestRefused:
    return RequestRefused(405, "MethodRefused", "this method is not supported. Use GET, POST or DELETE.")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns a body that was already read, and then passes on further messages."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _route(scope: Scope) -> str:
    """Return the path template of the route, or `none` if there is no route. Contains no ids from the request."""
    return getattr(scope.get("route"), "path", "") or "none"


def _normalize_host(name: str) -> str:
    """Return a host name as `Host` headers spell it, with IPv6 addresses in brackets."""
    try:
        return f"[{name}]" if ipaddress.ip_address(name).version == 6 else name
    except ValueError:
        return name


def _split_host(host: str) -> tuple[str | None, int | None]:
    """Split a host such as `[::1]:80` into `[::1]` and 80.

    The port is None if there is none, and both are None if the host is invalid.
    """
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host, None
    if not port.isdecimal() or len(port) > 5 or (":" in name and not name.startswith("[")):
        return None, None
    return name, int(port)


@lru_cache(maxsize=1_000)
def _is_own_address(name: str, server: str) -> bool:
    """Return whether a name is a loopback address or the address that the connection was made to."""
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or str(address) == server.partition("%")[0]
