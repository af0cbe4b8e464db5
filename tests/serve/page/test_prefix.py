"""Tests of two apps that are mounted in one, in a real browser: the page of each has its own session and its own renderers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from handrail import SqliteJournal
from handrail.serve import asgi
from handrail.serve.app import ServedApp
from support.browsers import PATIENCE, browser
from support.served import Served, source_in

pytestmark = pytest.mark.once
__all__ = ["browser"]

RENDERERS = """
import { html, register } from "../assets/renderers.js";
register("colour", ({ submit }) => html`<button onClick=${() => submit("green")}>Green</button>`);
"""


def test_two_apps_of_one_origin_do_not_sign_each_other_out(browser: Browser, tmp_path: Path):
    own = tmp_path / "renderers.js"
    own.write_text(RENDERERS)
    apps: dict[str, ServedApp] = {}
    for name in ("/one", "/two"):
        folder = tmp_path / name[1:]
        folder.mkdir()
        apps[name] = asgi(source_in(folder), journal=SqliteJournal(folder / "runs.db"), renderers=own)

    @asynccontextmanager
    async def lifespan(outer: Starlette) -> AsyncGenerator[None]:
        async with apps["/one"].lifespan(), apps["/two"].lifespan():
            yield

    server = Served(Starlette(routes=[Mount(name, app) for name, app in apps.items()], lifespan=lifespan))
    server.start()
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    pages = {name: context.new_page() for name in apps}
    for name, page in pages.items():
        page.goto(f"{server.url}{name}#link={apps[name].principals.new_link()}")
        page.get_by_label("Message", exact=True).fill("colour")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Green").click()
        expect(page.get_by_role("log")).to_contain_text("green")
    for name, page in pages.items():
        page.reload()
        expect(page.get_by_role("log")).to_contain_text("green")
        assert page.url.startswith(f"{server.url}{name}/")
    context.close()
    server.stop()
