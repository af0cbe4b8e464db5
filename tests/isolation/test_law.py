"""The law of isolation: calls that are `read` or `staged` commit as if one had run after the other.

It holds for all sessions, threads and processes that share a resource, with any journal or none. Each round runs a random
plan of calls, whose steps happen in a random order, and asks the checker for a serial order. All calls must succeed,
except those whose handlers fail on purpose: a call that conflicts runs again.
"""

import os
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from isolation.plans import Plan, Turn, draw_plan, plan_of
from isolation.rounds import JOURNALS, RESOURCES, Forker, Rounds, Setting, rounds_in
from isolation.shelves import MemoryShelf, ShelfFork

pytestmark = pytest.mark.once

DEEP = bool(os.environ.get("HANDRAIL_DEEP"))


def exists(setting: Setting) -> bool:
    """Return whether there is such a setting, and it differs from all others."""
    resource, alone = setting.resource, setting.sessions == "one"
    if resource == "workspace":  # it needs a recorded run, which is in one session and one event loop
        return alone and setting.place == "tasks" and setting.journal in ("process", "power", "postgres")
    if setting.place == "processes":
        return not alone and resource in ("directory", "folder shelf")
    if alone and setting.place == "tasks":  # all calls go through one gate
        return resource != "directories" and setting.journal != "different"
    return resource != "folder shelf" and (alone or resource != "slices")


SETTINGS = [
    setting
    for setting in (
        Setting(*each)
        for each in product(RESOURCES, ("one", "several"), ("tasks", "threads", "processes"), JOURNALS)
    )
    if exists(setting)
]


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    started = Forker()
    yield started
    started.close()


def check(rounds: Rounds, plan: Plan) -> None:
    outcome = rounds.run(plan)
    assert outcome.problem == "", f"{plan}"
    assert outcome.failures == {}, f"{plan}"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_calls_commit_as_if_one_had_run_after_the_other(setting: Setting, tmp_path: Path, forker: Forker):
    """Random calls have a serial order that explains what each of them read, and all of them commit."""
    draw = random.Random(str(setting))
    with rounds_in(setting, tmp_path, forker) as rounds:
        for _ in range(100 if DEEP else 2 if setting.place == "processes" else 4):
            check(
                rounds,
                draw_plan(draw, setting.keys, setting.folder, styles=("async", "async", "plain", "nested")),
            )


SKEWS = {
    "of two": lambda x, y, z: plan_of(f"read {x}, write {y}", f"read {y}, write {x}"),
    "of three, in a circle": lambda x, y, z: plan_of(
        f"read {x}, write {y}", f"read {y}, write {z}", f"read {z}, write {x}"
    ),
    "of two that read both": lambda x, y, z: plan_of(
        f"read {x}, read {y}, write {x}", f"read {x}, read {y}, write {y}"
    ),
    "of one file": lambda x, y, z: plan_of(*[f"read {x}, write {x}"] * 4),
}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_skew(setting: Setting, tmp_path: Path, forker: Forker):
    """Calls that all read before any of them commits, and then write what others read, all commit, in an order.

    So do calls that list a folder and then create a file in it.
    """
    with rounds_in(setting, tmp_path, forker) as rounds:
        for skew in SKEWS.values():
            check(rounds, skew(*setting.keys))
        if setting.folder:
            check(rounds, plan_of("list f:d, create f:d", "list f:d, create f:d"))


# --- the rounds themselves ------------------------------------------------------------------------------


class NeverStale(ShelfFork):
    """A fork that never says that something has changed."""

    def stale(self) -> list[str]:
        return []


class FailsWhenStale(ShelfFork):
    """A fork that fails if something has changed, so that the call does not run again."""

    def stale(self) -> list[str]:
        return []

    def prepare(self) -> None:
        self._is_open = False
        if stale := super().stale():
            raise RuntimeError(f"{stale} has changed")


def broken(monkeypatch: pytest.MonkeyPatch, fork: type[ShelfFork]) -> Setting:
    monkeypatch.setattr(MemoryShelf, "fork", lambda self, owner, /, *, writable=True: fork(self, owner))
    return Setting("shelf", "several", "tasks", "none")


@pytest.mark.parametrize("skew", SKEWS)
def test_a_round_finds_that_a_resource_is_not_isolated(
    skew: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With a resource that never reports a change, every skew is found."""
    setting = broken(monkeypatch, NeverStale)
    with rounds_in(setting, tmp_path) as rounds:
        outcome = rounds.run(SKEWS[skew](*setting.keys))
    assert outcome.problem.startswith("no serial order")
    assert outcome.failures == {}


def test_random_rounds_find_that_a_resource_is_not_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With such a resource, at least one in four of the random rounds is found to have no serial order."""
    setting = broken(monkeypatch, NeverStale)
    draw = random.Random(0)
    with rounds_in(setting, tmp_path) as rounds:
        outcomes = [rounds.run(draw_plan(draw, setting.keys)) for _ in range(40)]
    assert sum(outcome.problem != "" for outcome in outcomes) >= 10


def test_a_round_finds_calls_that_fail_rather_than_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a resource that fails if it has changed, there is an order of the calls that committed, but some failed."""
    setting = broken(monkeypatch, FailsWhenStale)
    with rounds_in(setting, tmp_path) as rounds:
        outcome = rounds.run(SKEWS["of one file"](*setting.keys))
    assert outcome.problem == ""
    assert outcome.failures


@pytest.mark.parametrize("place", ["tasks", "threads"])
def test_turns_are_taken_in_their_order(tmp_path: Path, place: str):
    """A call that commits between another's read and write makes the other run again, and one that commits before does not."""
    setting = Setting("memory", "several", place)  # type: ignore[arg-type]
    calls = plan_of("read f:x, write f:x", "read f:x, write f:x").calls
    between = Plan(calls, tuple(Turn(at, settles=True) for at in (0, 1, 1, 1, 0, 0)))
    before = Plan(calls, tuple(Turn(at, settles=True) for at in (1, 1, 1, 0, 0, 0)))
    with rounds_in(setting, tmp_path) as rounds:
        assert rounds.run(between).attempts == 3
        assert rounds.run(before).attempts == 2
