"""The floor: the loop written by hand, with only typed arguments and JSON results.

Over HTTP it uses aiohttp, as Handrail does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel

from peer import Peer, main
from work import PROMPT, SYSTEM, TOOL_DOC, Context, Script

Message = dict[str, Any]
Model = Callable[[list[Message]], Awaitable[Message]]


class Arguments(BaseModel):
    index: int
    label: str


TOOL = {
    "type": "function",
    "function": {"name": "work", "description": TOOL_DOC, "parameters": Arguments.model_json_schema()},
}


async def work(context: Context, arguments: str) -> dict[str, Any]:
    parsed = Arguments.model_validate_json(arguments)
    return context.work(parsed.index, parsed.label)


class Floor(Peer):
    name = "floor"
    dists = ("pydantic", "aiohttp")

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.client: Any = None

    def build(self, script: Script) -> Model:
        async def stub(messages: list[Message]) -> Message:
            turn = await script.aturn(messages[-1]["content"])
            message: Message = {"role": "assistant", "content": turn.text}
            if turn.calls:
                message["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.args_json},
                    }
                    for call in turn.calls
                ]
            return message

        async def post(messages: list[Message]) -> Message:
            if self.client is None:
                import aiohttp

                self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            body = {"model": script.model_name, "messages": messages, "tools": [TOOL]}
            async with self.client.post(self.base_url + "/chat/completions", json=body) as response:
                response.raise_for_status()
                return (await response.json())["choices"][0]["message"]

        return post if self.http else stub

    async def run(self, agent: Model, context: Context) -> str:
        tools = {"work": work}
        messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
        while True:
            message = await agent(messages)
            messages.append(message)
            if not message.get("tool_calls"):
                return message["content"]
            for call in message["tool_calls"]:
                asked = call["function"]
                result = await tools[asked["name"]](context, asked["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()


if __name__ == "__main__":
    main(Floor)
