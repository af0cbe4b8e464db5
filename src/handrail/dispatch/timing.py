"""How long a call may take: its timeout, the run's deadline, the lease of its job.

All of them end a call by cancelling its task. What they cancelled is taken back here and becomes what
it stands for; whoever else cancelled the task at the same moment is heard first.
"""

from __future__ import annotations

import asyncio
from typing import Any

from handrail.dispatch.call import LiveCall
from handrail.dispatch.failures import TimedOut
from handrail.dispatch.watchdog import Timer, watchdog_of
from handrail.errors import DeadlineExceededError
from handrail.tools import Tool


def start_watching(call: LiveCall, tool: Tool[Any, Any], task: asyncio.Task[Any]) -> None:
    """Watch over the handler: its timeout and the lease of its job."""
    if tool.timeout is not None:
        call.timer = watchdog_of(call.loop).watch(task, tool.timeout)
    if call.frame.lease is not None:
        call.heartbeat.keep(call.loop)


def stop_watching(call: LiveCall, task: asyncio.Task[Any], cancelling: int) -> None:
    """The handler is over. If its timeout ended it, that is raised."""
    if call.frame.lease is not None:
        call.heartbeat.stop()
    if call.timer is not None and call.timer.stop():
        task.uncancel()
        if task.cancelling() <= cancelling:
            raise TimedOut(call.tool.timeout)


def watch_deadline(call: LiveCall, task: asyncio.Task[Any]) -> Timer:
    """The deadline holds during all of a call: policies, waiting for an approval, the handler."""
    deadline: Any = call.frame.deadline
    return watchdog_of(call.loop).watch(task, max(deadline.remaining(), 0), deadline.remaining)


def deadline_or(
    error: BaseException, call: LiveCall, timer: Timer, task: asyncio.Task[Any], cancelling: int
) -> BaseException:
    """What a cancellation by the deadline stands for; any other error as it is."""
    deadline = call.frame.deadline
    if deadline is not None and timer.stop():
        task.uncancel()
        if isinstance(error, asyncio.CancelledError) and task.cancelling() <= cancelling:
            return DeadlineExceededError(deadline.at, f"{call.name} was done")
    return error
