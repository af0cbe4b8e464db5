"""`FleetApp`: an app whose runs workers execute. `Submission` and `submit`: record a run for a worker to begin."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from handrail.concurrency.deadline import is_span
from handrail.content import Attachment, AttachmentSource, attachments_of
from handrail.errors import DefinitionError
from handrail.fleet.dispatcher import Dispatcher
from handrail.ids import NewId, check_id, random_id, started_from
from handrail.journal.protocol import Journal
from handrail.journal.records import WORKSPACE, RunRecord, RunRow, queue_of
from handrail.messages import Model
from handrail.run.limits import Budget
from handrail.run.options import check_value
from handrail.run.record.begin import RunRequest, code_of
from handrail.run.record.log import contents, load_attachments
from handrail.serve.sources import Source, load


@dataclass(slots=True)
class FleetApp:
    """An app and the digest of its code, which together name the queue that its runs wait in."""

    named: str
    """The app as the user named it."""
    source: Source
    code: str
    _folders: dict[tuple[str, tuple[str, ...]], Source] = field(default_factory=dict[Any, Any])

    @classmethod
    def load(
        cls, named: str, *, model: Model | None = None, approvals: Any = None, files: Any = None
    ) -> FleetApp:
        """Load an app: a module (`pkg.mod`, `pkg.mod:prompt`, `app.py`), a worker's file, or a folder of workers.

        Raises `DefinitionError` if it can't be loaded.
        """
        source = load(named, model=model, approvals=approvals, files=files).source
        return cls(named, source, code_of(source.app))

    @property
    def name(self) -> str:
        return self.source.app

    @property
    def queue(self) -> str:
        """The queue for runs of this app and this version of its code."""
        return queue_of(self.source.app, self.code)

    def in_folder(self, folder: str, startup_files: Sequence[str] = ()) -> Source:
        """Return the app's source for runs that work in a folder or workspace, or its ordinary source if `folder` is "".

        Raises `DefinitionError` if the folder is not on this host.
        """
        if not folder:
            return self.source
        if folder.startswith(WORKSPACE):  # not cached, because there may be very many workspaces
            return self.source.with_files(_open(folder, startup_files))
        key = folder, tuple(startup_files)
        if key not in self._folders:
            self._folders[key] = self.source.with_files(_open(folder, startup_files))
        return self._folders[key]


def _open(folder: str, startup_files: Sequence[str]) -> Any:
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.workspace import Workspace

    if (workspace := Workspace.named(folder, startup_files=startup_files)) is not None:
        return workspace
    if not Path(folder).is_dir():
        raise DefinitionError(
            f"the folder {folder!r} of a run is not on this host. Start a worker on the host that has it."
        )
    return DirectoryFilesystem(folder, startup_files=startup_files)


LOCAL = "local"
"""The default principal of submitted runs."""


def this_host() -> str:
    """Return the name of this host, by which runs are pinned to it."""
    return socket.gethostname()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a run is asked to do, for whom, when and where.

    - `session_id`: the session that the run continues. The runs of a session take turns. Default: a new session.
    - `run_id`: the id of the run. Default: a new one.
    - `at`: when the run is due, in seconds since 1970. Default: now.
    - `every`: seconds between repeated runs. Each run submits the next one. To end the series, cancel the next run.
    - `key`: submitting again with the same key, as the same principal, returns the first run.
    - `folder`: the folder that the run works in, or `workspace:NAME`.
    - `startup_files`: patterns of the startup files in the folder that the run's calls may change without a separate approval.
    - `host`: the only host whose workers take the run. Default: this host if `folder` is a path, otherwise any host. A
      workspace can be used on any host.
    - `attachments`: files for the model, given as attachments, paths on this host, or http addresses. The bytes of files are
      recorded with the run. Addresses are recorded as they are.
    - `deadline`: how many seconds the run has once it begins.
    - `traceparent`: the span that the run belongs to, as W3C defines it. Default: the app's current span, if telemetry is on.

    Raises `DefinitionError` if `every` is not a positive number of seconds, or an attachment can't be read.
    """

    message: str = field(kw_only=False)
    session_id: str = ""
    principal: str = LOCAL
    run_id: str = ""
    at: float | None = None
    every: float | None = None
    key: str = ""
    folder: str = ""
    startup_files: tuple[str, ...] = ()
    attachments: Sequence[AttachmentSource] = ()
    host: str = ""
    deadline: float | None = None
    budget: Budget | None = None
    traceparent: str = ""

    def __post_init__(self) -> None:
        check_id("principal", self.principal)
        for what, id in (("session id", self.session_id), ("run id", self.run_id)):
            if id != "":
                check_id(what, id)
        if self.every is not None and not is_span(self.every):
            raise DefinitionError(
                f"every={self.every!r} is not a positive number of seconds. Pass one, such as every=3600."
            )

        if self.traceparent:
            check_value("traceparent", self.traceparent)
        object.__setattr__(self, "attachments", attachments_of(self.attachments))

    @property
    def loaded(self) -> Sequence[Attachment]:
        """The attachments, including the bytes of files that were given as paths."""
        return attachments_of(self.attachments)

    def request(self, run_id: str, due_at: float) -> RunRequest:
        """Return the request that is recorded with the run."""
        budget = self.budget
        return RunRequest(
            message=self.message,
            attachments=list(self.loaded),
            deadline=self.deadline,
            budget=None if budget is None else {str(unit): limit for unit, limit in budget.limits().items()},
            folder=self.folder,
            startup_files=list(self.startup_files),
            every=self.every,
            due_at=due_at,
            key=self.key or run_id,
            traceparent=self.traceparent or started_from(),
        )

    @property
    def pinned_host(self) -> str:
        """The only host whose workers take the run; "" for any host."""
        is_here = self.folder and not self.folder.startswith(WORKSPACE)
        return self.host or (this_host() if is_here else "")


async def submit(
    journal: Journal,
    app: FleetApp,
    submission: Submission | str,
    *,
    dispatcher: Dispatcher | None = None,
    new_id: NewId = random_id,
) -> RunRow:
    """Record a run for a worker to begin, and return its row. This process does not execute it.

    A text is submitted as the message of a run in a new session. If the same principal has submitted a run with the same key
    before, that run's row is returned, and nothing is recorded. The `dispatcher`, if there is one, is asked to start the first
    leg. Raises `RunError` if the journal already has another run with this id.
    """
    asked = Submission(submission) if isinstance(submission, str) else submission
    now = journal.clock.now().timestamp()
    due = now if asked.at is None else asked.at
    run_id = asked.run_id or new_id()
    source = app.source
    record = record_of(asked, run_id, now, due, source.prompt_name, source.model, app.name, app.code)
    blobs = contents(asked.loaded)
    row = await journal.queue.submit(record, at=due, host=asked.pinned_host, key=asked.key, blobs=blobs)
    if dispatcher is not None:
        await dispatcher.submit(row, asked.at)
    return row


def record_of(
    asked: Submission, id: str, now: float, due: float, prompt: str, model: str, app: str, code: str = ""
) -> RunRecord:
    """Return the record of a run that is submitted now."""
    return RunRecord(
        id=id,
        session_id=asked.session_id or id,
        principal=asked.principal,
        prompt=prompt,
        model=model,
        began_at=now,
        app=app,
        code=code or code_of(app),
        request=msgspec.msgpack.encode(asked.request(id, due)),
    )


async def repeat(journal: Journal, row: RunRow, request: RunRequest, dispatcher: Dispatcher) -> None:
    """Submit the next run of a series. Does nothing for a run that is not repeated.

    Times that have passed are skipped. The new run's key contains its time, so that it is submitted only once, even if
    several workers try.
    """
    if request.every is None:
        return
    late = max(0.0, journal.clock.now().timestamp() - request.due_at)
    due = request.due_at + request.every * (late // request.every + 1)
    key = f"{request.key}@{due:.3f}"
    new_id = f"{request.key}-{due:.3f}".removesuffix(".000")
    await load_attachments(journal, row.record.id, request.attachments)
    has_own_session = row.record.session_id == row.record.id
    record = msgspec.structs.replace(
        row.record,
        id=new_id,
        session_id=new_id if has_own_session else row.record.session_id,
        began_at=due,
        begin=b"",
        request=msgspec.msgpack.encode(msgspec.structs.replace(request, due_at=due, traceparent="")),
    )
    blobs = contents(request.attachments)
    next_row = await journal.queue.submit(record, at=due, host=row.host, key=key, blobs=blobs)
    await dispatcher.submit(next_row, due)
