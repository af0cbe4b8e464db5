"""Trials: a scenario is crashed at one point after another, in forks of a process without threads.

A `Report` says what was tried and which laws were broken.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from handrail.testing.simulation.laws import LAWS, History, Trial
from handrail.testing.simulation.process import CRASHED, FILES, WORLD, Point, Points, crash, live
from handrail.testing.simulation.scenario import RUN, Scenario, Seen, World
from handrail.testing.simulation.storage import Storage, storage_at

NOWHERE = "no crash"


class Broken(NamedTuple):
    """A broken law, and the crash point at which it broke."""

    law: str
    at: str
    """The point to pass to `simulate(scenario, at=...)` to repeat it, or `no crash` if the uncrashed run broke it."""
    what: str

    def __str__(self) -> str:
        return f"at {self.at!r}: {self.law}: {self.what}"


class Report(NamedTuple):
    """The results of a simulation: the run's writes and steps, how many points were tried, and the broken laws."""

    scenario: str
    writes: int
    """Number of journal writes in an uncrashed run. Each has two crash points."""
    steps: int
    """Number of event loop steps in an uncrashed run. Each has one crash point."""
    tried: dict[str, int]
    """Number of points tried, by kind."""
    processes: int
    seconds: float
    broken: Sequence[Broken]

    def assert_kept(self) -> None:
        """Raise `AssertionError`, with the text of this report, if any law was broken."""
        if self.broken:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        tried = ", ".join(f"{count} {kind}" for kind, count in self.tried.items())
        lines = [
            f"{self.scenario}: {self.writes} journal writes and {self.steps} event loop steps",
            f"{sum(self.tried.values())} crash points tried in {self.processes} processes and {self.seconds:.1f} s: {tried}",
            f"{len(self.broken)} broken laws",
        ]
        lines += [
            f"  {law}: {times} times" for law, times in Counter(each.law for each in self.broken).items()
        ]
        lines += [f"  {each}" for each in self.broken[:20]]
        if len(self.broken) > 20:
            lines.append(f"  and {len(self.broken) - 20} more")
        return "\n".join(lines)


_LATER = 3600.0
"""Virtual seconds between a crash and the restart, longer than any lease."""
_MOST_SECONDS = 300
"""Maximum real seconds that a process may take before it is killed as hung."""


class Wanted(NamedTuple):
    """The selection of points to try."""

    write_every: int = 1
    step_every: int = 1
    overtaken_every: int = 1
    parked_every: int = 0
    again: bool = False
    """Whether to crash the restarted process as well, at some later point."""
    connected: bool = False
    """Whether a person is present and answers at once, so that the run is never parked."""
    at: str | None = None
    """The only point to try, or None to try all."""
    part: int = 0
    parts: int = 1
    journal: str | None = None
    """The URL of the PostgreSQL database that the journals are in, or None if they are files."""


class Found(NamedTuple):
    """The results of one part of the trials."""

    writes: int
    steps: int
    tried: dict[str, int]
    processes: int
    broken: list[Broken]


class Trials:
    """The trials of one scenario, each in a new folder."""

    def __init__(self, scenario: Scenario, wanted: Wanted, base: Path, storage: Storage) -> None:
        self._scenario = scenario
        self._storage = storage
        self._wanted = wanted
        self._base = base
        self._processes = 0
        self._writes: Sequence[int] = ()
        self._steps = 0

    def run(self) -> Found:
        gc.collect()
        gc.freeze()  # lets child processes share the memory of imported modules
        tried: Counter[str] = Counter()
        broken: list[Broken] = []
        uncrashed = self._measure(broken)
        if uncrashed is not None:
            for point in self._points():
                tried[point.kind] += 1
                broken += self._try(point, uncrashed)
        return Found(len(self._writes), self._steps, dict(tried), self._processes, broken)

    def _measure(self, broken: list[Broken]) -> Path | None:
        """Run the scenario three times without a crash, and add to `broken` if it breaks a law or takes different steps.

        In the first run the person is connected. The others are compared with it, because a run that is parked and replayed
        must have the same outcome. Returns the folder of the second run, or None if a run does not end.
        """
        measured: list[tuple[Sequence[int], int]] = []
        for name in ("connected", "uncrashed", "again"):
            folder = self._folder(name)
            connected = self._wanted.connected or name == "connected"
            status = self._wait(self._fork(folder, 0, measuring=True, connected=connected))
            world = World(folder / WORLD)
            history = History(world.all())
            world.close()
            over = history.over
            if status or over is None or history.ended is None:
                failed = history.of("failed")
                why = failed[-1]["message"] if failed else _last_words(folder)
                broken.append(Broken("the_run_ends", NOWHERE, f"it does not end even without a crash: {why}"))
                return None
            measured.append((over["writes"], over["steps"]))
            _import_all(over["modules"])
            broken += self._judge(NOWHERE, folder, self._base / "connected")
        if measured[1] != measured[2]:
            first, second = ((len(writes), steps) for writes, steps in measured[1:])
            what = f"it takes {first} writes and steps, and {second} when it is run again"
            broken.append(Broken("it is deterministic", NOWHERE, what))
        self._writes, self._steps = measured[1]
        return self._base / "uncrashed"

    def _points(self) -> Sequence[Point]:
        wanted = self._wanted
        if wanted.at is not None:
            return [Point.parse(wanted.at)] if wanted.part == 0 else []
        writes = self._writes[:: wanted.write_every]
        points = [Point(kind, number) for number in writes for kind in ("before write", "after write")]
        points += [Point("step", number) for number in range(1, self._steps + 1, wanted.step_every)]
        if wanted.overtaken_every:
            points += [
                Point("overtaken before write", each) for each in self._writes[:: wanted.overtaken_every]
            ]
        if wanted.parked_every:
            points += [
                Point("parked at step", each) for each in range(1, self._steps + 1, wanted.parked_every)
            ]
        return points[wanted.part :: wanted.parts]

    def _try(self, point: Point, uncrashed: Path) -> list[Broken]:
        folder = self._folder("trial")
        if point.is_overtaken:
            return self._overtake(point, folder, uncrashed)
        status = self._wait(self._fork(folder, 0, point))
        if status not in (0, CRASHED):
            return [Broken("the_run_ends", str(point), f"its process went wrong: {_last_words(folder)}")]
        process = 1
        if self._wanted.again:
            chance = random.Random(str(point))
            second = Point("step", chance.randint(1, max(2, self._steps // 2)))
            if chance.random() < 0.5:
                second = Point(chance.choice(("before write", "after write")), chance.choice(self._writes))
            self._wait(self._fork(folder, process, second))
            process += 1
        if self._wait(self._fork(folder, process)):
            return [Broken("the_run_ends", str(point), f"resuming it failed: {_last_words(folder)}")]
        return self._judge(str(point), folder, uncrashed)

    def _overtake(self, point: Point, folder: Path, uncrashed: Path) -> list[Broken]:
        """Pause the first process until another has taken its run, let it continue, and return the broken laws."""
        stopped, go_on = os.pipe(), os.pipe()

        def stop() -> None:
            signal.alarm(4 * _MOST_SECONDS)
            os.write(stopped[1], b".")
            os.read(go_on[0], 1)

        first = self._fork(folder, 0, point, stop)
        os.close(stopped[1])
        reached = os.read(stopped[0], 1)
        peeked = None
        if reached:
            process = 1
            if self._is_owned(folder):
                self._wait(self._fork(folder, process, start=0.0))
                peeked, process = process, process + 1
            self._wait(self._fork(folder, process))
            os.write(go_on[1], b".")
        status = self._wait(first)
        for end in (stopped[0], *go_on):
            os.close(end)
        if status:
            return [Broken("the_run_ends", str(point), f"its process went wrong: {_last_words(folder)}")]
        return self._judge(str(point), folder, uncrashed, overtaken=bool(reached), peeked=peeked)

    def _judge(
        self, at: str, folder: Path, uncrashed: Path, overtaken: bool = False, peeked: int | None = None
    ) -> list[Broken]:
        world, other = World(folder / WORLD), World(uncrashed / WORLD)
        trial = Trial(
            History(world.all(), peeked),
            History(other.all()),
            overtaken,
            self._scenario.secrets,
            self._scenario.unrecorded,
            self._storage.contents(folder) if self._scenario.unrecorded else b"",
        )
        broken = [Broken(law.__name__, at, what) for law in LAWS for what in law(trial)]
        for law in self._scenario.laws:
            what = law(Seen(at, world, other, overtaken))
            if what is not None:
                broken.append(Broken(getattr(law, "__name__", repr(law)), at, what))
        world.close()
        other.close()
        return broken

    # --- processes -------------------------------------------------------------------------------

    def _folder(self, name: str) -> Path:
        folder = self._base / name
        shutil.rmtree(folder, ignore_errors=True)
        self._storage.clear(folder)
        for path, text in {**dict.fromkeys([f"{FILES}/"], ""), **_below(self._scenario.files)}.items():
            target = folder / path
            (target if path.endswith("/") else target.parent).mkdir(parents=True, exist_ok=True)
            if not path.endswith("/"):
                target.write_text(text)
        return folder

    def _fork(
        self,
        folder: Path,
        process: int,
        at: Point | None = None,
        reached: Callable[[], None] = crash,
        start: float | None = None,
        measuring: bool = False,
        connected: bool | None = None,
    ) -> int:
        self._processes += 1
        child = os.fork()
        if child:
            return child
        try:
            signal.alarm(_MOST_SECONDS)
            said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            later = _LATER * process if start is None else start
            connected = self._wanted.connected if connected is None else connected
            points = Points(at, reached)
            live(
                self._scenario,
                self._storage,
                folder,
                process,
                points,
                later,
                measuring=measuring,
                connected=connected,
                stops=at is not None and at.is_parked,
            )
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _is_owned(self, folder: Path) -> bool:
        """Return whether a process owns the run now."""
        rows = self._storage.read(folder, "SELECT owner FROM runs WHERE id = ?", RUN)
        return bool(rows and rows[0][0])

    def _wait(self, child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def try_points(scenario: Scenario, wanted: Wanted) -> Found:
    """Run all trials of one part in this process, which must have no other threads."""
    with (
        contextlib.closing(storage_at(wanted.journal)) as storage,
        tempfile.TemporaryDirectory(prefix="handrail-simulation-") as base,
    ):
        return Trials(scenario, wanted, Path(base), storage).run()


def _import_all(modules: Sequence[str]) -> None:
    """Import the modules that a child process had to import, so that later ones don't have to."""
    for name in modules:
        if name not in sys.modules and not name.startswith("__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _below(files: Mapping[str, str]) -> dict[str, str]:
    return {f"{FILES}/{path}": text for path, text in files.items()}


def _last_words(folder: Path) -> str:
    said = folder / "said"
    return (
        said.read_text()[-2000:].strip() or "it printed nothing, so it may have hung" if said.exists() else ""
    )
