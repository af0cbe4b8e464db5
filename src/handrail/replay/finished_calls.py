"""Finished calls: a resumed run takes their results, effects and costs from the record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.content import attachments_in
from handrail.dispatch.effects import compensate
from handrail.dispatch.transaction import Settled, Transaction, new_transaction, note_past
from handrail.errors import Conflict, Diverged, OutcomeUnknown
from handrail.messages import Usage
from handrail.place import Place
from handrail.records import CommitUnit
from handrail.replay.attachments import load
from handrail.replay.charges import AnswerCharge
from handrail.replay.log import RunLog
from handrail.replay.marks import NOT_KEPT, Tried, had_secret
from handrail.replay.records import (
    NO_USAGE,
    Changes,
    InnerCall,
    RecordedEffect,
    Spent,
    fingerprint,
    read_result,
    read_value,
    write_result,
)
from handrail.session.serialization import decode_item
from handrail.tools import EFFECTS, ToolResult

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt
    from handrail.dispatch.frame import Frame
    from handrail.dispatch.tickets import GivenTicket

CALL_AGAIN = "Call it again if it is still needed."
"""Advice to the model about a call that was undone."""


async def replay_call(attempt: Attempt) -> ToolResult[Any] | None:
    """Return this call's recorded outcome and apply its recorded effects; None if the call has to run.

    Raises `OutcomeUnknown` if

    - the outer handler now makes a different call at this place,
    - the effects conflict with later changes and the call may not run again (a call that was given a secret in an answer
      raises `Conflict` instead, even if it may run again),
    - the call was being undone and that can't be finished, or
    - the call's answer contained a secret and is lost, and `after` of its handoff may have had a lasting effect.
    """
    log = attempt.frame.log
    if attempt.kind.undoes:
        return None
    unit = log.finished(attempt.call.place)
    if unit is not None:
        await bill_tickets(attempt, log)
        return await _with_bytes(_replay_unit(attempt, unit), log)
    if attempt.parent is None:
        return None
    try:
        log.check_verb(attempt.call.place, fingerprint(attempt))
        inner = log.find("inner call", attempt.call.place, InnerCall)
        if inner is None:
            return None
        if inner.lost and _is_asked_again(attempt, log):
            return None
        attempt.call.restore(attempt.frame.tools.get(attempt.name, attempt.tool))
        if any(log.was_being_undone(Place.parse(done.place)) for done in inner.effects if done.tool):
            return await _replay_undone(attempt, inner, log)
        apply_inner(attempt, inner)
        await bill_tickets(attempt, log)
    except Conflict as error:
        if attempt.has_secret:
            raise  # the call's secret is no longer available
        if EFFECTS[attempt.tool.effect].transactional:
            return None  # what the call used has changed since the call ended, and the call can run again
        raise OutcomeUnknown(f"{attempt.name} ({error})") from error
    except Diverged as error:
        raise OutcomeUnknown(f"{attempt.path[-2]} ({error})") from error
    bill_nested(attempt)
    return await _with_bytes(end_as_recorded(attempt, inner.result), log)


async def _with_bytes(result: ToolResult[Any], log: RunLog) -> ToolResult[Any]:
    """Return a recorded result after loading the bytes of its attachments."""
    if result.attachments:
        await load(log.journal, log.run_id, (*result.attachments, *attachments_in(result.value)))
    return result


def _replay_unit(attempt: Attempt, unit: CommitUnit) -> ToolResult[Any]:
    """Replay a call that has a unit of its own. The session already has its changes."""
    frame = attempt.frame
    attempt.call.restore(frame.tools.get(attempt.name, attempt.tool))
    if attempt.parent is not None:
        attempt.transaction = new_transaction(attempt, attempt.tool)
        for each in frame.log.committed_inside(attempt.call.place) if attempt.tool.delegates else ():
            note_past(attempt, True, name=each.tool)
        note_past(attempt, bool(unit.effects or unit.writes))
    bill_nested(attempt)
    return end_as_recorded(attempt, unit.result)


async def _replay_undone(attempt: Attempt, inner: InnerCall, log: RunLog) -> ToolResult[Any]:
    """Finish undoing a call that was being undone because its outer call had failed, and return a result that says so.

    Raises `OutcomeUnknown` if an effect can't be undone.
    """
    pending = [done for done in settled_by(attempt, inner.effects) if not log.was_undone(done.place)]
    assert attempt.parent is not None
    _, left = await compensate(attempt.parent, pending)
    if left:
        raise OutcomeUnknown(f"{attempt.name} (could not be undone: {', '.join(left)})")
    bill_nested(attempt)
    result = ToolResult.error(
        f"{attempt.name} was being undone when the process ended, and has been undone since. {CALL_AGAIN}"
    )
    return end_as_recorded(attempt, write_result(result))


def _is_asked_again(attempt: Attempt, log: RunLog) -> bool:
    """Return whether a handoff must ask for a secret again, because the first answer was not recorded.

    It does not ask again if `after` has finished, because the result of `after` is in the record. If `after` had begun with
    the secret and may have had a lasting effect, this raises `OutcomeUnknown`.
    """
    handoff = attempt.parent
    assert handoff is not None
    after = handoff.place.child(attempt.call.number + 1)
    if log.has("inner call", after):
        return False
    tried = log.find("call tried", after, Tried)
    begun = log.has("call begun", after.attempt(1 if tried is None else tried.number))
    if begun and not EFFECTS[handoff.tool.effect].transactional:
        raise OutcomeUnknown(handoff.name, f"{NOT_KEPT}Find out what it changed before you do it again.")
    return True


def end_as_recorded(attempt: Attempt, written: bytes) -> ToolResult[Any]:
    """End the call with its recorded result, and return that result. Its end was published, and the session's logs have it."""
    attempt.close()
    return read_result(attempt.tool, written)


# --- effects ------------------------------------------------------------------------------------------


def apply_inner(attempt: Attempt, inner: InnerCall) -> None:
    """Apply an inner call's changes to its outer call, from a record or a deposit. Raises `Conflict` if they don't apply."""
    transaction = attempt.transaction = new_transaction(attempt, attempt.tool)
    try:
        for changes in inner.passed:
            _apply(attempt, Transaction(attempt.frame.session, attempt.name, True, transaction), changes)
        _apply(attempt, transaction, inner.changes)
    except BaseException:
        transaction.drop()
        raise
    outer = attempt.parent
    if outer is not None and outer.transaction is not transaction.parent:
        changed = bool(inner.events or inner.files or inner.settled or inner.passed)
        note_past(attempt, changed, *inner.passed, inner.changes)


def _apply(attempt: Attempt, transaction: Transaction, changes: Changes) -> None:
    transaction.writable = True
    for event in changes.events:
        transaction.session.redo(decode_item(event, attempt.frame.session.id))
    files = attempt.frame.world.filesystem
    if changes.files and files is not None:
        transaction.fork_of(files).redo(changes.files)
    for done in settled_by(attempt, changes.settled):
        transaction.settle(done)
    transaction.prepare()
    transaction.apply()
    if transaction.parent is not None:
        transaction.parent.inherit(transaction)


def settled_by(attempt: Attempt, effects: Iterable[RecordedEffect]) -> list[Settled]:
    """Return the external effects of an inner call, to be undone or reported if the outer call fails."""
    found: list[Settled] = []
    for done in effects:
        tool = attempt.frame.tools.get(done.tool) if done.tool else None
        if tool is not None and tool.secret and had_secret(tool, done.params):
            tool = None  # the params needed to undo it contain a secret, which was not recorded
        params = tool.parse(done.params) if tool is not None else None
        value = read_value(tool, done.value) if tool is not None else None
        found.append(Settled(done.what, done.call_id, tool, params, value, Place.parse(done.place)))
    return found


# --- costs --------------------------------------------------------------------------------------------


def bill_nested(attempt: Attempt, before: int | None = None) -> None:
    """Charge the recorded model answers of runs nested in this call. These runs are not replayed.

    With `before`, charge only the answers in attempts with a lower number.
    """
    frame = attempt.frame
    for body in frame.log.answers_under(attempt.call.place, before):
        answer = msgspec.msgpack.decode(body, type=AnswerCharge)
        frame.costs.models.add(answer.usage or Usage(requests=1), answer.cost)
        for each in answer.failed:
            if each.usage is not None:
                frame.costs.models.add(each.usage, each.cost)
        for each in (*answer.failed, answer):
            if frame.budget is not None:
                frame.budget.reserve().settle(**each.spent())


async def bill_tickets(attempt: Attempt, log: RunLog) -> dict[str, bytes]:
    """Close a call's recorded tickets, and charge what was spent under them.

    Returns the deposits by place; b"" for a ticket that was claimed and has no deposit.
    """
    places = log.tickets_under(attempt.call.place)
    found = dict(await log.journal.tickets.close(log.run_id, places)) if places else {}
    for body in found.values():
        if body:
            charge(attempt.frame, msgspec.msgpack.decode(body, type=Spent))
    return found


def charge(frame: Frame, spent: Spent, given: GivenTicket | None = None) -> None:
    """Charge what was spent under a ticket, and release the rest of the budget share that `given` reserved.

    Without `given`, no share was reserved in this process, and the budget is charged directly.
    """
    if spent.usage != NO_USAGE:
        frame.costs.models.add(spent.usage, spent.cost)
    if given is not None and given.reserved is not None:
        given.reserved.settle(**{**dict.fromkeys(given.share, 0), **spent.spent})
    elif given is None and frame.budget is not None:
        frame.budget.reserve().settle(**spent.spent)
