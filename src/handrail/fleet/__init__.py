"""A fleet: worker processes, on any number of machines, that execute the runs in one journal.

A run is executed in *legs*. A leg is one worker's execution of a run, until the run is over or parked, or the worker is
lost. The journal decides which worker has a run. So a leg that starts twice does nothing the second time, and any queue
that delivers at least once can start legs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.imports import names_on_first_use

if TYPE_CHECKING:
    from handrail.fleet.dispatcher import Dispatcher, Engine, JournalDispatcher
    from handrail.fleet.runner import Runner
    from handrail.fleet.submission import FleetApp, Submission, submit

__all__ = ["Dispatcher", "Engine", "FleetApp", "JournalDispatcher", "Runner", "Submission", "submit"]


if not TYPE_CHECKING:  # a type checker would take every name for one of the package's
    __getattr__ = names_on_first_use(
        __name__,
        {
            "dispatcher": "Dispatcher Engine JournalDispatcher",
            "runner": "Runner",
            "submission": "FleetApp Submission submit",
        },
    )
