"""The work that every peer does, and the scripted model that requests it.

A run consists of a number of calls of one tool, one after the other, and then an answer. The tool gets two typed
arguments and the run's context, which counts the calls, so that missing work is detected. The module uses only the
standard library, so it works in every peer's venv.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

SYSTEM = "You are a careful worker. Use the tools, then report."
PROMPT = "Do the work."
TOOL_DOC = "Do one unit of work and return its record."

_RESULT = re.compile(r"@r(\d+)")
_NAME = re.compile(rb"bench-n(\d+)-d(\d+)(?:-f(\w+?))?-end")


class Context:
    """The shared state of one run's calls, injected in the framework's own way."""

    __slots__ = ("calls", "marks", "total")

    def __init__(self, marks: list[float] | None = None) -> None:
        self.calls = 0
        self.total = 0
        self.marks = marks

    def work(self, index: int, label: str) -> dict[str, Any]:
        """Do the tool's work, and return its result. A tag with `@r` and the index identifies it in later messages."""
        self.calls += 1
        self.total += index
        if self.marks is not None:
            self.marks.append(time.process_time())
        return {"tag": f"@r{index}", "total": 1000 + index, "label": label}


class Call(NamedTuple):
    """A tool call by the model, with its arguments as the text that a provider would send."""

    id: str
    name: str
    args_json: str

    @property
    def args(self) -> dict[str, Any]:
        """The parsed arguments, for frameworks whose models return them parsed."""
        return json.loads(self.args_json)


class Turn(NamedTuple):
    """One turn of the model, which has either calls or the answer."""

    calls: list[Call]
    text: str | None


@dataclass(frozen=True)
class Script:
    """The model of a run: a number of calls, then the answer.

    The next turn depends only on the results so far.
    """

    calls: int
    delay_ms: int = 0
    final_tool: str | None = (
        None  # name of the call that carries the answer, for frameworks whose answer is a call
    )

    made: ClassVar[int] = 0  # number of turns requested in this process, over all scripts

    @property
    def model_name(self) -> str:
        """The script's parameters as a model name, so that the server can read them from a request."""
        final = f"-f{self.final_tool}" if self.final_tool else ""
        return f"bench-n{self.calls}-d{self.delay_ms}{final}-end"

    @classmethod
    def named(cls, text: bytes) -> Script:
        """Return the script whose name occurs in `text`. Raises `ValueError` if there is none."""
        found = _NAME.search(text)
        if found is None:
            raise ValueError("the request's `model` names no script")
        calls, delay, final = found.groups()
        return cls(int(calls), int(delay), final.decode() if final else None)

    @property
    def answer(self) -> str:
        """The answer of a run in which all results reached the model."""
        return f"@r{max(self.calls - 1, 0)} done"

    def turn_at(self, step: int) -> Turn:
        """Return the turn that follows this many results."""
        if step < self.calls:
            return Turn([Call(f"call_{step}", "work", f'{{"index": {step}, "label": "item-{step}"}}')], None)
        if self.final_tool:
            return Turn([Call("call_final", self.final_tool, json.dumps({"answer": self.answer}))], None)
        return Turn([], self.answer)

    def turn(self, newest: object) -> Turn:
        """Return the turn that follows the newest message, which may be any object. If its text contains no result, return the first turn."""
        Script.made += 1
        found = _RESULT.search(newest if isinstance(newest, str) else str(newest))
        return self.turn_at(int(found.group(1)) + 1 if found else 0)

    async def aturn(self, newest: object) -> Turn:
        """Return the turn that follows the newest message, after the model's delay."""
        if self.delay_ms:
            await asyncio.sleep(self.delay_ms / 1000)
        return self.turn(newest)
