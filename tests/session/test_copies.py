"""A call reads copies of items that could be changed in place, so such a change never reaches the session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict

from handrail import Session, Tool, ToolContext, ToolResult
from handrail.protocols import PolicyDecision
from handrail.run import open_gate
from handrail.session import kept


@kept(key=lambda plan: plan.name)
@dataclass(frozen=True)
class Plan:
    name: str
    steps: list[str]


@dataclass(frozen=True)
class Row:
    cells: dict[str, list[int]]


class Doc(BaseModel):
    model_config = ConfigDict(frozen=True)
    tags: list[str]


class Box(msgspec.Struct, frozen=True):
    inner: Plan


@dataclass(frozen=True)
class Leaf:
    name: Annotated[str, "a name"]
    sizes: tuple[int, ...]
    kind: Literal["a", "b"] | None = None
    child: Leaf | None = None


ITEMS: list[Any] = [Plan("p", ["a"]), Row({"x": [1]}), Doc(tags=["a"]), Box(Plan("p", ["a"]))]


def spoil(item: Any) -> None:
    match item:
        case Plan():
            item.steps.append("spoilt")
        case Row():
            item.cells["x"].append(2)
        case Doc():
            item.tags.clear()
        case _:
            item.inner.steps.append("spoilt")


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("how", ["latest", "all", "where", "iterate"])
@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
async def test_what_a_call_changes_in_place_is_not_in_the_session(item: Any, how: str, fails: bool):
    """If a call changes an item in place, the session's own item stays as it was, whether or not the call fails."""
    session, kind = Session(), type(item)
    session.dispatch(item)
    before = repr(item)

    async def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        slice_: Any = context.session[kind]
        assert len(slice_) == 1
        read: Any = {"latest": slice_.latest, "all": lambda: slice_.all()[0]}.get(how)
        read = (
            read
            or {"where": lambda: slice_.where(lambda each: True)[0], "iterate": lambda: next(iter(slice_))}[
                how
            ]
        )
        found = read()
        assert found == item
        spoil(found)
        return ToolResult.error("failed") if fails else ToolResult.ok(None, "done")

    tool = Tool("spoil", "Spoil it.", handler, effect="staged")
    assert (await open_gate([tool], session=session).invoke("spoil")).success is not fails
    assert repr(session[kind].latest()) == before


async def test_a_policy_reads_copies_too():
    """A policy can't change state items in place, either before or after the call."""
    session = Session()
    session.dispatch(Plan("p", ["a"]))

    class Spoils:
        name = "spoils"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            spoil(context.session[Plan].get("p"))
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            spoil(context.session[Plan].get("p"))

    async def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok(None, "done")

    gate = open_gate([Tool("go", "Go.", handler, effect="staged")], session=session, policies=[Spoils()])
    assert (await gate.invoke("go")).success
    assert session[Plan].all() == (Plan("p", ["a"]),)


async def test_items_that_can_not_change_are_read_as_they_are():
    """Immutable items are not copied: the call gets the session's own slice and item."""
    session, item, seen = Session(), Leaf("x", (1, 2), "a", Leaf("y", ())), list[Any]()
    session.dispatch(item)

    async def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        seen.extend((context.session[Leaf], context.session[Leaf].latest()))
        return ToolResult.ok(None, "done")

    await open_gate([Tool("look", "Look.", handler, effect="read")], session=session).invoke("look")
    assert seen[0] is session[Leaf]
    assert seen[1] is item
