"""`McpTools`: calls to a server's tools through the gate, and servers that misbehave."""

import asyncio
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import BlobResourceContents, EmbeddedResource, ImageContent, ResourceLink

import support
from handrail import (
    Adapter,
    CapabilityPolicy,
    LaterEnvironment,
    MemoryJournal,
    Prompt,
    PromptResponse,
    ScriptedModel,
    ToolCall,
    tool,
)
from handrail.errors import DefinitionError, PromptValidationError, RunParked
from handrail.events import Progress, ToolInvoked
from handrail.journal.sqlite import SqliteJournal
from handrail.mcp import McpTools, StdioServer, ToolServer, transport
from handrail.mcp import connection as connections
from handrail.mcp.connection import ServerLost, ServerUnavailable
from handrail.mcp.contents import attachments_in, text_of
from handrail.mcp.tools import MAX_NAME, capabilities_of, map_names
from handrail.messages import ToolMessage
from handrail.session import Session
from handrail.testing import Person
from handrail.text.secrets import Secrets
from mcp import Client
from support import PATIENCE
from support.npm_servers import event_of_listing
from support.parked_runs import answer_to
from support.texts import MCP_OUTCOME_UNKNOWN

SERVER = Path(support.__path__[0]) / "mcp_server.py"


def server(*arguments: object, env: Mapping[str, str] | None = None, **options: Any) -> McpTools:
    """Return a section with the tools of a server that misbehaves on request."""
    command = [sys.executable, "-S", str(SERVER), *map(str, arguments)]
    return McpTools("trial", server=StdioServer(command, env or {}), **options)


async def run(
    section: McpTools, *calls: ToolCall, **options: Any
) -> tuple[PromptResponse[Any], list[str], ScriptedModel]:
    """Make the calls in order in one run. Returns the response, the results that the model received, and the model."""
    model = ScriptedModel([*calls, "Done."])
    tools, policies = options.pop("tools", ()), options.pop("policies", ())
    prompt = Prompt("guide", ["Go.", section], tools=tools, policies=policies)
    response = await Adapter(model).evaluate(prompt, "hi", **options)
    messages = model.requests[-1].messages
    told = [one.text for each in messages if isinstance(each, ToolMessage) for one in each.results]
    return response, told, model


async def test_tools_of_a_server_in_a_run() -> None:
    """A server's tools are offered with its schemas, under names a model can write, and called by the server's names.

    They are irreversible. A tool whose schema refers to another document is left out.
    """
    async with server() as section:
        _, told, model = await run(
            section, ToolCall("echo", {"text": "a"}), ToolCall("Send_Mail", {"text": "b"})
        )
    assert told == ["echo: a", "Send.Mail: b"]
    offered = {each.tool.name: each.tool for each in model.requests[0].tools}
    assert offered["echo"].json_schema["required"] == ["text"]
    assert "remote" not in offered  # its schema refers to another document
    assert {each.effect for each in offered.values()} == {"irreversible"}


async def test_invalid_arguments_do_not_reach_the_server() -> None:
    """An argument that does not match the server's schema is refused. One that the schema does not mention is allowed."""
    async with server() as section:
        _, told, _ = await run(
            section, ToolCall("echo", {"text": 3}), ToolCall("echo", {"text": "a", "more": 1})
        )
    assert "text must be text" in told[0]
    assert told[1] == "echo: a"


async def test_effects_only_by_the_user() -> None:
    """A tool is irreversible, unless the user declares its effect, or trusts annotations that call it read-only."""
    async with (
        server(trust_annotations=True) as trusted,
        server(effects={"echo": "idempotent"}) as told,
        server() as plain,
    ):
        found = [
            {tool.name: tool.effect for tool in each.current_tools()}["echo"]
            for each in (trusted, told, plain)
        ]
        assert {tool.name: tool.effect for tool in trusted.current_tools()}["Send_Mail"] == "irreversible"
    assert found == ["read", "idempotent", "irreversible"]


async def test_policies_approvals_and_events() -> None:
    """A policy asks a person to approve a call to a server's tool. The call is made only if the person approves it."""
    for approve in (True, False):
        person = Person(approve=approve)
        async with server(policies=[CapabilityPolicy()]) as section:
            _, told, _ = await run(section, ToolCall("echo", {"text": "a"}), environment=person)
        assert [question.kind for question in person.questions] == ["approval"]
        assert ("echo: a" in told[0]) is approve


async def test_progress_is_published() -> None:
    """The progress that a server reports becomes the progress of the call. The end of the call is published once."""
    async with server() as section:
        model = ScriptedModel([ToolCall("echo", {"text": "a"}), "Done."])
        stream = Adapter(model).stream(Prompt("guide", ["Go.", section]), "hi")
        events = [event async for event in stream]
    assert [(each.done, each.total) for each in events if isinstance(each, Progress)] == [(1, 2)]
    assert [each.tool for each in events if isinstance(each, ToolInvoked)] == ["echo"]


async def test_progress_is_requested_only_if_somebody_listens() -> None:
    """A call asks the server for progress only if somebody subscribes to it: to `Progress`, or to everything."""
    told: list[str] = []
    async with server() as section:
        for kind in (None, ToolInvoked, Progress, object):
            session = Session()
            if kind is not None:
                session.dispatcher.subscribe(kind, lambda event: None)
            told += (await run(section, ToolCall("meta"), session=session))[1]
    assert ["progressToken" in each for each in told] == [False, False, True, True]


async def test_other_content_is_described_and_attached() -> None:
    """An image becomes an attachment of the result, and the text gives its media type and size."""
    async with server() as section:
        _, told, model = await run(section, ToolCall("pixels"))
    assert told == ["[image/png, 12 kB]"]
    (message,) = [each for each in model.requests[-1].messages if isinstance(each, ToolMessage)]
    (picture,) = message.results[0].attachments
    assert (picture.media_type, picture.size) == ("image/png", 12_000)


def test_invalid_content_is_left_out() -> None:
    """Data that is not base64, or whose media type is invalid, is not attached; a valid file is. A link is described."""
    blocks = [
        ImageContent(data="%%%", mime_type="image/png"),
        ImageContent(data="AAAA", mime_type="no type"),
        EmbeddedResource(
            resource=BlobResourceContents(uri="file:///a/b.bin", blob="AAAA", mime_type="application/x-b")
        ),
        ResourceLink(name="page", uri="https://example.com/a.png"),
    ]
    assert [each.name for each in attachments_in(blocks, Secrets())] == ["b.bin"]
    assert text_of(blocks).endswith("[link to page: https://example.com/a.png]")


async def test_question_of_a_server() -> None:
    """A server's question reaches the person.

    The server gets the answer, `decline` if the person declines, or `cancel` if nobody can be asked.
    """
    async with server() as section:
        person = Person(answers={"mcp.form": {"size": 4}})
        _, told, _ = await run(section, ToolCall("ask"), environment=person)
        _, declined, _ = await run(section, ToolCall("ask"), environment=Person())
        _, nobody, _ = await run(section, ToolCall("ask"))
    assert told == ['{"action": "accept", "content": {"size": 4}}']
    assert declined == ['{"action": "decline"}']
    assert nobody == ['{"action": "cancel"}']
    assert person.questions[0].payload["message"] == "Which size?"


async def test_question_of_a_run_that_is_parked(caplog: pytest.LogCaptureFixture) -> None:
    """A question that parks the run is cancelled for the server, without an error in the log. The resumed call asks again."""
    async with server(effects={"ask": "read"}) as section:
        model, journal = ScriptedModel([ToolCall("ask"), "Done."]), MemoryJournal()
        adapter, prompt = Adapter(model, journal=journal), Prompt("guide", ["Go.", section])
        with pytest.raises(RunParked) as parked:
            await adapter.evaluate(prompt, "hi", environment=LaterEnvironment())
        journal.questions.answer(answer_to(parked.value.questions[0], {"size": 4}))
        await adapter.resume(parked.value.run_id, prompt, environment=LaterEnvironment())
    assert '{"size": 4}' in model.requests[-1].messages[-1].text
    assert [each for each in caplog.records if each.levelname == "ERROR" or each.exc_info] == []


async def test_question_of_an_unknown_call() -> None:
    """A server's question, which names no call, is cancelled while calls of two principals are in progress.

    If all calls in progress belong to one principal, that principal's person is asked.
    """
    ann, bob = Person(answers={"mcp.form": {"size": 4}}), Person(answers={"mcp.form": {"size": 5}})
    async with server() as section:
        hanging = asyncio.ensure_future(
            run(section, ToolCall("hang"), environment=ann, session=Session(principal="ann"))
        )
        while not section.server.account("local").calls:
            await asyncio.sleep(0.01)
        _, told, _ = await run(section, ToolCall("ask"), environment=bob, session=Session(principal="bob"))
        hanging.cancel()
        await asyncio.wait([hanging])
        _, alone, _ = await run(section, ToolCall("ask"), environment=bob, session=Session(principal="bob"))
    assert told == ['{"action": "cancel"}']
    assert [len(ann.questions), len(bob.questions)] == [0, 1]
    assert alone == ['{"action": "accept", "content": {"size": 5}}']


async def test_defaults_of_a_question(tmp_path: Path) -> None:
    """The person is shown the values that a server suggests. The server gets the answer as it is, without them if they were cleared.

    The question's schema may contain formats and titles.
    """
    async with server(tmp_path / "state") as section:
        keeps = Person(answers={"mcp.form": lambda form: {**form["suggested"], "size": 4}})
        clears = Person(answers={"mcp.form": {"size": 4}})
        _, kept, _ = await run(section, ToolCall("ask"), environment=keeps)
        _, cleared, _ = await run(section, ToolCall("ask"), environment=clears)
    assert kept == ['{"action": "accept", "content": {"size": 4, "unit": "cm"}}']
    assert cleared == ['{"action": "accept", "content": {"size": 4}}']
    (question,) = clears.questions
    assert (
        question.message == "The MCP server trial asks this, not Handrail. Your answer is sent to the server."
    )


# --- servers that misbehave ---


async def test_server_that_dies(tmp_path: Path) -> None:
    """If a server dies, a read-only call is retried; the outcome of an irreversible call is unknown.

    The next call works.
    """
    async with server(tmp_path / "state", trust_annotations=True) as section:
        _, told, _ = await run(section, ToolCall("die"), ToolCall("echo", {"text": "a"}))
    assert told == ["survived", "echo: a"]
    async with server() as section:
        _, told, _ = await run(section, ToolCall("die"), ToolCall("echo", {"text": "a"}))
    assert MCP_OUTCOME_UNKNOWN in told[0]
    assert told[1] == "echo: a"


@pytest.mark.parametrize(("name", "why"), [("flood", "without an answer"), ("huge", "more than 16 MB")])
async def test_server_that_floods(name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends too much is disconnected, and the next call works."""
    monkeypatch.setattr(transport, "MAX_UNASKED", 500)
    async with server() as section:
        _, told, _ = await run(section, ToolCall(name), ToolCall("echo", {"text": "a"}))
    assert why in told[0]
    assert told[1] == "echo: a"


async def test_server_that_sends_rubbish() -> None:
    """A line that is not a message is skipped; an invalid answer fails the call at once.

    An unpaired surrogate, which a JavaScript program may send, is replaced. A deeply nested answer is read.
    """
    words = ("{", "null", "[1]", "half", "deep", "answer", "word")
    async with server(timeout=None) as section:
        _, told, _ = await run(section, *(ToolCall("rubbish", {"text": word}) for word in words))
    assert told[:3] == ["after rubbish"] * 3
    assert told[3:5] == ["half a character: \N{REPLACEMENT CHARACTER}", "deep"]
    assert all("not valid MCP" in each for each in told[5:])


async def test_server_that_hangs() -> None:
    """A call that is not answered ends when its timeout expires, and the connection remains usable."""
    seconds, told = 0.02, ["", ""]
    while told[1] != "echo: a" and seconds < PATIENCE:
        seconds *= 10  # on a busy machine, the second call may exceed a short timeout too
        async with server(timeout=seconds) as section:
            _, told, _ = await run(section, ToolCall("hang"), ToolCall("echo", {"text": "a"}))
            assert section.server.account("local").connection.opened == 1
    assert f"{seconds:g}" in told[0]
    assert told[1] == "echo: a"


async def test_server_that_stops_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that did not answer a call, and does not list its tools either, is started again for the next call."""
    monkeypatch.setattr(connections, "PROBE_TIMEOUT", 0.1)
    monkeypatch.setattr(connections, "MAX_REOPENED", 0)
    async with server(timeout=0.2) as section:
        await run(section, ToolCall("stop"))
        connection = section.server.account("local").connection
        assert connection.opened == 1
        await connection.client()
        assert connection.opened == 2


async def test_server_that_hangs_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run fails if a server starts but does not answer within the timeout."""
    monkeypatch.setattr(connections, "CONNECT_TIMEOUT", 0.2)
    with pytest.raises(ServerUnavailable, match="did not answer within"):
        await run(McpTools("mute", command=["sh", "-c", "cat > /dev/null"]))


async def test_last_words_of_a_server() -> None:
    """The error says how a server ended, with the end of what it wrote to standard error, but without its secrets."""
    async with server(env={"API_TOKEN": "hunter2hunter2"}) as section:
        _, told, _ = await run(section, ToolCall("crash"))
    assert "it ended with status 3 (first / loading / Token is [secret])" in told[0]
    command = [sys.executable, "-c", "import sys; sys.exit('no such folder: /data')"]
    with pytest.raises(ServerUnavailable, match=r"status 1 \(no such folder: /data\)"):
        await McpTools("files", command=command).connect()


async def test_secrets_of_a_server_are_hidden() -> None:
    """A secret from a server's settings is hidden if the server repeats it in a text, a value, an error, a file or a question."""
    async with server(env={"API_TOKEN": "hunter2hunter2", "PLAIN": "text"}) as section:
        calls = [ToolCall("leak", {"text": text}) for text in ("text", "value", "error", "file", "question")]
        person = Person(answers={"mcp.form": {"size": 4}})
        response, told, model = await run(section, *calls, environment=person)
    results = [
        one for each in model.requests[-1].messages if isinstance(each, ToolMessage) for one in each.results
    ]
    (file,) = results[3].attachments
    assert (file.name, file.content) == ("[secret].txt", b"a [secret] b")
    assert person.questions[0].payload["message"] == "Is [secret] right?"
    assert "hunter2" not in repr(person.questions)
    assert told[0] == "token [secret]"
    assert told[1] == '{"token":"[secret]","[secret]":["[secret]"]}'
    assert told[2].endswith("bad token [secret]")
    assert "hunter2" not in repr(response.session)


async def test_changed_list_is_offered_and_told(tmp_path: Path) -> None:
    """New tools can be called from the next turn on, and the next result tells the model about the change."""
    async with server() as section:
        calls = [
            ToolCall("change", {"text": "fresh"}),
            ToolCall("echo", {"text": "a"}),
            ToolCall("fresh", {"text": "b"}),
        ]
        _, told, model = await run(section, *calls)
    assert told[1] == "echo: a\n[The tools of the server trial have changed. added: fresh.]"
    assert told[2] == "fresh: b"
    assert "fresh" not in {each.tool.name for each in model.requests[0].tools}


async def test_changed_list_is_read_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a server reports that its list has changed, the list is read again without another call to the server."""
    monkeypatch.setattr(connections, "REFRESH_EVERY", 0.0)
    async with server() as section:
        listed = event_of_listing(section, "fresh", monkeypatch)
        await run(section, ToolCall("change", {"text": "fresh"}))
        await asyncio.wait_for(listed.wait(), PATIENCE)
        assert "fresh" in {tool.name for tool in section.current_tools()}


async def test_restarted_server_has_other_tools(tmp_path: Path) -> None:
    """After a restart the list is read again: tools that are gone can't be called any more, and new ones can."""
    state = tmp_path / "state"
    state.write_text("old")
    async with server(state) as section:
        _, told, _ = await run(section, ToolCall("old", {"text": "a"}))
        state.write_text("new")
        calls = [
            ToolCall("die"),
            ToolCall("echo", {"text": "a"}),
            ToolCall("old", {"text": "b"}),
            ToolCall("new", {"text": "c"}),
        ]
        _, after, _ = await run(section, *calls)
    assert told == ["old: a"]
    assert "removed: old; added: new" in after[1]
    assert "old" in after[2]
    assert "old: b" not in after[2]
    assert after[3] == "new: c"


async def test_replaced_server_is_offered_without_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a server ends and comes back with other tools, the model is offered them before it calls the server again.

    The result of the next call reports the change.
    """
    state = tmp_path / "state"
    state.write_text("old")
    async with server(state) as section:
        listed = event_of_listing(section, "new", monkeypatch)

        @tool(effect="read")
        async def wait() -> None:
            """Wait for the new list."""
            await asyncio.wait_for(listed.wait(), PATIENCE)

        @tool(effect="read")
        def replace() -> None:
            """Replace the server's program."""
            state.write_text("new")

        calls = [ToolCall("replace"), ToolCall("die"), ToolCall("wait"), ToolCall("new", {"text": "a"})]
        _, told, model = await run(section, *calls, tools=[wait, replace])
    offered = [{each.tool.name for each in request.tools} & {"old", "new"} for request in model.requests]
    assert offered[0] == {"old"}
    assert offered[3:] == [{"new"}, {"new"}]
    assert told[3].startswith("new: a")
    assert "removed: old; added: new" in told[3]


async def test_server_that_keeps_ending_is_left_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection is reopened without a call only a few times.

    Then only a call opens it again, and a successful call resets the count.
    """
    monkeypatch.setattr(connections, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(connections, "MAX_REOPENED", 1)

    async def lose(client: Any) -> None:
        raise OSError("gone")

    async with server() as section:
        connection = section.server.account("local").connection
        opened: list[tuple[int, bool]] = []
        for loses in (True, True, True, False, True):
            if loses:
                with pytest.raises(ServerLost):
                    await connection.request(lose)
            else:
                await run(section, ToolCall("echo", {"text": "a"}))
            await asyncio.gather(vars(connection)["_reopening"])
            opened.append((connection.opened, connection.is_open))
    assert opened == [(2, True), (2, False), (3, False), (4, True), (5, True)]


async def test_closed_section_is_not_opened_again() -> None:
    """A section that is closed after its server crashed does not reconnect, and leaves no task behind."""
    async with server() as section:
        connection = section.server.account("local").connection
        await run(section, ToolCall("crash"))
    assert not connection.is_open
    assert not [task for task in asyncio.all_tasks() if "Connection" in repr(task)]


async def test_server_that_can_not_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a required server can't be reached, a run does not begin. If an optional server can't be reached, the run has none of its tools.

    After a failure, the next attempt to connect is made only after a pause.
    """
    for name in ("FIRST_WAIT", "LONGEST_WAIT"):
        monkeypatch.setattr(connections, name, PATIENCE)
    section = McpTools("gone", command=["/nonexistent/server"])
    with pytest.raises(ServerUnavailable, match="'/nonexistent/server' was not found"):
        await run(section)
    monkeypatch.setattr(connections, "PATIENCE", 0.0)
    with pytest.raises(ServerUnavailable, match="The next attempt to connect is in"):
        await section.connect()
    response, _, model = await run(McpTools("gone", command=["/nonexistent/server"], required=False))
    assert response.text == "Done."
    assert not list(model.requests[0].tools)


async def test_same_name_twice() -> None:
    """A server's tool with the same name as another tool is refused; a prefix makes its name unique."""

    @tool(effect="pure")
    def echo(text: str) -> str:
        """Return the text."""
        return f"ours: {text}"

    async with server() as section:
        with pytest.raises(PromptValidationError, match="echo"):
            await run(section, tools=[echo])
    async with server(prefix="trial_") as section:
        calls = [ToolCall("echo", {"text": "a"}), ToolCall("trial_echo", {"text": "b"})]
        _, told, _ = await run(section, *calls, tools=[echo])
    assert told == ["ours: a", "echo: b"]


async def test_a_name_that_a_server_takes_later(caplog: pytest.LogCaptureFixture) -> None:
    """A tool that a server adds under the name of another tool is left out, with a warning, and the app works as before.

    The other tool may be one of the app, of a different server or of the run, whatever the order of the sections. The same holds in the
    run in which the tool is added.
    """

    @tool(effect="pure")
    def pay(text: str) -> str:
        """Pay somebody."""
        return f"ours: {text}"

    @tool(effect="pure")
    def added(text: str) -> str:
        """Do what was added to the run."""
        return f"the run's: {text}"

    calls = [ToolCall(name, {"text": "a"}) for name in ("pay", "b_echo", "added")]
    async with server() as bad, server(prefix="b_") as good:
        for order in ((bad, good), (good, bad)):
            for told in (["ours: a", "echo: a", "the run's: a"], ["ours: a", "echo: a", "the run's: a"]):
                changes = [ToolCall("change", {"text": name}) for name in ("pay", "b_echo", "added")]
                model = ScriptedModel([*changes, *calls, "Done."])
                sections: list[Any] = ["Go.", *order]
                for number, each in enumerate(order):
                    object.__setattr__(each, "key", f"key{number}")
                prompt = Prompt("guide", sections, tools=[pay])
                await Adapter(model).evaluate(prompt, "hi", tools=[added])
                messages = model.requests[-1].messages
                results = [
                    one.text for each in messages if isinstance(each, ToolMessage) for one in each.results
                ]
                assert [each.partition("\n")[0] for each in results[3:]] == told
                names = [each.tool.name for each in model.requests[-1].tools]
                assert len(names) == len(set(names))
    assert "has added a tool pay" in caplog.text
    assert "has added a tool b_echo" in caplog.text
    assert "has added a tool added" in caplog.text


async def test_a_served_app_keeps_its_tools_when_a_server_adds_one_of_their_names(tmp_path: Path) -> None:
    """An app that is itself served goes on when a server of its own adds a tool with the name of one of its agents."""

    @tool(effect="pure")
    def helper(text: str) -> str:
        """Help."""
        return f"ours: {text}"

    async with server() as section:
        served = ToolServer(Prompt("shop", ["Sell.", section]), more=[helper])
        async with Client(served.server) as client:
            await client.call_tool("change", {"text": "helper"})
            await client.call_tool("echo", {"text": "a"})
            found: Any = await client.call_tool("helper", {"text": "b"})
            assert [each.name for each in (await client.list_tools()).tools].count("helper") == 1
    assert found.content[0].text == "ours: b"


def test_section_on_several_event_loops() -> None:
    """A section can be used by runs on different event loops, one after the other."""
    section = server()
    for _ in range(2):
        _, told, _ = asyncio.run(run(section, ToolCall("echo", {"text": "a"})))
        assert told == ["echo: a"]


def test_section_closed_on_a_different_event_loop() -> None:
    """Closing a section closes its connection, whichever event loop opened it, and leaves no task behind."""
    section = server()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(section.connect(), loop).result(PATIENCE)
        (connection,) = section.server.account("local").connections
        assert connection.is_open
        asyncio.run(section.close())
        assert not connection.is_open
        assert asyncio.run_coroutine_threadsafe(tasks_left(), loop).result(PATIENCE) == 1
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def tasks_left() -> int:
    """Return the number of unfinished tasks on the running event loop, including this one."""
    return len(asyncio.all_tasks())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "either a command"),
        ({"command": "npx server"}, "list of strings"),
        ({"command": ["a"], "url": "https://a"}, "either a command"),
        ({"url": "ftp://a"}, "not an address"),
        ({"url": "https://me:word@a"}, "user name or password"),
        ({"command": ["a"], "prefix": "a b"}, "prefix"),
        ({"command": ["a"], "effects": {"x": "harmless"}}, "harmless"),
    ],
)
def test_invalid_definitions(options: dict[str, Any], match: str) -> None:
    """An invalid definition is refused when the section is created."""
    with pytest.raises(DefinitionError, match=match):
        McpTools("x", **options)


@given(
    st.lists(st.text("aB_.é", min_size=1, max_size=4) | st.just("x" * 80), unique=True, max_size=6),
    st.sampled_from(["", "p_"]),
)
def test_names_are_mapped_reversibly(remote: list[str], prefix: str) -> None:
    """Each name in a server's list is mapped to a unique name that a model can write. The order of the list has no effect."""
    names = map_names(remote, prefix)
    assert len(set(names.values())) == len(remote)
    assert all(
        0 < len(name) <= MAX_NAME and name.replace("_", "").replace("-", "").isascii()
        for name in names.values()
    )
    assert map_names(remote[::-1], prefix) == names


async def test_record_says_that_a_result_came_from_outside(tmp_path: Path) -> None:
    """The record of a call names the server that its result came from."""
    journal = SqliteJournal(tmp_path / "journal.db")
    async with server(effects={"echo": "read"}) as section:
        response, _, _ = await run(section, ToolCall("echo", {"text": "a"}), journal=journal)
    assert response.run_id is not None
    (unit,) = await journal.calls.load(response.run_id)
    assert unit.reads == ["server trial"]


async def test_names_that_look_like_a_tool_do_not_take_its_name() -> None:
    """A tool whose name is already valid keeps it, in calls and in its capability, whatever other tools the server lists."""
    assert map_names(["Send.Mail", "Send_Mail"], "")["Send_Mail"] == "Send_Mail"
    found = capabilities_of("Files", ["read_file", "Read_File", "read.file"])
    assert found["read_file"] == "mcp.files.read_file"
    assert len(set(found.values())) == 3
