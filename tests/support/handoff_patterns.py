"""The seven handoff patterns of examples/handoff, with the expected outcome of each."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import termios
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from handrail import (
    ScriptedModel,
    TerminalEnvironment,
)
from handrail.messages import ModelRequest, UserMessage
from support import ROOT
from support.terminals import Window, window

FOLDER = ROOT / "examples" / "handoff"


T = TypeVar("T")


class Refused(str):
    """The outcome of a pattern that is refused because its environment lacks the verb with this name."""


NEEDS_A_PERSON = Refused("wait_for")


NEEDS_A_MODEL = Refused("prompt_model")


@dataclass(frozen=True)
class Pattern:
    """An example, with its call, the answers, and the expected outcome in each environment."""

    handoff: str
    client: str
    arguments: Mapping[str, Any]
    public: Any
    """The public part that the `client` act gets in the unit tests."""
    answers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """A person's answers, by the name of the question."""
    typed: tuple[tuple[str, str], ...] = ()
    """Lines that a person types at a terminal, each after the text that must be on the screen first.

    The second line after the same text waits until that text has been shown twice, and so on.
    """
    replies: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The model's answers, by a piece of the message that each one answers."""
    tools: tuple[str, ...] = ()
    results: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Results of inner calls in the unit tests, by the name of the tool."""
    expected: Mapping[str, Any] = field(default_factory=dict[str, Any])


ENTRY = "name of an entry (Enter to finish):"
SEND = ("s send (Enter), e edit, d decline:", "\n")


PATTERNS = {
    "browser_only": Pattern(
        "get_user_input",
        "fill_in",
        {"fields": ["city"]},
        {"fields": ["city"]},
        answers={"input-form": {"values": {"city": "Oslo"}}},
        typed=(
            (ENTRY, "city\n"),
            ("city (text):", "Bergen\n"),
            (ENTRY, "\n"),
            SEND,
        ),
        expected={
            "person": {"city": "Oslo"},
            "terminal": {"city": "Bergen"},
            "model": NEEDS_A_PERSON,
            "nobody": NEEDS_A_PERSON,
            "mock user": {"values": {"city": "Oslo"}},
        },
    ),
    "agent_only": Pattern(
        "deep_analysis",
        "analyse",
        {"topic": "rain"},
        {"topic": "rain"},
        replies={"Analyse": {"findings": ["it rains"]}},
        expected={
            "person": NEEDS_A_MODEL,
            "terminal": NEEDS_A_MODEL,
            "model": ["it rains"],
            "nobody": NEEDS_A_MODEL,
            "mock model": {"findings": ["it rains"]},
        },
    ),
    "flexible": Pattern(
        "make_choice",
        "choose",
        {"guest": "Ada"},
        {"choices": ["tea", "coffee", "water"]},
        answers={"pick": {"selected": "tea"}},
        typed=(("selected (text):", "tea\n"), SEND),
        replies={"Choose": {"selected": "coffee"}},
        expected={
            "person": 3,
            "terminal": 3,
            "model": 4,
            "nobody": 0,
            "mock user": {"selected": "tea"},
            "mock model": {"selected": "coffee"},
            "mock nobody": {"selected": "water"},
        },
    ),
    "sequential": Pattern(
        "research",
        "look",
        {"topic": "rain"},
        {"topic": "rain"},
        replies={
            "Research": {"findings": ["rain"], "needs_more": True},
            "Expand on: rain": {"findings": ["wind"], "needs_more": False},
        },
        expected={
            "person": NEEDS_A_MODEL,
            "terminal": NEEDS_A_MODEL,
            "model": ["rain", "wind"],
            "nobody": NEEDS_A_MODEL,
            "mock model": ["rain", "wind"],
        },
    ),
    "parallel": Pattern(
        "assess",
        "look_from_both_sides",
        {"topic": "rain"},
        {"topic": "rain"},
        replies={"Technical": {"analysis": "wet"}, "Business": {"analysis": "umbrellas"}},
        expected={
            "person": NEEDS_A_MODEL,
            "terminal": NEEDS_A_MODEL,
            "model": {"technical": "wet", "business": "umbrellas"},
            "nobody": NEEDS_A_MODEL,
            "mock model": {"technical": "wet", "business": "umbrellas"},
        },
    ),
    "nested": Pattern(
        "do_all",
        "hand_out",
        {"tasks": ["wash", "dry"]},
        {"tasks": ["wash", "dry"]},
        answers={"do": {"output": "by hand"}},
        typed=(
            ("├ task  wash\n  Ctrl-D declines.\n  output (text):", "rinsed\n"),
            SEND,
            ("├ task  dry\n  Ctrl-D declines.\n  output (text):", "hung up\n"),
            SEND,
        ),
        replies={"wash": {"output": "washed"}, "dry": {"output": "dried"}},
        tools=("do_task",),
        results={"do_task": lambda arguments: f"{arguments['task']}!"},
        expected={
            "person": ["wash: by hand", "dry: by hand"],
            "terminal": ["wash: rinsed", "dry: hung up"],
            "model": ["wash: washed", "dry: dried"],
            "nobody": ["wash: left undone", "dry: left undone"],
            "mock user": ["wash!", "dry!"],
            "mock model": ["wash!", "dry!"],
            "mock nobody": ["wash!", "dry!"],
        },
    ),
    "streaming": Pattern(
        "work_through",
        "work",
        {"steps": 2},
        {"steps": 2},
        replies={"Do step": {"text": "done"}},
        expected={
            "person": 2,
            "terminal": 2,
            "model": 2,
            "nobody": 2,
            "mock user": {"completed": 2},
            "mock model": {"completed": 2},
            "mock nobody": {"completed": 2},
        },
    ),
}


@cache
def example(name: str) -> ModuleType:
    """Import the module of an example, and return it."""
    spec = importlib.util.spec_from_file_location(f"handoff_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def replying(pattern: Pattern) -> ScriptedModel:
    """Return a model that gives the reply whose key occurs in the last message, whatever the order of the requests."""

    def reply(request: ModelRequest) -> str:
        asked = request.messages[-1]
        assert isinstance(asked, UserMessage)
        from handrail.schema import to_json

        return next(to_json(said).decode() for piece, said in pattern.replies.items() if piece in asked.text)

    return ScriptedModel(reply)


async def at_terminal(pattern: Pattern, begin: Callable[[Any], Awaitable[T]]) -> T:
    """Run a pattern at a terminal, type all its lines, and check that the terminal's settings are restored."""

    async def come() -> T:
        with seen.streams() as (stdin, stdout):
            return await begin(TerminalEnvironment(stdin=stdin, stdout=stdout))

    with window() as seen:
        async with asyncio.TaskGroup() as both:
            coming = both.create_task(come())
            both.create_task(type_in(seen, pattern))
        assert termios.tcgetattr(seen.slave) == seen.before
    return coming.result()


async def type_in(seen: Window, pattern: Pattern) -> None:
    counts: dict[str, int] = {}
    for prompt, keys in pattern.typed:
        counts[prompt] = counts.get(prompt, 0) + 1
        await seen.until(prompt, counts[prompt])
        seen.type(keys)
