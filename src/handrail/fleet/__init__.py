"""A fleet: worker processes, on any number of machines, that execute the runs in one journal.

A run is executed in *legs*. A leg is one worker's execution of a run, until the run is over or parked, or the worker is
lost. The journal decides which worker has a run. So a leg that starts twice does nothing the second time, and any queue
that delivers at least once can start legs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.fleet.apps import FleetApp
    from handrail.fleet.dispatcher import Dispatcher, Engine, JournalDispatcher
    from handrail.fleet.runner import Runner
    from handrail.fleet.submission import Submission, submit

__all__ = ["Dispatcher", "Engine", "FleetApp", "JournalDispatcher", "Runner", "Submission", "submit"]

_HOMES = {
    "Dispatcher": "dispatcher",
    "Engine": "dispatcher",
    "FleetApp": "apps",
    "JournalDispatcher": "dispatcher",
    "Runner": "runner",
    "Submission": "submission",
    "submit": "submission",
}


if not TYPE_CHECKING:  # a type checker would take every name for one of the package's

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"handrail.fleet.{_HOMES[name]}"), name)
