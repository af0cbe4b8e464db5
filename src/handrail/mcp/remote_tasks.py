"""Tasks of an MCP server (SEP-2663), as its client sees them.

A server that supports tasks may answer a call with the id of a task. The client then requests the state of the task
until it is over, and answers its questions. It can also cancel the task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import mcp_types as wire
from mcp.client.extension import ClientExtension, ResultClaim
from pydantic import TypeAdapter, ValidationError

from handrail.concurrency.cancellation import shielded
from handrail.context import ToolContext
from handrail.mcp.connection import FIRST_WAIT, LONGEST_WAIT, ServerConnection, ServerLost, ServerUnavailable
from handrail.mcp.tasks import EXTENSION, TaskParams, UpdateParams
from handrail.run.call import attempt_of
from handrail.run.questions import paused_timeouts
from handrail.text.secrets import Secrets
from mcp import Client, MCPError

MAX_LOST = 8
"""Maximum number of requests for the state of a task that may fail in a row because the server can't be reached."""
SHORTEST_POLL, LONGEST_POLL = 0.02, 60.0
"""Minimum and maximum seconds between two requests for the state of a task. An interval that the server suggests is kept within them."""
REQUEST_SECONDS = 60.0
"""Seconds that a server has to answer a request about a task."""
MAX_ASKED = 20
"""Maximum number of requests for input in one task."""
CANCEL_SECONDS = 5.0
"""Seconds that a server has to answer the request that cancels a task."""
_POLL_MS = 1000

Answer = Callable[[ToolContext, Any], Awaitable[Any]]
"""A function that answers one request for input."""


class CreatedTask(wire.Result):
    """A server's answer to a call that has become a task."""

    result_type: Literal["task"] = "task"
    task_id: str
    poll_interval_ms: float | None = None


class TaskState(wire.Result):
    """The state of a task."""

    status: Literal["working", "input_required", "completed", "failed", "cancelled"]
    status_message: str | None = None
    poll_interval_ms: float | None = None
    input_requests: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    error: wire.ErrorData | None = None


class _Get(wire.Request[TaskParams, Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    name_param = "taskId"


class _Update(wire.Request[UpdateParams, Literal["tasks/update"]]):
    method: Literal["tasks/update"] = "tasks/update"
    name_param = "taskId"


class _Cancel(wire.Request[TaskParams, Literal["tasks/cancel"]]):
    method: Literal["tasks/cancel"] = "tasks/cancel"
    name_param = "taskId"


_INPUT: TypeAdapter[Any] = TypeAdapter(wire.InputRequest)


class TaskSupport(ClientExtension):
    """Declares the extension `EXTENSION`, so that a server may answer a call with a task."""

    identifier = EXTENSION

    def claims(self) -> Sequence[ResultClaim[Any]]:
        return (ResultClaim(result_type="task", model=CreatedTask, resolve=_unresolved),)


async def _unresolved(created: CreatedTask, context: Any) -> NoReturn:
    raise NotImplementedError("a task is not resolved by the SDK. Follow it with `RemoteTask`.")


class RemoteTask:
    """A task on a server. The call that started it waits for its result."""

    def __init__(self, id: str, connection: ServerConnection, secrets: Secrets, answer: Answer) -> None:
        self._id = id
        self._connection = connection
        self._secrets = secrets
        self._answer = answer
        self._answered: dict[str, Any] = {}
        """The requests for input that were answered, by key. A request that has changed is answered again."""
        self._unsent: dict[str, Any] = {}
        """The answers that the server has not confirmed yet, by key."""
        self._asked = 0
        self._said = ""

    async def follow(self, context: ToolContext) -> wire.CallToolResult:
        """Wait until the task is over, and return its result. The timeouts of the call are paused during the wait.

        The task's status messages become the call's progress, and its requests for input are answered. If the call is
        cancelled, the input can't be given, or the server refuses a request, the task is cancelled too, unless the run continues
        later or in a different process.

        Raises `ServerLost` if the server can't be reached any more. Raises `MCPError` if the task failed, was cancelled or
        has no valid result, if its input can't be given, or if the server refuses a request.
        """
        attempt = attempt_of(context)
        with contextlib.nullcontext() if attempt is None else paused_timeouts(attempt):
            while True:
                try:
                    state = await self._state()
                    if state.status in ("completed", "failed", "cancelled"):
                        break
                    await self._report(state.status_message or "", context)
                    if not await self._answer_all(state.input_requests or {}, context):
                        await asyncio.sleep(_seconds(state.poll_interval_ms))
                except (asyncio.CancelledError, MCPError):
                    # If this process no longer records the run, the resumed call goes on with the task.
                    if attempt is None or not attempt.run.log.closed:
                        await shielded(self._cancel())
                    raise
        return self._result_of(state)

    async def _state(self) -> TaskState:
        """Request the state. A server that can't be reached is asked again, with growing waits.

        Raises `ServerLost` after too many failures, and `MCPError` if the server refuses.
        """
        lost = 0
        while True:
            try:
                return await self._send(_Get(params=TaskParams(task_id=self._id)), TaskState)
            except (ServerLost, ServerUnavailable, TimeoutError) as error:
                if lost == MAX_LOST:
                    raise ServerLost(str(error) or "it does not answer") from None
                await asyncio.sleep(min(FIRST_WAIT * 2**lost, LONGEST_WAIT))
                lost += 1

    async def _send(self, request: Any, kind: Any) -> Any:
        async def send(client: Client) -> Any:
            return await client.session.send_request(request, kind)

        async with asyncio.timeout(REQUEST_SECONDS):
            return await self._connection.request(send)

    async def _report(self, message: str, context: ToolContext) -> None:
        if message and message != self._said:
            self._said = message
            await context.report_progress(self._secrets.hide(message))

    async def _answer_all(self, asked: Mapping[str, Any], context: ToolContext) -> bool:
        """Answer the requests for input that are new. Returns whether the server confirmed new answers.

        Answers that the server did not confirm are sent again the next time, if the task still asks for them; the person is
        not asked again. Raises `MCPError` if the task asks too often, if a request is invalid or can't be answered, or if the
        server refuses the answers.
        """
        for key, each in asked.items():
            if self._answered.get(key) != each:
                self._asked += 1
                if self._asked > MAX_ASKED:
                    raise MCPError(
                        wire.INTERNAL_ERROR, f"it asked more than {MAX_ASKED} times within one task"
                    )
                answer = await self._answer(context, _input_of(each))
                self._unsent[key] = answer.model_dump(by_alias=True, mode="json", exclude_none=True)
                self._answered[key] = each
        responses = {key: each for key, each in self._unsent.items() if key in asked}
        if not responses:
            return False
        try:
            given = UpdateParams(task_id=self._id, input_responses=responses)
            await self._send(_Update(params=given), wire.EmptyResult)
        except (ServerLost, ServerUnavailable, TimeoutError):
            return False
        self._unsent.clear()
        return True

    def _result_of(self, state: TaskState) -> wire.CallToolResult:
        """Return the result of a task that is over. Raises `MCPError` if it has none, or an invalid one."""
        if state.status == "completed":
            try:
                return wire.CallToolResult.model_validate(state.result or {}, by_name=False)
            except ValidationError:
                raise MCPError(wire.INTERNAL_ERROR, "the result of its task is not valid MCP") from None
        why = f"the task was {state.status}" if state.error is None else state.error.message
        raise MCPError(wire.INTERNAL_ERROR, self._secrets.hide(why))

    async def _cancel(self) -> None:
        with contextlib.suppress(ServerLost, ServerUnavailable, MCPError, ValidationError, TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await self._send(_Cancel(params=TaskParams(task_id=self._id)), wire.EmptyResult)


def _seconds(milliseconds: float | None) -> float:
    """Return the seconds until the next request: the server's suggestion, or the default, within the limits."""
    suggested = _POLL_MS if milliseconds is None else milliseconds
    return min(max(suggested / 1000, SHORTEST_POLL), LONGEST_POLL)


def _input_of(request: Any) -> Any:
    """Parse a request for input. Raises `MCPError` if it is invalid."""
    try:
        return _INPUT.validate_python(request, by_name=False)
    except ValidationError:
        raise MCPError(wire.INVALID_PARAMS, "its request for input is not valid MCP") from None
