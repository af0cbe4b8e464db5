"""A real browser for the tests: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Playwright, expect, sync_playwright

HEADLESS = Path("/usr/bin/chromium-headless-shell")
CHROMIUM = HEADLESS if HEADLESS.exists() else Path("/usr/bin/chromium")
"""The browser for the tests. The headless shell is preferred, because it takes half of Chromium's CPU time."""
PATIENCE = 300_000
"""Milliseconds to wait for something that must happen in the browser. This is enough even on a busy machine."""

expect.set_options(timeout=PATIENCE)


def arguments() -> list[str]:
    """Return the arguments for chromium: `--no-sandbox` for root, since chromium refuses to run as root with a sandbox."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []


def launched(playwright: Playwright) -> Browser:
    """Launch Chromium, and return the browser. Raises `AssertionError` if it is not installed."""
    if not CHROMIUM.exists():
        raise AssertionError(f"the page's tests need {HEADLESS}. Run scripts/components to install it.")
    return playwright.chromium.launch(executable_path=CHROMIUM, args=arguments(), timeout=PATIENCE)


class _Shared:
    """The browser that consecutive tests of this process share. It is launched on first use."""

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
    """Fixture: a browser that consecutive tests share."""
    return _shared.get()


def close_unless_used(following: pytest.Item | None) -> None:
    """Close the shared browser, if it is open, unless the next test uses it too.

    While playwright is open, its event loop runs in the tests' thread, where no other test can run its own loop.
    """
    if "browser" not in getattr(following, "fixturenames", ()):
        _shared.close()
