"""The calls of a conversation in the form that the providers' APIs accept.

A model can write any name, id and arguments for a call. Handrail refuses an invalid call, but keeps it unchanged in the
conversation. The conversation is sent back to the provider with every later request, and an API refuses the whole
request for one malformed name. The functions in this module normalise what is sent back:

- Each depends on nothing but its arguments, so that a message is encoded the same way in every request.
- What the rules below accept is returned unchanged, except for Mistral's ids and ids that could be mistaken for a digest.
- Different ids stay different, and a call and its result get the same id.

The rules come from the providers' documentation and error messages: names have up to 64 letters, digits, `_` and `-`;
OpenAI limits the length of ids, and Anthropic their characters; arguments are an object that every JSON parser reads.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from handrail.tools.result import clean_text

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]+")
_LONGEST_NAME = 64
_UNNAMED = "unnamed"
"""Replaces a name of which `name_for_wire` leaves nothing."""

CHAT_ID = re.compile(r"[^\ud800-\udfff]{1,40}")
RESPONSES_ID = re.compile(r"[^\ud800-\udfff]{1,64}")
ANTHROPIC_ID = re.compile(r"[a-zA-Z0-9_-]+")
GEMINI_ID = re.compile(r"[a-zA-Z0-9_.:-]{1,64}")
MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_NORMALISED = re.compile(r"hr-[0-9a-f]{32}")

_DEEPEST = 50
"""Maximum nesting of arguments that are sent unchanged. Some parsers read only 64 levels, including the request's own."""
_LONGEST_NUMBER = 300
"""Maximum digits in a row in arguments that are sent unchanged. A longer number may not fit a float, which many parsers use."""
_DIGITS = re.compile(rf"\d{{{_LONGEST_NUMBER + 1}}}")
_MOST_UNREADABLE = 20_000
"""Maximum number of characters of unreadable arguments that are sent back."""


def name_for_wire(name: str) -> str:
    """Return the name of a call as 1 to 64 letters, digits, `_` and `-`.

    An accepted name is returned unchanged. In any other name, each run of other characters becomes `_`, the name is cut to 64
    characters, and `_` is removed from its ends. If nothing is left, the name becomes `unnamed`.
    """
    if _NAME.fullmatch(name):
        return name
    return _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME].strip("_") or _UNNAMED


def id_for_wire(id: str, accepted: re.Pattern[str]) -> str:
    """Return an id unchanged if it matches the API's pattern and does not look like a digest, otherwise its digest.

    Mistral always gets a digest.
    """
    if accepted is MISTRAL_ID:
        # nine characters leave no room for a prefix that tells a digest from an id
        return base64.b32encode(_digest(id)).decode()[:9]
    if accepted.fullmatch(id) and not _NORMALISED.fullmatch(id):
        return id
    # An id that looks like a digest is replaced too, since it could be the digest of another id.
    return f"hr-{_digest(id).hex()[:32]}"


def _digest(id: str) -> bytes:
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()


def is_object(arguments: str) -> bool:
    """Return whether arguments are the complete JSON text of an object that parsers can read, even if keys are repeated."""
    return _object_in(arguments) is not None


def _object_in(arguments: str) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if len(arguments) > _LONGEST_NUMBER and _DIGITS.search(arguments):
        return None
    made = cast("dict[str, Any]", found)
    brackets = arguments.count("[") + arguments.count("{")
    return made if brackets <= _DEEPEST or not _is_deep(made) else None


def object_text(arguments: str) -> str:
    """Return a call's arguments as the JSON text of an object; `{}` if there are none.

    If a key is repeated, only its last value is kept, because some parsers refuse repeated keys. Text that `is_object` refuses
    becomes the value of the key `unreadable`, cut to `_MOST_UNREADABLE` characters.
    """
    if not arguments:
        return "{}"
    found = _object_in(arguments)
    if found is not None:  # if there are as many colons as outer keys, no key is repeated
        return arguments if arguments.count(":") == len(found) else _without_repeats(arguments)
    shown = clean_text(arguments)
    if len(shown) > _MOST_UNREADABLE:
        shown = f"{shown[:_MOST_UNREADABLE]}… ({len(shown) - _MOST_UNREADABLE} more characters)"
    return msgspec.json.encode({"unreadable": shown}).decode()


def raw_object(arguments: str) -> msgspec.Raw:
    """Return a call's arguments as raw JSON, for an API that expects an object instead of text."""
    return msgspec.Raw(object_text(arguments).encode())


def arguments_text(given: Any) -> str:
    """Return a call's arguments as JSON text, whether the server sent text or a value; "" if it sent none."""
    return given if isinstance(given, str) else value_text(given)


def value_text(given: Any) -> str:
    """Return a call's arguments, which the server sent as a value, as JSON text; "" if it sent none.

    The gate checks whether they are an object.
    """
    return "" if given is None else msgspec.json.encode(given).decode()


def _without_repeats(arguments: str) -> str:
    """Return the text of an object unchanged, or encoded again if a key in it is repeated."""
    has_repeats = False

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal has_repeats
        made = dict(pairs)
        has_repeats = has_repeats or len(made) < len(pairs)
        return made

    found = json.loads(arguments, object_pairs_hook=build)
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")) if has_repeats else arguments


def _is_deep(value: Any) -> bool:
    level: Sequence[Any] = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += cast("dict[str, Any]", each).values()
            elif isinstance(each, list):
                inner += cast("list[Any]", each)
        if not inner:
            return False
        level = inner
    return True
