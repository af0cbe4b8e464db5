"""Contexts for unit tests of a handler, with prepared answers.

    context = user_context({"pick": {"selected": "tea"}})
    result = await make_choice.handler(params, context=context)

Answers are looked up by the kind that a `wait_for` asks for, or by a part of a `prompt_model`'s prompt. They are
validated like real answers. Further arguments are members of the context, such as `session` and `filesystem`; an unknown
one raises `TypeError`. By default, each context has its own session and files in memory. `approve` decides approvals, and
`results` maps the names of tools and workers to the results of inner calls. Nothing is rolled back. To test what the gate
does around a handler, call the tool through a gate.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, Literal, TypeVar, cast, overload

from handrail.concurrency.deadline import Deadline
from handrail.concurrency.operation import DONE, Done, Home, Operation
from handrail.concurrency.threads import background_loop, run_on
from handrail.concurrency.user_code import Callback
from handrail.content import Attachment, AttachmentSource, attachments_of
from handrail.context import (
    AgentContext,
    Approval,
    Extras,
    Invocation,
    MessageCallback,
    RegistryView,
    RunContext,
    Ticket,
    ToolContext,
    UserContext,
    WorkerContext,
    WorkerFacts,
    WorkerUserContext,
    call_behind,
)
from handrail.errors import CallFailed, Declined, NotSupported
from handrail.events import ApprovalRemembered
from handrail.question import Wording
from handrail.resources.memory import MemoryFilesystem
from handrail.run.limits import BudgetTracker, Heartbeat
from handrail.run.place import RUN
from handrail.schema import Schema, to_json
from handrail.session import Session
from handrail.session.bus import check_event
from handrail.tools import Tool, ToolResult

T = TypeVar("T")
ContextT = TypeVar("ContextT", bound=ToolContext)

Answers = Mapping[str, Any]
"""Prepared answers. Each key is a kind of question, a part of a prompt or, for `results`, the name of a tool or worker.

An answer is a value, an exception to raise, or a function of the payload, the prompt or the arguments.
"""

TICKET_KEY = b"a key for tests only"
"""The key with which these contexts seal their tickets: `Ticket.open(context.ticket(), TICKET_KEY)`."""


@dataclass
class Recorded:
    """A record of what a handler did through its context."""

    progress: list[tuple[str, float | None, float | None]] = field(
        default_factory=list[tuple[str, float | None, float | None]]
    )
    emitted: list[object] = field(default_factory=list[object])
    approvals: list[str] = field(default_factory=list[str])
    questions: list[tuple[str, object]] = field(default_factory=list[tuple[str, object]])
    wordings: list[Wording] = field(default_factory=list[Wording])
    """The wording that a person would have seen with each question."""
    prompts: list[str] = field(default_factory=list[str])
    prompt_attachments: list[tuple[Attachment, ...]] = field(default_factory=list[tuple[Attachment, ...]])
    """The attachments of each prompt in `prompts`."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    workers: list[tuple[str, Any, tuple[Any, ...]]] = field(
        default_factory=list[tuple[str, Any, tuple[Any, ...]]]
    )
    """The calls to workers, each with its input and attachments. They are also in `calls`."""
    spawned: list[tuple[Any, str]] = field(default_factory=list[tuple[Any, str]])
    """The background runs that were begun, each as its agent and its message. None of them is executed."""
    once: dict[str, Any] = field(default_factory=dict[str, Any])
    beats: int = 0


def user_context(answers: Answers | None = None, **given: Any) -> UserContext:
    """Create a context with a person who gives prepared answers. A question without one raises `Declined`."""
    return _context(UserContext, answers or {}, None, given)


def agent_context(replies: Answers | None = None, **given: Any) -> AgentContext:
    """Create a context with a model that gives prepared replies. A prompt without one raises `NotSupported`."""
    return _context(AgentContext, None, replies or {}, given)


def headless_context(**given: Any) -> ToolContext:
    """Create a context with neither a person nor a model."""
    return _context(ToolContext, None, None, given)


@overload
def worker_context(
    name: str = ...,
    *,
    workers: Mapping[str, str] | None = ...,
    attachments: Sequence[Attachment] = ...,
    creation_defaults: Mapping[str, Any] | None = ...,
    message_callback: MessageCallback | None = ...,
    answers: Answers,
    replies: Answers | None = ...,
    **given: Any,
) -> WorkerUserContext: ...
@overload
def worker_context(
    name: str = ...,
    *,
    workers: Mapping[str, str] | None = ...,
    attachments: Sequence[Attachment] = ...,
    creation_defaults: Mapping[str, Any] | None = ...,
    message_callback: MessageCallback | None = ...,
    answers: Answers | None = ...,
    replies: Answers | None = ...,
    **given: Any,
) -> WorkerContext: ...
def worker_context(
    name: str = "worker",
    *,
    workers: Mapping[str, str] | None = None,
    attachments: Sequence[Attachment] = (),
    creation_defaults: Mapping[str, Any] | None = None,
    message_callback: MessageCallback | None = None,
    answers: Answers | None = None,
    replies: Answers | None = None,
    **given: Any,
) -> WorkerContext:
    """Create a context for testing a worker's tools.

    `workers` has the descriptions, by name, of the workers that this one may call, and `results` has their answers.
    With `answers`, there is a person to ask, and the context is a `WorkerUserContext`. With `replies`, there is a model
    to ask.
    """
    listed = RegistryView(dict(workers or {}))
    facts = WorkerFacts(name, listed, creation_defaults or {}, tuple(attachments), message_callback)
    kind = WorkerContext if answers is None else WorkerUserContext
    return _context(kind, answers, replies, {**given, "worker": facts})


def recorded(context: ToolContext) -> Recorded:
    """Return the record of what was done through a context. Raises `NotSupported` unless this module created the context."""
    call: object = call_behind(context)
    if not isinstance(call, MockCall):
        raise NotSupported("recorded", "Only contexts created by `handrail.testing` keep a record.")
    return call.recorded


def cancel(context: ToolContext) -> None:
    """Fire a context's signal, as the gate does when a call is cancelled or times out. May be called from any thread.

    Raises `NotSupported` unless this module created the context and its signal.
    """
    signal: object = context.signal
    if not isinstance(signal, MockSignal):
        raise NotSupported(
            "cancel", "Only a context whose signal `handrail.testing` created can be cancelled this way."
        )
    signal.fire()


def expire(context: ToolContext) -> None:
    """End a context's call, as the gate does when a handler returns. May be called from any thread."""
    home = call_behind(context).home
    here = asyncio._get_running_loop()  # pyright: ignore[reportPrivateUsage]  # asyncio documents this function for this use
    if here is home.loop or not home.loop.is_running():
        home.close()
    else:

        async def close() -> None:
            home.close()

        run_on(home.loop, close(), "expire")


def _context(
    kind: type[ContextT], answers: Answers | None, replies: Answers | None, given: Mapping[str, Any]
) -> ContextT:
    call: Any = MockCall(answers, replies, **given)  # not typed, because `__getattr__` provides members too
    return kind(call)


class MockCall:
    """A call without a gate or a run, which gives prepared answers.

    An optional member that was not given is None. Using any other member that was not given and has no default raises
    `NotSupported`, which says how to give it.
    """

    def __init__(
        self,
        answers: Answers | None,
        replies: Answers | None,
        *,
        call_id: str = "call-1",
        tool: Tool[Any, Any] | None = None,
        approve: bool | str = False,
        results: Answers | None = None,
        extras: Mapping[str, Any] | None = None,
        depth: int = 0,
        **members: Any,
    ) -> None:
        unknown = set(members) - _MEMBERS
        if unknown:
            raise TypeError(
                f"a context has no member {sorted(unknown)[0]!r}. Members: {', '.join(sorted(_MEMBERS))}"
            )
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = background_loop()
        self.home = Home(loop, call_id)
        self.tool = tool or Tool("tool", "A tool under test.")
        self.extras = extras if isinstance(extras, Extras) else Extras(extras)
        self.depth = depth
        self.invocation = Invocation(call_id, _START, 1, f"{call_id}/key", None, (self.tool.name,))
        self.run_context = RunContext("run-1", "request-1", "session-1", 1, "worker-1", "0" * 32, "0" * 16)
        self.recorded = Recorded()
        self._members = members
        self._approve = approve
        self._results = results or {}
        self.wait_for = None if answers is None else _Rules(self, answers).wait_for
        self.prompt_model = None if replies is None else _Rules(self, replies).prompt_model

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONAL:
            return self._members.get(name)
        if name in _MEMBERS:
            if name not in self._members:
                make = _IN_MEMORY.get(name)
                if make is None:
                    raise NotSupported(name, f"Give it when creating the context: `...context({name}=...)`.")
                self._members[name] = make(self)
            return self._members[name]
        raise AttributeError(name)

    def once(
        self, key: str, function: Callable[[], Any], probe: object, on_unknown: Literal["ask", "fail"]
    ) -> Operation[Any]:
        async def run() -> Any:
            if key not in self.recorded.once:
                value = function()
                self.recorded.once[key] = await value if inspect.isawaitable(value) else value
            return self.recorded.once[key]

        return Operation(run, f"once({key!r})", self.home)

    def beat(self) -> Done:
        self.recorded.beats += 1
        return DONE

    def report_progress(self, message: str, done: float | None, total: float | None) -> Done:
        self.recorded.progress.append((message, done, total))
        return DONE

    def emit(self, event: object) -> Done:
        check_event(event)
        self.recorded.emitted.append(event)
        return DONE

    def request_approval(self, message: str) -> Operation[Approval]:
        async def run() -> Approval:
            self.recorded.approvals.append(message)
            if self._approve is True:
                return Approval(True, "", "test", "approved")
            return Approval(False, self._approve or "", "test", "denied")

        return Operation(run, f"request_approval({message!r})", self.home)

    def request_permission(self, kind: str) -> Operation[Approval]:
        return self.request_approval(kind)

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Operation[ToolResult[Any]]:
        async def run() -> ToolResult[Any]:
            self.recorded.calls.append((name, dict(arguments)))
            if name not in self._results:
                return ToolResult.error(f"unknown tool {name!r}")
            return _as_result(_given(self._results[name], arguments))

        return Operation(run, f"call({name!r})", self.home)

    def call_worker(self, name: str, input: Any, attachments: Sequence[Any]) -> Operation[Any]:
        async def run() -> Any:
            self.recorded.workers.append((name, input, tuple(attachments)))
            result = await self.call_tool(name, {"input": input})
            if not result.success:
                raise CallFailed(name, result)
            return result.value

        return Operation(run, f"call_worker({name!r})", self.home)

    def spawn(self, agent: Any, message: str, budget: object, files: object, wake: bool) -> Any:
        background: Any = import_module("handrail.fleet.background")  # doors are not imported here
        self.recorded.spawned.append((agent, message))
        return background.Background(f"background-{len(self.recorded.spawned)}", {})

    def ticket(self) -> str:
        deadline: Deadline | None = self._members.get("deadline")
        return Ticket(
            run_id=self.run_context.run_id,
            place=str(RUN.child(1).attempt(1).child(1)),
            call_id=self.invocation.id,
            session_id=self.run_context.session_id,
            tool=self.tool.name,
            path=self.invocation.path,
            depth=self.depth,
            deadline=None if deadline is None else deadline.at,
            budget={},
            capabilities=tuple(sorted(self.tool.capabilities)),
            effect=self.tool.effect,
        ).seal(TICKET_KEY)


class MockSignal:
    """The signal of a context for tests, which `cancel` fires."""

    def __init__(self, call: MockCall) -> None:
        self._home = call.home
        self._fired = asyncio.Event()
        self.cancelled = False
        """Whether the signal has fired."""

    def wait(self) -> Operation[None]:
        """Wait until the signal fires."""
        self._home.check()

        async def wait() -> None:
            await self._fired.wait()

        return Operation(wait, "signal.wait()", self._home)

    def fire(self) -> None:
        """Fire the signal. It stays fired."""
        self.cancelled = True
        if asyncio._get_running_loop() is self._home.loop:  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
            self._fired.set()
        else:
            self._home.loop.call_soon_threadsafe(self._fired.set)


@dataclass(frozen=True)
class MockApprovals:
    """The approvals of a context for tests. By default, there is no mode, and no decision is remembered."""

    mode: str | None = None
    remembered: tuple[ApprovalRemembered, ...] = ()

    def list(self) -> tuple[ApprovalRemembered, ...]:
        """Return the remembered decisions."""
        return self.remembered


class _Rules:
    """Finds the prepared answer to a question or a prompt, and validates it like a real one."""

    def __init__(self, call: MockCall, answers: Answers) -> None:
        self._call = call
        self._answers = answers

    def wait_for(
        self,
        kind: str,
        payload: object = None,
        schema: Any = None,
        *,
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[Any]:
        self._call.home.check()
        wording = Wording.of(kind, message, title)

        async def run() -> Any:
            self._call.recorded.questions.append((kind, payload))
            self._call.recorded.wordings.append(wording)
            if kind not in self._answers:
                raise Declined(kind, f"no answer was prepared for {kind!r}")
            return Schema[Any](str if schema is None else schema).parse_value(
                _given(self._answers[kind], payload)
            )

        return Operation(run, f"wait_for({kind!r})", self._call.home)

    def prompt_model(
        self,
        prompt: str,
        schema: Any,
        *,
        attachments: Sequence[AttachmentSource] = (),
        on_text: Callable[[str], object] | None = None,
        **options: Any,
    ) -> Operation[Any]:
        self._call.home.check()
        attached = attachments_of(attachments)

        async def run() -> Any:
            self._call.recorded.prompts.append(prompt)
            self._call.recorded.prompt_attachments.append(attached)
            for piece, answer in self._answers.items():
                if piece in prompt:
                    wanted = Schema[Any](schema)
                    value = wanted.parse_value(_given(answer, prompt))
                    if on_text is not None:  # the text arrives in two chunks, as if a model streamed it
                        text, tell = to_json(value).decode(), Callback(on_text, "on_text")
                        tell(text[: len(text) // 2])
                        tell(text[len(text) // 2 :])
                        await tell.finish()
                    return value
            raise NotSupported(
                "prompt_model",
                f"No reply was prepared for the prompt {prompt!r}. Add one to the context's replies: {{'a part of it': reply}}.",
            )

        return Operation(run, f"prompt_model({prompt[:40]!r})", self._call.home)


def _given(answer: Any, about: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return answer(about) if callable(answer) else answer


def _as_result(value: Any) -> ToolResult[Any]:
    return cast(ToolResult[Any], value) if isinstance(value, ToolResult) else ToolResult.ok(value)


_IN_MEMORY: dict[str, Callable[[MockCall], Any]] = {
    "session": lambda call: Session(id=call.run_context.session_id),
    "event_bus": lambda call: call.session.dispatcher,
    "filesystem": lambda call: MemoryFilesystem(),
    "heartbeat": lambda call: Heartbeat(),
    "signal": lambda call: MockSignal(call),
    "approval_controller": lambda call: MockApprovals(),
    "budget_tracker": lambda call: BudgetTracker(),
    "cost_tracker": lambda call: call.budget_tracker,
}
"""Functions that create in-memory defaults for members that were not given."""

_START = datetime(2030, 1, 1, tzinfo=UTC)

_OPTIONAL = frozenset({"rendered_prompt", "request", "response_accumulator", "deadline", "worker"})
_MEMBERS = _OPTIONAL | {
    "adapter",
    "approval_controller",
    "budget_tracker",
    "cost_tracker",
    "event_bus",
    "filesystem",
    "heartbeat",
    "prompt",
    "resources",
    "session",
    "signal",
}
