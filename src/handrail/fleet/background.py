"""`Background`: a run that a call begins and that outlives it, with or without a journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from handrail.agent import Agent
from handrail.concurrency.operation import Operation
from handrail.errors import (
    BudgetExceededError,
    ConversationBusy,
    EffectRefused,
    HandrailError,
    MessageRefused,
    NotSupported,
    PromptEvaluationError,
    RunError,
    RunUnknown,
    SpawnRefused,
)
from handrail.events import BackgroundStarted
from handrail.guard.outer_policy import OuterPolicy, outer_policies, own_policies
from handrail.guard.policy import within_scope
from handrail.ids import spawned_id
from handrail.journal.local import LocalMessages
from handrail.journal.records import (
    OVER,
    Amounts,
    Parent,
    QueuedMessage,
    RunRecord,
    RunStatus,
    SpawnedRun,
    When,
    workspace_name,
)
from handrail.messages import UserMessage
from handrail.prompt import Prompt
from handrail.prompt.section import walk
from handrail.resources.paths import folder_of
from handrail.resources.startup_files import allowed_in
from handrail.run.conversation import root_conversation
from handrail.run.limits import Budget, BudgetTracker
from handrail.run.mailbox import hear
from handrail.run.record.begin import amounts_of, code_of, decode_outcome, prompt_of
from handrail.run.record.notices import text_of
from handrail.run.run import Run
from handrail.run.spawning import stage, stage_spawned
from handrail.runs import cancel, children, send
from handrail.session import Session
from handrail.text.raised_errors import described
from handrail.tools import EFFECTS
from handrail.workers import WorkerRegistry
from handrail.workers.worker_run import Reach

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal
    from handrail.run.call import Attempt
    from handrail.run.response import RunStream
    from handrail.serve.sources import Source

_WOKEN = "A background run that you have begun has ended."
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Background:
    """A background run. It begins when the call that has begun it commits, and never if that call is rolled back."""

    id: str
    _runs: Journal | _LocalRuns = field(repr=False)

    def wait(self) -> Operation[str]:
        """Wait until the run has ended, and return its answer.

        The operation raises `PromptEvaluationError` if the run failed or was cancelled, and `RunError` in the call that begins the run.
        """
        return Operation(self._wait, f"background({self.id!r}).wait")

    def send(self, text: str, *, when: When = "next step", id: str | None = None) -> Operation[QueuedMessage]:
        """Say something to the run while it works, as `handrail.runs.send` does."""
        return Operation(lambda: self._send(text, when, id), f"background({self.id!r}).send")

    def cancel(self) -> Operation[None]:
        """Cancel the run. If it is over, nothing happens."""
        return Operation(self._cancel, f"background({self.id!r}).cancel")

    async def _wait(self) -> str:
        with self._begun():
            if isinstance(self._runs, _LocalRuns):
                end = await asyncio.shield(self._runs.find(self.id).work)
                return _answer(self.id, end.end, end.text)
            while (row := await self._runs.runs.get(self.id)).status not in OVER:
                await self._runs.queue.wait(_LOOK_SECONDS)
        outcome = decode_outcome(row)
        return _answer(self.id, row.status, outcome.text if row.status == "done" else outcome.error)

    async def _send(self, text: str, when: When, id: str | None) -> QueuedMessage:
        with self._begun():
            if isinstance(self._runs, _LocalRuns):
                return await self._runs.find(self.id).stream.send(text, when=when)
            return (await send(self._runs, self.id, text, when=when, id=id)).message

    async def _cancel(self) -> None:
        with self._begun():
            if isinstance(self._runs, _LocalRuns):
                await self._runs.find(self.id).stream.aclose()
            else:
                await cancel(self._runs, self.id)

    @contextlib.contextmanager
    def _begun(self) -> Generator[None]:
        try:
            yield
        except RunUnknown as error:
            raise RunError(
                self.id,
                "it is not there: it begins when the call that begins it has committed",
                "Wait for it in a later call, or let its end be told to the model.",
            ) from error


class BackgroundRuns:
    """The background runs that the runs of a call's session have begun."""

    def __init__(self, attempt: Attempt) -> None:
        self._run = attempt.run

    async def list(self) -> Sequence[Mapping[str, str]]:
        """Return each run's id, agent and status, oldest first."""
        run = self._run
        if run.journal is None:
            local = _local.get(run.session, _LocalRuns()).runs
            return [
                {"id": id, "agent": each.started.agent, "status": "done" if each.work.done() else "running"}
                for id, each in local.items()
            ]
        rows = await run.journal.runs.list(session_id=run.session.id, principal=run.session.principal)
        found = [each for row in rows for each in await children(run.journal, row.record.id)]
        return [{"id": each.record.id, "agent": each.record.prompt, "status": each.status} for each in found]

    async def find(self, id: str) -> Background:
        """Return one of the runs. Raises `RunError` if there is none with this id."""
        run, known = self._run, [each["id"] for each in await self.list()]
        if id not in known:
            hint = f"These were begun: {', '.join(known)}." if known else "None was begun."
            raise RunError(id, "no run of this conversation has begun it", hint)
        return Background(id, _local[run.session] if run.journal is None else run.journal)


def _answer(id: str, end: str, text: str) -> str:
    """Return the answer of a background run that is over. Raises `PromptEvaluationError` if it has none."""
    if end != "done":
        raise PromptEvaluationError(text or f"it was {end}", phase=end, run_id=id)
    return text


def spawn(
    attempt: Attempt,
    agent: str | Agent[Any],
    message: str,
    budget: Budget | None,
    files: str | Path | None,
    wake: bool,
) -> Background:
    """Implement the verb `spawn` of one call. Raises `SpawnRefused` if the run can't be begun, as the verb's documentation says."""
    run, name = attempt.run, agent.name if isinstance(agent, Agent) else str(agent)
    if attempt.kind.undoes or not attempt.let_through:
        hint = "Only a tool's handler can begin a background run, and not inside a compensation or a probe."
        raise NotSupported("spawn", hint)
    attempt.check()
    if EFFECTS[attempt.tool.effect].transactional:
        what = f"it may not begin a background run ({name!r})"
        raise EffectRefused(attempt.name, attempt.tool.effect, what)
    if not isinstance(message, str) or not message.strip():  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be unchecked
        raise SpawnRefused(name, "it is asked nothing", "Say what it shall do: spawn(agent, message).")
    share = _share(run, name, budget)
    place = attempt.place.child(attempt.next_verb(f"spawn {name}"))
    id = spawned_id(place.id(run.run_context.request_id))
    folder = _folder(run, name, files)
    try:
        if run.journal is None:
            return _spawn_here(attempt, id, agent, message, share, folder, wake)
        found = _submission(attempt, run.journal, id, agent, message, share, folder, wake)
        stage_spawned(attempt, attempt.open_transaction, found)
    except BudgetExceededError as error:
        raise SpawnRefused(name, f"its share is not left: {error}", "Give it a smaller budget.") from error
    return Background(id, run.journal)


def _share(run: Run, name: str, budget: Budget | None) -> Amounts:
    """Return the share of the budget. Raises `SpawnRefused` if a unit is unlimited that is limited in the run."""
    share: Amounts = {} if budget is None else {str(unit): limit for unit, limit in budget.limits().items()}
    missing = [unit for unit in run.costs.tracker.left() if unit not in share]
    if missing:
        units = ", ".join(f"{unit}=..." for unit in missing)
        raise SpawnRefused(
            name,
            f"the run that begins it has a budget, and its share of {', '.join(missing)} is not given",
            f"Pass budget=Budget({units}).",
        )
    return share


def _folder(run: Run, name: str, files: str | Path | None) -> str:
    """Return the folder or the address of the workspace in which the run works. Raises `SpawnRefused` if it can't work there."""
    if files is None:
        return ""
    if workspace_name(str(files)):
        if str(files) == folder_of(_root(run).world.filesystem):
            problem = (
                f"{files} is the workspace of the run that begins it, and one run at a time has a workspace"
            )
            raise SpawnRefused(name, problem, "Give it another one, or a folder.")
        return str(files)
    if not Path(files).is_dir():
        raise SpawnRefused(name, f"there is no folder {str(files)!r}", "Pass the path of a folder.")
    return str(Path(files).resolve())


def _root(run: Run) -> Run:
    while run.outer is not None:
        run = run.outer.run
    return run


# --- the agent, and the policies that decide about it --------------------------------------------------


def _named(run: Run, agent: str) -> str:
    """Return the app of an agent: a worker's file, or `module:name`. Raises `SpawnRefused` for anything else."""
    reach = run.workers
    if isinstance(reach, Reach) and agent in reach.registry.names:
        if reach.worker is not None and agent not in reach.worker.workers:
            raise SpawnRefused(agent, reach.why_not(agent).rstrip("."), "List it there.")
        return str(reach.registry[agent].path)
    module, colon, _ = agent.partition(":")
    if not colon or agent.endswith(".md") or module == "__main__":
        known = f" The workers are {', '.join(reach.registry.names)}." if isinstance(reach, Reach) else ""
        raise SpawnRefused(
            agent,
            "it is neither a worker of this run nor an agent in a module that others can import",
            f"Pass a worker's name, or 'module:name'.{known}",
        )
    return agent


def _load(run: Run, agent: str) -> Source:
    from handrail.serve.sources import load

    app = _named(run, agent)
    try:
        return load(app).source
    except (HandrailError, ImportError) as error:
        problem, _, hint = str(error).partition(". ")
        raise SpawnRefused(agent, problem.rstrip("."), hint or "Correct the name.") from error


def _apps(run: Run, name: str) -> tuple[str, ...]:
    """Return references to the prompts whose policies decide in a run. Raises `SpawnRefused` if one can't be found again."""
    found = [policy.app for policy in _root(run).options.outer_policies]
    level: Run | None = run
    while level is not None:
        reach, own = level.workers, own_policies(level.policies)
        worker = reach.worker if isinstance(reach, Reach) else None
        app = level.options.app
        if level.outer is not None and worker is not None and worker.prompt is level.model.prompt:
            app = str(worker.path)
        if own and not app:
            raise SpawnRefused(
                name,
                f"the policy {own[0].name!r} decides about it, and the prompt that has the policy can't be found again",
                "Begin the run with app='module:name'.",
            )
        found += [app] if own else []
        level = None if level.outer is None else level.outer.run
    return tuple(dict.fromkeys(found))


def policies_of(parent: Parent) -> tuple[OuterPolicy, ...]:
    """Return the policies of the run that began a background run, as they apply in that. Raises `DefinitionError` or `RunError` if they can't be found."""
    found: list[OuterPolicy] = []
    for app in parent.policies:
        if app.endswith(".md"):
            prompt: Prompt[Any] = WorkerRegistry.worker_at(app).prompt
        else:
            prompt = prompt_of(parent.run_id, app)
        found += [OuterPolicy(policy, app) for policy in prompt.policies]
        sections = walk(prompt.sections)
        for _, section in sections:
            tools = frozenset(tool.name for _, each in walk((section,)) for tool in each.tools)
            found += [OuterPolicy(within_scope(policy, tools), app) for policy in section.policies]
    return tuple(found)


# --- with a journal ------------------------------------------------------------------------------------


def _submission(
    attempt: Attempt,
    journal: Journal,
    id: str,
    agent: str | Agent[Any],
    message: str,
    share: Amounts,
    folder: str,
    wake: bool,
) -> SpawnedRun:
    from handrail.fleet.submission import Submission

    run, root = attempt.run, _root(attempt.run)
    if not isinstance(agent, str):
        problem = "an agent's object can't be found again by the worker that begins it"
        raise SpawnRefused(agent.name, problem, "Pass a worker's name, or 'module:name'.")
    if not root.log.is_kept:
        problem = "the calls of an opened gate belong to no run that could be told its end"
        raise SpawnRefused(agent, problem, "Begin it in a run with a prompt.")
    source, now = _load(run, agent), run.clock.now().timestamp()
    principal = run.session.principal
    asked = Submission(message, principal=principal, folder=folder, budget=Budget(**share) if share else None)  # pyright: ignore[reportArgumentType]  # its own amounts
    parent = Parent(
        run_id=root.run_context.run_id,
        session_id=run.session.id,
        principal=principal,
        call_id=attempt.id,
        share=share,
        policies=_apps(run, agent),
        wake=_woken(root, id, agent, now) if wake else b"",
    )
    record = RunRecord(
        id=id,
        session_id=id,
        principal=principal,
        prompt=source.prompt_name,
        model=source.model,
        began_at=now,
        app=source.app,
        code=code_of(source.app),
        request=msgspec.msgpack.encode(asked.request(id, now)),
        parent=parent,
    )
    return SpawnedRun(record, asked.pinned_host)


def _woken(root: Run, id: str, agent: str, now: float) -> bytes:
    """Return the submission that continues the session of a run once it is over and the background run has ended."""
    from handrail.fleet.submission import Submission

    app, prompt, settings = root.options.app, root.model.prompt, root.model.settings
    if not app or prompt is None or settings is None:
        raise SpawnRefused(
            agent,
            "it shall wake the run that begins it, and that can't be found again",
            "Begin that run with app='module:name', or leave out wake=True.",
        )
    files, limits = root.world.filesystem, None if root.budget is None else dict(root.budget.limits)
    asked = Submission(_WOKEN, folder=folder_of(files), startup_files=tuple(allowed_in(files)))
    request = msgspec.structs.replace(asked.request(id, now), budget=limits or None)
    record = RunRecord(
        id=spawned_id(id),
        session_id=root.session.id,
        principal=root.session.principal,
        prompt=prompt.name,
        model=settings.model.name,
        began_at=now,
        app=app,
        code=code_of(app),
        request=msgspec.msgpack.encode(request),
    )
    return msgspec.msgpack.encode(SpawnedRun(record, asked.pinned_host))


# --- without a journal ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _LocalRun:
    stream: RunStream[Any]
    started: BackgroundStarted
    work: asyncio.Task[QueuedMessage]
    telling: asyncio.Task[None]


class _LocalRuns:
    """The background runs that the runs of a session have begun in this process, by id."""

    def __init__(self) -> None:
        self.runs: dict[str, _LocalRun] = {}

    def find(self, id: str) -> _LocalRun:
        if id not in self.runs:
            raise RunUnknown(id)
        return self.runs[id]


_local: WeakKeyDictionary[Session, _LocalRuns] = WeakKeyDictionary()


def _spawn_here(
    attempt: Attempt, id: str, agent: str | Agent[Any], message: str, share: Amounts, folder: str, wake: bool
) -> Background:
    from handrail.serve.sources import PromptSource

    run, root = attempt.run, _root(attempt.run)
    if wake:
        problem = "without a journal, nobody would read what the woken run answers"
        raise SpawnRefused(str(agent), problem, "Leave out wake=True, or give the run a journal.")
    source = PromptSource(agent.prompt, agent.adapter) if isinstance(agent, Agent) else _load(run, agent)
    if folder:
        from handrail.resources.directory import DirectoryFilesystem

        source = source.with_files(DirectoryFilesystem(folder))
    spending = BudgetTracker(Budget(**share)) if share else None  # pyright: ignore[reportArgumentType]  # its own amounts
    options: Any = {
        "run_id": id,
        "session": Session(id=id, principal=run.session.principal),
        "environment": run.people.environment,
        "budget": spending,
        "outer_policies": outer_policies(run.policies),
    }
    started = BackgroundStarted(id, source.prompt_name, message, attempt.id, attempt.run_context)
    local = _local.setdefault(run.session, _LocalRuns())

    def begin() -> None:
        if root.options.messages is None:
            heard = LocalMessages(run.session.principal, run.clock)
            root.options = root.options.replace(messages=heard)
            hear(root, heard)
        stream = Context().run(lambda: source.begin(message, **options))  # it is not a part of the call
        carried_out = _carry_out(root, stream, started, share, spending)
        work = attempt.call.loop.create_task(carried_out, context=Context())
        telling = attempt.call.loop.create_task(_tell(root, work), context=Context())
        local.runs[id] = _LocalRun(stream, started, work, telling)

    stage(attempt, attempt.open_transaction, share, started, begin)
    return Background(id, local)


async def _carry_out(
    parent: Run,
    stream: RunStream[Any],
    started: BackgroundStarted,
    share: Amounts,
    spending: BudgetTracker | None,
) -> QueuedMessage:
    """Execute a background run in this process, and return its end."""
    end: RunStatus = "done"
    try:
        text = (await stream.response).text
    except asyncio.CancelledError:
        end, text = "cancelled", ""
    except Exception as error:
        end, text = "failed", described(error)
    spent: Amounts = {} if spending is None else amounts_of(spending.spent())
    return QueuedMessage(
        id=started.background_id,
        text=text,
        by=parent.session.principal,
        child=started.background_id,
        agent=started.agent,
        end=end,
        left={unit: amount - spent[unit] for unit, amount in share.items()},
    )


async def _tell(parent: Run, work: asyncio.Task[QueuedMessage]) -> None:
    """Tell a run the end of a background run, or leave it in the conversation for the session's next run if the parent is over."""
    message, messages = await work, parent.options.messages
    assert messages is not None, "a run that begins a background run hears its end"
    try:
        await messages.send(parent.run_context.run_id, message)
        await messages.notify()
    except MessageRefused:
        conversation = root_conversation(parent.session)
        while True:
            try:
                with conversation:
                    conversation.add(UserMessage(text_of(message), True), message.id)
                return
            except ConversationBusy:  # another run is working on the session
                await asyncio.sleep(_LOOK_SECONDS)
