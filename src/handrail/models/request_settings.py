"""Request fields for `ModelSettings`, for each provider's API."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from handrail.messages import DEFAULT_SETTINGS, ModelRequest
from handrail.models import ModelRequestRefused

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
