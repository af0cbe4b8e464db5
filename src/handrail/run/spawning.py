"""Background runs that calls begin: staged in the call's transaction, and begun when it commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from handrail.events import BackgroundStarted
from handrail.journal.records import Amounts, SpawnedRun
from handrail.run.transaction import Spawned, Transaction

if TYPE_CHECKING:
    from handrail.run.call import Attempt


class _Asked(msgspec.Struct):
    message: str


def stage_spawned(attempt: Attempt, transaction: Transaction, spawned: SpawnedRun) -> None:
    """Stage a background run that is submitted when the call is recorded. Raises `BudgetExceededError` if its share is not left."""
    run, parent = spawned.run, spawned.run.parent
    assert parent is not None, "a call begins it"
    message = msgspec.msgpack.decode(run.request, type=_Asked).message
    started = BackgroundStarted(run.id, run.prompt, message, parent.call_id, attempt.run_context)
    stage(attempt, transaction, parent.share, started, record=spawned)


def stage(
    attempt: Attempt,
    transaction: Transaction,
    share: Amounts,
    started: BackgroundStarted,
    begin: Callable[[], None] = lambda: None,
    record: SpawnedRun | None = None,
) -> None:
    """Reserve the share of a background run, and stage the run. Raises `BudgetExceededError` if the share is not left."""
    run = attempt.run
    reserved = run.costs.tracker.reserve(**share)

    def committed() -> None:
        run.publish(started)
        begin()

    with run.session.lock:  # a handler's threads may each begin one
        transaction.spawned = (*transaction.spawned, Spawned(committed, reserved, record))
