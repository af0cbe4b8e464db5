"""Signing in, in a real browser, while a page of another port tries to sign the person in as somebody else."""

from __future__ import annotations

import http.server
import json
import re
import threading
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from handrail.serve.oidc import OidcProvider
from handrail.serve.people import People
from support.browsers import PATIENCE, browser
from support.oidc_provider import fetch, provider
from support.passwords import cheap_hashes
from support.served import Served, serving
from support.serving import source

pytestmark = pytest.mark.once
__all__ = ["browser", "cheap_hashes"]

ANN, EVE = "ann@example.org", "eve@example.org"
CLAIMS = [
    {"sub": str(number), "email": name, "email_verified": True} for number, name in enumerate((ANN, EVE), 1)
]
PASSWORDS = {ANN: "a long password of ann", EVE: "a long password of eve"}


@pytest.fixture(scope="module")
def issuer() -> Generator[str]:
    with provider(CLAIMS) as address:
        yield address


@contextmanager
def desk(folder: Path, issuer: str | None = None) -> Generator[Served]:
    """Serve an app whose users are Ann and Eve."""
    people = People(folder / "people.db")
    for name, password in PASSWORDS.items():
        people.add(name, ["user"], password)
    people.close()
    oidc = None if issuer is None else OidcProvider(issuer, "handrail", "secret")
    with serving(folder, source=source(), oidc=oidc) as server:
        yield server


@contextmanager
def window(browser: Browser) -> Generator[tuple[BrowserContext, Page]]:
    context = browser.new_context(viewport={"width": 1100, "height": 760}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)
    try:
        yield context, context.new_page()
    finally:
        context.close()


@contextmanager
def other_port(body: str, cookies: Sequence[str] = ()) -> Generator[str]:
    """Serve an attacker's page, which sets cookies for its host and thereby for every port of it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            for each in cookies:
                self.send_header("Set-Cookie", each)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()


def post(url: str, body: Any) -> tuple[Any, str]:
    """Send a request as a program does, and return the response's JSON and its first cookie."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=PATIENCE / 1000) as said:
        return json.load(said), said.headers.get("set-cookie", "").partition(";")[0]


def sign_in(page: Page, server: Served, name: str) -> None:
    page.goto(server.url)
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password").fill(PASSWORDS[name])
    page.keyboard.press("Enter")
    expect_person(page, name)


def expect_person(page: Page, name: str) -> None:
    expect(page.get_by_role("button", name=f"Menu of {name}")).to_be_visible()


def expect_nobody(page: Page) -> None:
    expect(page.get_by_label("Password")).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("^Menu of"))).to_have_count(0)


def test_somebody_signs_in_with_the_provider(browser: Browser, tmp_path: Path, issuer: str):
    with desk(tmp_path, issuer) as server, window(browser) as (_, page):
        page.goto(server.url)
        page.get_by_role("button", name="Sign in with your organisation").click()
        page.locator("input[name=sub]").fill("1")
        page.locator("button[type=submit], input[type=submit]").first.click()
        expect_person(page, ANN)
        page.reload()
        expect_person(page, ANN)
        assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize("is_signed_in", [False, True])
def test_a_page_of_another_port_can_not_plant_a_sign_in(
    browser: Browser, tmp_path: Path, issuer: str, is_signed_in: bool
):
    """Eve signs in at the provider, and sends Ann's browser to the end of that sign-in, with every cookie that she got."""
    with desk(tmp_path, issuer) as server, window(browser) as (_, page):
        if is_signed_in:
            sign_in(page, server, ANN)
        begun, cookie = post(f"{server.url}/oidc/login", {})
        status, back = fetch(begun["address"], {"sub": "2"})
        assert status == 302
        script = f"<script>location = {json.dumps(back)}</script>"
        with other_port(script, [f"{cookie}; Path=/", f"secret={begun['secret']}; Path=/"]) as evil:
            page.goto(evil)
            page.wait_for_url(f"{server.url}/**")
            expect_nobody(page)
            page.goto(f"{server.url}/")
            page.reload()
        if is_signed_in:
            expect_person(page, ANN)
        else:
            expect_nobody(page)


def test_a_planted_session_cookie_signs_out_but_never_in(browser: Browser, tmp_path: Path):
    """Eve's session cookie without the key of her session opens nothing."""
    with desk(tmp_path) as server, window(browser) as (_, page):
        sign_in(page, server, ANN)
        _, cookie = post(f"{server.url}/login", {"name": EVE, "password": PASSWORDS[EVE]})
        with other_port("planted", [f"{cookie}; Path=/; HttpOnly; SameSite=Strict"]) as evil:
            page.goto(evil)
            page.goto(f"{server.url}/")
            expect_nobody(page)


def test_a_page_of_another_port_can_not_replace_a_session(browser: Browser, tmp_path: Path):
    """Neither a form nor a script of another port signs Ann's browser in as Eve."""
    with desk(tmp_path) as server, window(browser) as (_, page):
        sign_in(page, server, ANN)
        given = json.dumps({"name": EVE, "password": PASSWORDS[EVE]})
        body = f"""<form method=post enctype=text/plain action={server.url}/login target=there>
            <input name='{given[:-1]}, "token": "' value='"}}'></form><iframe name=there></iframe><script>
            const given = {json.dumps(given)};
            const send = (type) => fetch("{server.url}/login", {{ method: "POST", mode: type.mode, credentials: "include",
              headers: {{ "Content-Type": type.type }}, body: given }}).then(() => "sent", () => "failed");
            document.forms[0].submit();
            window.done = Promise.all([{{ mode: "no-cors", type: "text/plain" }}, {{ mode: "cors", type: "application/json" }},
              {{ mode: "cors", type: "text/plain" }}].map(send));
            </script>"""
        with other_port(body) as evil:
            with page.expect_response(
                lambda said: said.request.resource_type == "document" and "/login" in said.url
            ) as form:
                page.goto(evil)
            assert form.value.status == 403
            assert page.evaluate("window.done") == ["failed"] * 3
        page.goto(f"{server.url}/")
        expect_person(page, ANN)


TAKE_OVER = """async (given) => {
    const post = async (path, body, key) => (await fetch(path, { method: "POST", body: JSON.stringify(body),
        headers: { "Content-Type": "application/json", ...(key && { "Handrail-Key": key }) } })).json();
    await post("logout", {}, localStorage.getItem("handrail.key"));
    localStorage.setItem("handrail.key", (await post("login", given)).key);
}"""


def test_a_tab_follows_the_person_who_signs_in_in_another(browser: Browser, tmp_path: Path):
    """All tabs share a session, so a tab never goes on showing one person's threads and sending as another."""
    with desk(tmp_path) as server, window(browser) as (context, page):
        sign_in(page, server, ANN)
        other = context.new_page()
        other.goto(server.url)
        other.get_by_role("button", name=f"Menu of {ANN}").click()
        other.get_by_role("menuitem", name="Sign out").click()
        expect_nobody(page)
        sign_in(other, server, EVE)
        page.reload()
        expect_person(page, EVE)
        # Ann takes over so quickly that the other tab never sees Eve signed out
        other.evaluate(TAKE_OVER, {"name": ANN, "password": PASSWORDS[ANN]})
        expect_person(page, ANN)
