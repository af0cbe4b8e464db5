"""The standard streams of a command as a transport to an MCP server.

What a server may send is limited. A server is killed if it sends a message that is too large, too many messages that are
not answers, or too many lines that are not JSON-RPC. The last lines that it writes to standard error are kept for the
error that says why it ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import anyio
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCResponse, ListToolsResult, jsonrpc_message_adapter
from mcp_types.methods import SERVER_RESULTS, validate_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from handrail.errors import DefinitionError
from handrail.mcp.login import AskLogin
from handrail.text.rendering import escape_line
from handrail.text.secrets import Secrets
from handrail.tools.result import clean_text

log = logging.getLogger("handrail.mcp")

_MAX_WARNINGS = 100
"""Maximum number of invalid tools that the log names for one connection."""
_MAX_WORDS = 200


class Listings:
    """The lists of tools that come through one connection, without the tools that are not valid.

    The SDK refuses a whole list if one tool in it is not valid, so such tools are removed before the SDK reads the list.
    `server` names the server in the log.
    """

    def __init__(self, server: str, secrets: Secrets) -> None:
        self._server = server
        self._secrets = secrets
        self._version: str = MODERN_PROTOCOL_VERSIONS[-1]
        self._warned: set[str] = set()

    def screen(self, message: object) -> None:
        """Remove the tools that are not valid from a response that lists tools.

        The log names each of them once, with what is wrong, but at most `_MAX_WARNINGS` of them.

        A list that is not valid for other reasons is left as it is, and so are all other messages.
        """
        if not isinstance(message, JSONRPCResponse):
            return
        result = message.result
        version = result.get("protocolVersion")
        if isinstance(version, str):
            self._version = version
        tools: Any = result.get("tools")
        if (
            not isinstance(tools, list)
            or "content" in result  # the message is the result of a call
            or not self._problem_of(result)
            or self._problem_of({**result, "tools": []})
        ):
            return
        kept: list[Any] = []
        for tool in cast("list[Any]", tools):
            problem = self._problem_of({**result, "tools": [tool]})
            if problem:
                self._warn(tool, problem)
            else:
                kept.append(tool)
        result["tools"] = kept

    def _problem_of(self, result: Mapping[str, Any]) -> str:
        """Return the first problem in a list of tools; "" if the list is valid."""
        try:
            if ("tools/list", self._version) in SERVER_RESULTS:
                validate_server_result("tools/list", self._version, result)
            ListToolsResult.model_validate(result, by_name=False)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(step) for step in first["loc"] if step != "tools")
            return f"{where.removeprefix('0').lstrip('.') or 'it'}: {first['msg']}"
        return ""

    def _warn(self, tool: object, problem: str) -> None:
        named: Any = cast("dict[str, Any]", tool).get("name") if isinstance(tool, dict) else None
        words = f"{named!r} ({problem})" if isinstance(named, str) else f"without a name ({problem})"
        said = escape_line(self._secrets.hide(words), _MAX_WORDS)
        if said not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(said)
            log.warning(
                "the MCP server %s describes a tool wrongly: %s. The tool is left out.", self._server, said
            )


Mode = Literal["auto", "legacy", "2026-07-28"]
"""The version of the protocol to use: `auto` asks the server, and `legacy` is a version before 2026-07-28."""
Lost = Callable[[str], None]
"""A function that is called with the reason when a server goes away."""

MAX_MESSAGE = 16 * 1024 * 1024
"""Maximum number of bytes in one message from a server."""
MAX_UNASKED = 5_000
"""Maximum number of messages that a server may send in a minute without an answer to a request among them."""
MAX_RUBBISH = 100
"""Maximum number of lines in a row that are not JSON-RPC messages."""
_ENDED = "it ended"
_GRACE = 2.0
"""How many seconds a server has to exit after its input ends, and again after it is told to terminate."""
_LAST_MOMENTS = 0.5
"""Maximum seconds to wait for the exit status of a server whose output has ended, and then for the rest of its standard error."""
_MAX_LOGGED = 1_000
"""Maximum number of lines of standard error that are logged for one start of a server."""
_WINDOW = 60.0


class Server(Protocol):
    """Where a server is, and how to connect to it. `StdioServer` and `UrlServer` implement it."""

    @property
    def mode(self) -> Mode: ...

    @property
    def hidden(self) -> Secrets:
        """The secrets in the server's settings."""
        ...

    def open(self, lost: Lost, ask: AskLogin, principal: str, /) -> AbstractAsyncContextManager[Any]:
        """Return the transport to the server: a context manager that gives a stream to read from and one to write to.

        `lost` is called if the server goes away. If the server needs a login, it is the principal's own, and `ask` asks them.
        """
        ...


@dataclasses.dataclass(frozen=True)
class StdioServer:
    """A server that is started by a command, and communicates over its standard input and output.

    It gets a few variables of this process's environment, such as `PATH` and `HOME`, and those in `env`. `secrets` are
    further values to hide, besides the variables in `env` whose names suggest a secret. Raises `DefinitionError` unless
    `command` is a sequence of strings without null bytes, the first of which names a program.
    """

    command: Sequence[str]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    cwd: str | Path | None = None
    mode: Mode = "auto"
    secrets: Sequence[str] = ()

    def __post_init__(self) -> None:
        words = check_command(self.command)
        if words is None:
            raise DefinitionError(
                "the command of an MCP server must be a list of strings without null bytes, the first of which names a program. "
                "Write ['npx', 'server']."
            )
        object.__setattr__(self, "command", words)

    @property
    def hidden(self) -> Secrets:
        return Secrets.of(self.env, {}, self.secrets)

    def __str__(self) -> str:
        return self.hidden.hide(" ".join(self.command[:3]))

    def open(self, lost: Lost, ask: AskLogin, principal: str) -> AbstractAsyncContextManager[Any]:
        """Return the transport to the server."""
        return _stdio(self, lost)


class Flood:
    """Counts a server's messages that are not answers to requests."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._unasked = 0
        self._since = 0.0

    def add(self, message: object) -> str:
        """Count a message, or reset the count if it is a response.

        Returns why the server is to be disconnected, or "" if it may continue.
        """
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            self._unasked = 0
            return ""
        if self._unasked == 0 or self._now() - self._since > _WINDOW:
            self._unasked, self._since = 0, self._now()
        self._unasked += 1
        return f"it sent {self._unasked:,} messages without an answer" if self._unasked > MAX_UNASKED else ""


class LastWords:
    """The end of what a server wrote to standard error."""

    def __init__(self, name: str, secrets: Secrets) -> None:
        self._name = name
        self._secrets = secrets
        self._lines: deque[str] = deque(maxlen=3)
        self._logged = 0

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Log the lines, up to a limit, and keep the last ones. Ends with the stream."""
        rest = b""
        while chunk := await stream.read(65536):
            *whole, rest = (rest + chunk).split(b"\n")
            rest = rest[-1000:]
            for line in whole:
                self._add(line)
        self._add(rest)

    def _add(self, line: bytes) -> None:
        text = self._secrets.hide(line[:2000].decode(errors="replace")).strip()
        if not text:
            return
        self._lines.append(escape_line(text, 200))
        if self._logged < _MAX_LOGGED:
            self._logged += 1
            log.info("%s: %s", self._name, self._lines[-1])

    def __str__(self) -> str:
        return " / ".join(self._lines)


@asynccontextmanager
async def _stdio(server: StdioServer, lost: Lost) -> AsyncGenerator[Any, None]:
    """Start a server and exchange JSON-RPC lines with it. Its whole process group ends with the context."""
    process = await asyncio.create_subprocess_exec(
        *server.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**get_default_environment(), **server.env},
        cwd=server.cwd,
        limit=MAX_MESSAGE,
        start_new_session=True,
    )
    incoming, read = anyio.create_memory_object_stream[Any](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    assert process.stderr is not None
    words = LastWords(server.command[0], server.hidden)
    errors = asyncio.create_task(words.read(process.stderr))
    listings = Listings(str(server), server.hidden)
    reader = asyncio.create_task(_read(process, incoming, lost, errors, words, listings))
    writer = asyncio.create_task(_write(process, outgoing, incoming, lost, reader))
    try:
        yield read, write
    finally:
        reader.cancel()
        writer.cancel()
        for stream in (incoming, read, write, outgoing):
            stream.close()
        await asyncio.shield(asyncio.ensure_future(_stop(process, errors, reader, writer)))


async def _read(
    process: asyncio.subprocess.Process,
    incoming: Any,
    lost: Lost,
    errors: asyncio.Task[None],
    words: LastWords,
    listings: Listings,
) -> None:
    stdout = process.stdout
    assert stdout is not None
    flood, rubbish = Flood(), 0
    why = _ENDED
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while True:
            try:
                line = await stdout.readline()
            except ValueError:
                why = f"it sent a message of more than {MAX_MESSAGE // 1024 // 1024} MB"
                break
            if not line.endswith(b"\n"):
                break
            try:
                message = message_in(line)
            except ValueError:
                rubbish += 1
                if rubbish > MAX_RUBBISH:
                    why = f"it sent {rubbish} lines in a row that are not MCP messages"
                    break
                continue
            rubbish = 0
            if flooded := flood.add(message):
                why = flooded
                break
            listings.screen(message)
            await incoming.send(SessionMessage(message))
    if why != _ENDED:
        _kill(process, signal.SIGKILL)
    else:
        why = await _ending(process, errors, words)
    lost(why)
    incoming.close()


def message_in(line: bytes) -> Any:
    """Return the message in a line. Raises `ValueError` if the line has no message.

    Lone surrogates are replaced: a server in JavaScript sends half a character if it cuts a text inside one. A response that is
    not valid is returned with a result that no request accepts, so that its request fails at once.
    """
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        pass  # pydantic refuses lone surrogates and deep nesting too
    try:
        found: Any = json.loads(clean_text(json.dumps(json.loads(line), ensure_ascii=False)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    try:
        return jsonrpc_message_adapter.validate_python(found, by_name=False)
    except ValidationError:
        named = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        id = None if "method" in named else named.get("id")
        if not isinstance(id, int | str):
            raise
        return JSONRPCResponse(jsonrpc="2.0", id=id, result={"content": 0, "tools": 0})


async def _ending(process: asyncio.subprocess.Process, errors: asyncio.Task[None], words: LastWords) -> str:
    """Return why a server's output has ended: how its process ended, if it has, and its last lines on standard error, if any."""
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _LAST_MOMENTS)
    await asyncio.wait([errors], timeout=_LAST_MOMENTS)
    code = process.returncode
    how = "it closed its output" if code is None else f"it ended with status {code}" if code >= 0 else ""
    how = how or f"it was killed by signal {-cast('int', code)}"
    return f"{how} ({words})" if str(words) else how


async def _write(
    process: asyncio.subprocess.Process, outgoing: Any, incoming: Any, lost: Lost, reader: asyncio.Task[None]
) -> None:
    stdin = process.stdin
    assert stdin is not None
    try:
        async for sent in outgoing:
            text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
            stdin.write(text.encode() + b"\n")
            await stdin.drain()
    except (OSError, anyio.ClosedResourceError):
        await asyncio.wait([reader], timeout=2 * _LAST_MOMENTS)  # if the server ended, the reader says how
        if not reader.done():
            lost("it no longer reads its input")
            incoming.close()  # the session sees the end of the connection


async def _stop(
    process: asyncio.subprocess.Process, errors: asyncio.Task[None], *tasks: asyncio.Task[None]
) -> None:
    """End a server: close its input, terminate its process group if the server does not exit, then kill what is left of it."""
    await asyncio.gather(*tasks, return_exceptions=True)
    if process.stdin is not None:
        process.stdin.close()
    draining = asyncio.ensure_future(_drain(process.stdout))
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            _kill(process, number)
        try:
            await asyncio.wait_for(process.wait(), _GRACE)
            break
        except TimeoutError:
            continue
    _kill(process, signal.SIGKILL)  # ends processes that the server started and left running
    draining.cancel()
    errors.cancel()
    await asyncio.gather(draining, errors, return_exceptions=True)
    transport: Any = getattr(process, "_transport")  # noqa: B009  # asyncio has no public way to close the pipes
    transport.close()


def _kill(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _drain(stdout: asyncio.StreamReader | None) -> None:
    """Discard the remaining output, because a server that is stuck writing can't exit."""
    while stdout is not None and await stdout.read(65536):
        pass


def check_command(command: object) -> tuple[str, ...] | None:
    """Return a command as a tuple; None unless it is a sequence of strings without null bytes, the first of which is not empty."""
    if isinstance(command, str) or not isinstance(command, Sequence) or not command:
        return None
    words = tuple(cast("Sequence[Any]", command))
    return words if all(isinstance(word, str) and "\0" not in word for word in words) and words[0] else None
