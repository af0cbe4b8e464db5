"""Wherever a commit is killed, the folder and the journal agree after recovery on whether the call happened."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resources.directory.crashes import DEEP, KILLED, Crashes, Killed, picked
from resources.directory.crashing import snapshot

pytestmark = pytest.mark.once  # killing many processes is slow, and one Python version is enough


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    made = Killed()
    yield made
    made.close()


@pytest.fixture
def crashes(tmp_path: Path, killed: Killed) -> Crashes:
    """Provide a folder, and child processes that commit to it and can be killed."""
    return Crashes(tmp_path, killed)


def before_and_after(crashes: Crashes, **order: Any) -> tuple[Any, Any, int]:
    """Run a commit with these options to its end. Return the folder before and after it, and the number of kill points."""
    crashes.fresh()
    before = snapshot(crashes.base / "root")
    assert crashes.run(**order) == 0
    return before, snapshot(crashes.base / "root"), crashes.said()["points"]


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("seed", range(8 if DEEP else 2))
def test_killed_at_any_step_it_is_before_or_after(crashes: Crashes, seed: int, durability: str):
    """Wherever a commit is killed, recovery leaves the folder as it was either before or after the call.

    With `power`, this holds even if unsynced changes are lost.
    """
    order = {"seed": seed, "durability": durability}
    before, after, points = before_and_after(crashes, **order)
    assert crashes.said()["said"] == "ok"
    assert before != after
    outcomes: set[str] = set()
    for at in picked(points, 12):
        crashes.fresh()
        assert crashes.run(at, **order) == KILLED
        torn = snapshot(crashes.base / "root")
        recovered, units = crashes.recover()
        expected = after if units else before
        assert snapshot(crashes.base / "root") == expected, f"killed at {at}"
        assert recovered.left == ()
        outcomes.add("torn" if torn not in (before, after) else "after" if units else "before")
    assert {"before", "after"} <= outcomes
    assert not DEEP or "torn" in outcomes


@pytest.mark.parametrize("seed", range(3 if DEEP else 1))
def test_what_somebody_edits_in_the_last_moment_is_never_lost(crashes: Crashes, seed: int):
    """A change that another program makes to a file at the last moment is never lost.

    If the process is not killed, the call fails and is reverted. After a kill, recovery completes a recorded call and
    reverts any other. It leaves that file as it is if it was edited before the kill.
    """
    order = {"seed": seed + 20, "edited": "a.txt"}
    before, after, points = before_and_after(crashes, **order)
    assert crashes.said()["said"] != "ok"
    theirs = ("edited by somebody\n", before["a.txt"][1])
    assert after == {**before, "a.txt": theirs}
    crashes.fresh()
    assert crashes.run(seed=seed + 20) == 0
    applied = snapshot(crashes.base / "root")
    for at in picked(points, 12):
        crashes.fresh()
        assert crashes.run(at, **order) == KILLED
        recovered, units = crashes.recover()
        now = snapshot(crashes.base / "root")
        if units and "a.txt" not in recovered.left and now["a.txt"] != theirs:
            assert now == applied  # the process was killed before the edit
        elif units:
            assert now == {**applied, "a.txt": theirs}
        else:
            assert now in (before, {**before, "a.txt": theirs})


def test_what_somebody_edits_after_the_crash_stays_theirs(crashes: Crashes):
    """Recovery never overwrites a file that was edited after the crash, and completes a recorded call's other changes.

    It reports the file if the call's own change to it had to be left out.
    """
    order = {"seed": 20}
    _, after, points = before_and_after(crashes, **order)
    seen: set[tuple[str, ...]] = set()
    for at in picked(points, 12):
        crashes.fresh()
        assert crashes.run(at, **order) == KILLED
        (crashes.base / "root" / "a.txt").write_text("edited by somebody\n")
        recovered, units = crashes.recover()
        now = snapshot(crashes.base / "root")
        assert now["a.txt"][0] == "edited by somebody\n"
        if units:
            assert {**now, "a.txt": after["a.txt"]} == after
        seen.add(recovered.left)
    assert seen == {(), ("a.txt",)}


def test_a_recovery_that_is_killed_is_gone_on_with(crashes: Crashes):
    """A recovery that is killed at any step can be repeated. The second one leaves the folder as it was before or after the call."""
    order = {"seed": 3}
    before, after, points = before_and_after(crashes, **order)
    for at in picked(points, 4):
        for again in range(1, 200, 1 if DEEP else 7):
            crashes.fresh()
            assert crashes.run(at, **order) == KILLED
            status = crashes.run(again, recover=True)
            _, units = crashes.recover()
            assert snapshot(crashes.base / "root") == (after if units else before), (at, again)
            if status == 0:
                break


def test_enough_were_killed(crashes: Crashes):
    """The first test of this file kills commits at 500 or more points in a deep run, and at 48 or more in other runs."""
    total = 0
    for seed in range(8 if DEEP else 2):
        for durability in ("process", "power"):
            points = before_and_after(crashes, seed=seed, durability=durability)[2]
            total += len(picked(points, 12))
    assert total >= (500 if DEEP else 48)
