"""`once`: what can't be rolled back is reserved before, settled after, and never settled twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from handrail.dispatch.asking import put, question_of
from handrail.dispatch.parking import waiting_for_a_person
from handrail.dispatch.transaction import Settled
from handrail.errors import EffectRefused, OutcomeUnknown
from handrail.operation import Operation
from handrail.schema import Schema
from handrail.threads import call_either
from handrail.tools import EFFECTS

if TYPE_CHECKING:
    from handrail.dispatch.call import LiveCall

OnUnknown = Literal["ask", "fail"]


def once(
    call: LiveCall,
    key: str,
    function: Callable[[], Any],
    probe: Callable[[], Any] | None,
    on_unknown: OnUnknown,
) -> Operation[Any]:
    """The verb `once` of one call."""
    if EFFECTS[call.tool.effect].transactional:
        raise EffectRefused(
            call.name, call.tool.effect, f"it may not use `once` ({key!r}), which can't be rolled back"
        )
    return Operation(lambda: _once(call, key, function, probe, on_unknown), f"once({key!r})", call.home)


async def _once(
    call: LiveCall,
    key: str,
    function: Callable[[], Any],
    probe: Callable[[], Any] | None,
    on_unknown: OnUnknown,
) -> Any:
    frame = call.frame
    value = await frame.steps.step(
        f"{call.invocation.idempotency_key}/{key}",
        lambda: call_either(function),
        run_id="" if frame.log is None else frame.log.run_id,
        unsettled=lambda: _settle_unknown(call, key, function, probe, on_unknown),
    )
    done = Settled(f"{call.name}: once({key!r})", call.id)
    if all(each.what != done.what for each in call.open_transaction.settled or ()):
        call.open_transaction.settle(done)
    return value


class _Asked(BaseModel):
    """What somebody who is asked whether something happened answers."""

    happened: bool


async def _settle_unknown(
    call: LiveCall,
    key: str,
    function: Callable[[], Any],
    probe: Callable[[], Any] | None,
    on_unknown: OnUnknown,
) -> Any:
    """A `once` found begun and not finished: probed, or asked about. Its value is None if it happened."""
    happened: Any = None if probe is None else await call_either(probe)
    if happened is None and on_unknown == "ask":
        happened = await _ask_whether(call, key)
    if happened is None:
        raise OutcomeUnknown(f"{call.name}: once({key!r})")
    return None if happened else await call_either(function)


async def _ask_whether(call: LiveCall, key: str) -> bool | None:
    environment = call.frame.environment
    if environment is None or environment.run_mode != "user":
        return None
    wanted: Schema[Any] = Schema(_Asked)
    question = question_of(
        call,
        call.question_id(f"once {key}"),
        "input",
        f"did {key!r} happen",
        f"The process ended while {call.name} did {key!r}, and it is not known whether it happened. Did it?",
        {"tool": call.name, "key": key},
        wanted.json_schema,
        None,
    )
    with waiting_for_a_person(call):
        answer = await put(call, question, wanted)
    return wanted.parse_value(answer.value).happened if answer.outcome == "answered" else None
