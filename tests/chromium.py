"""A real browser for the tests of the page, and where its files are served as the server would serve them.

`browser()` is a context manager around one chromium. It has an event loop of its own that runs while it is open,
so what uses it is a plain function, and the fixture around it ends with the module.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Generator
from pathlib import Path

import uvicorn
from playwright.sync_api import Browser, sync_playwright
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import FileResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "src" / "handrail" / "serve" / "page"
TEST_PAGE = ROOT / "tests" / "page"
CHROMIUM = "/usr/bin/chromium"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the real page may do; what it may not, the test page may not either."""


@contextlib.contextmanager
def browser() -> Generator[Browser]:
    """Chromium without a window, until the block is left."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield started
        finally:
            started.close()


class _UnderPolicy:
    """Every answer carries the policy."""

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
def widgets() -> Generator[str]:
    """Serve the test page of the components on a free port of loopback; yield its address."""
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
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
