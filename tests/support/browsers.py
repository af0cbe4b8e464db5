"""A real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Playwright, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
PATIENCE = 120_000
"""Milliseconds after which what should be on a page is missing: many, since machines are slow at times."""

expect.set_options(timeout=PATIENCE)


def arguments() -> list[str]:
    """As root it has no sandbox: chromium refuses one there."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []


def launched(playwright: Playwright) -> Browser:
    """The browser."""
    if not CHROMIUM.exists():
        raise AssertionError(f"the tests of the page need {CHROMIUM}: scripts/components installs it")
    return playwright.chromium.launch(executable_path=CHROMIUM, args=arguments())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a module; each test opens a context of its own in it.

    Playwright's loop runs in the thread of the tests as long as it is open. Past the end of the module it would be
    in the way of every test that runs a loop of its own, and of the next module's browser.
    """
    with sync_playwright() as playwright:
        found = launched(playwright)
        yield found
        found.close()
