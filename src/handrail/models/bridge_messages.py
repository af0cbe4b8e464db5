"""Conversion between Handrail's messages and pydantic-ai's."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

from handrail.messages import AssistantMessage, Kept, Message, ModelRequest, ToolMessage
from handrail.models.wire import encode
from handrail.schema import Schema
from handrail.tools import Tool


def tool_of(tool: Tool[Any, Any]) -> Any:
    """Convert an offered tool."""
    tools: Any = import_module("pydantic_ai.tools")
    return tools.ToolDefinition(
        name=tool.name, description=tool.description, parameters_json_schema=tool.json_schema
    )


def output_of(schema: Schema[Any]) -> Any:
    """Convert the required output."""
    output: Any = import_module("pydantic_ai.output")
    return output.OutputObjectDefinition(json_schema=schema.json_schema, name="answer")


def messages_of(model: str, request: ModelRequest) -> list[Any]:
    """Convert the conversation, with the system prompt first."""
    said: Any = import_module("pydantic_ai.messages")
    found = [_message(said, model, message) for message in request.messages]
    if request.system:
        found.insert(0, said.ModelRequest([said.SystemPromptPart(request.system)]))
    return found


def _message(said: Any, model: str, message: Message) -> Any:
    if isinstance(message, ToolMessage):
        return said.ModelRequest(
            [
                said.ToolReturnPart(
                    each.name, each.text, each.id, outcome="failed" if each.failed else "success"
                )
                for each in message.results
            ]
        )
    if isinstance(message, AssistantMessage):
        kept = message.kept
        if kept is not None and kept.wire == _wire(model):
            return _as_it_was(said, message, kept)
        parts = [said.TextPart(message.text)] if message.text else []
        parts += [said.ToolCallPart(call.name, call.arguments, call.id) for call in message.calls]
        return said.ModelResponse(parts)
    return said.ModelRequest([said.UserPromptPart(message.text)])


def _as_it_was(said: Any, message: AssistantMessage, kept: Kept) -> Any:
    """Convert an answer with its thinking and signatures. Its calls keep the ids they have here."""
    [response] = said.ModelMessagesTypeAdapter.validate_json(kept.data)
    calls = iter(message.calls)
    parts = [
        dataclasses.replace(part, tool_call_id=next(calls).id) if part.part_kind == "tool-call" else part
        for part in response.parts
    ]
    return dataclasses.replace(response, parts=parts)


def kept_of(model: str, response: Any) -> Kept | None:
    """Return what the provider needs back unchanged; None if text and calls are enough."""
    if not any(
        part.part_kind not in ("text", "tool-call") or part.id or part.provider_details
        for part in response.parts
    ):
        return None
    said: Any = import_module("pydantic_ai.messages")
    return Kept(_wire(model), said.ModelMessagesTypeAdapter.dump_json([response]))


def _wire(model: str) -> str:
    return f"bridge:{model}"


def arguments_of(arguments: Any, whole: bool) -> str:
    """Return a call's arguments as JSON text; an incomplete object as nothing."""
    if isinstance(arguments, str):
        return arguments
    if not whole:
        return ""
    return encode(arguments or {}).decode()
