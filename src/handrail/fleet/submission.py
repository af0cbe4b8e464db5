"""`submit`: record a run for a worker to begin."""

from __future__ import annotations

import socket

import msgspec

from handrail.adapter.requests import RunRequest
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.deadline import is_span
from handrail.errors import DefinitionError
from handrail.fleet.apps import FleetApp
from handrail.fleet.dispatcher import Dispatcher
from handrail.ids import NewId, random_id
from handrail.journals import Journal
from handrail.limits import Budget
from handrail.records import RunRecord, RunRow

LOCAL = "local"
"""The default principal of submitted runs."""


def this_host() -> str:
    """Return the name of this host, by which runs are pinned to it."""
    return socket.gethostname()


async def submit(
    journal: Journal,
    app: FleetApp,
    message: str,
    *,
    session_id: str = "",
    principal: str = LOCAL,
    run_id: str = "",
    at: float | None = None,
    every: float | None = None,
    key: str = "",
    folder: str = "",
    startup_files: tuple[str, ...] = (),
    host: str = "",
    deadline: float | None = None,
    budget: Budget | None = None,
    dispatcher: Dispatcher | None = None,
    clock: Clock = SYSTEM_CLOCK,
    new_id: NewId = random_id,
) -> RunRow:
    """Record a run for a worker to begin, and return its row. This process does not execute it.

    Raises `DefinitionError` if `every` is not a positive number of seconds.

    - `session_id`: the session that the run continues. The runs of a session take turns. Default: a new session.
    - `at`: when the run is due, in seconds since 1970. Default: now.
    - `every`: seconds between repeated runs. Each run submits the next one, so cancelling that ends the repetition.
    - `key`: submitting again with the same key, as the same principal, returns the first run.
    - `folder`: the folder that the run works in, or `workspace:NAME`.
    - `host`: the only host whose workers take the run. Default: this host if there is a `folder`, otherwise any host. A
      workspace moves with its run, so it pins the run to no host.
    - `deadline`: how many seconds the run has once it begins.
    """
    if every is not None and not is_span(every):
        raise DefinitionError(
            f"every={every!r} is not a positive number of seconds. Pass one, such as every=3600."
        )
    now = clock.now().timestamp()
    due = now if at is None else at
    run_id = run_id or new_id()
    request = RunRequest(
        message=message,
        deadline=deadline,
        budget=None if budget is None else {str(unit): limit for unit, limit in budget.limits().items()},
        folder=folder,
        startup_files=list(startup_files),
        every=every,
        due_at=due,
        key=key or run_id,
    )
    record = RunRecord(
        id=run_id,
        session_id=session_id or run_id,
        principal=principal,
        prompt=app.source.prompt_name,
        model=app.source.model,
        began_at=now,
        app=app.name,
        code=app.code,
        request=msgspec.msgpack.encode(request),
    )
    pinned = host or (this_host() if folder and not folder.startswith("workspace:") else "")
    row = await journal.queue.submit(record, at=due, host=pinned, key=key)
    if dispatcher is not None:
        await dispatcher.submit(row, at)
    return row


async def repeat(
    journal: Journal, row: RunRow, request: RunRequest, dispatcher: Dispatcher, clock: Clock
) -> None:
    """Submit the next run of a series. Does nothing for a run that is not repeated.

    Times that have passed are skipped. The new run's key contains its time, so that it is submitted only once, even by
    several workers.
    """
    if request.every is None:
        return
    late = max(0.0, clock.now().timestamp() - request.due_at)
    due = request.due_at + request.every * (late // request.every + 1)
    key = f"{request.key}@{due:.3f}"
    record = msgspec.structs.replace(
        row.record,
        id=f"{request.key}-{int(due)}",
        session_id=row.record.session_id
        if row.record.session_id != row.record.id
        else f"{request.key}-{int(due)}",
        began_at=due,
        begin=b"",
        request=msgspec.msgpack.encode(msgspec.structs.replace(request, due_at=due)),
    )
    next_row = await journal.queue.submit(record, at=due, host=row.host, key=key)
    await dispatcher.submit(next_row, due)
