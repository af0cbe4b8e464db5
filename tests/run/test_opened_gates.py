"""`open_gate` for your own orchestrator: with a prompt and an adapter, at the root and inside a call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Budget,
    CapabilityPolicy,
    MarkdownSection,
    MemoryFilesystem,
    MemoryJournal,
    Parked,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    ToolResult,
    UserContext,
    open_gate,
    tool,
)
from handrail.errors import ContextExpired, DefinitionError
from handrail.resources.bindings import Binding, given
from support.cards import Deal, Deck, Offer, Pick, card_game
from support.parked_runs import park_and_resume
from support.worker_folders import PLAIN, sound

LEAF = Prompt("leaf", "Leaf.")


@dataclass(frozen=True)
class Guest:
    """The params of a prompt."""

    name: str


class Database:
    """A resource that can be closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


@tool(capabilities=["network"])
async def fetch() -> str:
    """Fetch."""
    return "fetched"


@tool
async def ask(context: ToolContext) -> str:
    """Ask a model."""
    assert context.rendered_prompt is not None
    answer = await context.adapter.evaluate(LEAF, "go")
    return f"{context.prompt.name}: {context.rendered_prompt.text.strip()}: {answer.text}"


async def test_a_gate_for_a_prompt_has_its_tools_policies_and_resources() -> None:
    """Calls through a gate for a prompt behave as in a run of the prompt.

    The gate has the prompt's text, tools, policies, closed sections and resources, and closes the resources when it is closed.
    """
    seen: list[Any] = []

    @tool
    async def look(context: ToolContext) -> str:
        """Record the database."""
        seen.append(context.resources.get(Database))
        return "looked"

    database = Database()
    prompt = Prompt(
        "guide",
        sections=[
            MarkdownSection[Guest](
                "Greeting",
                "greeting",
                "Greet $name.",
                tools=[fetch],
                policies=[CapabilityPolicy({"network": "deny"})],
            ),
            MarkdownSection(
                "More", "more", "Much more.", tools=[look], summary="More of it.", visibility="summary"
            ),
        ],
        tools=[ask],
        resources=[Binding(Database, lambda _: database)],
    )
    adapter = Adapter(ScriptedModel(["answered"]))
    gate = open_gate(prompt=prompt, params=Guest("Ada"), adapter=adapter)
    assert gate.prompt is not None
    assert "Greet Ada." in gate.prompt.text
    assert [offered.name for offered in gate.prompt.tools] == ["ask", "fetch"]
    said = (await gate.invoke("ask")).unwrap()
    assert said.startswith("guide: ")
    assert said.endswith(": answered")
    assert not (await gate.invoke("fetch")).success, "the section's policy denies it"
    assert not (await gate.invoke("look")).success, "its section is closed"
    opened = open_gate(prompt=prompt, params=Guest("Ada"), opened=["more"])
    assert (await opened.invoke("look")).value == "looked"
    assert seen == [database]
    await opened.close()
    assert database.closed


async def test_what_an_adapter_was_created_with_applies_unless_it_is_replaced() -> None:
    @tool
    async def read(context: ToolContext) -> str:
        """Read."""
        return context.filesystem.read("a.txt")

    adapter = Adapter(ScriptedModel([]), filesystem=MemoryFilesystem({"a.txt": "the adapter's"}))
    assert (await open_gate([read], adapter=adapter).invoke("read")).value == "the adapter's"
    own = MemoryFilesystem({"a.txt": "own"})
    assert (await open_gate([read], adapter=adapter, filesystem=own).invoke("read")).value == "own"


@tool
async def delegate(name: str, context: ToolContext) -> str:
    """Let a worker answer."""
    return await context.call_worker(name, "go")


async def test_a_gate_opens_the_workers_of_its_adapter(tmp_path: Path) -> None:
    """The adapter's workers can be called through the gate and by handlers.

    If a gate opened inside a call has an adapter with workers, these replace the call's workers.
    """
    outer = sound(tmp_path / "outer", clerk=PLAIN)
    inner = sound(tmp_path / "inner", guide=PLAIN)
    adapter = Adapter(ScriptedModel(lambda request: "at your service"), workers=outer)
    gate = open_gate([delegate], adapter=adapter)
    assert (await gate.invoke("clerk", {"input": "go"})).value == "at your service"
    assert (await gate.invoke("delegate", {"name": "clerk"})).value == "at your service"
    without = open_gate([delegate], adapter=Adapter(ScriptedModel([])))
    assert "no tool 'clerk'" in (await without.invoke("clerk", {"input": "go"})).message

    @tool
    async def nest(with_workers: bool) -> list[bool]:
        """Call workers through a gate inside a call."""
        own = Adapter(ScriptedModel(lambda request: "here"), workers=inner if with_workers else None)
        opened = open_gate([delegate], adapter=own)
        return [(await opened.invoke("delegate", {"name": name})).success for name in ("clerk", "guide")]

    around = open_gate([nest], adapter=adapter)
    assert (await around.invoke("nest", {"with_workers": True})).value == [False, True]
    assert (await around.invoke("nest", {"with_workers": False})).value == [True, False]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"prompt": LEAF.render()}, "Pass a Prompt"), ({"adapter": "openai:gpt-5"}, "Pass an Adapter")],
)
def test_a_wrong_prompt_or_adapter_is_refused(arguments: Any, says: str) -> None:
    with pytest.raises(DefinitionError, match=says):
        open_gate([], **arguments)


def test_a_synchronous_handler_can_open_a_gate() -> None:
    @tool
    def outer() -> str:
        """Make a call through a new gate."""
        return open_gate([fetch]).invoke("fetch").wait().unwrap()

    assert open_gate([outer]).invoke("outer").wait().value == "fetched"


async def test_a_gate_inside_a_call_is_refused_what_is_always_the_calls() -> None:
    @tool
    async def outer() -> str:
        """Try to open a gate with a session, files or a journal of its own."""
        own: list[dict[str, Any]] = [
            {"session": Session()},
            {"filesystem": MemoryFilesystem()},
            {"journal": MemoryJournal()},
        ]
        for arguments in own:
            with pytest.raises(DefinitionError, match="inside the call outer"):
                open_gate([fetch], **arguments)
        return "refused"

    assert (await open_gate([outer]).invoke("outer")).value == "refused"


async def test_a_gate_inside_a_call_ends_with_the_call() -> None:
    """Calls through a gate that a handler opened are undone if the handler fails.

    When the handler's call has ended, the gate can't be used any more.
    """
    kept: list[Any] = []
    database = Database()
    files = MemoryFilesystem({"a.txt": "old"})

    @tool
    async def write(context: ToolContext) -> str:
        """Write."""
        context.resources.get(Database)
        context.filesystem.write("a.txt", "new")
        return "written"

    @tool
    async def outer() -> ToolResult[None]:
        """Fail after a nested call."""
        gate = open_gate([write])
        (await gate.invoke("write")).unwrap()
        await gate.close()
        assert not database.closed, "the run's resources are not the gate's"
        kept.append(open_gate([write]))
        return ToolResult.error("failed after all")

    around = open_gate([outer], filesystem=files, resources=[given(Database, database)])
    assert not (await around.invoke("outer")).success
    assert files.read("a.txt") == "old"
    with pytest.raises(ContextExpired):
        kept[0].invoke("write")


async def test_calls_of_a_gate_inside_a_call_are_charged_to_the_call() -> None:
    @tool
    async def outer() -> str:
        """Call five times."""
        gate = open_gate([fetch])
        return str(sum([(await gate.invoke("fetch")).success for _ in range(5)]))

    gate = open_gate([outer], budget=Budget(tool_calls=3))
    result = await gate.invoke("outer")
    assert "budget for tool_calls is too low: 1 wanted, 0 left" in result.render()
    assert "5" not in result.render()


async def test_a_resumed_run_does_not_repeat_what_was_done_by_hand_inside_a_call() -> None:
    """A resumed handler gets the recorded results of the calls and handoff steps it ran itself. None runs twice."""
    done: list[str] = []

    @tool(effect="idempotent")
    async def charge() -> str:
        """Charge."""
        done.append("charge")
        return "charged"

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        done.append("deal")
        return Parked(Deck(["ace"]), Offer(1))

    async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        done.append("settle")
        return ToolResult.ok(deck.cards[pick.index])

    game = card_game(before=deal, after=settle, effect="idempotent")

    @tool(effect="idempotent")
    async def outer(context: UserContext) -> str:
        """Charge and play by hand."""
        charged = (await open_gate([charge]).invoke("charge")).unwrap()
        parked = await game.start(Deal(1))
        assert isinstance(parked, Parked)
        picked = (await game.finish(parked, Pick(0))).unwrap()
        return f"{charged} {picked} {await context.wait_for('go_on', {})}"

    def answer(request: Any) -> Any:
        return ToolCall("outer", {}) if len(request.messages) == 1 else request.messages[-1].results[0].text

    adapter = Adapter(ScriptedModel(answer), journal=MemoryJournal())
    assert await park_and_resume(adapter, Prompt("root", "Root.", tools=[outer])) == "charged ace yes"
    assert done == ["charge", "deal", "settle"]
