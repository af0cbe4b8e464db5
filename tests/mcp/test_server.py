"""`ToolServer` offers a prompt's tools to MCP clients: tests with the SDK's client in both protocol generations."""

import math
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mcp_types import ElicitResult

import handrail
from handrail import (
    Adapter,
    CapabilityPolicy,
    MemoryFilesystem,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    ToolResult,
    UserContext,
    tool,
)
from handrail.journal.sqlite import MemoryJournal
from handrail.mcp import McpTools, StdioServer, ToolServer
from mcp import Client, MCPError

modes = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])


@dataclass(frozen=True)
class Sum:
    total: int


@tool(effect="pure")
async def add(a: int, b: int, *, context: ToolContext) -> Sum:
    """Add two numbers."""
    await context.report_progress("adding", done=1, total=2)
    return Sum(a + b)


@tool
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


entered: list[str] = []


@tool(effect="read")
async def order(*, context: UserContext) -> str:
    """Order a size."""
    entered.append("order")
    size = await context.wait_for("size", {"product": "shirt"}, int)
    colour = await context.wait_for("colour", {}, str)
    return f"{size} {colour}"


@dataclass(frozen=True)
class Wish:
    colour: str | None
    size: int
    note: str | None = "none"


@tool(effect="read")
async def wish(*, context: UserContext) -> str:
    """Ask for a wish."""
    return repr(await context.wait_for("wish", {}, Wish))


@tool(effect="read")
def measure() -> float:
    """Return a number that JSON does not have."""
    return math.nan


@tool
def send(to: str, amount: int) -> str:
    """Send money."""
    return f"sent {amount} to {to}"


@tool(effect="staged", capabilities={"fs.write"})
def note(text: str, context: ToolContext) -> str:
    """Add a line to the notes."""
    context.filesystem.append("notes.txt", f"{text}\n")
    return "noted"


@tool(effect="read")
def fail() -> ToolResult[str]:
    """Fail."""
    return ToolResult.error("It did not work.")


PROMPT = Prompt("shop", "Sell.", tools=[pay, order, add, fail], policies=[CapabilityPolicy()])
ODD = Prompt("odd", "Send.", tools=[measure, send], policies=[CapabilityPolicy()])


def client(mode: Any, **options: Any) -> Client:
    """Return the SDK's client for a server with the tools of `PROMPT`."""
    return Client(ToolServer(PROMPT).server, mode=mode, **options)


async def no_answer(context: Any, params: Any) -> ElicitResult:
    """Fail if the client is asked. A client with this callback declares that it can ask a person."""
    raise AssertionError("the client was asked, but the test gives the answers")


@modes
async def test_tools_are_described(mode: str) -> None:
    """Tools are listed in the order of their names, with schemas, and with annotations from their effects."""
    async with client(mode) as connected:
        tools = {each.name: each for each in (await connected.list_tools()).tools}
    assert list(tools) == ["add", "fail", "order", "pay"]
    assert tools["add"].input_schema["additionalProperties"] is False
    assert (tools["add"].output_schema or {})["required"] == ["total"]
    hints = {name: each.annotations for name, each in tools.items()}
    assert [
        (each.read_only_hint, each.destructive_hint) for each in (hints["add"], hints["pay"]) if each
    ] == [
        (True, False),
        (False, True),
    ]


@modes
async def test_a_field_of_a_form_that_may_be_null_is_left_empty(mode: Any) -> None:
    """A form does not require a field that may be null. A field that is left empty has its default, or else is null."""
    required: list[Any] = []

    async def answer(context: Any, params: Any) -> ElicitResult:
        required.append(params.requested_schema["required"])
        return ElicitResult(action="accept", content={"size": 42})

    server = ToolServer(Prompt("shop", "Sell.", tools=[wish]))
    async with Client(server.server, mode=mode, elicitation_callback=answer) as connected:
        result: Any = await connected.call_tool("wish", {})
    assert required == [["size"]]
    assert result.content[0].text.endswith("Wish(colour=None, size=42, note='none')")


@modes
async def test_calls_progress_and_errors(mode: str) -> None:
    """A call reports its progress and returns structured content.

    Invalid arguments and failures give error results; an unknown tool gives an MCP error.
    """
    reported: list[tuple[float, float | None]] = []

    async def report(progress: float, total: float | None, message: str | None) -> None:
        reported.append((progress, total))

    async with client(mode) as connected:
        found = await connected.call_tool("add", {"a": 1, "b": 2}, progress_callback=report)
        wrong = await connected.call_tool("add", {"a": "x"})
        failed = await connected.call_tool("fail", {})
        with pytest.raises(MCPError, match="there is no tool 'steal'"):
            await connected.call_tool("steal", {})
    assert found.structured_content == {"total": 3}
    assert reported == [(1, 2)]
    assert wrong.is_error
    assert "b" in wrong.content[0].text  # pyright: ignore[reportAttributeAccessIssue]  # it is text
    assert failed.is_error
    assert "It did not work." in failed.content[0].text  # pyright: ignore[reportAttributeAccessIssue]  # it is text


@modes
async def test_questions_reach_the_client(mode: str) -> None:
    """Each question of a call reaches the client, and the handler runs once."""
    entered.clear()
    asked: list[str] = []

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"value": 4 if "shirt" in params.message else "red"})

    async with client(mode, elicitation_callback=answer) as connected:
        found = await connected.call_tool("order", {})
    assert found.content[0].text == "4 red"  # pyright: ignore[reportAttributeAccessIssue]  # it is text
    assert len(asked) == 2
    assert entered == ["order"]


@modes
@pytest.mark.parametrize("approved", [True, False])
async def test_approvals_show_the_arguments(mode: str, approved: bool) -> None:
    """An approval question shows the call's arguments, and its answer decides whether the call runs."""
    asked: list[str] = []

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"approved": approved})

    async with client(mode, elicitation_callback=answer) as connected:
        found = await connected.call_tool("pay", {"amount": 5})
    assert "amount: 5" in asked[0]
    assert found.is_error is not approved
    assert ("paid 5" in found.content[0].text) is approved  # pyright: ignore[reportAttributeAccessIssue]  # it is text


@modes
async def test_approvals_show_the_changes(mode: Any) -> None:
    """An approval question about a staged call shows its diff, indented, and an approval applies exactly that diff."""
    asked: list[str] = []

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"approved": True})

    files = MemoryFilesystem({"notes.txt": "one\n"})
    prompt = Prompt("notes", "Keep notes.", tools=[note], policies=[CapabilityPolicy({"fs.write": "ask"})])
    server = ToolServer(prompt, files=lambda principal: files)
    async with Client(server.server, mode=mode, elicitation_callback=answer) as connected:
        await connected.call_tool("note", {"text": "two"})
    shown = asked[0].splitlines()
    assert shown[:3] == ["note uses 'fs.write'", "text: two", "It makes these changes:"]
    assert shown[-2:] == ["     one", "    +two"]
    assert all(line.startswith("    ") for line in shown[3:])
    assert files.read("notes.txt") == "one\ntwo\n"


@modes
async def test_an_argument_can_not_look_like_another_one(mode: Any) -> None:
    """In an approval question, every line of an argument but the first is indented, so that it can't pass for another argument."""
    asked: list[str] = []

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="decline")

    async with Client(ToolServer(ODD).server, mode=mode, elicitation_callback=answer) as connected:
        await connected.call_tool("send", {"to": "Ann\namount: 1", "amount": 900})
    rows = asked[0].splitlines()[1:]
    assert [row for row in rows if not row.startswith(" ")] == ["to: Ann↵", "amount: 900"]


@modes
async def test_a_number_that_json_does_not_have(mode: Any) -> None:
    """The result of a tool that returns NaN has the text `NaN` and no structured content."""
    async with Client(ToolServer(ODD).server, mode=mode) as connected:
        found: Any = await connected.call_tool("measure", {})
    assert (found.content[0].text, found.structured_content) == ("NaN", None)


@modes
@pytest.mark.parametrize("journal", [None, MemoryJournal])
async def test_arguments_that_are_not_unicode(mode: Any, journal: Any) -> None:
    """Arguments that can't be written as UTF-8 give an error result, whether or not calls are recorded."""
    server = ToolServer(ODD, journal=journal and journal())
    async with Client(server.server, mode=mode, elicitation_callback=no_answer) as connected:
        found: Any = await connected.call_tool("send", {"to": "\ud800", "amount": 1})
    assert found.is_error
    assert "can't be written as JSON" in found.content[0].text


async def test_a_forged_state_is_refused() -> None:
    """A request state that the server did not seal is refused, and so is one that was changed or sent with a different call."""
    async with client("2026-07-28", elicitation_callback=no_answer) as connected:
        asked: Any = await connected.session.call_tool("order", {}, allow_input_required=True)
        state = asked.request_state
        for forged in ("0" * 32, state[:-2] + ("A" if state[-2] != "A" else "B") + state[-1]):
            with pytest.raises(MCPError, match="Invalid or expired requestState"):
                await connected.session.call_tool(
                    "order", {}, request_state=forged, allow_input_required=True
                )
        with pytest.raises(MCPError, match="Invalid or expired requestState"):
            await connected.session.call_tool(
                "pay", {"amount": 1}, request_state=state, allow_input_required=True
            )


async def test_an_answer_counts_once() -> None:
    """An answer counts once. If a call is not recorded, its answer is refused when it is sent again after the call's end."""
    async with client("2026-07-28", elicitation_callback=no_answer) as connected:
        asked: Any = await connected.session.call_tool("pay", {"amount": 5}, allow_input_required=True)
        [id] = asked.input_requests
        given = {id: ElicitResult(action="accept", content={"approved": True})}
        more: dict[str, Any] = {
            "input_responses": given,
            "request_state": asked.request_state,
            "allow_input_required": True,
        }
        found: Any = await connected.session.call_tool("pay", {"amount": 5}, **more)
        assert found.content[0].text == "paid 5"
        with pytest.raises(MCPError, match="nothing waits for this answer"):
            await connected.session.call_tool("pay", {"amount": 5}, **more)


async def test_command_serves_an_app(tmp_path: Path) -> None:
    """`handrail mcp app.py` serves the app over standard input and output, and records its calls.

    Its tools work on the folder that `--files` names.
    """
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("hello")
    (tmp_path / "app.py").write_text(
        "from handrail import FileTools, Prompt\nprompt = Prompt('files', ['Go.', FileTools()])\n"
    )
    command = [
        sys.executable,
        "-m",
        "handrail",
        "mcp",
        str(tmp_path / "app.py"),
        "--files",
        str(tmp_path / "files"),
        "--journal",
        str(tmp_path / "runs.db"),
    ]
    source = str(Path(handrail.__file__).parent.parent)
    async with McpTools("ours", server=StdioServer(command, {"PYTHONPATH": source})) as section:
        model = ScriptedModel([ToolCall("read_file", {"path": "a.txt"}), "Done."])
        await Adapter(model).evaluate(Prompt("guide", ["Go.", section]), "hi")
    assert "hello" in model.requests[-1].messages[-1].text
    with closing(SqliteJournal(tmp_path / "runs.db")) as journal:
        [row] = await journal.runs.list()
    assert (row.status, row.record.prompt) == ("done", "files")
