"""Hearing that a server is told to stop, before it waits for its connections."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def told_first(stop: Callable[[], object]) -> Generator[None]:
    """Call `stop` in the loop when the process is signalled to end; then whoever listened before hears it.

    Servers tell an app that they stop only when their connections are closed, and a stream ends only when
    the app ends it: the one would wait for the other. Nothing is done where nobody listens for a signal,
    since the process then ends by it, nor in another thread than the main one, which signals never reach.
    """
    loop = asyncio.get_running_loop()
    listened: dict[int, Callable[[int, Any], Any]] = {}

    def heard(number: int, frame: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop)
        listened[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if callable(before) and before is not signal.default_int_handler:
                listened[number] = before
                signal.signal(number, heard)
    try:
        yield
    finally:
        for number, before in listened.items():
            if signal.getsignal(number) is heard:
                signal.signal(number, before)
