"""Operations for tests, and functions that run them or run scripts."""

import asyncio
import gc
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from handrail import Operation, gather
from handrail.concurrency.operation import Home
from handrail.concurrency.threads import run_in_thread
from support import PATIENCE


def value_of(value: object, home: Home | None = None) -> Operation[Any]:
    """Return an operation that yields to the event loop once and then returns `value`."""

    async def work() -> object:
        await asyncio.sleep(0)
        return value

    return Operation(work, "value", home)


def failing(error: BaseException, home: Home | None = None) -> Operation[Any]:
    """Return an operation that yields to the event loop once and then raises `error`."""

    async def work() -> None:
        await asyncio.sleep(0)
        raise error

    return Operation(work, "failing", home)


class Stuck:
    """An operation that never finishes by itself, and logs what happens to it."""

    def __init__(self, home: Home | None = None, cleanup: int = 0) -> None:
        self.began = threading.Event()
        self.log: list[str] = []
        self.cleanup = cleanup
        self.operation: Operation[None] = Operation(self.work, "stuck", home)

    async def work(self) -> None:
        self.log.append("began")
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        finally:
            for _ in range(self.cleanup):
                await asyncio.sleep(0)
            self.log.append("cleaned up")

    async def has_begun(self) -> None:
        """Wait until the work has begun."""
        while not self.began.is_set():
            await asyncio.sleep(0)


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run an async function to its end on its own event loop."""
    return asyncio.run(main())


async def use(operation: Operation[Any], way: str) -> Any:
    """Use an operation in one of four ways, `await`, `wait`, `task` or `gather`, and return its result."""
    if way == "wait":
        return await run_in_thread(operation.wait)
    if way == "task":
        return await asyncio.create_task(operation)
    if way == "gather":
        return await gather(operation)
    return await operation


@pytest.fixture
def nothing_is_logged(caplog: pytest.LogCaptureFixture):
    """Fixture: asserts that the test logs no warnings or errors, such as a lost exception or a destroyed task."""
    with caplog.at_level(logging.WARNING, logger="asyncio"):
        yield
        gc.collect()
    logged = [
        *caplog.get_records("call"),
        *caplog.records,
    ]  # the test's own records, and those of this fixture
    assert [record.getMessage() for record in logged] == []


_HEAD = """\
from handrail import Operation, gather
import asyncio, logging

# A slow machine is not the script's fault, so this warning of asyncio's dev mode is left out. All others count.
logging.getLogger("asyncio").addFilter(lambda record: "took" not in record.getMessage())
"""


def script(tmp_path: Any, text: str, *flags: str) -> list[str]:
    """Write a script to a file, and return the command that runs it as a user would."""
    file = tmp_path / "script.py"
    file.write_text(_HEAD + textwrap.dedent(text))
    return [sys.executable, *flags, str(file)]


def finished(command: list[str], seconds: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with a timeout, and return the completed process."""
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


async def close_when(waiting: asyncio.Event, running: Any) -> None:
    """Drive a run by hand until the event is set, and close its coroutine."""
    steps = running.__await__()
    while not waiting.is_set():
        pause = next(steps)
        if pause is None:
            await asyncio.sleep(0)
        else:
            pause._asyncio_future_blocking = False
            if not waiting.is_set():
                await asyncio.wait({pause})
    steps.close()
