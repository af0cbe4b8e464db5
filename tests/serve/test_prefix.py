"""Tests for an app below a prefix: mounted in another app, or behind a proxy that removes the prefix or passes it on."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from handrail import MemoryJournal, SqliteJournal
from handrail.errors import DefinitionError
from handrail.serve import asgi
from handrail.serve.app import ServedApp
from handrail.serve.oidc import OidcProvider
from handrail.serve.people import People
from handrail.serve.requests import placed, route_path
from support.oidc_provider import fetch, provider
from support.served import Served
from support.serving import TOKEN, Client, said_by, source

pytestmark = pytest.mark.once
PREFIX = "/tools/desk"


class Below(Client):
    """A client of an app below the prefix."""

    def head(self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> bytes:
        return super().head(method, f"{PREFIX}{path}", headers, body)


def mounted(app: ServedApp) -> ASGIApp:
    return Starlette(routes=[Mount("/tools", Starlette(routes=[Mount("/desk", app)]))], lifespan=app.lifespan)


def proxied(app: ServedApp, **more: str) -> ASGIApp:
    """Return what a proxy that removes the prefix, and its server, make of an app."""

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            assert scope["path"].startswith(PREFIX)
            scope = {**scope, "path": scope["path"].removeprefix(PREFIX), **more}
        await app(scope, receive, send)

    return front


FRONTS: dict[str, tuple[Callable[[ServedApp], ASGIApp], dict[str, Any]]] = {
    "mounted": (mounted, {}),
    "a proxy that keeps it": (lambda app: app, {"prefix": PREFIX}),
    "a proxy that removes it": (proxied, {"prefix": f"{PREFIX}/"}),
    "a proxy and root_path": (lambda app: proxied(app, root_path=PREFIX), {}),
}


@contextmanager
def below(folder: Path, how: str, **options: Any) -> Generator[Below]:
    """Serve an app below the prefix in one of these ways."""
    journal, people = SqliteJournal(folder / "runs.db"), People(folder / "people.db")
    front, more = FRONTS[how]
    app = asgi(source(), journal=journal, people=people, **more, **options)
    server = Served(front(app))
    server.start()
    try:
        yield Below(f"{server.url}/", app)
    finally:
        server.stop()
        journal.close()
        people.close()


@pytest.mark.parametrize("how", FRONTS)
async def test_the_page_and_clients_work_below_a_prefix(tmp_path: Path, how: str):
    """The page, a sign-in, a run, AG-UI and sign-out work. The cookie is for this app alone."""
    with below(tmp_path, how, token=TOKEN) as client:
        for path in ("/health", "/", "/assets/page.css"):
            assert (await client.ask("GET", path)).status == 200, path
        assert (await client.ask("GET", "/about")).status == 401
        entered = await client.ask("POST", "/login", {"token": TOKEN})
        cookie = entered.headers["set-cookie"]
        assert cookie.startswith(f"handrail-{client.port}%2Ftools%2Fdesk=")
        assert f"Path={PREFIX}/;" in cookie
        page = {"Cookie": cookie.partition(";")[0], "Handrail-Key": entered.json["key"]}
        await client.say("a", "hello", page)
        assert said_by((await client.idle("a", page))["messages"]) == ["You said: hello"]
        sent = {"threadId": "b", "runId": "r", "messages": [{"id": "1", "role": "user", "content": "hi"}],
                "tools": [], "context": [], "state": {}, "forwardedProps": {}}  # fmt: skip
        async with client.stream("POST", "/agent", sent, page) as stream:
            assert [event["type"] for event in await stream.all()][-1] == "RUN_FINISHED"
        left = await client.ask("POST", "/logout", {}, page)
        assert f"Path={PREFIX}/;" in left.headers["set-cookie"]


@pytest.mark.parametrize("how", ["mounted", "a proxy that keeps it"])
async def test_the_prefix_itself_leads_to_the_page(tmp_path: Path, how: str):
    """The page's addresses are relative, so without the slash at the end they would lead elsewhere."""
    with below(tmp_path, how, token=TOKEN) as client:
        seen = await client.ask("GET", "")
        base = f"http://{client.host}{PREFIX}"
        assert seen.status == 307
        assert urllib.parse.urljoin(base, seen.headers["location"]) == f"{base}/"


async def test_over_tls_the_cookie_has_the_prefix_in_its_name(tmp_path: Path):
    """A cookie whose name begins with `__Host-` is sent to the whole host, so its name keeps the apps of a host apart."""
    seen = {"Host": "chat.example", "Origin": "https://chat.example"}
    options: Any = {"hosts": ["chat.example"], "origins": ["https://chat.example"], "token": TOKEN}
    with below(tmp_path, "a proxy that removes it", **options) as client:
        cookie = (await client.ask("POST", "/login", {"token": TOKEN}, seen)).headers["set-cookie"]
        assert cookie.startswith("__Host-handrail-443%2Ftools%2Fdesk=")
        assert "Path=/;" in cookie


@pytest.mark.parametrize("how", FRONTS)
async def test_a_provider_sends_people_back_below_the_prefix(tmp_path: Path, how: str):
    """The redirect address that the provider gets has the prefix, and the end of the sign-in leads to the page."""
    people = People(tmp_path / "people.db")
    people.add("ann@example.org", ["user"])
    people.close()
    with (
        provider([{"sub": "1", "email": "ann@example.org", "email_verified": True}]) as issuer,
        below(tmp_path, how, oidc=OidcProvider(issuer, "handrail", "secret")) as client,
    ):
        base = f"http://{client.host}{PREFIX}/"
        begins = urllib.parse.urljoin(base, (await client.ask("GET", "/health")).json["sign_in"])
        begun = await client.ask("POST", begins.removeprefix(base.rstrip("/")), {})
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(begun.json["address"]).query)
        assert asked["redirect_uri"] == [f"{base}oidc/callback"]
        status, back = await asyncio.to_thread(fetch, begun.json["address"], {"sub": "1"})
        assert status == 302
        ended = await client.ask("GET", back.removeprefix(base.rstrip("/")))
        page, _, link = urllib.parse.urljoin(back, ended.headers["location"]).partition("#link=")
        assert page == base
        given = {"link": link, "secret": begun.json["secret"]}
        assert (await client.ask("POST", "/login", given)).status == 200


async def test_a_mounted_app_that_is_not_started_refuses_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Frameworks run no lifespan of a mounted app, and without it the end of the process would cancel its runs.

    The refusal and the log, which has it once, say what to do.
    """
    app = asgi(source(), journal=MemoryJournal(), token=TOKEN)
    server = Served(Starlette(routes=[Mount(PREFIX, app)]))
    server.start()
    client = Below(f"{server.url}/", app, {"Authorization": f"Bearer {TOKEN}"})
    for path in ("/", "/health", "/about"):
        refused = await client.ask("GET", path)
        assert (refused.status, refused.kind) == (503, "NotStarted")
        assert "lifespan=desk.lifespan" in refused.json["error"]["message"]
    server.stop()
    [told] = [each.getMessage() for each in caplog.records if each.name == "handrail.serve"]
    assert "lifespan=desk.lifespan" in told


@pytest.mark.parametrize("prefix", ["agents", "/a b", "https://chat.example/agents", "/a//b", "/a?b", "/é"])
def test_a_prefix_that_is_not_a_path_is_refused(prefix: str):
    with pytest.raises(DefinitionError, match="such as /agents"):
        asgi(source(), journal=MemoryJournal(), token=TOKEN, prefix=prefix)


@pytest.mark.parametrize(
    ("scope", "prefix", "found"),
    [
        ({"path": "/x"}, "", ("", "/x")),
        ({"path": "/a/x", "root_path": "/a"}, "", ("/a", "/x")),
        ({"path": "/a/x", "root_path": "/a/"}, "", ("/a", "/x")),
        ({"path": "/a", "root_path": "/a"}, "", ("/a", "")),
        ({"path": "/x", "root_path": "/a"}, "", ("/a", "/x")),
        ({"path": "/ab/x", "root_path": "/a"}, "", ("/a", "/ab/x")),
        ({"path": "/a/x"}, "/a", ("/a", "/x")),
        ({"path": "/x"}, "/a", ("/a", "/x")),
        ({"path": "/m/x", "root_path": "/a/m", "app_root_path": "/a"}, "", ("/a/m", "/x")),
        ({"path": "/a/m/x", "root_path": "/a/m", "app_root_path": "/a"}, "", ("/a/m", "/x")),
        ({"path": "/m/x", "root_path": "/m", "app_root_path": ""}, "/a/m", ("/a/m", "/x")),
    ],
)
def test_where_an_app_is(scope: dict[str, str], prefix: str, found: tuple[str, str]):
    """The prefix is what the server names or what is configured, and does not count whether the path has it."""
    made = placed(scope, prefix)
    request: Any = type("Request", (), {"scope": made})
    assert (made["root_path"], route_path(request)) == found
    assert made["path"] == found[0] + found[1]
