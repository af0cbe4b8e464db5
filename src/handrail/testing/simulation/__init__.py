"""Deterministic simulation: a run is crashed at every possible point and resumed, and the laws are checked.

    report = simulate(Scenario(name="a payment", play=play))
    report.assert_kept()

A scenario is played in virtual time by real processes. One dies at its crash point as if by `kill -9`, and others
continue from the state that it left. `play(stage)` creates the adapter, prompt and tools from the stage,
again in each process. To run a scenario from a shell: `python -m handrail.testing.simulation module:scenario`.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from handrail.errors import DefinitionError, HandrailError
from handrail.journal.postgres.address import parse_url
from handrail.testing.simulation.process import Point
from handrail.testing.simulation.scenario import (
    Happening,
    Law,
    Play,
    Scenario,
    Seen,
    SimulatedModel,
    Stage,
    World,
)
from handrail.testing.simulation.trials import Broken, Found, Report, Wanted, try_points

__all__ = [
    "Broken",
    "Happening",
    "Law",
    "Play",
    "Point",
    "Report",
    "Scenario",
    "Seen",
    "SimulatedModel",
    "SimulationError",
    "Stage",
    "World",
    "simulate",
]


class SimulationError(HandrailError, RuntimeError):
    """Raised if a process that runs the trials ends unexpectedly."""

    def __init__(self, status: int | None) -> None:
        super().__init__(
            f"the process that tries the crash points ended with status {status}; its output above says why. "
            "It must be able to import the scenario: define the scenario and its functions at the top level of a module."
        )
        self.status = status


def simulate(
    scenario: Scenario,
    *,
    write_every: int = 1,
    step_every: int = 1,
    overtaken_every: int = 1,
    parked_every: int = 0,
    again: bool = False,
    connected: bool = False,
    at: str | None = None,
    jobs: int = 1,
    journal: str | None = None,
) -> Report:
    """Crash the scenario at every point, resume it, and check the laws.

    - `write_every`, `step_every`: crash only at every Nth journal write, or at every Nth step of the event loop.
    - `overtaken_every`: at every Nth write the process pauses instead of dying, and continues after another
      process has taken its run. 0 omits these points.
    - `parked_every`: at every Nth step the process is told to stop, parks its run by force, and ends. 0 omits these
      points.
    - `again`: crash the restarted process as well, at some later point.
    - `connected`: let the person be present and answer at once, so that the run is never parked.
    - `at`: try only this point, given as in a report.
    - `jobs`: how many points are tried at once.
    - `journal`: the URL of a PostgreSQL database, to record the run there, in schemas that the simulation creates and
      drops. By default it is recorded in SQLite files.

    Raises `DefinitionError` if a number is invalid, `JournalError` if the URL is invalid, and `SimulationError` if `at` is not
    a point or if a process that tries points fails.
    """
    for name, every in (("write_every", write_every), ("step_every", step_every), ("jobs", jobs)):
        if every < 1:
            raise DefinitionError(f"{name} is {every}. Pass 1 or more.")
    if overtaken_every < 0 or parked_every < 0:
        raise DefinitionError(
            "overtaken_every and parked_every can't be negative. Pass 0 to leave these points out."
        )
    if journal is not None:
        parse_url(journal)
    began = time.perf_counter()
    parts = [
        Wanted(
            write_every, step_every, overtaken_every, parked_every, again, connected, at, part, jobs, journal
        )
        for part in range(jobs)
    ]
    # Each part runs in a new interpreter, because this one may have threads, which a fork does not copy.
    context = multiprocessing.get_context("spawn")
    running: list[tuple[BaseProcess, Connection]] = []
    for wanted in parts:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_try_part, args=(scenario, wanted, theirs))
        process.start()
        theirs.close()
        running.append((process, ours))
    found = [_found(process, ours) for process, ours in running]
    tried: Counter[str] = Counter()
    for part in found:
        tried.update(part.tried)
    return Report(
        scenario.name,
        found[0].writes,
        found[0].steps,
        dict(tried),
        sum(part.processes for part in found),
        time.perf_counter() - began,
        list(dict.fromkeys(each for part in found for each in part.broken)),
    )


def _try_part(scenario: Scenario, wanted: Wanted, theirs: Connection) -> None:
    theirs.send(try_points(scenario, wanted))
    theirs.close()


def _found(process: BaseProcess, ours: Connection) -> Found:
    try:
        return ours.recv()
    except EOFError:
        process.join()
        raise SimulationError(process.exitcode) from None
    finally:
        ours.close()
        process.join()
