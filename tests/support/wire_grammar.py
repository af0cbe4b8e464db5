"""The grammars of the three provider APIs, as one strict checker of requests.

    problems("chat", body)          what the API would refuse in this request body, or []
    check("/v1/messages", body)     raises `WireRefused` with the problems; other paths are ignored

The checker implements what the providers document or reply with, and shares no code with `handrail.models`. A request
that it accepts is one that the provider accepts, whatever a model said earlier in the conversation.

Rules of all wires: one JSON object in valid UTF-8, with no field twice, finite numbers, no lone surrogate, and no more
than DEEPEST levels (System.Text.Json reads 64, serde_json 128). The names of tools and calls match
`[a-zA-Z0-9_-]{1,64}`. Each call has exactly one result, directly after the message with the call. Each result has a
call. The ids of calls are unique.

Chat completions, https://platform.openai.com/docs/api-reference/chat/create:
  roles system, developer, user, assistant and tool, with their own fields; `arguments` is the JSON text of an object,
  as llama.cpp and vLLM require; `content` may be null only beside `tool_calls`; at most 128 calls in a message
  (https://github.com/github/copilot-cli/issues/669) and 128 tools; an id has at most 40 characters
  (https://github.com/microsoft/autogen/issues/6377); names as in
  https://github.com/microsoft/semantic-kernel/issues/4447.

Responses, https://platform.openai.com/docs/api-reference/responses/create:
  items message, function_call, function_call_output and reasoning; `call_id` has at most 64 characters
  (https://github.com/decolua/9router/issues/393); a reasoning item is followed by the message or call that came of it
  (https://platform.openai.com/docs/guides/reasoning#keeping-reasoning-items-in-context).

Messages, https://platform.claude.com/docs/en/api/messages and
https://platform.claude.com/docs/en/agents-and-tools/tool-use/handle-tool-calls:
  roles user and assistant, a user first; ids match `[a-zA-Z0-9_-]+` (https://github.com/maximhq/bifrost/issues/5097);
  `input` is an object; results begin the next user message; no blank text block; a result with `is_error` has text
  (https://github.com/jlevy/markform/issues/153); thinking is signed, and never the last block
  (https://github.com/tailcallhq/forgecode/issues/2107); at most 32 MB.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

DEEPEST = 64
LONGEST_TEXT = 10_485_760
"""Maximum number of characters in one text on OpenAI's wires."""
LARGEST = {"chat": 512 << 20, "responses": 512 << 20, "messages": 32 << 20}
"""Maximum number of bytes in a request. OpenAI publishes no limit, so its limit here only bounds the tests."""
MOST_CALLS = 128
MOST_TOOLS = 128

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID = {"chat": re.compile(r".{1,40}", re.DOTALL), "responses": re.compile(r".{1,64}", re.DOTALL)}
_ID["messages"] = re.compile(r"[a-zA-Z0-9_-]+")
_PATHS = {"/chat/completions": "chat", "/responses": "responses", "/v1/messages": "messages"}

seen: Counter[str] = Counter()
"""How many requests were checked in this process, by wire."""


class WireRefused(AssertionError):
    """Raised for a request that a provider would refuse."""


class _Problem(Exception):
    """Raised for JSON that a provider's parser would refuse."""


def check(path: str, body: bytes) -> None:
    """Check a request that was sent to this path. Raises `WireRefused`. Paths of other APIs are not checked."""
    wire = wire_of(path)
    if wire is not None:
        found = problems(wire, body)
        if found:
            raise WireRefused(f"{path}: {'; '.join(found[:10])}\n{body[:2000]!r}")


def wire_of(path: str) -> str | None:
    """Return the wire that uses this path, or None if there is none."""
    return next((wire for end, wire in _PATHS.items() if path.split("?")[0].endswith(end)), None)


def problems(wire: str, body: bytes) -> list[str]:
    """Return everything that the wire would refuse in this request body."""
    seen[wire] += 1
    if len(body) > LARGEST[wire]:
        return [f"the body has {len(body)} bytes"]
    try:
        request = strict_json(body)
    except _Problem as problem:
        return [str(problem)]
    if not isinstance(request, dict) or isinstance(request, _Twice):
        return ["the body is not an object that has each key once"]
    rules = {"chat": _chat, "responses": _responses, "messages": _messages}[wire]
    return list(rules(cast("dict[str, Any]", request)))


# --- JSON --------------------------------------------------------------------------------------


def strict_json(data: bytes | str) -> Any:
    """Decode JSON as strictly as the strictest of the providers' parsers."""
    try:
        text = data if isinstance(data, str) else data.decode()
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int
        )
    except RecursionError:
        raise _Problem("JSON is too deep") from None
    except ValueError as error:
        raise _Problem(f"invalid JSON: {error}") from None
    _look_through(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    return made if len(made) == len(pairs) else _Twice(made)


class _Twice(dict[str, Any]):
    """An object in which a key occurred more than once."""


def _constant(name: str) -> NoReturn:
    raise _Problem(f"{name} is not JSON")


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise _Problem(f"the number {text[:20]} is out of range")
    return number


def _int(text: str) -> int:
    _float(text)  # many parsers read all numbers as floats
    return int(text)


def _look_through(value: Any) -> None:
    """Raise `_Problem` for lone surrogates and for nesting that is too deep."""
    level: list[Any] = [value]
    for _ in range(DEEPEST + 1):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _encodable(each)
            elif isinstance(each, dict):
                for key, member in cast("dict[str, Any]", each).items():
                    _encodable(key)
                    inner.append(member)
            elif isinstance(each, list):
                inner += cast("list[Any]", each)
        if not inner:
            return
        level = inner
    raise _Problem(f"JSON has more than {DEEPEST} levels")


def _encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Problem(f"a lone surrogate in {text[:40]!a}") from None


# --- shared rules ------------------------------------------------------------------------------


def _fields(where: str, value: Any, needed: str, optional: str = "") -> Iterator[str]:
    """Yield a problem for each missing and each unknown field of an object."""
    if not isinstance(value, dict):
        yield f"{where} is not an object"
        return
    names = set(cast("dict[str, Any]", value))
    for name in sorted(set(needed.split()) - names):
        yield f"{where}.{name} is missing"
    for name in sorted(names - set(needed.split()) - set(optional.split())):
        yield f"{where}.{name} is unknown"


def _text(where: str, value: Any) -> Iterator[str]:
    if not isinstance(value, str):
        yield f"{where} is not a text"
    elif len(value) > LONGEST_TEXT:
        yield f"{where} has {len(value)} characters"


def _name(where: str, value: Any) -> Iterator[str]:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        yield f"{where} {value!r:.80} does not match {_NAME.pattern}"


def _id(wire: str, where: str, value: Any) -> Iterator[str]:
    if not isinstance(value, str) or not _ID[wire].fullmatch(value):
        yield f"{where} {value!r:.100} does not match {_ID[wire].pattern}"


def _arguments(where: str, value: Any) -> Iterator[str]:
    """Yield the problems with a call's arguments, which are sent as JSON text."""
    yield from _text(where, value)
    if isinstance(value, str):
        try:
            if not isinstance(strict_json(value), dict):
                yield f"{where} is not the text of an object: {value[:40]!r}"
        except _Problem as problem:
            yield f"{where}: {problem}"


def _tools(wire: str, tools: Any, functions: Sequence[Any]) -> Iterator[str]:
    if not isinstance(tools, list) or not tools:
        yield "tools is not a list with at least one tool"
        return
    if wire != "messages" and len(cast("list[Any]", tools)) > MOST_TOOLS:
        yield f"there are {len(cast('list[Any]', tools))} tools"
    for number, tool in enumerate(functions):
        where = f"tools[{number}]"
        yield from _name(f"{where}.name", tool.get("name"))
        yield from _text(f"{where}.description", tool.get("description", ""))
        schema = tool.get("input_schema" if wire == "messages" else "parameters")
        if not isinstance(schema, dict) or cast("dict[str, Any]", schema).get("type") != "object":
            yield f"{where} has no schema of an object"
    names = [tool.get("name") for tool in functions]
    if len(set(names)) != len(names):
        yield f"two tools have one name: {names}"


class _Pairs:
    """Checks that every call has exactly one result, which directly follows the message with the call."""

    def __init__(self) -> None:
        self._all: set[Any] = set()
        self._open: list[Any] = []

    def call(self, where: str, id: Any) -> Iterator[str]:
        if id in self._all:
            yield f"{where}: the id {id!r} occurs twice"
        self._all.add(id)
        self._open.append(id)

    def result(self, where: str, id: Any) -> Iterator[str]:
        if id in self._open:
            self._open.remove(id)
        else:
            yield f"{where}: the result {id!r} has no call before it"

    def close(self, where: str) -> Iterator[str]:
        """Yield a problem if calls are still without a result when something other than a result follows."""
        if self._open:
            yield f"{where} comes before the results of {self._open}"
            self._open.clear()


def _list(request: Mapping[str, Any], name: str) -> list[Any]:
    value = request.get(name)
    return cast("list[Any]", value) if isinstance(value, list) else []


# --- chat completions --------------------------------------------------------------------------


def _chat(request: dict[str, Any]) -> Iterator[str]:
    if not isinstance(request.get("model"), str):
        yield "model is missing"
    if not _list(request, "messages"):
        yield "messages is not a list with at least one message"
    if "tools" in request:
        functions = [each.get("function", {}) for each in _list(request, "tools") if isinstance(each, dict)]
        yield from _tools("chat", request["tools"], functions)
    elif "tool_choice" in request:
        yield "tool_choice without tools"
    pairs = _Pairs()
    for number, message in enumerate(_list(request, "messages")):
        where = f"messages[{number}]"
        role: Any = message.get("role") if isinstance(message, dict) else None
        if role != "tool":
            yield from pairs.close(where)
        match role:
            case "system" | "developer" | "user":
                yield from _fields(where, message, "role content", "name")
                yield from _chat_text(f"{where}.content", message.get("content"))
            case "assistant":
                yield from _chat_assistant(where, message, pairs)
            case "tool":
                yield from _fields(where, message, "role content tool_call_id")
                yield from _chat_text(f"{where}.content", message.get("content"))
                yield from pairs.result(where, message.get("tool_call_id"))
            case _:
                yield f"{where}.role is {role!r}"
    yield from pairs.close("the end")


def _chat_text(where: str, content: Any) -> Iterator[str]:
    """Yield the problems with content, which is a text or a list of text parts."""
    if not isinstance(content, list):
        yield from _text(where, content)
        return
    if not content:
        yield f"{where} is an empty list"
    for part in cast("list[Any]", content):
        yield from _fields(where, part, "type text")


def _chat_assistant(where: str, message: Any, pairs: _Pairs) -> Iterator[str]:
    yield from _fields(where, message, "role", "content tool_calls name refusal")
    calls = message.get("tool_calls")
    if message.get("content") is not None:
        yield from _chat_text(f"{where}.content", message["content"])
    elif calls is None:
        yield f"{where} has neither content nor tool_calls"
    if calls is None:
        return
    if not isinstance(calls, list) or not 1 <= len(cast("list[Any]", calls)) <= MOST_CALLS:
        yield f"{where}.tool_calls is not a list of 1 to {MOST_CALLS} calls"
        return
    for number, call in enumerate(cast("list[Any]", calls)):
        at = f"{where}.tool_calls[{number}]"
        yield from _fields(at, call, "id type function")
        yield from _id("chat", f"{at}.id", call.get("id"))
        yield from pairs.call(at, call.get("id"))
        function = call.get("function")
        yield from _fields(f"{at}.function", function, "name arguments")
        yield from _name(f"{at}.function.name", function.get("name"))
        yield from _arguments(f"{at}.function.arguments", function.get("arguments"))


# --- responses ---------------------------------------------------------------------------------


def _responses(request: dict[str, Any]) -> Iterator[str]:
    if not isinstance(request.get("model"), str):
        yield "model is missing"
    items = _list(request, "input")
    if not items:
        yield "input is not a list with at least one item"
    if "tools" in request:
        yield from _tools("responses", request["tools"], _list(request, "tools"))
    elif "tool_choice" in request:
        yield "tool_choice without tools"
    if "instructions" in request:
        yield from _text("instructions", request["instructions"])
    pairs = _Pairs()
    calling = False
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind: Any = (
            item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
        )
        if kind == "function_call_output":
            calling = False
        elif not calling:
            yield from pairs.close(where)
        match kind:
            case "function_call":
                calling = True
                yield from _fields(where, item, "type call_id name arguments", "id status")
                yield from _id("responses", f"{where}.call_id", item.get("call_id"))
                yield from pairs.call(where, item.get("call_id"))
                yield from _name(f"{where}.name", item.get("name"))
                yield from _arguments(f"{where}.arguments", item.get("arguments"))
            case "function_call_output":
                yield from _fields(where, item, "type call_id output", "id status")
                yield from _text(f"{where}.output", item.get("output"))
                yield from pairs.result(where, item.get("call_id"))
            case "message":
                yield from _responses_message(where, item)
                if item.get("role") != "assistant":
                    yield from pairs.close(where)
                    calling = False
            case "reasoning":
                yield from _fields(where, item, "type summary", "id encrypted_content content status")
                follows: Any = items[number + 1] if number + 1 < len(items) else {}
                if follows.get("type") not in ("reasoning", "function_call") and not (
                    follows.get("type") == "message" and follows.get("role") == "assistant"
                ):
                    yield f"{where} is reasoning without the item that follows it"
            case _:
                yield f"{where}.type is {kind!r}"
    yield from pairs.close("the end")


def _responses_message(where: str, item: Any) -> Iterator[str]:
    yield from _fields(where, item, "role content", "type id status phase")
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        yield f"{where}.role is {role!r}"
    if isinstance(content, str):
        yield from _text(f"{where}.content", content)
    elif not isinstance(content, list) or not content:
        yield f"{where}.content is not a text and not a list with at least one part"
    else:
        for part in cast("list[Any]", content):
            kind: Any = part.get("type") if isinstance(part, dict) else None
            if kind not in (("output_text", "refusal") if role == "assistant" else ("input_text",)):
                yield f"{where}.content has a part {kind!r}"
                continue
            yield from _text(f"{where}.content.text", part.get("refusal" if kind == "refusal" else "text"))


# --- messages ----------------------------------------------------------------------------------


def _messages(request: dict[str, Any]) -> Iterator[str]:
    if not isinstance(request.get("model"), str):
        yield "model is missing"
    most = request.get("max_tokens")
    if type(most) is not int or most < 1:
        yield "max_tokens is missing"
    if "tools" in request:
        yield from _tools("messages", request["tools"], _list(request, "tools"))
    elif "tool_choice" in request:
        yield "tool_choice without tools"
    for block in _list(request, "system"):
        yield from _block_text("system", block)
    messages = _list(request, "messages")
    if not messages:
        yield "messages is not a list with at least one message"
    elif not isinstance(messages[0], dict) or cast("dict[str, Any]", messages[0]).get("role") != "user":
        yield "the first message is not the user's"
    pairs = _Pairs()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        yield from _fields(where, message, "role content")
        role: Any = message.get("role")
        content: Any = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content:
            yield f"{where}.content is empty"
            continue
        if role == "user":
            yield from _said_by_user(where, cast("list[Any]", content), pairs)
        elif role == "assistant":
            yield from pairs.close(where)
            yield from _said_by_assistant(where, cast("list[Any]", content), pairs)
        else:
            yield f"{where}.role is {role!r}"
    yield from pairs.close("the end")


def _said_by_user(where: str, content: list[Any], pairs: _Pairs) -> Iterator[str]:
    started = False
    for number, block in enumerate(content):
        at = f"{where}.content[{number}]"
        if block.get("type") != "tool_result":
            if not started:
                yield from pairs.close(at)
                started = True
            yield from _block_text(at, block)
            continue
        if started:
            yield f"{at}: a result comes after something else"
        yield from _fields(at, block, "type tool_use_id", "content is_error cache_control")
        yield from _id("messages", f"{at}.tool_use_id", block.get("tool_use_id"))
        yield from pairs.result(at, block.get("tool_use_id"))
        yield from _result_content(at, block)
    yield from pairs.close(f"the end of {where}")


def _result_content(where: str, block: Any) -> Iterator[str]:
    content: Any = block.get("content")
    if not content and block.get("is_error"):
        yield f"{where}.content cannot be empty if is_error is true"
    if isinstance(content, str):
        if not content.strip():
            yield f"{where}.content is blank"
    elif isinstance(content, list):
        for part in cast("list[Any]", content):
            if isinstance(part, dict) and cast("dict[str, Any]", part).get("type") == "tool_reference":
                yield from _name(f"{where}.tool_name", cast("dict[str, Any]", part).get("tool_name"))
            else:
                yield from _block_text(where, part)
    elif content is not None:
        yield f"{where}.content is neither text nor blocks"


def _said_by_assistant(where: str, content: list[Any], pairs: _Pairs) -> Iterator[str]:
    for number, block in enumerate(content):
        at = f"{where}.content[{number}]"
        match block.get("type"):
            case "text":
                yield from _block_text(at, block)
            case "thinking":
                yield from _fields(at, block, "type thinking signature")
                if not block.get("signature"):
                    yield f"{at} is not signed"
            case "redacted_thinking":
                yield from _fields(at, block, "type data")
            case "tool_use":
                yield from _fields(at, block, "type id name input", "cache_control caller")
                yield from _id("messages", f"{at}.id", block.get("id"))
                yield from pairs.call(at, block.get("id"))
                yield from _name(f"{at}.name", block.get("name"))
                if not isinstance(block.get("input"), dict):
                    yield f"{at}.input is not an object"
            case kind:
                yield f"{at}.type is {kind!r}"
    if content[-1].get("type") in ("thinking", "redacted_thinking"):
        yield f"{where}: the last block is thinking"


def _block_text(where: str, block: Any) -> Iterator[str]:
    yield from _fields(where, block, "type text", "cache_control citations")
    if not isinstance(block, dict) or cast("dict[str, Any]", block).get("type") != "text":
        yield f"{where} is not a text block"
    elif not str(cast("dict[str, Any]", block).get("text") or "").strip():
        yield f"{where}: text content blocks must be non-empty"
