"""Replay: finished calls come from the record, and interrupted ones follow their effect."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from handrail.dispatch.compensations import compensate
from handrail.dispatch.failures import Unsuccessful, WrongResult
from handrail.dispatch.secrets import GIVEN, enters_again, had_secret, has_secret, is_masked, mark
from handrail.dispatch.tickets import Spent, charge
from handrail.dispatch.transaction import Settled, Transaction, new_transaction
from handrail.errors import Conflict, Diverged, OutcomeUnknown, ToolValidationError
from handrail.events import CallStatus, ToolInvoked
from handrail.journal.runlog import RunLog
from handrail.messages import Usage
from handrail.place import Place
from handrail.records import CommitUnit
from handrail.schema import to_json
from handrail.session.serialization import decode_item, encode_item
from handrail.threads import call_either
from handrail.tools import EFFECTS, Tool, ToolResult

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt

logger = logging.getLogger("handrail.gate")

_PROBING = object()
_NOT_KEPT = "It was given a secret, and these are not kept, so it is not run again. "


class RecordedResult(ToolResult[Any], frozen=True):
    """A recorded result, which keeps what the model was told."""

    text: str = ""

    def render(self) -> str:
        return self.text or super().render()  # a part's result, which nobody was told, may become the whole's


class WasDone(Exception):
    """The call happened before the process ended: this is its result."""

    def __init__(self, result: ToolResult[Any]) -> None:
        self.result = result


class _Written(msgspec.Struct, frozen=True):
    """A result in its recorded form."""

    message: str
    value: msgspec.Raw
    success: bool
    excluded: bool
    text: str


class _Done(msgspec.Struct, frozen=True):
    """An effect of an inner call that a rollback of the outer one must know of."""

    what: str
    call_id: str
    tool: str
    """The compensable tool; "" for what can't be undone."""
    params: bytes
    value: bytes
    place: str


class InnerCall(msgspec.Struct, frozen=True):
    """A call that finished inside one that is still open, and everything it left there."""

    verb: str
    status: CallStatus
    result: bytes
    events: Sequence[bytes] = ()
    files: Sequence[Any] = ()
    settled: Sequence[_Done] = ()
    seconds: float = 0.0
    act: bool = False
    """Whether it is an act of a handoff: its result is for the next act only."""
    lost: bool = False
    """Whether an answer contained a secret: it is not recorded, and is asked for again."""


class Deposit(Spent, frozen=True, kw_only=True):
    """What was done under a ticket for the issuing call, and what it cost."""

    inner: InnerCall


def write_result(result: ToolResult[Any], text: str | None = None) -> bytes:
    """Encode a result, with what the model is told of it."""
    value = msgspec.Raw(to_json(result.value))
    told = result.render() if text is None else text
    return msgspec.json.encode(
        _Written(result.message, value, result.success, result.exclude_value_from_context, told)
    )


def _is_lost(attempt: Attempt, result: ToolResult[Any]) -> bool:
    """Whether this is an answer with a secret, which the record can't give back."""
    return attempt.kind.only_asks and result.success and has_secret(attempt.tool.result_schema, result.value)


def _write_act(attempt: Attempt, result: ToolResult[Any]) -> bytes:
    """Encode the result of an act, which no model sees and which must come back exactly."""
    if _is_lost(attempt, result) and attempt.tool.shown is not None:
        return write_result(attempt.tool.shown(result), "")
    written = write_result(result, "")
    if result.success and read_result(attempt.tool, written).value != result.value:
        raise WrongResult(
            "what it returned is not the same after being recorded, and this run is journaled: "
            "give plain data, and nothing that is masked"
        )
    return written


def read_result(tool: Tool[Any, Any], written: bytes) -> RecordedResult:
    """Decode a recorded result; its value has the declared type if it still fits."""
    found = msgspec.json.decode(written, type=_Written)
    written = bytes(found.value)
    value = read_value(tool, written) if found.success else pydantic_core.from_json(written)
    return RecordedResult(found.message, value, found.success, found.excluded, found.text)


# --- finished calls ---------------------------------------------------------------------------------


async def from_the_record(attempt: Attempt) -> ToolResult[Any] | None:
    """Return the recorded outcome of this call, with everything it left; None if it has to run."""
    log = attempt.frame.log
    if attempt.kind.undoes:
        return None
    if attempt.parent is None:
        unit = log.finished(attempt.call.place)
        if unit is None:
            return None
        await _bill_tickets(attempt, log)
        return _taken_up(attempt, unit)
    try:
        log.check_verb(attempt.call.place, verb_of(attempt))
        inner = log.find("inner call", attempt.call.place, InnerCall)
        if inner is None:
            return None
        if inner.lost and _is_asked_again(attempt, log):
            return None
        attempt.call.resolve(attempt.frame.tools.get(attempt.name, attempt.tool))
        apply_inner(attempt, inner)
        await _bill_tickets(attempt, log)
    except Conflict as error:
        if attempt.has_secret:
            raise  # and its secret is no longer available
        if EFFECTS[attempt.tool.effect].transactional:
            return None  # what it worked on has changed since, and it can simply run again
        raise OutcomeUnknown(f"{attempt.name} ({error})") from error
    except Diverged as error:
        raise OutcomeUnknown(f"{attempt.path[-2]} ({error})") from error
    _bill_nested(attempt)
    return end_as_recorded(attempt, inner.status, inner.result, inner.seconds)


def _is_asked_again(attempt: Attempt, log: RunLog) -> bool:
    """Whether a handoff asks again for a secret that is gone.

    Not if `after` has finished: it comes from the record. If `after` had begun with the secret and may
    have done something that stands, the outcome is unknown.
    """
    handoff = attempt.parent
    assert handoff is not None
    after = handoff.place.child(attempt.call.number + 1)
    if log.has("inner call", after):
        return False
    tried = log.find("call tried", after, _Begun)
    begun = log.has("call begun", after.attempt(1 if tried is None else tried.number))
    if begun and not EFFECTS[handoff.tool.effect].transactional:
        raise OutcomeUnknown(handoff.name, f"{_NOT_KEPT}Find out what stands before you do it again.")
    return True


class _Spent(msgspec.Struct, frozen=True):
    """What a recorded model answer is charged."""

    usage: Usage | None
    cost: Decimal | None = None


def _bill_nested(attempt: Attempt, before: int | None = None) -> None:
    """Charge the model answers of runs nested in this call, although they are not replayed."""
    frame = attempt.frame
    for body in frame.log.answers_under(attempt.call.place, before):
        spent = msgspec.msgpack.decode(body, type=_Spent)
        frame.spending.add(spent.usage or Usage(), spent.cost)
        if frame.budget is not None:
            told = {} if spent.usage is None else {"tokens": spent.usage.tokens, "money": spent.cost}
            frame.budget.reserve().settle(requests=1, **told)


async def _bill_tickets(attempt: Attempt, log: RunLog) -> dict[str, bytes]:
    """Charge what was spent under the tickets of a finished call. Returns the deposits."""
    places = log.tickets_under(attempt.call.place)
    found = dict(await log.journal.tickets.close(log.run_id, places)) if places else {}
    for body in found.values():
        if body:
            charge(attempt.frame, msgspec.msgpack.decode(body, type=Spent))
    return found


def _taken_up(attempt: Attempt, unit: CommitUnit) -> ToolResult[Any]:
    frame = attempt.frame
    attempt.call.resolve(frame.tools.get(attempt.name, attempt.tool))
    if unit.charged and frame.budget is not None:
        frame.budget.reserve().settle(tool_calls=1)
    _bill_nested(attempt)
    return end_as_recorded(attempt, unit.status, unit.result, unit.seconds)


def end_as_recorded(attempt: Attempt, status: Any, written: bytes, seconds: float) -> ToolResult[Any]:
    """Give the call its recorded end. Listeners have heard of it before, so it is only kept."""
    result = read_result(attempt.tool, written)
    attempt.close()
    frame = attempt.frame
    frame.session.keep(
        ToolInvoked(
            attempt.id,
            attempt.name,
            attempt.path,
            status,
            result,
            None,
            seconds,
            1,
            (),
            None,
            frame.run_context,
        )
    )
    return result


def apply_inner(attempt: Attempt, inner: InnerCall) -> None:
    """Apply what an inner call did to the call around it, from the record or a deposit."""
    transaction = attempt.transaction = new_transaction(attempt, attempt.tool)
    transaction.writable = True
    for event in inner.events:
        transaction.session.dispatch(decode_item(event, attempt.frame.session.id))
    files = attempt.frame.filesystem
    if inner.files and files is not None:
        transaction.fork_of(files).redo(inner.files)
    for done in settled_by(attempt, inner):
        transaction.settle(done)
    transaction.prepare()
    transaction.apply()
    if transaction.parent is not None:
        transaction.parent.inherit(transaction)


def settled_by(attempt: Attempt, inner: InnerCall) -> list[Settled]:
    """What an inner call did to the world, to be undone or named if the outer call fails."""
    found: list[Settled] = []
    for done in inner.settled:
        tool = attempt.frame.tools.get(done.tool) if done.tool else None
        if tool is not None and tool.secret and had_secret(tool, done.params):
            tool = None  # what is needed to undo it was not recorded
        params = tool.parse(done.params) if tool is not None else None
        value = read_value(tool, done.value) if tool is not None else None
        found.append(Settled(done.what, done.call_id, tool, params, value, Place.parse(done.place)))
    return found


def read_value(tool: Tool[Any, Any], written: bytes) -> Any:
    """Convert a value to the declared type; plain data if there is none, or the type has changed."""
    schema = tool.result_schema
    try:
        return pydantic_core.from_json(written) if schema is None else schema.parse(written)
    except ToolValidationError:
        return pydantic_core.from_json(written)


# --- inner calls --------------------------------------------------------------------------------------


def verb_of(attempt: Attempt) -> str:
    """Return the fingerprint of an inner call, for when the handler around it is re-entered.

    Secrets are masked first: a digest of a password can be guessed, and a model's text comes masked
    from the record.
    """
    tool = attempt.tool if attempt.kind.is_part else attempt.frame.tools.get(attempt.name, attempt.tool)
    arguments: Any = attempt.arguments
    if tool.secret:
        arguments = tool.mask(arguments)
    elif not isinstance(arguments, str | bytes):
        arguments = to_json(arguments)
    text = arguments if isinstance(arguments, bytes) else arguments.encode("utf-8", "surrogatepass")
    return f"call {attempt.name} {hashlib.sha256(text).hexdigest()[:16]}"


def inner_call(attempt: Attempt, result: ToolResult[Any], status: CallStatus = "ok") -> InnerCall:
    """Return the record of an inner call, taken before its forks are merged."""
    own = attempt.own_effect(result)
    transaction = attempt.transaction if result.success else None
    return record_of(attempt, result, transaction, status, () if own is None else (own,))


def record_of(
    attempt: Attempt,
    result: ToolResult[Any],
    transaction: Transaction | None,
    status: CallStatus,
    also: Sequence[Settled] = (),
) -> InnerCall:
    """Encode what a transaction contains as the work of a call, with its effects on the world."""
    files: list[Any] = []
    events: list[bytes] = []
    settled: list[Settled] = []
    if transaction is not None:
        for fork in transaction.touched:
            files += fork.file_changes()
        events = [encode_item(event, attempt.frame.session.id) for event in transaction.events]
        settled = [*(transaction.settled or ())]
    return InnerCall(
        verb_of(attempt),
        status,
        _write_act(attempt, result) if attempt.kind.is_part else write_result(result),
        events,
        files,
        [_written(done) for done in (*settled, *also)],
        attempt.elapsed,
        attempt.kind.is_part,
        _is_lost(attempt, result),
    )


def _written(done: Settled) -> _Done:
    tool = done.tool
    return _Done(
        done.what,
        done.call_id,
        "" if tool is None else tool.name,
        b"{}" if tool is None else tool.dump(done.params),
        b"null" if tool is None else to_json(done.value),
        str(done.place),
    )


# --- interrupted calls ---------------------------------------------------------------------------------


async def mark_begun(attempt: Attempt) -> None:
    """Record that the handler of a call that must not run twice has begun."""
    if not enters_again(attempt):
        await mark(attempt, attempt.name)


async def decide_interrupted(attempt: Attempt) -> None:
    """Decide about a call that had begun when the process ended and must not run again.

    Returns if it can run after all. `WasDone` and `Unsuccessful` carry its result. A call with a secret
    can't run again: a model's text comes masked from the record, which parsing refuses, and a person's
    answer would have to be asked for again after the call may have used the first.
    """
    log, tool, arguments = attempt.frame.log, attempt.tool, attempt.arguments
    begun = log.find("call begun", attempt.place, str)
    if tool.enters_again and not tool.secret and begun != GIVEN:
        return
    secret = tool.secret and had_secret(tool, arguments)
    if tool.enters_again and not secret and begun != GIVEN:
        return
    lost = secret and is_masked(arguments)
    if begun is None:
        if lost:
            await _withdraw(attempt, log)
        return
    attempt.params = None if lost else tool.parse(arguments)
    happened = None if lost or tool.probe is None else await _probe(attempt, tool.probe)
    if happened is False:
        return  # it never began, so there is nothing to repeat
    _bill_nested(attempt)
    if happened:
        raise WasDone(
            ToolResult.ok(
                None,
                f"{attempt.name} was done before the process ended; what it returned was not recorded.",
            )
        )
    left = _left_by(attempt, await _bill_tickets(attempt, log))
    await _withdraw(attempt, log)
    why = _NOT_KEPT if secret or begun == GIVEN else ""
    if EFFECTS[tool.effect].transactional:
        hint = (
            "with the secret, if it is still wanted" if secret else "if it is still wanted, and it asks again"
        )
        raise Unsuccessful(
            ToolResult.error(
                f"{attempt.name} was interrupted when the process ended, and nothing of it stands. {why}"
                f"Call it again, {hint}.{left}"
            )
        )
    if tool.effect == "compensable" and not lost:
        own = Settled(attempt.name, attempt.id, tool, attempt.params, None, attempt.call.place)
        undone, _ = await compensate(attempt.gate, attempt, [own])
        if undone:
            raise Unsuccessful(
                ToolResult.error(
                    f"{attempt.name} was interrupted when the process ended, and what it may have done was "
                    f"undone. Call it again if it is still wanted.{left}"
                )
            )
    raise OutcomeUnknown(attempt.name, f"{why}Find out what stands before you do it again.{left}")


async def _withdraw(attempt: Attempt, log: RunLog) -> None:
    """Withdraw the questions of this call and the questions about it."""
    await log.journal.questions.withdraw_all(attempt.call.place.prefix(log.run_id))


def _left_by(attempt: Attempt, deposited: Mapping[str, bytes]) -> str:
    """Return what inner calls of an interrupted call, and others under its tickets, did to the world."""
    log = attempt.frame.log
    inner = [msgspec.msgpack.decode(body, type=InnerCall) for body in log.under(attempt.call.place)]
    inner += [msgspec.msgpack.decode(body, type=Deposit).inner for body in deposited.values() if body]
    done = list(dict.fromkeys(each.what for record in inner for each in record.settled))
    return f" It had done: {', '.join(done)}." if done else ""


async def _probe(attempt: Attempt, probe: Any) -> bool | None:
    """Ask the tool's probe whether the call happened. A probe that raises does not know."""
    probing = attempt.next()
    probing.params, probing.token = attempt.params, _PROBING
    probing.transaction = transaction = new_transaction(probing, attempt.tool)
    context = attempt.tool.context_type(probing)
    try:
        return await call_either(probe, attempt.params, context=context)
    except Exception:
        logger.exception("the probe of %s raised, so it is not known whether it happened", attempt.name)
        return None
    finally:
        probing.close()
        transaction.drop()


class _Begun(msgspec.Struct, frozen=True):
    """An attempt after the first, as recorded when it begins."""

    number: int
    retries: int
    left: tuple[str, ...]


async def note_attempt(attempt: Attempt, left: tuple[str, ...]) -> None:
    """Record another attempt: what earlier attempts recorded no longer counts."""
    begun = _Begun(attempt.number, attempt.retries, left)
    await attempt.frame.log.note("call tried", attempt.call.place, begun)


def resume_attempt(attempt: Attempt) -> tuple[str, ...]:
    """Turn the first attempt at a call into the interrupted one. Returns what earlier ones left."""
    log = attempt.frame.log
    if attempt.kind.undoes or attempt.number > 1:
        return ()
    place = attempt.call.place
    found = log.find("call tried", place, _Begun)
    if found is None:
        return ()
    attempt.number, attempt.retries = found.number, found.retries
    if not log.is_over(place):
        _bill_nested(attempt, before=attempt.number)
    return found.left
