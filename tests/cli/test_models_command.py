"""Tests for `handrail models` and `handrail model serve`, and for your own models on the command line."""

import contextlib
import http.client
import inspect
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import pytest
from openai import OpenAI
from openai.types.responses import ParsedResponseFunctionToolCall, ResponseTextDeltaEvent
from pydantic import BaseModel, Field

from handrail import Agent, tool
from handrail.cli import models_commands
from handrail.cli.command_options import McpOptions, ServeOptions
from handrail.events import TextDelta
from handrail.models import ModelUnavailable
from handrail.models.availability import survey
from handrail.models.openai import OpenAIModel
from handrail.models.providers import PROVIDERS
from support import PATIENCE
from support.programs import HANDRAIL, environment, handrail
from support.raw_server import raw_server, whole

pytestmark = pytest.mark.once  # starting processes is slow, and the Python version makes no difference

VARIABLES = [
    variable
    for row in PROVIDERS.values()
    for variable in [*(key.variable for key in row.keys), *(each.variable for each in row.addresses)]
]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Fixture: the address of the embedded model, served in its own process, which ends on SIGTERM with exit code 0."""
    command = [*HANDRAIL, "model", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        yield said.split(" is at ")[1].split(" ")[0]
        process.terminate()
        assert process.wait() == 0


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixture: an environment without keys, in which no self-hosted server answers.

    A server that a test starts gets more time to answer.
    """
    monkeypatch.setattr("handrail.models.availability.SECONDS", PATIENCE)
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for provider in ("OLLAMA", "VLLM", "LMSTUDIO"):
        monkeypatch.setenv(f"{provider}_BASE_URL", "http://127.0.0.1:9/v1")


# --- handrail models ---


async def states() -> dict[str, str]:
    return {each.provider: each.state for each in await survey()}


@pytest.mark.usefixtures("nothing")
async def test_the_models_that_work_here(monkeypatch: pytest.MonkeyPatch):
    """Only the embedded and the demonstration models need no setup.

    A vendor needs a key, and a self-hosted provider a server that answers. A server that refuses the request is reported
    with the variable to set.
    """
    before = await states()
    assert {name for name, state in before.items() if state == "ready"} == {"local", "demo"}
    assert before["openai"] == before["groq"] == "no key"
    assert before["azure"] == "no address"
    assert before["ollama"] == "down"
    monkeypatch.setenv("GROQ_API_KEY", "k")
    assert {name for name, state in (await states()).items() if state == "ready"} == {"local", "demo", "groq"}
    async with raw_server(whole({"data": [{"id": "llama3"}, {}]})) as server:
        monkeypatch.setenv("OLLAMA_BASE_URL", server.url)
        found = {each.provider: each for each in await survey()}
        assert found["ollama"].state == "ready"
        assert found["ollama"].models == ("ollama:llama3",)
    async with raw_server(whole({"error": {"message": "no"}}, 401)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        found = {each.provider: each for each in await survey()}
        assert (found["openai"].state, found["openai"].detail[-20:]) == (
            "refused",
            "Set OPENAI_API_KEY.".rjust(20),
        )


@pytest.mark.usefixtures("nothing")
async def test_no_vendor_is_contacted(monkeypatch: pytest.MonkeyPatch):
    """Only self-hosted servers are asked for their models, even if every key is set."""
    asked: list[str] = []

    async def get(self: Any, path: str, seconds: float) -> Any:
        asked.append(self._base_url)
        return {}

    monkeypatch.setattr("handrail.models.http.Endpoint.get", get)
    for row in PROVIDERS.values():
        for key in row.keys:
            monkeypatch.setenv(key.variable, "k")
    await survey()
    assert asked == ["http://127.0.0.1:9/v1"] * 3


async def test_a_server_that_says_it_is_unavailable_is_not_called_silent(monkeypatch: pytest.MonkeyPatch):
    async def get(self: Any, path: str, seconds: float) -> Any:
        raise ModelUnavailable("ollama", "it is starting", status=503)

    monkeypatch.setattr("handrail.models.http.Endpoint.get", get)
    found = {each.provider: each for each in await survey()}["ollama"]
    assert (found.state, "answered with status 503" in found.detail) == ("down", True)


def test_the_list_as_lines_and_as_json(tmp_path: Path):
    """Each provider has a line with its state and, if it does not work, what to do. `--json` lists the same providers."""
    clean = environment(**{**dict.fromkeys(VARIABLES, ""), "OLLAMA_BASE_URL": "http://127.0.0.1:9/v1"})
    lines = handrail("models", cwd=tmp_path, env=clean)
    assert lines.returncode == 0, lines.stderr
    assert "openai     no key        Set OPENAI_API_KEY." in lines.stdout
    assert "Nothing answers at http://127.0.0.1:9/v1. Start it with `ollama serve`" in lines.stdout
    listed = json.loads(handrail("models", "--json", cwd=tmp_path, env=clean).stdout)["models"]
    assert [each["provider"] for each in listed] == [line.split()[0] for line in lines.stdout.splitlines()]


# --- handrail model serve ---


@tool(effect="read")
async def fare(city: str) -> str:
    """Return the price of a ticket to a city."""
    return f"129 euros to {city}"


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_on_the_served_model(served: str, api: Any):
    """An agent on the served model calls the only tool and answers in text. Streaming gives the same text."""
    model = OpenAIModel("smollm2-135m", base_url=served, key_variable=None, api=api)
    agent = Agent(model, "Answer in one short sentence.", tools=[fare])
    whole_answer = agent.run("How much is the ticket to Rome?").wait()
    assert whole_answer.usage.requests == 2
    assert whole_answer.text
    stream = agent.stream("How much is the ticket to Rome?")
    pieces = [event.text for event in stream if isinstance(event, TextDelta)]
    assert "".join(pieces) == stream.response.wait().text == whole_answer.text


def post(address: str, body: Any, path: str = "/chat/completions", **headers: str) -> tuple[int, Any]:
    at = urlsplit(address)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=PATIENCE)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {
        "content-type": "application/json",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    with contextlib.closing(connection):
        connection.request("POST", f"{at.path}{path}", sent, given)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


USER = {"role": "user", "content": "Ada lives in Paris."}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
CITY_TOOL = {"type": "function", "function": {"name": "city", "parameters": CITY}}
OTHER_TOOL = {"type": "function", "function": {"name": "other"}}


def test_structured_answers_and_chosen_tools(served: str):
    """Answers and the arguments of a chosen tool follow their schemas.

    With several tools and no `tool_choice`, the answer is text, which `max_tokens` can cut off.
    """
    base = {"model": "smollm2-135m", "messages": [USER], "max_tokens": 40}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    status, answer = post(served, {**base, "response_format": form})
    assert status == 200
    assert list(json.loads(answer["choices"][0]["message"]["content"])) == ["city"]
    choice = {"type": "function", "function": {"name": "city"}}
    _, answer = post(served, {**base, "tools": [OTHER_TOOL, CITY_TOOL], "tool_choice": choice})
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], list(json.loads(call["function"]["arguments"]))) == ("city", ["city"])
    _, answer = post(served, {**base, "max_tokens": 3, "tools": [OTHER_TOOL, CITY_TOOL]})
    assert "tool_calls" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_responses_api(served: str):
    """Structured answers, a chosen tool, a conversation with a call, and the length limit work on the responses API too.

    An item of an unknown type is refused.
    """
    base = {"model": "smollm2-135m", "input": "Ada lives in Paris.", "max_output_tokens": 40}
    form = {"format": {"type": "json_schema", "name": "a", "schema": CITY}}
    _, answer = post(served, {**base, "text": form}, "/responses")
    assert list(json.loads(answer["output"][0]["content"][0]["text"])) == ["city"]
    tools = [{"type": "function", "name": "other"}, {"type": "function", "name": "city", "parameters": CITY}]
    chosen = {"type": "function", "name": "city"}
    _, answer = post(served, {**base, "tools": tools, "tool_choice": chosen}, "/responses")
    (call,) = answer["output"]
    assert (call["type"], call["name"], list(json.loads(call["arguments"]))) == (
        "function_call",
        "city",
        ["city"],
    )
    told = [
        {"role": "user", "content": [{"type": "input_text", "text": "Ada lives in Paris."}]},
        {"type": "reasoning", "summary": []},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "stored"},
    ]
    asked = {**base, "instructions": "Be brief.", "input": told, "max_output_tokens": 3}
    status, answer = post(served, asked, "/responses")
    assert (status, answer["status"], answer["usage"]["output_tokens"]) == (200, "incomplete", 3)
    status, answer = post(served, {**base, "input": [{"type": "novelty"}]}, "/responses")
    assert (status, "items of the type 'novelty'" in answer["error"]["message"]) == (400, True)


def client(served: str) -> OpenAI:
    return OpenAI(base_url=served, api_key="none", max_retries=0)


class Where(BaseModel):
    city: Annotated[str, Field(max_length=12)]


def test_the_official_client_streams_responses(served: str):
    """`responses.stream()` gives text, typed answers and calls. Its events are numbered without gaps and have their item's id."""
    tools: Any = [{"type": "function", "name": "city", "parameters": CITY, "strict": True}]
    for more, kind in (
        ({}, "output_text"),
        ({"text_format": Where}, "output_text"),
        ({"tools": tools}, "function_call_arguments"),
    ):
        options: Any = {"model": "smollm2-135m", "input": "Ada lives in Paris.", **more}
        with client(served).responses.stream(**options) as stream:
            events = list(stream)
            answer = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        part = ["content_part"] if kind == "output_text" else []
        assert list(dict.fromkeys(kinds)) == [
            *("created", "in_progress", "output_item.added", *(f"{each}.added" for each in part)),
            *(f"{kind}.delta", f"{kind}.done", *(f"{each}.done" for each in part)),
            *("output_item.done", "completed"),
        ]
        item: Any = answer.output[0]
        assert {getattr(event, "item_id", item.id) for event in events} == {item.id}
        pieces = [event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)]
        if kind == "output_text":
            assert "".join(pieces) == answer.output_text
        else:
            assert isinstance(item, ParsedResponseFunctionToolCall)
            assert list(json.loads(item.arguments)) == ["city"]
        if "text_format" in more:
            assert isinstance(answer.output_parsed, Where)


def test_a_response_that_was_cut_says_so_in_its_item(served: str):
    """An answer of limited length is incomplete, and so is its item. The response has the settings that it was made with."""
    answer = client(served).responses.create(
        model="smollm2-135m",
        input="Ada lives in Paris.",
        max_output_tokens=3,
        metadata={"a": "b"},
        user="ada",
    )
    assert (answer.status, answer.output[0].to_dict()["status"]) == ("incomplete", "incomplete")
    assert (answer.metadata, answer.max_output_tokens, answer.tools, answer.tool_choice) == (
        {"a": "b"},
        3,
        [],
        "auto",
    )


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_parameters_that_change_nothing_are_accepted(served: str, api: str):
    """Parameters that an answer does not depend on are accepted, and others if their value asks for what the server does anyway."""
    shared: Any = {
        "user": "ada",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "top_p": 1.0,
    }
    if api == "chat":
        chat = client(served).chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=2,
            n=1,
            logprobs=False,
            presence_penalty=0,
            **shared,
        )
        assert len(chat.choices) == 1
    else:
        response = client(served).responses.create(
            model="smollm2-135m",
            input="Hello",
            max_output_tokens=2,
            include=["reasoning.encrypted_content"],
            background=False,
            truncation="disabled",
            text={"verbosity": "medium"},
            **shared,
        )
        assert response.error is None


@pytest.mark.parametrize(
    ("api", "change", "param", "code"),
    [
        ("chat", {"n": 2}, "n", "unsupported_value"),
        ("chat", {"logprobs": True}, "logprobs", "unsupported_value"),
        ("chat", {"top_logprobs": 2}, "top_logprobs", "unsupported_value"),
        ("chat", {"top_p": 0.5}, "top_p", "unsupported_value"),
        ("chat", {"stop": ["\n"]}, "stop", "unsupported_value"),
        ("chat", {"seed": 7}, "seed", "unsupported_parameter"),
        ("chat", {"store": True}, "store", "unsupported_value"),
        ("chat", {"max_tokens": 0}, "max_tokens", "invalid_value"),
        ("chat", {"temperature": "hot"}, "temperature", "invalid_value"),
        ("chat", {"previous_response_id": "r"}, "previous_response_id", "unsupported_parameter"),
        ("chat", {"colour": "red"}, "colour", "unsupported_parameter"),
        ("chat", {"tools": [{"type": "custom", "custom": {}}]}, "tools", "unsupported_parameter"),
        (
            "chat",
            {"stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "unsupported_value",
        ),
        ("responses", {"previous_response_id": "r"}, "previous_response_id", "unsupported_parameter"),
        ("responses", {"conversation": "c"}, "conversation", "unsupported_parameter"),
        ("responses", {"n": 2}, "n", "unsupported_parameter"),
        ("responses", {"background": True}, "background", "unsupported_value"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include", "unsupported_value"),
        ("responses", {"reasoning": {"effort": "low"}}, "reasoning.effort", "unsupported_value"),
        ("responses", {"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_value"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ("responses", {"max_output_tokens": -1}, "max_output_tokens", "invalid_value"),
    ],
)
def test_parameters_that_would_be_ignored_are_refused(
    served: str, api: str, change: dict[str, Any], param: str, code: str
):
    """What the server can't honour is refused in OpenAI's format, which names the parameter."""
    base = {"messages": [USER]} if api == "chat" else {"input": "Hello"}
    path = "/chat/completions" if api == "chat" else "/responses"
    status, answer = post(served, {"model": "smollm2-135m", **base, **change}, path)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code)
    assert param in answer["error"]["message"]


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"model": "gpt-5"}, 404, "there is no model 'gpt-5'"),
        ({"messages": []}, 400, "there is no message"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "no role 'king'"),
        ({"messages": 7}, 400, "unexpected form"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "only text, not image_url",
        ),
        ({"tools": [OTHER_TOOL, CITY_TOOL], "tool_choice": "required"}, 400, "can't choose among 2 tools"),
        ({"tool_choice": {"function": {"name": "x"}}}, 400, "not among the tools"),
        ({"response_format": {"type": "xml"}}, 400, "no response format 'xml'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}, 400, "can't be used"),
    ],
)
def test_requests_that_are_refused(served: str, change: dict[str, Any], status: int, said: str):
    """A request that can't be answered gets an error in OpenAI's format that says why."""
    got, answer = post(served, {"model": "smollm2-135m", "messages": [USER], **change})
    assert (got, said in answer["error"]["message"]) == (status, True), answer


def test_what_a_page_in_a_browser_could_send_is_refused(served: str):
    """A foreign host name, a form's content type and a body that is not a JSON object are refused."""
    body = {"model": "smollm2-135m", "messages": [USER]}
    assert post(served, body, host="evil.example")[0] == 403
    assert post(served, body, content_type="text/plain")[0] == 415
    assert post(served, b"{")[0] == 400
    assert post(served, b"[]")[0] == 400


# --- runs that remember their model ---

KILLED = """
import os, signal
from pathlib import Path
{head}
async def fare(city: str) -> str:
    \"""Return the price of a ticket to a city.\"""
    if not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "129 euros"
{tail}
"""
WORKER = "---\ndescription: Tells fares.\n{model}tools: [fare]\n---\nAnswer in one short sentence.\n"
ASKED = "How much is the ticket to Rome?"
HEAD = 'from handrail import Adapter, Agent, Prompt, OpenAIModel, tool\n@tool(effect="read")'


def started_and_killed(folder: Path, *arguments: str, **variables: str) -> str:
    """Run the program until its tool kills it, and return the id of the run."""
    given = environment(HANDRAIL_JOURNAL=str(folder / "runs.db"), **variables)
    died = handrail("run", *arguments, ASKED, "--approve", "all", cwd=folder, env=given)
    assert died.returncode == -signal.SIGKILL, died.stderr
    listed = json.loads(handrail("runs", "list", "--json", cwd=folder, env=given).stdout)
    return listed["runs"][0]["run_id"]


@pytest.mark.parametrize("how", ["worker", "worker --model", "worker module", "agent", "agent --model"])
def test_a_run_that_was_killed_resumes_on_its_model(served: str, how: str, tmp_path: Path):
    """A run that was killed is resumed on the model that it began with, however the model was named."""
    kind, _, named = how.partition(" ")
    tail = "" if kind == "worker" else "agent = Agent({model}, 'Answer in one short sentence.', tools=[fare])"
    model = "'openai:smollm2-135m'" if not named else "OpenAIModel('none', base_url='http://127.0.0.1:9/v1')"
    code = KILLED.replace("{head}", HEAD).replace("{tail}", tail.replace("{model}", model))
    (tmp_path / ("tools.py" if kind == "worker" else "app.py")).write_text(code)
    (tmp_path / "mine.py").write_text(
        f"from handrail import OpenAIModel\nm = OpenAIModel('smollm2-135m', base_url={served!r}, key_variable=None)\n"
    )
    line = {"": "model: openai:smollm2-135m\n", "module": "model: mine:m\n"}.get(named, "")
    (tmp_path / "main.md").write_text(WORKER.replace("{model}", line))
    more = ("--model", "mine:m") if named == "--model" else ()
    variables = {} if named else {"OPENAI_BASE_URL": served}
    run_id = started_and_killed(tmp_path, "main.md" if kind == "worker" else "app.py", *more, **variables)
    given = environment(HANDRAIL_JOURNAL=str(tmp_path / "runs.db"), **variables)
    done = handrail("runs", "resume", run_id, "--approve", "all", "--json", cwd=tmp_path, env=given)
    assert done.returncode == 0, done.stderr
    assert "129" in json.loads(done.stdout)["text"]


def test_a_prompt_resumes_with_the_adapter_beside_it(tmp_path: Path):
    """`runs resume` uses the adapter in the prompt's module, because a scripted model can't be found by name."""
    (tmp_path / "app.py").write_text(
        "import sys\n"
        "from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal, ToolCall, tool\n"
        + KILLED.replace("{head}", '@tool(effect="read")').replace("{tail}", "")
        + "answers = ['It is 129 euros.'] if Path('killed').exists() else [ToolCall('fare', {'city': 'Rome'})]\n"
        "prompt = Prompt('fares', 'Be brief.', tools=[fare])\n"
        "adapter = Adapter(ScriptedModel(answers))\n"
    )
    start = (
        "import app, handrail; app.adapter.evaluate(app.prompt, 'hi', app='app:prompt', run_id='r1', "
        "journal=handrail.SqliteJournal('runs.db')).wait()"
    )
    command = [HANDRAIL[0], "-c", start]
    died = subprocess.run(command, cwd=tmp_path, env=environment(PYTHONPATH=str(tmp_path)))
    assert died.returncode == -signal.SIGKILL
    done = handrail("runs", "resume", "r1", "--json", "--journal", "runs.db", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout)["text"] == "It is 129 euros."


def test_a_recorded_model_that_is_gone(tmp_path: Path):
    """If the model can't be found by its recorded name, an error says so. `--model module:agent` uses the agent's model."""
    (tmp_path / "app.py").write_text(
        "import os\n"
        "from handrail import Agent, CapabilityPolicy, ScriptedModel, ToolCall, tool\n"
        '@tool(effect="irreversible", capabilities={"pay"})\n'
        "async def pay() -> str:\n"
        '    """Pay."""\n'
        "    return 'paid'\n"
        "name = 'scripted:second' if os.path.exists('second') else 'scripted:first'\n"
        "script = ['Paid.'] if os.path.exists('second') else [ToolCall('pay')]\n"
        "agent = Agent(ScriptedModel(script, name=name), 'Pay.', tools=[pay], policies=[CapabilityPolicy({'pay': 'ask'})])\n"
    )
    given = environment(HANDRAIL_JOURNAL=str(tmp_path / "runs.db"))
    parked = handrail("run", "app.py", "x", "--approve", "later", "--json", cwd=tmp_path, env=given)
    assert parked.returncode == 5, parked.stderr
    run_id = json.loads(parked.stdout)["run_id"]
    (tmp_path / "second").touch()
    refused = handrail("runs", "resume", run_id, "--approve", "all", cwd=tmp_path, env=given)
    assert refused.returncode == 2
    assert "began with the model 'scripted:first', which can't be found by that name" in refused.stderr
    done = handrail(
        "runs", "resume", run_id, "--approve", "all", "--model", "app:agent", cwd=tmp_path, env=given
    )
    assert (done.returncode, "Paid." in done.stdout) == (0, True), done.stderr


def test_the_servers_have_different_default_ports() -> None:
    """`serve`, `model serve` and `mcp --http` can run at the same time without `--port`."""
    ports = [
        inspect.signature(each).parameters["port"].default
        for each in (ServeOptions, models_commands.serve, McpOptions)
    ]
    assert len(set(ports)) == 3
