"""Measure the cost of a call through the gate, compared with the same work written by hand, in one run.

The figures are medians of CPU time, or of wall time for parallel calls, over interleaved rounds, so that a busy machine
slows both sides. Each row has a limit, and says whether it was met.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from handrail import Tool, ToolContext, ToolResult
from handrail.events import Fact
from handrail.protocols import PolicyDecision
from handrail.resources.memory import MemoryFilesystem
from handrail.run import open_gate
from handrail.run.call import ToolCall, new_call, run_turn
from handrail.run.gate import Gate
from handrail.session import Session

ROUNDS = int(os.environ.get("ROUNDS", "15"))
CALLS = int(os.environ.get("CALLS", "2000"))
ARGUMENTS = '{"city":"Oslo","days":3}'


@dataclass
class Forecast:
    city: str
    days: int


@dataclass(frozen=True)
class Seen:
    city: str


async def handler(params: Forecast, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(params.city, "fine")


async def writing_handler(params: Forecast, *, context: ToolContext) -> ToolResult[str]:
    context.filesystem.write("seen.txt", params.city)
    context.session.dispatch(Seen(params.city))
    return ToolResult.ok(params.city, "fine")


async def suspending_handler(params: Forecast, *, context: ToolContext) -> ToolResult[str]:
    await asyncio.sleep(0)
    return ToolResult.ok(params.city, "fine")


def plain_handler(params: Forecast, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(params.city, "fine")


async def sleeping_handler(params: Forecast, *, context: ToolContext) -> ToolResult[None]:
    await asyncio.sleep(0.01)
    return ToolResult.ok(None)


class Allows:
    """A policy that allows every call."""

    name = "allows"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        return PolicyDecision.allow()

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        return None


def listen(event: Fact) -> None:
    """Receive a fact and ignore it."""


# --- the two sides -------------------------------------------------------------------------------

Timed = Callable[[], Awaitable[float]]


async def cpu_of(work: Callable[[], Awaitable[Any]], calls: int = CALLS) -> float:
    """Return the CPU time of one iteration, in microseconds."""
    gc.collect()
    began = time.process_time()
    for _ in range(calls):
        await work()
    return (time.process_time() - began) / calls * 1e6


async def floor() -> float:
    """Measure a call written by hand: parse with a cached validator, await the handler, store its result."""
    validate = TypeAdapter(Forecast).validator.validate_json
    kept: list[Any] = []

    async def work() -> None:
        kept.append(await handler(validate(ARGUMENTS, strict=True, extra="forbid"), context=None))  # pyright: ignore[reportArgumentType]

    return await cpu_of(work)


async def writing_floor() -> float:
    """Measure a call written by hand that also writes a file to a dict and an event to a list."""
    validate = TypeAdapter(Forecast).validator.validate_json
    kept: list[Any] = []
    files: dict[str, bytes] = {}
    events: list[Any] = []

    async def by_hand(params: Forecast, *, context: Any) -> ToolResult[str]:
        files["seen.txt"] = params.city.encode()
        events.append(Seen(params.city))
        return ToolResult.ok(params.city, "fine")

    async def work() -> None:
        kept.append(await by_hand(validate(ARGUMENTS, strict=True, extra="forbid"), context=None))

    return await cpu_of(work)


def a_gate(body: Any = handler, *, timeout: float | None = None, items: int = 0, files: int = 0) -> Gate:
    """Return a gate with a policy, a subscriber to every fact, and this many session items and files."""
    session = Session()
    for number in range(items):
        session.dispatch(Seen(str(number)))
    session.dispatcher.subscribe(Fact, listen)
    memory = MemoryFilesystem({f"folder/{number}.txt": "text" for number in range(files)})
    tool = Tool("forecast", "Forecast.", body, timeout=timeout, effect="staged")
    return open_gate([tool], session=session, filesystem=memory, policies=[Allows()])


def through(gate: Gate) -> Timed:
    """Return a function that measures calls that enter the gate as they do in a model's turn."""

    async def work() -> Any:
        return await gate.pass_through(new_call(gate, "forecast", ARGUMENTS))

    return lambda: cpu_of(work)


def invoked(gate: Gate) -> Timed:
    """Return a function that measures calls that enter the gate through `invoke`, as a program's do."""

    async def work() -> Any:
        return await gate.invoke("forecast", ARGUMENTS)

    return lambda: cpu_of(work)


# --- the table -----------------------------------------------------------------------------------


async def medians(**sides: Timed) -> dict[str, float]:
    """Return the median of each side. The sides take turns in every round."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            taken[name].append(await side())
    return {name: statistics.median(times) for name, times in taken.items()}


def row(what: str, figure: float, unit: str, ratio: float, bound: float) -> None:
    verdict = "ok" if ratio <= bound else "MISSED"
    print(f"{what:58} {figure:9.2f} {unit:3} {ratio:6.2f}x   at most {bound}x   {verdict}", flush=True)


async def calls() -> None:
    times = await medians(
        floor=floor,
        gate=lambda: through(a_gate())(),
        invoked=lambda: invoked(a_gate())(),
        timeout=lambda: through(a_gate(timeout=30))(),
        suspending=lambda: through(a_gate(suspending_handler))(),
        plain=lambda: through(a_gate(plain_handler))(),
        writing_floor=writing_floor,
        writing=lambda: through(a_gate(writing_handler))(),
    )
    row("by hand: parse, await, result, keep", times["floor"], "us", 1, 1)
    row("gate: policy, subscriber, both events", times["gate"], "us", times["gate"] / times["floor"], 4.5)
    row(
        "the same by gate.invoke, an Operation",
        times["invoked"],
        "us",
        times["invoked"] / times["floor"],
        5.5,
    )
    row("gate with a timeout", times["timeout"], "us", times["timeout"] / times["floor"], 6)
    suspending, plain = times["suspending"] / times["gate"], times["plain"] / times["gate"]
    row("a handler that suspends once, over one that does not", times["suspending"], "us", suspending, 1.5)
    row("a plain `def` handler, over an async one", times["plain"], "us", plain, 4)
    row("by hand, with a file and an event", times["writing_floor"], "us", 1, 1)
    row(
        "gate, file written and event committed",
        times["writing"],
        "us",
        times["writing"] / times["writing_floor"],
        10,
    )


async def flatness() -> None:
    small = await medians(
        empty=through(a_gate(writing_handler)),
        thousand=through(a_gate(writing_handler, items=1_000)),
        many=through(a_gate(writing_handler, items=100_000)),
        files=through(a_gate(writing_handler, files=10_000)),
    )
    for name, what in (
        ("thousand", "a writing call at 1,000 items over one at none"),
        ("many", "a writing call at 100,000 items over one at none"),
        ("files", "a writing call at 10,000 files over one at none"),
    ):
        row(what, small[name], "us", small[name] / small["empty"], 1.3)


async def forks() -> None:
    def filled(items: int) -> Session:
        session = Session()
        for number in range(items):
            session.dispatch(Seen(str(number)))
        return session

    def forking(items: int) -> Timed:
        session = filled(items)

        async def timed() -> float:
            began = time.process_time()
            for _ in range(CALLS * 5):
                session.fork()
            return (time.process_time() - began) / (CALLS * 5) * 1e6

        return timed

    def appending(items: int, siblings: int) -> Timed:
        """Return a function that measures forks which append 32 items each, so that the last block of 32 is measured at every fill level."""
        session = filled(items)

        async def timed() -> float:
            gc.collect()
            began = time.process_time()
            for _ in range(max(CALLS // siblings // 32, 1)):
                for fork in [session.fork() for _ in range(siblings)]:
                    for _ in range(32):
                        fork.dispatch(Seen("x"))
            done = max(CALLS // siblings // 32, 1) * siblings * 32
            return (time.process_time() - began) / done * 1e6

        return timed

    times = await medians(
        ten=forking(10),
        many=forking(100_000),
        ten_raced=appending(10, 100),
        many_raced=appending(100_000, 100),
    )
    row("a fork at 100,000 items over one at ten", times["many"], "us", times["many"] / times["ten"], 1.3)
    raced = times["many_raced"] / times["ten_raced"]
    row("an append by one of a hundred sibling forks, the same", times["many_raced"], "us", raced, 1.3)


async def parallel() -> None:
    gate = a_gate(sleeping_handler)
    turn = [ToolCall("forecast", ARGUMENTS) for _ in range(100)]

    async def bare() -> float:
        began = time.perf_counter()
        await asyncio.gather(*[asyncio.sleep(0.01) for _ in range(100)])
        return (time.perf_counter() - began) * 1e3

    async def gated() -> float:
        began = time.perf_counter()
        await run_turn(gate, turn)
        return (time.perf_counter() - began) * 1e3

    times = await medians(bare=bare, gated=gated)
    row(
        "100 parallel calls that sleep 10 ms, over bare asyncio",
        times["gated"],
        "ms",
        times["gated"] / times["bare"],
        1.5,
    )


def main() -> None:
    print(f"Python {sys.version.split()[0]}, {ROUNDS} rounds of {CALLS} calls, CPU time, medians\n")
    for part in (calls, flatness, forks, parallel):
        asyncio.run(part())


if __name__ == "__main__":
    main()
