"""Tests of the page's timeline in a real browser, under the content security policy."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from serve.page.widgets import Widgets, opened, shown
from support.browsers import browser

__all__ = ["browser", "opened", "shown"]

pytestmark = pytest.mark.once

BEGAN = 1_760_000_000.0
DAY = 86_400.0


def call(tool: str, at: float, seconds: float | None, **more: Any) -> dict[str, Any]:
    found = {"calls": [], "runs": [], "questions": [], "status": "ok", "message": "", **more}
    return {"id": tool, "tool": tool, "at": BEGAN + at, "seconds": seconds, **found}


def turn(number: int, at: float, seconds: float, *calls: dict[str, Any]) -> dict[str, Any]:
    usage = {"input": 1200, "output": 80}
    return {
        "number": number, "at": BEGAN + at, "seconds": seconds, "model": "test:model", "usage": usage,
        "cost": "0.0012", "calls": list(calls),
    }  # fmt: skip


def tree(*turns: dict[str, Any], status: str = "done") -> dict[str, Any]:
    return {"id": "r", "status": status, "cost": "0.0123", "turns": list(turns)}


HELPER = {
    "name": "helper",
    "turns": [turn(1, 3.2, 0.5, call("fetch", 3.8, 0.4, status="timed out"))],
    "calls": [],
}
APPROVAL = {
    "name": "approval",
    "kind": "approval",
    "asked_at": BEGAN + 7,
    "answered": True,
    "answered_at": BEGAN + 7 + 2 * DAY,
}
RUN = tree(
    turn(1, 0, 2, call("read", 2, 1), call("search", 2, 3), call("ask", 3, 2, runs=[HELPER])),
    turn(2, 5.2, 1, call("write", 6.5, 2 * DAY + 1, questions=[APPROVAL])),
    turn(3, 2 * DAY + 8, 1),
)


def bars(shown: Widgets) -> list[dict[str, float]]:
    """Return the position and the width of each turn's and each call's bar."""
    return shown.page.locator("svg .bar .body").evaluate_all(
        "all => all.map(one => Object.fromEntries(['x', 'y', 'width'].map(name => [name, Number(one.getAttribute(name))])))"
    )


def items(shown: Widgets) -> Locator:
    return shown.page.get_by_role("tree", name="What happened").get_by_role("treeitem")


def test_spans_on_an_axis(shown: Widgets):
    """Concurrent calls of one turn begin together on the axis, each in its own row. A bar's width shows its duration.

    The picture has a description for screen readers.
    """
    shown.show("timeline", tree=RUN)
    expect(items(shown)).to_have_count(10)
    first, read, search, *_ = bars(shown)
    assert first["x"] + first["width"] == pytest.approx(read["x"], abs=1)
    assert read["x"] == search["x"]
    assert read["y"] < search["y"]
    assert search["width"] == pytest.approx(3 * read["width"], abs=2)
    picture = shown.page.get_by_role("img")
    expect(picture).to_have_accessible_name(
        "Spans of the run on a time axis: 2 d · 4 model turns · 5 calls · $0.0123. The longest call is write, 2 d."
    )


def test_calls_that_no_longer_stand_say_so(shown: Widgets):
    """A call that was compensated or rolled back has a sign of its own, and its line says which."""
    inner = [call("book", 2, 1, compensated=True), call("note", 2, 1, rolled_back=True)]
    shown.show("timeline", tree=tree(turn(1, 0, 2, call("trip", 2, 1, status="cancelled", calls=inner))))
    _, trip, book, note = items(shown).all()
    expect(trip).to_have_accessible_name("trip · cancelled · 1 s · after 2 s")
    expect(book).to_have_accessible_name("book · ok · compensated · 1 s · after 2 s")
    expect(note).to_have_accessible_name("note · ok · rolled back · 1 s · after 2 s")
    expect(book).to_contain_text("↶")
    expect(trip).not_to_contain_text("↶")


def test_days_of_waiting_do_not_hide_seconds_of_work(shown: Widgets):
    """A long wait is hatched, shortened, and labelled with its duration."""
    shown.show("timeline", tree=RUN)
    expect(shown.page.locator("svg .break text")).to_have_text("2 d")
    assert shown.page.locator("svg .wait").count() == 1
    assert bars(shown)[0]["width"] > 50
    expect(shown.page.get_by_role("list", name="Legend")).to_contain_text("waiting for a person")


def test_the_keyboard_walks_the_spans(shown: Widgets):
    """The arrow, Home and End keys move between spans. The left and right arrow keys also fold and unfold them.

    A line of text describes the focused span in full.
    """
    shown.show("timeline", tree=RUN)
    page = shown.page
    page.get_by_role("button", name="Zoom in").focus()
    page.keyboard.press("Tab")
    expect(items(shown).first).to_be_focused()
    expect(page.locator(".timeline-detail")).to_have_text(
        "Turn 1 (test:model) · 2 s · 1,200 tokens in, 80 out · $0.0012 · from the start"
    )
    page.keyboard.press("End")
    expect(items(shown).last).to_be_focused()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    ask = items(shown).nth(3)
    expect(ask).to_be_focused()
    expect(ask).to_have_accessible_name("ask · ok · 2 s · after 3 s")
    expect(ask).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("ArrowLeft")
    expect(ask).to_have_attribute("aria-expanded", "false")
    expect(items(shown)).to_have_count(7)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(items(shown).nth(4)).to_be_focused()
    expect(items(shown).nth(4)).to_have_attribute("aria-level", "2")
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    expect(page.locator(".timeline-detail")).to_contain_text("write · ok · 2 d · waited 2 d for approval")


def details(shown: Widgets, name: str) -> Locator:
    return shown.page.get_by_role("dialog", name=name)


WRITE = call(
    "write", 2, 1, arguments='{"path": "notes.md", "password": "***"}', message="wrote 2 lines", decision="ask",
    diff="diff --git a/notes.md b/notes.md\n--- a/notes.md\n+++ b/notes.md\n@@ -1 +1 @@\n-one\n+two\n",
    effects=["mail"], usage={"input": 2400, "output": 160}, cost="0.0024",
)  # fmt: skip
ASKED = {
    **turn(1, 0, 2, WRITE, call("read", 2, 0.5, arguments="{}")),
    "said": ["Write it."],
    "text": "I will.",
}
ANSWERED = {**turn(2, 4, 1), "said": ["And be quick."], "text": "It is written."}


def test_a_click_shows_everything_about_a_call(shown: Widgets):
    """A call's arguments, result, diff, cost and trace are shown, each as text. The focus returns to the call."""
    shown.show("timeline", tree={**tree(ASKED, ANSWERED), "trace_id": "a" * 32})
    items(shown).nth(1).click()
    found = details(shown, "write")
    for text in (
        "notes.md",
        "***",
        "wrote 2 lines",
        "$0.0024",
        "2,400 in, 160 out",
        "a" * 32,
        "mail can’t be undone",
    ):
        expect(found).to_contain_text(text)
    expect(found.get_by_role("region", name="Changes to notes.md")).to_contain_text("two")
    shown.page.keyboard.press("Escape")
    expect(found).to_have_count(0)
    expect(items(shown).nth(1)).to_be_focused()
    shown.page.locator("svg .bar").nth(2).locator(".body").click()
    expect(details(shown, "read")).to_be_visible()


def test_enter_shows_the_request_and_the_answer_of_a_turn(shown: Widgets):
    """A turn shows what was new in its request: what people said, and the results of the calls before. Its calls can be opened."""
    shown.show("timeline", tree=tree(ASKED, ANSWERED))
    items(shown).first.press("Enter")
    found = details(shown, "Turn 1")
    assert re.search("New in the request.*Write it..*Answer.*I will.", found.inner_text(), re.DOTALL)
    found.get_by_role("list", name="Calls").get_by_role("button", name="read").press("Enter")
    expect(details(shown, "read")).to_contain_text("ok")
    shown.page.keyboard.press("Escape")
    expect(shown.page.get_by_role("dialog")).to_have_count(0)
    items(shown).last.press("Enter")
    told = details(shown, "Turn 2").inner_text()
    assert re.search(
        "New in the request.*write returned.*wrote 2 lines.*And be quick..*It is written.", told, re.DOTALL
    )


def test_a_chevron_folds_without_opening(shown: Widgets):
    """A click on the chevron of a span folds what is inside it, and shows no details."""
    shown.show("timeline", tree=RUN)
    items(shown).nth(3).locator(".span-fold").click()
    expect(items(shown)).to_have_count(7)
    expect(shown.page.get_by_role("dialog")).to_have_count(0)


def test_status_is_not_colour_alone(shown: Widgets):
    """A failed call is marked by a sign beside its name, a cross at its bar and a status in words, not by colour alone."""
    shown.show("timeline", tree=RUN)
    expect(items(shown).nth(6)).to_have_accessible_name("fetch · timed out · 400 ms · after 3.8 s")
    expect(items(shown).nth(6)).to_contain_text("◔")
    assert shown.page.locator("svg .cross").count() == 1


def test_failures_before_an_answer(shown: Widgets):
    """If other models failed before a turn was answered, the turn is marked, and its name says which and why."""
    failed = [{"model": "a:1", "error": "Overloaded"}, {"model": "b:1", "error": "it refused to answer"}]
    shown.show("timeline", tree=tree({**turn(1, 0, 2), "failed": failed}, turn(2, 3, 1)))
    expect(items(shown).nth(0)).to_have_accessible_name(
        "Turn 1 (test:model) · a:1 failed before: Overloaded · b:1 failed before: it refused to answer · 2 s · "
        "1,200 tokens in, 80 out · $0.0012 · from the start"
    )
    expect(items(shown).nth(0)).to_contain_text("✕")
    expect(items(shown).nth(1)).not_to_contain_text("✕")
    expect(shown.page.get_by_role("list", name="Legend")).to_contain_text("failed")


def test_the_pointer_shows_a_span(shown: Widgets):
    """Hovering over a bar shows the details of its span."""
    shown.show("timeline", tree=RUN)
    shown.page.locator("svg .bar").nth(2).locator(".body").hover()
    expect(shown.page.locator(".timeline-detail")).to_have_text("search · ok · 3 s · after 2 s")


def test_zoom_and_fit(shown: Widgets):
    """Each zoom step doubles the width of the bars, and Fit shows the whole timeline again."""
    shown.show("timeline", tree=RUN)
    page = shown.page
    # wait until the layout has finished
    expect(page.get_by_role("img")).to_have_attribute("width", re.compile(r"\d{3}"))
    before = bars(shown)[0]["width"]
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Zoom in").click()
    expect(page.get_by_role("button", name="Fit")).to_be_enabled()
    assert bars(shown)[0]["width"] == pytest.approx(4 * before, rel=0.1)
    page.get_by_role("button", name="Fit").click()
    expect(page.get_by_role("button", name="Zoom out")).to_be_disabled()
    assert bars(shown)[0]["width"] == pytest.approx(before, abs=1)


def test_a_run_that_waits_now(shown: Widgets):
    """The name of an open span says how long it has lasted so far, and its bar ends in an arrow."""
    asked = {**APPROVAL, "answered": False, "answered_at": None}
    write = call("write", 2, None, status="waiting", questions=[{**asked, "asked_at": BEGAN + 2.1}])
    shown.show("timeline", tree=tree(turn(1, 0, 2, write), status="waiting"))
    expect(items(shown).nth(1)).to_have_accessible_name(re.compile("so far · waiting .* for approval"))
    assert shown.page.locator("svg .going").count() == 1


def test_nothing_yet_one_span_and_five_hundred(shown: Widgets):
    """A timeline without spans says so. With one span or five hundred, all are shown, and the End key reaches the last."""
    shown.show("timeline", tree=tree(status="running"))
    expect(shown.page.get_by_text("Nothing has happened in this run yet.")).to_be_visible()
    shown.show("timeline", tree=tree(turn(1, 0, 0)))
    expect(items(shown)).to_have_count(1)
    calls = [call(f"call_{at}", at / 10, 0.3) for at in range(499)]
    shown.show("timeline", tree=tree(turn(1, 0, 0.1, *calls)))
    expect(items(shown)).to_have_count(500)
    assert len(bars(shown)) == 500
    items(shown).first.focus()
    shown.page.keyboard.press("End")
    expect(items(shown).last).to_be_focused()


def test_a_failed_run_says_why(shown: Widgets):
    """The reason of a failed run stands below its spans, or in their place. A turn without an answer is marked as failed."""
    failed = {"number": 2, "at": BEGAN + 3, "seconds": 1, "answered": False, "calls": []}
    failed["failed"] = [{"model": "a:1", "error": "Overloaded"}]
    error = "prompt 'p': model 'a:1': Overloaded. It was tried 2 times."
    shown.show("timeline", tree={**tree(turn(1, 0, 2), failed, status="failed"), "error": error})
    expect(shown.page.get_by_text(error)).to_be_visible()
    expect(items(shown).nth(1)).to_have_accessible_name(
        "Turn 2 · a:1 failed: Overloaded · no answer · 1 s · after 3 s"
    )
    assert shown.page.locator("svg .cross").count() == 1
    shown.show("timeline", tree={**tree(status="failed"), "error": error})
    expect(shown.page.get_by_text(error)).to_be_visible()
    expect(shown.page.get_by_text("Nothing")).to_have_count(0)


def test_no_timeline_is_wider_than_a_phone(shown: Widgets):
    """At a width of 390 pixels, the timeline scrolls inside its box and the page does not scroll sideways."""
    shown.page.set_viewport_size({"width": 390, "height": 800})
    shown.show("timeline", tree=RUN)
    shown.page.get_by_role("button", name="Zoom in").click()
    assert shown.page.locator(".timeline-scroll").evaluate("box => box.scrollWidth > box.clientWidth")
    assert shown.overflow() == 0
