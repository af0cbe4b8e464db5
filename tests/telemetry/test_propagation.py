"""Traces across programs: MCP in both directions, AG-UI requests, and hosts of models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, trace

from handrail import Adapter, OpenAIModel, Prompt, ScriptedModel, ToolCall, ToolContext, tool
from handrail.context import RunContext
from handrail.fleet import FleetApp, Runner, submit
from handrail.mcp import ToolServer
from handrail.telemetry import names
from mcp import Client
from support import PATIENCE, fleet_app, journals
from support.mcp_http import Reply, Request, listening, ordinary
from support.parked_runs import answer_to
from support.raw_server import raw_server, said
from support.serving import serving
from support.traced import traced

STARTED = f"00-{'1f' * 16}-{'2e' * 8}-01"


async def test_a_call_to_an_mcp_server_joins_its_span_and_carries_the_trace() -> None:
    """The request has the span of the call as its `traceparent`, and none of the app's baggage. The span has the attributes of MCP."""
    from handrail.mcp import McpTools, UrlServer

    metas: list[dict[str, Any]] = []

    def answer(request: Request) -> Reply | None:
        if request.message.get("method") == "tools/call":
            metas.append(request.message["params"].get("_meta", {}))
        return ordinary(request)

    async with listening(answer) as url:
        tools = McpTools("trial", server=UrlServer(url), effects={"echo": "read"})
        adapter = Adapter(ScriptedModel([ToolCall("echo", {"text": "hi"}), "done"]))
        token = context.attach(baggage.set_baggage("who", "ada"))
        with traced() as seen:
            await adapter.evaluate(Prompt("p", ["Echo.", tools]), "go", approvals="approve_all")
        context.detach(token)
        await tools.close()
    call = seen.named("execute_tool echo")
    [meta] = metas
    assert meta["traceparent"] == f"00-{call.context.trace_id:032x}-{call.context.span_id:016x}-01"
    assert "baggage" not in meta
    assert call.attributes[names.MCP_METHOD_NAME] == "tools/call"
    assert call.attributes[names.SERVER_ADDRESS] == "127.0.0.1"


async def test_a_call_by_an_mcp_client_begins_in_the_clients_trace() -> None:
    """A served tool's call is in the trace of the client's current span, which the official client sends."""

    @tool(effect="pure")
    async def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    with traced() as seen:
        tracer = seen.provider.get_tracer("client")
        async with Client(ToolServer(Prompt("p", "Add.", tools=[add])).server) as client:
            with tracer.start_as_current_span("client") as span:
                assert (await client.call_tool("add", {"a": 1, "b": 2})).content
    call = seen.named("execute_tool add")
    assert call.context.trace_id == span.get_span_context().trace_id


async def test_an_authenticated_request_starts_a_run_in_its_trace(tmp_path: Path) -> None:
    """The header of an AG-UI request is the parent of the run. A malformed one is ignored."""
    async with serving(tmp_path) as client:
        with traced() as seen:
            await client.say("t1", "hello", {"traceparent": STARTED})
            await client.idle("t1")
            await client.say("t2", "hello", {"traceparent": "nonsense"})
            await client.idle("t2")
    first, second = (span for span in seen.spans if span.name.startswith("invoke_agent"))
    assert f"{first.context.trace_id:032x}" == "1f" * 16
    assert first.parent.span_id == int("2e" * 8, 16)
    assert second.parent is None


@pytest.mark.parametrize(("hosts", "sent"), [([], False), (["127.0.0.1"], True), (["*.example.com"], False)])
async def test_models_get_the_trace_only_at_hosts_that_are_named(hosts: list[str], sent: bool) -> None:
    """A request to a model has the span of the request as its `traceparent` only if its host was named."""
    async with raw_server(said("Hi.", {"prompt_tokens": 1, "completion_tokens": 1})) as server:
        model = OpenAIModel("gpt", base_url=server.url, key_variable=None)
        with traced(trace_hosts=hosts) as seen:
            await Adapter(model).evaluate(Prompt("p", "Answer."), "go")
        heads = "".join(str(each) for each in server.heads).lower()
    chat = seen.named("chat gpt")
    assert (f"{chat.context.trace_id:032x}-{chat.context.span_id:016x}" in heads) is sent


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_submitted_run_is_in_the_trace_of_what_submitted_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers execute the legs of a run in the trace of the app's span that submitted it, and the second names the first's leg."""
    monkeypatch.setenv("FLEET_LOG", str(tmp_path / "log"))
    app = FleetApp.load(str(Path(fleet_app.__file__)))
    with journals.of_kind(kind), traced() as seen:
        journal = journals.open_at(tmp_path / "runs.db")
        with seen.provider.get_tracer("app").start_as_current_span("request") as span:
            run_id = (await submit(journal, app, "choose tea")).record.id
        journal.close()
        for status in ("parked", "done"):
            journal, stop = journals.open_at(tmp_path / "runs.db"), asyncio.Event()
            for question in await journal.questions.open(run_id):
                journal.questions.answer(answer_to(question, {"name": "green"}))
            working = asyncio.ensure_future(Runner(journal, [app]).run(stop))
            async with asyncio.timeout(PATIENCE):
                while (await journal.runs.get(run_id)).status != status:
                    await journal.queue.wait(0.01)
                stop.set()
                await working
            journal.close()
    first, second = [each for each in seen.spans if each.name.startswith("invoke_agent")]
    assert {each.context.trace_id for each in seen.spans} == {span.get_span_context().trace_id}
    assert {each.parent.span_id for each in (first, second)} == {span.get_span_context().span_id}
    [link] = second.links
    assert (link.context.span_id, link.attributes[names.LEG_END]) == (first.context.span_id, "parked")
    assert first.attributes[names.WORKER_ID] != second.attributes[names.WORKER_ID]
    assert {each.attributes[names.RUN_ID] for each in (first, second)} == {run_id}


async def test_what_started_a_run_is_in_its_context() -> None:
    """Tools see what their run was started from, with the app's current span before the request's."""
    seen: list[RunContext] = []

    @tool(effect="pure")
    async def look(context: ToolContext) -> str:
        """Look."""
        seen.append(context.run_context)
        return "looked"

    with traced() as spans, spans.provider.get_tracer("app").start_as_current_span("request") as span:
        adapter = Adapter(ScriptedModel([ToolCall("look", {}), "done"]))
        await adapter.evaluate(Prompt("p", "Look.", tools=[look]), "go")
    assert seen[0].traceparent.split("-")[2] == f"{span.get_span_context().span_id:016x}"
    assert trace.get_current_span().get_span_context().span_id == 0
