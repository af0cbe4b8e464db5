"""Count the instructions of a call with valgrind: without telemetry, and with it off, on, and on with content.

    python bench/instructions.py [CHECKOUT]

The counts hardly depend on what else the machine does. A process makes 100 calls, another 400, and the difference is divided by 300. `gate` is a call through
the gate, and `run` a model's turn with a call, in a run of twenty of them. CHECKOUT is an older one to measure; what it has no telemetry for is left out.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FEW, MANY = 100, 400
KINDS = ("gate", "run")
MODES = ("absent", "off", "on", "content")


class Absent:
    """An import hook for which OpenTelemetry is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def prepare(mode: str) -> None:
    """Bring telemetry into the state that is measured."""
    if mode == "absent":
        sys.meta_path.insert(0, Absent())
        return
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    from handrail import telemetry

    if mode != "off":
        telemetry.start(
            content=mode == "content", tracer_provider=TracerProvider(), meter_provider=MeterProvider()
        )


async def work(kind: str, calls: int) -> None:
    """Make this many calls."""
    from handrail import Adapter, Prompt, ScriptedModel, Tool, ToolCall

    bench: Any = import_module("run")
    if kind == "gate":
        gate = bench.a_gate()
        for _ in range(calls):
            await gate.pass_through(bench.new_call(gate, "forecast", bench.ARGUMENTS))
        return
    script: list[Any] = [*[ToolCall("forecast", {"city": "Oslo", "days": 3})] * 20, "done"]
    prompt = Prompt(
        "bench", "Be brief.", tools=[Tool("forecast", "Forecast.", bench.handler, effect="staged")]
    )
    for _ in range(calls // 20):
        await Adapter(ScriptedModel([*script])).evaluate(prompt, "Go.")


def counted(tree: Path, mode: str, kind: str, calls: int) -> int:
    """Return how many instructions a process takes for this many calls."""
    path = os.pathsep.join([str(tree / "src"), str(tree / "bench")])
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    command = [sys.executable, "-P", __file__, "--work", mode, kind, str(calls)]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    done = subprocess.run([*valgrind, *command], env=environment, capture_output=True, text=True, check=True)
    return int(re.findall(r"Collected : (\d+)", done.stderr)[0])


def main(tree: Path) -> None:
    modes = MODES if (tree / "src/handrail/telemetry").is_dir() else MODES[:1]
    for kind in KINDS:
        for mode in modes:
            subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree / "src")], check=False)
            each = (counted(tree, mode, kind, MANY) - counted(tree, mode, kind, FEW)) / (MANY - FEW)
            print(f"{kind:5} {mode:8} {each:12,.0f} instructions a call", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        prepare(sys.argv[2])
        gc.disable()  # a collection would fall into one process or the other
        asyncio.run(work(sys.argv[3], int(sys.argv[4])))
        sys.stdout.flush()
        os._exit(0)
    main(Path(*sys.argv[1:2]) if sys.argv[1:] else ROOT)
