"""Measure a peer. `main(PeerClass)` runs one scenario and prints one JSON object.

    python peer_NAME.py SCENARIO [--variant http --base-url URL] [--calls N] [--runs N] [--repeat N]

In process, the framework's model is a stub that uses the framework's own extension point. Over HTTP, the framework uses
its own client. Every run is checked for its number of calls, the sum of their indices and its answer. The number of turns
is checked too, except in warm-up runs outside `tool_loop`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import json
import os
import resource
import statistics
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from work import Context, Script

POINTS = (10, 100, 500, 1000)  # numbers of messages in the conversation at which `growth` measures
AROUND = 7  # number of turns that are measured on each side of a point


class Peer(ABC):
    """A framework that does the work."""

    name: str
    dists: tuple[str, ...]  # packages whose versions are reported
    final_tool: str | None = None
    fresh_agent_per_run = False  # whether the agent keeps its conversation, so that each run needs a new one

    def __init__(self, options: argparse.Namespace) -> None:
        self.http = options.variant == "http"
        self.base_url: str = options.base_url
        self.scenario: str = options.scenario
        self.runs: int = options.runs

    @abstractmethod
    def build(self, script: Script) -> Any:
        """Create an agent on the script's model.

        This is not timed, except in `concurrency` if each run needs its own agent.
        """

    @abstractmethod
    async def run(self, agent: Any, context: Context) -> Any:
        """Do the work once, and return the answer."""

    async def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Close everything that the peer opened."""


# --- checks --------------------------------------------------------------------------------------


class WrongWork(Exception):
    """Raised if the peer did different work than requested, which makes its figure meaningless."""


def check_run(script: Script, context: Context, answer: object) -> None:
    """Raise `WrongWork` unless the number of calls, the sum of their indices and the end of the answer are right."""
    wanted = (script.calls, script.calls * (script.calls - 1) // 2)
    if (context.calls, context.total) != wanted:
        raise WrongWork(f"calls and the sum of their indices: {(context.calls, context.total)}, not {wanted}")
    if not str(answer).strip().endswith(script.answer):
        raise WrongWork(f"the answer is {str(answer)[:200]!r}, not {script.answer!r}")


def turns_made(peer: Peer) -> int:
    """Return the number of model turns so far. In process, `Script` counts them; over HTTP, the server counts its requests."""
    if not peer.http:
        return Script.made
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(peer.base_url.removesuffix("/v1") + "/stats", timeout=10) as response:
        return json.load(response)["served"]


async def checked(peer: Peer, turns: int, work: Awaitable[Any]) -> None:
    """Run the work. Raises `WrongWork` unless the model was asked for exactly this many turns."""
    before = turns_made(peer)
    await work
    made = turns_made(peer) - before
    if made != turns:
        raise WrongWork(f"the model was asked {made} times, not {turns}")


# --- scenarios -----------------------------------------------------------------------------------


async def timed(peer: Peer, script: Script, agent: Any, marks: list[float] | None = None) -> float:
    """Return the CPU seconds of one run, after checking its work."""
    context = Context(marks)
    gc.collect()
    began = time.process_time()
    answer = await peer.run(agent, context)
    took = time.process_time() - began
    check_run(script, context, answer)
    return took


async def tool_loop(peer: Peer, options: argparse.Namespace) -> dict[str, float]:
    """Measure the CPU time of a call and its turn: the median over several runs, divided by the number of calls in a run."""
    script = Script(options.calls, final_tool=peer.final_tool)
    taken: list[float] = []

    async def runs() -> None:
        agent = peer.build(script)
        for number in range(2 + options.repeat):
            if number and peer.fresh_agent_per_run:
                agent = peer.build(script)
            taken.append(await timed(peer, script, agent))

    await checked(peer, (script.calls + 1) * (2 + options.repeat), runs())
    return {"us_per_call": statistics.median(taken[2:]) / script.calls * 1e6}


async def growth(peer: Peer, options: argparse.Namespace) -> dict[str, float]:
    """Measure the CPU time of one turn of a long run, at each number of messages in POINTS that its conversation reaches."""
    short = Script(20, final_tool=peer.final_tool)
    await timed(peer, short, peer.build(short))
    script = Script(options.calls, final_tool=peer.final_tool)
    marks: list[float] = []
    await checked(peer, script.calls + 1, timed(peer, script, peer.build(script), marks))
    figures: dict[str, float] = {}
    for point in POINTS:
        middle = point // 2  # the index of the call that is made after about `point` messages
        if middle + AROUND + 1 < script.calls:
            near = range(max(1, middle - AROUND), middle + AROUND + 1)
            turns = sorted(marks[turn] - marks[turn - 1] for turn in near)
            # The slowest quarter is left out, because it includes garbage collection and other work on the machine.
            figures[f"us_turn_{point}"] = statistics.mean(turns[: max(1, len(turns) * 3 // 4)]) * 1e6
    return figures


async def concurrency(peer: Peer, options: argparse.Namespace) -> dict[str, float]:
    """Measure many concurrent runs of five calls each, on a model that takes 50 ms per turn."""
    script = Script(5, delay_ms=50, final_tool=peer.final_tool)
    shared = None if peer.fresh_agent_per_run else peer.build(script)
    for _ in range(2):
        await timed(peer, script, shared or peer.build(script))
    contexts = [Context() for _ in range(options.runs)]
    gc.collect()
    figures: dict[str, float] = {}

    async def one(context: Context) -> Any:
        return await peer.run(shared or peer.build(script), context)

    async def all_of_them() -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        answers = await asyncio.gather(*map(one, contexts))
        figures["cpu_s"] = time.process_time() - cpu
        figures["wall_s"] = time.perf_counter() - wall
        for context, answer in zip(contexts, answers, strict=True):
            check_run(script, context, answer)

    await checked(peer, (script.calls + 1) * options.runs, all_of_them())
    figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return figures


Scenario = Callable[[Peer, argparse.Namespace], Awaitable[dict[str, float]]]
# The function of each scenario, and its default number of calls in process and over HTTP. Over HTTP, the whole
# conversation is sent on each turn, so `growth` makes fewer calls.
SCENARIOS: dict[str, tuple[Scenario, int, int]] = {
    "tool_loop": (tool_loop, 50, 50),
    "growth": (growth, 520, 270),
    "concurrency": (concurrency, 5, 5),
}


# --- the program ---------------------------------------------------------------------------------


def calibration() -> float:
    """Return the CPU milliseconds of a fixed piece of code, the best of three. If results differ, the machine's speed has changed."""
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        seen: dict[int, int] = {}
        for number in range(60_000):
            seen[number & 1023] = seen.get(number & 1023, 0) + len(str(number))
        best = min(best, time.process_time() - began)
    return best * 1e3


def versions(dists: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of these packages, without those that are not installed."""
    found: dict[str, str] = {}
    for name in dists:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


async def measure(made: type[Peer], options: argparse.Namespace) -> dict[str, float]:
    """Run one scenario and return its figures."""
    peer = made(options)
    try:
        return await SCENARIOS[options.scenario][0](peer, options)
    finally:
        await peer.close()


def main(made: type[Peer]) -> None:
    """Run one peer's script as a program."""
    parser = argparse.ArgumentParser(description=f"{made.name}: one scenario, one JSON object")
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--variant", default="inproc", choices=["inproc", "http"])
    parser.add_argument("--base-url", default="", help="the address of server.py, for --variant http")
    parser.add_argument("--calls", type=int, help="number of calls in a run, for tool_loop and growth")
    parser.add_argument("--runs", type=int, default=500, help="number of concurrent runs, for concurrency")
    parser.add_argument("--repeat", type=int, default=7, help="number of measured runs, for tool_loop")
    options = parser.parse_args()
    if options.calls is None:
        options.calls = SCENARIOS[options.scenario][2 if options.variant == "http" else 1]
    figures = asyncio.run(measure(made, options))
    about = {
        "calibration_ms": calibration(),
        "load": os.getloadavg()[0],
        "python": sys.version.split()[0],
        "versions": versions(made.dists),
    }
    print(json.dumps({"figures": figures} | about))
