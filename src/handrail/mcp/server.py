"""`ToolServer`: the tools of a prompt as an MCP server.

Each `tools/call` is a separate run: it has its own gate, and with it policies, approvals, limits and events. A question
that a call asks goes to the client: as elicitation to clients of the older generations, and as an input-required result to
clients of 2026-07-28, which call again with the answer. A call that waits stays in this process, and ends with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import mcp_types as wire
import msgspec
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from handrail.dispatch import open_gate
from handrail.events import Progress
from handrail.guard.policy import within_scope
from handrail.ids import random_id
from handrail.prompt import Prompt
from handrail.protocols import Environment, Filesystem, RunMode
from handrail.question import Answer, Question
from handrail.session import Session
from handrail.tools import EFFECTS, Tool, ToolResult
from handrail.tools.result import json_of, shown_text
from mcp import MCPError

MAX_WAITING = 1_000
"""Maximum number of calls that wait for answers. Beyond that, the one that has waited longest is cancelled."""
_FLAT = frozenset(["string", "number", "integer", "boolean"])


class ToolServer:
    """An MCP server with the tools of a prompt: `await ToolServer(prompt).serve_stdio()`.

    `files` returns the filesystem of one call, or None. Only the tools of sections that are shown in full are served. Further
    arguments are passed to `open_gate`.
    """

    def __init__(
        self, prompt: Prompt[Any], *, files: Callable[[], Filesystem | None] = lambda: None, **arguments: Any
    ) -> None:
        self._prompt = prompt
        self._files = files
        self._arguments = arguments
        self._waiting: dict[str, _Call] = {}
        self.server: Server[Any] = Server(
            prompt.name, version="0.2", on_list_tools=self._list, on_call_tool=self._call
        )

    async def serve_stdio(self) -> None:
        """Serve one client over standard input and output, until the input ends."""
        async with stdio_server() as (read, write):
            await self.server.run(read, write, self.server.create_initialization_options())

    async def _list(self, _: Any, params: Any) -> wire.ListToolsResult:
        await self._prompt.connect()
        tools = [describe(tool) for tool in self._prompt.render().tools]
        return wire.ListToolsResult(tools=sorted(tools, key=lambda tool: tool.name))

    async def _call(
        self, request: Any, params: wire.CallToolRequestParams
    ) -> wire.CallToolResult | wire.InputRequiredResult:
        state = params.request_state
        if state is None:
            call = await self._begin(request, params.name, params.arguments or {})
        else:
            call = self._waiting.pop(state, None)
            if call is None or call.name != params.name:
                raise MCPError(
                    wire.INVALID_PARAMS, "nothing waits for this answer: it was given, or it came too late"
                )
            call.take(params.input_responses or {})
        modern = request.protocol_version in MODERN_PROTOCOL_VERSIONS
        try:
            while True:
                question = await call.next_question()
                if question is None:
                    return content_of(call.task.result())
                asked = form_of(question)
                if not modern:
                    found = await request.session.elicit_form(
                        asked.message, asked.requested_schema, request.request_id
                    )
                    call.take({question.id: found})
                    continue
                state = random_id()
                self._waiting[state] = call
                if len(self._waiting) > MAX_WAITING:
                    self._waiting.pop(next(iter(self._waiting))).task.cancel()
                return wire.InputRequiredResult(
                    input_requests={question.id: wire.ElicitRequest(params=asked)}, request_state=state
                )
        except BaseException:
            call.task.cancel()
            raise

    async def _begin(self, request: Any, name: str, arguments: Mapping[str, Any]) -> _Call:
        await self._prompt.connect()
        rendered = self._prompt.render()
        if all(tool.name != name for tool in rendered.tools):
            raise MCPError(wire.INVALID_PARAMS, f"there is no tool {name!r}")
        questions: asyncio.Queue[_Asked] = asyncio.Queue()
        session = Session()
        loop = asyncio.get_running_loop()
        sent: set[asyncio.Task[None]] = set()

        def report(event: Progress) -> None:
            if event.done is not None:
                task = loop.create_task(
                    request.session.report_progress(event.done, event.total, event.message)
                )
                sent.add(task)
                task.add_done_callback(sent.discard)

        session.dispatcher.subscribe(Progress, report)
        gate = open_gate(
            rendered.tools,
            policies=[within_scope(scoped.policy, scoped.tools) for scoped in rendered.policies],
            session=session,
            environment=_Client(questions),
            filesystem=self._files(),
            **self._arguments,
        )

        async def run() -> ToolResult[Any]:
            try:
                return await gate.invoke(name, arguments)
            finally:
                await gate.close()

        return _Call(name, loop.create_task(run()), questions)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A question, and the future that gets its answer."""

    question: Question
    answer: asyncio.Future[Answer]


class _Client(Environment):
    """The environment of a call. The client's person answers its questions. Those that need more than a flat form are declined."""

    run_mode: RunMode = "user"

    def __init__(self, questions: asyncio.Queue[_Asked]) -> None:
        self._questions = questions

    async def ask(self, question: Question, /) -> Answer:
        asked = _Asked(question, asyncio.get_running_loop().create_future())
        if form_of(question, check=True) is None:
            return _answer(question, "declined", reason="the client can show only flat forms")
        self._questions.put_nowait(asked)
        return await asked.answer


class _Call:
    """A call in progress, across the requests that it takes."""

    def __init__(
        self, name: str, task: asyncio.Task[ToolResult[Any]], questions: asyncio.Queue[_Asked]
    ) -> None:
        self.name = name
        self.task = task
        self._questions = questions
        self._open: _Asked | None = None

    async def next_question(self) -> Question | None:
        """Wait until the call asks or ends. Returns the question, or None if it has ended."""
        getting = asyncio.ensure_future(self._questions.get())
        try:
            await asyncio.wait([self.task, getting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not getting.done():
                getting.cancel()
        if not getting.done() or getting.cancelled():
            return None
        self._open = getting.result()
        return self._open.question

    def take(self, responses: Mapping[str, Any]) -> None:
        """Give the open question its answer. Without one in the responses, the question is cancelled."""
        asked, self._open = self._open, None
        if asked is None or asked.answer.done():
            return
        question = asked.question
        given: Any = responses.get(question.id)
        if not isinstance(given, wire.ElicitResult) or given.action == "cancel":
            asked.answer.set_result(_answer(question, "cancelled"))
        elif given.action == "decline":
            asked.answer.set_result(_answer(question, "declined", reason="declined at the client"))
        else:
            value: Any = given.content or {}
            if not _is_object(question.schema):
                value = cast("dict[str, Any]", value).get("value")
            asked.answer.set_result(_answer(question, "answered", value))


def _answer(question: Question, outcome: Any, value: Any = None, reason: str = "") -> Answer:
    return Answer(
        question_id=question.id,
        digest=question.digest,
        by=question.principal,
        outcome=outcome,
        value=value,
        reason=reason,
    )


def _is_object(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "object"


def form_of(question: Question, check: bool = False) -> Any:
    """Return a question as a form for a client. With `check`, returns None if the form would not be flat."""
    schema: dict[str, Any] = dict(question.schema)
    if not _is_object(schema):
        schema = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    fields: dict[str, Any] = {
        name: {
            word: value
            for word, value in cast("dict[str, Any]", field).items()
            if word != "additionalProperties"
        }
        for name, field in schema.get("properties", {}).items()
    }
    if check and not all(each.get("type") in _FLAT for each in fields.values()):
        return None
    shown = "\n".join(f"{row.name}: {row.whole}" for row in question.rows)
    message = "\n".join(part for part in (question.message or question.name, shown) if part)
    flat = {"type": "object", "properties": fields, "required": list(schema.get("required", ()))}
    return wire.ElicitRequestFormParams(message=message, requested_schema=flat)


def content_of(result: ToolResult[Any]) -> wire.CallToolResult:
    """Return a result as MCP content: its text and, if it succeeded, its value, if that is an object and not excluded."""
    content: list[Any] = [wire.TextContent(text=shown_text(result))]
    if not result.success:
        return wire.CallToolResult(content=content, is_error=True)
    value: Any = None if result.exclude_value_from_context else msgspec.json.decode(json_of(result))
    return wire.CallToolResult(content=content, structured_content=value if isinstance(value, dict) else None)


def describe(tool: Tool[Any, Any]) -> wire.Tool:
    """Return the MCP description of a tool. Its annotations follow from its effect."""
    rules = EFFECTS[tool.effect]
    result = tool.result_schema
    output = None if result is None else dict(result.json_schema)
    return wire.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=_plain(tool.json_schema),
        output_schema=_plain(output) if output is not None and _is_object(output) else None,
        annotations=wire.ToolAnnotations(
            read_only_hint=not rules.writes,
            destructive_hint=tool.effect in ("irreversible", "compensable"),
            idempotent_hint=tool.effect in ("pure", "read", "idempotent"),
        ),
    )


def _plain(value: Any) -> Any:
    """Return a read-only schema as plain dicts and lists."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in cast("Mapping[str, Any]", value).items()}
    return [_plain(each) for each in cast("list[Any]", value)] if isinstance(value, list | tuple) else value
