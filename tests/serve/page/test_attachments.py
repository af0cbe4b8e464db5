"""Tests of attachments on the page, in a real browser: pasted, dropped, chosen, removed, sent and shown."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from handrail import Adapter, Attachment, Prompt, ScriptedModel
from handrail.messages import ModelRequest, UserMessage
from handrail.models.media import attachment_of, attachment_with
from handrail.models.scripted import Reply
from handrail.run.record.log import attached_to
from handrail.serve.sources import PromptSource
from support.browsers import PATIENCE, browser
from support.served import serving

pytestmark = pytest.mark.once
__all__ = ["browser"]

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
)
"""A picture with one pixel, which a browser can decode."""

TRAP = b"""<svg xmlns="http://www.w3.org/2000/svg" onload="top.document.title='caught'">
<script>top.document.title = 'caught'</script><circle r="9"/></svg>"""
"""A picture with scripts."""

HAND_OVER = """(target, {event, files, text}) => {
  const data = new DataTransfer();
  for (const [name, type, bytes] of files) {
    data.items.add(new File([Uint8Array.from(atob(bytes), (char) => char.charCodeAt(0))], name, { type }));
  }
  if (text) data.setData("text/plain", text);
  const init = { bubbles: true, cancelable: true };
  const given = event === "paste"
    ? new ClipboardEvent(event, { ...init, clipboardData: data })
    : new DragEvent(event, { ...init, dataTransfer: data });
  return target.dispatchEvent(given);
}"""


@pytest.fixture
def model() -> ScriptedModel:
    made = [
        Attachment(PNG, "cat.png"),
        attachment_of("m", base64.b64encode(bytes(4800)).decode(), "audio/L16"),
    ]
    traps = [attachment_with("m", TRAP, kind) for kind in ("image/svg+xml", "image/png", "text/html")]
    drawn = {"Draw a cat": made, "Draw a trap": traps}

    def answer(request: ModelRequest) -> Reply:
        said = request.messages[-1]
        pictures = drawn.get(said.text) if isinstance(said, UserMessage) else None
        return Reply("Look:", attachments=pictures) if pictures else Reply("I see it.")

    return ScriptedModel(answer)


@pytest.fixture
def page(browser: Browser, tmp_path: Path, model: ScriptedModel) -> Iterator[Page]:
    with serving(tmp_path, source=PromptSource(Prompt("p", "x"), Adapter(model))) as server:
        context = browser.new_context(viewport={"width": 1100, "height": 760}, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE)
        server.sign_in(context)
        page = context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error.stack)))
        page.goto(server.url)
        yield page
        context.close()
        assert wrong == []


def hand_over(page: Page, event: str, *names: str, text: str = "") -> bool:
    """Paste or drop pictures with these names, and a text. Return whether the browser would handle the event too."""
    files = [[name, "image/png", base64.b64encode(PNG).decode()] for name in names]
    target = page.get_by_label("Message", exact=True)
    return target.evaluate(HAND_OVER, {"event": event, "files": files, "text": text})


@pytest.mark.parametrize("event", ["paste", "drop"])
def test_a_picture_is_pasted_or_dropped(page: Page, model: ScriptedModel, event: str):
    """A picture that is pasted or dropped is listed, sent with the message, and shown, even after a reload."""
    waiting = page.get_by_role("list", name="Files to send").get_by_role("listitem")
    assert not hand_over(page, event, "cat.png")
    expect(waiting).to_contain_text(f"cat.png {len(PNG)} bytes")
    expect(waiting.locator("img")).to_have_attribute("src", re.compile("^data:image/png"))
    page.get_by_label("Message", exact=True).fill("What is this?")
    page.keyboard.press("Enter")
    expect(page.get_by_text("I see it.")).to_be_visible()
    expect(waiting).to_have_count(0)
    (sent,) = attached_to(model.requests[0].messages)
    assert (sent.name, sent.media_type, sent.content) == ("cat.png", "image/png", PNG)
    for _ in range(2):
        picture = page.get_by_role("img", name="cat.png")
        expect(picture).to_be_visible()
        assert picture.evaluate("async (img) => (await img.decode(), img.naturalWidth)") == 1
        page.reload()


def test_pictures_add_up_and_can_be_removed(page: Page, model: ScriptedModel):
    """Pasted, dropped and chosen pictures are sent together, except for one that was removed.

    They can be sent without any text.
    """
    hand_over(page, "paste", "a.png", "b.png")
    hand_over(page, "drop", "c.png")
    page.get_by_label("Attach files").set_input_files(
        {"name": "d.png", "mimeType": "image/png", "buffer": PNG}
    )
    waiting = page.get_by_role("list", name="Files to send").get_by_role("listitem")
    expect(waiting).to_have_count(4)
    page.get_by_role("button", name="Remove b.png").click()
    expect(waiting).to_have_count(3)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("I see it.")).to_be_visible()
    assert [each.name for each in attached_to(model.requests[0].messages)] == ["a.png", "c.png", "d.png"]


def test_pasted_text_is_left_to_the_browser(page: Page):
    """The browser itself handles text that is pasted, and nothing is attached."""
    assert hand_over(page, "paste", text="hello")
    expect(page.get_by_role("list", name="Files to send")).to_have_count(0)


def test_what_a_model_makes_is_shown(page: Page, model: ScriptedModel):
    """A picture that the model makes is shown below its text, and a sound can be played, even after a reload."""
    page.get_by_label("Message", exact=True).fill("Draw a cat")
    page.keyboard.press("Enter")
    for _ in range(2):
        expect(page.get_by_text("Look:")).to_be_visible()
        picture = page.get_by_role("img", name="cat.png")
        expect(picture).to_be_visible()
        assert picture.evaluate("async (img) => (await img.decode(), img.naturalWidth)") == 1
        player = page.get_by_label("audio.wav", exact=True)
        expect(player).to_be_visible()
        expect(player).to_have_js_property("duration", 0.1)
        page.reload()


def test_scripts_in_what_a_model_makes_do_not_run(page: Page):
    """A picture with scripts, or a page that claims to be a picture, is only a link to a file, which is downloaded."""
    page.get_by_label("Message", exact=True).fill("Draw a trap")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Look:")).to_be_visible()
    for name in ("image.svg", "image.png", "text.html"):
        link = page.get_by_role("button", name=f"{name} ({len(TRAP)} bytes)")
        expect(link).to_be_visible()
        with page.expect_download() as download:
            link.click()
        assert download.value.path().read_bytes() == TRAP
    expect(page.get_by_role("list", name="Attachments").get_by_role("img")).to_have_count(0)
    assert "caught" not in page.title()
