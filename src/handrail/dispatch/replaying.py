"""Going through a run again: calls that are over are taken from the record, those under way follow their effect."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from handrail.dispatch.failures import Unsuccessful, WrongResult
from handrail.dispatch.secrets import GIVEN, enters_again, had_secret, has_secret, is_masked, mark
from handrail.dispatch.sharing import Spent, charge
from handrail.dispatch.transaction import Settled, Transaction, new_transaction
from handrail.dispatch.undoing import compensate
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
    from handrail.dispatch.call import LiveCall

logger = logging.getLogger("handrail.gate")

_PROBING = object()
_NOT_KEPT = "It was given a secret, and these are not kept, so it is not run again. "


class RecordedResult(ToolResult[Any], frozen=True):
    """A result that was recorded: what the model was told of it is kept as it was."""

    text: str = ""

    def render(self) -> str:
        return self.text or super().render()  # an act's, which nobody was told, may become the whole's


class WasDone(Exception):
    """The call happened before the process ended: this is what there is to say of it."""

    def __init__(self, result: ToolResult[Any]) -> None:
        self.result = result


class _Written(msgspec.Struct, frozen=True):
    """A result as it is recorded."""

    message: str
    value: msgspec.Raw
    success: bool
    excluded: bool
    text: str


class _Done(msgspec.Struct, frozen=True):
    """An effect of an inner call that a rollback of the outer one has to know of."""

    what: str
    call_id: str
    tool: str
    """The compensable tool; "" for what can't be undone."""
    params: bytes
    value: bytes
    place: str


class InnerCall(msgspec.Struct, frozen=True):
    """A call that finished inside one that is still open, and all it left there."""

    verb: str
    status: CallStatus
    result: bytes
    events: Sequence[bytes] = ()
    files: Sequence[Any] = ()
    settled: Sequence[_Done] = ()
    seconds: float = 0.0
    act: bool = False
    """Is it an act of a handoff? Its result is for the act after it, and for nobody to look at."""
    lost: bool = False
    """Was there a secret in what somebody answered? Then that is not here, and it is asked for again."""


class Deposit(Spent, frozen=True, kw_only=True):
    """What was done under a ticket, for the call that gave it out, and what that cost."""

    inner: InnerCall


def write_result(result: ToolResult[Any], text: str | None = None) -> bytes:
    """A result as it is recorded, with what the model is told of it."""
    value = msgspec.Raw(to_json(result.value))
    told = result.render() if text is None else text
    return msgspec.json.encode(
        _Written(result.message, value, result.success, result.exclude_value_from_context, told)
    )


def _is_lost(call: LiveCall, result: ToolResult[Any]) -> bool:
    """Is this an answer with a secret in it, which the record can't give back?"""
    return call.asks_only and result.success and has_secret(call.tool.result_schema, result.value)


def _write_act(call: LiveCall, result: ToolResult[Any]) -> bytes:
    """The result of an act, which no model is told, and which must come back exactly as it is."""
    if _is_lost(call, result) and call.tool.shown is not None:
        return write_result(call.tool.shown(result), "")
    written = write_result(result, "")
    if result.success and read_result(call.tool, written).value != result.value:
        raise WrongResult(
            "what it returned is not the same after being recorded, and this run is journaled: "
            "give plain data, and nothing that is masked"
        )
    return written


def read_result(tool: Tool[Any, Any], written: bytes) -> RecordedResult:
    """The result that was recorded, its value of the declared type again where it still fits it."""
    found = msgspec.json.decode(written, type=_Written)
    written = bytes(found.value)
    value = read_value(tool, written) if found.success else pydantic_core.from_json(written)
    return RecordedResult(found.message, value, found.success, found.excluded, found.text)


# --- calls that are over ---------------------------------------------------------------------------


async def from_the_record(call: LiveCall, arguments: Any) -> ToolResult[Any] | None:
    """What came of this call before, with all it left; None where it has to run."""
    log = call.frame.log
    if log is None or not log.resumed or call.undoing:
        return None
    _begin_where_it_was(call, log)
    if call.parent is None:
        unit = log.finished(call.place)
        if unit is None:
            return None
        await _bill_tickets(call, log)
        return _taken_up(call, unit)
    try:
        log.check_verb(call.place, verb_of(call, arguments))
        inner = log.find("inner call", call.place, InnerCall)
        if inner is None:
            return None
        if inner.lost and _is_asked_again(call, log):
            return None
        call.tool = call.frame.tools.get(call.name, call.tool)
        apply_inner(call, inner)
        await _bill_tickets(call, log)
    except Conflict as error:
        if call.given_secret:
            raise  # and what it was given is not there any more
        if EFFECTS[call.tool.effect].transactional:
            return None  # what it worked on has changed since, and it can simply run again
        raise OutcomeUnknown(f"{call.name} ({error})") from error
    except Diverged as error:
        raise OutcomeUnknown(f"{call.path[-2]} ({error})") from error
    _bill_nested(call)
    return end_as_recorded(call, inner.status, inner.result, inner.seconds)


def _is_asked_again(call: LiveCall, log: RunLog) -> bool:
    """A handoff was given a secret that is gone: is somebody asked for it again?

    Not where `after` is over, which then comes from the record and hears no mask. Where it had begun with the
    secret, and may have done something that stands, its outcome is unknown.
    """
    handoff = call.parent
    assert handoff is not None
    after = handoff.attempt_place.child(call.ordinal + 1)
    if log.has("inner call", after):
        return False
    tried = log.find("call tried", after, _Try)
    begun = log.has("call begun", after.attempt(1 if tried is None else tried.tries))
    if begun and not EFFECTS[handoff.tool.effect].transactional:
        raise OutcomeUnknown(handoff.name, f"{_NOT_KEPT}Find out what stands before you do it again.")
    return True


class _Spent(msgspec.Struct, frozen=True):
    """What is billed of an answer of the model that was recorded."""

    usage: Usage | None
    cost: Decimal | None = None


def _bill_nested(call: LiveCall, before: int | None = None) -> None:
    """What the model said in runs nested in this call counts, although they are not gone through again."""
    frame = call.frame
    assert frame.log is not None
    for body in frame.log.answers_under(call.place, before):
        spent = msgspec.msgpack.decode(body, type=_Spent)
        frame.spending.add(spent.usage or Usage(), spent.cost)
        if frame.budget is not None:
            told = {} if spent.usage is None else {"tokens": spent.usage.tokens, "money": spent.cost}
            frame.budget.reserve().settle(requests=1, **told)


async def _bill_tickets(call: LiveCall, log: RunLog) -> dict[str, bytes]:
    """What was spent under the tickets of a call that is over counts. Returns what was deposited."""
    places = log.tickets_under(call.place)
    found = dict(await log.journal.tickets.close(log.run_id, places)) if places else {}
    for body in found.values():
        if body:
            charge(call.frame, msgspec.msgpack.decode(body, type=Spent))
    return found


def _taken_up(call: LiveCall, unit: CommitUnit) -> ToolResult[Any]:
    frame = call.frame
    call.tool = frame.tools.get(call.name, call.tool)
    if unit.charged and frame.budget is not None:
        frame.budget.reserve().settle(tool_calls=1)
    _bill_nested(call)
    return end_as_recorded(call, unit.status, unit.result, unit.seconds)


def end_as_recorded(call: LiveCall, status: Any, written: bytes, seconds: float) -> ToolResult[Any]:
    """Give the call the end it had. Whoever listens has heard of it, then or where it ran; it is only kept."""
    result = read_result(call.tool, written)
    call.status, call.result = status, result
    call.close()
    frame = call.frame
    frame.session.keep(
        ToolInvoked(
            call.id, call.name, call.path, status, result, None, seconds, 1, (), None, frame.run_context
        )
    )
    return result


def apply_inner(call: LiveCall, inner: InnerCall) -> None:
    """Bring what an inner call did into the call around it again, or from where it was done."""
    transaction = call.transaction = new_transaction(call, call.tool)
    transaction.writable = True
    for event in inner.events:
        transaction.session.dispatch(decode_item(event, call.frame.session.id))
    files = call.frame.filesystem
    if inner.files and files is not None:
        transaction.fork_of(files).redo(inner.files)
    for done in settled_by(call, inner):
        transaction.settle(done)
    transaction.prepare()
    transaction.apply()
    if transaction.parent is not None:
        transaction.parent.inherit(transaction)


def settled_by(call: LiveCall, inner: InnerCall) -> list[Settled]:
    """What an inner call did to the world, to be undone or named should the one around it fail."""
    found: list[Settled] = []
    for done in inner.settled:
        tool = call.frame.tools.get(done.tool) if done.tool else None
        if tool is not None and tool.secret and had_secret(tool, done.params):
            tool = None  # what it takes to undo it was not kept
        params = tool.parse(done.params) if tool is not None else None
        value = read_value(tool, done.value) if tool is not None else None
        found.append(Settled(done.what, done.call_id, tool, params, value, Place.parse(done.place)))
    return found


def read_value(tool: Tool[Any, Any], written: bytes) -> Any:
    """A value of the declared type; plain data where none was declared, or the type has changed since."""
    schema = tool.result_schema
    try:
        return pydantic_core.from_json(written) if schema is None else schema.parse(written)
    except ToolValidationError:
        return pydantic_core.from_json(written)


# --- what is recorded of inner calls ----------------------------------------------------------------


def verb_of(call: LiveCall, arguments: Any) -> str:
    """What an inner call is told by, when the handler around it is entered again.

    Secrets are masked first: a digest of a password can be guessed, and what a model wrote comes masked
    from the record.
    """
    tool = call.tool if call.act else call.frame.tools.get(call.name, call.tool)
    if tool.secret:
        arguments = tool.mask(arguments)
    elif not isinstance(arguments, str | bytes):
        arguments = to_json(arguments)
    text = arguments if isinstance(arguments, bytes) else arguments.encode("utf-8", "surrogatepass")
    return f"call {call.name} {hashlib.sha256(text).hexdigest()[:16]}"


def inner_call(call: LiveCall, result: ToolResult[Any]) -> InnerCall:
    """What is recorded of an inner call, taken before its forks are merged."""
    own = call.own_effect(result)
    return record_of(
        call, result, call.transaction if result.success else None, () if own is None else (own,)
    )


def record_of(
    call: LiveCall,
    result: ToolResult[Any],
    transaction: Transaction | None,
    also: Sequence[Settled] = (),
    status: CallStatus | None = None,
) -> InnerCall:
    """A call with what stands in a transaction as what it did; and what it has done to the world besides."""
    files: list[Any] = []
    events: list[bytes] = []
    settled: list[Settled] = []
    if transaction is not None:
        for fork in transaction.touched:
            files += fork.file_changes()
        events = [encode_item(event, call.frame.session.id) for event in transaction.events]
        settled = [*(transaction.settled or ())]
    return InnerCall(
        verb_of(call, call.arguments),
        status or call.status,
        _write_act(call, result) if call.act else write_result(result),
        events,
        files,
        [_written(done) for done in (*settled, *also)],
        call.elapsed,
        call.act,
        _is_lost(call, result),
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


# --- calls that were under way -----------------------------------------------------------------------


async def mark_begun(call: LiveCall) -> None:
    """Before the handler of a call that may not be run twice: it has begun."""
    if call.frame.log is not None and not enters_again(call):
        await mark(call, call.name)


async def decide_interrupted(call: LiveCall, arguments: Any) -> None:
    """A call that had begun when the process ended, and may not run again: find what there is to say.

    Returns where it can run after all. `WasDone` and `Unsuccessful` carry its result. One that was given a
    secret may not: what a model wrote comes masked from the record, and parsing refuses that; what somebody
    answered it would have to ask for again, after it may have done something with the first.
    """
    log, tool = call.frame.log, call.tool
    if log is None or not log.resumed:
        return
    begun = log.find("call begun", call.attempt_place, str)
    if tool.enters_again and not tool.secret and begun != GIVEN:
        return
    secret = tool.secret and had_secret(tool, arguments)
    if tool.enters_again and not secret and begun != GIVEN:
        return
    lost = secret and is_masked(arguments)
    if begun is None:
        if lost:
            await _withdraw(call, log)
        return
    call.params = None if lost else tool.parse(arguments)
    happened = None if lost or tool.probe is None else await _probe(call, tool.probe)
    if happened is False:
        return  # it never was, so there is nothing to repeat
    _bill_nested(call)
    if happened:
        raise WasDone(
            ToolResult.ok(
                None,
                f"{call.name} was done before the process ended; what it returned was not recorded.",
            )
        )
    left = _left_by(call, await _bill_tickets(call, log))
    await _withdraw(call, log)
    why = _NOT_KEPT if secret or begun == GIVEN else ""
    if EFFECTS[tool.effect].transactional:
        mend = (
            "with the secret, if it is still wanted" if secret else "if it is still wanted, and it asks again"
        )
        raise Unsuccessful(
            ToolResult.error(
                f"{call.name} was interrupted when the process ended, and nothing of it stands. {why}"
                f"Call it again, {mend}.{left}"
            )
        )
    if tool.effect == "compensable" and not lost:
        own = Settled(call.name, call.id, tool, call.params, None, call.place)
        undone, _ = await compensate(call.gate, call, [own])
        if undone:
            raise Unsuccessful(
                ToolResult.error(
                    f"{call.name} was interrupted when the process ended, and what it may have done was "
                    f"undone. Call it again if it is still wanted.{left}"
                )
            )
    raise OutcomeUnknown(call.name, f"{why}Find out what stands before you do it again.{left}")


async def _withdraw(call: LiveCall, log: RunLog) -> None:
    """Nobody waits for an answer to what this call asked, or was asked about it, any more."""
    await log.journal.withdraw(call.place.prefix(log.run_id))


def _left_by(call: LiveCall, deposited: Mapping[str, bytes]) -> str:
    """What inner calls of an interrupted call had done to the world, and others under its tickets."""
    log = call.frame.log
    assert log is not None
    inner = [msgspec.msgpack.decode(body, type=InnerCall) for body in log.under(call.place)]
    inner += [msgspec.msgpack.decode(body, type=Deposit).inner for body in deposited.values() if body]
    done = list(dict.fromkeys(each.what for record in inner for each in record.settled))
    return f" It had done: {', '.join(done)}." if done else ""


async def _probe(call: LiveCall, probe: Any) -> bool | None:
    """Ask the tool whether the call happened; one that raises does not know."""
    probing = call.again()
    probing.params, probing.token = call.params, _PROBING
    probing.transaction = transaction = new_transaction(probing, call.tool)
    context = call.tool.context_type(probing)
    try:
        return await call_either(probe, call.params, context=context)
    except Exception:
        logger.exception("the probe of %s raised, so it is not known whether it happened", call.name)
        return None
    finally:
        probing.close()
        transaction.drop()


class _Try(msgspec.Struct, frozen=True):
    tries: int
    attempt: int
    left: tuple[str, ...]


async def note_try(call: LiveCall) -> None:
    """A call is tried again: what its first try left under its place does not count any more."""
    log = call.frame.log
    if log is not None:
        await log.note("call tried", call.place, _Try(call.tries, call.attempt, call.left))


def _begin_where_it_was(call: LiveCall, log: RunLog) -> None:
    """A call that had been tried more than once goes on with its last try."""
    if call.tries == 1:
        found = log.find("call tried", call.place, _Try)
        if found is not None:
            call.tries, call.attempt, call.left = found.tries, found.attempt, found.left
            if log.finished(call.place) is None and log.find("inner call", call.place, InnerCall) is None:
                _bill_nested(call, before=call.tries)
