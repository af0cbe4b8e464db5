"""Extras from a model, an adapter, a run or a gate, as handlers read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from handrail import (
    Adapter,
    MemoryJournal,
    Prompt,
    ScriptedModel,
    ToolCall,
    ToolContext,
    UserContext,
    open_gate,
    tool,
)
from handrail.context import RETRIES, TRACING_SPAN, ExtraKey, Extras, PerCall
from handrail.errors import DefinitionError, ExtraKeyError
from handrail.events import ToolStarted
from handrail.messages import SentPart
from handrail.session import Session
from support.parked_runs import park_and_resume

TENANT = ExtraKey("tenant", str, "Whose data this is.")
HANDLE = ExtraKey("handle", list, "Lives as long as the run; any thread.", opaque=True)


def reading(seen: list[Any], *keys: ExtraKey[Any]) -> Any:
    @tool(effect="idempotent")
    async def read(context: ToolContext) -> str:
        """Read the extras."""
        seen.append([context.extras.get(key) for key in keys])
        return "read"

    return read


def calling(name: str) -> Any:
    return lambda request: ToolCall(name, {}) if len(request.messages) == 1 else "done"


async def test_a_gate_contributes_extras() -> None:
    seen: list[Any] = []
    handle: list[int] = []
    gate = open_gate([reading(seen, TENANT, HANDLE)], extras={TENANT: "acme", HANDLE: handle})
    (await gate.invoke("read")).unwrap()
    assert seen == [["acme", handle]]
    assert seen[0][1] is handle


async def test_a_run_replaces_the_extras_of_its_adapter_by_name() -> None:
    seen: list[Any] = []
    other = ExtraKey("other", int)
    prompt = Prompt("p", "Read.", tools=[reading(seen, TENANT, other)])
    adapter = Adapter(ScriptedModel(calling("read")), extras={TENANT: "acme", other: 1})
    await adapter.evaluate(prompt, "go")
    await adapter.evaluate(prompt, "go", extras={"tenant": "umbrella"})
    assert seen == [["acme", 1], ["umbrella", 1]]


async def test_nested_runs_inherit_extras_and_may_replace_them() -> None:
    seen: list[Any] = []
    inner = Prompt("inner", "Read.", tools=[reading(seen, TENANT)])

    @tool
    async def outer(context: ToolContext) -> str:
        """Evaluate the inner prompt twice, and read the extras through a new gate."""
        await context.adapter.evaluate(inner, "go")
        await context.adapter.evaluate(inner, "go", extras={TENANT: "inner"})
        (await open_gate([reading(seen, TENANT)]).invoke("read")).unwrap()
        return "nested"

    adapter = Adapter(ScriptedModel(calling("read")), extras={TENANT: "acme"})
    (await open_gate([outer], adapter=adapter).invoke("outer")).unwrap()
    assert seen == [["acme"], ["inner"], ["acme"]]


class Wire(ScriptedModel):
    """A model that contributes extras with each answer."""

    async def stream(self, request: Any) -> AsyncGenerator[Any]:
        yield SentPart(b"{}", {}, extras={"tenant": "of the wire", "retries": 99})
        async for part in super().stream(request):
            yield part


async def test_a_model_contributes_extras_that_survive_resume() -> None:
    """A model's extras are recorded with its answer, so a resumed run has them too.

    They can't replace what Handrail itself adds, such as the number of retries.
    """
    seen: list[Any] = []

    @tool(effect="idempotent", name="read")
    async def reads(context: UserContext) -> str:
        """Read the extras, and ask somebody."""
        seen.append([context.extras[TENANT], context.extras[RETRIES]])
        return await context.wait_for("go_on", {})

    prompt = Prompt("p", "Read.", tools=[reads])
    adapter = Adapter(Wire(calling("read")), journal=MemoryJournal(), extras={TENANT: "the adapter's"})
    assert await park_and_resume(adapter, prompt) == "done"
    assert seen == [["of the wire", 0]] * 2


@pytest.mark.parametrize(
    ("extras", "says"),
    [
        ({"Tenant": "acme"}, "snake_case"),
        ({TENANT: 3}, "declared for str"),
        ({"tenant": object()}, "can't be written as JSON"),
        ("tenant", "mapping from keys to values"),
    ],
)
def test_wrong_extras_are_refused_when_they_are_given(extras: Any, says: str) -> None:
    with pytest.raises(DefinitionError, match=says):
        open_gate([], extras=extras)


def test_a_value_of_the_wrong_type_is_refused_when_it_is_read() -> None:
    """A value that was added by name is refused when it is read by a key that declares a different type."""
    extras = Extras({"tenant": 3})
    assert extras["tenant"] == 3
    assert TENANT in extras
    for read in (lambda: extras[TENANT], lambda: extras.get(TENANT)):
        with pytest.raises(ExtraKeyError, match=r"its value is .* declared for str"):
            read()


async def test_the_tracing_span_of_a_call_is_found_by_its_id() -> None:
    """A tracer begins a span for each `ToolStarted`. Each call reads its own span, even if several calls run at once."""
    session, spans = Session(), dict[str, Any]()
    seen: dict[str, Any] = {}
    session.dispatcher.subscribe(ToolStarted, lambda event: spans.update({event.call_id: object()}))

    @tool
    async def work(context: ToolContext) -> str:
        """Record the span of the call."""
        await asyncio.sleep(0)
        seen[context.invocation.id] = context.extras[TRACING_SPAN]
        return "worked"

    gate = open_gate([work], session=session, extras={TRACING_SPAN: PerCall(spans.get)})
    await asyncio.gather(*(gate.invoke("work") for _ in range(3)))
    assert len(seen) == 3
    assert seen == spans


async def test_a_call_without_a_value_of_its_own_has_none() -> None:
    seen: list[Any] = []
    gate = open_gate([reading(seen, TRACING_SPAN)], extras={TRACING_SPAN: PerCall(lambda call_id: None)})
    (await gate.invoke("read")).unwrap()
    assert seen == [[None]]


class Listing(ScriptedModel):
    """A model that contributes a list with each answer."""

    async def stream(self, request: Any) -> AsyncGenerator[Any]:
        yield SentPart(b"{}", {}, extras={"labels": ["new"]})
        async for part in super().stream(request):
            yield part


async def test_a_tool_changes_no_extras_for_other_calls_and_runs() -> None:
    """What a tool does to a value that it reads is not seen by other calls, by nested runs, or by who gave the value."""
    mine: dict[str, Any] = {"quota": {"left": 3}}
    seen: list[Any] = []

    @tool(effect="idempotent")
    async def spoil(context: ToolContext) -> str:
        """Read the extras, and try to change them."""
        seen.append((dict(context.extras["quota"]), list(context.extras["labels"])))
        with pytest.raises(TypeError, match="read-only"):
            context.extras["quota"]["left"] = 0
        with pytest.raises(TypeError, match="read-only"):
            context.extras["labels"].append("spoilt")
        return "tried"

    prompt = Prompt("p", "Spoil.", tools=[spoil])
    adapter = Adapter(Listing([[ToolCall("spoil"), ToolCall("spoil")], "Done."] * 2), extras=mine)
    for _ in range(2):
        await adapter.evaluate(prompt, "go")
    assert seen == [({"left": 3}, ["new"])] * 4
    assert mine == {"quota": {"left": 3}}


async def test_a_calls_own_extras_can_be_passed_on() -> None:
    """`context.extras` can be passed to a nested run, with opaque objects and declared types."""
    seen: list[Any] = []
    handle: list[int] = []
    inner = Prompt("inner", "Read.", tools=[reading(seen, TENANT, HANDLE)])

    @tool
    async def outer(context: ToolContext) -> str:
        """Pass the extras on."""
        await context.adapter.evaluate(inner, "go", extras=context.extras)
        return "nested"

    adapter = Adapter(ScriptedModel(calling("read")))
    gate = open_gate([outer], adapter=adapter, extras={TENANT: "acme", HANDLE: handle})
    (await gate.invoke("outer")).unwrap()
    assert seen == [["acme", handle]]
    assert seen[0][1] is handle
