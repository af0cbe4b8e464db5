"""Interrupted calls: decides what happens to a call whose process ended while it ran, depending on its effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from handrail.dispatch.call_log import CallLog, log_again
from handrail.dispatch.effects import compensate, probe
from handrail.dispatch.failures import Unsuccessful
from handrail.dispatch.transaction import Settled, new_transaction
from handrail.errors import OutcomeUnknown
from handrail.place import Place
from handrail.replay.finished_calls import CALL_AGAIN, bill_nested, bill_tickets, settled_by
from handrail.replay.log import RunLog
from handrail.replay.marks import GIVEN_SECRET, NOT_KEPT, Begun, Tried, had_secret, is_masked
from handrail.replay.records import Deposit, InnerCall, RecordedEffect
from handrail.session.serialization import decode_item
from handrail.tools import EFFECTS, ToolResult

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt


def resume_attempt(attempt: Attempt) -> tuple[str, ...]:
    """Continue the count of the call's attempts, and note whether the call was charged before the process ended.

    Unless the call is over, the recorded model answers of its earlier attempts are charged. Returns the lasting effects of
    these attempts.
    """
    log = attempt.frame.log
    if attempt.kind.undoes or attempt.number > 1:
        return ()
    place = attempt.call.place
    attempt.charged = log.was_charged(place)
    found = log.find("call tried", place, Tried)
    if found is None:
        return ()
    attempt.number, attempt.retries = found.number, found.retries
    if found.logged:  # the session's logs have it; the call's record must have it too
        attempt.logged = CallLog(found.logged)
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
    log, tool, arguments = attempt.frame.log, attempt.tool, attempt.arguments
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
    session, call = attempt.frame.session, attempt.call.place
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
    log = attempt.frame.log
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
    log = attempt.frame.log
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
