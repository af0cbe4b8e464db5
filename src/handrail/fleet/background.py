"""`Background`: a run that a call begins and that outlives it, with or without a journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from handrail import errors
from handrail.agent import Agent
from handrail.concurrency.operation import Operation
from handrail.errors import DefinitionError, RunError, SpawnRefused
from handrail.events import BackgroundStarted
from handrail.fleet.submission import Submission, record_of
from handrail.guard.outer_policy import OuterPolicy, outer_policies, own_policies
from handrail.guard.policy import within_scope
from handrail.ids import spawned_id, traceparent_of, tracing
from handrail.journal.local import LocalMessages
from handrail.journal.records import OVER, Amounts, Parent, QueuedMessage, SpawnedRun, When, workspace_name
from handrail.prompt import Prompt
from handrail.prompt.section import walk
from handrail.resources.directory import DirectoryFilesystem
from handrail.resources.paths import folder_of
from handrail.resources.startup_files import allowed_in
from handrail.run.conversation import root_conversation
from handrail.run.limits import Budget, BudgetTracker
from handrail.run.mailbox import hear
from handrail.run.record.begin import amounts_of, decode_outcome, prompt_of
from handrail.run.record.notices import message_of_ends
from handrail.run.run import Run
from handrail.run.transaction import stage, stage_spawned
from handrail.runs import cancel, children, send
from handrail.serve.sources import PromptSource, Source, load
from handrail.session import Session
from handrail.text.raised_errors import described
from handrail.tools import EFFECTS
from handrail.workers import WorkerRegistry
from handrail.workers.worker_run import Reach

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal
    from handrail.run.call import Attempt
    from handrail.run.response import RunStream

T = TypeVar("T")

_WOKEN = "A background run that you have begun has ended."
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Background:
    """A background run. It begins when the call that has begun it commits, and never if that call is rolled back.

    In the call that begins it, the operations raise `RunError`.
    """

    id: str
    _runs: Journal | dict[str, _LocalRun] = field(repr=False)

    def wait(self) -> Operation[str]:
        """Wait until the run has ended, and return its answer.

        The operation raises `PromptEvaluationError` if the run failed or was cancelled.
        """
        return self._operation("wait", self._wait)

    def send(self, text: str, *, when: When = "next step", id: str | None = None) -> Operation[QueuedMessage]:
        """Say something to the run while it works, as `handrail.runs.send` does."""
        return self._operation("send", lambda: self._send(text, when, id))

    def cancel(self) -> Operation[None]:
        """Cancel the run. If it is over, nothing happens."""
        return self._operation("cancel", self._cancel)

    def _operation(self, verb: str, work: Callable[[], Coroutine[Any, Any, T]]) -> Operation[T]:
        async def go() -> T:
            try:
                return await work()
            except (errors.RunUnknown, KeyError):
                problem = "it is not there: it begins when the call that begins it has committed"
                raise RunError(self.id, problem, f"Use `{verb}` in a later call.") from None

        return Operation(go, f"background({self.id!r}).{verb}")

    async def _wait(self) -> str:
        if isinstance(self._runs, dict):
            end = await asyncio.shield(self._runs[self.id].work)
            status, text = end.end, end.text
        else:
            while (row := await self._runs.runs.get(self.id)).status not in OVER:
                await self._runs.queue.wait(_LOOK_SECONDS)
            status, outcome = row.status, decode_outcome(row)
            text = outcome.text if status == "done" else outcome.error
        if status != "done":
            problem = text or f"it was {status}"
            raise errors.PromptEvaluationError(problem, phase=status, run_id=self.id)
        return text

    async def _send(self, text: str, when: When, id: str | None) -> QueuedMessage:
        if isinstance(self._runs, dict):
            return await self._runs[self.id].stream.send(text, when=when)
        return (await send(self._runs, self.id, text, when=when, id=id)).message

    async def _cancel(self) -> None:
        if isinstance(self._runs, dict):
            await self._runs[self.id].stream.aclose()
        else:
            await cancel(self._runs, self.id)


async def list_background(attempt: Attempt) -> Mapping[str, str]:
    """Return the agent and the status of each background run that the runs of a call's session have begun, by its id, oldest first."""
    session, journal = attempt.run.session, attempt.run.journal
    if journal is None:
        local = _local.get(session, {}).items()
        return {id: f"{each.started.agent} {'done' if each.work.done() else 'running'}" for id, each in local}
    runs = await journal.runs.list(session_id=session.id, principal=session.principal)
    rows = [row for run in runs for row in await children(journal, run.record.id)]
    return {row.record.id: f"{row.record.prompt} {row.status}" for row in rows}


async def find_background(attempt: Attempt, id: str) -> Background:
    """Return a background run that a run of a call's session has begun. Raises `RunError` if none has begun one with this id."""
    known, run = await list_background(attempt), attempt.run
    if id not in known:
        hint = f"These were begun: {', '.join(known)}." if known else "None was begun."
        raise RunError(id, "no run of this conversation has begun it", hint)
    return Background(id, _local[run.session] if run.journal is None else run.journal)


def policies_of(parent: Parent) -> tuple[OuterPolicy, ...]:
    """Return the policies of the run that began a background run, as they apply in that.

    Raises `WorkerError` or `RunError` if they can't be found.
    """
    found: list[OuterPolicy] = []
    for app in parent.policies:
        prompt: Prompt[Any] = (
            WorkerRegistry.worker_at(app).prompt if app.endswith(".md") else prompt_of(parent.run_id, app)
        )
        found += [OuterPolicy(policy, app) for policy in prompt.policies]
        for _, section in walk(prompt.sections):
            tools = frozenset(tool.name for _, each in walk((section,)) for tool in each.tools)
            found += [OuterPolicy(within_scope(policy, tools), app) for policy in section.policies]
    return tuple(found)


def spawn(
    attempt: Attempt, agent: str | Agent[Any], message: str, budget: Budget | None, files: Any, wake: bool
) -> Background:
    """Implement the verb `spawn` of one call. Raises `SpawnRefused` if the run can't be begun, as the verb's documentation says."""
    name, budget = agent.name if isinstance(agent, Agent) else str(agent), budget or Budget()
    share: Amounts = {str(unit): limit for unit, limit in budget.limits().items()}
    root = [*attempt.with_outer()][-1].run
    asked = _Asked(attempt, agent, message, budget, wake, name, share, root)
    if attempt.kind.undoes or not attempt.let_through:
        hint = "Only a tool's handler can begin a background run, and not inside a compensation or a probe."
        raise errors.NotSupported("spawn", hint)
    attempt.check()
    if EFFECTS[attempt.tool.effect].transactional:
        what = f"it may not begin a background run ({asked.name!r})"
        raise errors.EffectRefused(attempt.name, attempt.tool.effect, what)
    if not message.strip():
        raise asked.refused("it is asked nothing", "Say what it shall do: spawn(agent, message).")
    asked.check_share()
    place = attempt.place.child(attempt.next_verb(f"spawn {asked.name}"))
    id, folder = spawned_id(place.id(attempt.run_context.request_id)), asked.folder(files)
    try:
        if attempt.run.journal is None:
            return asked.stage_here(id, folder)
        stage_spawned(attempt, attempt.open_transaction, asked.submission(id, folder))
    except errors.BudgetExceededError as error:
        raise asked.refused(f"its share is not left: {error}", "Give it a smaller budget.") from error
    return Background(id, attempt.run.journal)


class _Asked(msgspec.Struct, frozen=True, eq=False):
    """A background run that a call asks for."""

    attempt: Attempt
    agent: str | Agent[Any]
    message: str
    budget: Budget
    wake: bool
    name: str
    share: Amounts
    root: Run

    def refused(self, problem: str, hint: str) -> SpawnRefused:
        return SpawnRefused(self.name, problem, hint)

    def check_share(self) -> None:
        """Raise `SpawnRefused` if the share is unlimited where the run has a limit."""
        missing = [unit for unit in self.attempt.run.costs.tracker.left() if unit not in self.share]
        if missing:
            problem = (
                f"the run that begins it has a budget, and its share of {', '.join(missing)} is not given"
            )
            raise self.refused(
                problem, f"Pass budget=Budget({', '.join(f'{unit}=...' for unit in missing)})."
            )

    def folder(self, files: Any) -> str:
        """Return the folder or the address of the workspace that the run works in. Raises `SpawnRefused` if it can't work there."""
        if files is None:
            return ""
        if workspace_name(str(files)):
            if str(files) == folder_of(self.root.world.filesystem):
                problem = f"the run that begins it has {files}, and one run at a time has a workspace"
                raise self.refused(problem, "Give it another workspace, or a folder.")
            return str(files)
        if not Path(files).is_dir():
            raise self.refused(f"there is no folder {str(files)!r}", "Pass the path of a folder.")
        return str(Path(files).resolve())

    @property
    def traceparent(self) -> str:
        """What the run begins from: the call, or the app's current span inside it."""
        return tracing.ambient() or traceparent_of(self.attempt.run_context, self.attempt.id)

    def source(self) -> Source:
        """Find the agent. Raises `SpawnRefused` if it is not a worker of the run, or an agent in a module that others can import."""
        reach, app = self.attempt.run.workers, self.name
        if isinstance(reach, Reach) and app in reach.registry.names:
            if reach.worker is not None and app not in reach.worker.workers:
                raise self.refused(reach.why_not(app).rstrip("."), "List it there.")
            app = str(reach.registry[app].path)
        elif not isinstance(self.agent, str) or ":" not in app or app.startswith("__main__:"):
            known = f" The workers are {', '.join(reach.registry.names)}." if isinstance(reach, Reach) else ""
            problem = (
                "it is neither a worker of this run nor named as an agent in a module that others can import"
            )
            raise self.refused(problem, f"Pass a worker's name, or 'module:name'.{known}")
        try:
            return load(app).source
        except (errors.HandrailError, ImportError) as error:
            problem, hint = DefinitionError(str(error)).parts
            raise self.refused(problem.rstrip("."), hint or "Correct the name.") from error

    def policies(self) -> tuple[str, ...]:
        """Return references to the prompts whose policies decide. Raises `SpawnRefused` if one can't be found again."""
        found = [policy.app for policy in self.root.options.outer_policies]
        for around in self.attempt.with_outer():
            level, reach = around.run, around.run.workers
            worker = reach.worker if isinstance(reach, Reach) else None
            is_worker = worker is not None and worker.prompt is level.model.prompt
            app = str(worker.path) if worker is not None and is_worker else level.options.app
            own = own_policies(level.policies)
            if own and not app:
                problem = f"the policy {own[0].name!r} decides about it, and the prompt that has the policy can't be found again"
                raise self.refused(problem, "Begin the run with app='module:name'.")
            found += [app] if own else []
        return tuple(dict.fromkeys(found))

    def submission(self, id: str, folder: str) -> SpawnedRun:
        """Return the run as the journal submits it."""
        root, session = self.root, self.attempt.run.session
        if not root.log.is_kept:
            problem = "the calls of an opened gate belong to no run that could be told its end"
            raise self.refused(problem, "Begin it in a run with a prompt.")
        source, share = self.source(), self.share
        budget, run_id, call_id = self.budget if share else None, root.run_context.run_id, self.attempt.id
        asked = Submission(
            self.message,
            principal=session.principal,
            folder=folder,
            budget=budget,
            traceparent=self.traceparent,
        )
        wake = msgspec.msgpack.encode(self.woken(id)) if self.wake else b""
        parent = Parent(
            run_id=run_id,
            call_id=call_id,
            share=share,
            policies=self.policies(),
            spend=self.attempt.run.options.spend,
            wake=wake,
        )
        now = root.clock.now().timestamp()
        record = record_of(asked, id, now, now, source.prompt_name, source.model, source.app)
        return SpawnedRun(msgspec.structs.replace(record, parent=parent), asked.pinned_host)

    def woken(self, id: str) -> SpawnedRun:
        """Return the run that continues the session once this one is over and the background run has ended."""
        root, files, session = self.root, self.root.world.filesystem, self.root.session
        app, prompt, settings = root.options.app, root.model.prompt, root.model.settings
        if not app or prompt is None or settings is None:
            problem = "it shall wake the run that begins it, and that can't be found again"
            raise self.refused(problem, "Begin that run with app='module:name', or leave out wake=True.")
        limits: Any = {} if root.budget is None else root.budget.limits
        where: Any = {"folder": folder_of(files), "startup_files": tuple(allowed_in(files))}
        budget = Budget(**limits) if limits else None
        where["traceparent"] = self.traceparent
        asked = Submission(_WOKEN, session_id=session.id, principal=session.principal, budget=budget, **where)
        now = root.clock.now().timestamp()
        record = record_of(asked, spawned_id(id), now, now, prompt.name, settings.model.name, app)
        return SpawnedRun(record, asked.pinned_host)

    def stage_here(self, id: str, folder: str) -> Background:
        """Stage the run as a task of this process, which begins when the call has committed."""
        attempt, run, root, agent = self.attempt, self.attempt.run, self.root, self.agent
        if self.wake:
            problem = "without a journal, nobody would read what the woken run answers"
            raise self.refused(problem, "Leave out wake=True, or give the run a journal.")
        source = PromptSource(agent.prompt, agent.adapter) if isinstance(agent, Agent) else self.source()
        source = source.with_files(DirectoryFilesystem(folder)) if folder else source
        tracker = BudgetTracker(self.budget)
        options: Any = {
            "run_id": id,
            "session": Session(id=id, principal=run.session.principal),
            "environment": run.people.environment,
            "budget": tracker if self.share else None,
            "outer_policies": outer_policies(run.policies),
            "traceparent": self.traceparent,
        }
        started = BackgroundStarted(id, source.prompt_name, self.message, attempt.id, attempt.run_context)
        local = _local.setdefault(run.session, {})

        def begin() -> None:
            run.publish(started)
            if root.options.messages is None:
                hear(root, LocalMessages(run.session.principal, run.clock))
            stream = Context().run(lambda: source.begin(self.message, **options))  # not a part of the call
            create = attempt.call.loop.create_task
            work = create(_carry_out(stream, started, root.session.principal, tracker), context=Context())
            local[id] = _LocalRun(stream, started, work, create(_tell(root, work), context=Context()))

        stage(attempt, attempt.open_transaction, self.share, begin, None)
        return Background(id, local)


# --- without a journal ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _LocalRun:
    stream: RunStream[Any]
    started: BackgroundStarted
    work: asyncio.Task[QueuedMessage]
    telling: asyncio.Task[None]


_local: WeakKeyDictionary[Session, dict[str, _LocalRun]] = WeakKeyDictionary()
"""The background runs that the runs of a session have begun in this process, by id."""


async def _carry_out(
    stream: RunStream[Any], started: BackgroundStarted, principal: str, tracker: BudgetTracker
) -> QueuedMessage:
    """Execute a background run in this process, and return its end."""
    id, agent = started.background_id, started.agent
    end, text = "cancelled", ""
    try:
        end, text = "done", (await stream.response).text
    except asyncio.CancelledError:
        pass
    except Exception as error:
        end, text = "failed", described(error)
    spent = amounts_of(tracker.spent())
    left: Any = {unit: limit - spent[unit] for unit, limit in tracker.limits.items()}
    return QueuedMessage(id=id, text=text, by=principal, child=id, agent=agent, end=end, left=left)


async def _tell(parent: Run, work: asyncio.Task[QueuedMessage]) -> None:
    """Tell a run the end of a background run, or leave it in the conversation for the session's next run if the parent is over."""
    message, messages = await work, parent.options.messages
    told = message_of_ends([message])
    assert messages is not None, "a run that begins a background run hears its end"
    assert told is not None
    try:
        await messages.send(parent.run_context.run_id, message)
        await messages.notify()
    except errors.MessageRefused:
        conversation = root_conversation(parent.session)
        while True:
            try:
                with conversation:
                    conversation.add(told, message.id)
                return
            except errors.ConversationBusy:  # another run is working on the session
                await asyncio.sleep(_LOOK_SECONDS)
