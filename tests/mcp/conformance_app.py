"""The app that MCP's conformance suite is run against, through `handrail mcp --http`.

The suite names the tools and says what they do. Anybody may call them, so serve this app only on loopback.
"""

from __future__ import annotations

import asyncio
import base64
from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, Field, WithJsonSchema

from handrail import Attachment, MarkdownSection, Prompt, Tool, ToolContext, ToolResult, UserContext, tool
from handrail.errors import BudgetExceededError

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00\x40\x1f\x00\x00\x80\x3e\x00\x00\x02\x00\x10\x00data\x00\x00\x00\x00"
TASK = {"mcp.task"}


def authenticate(request: Any) -> str:
    """Accept everybody, because the suite sends no token."""
    return "suite"


@tool(effect="read")
def test_simple_text() -> str:
    """Return a text."""
    return "This is a simple text response for testing."


@tool(effect="read")
def test_image_content() -> ToolResult[None]:
    """Return an image."""
    return ToolResult.ok(attachments=[Attachment(PNG)])


@tool(effect="read")
def test_audio_content() -> ToolResult[None]:
    """Return a sound."""
    return ToolResult.ok(attachments=[Attachment(WAV)])


@tool(effect="read")
def test_embedded_resource() -> ToolResult[None]:
    """Return a file."""
    return ToolResult.ok(attachments=[Attachment(b"This is an embedded resource content.", "embedded.txt")])


@tool(effect="read")
def test_multiple_content_types() -> ToolResult[None]:
    """Return several kinds of content."""
    more = [Attachment(PNG), Attachment(b'{"test":"data","value":123}', "data.json")]
    return ToolResult.ok(message="Multiple content types test:", attachments=more)


@tool(effect="read")
def test_error_handling() -> str:
    """Fail."""
    raise ValueError("This tool intentionally returns an error for testing")


@tool(effect="read")
async def test_tool_with_progress(*, context: ToolContext) -> str:
    """Report progress."""
    for done in (0, 50, 100):
        await context.report_progress(f"{done} of 100", done=done, total=100)
        await asyncio.sleep(0.05)
    return "done"


class Person(BaseModel):
    username: str = Field(description="User's response")
    email: str = Field(description="User's email address")


@tool(effect="read")
async def test_elicitation(message: str, *, context: UserContext) -> str:
    """Ask the person for their name and address."""
    found = await context.wait_for("person", {}, Person, message=message)
    return f"User response: {found}"


class Status(Enum):
    active = "active"
    inactive = "inactive"
    pending = "pending"


class Defaults(BaseModel):
    name: str = "John Doe"
    age: int = 30
    score: float = 95.5
    status: Status = Status.active
    verified: bool = True


@tool(effect="read")
async def test_elicitation_sep1034_defaults(*, context: UserContext) -> str:
    """Ask for values that have defaults."""
    found = await context.wait_for("defaults", {}, Defaults)
    return f"Elicitation completed: action=accept, content={found.model_dump_json()}"


def choices(titles: dict[str, str]) -> list[dict[str, str]]:
    return [{"const": value, "title": title} for value, title in titles.items()]


OPTIONS = ["option1", "option2", "option3"]
FIRST = {"value1": "First Option", "value2": "Second Option", "value3": "Third Option"}
LEGACY = ["Option One", "Option Two", "Option Three"]


class Enums(BaseModel):
    untitledSingle: Annotated[str, WithJsonSchema({"type": "string", "enum": OPTIONS})]
    titledSingle: Annotated[str, WithJsonSchema({"type": "string", "oneOf": choices(FIRST)})]
    legacyEnum: Annotated[
        str, WithJsonSchema({"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": LEGACY})
    ]
    untitledMulti: Annotated[
        list[str], WithJsonSchema({"type": "array", "items": {"type": "string", "enum": OPTIONS}})
    ]
    titledMulti: Annotated[list[str], WithJsonSchema({"type": "array", "items": {"anyOf": choices(FIRST)}})]


@tool(effect="read")
async def test_elicitation_sep1330_enums(*, context: UserContext) -> str:
    """Ask for choices of every kind."""
    found = await context.wait_for("enums", {}, Enums)
    return f"Elicitation completed: action=accept, content={found.model_dump_json()}"


class Name(BaseModel):
    name: str


class Colour(BaseModel):
    color: str


class Agreed(BaseModel):
    ok: bool


class Confirmed(BaseModel):
    confirm: bool


class Named(BaseModel):
    name: str
    confirm: bool


async def greeted(context: UserContext) -> str:
    found = await context.wait_for("user_name", {}, Name, message="What is your name?")
    return f"Hello, {found.name}!"


@tool(effect="read")
async def test_input_required_result_elicitation(*, context: UserContext) -> str:
    """Ask for a name."""
    return await greeted(context)


@tool(effect="read")
async def test_input_required_result_capabilities(*, context: ToolContext) -> str:
    """Ask for a name, if somebody can be asked."""
    if context.wait_for is None:
        return "nobody can be asked"
    found = await context.wait_for("name", {}, Name, message="What is your name?")
    return f"Hello, {found.name}!"


async def confirmed(context: UserContext) -> str:
    await context.wait_for("confirm", {}, Agreed, message="Please confirm")
    return "state-ok"


@tool(effect="read")
async def test_input_required_result_request_state(*, context: UserContext) -> str:
    """Ask for a confirmation."""
    return await confirmed(context)


@tool(effect="read")
async def test_input_required_result_tampered_state(*, context: UserContext) -> str:
    """Ask for a confirmation."""
    return await confirmed(context)


@tool(effect="read")
async def test_input_required_result_multi_round(*, context: UserContext) -> str:
    """Ask for two things, one after the other."""
    found = await context.wait_for("step1", {}, Name, message="Step 1: What is your name?")
    colour = await context.wait_for("step2", {}, Colour, message="Step 2: What is your favorite color?")
    return f"{found.name} likes {colour.color}"


@tool(effect="read")
async def test_missing_capability(*, context: UserContext) -> str:
    """Ask for a name, so that a client that can't show forms is refused."""
    return await greeted(context)


@tool(effect="read")
async def test_streaming_elicitation(*, context: UserContext) -> str:
    """Ask for a name."""
    return await greeted(context)


@tool(effect="read")
def test_logging_tool() -> str:
    """Log nothing: clients get no log messages."""
    return "nothing was logged"


# Tasks.


@tool(effect="read")
def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello, {name}!"


@tool(effect="read", capabilities=TASK)
async def slow_compute(seconds: float, label: str = "", *, context: ToolContext) -> str:
    """Take some seconds."""
    await asyncio.sleep(seconds)
    return f"computed {label}"


@tool(effect="read", capabilities={"mcp.task.required"})
async def failing_job(*, context: ToolContext) -> ToolResult[str]:
    """Fail after a while."""
    await asyncio.sleep(0.2)
    return ToolResult.error("The job failed.")


@tool(effect="read", capabilities=TASK)
async def protocol_error_job(*, context: ToolContext) -> str:
    """End its run with an error."""
    raise BudgetExceededError("tool_calls", 1, 0, of_root=True)


@tool(effect="read", capabilities=TASK)
async def confirm_delete(filename: str, *, context: UserContext) -> str:
    """Delete a file, after a confirmation."""
    await context.wait_for("confirm", {"filename": filename}, Confirmed, message="Delete this file?")
    return f"deleted {filename}"


@tool(effect="read", capabilities=TASK)
async def multi_input(*, context: UserContext) -> str:
    """Ask for two things at once."""
    found = await asyncio.gather(
        context.wait_for("first", {}, Named, message="What is your name?"),
        context.wait_for("second", {}, Named, message="What is your other name?"),
    )
    return f"{found[0].name} {found[1].name}"


@tool(effect="read")
async def test_tool_with_task(*, context: UserContext) -> str:
    """Ask for a name, and then take long."""
    found = await context.wait_for("user_name", {}, Name, message="What is your name?")
    await asyncio.sleep(1.5)
    return f"Hello, {found.name}!"


# A schema that no Python type describes.

CONTACT: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


async def contacted(params: dict[str, Any], *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(f"contacted {params.get('name', 'somebody')}")


json_schema_2020_12_tool = Tool(
    "json_schema_2020_12_tool", "Contact somebody.", contacted, params=CONTACT, effect="read"
)


@tool(effect="read")
def forecast(city: Annotated[str, Field(json_schema_extra={"x-mcp-header": "City"})], days: int = 1) -> str:
    """Forecast the weather. Proxies see the city in a header of the request."""
    return f"{city}: sun for {days} days"


class Arguments(BaseModel):
    arg1: str
    arg2: str
    context: str


prompt = Prompt(
    "conformance",
    [
        "The tools that MCP's conformance suite calls.",
        MarkdownSection("Simple", "test_simple_prompt", "This is a simple prompt for testing."),
        MarkdownSection[Arguments](
            "With arguments",
            "test_prompt_with_arguments",
            "Prompt with arguments: arg1='$arg1', arg2='$arg2'",
        ),
        MarkdownSection[Arguments](
            "That asks", "test_input_required_result_prompt", "Use this context: $context"
        ),
        MarkdownSection(
            "With an image", "test_prompt_with_image", "Describe the image.", attachments=[Attachment(PNG)]
        ),
        MarkdownSection(
            "With a file",
            "test_prompt_with_embedded_resource",
            "Summarise the file.",
            attachments=[Attachment(b"This is an embedded resource content.", "embedded.txt")],
        ),
    ],
    tools=[each for each in list(globals().values()) if isinstance(each, Tool)],
)
