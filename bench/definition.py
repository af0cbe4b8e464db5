"""Measure the definition of a tool, compared with a pydantic model of the same fields.

The figures are medians of CPU time, over interleaved rounds. A tool's definition reads a signature, and creates a validator and
the JSON Schema that a model is shown. A pydantic model has a validator and no JSON Schema.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from handrail import ToolContext, tool

ROUNDS = int(os.environ.get("ROUNDS", "15"))
TOOLS = int(os.environ.get("TOOLS", "200"))


@dataclasses.dataclass
class Report:
    title: str
    lines: list[str]


Query = Annotated[str, Field(description="What to search for.")]
Limit = Annotated[int, Field(ge=1, le=100)]
Order = Literal["new", "old"]


def a_tool() -> Any:
    async def forecast(city: str, days: int = 3, *, context: ToolContext) -> str:
        """Return the weather forecast."""
        return city

    return tool(forecast)


def a_model() -> Any:
    return create_model("forecast", city=(str, ...), days=(int, 3))


def a_rich_tool() -> Any:
    async def search(
        query: Query,
        limit: Limit = 10,
        tags: list[str] | None = None,
        order: Order = "new",
        *,
        context: ToolContext,
    ) -> Report:
        """Search the reports."""
        return Report(query, tags or [])

    return tool(search)


def two_models() -> Any:
    search: dict[str, Any] = {
        "query": (Query, ...),
        "limit": (Limit, 10),
        "tags": (list[str] | None, None),
        "order": (Order, "new"),
    }
    return create_model("search", **search), create_model("report", title=(str, ...), lines=(list[str], ...))


ROWS: list[tuple[str, Callable[[], Any], Callable[[], Any], float]] = [
    ("a tool with two plain parameters", a_tool, a_model, 3),
    ("a tool with constraints, defaults and a dataclass as result", a_rich_tool, two_models, 3),
]


def cpu_of(make: Callable[[], Any]) -> float:
    """Return the CPU time of one definition, in microseconds."""
    gc.collect()
    began = time.process_time()
    for _ in range(TOOLS):
        make()
    return (time.process_time() - began) / TOOLS * 1e6


def main() -> None:
    print(f"{ROUNDS} rounds of {TOOLS} definitions, CPU time, medians; load {os.getloadavg()[0]:.1f}\n")
    for what, ours, floor, most in ROWS:
        taken = [(cpu_of(ours), cpu_of(floor)) for _ in range(ROUNDS)]
        figure = statistics.median(mine for mine, _ in taken)
        ratio = figure / statistics.median(bare for _, bare in taken)
        verdict = "ok" if ratio <= most else "MISSED"
        print(f"{what:62} {figure:8.0f} us  {ratio:5.2f}x   at most {most}x   {verdict}", flush=True)


if __name__ == "__main__":
    main()
