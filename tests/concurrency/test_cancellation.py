"""Cancellation: one cancel stops a whole tree of runs, children first, and cancels each task only once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.concurrency.cancellation import Cancellation, finish
from handrail.testing import run_virtual


def nothing() -> list[asyncio.Task[Any]]:
    return []


class Works:
    """A node in the tree. Its one task records the node's name when it is cancelled."""

    def __init__(self, name: str, stopped: list[str], parent: Works | None = None) -> None:
        self.name = name
        self.stopped = stopped
        self.parent = parent
        self.times = 0
        self.task = asyncio.get_running_loop().create_task(self.work())
        self.node = Cancellation(lambda: [self.task], None if parent is None else parent.node)

    async def work(self) -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.times = self.task.cancelling()
            self.stopped.append(self.name)
            await asyncio.sleep(5)
            self.times = self.task.cancelling()
            raise


def in_loop(script: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await script()

    run_virtual(main)


def test_the_whole_tree_stops_children_first():
    """A cancel stops the innermost runs first, and nothing outside the cancelled branch."""

    async def script() -> None:
        stopped: list[str] = []
        root = Works("root", stopped)
        child = Works("child", stopped, root)
        inner = Works("inner", stopped, child)
        other = Works("other", stopped, root)
        await asyncio.sleep(1)
        child.node.cancel("enough")
        await asyncio.sleep(1)
        assert stopped == ["inner", "child"]
        assert [each.node.cancelled for each in (root, child, inner, other)] == [False, True, True, False]
        assert (child.node.reason, inner.node.reason, root.node.reason) == ("enough", "enough", "")
        root.node.cancel()
        await asyncio.sleep(1)
        assert stopped == ["inner", "child", "other", "root"]
        assert (root.node.reason, child.node.reason) == ("cancelled", "enough")

    in_loop(script)


def test_cancelling_again_disturbs_nothing():
    """A task that is already being cancelled is not cancelled again, by its own run or by an outer one."""

    async def script() -> None:
        stopped: list[str] = []
        root = Works("root", stopped)
        child = Works("child", stopped, root)
        await asyncio.sleep(1)
        told: list[str] = []
        child.node.on_cancel(lambda: told.append("child"))
        child.node.cancel()
        child.node.cancel("again")
        await asyncio.sleep(1)
        root.node.cancel("all")
        root.node.cancel("all")
        await asyncio.sleep(10)
        assert (root.times, child.times) == (1, 1)
        assert stopped == ["child", "root"]
        assert told == ["child"]
        assert child.node.reason == "cancelled"

    in_loop(script)


def test_a_task_in_two_places_is_cancelled_once():
    """A task that belongs to an inner and an outer run is cancelled only once."""

    async def script() -> None:
        outer = Works("outer", [])
        Cancellation(lambda: [outer.task], outer.node)
        await asyncio.sleep(1)
        outer.node.cancel()
        await asyncio.sleep(10)
        assert outer.times == 1

    in_loop(script)


def test_a_child_of_the_cancelled_is_cancelled():
    """A child opened in a cancelled run is cancelled at once, with the same reason, and calls each watcher as it is added."""
    root = Cancellation(nothing)
    root.cancel("over")
    late = Cancellation(nothing, root)
    told: list[str] = []
    late.on_cancel(lambda: told.append("told"))()
    assert (late.cancelled, late.reason) == (True, "over")
    assert told == ["told"]
    late.cancel("again")
    assert late.reason == "over"


def test_watchers_are_told_once_and_can_be_taken_back():
    """A cancel calls each watcher once, including the watchers of children. A removed watcher is not called."""
    root = Cancellation(nothing)
    child = Cancellation(nothing, root)
    told: list[str] = []
    root.on_cancel(lambda: told.append("root"))
    child.on_cancel(lambda: told.append("child"))
    take_back = child.on_cancel(lambda: told.append("gone"))
    take_back()
    take_back()
    root.cancel()
    root.cancel()
    take_back()
    assert told == ["child", "root"]


def test_a_watcher_that_raises_stops_nobody(caplog: pytest.LogCaptureFixture):
    """If a watcher raises, the error is logged. The other watchers are still called, and the tasks are cancelled."""

    async def script() -> None:
        stopped: list[str] = []
        told: list[str] = []
        root = Works("root", stopped)

        def bad() -> None:
            raise ValueError("no")

        root.node.on_cancel(bad)
        root.node.on_cancel(lambda: told.append("told"))
        await asyncio.sleep(1)
        root.node.cancel()
        await asyncio.sleep(1)
        assert (told, stopped) == (["told"], ["root"])

    in_loop(script)
    (record,) = caplog.records
    assert "a cancellation watcher raised" in record.getMessage()


def test_watchers_may_change_the_tree():
    """A watcher may open, close and cancel runs during the cancel that called it."""
    root = Cancellation(nothing)
    children = [Cancellation(nothing, root) for _ in range(5)]
    made: list[Cancellation] = []
    for child in children:
        child.on_cancel(child.close)
        child.on_cancel(lambda: made.append(Cancellation(nothing, root)))
        child.on_cancel(root.cancel)
    root.cancel("once")
    assert len(made) == 5
    assert all(each.cancelled and each.reason == "once" for each in (*children, *made))


def test_a_run_that_is_over_is_left_alone():
    """A closed run leaves the tree, so cancelling its parent does not cancel its task. Closing it twice is harmless."""

    async def script() -> None:
        stopped: list[str] = []
        root = Works("root", stopped)
        child = Works("child", stopped, root)
        await asyncio.sleep(1)
        child.node.close()
        child.node.close()
        root.node.close()
        root.node.cancel()
        await asyncio.sleep(1)
        assert stopped == ["root"]
        assert not child.node.cancelled
        child.task.cancel()

    in_loop(script)


def test_what_is_done_is_not_cancelled():
    """Cancelling a run whose task has finished does not change the task's result."""

    async def script() -> None:
        async def quick() -> str:
            return "done"

        task = asyncio.get_running_loop().create_task(quick())
        await task
        node = Cancellation(lambda: [task])
        node.cancel()
        assert task.result() == "done"
        assert node.cancelled

    in_loop(script)


@pytest.mark.parametrize("when", ["before", "during", "never"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_finished_step_raises_the_cancellation_that_came_meanwhile(when: str, fails: bool):
    """`finish` completes the step even if the awaiting task is cancelled. The step's error replaces the cancellation."""

    async def script() -> None:
        done: list[str] = []

        async def step() -> str:
            await asyncio.sleep(2)
            done.append("step")
            if fails:
                raise ValueError("failed")
            return "value"

        async def work() -> str:
            if when == "before":
                task.cancel()
            return await finish(step())

        task = asyncio.ensure_future(work())
        await asyncio.sleep(1)
        if when == "during":
            task.cancel()
        await asyncio.wait({task})
        assert done == ["step"]
        if fails:
            assert not task.cancelled()
            assert str(task.exception()) == "failed"
        elif when == "never":
            assert task.result() == "value"
        else:
            assert task.cancelled()

    in_loop(script)


@given(st.lists(st.integers(0, 30), max_size=12), st.lists(st.integers(0, 30), max_size=6))
def test_any_tree_and_any_cancels_stop_exactly_what_is_below(parents: list[int], cancels: list[int]):
    """Exactly the nodes at or below a cancelled one are cancelled, children first, and each keeps its first reason."""
    order: list[int] = []
    nodes = [Cancellation(nothing)]
    above = [-1]
    for number, pick in enumerate(parents, start=1):
        above.append(pick % number)
        nodes.append(Cancellation(nothing, nodes[above[-1]]))
    for number, node in enumerate(nodes):
        node.on_cancel(lambda n=number: order.append(n))
    reasons: dict[int, str] = {}
    for pick in cancels:
        chosen = pick % len(nodes)
        nodes[chosen].cancel(f"of {chosen}")
        for number in range(chosen, len(nodes)):
            if number == chosen or above[number] in reasons:
                line = [number]
                while line[-1] not in (chosen, -1):
                    line.append(above[line[-1]])
                if line[-1] == chosen:
                    reasons.setdefault(number, f"of {chosen}")
    assert {n: node.reason for n, node in enumerate(nodes) if node.cancelled} == reasons
    assert sorted(order) == sorted(reasons)
    assert all(
        order.index(n) < order.index(above[n])
        for n in order
        if above[n] in order and reasons[n] == reasons[above[n]]
    )
