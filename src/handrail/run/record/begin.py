"""The record of a run: how a run begins, resumes and ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import msgspec

from handrail.concurrency.cancellation import finish, open_scope
from handrail.content import Attachment
from handrail.errors import (
    DefinitionError,
    HandrailError,
    JournalError,
    MessagesWaiting,
    PromptEvaluationError,
    RunBusy,
    RunError,
    RunParked,
    WorkspaceTakenError,
)
from handrail.events import MessageAdded
from handrail.guard.remembered import keep_decisions
from handrail.imports import find_app, import_app
from handrail.journal.protocol import Journal
from handrail.journal.records import (
    Amounts,
    Entry,
    RunRecord,
    RunRow,
    RunStatus,
    SessionTurn,
    SpendCap,
    workspace_name,
)
from handrail.messages import Compaction, Message, ModelSettings, Usage
from handrail.models.names import reference_to
from handrail.prompt import Prompt, RenderedPrompt
from handrail.resources.paths import folder_of
from handrail.resources.startup_files import allowed_in
from handrail.run.answer import Unanswered, offer_of
from handrail.run.conversation import Conversation, SecretMask, sendable
from handrail.run.limits import UNITS
from handrail.run.mailbox import hear, look
from handrail.run.record.lease import STOPPED, leased, note_deadline, stopped
from handrail.run.record.log import RunLog, attached_to, load_attachments, store_attachments
from handrail.run.record.notices import UndoneCalls, forget_undone, tell_nobody, undone_in
from handrail.run.record.parking import next_end
from handrail.run.response import Outcome, Output
from handrail.run.run import Run
from handrail.schema import to_json
from handrail.session import Session
from handrail.session.serialization import encode_item, save
from handrail.text.raised_errors import described
from handrail.tools import Tool
from handrail.tools.result import clean_text


def code_of(app: str) -> str:
    """Return a digest of an app's own files: its module, or the `.md` and `.py` files in its folder; "" if there is no app.

    Nothing is imported, except the packages around a module. Raises `ImportError` if there is no such module or file.
    """
    if not app:
        return ""
    module, colon, _ = app.partition(":")
    if colon and not app.endswith(".md"):
        loaded = sys.modules.get(module)
        spec = find_app(module) if loaded is None else None
        if loaded is None and spec is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        files = [Path(str(spec.origin if spec else getattr(loaded, "__file__", "")))]
    elif app.endswith(".md") and not Path(app).is_file():
        raise ImportError(f"there is no file {app!r}")
    else:
        folder = Path(app) if Path(app).is_dir() else Path(app).parent
        files = sorted([*folder.glob("*.md"), *folder.glob("*.py")])
    found = hashlib.sha256()
    for file in files:
        with contextlib.suppress(OSError):
            found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


_GIVE_THE_PROMPT = "Pass the prompt: resume(run_id, prompt), or --app module:name on the command line."


def prompt_of(run_id: str, app: str, hint: str = _GIVE_THE_PROMPT) -> Prompt[Any]:
    """Import and return the prompt of an app, `module:name`.

    Raises `RunError` with this hint if `app` has a different form, if importing it raises `ImportError`, or if it has no prompt.
    """
    module, colon, name = app.partition(":")
    if not app:
        raise RunError(run_id, "it began without a reference to its prompt", hint)
    if not colon or app.endswith(".md"):
        raise RunError(run_id, f"its app {app!r} does not have the form module:name", hint)
    try:
        found: Any = getattr(import_app(module), name, None)
    except ImportError as error:
        problem = f"its prompt is at {app!r}, which can't be imported: {error}"
        raise RunError(run_id, problem, hint) from error
    prompt: object = getattr(found, "prompt", found)  # the prompt itself, or an agent that has one
    if not isinstance(prompt, Prompt):
        raise RunError(run_id, f"there is no Prompt at {app!r}", hint)
    return cast("Prompt[Any]", prompt)


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a submitted run. It is recorded with the run, and a worker reads it to begin or resume the run."""

    message: str
    attachments: list[Attachment] = []
    """References to the files that the message comes with. Their bytes are blobs of the run."""
    deadline: float | None = None
    """Seconds that the run has once it begins; None for no limit."""
    budget: dict[str, int | Decimal] | None = None
    folder: str = ""
    """The folder of the run's files, or `workspace:NAME`; "" for the files that the worker was started with, if any."""
    startup_files: list[str] = []
    """The patterns of the startup files that the run's calls may change without a separate approval."""
    every: float | None = None
    """Seconds between repetitions of the run; None for a run that is not repeated."""
    due_at: float = 0.0
    """When the run was due, in seconds since 1970. The next repetition is due a multiple of `every` seconds later."""
    key: str = ""
    """The idempotency key with which the request was first submitted, or the id of its first run if it had no key."""
    traceparent: str = ""
    """What the run was submitted from; "" if nothing is known. A repetition has a trace of its own."""

    @property
    def workspace(self) -> str:
        """The name of the workspace that the run works in; "" if it works in none."""
        return workspace_name(self.folder)


def decode_request(record: RunRecord) -> RunRequest:
    """Return the request of a submitted run."""
    return msgspec.msgpack.decode(record.request, type=RunRequest)


async def begun_runs(journal: Journal, session_id: str, principal: str) -> Sequence[RunRow]:
    """Return the runs of a principal's session that have begun, oldest first."""
    rows = await journal.runs.list(session_id=session_id, principal=principal)
    return [row for row in rows if row.record.has_begun]


def check_begun(row: RunRow) -> None:
    """Raise `RunError` for a run that was submitted and has not begun."""
    if not row.record.has_begun:
        raise RunError(
            row.record.id,
            f"it is {row.status} and has not begun",
            f"Start a worker, which begins it: `handrail worker {row.record.app}`."
            if row.status == "queued"
            else "Submit it again.",
        )


_followed: WeakKeyDictionary[Session, dict[str, SessionTurn | None]] = WeakKeyDictionary()
"""The turns that sessions include, by the ids of their journals."""


def follow(session: Session, journal: Journal, turn: SessionTurn | None) -> None:
    """Note that a session includes everything that was recorded until this turn, or is the session of this turn's run."""
    with session.lock:
        _followed.setdefault(session, {})[journal.id] = turn


def continue_turn(session: Session, journal: Journal) -> None:
    """Note that the run that has the session's turn works on this object, which then includes what the run adds to the record."""
    turn = followed(session, journal)
    if turn is not None:
        follow(session, journal, SessionTurn(turn.id))


def followed(session: Session, journal: Journal) -> SessionTurn | None:
    """Return the last turn in a journal that a session includes; None if it includes none."""
    return _followed.get(session, {}).get(journal.id)


async def is_outdated(session: Session, journal: Journal) -> bool:
    """Return whether a run can't begin on a session, because its record goes further. Then the session must be loaded again."""
    return followed(session, journal) != await journal.runs.turn(session.id, session.principal)


class RunBegin(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run needs to begin again in the same way."""

    message: str | None
    params: bytes | None
    history: list[Message]
    system: str
    """The rendered prompt. It is sent again unchanged even if the prompt has changed since."""
    tools: list[str]
    opened: list[str]
    temperature: float | None
    max_tokens: int | None
    deadline: float | None
    pauses: bool  # whether the deadline pauses while people answer
    budget: dict[str, int | Decimal] | None
    base: bytes | None
    """The session's state when the run began; None if it can be restored from an earlier run in the journal."""
    folder: str = ""  # the folder of the run's files, or `workspace:NAME`; "" for other files
    startup_files: list[str] = []
    """The patterns of the startup files that the run's calls may change without a separate approval."""
    offered: dict[str, str] = {}  # what the model was shown of each tool, besides its name
    output: str | None = (
        None  # the JSON Schema of the answer; "" if it has none, None if that is not recorded
    )
    shown_files: list[Attachment] | None = (
        None  # the attachments of the sections shown in full; None if not recorded
    )
    model_settings: ModelSettings | None = None
    added: list[str] = []  # the names of the tools that this run has in addition to the prompt's
    events: list[bytes] = []
    """In a copy of a run: the events that earlier runs committed in the session since `base`. Those runs are not copied."""
    logged: list[bytes] = []  # what the runs whose events are in `events` have logged
    said: list[Message] = []  # the messages of the runs whose events are in `events`
    compact: tuple[str, float, int | None, float] | None = None
    """When and how the run compacts its conversation, unless its prompt says it. A function is left to whoever resumes the run."""
    result_limit: int | None = None  # the run's limit on results, unless its prompt says it
    compaction: Compaction | None = None  # in a copy: what of the messages in `base` and `said` is sent
    shown: list[str] = []  # the sections that were opened in the runs whose events are in `events`
    traceparent: str = ""  # what the run was started from, if anything
    models: dict[str, str] = {}  # the models that replace those in the files of workers, by worker
    denied: list[bytes] = []  # in a copy: the original session's remembered denials, and its revocations
    attachments: list[Attachment] = []  # the files that the run's worker was given, as references
    attached: list[Attachment] = []  # the attachments of the run's message, as references
    spend: tuple[SpendCap, ...] = ()  # the caps on what is spent in a day
    sources: dict[str, str] = {}  # the files that name the servers of the run's tools, and a digest of each


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, and what it adds to its session, as the journal records it."""

    text: str = ""
    output: bytes = b"null"
    stop_reason: str = ""
    usage: Usage = Usage()
    cost: Decimal | None = None
    error: str = ""
    phase: str = ""
    spent: Amounts = {}  # what was spent of the budget; a unit that is left out counts as spent
    messages: list[Message] = []  # the messages that the run added to its session's conversation
    opened: list[str] = []  # the sections that the run's model opened; later runs show them in full
    logged: list[bytes] = []  # what calls without a recorded end have logged, such as cancelled ones
    unanswered: Unanswered | None = None  # the requests for the answer that the run ended without


def amounts_of(spent: Mapping[str, Decimal]) -> Amounts:
    """Return what was spent of each unit of a budget. Nothing was spent of a unit that is left out."""
    return {
        unit: spent.get(unit, Decimal(0)) if unit == "money" else int(spent.get(unit, 0)) for unit in UNITS
    }


def never_begun(stop_reason: Literal["failed", "cancelled"], error: str) -> bytes:
    """Return the outcome of a run that ended before it began, encoded."""
    phase = "begin" if stop_reason == "failed" else ""
    outcome = RunOutcome(
        stop_reason=stop_reason, cost=Decimal(0), error=error, phase=phase, spent=amounts_of({})
    )
    return msgspec.msgpack.encode(outcome)


def decode_begin(record: RunRecord) -> RunBegin:
    return msgspec.msgpack.decode(record.begin, type=RunBegin)


def decode_outcome(row: RunRow) -> RunOutcome:
    return msgspec.msgpack.decode(row.outcome, type=RunOutcome) if row.outcome else RunOutcome()


# --- begin ---------------------------------------------------------------------------------------------


async def begin_run(
    run: Run, prompt: Prompt[Any], rendered: RenderedPrompt[Any], conversation: Conversation
) -> str:
    """Begin a new run, and record it before it does anything. Returns its system text.

    Raises `DefinitionError` if the session's conversation has begun although the run has a history, or if importing the run's `app` raises `ImportError`.
    """
    conversation.close_calls(run.run_context.run_id)
    add_history(run, rendered, conversation)
    attach_sections(run, rendered, conversation)
    if run.log.is_kept:
        await load_attachments(run.log.journal, run.log.run_id, attached_to(conversation.messages), some=True)
        await _record(run, prompt, rendered)
    return rendered.text


def add_history(run: Run, rendered: RenderedPrompt[Any], conversation: Conversation) -> None:
    """Begin the run's conversation with its history, if it has any."""
    options = run.options
    if options.history:
        run.show(
            rendered.offer.toolbox.plus(options.tools), ()
        )  # they declare which arguments in the history are secret
        masked = SecretMask(run, conversation).message if run.secretive or rendered.secretive else None
        conversation.begin_with(options.history, run.run_context.run_id, masked)
        if masked is not None:
            run.options = options.replace(history=tuple(masked(each) for each in options.history))


def attach_sections(run: Run, rendered: RenderedPrompt[Any], conversation: Conversation) -> None:
    """Attach to the run's message what the prompt's sections come with and was not sent before."""
    attachments = run.options.attachments
    seen = {*attached_to(conversation.messages), *attachments} if rendered.attachments else ()
    if new := [each for each in rendered.attachments if each not in seen]:
        run.options = run.options.replace(attachments=(*new, *attachments))


async def _record(run: Run, prompt: Prompt[Any], rendered: RenderedPrompt[Any]) -> None:
    journal, options, settings = run.log.journal, run.options, run.model.settings
    assert settings is not None, "a model makes the run's calls"
    app = options.app
    try:
        code = code_of(app)
    except ImportError as error:
        raise DefinitionError(
            f"app is {app!r}, which can't be imported: {error}. Give it as module:name, importable wherever the "
            "run is resumed, or leave it out."
        ) from error
    session = run.session
    attachments: Sequence[Attachment] = getattr(options.workers, "attachments", ())
    await _heed_undone(journal, session, run.log)
    await keep_decisions(session, journal)
    deadline, budget = run.deadline, run.budget
    every_tool = tools_of(rendered)
    tools: list[Any] = [*every_tool, *options.tools]
    begin = RunBegin(
        message=None if options.message is None else clean_text(options.message),
        params=None if options.params is None else encode_item(options.params, session.id),
        history=[sendable(each) for each in options.history],
        system=rendered.text,
        tools=[tool.name for tool in every_tool],
        opened=list(options.opened),
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        model_settings=options.model_settings,
        compact=None if options.compact is None else options.compact.recorded(),
        result_limit=options.result_limit,
        deadline=None if deadline is None else deadline.at.timestamp(),
        pauses=deadline is not None and deadline.pauses_for_people,
        budget=None if budget is None else dict(budget.left()),
        base=await _base(journal, session),
        folder=folder_of(run.world.filesystem),
        startup_files=allowed_in(run.world.filesystem),
        offered={tool.name: offer_of(tool) for tool in tools},
        output=schema_of(rendered),
        shown_files=list(rendered.attachments),
        added=[tool.name for tool in options.tools],
        traceparent=run.run_context.traceparent,
        models={name: reference_to(each) for name, each in getattr(options.workers, "models", {}).items()},
        attachments=list(attachments),
        attached=list(options.attachments),
        spend=options.spend,
        sources=dict(each.source for each in tools if getattr(each, "source", None)),
    )
    record = RunRecord(
        id=run.run_context.run_id,
        session_id=session.id,
        principal=session.principal,
        prompt=prompt.name,
        model=reference_to(settings.model),
        began_at=run.began_at.timestamp(),
        begin=msgspec.msgpack.encode(begin),
        app=app,
        code=code,
    )
    turn = await journal.runs.begin(record, followed=followed(session, journal))
    follow(session, journal, SessionTurn(turn.id))
    if turn.has_messages:
        await look(run, journal.messages)
    await store_attachments(journal, run.run_context.run_id, attachments)
    said = (fact.message for fact in session[MessageAdded].all())
    await store_attachments(journal, run.run_context.run_id, [*options.attachments, *attached_to(said)])


def tools_of(rendered: RenderedPrompt[Any]) -> tuple[Tool[Any, Any], ...]:
    """Return the prompt's tools that are offered when a run begins, with those of the provider last."""
    return (*rendered.tools, *rendered.provider_tools)


def schema_of(rendered: RenderedPrompt[Any]) -> str:
    """Return the JSON Schema of the answer as the model is shown it; "" if there is none."""
    schema = rendered.output_schema
    return (
        ""
        if schema is None
        else msgspec.json.encode(Output(schema).schema.json_schema, order="sorted").decode()
    )


async def _base(journal: Journal, session: Session) -> bytes | None:
    """Return the session's state; None if it can be restored from an earlier run in this journal."""
    first = await journal.runs.list(session_id=session.id, principal=session.principal, limit=1)
    if first and not first[0].record.has_begun:
        first = await begun_runs(journal, session.id, session.principal)
    return None if first else save(session)


async def _heed_undone(journal: Journal, session: Session, log: RunLog) -> None:
    """Drop undone calls from the session and remember to tell the model, unless it has been told about all of them."""
    undone = await undone_in(journal, session.id, session.principal)
    if undone.untold:
        log.untold = undone.untold
        await heed_undone(journal, session, undone)


async def heed_undone(journal: Journal, session: Session, undone: UndoneCalls) -> None:
    """Drop undone calls from a session in memory."""
    runs = await begun_runs(journal, session.id, session.principal)
    before = decode_begin(runs[0].record).events if runs else ()
    ids = {row.record.id for row in runs}
    units = [unit for unit in await journal.calls.load_session(session.id) if unit.run_id in ids]
    forget_undone(session, base_of(runs), before, units, undone.calls)


def check_resumed(row: RunRow, prompt: Prompt[Any], files: object, tools: Sequence[Tool[Any, Any]]) -> None:
    """Raise `RunError` if the run has not begun, if the prompt is a different one, or if files or tools are missing."""
    check_begun(row)
    record, begin = row.record, decode_begin(row.record)
    if prompt.name != record.prompt:
        raise RunError(
            record.id,
            f"it began with the prompt {record.prompt!r}, and this is {prompt.name!r}",
            "Pass the prompt that it began with.",
        )
    if begin.folder and files is None:
        raise RunError(
            record.id,
            f"it works on the files in {begin.folder!r}, and no files were passed",
            "Pass filesystem=DirectoryFilesystem(...) or Workspace(...), or --files on the command line.",
        )
    given = {tool.name for tool in tools}
    missing = [name for name in begin.added if name not in given]
    if missing:
        raise RunError(
            record.id,
            f"it began with added tools, and these were not passed: {', '.join(missing)}",
            "Pass them again: resume(..., tools=[...]).",
        )


# --- run -----------------------------------------------------------------------------------------------


async def carry_out(run: Run, conversation: Conversation, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run `work` under the run's lease, and record how it ends. Errors of `work` are raised.

    Raises `RunParked` if the run was parked, `RunBusy` if another process has taken it over, `JournalUpgraded` if the journal
    no longer lets this version write to it, and `PromptEvaluationError` if it was cancelled through the journal.
    """
    journal, run_id = run.log.journal, run.run_context.run_id
    began, shown = len(conversation.messages), len(conversation.opened)
    scope = open_scope(run.cancellation)
    status: RunStatus = "cancelled"
    due_at: float | None = None
    outcome = RunOutcome(stop_reason="cancelled")
    has_ended = False

    def completed(outcome: RunOutcome) -> bytes:
        """Return the outcome with what the run has added to its session, encoded."""
        return msgspec.msgpack.encode(
            msgspec.structs.replace(
                outcome,
                usage=run.costs.models.usage,
                cost=run.costs.models.cost,
                spent={} if run.budget is None else amounts_of(run.budget.spent()),
                messages=conversation.shown_since(began),
                opened=conversation.opened[shown:],
                logged=run.log.unrecorded,
                unanswered=run.model.unanswered if status in ("failed", "cancelled") else None,
            )
        )

    async def end(ended: Outcome) -> bool:
        nonlocal has_ended
        if run.left_to_the_record:
            return True  # the record says how it goes on
        output = to_json(ended.output, round_trip=True)
        done = RunOutcome(text=ended.text, output=output, stop_reason=ended.stop_reason)
        lease.pause()
        try:
            await finish(journal.runs.leave(run_id, "done", completed(done), all_told=True))
            has_ended = True
        except MessagesWaiting:
            lease.resume()
            await look(run, journal.messages)
        except JournalError:
            run.log.close()  # the run is done, not failed; whoever resumes it records its end
            raise
        return has_ended

    run.end = end
    try:
        async with leased(journal, run) as lease:
            return await _unless_parked(journal, run, work)
    except RunParked as parked:
        status = "parked"
        due_at = parked.due_at
        raise
    except asyncio.CancelledError:
        if run.log.closed:
            scope.absorb()
            lost = (await journal.runs.keep(run_id))[run_id]
            raise lost if isinstance(lost, HandrailError) else RunBusy(run_id, journal.owner) from None
        if run.cancellation.reason == STOPPED:
            scope.absorb()
            raise stopped(run_id) from None
        raise
    except (RunBusy, WorkspaceTakenError, GeneratorExit) as error:
        if isinstance(error, GeneratorExit):  # nothing can be awaited any more, as if the process had ended
            run.log.close()
        elif isinstance(error, WorkspaceTakenError):
            status = "running"  # any process may resume the run
        raise
    except Exception as error:
        status = "failed"
        words = clean_text(described(error))
        phase = error.phase if isinstance(error, PromptEvaluationError) else ""
        outcome = RunOutcome(stop_reason="failed", error=words, phase=phase)
        raise
    finally:
        run.end = None
        if not has_ended and (not run.log.closed or status in ("parked", "running")):
            with contextlib.suppress(RunBusy):
                if status == "parked" and run.deadline is not None and run.deadline.pauses_for_people:
                    await note_deadline(journal, run_id, run.deadline, run.clock, paused=True)
                if status == "parked":
                    await _note_told(journal, run)
                while True:
                    encoded = b"" if status in ("parked", "running") else completed(outcome)
                    left = journal.runs.leave(run_id, status, encoded, due_at=due_at, all_told=True)
                    try:
                        await asyncio.shield(asyncio.ensure_future(left))
                        break
                    except MessagesWaiting:
                        await tell_nobody(run, conversation)


async def carry_out_unrecorded(
    run: Run, conversation: Conversation, work: Coroutine[Any, Any, Outcome]
) -> Outcome:
    """Run `work` without a record, and let it hear what is said to the run meanwhile, if anybody can say anything."""
    if run.options.messages is not None:
        hear(run, run.options.messages)
    try:
        return await work
    finally:
        if (messages := run.options.messages) is not None:  # it may have begun a background run
            run.end = messages.look = None
            while not messages.end("failed"):
                await tell_nobody(run, conversation)


async def _note_told(journal: Journal, run: Run) -> None:
    """Record what was published about the unfinished calls of a parked run, so that the next leg does not publish it again."""
    if run.parking is not None and run.parking.told:
        context, now = run.run_context, run.log.now()
        body = msgspec.msgpack.encode(run.parking.told)
        await journal.calls.note(context.run_id, Entry("parked", str(context.attempt), now, body))


async def _unless_parked(journal: Journal, run: Run, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Return the outcome of `work`. If the run was parked, raises `RunParked` instead, even if `work` failed, except with `RunBusy`."""
    scope = open_scope(run.cancellation)
    try:
        ended = await work
        if not run.parked:
            return ended
    except RunBusy:
        raise
    except (Exception, asyncio.CancelledError):
        if not run.parked:
            raise
    scope.absorb()
    run_id = run.run_context.run_id
    questions = await journal.questions.open(run_id)
    raise RunParked(run_id, questions, next_end(questions, run.deadline, journal.clock.now()))


# --- end -----------------------------------------------------------------------------------------------


def base_of(runs: Iterable[RunRow]) -> bytes | None:
    """Return the saved session as it was before its first run in this journal; None if it was not saved."""
    bases = (decode_begin(each.record).base for each in runs if each.record.begin)
    return next((base for base in bases if base is not None), None)
