"""Cache breakpoints of Anthropic's messages API.

A breakpoint is a mark on a block. The provider caches the request up to the mark, and reuses what an earlier request
cached up to the same block. Handrail sets at most three of the four that are allowed: at the end of the tools and the
system text, at the end of the previous request, and at the end of this one. The last is a mark on the request itself, so
that no message changes when it moves.
"""

from __future__ import annotations

from typing import Any

from handrail.messages import AssistantMessage, Encode, Message, ModelRequest, Sent, ToolMessage
from handrail.models.http import encode

_LOOKBACK = 20
"""Number of blocks before a breakpoint in which the provider looks for an earlier request's cache entry."""
_END = b"}]}"
"""How every encoded message ends: this closes its last block, the list of its blocks, and the message itself."""


def marked(encoded: bytes, mark: dict[str, Any]) -> bytes:
    """Add a mark to an encoded block."""
    return encoded[:-1] + b',"cache_control":' + encode(mark) + b"}"


def marked_tools(request: ModelRequest, tool: Encode, mark: dict[str, Any]) -> bytes | bytearray:
    """Encode the tools with a mark on the last one that is not deferred, if any. Deferred tools are not cached."""
    tools = list(request.tools)
    first = [index for index, offered in enumerate(tools) if not offered.deferred]
    if not first:
        return request.tools.encoded(tool)
    last = first[-1]
    parts = [tool(each) for each in tools]
    parts[last] = marked(parts[last], mark)
    return b",".join(parts)


def marked_messages(
    messages: Sent[Message], said: bytearray, message: Encode, mark: dict[str, Any]
) -> bytes | bytearray:
    """Return the encoded messages, with a mark at the end of the previous request if that is too far back to be found.

    With the mark, the provider reads everything up to it from the cache.
    """
    newest = _since_last_request(messages)
    if sum(map(_blocks, newest)) < _LOOKBACK or len(newest) == len(messages):
        return said
    after = b"," + b",".join(map(message, newest))
    before = said[: len(said) - len(after)]
    if not said.endswith(after) or not before.endswith(_END):
        return said
    return b'%s,"cache_control":%s%s%s' % (before[: -len(_END)], encode(mark), _END, after)


def _since_last_request(messages: Sent[Message]) -> list[Message]:
    """Return the model's newest answer and the messages after it, or all messages if there is no answer."""
    newest: list[Message] = []
    for index in range(len(messages) - 1, -1, -1):
        newest.append(messages[index])
        if isinstance(newest[-1], AssistantMessage):
            break
    return newest[::-1]


def _blocks(message: Message) -> int:
    """Return an upper bound for the number of blocks of a message. The bound need not be exact: an extra mark costs nothing."""
    if isinstance(message, ToolMessage):
        return len(message.results) + sum(1 + len(each.attachments) for each in message.results if each.shows)
    if isinstance(message, AssistantMessage):
        return 1 + len(message.calls) if message.kept is None else 1 + message.kept.data.count(b'"type"')
    return 1 + len(message.attachments)
