"""`Acts`: the three acts of one handoff, each a tool that a model can't call.

An `Act` is one function of a handoff. `Parked` holds the data that is kept while someone else decides.
"""

from __future__ import annotations

import copy
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec
import pydantic_core

from handrail.concurrency.user_code import is_closing
from handrail.context import ToolContext
from handrail.errors import (
    ActFailed,
    CallFailed,
    CapabilityMissing,
    Conflict,
    ContextError,
    DefinitionError,
    EffectRefused,
    LimitError,
    ModelError,
    NoAnswer,
    NotSupported,
    PromptEvaluationError,
    ToolDefinitionError,
    ToolValidationError,
    TransientError,
    VisibilityExpansionRequired,
)
from handrail.events import HandoffAnswered, HandoffParked
from handrail.question import Wording
from handrail.run.call import Attempt, attempt_of, new_part
from handrail.run.call_log import tell_between
from handrail.run.failures import WrongResult, transient_in
from handrail.run.questions import ask_value, note_verb
from handrail.run.record.format import has_secret
from handrail.schema import Schema, is_instance
from handrail.schema.problems import describe, describe_kind
from handrail.text.raised_errors import leaves_of
from handrail.text.spelling import checked_arguments
from handrail.tools import EFFECTS, Effect, Tool, ToolResult
from handrail.tools.signature import MISSING, Signature, caller_namespace, context_parameter, positional, read

PrivateT = TypeVar("PrivateT")
PublicT = TypeVar("PublicT")
ResultT = TypeVar("ResultT")


@checked_arguments
@dataclass(frozen=True)
class Parked(Generic[PrivateT, PublicT]):
    """The value that `before` returns to hand the decision over.

    Of the acts, only `after` gets `private`; `public` is what `client` gets and what a person or a model sees. Both
    are plain data (dataclasses, pydantic models, JSON values), because a handoff may wait for days.
    """

    private: PrivateT = field(repr=False)
    public: PublicT
    id: str = field(default="", repr=False)
    """Identifies the handoff that `Handoff.start` began, which can be finished once. `before` leaves it empty."""


@dataclass(frozen=True)
class Begun(Generic[PrivateT, PublicT, ResultT]):
    """The recorded outcome of `before`: either `parked`, or finished early with `value`."""

    parked: Parked[PrivateT, PublicT] | None = field(default=None, repr=False)
    value: ResultT | None = None


@dataclass(frozen=True, slots=True)
class Act:
    """One act of a handoff: its function and what its signature says."""

    function: Callable[..., Any]
    is_async: bool
    context_type: type[ToolContext]
    takes: tuple[Any, ...]
    """The annotations of the parameters that are passed by position."""
    returns: Any
    wants_params: bool


def read_act(handoff: str, function: Callable[..., Any], act: str, form: str, params: Any) -> Act:
    """Read an act's function and its signature. Raises `ToolDefinitionError` if the signature is invalid."""
    what = f"`{act}`"
    signature = read(handoff, function, caller_namespace(), what)
    context_type = context_parameter(handoff, signature, what)
    wants_params = act != "before" and "params" in signature.parameters
    if wants_params:
        check_fit(handoff, "params", params, f"`params` of its {act}", signature.annotation("params"))
        rest = {name: each for name, each in signature.parameters.items() if name != "params"}
        signature = Signature(rest, signature.hints, signature.is_async)
    names = positional(handoff, signature, 2 if act == "after" else 1, what, form)
    takes = tuple(signature.annotation(name) for name in names)
    return Act(function, signature.is_async, context_type, takes, signature.returns, wants_params)


def parked_types(handoff: str, act: Act) -> tuple[Any, Any, Any]:
    """Return the private type, the public type and the early result type from the annotation of `before`.

    The early result type is `Any` unless the annotation has exactly one `ToolResult[...]`. Raises `ToolDefinitionError`
    unless the annotation has exactly one `Parked[...]`, and besides it only `ToolResult`s.
    """
    hint = "Annotate it `-> Parked[Private, Public]`, or `-> Parked[Private, Public] | ToolResult[Result]`."
    members = _members(act.returns)
    parked = [each for each in members if get_origin(each) is Parked]
    results = [each for each in members if each is ToolResult or get_origin(each) is ToolResult]
    if act.returns is MISSING or Parked in members:
        raise ToolDefinitionError(handoff, "its `before` does not say what it parks", hint)
    if len(parked) + len(results) != len(members):
        raise ToolDefinitionError(handoff, f"its `before` returns {describe(act.returns)}", hint)
    if len(parked) != 1:
        problem = "never hands over" if not parked else "parks different things"
        raise ToolDefinitionError(handoff, f"its `before` {problem}", hint)
    private, public = get_args(parked[0])
    early = [get_args(each)[0] if get_args(each) else Any for each in results]
    return private, public, early[0] if len(early) == 1 else Any


def always_parks(act: Act) -> bool:
    """Return whether this `before` always parks, according to its annotation, and never returns an early result."""
    return len(_members(act.returns)) == 1


def schema_for(handoff: str, what: str, annotation: Any, namespace: Mapping[str, Any]) -> Schema[Any]:
    """Create the schema with which one part of a handoff is recorded. Raises `ToolDefinitionError` if that is not possible."""
    try:
        return Schema[Any](annotation, namespace)
    except DefinitionError as error:
        problem, hint = error.parts
        more = "Put objects that live only in this process into `resources`." if what == "private" else ""
        raise ToolDefinitionError(
            handoff, f"its {what} part can't be recorded: {problem}", f"{hint} {more}".strip()
        ) from None


def check_fit(handoff: str, what: str, given: Any, whose: str, wanted: Any) -> None:
    """Raise `ToolDefinitionError` if `given` is a class that does not fit the class `wanted`. Protocols are not checked."""
    given, wanted = (type(None) if each is None else each for each in (given, wanted))
    if any(each in (Any, MISSING) or not isinstance(each, type) for each in (given, wanted)):
        return
    if getattr(wanted, "_is_protocol", False) or (given is int and wanted is float):
        return
    try:
        fits = issubclass(given, wanted)
    except TypeError:  # `issubclass` does not accept a TypedDict or a generic alias
        return
    if not fits:
        problem = f"{what} is {describe(given)} and {whose} is annotated {describe(wanted)}"
        raise ToolDefinitionError(handoff, problem, "Make them the same type.")


def either(one: Any, other: Any) -> Any:
    """Return the union of two types, which is `Any` if one of them is `Any`."""
    return Any if Any in (one, other) else Union[one, other]  # noqa: UP007  # None has no `|` operator


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the types in a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


_STANDING_IN = (
    "You stand in for a person. Decide as they would, from what you are shown and nothing else, "
    "and answer with what is asked for."
)
_TOLD = (
    *(NoAnswer, CallFailed, ContextError, EffectRefused, Conflict, LimitError, ModelError),
    *(PromptEvaluationError, VisibilityExpansionRequired),
)
"""Errors that are passed on unchanged, because their messages come from Handrail or an inner call, not from the act."""


class ActRunner:
    """Runs one call's acts, in order.

    Each act passes the gate as an inner call to its own tool. So an act is isolated, commits to the call that it
    is part of, and has its own events and its own place in the path. It needs no approval and is not counted as
    another call, because the outer call was already judged and counted.
    """

    __slots__ = ("_attempt", "_ids")

    def __init__(self, context: ToolContext) -> None:
        self._attempt = _attempt_in(context)
        self._ids: dict[str, str] = {}

    async def run(
        self, act: Tool[Any, Any], *, only_asks: bool = False, has_secret: bool = False
    ) -> ToolResult[Any]:
        """Run the next act. Its id is derived from the call's id, the attempt, and the act's number in that attempt."""
        attempt = self._attempt
        part = new_part(attempt, act, only_asks=only_asks, has_secret=has_secret)
        self._ids[part.id] = act.name
        return await attempt.gate.pass_through(part)

    def note(self, kind: type[HandoffParked] | type[HandoffAnswered], data: Any) -> None:
        """Record that the handoff was parked or answered, with this data."""
        attempt = self._attempt
        tell_between(attempt, kind(attempt.id, attempt.name, attempt.path, data, attempt.run_context))

    def done(self) -> None:
        """Drop the recorded effects of the acts themselves, because the effect of the handoff's own call replaces them."""
        transaction = self._attempt.open_transaction
        if transaction.settled is not None:
            transaction.settled = [
                each for each in transaction.settled if self._ids.get(each.call_id) != each.what
            ]


@dataclass(frozen=True, slots=True)
class Acts:
    """The three acts of a handoff, with their schemas and tools. An act that is not defined is None.

    Without a `before`, the params are the public data. Without an `after`, the answer is the result.
    """

    handoff: Tool[Any, Any]
    before: Act | None
    client: Act | None
    after: Act | None
    private: Schema[Any]
    public: Schema[Any]
    answer: Schema[Any]
    begins: Tool[Any, Any]
    asks: Tool[Any, Any]
    ends: Tool[Any, Any]

    async def play(self, params: Any, context: ToolContext) -> ToolResult[Any]:
        """Run one call of the handoff: its acts in order, up to the first that fails or ends it early.

        A resumed run can run it again: only its acts have effects, and each act is a recorded call.
        """
        runner = ActRunner(context)
        begun = await self.begin(runner, params)
        if not begun.success:
            return begun
        state = cast("Begun[Any, Any, Any]", begun.value)
        if state.parked is None:
            runner.done()
            return msgspec.structs.replace(begun, value=state.value)
        runner.note(HandoffParked, self.public.hide(state.parked.public))
        answered = await runner.run(self.asking(state.parked.public), only_asks=True)
        if not answered.success:
            return answered
        runner.note(HandoffAnswered, self.answer.hide(answered.value))
        ended = await self.end(runner, state.parked.private, answered.value)
        if ended.success:
            runner.done()
        return ended

    async def begin(self, runner: ActRunner, params: Any) -> ToolResult[Any]:
        """Run `before`, if there is one. The value of a successful result is a `Begun`."""
        if self.before is None:
            return ToolResult("", Begun[Any, Any, Any](Parked(None, params)))
        return await runner.run(_with(self.begins, self.before, None, self._begun, without_words))

    async def end(self, runner: ActRunner, private: Any, answer: Any) -> ToolResult[Any]:
        """Run `after`, if there is one. Otherwise the answer is the result."""
        if self.after is None:
            return ToolResult("", answer)
        ends = _with(self.ends, self.after, (private, answer), None, without_words)
        return await runner.run(ends, has_secret=has_secret(self.answer, answer))

    def asking(self, public: Any) -> Tool[Any, Any]:
        """Return the tool of the `client` act for this public data.

        It runs the act's function or, if there is none, asks the environment.
        """
        if self.client is not None:
            return _with(self.asks, self.client, (public,), self._answered, None)

        async def ask(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            return ToolResult("", await self._ask(public, context))

        return _handled(self.asks, ask)

    async def _ask(self, public: Any, context: ToolContext) -> Any:
        name, description = self.handoff.name, self.handoff.description
        shown = self.public.dump(public)
        if context.wait_for is not None:
            plain = pydantic_core.from_json(shown)
            return await _hand_over(context, name, description, plain, self.answer)
        if context.prompt_model is not None:
            prompt = f"{description}\n\nYou are shown:\n{shown.decode()}"
            return await context.prompt_model(prompt, self.answer.annotation, system=_STANDING_IN)
        raise CapabilityMissing(
            name,
            "somebody to answer",
            "Run it where a person (run_mode 'user') or a model ('agent') can answer, or give it a "
            "`client` act that decides without them.",
        )

    def _begun(self, value: Any) -> ToolResult[Any]:
        """Return the result of `before`, with a `Begun` as its value if it succeeded. Raises `WrongResult` if a type is wrong."""
        if isinstance(value, ToolResult):
            done = cast("ToolResult[Any]", value)
            if not done.success:
                return done
            return msgspec.structs.replace(done, value=Begun[Any, Any, Any](None, done.value))
        if not isinstance(value, Parked):
            raise WrongResult(
                f"it returned {describe_kind(value)}; return `Parked(private, public)`, or a ToolResult"
            )
        parked = cast("Parked[Any, Any]", value)
        _recorded("private", self.private, parked.private)
        public = _recorded("public", self.public, parked.public)
        return ToolResult("", Begun[Any, Any, Any](Parked(parked.private, public)))

    def _answered(self, value: Any) -> ToolResult[Any]:
        if isinstance(value, ToolResult):
            raise WrongResult("it returned a ToolResult; return the answer itself")
        try:
            parsed = self.answer.parse_value(value)
        except ToolValidationError as error:
            raise WrongResult(f"its answer does not fit: {error}") from None
        # A value that already has this type is returned unchanged, with its secrets.
        return ToolResult("", value if is_instance(value, self.answer.annotation) else parsed)


async def _hand_over(
    context: ToolContext, name: str, message: str, public: object, answer: Schema[Any]
) -> Any:
    """Ask the environment's person for the answer to a handoff, and return it."""
    attempt = _attempt_in(context)
    attempt.home.check()
    number = attempt.next_verb(f"handoff {name}")
    await note_verb(attempt, number, f"handoff {name}")
    return await ask_value(attempt, number, "handoff", name, Wording.of(name, message, None), public, answer)


def _attempt_in(context: ToolContext) -> Attempt:
    attempt = attempt_of(context)
    if attempt is None:
        raise NotSupported(
            "call",
            "A handoff needs it. Call the handoff through a gate; with a context created for a test, call its acts one by one.",
        )
    return attempt


def act_tool(
    handoff: Tool[Any, Any], name: Literal["before", "client", "after"], act: Act | None, result: Any
) -> Tool[Any, Any]:
    """Create the tool of one act, without the data that the act works on."""

    async def begun_later(params: Any, *, context: ToolContext) -> Any: ...
    def begun_in_thread(params: Any, *, context: ToolContext) -> Any: ...

    handler: Any = begun_later if act is None or act.is_async else begun_in_thread
    handler.__annotations__ = {"context": ToolContext if act is None else act.context_type}
    made = Tool[Any, Any](
        handoff.name,
        handoff.description,
        handler,
        params=handoff.params,
        result=result,
        effect=_effect(handoff.effect, name),
        run_mode=handoff.run_mode,
    )
    fill(made, "name", f"{handoff.name}.{name}")  # neither a model nor `context.call` can use such a name
    if name == "before":
        fill(made, "shown", without_private)
    elif name == "client" and made.result_schema is not None and made.result_schema.secret:
        fill(made, "shown", _masked_by(made.result_schema))
    return made


def fill(tool: Tool[Any, Any], field: str, value: Any) -> None:
    """Set a derived field of a frozen tool."""
    object.__setattr__(tool, field, value)


def _effect(effect: Effect, act: str) -> Effect:
    """Return the effect of one of a handoff's acts. Usually it is the handoff's own effect.

    If that is not transactional, `client` is idempotent, so that it may call every tool that the handoff may call.
    """
    if EFFECTS[effect].transactional:
        return effect
    if act == "client":
        return "idempotent"
    return "irreversible" if effect == "compensable" else effect  # only the whole handoff can be compensated


def without_private(result: ToolResult[Any]) -> ToolResult[Any]:
    """Return the result of `before` without its private part."""
    came: Any = result.value
    if not isinstance(came, Begun):
        return result
    begun = cast("Begun[Any, Any, Any]", came)
    value = begun.value if begun.parked is None else begun.parked.public
    return msgspec.structs.replace(result, value=value)


def _masked_by(schema: Schema[Any]) -> Callable[[ToolResult[Any]], ToolResult[Any]]:
    """Return a function that masks the secrets in the value of a successful result."""

    def shown(result: ToolResult[Any]) -> ToolResult[Any]:
        return (
            ToolResult(result.message, schema.hide(result.value), True, attachments=result.attachments)
            if result.success
            else result
        )

    return shown


def _handled(tool: Tool[Any, Any], handler: Callable[..., Any]) -> Tool[Any, Any]:
    made = copy.copy(tool)
    fill(made, "handler", handler)
    return made


def _with(
    tool: Tool[Any, Any],
    act: Act,
    given: tuple[Any, ...] | None,
    finish: Callable[[Any], ToolResult[Any]] | None,
    hide: Callable[[BaseException], BaseException] | None,
) -> Tool[Any, Any]:
    """Return an act's tool, which works on `given`, or on the params if `given` is None."""
    function = act.function

    def arguments(params: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (params,) if given is None else given, {"params": params} if act.wants_params else {}

    async def run_async(params: Any, *, context: ToolContext) -> Any:
        positional, named = arguments(params)
        try:
            value = await function(*positional, **named, context=context)
        except (Exception, GeneratorExit) as error:
            if hide is None or is_closing():
                raise
            raised = hide(error)
        else:
            return value if finish is None else finish(value)
        raise raised  # raised outside the `except` block, so that the first error does not become its context

    def run_in_thread(params: Any, *, context: ToolContext) -> Any:
        positional, named = arguments(params)
        try:
            value = function(*positional, **named, context=context)
        except (Exception, GeneratorExit) as error:
            if hide is None:
                raise
            raised = hide(error)
        else:
            return value if finish is None else finish(value)
        raise raised

    return _handled(tool, run_async if act.is_async else run_in_thread)


def without_words(error: BaseException) -> BaseException:
    """Return the error to report for an act's error. It omits the original message, which may contain private data.

    The errors in `_TOLD`, and groups with an error that ends the run, are returned unchanged. A transient error stays one.
    """
    if isinstance(error, _TOLD) or _concerns_the_run(error):
        return error
    if (failure := transient_in(error)) is not None:
        return TransientError("it may work later", retry_after=failure.retry_after)
    lines = traceback.extract_tb(error.__traceback__)[1:]
    return ActFailed(
        type(error).__name__, [f"{each.filename}:{each.lineno} in {each.name}" for each in lines]
    )


def _concerns_the_run(error: BaseException) -> bool:
    return any(
        isinstance(each, PromptEvaluationError | VisibilityExpansionRequired) for each in leaves_of(error)
    )


def _recorded(what: str, schema: Schema[Any], value: Any) -> Any:
    """Return a value as it will be read back from the record. Raises `WrongResult`, which does not show the value, if it is invalid."""
    places = ""
    try:
        return schema.parse_value(value)
    except ToolValidationError as error:
        places = ", ".join(str(problem.where) for problem in error.problems if problem.where)
    at = f", at {places}" if places else ""
    raise WrongResult(f"the {what} part it parked does not match its type, {describe(schema.annotation)}{at}")
