"""`once`: reserves an effect that can't be rolled back before it happens, and settles it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from handrail.dispatch.parking import waiting_for_a_person
from handrail.dispatch.questions import put, question_of
from handrail.dispatch.transaction import Settled
from handrail.errors import EffectRefused, OutcomeUnknown
from handrail.operation import Operation
from handrail.schema import Schema
from handrail.threads import call_either
from handrail.tools import EFFECTS

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt

OnUnknown = Literal["ask", "fail"]


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
    value = await frame.steps.run(
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
    environment = attempt.frame.environment
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
