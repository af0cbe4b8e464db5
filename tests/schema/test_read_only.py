"""Data that tools see and share can't be changed, at any depth. Deep copies of it can."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Adapter, Prompt, ScriptedModel, Session, Tool, ToolCall, ToolContext, tool
from handrail.schema.immutability import ReadOnlyDict, ReadOnlyList, read_only
from handrail.serve.agui.interrupts import frontend_tool

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)

CHANGES: list[Callable[[Any], object]] = [
    lambda data: data.__setitem__(next(iter(data), 0) if isinstance(data, dict) else 0, 1),
    lambda data: data.__delitem__(next(iter(data), 0) if isinstance(data, dict) else 0),
    lambda data: data.clear(),
    lambda data: data.pop(),
    lambda data: data.update(a=1) if isinstance(data, dict) else data.extend([1]),
    lambda data: data.setdefault("a", 1) if isinstance(data, dict) else data.insert(0, 1),
    lambda data: data.popitem() if isinstance(data, dict) else data.remove(1),
    lambda data: data.__ior__({"a": 1}) if isinstance(data, dict) else data.__iadd__([1]),
    lambda data: data.clear() if isinstance(data, dict) else (data.reverse(), data.sort()),
    lambda data: data.clear() if isinstance(data, dict) else data.__imul__(2),
]


def inside(data: Any) -> list[Any]:
    """Return every dict and list in some data, each before those inside it."""
    found = [data] if isinstance(data, dict | list) else []
    values: Any = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return found + [each for value in values for each in inside(value)]


def assert_unchangeable(data: Any) -> None:
    for each in inside(data):
        assert isinstance(each, ReadOnlyDict | ReadOnlyList)
        for change in CHANGES:
            with pytest.raises(TypeError, match=r"read-only.*Change a copy"):
                change(each)


@given(data=plain)
def test_read_only_data_equals_the_original_and_refuses_changes(data: Any):
    """Read-only data equals the original, is encoded like it, and refuses changes. A deep copy of it is plain."""
    original = copy.deepcopy(data)
    shown = read_only(data)
    assert_unchangeable(shown)
    assert shown == original
    assert msgspec.json.encode(shown) == msgspec.json.encode(original)
    assert pydantic_core.to_json(shown) == pydantic_core.to_json(original)
    assert json.dumps(shown) == json.dumps(original)
    assert pickle.loads(pickle.dumps(shown)) == original
    copied = copy.deepcopy(shown)
    assert copied == original
    assert not any(isinstance(each, ReadOnlyDict | ReadOnlyList) for each in inside(copied))


@dataclass
class Order:
    items: list[dict[str, int]]
    note: str = ""


async def _handle(params: Order, *, context: ToolContext) -> Any: ...


@pytest.mark.parametrize(
    "described",
    [
        Tool("order", "Order.", _handle, result=Any),
        Tool("nothing", "Do nothing.", params=None),
        frontend_tool("page", "Show a page.", {"type": "object", "properties": {"a": {"enum": [1, 2]}}}),
    ],
    ids=lambda each: each.name,
)
def test_a_tools_schema_is_read_only(described: Any):
    """No policy or handler can change a tool's schema, which the model sees too."""
    assert inside(described.json_schema)
    assert_unchangeable(described.json_schema)


def test_a_sessions_config_is_read_only_and_not_shared_with_the_caller():
    """A session's config can't be changed by a tool, or by changing the dict that the caller passed."""
    given_ = {"limits": {"sizes": [1, 2]}, "tags": {"a"}}
    session = Session(config=given_)
    given_["limits"]["sizes"].append(3)  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]  # a list
    assert session.config["limits"] == {"sizes": [1, 2]}
    assert session.config["tags"] == frozenset({"a"})
    assert_unchangeable(session.config)


def test_the_request_that_a_tool_sees_is_read_only():
    """A tool can't change the request's body and headers, which other tools see too."""
    seen: list[Any] = []

    @tool
    async def look(context: ToolContext) -> str:
        """Look at the request."""
        seen.append(context.request)
        return "seen"

    Adapter(ScriptedModel([ToolCall("look", {}), "Done."])).evaluate(
        Prompt("p", "T.", tools=[look]), "hi"
    ).wait()
    (request,) = seen
    assert len(inside(request.body)) > 1
    assert_unchangeable(request.body)
    assert isinstance(request.headers, ReadOnlyDict)
