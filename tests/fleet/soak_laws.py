"""What holds after a soak: no process holds more than it did after its warm-up, and every run of a person ended as it should."""

from __future__ import annotations

import collections
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fleet.chaos_laws import Broken, Ledger
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, CommitUnit, RunRow
from handrail.run.record.begin import RunOutcome, decode_outcome


class Figures(NamedTuple):
    """What a process holds."""

    memory: float
    """Resident memory, in MB."""
    descriptors: int
    threads: int
    children: int
    """Processes that it has started. The first command starts one that stays."""
    files: int
    """Temporary files and folders: in its own folder for them, and those of calls at work beside the app's folder."""
    mounts: int
    """Mounts that it and its children see, and that have to do with the soak."""

    @classmethod
    def of(cls, pid: int, home: Path, folders: Iterable[Path], besides: Iterable[str] = ()) -> Figures:
        """Return what the process holds, with the temporary files in these folders that are not in those of `besides`.

        Only mounts of something in `home` or on it are counted, because other programs may mount something meanwhile.
        """
        known = tuple(besides)
        process = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        children = [pid for each in process.glob("task/*/children") for pid in each.read_text().split()]
        mounts = [Path(f"/proc/{each}/mountinfo").read_text() for each in (pid, *children)]
        return cls(
            round(int(status["VmRSS"].split()[0]) / 1024, 1),
            len(os.listdir(process / "fd")),
            int(status["Threads"]),
            len(children),
            sum(not str(each).startswith(known) for folder in folders for each in folder.rglob("*")),
            sum(str(home) in line for each in mounts for line in each.splitlines()),
        )

    def least(self, other: Figures) -> Figures:
        """Return the less of each figure."""
        return Figures(*(min(pair) for pair in zip(self, other, strict=True)))  # pyright: ignore[reportArgumentType]  # the fields keep their types


GROWTH = Figures(memory=24, descriptors=6, threads=3, children=0, files=0, mounts=0)
"""By how much a figure may grow between two quiet moments. Pools of connections and threads fill up, and memory is not
returned to the system at once."""


def grown(name: str, start: Figures, end: Figures, allowed: Figures = GROWTH) -> Iterator[Broken]:
    """Yield each figure of a process that has grown by more than is allowed."""
    for what, before, after, most in zip(Figures._fields, start, end, allowed, strict=True):
        if after - before > most:
            yield Broken("nothing grows", f"{name}: {what} {before:g} -> {after:g}, allowed {most:g} more")


_EFFECTS = {"spend": "spend", "begin": "paid"}
"""What the ledger must have after a turn. A background run writes the second."""


class _Turn(NamedTuple):
    """A run that a person has begun, and everything recorded about it."""

    row: RunRow
    outcome: RunOutcome
    units: Sequence[CommitUnit]
    text: str
    """What the person said; "" if the server died before it named the run."""

    @property
    def verb(self) -> str:
        return self.text.partition(" ")[0]

    @property
    def order(self) -> str:
        return self.text.partition(" ")[2]


async def check_turns(
    journal: Journal,
    turns: Mapping[str, str],
    ledger: Ledger,
    kept: Sequence[str],
    count: Callable[[str, int], None],
) -> AsyncGenerator[Broken]:
    """Check all runs of a journal that are no orders, and yield each violation. `turns` has what people said, by run.

    `kept` has the lines of all files in which the app keeps orders. `count` is called with figures about what happened.
    """
    lines = collections.Counter(kept)
    for row in await _rows(journal):
        turn = _Turn(
            row,
            decode_outcome(row),
            await journal.calls.load(row.record.id),
            turns.get(row.record.id, ""),
        )
        entries = await journal.calls.entries(row.record.id)
        count("compactions", sum(each.kind == "compaction" for each in entries))
        count("calls that failed", sum(unit.status != "ok" for unit in turn.units))
        for law, what in (*_ends(turn), *_calls(turn, ledger), *_lines(turn, lines)):
            yield Broken(law, f"{row.record.id} ({turn.text}): {what}")


async def _rows(journal: Journal) -> Sequence[RunRow]:
    found: list[RunRow] = []
    while page := await journal.runs.list(limit=500, before=found[-1].record.mark if found else None):
        found += page
    return [each for each in found if not each.record.id.removeprefix("run").isdecimal()]


def _ends(turn: _Turn) -> Iterator[tuple[str, str]]:
    wanted = {"cancelled"} if turn.verb == "rest" else {"done"} if turn.text else OVER
    if turn.row.status not in wanted:
        yield "every run finished", f"{turn.row.status} {turn.outcome.stop_reason} {turn.outcome.error}"


def _calls(turn: _Turn, ledger: Ledger) -> Iterator[tuple[str, str]]:
    for place, units in collections.Counter(unit.place for unit in turn.units).items():
        if units > 1:
            yield "every unit once", f"{place} has {units} units"
    what = _EFFECTS.get(turn.verb)
    if what is not None and not ledger.ended[what, turn.order]:
        yield "effects settled at most once", f"{what} is not in the ledger"


def _lines(turn: _Turn, lines: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    if turn.verb == "keep":
        wanted = sum(unit.status == "ok" for unit in turn.units)
        if lines.get(turn.order, 0) != wanted:
            yield "files right", f"it is in the files {lines.get(turn.order, 0)} times, not {wanted}"


def kept_in(folder: Path) -> list[str]:
    """Return the lines of all files in which the app keeps orders."""
    return [line for each in sorted((folder / "kept").glob("*")) for line in each.read_text().splitlines()]
