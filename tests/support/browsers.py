"""A real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Playwright, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
PATIENCE = 120_000
"""Milliseconds to wait for an element before it counts as missing. Generous, since machines can be slow."""

expect.set_options(timeout=PATIENCE)


def arguments() -> list[str]:
    """Return chromium's arguments.

    As root it gets `--no-sandbox`, since it refuses to start with a sandbox.
    """
    return ["--no-sandbox"] if os.geteuid() == 0 else []


def launched(playwright: Playwright) -> Browser:
    """Launch the browser."""
    if not CHROMIUM.exists():
        raise AssertionError(f"the page's tests need {CHROMIUM}. Run scripts/components to install it.")
    return playwright.chromium.launch(executable_path=CHROMIUM, args=arguments())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a module; each test opens its own context.

    While the browser is open, playwright's loop runs in the test thread. Closing it with the module keeps it
    out of
    the way of tests that run their own loop, and of the next module's browser.
    """
    with sync_playwright() as playwright:
        found = launched(playwright)
        yield found
        found.close()
