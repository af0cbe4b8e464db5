"""`check_parameters`: refuses the parameters of OpenAI's APIs that the embedded model's server would otherwise ignore.

A parameter that is not read is accepted only if the answer is what the client asked for anyway.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Mapping
from typing import Any, cast

_ANY = None
Accepted = Mapping[str, Collection[Any] | None]
"""The parameters that an API accepts, with the accepted values, or `_ANY` if the parameter is read or every value is harmless."""

_OBJECTS = ("stream_options", "text", "reasoning")
"""Parameters whose fields are parameters of their own."""
_SHARED: Accepted = {
    "metadata": _ANY,
    "parallel_tool_calls": _ANY,  # an answer has at most one call
    "prompt_cache_key": _ANY,
    "prompt_cache_options": _ANY,
    "prompt_cache_retention": _ANY,
    "safety_identifier": _ANY,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options.include_obfuscation": (False,),
    "top_logprobs": (0,),
    "top_p": (1,),
    "user": _ANY,
}
CHAT: Accepted = {
    **_SHARED,
    **dict.fromkeys(("model", "messages", "tools", "tool_choice", "response_format", "temperature"), _ANY),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "stream", "stream_options.include_usage"), _ANY),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": _ANY,  # only changes how fast the answer comes
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "stop": ([],),
    "verbosity": ("medium",),
}
RESPONSES: Accepted = {
    **_SHARED,
    **dict.fromkeys(("model", "input", "instructions", "tools", "tool_choice", "text.format"), _ANY),
    **dict.fromkeys(("temperature", "max_output_tokens", "stream"), _ANY),
    "background": (False,),
    "include": (  # parts of items that this server's answers never have
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    ),
    "max_tool_calls": _ANY,  # limits the provider's own tools, which this server does not have
    "reasoning.effort": ("none",),
    "text.verbosity": ("medium",),
    "truncation": ("disabled",),
}
_LEAST = {"max_completion_tokens": 1, "max_output_tokens": 1, "max_tokens": 1, "temperature": 0}
_REMEDIES = {
    "conversation": "Nothing is stored: send the whole conversation as `input`.",
    "function_call": "Send `tool_choice`.",
    "functions": "Send `tools`.",
    "n": "Send a request for each answer.",
    "previous_response_id": "Nothing is stored: send the whole conversation as `input`.",
}


class BadRequest(Exception):
    """Raised if a request can't be answered. The message is sent to the client, with the parameter that it is about, if any."""

    def __init__(self, problem: str, status: int = 400, *, param: str | None = None, code: str | None = None):
        super().__init__(problem)
        self.status = status
        self.param = param
        self.code = code


def check_parameters(body: Mapping[str, Any], accepted: Accepted) -> None:
    """Raise `BadRequest` for a parameter that is neither read nor harmless. A parameter that is null counts as left out."""
    for name, value in _flat(body):
        if value is None:
            continue
        if name not in accepted:
            what = f"this server does not support the parameter `{name}`"
            raise _unsupported(name, what, _REMEDIES.get(name, "Leave it out."))
        if name in _LEAST and not _is_number(value, _LEAST[name]):
            raise BadRequest(
                f"`{name}` is {_shown(value)}. Send a number of at least {_LEAST[name]}.",
                param=name,
                code="invalid_value",
            )
        values = accepted[name]
        if values is not None and value not in values:
            remedy = f"Leave it out, or send {' or '.join(map(_shown, values))}."
            raise BadRequest(
                f"`{name}` can't be {_shown(value)} here. {_REMEDIES.get(name, remedy)}",
                param=name,
                code="unsupported_value",
            )


def _unsupported(param: str, what: str, remedy: str) -> BadRequest:
    return BadRequest(f"{what}. {remedy}", param=param, code="unsupported_parameter")


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= least


def check_function(given: Mapping[str, Any], param: str) -> None:
    """Raise `BadRequest` unless a tool, or the choice of one, is a function: the client's own tools are the only ones."""
    kind = given.get("type", "function")
    if kind != "function":
        raise _unsupported(
            param, f"this server does not support {kind!r} in `{param}`", "Send only functions of your own."
        )


def _flat(body: Mapping[str, Any]) -> Generator[tuple[str, Any]]:
    """Yield each parameter with its value. Objects of parameters and `include` are yielded by their fields and items."""
    for name, value in body.items():
        if name in _OBJECTS and isinstance(value, dict):
            for field, inner in cast("dict[str, Any]", value).items():
                yield f"{name}.{field}", inner
        elif name == "include" and isinstance(value, list):
            for item in cast("list[Any]", value):
                yield name, item
        else:
            yield name, value
