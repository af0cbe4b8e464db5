"""Accounts: each principal has their own login to an MCP server, with its own connection and tools."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from handrail import Adapter, Prompt, ScriptedModel, Session, ToolCall
from handrail.mcp import Login, McpTools, ToolServer, UrlServer, connection, section
from handrail.messages import ToolMessage
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.tools import RunMode
from support.mcp_http import Reply, Request, json_reply, listening, ordinary
from support.parked_runs import answer_to


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pause after a failed attempt to connect."""
    monkeypatch.setattr(connection, "FIRST_WAIT", 0.0)


class Person(Environment):
    """A person who logs in with their own account when they are asked."""

    run_mode: RunMode = "user"

    def __init__(self, name: str) -> None:
        self.name = name
        self.questions: list[Question] = []

    async def ask(self, question: Question, /) -> Answer:
        self.questions.append(question)
        asked = parse_qs(urlsplit(question.payload["url"]).query)
        ended = f"{asked['redirect_uri'][0]}?code={self.name}&state={asked['state'][0]}"
        return answer_to(question, ended)


class Mailboxes:
    """A server with a mailbox for each account, which is also its own authorization server."""

    def __init__(self) -> None:
        self.url = ""
        self.sessions: list[str] = []
        """The account of each session that was begun."""

    def __call__(self, request: Request) -> Reply:
        base, path = self.url.removesuffix("/mcp"), urlsplit(request.path).path
        if path == "/mcp":
            return self._mail(request)
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
            },
            "/register": {"client_id": "me", "redirect_uris": request.message.get("redirect_uris", [])},
            "/token": {"access_token": request.form.get("code"), "token_type": "Bearer", "expires_in": 3600},
        }
        if path not in found:
            return Reply(404)
        status = 201 if path == "/register" else 200
        return Reply(status, {"Content-Type": "application/json"}, [json.dumps(found[path]).encode()])

    def _mail(self, request: Request) -> Reply:
        account = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not account:
            base = self.url.removesuffix("/mcp")
            where = f'Bearer resource_metadata="{base}/.well-known/oauth-protected-resource/mcp"'
            return Reply(401, {"WWW-Authenticate": where})
        match request.message.get("method"):
            case "initialize":
                self.sessions.append(account)
                return ordinary(request)
            case "tools/list":
                names = ["read_mail", f"mail_of_{account}"]
                tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
                return json_reply(request.message, {"tools": tools})
            case "tools/call":
                return json_reply(
                    request.message, {"content": [{"type": "text", "text": f"mail of {account}"}]}
                )
            case _:
                return ordinary(request)


def mail(server: Mailboxes, folder: Path) -> McpTools:
    """Return a section with a mail server that requires a login."""
    login = Login(folder, "http://127.0.0.1:1/callback")
    effects: Any = {"read_mail": "read"}
    return McpTools("mail", server=UrlServer(server.url, login=login, mode="legacy"), effects=effects)


async def run(tools: McpTools, person: Person, *calls: str, more: Any = ()) -> tuple[list[str], list[str]]:
    """Run as this person. Returns what their calls returned, and the names of the tools that they were offered at first."""
    model = ScriptedModel([*(ToolCall(name) for name in calls), "Done."])
    await Adapter(model).evaluate(
        Prompt("guide", ["Go.", tools] if not more else ["Go."]),
        "hi",
        tools=more,
        environment=person,
        session=Session(principal=person.name),
        approvals="approve_all",
    )
    messages = model.requests[-1].messages
    told = [one.text for each in messages if isinstance(each, ToolMessage) for one in each.results]
    return told, [each.tool.name for each in model.requests[0].tools]


@pytest.mark.parametrize(("first", "second"), [("ann", "bob"), ("mallory", "ann"), ("local", "bob")])
async def test_each_principal_logs_in_on_their_own(tmp_path: Path, first: str, second: str) -> None:
    """A principal is asked to log in although another one has logged in, and their calls use their own account.

    Their tools are those of their own account. Later connections find each principal's tokens again.
    """
    one, other = Person(first), Person(second)
    server = Mailboxes()
    async with listening(server) as server.url:
        async with mail(server, tmp_path) as tools:
            assert (await run(tools, one, "mail_login", "read_mail"))[0][1] == f"mail of {first}"
            told, offered = await run(tools, other, "mail_login", "read_mail")
            assert (told[1], offered) == (f"mail of {second}", ["mail_login"])
            assert await run(tools, one, "read_mail") == (
                [f"mail of {first}"],
                ["read_mail", f"mail_of_{first}"],
            )
        assert [each.principal for each in (*one.questions, *other.questions)] == [first, second]
        async with mail(server, tmp_path) as later:
            for person in (other, one):
                assert (await run(later, person, "read_mail"))[0] == [f"mail of {person.name}"]
    assert len(one.questions) == len(other.questions) == 1
    kept = [json.loads(file.read_text()).get("tokens") for file in tmp_path.glob("*.json")]
    assert sorted(each["access_token"] for each in kept if each) == sorted([first, second])


class Waits(Person):
    """A person who answers when `go` is set. `asked` is set when they are asked."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def ask(self, question: Question, /) -> Answer:
        self.asked.set()
        await self.go.wait()
        return await super().ask(question)


async def test_who_needs_a_login_is_asked(tmp_path: Path) -> None:
    """Two principals who log in at the same time are each asked by their own call, and the answer of one does not log in the other."""
    server, ann, bob = Mailboxes(), Waits("ann"), Waits("bob")
    async with listening(server) as server.url, mail(server, tmp_path) as tools:
        runs = [asyncio.create_task(run(tools, each, "mail_login", "read_mail")) for each in (ann, bob)]
        await asyncio.gather(ann.asked.wait(), bob.asked.wait())
        bob.go.set()
        assert (await runs[1])[0][1] == "mail of bob"
        assert not runs[0].done()
        ann.go.set()
        assert (await runs[0])[0][1] == "mail of ann"
    assert [each.principal for each in (*ann.questions, *bob.questions)] == ["ann", "bob"]


async def test_a_tool_from_the_list_of_another_principal(tmp_path: Path) -> None:
    """Which account a call uses depends on the call's principal, not on whose list the tool is from."""
    server, ann, bob = Mailboxes(), Person("ann"), Person("bob")
    async with listening(server) as server.url, mail(server, tmp_path) as tools:
        await run(tools, ann, "mail_login")
        read = tools.current_tools("ann")
        assert (await run(tools, bob, "read_mail", more=read))[0] == ["mail of bob"]
    assert [each.principal for each in bob.questions] == ["bob"]


async def test_clients_of_a_server_have_their_own_accounts(tmp_path: Path) -> None:
    """An MCP server lists and calls the tools of the account of the principal who asks."""
    server = Mailboxes()
    async with listening(server) as server.url, mail(server, tmp_path) as tools:
        await run(tools, Person("ann"), "mail_login")
        served = ToolServer(Prompt("mail", ["Go.", tools]), approvals="approve_all")
        assert list(await served.tools.all("ann")) == ["read_mail", "mail_of_ann"]
        assert list(await served.tools.all("bob")) == ["mail_login"]
        read = (await served.tools.all("ann"))["read_mail"]
        call = await served.calls.begin(read, {}, principal="ann", asks=False)
        assert await call.wait()
        assert call.task.result().message == "mail of ann"
        await served.calls.stop()


def connections(tools: McpTools, *principals: str) -> list[bool]:
    """Return whether each of these principals has an open connection."""
    return [tools.server.account(each).connection.is_open for each in principals]


async def test_connections_of_idle_principals_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If more principals than `MOST_OPEN` use a server, the connection unused for longest is closed, and opened again when it is needed."""
    monkeypatch.setattr(section, "MOST_OPEN", 2)
    server, people = Mailboxes(), [Person(name) for name in ("ann", "bob", "eve")]
    async with listening(server) as server.url, mail(server, tmp_path) as tools:
        await tools.close()  # the local principal's
        for person in people:
            await run(tools, person, "mail_login", "read_mail")
        assert connections(tools, "ann", "bob", "eve") == [False, True, True]
        assert (await run(tools, people[0], "read_mail"))[0] == ["mail of ann"]
        assert connections(tools, "ann", "bob", "eve") == [True, False, True]
    assert [len(each.questions) for each in people] == [1, 1, 1]


async def test_a_server_without_login_has_one_connection() -> None:
    """All principals share the connection to a server without a login."""
    began: list[Request] = []

    def answer(request: Request) -> Reply:
        if request.message.get("method") == "initialize":
            began.append(request)
        return ordinary(request)

    async with listening(answer) as url, McpTools("trial", url=url) as tools:
        for name in ("ann", "bob", "local"):
            await run(tools, Person(name), "echo")
        assert tools.server.account("ann") is tools.server.account("bob")
    assert len(began) == 1
