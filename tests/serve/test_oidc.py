"""Tests for signing in with an OpenID Connect provider, which is a mock server from PyPI."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Generator
from pathlib import Path

import pytest

from handrail.errors import DefinitionError
from handrail.serve.oidc import OidcProvider
from handrail.serve.people import People
from support.oidc_provider import fetch, provider
from support.serving import Client, Said, Still, serving

pytestmark = pytest.mark.once
CLAIMS = [
    {"sub": "1", "email": "ann@example.org", "email_verified": True},
    {"sub": "2", "email": "eve@example.org", "email_verified": True},
    {"sub": "3", "email": "ann@example.org", "email_verified": False},
    {"sub": "4"},
]


@pytest.fixture(scope="module")
def issuer() -> Generator[str]:
    with provider(CLAIMS) as address:
        yield address


async def begun(client: Client) -> tuple[str, str]:
    """Begin a sign-in, and return the provider's address and the secret that the page gets."""
    said = await client.ask("POST", "/oidc/login", {})
    assert said.status == 200, said.body
    return said.json["address"], said.json["secret"]


async def came_back(client: Client, where: str, sub: str) -> Said:
    """Sign in at the provider, and return the server's response when the browser comes back."""
    status, back = await asyncio.to_thread(fetch, where, {"sub": sub})
    assert status == 302
    return await client.ask("GET", back.partition(client.host)[2], headers={"Sec-Fetch-Site": "cross-site"})


async def link_from(client: Client, where: str, sub: str) -> str:
    """Sign in at the provider, and return the code of the link to which the server redirects the browser."""
    said = await came_back(client, where, sub)
    assert said.status == 303, said.body
    return said.headers["location"].removeprefix("../#link=")


def users_in(folder: Path) -> None:
    people = People(folder / "people.db")
    people.add("ann@example.org", ["approver"])
    people.close()


async def test_somebody_whom_the_provider_names_gets_in_with_the_roles_they_have_here(
    tmp_path: Path, issuer: str
):
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret")) as client:
        assert (await client.ask("GET", "/health")).json["sign_in"] == "oidc/login"
        where, secret = await begun(client)
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(where).query)
        assert asked["code_challenge_method"] == ["S256"]
        assert asked["nonce"]
        given = {"link": await link_from(client, where, "1"), "secret": secret}
        entered = await client.ask("POST", "/login", given)
        assert entered.status == 200, entered.body
        page = {
            "Authorization": "-",
            "Cookie": entered.headers["set-cookie"].partition(";")[0],
            "Handrail-Key": entered.json["key"],
        }
        about = (await client.ask("GET", "/about", headers=page)).json
        assert (about["principal"], about["roles"]) == ("ann@example.org", ["approver"])
        assert (await client.ask("POST", "/login", given)).kind == "LinkUsed"


@pytest.mark.parametrize("other", ["", "guessed", "of another sign-in"])
async def test_a_sign_in_is_finished_on_the_page_that_began_it(tmp_path: Path, issuer: str, other: str):
    """The link that ends a sign-in works only with the secret of the page that began it. Using it elsewhere uses it up."""
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret")) as client:
        where, secret = await begun(client)
        if other == "of another sign-in":
            _, other = await begun(client)
        link = await link_from(client, where, "1")
        assert (await client.ask("POST", "/login", {"link": link, "secret": other})).kind == "LinkUsed"
        assert (await client.ask("POST", "/login", {"link": link, "secret": secret})).kind == "LinkUsed"


async def test_a_sign_in_sets_no_cookie_and_takes_none(tmp_path: Path, issuer: str):
    """Every port of a host can set the host's cookies, so a sign-in depends on none until its session begins."""
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret")) as client:
        said = await client.ask("POST", "/oidc/login", {})
        back = await came_back(client, said.json["address"], "1")
        assert "set-cookie" not in {**said.headers, **back.headers}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://friend.example"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
async def test_only_the_server_s_own_page_begins_a_sign_in(
    tmp_path: Path, issuer: str, headers: dict[str, str], status: int
):
    """Pages of other ports, hosts and allowed origins can't, and neither can a form or a link."""
    users_in(tmp_path)
    provider = OidcProvider(issuer, "handrail", "secret")
    async with serving(tmp_path, oidc=provider, origins=["https://friend.example"]) as client:
        assert (await client.ask("POST", "/oidc/login", {}, headers)).status == status
        assert (await client.ask("GET", "/oidc/login")).status == 405


@pytest.mark.parametrize(
    ("sub", "status", "kind"),
    [("2", 403, "UserUnknown"), ("3", 401, "SignInWrong"), ("4", 401, "SignInWrong")],
)
async def test_others_do_not_get_in(tmp_path: Path, issuer: str, sub: str, status: int, kind: str):
    """People who are not users, whose email is not verified, or who have no email can't sign in."""
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret")) as client:
        where, _ = await begun(client)
        said = await came_back(client, where, sub)
        assert (said.status, said.kind) == (status, kind)


async def test_a_sign_in_is_finished_once(tmp_path: Path, issuer: str):
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret")) as client:
        where, _ = await begun(client)
        assert (await came_back(client, where, "1")).status == 303
        assert (await came_back(client, where, "1")).kind == "SignInWrong", "a second time"
        said = await client.ask("GET", "/oidc/callback?state=x&code=y")
        assert (said.status, said.kind) == (401, "SignInWrong")


async def test_too_many_sign_ins_are_slowed_down(tmp_path: Path, issuer: str):
    users_in(tmp_path)
    async with serving(tmp_path, oidc=OidcProvider(issuer, "handrail", "secret", clock=Still())) as client:
        said = [await client.ask("POST", "/oidc/login", {}) for _ in range(21)]
        assert [each.status for each in said] == [200] * 20 + [429]


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
            said = await client.ask("POST", "/oidc/login", {})
            assert (said.status, said.kind) == (503, "ProviderUnreachable")


def test_a_provider_without_tls_or_a_server_without_users_is_refused(tmp_path: Path):
    with pytest.raises(DefinitionError, match="https"):
        OidcProvider("http://login.example.org", "a", "b")

    async def start() -> None:
        async with serving(tmp_path, oidc=OidcProvider("https://login.example.org", "a", "b")):
            pass

    with pytest.raises(DefinitionError, match="handrail users add"):
        asyncio.run(start())
