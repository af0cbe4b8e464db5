"""Tests of messages that come together with answers over AG-UI: they are told to the model, once, and are never dropped."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from handrail import ScriptedModel
from handrail.messages import Message, ModelRequest, ToolMessage, UserMessage
from handrail.serve import Limits
from support.serving import Client, play, said_by, serving, source

pytestmark = pytest.mark.once

ASKED = {"id": "u1", "role": "user", "content": "call order"}
VALUE = {"seats": 2, "name": "Ann"}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()


async def send(client: Client, run: str, messages: list[Any], **more: Any) -> list[dict[str, Any]]:
    sent = {"threadId": "a", "runId": run, "messages": messages, "tools": [], "context": [], "state": {},
            "forwardedProps": {}, **more}  # fmt: skip
    async with client.stream("POST", "/agent", sent) as stream:
        return await stream.all()


async def asked(client: Client) -> tuple[list[Any], dict[str, Any]]:
    """Ask a person, and return the client's messages and the answer to the interrupt."""
    events = await send(client, "r1", [ASKED])
    [interrupt] = events[-1]["outcome"]["interrupts"]
    call = next(event for event in events if event["type"] == "TOOL_CALL_START")
    called = {"id": call["toolCallId"], "type": "function", "function": {"name": "order", "arguments": "{}"}}
    messages = [ASKED, {"id": "m1", "role": "assistant", "toolCalls": [called]}]
    return messages, {"interruptId": interrupt["id"], "status": "resolved", "payload": VALUE}


def user(id: str, content: Any) -> dict[str, Any]:
    return {"id": id, "role": "user", "content": content}


async def users(client: Client) -> list[tuple[str, Any]]:
    """Return the ids and the contents of the users' messages in the thread."""
    seen = await client.idle("a")
    return [(each["id"], each["content"]) for each in seen["messages"] if each["role"] == "user"]


async def test_a_message_with_an_answer_is_told_with_its_files(tmp_path: Path):
    """The model gets the results first. The thread shows the message under the client's id."""
    requests: list[list[Message]] = []

    def remembered(request: ModelRequest) -> Any:
        requests.append(list(request.messages))
        return play(request)

    picture = {"type": "image", "source": {"type": "data", "value": PNG, "mimeType": "image/png"}}
    async with serving(tmp_path, source(model=ScriptedModel(remembered))) as client:
        messages, answer = await asked(client)
        messages.append(user("u2", [{"type": "text", "text": "and be quick"}, picture]))
        events = await send(client, "r2", messages, resume=[answer])
        assert events[-1]["outcome"]["type"] == "success"
        *_, results, told = requests[-1]
        assert isinstance(results, ToolMessage)
        assert isinstance(told, UserMessage)
        assert (told.text, [each.content for each in told.attachments]) == (
            "and be quick",
            [base64.b64decode(PNG)],
        )
        seen = await client.idle("a")
        assert said_by(seen["messages"]) == ["", "You said: and be quick"]
        assert [id for id, _ in await users(client)] == ["u1", "u2"]
        [shown] = [part for part in (await users(client))[1][1] if part["type"] != "text"]
        found = await client.ask("GET", f"/threads/a/{shown['source']['value']}")
        assert (found.status, found.body) == (200, base64.b64decode(PNG))


async def test_the_same_request_again_says_nothing_twice(tmp_path: Path):
    """A client that did not get the response sends its request again, also after the run has ended."""
    async with serving(tmp_path) as client:
        messages, answer = await asked(client)
        for more in ([user("u2", "one")], [user("u2", "one")], [user("u2", "one"), user("u3", "two")]):
            await send(client, f"r{len(more)}", [*messages, *more], resume=[answer])
        # the third request has a message of its own, which the ended run can't get any more
        assert await users(client) == [("u1", "call order"), ("u2", "one"), ("u3", "two")]
        seen = await client.idle("a")
        assert said_by(seen["messages"]) == ["", "You said: one", "You said: two"]


@pytest.mark.parametrize("messages", [[ASKED], []])
async def test_a_client_that_sends_no_new_message_says_nothing(tmp_path: Path, messages: list[Any]):
    """A client need not send the whole conversation. A message that it repeats is not a new one."""
    async with serving(tmp_path) as client:
        _, answer = await asked(client)
        await send(client, "r2", messages, resume=[answer])
        assert await users(client) == [("u1", "call order")]
        assert said_by((await client.idle("a"))["messages"]) == ["", "Done: 2 for Ann"]


async def test_a_message_that_is_too_long_refuses_the_answer_too(tmp_path: Path):
    """Neither is accepted, so the client can send both again."""
    async with serving(tmp_path, limits=Limits(message_chars=10)) as client:
        messages, answer = await asked(client)
        sent = {"threadId": "a", "runId": "r2", "messages": [*messages, user("u2", "x" * 11)], "tools": [],
                "context": [], "state": {}, "forwardedProps": {}, "resume": [answer]}  # fmt: skip
        refused = await client.ask("POST", "/agent", sent)
        assert (refused.status, refused.kind) == (413, "MessageTooLong")
        await send(client, "r3", [*messages, user("u2", "short")], resume=[answer])
        assert (await users(client))[1] == ("u2", "short")
