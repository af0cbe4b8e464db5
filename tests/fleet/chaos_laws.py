"""The laws that hold for the runs of the chaos app once all of them are over, whatever happened to their workers."""

from __future__ import annotations

import collections
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from fleet import chaos_app
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit, Entry, RunRow
from handrail.run.answer import RecordedAnswer
from handrail.run.record.begin import RunOutcome, decode_outcome

LAWS = (
    "every run finished",
    "every unit once",
    "effects settled at most once",
    "idempotent effects repeated with the same key",
    "irreversible effects never begun twice",
    "unknown outcomes told",
    "budgets exact",
    "files right",
    "the journal verifies",
)


class Broken(NamedTuple):
    """A violation of a law."""

    law: str
    what: str

    def __str__(self) -> str:
        return f"{self.law}: {self.what}"


def is_short(number: int) -> bool:
    """Return whether a run must fail because its budget is one call too small."""
    return number % 4 == 3


def workspace_of(number: int) -> str:
    """Return the name of the workspace that a run works in. Two of every twenty runs share one."""
    return f"w{number - (number % 20 == 1)}"


class Ledger:
    """The contents of a ledger file: how often each action began and ended for each order, and with which keys."""

    def __init__(self, path: Path) -> None:
        lines = chaos_app.read_ledger(path)
        self.begun = collections.Counter((what, order) for verb, what, order, _ in lines if verb == "begin")
        self.ended = collections.Counter((what, order) for verb, what, order, _ in lines if verb == "end")
        self.keys: dict[tuple[str, str], set[str]] = {}
        for verb, what, order, key in lines:
            if verb != "clock":
                self.keys.setdefault((what, order), set()).add(key)
        self.off = sum(line[0] == "clock" for line in lines)
        """How many lines were written by a process whose clock was wrong."""


class _Run(NamedTuple):
    """A run that is over, and everything recorded about it."""

    number: int
    row: RunRow
    outcome: RunOutcome
    units: Sequence[CommitUnit]
    failed: int
    """How many of its requests failed after the model had reported their tokens, so that they are counted."""
    ledger: Ledger

    @property
    def order(self) -> str:
        return f"o{self.number}"

    @property
    def is_short(self) -> bool:
        return is_short(self.number)

    def unit(self, tool: str) -> CommitUnit | None:
        return next((unit for unit in self.units if unit.tool == tool), None)


async def check(
    journal: Journal, runs: int, ledger: Ledger, settled: Sequence[str], count: Callable[[str, int], None]
) -> AsyncGenerator[Broken]:
    """Check all runs, and yield each violation.

    `settled` contains one name for each record of a settled step. `count` is called with figures about what happened.
    """
    count("steps settled", len(settled))
    for step, times in collections.Counter(settled).items():
        if times > 1:
            yield Broken("effects settled at most once", f"{step} was settled {times} times")
    for (what, order), keys in ledger.keys.items():
        if len(keys) > 1:
            yield Broken(
                "idempotent effects repeated with the same key", f"{what} {order} has {len(keys)} keys"
            )
    logs: dict[str, list[str]] = {}
    for number in range(runs):
        id, name = f"run{number}", workspace_of(number)
        row = await journal.runs.get(id)
        failed = _failed(await journal.calls.entries(id))
        run = _Run(number, row, decode_outcome(row), await journal.calls.load(id), failed, ledger)
        count(row.status, 1)
        count("legs", row.legs)
        count("pay again", max(0, ledger.begun["pay", run.order] - 1))
        count("ship unknown", int((unit := run.unit("ship")) is None or unit.status != "ok"))
        for law, what in (*_ends(run), *_effects(run), *_budget(run)):
            yield Broken(law, f"{id}: {what}")
        files = await _read(journal, name)
        for what in _files(run, files):
            yield Broken("files right", f"{id}: {what}")
        logs[name] = files.get("log", "").splitlines()
    count("lines in files", sum(map(len, logs.values())))
    verified = await journal.runs.verify()
    count("records", verified.records)
    for each in verified.altered:
        yield Broken("the journal verifies", str(each))


async def _read(journal: Journal, name: str) -> dict[str, str]:
    """Return the text of each file in a workspace."""
    states = {
        path: state for path, state in (await journal.workspaces.files(name)).items() if state is not None
    }
    digests = {path: state.digest for path, state in states.items() if state.kind == "file"}
    bytes_of = await journal.workspaces.fetch(set(digests.values()))
    return {path: bytes_of[digest].decode() for path, digest in digests.items()}


def _failed(entries: Sequence[Entry]) -> int:
    bodies = [each.body for each in entries if each.kind == "model answer"]
    answers = [msgspec.msgpack.decode(each, type=RecordedAnswer) for each in bodies]
    return sum(request.usage is not None for answer in answers for request in answer.failed)


def _ends(run: _Run) -> Iterator[tuple[str, str]]:
    wanted, outcome = "failed" if run.is_short else "done", run.outcome
    if run.row.status != wanted:
        yield "every run finished", f"{run.row.status} {outcome.stop_reason} {outcome.error}"
    for place, units in collections.Counter(unit.place for unit in run.units).items():
        if units > 1:
            yield "every unit once", f"{place} has {units} units"
    shipped = run.unit("ship")
    if shipped is None:
        yield "every unit once", f"ship has none; legs {run.row.legs}, deaths {run.row.deaths}"
    elif shipped.status != "ok" and "not known" not in _told(outcome, "ship"):
        yield "unknown outcomes told", f"the model was told {_told(outcome, 'ship')!r}"


def _told(outcome: RunOutcome, tool: str) -> str:
    """Return what the model was told about the call of a tool, or "" if nothing."""
    results = [each for message in outcome.messages for each in getattr(message, "results", ())]
    return next((each.text for each in results if each.name == tool), "")


def _effects(run: _Run) -> Iterator[tuple[str, str]]:
    ledger, order = run.ledger, run.order
    for what in ("ship", "pay", "book"):
        unit = run.unit(what)
        if unit is not None and unit.status == "ok" and not ledger.ended[what, order]:
            yield "effects settled at most once", f"{what} is recorded, but not in the ledger"
    if ledger.begun["ship", order] > 1:
        yield "irreversible effects never begun twice", f"ship began {ledger.begun['ship', order]} times"


def _budget(run: _Run) -> Iterator[tuple[str, str]]:
    """Yield each sign that a budget was applied wrongly: a failure with another cause, a wrong count of requests, a call wrongly stopped or allowed."""
    outcome = run.outcome
    if run.is_short and outcome.phase != "budget":
        yield "budgets exact", f"it failed, but not because of its budget: {outcome.error}"
    if not run.is_short and outcome.usage.requests != chaos_app.REQUESTS + run.failed:
        yield "budgets exact", f"{outcome.usage.requests} requests were counted"
    charged = sum(unit.charged for unit in run.units)
    for what in ("pay", "book", "fee", "tip"):  # a small budget excludes the last two
        is_wanted = not (run.is_short and what in ("fee", "tip"))
        if bool(run.ledger.begun[what, run.order]) != is_wanted:
            did = "never began" if is_wanted else "began, which its budget excludes"
            yield "budgets exact", f"{what} {did} ({charged} units charged)"


def _files(run: _Run, files: dict[str, str]) -> Iterator[str]:
    """Yield how the files of a run differ from what its committed calls wrote."""
    order, ledger = run.order, run.ledger
    lines = collections.Counter(files.get("log", "").splitlines())
    shipped = run.unit("ship")
    wanted = {
        "pay": 1,
        "ship": int(shipped is not None and shipped.status == "ok"),
        "charge": int(not run.is_short),
    }
    for what, times in wanted.items():
        if lines[f"{what} {order}"] != times:
            yield f"{what} is in the log {lines[f'{what} {order}']} times, not {times}"
    is_whole = ledger.begun["book", order] == ledger.ended["book", order] == 1
    booked = lines[f"book {order}"]
    if booked > 1 or (not booked and is_whole and _is_committed(run)):
        yield f"book is in the log {booked} times"
    if files.get(f"choices/{order}") != "blue":
        yield f"the choice is {files.get(f'choices/{order}')!r}"
    known = {"log", *(f"choices/o{number}" for number in range(run.number - 1, run.number + 2))}
    if not files.keys() <= known:
        yield f"there are other files: {sorted(files.keys() - known)}"


def _is_committed(run: _Run) -> bool:
    unit = run.unit("book")
    return unit is not None and unit.status == "ok" and bool(unit.workspaces)
