"""A question that asks for a secret is asked on a page of the server, never in a form of the client.

If the server has no page, or the client can't open addresses, the call fails.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2
import pytest
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ElicitRequestURLParams, ElicitResult
from pydantic import BaseModel, SecretStr

from handrail import CapabilityPolicy, Prompt, ToolContext, UserContext, gather, tool
from handrail.journal.sqlite import MemoryJournal
from handrail.mcp import ToolServer
from handrail.mcp.forms import answer_of, form_of
from handrail.question import Question
from mcp import Client
from support import PATIENCE
from support.mcp_served import serving
from support.serving import BEARER, TOKEN

PASSWORD = "correct horse battery staple"
modes = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])


class Account(BaseModel):
    """The fields of a login."""

    user: str
    password: SecretStr


@tool(effect="read")
async def log_in(*, context: UserContext) -> str:
    """Log in."""
    given = await context.wait_for("account", {"site": "example.org"}, Account)
    return f"{given.user} has {len(given.password.get_secret_value())} characters"


PROMPT = Prompt("shop", "Sell.", tools=[log_in], policies=[CapabilityPolicy()])


class Person:
    """The person at a client. They open addresses, and answer on the page as its script does."""

    def __init__(self, token: str = TOKEN, **answer: Any) -> None:
        self.asked: list[Any] = []
        self.said: list[tuple[int, dict[str, Any]]] = []
        self._token = token
        self._answer = answer or {"value": {"user": "ann", "password": PASSWORD}}

    async def elicit(self, context: Any, params: Any) -> ElicitResult:
        self.asked.append(params)
        if "action" in self._answer:
            return ElicitResult(action=self._answer["action"])
        if not isinstance(params, ElicitRequestURLParams):
            return ElicitResult(action="accept", content={"user": "ann", "password": PASSWORD})
        await self.open(params.url)
        return ElicitResult(action="accept")

    async def open(self, url: str) -> None:
        where = urlsplit(url)
        named = {name: given[0] for name, given in parse_qs(where.fragment).items()}
        address = f"{where.scheme}://{where.netloc}/question"
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        async with httpx2.AsyncClient(headers=headers, timeout=PATIENCE) as http:
            shown = await http.get(address, params=named)
            self.said.append((shown.status_code, shown.json()))
            sent = {**named, "digest": shown.json().get("digest", ""), **self._answer}
            said = await http.post(address, json=sent)
            self.said.append((said.status_code, said.json()))


@asynccontextmanager
async def connected(url: str, mode: Any, person: Person) -> AsyncGenerator[Client]:
    async with (
        httpx2.AsyncClient(headers=BEARER, timeout=PATIENCE) as http,
        Client(
            streamable_http_client(url, http_client=http), mode=mode, elicitation_callback=person.elicit
        ) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("mode", "is_recorded"), [("legacy", True), ("2026-07-28", False), ("2026-07-28", True)]
)
async def test_a_secret_is_asked_for_on_the_servers_page(mode: str, is_recorded: bool) -> None:
    """The client gets an address in place of a form. The question is shown and answered there.

    The record of the call does not contain the secret.
    """
    journal = MemoryJournal() if is_recorded else None
    person = Person()
    async with (
        serving(ToolServer(PROMPT, journal=journal)) as url,
        connected(url, mode, person) as client,
    ):
        found: Any = await client.call_tool("log_in", {})
    assert found.content[0].text == "ann has 28 characters"
    [asked] = person.asked
    assert isinstance(asked, ElicitRequestURLParams)
    assert "example.org" in asked.message
    [(_, shown), said] = person.said
    assert (shown["message"], shown["tool"]) == ("Please answer: account.", "log_in")
    assert shown["rows"][0]["text"] == "example.org"
    assert said == (200, {"outcome": "answered"})
    if journal is not None:
        [row] = await journal.runs.list()
        units = await journal.calls.load(row.record.id)
        assert PASSWORD not in str(units) + str(row)


@modes
async def test_a_call_waits_until_the_page_was_answered(mode: str) -> None:
    """If the person agrees to open the address but answers later, the call waits for the answer."""
    person = Person()
    later: list[asyncio.Task[None]] = []

    async def agree(context: Any, params: Any) -> ElicitResult:
        later.append(asyncio.create_task(person.open(params.url)))
        return ElicitResult(action="accept")

    person.elicit = agree  # type: ignore[method-assign]
    async with serving(ToolServer(PROMPT)) as url, connected(url, mode, person) as client:
        found: Any = await client.call_tool("log_in", {})
    assert found.content[0].text == "ann has 28 characters"
    assert len(later) == 1


@modes
async def test_a_person_declines(mode: str) -> None:
    """A question can be declined on the page or at the client, and the call's error says where."""
    on_page, at_client = Person(decline=True), Person(action="decline")
    async with serving(ToolServer(PROMPT)) as url:
        for person, reason in ((on_page, "declined on the page"), (at_client, "declined at the client")):
            async with connected(url, mode, person) as client:
                found: Any = await client.call_tool("log_in", {})
            assert found.is_error
            assert reason in found.content[0].text


@modes
async def test_without_an_address_a_secret_is_refused_in_words(mode: Any) -> None:
    """A server on standard input and output has no page, so the call fails and says what to do. No form is shown."""
    person = Person()
    server = ToolServer(PROMPT, journal=MemoryJournal())
    async with Client(server.server, mode=mode, elicitation_callback=person.elicit) as client:
        found: Any = await client.call_tool("log_in", {})
    assert person.asked == []
    assert found.is_error
    assert "asks for a secret" in found.content[0].text
    assert "--http" in found.content[0].text


async def test_a_client_that_opens_no_addresses_is_refused_in_words() -> None:
    """If the client can't open addresses, the call fails and says why, although the server has a page. No form is sent."""
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {
            "name": "log_in",
            "arguments": {},
            "_meta": {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {"elicitation": {"form": {}}},
            },
        },
    }
    headers = {
        **BEARER,
        "Accept": "application/json, text/event-stream",
        "Mcp-Method": "tools/call",
        "Mcp-Name": "log_in",
        "MCP-Protocol-Version": "2026-07-28",
    }
    async with (
        serving(ToolServer(PROMPT)) as url,
        httpx2.AsyncClient(headers=headers, timeout=PATIENCE) as http,
    ):
        found = await http.post(url, json=body)
    assert "asks for a secret" in found.text
    assert "opens addresses" in found.text
    assert "inputRequests" not in found.text


async def test_only_the_caller_may_answer() -> None:
    """A different user can neither see nor answer the question, and neither can somebody without a token."""

    def authenticate(request: Any) -> str | None:
        return request.headers.get("authorization", "").removeprefix("Bearer ") or None

    person, stranger, nobody = Person(), Person("bob"), Person("")
    done: list[Any] = []

    async def elicit(context: Any, params: Any) -> ElicitResult:
        for each in (stranger, nobody, person):
            await each.open(params.url)
        return ElicitResult(action="accept")

    person.elicit = elicit  # type: ignore[method-assign]
    served = ToolServer(PROMPT, journal=MemoryJournal())
    async with (
        serving(served, token=None, authenticate=authenticate) as url,
        connected(url, "2026-07-28", person) as client,
    ):
        done.append(await client.call_tool("log_in", {}))
    assert done[0].content[0].text == "ann has 28 characters"
    assert [status for status, _ in stranger.said] == [404, 404]
    assert [status for status, _ in nobody.said] == [401, 401]
    assert "example.org" not in json.dumps(stranger.said + nobody.said)


@pytest.mark.parametrize("is_recorded", [False, True])
async def test_a_question_is_shown_and_answered_while_its_call_still_works(is_recorded: bool) -> None:
    """The page waits neither for the rest of the call nor for a question that nobody asks."""
    working = asyncio.Event()

    @tool(effect="read")
    async def work() -> str:
        """Work until the page was answered."""
        await working.wait()
        return "worked"

    @tool(effect="read")
    async def log_in_and_work(*, context: ToolContext) -> str:
        """Log in while working."""
        found, _ = await gather(context.call("log_in"), context.call("work"))
        return found.render()

    person = Person()
    prompt = Prompt("shop", "Sell.", tools=[log_in, work, log_in_and_work], policies=[CapabilityPolicy()])
    served = ToolServer(prompt, journal=MemoryJournal() if is_recorded else None)
    async with serving(served) as url, connected(url, "legacy", person) as client:
        calling = asyncio.ensure_future(client.call_tool("log_in_and_work", {}))
        while not (live := [each for each in served.calls._live.values() if each.questions]):  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.01)
        [call] = live
        assert call.rests != is_recorded
        for question in ("none", next(iter(call.questions))):
            fragment = urlencode({"call": call.run_id, "question": question})
            await person.open(f"{url.removesuffix('/mcp')}/#{fragment}")
        working.set()
        found: Any = await calling
    assert [status for status, _ in person.said[:4]] == [404, 404, 200, 200]
    assert found.content[0].text == "ann has 28 characters"


async def test_a_question_survives_the_server() -> None:
    """After a restart of the server, its page resumes the parked call with the answer, and the client gets the result."""
    journal = MemoryJournal()
    person = Person()
    async with (
        serving(ToolServer(PROMPT, journal=journal)) as url,
        connected(url, "2026-07-28", person) as client,
    ):
        asked: Any = await client.session.call_tool("log_in", {}, allow_input_required=True)
    [(key, request)] = asked.input_requests.items()
    async with (
        serving(ToolServer(PROMPT, journal=journal)) as url,
        connected(url, "2026-07-28", person) as client,
    ):
        moved = urlsplit(request.params.url)._replace(netloc=urlsplit(url).netloc)
        await person.open(moved.geturl())
        found: Any = await client.session.call_tool(
            "log_in",
            {},
            input_responses={key: ElicitResult(action="accept")},
            request_state=asked.request_state,
        )
    assert person.said[1] == (200, {"outcome": "answered"})
    assert found.content[0].text == "ann has 28 characters"


async def test_a_wrong_answer_and_a_changed_question_are_refused() -> None:
    """An answer that does not match the schema is refused with the reason, and so is one for a changed question.

    The question stays open.
    """
    wrong, stale, right = Person(value={"user": "ann"}), Person(value={}, digest="x"), Person()

    async def elicit(context: Any, params: Any) -> ElicitResult:
        for each in (wrong, stale, right):
            await each.open(params.url)
        return ElicitResult(action="accept")

    right.elicit = elicit  # type: ignore[method-assign]
    async with serving(ToolServer(PROMPT)) as url, connected(url, "2026-07-28", right) as client:
        found: Any = await client.call_tool("log_in", {})
    assert found.content[0].text == "ann has 28 characters"
    assert wrong.said[1][0] == 422
    assert "password" in json.dumps(wrong.said[1][1])
    assert stale.said[1][0] == 409


def test_no_form_is_made_for_a_secret() -> None:
    """A question that asks for a secret gets no form, and a client's form response is not taken as its answer."""
    asked = Question(
        id="1", kind="input", name="password", message="", payload={}, schema={"type": "string"}, digest="d",
        principal="ann", asked_by=(), call_id="c", asked_at=datetime(2030, 1, 1, tzinfo=UTC), secret=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="secret"):
        form_of(asked)
    assert answer_of(asked, ElicitResult(action="accept", content={"value": PASSWORD})) is None
    declined = answer_of(asked, ElicitResult(action="decline"))
    assert declined is not None
    assert declined.outcome == "declined"
