"""Tests for how each wire asks for its provider's own tools, and for what it reads from the answer."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from handrail import (
    Adapter,
    AnthropicModel,
    GeminiModel,
    ModelSettings,
    OpenAIModel,
    Prompt,
    PromptEvaluationError,
    ProviderTool,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolContext,
    first_that_works,
    tool,
)
from handrail.events import MessageAdded, ModelResponded
from handrail.messages import AssistantMessage, Model, Price, Traits, Usage
from handrail.run.adapter import Retry
from handrail.runs.tree import said
from handrail.testing import Cassette
from handrail.testing.cassette import CassetteError
from support.raw_server import Raw, raw_server, streamed, whole

PRICE = Price(Decimal(1), Decimal(1), searches=Decimal(10))


@tool(effect="read")
async def look(where: str, context: ToolContext) -> str:
    """Look somewhere."""
    return f"Nothing in {where}."


def model_at(wire: str, url: str, name: str = "") -> Model:
    """Return a model that uses a wire at this address, without a key."""
    if wire == "messages":
        return AnthropicModel(name or "claude-sonnet-4-5", base_url=url, key_variable=None, price=PRICE)
    if wire == "gemini":
        return GeminiModel(
            name or "gemini-3-pro-preview", base_url=f"{url}/v1beta", key_variable=None, price=PRICE
        )
    api: Any = wire
    return OpenAIModel(name or "gpt-5", api=api, base_url=f"{url}/v1", key_variable=None, price=PRICE)


SEARCHED: dict[str, Any] = {
    "messages": {
        "content": [
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "rust"}},
            {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"where": "a"}},
        ],
        "stop_reason": "tool_use",
        "usage": {
            "input_tokens": 1_000_000,
            "output_tokens": 0,
            "server_tool_use": {"web_search_requests": 2, "web_fetch_requests": 0},
        },
    },
    "responses": {
        "status": "completed",
        "output": [
            {
                "id": "ws_1",
                "type": "web_search_call",
                "status": "completed",
                "action": {"type": "search", "query": "rust"},
            },
            {"id": "ws_2", "type": "web_search_call", "action": {"type": "search", "query": "rust 2"}},
            {"id": "ws_3", "type": "web_search_call", "action": {"type": "open_page", "url": "https://a.b"}},
            {
                "id": "fc_1",
                "type": "function_call",
                "call_id": "call_1",
                "name": "look",
                "arguments": '{"where":"a"}',
            },
        ],
        "usage": {"input_tokens": 1_000_000, "output_tokens": 0},
    },
    "gemini": {
        "candidates": [
            {
                "content": {
                    "parts": [
                        {
                            "toolCall": {
                                "toolType": "GOOGLE_SEARCH_WEB",
                                "args": {"queries": ["rust"]},
                                "id": "t1",
                            },
                            "thoughtSignature": "c2ln",
                        },
                        {"toolResponse": {"toolType": "GOOGLE_SEARCH_WEB", "response": {}, "id": "t1"}},
                        {
                            "functionCall": {"name": "look", "args": {"where": "a"}, "id": "f1"},
                            "thoughtSignature": "c2lnMg==",
                        },
                    ]
                },
                "groundingMetadata": {"webSearchQueries": ["rust", "rust 2"]},
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {"promptTokenCount": 1_000_000, "candidatesTokenCount": 0},
    },
}
"""For each wire, an answer with two searches that are charged for and a call to one of our own tools."""
DONE: dict[str, Any] = {
    "messages": {
        "content": [{"type": "text", "text": "Done."}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
    "responses": {
        "status": "completed",
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Done.", "annotations": []}],
            }
        ],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
    "gemini": {
        "candidates": [{"content": {"parts": [{"text": "Done."}]}, "finishReason": "STOP"}],
        "usageMetadata": {"promptTokenCount": 1, "candidatesTokenCount": 1},
    },
}
WIRES = list(SEARCHED)


async def sent_tools(wire: str, *tools: Any, name: str = "", **options: Any) -> dict[str, Any]:
    """Return the body of a request with these tools."""
    async with raw_server(whole(DONE[wire])) as server:
        prompt = Prompt("p", "Be brief.", tools=tools)
        response = await Adapter(model_at(wire, server.url, name), **options).evaluate(prompt, "Go.")
        assert response.text == "Done."
        return server.bodies[0]


# --- requests ---


@pytest.mark.parametrize(
    ("wire", "asked", "written"),
    [
        (
            "messages",
            ProviderTool("web_search", max_uses=3, blocked_domains=["a.com"]),
            {
                "type": "web_search_20250305",
                "name": "web_search",
                "max_uses": 3,
                "blocked_domains": ["a.com"],
            },
        ),
        (
            "messages",
            ProviderTool("web_fetch", allowed_domains=["a.com"], options={"citations": {"enabled": True}}),
            {
                "type": "web_fetch_20250910",
                "name": "web_fetch",
                "allowed_domains": ["a.com"],
                "citations": {"enabled": True},
            },
        ),
        (
            "messages",
            ProviderTool("code_execution"),
            {"type": "code_execution_20250825", "name": "code_execution"},
        ),
        (
            "responses",
            ProviderTool("web_search", allowed_domains=["a.com"], options={"filters": {"x_more": 1}}),
            {"type": "web_search", "filters": {"allowed_domains": ["a.com"], "x_more": 1}},
        ),
        (
            "responses",
            ProviderTool("code_execution", options={"container": {"memory_limit": "4g"}}),
            {"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "4g"}},
        ),
        (
            "responses",
            ProviderTool("file_search", stores=["vs_1"]),
            {"type": "file_search", "vector_store_ids": ["vs_1"]},
        ),
        ("gemini", ProviderTool("web_search"), {"googleSearch": {}}),
        ("gemini", ProviderTool("web_fetch"), {"urlContext": {}}),
        ("gemini", ProviderTool("code_execution"), {"codeExecution": {}}),
        (
            "gemini",
            ProviderTool("file_search", stores=["fileSearchStores/a"], options={"topK": 2}),
            {"fileSearch": {"fileSearchStoreNames": ["fileSearchStores/a"], "topK": 2}},
        ),
    ],
)
async def test_the_request_asks_for_it(wire: str, asked: ProviderTool, written: dict[str, Any]) -> None:
    """Each wire writes a provider's tool in its API's form. Beside one of our own tools, the provider's tool comes first."""
    alone = await sent_tools(wire, asked)
    beside = await sent_tools(wire, look, asked)
    assert alone["tools"] == [written]
    assert beside["tools"][0] == written
    assert len(beside["tools"]) == 2


async def test_gemini_asks_for_the_calls_as_parts() -> None:
    """Gemini 3 is asked to report calls to its own tools as parts. Older models are not, because they do not know the field for this."""
    body = await sent_tools(
        "gemini",
        look,
        ProviderTool("web_search"),
        model_settings=ModelSettings(tool_choice="auto"),
    )
    assert body["toolConfig"] == {
        "functionCallingConfig": {"mode": "AUTO"},
        "includeServerSideToolInvocations": True,
    }
    assert "toolConfig" not in await sent_tools("gemini", ProviderTool("web_search"), name="gemini-2.5-pro")


async def refusal(wire: str, *tools: Any, name: str = "") -> str:
    """Return why a request with these tools is refused, and check that nothing was sent."""
    async with raw_server(whole(DONE.get(wire, {}))) as server:
        prompt, adapter = Prompt("p", "Be brief.", tools=tools), Adapter(model_at(wire, server.url, name))
        with pytest.raises(PromptEvaluationError) as raised:
            await adapter.evaluate(prompt, "Go.")
        assert server.bodies == []
    return str(raised.value)


async def test_chat_completions_have_none() -> None:
    """A request for a provider's tool over chat completions is refused, and the error names an API that has it."""
    why = await refusal("chat", ProviderTool("web_search"))
    assert "model 'openai:gpt-5': it has no web_search of its own." in why
    assert "OpenAIModel(..., api='responses')" in why


@pytest.mark.parametrize(
    ("wire", "asked", "problem"),
    [
        ("messages", ProviderTool("file_search", stores=["a"]), "It has code_execution, web_fetch, web_sea"),
        ("responses", ProviderTool("web_fetch"), "use a model that has it: Anthropic's or Gemini's"),
        ("responses", ProviderTool("web_search", max_uses=3), "its web_search has no max_uses. Remove max_u"),
        (
            "gemini",
            ProviderTool("web_search", allowed_domains=["a"]),
            "its web_search has no allowed_domains",
        ),
    ],
)
async def test_what_a_provider_lacks_is_refused_by_name(wire: str, asked: ProviderTool, problem: str) -> None:
    """A tool or a limit that the provider does not have is refused before anything is sent."""
    assert problem in await refusal(wire, asked)


async def test_an_older_gemini_refuses_the_combination() -> None:
    """Gemini 2.5 can't combine its own tools with ours, and the error says what to do instead."""
    why = await refusal("gemini", look, ProviderTool("web_search"), name="gemini-2.5-pro")
    assert "agent.as_tool()" in why


async def test_a_model_that_knows_nothing_of_them_is_not_asked() -> None:
    """If a model's traits list no provider tools, a run with one is refused before the model is asked."""
    model = ScriptedModel(["Hm."], traits=Traits())
    with pytest.raises(PromptEvaluationError, match="it has no code_execution of its own"):
        await Adapter(model).evaluate(Prompt("p", "x", tools=[ProviderTool("code_execution")]), "Go.")
    assert model.requests == []


# --- answers ---


async def searched(wire: str, server: Raw, **options: Any) -> tuple[Any, Session]:
    """Run a prompt with web search and a tool of ours. Return the response and the session."""
    session = Session()
    prompt = Prompt("p", "Be brief.", tools=[look, ProviderTool("web_search")])
    model = model_at(wire, server.url)
    return await Adapter(model, **options).evaluate(prompt, "Go.", session=session), session


@pytest.mark.parametrize("wire", WIRES)
async def test_a_run_with_searches(wire: str, tmp_path: Path) -> None:
    """A provider's searches are shown, recorded, priced and sent back, but are not numbered as calls of the run."""
    async with raw_server(whole(SEARCHED[wire]), whole(DONE[wire])) as server:
        journal = SqliteJournal(tmp_path / "j.db")
        response, session = await searched(wire, server, journal=journal)
        first, second = server.bodies
        assert first["tools"] == second["tools"]
        assert "rust" in json.dumps(second)
    assert response.usage.searches == 2
    assert session[ModelResponded].all()[0].cost == Decimal("1.02")
    transcript = await said(journal, response.run_id)
    (answer,) = [each for each in transcript if isinstance(each, AssistantMessage) and each.calls]
    assert "run by the provider: rust" in answer.thought
    assert answer.kept is not None
    units = await journal.calls.load(response.run_id)
    assert [(unit.tool, unit.place) for unit in units] == [("look", ".1")]


@tool(effect="read")
async def hide(key: SecretStr, context: ToolContext) -> str:
    """Take a secret."""
    return "Hidden."


@pytest.mark.parametrize("wire", WIRES)
async def test_secrets_beside_searches_are_not_recorded(wire: str, tmp_path: Path) -> None:
    """In an answer with searches, the secret arguments of a call are masked in the record, and the searches are kept."""
    answer = json.dumps(SEARCHED[wire]).replace('"look"', '"hide"').replace("where", "key")
    answer = answer.replace('"a"', '"hunter2"').replace('\\"a\\"', '\\"hunter2\\"')
    async with raw_server(whole(answer.encode()), whole(DONE[wire])) as server:
        adapter = Adapter(model_at(wire, server.url), journal=SqliteJournal(tmp_path / "j.db"))
        prompt = Prompt("p", "Be brief.", tools=[hide, ProviderTool("web_search")])
        assert (await adapter.evaluate(prompt, "Go.")).text == "Done."
        assert "hunter2" in json.dumps(server.bodies[1])
    recorded = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"run by the provider: rust" in recorded
    assert b"hunter2" not in recorded


async def test_gemini_without_parts_says_what_it_searched_for() -> None:
    """An older Gemini reports only its queries. They are shown, and together count as one search."""
    chunk = {
        "candidates": [
            {
                "content": {"parts": [{"text": "Found."}]},
                "groundingMetadata": {"webSearchQueries": ["rust", "rust 2", 3]},
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {"promptTokenCount": 1, "candidatesTokenCount": 1},
    }
    async with raw_server(streamed(chunk, end=b"")) as server:
        model = model_at("gemini", server.url, "gemini-2.5-pro")
        session = Session()
        prompt = Prompt("p", "x", tools=[ProviderTool("web_search")])
        response = await Adapter(model).stream(prompt, "Go.", session=session).response
    assert (response.text, response.usage.searches) == ("Found.", 1)
    messages = [each.message for each in session[MessageAdded].all()]
    (answer,) = [each for each in messages if isinstance(each, AssistantMessage)]
    assert answer.thought == "google_search, run by the provider: rust, rust 2\n"


def test_searches_are_added_and_priced() -> None:
    """Adding usages adds their searches, and the table has prices for searches."""
    from handrail.models.prices import tariff_of

    both = Usage(searches=1) + Usage(searches=2)
    assert both.searches == 3
    tariff = tariff_of("anthropic:claude-sonnet-4-5", Traits())
    assert tariff(Usage(searches=1000)) == Decimal(10)


async def test_a_cassette_replays_a_run_with_searches(tmp_path: Path) -> None:
    """A recorded run with a provider's tool is replayed. A request without the tool does not match the recording."""
    path = tmp_path / "run.json"
    async with raw_server(whole(SEARCHED["messages"]), whole(DONE["messages"])) as server:
        with Cassette(path, mode="record"):
            await searched("messages", server)
        with Cassette(path, mode="replay"):
            response, _ = await searched("messages", server)
        bare, adapter = Prompt("p", "Be brief.", tools=[look]), Adapter(model_at("messages", server.url))
        with pytest.raises(CassetteError, match="tools"), Cassette(path, mode="replay"):
            await adapter.evaluate(bare, "Go.")
        assert len(server.bodies) == 2
    assert (response.text, response.usage.searches) == ("Done.", 2)


# --- calls that were interrupted ---


def paused(name: str, kind: str = "server_tool_use") -> bytes:
    """Return an answer that Anthropic pauses in the middle of a call to its own tool."""
    call = {"type": kind, "id": "srvtoolu_1", "name": name, "input": {"query": "rust"}}
    return whole({"content": [call], "stop_reason": "pause_turn", "usage": {"input_tokens": 1}})


ENDED: dict[str, dict[str, Any]] = {
    "web_search": {
        "type": "web_search_tool_result",
        "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
    },
    "bash_code_execution": {
        "type": "bash_code_execution_tool_result",
        "content": {"type": "bash_code_execution_tool_result_error", "error_code": "unavailable"},
    },
    "tool_search_tool_regex": {
        "type": "tool_search_tool_result",
        "content": {"type": "tool_search_tool_result_error", "error_code": "unavailable"},
    },
    "remote": {
        "type": "mcp_tool_result",
        "is_error": True,
        "content": [{"type": "text", "text": "The call was interrupted."}],
    },
}
"""For each tool, the result that is sent for an interrupted call, without the call's id."""


@pytest.mark.parametrize("name", ENDED)
async def test_a_call_that_was_interrupted_gets_an_error_as_its_result(name: str) -> None:
    """If Anthropic does not continue a call that it paused, the session's next request has an error as the call's result."""
    kind = "mcp_tool_use" if name == "remote" else "server_tool_use"
    failed = whole({"error": {"message": "no"}}, 400)
    async with raw_server(paused(name, kind), failed, whole(DONE["messages"])) as server:
        session, prompt = Session(), Prompt("p", "x", tools=[look, ProviderTool("web_search")])
        adapter = Adapter(model_at("messages", server.url))
        with pytest.raises(PromptEvaluationError):
            await adapter.evaluate(prompt, "Go.", session=session)
        assert (await adapter.evaluate(prompt, "And now?", session=session)).text == "Done."
        _, call, ended, _ = server.bodies[2]["messages"]
        assert server.bodies[1]["messages"][1] == call
    assert ended == {"role": "assistant", "content": [{**ENDED[name], "tool_use_id": "srvtoolu_1"}]}


async def test_a_call_that_another_provider_continued_gets_an_error_as_its_result() -> None:
    """If another provider answers after Anthropic paused a call, the next request to Anthropic has an error as the call's result."""
    down = whole({"error": {"message": "x"}}, 529)
    async with (
        raw_server(paused("web_search"), down, down, whole(DONE["messages"])) as one,
        raw_server(whole(DONE["responses"])) as two,
    ):
        claude, gpt = model_at("messages", one.url), model_at("responses", two.url)
        session, prompt = Session(), Prompt("p", "x", tools=[ProviderTool("web_search")])
        adapter = Adapter(first_that_works(claude, gpt), retry=Retry(attempts=2, first_wait=0.0))
        await adapter.evaluate(prompt, "Go.", session=session)
        await Adapter(claude).evaluate(prompt, "And now?", session=session)
        messages = one.bodies[-1]["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "assistant", "assistant", "user"]
    assert messages[2]["content"] == [{**ENDED["web_search"], "tool_use_id": "srvtoolu_1"}]


async def test_a_call_that_anthropic_continues_gets_no_other_result() -> None:
    """If Anthropic continues a call that it paused, the call's only result in the next request is Anthropic's."""
    result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"where": "a"}}
    rest = whole({"content": [result, use], "stop_reason": "tool_use", "usage": {"input_tokens": 1}})
    async with raw_server(paused("web_search"), rest, whole(DONE["messages"])) as server:
        prompt = Prompt("p", "x", tools=[look, ProviderTool("web_search")])
        await Adapter(model_at("messages", server.url)).evaluate(prompt, "Go.")
        assert json.dumps(server.bodies[-1]).count("web_search_tool_result") == 1


# --- Gemini ---


async def test_gemini_tells_each_search_once() -> None:
    """If Gemini reports searches after the end of its answer, repeated ones are not shown again, and new ones are shown."""
    chunks = [
        {
            "candidates": [
                {
                    "content": {"parts": [{"text": text}]},
                    "groundingMetadata": {"webSearchQueries": queries},
                    "finishReason": "STOP",
                }
            ]
        }
        for text, queries in (("Found.", ["rust"]), ("", ["rust"]), ("", ["rust", "go"]))
    ]
    async with raw_server(streamed(*chunks, end=b"")) as server:
        session, prompt = Session(), Prompt("p", "x", tools=[ProviderTool("web_search")])
        await Adapter(model_at("gemini", server.url)).stream(prompt, "Go.", session=session).response
    answer: Any = session[MessageAdded].all()[-1].message
    assert (
        answer.thought == "google_search, run by the provider: rust\ngoogle_search, run by the provider: go\n"
    )


async def test_gemini_gets_no_choice_of_functions_without_functions() -> None:
    """If Gemini has only its own tools, `tool_choice` is left out, because Gemini would refuse it."""
    settings = ModelSettings(tool_choice="required")
    alone = await sent_tools("gemini", ProviderTool("web_search"), model_settings=settings)
    assert alone["toolConfig"] == {"includeServerSideToolInvocations": True}
    beside = await sent_tools("gemini", look, ProviderTool("web_search"), model_settings=settings)
    assert beside["toolConfig"]["functionCallingConfig"] == {"mode": "ANY"}
