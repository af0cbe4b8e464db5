"""One run, watched: its events go to a view, Ctrl-C cancels it, a second Ctrl-C ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from handrail.cli.codes import CANCELLED, TERMINATED
from handrail.cli.ending import Trouble, stopped, trouble
from handrail.cli.screen import View
from handrail.session import Session

if TYPE_CHECKING:
    from handrail.adapter import PromptResponse
    from handrail.adapter.stream import RunStream


class Ended(NamedTuple):
    """What came of a run."""

    code: int
    response: PromptResponse[Any] | None
    trouble: Trouble | None
    note: str
    error: BaseException | None = None


class Stopper:
    """What Ctrl-C does while a run is under way: the first cancels its whole tree, the second ends the process."""

    def __init__(self, task: asyncio.Task[Any], view: View) -> None:
        self._task = task
        self._view = view
        self.code = 0

    def press(self, code: int) -> None:
        if self.code:
            self._view.abandon()
            os._exit(code)
        self.code = code
        self._task.cancel()
        self._view.note("Cancelling: what is under way is undone. Once more ends it at once.", "yellow")


async def watched(
    begin: Callable[[Session], RunStream[Any]], session: Session, view: View, journal: str = ""
) -> Ended:
    """Run to the end, showing every event; never raises for the run. `journal` is where it is recorded."""
    loop = asyncio.get_running_loop()

    def show(event: object) -> None:
        if asyncio._get_running_loop() is loop:  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
            view.show(event)
        else:
            loop.call_soon_threadsafe(view.show, event)

    with view.begin():
        stop = session.dispatcher.subscribe(object, show)
        task = loop.create_task(_response(begin, session))
        stopper = Stopper(task, view)
        loop.add_signal_handler(signal.SIGINT, stopper.press, CANCELLED)
        loop.add_signal_handler(signal.SIGTERM, stopper.press, TERMINATED)
        try:
            await asyncio.wait([task])
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)
            stop()
        return _ended(task, stopper, view, journal)


async def _response(begin: Callable[[Session], RunStream[Any]], session: Session) -> PromptResponse[Any]:
    return await begin(session).response


def _ended(task: asyncio.Task[PromptResponse[Any]], stopper: Stopper, view: View, journal: str) -> Ended:
    if stopper.code and (task.cancelled() or task.exception() is not None):
        said = "Cancelled. What was under way was undone."
        return Ended(stopper.code, None, Trouble(stopper.code, "Cancelled", said), said)
    if task.cancelled():
        error: BaseException | None = asyncio.CancelledError("the run was cancelled")
    else:
        error = task.exception()
    if error is not None:
        found = trouble(error, journal)
        return Ended(found.code, None, found, "", error)
    response = task.result()
    code, note = stopped(response.stop_reason, view.ledger.denied)
    return Ended(code, response, None, note)
