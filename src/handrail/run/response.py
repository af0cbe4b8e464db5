"""`PromptResponse`, which a run returns, and `Output`, the schema of the typed answer in it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, cast, get_origin

import msgspec
import pydantic_core
from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, create_model
from pydantic_core import CoreSchema
from typing_extensions import is_typeddict

from handrail.concurrency.operation import Operation, cancel_and_await
from handrail.concurrency.threads import background_loop, run_on
from handrail.content import Attachment
from handrail.context import ToolContext
from handrail.errors import MessageRefused, OperationUsedTwice, ToolValidationError
from handrail.events import MessageAdded
from handrail.journal.records import QueuedMessage, When
from handrail.messages import AssistantMessage, Message, Usage
from handrail.protocols import EventBus
from handrail.run.place import is_in_run
from handrail.schema import Schema, list_problems
from handrail.session import Session
from handrail.tools import Tool, ToolResult

if TYPE_CHECKING:
    from handrail.journal.local import LocalMessages
    from handrail.journal.protocol import Journal
    from handrail.run.conversation import Conversation
    from handrail.run.run import Run
    from handrail.schema.partial_values import PartialType, PartialValue


OutputT = TypeVar("OutputT")


class PromptResponse(msgspec.Struct, Generic[OutputT], frozen=True):
    """The result of a run: its answer, its usage and cost, and why it ended."""

    text: str
    """What the model wrote as its answer."""
    output: OutputT
    """The typed answer of a prompt with `output=...`; otherwise None."""
    usage: Usage
    """The tokens used by this run and by everything nested in it."""
    cost: Decimal | None
    """The cost in US dollars, including nested runs; None if part of it is unknown."""
    run_id: str
    stop_reason: str
    """Why the run ended: `done`, `length`, `refused` or `incomplete`.

    With `length`, the answer was cut off. With `incomplete`, a completion checker has reached its cap, and something is
    still missing.
    """
    session: Session
    unclosed: tuple[Exception, ...] = ()
    """The errors raised while the run's resources were closed. They are also logged."""
    conversation: str = "root"
    """The key of the run's conversation, which names it in the session's log of messages."""
    length: int = 0
    """How many messages the conversation had at the end of the run."""
    attachments: tuple[Attachment, ...] = ()
    """The pictures, sounds and other files that the model made in this run, in order.

    What a nested run made is in the result of the call that started it.
    """

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation up to the end of this run, with secrets masked. Passed as `history`, it continues in another session."""
        added = self.session[MessageAdded].where(lambda fact: fact.conversation == self.conversation)
        return tuple(fact.message for fact in added)[: self.length]


class Outcome(msgspec.Struct, frozen=True):
    """A run's last answer, and why the run ended."""

    text: str
    output: Any
    stop_reason: str
    attachments: tuple[Attachment, ...] = ()
    """What the model made in the run."""


def respond(
    outcome: Outcome, run: Run, conversation: Conversation, unclosed: tuple[Exception, ...] = ()
) -> PromptResponse[Any]:
    """Create the response of a run, root or nested."""
    spending = run.costs.models
    return PromptResponse(
        outcome.text,
        outcome.output,
        spending.usage,
        spending.cost,
        run.run_context.run_id,
        outcome.stop_reason,
        run.session,
        unclosed,
        conversation.key,
        len(conversation.messages),
        outcome.attachments,
    )


def made_in(messages: Iterable[Message]) -> tuple[Attachment, ...]:
    """Return the attachments that the model made in its messages."""
    return tuple(
        attachment
        for message in messages
        if isinstance(message, AssistantMessage)
        for attachment in message.attachments
    )


# --- structured output ---

ANSWER_TOOL = "final_answer"
"""The tool with which a model gives a structured answer if its provider does not enforce the schema, or the answer may contain secrets."""
REPAIRS = 2
"""How many times the model may correct an answer that does not match the schema."""

_FENCED = re.compile(r"\A\s*```[a-zA-Z]*\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)


class PlainAnswer:
    """Base class of answer types whose values are plain JSON, although a class validates them."""

    within: ClassVar[str] = ""
    """The field that has the value, if an object was put around it; otherwise ""."""


class Output:
    """The schema of a run's answer."""

    __slots__ = ("_partial", "_unwraps", "_within", "schema")

    def __init__(self, schema: Schema[Any]) -> None:
        kind: Any = schema.annotation
        self._unwraps = schema.json_schema.get("type") != "object" or not _can_be_params(kind)
        self.schema: Schema[Any] = _wrapped(schema) if self._unwraps else schema
        self._within = "value" if self._unwraps else kind.within if _is_plain(kind) else ""
        """The field that has the value, if the model sends it inside an object."""
        self._partial: PartialType | None = None

    def parse(self, text: str) -> Any:
        """Parse an answer and return its value. Raises a `ToolValidationError` that lists the problems if it is invalid."""
        return self.value_of(self.schema.parse(_unfenced(text)))

    def value_of(self, answer: Any) -> Any:
        """Return the value of a parsed answer, without the object that it was wrapped in, if any."""
        return answer.value if self._unwraps else answer

    def text_of(self, text: str) -> str:
        """Return the text of a valid answer, without the object that its value is wrapped in, if any."""
        if not self._within:
            return text
        value = pydantic_core.from_json(_unfenced(text))[self._within]
        return value if isinstance(value, str) else pydantic_core.to_json(value).decode()

    def partial(self) -> PartialValue | None:
        """Return a reader for an answer that arrives in pieces; None if the answer may contain secrets."""
        from handrail.schema.partial_values import PartialType, PartialValue

        if self.schema.secret:
            return None
        if self._partial is None:
            self._partial = PartialType(self.schema.core, plain=_is_plain(self.schema.annotation))
        return PartialValue(self._partial, self._within)

    def tool(self) -> Tool[Any, Any]:
        """Create the tool whose call is the answer. That call goes through the gate like any other."""

        async def handler(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            return ToolResult.ok(params, "The answer was accepted.", exclude_value_from_context=True)

        return Tool(
            ANSWER_TOOL,
            "Give the final answer. Call this once, when everything else is done.",
            handler,
            params=self.schema.annotation,
            result=Any,
            accepts_overrides=False,
            effect="pure",
        )


def what_to_correct(error: ToolValidationError, by_call: bool = False) -> str:
    """Return the message that tells the model why its answer was not accepted.

    With `by_call`, the model is to correct it in a call, and otherwise in text.
    """
    how = f"Call {ANSWER_TOOL} with it." if by_call else "Answer again, with nothing but the corrected JSON."
    return f"Your answer is invalid:\n{list_problems(error)}\n{how}"


def _unfenced(text: str) -> str:
    fenced = _FENCED.match(text)
    return fenced[1] if fenced else text


def _is_plain(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, PlainAnswer)


def _can_be_params(annotation: Any) -> bool:
    """Return whether a type can be the params type of a tool. A `TypedDict` or another mapping can't."""
    kind = get_origin(annotation) or annotation
    return not (is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, Mapping)))


def _wrapped(schema: Schema[Any]) -> Schema[Any]:
    """Wrap a schema in an object with one field. Providers enforce only schemas of objects, and a mapping can't be the params of a tool."""
    value: Any = schema.annotation
    if isinstance(value, TypeAdapter):
        value = _by_adapter(cast("TypeAdapter[Any]", value))
    made = create_model("Answer", __config__=ConfigDict(frozen=True), value=(value, ...))
    return Schema(made)


def _by_adapter(adapter: TypeAdapter[Any]) -> type:
    """Create a type that pydantic validates with this `TypeAdapter`."""

    class ByAdapter:
        core: ClassVar[CoreSchema] = adapter.core_schema

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
            return cls.core

    return ByAdapter


_END = object()


class RunStream(Generic[OutputT]):
    """The events of a run and of everything nested in it, and its response.

    Iterate with `async for`, or with `for` in a script. `.response` is an operation that returns the response or
    raises the error that ended the run; iterating does not raise that error. Leaving a `for` loop early, or calling
    `aclose()`, cancels the run at once. Leaving an `async for` cancels it once the generator is closed.
    """

    def __init__(
        self,
        begin: Callable[[], Coroutine[Any, Any, PromptResponse[OutputT]]],
        bus: EventBus,
        run_id: str,
        name: str,
        heard: LocalMessages | Journal | None,
    ) -> None:
        self._heard = heard
        """Where the run hears what is said to it; None if it is resumed without a journal, which raises."""
        self._begin = begin
        self._bus = bus
        self._run_id = run_id
        self._name = name
        self._task: asyncio.Task[PromptResponse[OutputT]] | None = None
        self._iterated = False

    @property
    def run_id(self) -> str:
        return self._run_id

    if not TYPE_CHECKING:  # type checkers report unknown attributes by themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"a stream has no {name!r}: it yields the run's events. The response is "
                f"`(await stream.response)`, or `stream.response.wait()` in a script."
            )

    @property
    def response(self) -> Operation[PromptResponse[OutputT]]:
        """The run's response. Awaiting it starts the run, unless iterating has already started it."""
        return Operation(self._finish, f"stream({self._name!r}).response")

    def send(self, text: str, *, when: When = "next step") -> Operation[QueuedMessage]:
        """Say something to the run while it works, as `handrail.runs.send` does. Returns an operation that returns the accepted message.

        The operation raises `MessageRefused` if the run has not begun or is over.
        """
        return Operation(lambda: self._send(text, when), f"stream({self._name!r}).send")

    def withdraw(self, message_id: str) -> Operation[None]:
        """Take back a message that the run's model was not told yet. Returns an operation, which raises as `handrail.runs.withdraw` does."""
        return Operation(lambda: self._withdraw(message_id), f"stream({self._name!r}).withdraw")

    async def _withdraw(self, message_id: str) -> None:
        from handrail.run.mailbox import take_back

        await take_back(self._begun(), self._run_id, message_id)

    async def _send(self, text: str, when: When) -> QueuedMessage:
        from handrail.run.mailbox import say

        return await say(self._begun(), self._run_id, text, when)

    def _begun(self) -> LocalMessages | Journal:
        """Return where the run hears what is said to it. Raises `MessageRefused` if the run has not begun."""
        if self._task is None or self._heard is None:
            problem = "the run has not begun"
            raise MessageRefused(
                self._run_id, problem, "Iterate over the stream, or await its response, first."
            )
        return self._heard

    async def _finish(self) -> PromptResponse[OutputT]:
        task = self._start()
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                await cancel_and_await([task])
            raise

    async def aclose(self) -> None:
        """Cancel the run and wait until it has ended. Does nothing if the run is over or has not started."""
        if self._task is not None and not self._task.done():
            await cancel_and_await([self._task])

    def _start(self) -> asyncio.Task[PromptResponse[OutputT]]:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._begin())
            self._task.add_done_callback(_seen)
        return self._task

    def __aiter__(self) -> AsyncIterator[object]:
        if self._iterated:
            raise OperationUsedTwice(
                f"stream({self._name!r})",
                "it has been iterated already. A stream can be iterated once, so create another.",
            )
        self._iterated = True
        return self._events()

    async def _events(self) -> AsyncIterator[object]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[object] = asyncio.Queue()

        def put(event: object) -> None:
            context = getattr(event, "run_context", None)
            run_id = getattr(context, "run_id", None) or getattr(event, "run_id", "")
            if is_in_run(run_id, self._run_id):
                if asyncio._get_running_loop() is loop:  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
                    queue.put_nowait(event)
                else:
                    loop.call_soon_threadsafe(queue.put_nowait, event)

        stop = self._bus.subscribe(object, put)
        task = self._start()
        task.add_done_callback(lambda _: queue.put_nowait(_END))
        try:
            while (event := await queue.get()) is not _END:
                yield event
        finally:
            stop()
            if not task.done():
                await cancel_and_await([task])

    def __iter__(self) -> Iterator[object]:
        events = self.__aiter__()
        loop = background_loop()
        name = f"stream({self._name!r})"
        try:
            while True:
                try:
                    yield run_on(loop, _next(events), name)
                except StopAsyncIteration:
                    return
        finally:
            run_on(loop, _close(events), name)


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        # Marks the error as retrieved, so that asyncio does not log it; `.response` raises it.
        task.exception()


async def _next(events: AsyncIterator[object]) -> object:
    return await anext(events)


async def _close(events: Any) -> None:
    await events.aclose()
