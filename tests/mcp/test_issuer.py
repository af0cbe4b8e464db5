"""Tests for an MCP server that accepts the access tokens of an OAuth issuer, with valid and invalid tokens."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from jwt.algorithms import ECAlgorithm
from mcp.client.streamable_http import streamable_http_client

from handrail import CapabilityPolicy, Prompt, ToolContext, tool
from handrail.cli.command_options import McpOptions
from handrail.cli.serve_commands import serve_mcp
from handrail.errors import DefinitionError
from handrail.journal.sqlite import MemoryJournal
from handrail.mcp import HttpServer, ToolServer
from handrail.mcp import http as mcp_http
from handrail.mcp import issuer as issuers
from handrail.mcp.issuer import LEEWAY, Issuer
from mcp import Client, MCPError
from support import PATIENCE
from support.mcp_http import Reply, Request, listening
from support.mcp_served import serving
from support.oidc_provider import fetch
from support.oidc_provider import provider as oidc_provider

KEY, OTHER = generate_private_key(SECP256R1()), generate_private_key(SECP256R1())
AUDIENCE = "https://tools.example/mcp"
PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


@tool(effect="read")
async def who(*, context: ToolContext) -> str:
    """Say who calls."""
    return context.session.principal


PROMPT = Prompt("shop", "Sell.", tools=[who], policies=[CapabilityPolicy()])


class Provider:
    """An issuer on loopback, which publishes its metadata and its keys."""

    def __init__(self) -> None:
        self.address = ""
        self.keys = {"one": KEY}
        self.reads = 0
        self.well_known = "/.well-known/oauth-authorization-server"
        self.calls_itself = ""
        self.keys_at = ""

    def answer(self, request: Request) -> Reply:
        body: dict[str, Any]
        if request.path == self.well_known:
            body = {
                "issuer": self.calls_itself or self.address,
                "jwks_uri": self.keys_at or f"{self.address}/keys",
            }
        elif request.path == "/keys":
            self.reads += 1
            keys = [{**_public(key), "kid": name} for name, key in self.keys.items()]
            body = {"keys": keys}
        else:
            return Reply(404)
        return Reply(200, {"Content-Type": "application/json"}, [json.dumps(body).encode()])

    def token(
        self, key: EllipticCurvePrivateKey = KEY, id: str = "one", kind: str = "at+jwt", **claims: Any
    ) -> str:
        """Return an access token. A claim that is None is left out."""
        now = int(time.time())
        given = {"iss": self.address, "aud": AUDIENCE, "sub": "ann", "iat": now, "exp": now + 600, **claims}
        kept = {name: value for name, value in given.items() if value is not None}
        return jwt.encode(kept, key, algorithm="ES256", headers={"kid": id, "typ": kind})


def _public(key: EllipticCurvePrivateKey) -> dict[str, Any]:
    return ECAlgorithm.to_jwk(key.public_key(), as_dict=True)


@asynccontextmanager
async def protected(provider: Provider, scopes: Sequence[str] = ()) -> AsyncGenerator[str]:
    """Serve this provider, and an app that accepts its tokens. Yields the address of the app's endpoint."""
    async with listening(provider.answer) as address:
        provider.address = address.removesuffix("/mcp")
        issuer = Issuer(provider.address, resource=AUDIENCE, scopes=scopes)
        async with serving(ToolServer(PROMPT, journal=MemoryJournal()), token=None, issuer=issuer) as url:
            yield url


async def status(url: str, token: str | None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=PATIENCE) as http:
        return (await http.post(url, json=PING)).status_code


@pytest.mark.parametrize("well_known", ["oauth-authorization-server", "openid-configuration"])
async def test_the_subject_is_the_principal(well_known: str) -> None:
    """A client with a valid token calls tools as the token's subject. The keys are read once.

    The issuer may publish OAuth's or OpenID's metadata.
    """
    provider = Provider()
    provider.well_known = f"/.well-known/{well_known}"
    async with protected(provider) as url:
        for name in ("ann", "bob"):
            headers = {"Authorization": f"Bearer {provider.token(sub=name, aud=['other', AUDIENCE])}"}
            async with (
                httpx2.AsyncClient(headers=headers, timeout=PATIENCE) as http,
                Client(streamable_http_client(url, http_client=http), mode="2026-07-28") as client,
            ):
                found: Any = await client.call_tool("who", {})
            assert found.content[0].text == name
    assert provider.reads == 1


async def test_a_stranger_learns_where_to_get_a_token() -> None:
    """A request without a token is refused with the address of the metadata, which names the issuer. A wrong token is called invalid."""
    provider = Provider()
    async with protected(provider) as url, httpx2.AsyncClient(timeout=PATIENCE) as http:
        refused = await http.post(url, json=PING)
        where = f"{urlsplit(AUDIENCE).scheme}://{urlsplit(AUDIENCE).netloc}/.well-known/oauth-protected-resource/mcp"
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == f'Bearer resource_metadata="{where}"'
        assert provider.address in refused.json()["error"]["message"]
        found = await http.get(urlsplit(url)._replace(path=urlsplit(where).path).geturl())
        assert found.status_code == 200
        assert found.json()["resource"] == AUDIENCE
        assert found.json()["authorization_servers"] == [f"{provider.address}/"]
        wrong = await http.post(url, json=PING, headers={"Authorization": "Bearer wrong"})
        assert wrong.headers["www-authenticate"].startswith(
            'Bearer error="invalid_token", resource_metadata='
        )


async def test_wrong_tokens_are_refused() -> None:
    """A request is refused if its token is missing, forged, from a different issuer, not for this server, or not valid now.

    A token without a usable subject or without an expiry time is refused too.
    Tokens with unknown keys do not make the server read the issuer's keys again at once.
    """
    provider = Provider()
    async with protected(provider) as url:
        now = int(time.time())
        unsigned = jwt.encode(
            {"iss": provider.address, "aud": AUDIENCE, "sub": "ann", "exp": now + 600}, "", algorithm="none"
        )
        shared = jwt.encode(
            {"iss": provider.address, "aud": AUDIENCE, "sub": "ann", "exp": now + 600},
            _public(KEY)["x"] * 2,
            algorithm="HS256",
            headers={"kid": "one"},
        )
        wrong = {
            "nothing": None,
            "not a token": "abc",
            "unsigned": unsigned,
            "signed with a public value": shared,
            "a different key": provider.token(OTHER),
            "an unknown key": provider.token(OTHER, "two"),
            "a different audience": provider.token(aud="https://other.example/mcp"),
            "no audience": provider.token(aud=None),
            "a different issuer": provider.token(iss="https://other.example"),
            "expired": provider.token(exp=now - 3600),
            "without an end": provider.token(exp=None),
            "not yet": provider.token(nbf=now + 3600),
            "nobody": provider.token(sub=None),
            "an empty name": provider.token(sub=""),
            "a number": provider.token(sub=7),
        }
        found = {name: await status(url, token) for name, token in wrong.items()}
        assert set(found.values()) == {401}, found
        assert await status(url, provider.token()) != 401, "a right token works beside them"
    assert provider.reads == 1, "unknown keys do not make the server read the keys each time"


ACCESS: dict[str, dict[str, Any]] = {
    "a type of its own": {"kind": "at+jwt"},
    "the long form of the type": {"kind": "application/at+JWT"},
    "scopes": {"kind": "JWT", "scope": "tools"},
    "scopes as a list": {"kind": "JWT", "scp": ["tools"]},
    "a client": {"kind": "JWT", "client_id": "editor"},
    "a kind in a claim": {"kind": "JWT", "scope": "openid", "token_use": "access"},
    "a type in a claim": {"kind": "JWT", "scope": "openid", "typ": "Bearer"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "an ID token": {"kind": "JWT", "nonce": "n", "at_hash": "h", "azp": "editor"},
    "a refreshed ID token, without a nonce": {"kind": "JWT", "azp": "editor", "email": "ann@example.org"},
    "an ID token of a hybrid flow": {"kind": "JWT", "c_hash": "h", "scope": "openid"},
    "an ID token that names its kind": {"kind": "JWT", "scope": "openid", "token_use": "id"},
    "an ID token with a type in its claims": {"kind": "JWT", "scope": "openid", "typ": "ID"},
    "a logout token": {
        "kind": "JWT",
        "client_id": "editor",
        "events": {"http://schemas.openid.net/event/backchannel-logout": {}},
    },
    "a logout token by its type": {"kind": "logout+jwt", "scope": "tools"},
    "a security event": {"kind": "secevent+jwt", "client_id": "editor"},
    "a signed response of introspection": {"kind": "token-introspection+jwt", "scope": "tools"},
    "a client's authentication": {"kind": "JWT", "client_id": "editor", "sub": "the issuer"},
    "a client's authentication with the type": {"sub": "the issuer"},
    "empty scopes": {"kind": "JWT", "scope": "", "scp": []},
    "nothing": {"kind": "JWT"},
}


async def test_only_access_tokens_are_accepted() -> None:
    """Of the tokens that an issuer signs for this audience, only those are accepted that show that they are access tokens.

    ID tokens, logout tokens, security events and the authentication of clients are refused.
    """
    provider = Provider()
    async with protected(provider) as url:
        for what, given in ACCESS.items():
            assert await status(url, provider.token(**given)) != 401, what
        for what, given in OTHERS.items():
            claims: dict[str, Any] = {**given, **({"sub": provider.address} if given.get("sub") else {})}
            assert await status(url, provider.token(**claims)) == 401, what


async def test_the_id_token_of_a_real_provider_is_refused() -> None:
    """The ID token with which a provider tells a client who signed in is refused, though it is for this audience, and signed and valid."""
    with oidc_provider([{"sub": "ann"}]) as address:
        asked = {"client_id": "tools", "redirect_uri": "http://127.0.0.1:1/", "response_type": "code"}
        query = urlencode({**asked, "scope": "openid", "nonce": "n"})
        _, back = await asyncio.to_thread(fetch, f"{address}/oauth2/authorize?{query}", {"sub": "ann"})
        form = {
            "grant_type": "authorization_code",
            "code": parse_qs(urlsplit(back).query)["code"][0],
            "redirect_uri": asked["redirect_uri"],
        }
        async with httpx2.AsyncClient(timeout=PATIENCE) as http:
            answer = await http.post(f"{address}/oauth2/token", data=form, auth=("tools", "secret"))
            token = answer.json()["id_token"]
        issuer = Issuer(address, resource=AUDIENCE, audience="tools")
        assert jwt.decode(token, options={"verify_signature": False})["aud"] in ("tools", ["tools"])
        assert await issuer.verify_token(token) is None
        with pytest.MonkeyPatch.context() as patched:  # it is refused for nothing else
            patched.setattr(issuers, "is_access_token", lambda header, claims: True)
            found = await issuer.verify_token(token)
    assert found is not None
    assert found.subject == "ann"


class Clock:
    """A clock that is ahead of the machine's by a number of seconds."""

    ahead = 0.0

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.ahead)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


async def test_a_stream_ends_when_its_token_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open stream ends when the access token that opened it has expired, and a request without a response gets status 401."""
    monkeypatch.setattr(mcp_http, "CHECK_SECONDS", 0.01)
    begun, ended = asyncio.Event(), asyncio.Event()

    @tool(effect="read")
    async def slow() -> str:
        """Take time to end."""
        begun.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    provider, clock = Provider(), Clock()
    async with listening(provider.answer) as address:
        provider.address = address.removesuffix("/mcp")
        issuer = Issuer(provider.address, resource=AUDIENCE, clock=clock)
        served = ToolServer(Prompt("shop", "Sell.", tools=[slow]), journal=MemoryJournal())
        async with serving(served, token=None, issuer=issuer) as url:
            headers = {"Authorization": f"Bearer {provider.token()}"}
            async with (
                httpx2.AsyncClient(headers=headers, timeout=PATIENCE) as http,
                Client(streamable_http_client(url, http_client=http), mode="2026-07-28") as client,
            ):
                call = asyncio.ensure_future(client.call_tool("slow", {}))
                await begun.wait()
                assert not call.done()
                clock.ahead = 600 + LEEWAY + 1
                await asyncio.wait_for(ended.wait(), PATIENCE)
                with pytest.raises(MCPError):
                    await asyncio.wait_for(call, PATIENCE)


async def test_a_token_counts_only_in_its_header() -> None:
    """A token in the query, in a cookie, or with a different scheme is not read, and the refusal does not repeat it."""
    provider = Provider()
    async with protected(provider) as url, httpx2.AsyncClient(timeout=PATIENCE) as http:
        token = provider.token()
        given: list[tuple[str, dict[str, str]]] = [
            (f"?access_token={token}", {}),
            ("", {"Cookie": f"access_token={token}"}),
            ("", {"Authorization": f"Basic {token}"}),
        ]
        for query, headers in given:
            refused = await http.post(url + query, json=PING, headers=headers)
            assert refused.status_code == 401
            assert token not in refused.text
            assert "error=" not in refused.headers["www-authenticate"], "there was no token to judge"


@pytest.mark.parametrize("subject", ["local", "a\nb", "a\0b", "a\u202eb", "\ud800", "x" * 257])
async def test_a_subject_that_can_not_be_a_principal_is_refused(
    subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A token for `local`, the principal of programs on this machine, is refused, so that nobody gets its approvals.

    Subjects that can't be shown or are too long are refused too. The response calls the token invalid.
    """
    provider = Provider()
    async with protected(provider) as url, httpx2.AsyncClient(timeout=PATIENCE) as http:
        headers = {"Authorization": f"Bearer {provider.token(sub=subject)}"}
        refused = await http.post(url, json=PING, headers=headers)
    assert refused.status_code == 401
    assert refused.json()["error"]["kind"] == "SubjectRefused"
    assert refused.headers["www-authenticate"].startswith('Bearer error="invalid_token", ')
    assert "authenticate" not in caplog.text


@pytest.mark.parametrize(
    "claim", [{"scope": "read tools"}, {"scp": ["read", "tools"]}, {"scope": ["read", "tools"]}]
)
async def test_required_scopes(claim: dict[str, Any]) -> None:
    """A token without a required scope is refused with status 403, and the client learns which scopes it needs.

    A token with all scopes is accepted, whichever claim lists them.
    """
    provider = Provider()
    async with protected(provider, ["read", "tools"]) as url, httpx2.AsyncClient(timeout=PATIENCE) as http:
        lacking: list[dict[str, Any]] = [
            *({"scope": each} for each in (None, "read", "read toolsmith", 3)),
            {"scp": [["tools"]]},
        ]
        for given in lacking:
            headers = {"Authorization": f"Bearer {provider.token(**given)}"}
            refused = await http.post(url, json=PING, headers=headers)
            assert refused.status_code == 403, given
            told = refused.headers["www-authenticate"]
            assert told.startswith(
                'Bearer error="insufficient_scope", scope="read tools", resource_metadata='
            )
        asked = await http.post(url, json=PING)
        assert asked.headers["www-authenticate"].startswith('Bearer scope="read tools", ')
        assert await status(url, provider.token(**claim)) not in (401, 403)
        path = "/.well-known/oauth-protected-resource/mcp"
        found = await http.get(urlsplit(url)._replace(path=path).geturl())
        assert found.json()["scopes_supported"] == ["read", "tools"]


async def test_keys_are_not_read_without_tls() -> None:
    """Keys are read only over TLS or from a known loopback name, because otherwise they could be replaced in transit.

    If the keys have any other address, requests get status 503.
    """
    provider = Provider()
    async with listening(provider.answer) as elsewhere:
        provider.keys_at = elsewhere.replace("127.0.0.1", "127.1").removesuffix("/mcp") + "/keys"
        async with protected(provider) as url:
            assert await status(url, provider.token()) == 503
    assert provider.reads == 0


async def test_metadata_of_a_different_issuer_is_refused() -> None:
    """If the metadata names a different issuer, requests get status 503, and the keys are not read."""
    false = Provider()
    false.calls_itself = "https://other.example"
    async with protected(false) as url:
        assert await status(url, false.token()) == 503
        assert await status(url, false.token()) == 503
    assert false.reads == 0


def test_what_contradicts_an_issuer_is_refused() -> None:
    """An issuer on another host needs TLS, and an issuer can't be combined with the app's own hook.

    With an issuer, the server has no page for answers.
    """
    with pytest.raises(DefinitionError, match="https"):
        Issuer("http://login.example.org", resource=AUDIENCE)
    issuer = Issuer("https://login.example.org", resource=AUDIENCE)
    with pytest.raises(DefinitionError, match="contradict"):
        HttpServer(ToolServer(PROMPT), issuer=issuer, authenticate=lambda request: "ann")
    server = ToolServer(PROMPT)
    HttpServer(server, issuer=issuer)
    assert server.page is None, "a browser has no access token, so secrets are refused in words"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"issuer": "https://login.example.org"}, "--issuer needs --http"),
        ({"http": True, "audience": AUDIENCE}, "--audience and --scope need --issuer"),
        ({"http": True, "scopes": ["tools"]}, "--audience and --scope need --issuer"),
        ({"http": True, "issuer": "https://login.example.org", "scopes": ['a"b']}, "can't be a scope"),
        ({"http": True, "issuer": "https://login.example.org", "token_file": True}, "contradict each other"),
        ({"http": True, "issuer": "http://login.example.org"}, "is not an https:// URL"),
        ({"resources": "files:///"}, "--resources needs --files"),
    ],
)
def test_options_that_contradict_each_other(
    options: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command refuses options that are invalid, contradict each other or lack another option, and says why."""
    app = tmp_path / "app.py"
    app.write_text("from handrail import Prompt\nprompt = Prompt('shop', 'Sell.')\n")
    token = tmp_path / "token"
    token.write_text("a-token-that-nobody-guesses\n")
    token.chmod(0o600)
    given: dict[str, Any] = {**options, **({"token_file": token} if "token_file" in options else {})}
    assert serve_mcp(McpOptions(app=str(app), port=0, no_journal=True, **given)) == 2
    assert said in capsys.readouterr().err
