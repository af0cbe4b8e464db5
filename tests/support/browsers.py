"""A real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import os
from contextlib import ExitStack
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


class _Shared:
    """The browser of all tests of this process that use one."""

    def __init__(self) -> None:
        self._browser: Browser | None = None
        self._opened = ExitStack()

    def get(self) -> Browser:
        if self._browser is None:
            self._browser = launched(self._opened.enter_context(sync_playwright()))
            self._opened.callback(self._browser.close)
        return self._browser

    def close(self) -> None:
        self._browser = None
        self._opened.close()


_shared = _Shared()


@pytest.fixture(scope="module")
def browser() -> Browser:
    """One browser for all tests that follow each other; each test opens a context of its own in it."""
    return _shared.get()


def close_unless_used(following: pytest.Item | None) -> None:
    """Close the browser, if there is one, unless the test that follows uses it too.

    Playwright's loop runs in the thread of the tests as long as it is open, where it would be in the way of every
    test that runs a loop of its own.
    """
    if "browser" not in getattr(following, "fixturenames", ()):
        _shared.close()
