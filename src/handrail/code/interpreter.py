"""`Interpreter`: runs one script in a worker process of Monty, an interpreter of a subset of Python without access to anything outside.

A process of its own, the host, talks to the worker: see `handrail.code.host`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from datetime import datetime
from importlib import metadata, util
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from handrail.code.host import (
    CRASHED,
    Dumped,
    Failed,
    Limits,
    Ready,
    Reply,
    Setup,
    Step,
    receive,
    send,
)
from handrail.concurrency.cancellation import shielded
from handrail.concurrency.threads import run_in_thread
from handrail.errors import DefinitionError
from handrail.schema import to_json

_GRACE = 1.0
"""Seconds that the host has to end its worker and itself."""
_PACKAGE = Path(__file__).parents[1]
_BOOT = """
import sys, types
folder, *sys.path = sys.argv[1:]
for name in ("handrail", "handrail.code"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [folder + name.removeprefix("handrail").replace(".", "/")]
from handrail.code.host import main
main()
"""
"""Code that runs the host without importing the rest of Handrail. Empty modules stand in for its parent packages."""


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


class ScriptError(Exception):
    """A script failed. The message is for the model."""


class ScriptRefused(ScriptError):
    """A script was refused before it ran."""


class NotLoadable(Exception):
    """A suspended script can't be loaded: another version dumped it, or it is damaged."""


_ERRORS = {"failed": ScriptError, "refused": ScriptRefused, "not loadable": NotLoadable}


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
    """One script in a worker process, by way of its host. If a method is cancelled, the worker is killed."""

    def __init__(
        self, limits: Limits, *, stubs: str, now: datetime, seed: str, functions: frozenset[str]
    ) -> None:
        self._setup = Setup(str(binary()), limits, stubs, now, seed, functions)
        self._host: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        """The worker's process."""
        self.printed = ""
        self.suspensions = 0

    async def open(self) -> None:
        """Start the worker. Call `close` afterwards, even if this fails."""
        await shielded(run_in_thread(self._start_host))
        ready = await self._ask(self._setup)
        assert isinstance(ready, Ready)
        self._pid = ready.pid

    async def close(self) -> None:
        """End the worker."""
        await shielded(run_in_thread(self._end))

    async def start(self, code: str) -> Step:
        """Check a script, and begin it. Raises `ScriptError` if it is refused or fails."""
        return await self._step("start", code)

    async def load(self, dump: bytes, printed: str, suspensions: int) -> Step:
        """Continue a suspended script. Raises `NotLoadable` if it can't be loaded."""
        self.printed = printed
        return await self._step("load", dump, len(printed.encode()), suspensions)

    async def promise(self) -> Step:
        """Let the script go on after a call, whose outcome it gets when it waits for it."""
        return await self._step("promise")

    async def refuse(self, outcome: Outcome) -> Step:
        """Let the script go on after a call that it can't make."""
        return await self._step("refuse", to_json(outcome.answer))

    async def settle(self, id: int, outcome: Outcome) -> Step:
        """Give a script that waits the outcome of one call."""
        return await self._step("settle", id, to_json(outcome.answer))

    async def dump(self) -> bytes:
        """Return the state of a script that waits."""
        dumped = await self._ask(["dump"])
        assert isinstance(dumped, Dumped)
        return dumped.state

    async def _step(self, *request: Any) -> Step:
        step = await self._ask(request)
        assert isinstance(step, Step)
        return step

    async def _ask(self, request: Any) -> Any:
        body = msgspec.msgpack.encode(request)
        try:
            reply = await run_in_thread(lambda: self._exchange(body))
        except asyncio.CancelledError:
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            raise
        except (EOFError, OSError):
            raise ScriptError(CRASHED) from None
        self.printed += reply.printed
        self.suspensions = reply.suspensions
        if isinstance(reply.result, Failed):
            raise _ERRORS[reply.result.kind](reply.result.message)
        return reply.result

    # In a thread.

    def _start_host(self) -> None:
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        self._host = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _BOOT, str(_PACKAGE), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def _exchange(self, body: bytes) -> Reply:
        host = self._host
        assert host is not None
        send(cast(BinaryIO, host.stdin), body)
        return msgspec.msgpack.decode(receive(cast(BinaryIO, host.stdout)), type=Reply)

    def _end(self) -> None:
        host, pid = self._host, self._pid
        self._host = self._pid = None
        if host is None:
            return
        with contextlib.suppress(OSError):
            cast(BinaryIO, host.stdin).close()
        try:
            host.wait(_GRACE)
        except subprocess.TimeoutExpired:
            host.kill()
            host.wait()
        cast(BinaryIO, host.stdout).close()
        if host.returncode and pid is not None:  # it has not ended its worker
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # another process than this one gets orphans
                os.waitpid(pid, 0)
