"""The providers' own tools: which of them each wire has, and how a request asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from handrail.messages import Model, ModelRequest
from handrail.models import ModelRequestRefused
from handrail.models.blocks import encode
from handrail.models.request_settings import Write, merge_fields
from handrail.tools.provider_tool import ProviderTool


class Form(msgspec.Struct, frozen=True):
    """How a wire asks for one of the provider's tools."""

    fields: Mapping[str, Any]
    """The fields that every request for the tool has."""
    writes: Mapping[str, Write] = {}
    """For each limit that the provider has, the function that writes it."""
    inside: str = ""
    """The field that holds the limits and the options; "" if they are beside the other fields."""

    def write(self, model: str, tool: ProviderTool) -> dict[str, Any]:
        """Return the tool as the wire writes it. Raises `ModelRequestRefused` for a limit that the provider does not have."""
        more: dict[str, Any] = {}
        for name, value in tool.limits().items():
            write = self.writes.get(name)
            if write is None:
                raise ModelRequestRefused(
                    model,
                    f"its {tool.name} has no {name}. Remove {name} from ProviderTool({tool.name!r}, ...)",
                )
            merge_fields(more, write(value))
        merge_fields(more, tool.options)
        fields = dict(self.fields)
        merge_fields(fields, {self.inside: more} if self.inside else more)
        return fields


Forms = Mapping[str, Form]
"""The forms of one wire, by the names of the tools."""


def _same(name: str) -> Write:
    return lambda value: {name: list(value) if isinstance(value, tuple) else value}  # pyright: ignore[reportUnknownArgumentType]  # a tuple of strings


_WHERE = {name: _same(name) for name in ("max_uses", "allowed_domains", "blocked_domains")}

ANTHROPIC_TOOLS: Forms = {
    "web_search": Form({"type": "web_search_20250305", "name": "web_search"}, _WHERE),
    "web_fetch": Form({"type": "web_fetch_20250910", "name": "web_fetch"}, _WHERE),
    "code_execution": Form({"type": "code_execution_20250825", "name": "code_execution"}),
}
RESPONSES_TOOLS: Forms = {
    "web_search": Form(
        {"type": "web_search"}, {"allowed_domains": lambda value: {"filters": {"allowed_domains": [*value]}}}
    ),
    "code_execution": Form({"type": "code_interpreter", "container": {"type": "auto"}}),
    "file_search": Form({"type": "file_search"}, {"stores": lambda value: {"vector_store_ids": [*value]}}),
}
GEMINI_TOOLS: Forms = {
    "web_search": Form({"googleSearch": {}}, inside="googleSearch"),
    "web_fetch": Form({"urlContext": {}}, inside="urlContext"),
    "code_execution": Form({"codeExecution": {}}, inside="codeExecution"),
    "file_search": Form(
        {"fileSearch": {}},
        {"stores": lambda value: {"fileSearchStoreNames": [*value]}},
        inside="fileSearch",
    ),
}
_MODELS = {
    "Anthropic's": ANTHROPIC_TOOLS,
    "Gemini's": GEMINI_TOOLS,
    "OpenAI's with OpenAIModel(..., api='responses')": RESPONSES_TOOLS,
}
"""The models whose providers have their own tools, as errors name these models, and the forms of their wires."""


def write_tools(model: str, request: ModelRequest, forms: Forms) -> bytes:
    """Return the provider's tools of a request as JSON, separated by commas. The wire must have all of them.

    Raises `ModelRequestRefused` with the name of the first limit that the provider does not have.
    """
    return b",".join(encode(forms[tool.name].write(model, tool)) for tool in request.provider_tools)


def joined_tools(own: bytes, *functions: bytes | bytearray) -> tuple[bytes | bytearray, ...]:
    """Return the JSON list of a request's tools, in pieces.

    The provider's own tools come first, so that the list keeps its beginning when later requests append functions.
    """
    return (b"[", own, b"," if own and any(functions) else b"", *functions, b"]")


def check_provider_tools(model: Model, tools: tuple[ProviderTool, ...]) -> None:
    """Raise `ModelRequestRefused` if a model's provider does not have one of these tools.

    A run checks this before it sends a request, so wires need not.
    """
    known = model.traits.provider_tools
    for tool in tools:
        if tool.name not in known:
            has = f"It has {', '.join(sorted(known))}. " if known else ""
            others = " or ".join(models for models, forms in _MODELS.items() if tool.name in forms)
            raise ModelRequestRefused(
                model.name,
                f"it has no {tool.name} of its own. {has}Remove ProviderTool({tool.name!r}), or use a model that has it: {others}",
            )
