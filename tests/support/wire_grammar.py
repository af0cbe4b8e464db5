"""The grammars of the four provider APIs, as one strict checker of requests.

    problems("chat", body)          what the API would refuse in this request body, or []
    check("/v1/messages", body)     raises `WireRefused` with the problems; other paths are ignored

The checker implements rules that the providers document or enforce, and shares no code with `handrail.models`. It is
meant to accept only requests that the provider accepts, whatever a model said earlier in the conversation.

Rules for all wires: one JSON object in valid UTF-8, with no repeated key in any object, finite numbers, no lone
surrogate, and no more than DEEPEST levels (System.Text.Json reads 64, serde_json 128). The names of tools and calls
match `[a-zA-Z0-9_-]{1,64}`. Each call has exactly one result, directly after the message with the call. Each result has
a call. The ids of calls are unique; on the Gemini wire, within one content.

Chat completions, https://platform.openai.com/docs/api-reference/chat/create:
  roles system, developer, user, assistant and tool, with their own fields; `arguments` is the JSON text of an object,
  as llama.cpp and vLLM require; `content` may be null only beside `tool_calls`; at most 128 calls in a message
  (https://github.com/github/copilot-cli/issues/669) and 128 tools; an id has at most 40 characters
  (https://github.com/microsoft/autogen/issues/6377); names as in
  https://github.com/microsoft/semantic-kernel/issues/4447.

Responses, https://platform.openai.com/docs/api-reference/responses/create:
  items message, function_call, function_call_output and reasoning; `call_id` has at most 64 characters
  (https://github.com/decolua/9router/issues/393); a reasoning item is followed by the message or call that it led to
  (https://platform.openai.com/docs/guides/reasoning#keeping-reasoning-items-in-context). Tool search,
  https://developers.openai.com/api/docs/guides/tools-tool-search: a search that the client runs has a description and a
  schema, its `tool_search_call` has an object as arguments, and is answered by a `tool_search_output` with deferred
  functions; deferred functions in the list of tools require the tool `tool_search`
  (https://github.com/pydantic/pydantic-ai/pull/6080); a call of a loaded function names the namespace of its name
  (https://github.com/dust-tt/dust/pull/31323).

Messages, https://platform.claude.com/docs/en/api/messages and
https://platform.claude.com/docs/en/agents-and-tools/tool-use/handle-tool-calls:
  roles user and assistant, beginning with user; ids match `[a-zA-Z0-9_-]+` (https://github.com/maximhq/bifrost/issues/5097);
  `input` is an object; results begin the next user message; no blank text block; a result with `is_error` has text
  (https://github.com/jlevy/markform/issues/153); thinking is signed, and never the last block
  (https://github.com/tailcallhq/forgecode/issues/2107); a result of one of the provider's own tools follows its call,
  and a call without a result is in the last message or beside calls that have their own results
  (https://platform.claude.com/docs/en/agents-and-tools/tool-use/server-tools); a reference names a tool of the request
  (https://platform.claude.com/docs/en/agents-and-tools/tool-use/tool-search-tool); at most 32 MB.

Providers accept back what they sent. So fields that servers add to chat completions (see ADDED), and the items and
blocks of a provider's own tools, are accepted with any content. A name that begins with `x_` stands for one that is not
known yet.

Gemini, https://ai.google.dev/api/generate-content and https://ai.google.dev/gemini-api/docs/function-calling:
  contents of user and model alternate, beginning with user; each part has exactly one kind of data; the responses of a
  turn begin the next content, as many as there were calls (https://github.com/google-gemini/gemini-cli/issues/5443),
  with the same ids and names; names begin with a letter or an underscore; `args` and `response` are objects; text is
  empty only in a thought or beside a signature; a content with calls has a signature
  (https://ai.google.dev/gemini-api/docs/thought-signatures); nothing but `$` words beside a `$ref`; 20 MB.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

DEEPEST = 64
LONGEST_TEXT = 10_485_760
"""Maximum number of characters in one text on OpenAI's wires."""
LARGEST = {"chat": 512 << 20, "responses": 512 << 20, "messages": 32 << 20, "gemini": 20 << 20}
"""Maximum number of bytes in a request. OpenAI publishes no limit, so its limit here only bounds the tests."""
ADDED = "reasoning_content reasoning reasoning_details thinking_blocks extra_content images provider_specific_fields"
"""The fields that servers add to the messages and calls of chat completions, and accept back."""
MOST_CALLS = 128
MOST_TOOLS = 128

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID = {"chat": re.compile(r".{1,40}", re.DOTALL), "responses": re.compile(r".{1,64}", re.DOTALL)}
_ID["messages"] = re.compile(r"[a-zA-Z0-9_-]+")
_PROVIDER_ITEMS = frozenset({"mcp_list_tools", "mcp_approval_request", "compaction", "tool_search_output"})
"""Types of items that a provider's own features add to its responses, besides those that end with `_call`."""
_ID["gemini"] = re.compile(r"[a-zA-Z0-9_.:-]{1,64}")
_PATHS = {"/chat/completions": "chat", "/responses": "responses", "/v1/messages": "messages"}

seen: Counter[str] = Counter()
"""How many requests were checked in this process, by wire."""


class WireRefused(AssertionError):
    """Raised for a request that a provider would refuse."""


class _Problem(Exception):
    """Raised for JSON that a provider's parser would refuse."""


def check(path: str, body: bytes) -> None:
    """Raise `WireRefused` if the provider would refuse this request. Requests to paths of other APIs are not checked."""
    wire = wire_of(path)
    if wire is not None:
        found = problems(wire, body)
        if found:
            raise WireRefused(f"{path}: {'; '.join(found[:10])}\n{body[:2000]!r}")


def wire_of(path: str) -> str | None:
    """Return the wire that uses this path, or None if there is none."""
    path = path.split("?")[0]
    if path.lower().endswith((":generatecontent", ":streamgeneratecontent")):
        return "gemini"
    return next((wire for end, wire in _PATHS.items() if path.endswith(end)), None)


def problems(wire: str, body: bytes) -> list[str]:
    """Return what the wire would refuse in this request body. A body that is too large or can't be read gives only one problem."""
    seen[wire] += 1
    if len(body) > LARGEST[wire]:
        return [f"the body has {len(body)} bytes"]
    try:
        request = strict_json(body)
    except _Problem as problem:
        return [str(problem)]
    if not isinstance(request, dict):
        return ["the body is not an object"]
    rules = {"chat": _chat, "responses": _responses, "messages": _messages, "gemini": _gemini}[wire]
    return list(rules(cast("dict[str, Any]", request)))


# --- JSON --------------------------------------------------------------------------------------


def strict_json(data: bytes | str) -> Any:
    """Decode JSON as strictly as the strictest of the providers' parsers. Raises `_Problem` if that parser would refuse it."""
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
    if len(made) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _Problem(f"the key {key[:80]!r} is repeated")
    return made


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
        if not name.startswith("x_"):
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


_HOSTED_TOOLS = {
    "responses": {
        "web_search": ("type", "filters search_context_size user_location external_web_access"),
        "code_interpreter": ("type container", ""),
        "file_search": ("type vector_store_ids", "max_num_results filters ranking_options"),
        "tool_search": ("type", "execution description parameters"),
    },
    "messages": {
        "web_search_20250305": (
            "type name",
            "max_uses allowed_domains blocked_domains user_location cache_control",
        ),
        "web_fetch_20250910": (
            "type name",
            "max_uses allowed_domains blocked_domains citations max_content_tokens cache_control",
        ),
        "code_execution_20250825": ("type name", "cache_control"),
    },
}
"""The providers' own tools, by wire and type: the fields that each needs, and those that it may have."""


def _functions(wire: str, request: Mapping[str, Any]) -> list[Any]:
    return [
        tool
        for tool in _list(request, "tools")
        if not isinstance(tool, dict) or cast("dict[str, Any]", tool).get("type") not in _HOSTED_TOOLS[wire]
    ]


def _hosted_tools(wire: str, request: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems with the provider's own tools in a request."""
    functions, names = _functions(wire, request), list[Any]()
    for number, tool in enumerate(_list(request, "tools")):
        if tool in functions:
            continue
        where = f"tools[{number}]"
        needed, optional = _HOSTED_TOOLS[wire][tool["type"]]
        yield from _fields(where, tool, needed, optional)
        if wire == "messages" and not tool["type"].startswith(f"{tool.get('name')}_"):
            yield f"{where} is named {tool.get('name')!r}"
        if "max_uses" in tool and (type(tool["max_uses"]) is not int or tool["max_uses"] < 1):
            yield f"{where}.max_uses is {tool['max_uses']!r}"
        if {"allowed_domains", "blocked_domains"} <= set(tool):
            yield f"{where} has both allowed_domains and blocked_domains"
        names.append(tool["type"])
    if len(set(names)) != len(names):
        yield f"two of the provider's tools have one type: {names}"


class _Pairs:
    """Checks that every call has exactly one result, which directly follows the message with the call."""

    def __init__(self) -> None:
        self._all: set[Any] = set()
        self._open: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._open)

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
            case "system" | "developer":
                yield from _fields(where, message, "role content", "name")
                yield from _chat_text(f"{where}.content", message.get("content"))
            case "user":
                yield from _fields(where, message, "role content", "name")
                yield from _chat_content(f"{where}.content", message.get("content"))
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


def _chat_content(where: str, content: Any) -> Iterator[str]:
    """Yield the problems with a user's content, in which pictures, sounds and files are allowed too."""
    if not isinstance(content, list) or not content:
        yield from _chat_text(where, content)
        return
    for part in cast("list[Any]", content):
        match part.get("type"):
            case "image_url":
                yield from _fields(where, part, "type image_url")
                yield from _fields(where, part["image_url"], "url", "detail")
                yield from _media(where, part["image_url"]["url"], _IMAGES)
            case "input_audio":
                yield from _fields(where, part, "type input_audio")
                yield from _fields(where, part["input_audio"], "data format")
                yield from _base64(where, part["input_audio"]["data"])
                if part["input_audio"]["format"] not in ("wav", "mp3"):
                    yield f"{where}: the format of a sound is {part['input_audio']['format']!r}"
            case "file":
                yield from _fields(where, part, "type file")
                yield from _fields(where, part["file"], "filename file_data")
                yield from _media(where, part["file"]["file_data"], ("application/pdf",), address=False)
            case _:
                yield from _fields(where, part, "type text")
                yield from _text(where, part.get("text"))


_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")


def _media(where: str, url: Any, types: Sequence[str], *, address: bool = True) -> Iterator[str]:
    """Yield the problems with a data URL. An http or https URL is accepted if `address` is true."""
    if address and isinstance(url, str) and url.startswith(("https://", "http://")):
        return
    head, comma, data = str(url).partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        yield f"{where}: {str(url)[:40]!r} is not a data URL"
    elif head[5:-7] not in types:
        yield f"{where}: the media type {head[5:-7]!r} is not accepted"
    else:
        yield from _base64(where, data)


def _base64(where: str, data: Any) -> Iterator[str]:
    try:
        if not isinstance(data, str) or not base64.b64decode(data, validate=True):
            yield f"{where}: the data is empty"
    except binascii.Error:
        yield f"{where}: the data is not base64"


def _chat_assistant(where: str, message: Any, pairs: _Pairs) -> Iterator[str]:
    yield from _fields(where, message, "role", f"content tool_calls name refusal {ADDED}")
    calls = message.get("tool_calls")
    content = message.get("content")
    if isinstance(content, list):  # Mistral's models return their thinking as parts of the content
        thinking = [part for part in cast("list[Any]", content) if isinstance(part, dict)]
        content = [
            part for part in thinking if cast("dict[str, Any]", part).get("type") != "thinking"
        ] or None
    if content is not None:
        yield from _chat_text(f"{where}.content", content)
    elif message.get("content") is not None:
        pass
    elif calls is None:
        yield f"{where} has neither content nor tool_calls"
    if calls is None:
        return
    if not isinstance(calls, list) or not 1 <= len(cast("list[Any]", calls)) <= MOST_CALLS:
        yield f"{where}.tool_calls is not a list of 1 to {MOST_CALLS} calls"
        return
    for number, call in enumerate(cast("list[Any]", calls)):
        at = f"{where}.tool_calls[{number}]"
        yield from _fields(at, call, "id type function", ADDED)
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
        yield from _tools("responses", request["tools"], _functions("responses", request))
        yield from _hosted_tools("responses", request)
    elif "tool_choice" in request:
        yield "tool_choice without tools"
    if "instructions" in request:
        yield from _text("instructions", request["instructions"])
    pairs = _Pairs()
    search = _ToolSearch(request)
    yield from search.tools()
    calling = False
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind: Any = (
            item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
        )
        if kind == "function_call_output" or (kind == "tool_search_output" and search.is_own(item)):
            calling = False
        elif not calling:
            yield from pairs.close(where)
        match kind:
            case "function_call":
                calling = True
                yield from _fields(where, item, "type call_id name arguments", "id status namespace")
                yield from search.function_call(where, item)
                yield from _id("responses", f"{where}.call_id", item.get("call_id"))
                yield from pairs.call(where, item.get("call_id"))
                yield from _name(f"{where}.name", item.get("name"))
                yield from _arguments(f"{where}.arguments", item.get("arguments"))
            case "function_call_output":
                yield from _fields(where, item, "type call_id output", "id status")
                yield from search.other_output(where, item)
                if isinstance(item.get("output"), list):
                    yield from _responses_message(where, {"role": "user", "content": item["output"]})
                else:
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
                    (follows.get("type") == "message" and follows.get("role") == "assistant")
                    or str(follows.get("type")).endswith("_call")
                    or str(follows.get("type")).startswith("x_")
                    or follows.get("type") in _PROVIDER_ITEMS
                ):
                    yield f"{where} is reasoning without the item that follows it"
            case "tool_search_call" if search.is_own(item):
                calling = True
                yield from search.call(where, item)
                yield from pairs.call(where, item.get("call_id"))
            case "tool_search_output" if search.is_own(item):
                yield from search.output(where, item)
                yield from pairs.result(where, item.get("call_id"))
            case str() if kind.endswith("_call") or kind.startswith("x_") or kind in _PROVIDER_ITEMS:
                calling = calling or bool(pairs)
            case _:
                yield f"{where}.type is {kind!r}"
    yield from pairs.close("the end")


class _ToolSearch:
    """Checks the searches for tools that the client runs, and the calls of the functions that they have loaded."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        listed = _list(request, "tools")
        self._tools: list[dict[str, Any]] = [tool for tool in listed if isinstance(tool, dict)]
        self._calls: set[Any] = set()
        self._loaded: set[Any] = set()

    def is_own(self, item: Any) -> bool:
        """Return whether the client runs the search that an item belongs to."""
        return item.get("execution") == "client"

    def tools(self) -> Iterator[str]:
        searches = [tool for tool in self._tools if tool.get("type") == "tool_search"]
        for tool in searches:
            if self.is_own(tool):
                yield from _text("tool_search.description", tool.get("description"))
                if (tool.get("parameters") or {}).get("type") != "object":
                    yield "tool_search has no schema of an object"
        if not searches and any(tool.get("defer_loading") for tool in self._tools):
            yield "deferred tools require tool_search"

    def call(self, where: str, item: Any) -> Iterator[str]:
        yield from _fields(where, item, "type call_id execution arguments", "id status created_by")
        yield from _id("responses", f"{where}.call_id", item.get("call_id"))
        if not isinstance(item.get("arguments"), dict):
            yield f"{where}.arguments is not an object"
        if not any(tool.get("type") == "tool_search" for tool in self._tools):
            yield f"{where} is a search without tool_search"
        self._calls.add(item.get("call_id"))

    def output(self, where: str, item: Any) -> Iterator[str]:
        yield from _fields(where, item, "type call_id execution tools", "id status")
        if item.get("call_id") not in self._calls:
            yield f"{where} is the output of no search"
        for tool in _list(item, "tools"):
            yield from _fields(
                f"{where}.tools", tool, "type name description parameters defer_loading", "strict"
            )
            yield from _name(f"{where}.tools.name", tool.get("name"))
            if tool.get("type") != "function" or tool.get("defer_loading") is not True:
                yield f"{where}.tools has a tool that is no deferred function"
            if (tool.get("parameters") or {}).get("type") != "object":
                yield f"{where}.tools has no schema of an object"
            self._loaded.add(tool.get("name"))
        if not isinstance(item.get("tools"), list):
            yield f"{where}.tools is not a list"

    def other_output(self, where: str, item: Any) -> Iterator[str]:
        if item.get("call_id") in self._calls:
            yield f"{where} is no output of a search"

    def function_call(self, where: str, item: Any) -> Iterator[str]:
        name = item.get("name")
        if name in self._loaded and item.get("namespace") != name:
            yield f"{where}: missing namespace for function_call {name!r}"


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
            if role == "user" and kind in ("input_image", "input_file"):
                yield from _responses_file(f"{where}.content", part)
                continue
            if kind not in (("output_text", "refusal") if role == "assistant" else ("input_text",)):
                yield f"{where}.content has a part {kind!r}"
                continue
            yield from _text(f"{where}.content.text", part.get("refusal" if kind == "refusal" else "text"))


def _responses_file(where: str, part: Any) -> Iterator[str]:
    if part["type"] == "input_image":
        yield from _fields(where, part, "type detail image_url")
        yield from _media(where, part.get("image_url"), _IMAGES)
    elif "file_url" in part:
        yield from _fields(where, part, "type file_url")
        if not str(part["file_url"]).startswith(("https://", "http://")):
            yield f"{where}: the address of a file is {part['file_url']!r}"
    else:
        yield from _fields(where, part, "type filename file_data")
        head = str(part.get("file_data")).partition(";")[0].removeprefix("data:")
        if not head.startswith("application/"):
            yield f"{where}: the media type {head!r} of a file is not accepted"
        yield from _media(where, part.get("file_data"), (head,), address=False)


# --- messages ----------------------------------------------------------------------------------


def _messages(request: dict[str, Any]) -> Iterator[str]:
    if not isinstance(request.get("model"), str):
        yield "model is missing"
    most = request.get("max_tokens")
    if type(most) is not int or most < 1:
        yield "max_tokens is missing"
    if "tools" in request:
        yield from _tools("messages", request["tools"], _functions("messages", request))
        yield from _hosted_tools("messages", request)
    elif "tool_choice" in request:
        yield "tool_choice without tools"
    for block in _list(request, "system"):
        yield from _block_text("system", block)
    messages = _list(request, "messages")
    if not messages:
        yield "messages is not a list with at least one message"
    elif not isinstance(messages[0], dict) or cast("dict[str, Any]", messages[0]).get("role") != "user":
        yield "the first message is not the user's"
    pairs, hosted = _Pairs(), _Hosted()
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
            yield from _said_by_user(where, cast("list[Any]", content), pairs, hosted)
        elif role == "assistant":
            yield from pairs.close(where)
            yield from _said_by_assistant(where, cast("list[Any]", content), pairs, hosted)
        else:
            yield f"{where}.role is {role!r}"
    yield from pairs.close("the end")
    offered = {tool.get("name") for tool in _list(request, "tools") if isinstance(tool, dict)}
    for name in _referenced(messages):
        if name not in offered:
            yield f"the reference to {name!r} has no corresponding tool definition"


def _referenced(value: Any) -> Iterator[Any]:
    """Yield the names of the tools that messages refer to."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        if found.get("type") == "tool_reference":
            yield found.get("tool_name")
        elif found.get("type") != "tool_use":  # the model writes its input
            yield from _referenced([found.get("content")])
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _referenced(each)


def _said_by_user(where: str, content: list[Any], pairs: _Pairs, hosted: _Hosted) -> Iterator[str]:
    started = False
    for number, block in enumerate(content):
        at = f"{where}.content[{number}]"
        if block.get("type") != "tool_result":
            if not started:
                yield from pairs.close(at)
                if not number:
                    yield from hosted.close(at)
                started = True
            yield from _block(at, block)
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
                yield from _block(where, part)
    elif content is not None:
        yield f"{where}.content is neither text nor blocks"


def _said_by_assistant(where: str, content: list[Any], pairs: _Pairs, hosted: _Hosted) -> Iterator[str]:
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
            case "server_tool_use" | "mcp_tool_use":
                yield from _fields(at, block, "type id name input", "cache_control caller server_name")
                hosted.open.append(block.get("id"))
                if not isinstance(block.get("input"), dict):
                    yield f"{at}.input is not an object"
            case str(kind) if kind.endswith("_tool_result"):
                yield from _fields(at, block, "type tool_use_id content", "cache_control caller is_error")
                yield from hosted.result(at, block.get("tool_use_id"))
            case "compaction" | "container_upload":
                pass
            case str(kind) if kind.startswith("x_"):
                pass
            case kind:
                yield f"{at}.type is {kind!r}"
    if content[-1].get("type") in ("thinking", "redacted_thinking"):
        yield f"{where}: the last block is thinking"


class _Hosted:
    """Checks that calls to a provider's own tools have results. The provider sends both."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    def result(self, where: str, id: Any) -> Iterator[str]:
        if id in self.open:
            self.open.remove(id)
        else:
            yield f"{where}: the result {id!r} has no server_tool_use before it"

    def close(self, where: str) -> Iterator[str]:
        """Yield a problem for calls still without a result. Called for a user's message that does not begin with a result."""
        if self.open:
            yield f"{where} comes before the provider's own results of {self.open}"
            self.open.clear()


def _block(where: str, block: Any) -> Iterator[str]:
    """Yield the problems with a block in a user's message or in a result: text, a picture or a document."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in ("image", "document"):
        yield from _block_text(where, block)
        return
    yield from _fields(
        where, block, "type source", "cache_control" if kind == "image" else "cache_control title"
    )
    source: Any = block.get("source") or {}
    types = _IMAGES if kind == "image" else ("application/pdf",)
    if source.get("type") == "url":
        yield from _fields(where, source, "type url")
    else:
        yield from _fields(where, source, "type media_type data")
        if source.get("type") != "base64" or source.get("media_type") not in types:
            yield f"{where}: a source of {source.get('media_type')!r} is not accepted"
        yield from _base64(where, source.get("data"))


def _block_text(where: str, block: Any) -> Iterator[str]:
    yield from _fields(where, block, "type text", "cache_control citations")
    if not isinstance(block, dict) or cast("dict[str, Any]", block).get("type") != "text":
        yield f"{where} is not a text block"
    elif not str(cast("dict[str, Any]", block).get("text") or "").strip():
        yield f"{where}: text content blocks must be non-empty"


# --- Gemini ------------------------------------------------------------------------------------

_FIRST = re.compile(r"[a-zA-Z_]")
_ABOUT = frozenset({"thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution"})


def _gemini(request: dict[str, Any]) -> Iterator[str]:
    known = "systemInstruction tools toolConfig generationConfig safetySettings cachedContent serviceTier"
    yield from _fields("the body", request, "contents", known)
    contents = _list(request, "contents")
    if not contents:
        yield "contents is not a list with at least one content"
    if "systemInstruction" in request:
        for part in _list(request["systemInstruction"], "parts"):
            yield from _gemini_text("systemInstruction", part)
    if "tools" in request:
        yield from _gemini_tools(request)
    elif "toolConfig" in request:
        yield "toolConfig without tools"
    last = "model"
    calls: list[tuple[Any, Any]] = []
    for number, content in enumerate(contents):
        where = f"contents[{number}]"
        yield from _fields(where, content, "role parts")
        parts: list[Any] = _list(content, "parts")
        role: Any = content.get("role")
        if role not in ("user", "model") or role == last:
            yield f"{where}.role is {role!r} after {last!r}"
        last = role
        if not parts:
            yield f"{where}.parts is empty"
        for part in parts:
            yield from _gemini_part(where, part)
        results = [_pair(part["functionResponse"]) for part in parts if "functionResponse" in part]
        if role == "user" and sorted(map(repr, results)) != sorted(map(repr, calls)):
            yield f"{where}: the responses {results} are not those of the calls {calls}"
        if any("functionResponse" in part for part in parts[len(results) :]):
            yield f"{where}: a response comes after something else"
        if role == "model" and results:
            yield f"{where}: a model has no responses"
        calls = [_pair(part["functionCall"]) for part in parts if "functionCall" in part]
        if role == "user" and calls:
            yield f"{where}: a user has no calls"
        if len(set(map(repr, calls))) != len(calls):
            yield f"{where}: two calls have one id: {calls}"
        first = next((part for part in parts if "functionCall" in part), None)
        if first is not None and not first.get("thoughtSignature") and not _has_signature(parts):
            yield f"{where}: the first call is missing a thought_signature"
    if calls:
        yield f"the end comes before the responses of {calls}"


def _has_signature(parts: list[Any]) -> bool:
    return any(part.get("thoughtSignature") for part in parts)


def _pair(said: Any) -> tuple[Any, Any]:
    return (said.get("id"), said.get("name"))


def _gemini_part(where: str, part: Any) -> Iterator[str]:
    kinds = sorted(set(part) - _ABOUT)
    if len(kinds) != 1:
        if kinds or not part.get("thoughtSignature"):
            yield f"{where} has a part with {kinds or 'no content'}"
        return
    if not isinstance(part.get("thought", False), bool) or not isinstance(
        part.get("thoughtSignature", ""), str
    ):
        yield f"{where} has a part whose thought or signature has the wrong type"
    match kinds[0]:
        case "text":
            if not part.get("thought") and not part.get("thoughtSignature"):
                yield from _gemini_text(where, part)
        case "functionCall" | "functionResponse" as kind:
            said = part[kind]
            inner = "args" if kind == "functionCall" else "response"
            yield from _fields(f"{where}.{kind}", said, f"id name {inner}", "parts")
            yield from _id("gemini", f"{where}.{kind}.id", said.get("id"))
            yield from _gemini_name(f"{where}.{kind}.name", said.get("name"))
            if not isinstance(said.get(inner), dict):
                yield f"{where}.{kind}.{inner} is not an object"
        case "inlineData":
            yield from _fields(f"{where}.inlineData", part["inlineData"], "mimeType data", "displayName")
        case _:
            pass


def _gemini_text(where: str, part: Any) -> Iterator[str]:
    yield from _text(f"{where}.text", part.get("text"))
    if not str(part.get("text") or "").strip():
        yield f"{where}: a text part must not be empty"


def _gemini_name(where: str, name: Any) -> Iterator[str]:
    yield from _name(where, name)
    if isinstance(name, str) and not _FIRST.match(name):
        yield f"{where} {name!r:.80} does not begin with a letter or an underscore"


_GEMINI_HOSTED = {
    "googleSearch": "",
    "urlContext": "",
    "codeExecution": "",
    "fileSearch": "fileSearchStoreNames",
}
"""Gemini's own tools, each with the fields that it needs, separated by spaces."""


def _gemini_tools(request: Mapping[str, Any]) -> Iterator[str]:
    tools = _list(request, "tools")
    hosted = [tool for tool in tools if "functionDeclarations" not in tool]
    if len(hosted) < len(tools) or not tools:
        yield from _declarations([tool for tool in tools if "functionDeclarations" in tool])
    for tool in hosted:
        kinds = list(tool)
        if len(kinds) != 1 or kinds[0] not in _GEMINI_HOSTED:
            yield f"a tool has the fields {kinds}"
        else:
            yield from _fields(kinds[0], tool[kinds[0]], _GEMINI_HOSTED[kinds[0]], "metadataFilter topK")
    shown = request.get("toolConfig", {}).get("includeServerSideToolInvocations")
    if hosted and len(hosted) < len(tools) and shown is not True:
        yield "the provider's own tools and functions need includeServerSideToolInvocations"


def _declarations(tools: list[Any]) -> Iterator[str]:
    found = [each for tool in tools for each in _list(tool, "functionDeclarations")]
    if not found:
        yield "tools has no function declarations"
    for number, each in enumerate(found):
        where = f"functionDeclarations[{number}]"
        yield from _fields(
            where, each, "name description", "parametersJsonSchema responseJsonSchema behavior"
        )
        yield from _gemini_name(f"{where}.name", each.get("name"))
        schema = each.get("parametersJsonSchema")
        if not isinstance(schema, dict) or cast("dict[str, Any]", schema).get("type") != "object":
            yield f"{where} has no schema of an object"
        yield from _references(where, schema)
    names = [each.get("name") for each in found]
    if len(set(names)) != len(names):
        yield f"two tools have one name: {names}"


def _references(where: str, schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for each in cast("list[Any]", schema):
            yield from _references(where, each)
    elif isinstance(schema, dict):
        words = cast("dict[str, Any]", schema)
        if isinstance(words.get("$ref"), str) and any(not word.startswith("$") for word in words):
            yield f"{where} has more than $ref beside {words['$ref']}"
        for each in words.values():
            yield from _references(where, each)
