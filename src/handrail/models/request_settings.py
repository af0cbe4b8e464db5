"""Request fields for `ModelSettings`, and for the providers' own tools, for each provider's API."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import msgspec

from handrail.messages import DEFAULT_SETTINGS, Model, ModelRequest
from handrail.models import ModelRequestRefused
from handrail.models.blocks import encode
from handrail.tools.provider_tool import ProviderTool

Write = Callable[[Any], Mapping[str, Any]]
"""A function that takes the value of one setting, or of one limit of a tool, and returns the fields that express it."""


def settings_fields(
    model: str, request: ModelRequest, writes: Mapping[str, Write], lacks: Collection[str] = ()
) -> dict[str, Any]:
    """Return the fields of a request for its settings. Objects of the same name are merged.

    In a request without tools, the settings about calls are left out.

    Raises `ModelRequestRefused` for a setting that the provider does not have, a value that the model does not accept,
    and a `tool_choice` that names a tool that is not offered.
    """
    settings, fields = request.settings, dict[str, Any]()
    if settings is DEFAULT_SETTINGS:
        return fields
    for name in settings.chosen():
        write = writes.get(name)
        if write is None or name in lacks:
            raise ModelRequestRefused(model, f"it has no {name}. Remove {name} from ModelSettings")
        if name in ("tool_choice", "parallel_calls") and not (len(request.tools) or request.provider_tools):
            continue  # providers refuse these in a request without tools
        if name == "tool_choice":
            _check_offered(model, request)
        merge_fields(fields, write(getattr(settings, name)))
    return fields


def limit_fields(request: ModelRequest, max_tokens: str) -> dict[str, Any]:
    """Return the fields for a request's temperature and its maximum of tokens, which the provider calls `max_tokens`."""
    fields = {"temperature": request.temperature, max_tokens: request.max_tokens}
    return {name: value for name, value in fields.items() if value is not None}


def _check_offered(model: str, request: ModelRequest) -> None:
    """Raise `ModelRequestRefused` if the tool that the model must call is not offered to it."""
    name = request.settings.tool_choice
    offered = [each.tool.name for each in request.tools]
    if name not in _WORDS and name not in offered:
        known = ", ".join(offered) or "there is none"
        raise ModelRequestRefused(
            model,
            f"tool_choice is {name!r}, which is not offered. Pass auto, required, none or the name of a tool that is "
            f"offered: {known}",
        )


def merge_fields(fields: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add fields to a request. Each replaces the field of the same name, unless both are objects, which are merged."""
    for name, value in more.items():
        before: Any = fields.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            merged: dict[str, Any] = {**before}
            merge_fields(merged, cast("dict[str, Any]", value))
            fields[name] = merged
        else:
            fields[name] = value


CHAT: Mapping[str, Write] = {
    "effort": lambda level: {"reasoning_effort": level},
    "verbosity": lambda level: {"verbosity": level},
    "service_tier": lambda tier: {"service_tier": tier},
    "seed": lambda seed: {"seed": seed},
    "stop": lambda texts: {"stop": list(texts)},
    "parallel_calls": lambda may: {"parallel_tool_calls": may},
    "tool_choice": lambda name: {
        "tool_choice": name if name in _WORDS else {"type": "function", "function": {"name": name}}
    },
    "cache_key": lambda key: {"prompt_cache_key": key},
}
RESPONSES: Mapping[str, Write] = {
    "effort": lambda level: {"reasoning": {"effort": level}},
    "verbosity": lambda level: {"text": {"verbosity": level}},
    "service_tier": lambda tier: {"service_tier": tier},
    "parallel_calls": lambda may: {"parallel_tool_calls": may},
    "tool_choice": lambda name: {
        "tool_choice": name if name in _WORDS else {"type": "function", "name": name}
    },
    "cache_key": lambda key: {"prompt_cache_key": key},
}
ANTHROPIC: Mapping[str, Write] = {
    "effort": lambda level: {"output_config": {"effort": level}},
    "service_tier": lambda tier: {"service_tier": tier},
    "stop": lambda texts: {"stop_sequences": list(texts)},
    "parallel_calls": lambda may: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": not may}},
    "tool_choice": lambda name: {
        "tool_choice": {"type": _ANTHROPIC_WORDS[name]} if name in _WORDS else {"type": "tool", "name": name}
    },
    "cache_ttl": lambda ttl: {"cache_control": {"type": "ephemeral", "ttl": ttl}},
}


def anthropic_choice(fields: dict[str, Any], must_call: bool) -> None:
    """Make the `tool_choice` of a request valid.

    With `must_call`, the model has to call a tool, but may choose which. A choice of "none" loses its other fields,
    because the API refuses them.
    """
    choice = fields.get("tool_choice")
    if must_call:
        several = "disable_parallel_tool_use"
        fields["tool_choice"] = {"type": "any"}
        if choice and several in choice:
            fields["tool_choice"][several] = choice[several]
    elif choice and choice["type"] == "none":
        fields["tool_choice"] = {"type": "none"}


def gemini_writes(name: str, wire_name: Callable[[str], str]) -> Mapping[str, Write]:
    """Return the functions that write a Gemini model's settings.

    Models before Gemini 3 take a token budget instead of a level of effort.
    """
    before_3 = re.match(r"(?:models/)?gemini-(?:1|2)\b", name)

    def effort(level: str) -> Mapping[str, Any]:
        budget = _GEMINI_BUDGETS.get(level) if before_3 else None
        if before_3 and budget is None:
            raise ModelRequestRefused(
                f"google:{name}", f"it has no effort {level!r}. Pass one of {', '.join(_GEMINI_BUDGETS)}"
            )
        thinking = {"thinkingLevel": level} if budget is None else {"thinkingBudget": budget}
        return {"generationConfig": {"thinkingConfig": thinking}}

    def tool_choice(choice: str) -> Mapping[str, Any]:
        config: dict[str, Any] = {"mode": _GEMINI_WORDS.get(choice, "ANY")}
        if choice not in _WORDS:
            config["allowedFunctionNames"] = [wire_name(choice)]
        return {"toolConfig": {"functionCallingConfig": config}}

    return {
        "effort": effort,
        "seed": lambda seed: {"generationConfig": {"seed": seed}},
        "stop": lambda texts: {"generationConfig": {"stopSequences": list(texts)}},
        "tool_choice": tool_choice,
    }


BRIDGE: Mapping[str, Write] = {
    "seed": lambda seed: {"seed": seed},
    "stop": lambda texts: {"stop_sequences": list(texts)},
    "parallel_calls": lambda may: {"parallel_tool_calls": may},
}
_WORDS = ("auto", "required", "none")
_GEMINI_WORDS = {"auto": "AUTO", "required": "ANY", "none": "NONE"}
_GEMINI_BUDGETS = {"none": 0, "minimal": 1024, "low": 1024, "medium": 8192, "high": 24576}
"""Thinking budgets in tokens, by level of effort, as Google maps them."""
_ANTHROPIC_WORDS = {"auto": "auto", "required": "any", "none": "none"}


# --- the providers' own tools ---


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
