"""The host of the interpreter: the process that talks to it, and turns what a script hands over into JSON text.

Python computes the hash of each key while it takes over a dict or a set, and a script can have keys for which that takes for ever:
tuples of tuples that it has once, or integers with equal hashes. Nothing interrupts it, so it does not happen in the program's process.

This module imports nothing else from Handrail, so the process starts quickly.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import sys
import time
from collections.abc import Callable, Collection
from datetime import datetime
from importlib import import_module
from typing import Any, BinaryIO, Literal, NoReturn, cast

import msgspec
import pydantic_core

_BACKSTOP = 5.0
"""Seconds beyond its own limit after which a worker that does not answer is killed."""
CRASHED = "its interpreter took too long or crashed, and was stopped."
_LONGEST_ERROR = 4_000
_RECURSION = 200
_BYTES_OF_ONE = 256
"""The bytes that each part of a value counts for: to go through a part takes as long as to write so much text."""


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


class Setup(msgspec.Struct, frozen=True):
    """What the host needs to begin."""

    binary: str
    limits: Limits
    stubs: str
    now: datetime
    seed: str
    functions: frozenset[str]


class Called(msgspec.Struct, frozen=True, tag=True):
    """The script has called a function. The call does not begin before the script waits for it."""

    id: int
    name: str
    has_positional: bool
    arguments: str
    """The keyword arguments as JSON, or "" if they have none."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The script can't go on without one of these calls."""

    ids: list[int]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The script has ended."""

    value: str
    """Its last value as JSON."""


Step = Called | Waiting | Ended


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker has been started."""

    pid: int


class Dumped(msgspec.Struct, frozen=True, tag=True):
    """The state of a script that waits."""

    state: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A script has failed, was refused before it ran, or can't be loaded."""

    message: str
    kind: Literal["failed", "refused", "not loadable"] = "failed"


class Reply(msgspec.Struct, frozen=True):
    """What the host sends for each request."""

    result: Called | Waiting | Ended | Ready | Dumped | Failed
    suspensions: int
    printed: str
    """What the script has printed since the reply before."""


def send(pipe: BinaryIO, body: bytes) -> None:
    """Write one message."""
    pipe.write(struct.pack("!Q", len(body)) + body)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes:
    """Read one message. Raises `EOFError` if the other process has ended."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    size: int = struct.unpack("!Q", head)[0]
    body = pipe.read(size)
    if len(body) < size:
        raise EOFError
    return body


def main() -> None:
    """Do what is asked on the standard input, until it ends."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError), contextlib.ExitStack() as held:
        host = _Host(msgspec.msgpack.decode(receive(requests), type=Setup), held)
        host.limit()
        send(replies, msgspec.msgpack.encode(Reply(Ready(host.pid), 0, "")))
        while True:
            name, *given = msgspec.msgpack.decode(receive(requests), type=list[Any])
            host.limit()
            send(replies, msgspec.msgpack.encode(host.reply(name, *given)))


class _Failure(Exception):
    def __init__(self, failed: Failed) -> None:
        self.failed = failed


class _Host:
    def __init__(self, setup: Setup, held: contextlib.ExitStack) -> None:
        self._limits = limits = setup.limits
        self._functions = setup.functions
        self._monty: Any = import_module("pydantic_monty")
        pool = self._monty.Monty(
            binary_path=setup.binary, max_processes=1, request_timeout=limits.seconds + _BACKSTOP
        )
        session = held.enter_context(pool).checkout(
            script_name="script.py",
            limits={
                "max_memory": limits.memory,
                "max_feed_duration_secs": limits.seconds,
                "max_recursion_depth": _RECURSION,
                "max_suspensions": limits.suspensions + 1,
            },
            type_check=True,
            type_check_stubs=setup.stubs,
            type_check_format="concise",
            os_policy={"datetime": setup.now, "sleep": "zero", "random_start": {"seed": setup.seed}},
        )
        self._session = held.enter_context(session)
        self.pid: int = self._session.worker_pid
        self._printed = self._collector(0)
        self._sent = 0
        self._at: Any = None
        """Where the script is suspended."""
        self._suspensions = 0

    def limit(self) -> None:
        """Let the system end this process if the next request keeps it computing for too long. The worker has its own limit."""
        import resource  # the program imports this module too, also where there is no such limit

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        seconds = math.ceil(time.process_time() + self._limits.seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if most < 0 else min(seconds, most), most))

    def reply(self, name: str, *given: Any) -> Reply:
        try:
            result = getattr(self, f"_{name}")(*given)
        except _Failure as error:
            result = error.failed
        printed: str = self._printed.output
        since, self._sent = printed[self._sent :], len(printed)
        return Reply(result, self._suspensions, since)

    # Requests.

    def _start(self, code: str) -> Step:
        return self._next(lambda: self._session.feed_start(code, print_callback=self._printed))

    def _load(self, state: bytes, printed: int, suspensions: int) -> Waiting:
        self._suspensions = suspensions
        self._printed = self._collector(printed)
        try:
            self._at = self._session.load_snapshot(state, print_callback=self._printed)
        except self._monty.MontyError as error:
            raise _Failure(Failed(str(error), "not loadable")) from None
        if type(self._at).__name__ != "FutureSnapshot":
            raise _Failure(Failed("it does not wait for calls", "not loadable"))
        return Waiting(sorted(self._at.pending_call_ids))

    def _promise(self) -> Step:
        return self._next(lambda: self._at.resume({"future": ...}))

    def _refuse(self, answer: bytes) -> Step:
        return self._next(lambda: self._at.resume(pydantic_core.from_json(answer)))

    def _settle(self, id: int, answer: bytes) -> Step:
        return self._next(lambda: self._at.resume({id: pydantic_core.from_json(answer)}))

    def _dump(self) -> Dumped:
        return Dumped(self._at.dump())

    # The script.

    def _collector(self, used: int) -> Any:
        return self._monty.CollectString(max_bytes=max(self._limits.output - used, 0))

    def _next(self, go_on: Callable[[], Any]) -> Step:
        """Let the script go on until it calls one of the functions, waits for calls, or ends."""
        monty = self._monty
        try:
            at = self._at = go_on()
            while True:
                self._suspensions += 1
                if isinstance(at, monty.MontyComplete):
                    return Ended(self._plain(at.output))
                if self._suspensions > self._limits.suspensions:
                    raise _failure(f"it turned to its host more than {self._limits.suspensions} times.")
                if isinstance(at, monty.FutureSnapshot):
                    return Waiting(sorted(at.pending_call_ids))
                if isinstance(at, monty.NameLookupSnapshot):
                    at = self._name(at)
                elif at.is_os_function:
                    at = at.resume_not_handled()
                elif at.function_name not in self._functions:
                    said = f"name {at.function_name!r} is not defined: no tool is offered by that name"
                    at = at.resume({"exc_type": "NameError", "message": said})
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
            return _to_json(given).decode() if _fits(given, self._limits.memory) else ""
        except Exception:  # the script's own objects have no JSON
            return ""

    def _plain(self, value: Any) -> str:
        """Return the script's value as JSON if it is plain data, and otherwise as text in JSON."""
        if not _fits(value, self._limits.memory):
            raise _failure(
                f"its last value is too large. It may have {self._limits.memory:,} bytes, and each part counts for {_BYTES_OF_ONE}."
            )
        try:
            text = _to_json(value).decode()
        except Exception:  # the script's own objects
            return _to_json(repr(value)).decode()
        try:
            pydantic_core.from_json(text)
        except ValueError:  # a number that is too long
            return _to_json(text).decode()
        return text

    def _fail(self, error: Any) -> NoReturn:
        monty, limits = self._monty, self._limits
        if isinstance(error, monty.MontyTypingError):
            raise _failure(f"a check found mistakes in it.\n{_short(error.display())}", "refused") from None
        if isinstance(error, monty.MontySyntaxError):
            raise _failure(f"it can't be parsed. {_short(error.display('type-msg'))}", "refused") from None
        if isinstance(error, monty.MontyCrashedError):
            raise _failure(CRASHED) from None
        message = error.display() if isinstance(error, monty.MontyRuntimeError) else str(error)
        message = _short(message.replace("<python-input-0>", "script.py"))
        if "time limit exceeded" in message:
            message += f"\nA script may compute for {limits.seconds:g} seconds."
        elif "memory limit exceeded" in message:
            message += f"\nA script may use {limits.memory:,} bytes, and print {limits.output:,}."
        raise _failure(message) from None


def _failure(message: str, kind: Literal["failed", "refused"] = "failed") -> _Failure:
    return _Failure(Failed(message, kind))


def _to_json(value: Any) -> bytes:
    return pydantic_core.to_json(value, inf_nan_mode="constants", fallback=os.fspath)


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
