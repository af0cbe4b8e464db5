"""The client's side of MCP's tasks extension, which the SDK's own client does not support."""

import asyncio
from typing import Any

import mcp_types as wire
from mcp.client.extension import ClientExtension
from pydantic import ConfigDict

from handrail.mcp.tasks import EXTENSION


class TasksClient(ClientExtension):
    """Declares that the client supports tasks."""

    identifier = EXTENSION


class TaskSession:
    """Sends the requests of the tasks extension."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        request = wire.Request[Any, str](method=method, params=params)
        found = await self._session.send_request(request, Anything)
        return found.model_dump(by_alias=True)

    async def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        return await self.send("tools/call", name=name, arguments=arguments)

    async def get(self, task: str, status: str) -> dict[str, Any]:
        """Poll a task until it has this status, and return it. Raises `AssertionError` if it ends with another status."""
        while True:
            found = await self.send("tasks/get", taskId=task)
            if found["status"] == status:
                return found
            assert found["status"] in ("working", "input_required"), found
            await asyncio.sleep(0)


class Anything(wire.Result):
    """A result with any fields."""

    model_config = ConfigDict(extra="allow")
