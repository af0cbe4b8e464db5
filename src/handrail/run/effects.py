"""External effects, which are not part of a transaction.

`once` completes an effect at most once, compensations undo effects, and probes find out whether effects happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from pydantic import BaseModel

from handrail.concurrency.cancellation import shielded
from handrail.concurrency.operation import Operation
from handrail.concurrency.threads import call_either
from handrail.context import ToolContext
from handrail.errors import EffectRefused, OutcomeUnknown
from handrail.journal.local import LocalSteps
from handrail.question import Wording
from handrail.run.questions import put, question_of, waiting_for_a_person
from handrail.run.transaction import Settled
from handrail.schema import Schema
from handrail.text.raised_errors import in_short, log_error
from handrail.tools import EFFECTS, Tool, ToolResult
from handrail.tools.definition import Handler

if TYPE_CHECKING:
    from handrail.run.call import Attempt, Call, Passage

log = logging.getLogger("handrail.gate")

OnUnknown = Literal["ask", "fail"]

_SECONDS = 30.0
"""Maximum duration of one compensation or probe, in seconds."""


# --- once -------------------------------------------------------------------------------------------


def once(
    attempt: Attempt,
    key: str,
    function: Callable[[], Any],
    probe: Callable[[], Any] | None,
    on_unknown: OnUnknown,
) -> Operation[Any]:
    """Implement the verb `once` of one call. Raises `EffectRefused` if the tool's effect is transactional."""
    if EFFECTS[attempt.tool.effect].transactional:
        raise EffectRefused(
            attempt.name,
            attempt.tool.effect,
            f"it may not use `once` ({key!r}), because that can't be rolled back",
        )
    step = _Step(attempt, key, function, probe, on_unknown)
    return Operation(step.run, f"once({key!r})", attempt.home)


class _HappenedAnswer(BaseModel):
    """The answer to whether something happened."""

    happened: bool


class _Step(msgspec.Struct, frozen=True, eq=False):
    """One use of `once`."""

    attempt: Attempt
    key: str
    function: Callable[[], Any]
    probe: Callable[[], Any] | None
    on_unknown: OnUnknown

    @property
    def what(self) -> str:
        return f"{self.attempt.name}: once({self.key!r})"

    async def run(self) -> Any:
        attempt, steps = self.attempt, self.attempt.run.world.steps
        key = f"{attempt.invocation.idempotency_key}/{self.key}"
        if isinstance(steps, LocalSteps):
            outermost = attempt
            while outermost.parent is not None:
                outermost = outermost.parent
            live = {each.call.key for each in outermost.run.live}
            steps.begin(key, outermost.call.key, live)
        value = await steps.run(
            key,
            lambda: call_either(self.function),
            run_id=attempt.run.log.run_id,
            unsettled=self._settle_unknown,
        )
        done = Settled(self.what, attempt.id)
        if all(each.what != done.what for each in attempt.open_transaction.settled or ()):
            attempt.open_transaction.settle(done)
        return value

    async def _settle_unknown(self) -> Any:
        """Find out from the probe or a person whether an interrupted `once` happened, and finish it.

        If it happened, its value is None. If not, the function is called now. A person is asked only with
        `on_unknown="ask"`. Raises `OutcomeUnknown` if it is still not known whether the effect happened.
        """
        happened: Any = None if self.probe is None else await call_either(self.probe)
        if happened is None and self.on_unknown == "ask":
            happened = await self._ask_whether()
        if happened is None:
            raise OutcomeUnknown(self.what)
        return None if happened else await call_either(self.function)

    async def _ask_whether(self) -> bool | None:
        attempt, key = self.attempt, self.key
        environment = attempt.run.people.environment
        if environment is None or environment.run_mode != "user":
            return None
        wanted: Schema[Any] = Schema(_HappenedAnswer)
        question = question_of(
            attempt,
            attempt.question_id(f"once {key}"),
            "input",
            f"did {key!r} happen",
            Wording(
                f"The process ended while {attempt.name} was doing {key!r}, so it is unknown whether that happened. Did it?"
            ),
            {"tool": attempt.name, "key": key},
            wanted.json_schema,
            None,
        )
        with waiting_for_a_person(attempt):
            answer = await put(attempt, question, wanted)
        return wanted.parse_value(answer.value).happened if answer.outcome == "answered" else None


# --- compensations and probes ----------------------------------------------------------------------------------


class _AuxiliaryTool(Tool[Any, Any]):
    """A tool's `compensate` or `probe` function, as a tool that only the gate can call."""

    given: Any
    """The params, already parsed."""

    def parse(self, arguments: Any) -> Any:
        return self.given

    def mask(self, arguments: Any) -> str:
        return self.dump(self.given).decode()


def _auxiliary_tool(
    tool: Tool[Any, Any], name: str, params: Any, handler: Handler[Any, Any]
) -> Tool[Any, Any]:
    made = object.__new__(_AuxiliaryTool)
    made.__dict__.update(
        tool.__dict__,
        name=f"{tool.name}.{name}",  # a name that neither a model nor `context.call` can use
        handler=handler,
        is_async=True,
        timeout=_SECONDS,
        given=params,
        needs=frozenset[Any](),
        reenters=False,
        result=None,
        result_class=None,
        _result_schema=None,
        shown=None,
    )
    return made


async def compensate(attempt: Attempt, settled: Sequence[Settled]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compensate these external effects, last first. Returns what was compensated and what was not.

    Each compensation passes the gate alongside the call. If one fails, even with `SystemExit`, it is rolled back and
    the others still run.
    """
    compensated: list[str] = []
    left: list[str] = []
    for done in reversed(settled):
        if done.tool is None:
            left.append(done.what)
            continue
        try:
            error = await _compensate(attempt, done, done.tool)
        except Exception as problem:  # the others must still run
            error = problem
        if error is None:
            compensated.append(done.what)
        else:
            log_error(log, logging.ERROR, "compensating %s (%s) raised", done.what, done.call_id, error=error)
            left.append(f"{done.what} (compensating it failed: {in_short(error)})")
    return tuple(compensated), tuple(left)


async def _compensate(attempt: Attempt, done: Settled, tool: Tool[Any, Any]) -> BaseException | None:
    """Pass one compensation through the gate. Returns its error if it fails, otherwise None."""
    function = tool.compensate
    assert function is not None

    async def undo(params: Any, *, context: ToolContext) -> ToolResult[Any]:
        await call_either(function, params, done.value, context=context)
        return ToolResult.ok(None, "It was undone.")

    undoing = _auxiliary_tool(tool, "undo", done.params, undo)
    call = attempt.auxiliary(f"{done.call_id}.undo", undoing, done.place.compensation)
    return (await _carry(call)).error


async def probe(attempt: Attempt) -> bool | None:
    """Ask the tool's probe whether an interrupted call happened. Returns None if there is no probe or it does not know.

    The probe passes the gate alongside the call. A probe that fails is rolled back, and None is returned.
    """
    tool, function = attempt.tool, attempt.tool.probe
    if function is None:
        return None

    async def ask(params: Any, *, context: ToolContext) -> ToolResult[Any]:
        happened = await call_either(function, params, context=context)
        return ToolResult.ok(happened if happened is False else True if happened else None)

    probing = _auxiliary_tool(tool, "probe", attempt.params, ask)
    passage = await _carry(attempt.auxiliary(f"{attempt.id}.probe", probing, attempt.call.place.probe))
    if passage.result is None or passage.error is not None:
        told = "the probe of %s raised, so it is unknown whether the call happened"
        if passage.error is None:
            log.error(told, attempt.name)
        else:
            log_error(log, logging.ERROR, told, attempt.name, error=passage.error)
        return None
    return passage.result.value


async def _carry(call: Call) -> Passage:
    """Pass a compensation or a probe through the gate. If it fails, the returned passage's `error` is set."""
    first = call.gate.open(call)
    passage = first.passage
    try:
        await shielded(call.gate.pass_through(call, first))
    except (Exception, asyncio.CancelledError) as error:
        passage.error = error if passage.error is None else passage.error
    return passage
