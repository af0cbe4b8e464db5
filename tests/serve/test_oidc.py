"""Tests for signing in with an OpenID Connect provider, which is a mock server from PyPI in its own process."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from handrail.errors import DefinitionError
from handrail.serve.oidc import OidcProvider
from handrail.serve.people import People
from support import PATIENCE
from support.reserved_port import reserved_port
from support.serving import Client, Said, Still, serving

pytestmark = pytest.mark.once
CLAIMS = [
    {"sub": "1", "email": "ann@example.org", "email_verified": True},
    {"sub": "2", "email": "eve@example.org", "email_verified": True},
    {"sub": "3", "email": "ann@example.org", "email_verified": False},
    {"sub": "4"},
]


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


def fetch(address: str, form: dict[str, str] | None = None) -> tuple[int, str]:
    """Return the status of a response and the address it redirects to, or "". Redirects are not followed."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay())
    data = None if form is None else urllib.parse.urlencode(form).encode()
    try:
        with opener.open(address, data, timeout=PATIENCE) as said:
            return said.status, ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("location", "")


@contextmanager
def provider() -> Generator[str]:
    users = [part for claims in CLAIMS for part in ("--user-claims", json.dumps(claims))]
    with reserved_port() as port:
        program = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "--port", str(port), *users]
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            assert process.poll() is None, "the provider did not start"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def issuer() -> Generator[str]:
    with provider() as address:
        yield address


async def begun(client: Client) -> tuple[str, dict[str, str]]:
    """Begin a sign-in, and return the provider's address and the cookie that the browser gets."""
    said = await client.ask("GET", "/oidc/login")
    assert said.status == 303, said.body
    return said.headers["location"], {"Cookie": said.headers["set-cookie"].partition(";")[0]}


async def came_back(client: Client, where: str, cookie: dict[str, str], sub: str) -> Said:
    """Sign in at the provider, and return the server's response when the browser comes back."""
    status, back = await asyncio.to_thread(fetch, where, {"sub": sub})
    assert status == 302
    return await client.ask(
        "GET", back.partition(client.host)[2], headers={"Sec-Fetch-Site": "cross-site", **cookie}
    )


def users_in(folder: Path) -> None:
    people = People(folder / "people.db")
    people.add("ann@example.org", ["approver"])
    people.close()


async def test_somebody_whom_the_provider_names_gets_in_with_the_roles_they_have_here(
    tmp_path: Path, issuer: str
):
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret")) as client:
        assert (await client.ask("GET", "/health")).json["sign_in"] == "/oidc/login"
        where, cookie = await begun(client)
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(where).query)
        assert asked["code_challenge_method"] == ["S256"]
        assert asked["nonce"]
        said = await came_back(client, where, cookie, "1")
        assert said.status == 303, said.body
        link = said.headers["location"].removeprefix("/#link=")
        browser = {"Cookie": said.headers["set-cookie"].partition(";")[0]}
        entered = await client.ask("POST", "/login", {"link": link}, headers=browser)
        assert entered.status == 200, entered.body
        page = {
            "Authorization": "-",
            "Cookie": entered.headers["set-cookie"].partition(";")[0],
            "Handrail-Key": entered.json["key"],
        }
        about = (await client.ask("GET", "/about", headers=page)).json
        assert (about["principal"], about["roles"]) == ("ann@example.org", ["approver"])
        assert (await client.ask("POST", "/login", {"link": link}, headers=browser)).kind == "LinkUsed"


async def test_a_sign_in_is_finished_in_the_browser_that_began_it(tmp_path: Path, issuer: str):
    """The link that ends a sign-in works only in the browser that began it. Using it elsewhere uses it up."""
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret")) as client:
        said = await came_back(client, *await begun(client), "1")
        link = said.headers["location"].removeprefix("/#link=")
        browser = {"Cookie": said.headers["set-cookie"].partition(";")[0]}
        assert "-link=" in browser["Cookie"]
        assert (await client.ask("POST", "/login", {"link": link})).kind == "LinkUsed"
        assert (await client.ask("POST", "/login", {"link": link}, headers=browser)).kind == "LinkUsed"


@pytest.mark.parametrize(
    ("sub", "status", "kind"),
    [("2", 403, "UserUnknown"), ("3", 401, "SignInWrong"), ("4", 401, "SignInWrong")],
)
async def test_others_do_not_get_in(tmp_path: Path, issuer: str, sub: str, status: int, kind: str):
    """People who are not users, whose email is not verified, or who have no email can't sign in."""
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret")) as client:
        said = await came_back(client, *await begun(client), sub)
        assert (said.status, said.kind) == (status, kind)


async def test_a_sign_in_is_finished_once_by_the_browser_that_began_it(tmp_path: Path, issuer: str):
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret")) as client:
        where, _ = await begun(client)
        _, other = await begun(client)
        assert (await came_back(client, where, other, "1")).kind == "SignInWrong", "another browser's cookie"
        where, cookie = await begun(client)
        assert (await came_back(client, where, {}, "1")).kind == "SignInWrong", "no cookie"
        where, cookie = await begun(client)
        assert (await came_back(client, where, cookie, "1")).status == 303
        assert (await came_back(client, where, cookie, "1")).kind == "SignInWrong", "a second time"
        said = await client.ask("GET", "/oidc/callback?state=x&code=y", headers=cookie)
        assert (said.status, said.kind) == (401, "SignInWrong")


async def test_too_many_sign_ins_are_slowed_down(tmp_path: Path, issuer: str):
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret", clock=Still())) as client:
        said = [await client.ask("GET", "/oidc/login") for _ in range(21)]
        assert [each.status for each in said] == [303] * 20 + [429]


async def test_an_unreachable_or_false_provider_is_reported(
    tmp_path: Path, issuer: str, monkeypatch: pytest.MonkeyPatch
):
    users_in(tmp_path)

    async def other(self: OidcProvider, address: str) -> dict[str, str]:
        return {"issuer": "https://another.example", "authorization_endpoint": "https://another.example/"}

    for wrong in ("http://127.0.0.1:9", f"{issuer}/nothing", issuer):
        if wrong == issuer:
            monkeypatch.setattr(OidcProvider, "_fetch", other)
        async with serving(tmp_path, oidc=OidcProvider(wrong, "handrail", "secret")) as client:
            said = await client.ask("GET", "/oidc/login")
            assert (said.status, said.kind) == (503, "ProviderUnreachable")


def test_a_provider_without_tls_or_a_server_without_users_is_refused(tmp_path: Path):
    with pytest.raises(DefinitionError, match="https"):
        OidcProvider("http://login.example.org", "a", "b")

    async def start() -> None:
        async with serving(tmp_path, oidc=OidcProvider("https://login.example.org", "a", "b")):
            pass

    with pytest.raises(DefinitionError, match="handrail users add"):
        asyncio.run(start())
