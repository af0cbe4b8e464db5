"""A real browser that shows single components of the page, under the real page's content security policy.

from support.browsers import browser
from serve.page.widgets import Widgets, opened, shown

def test_it(shown: Widgets):
    shown.show("form", schema={"type": "boolean"})
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Page
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import FileResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from support import ROOT
from support.browsers import PATIENCE

PAGE = ROOT / "src" / "handrail" / "serve" / "page"
TEST_PAGE = ROOT / "tests" / "serve" / "page"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "media-src data:; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy of the real page, applied to the test page too."""


class _UnderPolicy:
    """Adds the content security policy to every response, and forbids caching."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", POLICY.encode()),
                    (b"cache-control", b"no-store"),
                ]
            await send(message)

        await self._app(scope, receive, sent)


@contextlib.contextmanager
def served() -> Generator[str]:
    """Serve the components' test page on a free loopback port, and yield its address."""
    app = Starlette(
        routes=[
            Route("/", lambda _: FileResponse(TEST_PAGE / "widgets.html")),
            Mount("/assets", StaticFiles(directory=PAGE)),
            Mount("/page", StaticFiles(directory=TEST_PAGE)),
        ],
        middleware=[Middleware(_UnderPolicy)],
    )
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # the browser may come before the server has started
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="error", lifespan="off", timeout_keep_alive=PATIENCE // 1000)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


class Widgets:
    """A page that shows one component at a time, and records its errors and warnings for `check`."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.expected: list[str] = []
        """Parts of error messages that the test causes on purpose."""
        self._wrong: list[str] = []
        page.context.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: self._wrong.append(str(error)))
        page.on("console", self._hear)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._wrong.append(message.text)

    def check(self) -> None:
        """Assert that the page had no errors or warnings, except the expected ones."""
        unseen = [wrong for wrong in self._wrong if not any(part in wrong for part in self.expected)]
        assert unseen == []

    def show(self, component: str, **props: Any) -> None:
        """Show this component in place of the previous one."""
        self.page.evaluate("([name, props]) => window.show(name, props)", [component, props])

    def update(self, **props: Any) -> None:
        """Replace the props of the component that is shown."""
        self.page.evaluate("(props) => window.show(null, props, {anew: false})", props)

    def said(self, name: str | None = None) -> list[Any]:
        """Return what the component reported: every [name, value] pair or, with a name, only the values under that name."""
        said: list[list[Any]] = self.page.evaluate("window.said")
        return said if name is None else [value for each, value in said if each == name]

    def overflow(self) -> int:
        """Return how many pixels wider the page is than the window."""
        return self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )

    def begin(self) -> None:
        """Reset the window's size, its storage, and the recorded and the expected errors."""
        self.expected.clear()
        self._wrong.clear()
        self.page.set_viewport_size({"width": 1100, "height": 800})
        self.page.evaluate("localStorage.clear()")


@pytest.fixture(scope="module")
def opened(browser: Browser) -> Iterator[Widgets]:
    """Fixture: the components' test page in a browser, shared by all tests of a module."""
    with served() as url, contextlib.closing(browser.new_context(timezone_id="UTC")) as context:
        found = Widgets(context.new_page())
        found.page.goto(url)
        found.page.wait_for_function("window.ready")
        yield found


@pytest.fixture
def shown(opened: Widgets) -> Iterator[Widgets]:
    """Fixture: a page that can show a component. Fails the test on any unexpected error or warning."""
    opened.begin()
    yield opened
    opened.check()
