"""Tests for examples/embedded: a FastAPI app with an agent mounted in it, and a page of its own, in a browser."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from support import ROOT
from support.browsers import browser
from support.served import Served

pytestmark = pytest.mark.once
__all__ = ["browser"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Served]:
    """Fixture: the example's app on loopback."""
    monkeypatch.setenv("HANDRAIL_JOURNAL", str(tmp_path / "desk.db"))
    file = ROOT / "examples/embedded/app.py"
    spec = importlib.util.spec_from_file_location("embedded_app", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    served = Served(module.app)
    served.start()
    yield served
    served.stop()


def test_a_page_of_ones_own_asks_and_streams(server: Served, browser: Browser) -> None:
    """A user signs in to the app, approves on its page, and finds the conversation again. Nobody else can read it."""
    context = browser.new_context(base_url=server.url)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto("/")
    expect(page.get_by_label("Message")).to_be_hidden()
    assert context.request.get("/agents/threads").status == 401
    page.get_by_label("Your name").fill("ann")
    page.get_by_text("Sign in").click()
    page.get_by_label("Message").fill("Refund order 17.")
    page.get_by_text("Send").click()
    expect(page.get_by_text("order: 17")).to_be_visible()
    page.reload()
    page.get_by_text("Approve").click()
    answer = page.get_by_text("I asked for the refund: order 17 is refunded")
    expect(answer).to_be_visible()
    expect(page.get_by_text("order: 17")).to_have_count(0)
    page.get_by_label("Message").fill("Once more.")
    page.get_by_text("Send").click()
    page.get_by_text("Deny").click()
    expect(page.get_by_text("refund was not approved (denied)")).to_be_visible()
    thread = page.evaluate("localStorage.thread")
    assert context.request.get(f"/agents/threads/{thread}").ok
    assert errors == []
    stranger = browser.new_context(base_url=server.url)
    stranger.request.post("/login", data={"name": "bob"})
    assert stranger.request.get(f"/agents/threads/{thread}").status == 404
    stranger.close()
    context.close()
