"""`ToolServer`: the tools of an app as an MCP server.

Each call of a tool is a separate run: it has its own gate, and with it policies, approvals, limits and events. A
question that a call asks goes to the client: as elicitation to clients with older protocol versions, and as an
input-required result to clients with version 2026-07-28, which call again with the answer. A question that asks for a
secret goes to the client as the address of a page.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Unpack, cast

import mcp_types as wire
import msgspec
from mcp.server.lowlevel.server import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.stdio import stdio_server
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from handrail import __version__
from handrail.concurrency.operation import cancel_and_await
from handrail.concurrency.threads import run_in_thread
from handrail.errors import RunBusy, ToolValidationError
from handrail.journal.protocol import Journal
from handrail.mcp.calls import NO_PAGE, PARK_AFTER, CallRefused, Calls, CallUnknown, LiveCall
from handrail.mcp.contents import content_of, describe
from handrail.mcp.forms import address_of, can_ask, elicitation_of, form_of, key_of, principal_of
from handrail.mcp.offers import FileResources, SectionPrompts
from handrail.mcp.served_tools import ServedTools
from handrail.mcp.skills import ServedSkills
from handrail.mcp.tasks import Tasks
from handrail.prompt import Prompt, Section
from handrail.question import Question
from handrail.run.adapter import Adapter
from handrail.run.options import SharedArguments
from handrail.tools import Tool, ToolResult
from mcp import MCPError

STATE_SECONDS = 30 * 24 * 3600.0
"""Seconds for which a client may call again with the answer to a question."""
OPEN_SECONDS = 30.0
"""Seconds to wait for the answer from a page that was opened, before a 2026-07-28 client is sent to the page again."""
_STATE = b"handrail mcp request state"
_NONE: Mapping[str, Any] = {}

Answered = wire.CallToolResult | wire.InputRequiredResult | dict[str, Any]


class _State(msgspec.Struct, frozen=True):
    """The state that a client sends back with its answers: the call's id, and the digests of the questions that the client was shown, by id."""

    call: str
    asked: dict[str, str]


class ToolServer:
    """An MCP server with the tools of a prompt: `await ToolServer(prompt).serve_stdio()`.

    - `adapter`: the app's own, whose model and settings the calls can use.
    - `more`: tools that are served in addition to the prompt's.
    - `journal`: records each call as a run. A question can then be answered days later, and after a restart.
    - `files`: a function that returns the filesystem for the calls of a principal, or None if they have no files.
    - `resource_address`: serves those files as MCP resources, whose addresses begin with this, such as "files:///".
    - `sections`: the sections that are served as MCP prompts, and whose skills are served; by default, those of the prompt.
    - `park_after`: seconds for which a recorded call that waits for an answer stays in memory.

    The tools of sections that are not shown in full are not served. Further arguments apply to each run.
    """

    def __init__(
        self,
        prompt: Prompt[Any],
        *,
        adapter: Adapter | None = None,
        more: Iterable[Tool[Any, Any]] = (),
        journal: Journal | None = None,
        files: Callable[[str], Any] = lambda principal: None,
        resource_address: str | None = None,
        sections: Sequence[Section[Any]] | None = None,
        park_after: float = PARK_AFTER,
        **arguments: Unpack[SharedArguments],
    ) -> None:
        self.tools = ServedTools(prompt, adapter=adapter, more=more)
        self.calls = self.make_calls(journal=journal, files=files, park_after=park_after, **arguments)
        shown = prompt.sections if sections is None else sections
        prompts = SectionPrompts(shown)
        offered = None if resource_address is None else FileResources(resource_address, files)
        skills = ServedSkills(shown, offered)
        has_resources = bool(skills) or offered is not None
        self.page: Callable[[Any, str, Question], str] | None = None
        """Returns the address of the page for a request, a call and its question; None if the server has no such page."""
        call: Any = self._call  # `Any`, because a task is returned as a plain dict
        self.server: Server[Any] = Server(
            prompt.name,
            version=__version__,
            get_tool_input_schema=self.tools.input_schema,
            on_list_tools=self._list,
            on_call_tool=call,
            on_list_prompts=prompts.list if prompts else None,
            on_get_prompt=prompts.get if prompts else None,
            on_completion=prompts.complete if prompts else None,
            on_list_resources=skills.resources if has_resources else None,
            on_list_resource_templates=None if offered is None else offered.templates,
            on_read_resource=skills.read if has_resources else None,
        )
        if skills:
            skills.declare(self.server)
        security = RequestStateSecurity.ephemeral(ttl=STATE_SECONDS)
        if journal is not None:
            key = hmac.digest(journal.key, _STATE, "sha256")
            security = RequestStateSecurity(keys=[key], ttl=STATE_SECONDS)
        security.bind_principal = principal_of
        self.tasks = None if journal is None else Tasks(self)
        self.server.middleware.append(RequestStateBoundary(security, default_audience=prompt.name))

    def make_calls(self, **options: Any) -> Calls:
        """Create the `Calls` of this server. A subclass overrides this to decide who answers questions."""
        return Calls(self.tools, **options)

    async def serve_stdio(self) -> None:
        """Serve one client over standard input and output, until the client goes away, or SIGINT or SIGTERM arrives.

        If the client goes away, the calls whose requests are in progress are cancelled. All other calls, and on a signal all of
        them, are parked or cancelled, as `LiveCall.leave` does.
        """
        try:
            await serve_one(self.server, self.calls.stop)
        finally:
            await self.calls.stop()

    async def _list(self, request: Any, params: Any) -> wire.ListToolsResult:
        tools = await self.tools.all(principal_of(request))
        return wire.ListToolsResult(tools=[describe(tools[name]) for name in sorted(tools)])

    async def _call(self, request: Any, params: wire.CallToolRequestParams) -> Answered:
        principal = principal_of(request)
        tool = (await self.tools.all(principal)).get(params.name)
        if tool is None:
            raise MCPError(wire.INVALID_PARAMS, f"there is no tool {params.name!r}")
        if self.tasks is not None:
            self.tasks.check(request, tool)
        if "user" in tool.needs and not can_ask(request):
            raise _needs_forms(params.name)
        call: LiveCall | ToolResult[Any]
        opened: set[str] = set()
        if params.request_state is None:
            try:
                call = await self.calls.begin(
                    tool,
                    params.arguments or {},
                    principal=principal,
                    asks=can_ask(request),
                    opens=self.can_open(request),
                    report=request.session.report_progress,
                )
            except CallRefused as error:
                raise MCPError(wire.INVALID_REQUEST, str(error)) from None
            except ToolValidationError as error:  # arguments that are not valid Unicode can't be recorded
                call = ToolResult.error(f"The arguments of {tool.name} are invalid: {error}.")
        else:
            state = msgspec.json.decode(params.request_state, type=_State)
            call = await self.continue_call(request, state.call, principal, params.input_responses or {})
            if isinstance(call, LiveCall):
                await call.wait()
                call.answer(params.input_responses or {}, state.asked)
                responses = params.input_responses or {}
                opened = {
                    id for id, each in call.questions.items() if each.secret and key_of(each) in responses
                }
        if isinstance(call, ToolResult):
            return content_of(call)
        try:
            made = None if self.tasks is None else await self.tasks.consider(request, call, tool)
        except BaseException:
            call.cancel()
            raise
        return await self._finish(request, call, opened) if made is None else made

    async def continue_call(
        self, request: Any, run_id: str, principal: str, responses: Mapping[str, Any] = _NONE
    ) -> LiveCall | ToolResult[Any]:
        """Return the call that a client continues, or its recorded result if the call is over.

        If this process does not have the call in memory, the responses are recorded and the call is resumed.

        Raises `MCPError` if there is no such call, if a different process executes it, or while the server stops.
        """
        found = self.calls.find(run_id, principal)
        if found is not None:
            found.report = request.session.report_progress
            self.calls.collect(found)
            return found
        try:
            if responses:
                await self.calls.answer(run_id, principal, responses)
            return await self.calls.resume(
                run_id,
                principal=principal,
                asks=can_ask(request),
                opens=self.can_open(request),
                report=request.session.report_progress,
            )
        except CallUnknown:
            raise MCPError(
                wire.INVALID_PARAMS,
                "nothing waits for this answer: the question was already answered, or the answer came too late. Call the tool again",
            ) from None
        except CallRefused as error:
            raise MCPError(wire.INVALID_REQUEST, str(error)) from None
        except RunBusy:
            raise MCPError(
                wire.INVALID_PARAMS, "a different server process is executing this call. Try again soon"
            ) from None

    def can_open(self, request: Any) -> bool:
        """Return whether the client's user can be sent to a page of this server."""
        offered = elicitation_of(request)
        return self.page is not None and offered is not None and offered.url is not None

    def ask_of(self, request: Any, call_id: str, question: Question, problem: str = "") -> wire.ElicitRequest:
        """Return a question as a request to the client: a form, or the address of a page if it asks for a secret.

        Raises `MCPError` if it asks for a secret and the server has no page.
        """
        if not question.secret:
            return wire.ElicitRequest(params=form_of(question, problem))
        if self.page is None:
            raise MCPError(wire.INVALID_REQUEST, f"question {question.name!r} can't be asked: {NO_PAGE}")
        return wire.ElicitRequest(params=address_of(question, self.page(request, call_id, question)))

    async def _elicit(self, request: Any, call: LiveCall, question: Question) -> None:
        """Ask a client with an older protocol version, and give the call the answer.

        For a secret, the client opens an address at which the person answers. A client that accepts this is told when the
        question is closed.
        """
        params: Any = self.ask_of(request, call.run_id, question, call.problems.get(question.id, "")).params
        if not question.secret:
            found = await request.session.elicit_form(
                params.message, params.requested_schema, request.request_id
            )
            call.answer({key_of(question): found})
            return
        found = await request.session.elicit_url(params.message, params.url, question.id, request.request_id)
        if not call.answer({key_of(question): found}):
            await call.closed({question.id})
            await request.session.send_elicit_complete(question.id, request.request_id)

    async def _finish(self, request: Any, call: LiveCall, opened: set[str]) -> Answered:
        """Wait for a call, and return its result, or its questions for a client that calls again with the answers.

        A client with an older protocol version is asked while the call waits. `opened` are the ids of questions whose page the
        person has just opened. Their answers are awaited first, for at most `OPEN_SECONDS`. If this request ends early, the call is cancelled.
        """
        is_modern = request.protocol_version in MODERN_PROTOCOL_VERSIONS
        try:
            if opened:
                await call.closed(opened, OPEN_SECONDS)
            while True:
                has_ended = await call.wait()
                # cancelled by a different request or process: this request's session is still open
                if call.task.cancelled():
                    return content_of(ToolResult.error(f"{call.name} was cancelled."))
                if has_ended and not call.is_parked:
                    await call.flush()
                    return content_of(call.task.result())
                if is_modern and call.questions:
                    return self._input_required(request, call)
                if has_ended:  # the call was parked just as its question was answered
                    again = await self.continue_call(request, call.run_id, call.principal)
                    if isinstance(again, ToolResult):
                        return content_of(again)
                    call = again
                    continue
                for question in list(call.questions.values()):
                    await self._elicit(request, call, question)
        except BaseException:
            call.cancel()
            raise

    def _input_required(self, request: Any, call: LiveCall) -> wire.InputRequiredResult:
        asked = {id: question.digest for id, question in call.questions.items()}
        call.is_left = True
        return wire.InputRequiredResult(
            input_requests={
                key_of(question): self.ask_of(request, call.run_id, question, call.problems.get(id, ""))
                for id, question in call.questions.items()
            },
            request_state=msgspec.json.encode(_State(call.run_id, asked)).decode(),
        )


def _needs_forms(name: str) -> MCPError:
    needed = wire.ClientCapabilities(elicitation=wire.ElicitationCapability())
    data = wire.MissingRequiredClientCapabilityErrorData(required_capabilities=needed)
    return MCPError(
        wire.MISSING_REQUIRED_CLIENT_CAPABILITY,
        f"{name} asks a person, and this client can't show forms. Use a client that supports elicitation",
        data=data.model_dump(by_alias=True, mode="json", exclude_none=True),
    )


# --- standard input and output ---

DRAIN_SECONDS = 5.0
"""Maximum seconds for requests to end, and for their responses to be read, once the input has ended."""


async def serve_one(server: Server[Any], park: Callable[[], Awaitable[None]]) -> None:
    """Serve a client until the input ends, nobody reads the output any more, or SIGINT or SIGTERM arrives.

    None of these is an error. On a signal, `park` is called before the requests in progress end. Otherwise they are cancelled,
    because nobody waits for them. A second signal ends the process at once. While a client is served, handlers and their
    child processes read nothing from standard input, and what they print goes to standard error.
    """
    over = asyncio.Event()
    with _wire() as (reads, writes), _signals() as stopped:
        given, said = _Input(reads, over), _Output(writes, over)

        async def serve() -> None:
            async with stdio_server(cast("Any", given), cast("Any", said)) as (read, write):
                await server.run(read, write, server.create_initialization_options())

        async def stop() -> None:
            await stopped.wait()
            await park()
            over.set()

        serving, stopping = asyncio.ensure_future(serve()), asyncio.ensure_future(stop())
        ending = asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([serving], timeout=DRAIN_SECONDS)
        finally:
            await cancel_and_await([serving, stopping, ending])
        if not serving.cancelled():
            serving.result()


class _Input:
    """The lines that a client sends, until the input ends or `over` is set."""

    def __init__(self, descriptor: int, over: asyncio.Event) -> None:
        self._file = os.fdopen(descriptor, "rb", closefd=False)
        self._over = over

    async def __aiter__(self) -> AsyncIterator[str]:
        over = asyncio.ensure_future(self._over.wait())
        try:
            while True:
                # in a thread that may be left behind: nothing else ends the read while the client keeps the input open
                line = asyncio.ensure_future(run_in_thread(self._file.readline))
                await asyncio.wait([line, over], return_when=asyncio.FIRST_COMPLETED)
                if self._over.is_set() or not line.result():
                    line.cancel()
                    return
                yield line.result().decode("utf-8", "replace")
        finally:
            self._over.set()
            over.cancel()


class _Output:
    """What the client reads. If it can't be written, `over` is set, and nothing more is written."""

    def __init__(self, descriptor: int, over: asyncio.Event) -> None:
        self._descriptor = descriptor
        self._over = over
        self._is_broken = False
        self._text = ""

    async def write(self, text: str) -> None:
        self._text += text

    async def flush(self) -> None:
        data, self._text = self._text.encode("utf-8", "replace"), ""
        if not self._is_broken:
            try:
                await run_in_thread(lambda: self._write(data))
            except OSError:  # nobody reads it any more
                self._is_broken = True
                self._over.set()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]


@contextlib.contextmanager
def _wire() -> Generator[tuple[int, int]]:
    """Yield private copies of standard input and output. Until the block ends, the public ones lead nowhere and to standard error.

    The copies stay open, because a thread may still read or write them.
    """
    reads, writes = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3) for each in (0, 1))
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    try:
        yield reads, writes
    finally:
        sys.stdout.flush()
        os.dup2(writes, 1)
        os.dup2(reads, 0)


@contextlib.contextmanager
def _signals() -> Generator[asyncio.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets. The second one ends the process. Other threads get no signals."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def handle(number: int) -> None:
        if stopped.is_set():
            os._exit(128 + number)
        stopped.set()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, handle, number)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
