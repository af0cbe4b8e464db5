"""Tests in a real browser that the page follows workers' runs while workers and servers are killed and restarted."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from serve.page.test_page import log, question, say
from support.browsers import PATIENCE, browser
from support.watched_fleet import TOKEN, WatchedFleet, watched_fleet

pytestmark = pytest.mark.once
__all__ = ["browser"]
FIRST, SECOND = "The first half.", "The second half."


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[WatchedFleet]:
    with watched_fleet(tmp_path) as found:
        yield found


def test_the_page_goes_on_through_restarts_of_the_worker_and_of_the_server(
    browser: Browser, tmp_path: Path, fleet: WatchedFleet
):
    """Two windows show a run to its end, even if its worker is killed and replaced and the server is restarted.

    Both windows also follow the next two runs. One window answers a question, and the other stops the last run.
    """
    first_worker, first_server = fleet.worker(), fleet.server()
    context = browser.new_context(reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)
    key = context.request.post(f"{fleet.address}/login", data={"token": TOKEN}).json()["key"]
    context.add_init_script(f"localStorage.setItem('handrail.key', {json.dumps(key)})")
    page = context.new_page()
    page.goto(fleet.address)
    say(page, "tell")
    expect(log(page)).to_contain_text(FIRST)
    other = context.new_page()
    other.goto(page.url)
    expect(log(other)).to_contain_text(FIRST)
    assert fleet.rows("broadcasts")
    fleet.kill(first_worker)
    fleet.worker()
    fleet.until(lambda: "continues" in fleet.said())
    fleet.kill(first_server, signal.SIGTERM)
    fleet.server()
    for window in (page, other):
        expect(log(window)).to_contain_text(FIRST)
    fleet.open("middle")
    for window in (page, other):
        expect(log(window)).to_contain_text(SECOND)
        assert log(window).inner_text().count(FIRST) == 1
    say(other, "choose")
    asked = question(page, "Pick")
    asked.get_by_role("textbox").fill("green")
    asked.get_by_role("button", name="Send").click()
    for window in (page, other):
        expect(log(window)).to_contain_text("Result: green")
    say(page, "hold")
    expect(log(other)).to_contain_text("waiting at the gate")
    other.get_by_role("button", name="Stop").click()
    fleet.until(lambda: (fleet.gates / "cancelled").exists())
    for window in (page, other):
        expect(log(window)).to_contain_text("Stopped.")
    context.close()
