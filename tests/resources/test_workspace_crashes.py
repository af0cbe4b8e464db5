"""At whatever point a process that uses a workspace is killed, every host then has what is recorded, and nothing else."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail import SqliteJournal
from resources.directory.crashes import KILLED, Killed, picked
from resources.workspace_crashes import prepare
from resources.workspaces import run, tree

pytestmark = pytest.mark.once  # processes are slow to start, and behave the same under every Python version

HOSTS = ("here", "there")
KILLS = 5
"""For each kind of work, the minimum number of points at which its process is killed. A deep run tries all points."""


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    program = Killed(Path(__file__).with_name("workspace_crashes.py"))
    yield program
    program.close()


def copies(base: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Open the workspace on both hosts. Returns what each copy contains, and the ids of the recorded calls of the run `r2`."""

    async def look() -> tuple[list[dict[str, Any]], list[str]]:
        journal = SqliteJournal(base / "journal.db")
        try:
            for number, host in enumerate(HOSTS):
                await run(journal, base / host, run_id=f"look {number}")
            assert not (await journal.runs.verify()).altered
            made = (
                [unit.call_id for unit in await journal.calls.load("r2")] if await _has(journal, "r2") else []
            )
            return [tree(base / host) for host in HOSTS], made
        finally:
            journal.close()

    return asyncio.run(look())


async def _has(journal: SqliteJournal, run_id: str) -> bool:
    return any(row.record.id == run_id for row in await journal.runs.list())


def trees(base: Path) -> dict[str, dict[str, Any]]:
    """Prepare a workspace without the change and one with it. Return the files of their copies, as `before` and `after`."""
    found: dict[str, dict[str, Any]] = {}
    for name, with_changes in (("before", False), ("after", True)):
        (base / name).mkdir()
        asyncio.run(prepare(base / name, with_changes=with_changes))
        found[name] = tree(base / name / "here")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["change", "open", "undo"])
def test_what_is_recorded_is_on_every_host_and_nothing_else_wherever_the_process_dies(
    what: str, killed: Killed, tmp_path: Path
):
    """Wherever the process is killed, a recorded call's changes are on every host, and an unrecorded call's are on none.

    An undo is complete or has no effect.
    """
    known, seen = trees(tmp_path), list[str]()
    start = tmp_path / "start"
    start.mkdir()
    call = asyncio.run(prepare(start, with_changes=what == "undo"))

    def attempt(at: int) -> tuple[int, Path]:
        base = tmp_path / f"at{at}"
        shutil.copytree(start, base, symlinks=True)
        return killed.run({"base": str(base), "at": at, "what": what, "call": call}), base

    status, base = attempt(0)
    assert status == 0
    points = int((base / "passed").read_text())
    for at in sorted({*picked(points, KILLS), points}):
        status, base = attempt(at)
        assert status == KILLED, f"at {at}"
        found, made = copies(base)
        assert found[0] == found[1], f"at {at}: the hosts differ"
        [name] = [name for name, expected in known.items() if found[0] == expected]
        seen.append(name)
        if what == "change":
            assert (name == "after") == bool(made), f"at {at}: {name}, although the record has {made}"
    assert seen == sorted(seen, reverse=what != "undo"), "a change was taken back"
    assert set(seen) == ({"before"} if what == "open" else {"before", "after"})
