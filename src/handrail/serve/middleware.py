"""`GuardMiddleware`: checks every request before it reaches a route, and adds headers to every response.

It is plain ASGI middleware, so streams pass through it unbuffered. `AccessLog` is a file with one line of JSON for each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, JournalError
from handrail.ids import TRACEPARENT, NewId, inbound, random_id
from handrail.serve.limits import Limits, Quota, Rate, network_of
from handrail.serve.metrics import BYTES_SENT, REQUESTS, Metrics
from handrail.serve.principals import Principals, address_of
from handrail.serve.refusals import INCIDENT, RequestRefused, error_response, journal_refusal, server_error
from handrail.serve.requests import (
    PERSON,
    PRINCIPAL,
    STARTED,
    Bodies,
    parse_prefix,
    placed,
    prefix_of,
    replay,
    route_path,
)

log = logging.getLogger("handrail.serve")

RESOURCE_METADATA = "/.well-known/oauth-protected-resource"
"""The beginning of the path at which an MCP server says which issuer it trusts."""
CALLBACK = "/oidc/callback"
"""The path to which a sign-in provider sends a browser back. Other sites may link only to it, the page and its files."""
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "media-src data:; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
_HOST = r"(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?"
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_HOST}")
_DEFAULT_PORT = re.compile(r"(?<=^http:)(.*):80$|(?<=^https:)(.*):443$")
_SAFE = ("GET", "HEAD")
_METHODS = (*_SAFE, "POST", "DELETE")
_CLOSE = (b"connection", b"close")
_EVENTS = b"text/event-stream"
_DRAIN_SECONDS = 1.0


def is_static(path: str) -> bool:
    """Return whether a path is the page or one of its files, which are public and the same for everyone."""
    return path in ("", "/") or path.startswith("/assets/")


def is_open(path: str) -> bool:
    """Return whether a path is served without authentication."""
    return (
        is_static(path)
        or path in ("/health", "/readyz", "/login", "/oidc/login", CALLBACK)
        or path.startswith(RESOURCE_METADATA)
    )


class GuardMiddleware:
    """Checks load, headers, origin, principal, rate and body, in this order, and then calls the app, whose routes are `routes`.

    Raises `DefinitionError` for a host or an origin that no browser could send, and for a prefix that is not a path.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        principals: Principals,
        routes: Sequence[BaseRoute],
        metrics: Metrics,
        limits: Limits,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        prefix: str = "",
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
        self._hosts = frozenset(map(_parse_host, hosts))
        self._origins = frozenset(map(_parse_origin, origins))
        self._prefix = parse_prefix(prefix)
        self._stopping = stopping
        self._clock = clock
        self._new_id = new_id
        self.routes = routes
        self._bodies = Bodies(routes, seconds=limits.body_seconds)
        self._rate = Rate(limits.requests_per_second, limits.burst, clock=clock)
        self._open_rate = Rate(limits.requests_per_second, limits.burst, clock=clock)
        """How often each address may use the paths that need no credentials."""
        self._requests, self._open_requests = (
            Quota(
                limits.requests,
                "TooManyRequests",
                f"you have {limits.requests} requests in progress, which is the limit. Wait for their responses.",
            )
            for _ in range(2)
        )
        self._in_progress = 0
        """The requests of everybody. What each sender may have is far less, so no sender alone reaches the limit."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            with contextlib.ExitStack() as counted:
                self._in_progress += 1
                counted.callback(self._leave)
                await self._serve(placed(scope, self._prefix), receive, send, counted)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    def _leave(self) -> None:
        self._in_progress -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send, counted: contextlib.ExitStack) -> None:
        """Serve a request, which is in progress until `counted` is closed."""
        if self._is_behind_tls(scope):
            scope["scheme"] = (
                "https"  # so that the page's own origin is its own here too, and its cookies are `__Host-`
            )
        scope[STARTED], scope[INCIDENT] = self._clock.monotonic(), self._new_id()[:8]
        body = contextlib.ExitStack()
        """What is held until the answer begins, or the request ends."""
        place = contextlib.ExitStack()
        """The request's place among its sender's requests. A stream gives it up, because streams have a limit of their own."""
        counted.callback(place.close)
        answer = _Sender(send, self._metrics, self._cors(scope), body.close, place.close)
        try:
            request = Request(scope)
            self._check_load(request)
            self._check_headers(request)
            self._check_origin(request)
            if self._is_preflight(request):
                await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, answer.send)
                return
            receive = await self._admit(request, receive, body, place)
            if PERSON in scope:
                answer.reader = partial(self._principals.watch, scope[PERSON])
            app = self._app if route_path(request) else _add_slash(request)
            await app(scope, receive, answer.send)
        except (RequestRefused, JournalError) as error:
            refused = journal_refusal(error, scope[INCIDENT]) if isinstance(error, JournalError) else error
            self._metrics.refuse(refused.kind)
            counted.close()  # whoever is refused takes nobody's place while the rest of the body is read
            await self._refuse(refused, scope, receive, answer)
        except Exception:
            log.exception("request %s %s failed (%s)", scope["method"], _route(scope), scope[INCIDENT])
            if not answer.started:
                await error_response(server_error(scope[INCIDENT]))(scope, receive, answer.send)
        finally:
            body.close()
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
        if self._in_progress > self._limits.connections and route_path(request) != "/health":
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
        path = route_path(request)
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

    async def _admit(
        self, request: Request, receive: Receive, body: contextlib.ExitStack, place: contextlib.ExitStack
    ) -> Receive:
        """Authenticate the request, apply its sender's limits and read the body, as far as its path and method require.

        The bytes of the body count as held until `body` is closed, and the request as its sender's until `place` is closed.

        Returns a `receive` that replays the body, if it was read. Raises `RequestRefused` if one of the checks fails.
        """
        path, method = route_path(request), request.method
        if method == "OPTIONS" or (method == "HEAD" and not is_static(path)):
            raise _method_refused()
        if is_open(path):
            sender, rate, quota = network_of(address_of(request)), self._open_rate, self._open_requests
        else:
            person = request.scope[PERSON] = await self._principals.of(request)
            sender, rate, quota = person.name, self._rate, self._requests
            request.scope[PRINCIPAL] = sender
            if TRACEPARENT.fullmatch(started := request.headers.get("traceparent", "")):
                inbound.set(started)
        is_free = method in _SAFE and (
            is_static(path) or path in ("/health", "/readyz")
        )  # as cheap to answer as to refuse
        wait = 0.0 if is_free else rate.take(sender)
        if wait:
            raise RequestRefused(
                429,
                "TooManyRequests",
                "too many requests at once. Try again after the time in the `Retry-After` header.",
                retry_after=wait,
            )
        if path != "/health" or method not in _SAFE:
            quota.take(sender)
            place.callback(quota.give_back, sender)
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
        return replay(await self._bodies.read(request, receive, sender, body), receive)

    async def _refuse(self, refused: RequestRefused, scope: Scope, receive: Receive, answer: _Sender) -> None:
        """Send the refusal, unless a response has begun.

        For a method other than GET and HEAD, and for the statuses 400, 431 and 503, the connection is closed. Before
        that, a limited part of the body, if any, is read for up to a second. Without this, a client that is still
        sending the body might not get the refusal.
        """
        if answer.started:
            return
        made = error_response(refused)
        answer.reader = None  # anybody may read a refusal
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

    def _is_behind_tls(self, scope: Scope) -> bool:
        """Return whether browsers reach the request's host over TLS, which a proxy terminates: its https origin is allowed."""
        if not self._origins:
            return False
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        return f"https://{host.decode('latin-1').lower()}" in self._origins

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
    """Sends a response, adds the headers that every response has, and counts the body's bytes.

    Before each chunk of a stream, it checks whether the reader may still read. If not, it ends the response without that
    chunk, and drops whatever the app still sends. The app is told that the client has disconnected.
    """

    def __init__(
        self,
        send: Send,
        metrics: Metrics,
        more: Sequence[tuple[bytes, bytes]],
        begins: Callable[[], object],
        streams: Callable[[], object],
    ) -> None:
        self._send = send
        self._begins = begins
        self._streams = streams
        """Called when the response turns out to be a stream of events."""
        self._metrics = metrics
        self._more = more
        self.started = False
        self.status = 0
        self.sent = 0
        self.reader: Callable[[], Callable[[], bool]] | None = None
        """Begins to watch the reader of the response; None if it is public. Returns what `Principals.watch` returns."""
        self._may_read: Callable[[], bool] | None = None
        self._is_over = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._begins()
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            if any(name == b"content-type" and value.startswith(_EVENTS) for name, value in headers):
                self._streams()
            if not any(name == b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*headers, *HEADERS, *self._more]}
        elif self._is_over:
            return
        else:
            # A refusal is not withheld: it tells the reader why nothing more comes.
            if message.get("more_body") and self.reader is not None and self.status < 400:
                if self._may_read is None:
                    self._may_read = self.reader()
                if not self._may_read():
                    self._is_over = True
                    message = {"type": "http.response.body", "body": b"", "more_body": False}
            self.sent += len(message.get("body", b""))
            self._metrics.add(BYTES_SENT, len(message.get("body", b"")))
        await self._send(message)


def _add_slash(request: Request) -> Response:
    """Return a redirect from the app's prefix to the page, whose addresses are relative."""
    return Response(status_code=307, headers={"location": f"{prefix_of(request).rpartition('/')[2]}/"})


def _method_refused() -> RequestRefused:
    return RequestRefused(405, "MethodRefused", "this method is not supported. Use GET, POST or DELETE.")


def _route(scope: Scope) -> str:
    """Return the path template of the route, or `none` if there is no route. Contains no ids from the request."""
    return getattr(scope.get("route"), "path", "") or "none"


def _parse_host(text: str) -> str:
    """Return a host to answer to, as `Host` headers spell it. Raises `DefinitionError` if it is not a host."""
    host = _normalize_host(text.lower())
    if not re.fullmatch(_HOST, host):
        raise DefinitionError(
            f"{text!r} is not a host that the server can answer to. Name each one, such as chat.example or chat.example:8600."
        )
    return host


def _parse_origin(text: str) -> str:
    """Return an allowed origin, as `Origin` headers spell it. Raises `DefinitionError` if it is not one origin."""
    origin = text.lower().removesuffix("/")
    if not _ORIGIN.fullmatch(origin):
        raise DefinitionError(
            f"{text!r} is not an origin that can be allowed. Name each one by scheme and host, such as https://chat.example."
        )
    return _DEFAULT_PORT.sub(r"\1\2", origin)


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


class AccessLog:
    """Appends one line for each request to a file. If the file is new, only its owner can read it.

    A line contains the template of the route, but no ids from the path, no query and no body. Each line is written with
    one system call, so several processes can share the file. Raises `DefinitionError` if the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DefinitionError(
                f"can't write the access log {str(path)!r}: {error.strerror}. Give another file."
            ) from None

    def write(self, line: dict[str, Any]) -> None:
        os.write(self._file, (json.dumps(line, ensure_ascii=True) + "\n").encode())
