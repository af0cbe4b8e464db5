"""`McpTools`: the tools of a server through the gate, and servers that misbehave."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import support
from handrail import Adapter, CapabilityPolicy, Prompt, PromptResponse, ScriptedModel, ToolCall, tool
from handrail.errors import DefinitionError, PromptValidationError
from handrail.events import Progress, ToolInvoked
from handrail.mcp import McpTools, transport
from handrail.mcp import connection as connections
from handrail.mcp.connection import ServerUnavailable
from handrail.mcp.tools import MAX_NAME, map_names
from handrail.messages import ToolMessage
from handrail.testing import Person

SERVER = Path(support.__path__[0]) / "mcp_server.py"


def server(*arguments: object, **options: Any) -> McpTools:
    """Return a section with the tools of a server that misbehaves on request."""
    return McpTools("trial", command=[sys.executable, str(SERVER), *map(str, arguments)], **options)


async def run(
    section: McpTools, *calls: ToolCall, **options: Any
) -> tuple[PromptResponse[Any], list[str], ScriptedModel]:
    """Make the calls in order in one run. Returns the response, the results that the model received, and the model."""
    model = ScriptedModel([*calls, "Done."])
    tools, policies = options.pop("tools", ()), options.pop("policies", ())
    prompt = Prompt("guide", ["Go.", section], tools=tools, policies=policies)
    response = await Adapter(model).evaluate(prompt, "hi", **options)
    messages = model.requests[-1].messages
    told = [one.text for each in messages if isinstance(each, ToolMessage) for one in each.results]
    return response, told, model


async def test_tools_of_a_server_in_a_run() -> None:
    """A server's tools are offered with its schemas, under names a model can write, and called by the server's names."""
    async with server() as section:
        _, told, model = await run(
            section, ToolCall("echo", {"text": "a"}), ToolCall("Send_Mail", {"text": "b"})
        )
    assert told == ["echo: a", "Send.Mail: b"]
    offered = {each.tool.name: each.tool for each in model.requests[0].tools}
    assert offered["echo"].json_schema["required"] == ["text"]
    assert "remote" not in offered  # its schema refers to another document
    assert {each.effect for each in offered.values()} == {"irreversible"}


async def test_invalid_arguments_do_not_reach_the_server() -> None:
    """Arguments are checked against the server's schema; unknown ones are allowed unless the schema forbids them."""
    async with server() as section:
        _, told, _ = await run(
            section, ToolCall("echo", {"text": 3}), ToolCall("echo", {"text": "a", "more": 1})
        )
    assert "text must be text" in told[0]
    assert told[1] == "echo: a"


async def test_effects_only_by_the_user() -> None:
    """A server's read-only annotation counts only if the user trusts it. An effect that the user declares always counts."""
    async with (
        server(trust_annotations=True) as trusted,
        server(effects={"echo": "idempotent"}) as told,
        server() as plain,
    ):
        found = [
            {tool.name: tool.effect for tool in each.current_tools()}["echo"]
            for each in (trusted, told, plain)
        ]
        assert {tool.name: tool.effect for tool in trusted.current_tools()}["Send_Mail"] == "irreversible"
    assert found == ["read", "idempotent", "irreversible"]


async def test_policies_approvals_and_events() -> None:
    """A server's tool needs the same approval as any other tool."""
    for approve in (True, False):
        person = Person(approve=approve)
        async with server(policies=[CapabilityPolicy()]) as section:
            _, told, _ = await run(section, ToolCall("echo", {"text": "a"}), environment=person)
        assert [question.kind for question in person.questions] == ["approval"]
        assert ("echo: a" in told[0]) is approve


async def test_progress_is_published() -> None:
    """The progress that a server reports becomes the progress of the call."""
    async with server() as section:
        model = ScriptedModel([ToolCall("echo", {"text": "a"}), "Done."])
        stream = Adapter(model).stream(Prompt("guide", ["Go.", section]), "hi")
        events = [event async for event in stream]
    assert [(each.done, each.total) for each in events if isinstance(each, Progress)] == [(1, 2)]
    assert [each.tool for each in events if isinstance(each, ToolInvoked)] == ["echo"]


async def test_other_content_is_described() -> None:
    """Content that is not text is replaced by its media type and size."""
    async with server() as section:
        _, told, _ = await run(section, ToolCall("pixels"))
    assert told == ["[image/png, 12 kB]"]


async def test_question_of_a_server() -> None:
    """A server's question reaches the person. The server gets the answer, `decline`, or `cancel` if nobody can be asked."""
    async with server() as section:
        person = Person(answers={"mcp.form": {"size": 4}})
        _, told, _ = await run(section, ToolCall("ask"), environment=person)
        _, declined, _ = await run(section, ToolCall("ask"), environment=Person())
        _, nobody, _ = await run(section, ToolCall("ask"))
    assert told == ['{"action": "accept", "content": {"size": 4}}']
    assert declined == ['{"action": "decline"}']
    assert nobody == ['{"action": "cancel"}']
    assert person.questions[0].payload["message"] == "Which size?"


# --- servers that misbehave ---


async def test_server_that_dies(tmp_path: Path) -> None:
    """If a server dies, its call is retried if its effect allows that; if not, the outcome is unknown. The next call works."""
    async with server(tmp_path / "state", trust_annotations=True) as section:
        _, told, _ = await run(section, ToolCall("die"), ToolCall("echo", {"text": "a"}))
    assert told == ["survived", "echo: a"]
    async with server() as section:
        _, told, _ = await run(section, ToolCall("die"), ToolCall("echo", {"text": "a"}))
    assert "not known whether the call happened" in told[0]
    assert told[1] == "echo: a"


@pytest.mark.parametrize(("name", "why"), [("flood", "without an answer"), ("huge", "more than 16 MB")])
async def test_server_that_floods(name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends too much is disconnected, and the next call starts a new one."""
    monkeypatch.setattr(transport, "MAX_UNASKED", 500)
    async with server() as section:
        _, told, _ = await run(section, ToolCall(name), ToolCall("echo", {"text": "a"}))
    assert why in told[0]
    assert told[1] == "echo: a"


async def test_server_that_sends_rubbish() -> None:
    """A line that is not a message is skipped; an invalid answer fails the call."""
    async with server() as section:
        calls = [ToolCall("rubbish", {"text": text}) for text in ("{", "null", "[1]", "answer")]
        _, told, _ = await run(section, *calls)
    assert told[:3] == ["after rubbish"] * 3
    assert "not valid MCP" in told[3]


async def test_server_that_hangs() -> None:
    """A call that is not answered ends with the timeout, and the connection remains usable."""
    async with server(timeout=0.2) as section:
        _, told, _ = await run(section, ToolCall("hang"), ToolCall("echo", {"text": "a"}))
        assert section.server.connection.opened == 1
    assert "0.2" in told[0]
    assert told[1] == "echo: a"


async def test_changed_list_is_offered_and_told(tmp_path: Path) -> None:
    """New tools can be called from the next turn on, and the next result tells the model about the change."""
    async with server() as section:
        calls = [
            ToolCall("change", {"text": "fresh"}),
            ToolCall("echo", {"text": "a"}),
            ToolCall("fresh", {"text": "b"}),
        ]
        _, told, model = await run(section, *calls)
    assert told[1] == "echo: a\n[The tools of the server trial have changed. added: fresh.]"
    assert told[2] == "fresh: b"
    assert "fresh" not in {each.tool.name for each in model.requests[0].tools}


async def test_restarted_server_has_other_tools(tmp_path: Path) -> None:
    """After a restart the list is read again: tools that are gone are no longer offered."""
    state = tmp_path / "state"
    state.write_text("old")
    async with server(state) as section:
        _, told, _ = await run(section, ToolCall("old", {"text": "a"}))
        state.write_text("new")
        calls = [
            ToolCall("die"),
            ToolCall("echo", {"text": "a"}),
            ToolCall("old", {"text": "b"}),
            ToolCall("new", {"text": "c"}),
        ]
        _, after, _ = await run(section, *calls)
    assert told == ["old: a"]
    assert "removed: old; added: new" in after[1]
    assert "old" in after[2]
    assert "old: b" not in after[2]
    assert after[3] == "new: c"


async def test_server_that_can_not_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run does not begin if it can't reach a required server. After a failure, the next attempt to connect has to wait."""
    section = McpTools("gone", command=["/nonexistent/server"])
    with pytest.raises(ServerUnavailable, match="'/nonexistent/server' was not found"):
        await run(section)
    monkeypatch.setattr(connections, "PATIENCE", 0.0)
    with pytest.raises(ServerUnavailable, match="The next attempt to connect is in"):
        await section.connect()
    response, _, model = await run(McpTools("gone", command=["/nonexistent/server"], required=False))
    assert response.text == "Done."
    assert not list(model.requests[0].tools)


async def test_same_name_twice() -> None:
    """A server's tool with the same name as another tool is refused; a prefix makes its name unique."""

    @tool(effect="pure")
    def echo(text: str) -> str:
        """Return the text."""
        return f"ours: {text}"

    async with server() as section:
        with pytest.raises(PromptValidationError, match="echo"):
            await run(section, tools=[echo])
    async with server(prefix="trial_") as section:
        calls = [ToolCall("echo", {"text": "a"}), ToolCall("trial_echo", {"text": "b"})]
        _, told, _ = await run(section, *calls, tools=[echo])
    assert told == ["ours: a", "echo: b"]


def test_section_on_several_event_loops() -> None:
    """A section can be used by runs on different event loops, one after the other."""
    section = server()
    for _ in range(2):
        _, told, _ = asyncio.run(run(section, ToolCall("echo", {"text": "a"})))
        assert told == ["echo: a"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "either a command"),
        ({"command": "npx server"}, "either a command"),
        ({"command": ["a"], "url": "https://a"}, "either a command"),
        ({"url": "ftp://a"}, "not an address"),
        ({"command": ["a"], "prefix": "a b"}, "prefix"),
        ({"command": ["a"], "effects": {"x": "harmless"}}, "harmless"),
    ],
)
def test_invalid_definitions(options: dict[str, Any], match: str) -> None:
    """An invalid definition is refused when the section is created."""
    with pytest.raises(DefinitionError, match=match):
        McpTools("x", **options)


@given(
    st.lists(st.text("aB_.é", min_size=1, max_size=4) | st.just("x" * 80), unique=True, max_size=6),
    st.sampled_from(["", "p_"]),
)
def test_names_are_mapped_reversibly(remote: list[str], prefix: str) -> None:
    """Every name in a server's list is mapped to a different name that a model can write, whatever the list's order."""
    names = map_names(remote, prefix)
    assert len(set(names.values())) == len(remote)
    assert all(
        0 < len(name) <= MAX_NAME and name.replace("_", "").replace("-", "").isascii()
        for name in names.values()
    )
    assert map_names(remote[::-1], prefix) == names
