"""`Interpreter`: runs one script in a worker process of Monty, an interpreter of a subset of Python without access to anything outside.

All calls of Monty are made in threads. Its own async interface works on threads that asyncio does not know of, which may still
touch Python's objects while the program ends, and then abort it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import Callable, Collection
from datetime import datetime
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from handrail.concurrency.cancellation import shielded
from handrail.concurrency.threads import run_in_thread
from handrail.errors import DefinitionError
from handrail.schema import to_json

T = TypeVar("T")

_BACKSTOP = 5.0
"""Seconds beyond its own limit after which a worker that does not answer is killed."""
_LONGEST_ERROR = 4_000
_RECURSION = 200
_BYTES_OF_ONE = 256
"""The bytes that each part of a value counts for: to go through a part takes as long as to write so much text."""


def check_installed() -> None:
    """Raise `DefinitionError` if the interpreter is not installed."""
    if util.find_spec("pydantic_monty") is None:
        raise DefinitionError(
            "CodeMode needs pydantic-monty, which is not installed. Install it with: pip install 'handrail[code]'"
        )


def binary() -> Path:
    """Return the path of the interpreter's own program. Neither `PATH` nor the environment can name another one."""
    for file in metadata.files("pydantic-monty-runtime") or ():
        if file.name in ("monty", "monty.exe"):
            return Path(str(file.locate())).resolve()
    raise DefinitionError(
        "the program of pydantic-monty is not installed. Install it again with: pip install --force-reinstall 'handrail[code]'"
    )


class Limits(msgspec.Struct, frozen=True):
    """What one script may use."""

    memory: int
    """Bytes."""
    seconds: float
    """Seconds of computing, without those in which it waits for its calls."""
    calls: int
    output: int
    """Bytes that it may print."""

    @property
    def suspensions(self) -> int:
        """How often the script may turn to its host, for calls and anything else."""
        return 4 * self.calls + 100


class ScriptError(Exception):
    """A script failed. The message is for the model."""


class ScriptRefused(ScriptError):
    """A script was refused before it ran."""


class NotLoadable(Exception):
    """A suspended script can't be loaded: another version dumped it, or it is damaged."""


class Called(msgspec.Struct, frozen=True):
    """The script has called a function. The call does not begin before the script waits for it."""

    id: int
    name: str
    has_positional: bool
    arguments: str
    """The keyword arguments as JSON, or "" if they have none."""


class Waiting(msgspec.Struct, frozen=True):
    """The script can't go on without one of these calls."""

    ids: list[int]


class Ended(msgspec.Struct, frozen=True):
    """The script has ended."""

    value: Any


Step = Called | Waiting | Ended


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a call, as the script gets it."""

    value: Any = None
    error: str = ""
    """The name of the exception that the call raises; "" if it returns its value."""
    message: str = ""

    @property
    def digest(self) -> str:
        """A digest of the outcome, by which it can be compared with another one."""
        return hashlib.sha256(to_json([self.value, self.error, self.message])).hexdigest()

    @property
    def answer(self) -> Any:
        """The outcome in the interpreter's own form."""
        if self.error:
            return {"exc_type": self.error, "message": self.message}
        return {"return_value": self.value}


class Interpreter:
    """One script in a worker process. If a method is cancelled, the worker is killed."""

    def __init__(
        self, limits: Limits, *, stubs: str, now: datetime, seed: str, functions: frozenset[str]
    ) -> None:
        self._limits = limits
        self._stubs = stubs
        self._policy = {"datetime": now, "sleep": "zero", "random_start": {"seed": seed}}
        self._functions = functions
        self._monty: Any = None
        self._printed: Any = None
        self._before = ""
        """What the script had printed before it was loaded."""
        self._held = contextlib.ExitStack()
        self._session: Any = None
        self._pid: int | None = None
        self._at: Any = None
        """Where the script is suspended."""
        self.suspensions = 0

    async def open(self) -> None:
        """Start the worker. Call `close` afterwards, even if this fails."""
        await self._do(self._open)

    async def close(self) -> None:
        """End the worker."""
        await shielded(run_in_thread(self._held.close))

    @property
    def printed(self) -> str:
        return self._before + ("" if self._printed is None else self._printed.output)

    async def start(self, code: str) -> Step:
        """Check a script, and begin it. Raises `ScriptError` if it is refused or fails."""
        return await self._do(
            lambda: self._next(lambda: self._session.feed_start(code, print_callback=self._printed))
        )

    async def load(self, dump: bytes, printed: str, suspensions: int) -> Step:
        """Continue a suspended script. Raises `NotLoadable` if it can't be loaded."""

        def load() -> Step:
            self._before, self.suspensions = printed, suspensions
            self._printed = self._collector(len(printed.encode()))
            try:
                self._at = self._session.load_snapshot(dump, print_callback=self._printed)
            except self._monty.MontyError as error:
                raise NotLoadable(str(error)) from None
            if type(self._at).__name__ != "FutureSnapshot":
                raise NotLoadable("it does not wait for calls")
            return Waiting(sorted(self._at.pending_call_ids))

        return await self._do(load)

    async def promise(self) -> Step:
        """Let the script go on after a call, whose outcome it gets when it waits for it."""
        return await self._resume({"future": ...})

    async def refuse(self, outcome: Outcome) -> Step:
        """Let the script go on after a call that it can't make."""
        return await self._resume(outcome.answer)

    async def settle(self, id: int, outcome: Outcome) -> Step:
        """Give a script that waits the outcome of one call."""
        return await self._resume({id: outcome.answer})

    async def dump(self) -> bytes:
        """Return the state of a script that waits."""
        return await run_in_thread(lambda: self._at.dump())

    async def _resume(self, answer: Any) -> Step:
        return await self._do(lambda: self._next(lambda: self._at.resume(answer)))

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await run_in_thread(work)
        except asyncio.CancelledError:
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            raise

    # In a thread.

    def _open(self) -> None:
        monty = self._monty = import_module("pydantic_monty")
        limits = self._limits
        self._printed = self._collector(0)
        pool = monty.Monty(binary_path=binary(), max_processes=1, request_timeout=limits.seconds + _BACKSTOP)
        session = self._held.enter_context(pool).checkout(
            script_name="script.py",
            limits={
                "max_memory": limits.memory,
                "max_feed_duration_secs": limits.seconds,
                "max_recursion_depth": _RECURSION,
                "max_suspensions": limits.suspensions + 1,
            },
            type_check=True,
            type_check_stubs=self._stubs,
            type_check_format="concise",
            os_policy=self._policy,
        )
        self._session = self._held.enter_context(session)
        self._pid = self._session.worker_pid
        self._held.callback(self._forget)

    def _forget(self) -> None:
        self._pid = self._at = None

    def _collector(self, used: int) -> Any:
        return self._monty.CollectString(max_bytes=max(self._limits.output - used, 0))

    def _next(self, go_on: Callable[[], Any]) -> Step:
        """Let the script go on until it calls one of the functions, waits for calls, or ends."""
        monty = self._monty
        try:
            at = self._at = go_on()
            while True:
                self.suspensions += 1
                if isinstance(at, monty.MontyComplete):
                    return Ended(self._plain(at.output))
                if self.suspensions > self._limits.suspensions:
                    raise ScriptError(f"it turned to its host more than {self._limits.suspensions} times.")
                if isinstance(at, monty.FutureSnapshot):
                    return Waiting(sorted(at.pending_call_ids))
                if isinstance(at, monty.NameLookupSnapshot):
                    at = self._name(at)
                elif at.is_os_function:
                    at = at.resume_not_handled()
                elif at.function_name not in self._functions:
                    said = f"name {at.function_name!r} is not defined: no tool is offered by that name"
                    at = at.resume(Outcome(error="NameError", message=said).answer)
                else:
                    return Called(at.call_id, at.function_name, bool(at.args), self._arguments(at.kwargs))
                self._at = at
        except monty.MontyError as error:
            self._fail(error)

    def _name(self, at: Any) -> Any:
        if at.variable_name not in self._functions or at.object_id is not None:
            return at.resume()

        def function() -> None: ...

        function.__name__ = function.__qualname__ = at.variable_name
        return at.resume(value=function)

    def _arguments(self, given: dict[str, Any]) -> str:
        try:
            return to_json(given).decode() if _fits(given, self._limits.memory) else ""
        except Exception:  # the script's own objects have no JSON
            return ""

    def _plain(self, value: Any) -> Any:
        """Return the script's value if it is plain data, and otherwise as text."""
        if not _fits(value, self._limits.memory):
            raise ScriptError(
                f"its last value is too large. It may have {self._limits.memory:,} bytes, and each part counts for {_BYTES_OF_ONE}."
            )
        try:
            to_json(value)
        except Exception:  # the script's own objects, or an infinite number
            return repr(value)
        return value

    def _fail(self, error: Any) -> NoReturn:
        monty, limits = self._monty, self._limits
        if isinstance(error, monty.MontyTypingError):
            raise ScriptRefused(f"a check found mistakes in it.\n{_short(error.display())}") from None
        if isinstance(error, monty.MontySyntaxError):
            raise ScriptRefused(f"it can't be parsed. {_short(error.display('type-msg'))}") from None
        if isinstance(error, monty.MontyCrashedError):
            raise ScriptError("its interpreter took too long or crashed, and was stopped.") from None
        message = error.display() if isinstance(error, monty.MontyRuntimeError) else str(error)
        message = _short(message.replace("<python-input-0>", "script.py"))
        if "time limit exceeded" in message:
            message += f"\nA script may compute for {limits.seconds:g} seconds."
        elif "memory limit exceeded" in message:
            message += f"\nA script may use {limits.memory:,} bytes, and print {limits.output:,}."
        raise ScriptError(message) from None


def _short(message: str) -> str:
    """Return the end of a message, which says what is wrong."""
    message = message.strip()
    return message if len(message) <= _LONGEST_ERROR else f"…{message[-_LONGEST_ERROR:]}"


def _fits(value: Any, most: int) -> bool:
    """Return whether a value has at most about this many bytes, written out, if each of its parts has `_BYTES_OF_ONE`.

    A list that contains the same list many times takes little memory in the script, and grows without bound when it is written.
    """
    rest: list[Any] = [value]
    left = most
    while rest and left >= 0:
        each = rest.pop()
        left -= _BYTES_OF_ONE
        if isinstance(each, str | bytes):
            left -= len(each)
        elif isinstance(each, dict):
            rest += cast("dict[Any, Any]", each).keys()
            rest += cast("dict[Any, Any]", each).values()
        elif isinstance(each, list | tuple | set | frozenset):
            rest += cast("Collection[Any]", each)
        elif hasattr(each, "attributes"):  # an object of a script's own class
            rest.append(each.attributes)
    return left >= 0
