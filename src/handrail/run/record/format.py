"""Records: the form in which a journal stores results, inner calls and deposits."""

from __future__ import annotations

import hashlib
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from handrail.content import Attachment
from handrail.context import RunContext
from handrail.errors import RunBusy, ToolValidationError
from handrail.events import CallStatus, SecretGiven, ToolInvoked
from handrail.journal.records import CommitUnit, SpawnedRun, WorkspaceDelta
from handrail.messages import Usage
from handrail.resources.paths import folder_id_of, folder_of
from handrail.run.call_log import logged_by
from handrail.run.failures import WrongResult
from handrail.run.transaction import Settled, Transaction
from handrail.schema import Schema, to_json
from handrail.schema import secrets as schema_secrets
from handrail.schema.secrets import MASK
from handrail.session.serialization import encode_item
from handrail.tools import EFFECTS, Tool, ToolResult
from handrail.tools.result import Whole, clean_text, json_of, rendering_of, whole_of, with_excerpt

if TYPE_CHECKING:
    from handrail.run.call import Attempt


GIVEN_SECRET = "given a secret"
"""The mark of a call that was given a secret in an answer. Other calls are marked with their names."""

NOT_KEPT = "It was given a secret. Secrets are not recorded, so it is not run again. "
"""Tells the model why a call that was given a secret does not run again."""


class Tried(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of an attempt after the first, written when the attempt begins."""

    number: int
    retries: int
    left: tuple[str, ...]
    charged: bool = False
    """Whether the budget was charged for the call."""
    logged: Sequence[bytes] = ()
    """What the earlier attempts have logged."""


class Begun(msgspec.Struct, frozen=True, omit_defaults=True):
    """The mark of a call that has begun."""

    what: str
    """The name of the call, or `GIVEN_SECRET`."""
    charged: bool = False
    """Whether the budget was charged for the call."""
    logged: Sequence[bytes] = ()
    """What the call and its policies have logged. It counts if the call is cut off and not entered again."""


class Advice(msgspec.Struct, frozen=True):
    """The record of a round of advice, with the number of times that each adviser had spoken by then."""

    said: list[str]
    given: list[int]
    after: int
    """The number of the model's answer that the advice follows."""


async def note_attempt(attempt: Attempt, left: tuple[str, ...]) -> None:
    """Record that another attempt begins, so that the records of earlier attempts no longer count."""
    tried = Tried(attempt.number, attempt.passage.retries, left, attempt.passage.charged, logged_by(attempt))
    await attempt.run.log.note("call tried", attempt.call.place, tried)


async def mark_begun(attempt: Attempt) -> None:
    """Record that the handler of a call is about to begin, if a resumed run has to know that.

    A call that must not run twice is marked. An inner call of such a call is marked if it was charged or has logged
    something, such as a count of a rate limit: after a crash, the outer call does not make the inner call again, so
    both would otherwise be forgotten. A compensation is marked
    although it may run twice, so that a resumed run does not replay the call that was being undone.
    """
    if attempt.call.place.kind == "compensation" or not can_reenter(attempt) or _is_not_repeated(attempt):
        await _mark(attempt, attempt.name)


def _is_not_repeated(attempt: Attempt) -> bool:
    """Return whether the call was charged, or has logged something, inside a call that must not run twice."""
    counts = attempt.passage.charged or attempt.passage.logged is not None
    return counts and any(not can_reenter(each) for each in attempt.with_outer())


async def mark_given(attempt: Attempt, schema: Schema[Any], answer: Any) -> None:
    """Mark a handler that is about to receive a secret in an answer, so that a resumed run does not run it again.

    The record has a mask in place of the secret, so the handler could not go the same way.
    An act that only asks is not marked, because its question is asked again.
    """
    attempt.passage.has_secret = True
    if attempt.run.told.get(SecretGiven, True):
        attempt.run.publish(SecretGiven(attempt.id, answer, schema.hide(answer), attempt.run_context))
    if not attempt.kind.only_asks:
        await _mark(attempt, GIVEN_SECRET)


async def _mark(attempt: Attempt, what: str) -> None:
    """Record the mark durably. Does nothing without a journal.

    If the log is closed, raises `CancelledError` in a cancelled run, and `RunBusy` otherwise.
    """
    log = attempt.run.log
    if log.is_kept:
        if log.closed:  # nothing can be marked any more, so a call that must be marked must not continue
            raise (
                CancelledError if attempt.run.cancellation.cancelled else RunBusy(log.run_id, "another one")
            )
        await log.note("call begun", attempt.place, Begun(what, attempt.passage.charged, logged_by(attempt)))


def can_reenter(attempt: Attempt) -> bool:
    """Return whether an interrupted handler may be run again from the start.

    It may not if its tool does not allow that, or if it was given a secret, which is not recorded and so can't be given
    again. Before it begins, a handler gets secrets only as arguments; the exception is an act of a handoff, which may get one
    in an answer. That answer is requested again if the act can be undone completely.
    """
    tool = attempt.tool
    if attempt.passage.has_secret and not EFFECTS[tool.effect].transactional:
        return False
    return tool.enters_again and not (tool.secret and had_secret(tool, attempt.arguments))


# --- secrets ------------------------------------------------------------------------------------------


def had_secret(tool: Tool[Any, Any], arguments: Any) -> bool:
    """Return whether these arguments contain a secret, or a mask in place of one."""
    return MASK in tool.mask(arguments)


def is_masked(arguments: Any) -> bool:
    """Return whether these arguments are JSON text with a mask in place of a secret, as a record has it."""
    if not isinstance(arguments, str | bytes):
        return False
    try:
        return schema_secrets.is_masked(pydantic_core.from_json(arguments))
    except ValueError:
        return False


def has_secret(schema: Schema[Any] | None, value: object) -> bool:
    """Return whether this value contains a secret."""
    return schema is not None and schema.secret and schema_secrets.is_masked(schema.hide(value))


def was_given_secret(attempt: Attempt) -> bool:
    """Return whether the attempt was given a secret, as an argument or later."""
    return attempt.passage.has_secret or (attempt.tool.secret and had_secret(attempt.tool, attempt.arguments))


NO_USAGE = Usage()

LONGEST_DIFF = 64 * 1024
"""Maximum length of a recorded diff, in characters. A longer diff is cut; the files themselves are not."""


# --- results ------------------------------------------------------------------------------------------


class RecordedResult(ToolResult[Any], frozen=True):
    """A result read from the record, with the text that the model was shown."""

    text: str = ""

    def render(self) -> str:
        # An act's result is recorded without text, and may become the result of its handoff.
        return self.text or super().render()


class _Written(msgspec.Struct, frozen=True, omit_defaults=True):
    """A result in its recorded form."""

    message: str
    value: msgspec.Raw
    success: bool
    excluded: bool
    text: str
    attachments: tuple[Attachment, ...] = ()
    """References to the attachments, whose bytes are blobs of the journal."""
    number: str = ""
    """The value as text, if it has a number that JSON does not have, such as NaN. `value` is then null."""
    whole: Whole | None = None
    """Where the whole text is, if `text` is an excerpt."""

    @property
    def json(self) -> bytes:
        """The value as JSON, in which numbers can be NaN or infinite."""
        return self.number.encode() or bytes(self.value)


_encode = msgspec.json.Encoder().encode


def write_result(result: ToolResult[Any], text: str | None = None) -> bytes:
    """Encode a result, with `text` or, if that is None, the text that the model is shown.

    Raises `WrongResult` if the value can't be recorded.
    """
    try:
        shown, json = rendering_of(result) if text is None else (text, json_of(result))
    except ToolValidationError as error:
        raise WrongResult(
            f"its return value {error}, and this run has a journal: return plain data"
        ) from None
    message, excluded = clean_text(result.message), bool(result.exclude_value_from_context)
    number = "" if _is_strict(json) else json.decode()
    value, success = msgspec.Raw(b"null" if number else json), bool(result.success)
    whole = whole_of(result)
    return _encode(_Written(message, value, success, excluded, shown, result.attachments, number, whole))


def _is_strict(json: bytes) -> bool:
    """Return whether JSON text has no NaN and no infinity."""
    if b"NaN" not in json and b"Infinity" not in json:
        return True
    try:
        msgspec.json.decode(json)
    except msgspec.DecodeError:
        return False
    return True


def read_result(tool: Tool[Any, Any] | None, written: bytes, *, has_value: bool = True) -> RecordedResult:
    """Decode a recorded result. The value of a success has the declared type if it still matches that type.

    Without a tool, the value is plain data; without `has_value`, it is left out.
    """
    found = msgspec.json.decode(written, type=_Written)
    if tool is not None and found.success:
        value = read_value(tool, found.json)
    else:
        value = pydantic_core.from_json(found.json) if has_value else None
    result = RecordedResult(
        found.message, value, found.success, found.excluded, found.attachments, text=found.text
    )
    return result if found.whole is None else with_excerpt(result, found.text, found.whole)


def text_of(result: bytes) -> str:
    """Return the text that the model was given, taken from a recorded result; "" if there is none."""
    found: Any = pydantic_core.from_json(result) if result else {}
    return str(found.get("text", "")) if isinstance(found, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # plain JSON


class _Attached(msgspec.Struct, frozen=True):
    attachments: tuple[Attachment, ...] = ()


def attachments_in(result: bytes) -> tuple[Attachment, ...]:
    """Return references to the attachments of a recorded result."""
    return msgspec.json.decode(result, type=_Attached).attachments if result.startswith(b"{") else ()


def read_value(tool: Tool[Any, Any], written: bytes) -> Any:
    """Decode a value as the declared type, or as plain data if there is none or the value no longer matches it."""
    schema = tool.result_schema
    try:
        return pydantic_core.from_json(written) if schema is None else schema.restore(written)
    except ToolValidationError:
        return pydantic_core.from_json(written)


# --- calls of the run ---------------------------------------------------------------------------------


def commit_unit(
    attempt: Attempt,
    result: ToolResult[Any],
    status: CallStatus = "ok",
    files: Sequence[Mapping[str, Any]] = (),
    diff: str = "",
    workspaces: Sequence[WorkspaceDelta] = (),
) -> CommitUnit:
    """Create the record of a finished call, with all its changes as plain data."""
    transaction = attempt.transaction if result.success else None
    run, call = attempt.run, attempt.call
    session_id, filesystem = run.session.id, run.world.filesystem
    settled = _settled(attempt, transaction) if result.success else ()
    changing = transaction if transaction is not None and transaction.touched else None
    unit = CommitUnit(
        run_id=run.run_context.request_id,
        call_id=call.id,
        result=write_result(result),
        session_id=session_id,
        place=str(call.place),
        tool=call.name,
        arguments=_text(attempt),
        status=status,
        at=run.began_at.timestamp() + attempt.passage.started,
        seconds=attempt.elapsed,
        reads=_reads(attempt, changing),
        charged=attempt.passage.charged,
        decision=attempt.passage.decision,
        logged=logged_by(attempt),
    )
    is_inner = len(call.path) > 1
    spawned = _spawned(transaction)
    if (
        changing is None
        and filesystem is None
        and not (settled or files or workspaces or is_inner or spawned)
    ):
        return unit  # the rest is what a unit has by default, and msgspec takes long for so many arguments
    return msgspec.structs.replace(
        unit,
        events=() if changing is None else [encode_item(event, session_id) for event in changing.events],
        effects=[done.what for done in settled] if settled else (),
        files=files,
        workspaces=tuple(workspaces),
        writes=() if changing is None else changing.writes(),
        diff=diff[:LONGEST_DIFF],
        root="" if filesystem is None else folder_of(filesystem),
        root_id="" if filesystem is None else folder_id_of(filesystem),
        path=call.path if is_inner else (),
        spawned=spawned,
    )


def _spawned(transaction: Transaction | None) -> tuple[SpawnedRun, ...]:
    """Return the background runs that a call begins."""
    spawned = () if transaction is None else transaction.spawned
    return tuple(each.record for each in spawned if each.record is not None)


def _settled(attempt: Attempt, transaction: Transaction | None) -> Sequence[Settled]:
    """Return the external effects that a call noted, and the effect of the call itself."""
    settled = () if transaction is None else transaction.settled or ()
    own = attempt.own_effect(attempt.finished)
    return settled if own is None else [*settled, own]


def _reads(attempt: Attempt, transaction: Any) -> Sequence[str]:
    """Return the names of what the call has read. If its tool gets results from outside this program, the first is their origin."""
    found: Sequence[str] = () if transaction is None else transaction.reads()
    origin = attempt.tool.origin
    return [origin, *found] if origin else found


def _text(attempt: Attempt) -> str:
    """Return the arguments as text, with secrets masked; "" if they could not be parsed."""
    try:
        return attempt.tool.dump(attempt.params).decode()
    except Exception:  # the arguments could not be parsed
        return ""


# --- inner calls --------------------------------------------------------------------------------------


class RecordedEffect(msgspec.Struct, frozen=True):
    """An inner call's external effect, which a rollback of the outer call must compensate or report."""

    what: str
    call_id: str
    tool: str
    """The name of the compensable tool; "" if the effect can't be undone."""
    params: bytes
    value: bytes
    place: str


class Changes(msgspec.Struct, frozen=True):
    """The changes of one inner call: its events, its files, its external effects, and the background runs that it begins."""

    events: Sequence[bytes] = ()
    files: Sequence[Any] = ()
    settled: Sequence[RecordedEffect] = ()
    spawned: Sequence[SpawnedRun] = ()


class InnerCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that finished inside a call that is still open, with everything that it passed on to the outer call."""

    verb: str
    status: CallStatus
    result: bytes
    events: Sequence[bytes] = ()
    files: Sequence[Any] = ()
    settled: Sequence[RecordedEffect] = ()
    seconds: float = 0.0
    act: bool = False
    """Whether the call is a part of its outer call, such as an act of a handoff. No model is shown its result."""
    lost: bool = False
    """Whether the call only asked, and the answer contained a secret. A secret is not recorded, so a resumed run may have to ask again."""
    charged: bool = False
    """Whether the budget was charged for the call."""
    passed: Sequence[Changes] = ()
    """The changes that its own inner calls committed past it, to a call around it, in order. They stand even if the call failed."""
    call_id: str = ""
    path: tuple[str, ...] = ()
    """The names of the calls around the call, outermost first, followed by its own name."""
    logged: Sequence[bytes] = ()
    """What the call itself added to the session's logs, in order. It stays even if the call failed."""
    spawned: Sequence[SpawnedRun] = ()

    @property
    def changes(self) -> Changes:
        """The changes of the call itself."""
        return Changes(self.events, self.files, self.settled, self.spawned)

    @property
    def effects(self) -> Sequence[RecordedEffect]:
        """The external effects of the call, and of the inner calls that have committed past it."""
        return [done for each in (*self.passed, self.changes) for done in each.settled]


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts that were spent under a ticket."""

    spent: dict[str, Decimal] = {}
    usage: Usage = NO_USAGE
    cost: Decimal | None = None


class Deposit(Spent, frozen=True, kw_only=True):
    """The work done under a ticket for the call that issued it, and its cost."""

    inner: InnerCall
    reads: dict[str, str] = {}
    """A digest of each slice that the work has read, by the name of its type, if the work depends on its reads."""


def fingerprint(attempt: Attempt) -> str:
    """Return the fingerprint of an inner call, by which it is recognised when the outer handler is re-entered.

    Secrets are masked first: a password could be guessed from its digest, and arguments from a model come
    from the record with their secrets masked.
    """
    tool = attempt.tool if attempt.kind.is_part else attempt.run.tools.get(attempt.name, attempt.tool)
    arguments: Any = attempt.arguments
    if tool.secret:
        arguments = tool.mask(arguments)
    elif not isinstance(arguments, str | bytes):
        arguments = to_json(arguments)
    text = arguments if isinstance(arguments, bytes) else arguments.encode("utf-8", "surrogatepass")
    return f"call {attempt.name} {hashlib.sha256(text).hexdigest()[:16]}"


def inner_call(attempt: Attempt, result: ToolResult[Any], status: CallStatus = "ok") -> InnerCall:
    """Create the record of an inner call, before its forks are merged."""
    own = attempt.own_effect(result)
    transaction = attempt.open_transaction if result.success else None
    passed = () if attempt.transaction is None else attempt.transaction.passed
    return record_of(attempt, result, transaction, status, () if own is None else (own,), passed)


def record_of(
    attempt: Attempt,
    result: ToolResult[Any],
    transaction: Transaction | None,
    status: CallStatus,
    also: Sequence[Settled] = (),
    passed: Sequence[Changes] = (),
) -> InnerCall:
    """Encode the contents of a transaction, with its external effects, as the record of an inner call."""
    files: list[Any] = []
    events: list[bytes] = []
    settled: list[Settled] = []
    if transaction is not None:
        for fork in transaction.touched:
            files += fork.file_changes()
        events = [encode_item(event, attempt.run.session.id) for event in transaction.events]
        settled = [*(transaction.settled or ())]
    return InnerCall(
        fingerprint(attempt),
        status,
        _write_act(attempt, result) if attempt.kind.is_part else write_result(result),
        events,
        files,
        [_write_effect(done) for done in (*settled, *also)],
        attempt.elapsed,
        attempt.kind.is_part,
        _is_lost(attempt, result),
        attempt.passage.charged,
        passed,
        attempt.id,
        attempt.path,
        logged_by(attempt),
        _spawned(transaction),
    )


def _is_lost(attempt: Attempt, result: ToolResult[Any]) -> bool:
    """Return whether the result is an answer with a secret, which is lost because it can't be recorded."""
    return attempt.kind.only_asks and result.success and has_secret(attempt.tool.result_schema, result.value)


def _write_act(attempt: Attempt, result: ToolResult[Any]) -> bytes:
    """Encode the result of a part of a call, such as an act. No model sees it.

    Raises `WrongResult` if the result is a success that can't be restored exactly, unless it is an answer with a secret,
    which is lost.
    """
    if _is_lost(attempt, result) and attempt.tool.shown is not None:
        return write_result(attempt.tool.shown(result), "")
    written = write_result(result, "")
    if result.success and read_result(attempt.tool, written).value != result.value:
        raise WrongResult(
            "its return value changes when it is recorded, and this run has a journal: "
            "return plain data without secrets"
        )
    return written


def _write_effect(done: Settled) -> RecordedEffect:
    tool = done.tool
    return RecordedEffect(
        done.what,
        done.call_id,
        "" if tool is None else tool.name,
        b"{}" if tool is None else tool.dump(done.params),
        b"null" if tool is None else to_json(done.value),
        str(done.place),
    )


def end_of(
    end: CommitUnit | InnerCall, context: RunContext, tools: Mapping[str, Tool[Any, Any]] = {}
) -> ToolInvoked:
    """Return the end of a call as its record has it. The record has no error, no number of attempts, and no parsed arguments.

    The result of an act has no value, because the value may be private.
    """
    path = end.path or (end.tool if isinstance(end, CommitUnit) else "",)
    is_act = isinstance(end, InnerCall) and end.act
    tool = None if is_act else tools.get(path[-1])
    result = read_result(tool, end.result, has_value=not is_act)
    status: Any = end.status
    return ToolInvoked(end.call_id, path[-1], path, status, result, None, end.seconds, 1, (), None, context)
