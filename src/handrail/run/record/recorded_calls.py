"""Finished calls: a resumed run takes their results, effects and costs from the record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace

from handrail.content import attachments_in
from handrail.errors import Conflict, Diverged, OutcomeUnknown
from handrail.journal.records import CommitUnit
from handrail.messages import Usage
from handrail.run.call_log import CallLog, log_again
from handrail.run.effects import compensate, probe
from handrail.run.failures import Unsuccessful
from handrail.run.limits import AnswerCharge, SummaryCharge, charge_again
from handrail.run.place import Place
from handrail.run.record.format import (
    GIVEN_SECRET,
    NO_USAGE,
    NOT_KEPT,
    Begun,
    Changes,
    Deposit,
    InnerCall,
    RecordedEffect,
    Spent,
    Tried,
    fingerprint,
    had_secret,
    is_masked,
    read_result,
    read_value,
    write_result,
)
from handrail.run.record.log import RunLog, load_attachments
from handrail.run.transaction import Settled, Transaction, new_transaction, note_past, stage_spawned
from handrail.session.serialization import decode_item
from handrail.tools import EFFECTS, ToolResult

if TYPE_CHECKING:
    from handrail.events import CallStatus
    from handrail.run.call import Attempt
    from handrail.run.run import Run
    from handrail.run.tickets import GivenTicket


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
    log = attempt.run.log
    if attempt.kind.undoes:
        return None
    unit = log.finished(attempt.call.place)
    if unit is not None:
        await bill_tickets(attempt, log)
        attempt.passage.status = cast("CallStatus", unit.status)
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
        _take_tool(attempt)
        attempt.passage.status = inner.status
        if any(log.was_being_undone(Place.parse(done.place)) for done in inner.effects if done.tool):
            return await _replay_undone(attempt, inner, log)
        apply_inner(attempt, inner)
        await bill_tickets(attempt, log)
    except Conflict as error:
        if attempt.passage.has_secret:
            raise  # the call's secret is no longer available
        if EFFECTS[attempt.tool.effect].transactional:
            return None  # what the call used has changed since the call ended, and the call can run again
        raise OutcomeUnknown(f"{attempt.name} ({error})") from error
    except Diverged as error:
        raise OutcomeUnknown(f"{attempt.path[-2]} ({error})") from error
    bill_nested(attempt)
    return await _with_bytes(end_as_recorded(attempt, inner.result), log)


def _take_tool(attempt: Attempt) -> None:
    """Set the tool that a replayed call names, if it still exists. Unlike `resolve`, this never refuses the call."""
    attempt.call = replace(attempt.call, tool=attempt.run.tools.get(attempt.name, attempt.tool))


async def _with_bytes(result: ToolResult[Any], log: RunLog) -> ToolResult[Any]:
    """Return a recorded result after loading the bytes of its attachments."""
    if result.attachments:
        await load_attachments(log.journal, log.run_id, (*result.attachments, *attachments_in(result.value)))
    return result


def _replay_unit(attempt: Attempt, unit: CommitUnit) -> ToolResult[Any]:
    """Replay a call that has a unit of its own. The session already has its changes."""
    run = attempt.run
    _take_tool(attempt)
    if attempt.parent is not None:
        attempt.transaction = new_transaction(attempt, attempt.tool)
        for each in run.log.committed_inside(attempt.call.place) if attempt.tool.delegates else ():
            note_past(attempt, True, name=each.tool)
        note_past(attempt, unit.has_changed)
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
            _apply(attempt, Transaction(attempt.run.session, attempt.name, True, transaction), changes)
        _apply(attempt, transaction, inner.changes)
    except BaseException:
        transaction.drop()
        raise
    outer = attempt.parent
    if outer is not None and outer.transaction is not transaction.parent:
        changed = bool(inner.events or inner.files or inner.settled or inner.passed or inner.spawned)
        note_past(attempt, changed, *inner.passed, inner.changes)


def _apply(attempt: Attempt, transaction: Transaction, changes: Changes) -> None:
    transaction.writable = True
    for event in changes.events:
        transaction.session.redo(decode_item(event, attempt.run.session.id))
    files = attempt.run.world.filesystem
    if changes.files and files is not None:
        transaction.fork_of(files).redo(changes.files)
    for done in settled_by(attempt, changes.settled):
        transaction.settle(done)
    for spawned in changes.spawned:
        stage_spawned(attempt, transaction, spawned)
    transaction.prepare()
    transaction.apply()
    if transaction.parent is not None:
        transaction.parent.inherit(transaction)


def settled_by(attempt: Attempt, effects: Iterable[RecordedEffect]) -> list[Settled]:
    """Return the external effects of an inner call, to be undone or reported if the outer call fails."""
    found: list[Settled] = []
    for done in effects:
        tool = attempt.run.tools.get(done.tool) if done.tool else None
        if tool is not None and tool.secret and had_secret(tool, done.params):
            tool = None  # the params needed to undo it contain a secret, which was not recorded
        params = tool.parse(done.params) if tool is not None else None
        value = read_value(tool, done.value) if tool is not None else None
        found.append(Settled(done.what, done.call_id, tool, params, value, Place.parse(done.place)))
    return found


# --- costs --------------------------------------------------------------------------------------------


def bill_nested(attempt: Attempt, before: int | None = None) -> None:
    """Charge the recorded model answers and summaries of runs nested in this call, and the shares of its background runs.

    None of these runs is replayed. With `before`, charge only those in attempts with a lower number.
    """
    run, place = attempt.run, attempt.call.place
    for spawned in run.log.spawned_under(place, before):
        if run.budget is not None and spawned.run.parent is not None:
            run.budget.reserve().settle(**spawned.run.parent.share)
    for body in run.log.bodies_under("model answer", place, before):
        answer = msgspec.msgpack.decode(body, type=AnswerCharge)
        if answer.usage is None:
            run.costs.models.add(Usage(requests=1), answer.cost)
        for each in (*answer.failed, answer):
            charge_again(run, each)
    for body in run.log.bodies_under("compaction", place, before):
        for each in msgspec.msgpack.decode(body, type=SummaryCharge).spent:
            charge_again(run, each)


async def bill_tickets(attempt: Attempt, log: RunLog) -> dict[str, bytes]:
    """Close a call's recorded tickets, and charge what was spent under them.

    Returns the deposits by place; b"" for a ticket that was claimed and has no deposit.
    """
    places = log.tickets_under(attempt.call.place)
    found = dict(await log.journal.tickets.close(log.run_id, places)) if places else {}
    for body in found.values():
        if body:
            charge(attempt.run, msgspec.msgpack.decode(body, type=Spent))
    return found


def charge(run: Run, spent: Spent, given: GivenTicket | None = None) -> None:
    """Charge what was spent under a ticket, and release the rest of the budget share that `given` reserved.

    Without `given`, no share was reserved in this process, and the budget is charged directly.
    """
    if spent.usage != NO_USAGE:
        run.costs.models.add(spent.usage, spent.cost)
    if given is not None and given.reserved is not None:
        given.reserved.settle(**{**dict.fromkeys(given.share, 0), **spent.spent})
    elif given is None and run.budget is not None:
        run.budget.reserve().settle(**spent.spent)


def resume_attempt(attempt: Attempt) -> tuple[str, ...]:
    """Continue the count of the call's attempts, and note whether the call was charged before the process ended.

    Unless the call is over, the recorded model answers of its earlier attempts are charged. Returns the lasting effects of
    these attempts.
    """
    log = attempt.run.log
    if attempt.kind.undoes or attempt.number > 1:
        return ()
    place = attempt.call.place
    attempt.passage.charged = log.was_charged(place)
    found = log.find("call tried", place, Tried)
    if found is None:
        return ()
    attempt.number, attempt.passage.retries = found.number, found.retries
    if found.logged:  # the session's logs have it; the call's record must have it too
        attempt.passage.logged = CallLog(found.logged)
    if not log.is_over(place):
        bill_nested(attempt, before=attempt.number)
    return found.left


async def decide_interrupted(attempt: Attempt) -> bool:
    """Decide what becomes of a call that may have been interrupted when the process ended.

    Returns False if the call may run: it had not begun, can run again, never took effect, or continues work that goes on
    elsewhere. Returns True if the call has happened. It is then finished, and its transaction has the effects of its inner
    calls, so it only has to commit. Otherwise raises `Unsuccessful`, which carries the call's result, or `OutcomeUnknown`.

    Once a call with a secret has begun, it runs again only if its probe says that it never took effect, or if it continues
    work that goes on elsewhere. The record has a mask in place of a secret argument from a model, and parsing rejects the
    mask. A secret from a person would have to be requested again, although the call may have used the first answer already.
    """
    if attempt.kind.is_auxiliary:
        return False
    log, tool, arguments = attempt.run.log, attempt.tool, attempt.arguments
    found = log.find("call begun", attempt.place, Begun)
    begun = None if found is None else found.what
    if tool.enters_again and not tool.secret and begun != GIVEN_SECRET:
        return False
    secret = tool.secret and had_secret(tool, arguments)
    if tool.enters_again and not secret and begun != GIVEN_SECRET:
        return False
    lost = secret and is_masked(arguments)
    if begun is None:
        if lost:
            await _withdraw(attempt, log)
        return False
    if not lost and log.find_remote(attempt.place) is not None:
        return False  # the handler continues with the work that it started elsewhere
    attempt.params = None if lost else tool.parse(arguments)
    if log.was_undone(attempt.call.place):
        _restore_logs(attempt, log)
        _, left = await _undo_inner(attempt)
        raise Unsuccessful(ToolResult.error(f"{_undone(attempt)}{left}"))
    happened = None if lost else await probe(attempt)
    if happened is False:
        return False  # the call never happened, so nothing is repeated
    _restore_logs(attempt, log)
    bill_nested(attempt)
    if happened:
        attempt.transaction = new_transaction(attempt, tool)
        for each in _inner_effects(attempt)[1]:
            attempt.transaction.settle(each)
        attempt.finished = ToolResult.ok(
            None,
            f"{attempt.name} was done before the process ended; what it returned was not recorded.",
        )
        return True
    deposited = await bill_tickets(attempt, log)
    for body in deposited.values():
        log_again(attempt, msgspec.msgpack.decode(body, type=Deposit).inner.logged if body else ())
    await _withdraw(attempt, log)
    why = NOT_KEPT if secret or begun == GIVEN_SECRET else ""
    if EFFECTS[tool.effect].transactional:
        hint = (
            "with the secret, if it is still needed" if secret else "if it is still needed; it will ask again"
        )
        raise Unsuccessful(
            ToolResult.error(
                f"{attempt.name} was interrupted when the process ended, and none of its own effects remain. {why}"
                f"Call it again, {hint}.{_left_by(attempt, deposited)}"
            )
        )
    if tool.effect == "compensable" and not lost:
        own = Settled(attempt.name, attempt.id, tool, attempt.params, None, attempt.call.place)
        undone, _ = await compensate(attempt, [own])
        if undone:
            _, left = await _undo_inner(attempt, deposited)
            raise Unsuccessful(ToolResult.error(f"{_undone(attempt)}{left}"))
    undone, left = await _undo_inner(attempt, deposited)
    said = f" These inner calls were undone: {', '.join(undone)}." if undone else ""
    raise OutcomeUnknown(attempt.name, f"{why}Find out what it changed before you do it again.{said}{left}")


def _restore_logs(attempt: Attempt, log: RunLog) -> None:
    """Restore what was logged by an interrupted call that is not entered again, and by inner calls that were cut off with it."""
    session, call = attempt.run.session, attempt.call.place
    log_again(attempt, _logged_since(log, call))
    for inner in dict.fromkeys(log.begun_inside(call)):
        for entry in _logged_since(log, inner):
            session.relog(decode_item(entry, session.id))


def _logged_since(log: RunLog, call: Place) -> Sequence[bytes]:
    """Return what the last attempt at a call had logged when it began. The session has what earlier attempts logged."""
    tried = log.find("call tried", call, Tried)
    begun = log.find("call begun", call.attempt(1 if tried is None else tried.number), Begun)
    return () if begun is None else begun.logged[0 if tried is None else len(tried.logged) :]


def _undone(attempt: Attempt) -> str:
    return (
        f"{attempt.name} was interrupted when the process ended, and anything it may have done was "
        f"undone. {CALL_AGAIN}"
    )


async def _withdraw(attempt: Attempt, log: RunLog) -> None:
    """Withdraw the questions that were asked by this call or about it."""
    await log.journal.questions.withdraw_all(attempt.call.place.prefix(log.run_id))


async def _undo_inner(attempt: Attempt, deposited: Mapping[str, bytes] = {}) -> tuple[Sequence[str], str]:
    """Compensate the recorded inner calls of an interrupted call that does not run again, last first.

    A call whose compensation has finished is not compensated again. Returns the calls that were undone, now or before, and
    what the model is told about the effects that remain, including those of work under tickets.
    """
    before, pending = _inner_effects(attempt)
    undone, left = await compensate(attempt, pending)
    told = _had_done([*left, *(each.what for each in _by_tickets(deposited))])
    return list(dict.fromkeys([*before, *undone])), told


def _inner_effects(attempt: Attempt) -> tuple[list[str], list[Settled]]:
    """Return the recorded effects of a call's inner calls: the names of those that were undone, and those that stand."""
    log = attempt.run.log
    undone: list[str] = []
    standing: dict[tuple[str, str], Settled] = {}
    for body in log.under(attempt.call.place):
        for each in settled_by(attempt, msgspec.msgpack.decode(body, type=InnerCall).settled):
            if each.tool and log.was_undone(each.place):
                undone.append(each.what)
            else:
                standing.setdefault((str(each.place), each.what), each)
    return undone, list(standing.values())


def _left_by(attempt: Attempt, deposited: Mapping[str, bytes]) -> str:
    """Return a sentence that names what remains of an interrupted call's inner calls and of work under its tickets.

    Returns "" if no external effect remains.
    """
    log = attempt.run.log
    records = [msgspec.msgpack.decode(body, type=InnerCall) for body in log.under(attempt.call.place)]
    effects = [each for record in records for each in record.settled] + _by_tickets(deposited)
    return _had_done(
        each.what for each in effects if not (each.tool and log.was_undone(Place.parse(each.place)))
    )


def _by_tickets(deposited: Mapping[str, bytes]) -> list[RecordedEffect]:
    """Return the external effects of work under tickets."""
    deposits = [msgspec.msgpack.decode(body, type=Deposit) for body in deposited.values() if body]
    return [each for deposit in deposits for each in deposit.inner.settled]


def _had_done(effects: Iterable[str]) -> str:
    """Return the sentence that names these effects, each once; "" if there are none."""
    done = list(dict.fromkeys(effects))
    return f" It had done: {', '.join(done)}." if done else ""
