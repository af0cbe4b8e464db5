"""`Connection`: the connection to one MCP server, which is opened again with backoff when it is lost.

A separate task owns each connection, so that it outlives the call that opened it. Calls use the connection from their own
tasks on the same event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from mcp_types import CONNECTION_CLOSED, Implementation
from mcp_types import Tool as Described
from pydantic import ValidationError

from handrail.errors import HandrailError
from handrail.mcp.tools import MAX_TOOLS
from handrail.mcp.transport import Address
from handrail.raised_errors import in_short
from mcp import Client, MCPError

log = logging.getLogger("handrail.mcp")

CONNECT_TIMEOUT = 30.0
"""How many seconds a server has to start, to introduce itself and to list its tools."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between attempts to connect: the first wait, doubled after each failure up to the longest."""
PATIENCE = 5.0
"""How many seconds a call waits for the next attempt. If the wait is longer, the call fails at once."""
_LIST_CHANGED = "notifications/tools/list_changed"


class ServerUnavailable(HandrailError, ConnectionError):
    """An MCP server can't be reached or used. The request was not sent."""


class ServerLost(HandrailError, ConnectionError):
    """An MCP server disconnected, or sent an invalid answer, during a request."""


class Connection:
    """The connection to one server on one event loop.

    `listed` is called with the server's tools each time they have been listed.
    """

    def __init__(
        self,
        name: str,
        address: Address,
        mode: Any,
        elicit: Any,
        listed: Callable[[list[Described]], None],
    ) -> None:
        self._name = name
        self._address = address
        self._mode = mode
        self._elicit = elicit
        self._listed = listed
        self.loop = asyncio.get_running_loop()
        self._client: Client | None = None
        self._owner: asyncio.Task[None] | None = None
        self._end: asyncio.Event | None = None
        self._opening: asyncio.Future[Client] | None = None
        self._failures = 0
        self._next_attempt = 0.0
        self._why = ""
        self._stale = False
        self.opened = 0
        """How many times the connection was opened."""

    @property
    def is_open(self) -> bool:
        return self._client is not None

    async def client(self) -> Client:
        """Return the client. Opens the connection if it is not open, and lists the tools again if they have changed.

        Raises `ServerUnavailable` if the connection can't be opened.
        """
        client = self._client
        if client is None:
            client = await self._open()
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
            work = self._own(self._opening, max(wait, 0.0))
            self._owner = self.loop.create_task(work, context=contextvars.Context())
        try:
            return await asyncio.shield(self._opening)
        except ServerUnavailable as error:
            raise ServerUnavailable(*error.args) from None  # each waiter gets its own exception

    async def _own(self, opening: asyncio.Future[Client], wait: float) -> None:
        """Open the connection, notify those who wait for it, and hold it open until it is lost or closed."""
        end = self._end = asyncio.Event()
        error: BaseException | None = None
        try:
            await asyncio.sleep(wait)
            async with Client(
                self._address.open(self._lost),
                mode=self._mode,
                elicitation_callback=self._elicit,
                message_handler=self._heard,
                client_info=Implementation(name="handrail", version="0.2"),
                cache=None,
            ) as client:
                await asyncio.wait_for(self._list(client), CONNECT_TIMEOUT)
                self._client, self._failures = client, 0
                self.opened += 1
                opening.set_result(client)
                self._opening = None
                await end.wait()
        except asyncio.CancelledError as cancelled:
            error = cancelled
            raise
        except BaseException as raised:
            error = raised
        finally:
            self._client = None
            if not opening.done():
                self._fail(opening, error)

    def _fail(self, opening: asyncio.Future[Client], error: BaseException | None) -> None:
        self._opening = None
        self._why = _words_of(error)
        self._next_attempt = self.loop.time() + min(FIRST_WAIT * 2**self._failures, LONGEST_WAIT)
        self._failures += 1
        opening.set_exception(
            ServerUnavailable(f"the MCP server {self._name!r} ({self._address}) can't be used: {self._why}.")
        )
        opening.exception()  # it is not an error if nobody waits any more

    def _lost(self, why: str) -> None:
        """Note that the server is gone. The next call opens a new connection."""
        self._why = why
        self._client = None
        if self._end is not None:
            self._end.set()

    async def _heard(self, message: Any) -> None:
        if getattr(message, "method", "") == _LIST_CHANGED:
            self._stale = True

    async def _list(self, client: Client) -> None:
        """List the server's tools, all pages."""
        found: list[Described] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
            if len(found) > MAX_TOOLS or not page.tools:
                raise ServerUnavailable(f"it lists more than {MAX_TOOLS} tools, or lists them without end")
        self._listed(found)

    async def request(self, send: Callable[[Client], Awaitable[Any]]) -> Any:
        """Send a request on the open connection.

        Raises `ServerUnavailable` if nothing was sent, `ServerLost` if it is not known what became of the request, and
        `MCPError` if the server refused it.
        """
        try:
            client = await self.client()
        except ServerUnavailable:
            raise
        except (MCPError, ValidationError, OSError, TimeoutError) as error:
            self._lost(_words_of(error))
            raise ServerUnavailable(
                f"the MCP server {self._name!r} can't be used: {_words_of(error)}."
            ) from None
        try:
            return await send(client)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            why = self._why or "the connection was closed"
        except (ValidationError, OSError) as error:
            why = _words_of(error)
        if self._client is client:
            self._lost(why)
        raise ServerLost(why)

    async def close(self) -> None:
        """Close the connection, and stop the server if this connection started it."""
        owner = self._owner
        self._lost("it was closed")
        if owner is not None and not owner.done():
            if self._opening is not None:
                owner.cancel()
            await asyncio.gather(owner, return_exceptions=True)


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
        case MCPError():
            return f"it answered: {found.message}".rstrip(".")
        case ValidationError():
            return "it sent an answer that is not valid MCP"
        case ServerUnavailable():
            return str(found).rstrip(".")
        case _:
            return in_short(cast("BaseException", found)).rstrip(".")
