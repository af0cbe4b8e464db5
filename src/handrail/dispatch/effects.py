"""Effects on the world that no transaction covers: `once` settles them once, compensations undo them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from handrail.dispatch.call import COMPENSATION, Call
from handrail.dispatch.failures import in_short
from handrail.dispatch.questions import put, question_of, waiting_for_a_person
from handrail.dispatch.transaction import Settled, Transaction, commit_lock_of, new_transaction
from handrail.errors import EffectRefused, OutcomeUnknown
from handrail.operation import Operation
from handrail.replay.commits import commit_recorded
from handrail.schema import Schema
from handrail.threads import call_either
from handrail.tools import EFFECTS, ToolResult

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt
    from handrail.dispatch.gate import Gate

log = logging.getLogger("handrail.gate")

OnUnknown = Literal["ask", "fail"]

_SECONDS = 30.0
"""How long one compensation may take."""


# --- once -------------------------------------------------------------------------------------------


def once(
    attempt: Attempt,
    key: str,
    function: Callable[[], Any],
    probe: Callable[[], Any] | None,
    on_unknown: OnUnknown,
) -> Operation[Any]:
    """The verb `once` of one call."""
    if EFFECTS[attempt.tool.effect].transactional:
        raise EffectRefused(
            attempt.name, attempt.tool.effect, f"it may not use `once` ({key!r}), which can't be rolled back"
        )
    return Operation(lambda: _once(attempt, key, function, probe, on_unknown), f"once({key!r})", attempt.home)


async def _once(
    attempt: Attempt,
    key: str,
    function: Callable[[], Any],
    probe: Callable[[], Any] | None,
    on_unknown: OnUnknown,
) -> Any:
    frame = attempt.frame
    value = await frame.world.steps.run(
        f"{attempt.invocation.idempotency_key}/{key}",
        lambda: call_either(function),
        run_id=frame.log.run_id,
        unsettled=lambda: _settle_unknown(attempt, key, function, probe, on_unknown),
    )
    done = Settled(f"{attempt.name}: once({key!r})", attempt.id)
    if all(each.what != done.what for each in attempt.open_transaction.settled or ()):
        attempt.open_transaction.settle(done)
    return value


class _Asked(BaseModel):
    """The answer to whether something happened."""

    happened: bool


async def _settle_unknown(
    attempt: Attempt,
    key: str,
    function: Callable[[], Any],
    probe: Callable[[], Any] | None,
    on_unknown: OnUnknown,
) -> Any:
    """Decide a `once` that began and never finished: probe it, or ask. Its value is None if it happened."""
    happened: Any = None if probe is None else await call_either(probe)
    if happened is None and on_unknown == "ask":
        happened = await _ask_whether(attempt, key)
    if happened is None:
        raise OutcomeUnknown(f"{attempt.name}: once({key!r})")
    return None if happened else await call_either(function)


async def _ask_whether(attempt: Attempt, key: str) -> bool | None:
    environment = attempt.frame.people.environment
    if environment is None or environment.run_mode != "user":
        return None
    wanted: Schema[Any] = Schema(_Asked)
    question = question_of(
        attempt,
        attempt.question_id(f"once {key}"),
        "input",
        f"did {key!r} happen",
        f"The process ended while {attempt.name} did {key!r}, and it is not known whether it happened. Did it?",
        {"tool": attempt.name, "key": key},
        wanted.json_schema,
        None,
    )
    with waiting_for_a_person(attempt):
        answer = await put(attempt, question, wanted)
    return wanted.parse_value(answer.value).happened if answer.outcome == "answered" else None


# --- compensations ----------------------------------------------------------------------------------


async def compensate(
    gate: Gate, attempt: Attempt, settled: Sequence[Settled]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compensate inner calls, last first. Returns what was compensated and what still stands."""
    compensated: list[str] = []
    left: list[str] = []
    for done in reversed(settled):
        if done.tool is None:
            left.append(done.what)
            continue
        try:
            await asyncio.wait_for(_compensate(gate, attempt, done), _SECONDS)
            compensated.append(done.what)
        except (Exception, asyncio.CancelledError) as error:
            log.error("compensating %s (%s) raised", done.what, done.call_id, exc_info=error)
            left.append(f"{done.what} (compensating it failed: {in_short(error)})")
    return tuple(compensated), tuple(left)


async def _compensate(gate: Gate, attempt: Attempt, done: Settled) -> None:
    """Run one `compensate` handler in a transaction of its own, beside the call that failed."""
    tool = done.tool
    assert tool is not None
    assert tool.compensate is not None
    # It is not counted among the calls: a resumed run does not undo again.
    call = attempt.call
    undoing = gate.open(
        Call(
            gate,
            tool.name,
            None,
            f"{done.call_id}.undo",
            (*call.path[:-1], tool.name),
            call.loop,
            0,
            call.parent,
            call.depth,
            kind=COMPENSATION,
            tool=tool,
            started=call.started,
            _place=done.place.compensation,
        )
    ).attempt
    undoing.params = done.params
    transaction = undoing.transaction = new_transaction(undoing, tool)
    context = tool.context_type(undoing)
    try:
        await call_either(tool.compensate, done.params, done.value, context=context)
        undoing.close()
        await _commit(undoing, transaction)
    except BaseException:
        transaction.drop()
        raise
    finally:
        undoing.close()
    transaction.publish()


async def _commit(undoing: Attempt, transaction: Transaction) -> None:
    """Commit what a compensation changed, and record it if the run is recorded."""
    frame = undoing.frame
    if frame.journal is not None and transaction.parent is None:
        async with commit_lock_of(frame.session):
            transaction.prepare()
            await commit_recorded(frame.journal, undoing, ToolResult.ok(None, "It was undone."), False)
        return
    transaction.prepare()
    if transaction.durable is None:
        transaction.apply()
    else:
        transaction.apply_all(undoing.id)
