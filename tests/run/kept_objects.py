"""Counts the objects, by type, and the bytes that are still alive after many calls that end in the same way.

python tests/run/kept_objects.py 10000      prints a table
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple

from handrail import Tool, ToolContext, ToolResult, TransientError, tool
from handrail.concurrency import threads
from handrail.concurrency.threads import threads_at_work
from handrail.events import ToolInvoked, ToolRolledBack
from handrail.protocols import PolicyDecision
from handrail.resources.memory import MemoryFilesystem
from handrail.run import open_gate
from handrail.run.call import ToolCall, run_turn
from handrail.run.gate import Gate
from handrail.session import Session

DOCUMENT = "x" * 100_000
FACTS = (ToolInvoked, ToolRolledBack, ToolResult, BaseException)
"""Types of the objects that a session's log keeps for each call: its facts, and the results and errors in them."""


@dataclass(frozen=True)
class Draft:
    """A piece of state that a call writes."""

    text: str


class Body:
    """An object that a handler creates. It contains the document that was read, and must not outlive its call."""

    def __init__(self, context: ToolContext) -> None:
        self.text = context.filesystem.read("document.txt") + "."


def _work(context: ToolContext) -> Body:
    """Read the document, write a changed copy to the files and the state, and return the `Body`."""
    body = Body(context)
    context.filesystem.write("document.txt", body.text)
    context.session.dispatch(Draft(body.text))
    return body


Invoke = Callable[[Gate], Coroutine[Any, Any, Any]]


def _plain(gate: Gate) -> Coroutine[Any, Any, Any]:
    return _invoke(gate)


async def _invoke(gate: Gate) -> None:
    await gate.invoke("work", {})


async def _cancelled(gate: Gate) -> None:
    task = asyncio.ensure_future(_invoke(gate))
    while not gate.run.live:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})


async def _turn(gate: Gate) -> None:
    await run_turn(gate, [ToolCall("work"), ToolCall("work")])


class Ending(NamedTuple):
    """One way in which a call can end."""

    name: str
    status: str
    tool: Tool[Any, Any]
    invoke: Invoke = _plain
    denies: bool = False


class Denies:
    """A policy that denies every call."""

    name = "denies"

    def check(self, tool: Any, params: Any, *, context: Any) -> PolicyDecision:
        return PolicyDecision.deny("no")

    def on_result(self, tool: Any, params: Any, result: Any, *, context: Any) -> None:
        """Do nothing."""


def endings() -> list[Ending]:
    """Return all endings, each with what makes a call end in that way."""

    def made(function: Any, **options: Any) -> Tool[Any, Any]:
        return tool(name="work", description="Work.", effect="staged", **options)(function)

    async def succeeds(context: ToolContext) -> str:
        return str(len(Body(context).text))

    async def fails(context: ToolContext) -> str:
        body = _work(context)
        raise ValueError(len(body.text))

    async def chains(context: ToolContext) -> str:
        try:
            body = _work(context)
            raise KeyError(len(body.text))
        except KeyError as error:
            raise ValueError("chained") from error

    async def groups(context: ToolContext) -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails(context))
        return ""

    async def misspells(context: ToolContext) -> str:
        body = _work(context)
        return context.filesystm + body  # type: ignore[attr-defined]  # pyright: ignore

    async def retries(context: ToolContext) -> str:
        body = _work(context)
        raise TransientError(str(len(body.text)), retry_after=0)

    async def waits(context: ToolContext) -> str:
        body = _work(context)
        await asyncio.sleep(60)
        return body.text

    async def returns_wrong(context: ToolContext) -> Any:
        return {"body": _work(context), "lock": threading.Lock()}

    def fails_in_thread(context: ToolContext) -> str:
        body = _work(context)
        raise ValueError(len(body.text))

    def waits_in_thread(context: ToolContext) -> str:
        body = _work(context)
        context.signal.wait().wait()
        return body.text

    async def nested(context: ToolContext) -> str:
        body = _work(context)
        await context.call("inner")
        raise ValueError(len(body.text))

    return [
        Ending("ok", "ok", made(succeeds)),
        Ending("failed", "error", made(fails)),
        Ending("failed, with a cause", "error", made(chains)),
        Ending("failed in a group", "error", made(groups)),
        Ending("failed on the context", "error", made(misspells)),
        Ending("failed in a thread", "error", made(fails_in_thread)),
        Ending("failed in a turn of two", "error", made(fails), _turn),
        Ending("failed around an inner call", "error", made(nested)),
        Ending("retried, then failed", "error", made(retries)),
        Ending("wrong result", "error", made(returns_wrong)),
        Ending("denied", "denied", made(succeeds), denies=True),
        Ending("cancelled", "cancelled", made(waits), _cancelled),
        Ending("cancelled in a thread", "cancelled", made(waits_in_thread), _cancelled),
        Ending("timed out", "timed out", made(waits, timeout=0.0001)),
        Ending("timed out in a thread", "timed out", made(waits_in_thread, timeout=0.0001)),
    ]


@tool(effect="staged")
async def inner(context: ToolContext) -> str:
    """Work inside a call."""
    return str(len(_work(context).text))


class Kept(NamedTuple):
    """The objects that are still alive after the calls, compared with before.

    Our objects are those of Handrail's types, and the `Body` and `Draft` objects.
    """

    facts: int
    """How many more facts, results and errors are alive than before."""
    objects: Counter[str]
    """How many more of our other objects are alive than before, by type."""
    kept_bytes: int
    after_session: Counter[str]
    """How many of our other objects from this measurement are still alive after the session was dropped, by type."""
    after_session_bytes: int


def _ours() -> tuple[int, Counter[str]]:
    """Return how many facts, results and errors are alive, and how many of our other objects, by type."""
    gc.collect()
    ours = [
        each
        for each in gc.get_objects()
        if type(each).__module__.split(".")[0] == "handrail" or type(each) in (Body, Draft)
        if not isinstance(each, type)
    ]
    params = {id(each.params) for each in ours if isinstance(each, ToolInvoked)}  # a part of the fact
    found = Counter(
        type(each).__name__ for each in ours if not isinstance(each, FACTS) and id(each) not in params
    )
    found.pop("_Worker", None)  # idle threads, which end by themselves
    return sum(isinstance(each, FACTS) for each in ours), found


async def _many(gate: Gate, ending: Ending, count: int) -> None:
    for _ in range(count):
        await ending.invoke(gate)
    loop = asyncio.get_running_loop()
    while threads_at_work(loop) or len(threads._idle) < _handler_threads():
        await asyncio.sleep(0.001)  # a thread that has delivered its outcome may still hold its job
    for _ in range(3):
        await asyncio.sleep(0)  # callbacks that threads have scheduled on the loop hold their jobs too


def _handler_threads() -> int:
    return sum(each.name == "handrail-handler" for each in threading.enumerate())


async def left_to_the_collector(ending: Ending, count: int) -> Counter[str]:
    """Make `count` calls that end in this way, and return the types of the objects that only the garbage collector frees."""
    session, files = Session(), MemoryFilesystem({"document.txt": DOCUMENT})
    policies = [Denies()] if ending.denies else []
    gate = open_gate([ending.tool, inner], session=session, filesystem=files, policies=policies)
    await _many(gate, ending, 5)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)  # what is collected is kept in `gc.garbage`
    try:
        await _many(gate, ending, count)
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def measure(ending: Ending, count: int) -> Kept:
    """Make `count` calls that end in this way, after a few to warm up, and return what is still alive."""
    gc.collect()
    gc.freeze()  # from here on, `gc.get_objects` returns only objects that are made below
    session, files = Session(), MemoryFilesystem({"document.txt": DOCUMENT})
    policies = [Denies()] if ending.denies else []
    gate: Gate | None = open_gate([ending.tool, inner], session=session, filesystem=files, policies=policies)
    assert gate is not None
    # A call may be cancelled before it creates the slice of `Draft`, so the slice is created now.
    session.dispatch(Draft(""))
    await _many(gate, ending, 5)
    seen = {event.status for event in session[ToolInvoked].all() if event.tool == "work"}
    assert seen == {ending.status}, seen
    tracemalloc.start()
    try:
        facts, objects = _ours()
        used = tracemalloc.get_traced_memory()[0]
        await _many(gate, ending, count)
        now_facts, now = _ours()
        now_used = tracemalloc.get_traced_memory()[0]
        await gate.close()
        gate = None
        del session, files
        _, end = _ours()
        end -= Counter(Timers=1)  # the timers of the event loop, which is still running
        end_used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    return Kept(now_facts - facts, now - objects, now_used - used, end, end_used - used)


def table(count: int) -> str:
    """Return the measurements of all endings as a table."""
    rows = [
        f"| ending of {count:,} calls | facts in the log | our other objects | bytes per call, with its facts | "
        "our objects after the session | MB after the session |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for ending in endings():
        kept = asyncio.run(measure(ending, count))
        rows.append(
            f"| {ending.name} | {kept.facts:,} | {sum(kept.objects.values())} | {kept.kept_bytes // count:,} | "
            f"{sum(kept.after_session.values())} | {kept.after_session_bytes / 1e6:.2f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
