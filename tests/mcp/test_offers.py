"""A server offers sections as prompts, files as resources, attachments as content, and agents and workers as tools."""

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from mcp_types import ElicitResult, PromptReference
from pydantic import BaseModel, Field, field_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from handrail import (
    Agent,
    Attachment,
    CapabilityPolicy,
    DirectoryFilesystem,
    MarkdownSection,
    MemoryFilesystem,
    Prompt,
    ScriptedModel,
    Tool,
    ToolContext,
    ToolResult,
    UserContext,
    tool,
)
from handrail.mcp import ToolServer
from handrail.mcp.apps import load_app
from handrail.prompt.section import LiveSection
from mcp import Client, MCPError

modes = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
PNG = b"\x89PNG\r\n\x1a\n rest"


@dataclass(frozen=True)
class Trip:
    city: str
    days: int = 1


Kind = Enum("Kind", {f"KIND_{each}": f"kind {each}" for each in range(120)})


@dataclass(frozen=True)
class Paint:
    kind: Kind  # pyright: ignore[reportInvalidTypeForm]  # its members are made in a loop
    name: str
    colour: Literal["Red", "rose", "blue"] | None = None


PAINT = MarkdownSection[Paint]("Paint", "paint", "Paint $name $colour in $kind.")
PLAN = MarkdownSection[Trip]("Plan a trip", "plan", "Plan $days days in $city.", summary="A plan for a city.")
SMALL = MarkdownSection("Manners", "manners", "Be polite.", visibility="summary", summary="How to behave.")


@modes
async def test_sections_are_prompts(mode: Any) -> None:
    """A titled section is a prompt, whose arguments are the section's params.

    A section that is shown as a summary is returned in full. An unknown prompt is an error. So is a missing argument, for a client
    without forms.
    """
    server = ToolServer(Prompt("guide", "Guide."), sections=[PLAN, SMALL])
    async with Client(server.server, mode=mode) as client:
        listed = (await client.list_prompts()).prompts
        plan: Any = await client.get_prompt("plan", {"city": "Oslo", "days": "3"})
        manners: Any = await client.get_prompt("manners")
        for name, given in (("plan", {}), ("other", {})):
            with pytest.raises(MCPError, match=r"with these arguments: city: Field required$|no prompt"):
                await client.get_prompt(name, given)
    assert [each.name for each in listed] == ["manners", "plan"]
    assert [(each.name, each.required) for each in listed[1].arguments or ()] == [
        ("city", True),
        ("days", False),
    ]
    assert "Plan 3 days in Oslo." in plan.messages[0].content.text
    assert "Be polite." in manners.messages[0].content.text


def _in_a_city(*, params: Trip) -> bool:
    return bool(params.city)


@dataclass(frozen=True)
class Checked:
    city: str
    days: int

    def __post_init__(self) -> None:
        if self.days < 1:
            raise ValueError("at least one day")


class Model(BaseModel):
    city: str
    days: int = Field(ge=1)
    names: list[str] = Field(default_factory=list)


class Validated(Model):
    @field_validator("city")
    @classmethod
    def is_known(cls, city: str) -> str:
        return city


@pydantic_dataclass
class Strict:
    city: str
    days: int = 1

    @field_validator("city")
    @classmethod
    def is_known(cls, city: str) -> str:
        return city


@pytest.mark.parametrize(
    ("section", "arguments"),
    [
        (MarkdownSection[Strict]("A", "a", "In $city."), [("city", True), ("days", False)]),
        (MarkdownSection[Trip]("A", "a", "In $city."), [("city", True)]),
        (MarkdownSection[Trip]("A", "a", "$days days."), [("days", False)]),
        (MarkdownSection[Trip]("A", "a", "Be kind."), []),
        (
            MarkdownSection[Trip]("A", "a", "In $city.", summary="For $days days."),
            [("city", True), ("days", False)],
        ),
        (MarkdownSection[Model]("A", "a", "$days days: $names."), [("days", True), ("names", False)]),
        # In the following cases, code gets the params and may read any field, so every field is an argument.
        (MarkdownSection[Trip]("A", "a", "Be kind.", enabled=_in_a_city), [("city", True), ("days", False)]),
        (MarkdownSection[Checked]("A", "a", "In $city."), [("city", True), ("days", True)]),
        (
            MarkdownSection[Validated]("A", "a", "In $city."),
            [("city", True), ("days", True), ("names", False)],
        ),
    ],
)
async def test_the_arguments_are_the_fields_that_a_section_uses(section: Any, arguments: list[Any]) -> None:
    server = ToolServer(Prompt("guide", "Guide."), sections=[section])
    async with Client(server.server, mode="2026-07-28") as client:
        [listed] = (await client.list_prompts()).prompts
        given = {"city": "Oslo", "days": "3"}
        found: Any = await client.get_prompt(
            "a", {name: given[name] for name, _ in arguments if name in given}
        )
        if any(name == "days" and needed for name, needed in arguments):
            with pytest.raises(MCPError, match="day"):
                await client.get_prompt("a", {"city": "Oslo", "days": "0"})
    assert [(each.name, each.required) for each in listed.arguments or ()] == arguments
    assert "$" not in found.messages[0].content.text


async def test_missing_arguments_are_asked_for() -> None:
    """A client that can show forms is asked for the required arguments that are missing. If its user declines, that is an error."""
    server = ToolServer(Prompt("guide", "Guide."), sections=[PLAN, PAINT])
    asked: list[Any] = []
    answers = [
        ElicitResult(action="accept", content={"city": "Oslo"}),
        ElicitResult(action="accept", content={"kind": "kind 1", "name": "Sky"}),
        ElicitResult(action="decline"),
        ElicitResult(action="accept", content={"city": "Rome"}),
    ]

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params)
        return answers[len(asked) - 1]

    async with Client(server.server, mode="2026-07-28", elicitation_callback=answer) as client:
        plan: Any = await client.get_prompt("plan", {"days": "3"})
        paint: Any = await client.get_prompt("paint")
        with pytest.raises(MCPError, match="the arguments of 'plan' were not given: decline"):
            await client.get_prompt("plan")
        whole: Any = await client.get_prompt("plan", {"city": "Bergen"})
    assert "Plan 3 days in Oslo." in plan.messages[0].content.text
    assert "Paint Sky" in paint.messages[0].content.text
    assert "Bergen" in whole.messages[0].content.text
    assert [each.message for each in asked[:2]] == [
        "The prompt Plan a trip needs: city",
        "The prompt Paint needs: kind, name",
    ]
    assert asked[1].requested_schema["properties"]["kind"]["enum"][:2] == ["kind 0", "kind 1"]
    assert len(asked) == 3


@modes
async def test_the_attachments_of_a_section_are_content(mode: Any) -> None:
    """An image, a sound, a file and a link follow the text of a prompt. So does the image of a section shown as a summary."""
    files = [
        Attachment(PNG, "a.png"),
        Attachment(b"fLaC", "a.flac"),
        Attachment(b"text", "a.txt"),
        Attachment("https://example.org/a.pdf"),
    ]
    closed = MarkdownSection("B", "b", "Look.", visibility="summary", summary="B.", attachments=files[:1])
    server = ToolServer(
        Prompt("p", "x"), sections=[MarkdownSection("A", "a", "Look.", attachments=files), closed]
    )
    async with Client(server.server, mode=mode) as client:
        found: Any = await client.get_prompt("a")
        opened: Any = await client.get_prompt("b")
    kinds = ["text", "image", "audio", "resource", "resource_link"]
    assert [each.content.type for each in found.messages] == kinds
    assert [each.content.type for each in opened.messages] == ["text", "image"]
    assert found.messages[3].content.resource.text == "text"


@modes
async def test_files_are_resources(mode: Any) -> None:
    """Files are listed, and read as text or bytes. Any other address is an error."""
    files = MemoryFilesystem()
    files.write("notes/a b.txt", "hello")
    files.write("image.png", PNG)
    server = ToolServer(Prompt("files", "Read."), files=lambda principal: files, resource_address="files:///")
    async with Client(server.server, mode=mode) as client:
        listed = (await client.list_resources()).resources
        text: Any = await client.read_resource("files:///notes/a%20b.txt")
        image: Any = await client.read_resource("files:///image.png")
        for uri in (
            "files:///../secret",
            "files:///missing",
            "other:///image.png",
            "files:///%2Fetc%2Fpasswd",
        ):
            with pytest.raises(MCPError, match="no such resource"):
                await client.read_resource(uri)
    assert [str(each.uri) for each in listed] == ["files:///image.png", "files:///notes/a%20b.txt"]
    assert (text.contents[0].text, text.contents[0].mime_type) == ("hello", "text/plain")
    assert (image.contents[0].mime_type, hasattr(image.contents[0], "blob")) == ("image/png", True)


async def test_only_regular_files_are_resources(tmp_path: Path) -> None:
    """A pipe, a socket and a link to a pipe are not listed, and the pipe can't be read."""
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    files = DirectoryFilesystem(tmp_path)
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(tmp_path):
        made.bind("socket")
    server = ToolServer(Prompt("p", "Text."), files=lambda principal: files, resource_address="files:///")
    async with Client(server.server) as client:
        listed = (await client.list_resources()).resources
        with pytest.raises(MCPError, match="no such resource"):
            await client.read_resource("files:///pipe")
    assert [each.name for each in listed] == ["a.txt"]


@modes
@pytest.mark.parametrize("cursor", ["-1", "\u0663", "9" * 5000])
async def test_a_made_up_cursor_is_refused(mode: Any, cursor: str) -> None:
    """A malformed cursor is refused with an error that says that the server did not return it, however long the cursor is."""
    files = MemoryFilesystem()
    server = ToolServer(Prompt("p", "Text."), files=lambda principal: files, resource_address="files:///")
    async with Client(server.server, mode=mode) as client:
        with pytest.raises(MCPError, match="not one that this server returned"):
            await client.list_resources(cursor=cursor)


@modes
async def test_resources_are_offered_only_if_asked_for(mode: Any) -> None:
    """A server that was given no address for its files offers no resources."""
    files = MemoryFilesystem()
    server = ToolServer(Prompt("files", "Read."), files=lambda principal: files)
    async with Client(server.server, mode=mode) as client:
        with pytest.raises(MCPError):
            await client.list_resources()


@modes
async def test_attachments_are_content(mode: Any) -> None:
    """Each attachment of a result becomes a content block of the matching kind."""

    @tool(effect="read")
    def show() -> ToolResult[None]:
        """Show things."""
        sound = Attachment(b"RIFF\x00\x00\x00\x00WAVE", "a.wav")
        more = [Attachment(PNG), sound, Attachment(b"{}", "a.json"), Attachment(b"%PDF-1", "a.pdf")]
        return ToolResult.ok(message="Here.", attachments=[*more, Attachment("https://example.org/b.png")])

    async with Client(ToolServer(Prompt("show", "Show.", tools=[show])).server, mode=mode) as client:
        found: Any = await client.call_tool("show", {})
    kinds = [each.type for each in found.content]
    assert kinds == ["text", "image", "audio", "resource", "resource", "resource_link"]
    assert found.content[3].resource.text == "{}"
    assert found.content[4].resource.blob


@modes
async def test_arguments_of_prompts_are_completed(mode: Any) -> None:
    """An enum or literal argument is completed with at most 100 of the values that begin with the typed text, ignoring case.

    Other arguments have no completions, and an unknown prompt is an error.
    """
    server = ToolServer(Prompt("shop", "Sell."), sections=[PAINT])
    async with Client(server.server, mode=mode) as client:
        there = PromptReference(name="paint")

        async def complete(name: str, value: str) -> Any:
            return (await client.complete(there, {"name": name, "value": value})).completion

        assert (await complete("colour", "r")).values == ["Red", "rose"]
        assert (await complete("colour", "")).values == ["Red", "rose", "blue"]
        many = await complete("kind", "kind")
        assert (len(many.values), many.total, many.has_more) == (100, 120, True)
        assert (await complete("name", "a")).values == []
        assert (await complete("nothing", "a")).values == []
        with pytest.raises(MCPError, match="no prompt 'print'"):
            await client.complete(PromptReference(name="print"), {"name": "colour", "value": ""})


class Live(LiveSection):
    """A live section whose text and condition use the params. Each call to `connect` adds a tool to it."""

    def __init__(self) -> None:
        super().__init__("Live", "live", "Live in $city.", enabled=_in_a_city)
        self._found: tuple[Tool[Any, Any], ...]
        object.__setattr__(self, "_found", ())

    async def connect(self, principal: str) -> None:
        def handle(params: None, *, context: ToolContext) -> ToolResult[None]:
            return ToolResult.ok(message="Done.")

        made = Tool(f"live_{len(self._found)}", "Does it.", handle, effect="read")
        object.__setattr__(self, "_found", (*self._found, made))

    def current_tools(self, principal: str) -> tuple[Tool[Any, Any], ...]:
        return self._found


async def test_a_prompt_with_params_serves_the_current_tools_of_all_its_sections() -> None:
    """The tools of all sections that are enabled or may be, those of live sections too, are served.

    A section's policies also decide on tools of sections inside it.
    """

    @tool(effect="read")
    def fare() -> int:
        """Look up a fare."""
        return 4

    @tool(effect="read")
    def route() -> str:
        """Look up a route."""
        return "north"

    @tool(effect="read")
    def secret() -> str:
        """Look up a secret."""
        return "s"

    off = [
        MarkdownSection("Off", "off", "", tools=[secret], enabled=False),
        MarkdownSection("Never", "never", "", children=[Live()], enabled=lambda: False),
    ]
    deny = CapabilityPolicy(effects={"read": "deny"})
    outer = MarkdownSection("Outer", "outer", "", policies=[deny], children=[Live()])
    routes = MarkdownSection("Routes", "routes", "", tools=[route], policies=[deny])
    fares = MarkdownSection[Trip]("Fares", "fares", "In $city.", tools=[fare])
    agent = Agent(ScriptedModel([]), [PLAN, outer, routes, fares, *off], name="guide")
    async with Client(agent.mcp().server, mode="2026-07-28") as client:
        listed = [[each.name for each in (await client.list_tools()).tools] for _ in range(2)]
        denied = [(await client.call_tool(name, {})).is_error for name in ("fare", "live_0", "route")]
    assert listed == [["fare", "live_0", "route"], ["fare", "live_0", "live_1", "route"]]
    assert denied == [False, True, True]


@modes
async def test_an_agent_is_a_tool(mode: Any) -> None:
    """`Agent.mcp()` serves the agent's tools and the agent itself, which runs inside the call."""

    @tool(effect="read")
    def fare(city: str) -> int:
        """Look up a fare."""
        return 4

    model = ScriptedModel(["It costs 4."])
    agent = Agent(model, "Answer briefly.", name="guide", description="Knows fares.", tools=[fare])
    async with Client(agent.mcp().server, mode=mode) as client:
        names = [each.name for each in (await client.list_tools()).tools]
        found: Any = await client.call_tool("guide", {"message": "How much?"})
    assert names == ["fare", "guide"]
    assert found.content[0].text == "It costs 4."
    assert model.requests[0].messages[0].text == "How much?"


async def test_workers_are_tools(tmp_path: Path) -> None:
    """Each worker in a folder becomes a tool. It uses the model that is passed to `load_app`."""
    (tmp_path / "clerk.md").write_text("---\ndescription: Files things.\n---\nFile it.\n")
    (tmp_path / "judge.md").write_text("---\ndescription: Judges things.\n---\nJudge it.\n")
    app = load_app(str(tmp_path), ScriptedModel(["filed"]))
    async with Client(ToolServer(app.prompt, adapter=app.adapter).server) as client:
        names = [each.name for each in (await client.list_tools()).tools]
        found: Any = await client.call_tool("clerk", {"input": "this"})
    assert names == ["clerk", "judge"]
    assert found.content[0].text == "filed"


@modes
async def test_a_tool_that_asks_needs_a_client_with_forms(mode: Any) -> None:
    """A client that can't show forms is told so when it calls a tool that asks a person."""

    @tool(effect="read")
    async def order(*, context: UserContext) -> str:
        """Ask for a size."""
        return await context.wait_for("size", {}, str)

    async with Client(ToolServer(Prompt("shop", "Sell.", tools=[order])).server, mode=mode) as client:
        with pytest.raises(MCPError, match="can't show forms"):
            await client.call_tool("order", {})


@modes
async def test_a_cancelled_request_cancels_its_call(mode: Any) -> None:
    """If a client cancels its request, the call is cancelled, and so is its handler."""
    began, ended = asyncio.Event(), asyncio.Event()

    @tool(effect="read")
    async def slow() -> str:
        """Take long."""
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async with Client(ToolServer(Prompt("slow", "Go.", tools=[slow])).server, mode=mode) as client:
        calling = asyncio.create_task(client.call_tool("slow", {}))
        await began.wait()
        calling.cancel()
        await ended.wait()
