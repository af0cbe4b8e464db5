"""Tests for the table of providers and for names of models: where requests go, with which key, and which model a name means."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Agent,
    AgentEnvironment,
    Prompt,
    ScriptedModel,
    ToolContext,
    by,
    first_that_works,
    open_gate,
    tool,
)
from handrail.errors import DefinitionError, PromptEvaluationError
from handrail.imports import search
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    Kept,
    ModelRequest,
    Sent,
    ToolMessage,
    UserMessage,
)
from handrail.models import ModelKeyMissing
from handrail.models.names import check_name, give, model_named, reference_to
from handrail.models.openai import OpenAIModel
from handrail.models.providers import BRIDGED, PROVIDERS, Key
from handrail.serve.sources import load_module
from handrail.workers import WorkerRegistry
from support.raw_server import raw_server, whole
from support.texts import NO_SUCH_PROVIDER, NOT_A_MODEL_NAME

SAID = {"role": "assistant", "content": "Fine."}
ANSWER = {"choices": [{"message": SAID, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}
MESSAGE = {"content": [{"type": "text", "text": "Fine."}], "stop_reason": "end_turn", "usage": {}}
CHAT = [name for name, row in PROVIDERS.items() if row.wire == "chat"]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove every environment variable that the table of providers names."""
    for row in PROVIDERS.values():
        for variable in [
            *(key.variable for key in row.keys),
            *(each.variable for each in row.addresses),
            *row.headers.values(),
        ]:
            monkeypatch.delenv(variable, raising=False)


async def asked(model: Any) -> str:
    return (await Adapter(model).evaluate(Prompt("guide", "Be brief."), "hi")).text


# --- addresses and keys ---


@pytest.mark.parametrize("provider", [*CHAT, "anthropic"])
async def test_each_provider_is_asked_at_the_address_in_the_environment(
    provider: str, monkeypatch: pytest.MonkeyPatch
):
    """An address in any of a provider's variables is used, and the key is sent in the provider's own header."""
    row = PROVIDERS[provider]
    answer = MESSAGE if row.wire == "anthropic" else ANSWER
    for address in row.addresses:
        async with raw_server(whole(json.dumps(answer).encode())) as server:
            patched, host = monkeypatch, server.url
            given = host.removeprefix("http://") if address.port else host
            patched.setenv(address.variable, given)
            patched.setenv(row.keys[0].variable, "a-key")
            assert await asked(f"{provider}:some/model") == "Fine."
            sent = server.heads[0]
            key = row.keys[0]
            assert f"{key.header}: {key.prefix}a-key".lower().encode() in sent
            path = "/v1/messages" if row.wire == "anthropic" else f"{address.path}/chat/completions"
            assert sent.startswith(f"post {path} ".encode())
            assert server.bodies[0]["model"] == "some/model"
            patched.delenv(address.variable)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("10.0.0.5", "http://10.0.0.5:11434/v1"),
        ("0.0.0.0:80", "http://127.0.0.1:80/v1"),
        ("https://box.example/", "https://box.example/v1"),
        ("http://[::1]:9", "http://[::1]:9/v1"),
    ],
)
def test_the_forms_of_a_host(given: str, address: str, monkeypatch: pytest.MonkeyPatch):
    """`OLLAMA_HOST` may be a host, a host with a port or a URL, as in Ollama's own client."""
    monkeypatch.setenv("OLLAMA_HOST", given)
    assert PROVIDERS["ollama"].find_address() == address


async def test_a_second_key_variable_and_further_headers(monkeypatch: pytest.MonkeyPatch):
    """`ANTHROPIC_AUTH_TOKEN` is sent as a bearer token, and `OPENAI_ORG_ID` in OpenAI's organization header."""
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "a-token")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    for model, variable, answer, header in (
        ("anthropic:m", "ANTHROPIC_BASE_URL", MESSAGE, b"authorization: bearer a-token"),
        ("openai:m", "OPENAI_BASE_URL", ANSWER, b"openai-organization: org-1"),
    ):
        async with raw_server(whole(json.dumps(answer).encode())) as server:
            monkeypatch.setenv(variable, server.url)
            await asked(model)
            assert header in server.heads[0]


def test_only_a_vendors_own_address_needs_a_key(monkeypatch: pytest.MonkeyPatch):
    """A key is required at a vendor's own address, but not at a local server or at an address that replaces the vendor's."""
    needing = {name for name, row in PROVIDERS.items() if row.needs_key(row.find_address())}
    assert needing == {
        "openai",
        "anthropic",
        "azure",
        "deepseek",
        "google",
        "groq",
        "mistral",
        "moonshotai",
        "openrouter",
    }
    assert not PROVIDERS["openai"].needs_key("http://127.0.0.1:1/v1")


def test_a_missing_key_is_short():
    """The error for a missing key is one line that names the variable. It has no cause, and its traceback shows no frame inside Handrail."""
    with pytest.raises(PromptEvaluationError, match="Set ANTHROPIC_API_KEY in the environment") as caught:
        Agent("anthropic:m", "Be brief.").run("hi").wait()
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert isinstance(caught.value.__context__, ModelKeyMissing)
    assert "\n" not in str(caught.value)
    assert [frame.name for frame in caught.traceback] == ["test_a_missing_key_is_short"]


def test_a_missing_address_is_said():
    """A provider without a default address is refused if no address is set, and the error names the variable."""
    with pytest.raises(DefinitionError, match=r"azure:gpt' has no address.* Set AZURE_OPENAI_ENDPOINT"):
        model_named("azure:gpt")


def test_a_key_may_come_from_a_different_variable():
    """`key_variable` and `key_header` replace those of the provider, and `key_variable=None` sends no key.

    A provider that speaks a different API is refused.
    """
    at: Any = {"base_url": "http://127.0.0.1:1"}
    assert OpenAIModel("m", **at, key_variable="MINE")._endpoint._keys == (Key("MINE"),)
    assert OpenAIModel("m", **at, key_variable="MINE", key_header="API-Key")._endpoint._keys == (
        Key("MINE", "api-key", ""),
    )
    assert OpenAIModel("m", **at, key_variable=None)._endpoint._keys == ()
    with pytest.raises(DefinitionError, match="no provider 'anthropic' speaks this API"):
        OpenAIModel("m", provider="anthropic")


# --- requirements of single providers ---


def sent_by(provider: str, *messages: Any, **more: Any) -> dict[str, Any]:
    from handrail.models import openai

    base_url = "http://x/v1" if provider == "azure" else None
    model = OpenAIModel("m", provider=provider, base_url=base_url)
    request = ModelRequest("", Sent(messages), Sent(), **more)
    return json.loads(openai._body(model._fields, request, model._quirks, model._wire))


CALLED = AssistantMessage("", (CallAsked("call_0123456789abcdef", "f", "{}"),))
RESULT = ToolMessage((CallAnswered("call_0123456789abcdef", "f", "1"),))


@pytest.mark.parametrize("provider", CHAT)
def test_the_fields_of_a_streamed_request(provider: str):
    """Each provider gets the token limit and the stream options in the fields that it knows."""
    body = sent_by(provider, UserMessage("hi"), stream=True, max_tokens=5)
    newer = provider in ("openai", "azure", "groq", "moonshotai")
    assert body["max_completion_tokens" if newer else "max_tokens"] == 5
    assert ("stream_options" in body) == (provider != "mistral")
    assert len([name for name in body if name.startswith("max_")]) == 1


def test_what_mistral_requires():
    """Mistral gets call ids of nine letters and digits, the same for a call and its result. No user message directly follows a result."""
    body = sent_by("mistral", UserMessage("hi"), CALLED, RESULT, UserMessage("go on"))
    assert [each["role"] for each in body["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
    id = body["messages"][1]["tool_calls"][0]["id"]
    assert len(id) == 9
    assert id.isalnum()
    assert body["messages"][2]["tool_call_id"] == id


@pytest.mark.parametrize(
    ("model", "is_forced"),
    [
        ("deepseek:deepseek-chat", True),
        ("deepseek:deepseek-reasoner", False),
        ("deepseek:deepseek-v4-pro", False),
        ("openai:gpt-5", True),
    ],
)
def test_a_model_that_refuses_to_be_forced_is_not(model: str, is_forced: bool):
    """DeepSeek's thinking models refuse a forced call, so requests to them do not force one."""
    from handrail.models import openai

    provider, name = model.split(":")
    made = OpenAIModel(name, provider=provider, key_variable=None)
    request = ModelRequest("", Sent([UserMessage("hi")]), Sent(), must_call=True)
    body = json.loads(openai._body(made._fields, request, made._quirks, made._wire))
    assert ("tool_choice" in body) == is_forced


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_sent_back_with_calls(stream: bool, monkeypatch: pytest.MonkeyPatch):
    """If an answer has calls, its reasoning is sent back to DeepSeek and OpenRouter, but not to OpenAI.

    Streamed pieces are joined. In place of another provider's reasoning, DeepSeek gets a space.
    """
    from handrail.models.openai import ChatChunks, read_answer

    pieces = [
        {
            "reasoning_content": "I ",
            "reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "I "}],
        },
        {
            "reasoning_content": "see",
            "reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "see"}],
        },
    ]
    fields = ("reasoning_content", "reasoning_details")
    whole_ones = {
        "reasoning_content": "I see",
        "reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "I see"}],
    }
    endpoint = OpenAIModel("m", base_url="http://x")._endpoint
    if stream:
        taker = ChatChunks(endpoint, "chat:of the answer")
        chunks = [
            *({"choices": [{"delta": piece}]} for piece in pieces),
            {"choices": [{"finish_reason": "tool_calls"}]},
        ]
        parts = [part for chunk in chunks for part in taker.take(chunk)]
    else:
        answer = {"choices": [{"message": whole_ones, "finish_reason": "tool_calls"}]}
        parts = list(read_answer(endpoint, "chat:of the answer", None, answer))
    kept: Any = parts[-1]

    def by(provider: str) -> AssistantMessage:
        return AssistantMessage("", CALLED.calls, Kept(f"chat:{provider}", kept.kept.data), thought="I see")

    for provider, field in (("deepseek", "reasoning_content"), ("openrouter", "reasoning_details")):
        body = sent_by(provider, UserMessage("hi"), by(provider), RESULT)
        back = body["messages"][1]
        assert {name: back.get(name) for name in fields} == {
            **dict.fromkeys(fields),
            field: whole_ones[field],
        }
    for said in (by("openai"), by("openrouter")):
        assert not set(fields) & set(sent_by("openai", UserMessage("hi"), said, RESULT)["messages"][1])
    moved = sent_by("deepseek", UserMessage("hi"), by("openrouter"), RESULT)["messages"][1]
    assert moved["reasoning_content"] == " "  # DeepSeek refuses a call without reasoning


# --- names of models ---


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module with models to a folder on Python's path, and yield the module's name."""
    name = f"models_of_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(
        "from handrail import Adapter, Agent, ScriptedModel\n"
        "fast = ScriptedModel(['Mine.'])\n"
        "adapter = Adapter(ScriptedModel(['Of the adapter.']))\n"
        "agent = Agent(ScriptedModel(['Of the agent.']), 'Be brief.')\n"
        "text = 'no model'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("attribute", "said"), [("fast", "Mine."), ("adapter", "Of the adapter."), ("agent", "Of the agent.")]
)
async def test_a_model_of_ones_own_by_name(module: str, attribute: str, said: str):
    """`module:name` names a model, or the model of an adapter or agent, and `reference_to` returns that name."""
    name = f"{module}:{attribute}"
    assert await asked(name) == said
    assert reference_to(model_named(name)) == name
    check_name(name)


async def test_prompt_model_takes_a_model_and_its_name(module: str):
    """`prompt_model` takes the model to ask, or its name."""

    @tool(effect="read")
    async def ask(context: ToolContext, by_name: bool) -> str:
        """Ask a model."""
        assert context.prompt_model
        chosen = f"{module}:answering" if by_name else ScriptedModel(['{"value": "passed"}'])
        return await context.prompt_model("Which?", str, model=chosen)

    model_named(f"{module}:fast")
    sys.modules[module].answering = ScriptedModel(['{"value": "named"}'])  # pyright: ignore[reportAttributeAccessIssue]
    gate = open_gate([ask], environment=AgentEnvironment(ScriptedModel([])))
    assert (await gate.invoke("ask", {"by_name": True})).render() == "named"
    assert (await gate.invoke("ask", {"by_name": False})).render() == "passed"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:model", f"there is {NO_SUCH_PROVIDER}. `handrail models` lists"),
        ("opnai:gpt-5", "Did you mean openai:gpt-5"),
        ("scripted:x", "Create a ScriptedModel"),
        ("a-b:c", NO_SUCH_PROVIDER),
        ("gpt-5", f"{NOT_A_MODEL_NAME}. Write provider:name"),
    ],
)
def test_an_unknown_name(name: str, message: str):
    """An unknown model name is refused as soon as it is given, and the error never says to install the bridge."""
    for refuse in (model_named, check_name, lambda name: Agent(name, "Be brief.")):
        with pytest.raises(DefinitionError, match=message) as caught:
            refuse(name)
        assert "bridge" not in str(caught.value)


def test_a_module_without_that_model(module: str, tmp_path: Path):
    """A model's name is refused if its module has no such model or can't be imported, and the error says which."""
    for attribute in ("text", "nothing"):
        with pytest.raises(DefinitionError, match=f"has no model called '{attribute}'"):
            model_named(f"{module}:{attribute}")
    (tmp_path / "broken_models.py").write_text("1 / 0\n")
    with pytest.raises(DefinitionError, match="can't import 'broken_models': ZeroDivisionError"):
        model_named("broken_models:x")


def test_a_module_that_ends_the_program_is_an_error(tmp_path: Path):
    """A worker's file can name any installed module, and one that exits when it is imported must not end the server."""
    (tmp_path / "exits.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(DefinitionError, match="can't import 'exits': SystemExit"):
        model_named("exits:model", folder=tmp_path)
    with pytest.raises(DefinitionError, match=NO_SUCH_PROVIDER):
        model_named("unittest.__main__:model", folder=tmp_path)


def test_a_module_beside_a_worker(tmp_path: Path):
    """Two folders may each have a module of the same name. No such module replaces an installed one or a provider."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name in ("mine", "json", "mistral"):
            (tmp_path / folder / f"{name}.py").write_text(
                f"from handrail import ScriptedModel\nm = ScriptedModel([], name='scripted:{folder}')\n"
            )
    one, two = (model_named("mine:m", tmp_path / folder) for folder in ("one", "two"))
    assert (one.name, two.name) == ("scripted:one", "scripted:two")
    assert model_named("mine:m", tmp_path / "one") is one
    with pytest.raises(DefinitionError, match="module 'json' has no model"):
        model_named("json:m", tmp_path / "one")
    assert isinstance(model_named("mistral:m", tmp_path / "one"), OpenAIModel)


_PLANTED = """
import pathlib
from handrail import ScriptedModel
pathlib.Path(__file__).with_name("ran").touch()
m = ScriptedModel(["Here."])
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module to the current folder, which is searched for apps, and yield the module's name."""
    name = f"here_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(_PLANTED)
    monkeypatch.chdir(tmp_path)
    search(tmp_path)
    yield name
    sys.modules.pop(name, None)


async def test_a_name_from_a_model_or_a_file_imports_nothing_from_the_current_folder(
    planted: str, tmp_path: Path
):
    """A module that only the current folder has is not imported for a name that a tool, a worker's file or a choice of models gives."""
    name = f"{planted}:m"

    @tool(effect="read")
    async def ask(context: ToolContext, name: str) -> str:
        """Ask the model that the model chose."""
        assert context.prompt_model
        return await context.prompt_model("Which?", str, model=name)

    gate = open_gate([ask], environment=AgentEnvironment(ScriptedModel([])))
    assert NO_SUCH_PROVIDER in (await gate.invoke("ask", {"name": name})).render()
    workers = tmp_path / "team"
    workers.mkdir()
    (workers / "main.md").write_text(f"---\nmodel: {name}\n---\nDo.\n")
    registry = WorkerRegistry(workers)
    chosen: Any = by(lambda request: name)
    assert [problem.line for problem in registry.check()] == [2]
    for refused in (
        lambda: registry.run("main", "x"),
        lambda: registry.run("main", "x", model=name, models={"main": name}),
        lambda: check_name(name),
        lambda: Adapter(name),
        lambda: Agent(name, "Be brief."),
        lambda: chosen.candidates(None),
        lambda: first_that_works("openai:x", name),
    ):
        with pytest.raises(Exception, match=NO_SUCH_PROVIDER):
            refused()
    assert not (tmp_path / "ran").exists()


async def test_a_name_from_the_user_finds_a_module_in_the_current_folder(planted: str, tmp_path: Path):
    """What the command line names, and what an app names while it is imported, may be in the current folder or beside the app."""
    give(f"{planted}:m")
    check_name(f"{planted}:m")
    assert not (tmp_path / "ran").exists()
    assert await asked(f"{planted}:m") == "Here."
    beside = f"beside_{planted}"
    (tmp_path / f"{beside}.py").write_text(_PLANTED)
    (tmp_path / f"app_{planted}.py").write_text(
        f"from handrail import Agent\nagent = Agent('{beside}:m', 'Be brief.')\n"
    )
    app = load_module(str(tmp_path / f"app_{planted}.py"))
    assert (await app.agent.run("hi")).text == "Here."


def test_checking_a_name_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A name is checked without importing the module, or a package around it."""
    package = tmp_path / "a_package_of_models"
    package.mkdir()
    for file in ("__init__.py", "models.py"):
        (package / file).write_text(_PLANTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_name("a_package_of_models.models:m")
    with pytest.raises(DefinitionError, match=NO_SUCH_PROVIDER):
        check_name("a_package_of_models.nothing:m")
    assert not (package / "ran").exists()
    assert "a_package_of_models" not in sys.modules


def test_no_name_means_two_things():
    """No provider is both in the table and in the bridge."""
    assert not BRIDGED & PROVIDERS.keys()
