"""Evaluations, from their options to their response: new ones, resumed ones, and those inside a call.

`Adapter` imports this module on its first run, and with it the gate and everything else that a run needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import msgspec
import pydantic_core

from handrail.concurrency.cancellation import finish
from handrail.concurrency.operation import Operation
from handrail.concurrency.user_code import Callback
from handrail.content import AttachmentSource, attachments_of
from handrail.context import PromptModel
from handrail.errors import (
    DefinitionError,
    HandrailError,
    PromptEvaluationError,
    RunError,
    ToolValidationError,
)
from handrail.guard.outer_policy import own_policies
from handrail.guard.remembered import keep_decisions
from handrail.journal.location import check_out_of_reach
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, RunRow
from handrail.messages import AssistantMessage, Message, Model, UserMessage
from handrail.prompt import Prompt, RenderedPrompt
from handrail.protocols import EventBus, SessionView
from handrail.resources.paths import folder_of
from handrail.run.adapter import Settings, check_added, check_files, forward_events, one_message, settings_of
from handrail.run.answer import spent_by
from handrail.run.conversation import NO_MESSAGE, Conversation, root_conversation
from handrail.run.loop import run_in
from handrail.run.mailbox import look
from handrail.run.nested import nested_run
from handrail.run.options import NestedArguments, Recoverable, RunFiles, RunOptions, check_value, named
from handrail.run.record.begin import (
    RunOutcome,
    attach_sections,
    begin_run,
    carry_out,
    carry_out_unrecorded,
    check_resumed,
    continue_turn,
    decode_begin,
    decode_outcome,
    prompt_of,
)
from handrail.run.record.lease import acquire_in_process, acquire_run, stopped
from handrail.run.record.lineage import end_stopped
from handrail.run.record.log import NO_LOG, RunLog, attached_to, load_attachments
from handrail.run.record.parking import Parking
from handrail.run.record.recorded_session import continue_session, load_resumed, load_session
from handrail.run.response import Output, PromptResponse, made_in, respond
from handrail.run.run import Run, open_run
from handrail.run.spend import check_caps
from handrail.schema import Schema
from handrail.session import Dispatcher, Session
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.run.adapter import Adapter
    from handrail.run.call import Attempt

OutputT = TypeVar("OutputT")

Begin = Callable[[Run, Prompt[Any], RenderedPrompt[Any], Conversation], Awaitable[str]]
"""Begins or resumes a run whose prompt is rendered, and returns the system text that is sent."""

_NO_SYSTEM = "You are part of a program. Answer exactly what is asked."

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
        return await _go(_open(adapter, prompt, options, streaming), prompt, begin_run)
    async with _stoppable(journal, run_id):
        with acquire_in_process(journal, run_id):
            async with _opened_files(options, journal, run_id) as options:
                run = _open(adapter, prompt, options, streaming, RunLog(journal, run_id, options.clock))
                return await _go(run, prompt, begin_run)


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
            if row.record.parent is not None:
                of_parent: Any = import_module("handrail.fleet.background").policies_of
                options = options.replace(outer_policies=of_parent(row.record.parent))
            resumed = await load_resumed(journal, row, session, clock)
            continue_turn(resumed.session, journal)
            await keep_decisions(resumed.session, journal, is_restored=True)
            run = _open(adapter, prompt, resumed.options(options), heard is not None, resumed.log)
            if row.has_messages:
                await look(run, journal.messages)
            return await _go(run, prompt, resumed.begin_again, heard)


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
    await load_attachments(journal, row.record.id, attached, some=True)
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


def _open(
    adapter: Adapter, prompt: Prompt[Any], options: RunOptions, streaming: bool, log: RunLog = NO_LOG
) -> Run:
    """Open a run at the root, new or resumed."""
    settings = adapter.settings().override(
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        streaming=streaming or None,
        model_settings=settings_of(prompt, options),
    )
    if prompt.resources:
        options = options.replace(resources=(*options.resources, *prompt.resources))
    if options.spend:
        options = options.replace(spend=named(options.spend, prompt.name))
    run, environment = open_run(options, prompt=prompt, log=log), options.environment
    bind_model(run, adapter, settings)
    if environment is not None and environment.parks:
        if not log.is_kept:
            raise DefinitionError(
                f"{type(environment).__name__} parks runs, which requires a journal. "
                "Give the adapter one: journal=SqliteJournal('runs.db')."
            )
        run.parking = Parking(run, environment)
    check_files(prompt, run)
    if log.is_kept:
        check_out_of_reach(log.journal.path, folder_of(run.world.filesystem))
    check_added(prompt, options.tools)
    return run


async def _go(
    run: Run, prompt: Prompt[Any], begin: Begin, heard: EventBus | None = None
) -> PromptResponse[Any]:
    """Carry out a run that `begin` begins or resumes, and return its response."""
    if run.parking is not None:
        run.parking.begin()
    session, workers = run.session, run.options.workers
    conversation = root_conversation(session)
    forward = forward_events(session, run.options.bus, heard)
    try:
        with conversation:
            async with nullcontext() if workers is None else workers.enter(run):
                rendered = await _render(run, prompt, session)
                system = await begin(run, prompt, rendered, conversation)
                work = run_in(run, conversation, prompt, rendered, system=system)
                carry = carry_out if run.log.is_kept else carry_out_unrecorded
                outcome = await carry(run, conversation, work)
    except BaseException as error:
        forward()
        await run.world.resources.close_logged(error)
        raise
    finally:
        run.mailbox = run.model.evaluation = None
    forward()
    return respond(outcome, run, conversation, await run.world.resources.close_logged())


async def _render(run: Run, prompt: Prompt[Any], session: SessionView) -> RenderedPrompt[Any]:
    await prompt.connect(session.principal)
    options = run.options
    return prompt.render(options.params, session=session, opened=options.opened, deadline=run.deadline)


# --- inside a call ---------------------------------------------------------------------------------------


class CallAdapter:
    """The adapter as one call sees it. Evaluations with it are part of the call.

    They inherit from the call as `RunOptions.nested` says: limits that are passed to them can only be tighter, and resources
    replace the call's resources of the same protocols. Each evaluation has its own conversation.
    """

    __slots__ = ("_adapter", "_call", "_settings")

    def __init__(self, adapter: Adapter, settings: Settings, attempt: Attempt) -> None:
        self._adapter = adapter
        self._settings = settings
        self._call = attempt

    @property
    def streams(self) -> bool:
        """Whether the model's text is published as events while it is being written."""
        return self._settings.streaming

    def model_or(self, model: Model | str | None) -> Model:
        """Return `model`, which may be given by name. If it is None, return this adapter's model."""
        return self._settings.override(model=model).model if model is not None else self._settings.model

    def evaluate(
        self,
        prompt: Prompt[OutputT],
        params: object = None,
        /,
        *,
        message: str | None = None,
        model: Model | str | None = None,
        **arguments: Unpack[NestedArguments],
    ) -> Operation[PromptResponse[OutputT]]:
        """Run another prompt inside this call, and return its response."""
        self._call.home.check()
        if isinstance(params, str):
            params, message = None, one_message(params, message)
        check_value("message", message)
        options = RunOptions(params=params, message=message)
        return self.run(prompt, options.updated("evaluate", NestedArguments, arguments), model)

    def run(
        self,
        prompt: Prompt[OutputT],
        given: RunOptions,
        model: Model | str | None = None,
        levels: int | None = None,
    ) -> Operation[PromptResponse[OutputT]]:
        """Run a prompt inside this call. `RunOptions.nested` says how the options in `given` are combined with the call's.

        `levels` limits how deep the run's calls may nest.
        """
        attempt = self._call
        attempt.home.check()
        settings = self._settings
        chosen = settings_of(prompt, given)
        own = (model, given.temperature, given.max_tokens, chosen)
        if any(each is not None for each in own):
            settings = settings.override(
                model=model,
                temperature=given.temperature,
                max_tokens=given.max_tokens,
                model_settings=chosen,
            )
        verb = f"evaluate {prompt.name}"
        number = attempt.next_verb(verb)
        given = given.replace(
            resources=(*given.resources, *prompt.resources), spend=named(given.spend, prompt.name)
        )
        check_added(prompt, given.tools)
        evaluate = partial(
            _evaluate_inside, attempt, number, verb, prompt, given, self._adapter, settings, levels=levels
        )
        return Operation(evaluate, f"evaluate({prompt.name!r})", attempt.home)


async def _evaluate_inside(
    attempt: Attempt,
    number: int,
    verb: str,
    prompt: Prompt[Any],
    given: RunOptions,
    adapter: Adapter,
    settings: Settings,
    *,
    levels: int | None = None,
    output: Output | None = None,
    on_text: Callback[str] | None = None,
) -> PromptResponse[Any]:
    async with nested_run(attempt, number, verb, given, prompt, levels) as run:
        bind_model(run, adapter, settings)
        check_files(prompt, run)
        async with nullcontext() if given.workers is None else given.workers.enter(run):
            rendered = await _render(run, prompt, attempt.session)
            conversation = Conversation(run.session, run.run_context.run_id)
            attach_sections(run, rendered, conversation)
            outcome = await run_in(run, conversation, prompt, rendered, output=output, on_text=on_text)
        if on_text is not None:
            await on_text.finish()
    return respond(outcome, run, conversation)


def bind_model(run: Run, adapter: Adapter, settings: Settings) -> None:
    """Let the calls of a run, and the runs nested in them, use the run's adapter and model.

    An environment's own `prompt_model` takes precedence over the run's model.
    """
    run.model.settings = settings
    if run.options.spend:
        check_caps(run, settings)
    settings = settings.inherited()
    run.model.adapter = lambda attempt: CallAdapter(adapter, settings, attempt)
    environment = run.people.environment
    if environment is None or environment.prompt_model is None:
        run.model.prompt_model = lambda attempt: prompt_model_of(adapter, settings, attempt)
    else:
        run.model.prompt_model = environment.prompt_model


def prompt_model_of(adapter: Adapter, settings: Settings, attempt: Attempt) -> PromptModel:
    """Return the `prompt_model` verb of one call."""

    def verb(
        prompt: str,
        schema: Any,
        *,
        system: str | None = None,
        model: Model | str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        attachments: Sequence[AttachmentSource] = (),
        on_text: Callable[[str], object] | None = None,
    ) -> Operation[Any]:
        attempt.home.check()
        wanted: Schema[Any] = Schema(schema)
        attached = attachments_of(attachments)
        asked = Prompt(
            "prompt_model",
            (system or _NO_SYSTEM).replace("$", "$$"),
            tools=tools,
            policies=own_policies(attempt.run.policies),
        )
        chosen = settings
        if model is not None or temperature is not None or on_text is not None:
            streams = True if on_text is not None else None
            chosen = settings.override(model=model, temperature=temperature, streaming=streams)
        number = attempt.next_verb("prompt_model")

        async def ask() -> Any:
            given = RunOptions(message=prompt, attachments=attached)
            tell = None if on_text is None else Callback(on_text, "on_text")
            response = await _evaluate_inside(
                *(attempt, number, "prompt_model", asked, given, adapter, chosen),
                output=Output(wanted),
                on_text=tell,
            )
            return response.output

        return Operation(ask, "prompt_model", attempt.home)

    return verb
