"""One evaluation, new or resumed, from its options to its response.

`Adapter` imports this module on its first run, and with it the gate and everything else that a run needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pydantic_core

from handrail.concurrency.cancellation import finish
from handrail.errors import (
    DefinitionError,
    HandrailError,
    PromptEvaluationError,
    RunError,
    ToolValidationError,
)
from handrail.guard.approval import keep_decisions
from handrail.journal.location import check_out_of_reach
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, RunRow
from handrail.messages import AssistantMessage, Message, UserMessage
from handrail.prompt import Prompt
from handrail.protocols import EventBus
from handrail.resources.paths import folder_of
from handrail.run.answer import spent_by
from handrail.run.apps import prompt_of
from handrail.run.call_adapter import bind_model
from handrail.run.conversation import root_conversation
from handrail.run.loop import NO_MESSAGE, run_in, with_sections
from handrail.run.mask import SecretMask
from handrail.run.options import Recoverable, RunFiles, RunOptions
from handrail.run.record.attachments import attached_to, load
from handrail.run.record.begin import (
    RunOutcome,
    begin_run,
    carry_out,
    check_resumed,
    continue_turn,
    decode_begin,
    decode_outcome,
)
from handrail.run.record.lease import acquire_in_process, acquire_run, stopped
from handrail.run.record.lineage import end_stopped
from handrail.run.record.log import RunLog
from handrail.run.record.parking import Parking
from handrail.run.record.resume import ResumedRun, continue_session, load_resumed, load_session
from handrail.run.response import PromptResponse, made_in, respond
from handrail.run.run import Run, open_run
from handrail.run.settings import Settings, check_added, check_files, forward_events, settings_of
from handrail.schema import Schema
from handrail.session import Dispatcher, Session

if TYPE_CHECKING:
    from handrail.run.adapter import Adapter

OutputT = TypeVar("OutputT")

MOST_DEATHS = 3
"""How many consecutive processes may die while they execute a run, without progress, before it is set aside."""
MOST_WORKER_DEATHS = 10
"""How many worker processes may die while they execute a run, without progress, before it is set aside.

The number is higher than `MOST_DEATHS`, because a worker executes several runs, and any of them may have killed it.
"""


async def evaluate(
    adapter: Adapter, prompt: Prompt[OutputT], options: RunOptions, streaming: bool = False
) -> PromptResponse[OutputT]:
    """Run a prompt, and record the run if there is a journal. With `streaming`, the model streams its answers."""
    bus, new_id, journal = options.bus, options.new_id, options.journal
    own = bus if isinstance(bus, Dispatcher) else None
    run_id = options.run_id or new_id()
    session = options.session or Session(new_id=new_id, dispatcher=own)
    options = options.replace(session=session, run_id=run_id)
    if options.continues:
        await continue_session(journal, session)
    if journal is None:
        return await _go(adapter, prompt, options, streaming, None)
    async with _stoppable(journal, run_id):
        with acquire_in_process(journal, run_id):
            async with _opened_files(options, journal, run_id) as options:
                return await _go(adapter, prompt, options, streaming, RunLog(journal, run_id, options.clock))


@contextlib.asynccontextmanager
async def _stoppable(journal: Journal, run_id: str) -> AsyncGenerator[None]:
    """If the block raises a `HandrailError`, call `end_stopped`. If that ends the run, raise `PromptEvaluationError` instead.

    A request to cancel the run may have come too late for the block, for example while the run was being parked.
    """
    try:
        yield
    except HandrailError:
        is_ended = False
        with contextlib.suppress(HandrailError):  # the run may not be in the journal
            is_ended = await finish(end_stopped(journal, run_id))
        if is_ended:
            raise stopped(run_id) from None
        raise


@contextlib.asynccontextmanager
async def _opened_files(options: RunOptions, journal: Journal, run_id: str) -> AsyncGenerator[RunOptions]:
    """Open the run's files, if they are a `RunFiles` such as a workspace. Yields the options with the files to use."""
    if not isinstance(options.filesystem, RunFiles):
        yield options
        return
    async with options.filesystem.opened(journal, run_id) as files:
        yield options.replace(filesystem=files)


async def resume(
    adapter: Adapter,
    run_id: str,
    prompt: Prompt[Any] | None,
    options: RunOptions,
    heard: EventBus | None = None,
) -> PromptResponse[Any]:
    """Continue a recorded run. `heard` receives the events that are not in its record.

    Raises `RunUnknown` if the journal has no such run, `RunBusy` if the run is being executed, `SessionBusy` while another run
    works on its session, and `RunError` if it can't be resumed with what was passed. Raises `PromptEvaluationError` if the run is set aside, or failed or was cancelled before.
    A continued run raises the errors of `carry_out`.
    """
    journal, session, clock = options.journal, options.session, options.clock
    if journal is None:
        raise RunError(
            run_id, "this adapter has no journal", "Pass the journal that has the run: journal=..."
        )
    row = await journal.runs.get(run_id)
    prompt = prompt or prompt_of(run_id, row.record.app)
    if row.status in OVER:
        return await _recorded_answer(journal, row, prompt, session)
    check_resumed(row, prompt, options.filesystem, options.tools)
    async with _stoppable(journal, run_id), acquire_run(journal, run_id) as row:
        if row.status in OVER:  # the run may have ended since its row was read
            return await _recorded_answer(journal, row, prompt, session)
        if row.deaths >= (MOST_WORKER_DEATHS if row.queue else MOST_DEATHS):
            raise await _set_aside(journal, row)
        if isinstance(options.filesystem, Recoverable):
            await options.filesystem.recover(journal)
        await _check_applied(journal, run_id)
        async with _opened_files(options, journal, run_id) as options:
            resumed = await load_resumed(journal, row, session, clock)
            continue_turn(resumed.session, journal)
            await keep_decisions(resumed.session, journal, is_restored=True)
            return await _go(
                adapter, prompt, resumed.options(options), heard is not None, resumed.log, resumed, heard
            )


async def _check_applied(journal: Journal, run_id: str) -> None:
    """Raise `RunError` if recorded file changes of a run have not been applied, because its model relies on them."""
    for unit in await journal.calls.unapplied():
        if unit.run_id == run_id:
            raise RunError(
                run_id,
                f"what its call {unit.call_id!r} changed in {unit.root!r} is not applied, because that folder or its "
                "staged files can't be found",
                "Open that folder, wherever it is now, with --files FOLDER or filesystem=. Or discard the changes: "
                f"`handrail runs discard {run_id} {unit.call_id}`.",
            )


async def _recorded_answer(
    journal: Journal, row: RunRow, prompt: Prompt[Any], session: Session | None
) -> PromptResponse[Any]:
    """Return the recorded response of a run that is over, or raise its error.

    Raises `JournalAltered` if the record was altered.
    """
    found = await journal.runs.verify(row.record.id)
    if found.altered:
        raise found.altered[0]
    response = _answer_of(row, prompt, await load_session(journal, row, session, until=row.record.id))
    attached = (*response.attachments, *attached_to(response.messages))
    await load(journal, row.record.id, attached, some=True)
    return response


def _answer_of(row: RunRow, prompt: Prompt[Any], session: Session) -> PromptResponse[Any]:
    """Return the response of a finished run. Raises `PromptEvaluationError` if the run failed or was cancelled."""
    outcome = decode_outcome(row)
    if row.status != "done":
        problem = outcome.error or f"it was {row.status}"
        raise PromptEvaluationError(problem, phase=outcome.phase or row.status, run_id=row.record.id)
    output: Any = pydantic_core.from_json(outcome.output)
    if prompt.output is not None:
        with contextlib.suppress(
            ToolValidationError
        ):  # the type has changed since: keep the output as it was recorded
            schema: Schema[Any] = Schema(prompt.output)
            output = schema.parse(outcome.output)
    return PromptResponse(
        outcome.text,
        output,
        outcome.usage,
        outcome.cost,
        row.record.id,
        outcome.stop_reason,
        session,
        length=len(root_conversation(session).messages),
        attachments=made_in(outcome.messages),
    )


async def _set_aside(journal: Journal, row: RunRow) -> PromptEvaluationError:
    """End a run as failed, because too many processes died while they executed it. Returns the error to raise."""
    record = row.record
    problem = (
        f"run {record.id!r} was set aside: {row.deaths} processes in a row ended while they executed it, and none "
        "made progress. Find out what ends them, then fork the run to try again."
    )
    said: list[Message] = [UserMessage(decode_begin(record).message or NO_MESSAGE), AssistantMessage(problem)]
    usage, _ = spent_by(
        await journal.calls.entries(record.id)
    )  # the cost is unknown: requests may have been lost
    outcome = RunOutcome(stop_reason="failed", usage=usage, error=problem, phase="set aside", messages=said)
    await journal.runs.leave(record.id, "failed", msgspec.msgpack.encode(outcome))
    return PromptEvaluationError(problem, phase="set aside", run_id=record.id)


async def _go(
    adapter: Adapter,
    prompt: Prompt[Any],
    options: RunOptions,
    streaming: bool,
    log: RunLog | None,
    resumed: ResumedRun | None = None,
    heard: EventBus | None = None,
) -> PromptResponse[Any]:
    """Carry out a run, new or resumed, and return its response."""
    settings = adapter.settings().override(
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        streaming=streaming,
        model_settings=settings_of(prompt, options),
    )
    run = _run(adapter, prompt, options, settings, log)
    check_files(prompt, run)
    if log is not None:
        check_out_of_reach(getattr(options.journal, "path", ""), folder_of(run.world.filesystem))
    check_added(prompt, options.tools)
    if run.parking is not None:
        run.parking.begin()
    session, workers = run.session, options.workers
    conversation = root_conversation(session)
    forward = forward_events(session, options.bus, heard)
    run_id = run.run_context.run_id
    try:
        async with AsyncExitStack() as during:
            during.enter_context(conversation)
            if workers is not None:
                await during.enter_async_context(workers.enter(run))
            await prompt.connect(session.principal)
            rendered = prompt.render(
                options.params, session=session, opened=options.opened, deadline=run.deadline
            )
            if resumed is None:
                conversation.close_calls(run_id)
            else:
                resumed.catch_up((*rendered.tools, *options.tools))
            history = options.history
            # The conversation of a resumed run has the history already, unless it is empty.
            if history and (resumed is None or not len(conversation.messages)):
                # The tools declare which arguments in the history are secret.
                run.show([*rendered.tools, *options.tools], ())
                secretive = run.secretive or rendered.secretive
                masked = SecretMask(run, conversation).message if secretive else None
                conversation.begin_with(history, run_id, masked)
                if masked is not None:
                    options = options.replace(history=tuple(masked(each) for each in history))
            if resumed is None:  # a resumed run has its attachments in its record
                attached = with_sections(rendered, conversation, options.attachments)
                options = options.replace(attachments=attached)
            journal = None if log is None else options.journal
            if journal is not None:
                await load(journal, run_id, attached_to(conversation.messages), some=True)
            if journal is not None and resumed is None:
                await begin_run(journal, run, prompt, rendered, options, adapter.model)
            work = run_in(
                adapter,
                run,
                settings,
                conversation,
                prompt,
                rendered,
                options.message,
                system=None if resumed is None else resumed.begin.system,
                tools=options.tools,
                attachments=options.attachments,
            )
            outcome = await (work if journal is None else carry_out(journal, run, conversation, work))
    except BaseException as error:
        forward()
        await run.world.resources.close_logged(error)
        raise
    forward()
    return respond(outcome, run, conversation, await run.world.resources.close_logged())


def _run(
    adapter: Adapter, prompt: Prompt[Any], options: RunOptions, settings: Settings, log: RunLog | None
) -> Run:
    environment = options.environment
    run = open_run(
        options.replace(resources=(*options.resources, *prompt.resources)),
        prompt=prompt,
        log=log,
    )
    bind_model(run, adapter, settings)
    if environment is not None and environment.parks:
        if log is None:
            raise DefinitionError(
                f"{type(environment).__name__} parks runs, which requires a journal. "
                "Give the adapter one: journal=SqliteJournal('runs.db')."
            )
        run.parking = Parking(run, environment)
    return run
