"""Measure how costs grow with size, one run for each of three points a curve, and draw the curves.

    python bench/growth.py [--quick] [--out docs/img/growth.svg] [CURVE...]

It takes some minutes; with `--quick` it takes seconds, at sizes that say nothing about growth. The figures are CPU time, and for
viewers the server's share of a core. A flat curve is good. Without names of curves, all are measured and the picture is written.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import serving
from handrail import Adapter, Prompt, SqliteJournal, Tool, ToolContext, tool
from handrail.environment import LaterEnvironment
from handrail.errors import RunParked
from handrail.journal.records import RunCopy, RunRecord, RunRow
from handrail.messages import CallPart, ModelPart, ModelRequest, Price, StopPart, TextPart, Traits
from handrail.question import Answer

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "growth.svg"


@dataclass
class Curve:
    """What one unit costs at each size."""

    name: str
    unit: str
    points: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])

    def add(self, size: int, cost: float) -> None:
        self.points.append((size, cost))
        print(f"{self.name:46} {size:>9,}  {amount(cost):>8} {self.unit}", flush=True)


def amount(cost: float) -> str:
    """Format a figure with three significant digits."""
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}"


# --- the measured work -----------------------------------------------------------------------------


class Steps:
    """A model that requests this many calls in each run, one after another, and then answers. It keeps no requests."""

    name = "bench:steps"
    traits = Traits(price=Price(Decimal(0), Decimal(0)))

    def __init__(self, steps: int = 0, call: str = "add") -> None:
        self._steps = self._left = steps
        self._call = call
        self.messages = 0
        """How many messages the last request had."""

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        self.messages = len(request.messages)
        if self._left:
            self._left -= 1
            yield CallPart(0, "", self._call, '{"a": 1, "b": 2}' if self._call == "add" else "{}")
            yield StopPart("calls")
            return
        self._left = self._steps
        yield TextPart("done")
        yield StopPart("done")


@tool(effect="pure")
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(effect="pure")
async def pause() -> None:
    """Wait until all runs have begun."""
    await asyncio.sleep(0.2)


@tool(effect="staged")
async def choose(context: ToolContext) -> str:
    """Ask somebody for a number."""
    assert context.wait_for
    return str(await context.wait_for("pick", {}, int))


def prompt_of(*tools: Tool[Any, Any]) -> Prompt[None]:
    return Prompt("bench", "Do what is asked.", tools=list(tools))


async def cpu(work: Callable[[], Awaitable[object]]) -> float:
    """Return the CPU time of some work, in microseconds."""
    gc.collect()
    began = time.process_time()
    await work()
    return (time.process_time() - began) * 1e6


# --- the curves -------------------------------------------------------------------------------------


async def turns(sizes: Sequence[int]) -> list[Curve]:
    curve = Curve("a turn of a run with so many turns", "µs")
    for size in sizes:
        adapter = Adapter(Steps(size))
        curve.add(size, await cpu(lambda adapter=adapter: adapter.evaluate(prompt_of(add), "go")) / size)
    return [curve]


async def messages(sizes: Sequence[int]) -> list[Curve]:
    curve = Curve("a run in a conversation of so many messages", "µs")
    model, prompt, runs = Steps(), prompt_of(), 10
    adapter = Adapter(model)
    for size in sizes:
        response = await adapter.evaluate(prompt, "go")
        for _ in range(size // 2 - 1):
            await adapter.evaluate(prompt, "go", session=response.session)

        async def more(session: Any = response.session) -> None:
            for _ in range(runs):
                await adapter.evaluate(prompt, "go", session=session)

        curve.add(size, await cpu(more) / runs)
        assert model.messages >= size
    return [curve]


async def tools(sizes: Sequence[int]) -> list[Curve]:
    curve = Curve("a run with so many tools", "µs")
    runs = 50
    for size in sizes:
        prompt = prompt_of(*(tool(name=f"tool-{each}", effect="pure")(add.function) for each in range(size)))
        adapter = Adapter(Steps())
        await adapter.evaluate(prompt, "go")  # what is prepared once for all runs

        async def more(adapter: Adapter = adapter, prompt: Prompt[None] = prompt) -> None:
            for _ in range(runs):
                await adapter.evaluate(prompt, "go")

        curve.add(size, await cpu(more) / runs)
    return [curve]


async def at_once(sizes: Sequence[int]) -> list[Curve]:
    curve = Curve("one of so many runs at once", "µs")
    prompt = prompt_of(pause)
    for size in sizes:

        async def together(size: int = size) -> None:
            await asyncio.gather(*(Adapter(Steps(1, "pause")).evaluate(prompt, "go") for _ in range(size)))

        curve.add(size, await cpu(together) / size)
    return [curve]


async def fill(journal: SqliteJournal, runs: int) -> None:
    """Add this many finished runs to a journal."""
    for number in range(runs):
        record = RunRecord(
            id=f"run-{number}",
            session_id=f"session-{number}",
            principal="local",
            prompt="bench",
            model=Steps.name,
            began_at=float(number),
        )
        await journal.runs.add(RunCopy(row=RunRow(record=record, status="done", changed_at=float(number))))


async def park(journal: SqliteJournal) -> None:
    """Park a run, and answer its question."""
    adapter = Adapter(Steps(1, "choose"), journal=journal, environment=LaterEnvironment())
    with contextlib.suppress(RunParked):
        await adapter.evaluate(prompt_of(choose), "go", run_id="parked")
    (question,) = await journal.questions.open("parked")
    journal.questions.answer(
        Answer(question_id=question.id, digest=question.digest, by=question.principal, value=1)
    )


async def journals(sizes: Sequence[int]) -> list[Curve]:
    """Measure a journal file with so many runs. It is filled once, from size to size."""
    opening = Curve("open a journal of so many runs, first list", "ms")
    listing, getting = Curve("list a page of so many runs", "ms"), Curve("get one of so many runs", "µs")
    resuming = Curve("resume one of so many runs", "ms")
    verifying = Curve("verify a run of a journal of so many", "µs")
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "runs.db"
            with closing(SqliteJournal(path, watch=None, inline=True)) as journal:
                await fill(journal, size)
                await park(journal)
            took = time.process_time()
            with closing(SqliteJournal(path, watch=None, inline=True)) as journal:
                page = await journal.runs.list()
                opening.add(size, (time.process_time() - took) * 1e3)
                assert len(page) == min(size + 1, 100)

                async def get(journal: SqliteJournal = journal, size: int = size) -> None:
                    for number in range(100):
                        await journal.runs.get(f"run-{number % size}")

                adapter = Adapter(Steps(), journal=journal, environment=LaterEnvironment())
                listing.add(size, await cpu(journal.runs.list) / 1e3)
                getting.add(size, await cpu(get) / 100)
                resuming.add(
                    size, await cpu(lambda adapter=adapter: adapter.resume("parked", prompt_of(choose))) / 1e3
                )
                verifying.add(size, await cpu(journal.runs.verify) / size)
    return [opening, listing, getting, resuming, verifying]


async def viewers(sizes: Sequence[int]) -> list[Curve]:
    """Measure a server's share of a core while so many viewers wait for something to happen."""
    curve = Curve("share of a core for so many idle viewers", "%")
    for size in sizes:
        with serving.server() as at:
            await serving.streams(at.port, 1, "warm")
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(size):
                    reader, writer = await stack.enter_async_context(serving.connected(at.port))
                    writer.write(serving.request(at.port, "GET", "/threads/warm-0/events?follow=1"))
                    await reader.readuntil(b"RUN_FINISHED")
                seconds = 0.2 if size < 10 else 10
                await asyncio.sleep(seconds / 10)
                before = at.cpu()
                await asyncio.sleep(seconds)
                curve.add(size, (at.cpu() - before) / seconds * 100)
    return [curve]


CURVES: dict[str, tuple[Callable[[Sequence[int]], Awaitable[list[Curve]]], Sequence[int], Sequence[int]]] = {
    "turns": (turns, (100, 1_000, 10_000), (2, 4, 8)),
    "messages": (messages, (50, 500, 5_000), (2, 4, 8)),
    "tools": (tools, (10, 100, 1_000), (1, 2, 4)),
    "runs": (at_once, (20, 200, 2_000), (1, 2, 4)),
    "journals": (journals, (1_000, 10_000, 100_000), (2, 4, 8)),
    "viewers": (viewers, (20, 200, 2_000), (1, 2, 4)),
}
"""The function that measures each curve, its sizes, and those of `--quick`."""

# --- the picture ------------------------------------------------------------------------------------

WIDTH, HEIGHT, COLUMNS = 300, 130, 3
TEXT, LINE, CARD = "#57606a", "#0969da", "#ffffff"
"""The colours, of which a card is part: it can be read on a light page and on a dark one."""


def panel(curve: Curve, left: int, top: int) -> str:
    """Return one curve as SVG. Sizes grow tenfold from point to point, and costs begin at zero."""
    highest = max(cost for _, cost in curve.points) or 1
    step = (WIDTH - 80) / max(len(curve.points) - 1, 1)
    at = [
        (left + 40 + step * index, top + HEIGHT - 30 - (HEIGHT - 80) * cost / highest)
        for index, (_, cost) in enumerate(curve.points)
    ]
    floor = top + HEIGHT - 30
    parts = [
        f'<text x="{left + 10}" y="{top + 18}" class="name">{curve.name}</text>',
        f'<line x1="{left + 20}" y1="{floor}" x2="{left + WIDTH - 20}" y2="{floor}" stroke="{TEXT}" stroke-opacity="0.5"/>',
        f'<polyline points="{" ".join(f"{x:.0f},{y:.0f}" for x, y in at)}" fill="none" stroke="{LINE}" stroke-width="2"/>',
    ]
    for (x, y), (size, cost) in zip(at, curve.points, strict=True):
        parts += [
            f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="{LINE}"/>',
            f'<text x="{x:.0f}" y="{y - 9:.0f}" text-anchor="middle">{amount(cost)} {curve.unit}</text>',
            f'<text x="{x:.0f}" y="{floor + 16}" text-anchor="middle">{size:,}</text>',
        ]
    return "\n".join(parts)


def draw(curves: Sequence[Curve]) -> str:
    """Return the curves as an SVG picture on a card of its own, which can be read on light and dark pages."""
    rows = -(-len(curves) // COLUMNS)
    panels = [
        panel(curve, index % COLUMNS * WIDTH, index // COLUMNS * HEIGHT) for index, curve in enumerate(curves)
    ]
    title = "What one more costs, by size: " + "; ".join(
        f"{curve.name}: {', '.join(f'{amount(cost)} {curve.unit} at {size:,}' for size, cost in curve.points)}"
        for curve in curves
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * WIDTH} {rows * HEIGHT}" role="img">',
            f"<title>{title}</title>",
            f"<style>text {{ font: 11px sans-serif; fill: {TEXT} }} .name {{ font-weight: bold }}</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{CARD}"/>',
            *panels,
            "</svg>\n",
        ]
    )


async def measure(names: Sequence[str], *, quick: bool) -> list[Curve]:
    curves: list[Curve] = []
    await Adapter(Steps(1)).evaluate(prompt_of(add), "go")  # the first run imports what runs need
    for name in names:
        work, sizes, small = CURVES[name]
        curves += await work(small if quick else sizes)
    return curves


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure how costs grow with size.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("curves", nargs="*", metavar="CURVE", help=", ".join(CURVES))
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.curves if name not in CURVES]:
        parser.error(f"there is no curve {unknown[0]!r}. Choose from {', '.join(CURVES)}.")
    print(f"one run each; load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    began = time.monotonic()
    curves = asyncio.run(measure(given.curves or list(CURVES), quick=given.quick))
    out = given.out or (None if given.quick or given.curves else PICTURE)
    if out:
        out.write_text(draw(curves), encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s" + (f"; {out}" if out else ""))


if __name__ == "__main__":
    main()
