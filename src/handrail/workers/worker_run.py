"""`WorkerRun`: one run of a worker, either outermost or inside a call."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import msgspec

from handrail.agent import AgentTool, result_of
from handrail.concurrency.user_code import Callback
from handrail.content import Attachment
from handrail.context import (
    MessageCallback,
    ToolContext,
    WorkerFacts,
    WorkerMessage,
)
from handrail.errors import NotSupported
from handrail.events import MessageAdded
from handrail.messages import Model
from handrail.run.call import Attempt, attempt_of
from handrail.run.conversation import ROOT
from handrail.run.entry import CallAdapter
from handrail.run.options import RunOptions
from handrail.run.record.log import attached_to, load_attachments, store_attachments
from handrail.run.run import Run
from handrail.schema import to_json
from handrail.text.spelling import nearest
from handrail.tools import Effect, Tool, ToolResult
from handrail.workers.attachments import (
    WorkerCall,
    WorkerCallWithFiles,
    accept,
    as_argument,
    message_with,
    visible_to,
)
from handrail.workers.front_matter import AttachmentRule
from handrail.workers.worker import Worker

if TYPE_CHECKING:
    from handrail.workers.registry import WorkerRegistry


class WorkerSettings(msgspec.Struct, frozen=True):
    """Settings from a worker's caller, for the worker and for all workers that it calls."""

    root: str = ""
    models: Mapping[str, Model | str] = {}
    """Models by worker name. They take precedence over those in the files."""
    message_callback: MessageCallback | None = None


class Reach:
    """The workers that one run's calls can call by name. It is the `workers` of the run."""

    def __init__(self, registry: WorkerRegistry, worker: Worker | None, given: WorkerSettings) -> None:
        self.registry = registry
        self.worker = worker
        """The worker whose run this is.

        None for a run without a worker, which may call all workers in the folder.
        """
        self.given = given

    def find(self, name: str, attempt: Attempt, /) -> Tool[Any, Any] | None:
        if self.worker is None:
            return self.registry.tool(name) if name in self.registry.names else None
        session = attempt.run.session if attempt.parent is None else attempt.parent.session
        created = self.registry.created(self.worker, name, session)
        return None if created is None else worker_tool(created, lambda: created)

    def why_not(self, name: str, /) -> str:
        own = self.registry.names if self.worker is None else self.worker.workers
        if self.worker is not None and name in self.registry.names and name not in own:
            return f"{self.worker.name} may not call the worker {name}: its file does not list it under `workers:`."
        near = nearest(name, own)
        return f"Did you mean the worker {near}?" if near else ""

    def arguments(self, input: Any, attachments: Sequence[Any], /) -> Mapping[str, Any]:
        text = input if isinstance(input, str) else to_json(input).decode()
        given = [as_argument(each) for each in attachments]
        return {"input": text, "attachments": given} if given else {"input": text}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WorkerRun:
    """One run of a worker, which sets the workers, attachments and callback of the run."""

    worker: Worker
    attachments: tuple[Attachment, ...]
    given: WorkerSettings
    path: tuple[str, ...]

    @property
    def models(self) -> Mapping[str, Model | str]:
        """Models by worker name. They take precedence over those in the files."""
        return self.given.models

    def with_attachments(self, attachments: tuple[Attachment, ...]) -> WorkerRun:
        """Return a copy of this run with other attachments. A resumed run gets the recorded ones this way."""
        return dataclasses.replace(self, attachments=attachments)

    def open(self, run: Run, /) -> None:
        worker = self.worker
        run.workers = Reach(worker.registry, worker, self.given)
        run.worker = WorkerFacts(
            worker.name,
            worker.registry.view(worker.workers),
            worker.creation_defaults.model_dump(exclude_none=True),
            self.attachments,
            self.given.message_callback,
        )

    @asynccontextmanager
    async def enter(self, run: Run, /) -> AsyncGenerator[None]:
        self.open(run)
        callback = self.given.message_callback
        if callback is None:
            yield
            return
        run_id = run.run_context.run_id
        tell = Callback(callback, "message_callback")

        def hear(added: MessageAdded) -> None:
            if added.run_id == run_id:
                tell(WorkerMessage(self.path, added.message))

        stop = run.session.dispatcher.subscribe(MessageAdded, hear)
        try:
            yield
        finally:
            stop()
            await tell.finish()


def worker_tool(worker: Worker, find: Callable[[], Worker]) -> AgentTool:
    """Create a tool with the name and settings of `worker`. At each call, `find` returns the worker to run."""
    return tool_for(worker.name, worker.description, worker.attachments, worker.effect, find)


def tool_for(
    name: str, description: str, rule: AttachmentRule, effect: Effect, find: Callable[[], Worker]
) -> AgentTool:
    """Create a tool that calls a worker. `find` looks the worker up at each call, and may raise an error."""

    async def handler(params: Any, *, context: ToolContext) -> ToolResult[Any]:
        return await run_nested(find(), params, context)

    return AgentTool(
        name,
        description,
        handler,
        params=WorkerCallWithFiles if rule.count else WorkerCall,
        result=Any,
        capabilities=frozenset({"worker"}),
        effect=effect,
    )


async def run_nested(worker: Worker, params: Any, context: ToolContext) -> ToolResult[Any]:
    """Run a worker inside a call that the gate has allowed.

    Raises `NotSupported` if no gate made the context, `DefinitionError` if the worker's model is unknown, and `WorkerError` if
    its instructions can't be rendered. Raises `ToolValidationError` if an attachment is not allowed, or if the caller created
    the worker and it is no longer valid or allowed.
    """
    call = attempt_of(context)
    if call is None:
        raise NotSupported("adapter", "Call the worker through a gate.")
    around = call.run.workers
    reach = around if isinstance(around, Reach) else None
    given = WorkerSettings() if reach is None else reach.given
    registry = worker.registry
    if reach is not None and reach.worker is not None and reach.registry is registry:
        # In this session, a worker that the caller created replaces the folder's worker with the same name.
        worker = registry.created(reach.worker, worker.name, context.session) or worker
    call.open_transaction.commits_each = worker.commits_each
    attachments = await _attachments(worker, params.attachments, call, context)
    path = (given.root, *call.path) if given.root else call.path
    adapter = cast(CallAdapter, context.adapter)
    model = given.models.get(worker.name) or worker.find_model()
    shown = visible_to(adapter.model_or(model), attachments) if attachments else ()
    options = RunOptions(
        params=worker.render(params.input, [each.name for each in attachments]),
        message=message_with(params.input, attachments, shown),
        attachments=shown,
        deadline=worker.deadline(call.run.clock),
        budget=worker.budget(),
        workers=WorkerRun(worker, attachments, given, path),
    )
    response = await adapter.run(worker.prompt, options, model, worker.limits.depth)
    return result_of(worker.name, response, worker.output_schema is not None)


async def _attachments(
    worker: Worker, given: Sequence[Any], call: Attempt, context: ToolContext
) -> tuple[Attachment, ...]:
    """Return the attachments that a call gives to a worker. Raises `ToolValidationError` if one is not allowed.

    A name or a path may mean something else later. So a run with a journal records their bytes, and a call that is run
    again after a restart uses the recorded bytes.
    """
    log, place = call.run.log, call.place
    recorded = log.find("attachments", place, list[Attachment])
    if recorded is not None:
        await load_attachments(log.journal, log.run_id, recorded)
        return tuple(recorded)
    named = any(isinstance(each, str) for each in given)
    own = _own(call.run) if named else ()
    found = accept(worker.name, worker.attachments, given, lambda: context.filesystem, own)
    if log.is_kept and named:
        await store_attachments(log.journal, log.run_id, found)
        await log.note("attachments", place, found)
    return found


def _own(run: Run) -> tuple[Attachment, ...]:
    """Return the attachments that a run's calls may pass on: those of its worker, and those in its conversation."""
    given = () if run.worker is None else run.worker.attachments
    key = ROOT if run.outer is None else run.run_context.run_id
    added = run.session[MessageAdded].where(lambda each: each.conversation == key)
    return (*given, *attached_to(each.message for each in added))
