"""What spans show of messages, calls and errors, in the form of the conventions, and `Privacy`, which keeps secrets out of it."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec
import pydantic_core

from handrail.content import Attachment
from handrail.messages import AssistantMessage, Message, ModelRequest, ToolMessage
from handrail.schema.secrets import MASK
from handrail.telemetry import names
from handrail.text.raised_errors import words_of
from handrail.text.secrets import HIDDEN, escaped, hide_all, replace_secret
from handrail.tools.result import clean_text

Part = dict[str, Any]


class Privacy:
    """The secrets that the calls of one run were given, which are hidden wherever they occur."""

    __slots__ = ("_forms", "withheld")

    def __init__(self) -> None:
        self._forms: set[str] = set()
        self.withheld: set[str] = set()
        """The ids of calls that have secrets, so that the messages of their errors are not shown at all."""

    def learn(self, call_id: str, clear: Any, shown: Any) -> None:
        """Note the secrets that a call was given: what is masked in `shown` of the plain JSON `clear`."""
        self.withheld.add(call_id)
        for secret in _hidden(clear, shown):
            self._forms |= escaped(secret) - {""}

    def hide(self, text: str) -> str:
        """Return a text without the secrets of the run's calls, those in the settings of servers and models, and lone surrogates."""
        for form in sorted(self._forms, key=len, reverse=True):
            text = replace_secret(text, form)
        return clean_text(hide_all(text))

    def encode(self, value: Any) -> str:
        """Return a JSON value as text, without secrets."""
        return hide_all(msgspec.json.encode(self._hide_in(value) if self._forms else value).decode())

    def _hide_in(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {key: self._hide_in(each) for key, each in cast("dict[str, Any]", value).items()}
        return (
            [self._hide_in(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value
        )

    def described(self, error: BaseException, withheld: bool) -> dict[str, str]:
        """Return the attributes of an exception, with only its type and its frames if its message must not be shown."""
        kind = type(error)
        name = (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
        try:
            frames = (
                traceback.format_tb(error.__traceback__) if withheld else traceback.format_exception(error)
            )
        except Exception as problem:  # a user's error may refuse to be formatted
            frames = [f"its traceback can't be shown: {type(problem).__name__}"]
        return {
            names.EXCEPTION_TYPE: name,
            names.EXCEPTION_MESSAGE: HIDDEN if withheld else self.hide(words_of(error)),
            names.EXCEPTION_STACKTRACE: self.hide("".join(frames)),
        }


def _hidden(clear: Any, shown: Any) -> Iterator[str]:
    """Yield the texts in plain JSON that are masked, or otherwise differ, in what is shown of it."""
    if clear == shown and shown != MASK:
        return
    if isinstance(clear, dict) and isinstance(shown, dict):
        for (key, value), (other, mask) in zip(
            cast("dict[str, Any]", clear).items(), cast("dict[str, Any]", shown).items(), strict=False
        ):
            yield from _hidden(key, other)
            yield from _hidden(value, mask)
    elif isinstance(clear, list) and isinstance(shown, list):
        for value, mask in zip(cast("list[Any]", clear), cast("list[Any]", shown), strict=False):
            yield from _hidden(value, mask)
    elif isinstance(clear, str):
        yield clear
    else:
        yield from (each for each in _texts(clear))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in cast("dict[str, Any]", value).items():
            yield key
            yield from _texts(each)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


# --- messages ------------------------------------------------------------------------------------------


def text_part(text: str) -> Part:
    return {"type": "text", "content": text}


def input_of(messages: Iterable[Message]) -> list[Any]:
    """Return messages in the form of `gen_ai.input.messages`."""
    return [_message(each) for each in messages]


def output_of(message: AssistantMessage) -> list[Any]:
    """Return an answer in the form of `gen_ai.output.messages`."""
    reason = "tool_call" if message.calls else "stop"
    return [{**_message(message), "finish_reason": reason}]


def definitions_of(request: ModelRequest) -> list[Any]:
    """Return the tools that a request offers in the form of `gen_ai.tool.definitions`."""
    return [
        {
            "type": "function",
            "name": each.tool.name,
            "description": each.tool.description,
            "parameters": each.tool.json_schema,
        }
        for each in request.tools
    ]


def _message(message: Message) -> dict[str, Any]:
    if isinstance(message, ToolMessage):
        results = [
            {"type": "tool_call_response", "id": each.id, "result": each.text} for each in message.results
        ]
        return {"role": "tool", "parts": results}
    parts: list[Part] = []
    if isinstance(message, AssistantMessage):
        if message.thought:
            parts.append({"type": "reasoning", "content": message.thought})
        parts += [text_part(message.text)] if message.text else []
        parts += [
            {"type": "tool_call", "id": each.id, "name": each.name, "arguments": _arguments(each.arguments)}
            for each in message.calls
        ]
        return {"role": "assistant", "parts": parts}
    parts += [text_part(message.text)] if message.text else []
    return {"role": "user", "parts": [*parts, *map(_file, message.attachments)]}


def _arguments(text: str) -> Any:
    try:
        return pydantic_core.from_json(text)
    except ValueError:
        return text


def _file(file: Attachment) -> Part:
    """Return what is told of a file: where it is, or its name. Its bytes are not sent."""
    about = {"modality": file.kind, "mime_type": file.media_type}
    return (
        {"type": "uri", **about, "uri": file.address}
        if file.address
        else {"type": "file", **about, "name": file.name}
    )
