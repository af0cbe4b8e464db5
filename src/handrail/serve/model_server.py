"""A server for the embedded model with OpenAI's chat completions and responses APIs, streamed or not.

Arguments of calls and structured answers are constrained by their JSON Schema. The model can't choose among tools:

- A tool that `tool_choice` names is always called.
- With `required`, the only tool is called, and a request with several tools is refused.
- With `auto`, which is the default, the only tool is called once for each message of the user. With several tools, none
  is called.
- With `none`, no tool is called.

A parameter that is not read is accepted only if the answer is what the client asked for anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from handrail.clock import SYSTEM_CLOCK
from handrail.concurrency.operation import cancel_and_await
from handrail.errors import DefinitionError, ModelError
from handrail.ids import random_id
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    CallPart,
    Message,
    Model,
    ModelRequest,
    Offered,
    Sent,
    StopPart,
    TextPart,
    ToolMessage,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.schema.raw import check_foreign
from handrail.schema.size import MOST_VALUES
from handrail.serve.refusals import RequestRefused
from handrail.serve.requests import Bodies, BodyLimit, BodyRoute, run_parse
from handrail.serve.server import UvicornServer, on_signals

_BODY = BodyLimit(4 << 20, 5 * MOST_VALUES)
_BODY_SECONDS = 20.0
_STOPS = {
    "done": "stop",
    "calls": "tool_calls",
    "length": "length",
    "refused": "content_filter",
    "paused": "length",
}


class _ClientTool(msgspec.Struct, frozen=True):
    """A tool that a client offers, with the fields of `Tool` that the model reads."""

    name: str
    description: str
    json_schema: dict[str, Any]
    examples: tuple[()] = ()


class _ClientSchema(msgspec.Struct, frozen=True):
    """The schema of the answer that a client wants, with the field of `Schema` that the model reads."""

    json_schema: dict[str, Any]


def app_for(model: Model) -> Starlette:
    """Create the ASGI app that serves a model under the part of its name after the colon."""
    name = model.name.partition(":")[2]

    async def models(request: Request) -> Response:
        return JSONResponse(
            {
                "object": "list",
                "data": [{"id": name, "object": "model", "created": 0, "owned_by": "handrail"}],
            }
        )

    async def completions(request: Request) -> Response:
        def answer(body: dict[str, Any]) -> tuple[bool, Any, AsyncGenerator[bytes]]:
            check_parameters(body, CHAT)
            made = ChatAnswer(name, model, request_of(body))
            return made.request.stream, made.whole, made.events(_wants_usage(body))

        return await _answered(request, answer)

    async def responses(request: Request) -> Response:
        def answer(body: dict[str, Any]) -> tuple[bool, Any, AsyncGenerator[bytes]]:
            check_parameters(body, RESPONSES)
            made = ResponsesAnswer(name, model, request_of(body, chat_body), body)
            return made.request.stream, made.whole, made.events()

        return await _answered(request, answer)

    async def _answered(
        request: Request, make: Callable[[dict[str, Any]], tuple[bool, Any, AsyncGenerator[bytes]]]
    ) -> Response:
        try:
            body = await _read(request, bodies)
            if body.get("model") != name:
                raise BadRequest(f"there is no model {body.get('model')!r}. This server has {name!r}.", 404)
            streams, whole, events = make(body)
            if streams:
                return StreamingResponse(
                    events, media_type="text/event-stream", headers={"cache-control": "no-store"}
                )
            return JSONResponse(await _unless_gone(request, whole()))
        except ClientDisconnect:
            return Response(status_code=499)
        except BadRequest as error:
            return _error(str(error), error.status, error.param, error.code)
        except DefinitionError as error:
            return _error(str(error), 400)
        except ModelError as error:
            return _error(error.problem, error.status or 400)

    routes = [
        Route("/v1/models", models),
        BodyRoute("/v1/chat/completions", completions, methods=["POST"], body=_BODY),
        BodyRoute("/v1/responses", responses, methods=["POST"], body=_BODY),
    ]
    bodies = Bodies(routes, seconds=_BODY_SECONDS)
    return Starlette(routes=routes)


async def run(model: Model, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve a model until SIGINT or SIGTERM. `ready` is called when the server accepts requests."""

    server = UvicornServer(app_for(model), ready)
    with on_signals(lambda number: server.handle_exit(number, None)):
        await server.serve([listening])


# --- requests ---


async def _read(request: Request, bodies: Bodies) -> dict[str, Any]:
    """Return the body. Raises `BadRequest` unless it is a JSON object of limited size, sent as JSON to a local address.

    The content type and the address are checked to keep foreign pages in a browser from using the server.
    """
    if not _is_local(request.url.hostname or ""):
        raise BadRequest("this server only answers to its local address. Use 127.0.0.1 or localhost.", 403)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("the content type must be application/json.", 415)
    with contextlib.ExitStack() as read:
        try:
            raw = await bodies.read(request, request.receive, "", read)  # all clients are on this machine
        except RequestRefused as refused:
            raise BadRequest(str(refused), refused.status) from None
    try:
        body: Any = await run_parse(raw, msgspec.json.decode)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the request is not valid JSON: {error}. Send a JSON object.") from None
    if not isinstance(body, dict):
        raise BadRequest("the request is not a JSON object. Send one.")
    return cast("dict[str, Any]", body)


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def request_of(
    body: dict[str, Any], convert: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
) -> ModelRequest:
    """Return the model request for an HTTP request's body. `convert` first makes it a chat completions body.

    Raises `BadRequest` if the body is malformed or asks for something unsupported, and `DefinitionError` if a schema in
    it can't be used.
    """
    try:
        return _request_of(convert(body))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, DefinitionError):
            raise
        raise BadRequest(f"the request has an unexpected form: {type(error).__name__}: {error}.") from None


def _request_of(body: dict[str, Any]) -> ModelRequest:
    system: list[str] = []
    messages: list[Message] = []
    names: dict[str, str] = {}
    for said in body["messages"]:
        _add(said, system, messages, names)
    if not messages:
        raise BadRequest("there is no message. Send one with the role `user`.")
    tools, must_call = _tools(body, isinstance(messages[-1], UserMessage))
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return ModelRequest(
        "\n\n".join(system),
        Sent(messages),
        Sent(Offered(cast("Any", tool)) for tool in tools),
        output=cast("Any", None if must_call else _output(body.get("response_format"))),
        temperature=None if body.get("temperature") is None else float(body["temperature"]),
        max_tokens=None if limit is None else int(limit),
        stream=bool(body.get("stream")),
        must_call=must_call,
    )


def _add(said: dict[str, Any], system: list[str], messages: list[Message], names: dict[str, str]) -> None:
    text = _text(said.get("content"))
    match said["role"]:
        case "system" | "developer":
            system.append(text)
        case "user":
            messages.append(UserMessage(text))
        case "assistant":
            calls = tuple(
                CallAsked(call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in said.get("tool_calls") or ()
            )
            names.update((call.id, call.name) for call in calls)
            messages.append(AssistantMessage(text, calls))
        case "tool":
            id = said["tool_call_id"]
            result = CallAnswered(id, names.get(id, "tool"), text)
            before = messages[-1] if messages else None
            if isinstance(before, ToolMessage):
                messages[-1] = ToolMessage((*before.results, result))
            else:
                messages.append(ToolMessage((result,)))
        case role:
            raise BadRequest(f"there is no role {role!r}. Use system, developer, user, assistant or tool.")


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    kinds = {part["type"] for part in content} - {"text"}
    if kinds:
        raise BadRequest(
            f"this model reads only text, not {', '.join(sorted(kinds))}. Leave these parts out."
        )
    return "".join(part["text"] for part in content)


def _tools(body: dict[str, Any], by_user: bool) -> tuple[list[_ClientTool], bool]:
    """Return the tools that are offered, and whether the answer must be a call.

    Raises `BadRequest` if `tool_choice` does not fit the tools, and `DefinitionError` if a tool's schema can't be used.
    """
    tools: list[_ClientTool] = []
    for each in body.get("tools") or ():
        check_function(each, "tools")
        function = each["function"]
        schema: dict[str, Any] = function.get("parameters") or {"type": "object", "properties": {}}
        check_foreign(schema, f"the tool {function['name']}")
        tools.append(_ClientTool(function["name"], function.get("description") or "", schema))
    choice: Any = body.get("tool_choice") or "auto"
    if isinstance(choice, dict):
        check_function(cast("dict[str, Any]", choice), "tool_choice")
        wanted = cast("dict[str, Any]", choice)["function"]["name"]
        tools = [tool for tool in tools if tool.name == wanted]
        if not tools:
            raise BadRequest(f"tool_choice names {wanted!r}, which is not among the tools. Name one of them.")
        return tools, True
    if choice == "required" and not tools:
        raise BadRequest("tool_choice is 'required', but there are no tools. Send some, or leave it out.")
    return tools, choice == "required" or (choice == "auto" and by_user and len(tools) == 1)


def _output(wanted: Any) -> _ClientSchema | None:
    given: Any = wanted or {"type": "text"}
    kind: Any = given["type"]
    match kind:
        case "text":
            return None
        case "json_object":
            return _ClientSchema({"type": "object"})
        case "json_schema":
            schema: Any = given["json_schema"]["schema"]
            check_foreign(schema, "response_format")
            return _ClientSchema(schema)
        case _:
            raise BadRequest(f"there is no response format {kind!r}. Use text, json_object or json_schema.")


def _wants_usage(body: dict[str, Any]) -> bool:
    options: Any = body.get("stream_options")
    return isinstance(options, dict) and bool(cast("dict[str, Any]", options).get("include_usage"))


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Convert the body of a responses API request to the body of a chat completions request.

    Raises `LookupError`, `TypeError` or `AttributeError` if the body is malformed.
    """
    given: Any = body.get("input")
    said: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for item in said:
        _add_item(item, messages)
    chat: dict[str, Any] = {"model": body.get("model"), "messages": messages, "stream": body.get("stream")}
    if body.get("temperature") is not None:
        chat["temperature"] = body["temperature"]
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        chat["tools"] = [{"type": tool.get("type"), "function": tool} for tool in body["tools"]]
    choice: Any = body.get("tool_choice")
    if isinstance(choice, dict):
        named = cast("dict[str, Any]", choice)
        chat["tool_choice"] = {"type": named.get("type"), "function": named}
    elif choice is not None:
        chat["tool_choice"] = choice
    text: Any = body.get("text")
    wanted: Any = (text and text.get("format")) or {"type": "text"}
    chat["response_format"] = {"type": wanted["type"], "json_schema": wanted}
    return chat


def _add_item(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add an item of the input to the messages of a chat. Raises `LookupError` for an unknown type or a missing field."""
    match item.get("type", "message"):
        case "message":
            content: Any = item["content"]
            if not isinstance(content, str):
                content = [_part(part) for part in content]
            messages.append({"role": item["role"], "content": content})
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output: Any = item["output"]
            content = output if isinstance(output, str) else [_part(part) for part in output]
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        case "reasoning":
            pass
        case kind:
            raise LookupError(f"items of the type {kind!r} are not supported")


def _part(part: dict[str, Any]) -> dict[str, Any]:
    is_text = part["type"] in ("input_text", "output_text", "refusal")
    text = part.get("text") or part.get("refusal") or ""
    return {"type": "text", "text": text} if is_text else {"type": part["type"]}


# --- parameters ---

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


# --- answers ---


class _Answer:
    """One answer from the model."""

    def __init__(self, model: Model, request: ModelRequest) -> None:
        self.request = request
        self._model = model
        self._usage = Usage()
        self._stop = "done"

    async def _parts(self) -> AsyncGenerator[TextPart | CallPart]:
        """Yield the parts of the answer, and note its usage and why it stopped."""
        async with contextlib.aclosing(self._model.stream(self.request)) as parts:
            async for part in parts:
                match part:
                    case TextPart() | CallPart():
                        yield part
                    case UsagePart(usage):
                        self._usage = usage
                    case StopPart(reason):
                        self._stop = reason
                    case _:
                        pass


class ChatAnswer(_Answer):
    """One answer from the model, in the format of the chat completions API."""

    def __init__(self, name: str, model: Model, request: ModelRequest) -> None:
        super().__init__(model, request)
        self._name = name
        self._head = {"id": f"chatcmpl-{random_id()}", "created": int(SYSTEM_CLOCK.now().timestamp())}

    async def whole(self) -> dict[str, Any]:
        text = ""
        calls: dict[int, dict[str, Any]] = {}
        async for part in self._parts():
            if isinstance(part, TextPart):
                text += part.text
            else:
                call = calls.setdefault(part.index, _call(part))
                call["function"]["arguments"] += part.arguments
        said: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            said["tool_calls"] = list(calls.values())
        choice = {"index": 0, "message": said, "finish_reason": _STOPS[self._stop], "logprobs": None}
        return {**self._frame("chat.completion", [choice]), "usage": _usage(self._usage)}

    async def events(self, with_usage: bool) -> AsyncGenerator[bytes]:
        """Yield the events of the stream. If the model fails, the last event says so: the HTTP status has already been sent."""
        yield self._chunk({"role": "assistant", "content": ""})
        begun: set[int] = set()
        try:
            async with contextlib.aclosing(self._parts()) as parts:
                async for part in parts:
                    if isinstance(part, TextPart):
                        yield self._chunk({"content": part.text})
                        continue
                    call: dict[str, Any] = {"index": part.index, "function": {}}
                    if part.index not in begun:
                        call |= _call(part)
                    call["function"]["arguments"] = part.arguments
                    begun.add(part.index)
                    yield self._chunk({"tool_calls": [call]})
        except ModelError as error:
            yield _event({"error": {"message": error.problem, "type": "server_error"}})
            return
        yield self._chunk({}, _STOPS[self._stop])
        if with_usage:
            yield _event({**self._frame("chat.completion.chunk", []), "usage": _usage(self._usage)})
        yield b"data: [DONE]\n\n"

    def _frame(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self._name, "choices": choices}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return _event(self._frame("chat.completion.chunk", [choice]))


def _call(part: CallPart) -> dict[str, Any]:
    id = part.id or f"call_{random_id()}"
    return {"id": id, "type": "function", "function": {"name": part.name, "arguments": ""}}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(data).encode()


def _error(message: str, status: int, param: str | None = None, code: str | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": code, "param": param}}, status)


async def _unless_gone(request: Request, answer: Any) -> Any:
    """Return the answer. If the client disconnects first, generation is stopped, and `ClientDisconnect` is raised."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        await cancel_and_await([work, gone])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ResponsesAnswer(_Answer):
    """One answer from the model, in the format of the responses API.

    Nothing is stored, so a request must contain its whole conversation. Reasoning items are ignored.
    """

    def __init__(self, name: str, model: Model, request: ModelRequest, body: dict[str, Any]) -> None:
        super().__init__(model, request)
        self._head: dict[str, Any] = {
            "id": f"resp_{random_id()}",
            "object": "response",
            "created_at": int(SYSTEM_CLOCK.now().timestamp()),
            "model": name,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "temperature": body.get("temperature") or 0,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": 1,
            "truncation": "disabled",
            "usage": None,
        }
        self._items: list[dict[str, Any]] = []
        self._calls: dict[int, int] = {}
        self._number = 0
        """The `sequence_number` of the next event."""

    async def whole(self) -> dict[str, Any]:
        async for _ in self._changes():
            pass
        return self._response()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of the stream. If the model fails, the last event says so."""
        begun: dict[str, Any] = {**self._head, "status": "in_progress", "output": []}
        yield self._event("created", response=begun)
        yield self._event("in_progress", response=begun)
        try:
            async for number, piece, is_new in self._changes():
                item = self._items[number]
                where = {"item_id": item["id"], "output_index": number}
                if item["type"] == "message":
                    if is_new:
                        yield self._event(
                            "output_item.added", output_index=number, item={**item, "content": []}
                        )
                        part = _text_part("")
                        yield self._event("content_part.added", **where, content_index=0, part=part)
                    yield self._event("output_text.delta", **where, content_index=0, delta=piece, logprobs=[])
                else:
                    if is_new:
                        yield self._event(
                            "output_item.added", output_index=number, item={**item, "arguments": ""}
                        )
                    if piece:
                        yield self._event("function_call_arguments.delta", **where, delta=piece)
        except ModelError as error:
            problem = {"code": "server_error", "message": error.problem}
            yield self._event("failed", response={**begun, "status": "failed", "error": problem})
            return
        answer = self._response()
        for number, item in enumerate(self._items):
            where = {"item_id": item["id"], "output_index": number}
            if item["type"] == "message":
                [part] = item["content"]
                yield self._event(
                    "output_text.done", **where, content_index=0, text=part["text"], logprobs=[]
                )
                yield self._event("content_part.done", **where, content_index=0, part=part)
            else:
                arguments = {"name": item["name"], "arguments": item["arguments"]}
                yield self._event("function_call_arguments.done", **where, **arguments)
            yield self._event("output_item.done", output_index=number, item=item)
        yield self._event(answer["status"], response=answer)

    async def _changes(self) -> AsyncGenerator[tuple[int, str, bool]]:
        """Yield the index of each item that grew, the text that was added, and whether the item is new."""
        async with contextlib.aclosing(self._parts()) as parts:
            async for part in parts:
                if isinstance(part, TextPart):
                    is_new = not self._items or self._items[-1]["type"] != "message"
                    if is_new:
                        self._open("message", role="assistant", content=[_text_part("")])
                    cast("Any", self._items[-1])["content"][0]["text"] += part.text
                    yield len(self._items) - 1, part.text, is_new
                else:
                    is_new = part.index not in self._calls
                    if is_new:
                        self._calls[part.index] = len(self._items)
                        id = part.id or f"call_{random_id()}"
                        self._open("function_call", call_id=id, name=part.name, arguments="")
                    number = self._calls[part.index]
                    self._items[number]["arguments"] += part.arguments
                    yield number, part.arguments, is_new

    def _open(self, kind: str, **fields: Any) -> None:
        self._items.append({"id": f"item_{random_id()}", "type": kind, "status": "in_progress", **fields})

    def _response(self) -> dict[str, Any]:
        """Return the whole response, and mark its items as ended."""
        usage, is_cut = self._usage, self._stop in ("length", "refused")
        why = "max_output_tokens" if self._stop == "length" else "content_filter"
        for item in self._items:
            item["status"] = "completed"
        if is_cut and self._items:
            self._items[-1]["status"] = "incomplete"
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": why} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage.input,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.tokens,
            },
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response.%s\ndata: %s\n\n" % (kind.encode(), json.dumps(data).encode())


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
