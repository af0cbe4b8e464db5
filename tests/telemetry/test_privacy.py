"""Secrets are on no span, whatever a tool does with them, and nothing is computed while nobody observes."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from handrail import (
    Adapter,
    Prompt,
    ScriptedModel,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    UserContext,
    open_gate,
    tool,
)
from handrail.telemetry import names
from handrail.testing import Person
from handrail.text.secrets import HIDDEN
from support.planted_secrets import MARK, SECRETS
from support.traced import traced


class Login(BaseModel):
    """Arguments with a secret."""

    user: str
    keys: list[SecretStr]


async def leaky(params: Any, *, context: ToolContext) -> ToolResult[str]:
    """Raise an error with the secret in its message, its cause and its notes."""
    secret = params.keys[0].get_secret_value()
    error = ValueError(f"refused {secret!r}")
    error.add_note(secret)
    raise error from KeyError(secret)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=SECRETS, content=st.booleans())
async def test_a_secret_is_on_no_span(secret: str, content: bool) -> None:
    """A secret that a model sends to a tool, which raises it in every way, is on no span, with content and without."""
    login = Tool("login", "Log in.", leaky, params=Login)
    model = ScriptedModel([ToolCall("login", {"user": "ada", "keys": [secret]}), "done"])
    with traced(content=content) as seen:
        await Adapter(model).evaluate(Prompt("p", "Log in.", tools=[login]), "go")
    assert seen.named("execute_tool login")
    assert MARK not in seen.text()


@pytest.mark.parametrize("content", [False, True])
async def test_what_a_person_gave_in_secret_is_on_no_span(content: bool) -> None:
    """A secret that a person gave to a call is on no span if the call returns it, and only the type and the frames of an exception are."""

    @tool
    async def ask(fails: bool, context: UserContext) -> str:
        """Ask for a key, and show it."""
        key = await context.wait_for("key", {}, SecretStr)
        if fails:
            raise ValueError(f"bad key {key.get_secret_value()}")
        return f"the key is {key.get_secret_value()}"

    script = [ToolCall("ask", {"fails": True}), ToolCall("ask", {"fails": False}), "done"]
    adapter = Adapter(ScriptedModel([*script]), environment=Person(answers={"key": f"{MARK}-1"}))
    with traced(content=content) as seen:
        await adapter.evaluate(Prompt("p", "Ask.", tools=[ask]), "go")
    assert MARK not in seen.text()
    failed, succeeded = seen.all("execute_tool ask")
    [event] = failed.events
    assert event.attributes["exception.type"] == "ValueError"
    assert (succeeded.attributes.get(names.TOOL_CALL_RESULT) == f"the key is {HIDDEN}") is content


@tool(effect="pure")
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def entered() -> set[CodeType]:
    """Return the functions that a call enters."""
    found: set[CodeType] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_code)

    gate = open_gate([add])
    await gate.invoke("add", {"a": 1, "b": 1})
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        await gate.invoke("add", {"a": 1, "b": 2})
    finally:
        sys.setprofile(before)
    return found


async def test_nothing_is_computed_while_nobody_observes() -> None:
    """A call enters the same functions before telemetry was started and after it was stopped, and none of telemetry's."""
    before = await entered()
    with traced():
        during = await entered()
    after = await entered()
    assert {
        code.co_qualname if sys.version_info >= (3, 11) else code.co_name for code in before ^ after
    } == set()
    assert not [code for code in before if "handrail/telemetry" in code.co_filename]
    assert [code for code in during if "handrail/telemetry" in code.co_filename]
