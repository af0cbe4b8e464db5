"""Blocks of an answer in the form in which the provider sent them.

An answer consists of blocks: text, thinking, calls, calls of the provider's own tools and their results, and other
kinds. Providers require many of them back, unchanged and in the same order. So the blocks are kept, and only the calls
are replaced, because Handrail may have corrected their names, ids and arguments. Arguments are not kept with the blocks,
because they may contain secrets.
"""


# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from handrail.messages import Kept

encode = msgspec.json.encode


def _exact(text: str) -> msgspec.Raw:
    """Return a number as it was written, so that it is sent back with the same digits.

    Raises `ValueError` if it is too large for a float.
    """
    if math.isinf(float(text)):
        raise ValueError(f"the number {text[:20]} is out of range")
    return msgspec.Raw(text.encode())


decode = msgspec.json.Decoder(float_hook=_exact).decode
"""Decodes JSON. Numbers with a fraction or an exponent become `msgspec.Raw`, so that encoding gives the same bytes."""


_GROWING = frozenset({"text", "thinking", "summary", "data", "signature", "content", "encrypted_content"})
"""Fields of streamed items whose pieces are joined.

In any other field, a new piece replaces the earlier ones, except that objects are merged and null is ignored.
"""


def is_block(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is a block: an object with a `type`."""
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def is_search(block: Mapping[str, Any]) -> bool:
    """Return whether an item of the responses API is a search for tools that the client runs."""
    return block.get("type") == "tool_search_call" and block.get("execution") == "client"


def without(block: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a block without these fields."""
    left_out = frozenset(names)
    return {name: value for name, value in block.items() if name not in left_out}


def emptied(block: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a block with null in these fields, so that their order is kept."""
    empty = frozenset(names)
    return {name: None if name in empty else value for name, value in block.items()}


def with_calls(
    blocks: Sequence[Any], calls: Sequence[dict[str, Any]], is_call: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Return the blocks of an answer with `calls` put back into the blocks that are calls, in order.

    Each block keeps its other fields, unless it is of another type than its call. Returns [] if the number of such blocks differs
    from that of `calls`.
    """
    placed: list[dict[str, Any]] = []
    rest = iter(calls)
    for block in filter(is_block, blocks):
        if is_call(block):
            call = next(rest, None)
            if call is None:
                return []
            block = {**block, **call} if block["type"] == call["type"] else call
        placed.append(block)
    return [] if next(rest, None) is not None else placed


def parsed_input(text: str) -> msgspec.Raw | dict[str, Any]:
    """Return the streamed input of a provider's own tool as raw JSON, or {} if it is not a complete object."""
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return msgspec.Raw(text.encode())


# --- the provider's own tools ---

_CALLS = (b'_tool_use"', b'_call"', b'"executableCode"', b'"toolCall"')
"""Every answer with a call of a provider's own tool contains at least one of these byte strings."""
OUTSIDE = ", run by the provider"
"""The text that follows the name of a provider's own tool in a line for people."""
_LINE = 200
_ASKED = ("query", "queries", "code", "command", "url")
"""The fields of a call that say what was asked of the tool. The first one that is set is shown."""


def outside_lines(kept: Kept | None) -> list[str]:
    """Return a line for people about each call of the provider's own tools in an answer, if any.

    Such calls do not pass Handrail's gate.
    """
    if kept is None or not any(mark in kept.data for mark in _CALLS):
        return []
    try:
        blocks: Any = msgspec.json.decode(kept.data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return []  # kept by a model that is not defined in this package
    found = (
        [_outside(block) for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
    )
    return [line for line in found if line]


def _outside(block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    if kind in ("server_tool_use", "mcp_tool_use"):
        name, given = block.get("name"), block.get("input")
    elif is_search(block):
        return ""  # it passes the gate
    elif isinstance(kind, str) and kind.endswith("_call") and kind != "function_call":
        name, given = kind.removesuffix("_call"), block.get("action", block)
    elif isinstance(block.get("executableCode"), dict):
        name, given = "code_execution", block["executableCode"]
    elif isinstance(block.get("toolCall"), dict):
        name, given = block["toolCall"].get("toolType"), block["toolCall"].get("args")
    else:
        return ""
    asked: Any = (
        next((given[field] for field in _ASKED if given.get(field)), "") if isinstance(given, dict) else ""
    )
    return outside_line(str(name), ", ".join(map(str, asked)) if isinstance(asked, list) else str(asked))


def outside_line(name: str, asked: str) -> str:
    """Return the line for one call of a provider's own tool. The name and `asked` are shortened to one line."""
    named, short = _in_line(name), _in_line(asked)
    return f"{named}{OUTSIDE}: {short}" if short else f"{named}{OUTSIDE}"


def _in_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LINE else f"{text[:_LINE]}…"


# --- pieces of a stream ---


def joined(before: Any, piece: Any) -> Any:
    """Join two pieces of a field: strings one after the other, objects field by field, and lists item by item.

    An item of a list continues the item before it if both have the same `index` and `type`. A piece of any other type
    replaces the piece before it, and so does a piece whose type differs from that of the piece before it.
    """
    if before is None or type(before) is not type(piece):
        return piece
    if isinstance(piece, str):
        return before + piece
    if isinstance(piece, dict):
        return _merged(before, piece)
    if not isinstance(piece, list):
        return piece
    items = list(before)
    for item in piece:
        last = items[-1] if items else None
        if isinstance(item, dict) and isinstance(last, dict) and _same_item(last, item):
            items[-1] = _merged(last, item)
        else:
            items.append(item)
    return items


def _merged(before: Mapping[str, Any], piece: Mapping[str, Any]) -> dict[str, Any]:
    grown = {
        name: joined(before.get(name), new) if name in _GROWING or isinstance(new, dict) else new
        for name, new in piece.items()
        if new is not None or name not in before
    }
    return {**before, **grown}


def _same_item(last: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    return "index" in item and (last.get("index"), last.get("type")) == (item["index"], item.get("type"))
