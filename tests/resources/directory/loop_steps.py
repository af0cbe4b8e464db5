"""What the event loop's thread does: the function calls of each pass of the loop, counted, and the disk calls that it makes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Generator
from types import FrameType
from typing import Any

from handrail.concurrency.threads import is_on_loop
from handrail.resources.directory.disk import Disk

_PASS: Any = asyncio.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]


class LoopSteps:
    """Counts the function calls of this thread, by passes of its event loop. Clocks don't matter, so it can't be flaky."""

    def __init__(self) -> None:
        self.most = 0
        """The most function calls in one pass."""
        self.where = ""
        """The functions that made the most calls in that pass."""
        self._calls: dict[str, int] = {}
        self._now = 0

    @contextlib.contextmanager
    def counted(self) -> Generator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._end_pass()

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "c_call"):
            return
        code = frame.f_code
        if event == "call" and code is _PASS:
            self._end_pass()
        self._now += 1
        name = f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"
        self._calls[name] = self._calls.get(name, 0) + 1

    def _end_pass(self) -> None:
        if self._now > self.most:
            self.most = self._now
            self.where = ", ".join(sorted(self._calls, key=self._calls.__getitem__, reverse=True)[:4])
        self._now, self._calls = 0, {}


class LoopDisk(Disk):
    """A disk that notes the calls that an event loop's thread makes while it is `watched`."""

    def __init__(self) -> None:
        self.watched = False
        self.on_loop: list[str] = []


def _watched(name: str) -> Any:
    def method(self: LoopDisk, *args: Any, **options: Any) -> Any:
        if self.watched and is_on_loop():
            self.on_loop.append(name)
        return getattr(Disk, name)(self, *args, **options)

    return method


for _name in vars(Disk):
    if not _name.startswith("_"):
        setattr(LoopDisk, _name, _watched(_name))
