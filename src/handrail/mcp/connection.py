"""`ServerConnection`: the connection to one MCP server. If it is lost, it is opened again, with backoff.

A separate task owns each connection, so that it outlives the call that opened it. Calls use the connection from their own
tasks on the same event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from mcp.client.subscriptions import SubscriptionLost
from mcp_types import CONNECTION_CLOSED, HEADER_MISMATCH, INVALID_REQUEST, Implementation
from mcp_types import Tool as Described
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from handrail import __version__
from handrail.errors import HandrailError
from handrail.mcp.login import LOGIN_SECONDS, LoginNeeded
from handrail.mcp.tools import MAX_TOOLS
from handrail.mcp.transport import Server
from handrail.text.raised_errors import in_short
from handrail.text.rendering import escape_line
from mcp import Client, MCPError

if TYPE_CHECKING:
    from handrail.mcp.section import Account

log = logging.getLogger("handrail.mcp")

CONNECT_TIMEOUT = 30.0
"""Seconds that a server has to introduce itself and list its tools. The start of its process does not count."""
PROBE_TIMEOUT = 5.0
"""Seconds that a server has to list its tools after a call that it did not answer. If it takes longer, the connection is closed."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between attempts to connect: the first wait, doubled after each failure up to the longest."""
PATIENCE = 5.0
"""Maximum seconds that a call waits for the next attempt. If the attempt is further away, the call fails at once."""
MAX_REOPENED = 5
"""Maximum number of attempts to reopen a lost connection in the background. After that, the next call opens it."""
REFRESH_EVERY = 1.0
"""Minimum seconds between one listing of the tools and the next in the background. A call lists changed tools at once."""
_MAX_WORDS = 600
"""Maximum number of characters in the description of an error."""
_LIST_CHANGED = "notifications/tools/list_changed"
_SESSION_GONE = "Session terminated"
"""The SDK's message if an HTTP server no longer knows the session."""
_CLOSED = ("Connection closed", "SSE stream")
"""How the SDK's messages begin when a connection was closed."""


_UNREADABLE = "Failed to parse "
_UNREAD = (_UNREADABLE, "Unexpected content type", "Server returned an error response", "HTTP status 5")
"""How the SDK's messages begin when an answer can't be read or has an error status, perhaps from a proxy in front of the server.

The server may still have handled the request.
"""


class ServerUnavailable(HandrailError, ConnectionError):
    """Raised if an MCP server can't be reached or used. The server has not handled the request."""


class ServerLost(HandrailError, ConnectionError):
    """Raised if it is unknown whether an MCP server handled a request: it disconnected, failed, or sent an invalid answer."""


class ServerConnection:
    """The connection to one server on one event loop."""

    def __init__(self, owner: Account, server: Server) -> None:
        self._of = owner
        self._name = owner.name
        self._server = server
        self._secrets = server.hidden
        self.loop = asyncio.get_running_loop()
        self._client: Client | None = None
        self._owners: list[asyncio.Task[None]] = []
        """The tasks that own connections, the newest last. Earlier tasks may still be closing their connections."""
        self._end: asyncio.Event | None = None
        self._opening: asyncio.Future[Client] | None = None
        self._failures = 0
        self._next_attempt = 0.0
        self._why = ""
        """Why connecting failed, or why the connection was lost; "" if neither has happened since the last attempt began."""
        self._last_why = ""
        """Why the last connection was lost, for the calls that were in progress on it."""
        self._stale = False
        self._listed_at = 0.0
        self._refreshing: asyncio.Task[None] | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._reopened = 0
        """Number of attempts to open a lost connection again since a request was last answered."""
        self._limits: dict[asyncio.Timeout, float] = {}
        """The time limits that are running for the server, each with its number of seconds."""
        self._calls = 0
        self._is_doubtful = False
        """Whether a request was cancelled before it was answered, so the server may be hanging."""
        self.opened = 0
        """How many times the connection was opened."""

    @property
    def is_open(self) -> bool:
        return self._client is not None

    async def client(self) -> Client:
        """Return the client. Opens the connection if it is not open, and lists the tools again if they have changed.

        Raises `ServerUnavailable` if the connection can't be opened or `_list` refuses the tools, and the request's own
        error if the tools can't be listed.
        """
        client = self._client
        if client is None:
            client = await self._open()
        elif self._is_doubtful and not self._calls:
            await self._probe(client)
            client = self._client or await self._open()
        if self._stale:
            self._stale = False
            await self._list(client)
        return client

    async def _open(self) -> Client:
        if self._opening is None:
            wait = self._next_attempt - self.loop.time()
            if wait > PATIENCE:
                raise ServerUnavailable(
                    f"the MCP server {self._name!r} is not available: {self._why}. "
                    f"The next attempt to connect is in {wait:.0f} s."
                )
            # The owner must not inherit the context of the run that happens to connect first.
            self._opening = self.loop.create_future()
            owner = self._task(self._own(self._opening, max(wait, 0.0)))
            self._owners = [*(each for each in self._owners if not each.done()), owner]
        try:
            return await asyncio.shield(self._opening)
        except ServerUnavailable as error:
            raise ServerUnavailable(*error.args) from None  # each waiter gets its own exception

    def _task(self, work: Any) -> asyncio.Task[Any]:
        """Start a task that does not inherit the context of a run."""
        return self.loop.create_task(work, context=contextvars.Context())

    async def _own(self, opening: asyncio.Future[Client], wait: float) -> None:
        """Open the connection, wake the tasks that wait for it, and hold it open until it is lost or closed.

        If it can't be opened, the waiting tasks get the error.
        """
        end = self._end = asyncio.Event()
        error: BaseException | None = None
        listening: asyncio.Task[None] | None = None
        self._why, self._is_doubtful = "", False

        def lost(why: str) -> None:
            self._lost(why, end)

        try:
            await asyncio.sleep(wait)
            async with (
                self._server.open(lost, self._ask_login, self._of.principal) as streams,
                # the limit does not cover the start of a process, which must not be interrupted
                self._within(CONNECT_TIMEOUT) as limit,
                Client(
                    contextlib.nullcontext(streams),
                    mode=self._server.mode,
                    elicitation_callback=self._of.elicit,
                    message_handler=self._heard,
                    client_info=Implementation(name="handrail", version=__version__),
                    cache=None,
                    extensions=self._of.extensions,
                ) as client,
            ):
                await self._list(client)
                if end.is_set():
                    raise ServerUnavailable(self._why)
                self._lift(limit)
                self._client, self._failures = client, 0
                self.opened += 1
                opening.set_result(client)
                self._opening = None
                if _announces_changes(client):
                    listening = self._task(self._listen(client))
                await end.wait()
        except asyncio.CancelledError as cancelled:
            error = cancelled
            raise
        except BaseException as raised:
            error = raised
        finally:
            if listening is not None:
                listening.cancel()
            if self._end is end:
                self._client = None
            if not opening.done():
                self._fail(opening, error)

    @contextlib.asynccontextmanager
    async def _within(self, seconds: float) -> AsyncGenerator[asyncio.Timeout]:
        """Limit the time that the server has inside this block. Raises `TimeoutError` when that time is over.

        The time that a person takes to log in does not count.
        """
        async with asyncio.timeout(seconds) as limit:
            self._limits[limit] = seconds
            try:
                yield limit
            finally:
                self._limits.pop(limit, None)

    def _lift(self, limit: asyncio.Timeout) -> None:
        del self._limits[limit]
        limit.reschedule(None)

    async def _ask_login(self, address: str, endpoints: Mapping[str, str] | None = None) -> str:
        """Ask a person to log in, for at most `LOGIN_SECONDS`. Afterwards, the limits on the server's time start again.

        Raises `LoginNeeded` if nobody can be asked, or if the person declines or does not answer in time.
        """
        self._set_limits(paused=True)
        try:
            async with asyncio.timeout(LOGIN_SECONDS):
                return await self._of.ask_login(address, endpoints)
        except TimeoutError:
            raise LoginNeeded(f"nobody logged in within {LOGIN_SECONDS:.0f} s") from None
        finally:
            self._set_limits(paused=False)

    def _set_limits(self, *, paused: bool) -> None:
        """Pause the limits on the server's time, or start them again from the beginning."""
        for limit, seconds in self._limits.items():
            if not limit.expired():
                limit.reschedule(None if paused else self.loop.time() + seconds)

    def _fail(self, opening: asyncio.Future[Client], error: BaseException | None) -> None:
        self._opening = None
        self._why = self._why or self._words_of(error)
        self._next_attempt = self.loop.time() + min(FIRST_WAIT * 2**self._failures, LONGEST_WAIT)
        self._failures += 1
        opening.set_exception(
            ServerUnavailable(f"the MCP server {self._name!r} ({self._server}) can't be used: {self._why}.")
        )
        opening.exception()  # marks the exception as retrieved, since nobody may be waiting

    def _lost(self, why: str, end: asyncio.Event | None) -> None:
        """Note that the server is gone. Does nothing if `end` belongs to an earlier connection.

        If the connection was open, `_reopen` is started, so that the model's next request has the current tools.
        """
        if end is not self._end:
            return  # an earlier connection, which was lost before
        was_open = self._client is not None
        self._end_connection(why)
        if was_open and (self._reopening is None or self._reopening.done()):
            self._reopening = self._task(self._reopen())

    def _end_connection(self, why: str) -> None:
        self._why = self._why or escape_line(self._secrets.hide(why), _MAX_WORDS)
        self._last_why = self._why
        self._client = None
        if self._end is not None:
            self._end.set()

    async def _reopen(self) -> None:
        """Open the connection again, at once and then with backoff. After `MAX_REOPENED` attempts, the next call opens it."""
        while self._client is None and self._reopened < MAX_REOPENED:
            backoff = min(FIRST_WAIT * 2 ** (self._reopened - 1), LONGEST_WAIT) if self._reopened else 0.0
            self._reopened += 1
            await asyncio.sleep(max(backoff, self._next_attempt - self.loop.time()))
            try:
                await self.client()
            except ServerUnavailable as error:
                log.debug("%s", error)
            except (MCPError, ValidationError, OSError, TimeoutError) as error:
                log.debug("the MCP server %r does not list its tools: %s", self._name, self._words_of(error))

    # --- the list of tools ---

    async def _heard(self, message: Any) -> None:
        if getattr(message, "method", "") == _LIST_CHANGED:
            self._changed()

    async def _listen(self, client: Client) -> None:
        """Listen for changes to the tools of a server with protocol version 2026-07-28, while the connection is open.

        Ends early if the server refuses.
        """
        wait = FIRST_WAIT
        while self._client is client:
            try:
                async with client.listen(tools_list_changed=True) as subscription:
                    wait = FIRST_WAIT
                    async for _ in subscription:
                        self._changed()
                self._changed()  # the list may change before the next subscription
            except SubscriptionLost:
                self._changed()
            except (MCPError, OSError, TimeoutError, ValidationError, RuntimeError) as error:
                log.debug("the MCP server %r can't be listened to: %s", self._name, error)
                if isinstance(error, MCPError) and not _is_closed(error):
                    return  # the server does not offer subscriptions
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT)

    def _changed(self) -> None:
        """Note that the list of tools has changed, and read it soon, so that the model's next request has the new tools."""
        self._stale = True
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = self._task(self._refresh())

    async def _refresh(self) -> None:
        # A server that keeps announcing changes must not keep this client busy.
        await asyncio.sleep(self._listed_at + REFRESH_EVERY - self.loop.time())
        client = self._client
        if not self._stale or client is None:
            return
        self._stale = False
        try:
            async with self._within(CONNECT_TIMEOUT):
                await self._list(client)
        except (MCPError, ValidationError, OSError, TimeoutError, ServerUnavailable) as error:
            log.warning("the MCP server %r does not list its tools: %s", self._name, self._words_of(error))
            self._stale = True

    async def _list(self, client: Client) -> None:
        """List all pages of the server's tools, and its skills, and pass them to the section.

        Raises `ServerUnavailable` if there are too many tools, or if a page is empty but not the last, and the request's own
        error if a request fails.
        """
        self._listed_at = self.loop.time()
        found: list[Described] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None or len(found) > MAX_TOOLS:
                break
            if not page.tools:
                raise ServerUnavailable("it sent an empty page of tools that is not the last page")
        if len(found) > MAX_TOOLS:
            raise ServerUnavailable(f"it lists more than {MAX_TOOLS} tools")
        self._of.listed(found)
        await self._of.list_skills(client)

    async def _probe(self, client: Client) -> None:
        """List the tools of a server that did not answer an earlier request. If that fails too, the connection is lost."""
        self._is_doubtful = False
        try:
            async with self._within(PROBE_TIMEOUT):
                await self._list(client)
        except (MCPError, ValidationError, OSError, TimeoutError, ServerUnavailable):
            if self._client is client:
                self._lost("it stopped answering", self._end)

    # --- requests ---

    async def request(self, send: Callable[[Client], Awaitable[Any]]) -> Any:
        """Send a request. Opens the connection first if it is not open.

        A request that the server did not take, because the server was restarted or the tool has changed, is sent once more.

        Raises `ServerUnavailable` if the server did not take the request, `ServerLost` if it is unknown whether the server
        handled the request, and `MCPError` if the server refused it.
        """
        try:
            return await self._request(send)
        except MCPError as error:
            # In both cases the server has not taken the request.
            if error.code == INVALID_REQUEST and error.message == _SESSION_GONE:
                self._lost("it was restarted", self._end)
            elif error.code == HEADER_MISMATCH:
                self._stale = True  # the tool's schema, which says what to send in headers, has changed
            else:
                raise
        return await self._request(send)

    async def _request(self, send: Callable[[Client], Awaitable[Any]]) -> Any:
        try:
            client = await self.client()
        except ServerUnavailable:
            raise
        except (MCPError, ValidationError, OSError, TimeoutError) as error:
            self._lost(self._words_of(error), self._end)
            raise ServerUnavailable(
                f"the MCP server {self._name!r} can't be used: {self._words_of(error)}."
            ) from None
        self._calls += 1
        try:
            answer = await send(client)
            self._reopened = 0
            return answer
        except asyncio.CancelledError:
            self._is_doubtful = True
            raise
        except MCPError as error:
            if self._client is client and error.message.startswith(_UNREAD):
                raise ServerLost(self._words_of(error)) from None
            if self._client is client and not _is_closed(error):
                raise MCPError(error.code, self._secrets.hide(error.message), error.error.data) from None
            why = self._words_of(error) if self._client is client else self._last_why
        except (ValidationError, OSError) as error:
            why = self._words_of(error)
        finally:
            self._calls -= 1
        if self._client is client:
            self._lost(why, self._end)
        raise ServerLost(why)

    # --- the end ---

    async def close(self) -> None:
        """Close the connection, and stop the server if this connection started it. May be called on any event loop.

        Does nothing if the connection's own loop is not running.
        """
        if self.loop is asyncio.get_running_loop():
            await self._close()
        elif self.loop.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), self.loop))
        # A loop that is not running can't close the connection now. `asyncio.run` cancels the connection's task when it closes the loop.

    async def _close(self) -> None:
        self._end_connection("it was closed")
        background = [task for task in (self._refreshing, self._reopening) if task is not None]
        for task in background:
            task.cancel()
        if self._opening is not None:
            self._owners[-1].cancel()
        await asyncio.gather(*background, *self._owners, return_exceptions=True)

    def _words_of(self, error: BaseException | None) -> str:
        return escape_line(self._secrets.hide(_words_of(error)), _MAX_WORDS)


def _is_closed(error: MCPError) -> bool:
    """Return whether an error means that the connection was closed.

    Many servers use the same code for their own errors, so the message is compared too.
    """
    return error.code == CONNECTION_CLOSED and error.message.startswith(_CLOSED)


def _announces_changes(client: Client) -> bool:
    """Return whether a server has protocol version 2026-07-28 and says that it announces changes to its tools."""
    tools = client.server_capabilities.tools
    return (
        client.protocol_version in MODERN_PROTOCOL_VERSIONS and tools is not None and bool(tools.list_changed)
    )


def _words_of(error: BaseException | None) -> str:
    """Describe an error in a few words. None means that the attempt to connect was cancelled."""
    found: Any = error
    while isinstance(found, BaseExceptionGroup):
        found = cast("Any", found).exceptions[0]
    match found:
        case None | asyncio.CancelledError():
            return "the attempt to connect was cancelled"
        case TimeoutError():
            return f"it did not answer within {CONNECT_TIMEOUT:.0f} s"
        case FileNotFoundError():
            return f"the command {found.filename!r} was not found"
        case MCPError() if _is_closed(found):
            return f"the connection was closed: {found.message}".rstrip(".")
        case MCPError() if found.message.startswith(_UNREADABLE) and "validation error" in found.message:
            return "it sent an answer that is not valid MCP"
        case MCPError():
            return f"it answered: {found.message}".rstrip(".")
        case ValidationError():
            return "it sent an answer that is not valid MCP"
        case ServerUnavailable() | LoginNeeded():
            return str(found).rstrip(".")
        case _:
            return in_short(cast("BaseException", found)).rstrip(".")
