"""`Tasks`: recorded calls as tasks of MCP (SEP-2663), for clients that declare the extension.

A call that takes longer than `TASK_AFTER` seconds, and asks nothing in that time, becomes a task: the client gets its
id, and requests its state, answers its questions and cancels it by that id. The call is recorded in the journal, so a
task survives a restart of the server. If the process that executed a task has ended, the next request for its state
resumes the call, unless the call waits for an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import mcp_types as wire
from mcp.server.mcpserver.server import require_client_extension
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from handrail import runs
from handrail.errors import RunBusy
from handrail.journal.records import OVER, RunRow
from handrail.mcp.calls import CallRefused, CallUnknown, LiveCall
from handrail.mcp.contents import content_of
from handrail.mcp.forms import can_ask, key_of, principal_of
from handrail.question import Question
from handrail.run.record.begin import decode_outcome
from handrail.run.record.parking import is_due
from handrail.tools import Tool
from mcp import MCPError

if TYPE_CHECKING:
    from handrail.mcp.server import ToolServer

EXTENSION = "io.modelcontextprotocol/tasks"
TASK = "mcp.task"
"""The capability of a tool whose calls are tasks from the start, for clients that support tasks."""
TASK_REQUIRED = "mcp.task.required"
"""The capability of a tool that can be called only by clients that support tasks."""
TASK_AFTER = 1.0
"""Seconds after which a call of a tool that has neither `TASK` nor `TASK_REQUIRED` becomes a task."""
TASK_SECONDS = 30 * 24 * 3600
"""The lifetime of a task in seconds, as reported to clients."""
_POLL_MS = 500


class TaskParams(wire.RequestParams):
    """The params of `tasks/get` and `tasks/cancel`."""

    task_id: str


class UpdateParams(TaskParams):
    """The params of `tasks/update`: responses to the task's open questions."""

    input_responses: dict[str, Any] | None = None


class Tasks:
    """The methods of the extension on a server whose calls are recorded."""

    def __init__(self, served: ToolServer) -> None:
        self._served = served
        self._calls = served.calls
        add = served.server.add_request_handler
        add("tasks/get", TaskParams, self._get)
        add("tasks/update", UpdateParams, self._update)
        add("tasks/cancel", TaskParams, self._cancel)
        served.server.extensions[EXTENSION] = {}

    def check(self, request: Any, tool: Tool[Any, Any]) -> None:
        """Raise `MCPError` if the tool has the capability `TASK_REQUIRED` and the client does not support tasks."""
        if TASK_REQUIRED in tool.capabilities and not has_tasks(request):
            require_client_extension(request, EXTENSION)

    async def consider(self, request: Any, call: LiveCall, tool: Tool[Any, Any]) -> dict[str, Any] | None:
        """Turn a call into a task, and return the task. Returns None if the client does not support tasks, or the call has ended.

        If the tool has neither of the capabilities `TASK` and `TASK_REQUIRED`, this waits for `TASK_AFTER` seconds first. It then
        returns None too if the call has asked a question meanwhile.
        """
        if not has_tasks(request):
            return None
        if not {TASK, TASK_REQUIRED} & tool.capabilities:
            waiting = asyncio.ensure_future(call.wait())
            done, _ = await asyncio.wait([waiting], timeout=TASK_AFTER)
            if done:
                return None
            waiting.cancel()
        await call.recorded()
        if call.is_over and not call.is_parked:
            return None
        call.report = None  # the request for which progress was reported ends here
        row, _ = await self._calls.row(call.run_id, call.principal)
        return {"resultType": "task", **_task(row, "working")}

    # The methods.

    async def _get(self, request: Any, params: TaskParams) -> dict[str, Any]:
        principal = self._check(request, params)
        return await self._state(request, params.task_id, principal)

    async def _state(self, request: Any, task_id: str, principal: str) -> dict[str, Any]:
        row, message = await self._find(task_id, principal)
        call = self._calls.find(task_id, principal)
        waits = row.status == "parked" and row.questions and not self._is_due(row)
        if call is None and row.status not in OVER and not waits:  # it can continue, or its process has ended
            call = await self._resume(request, task_id, principal)
            row, message = await self._find(task_id, principal)
        if row.status in OVER:
            if call is not None and row.status != "cancelled":  # which another process may have noted
                await call.over()
            return await self._ended(row, message)
        if call is not None and not call.is_parked:
            asked = dict(call.questions) if call.rests or call.questions else {}
            problems = call.problems
        else:
            asked = (
                {each.id: each for each in await self._questions(task_id)} if row.status == "parked" else {}
            )
            problems = {}
        if not asked:
            note = "" if call is None else call.last_progress
            return {**_task(row, "working"), **({"statusMessage": note} if note else {})}
        ask_of = self._served.ask_of
        forms = {
            key_of(question): _dumped(ask_of(request, task_id, question, problems.get(id, "")))
            for id, question in asked.items()
        }
        return {**_task(row, "input_required"), "inputRequests": forms}

    async def _ended(self, row: RunRow, message: Any) -> dict[str, Any]:
        if row.status == "done":
            result = content_of(await self._calls.result(row, message))
            return {**_task(row, "completed"), "result": _dumped(result)}
        if row.status == "cancelled":
            return _task(row, "cancelled")
        error = {"code": wire.INTERNAL_ERROR, "message": decode_outcome(row).error or "the call failed"}
        return {**_task(row, "failed"), "error": error}

    async def _update(self, request: Any, params: UpdateParams) -> dict[str, Any]:
        principal = self._check(request, params)
        responses: Mapping[str, Any] = params.input_responses or {}
        await self._find(params.task_id, principal)
        call = self._calls.find(params.task_id, principal)
        if call is not None:
            call.answer(responses)
        elif any(key_of(each) in responses for each in await self._questions(params.task_id)):
            await self._calls.answer(params.task_id, principal, responses)
            call = await self._resume(request, params.task_id, principal)
            if call is not None and not await call.wait():
                call.answer(responses)  # some may have been refused; this time the client gets the reason
        return {}

    async def _cancel(self, request: Any, params: TaskParams) -> dict[str, Any]:
        principal = self._check(request, params)
        row, _ = await self._find(params.task_id, principal)
        call = self._calls.find(params.task_id, principal)
        if call is not None:
            call.cancel()
            await call.over()
        if row.status not in OVER:
            await runs.cancel(self._calls.journal_of_tasks(), params.task_id)
        return {}

    # Helpers.

    def _check(self, request: Any, params: TaskParams) -> str:
        """Return the principal who sent a request.

        Raises `MCPError` if the client does not support tasks, or if an HTTP request does not have the id of the task in its
        header `Mcp-Name`.
        """
        if request.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            raise MCPError(wire.METHOD_NOT_FOUND, "Method not found", data=request.method)
        require_client_extension(request, EXTENSION)
        headers: Any = getattr(request.request, "headers", None)
        if headers is not None and headers.get("mcp-name") != params.task_id:
            raise MCPError(
                wire.HEADER_MISMATCH, "the header Mcp-Name must be the id of the task, as in the body"
            )
        return principal_of(request)

    async def _find(self, task_id: str, principal: str) -> tuple[RunRow, Any]:
        try:
            return await self._calls.row(task_id, principal)
        except CallUnknown:
            raise MCPError(wire.INVALID_PARAMS, "there is no such task") from None

    async def _resume(self, request: Any, task_id: str, principal: str) -> LiveCall | None:
        """Resume a task that this process does not execute.

        Returns None if it is over, if a different process executes it, or while the server stops.
        """
        try:
            found = await self._calls.resume(
                task_id, principal=principal, asks=can_ask(request), opens=self._served.can_open(request)
            )
        except (RunBusy, CallRefused):
            return None
        if not isinstance(found, LiveCall):
            return None
        await asyncio.sleep(0)
        return found

    def _is_due(self, row: RunRow) -> bool:
        """Return whether a parked task goes on without an answer, because a question or its deadline has expired."""
        return is_due(row.due_at, self._calls.journal_of_tasks().clock)

    async def _questions(self, task_id: str) -> list[Question]:
        """Return the open questions that the client's user may answer."""
        found = await self._calls.journal_of_tasks().questions.open(task_id)
        return [question for question in found if not question.quorums]


def has_tasks(request: Any) -> bool:
    """Return whether the client supports tasks: it uses protocol version 2026-07-28, and declares the extension for this request."""
    capabilities = request.session.client_capabilities
    declared = None if capabilities is None else capabilities.extensions
    return request.protocol_version in MODERN_PROTOCOL_VERSIONS and bool(declared) and EXTENSION in declared


def _task(row: RunRow, status: str) -> dict[str, Any]:
    began = row.record.began_at
    return {
        "taskId": row.record.id,
        "status": status,
        "createdAt": _time(began),
        "lastUpdatedAt": _time(max(began, row.changed_at)),
        "ttlMs": TASK_SECONDS * 1000,
        "pollIntervalMs": _POLL_MS,
    }


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _dumped(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(by_alias=True, mode="json", exclude_none=True)
    return dumped
