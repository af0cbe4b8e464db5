"""Tests for attachments over HTTP: sent with messages, shown to clients as references, and served so that nothing in them runs."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, Attachment, ScriptedModel, ToolCall, tool
from handrail.content import guess_type
from handrail.messages import AssistantMessage, UserMessage
from handrail.models.scripted import Reply
from handrail.prompt import Prompt
from handrail.run.record.log import attached_to
from handrail.serve.agui.message_writer import Known, MessageWriter, OpenRun
from handrail.serve.attachments import SHOWN, response_with
from handrail.serve.limits import Limits
from handrail.serve.sources import PromptSource
from handrail.serve.thread_messages import RunMessage, render
from support.serving import serving

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
PHOTO = Attachment(PNG + b"photo", "photo.png")


@tool(effect="read")
def plot() -> Attachment:
    """Draw a plot."""
    return Attachment(PNG + b"plot", "plot.png")


def served(script: ScriptedModel) -> PromptSource:
    return PromptSource(Prompt("p", "x", tools=[plot]), Adapter(script))


def file(name: str, content: bytes) -> dict[str, str]:
    return {"name": name, "data": base64.b64encode(content).decode()}


async def test_a_message_with_a_picture_and_a_picture_back(tmp_path: Path) -> None:
    """The model gets what a person attached, and clients get references to it and to what the tool returned.

    Only an authenticated client gets the bytes that a reference names. An unknown reference, or one under another thread, gives 404.
    """
    script = ScriptedModel([ToolCall("plot", {}), "done"])
    async with serving(tmp_path, served(script)) as client:
        said = await client.ask(
            "POST", "/threads/t/messages", {"text": "", "attachments": [file("photo.png", PHOTO.content)]}
        )
        assert said.status == 202, said.body
        seen = await client.idle("t")
        assert [each.name for each in attached_to(script.requests[-1].messages)] == ["photo.png", "plot.png"]
        first = next(each for each in seen["messages"] if each["role"] == "user")
        (part,) = first["content"]
        assert part["type"] == "image"
        assert part["source"] == {
            "type": "url",
            "value": f"attachments/{PHOTO.digest}",
            "mimeType": "image/png",
        }
        (call,) = [each for each in _all(seen) if each.get("tool") == "plot" and "attachments" in each]
        (shown,) = call["attachments"]
        assert (shown["name"], shown["kind"]) == ("plot.png", "image")
        got = await client.ask("GET", f"/threads/t/{shown['url']}")
        assert (got.status, got.body, got.headers["content-type"]) == (200, PNG + b"plot", "image/png")
        assert "sandbox" in got.headers["content-security-policy"]
        assert got.headers["cache-control"] == "no-store", "no copy outlives the session"
        for wrong in (f"/threads/other/{shown['url']}", f"/threads/t/attachments/{'0' * 64}"):
            assert (await client.ask("GET", wrong)).status == 404
        assert (
            await client.ask("GET", f"/threads/t/{shown['url']}", headers={"Authorization": "-"})
        ).status == 401


def _all(value: Any) -> list[Any]:
    """Return every object in a JSON value."""
    found: list[Any] = [value] if isinstance(value, dict) else []
    inner: Any = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return found + [each for item in inner for each in _all(item)]


async def test_too_much_is_refused(tmp_path: Path) -> None:
    """The size of a message's attachments, their number (over AG-UI too), and the size of the whole body are limited.

    Data that is not base64 is refused.
    """
    limits = Limits(attachment_bytes=1000, attachments=3, body_bytes=1000)
    async with serving(tmp_path, served(ScriptedModel(["ok"])), limits=limits) as client:
        for files, kind in (
            ([file("a", bytes(600)), file("b", bytes(600))], "AttachmentsTooLarge"),
            ([file("a", bytes(5000))], "BodyTooLarge"),
            ([file("a", b"")] * 4, "TooManyAttachments"),
        ):
            said = await client.ask("POST", "/threads/t/messages", {"text": "x", "attachments": files})
            assert (said.status, said.kind) == (413, kind)
        said = await client.ask(
            "POST", "/threads/t/messages", {"text": "x", "attachments": [{"name": "a", "data": "!"}]}
        )
        assert said.status in (400, 422)
        part = {"type": "image", "source": {"type": "url", "value": "https://host/a.png"}}
        message = {"id": "m", "role": "user", "content": [part] * 4}
        asked = {"threadId": "t", "runId": "r", "messages": [message]}
        body = {**asked, "state": {}, "tools": [], "context": [], "forwardedProps": {}}
        said = await client.ask("POST", "/agent", body)
        assert "TooManyAttachments" in said.body.decode()


@pytest.mark.parametrize(
    "part",
    [
        {
            "type": "image",
            "source": {"type": "data", "value": base64.b64encode(PNG).decode(), "mimeType": "image/png"},
        },
        {
            "type": "image",
            "source": {"type": "url", "value": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"},
        },
    ],
)
async def test_ag_ui_parts_are_attachments(tmp_path: Path, part: dict[str, Any]) -> None:
    """An AG-UI client attaches files as parts of a message's content. An invalid part is refused."""
    script = ScriptedModel(["a picture"])
    message = {"id": "m", "role": "user", "content": [{"type": "text", "text": "what?"}, part]}
    input = {
        "threadId": "t", "runId": "r", "messages": [message], "tools": [], "context": [], "state": {}, "forwardedProps": {}
    }  # fmt: skip
    async with serving(tmp_path, served(script)) as client:
        async with client.stream("POST", "/agent", input) as stream:
            assert stream.status == 200
            await stream.all()
        (found,) = attached_to(script.requests[0].messages)
        assert found.content == PNG
        bad = json.loads(json.dumps(input).replace("iVBOR", "!!!!!"))
        assert (await client.ask("POST", "/agent", {**bad, "threadId": "u"})).status == 422


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (PNG, "inline"),
        (b"%PDF-1.7", "inline"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", "attachment"),
        (b"<html><script>alert(1)</script></html>", "attachment"),
        (b"\0\1", "attachment"),
    ],
)
def test_nothing_that_can_run_is_shown(content: bytes, kind: str) -> None:
    """Content is shown inline only if its bytes show that its type is harmless. Otherwise it is a download.

    Every response is sandboxed.
    """
    response = response_with(content, "d" * 64)
    assert response.headers["content-disposition"].startswith(kind)
    assert response.headers["content-security-policy"] == "default-src 'none'; sandbox"
    expected = guess_type(content) if kind == "inline" else "application/octet-stream"
    assert response.headers["content-type"].partition(";")[0] == expected
    assert "image/svg+xml" not in SHOWN


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_get_what_a_model_made(stream: bool) -> None:
    """A picture that a model made is an activity between the texts of its answer, as it arrives and in the messages later."""
    picture = Attachment(PNG + b"made", "made.png")
    answer = AssistantMessage("AB", attachments=(picture, picture), offsets=(1, 2))
    writer, run = MessageWriter(Known()), OpenRun("r", None, begun=True)
    events = (
        [*writer.text(run, "A"), *writer.attachment(run, picture), *writer.text(run, "B")] if stream else []
    )
    assert not stream or [each["id"] for each in writer.messages(run)] == ["r/1", "r/1/made-1", "r/1/after-1"]
    joined = [each.data for each in writer.so_far(run)]
    events += writer.complete(run, answer)
    told = [(each.data["type"], each.data["messageId"]) for each in events]
    assert told == [
        ("TEXT_MESSAGE_START", "r/1"),
        ("TEXT_MESSAGE_CONTENT", "r/1"),
        ("TEXT_MESSAGE_END", "r/1"),
        ("ACTIVITY_SNAPSHOT", "r/1/made-1"),
        ("TEXT_MESSAGE_START", "r/1/after-1"),
        ("TEXT_MESSAGE_CONTENT", "r/1/after-1"),
        ("TEXT_MESSAGE_END", "r/1/after-1"),
        ("ACTIVITY_SNAPSHOT", "r/1/made-2"),
    ]
    assert not stream or [each["type"] for each in joined] == [kind for kind, _ in told[:6]]
    rendered = render([RunMessage("r", UserMessage("x")), RunMessage("r", answer)])
    assert [(each["id"], each["role"]) for each in rendered[1:]] == [
        ("r/1", "assistant"),
        ("r/1/made-1", "activity"),
        ("r/1/after-1", "assistant"),
        ("r/1/made-2", "activity"),
    ]
    [shown] = {json.dumps(each["content"]) for each in rendered if each["role"] == "activity"}
    assert json.loads(shown)["url"] == f"attachments/{picture.digest}"


async def test_a_client_gets_the_bytes_of_what_a_model_made(tmp_path: Path) -> None:
    """The snapshot of a thread names the picture, and the server has its bytes. An answer without text is a message, too."""
    picture = Attachment(PNG + b"made", "made.png")
    script = ScriptedModel([Reply("", [ToolCall("plot", {})], attachments=[picture]), "done"])
    async with serving(tmp_path, served(script)) as client:
        await client.ask("POST", "/threads/t/messages", {"text": "draw"})
        seen = await client.idle("t")
        roles = [each["role"] for each in seen["messages"]]
        assert roles == ["user", "assistant", "activity", "assistant", "tool", "assistant"]
        made = seen["messages"][2]
        assert made["activityType"] == "handrail.attachment"
        got = await client.ask("GET", f"/threads/t/{made['content']['url']}")
        assert (got.status, got.body) == (200, picture.content)
