"""OAuth login to an MCP server by means of a question to the person."""

import asyncio
import contextlib
import json
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from mcp.shared.auth import OAuthToken

from handrail import Adapter, Prompt, ScriptedModel, ToolCall
from handrail.mcp import Login, McpTools, UrlServer, connection
from handrail.mcp import url_transport as addresses
from handrail.mcp.connection import ServerUnavailable
from handrail.mcp.login import LOGIN_SECONDS, LoginNeeded, TokenFile, _code_in, _listening  # pyright: ignore[reportPrivateUsage]
from handrail.mcp.url_transport import Reach, reach_of
from handrail.messages import ToolMessage
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.tools import RunMode
from support.mcp_http import Reply, Request, listening, ordinary
from support.parked_runs import answer_to


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pause after a failed attempt to connect."""
    monkeypatch.setattr(connection, "FIRST_WAIT", 0.0)


class LogsIn(Environment):
    """A person who logs in, and answers with the address to which the browser was redirected."""

    run_mode: RunMode = "user"

    def __init__(self) -> None:
        self.questions: list[Question] = []

    agrees = False
    """Whether the person lets a login use addresses that are not on the issuer's origin."""

    async def ask(self, question: Question, /) -> Answer:
        self.questions.append(question)
        if question.name == "mcp.login.endpoints":
            by = question.principal
            return answer_to(question, self.agrees, by=by)
        asked = parse_qs(urlsplit(question.payload["url"]).query)
        ended = f"{asked['redirect_uri'][0]}?code=abc&state={asked['state'][0]}"
        return answer_to(question, ended)


class Guarded:
    """A server that requires a token, and the authorization server that issues it, on the same port."""

    def __init__(self) -> None:
        self.url = ""
        self.elsewhere = ""
        """The authorization server's address. If it is empty, the protected server's address is used."""
        self.token = "secret-token"
        self.grants: list[str] = []
        """The type of each grant for which a token was issued. A refresh token works once."""
        self.token_hosts: list[str] = []
        self.changes: dict[str, Any] = {}
        """Changes to the authorization server's metadata."""
        self.names_metadata = ""
        """The address at which the server says that its own metadata is; "" for the usual address."""
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> Reply:
        base = self.elsewhere or self.url.removesuffix("/mcp")
        path = urlsplit(request.path).path
        self.requests.append(request)
        if path == "/token":
            self.token_hosts.append(request.headers["host"].partition(":")[0])
            refresh = request.form.get("refresh_token", f"refresh-{len(self.grants)}")
            if refresh != f"refresh-{len(self.grants)}":
                return Reply(400, {"Content-Type": "application/json"}, [b'{"error": "invalid_grant"}'])
            self.grants.append(request.form["grant_type"])
        if path == "/mcp":
            if request.headers.get("authorization") == f"Bearer {self.token}":
                return ordinary(request)
            usual = f"{self.url.removesuffix('/mcp')}/.well-known/oauth-protected-resource/mcp"
            where = f'Bearer resource_metadata="{self.names_metadata or usual}"'
            return Reply(401, {"WWW-Authenticate": where})
        found: dict[str, Any] = {
            "/.well-known/oauth-protected-resource/mcp": {
                "resource": self.url,
                "authorization_servers": [base],
            },
            "/.well-known/oauth-authorization-server": {
                "issuer": base,
                "authorization_endpoint": f"{base}/authorize",
                "token_endpoint": f"{base}/token",
                "registration_endpoint": f"{base}/register",
                "response_types_supported": ["code"],
                "code_challenge_methods_supported": ["S256"],
                **self.changes,
            },
            "/register": {"client_id": "me", "redirect_uris": request.message.get("redirect_uris", [])},
            "/token": {
                "access_token": self.token,
                "token_type": "Bearer",
                "expires_in": 3600,
                "refresh_token": f"refresh-{len(self.grants)}",
            },
        }
        if path not in found:
            return Reply(404)
        status = 201 if path == "/register" else 200
        return Reply(status, {"Content-Type": "application/json"}, [json.dumps(found[path]).encode()])


async def run(section: McpTools, environment: Environment | None, *calls: ToolCall) -> tuple[list[str], Any]:
    model = ScriptedModel([*calls, "Done."])
    prompt = Prompt("guide", ["Go.", section])
    await Adapter(model).evaluate(prompt, "hi", environment=environment)
    messages = model.requests[-1].messages
    told = [one.text for each in messages if isinstance(each, ToolMessage) for one in each.results]
    return told, model


async def test_login_is_a_question_with_an_address(tmp_path: Path) -> None:
    """The model is offered a tool that asks the person to log in. After the login, this run and later runs have the server's tools.

    The tokens are kept in a file that only its owner can read.
    """
    guarded = Guarded()
    async with listening(guarded) as guarded.url:
        server = UrlServer(guarded.url, login=Login(tmp_path / "tokens", "http://127.0.0.1:1/callback"))
        person = LogsIn()
        async with McpTools("mail", server=server) as section:
            told, model = await run(section, person, ToolCall("mail_login"), ToolCall("echo", {"text": "a"}))
        assert [each.tool.name for each in model.requests[0].tools] == ["mail_login"]
        assert told[1] == "a"
        (question,) = person.questions
        assert question.name == "mcp.login"
        assert question.payload["url"].startswith(guarded.url.removesuffix("/mcp") + "/authorize?")
        async with McpTools("mail", server=server) as again:  # the tokens were kept
            assert (await run(again, None, ToolCall("echo", {"text": "b"})))[0] == ["b"]
    (file,) = (tmp_path / "tokens").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


class TakesLong(LogsIn):
    """A person who seems to take `seconds` to log in, because `ask` sets the event loop's clock forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def ask(self, question: Question, /) -> Answer:
        loop = asyncio.get_running_loop()
        clock, seconds = loop.time, self._seconds
        loop.time = lambda: clock() + seconds
        for _ in range(5):  # the timers that are due now fire
            await asyncio.sleep(0)
        return await super().ask(question)


async def test_person_may_take_long_to_log_in(tmp_path: Path) -> None:
    """The time that a person takes to log in does not count towards the time limit for connecting, and has its own limit."""
    guarded = Guarded()
    async with listening(guarded) as guarded.url:
        server = UrlServer(guarded.url, login=Login(tmp_path / "tokens", "http://127.0.0.1:1/callback"))
        calls = [ToolCall("mail_login"), ToolCall("echo", {"text": "a"})]
        async with McpTools("mail", server=server) as section:
            late, _ = await run(section, TakesLong(LOGIN_SECONDS + 1), *calls)
            in_time, _ = await run(section, TakesLong(connection.CONNECT_TIMEOUT + 1), *calls)
    assert "nobody logged in within 600 s" in late[0]
    assert in_time[1] == "a"


async def test_nobody_to_log_in(tmp_path: Path) -> None:
    """Without a person, the login tool says that a login is needed, and no token is kept."""
    guarded = Guarded()
    async with listening(guarded) as guarded.url:
        login = Login(tmp_path, "http://127.0.0.1:1/callback")
        async with McpTools("mail", server=UrlServer(guarded.url, login=login)) as section:
            told, _ = await run(section, None, ToolCall("mail_login"))
    assert "login" in told[0]
    assert list(tmp_path.glob("*")) == [] or "secret-token" not in next(tmp_path.iterdir()).read_text()


async def test_browser_comes_back_by_itself() -> None:
    """The program listens at a loopback address for the browser, and takes the code only from the redirect of this login."""
    free = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = free.sockets[0].getsockname()[1]
    free.close()
    await free.wait_closed()
    async with _listening(f"http://127.0.0.1:{port}/callback", "s") as came_back:
        for path in (
            "/callback?code=evil&state=other",
            "/callback?code=evil",
            "/other?code=evil&state=s",
            "",
        ):
            assert b"This is not the login" in await visited(port, path)
            assert not came_back.done()
        assert b"You are logged in" in await visited(port, "/callback?code=abc&state=s")
        assert _code_in(await came_back).code == "abc"
        assert b"did not succeed" in await visited(port, "/callback?error=access_denied&state=s")


async def visited(port: int, path: str) -> bytes:
    """Return the response that a browser gets at a path."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    found = await reader.read()
    writer.close()
    return found


class WrongState(LogsIn):
    """A person whose answer belongs to a different login."""

    async def ask(self, question: Question, /) -> Answer:
        answer = await super().ask(question)
        ended = re.sub("state=.*", f"state={'x' * 43}", str(answer.value))
        return answer_to(question, ended)


async def test_answer_of_a_different_login(tmp_path: Path) -> None:
    """If the state in the answer is not the one that was sent, the login fails, its code is not used, and no token is kept."""
    guarded = Guarded()
    async with listening(guarded) as guarded.url:
        login = Login(tmp_path, "http://127.0.0.1:1/callback")
        async with McpTools("mail", server=UrlServer(guarded.url, login=login)) as section:
            told, _ = await run(section, WrongState(), ToolCall("mail_login"))
    assert "State parameter mismatch" in told[0]
    assert guarded.grants == []
    assert "secret-token" not in "".join(each.read_text() for each in tmp_path.iterdir())


SECRETS = ("code", "code_verifier", "client_secret", "refresh_token")


def strangers(guarded: Guarded) -> list[Request]:
    """Return the requests with secrets, and those that register a client."""
    return [
        each
        for each in guarded.requests
        if any(name in each.form for name in SECRETS)
        or each.path == "/register"
        or each.headers.get("authorization", "").startswith("Basic")
    ]


@pytest.mark.parametrize("which", ["token_endpoint", "registration_endpoint", "authorization_endpoint"])
async def test_endpoints_that_are_not_the_issuer_s(tmp_path: Path, which: str) -> None:
    """If an endpoint is not on the issuer's origin, the person is shown the issuer and the endpoints first, and asked.

    If they decline, they are not sent to the address, and no code, verifier or secret is sent.
    """
    honest, thief = Guarded(), Guarded()
    async with listening(honest) as honest.url, listening(thief) as thief.url:
        path = {"token_endpoint": "token", "registration_endpoint": "register"}.get(which, "authorize")
        address = f"{thief.url.removesuffix('/mcp')}/{path}"
        honest.changes = {which: address}
        login, person = Login(tmp_path, "http://127.0.0.1:1/callback"), LogsIn()
        async with McpTools("mail", server=UrlServer(honest.url, login=login)) as section:
            told, _ = await run(section, person, ToolCall("mail_login"))
        assert "did not agree" in told[0]
        (question,) = person.questions
        assert question.name == "mcp.login.endpoints"
        assert "mail" in question.message
        base = honest.url.removesuffix("/mcp")
        shown = list(question.payload.values())
        assert {base, address} <= {each.rstrip("/") for each in shown}
        assert strangers(honest) == strangers(thief) == []


async def test_endpoints_that_a_person_or_the_settings_allow(tmp_path: Path) -> None:
    """Endpoints on other origins are used if a person agrees, who is asked once, or if the settings name them. Then nobody is asked."""
    guarded = Guarded()
    async with listening(guarded) as guarded.url:
        other = guarded.url.replace("127.0.0.1", "localhost").removesuffix("/mcp")
        guarded.changes = {"token_endpoint": f"{other}/token"}
        calls = [ToolCall("mail_login"), ToolCall("echo", {"text": "a"})]
        named = Login(tmp_path / "named", "http://127.0.0.1:1/callback", endpoints=[other])
        person = LogsIn()
        async with McpTools("mail", server=UrlServer(guarded.url, login=named)) as section:
            assert (await run(section, person, *calls))[0][1] == "a"
        assert [each.name for each in person.questions] == ["mcp.login"]
        person = LogsIn()
        person.agrees = True
        guarded.grants.clear()
        login = Login(tmp_path / "asked", "http://127.0.0.1:1/callback")
        async with McpTools("mail", server=UrlServer(guarded.url, login=login)) as section:
            assert (await run(section, person, *calls))[0][1] == "a"
        assert [each.name for each in person.questions] == ["mcp.login.endpoints", "mcp.login"]
        (file,) = (tmp_path / "asked").glob("*.json")
        expire(file)
        async with McpTools("mail", server=UrlServer(guarded.url, login=login)) as later:
            assert (await run(later, None, ToolCall("echo", {"text": "b"})))[0] == ["b"]
        assert guarded.grants == ["authorization_code", "refresh_token"]


async def test_a_stored_endpoint_is_checked_too(tmp_path: Path) -> None:
    """A refresh token is not sent to an endpoint that is not on the issuer's origin, even if it was stored by an earlier version."""
    guarded, thief = Guarded(), Guarded()
    async with listening(guarded) as guarded.url, listening(thief) as thief.url:
        server, file = await logged_in(guarded, tmp_path)
        stored = json.loads(file.read_text())
        stored["server"]["token_endpoint"] = f"{thief.url.removesuffix('/mcp')}/token"
        file.write_text(json.dumps(stored))
        async with McpTools("mail", server=server) as later:
            await run(later, None, ToolCall("mail_login"))
        assert thief.requests == []


@pytest.mark.parametrize("issuer", ["", "https://login.example.org"])
async def test_a_secret_belongs_to_its_issuer(tmp_path: Path, issuer: str) -> None:
    """A client's secret is not sent to an issuer that the MCP server names, unless it is the one in the settings, or a person agrees."""
    guarded, thief = Guarded(), Guarded()
    calls = [ToolCall("mail_login"), ToolCall("echo", {"text": "a"})]
    async with listening(guarded) as guarded.url, listening(thief) as thief.url:
        guarded.elsewhere = thief.elsewhere = thief.url.removesuffix("/mcp")
        given: dict[str, Any] = {"client_id": "me", "client_secret": "correct-horse"}
        login = Login(tmp_path / "a", "http://127.0.0.1:1/callback", issuer=issuer, **given)
        person = LogsIn()
        with contextlib.suppress(ServerUnavailable) if issuer else contextlib.nullcontext():
            async with McpTools("mail", server=UrlServer(guarded.url, login=login)) as section:
                told, _ = await run(section, person, *calls)
                assert "did not agree" in told[0]
        assert [each.name for each in person.questions] == ([] if issuer else ["mcp.login.endpoints"])
        assert strangers(guarded) == strangers(thief) == []
        named = Login(tmp_path / "b", "http://127.0.0.1:1/callback", issuer=guarded.elsewhere, **given)
        async with McpTools("mail", server=UrlServer(guarded.url, login=named)) as section:
            assert (await run(section, person, *calls))[0][1] == "a"
        assert thief.requests[-1].form["client_id"] == "me"


async def test_a_registered_secret_stays_with_its_issuer(tmp_path: Path) -> None:
    """A secret from a registration is noted with its issuer. If the server names another one later, the secret is not sent there."""
    guarded, thief = Guarded(), Guarded()
    async with listening(guarded) as guarded.url, listening(thief) as thief.url:
        _, file = await logged_in(guarded, tmp_path)
        stored = json.loads(file.read_text())
        assert stored["client"]["issuer"].rstrip("/") == guarded.elsewhere
        stored["client"]["client_secret"] = "correct-horse"
        stored["client"]["token_endpoint_auth_method"] = "client_secret_post"
        file.write_text(json.dumps({**stored, "tokens": None}))
        guarded.elsewhere = thief.elsewhere = thief.url.removesuffix("/mcp")
        server = UrlServer(guarded.url, login=Login(tmp_path, "http://127.0.0.1:1/callback"))
        async with McpTools("mail", server=server) as section:
            await run(section, LogsIn(), ToolCall("mail_login"))
        assert "correct-horse" not in str(thief.requests)


async def test_metadata_on_a_different_origin(tmp_path: Path) -> None:
    """A server may not say that its metadata is on a different origin. Nothing is requested from there, and nobody is asked."""
    guarded, other = Guarded(), Guarded()
    async with listening(guarded) as guarded.url, listening(other) as other.url:
        guarded.names_metadata = f"{other.url.removesuffix('/mcp')}/.well-known/oauth-protected-resource/mcp"
        person = LogsIn()
        login = Login(tmp_path, "http://127.0.0.1:1/callback")
        with pytest.raises(ServerUnavailable, match="not on its own origin"):
            async with McpTools("mail", server=UrlServer(guarded.url, login=login)) as section:
                await run(section, person, ToolCall("mail_login"))
    assert (other.requests, person.questions) == ([], [])


async def logged_in(guarded: Guarded, folder: Path) -> tuple[UrlServer, Path]:
    """Log in, let the access token expire, and return the server and the file with the tokens."""
    guarded.elsewhere = guarded.url.replace("127.0.0.1", "localhost").removesuffix("/mcp")
    server = UrlServer(guarded.url, login=Login(folder, "http://127.0.0.1:1/callback"))
    async with McpTools("mail", server=server) as section:
        assert (await run(section, LogsIn(), ToolCall("mail_login"), ToolCall("echo", {"text": "a"})))[0][
            1
        ] == "a"
    (file,) = folder.glob("*.json")
    expire(file)
    return server, file


def expire(file: Path) -> None:
    """Set the time at which the access token expires to the past."""
    stored = json.loads(file.read_text())
    assert stored["expires_at"] > 0
    file.write_text(json.dumps({**stored, "expires_at": 1.0}))


async def test_expired_tokens_are_refreshed_without_a_person(tmp_path: Path) -> None:
    """A later connection gets a new access token from the server that issued the old one. The tokens stay private."""
    guarded = Guarded()
    async with listening(guarded) as guarded.url:
        server, file = await logged_in(guarded, tmp_path)
        async with McpTools("mail", server=server) as later:
            assert (await run(later, None, ToolCall("echo", {"text": "b"})))[0] == ["b"]
    assert guarded.grants == ["authorization_code", "refresh_token"]
    assert set(guarded.token_hosts) == {"localhost"}, "the refresh token is sent to its issuer only"
    assert json.loads(file.read_text())["tokens"]["refresh_token"] == "refresh-2"
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}


async def test_processes_share_refreshed_tokens(tmp_path: Path) -> None:
    """Two connections that need a new token at the same time refresh it once, because a refresh token works only once.

    A connection that is open while another one refreshes the token takes over the new tokens.
    """
    guarded = Guarded()
    async with listening(guarded) as guarded.url:
        server, file = await logged_in(guarded, tmp_path)
        async with McpTools("a", server=server, prefix="a_") as one, McpTools("b", server=server) as other:
            assert guarded.grants == ["authorization_code", "refresh_token"]
            expire(file)
            told = await asyncio.gather(
                run(one, None, ToolCall("a_echo", {"text": "1"})),
                run(other, None, ToolCall("echo", {"text": "2"})),
            )
        assert [each[0] for each in told] == [["1"], ["2"]]
    assert guarded.grants == ["authorization_code", "refresh_token", "refresh_token"]


async def test_tokens_of_an_unknown_issuer_are_not_refreshed(tmp_path: Path) -> None:
    """If it is not recorded who issued a refresh token, the token is sent nowhere, and a new login is needed."""
    guarded = Guarded()
    async with listening(guarded) as guarded.url:
        server, file = await logged_in(guarded, tmp_path)
        stored = json.loads(file.read_text())
        guarded.token = "newer-token"
        file.write_text(json.dumps({**stored, "server": None}))
        async with McpTools("mail", server=server) as later:
            told, _ = await run(later, None, ToolCall("mail_login"))
    assert "login" in told[0]
    assert guarded.grants == ["authorization_code"]


def test_address_without_a_code() -> None:
    """An address without a code raises an error that gives the server's reason."""
    with pytest.raises(LoginNeeded, match="access_denied"):
        _code_in("http://127.0.0.1/callback?error=access_denied")


async def test_damaged_file_of_tokens(tmp_path: Path) -> None:
    """An unreadable token file counts as empty, and the next write replaces it."""
    file = TokenFile(tmp_path / "tokens.json")
    for text in ("", "{", "[]", '{"tokens": 3}'):
        file.path.write_text(text)
        assert await file.get_tokens() is None
    await file.set_tokens(OAuthToken(access_token="a"))
    found = await file.get_tokens()
    assert found is not None
    assert found.access_token == "a"


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        ("93.184.216.34", Reach.PUBLIC),
        ("2606:2800:220:1::1", Reach.PUBLIC),
        ("10.1.2.3", Reach.PRIVATE),
        ("100.64.0.1", Reach.PRIVATE),
        ("fd00::1", Reach.PRIVATE),
        ("fec0::1", Reach.PRIVATE),
        ("169.254.169.254", Reach.LINK_LOCAL),
        ("fe80::1%eth0", Reach.LINK_LOCAL),
        ("127.8.9.10", Reach.LOOPBACK),
        ("::1", Reach.LOOPBACK),
        ("0.0.0.0", Reach.LOOPBACK),  # it is not listened at
        ("::", Reach.LOOPBACK),
        ("::ffff:127.0.0.1", Reach.LOOPBACK),
        ("::ffff:10.0.0.1", Reach.PRIVATE),
        ("64:ff9b::a9fe:a9fe", Reach.LINK_LOCAL),
        ("2002:7f00:1::", Reach.LOOPBACK),
    ],
)
def test_reach_of_an_address(address: str, reach: Reach) -> None:
    """An address is public, private, link-local or loopback, also if it is written as an IPv6 address."""
    assert reach_of(address) is reach


@pytest.fixture
def borders(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function from whose call on 127.0.0.1 counts as public, and every other address as loopback."""

    def start() -> None:
        monkeypatch.setattr(
            addresses,
            "reach_of",
            lambda address: Reach.PUBLIC if address == "127.0.0.1" else Reach.LOOPBACK,
        )

    return start


@pytest.mark.parametrize("which", ["issuer", "token_endpoint", "registration_endpoint"])
async def test_a_login_does_not_lead_to_an_internal_address(
    tmp_path: Path, borders: Callable[[], None], which: str
) -> None:
    """A public server can't make a login connect to an internal address, even if the settings allow it. Nothing is requested there."""
    borders()
    guarded, internal = Guarded(), Guarded()
    async with listening(guarded) as guarded.url, listening(internal, "127.0.0.2") as internal.url:
        internal_origin = internal.url.removesuffix("/mcp")
        if which == "issuer":
            guarded.elsewhere = internal_origin
        else:
            guarded.changes = {which: f"{internal_origin}/admin"}
        login = Login(tmp_path, "http://127.0.0.1:1/callback", endpoints=[internal_origin])
        told = ""
        try:
            async with McpTools("mail", server=UrlServer(guarded.url, login=login)) as section:
                told = (await run(section, LogsIn(), ToolCall("mail_login")))[0][0]
        except ServerUnavailable as error:
            told = str(error)
    assert "which has a loopback address, and its own address is public" in told
    assert internal.requests == []


async def test_an_internal_server_may_name_internal_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is not public can name addresses that are as public as its own."""
    monkeypatch.setattr(addresses, "reach_of", lambda address: Reach.PRIVATE)
    guarded, issuer = Guarded(), Guarded()
    async with listening(guarded) as guarded.url, listening(issuer, "127.0.0.2") as issuer.url:
        guarded.elsewhere = issuer.elsewhere = issuer.url.removesuffix("/mcp")
        server = UrlServer(guarded.url, login=Login(tmp_path, "http://127.0.0.1:1/callback"))
        async with McpTools("mail", server=server) as section:
            told, _ = await run(section, LogsIn(), ToolCall("mail_login"), ToolCall("echo", {"text": "a"}))
    assert told[1] == "a"


async def test_tokens_are_not_refreshed_at_an_internal_address(
    tmp_path: Path, borders: Callable[[], None]
) -> None:
    """Expired tokens are refreshed before the server is connected to. A stored endpoint at an internal address is refused then too."""
    guarded, issuer = Guarded(), Guarded()
    async with listening(guarded) as guarded.url, listening(issuer, "127.0.0.2") as issuer.url:
        guarded.elsewhere = issuer.elsewhere = issuer.url.removesuffix("/mcp")
        server = UrlServer(guarded.url, login=Login(tmp_path, "http://127.0.0.1:1/callback"))
        async with McpTools("mail", server=server) as section:
            await run(section, LogsIn(), ToolCall("mail_login"))
        (file,) = tmp_path.glob("*.json")
        expire(file)
        issuer.requests.clear()
        borders()
        with pytest.raises(ServerUnavailable, match="which has a loopback address"):
            async with McpTools("mail", server=server) as later:
                await run(later, None)
    assert issuer.requests == []


@pytest.mark.parametrize("moves", ["issuer", "server"])
async def test_a_name_that_changes_its_address(
    tmp_path: Path, borders: Callable[[], None], monkeypatch: pytest.MonkeyPatch, moves: str
) -> None:
    """DNS rebinding does not help: the address that is connected to is the one that counts, for the server itself too."""
    borders()
    guarded, internal = Guarded(), Guarded()
    found, asked = socket.getaddrinfo, list[str]()

    def lookup(host: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if name.endswith(".test"):
            asked.append(name)
            is_moved = name == f"{moves}.test" and asked.count(name) > 1
            host = "127.0.0.2" if is_moved else "127.0.0.1"
        return found(host, *arguments, **options)

    def answer(request: Request) -> Reply:
        reply = guarded(request)
        closes = {**reply.headers, "Connection": "close"}  # so that the next request needs a new connection
        return reply._replace(headers=closes)

    async with listening(answer) as url:
        port = urlsplit(url).port or 0
        async with listening(internal, "127.0.0.2", port):
            monkeypatch.setattr(socket, "getaddrinfo", lookup)
            guarded.url, guarded.elsewhere = f"http://server.test:{port}/mcp", f"http://issuer.test:{port}"
            login = Login(tmp_path, "http://127.0.0.1:1/callback")
            with pytest.raises(ServerUnavailable, match="address"):
                async with McpTools("mail", server=UrlServer(guarded.url, login=login)) as section:
                    await run(section, LogsIn(), ToolCall("mail_login"))
    assert asked.count(f"{moves}.test") > 1
    assert internal.requests == []


@pytest.mark.parametrize(
    ("path", "status"), [("/register", 403), ("/register", 201), ("/token", 400), ("/token", 200)]
)
async def test_errors_quote_no_other_host(tmp_path: Path, path: str, status: int) -> None:
    """If a login fails, the error names the host and its HTTP status, and has nothing of what the host answered."""
    guarded, issuer = Guarded(), Guarded()

    def answer(request: Request) -> Reply:
        if request.path == path:
            body = b'{"access_token": ["db_password=hunter2"], "client_id": ["hunter2"]}'
            return Reply(status, {"Content-Type": "application/json"}, [body])
        return issuer(request)

    async with listening(guarded) as guarded.url, listening(answer, "127.0.0.2") as issuer.url:
        guarded.elsewhere = issuer.url.removesuffix("/mcp")
        login, told = Login(tmp_path, "http://127.0.0.1:1/callback"), ""
        try:
            async with McpTools("mail", server=UrlServer(guarded.url, login=login)) as section:
                told = (await run(section, LogsIn(), ToolCall("mail_login")))[0][0]
        except ServerUnavailable as error:
            told = str(error)
    assert f"The last answer of {guarded.elsewhere} had the HTTP status {status}" in told
    assert "hunter2" not in told
