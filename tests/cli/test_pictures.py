"""Pictures in the terminal, tested on the bytes that are written."""

from __future__ import annotations

import base64
import io
import os
import re
import sys

import pytest

from handrail import Adapter, Agent, Attachment, Prompt, ScriptedModel, ToolCall, tool
from handrail.cli.screens import LiveView, pictures_in, protocol_of
from handrail.clock import SYSTEM_CLOCK
from handrail.models.scripted import Reply

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40
JPEG = b"\xff\xd8\xff" + bytes(range(256))
SHOT = Attachment(PNG, "shot;\x1b.png")
SKETCH = Attachment(PNG[:300], "sketch.png")
PHOTO = Attachment(JPEG, "photo.jpg")
NOTES = Attachment(b"a,b", "notes.csv")
LIE = Attachment(b"\x1b]0;owned\x07", "lie.png", media_type="image/png")

KITTY = re.compile(r"\x1b_G([^;\x1b]*);([^\x1b]*)\x1b\\")
ITERM = re.compile(r"\x1b\]1337;File=([^:]*):([^\x07]*)\x07")


@pytest.mark.parametrize(
    ("variables", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM_PROGRAM": "iTerm.app"}, "iterm"),
        ({"TERM_PROGRAM": "WezTerm", "KITTY_WINDOW_ID": "1"}, "iterm"),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, "iterm"),
        ({"TERM": "xterm-256color"}, None),
        ({"TERM_PROGRAM": "Apple_Terminal"}, None),
        ({"TERM_PROGRAM": "iTerm.app", "TMUX": "/tmp/tmux"}, None),
        ({"TERM": "screen.xterm-kitty", "KITTY_WINDOW_ID": "1"}, None),
        ({}, None),
    ],
)
def test_the_terminal_says_what_it_can_draw(variables: dict[str, str], protocol: str | None):
    """The protocol for pictures is read from environment variables. Inside a terminal multiplexer, there is none."""
    assert protocol_of(variables) == protocol


def test_kitty_gets_a_picture_in_chunks():
    """Kitty gets a PNG in chunks of at most 4096 characters of data. The first describes the picture, and the last has `m=0`."""
    (picture,) = pictures_in([NOTES, PHOTO, SHOT, LIE], "kitty")
    chunks = KITTY.findall(picture.sequence)
    assert KITTY.sub("", picture.sequence) == ""
    assert [keys for keys, _ in chunks] == ["a=T,f=100,q=2,r=16,m=1", "m=1", "m=1", "m=0"]
    assert all(len(data) <= 4096 for _, data in chunks)
    assert base64.b64decode("".join(data for _, data in chunks)) == PNG


def test_iterm_gets_each_picture_in_one_sequence():
    """iTerm2 gets a picture with its name and size. The name can't end the sequence, because it is encoded too."""
    photo, shot = pictures_in([PHOTO, NOTES, SHOT, LIE], "iterm")
    for picture, content, name in ((photo, JPEG, "photo.jpg"), (shot, PNG, "shot;_.png")):
        ((keys, data),) = ITERM.findall(picture.sequence)
        assert ITERM.sub("", picture.sequence) == ""
        assert base64.b64decode(data) == content
        found = dict(each.split("=", 1) for each in keys.split(";"))
        assert base64.b64decode(found.pop("name")).decode() == name
        assert found == {
            "size": str(len(content)),
            "height": "16",
            "preserveAspectRatio": "1",
            "inline": "1",
        }


def test_nothing_else_is_drawn():
    """A picture that is too large or has only an address is not drawn. Without a protocol, no picture is."""
    large = Attachment(PNG + bytes(4_000_000), "large.png")
    assert pictures_in([large, Attachment("https://example.org/a.png")], "kitty") == []
    assert pictures_in([SHOT], None) == []


@tool(effect="read")
def shoot() -> Attachment:
    """Take a screenshot."""
    return SHOT


@pytest.mark.parametrize("protocol", ["kitty", None])
@pytest.mark.parametrize("held", [False, True], ids=["shown", "held"])
async def test_a_call_shows_its_picture(monkeypatch: pytest.MonkeyPatch, protocol: str | None, held: bool):
    """A call's line shows the name, size and path of a picture. A terminal that supports pictures draws it below that line.

    While a question is asked, nothing is written; the line and the picture follow later.
    """
    for name in ("TMUX", "STY", "TERM_PROGRAM", "LC_TERMINAL", "KITTY_WINDOW_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", f"xterm-{protocol}" if protocol else "xterm")
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    view = LiveView(SYSTEM_CLOCK)
    run = Adapter(ScriptedModel([ToolCall("shoot", {}), "Done."])).stream(
        Prompt("p", "x", tools=[shoot]), "go"
    )
    with view.begin():
        if held:
            with view.hold():
                before = written.tell()
                async for event in run:
                    view.show(event)
                assert written.tell() == before
        else:
            async for event in run:
                view.show(event)
    text = written.getvalue()
    drawn = "".join(data for _, data in KITTY.findall(text))
    assert base64.b64decode(drawn) == (PNG if protocol else b"")
    assert "shot;_.png (image/png, 10.2 kB)" in text.replace("\n", " ")
    if protocol:
        assert text.index("shot;_.png") < text.index("\x1b_G")
    assert "\x1b.png" not in text
    assert os.sep in text


@pytest.mark.parametrize("protocol", ["kitty", None])
async def test_what_a_model_makes_is_drawn(monkeypatch: pytest.MonkeyPatch, protocol: str | None):
    """A picture that the model made has a line with its name, size and path, after the text before it. It is drawn below, if it can be.

    What a nested run's model made is shown once, with the result of the call.
    """
    for name in ("TMUX", "STY", "TERM_PROGRAM", "LC_TERMINAL", "KITTY_WINDOW_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", f"xterm-{protocol}" if protocol else "xterm")
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    inner = Agent(
        ScriptedModel([Reply("In.", attachments=[SKETCH])]), "x", name="inner", description="Draws."
    )
    model = ScriptedModel([ToolCall("inner", {"message": "go"}), Reply("Look:", attachments=[SHOT])])
    view = LiveView(SYSTEM_CLOCK)
    with view.begin():
        async for event in Agent(model, "x", tools=[inner.as_tool()]).stream("go"):
            view.show(event)
    text = written.getvalue()
    drawn = b"".join(base64.b64decode(data) for data in re.findall(r"\x1b_G[^;\x1b]*;([^\x1b]*)", text))
    assert len(re.findall(r"\x1b_Ga=T", text)) == (2 if protocol else 0)
    assert drawn.startswith(PNG[:8]) is bool(protocol)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\n", " ")
    assert lines.count("sketch.png (image/png") == 1
    assert lines.index("Look:") < lines.index("shot;_.png (image/png, 10.2 kB)")
