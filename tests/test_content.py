"""Attachments are made from bytes, paths and addresses, identified by a digest, and recorded as references."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Attachment, ScriptedModel, ToolCall, ToolContext, ToolResult, open_gate, tool
from handrail.content import MAX_BYTES, attachments_of, guess_type
from handrail.errors import DefinitionError, ToolDefinitionError, ToolValidationError
from handrail.messages import CallAnswered, Message, ToolMessage, UserMessage
from handrail.prompt import Prompt
from handrail.run.adapter import Adapter
from handrail.tools import Tool

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
WAV = b"RIFF\x24\0\0\0WAVEfmt "


@pytest.mark.parametrize(
    ("content", "name", "media_type", "kind"),
    [
        (PNG, "", "image/png", "image"),
        (PNG, "photo.jpg", "image/png", "image"),  # providers refuse a type that the bytes contradict
        (b"\xff\xd8\xff\xe0", "", "image/jpeg", "image"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "", "image/webp", "image"),
        (WAV, "", "audio/wav", "audio"),
        (b"ID3\x04", "", "audio/mpeg", "audio"),
        (b"%PDF-1.7", "", "application/pdf", "document"),
        (
            b"<svg/>",
            "a.svg",
            "image/svg+xml",
            "file",
        ),  # no provider takes it as a picture, and it can run scripts
        (b"a,b", "a.csv", "text/csv", "file"),
        ("héllo".encode(), "", "text/plain", "file"),
        (b"\xff\0", "", "application/octet-stream", "file"),
        (b"", "", "application/octet-stream", "file"),
    ],
)
def test_the_media_type_is_recognised(content: bytes, name: str, media_type: str, kind: str) -> None:
    """The media type is recognised from the first bytes, then from the name, then from whether the bytes are text.

    An attachment always has a name, and its digest is the SHA-256 of its bytes.
    """
    made = Attachment(content, name)
    assert (made.media_type, made.kind) == (media_type, kind)
    assert made.name
    assert made.size == len(content)
    assert made.digest == hashlib.sha256(content).hexdigest()


def test_a_given_media_type_counts() -> None:
    """A media type that the caller gives is used, in its usual spelling. Text that is not a media type is refused."""
    assert Attachment(b"x", media_type="Image/JPG; q=1").media_type == "image/jpeg"
    with pytest.raises(DefinitionError, match="not a media type"):
        Attachment(b"x", media_type="picture")


def test_an_attachment_is_read_from_a_path(tmp_path: Path) -> None:
    """A file is read when the attachment is made, so later changes to it do not matter. A missing file is refused."""
    file = tmp_path / "plot.png"
    file.write_bytes(PNG)
    made = Attachment(file)
    file.write_bytes(b"changed")
    assert (made.name, made.content) == ("plot.png", PNG)
    with pytest.raises(DefinitionError, match=r"none\.png' can't be read"):
        Attachment(tmp_path / "none.png")


def test_an_address_is_not_fetched() -> None:
    """An attachment with an address has no bytes.

    Its name and type come from the address, and reading it raises an error.
    """
    made = Attachment("https://example.org/a%20b/plot.png?x=1")
    assert (made.name, made.media_type, made.size) == ("plot.png", "image/png", 0)
    assert made.digest == Attachment(made.address).digest
    with pytest.raises(ToolValidationError, match=r"they are at https://example\.org"):
        made.read()


@pytest.mark.parametrize(
    "address",
    ["https://", "https://me:pass@example.org/a.png", "https://a b/", "http://x/\n", "https://[x/a.png"],
)
def test_an_address_that_could_leak_or_break_is_refused(address: str) -> None:
    """An address with a missing or invalid host, a password, a space or a control character is refused."""
    with pytest.raises(DefinitionError, match="not an address"):
        Attachment(address)


@pytest.mark.parametrize(
    "address", ["data:image/png;base64,AAAA", "s3://bucket/a.png", "FILE:///etc/hosts", "gs://a/b"]
)
def test_an_address_that_no_provider_fetches_is_refused(address: str) -> None:
    """A text with a scheme other than http or https is refused, and is not read as a path."""
    with pytest.raises(DefinitionError, match="is not an http or https address"):
        Attachment(address)


def test_the_scheme_of_an_address_may_be_in_capitals() -> None:
    """An address whose scheme is in capitals is recognised too."""
    assert Attachment("HTTPS://example.org/a.png").address == "HTTPS://example.org/a.png"


def test_a_path_that_can_not_exist_is_refused() -> None:
    """A path with a null character is refused like one that does not exist."""
    with pytest.raises(DefinitionError, match=r"can't be read: .*embedded null"):
        Attachment("a\0b.png")


def test_a_large_attachment_is_refused(tmp_path: Path) -> None:
    """Bytes and files over the limit are refused. A file's size is checked before the file is read."""
    with pytest.raises(DefinitionError, match="at most"):
        Attachment(bytes(MAX_BYTES + 1), "big.bin")
    file = tmp_path / "big.bin"
    with file.open("wb") as sparse:
        sparse.truncate(MAX_BYTES * 1000)
    with pytest.raises(DefinitionError, match=r"'big\.bin' has"):
        Attachment(file)


@given(st.binary(max_size=40), st.text(max_size=300))
def test_a_reference_has_everything_but_the_bytes(content: bytes, name: str) -> None:
    """However an attachment is encoded, its bytes are left out. Loading the same bytes restores it. Other bytes are refused.

    Its name is printable and has at most 255 characters, and its filename has no slashes.
    """
    made = Attachment(content, name)
    assert made.name.isprintable()
    assert made.filename
    assert not set("/\\") & set(made.filename)
    assert len(made.name) <= 255
    for message in (
        UserMessage("x", attachments=(made,)),
        ToolMessage((CallAnswered("1", "t", "x", attachments=(made,)),)),
    ):
        for codec in (msgspec.json, msgspec.msgpack):
            again: Any = codec.decode(codec.encode(message), type=Message)
            assert again == message
            (read,) = again.attachments if isinstance(again, UserMessage) else again.results[0].attachments
            assert not read.is_here
            with pytest.raises(ToolValidationError, match="only a reference"):
                read.read()
            read.load(content)
            assert read.content == content
            with pytest.raises(DefinitionError, match="not the bytes"):
                read.load(content + b"x")


def test_an_address_takes_no_bytes() -> None:
    """Bytes can't be loaded into an attachment that is an address, and the error says so."""
    address = "https://a.example/plot.png"
    for content in (b"x", address.encode()):
        with pytest.raises(
            DefinitionError, match=rf"'plot.png' is at the address {address}, so no bytes can be"
        ):
            Attachment(address).load(content)


@given(st.binary(max_size=20), st.text(max_size=20))
def test_a_guess_is_always_a_media_type(content: bytes, name: str) -> None:
    """Whatever the bytes and the name are, the guessed media type is valid and is accepted as `media_type`."""
    guess = guess_type(content, name)
    assert Attachment(content, name, media_type=guess).media_type == guess


def test_what_is_attached_is_checked() -> None:
    """A single attachment, path, text or bytes in place of a list is refused, and so are bytes in a list. The error says what to pass."""
    wrong: Any
    for wrong in (Attachment(b""), b"", "a.png", Path("a.png")):
        with pytest.raises(DefinitionError, match="Pass a list"):
            attachments_of(wrong)
    wrong = [b"bytes"]
    with pytest.raises(DefinitionError, match="Attachment\\(bytes, name\\)"):
        attachments_of(wrong)


# --- tools ---


@dataclass
class Nothing:
    pass


@tool(effect="read")
def plot() -> Attachment:
    """Draw a plot."""
    return Attachment(PNG, "plot.png")


@tool(effect="read")
def pages() -> list[Attachment | str]:
    """Render pages."""
    return ["Two pages:", Attachment(PNG, "1.png"), Attachment(PNG, "2.png")]


@tool(effect="read")
def anything() -> Any:
    """Return anything."""
    return [Attachment(PNG, "a.png"), 3]


async def shoot(params: Nothing, *, context: ToolContext) -> ToolResult[int]:
    return ToolResult.ok(3, "Here.", attachments=[Attachment(PNG, "shot.png")])


shot: Tool[Any, Any] = Tool("shot", "Take a screenshot.", shoot, effect="read")


@pytest.mark.parametrize(
    ("offered", "text", "names"),
    [
        (plot, "[image plot.png: image/png, 28 bytes]", ["plot.png"]),
        (
            pages,
            "Two pages:\n[image 1.png: image/png, 28 bytes]\n[image 2.png: image/png, 28 bytes]",
            ["1.png", "2.png"],
        ),
        (anything, "[image a.png: image/png, 28 bytes]\n3", ["a.png"]),
        (shot, "Here.\n3", ["shot.png"]),
    ],
)
async def test_a_tool_returns_attachments(offered: Tool[Any, Any], text: str, names: list[str]) -> None:
    """The model gets the attachments that a handler returns by themselves, in a list, or in a result."""
    script = ScriptedModel([ToolCall(offered.name, {}), "ok"])
    await Adapter(script).evaluate(Prompt("p", "x", tools=[offered]), "go")
    (result,) = script.requests[-1].messages[-1].results  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]  # the last message is a tool message
    assert result.text == text
    assert [each.name for each in result.attachments] == names
    assert all(each.content == PNG for each in result.attachments)


async def test_a_caller_gets_the_attachment_itself() -> None:
    """Code that calls a tool gets its value, which is the attachment."""
    result = await open_gate([plot]).invoke("plot", {})
    assert result.unwrap().content == PNG


def test_a_tool_takes_no_attachment_as_an_argument() -> None:
    """A tool whose params contain an attachment is refused.

    A model can't write bytes, and must not be able to name other people's bytes by their digest.
    """

    @dataclass
    class Given:
        files: list[Attachment]

    async def handler(params: Given, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok()

    with pytest.raises(ToolDefinitionError, match="params contain an Attachment"):
        Tool("look", "Look.", handler, params=Given)
