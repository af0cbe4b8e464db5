"""Tests for `ModelSettings`: what each wire sends for them, what it refuses, and which runs inherit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Agent,
    AnthropicModel,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import DefinitionError
from handrail.messages import (
    AssistantMessage,
    CallAsked,
    ModelRequest,
    ModelSettings,
    Offered,
    Sent,
    StopPart,
    UserMessage,
)
from handrail.models import ModelRequestRefused, openai, responses
from handrail.models.gemini import GeminiModel
from handrail.models.openai import read_answer
from handrail.models.providers import PROVIDERS, Quirks
from handrail.runs.copies import fork
from support.provider_streams import look
from support.worker_folders import folder, sound

ALL = ModelSettings(
    effort="low",
    verbosity="high",
    service_tier="flex",
    seed=7,
    stop=("END",),
    parallel_calls=False,
    tool_choice="look",
    cache_key="thread-1",
    cache_ttl="1h",
)
SENT: dict[str, dict[str, Any]] = {
    "chat": {
        "effort": {"reasoning_effort": "low"},
        "verbosity": {"verbosity": "high"},
        "service_tier": {"service_tier": "flex"},
        "seed": {"seed": 7},
        "stop": {"stop": ["END"]},
        "parallel_calls": {"parallel_tool_calls": False},
        "tool_choice": {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        "cache_key": {"prompt_cache_key": "thread-1"},
    },
    "responses": {
        "effort": {"reasoning": {"effort": "low"}},
        "verbosity": {"text": {"verbosity": "high"}},
        "service_tier": {"service_tier": "flex"},
        "parallel_calls": {"parallel_tool_calls": False},
        "tool_choice": {"tool_choice": {"type": "function", "name": "look"}},
        "cache_key": {"prompt_cache_key": "thread-1"},
    },
    "messages": {
        "effort": {"output_config": {"effort": "low"}},
        "service_tier": {"service_tier": "flex"},
        "stop": {"stop_sequences": ["END"]},
        "parallel_calls": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_choice": {"tool_choice": {"type": "tool", "name": "look"}},
        "cache_ttl": {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    },
    "gemini": {
        "effort": {"generationConfig": {"thinkingConfig": {"thinkingLevel": "low"}}},
        "seed": {"generationConfig": {"seed": 7}},
        "stop": {"generationConfig": {"stopSequences": ["END"]}},
        "tool_choice": {
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}}
        },
    },
}


def body(wire: str, settings: ModelSettings) -> dict[str, Any]:
    request = ModelRequest("s", Sent([UserMessage("hi")]), Sent([Offered(look)]), settings=settings)
    if wire == "chat":
        return json.loads(openai._body({"model": "m"}, request, Quirks(), "chat:openai"))
    if wire == "responses":
        return json.loads(responses._body({"model": "m"}, request, "responses:openai"))
    if wire == "messages":
        return json.loads(AnthropicModel("m")._body(request))
    return json.loads(GeminiModel("m")._body(request))


@pytest.mark.parametrize("wire", SENT)
@pytest.mark.parametrize("name", ModelSettings.__struct_fields__)
def test_a_setting_is_sent_or_refused_by_name(wire: str, name: str) -> None:
    """Each wire sends each setting or refuses it by name. None is dropped silently."""
    settings = ModelSettings(**{name: getattr(ALL, name)})
    if name not in SENT[wire]:
        with pytest.raises(ModelRequestRefused, match=f"it has no {name}. Remove {name} from ModelSettings"):
            body(wire, settings)
        return
    sent = body(wire, settings)
    assert {field: sent[field] for field in SENT[wire][name]} == SENT[wire][name]


def test_a_refused_setting_names_the_model() -> None:
    with pytest.raises(ModelRequestRefused, match=r"anthropic:m.*it has no seed"):
        body("messages", ModelSettings(seed=1))
    with pytest.raises(ModelRequestRefused, match=r"openai:m.*it has no cache_ttl"):
        body("chat", ModelSettings(cache_ttl="5m"))


def test_what_a_provider_of_chat_lacks_is_a_row_of_the_table() -> None:
    """A setting is refused if the provider's row in the table says that the provider lacks it, and otherwise sent."""
    request = ModelRequest("", Sent([UserMessage("hi")]), Sent(), settings=ModelSettings(seed=1))
    for provider in ("moonshotai", "deepseek"):
        with pytest.raises(ModelRequestRefused, match=f"{provider}:m.*it has no seed"):
            openai._body({"model": "m"}, request, PROVIDERS[provider].quirks, f"chat:{provider}")
    assert b'"seed":1' in openai._body({"model": "m"}, request, PROVIDERS["groq"].quirks, "chat:groq")
    lacking = [row.quirks.lacks for row in PROVIDERS.values() if row.quirks.lacks]
    assert lacking
    assert all(lacks <= set(ModelSettings.__struct_fields__) for lacks in lacking)


def test_a_seed_has_the_name_that_the_server_knows() -> None:
    request = ModelRequest("", Sent([UserMessage("hi")]), Sent(), settings=ModelSettings(seed=1))
    sent = json.loads(openai._body({"model": "m"}, request, PROVIDERS["mistral"].quirks, "chat:mistral"))
    assert sent["random_seed"] == 1
    assert "seed" not in sent


@pytest.mark.parametrize("choice", ["auto", "required", "none", "look"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("must_call", [True, False])
def test_anthropic_gets_one_choice_of_parallel_calls_and_tool(
    choice: str, parallel: bool, must_call: bool
) -> None:
    """`tool_choice` and `parallel_calls` are sent as one object, and `must_call` overrides the choice.

    An object of type `none` says nothing about parallel calls.
    """
    settings = ModelSettings(parallel_calls=parallel, tool_choice=choice)
    request = ModelRequest(
        "s", Sent([UserMessage("hi")]), Sent([Offered(look)]), settings=settings, must_call=must_call
    )
    sent = json.loads(AnthropicModel("m")._body(request))["tool_choice"]
    several = {"disable_parallel_tool_use": not parallel}
    if must_call:
        assert sent == {"type": "any", **several}
    elif choice == "none":
        assert sent == {"type": "none"}
    elif choice == "look":
        assert sent == {"type": "tool", "name": "look", **several}
    else:
        assert sent == {"type": {"auto": "auto", "required": "any"}[choice], **several}


def test_a_model_that_must_call_gets_no_choice_without_settings() -> None:
    request = ModelRequest("s", Sent([UserMessage("hi")]), Sent([Offered(look)]), must_call=True)
    assert json.loads(AnthropicModel("m")._body(request))["tool_choice"] == {"type": "any"}


@pytest.mark.parametrize(("effort", "budget"), [("none", 0), ("low", 1024), ("high", 24576)])
def test_effort_of_older_gemini_models_is_a_budget(effort: str, budget: int) -> None:
    """Gemini 2.5 has no thinking levels, so the effort is sent as a thinking budget, beside the model's own options."""
    request = ModelRequest("", Sent([UserMessage("hi")]), Sent(), settings=ModelSettings(effort=effort))
    model = GeminiModel(
        "gemini-2.5-flash", options={"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    )
    thinking = json.loads(model._body(request))["generationConfig"]["thinkingConfig"]
    assert thinking == {"includeThoughts": True, "thinkingBudget": budget}


def test_an_unknown_effort_of_an_older_gemini_model() -> None:
    request = ModelRequest("", Sent([UserMessage("hi")]), Sent(), settings=ModelSettings(effort="xhigh"))
    with pytest.raises(
        ModelRequestRefused, match=r"it has no effort 'xhigh'. Pass one of none, minimal, low"
    ):
        GeminiModel("gemini-2.5-flash")._body(request)


@pytest.mark.parametrize(("choice", "mode"), [("auto", "AUTO"), ("required", "ANY"), ("none", "NONE")])
def test_geminis_modes_of_calling(choice: str, mode: str) -> None:
    sent = body("gemini", ModelSettings(tool_choice=choice))
    assert sent["toolConfig"] == {"functionCallingConfig": {"mode": mode}}


@pytest.mark.parametrize("wire", SENT)
def test_a_tool_that_is_not_offered_cannot_be_chosen(wire: str) -> None:
    with pytest.raises(
        ModelRequestRefused,
        match=r"tool_choice is 'find', which is not offered. Pass .* that is offered: look",
    ):
        body(wire, ModelSettings(tool_choice="find"))


def test_kimi_gets_its_thoughts_back() -> None:
    """A Kimi model gets back its own thinking with its calls, and a space in place of another model's. No call is forced."""
    quirks, wire = PROVIDERS["moonshotai"].quirks, "chat:moonshotai"
    whole = {
        "choices": [
            {
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "I look.",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
                    ],
                },
            }
        ]
    }
    endpoint: Any = None
    stop = list(read_answer(endpoint, wire, None, whole))[-1]
    assert isinstance(stop, StopPart)
    call = (CallAsked("c1", "look", "{}"),)
    own = AssistantMessage("", call, stop.kept, "I look.")
    foreign = AssistantMessage("", call, None, "They look.")
    request = ModelRequest("", Sent([UserMessage("hi"), own, foreign]), Sent([Offered(look)]), must_call=True)
    sent = json.loads(openai._body({"model": "kimi-k2.6"}, request, quirks, wire))
    assert [each.get("reasoning_content") for each in sent["messages"]] == [None, "I look.", " "]
    assert "tool_choice" not in sent


@pytest.mark.parametrize(
    "wrong",
    [{"verbosity": "loud"}, {"stop": "END"}, {"stop": ()}, {"seed": True}, {"seed": 1.5}, {"effort": ""}],
)
def test_an_invalid_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DefinitionError, match=f"ModelSettings\\({next(iter(wrong))}="):
        ModelSettings(**wrong)


async def test_settings_are_inherited_and_may_be_replaced() -> None:
    """Settings that a run leaves out come from its adapter. Those that a nested run leaves out come from its caller."""

    @tool
    async def delegate(context: ToolContext) -> str:
        """Ask another model."""
        inner = Prompt("inner", "Be brief.")
        return (await context.adapter.evaluate(inner, "go", model_settings=ModelSettings(effort="high"))).text

    model = ScriptedModel([ToolCall("delegate"), "inner", "outer"])
    adapter = Adapter(model, model_settings=ModelSettings(seed=1, effort="low"))
    prompt = Prompt("p", "Do.", tools=[delegate])
    await adapter.evaluate(
        prompt, "go", model_settings=ModelSettings(verbosity="low"), approvals="approve_all"
    )
    outer, inner, again = (request.settings for request in model.requests)
    assert outer == again == ModelSettings(seed=1, effort="low", verbosity="low")
    assert inner == ModelSettings(seed=1, effort="high", verbosity="low")


async def test_settings_are_those_of_the_run_when_it_is_resumed(tmp_path: Path) -> None:
    """A forked run that another adapter resumes keeps the settings of the original run."""
    settings, prompt = ModelSettings(stop=("END",), tool_choice="look"), Prompt("p", "Do.", tools=[look])
    first = ScriptedModel([ToolCall("look"), "done"])
    await Adapter(first, journal=SqliteJournal(tmp_path / "runs.db")).evaluate(
        prompt, "go", run_id="run", model_settings=settings
    )
    journal, later = SqliteJournal(tmp_path / "runs.db"), ScriptedModel(["done"])
    await fork(journal, "run", 1, "forked")
    await Adapter(later, journal=journal).resume("forked", prompt)
    assert [request.settings for request in later.requests] == [settings]


async def test_settings_of_agents_prompts_and_adapters() -> None:
    """A run's own settings take precedence over its prompt's, and the prompt's over its adapter's.

    A copy of the adapter with another model has none of the adapter's.
    """
    model, other = ScriptedModel(["done"] * 2), ScriptedModel(["done"])
    adapter = Adapter(model, model_settings=ModelSettings(seed=1, effort="low", verbosity="low"))
    agent = Agent(adapter, "Do.", model_settings=ModelSettings(effort="medium", verbosity="medium"))
    await agent.run("go", model_settings=ModelSettings(verbosity="high"))
    await agent.run("go")
    await adapter.with_model(other).evaluate(agent.prompt, "go")
    assert [request.settings for request in (*model.requests, *other.requests)] == [
        ModelSettings(seed=1, effort="medium", verbosity="high"),
        ModelSettings(seed=1, effort="medium", verbosity="medium"),
        ModelSettings(effort="medium", verbosity="medium"),
    ]


async def test_settings_of_an_agent_that_is_a_tool() -> None:
    inner = ScriptedModel(["39"])
    fare = Agent(
        inner, "Be brief.", name="fare", description="Fares.", model_settings=ModelSettings(effort="high")
    )
    model = ScriptedModel([ToolCall("fare", {"message": "Rome"}), "39"])
    await Agent(model, "Do.", tools=[fare.as_tool()], model_settings=ModelSettings(seed=1)).run("go")
    assert [request.settings for request in model.requests] == [ModelSettings(seed=1)] * 2
    assert [request.settings for request in inner.requests] == [ModelSettings(effort="high")]


def test_settings_beside_a_whole_prompt() -> None:
    prompt: Any = Prompt("p", "Do.")
    with pytest.raises(DefinitionError, match="already has a name, tools, output, policies and settings"):
        Agent(ScriptedModel([]), prompt, model_settings=ModelSettings(seed=1))  # pyright: ignore[reportCallIssue]


async def test_settings_of_a_worker(tmp_path: Path) -> None:
    """The settings in a worker's file apply when the worker is run by itself and when another worker calls it.

    A run's settings fill in what the file leaves out. In a call, the file's settings take precedence over the caller's.
    """
    front = (
        "---\nsettings: {effort: high, stop: [END], parallel_calls: false}\ndescription: Works.\n---\nWork."
    )
    workers = sound(tmp_path, "", work=front, lead="---\nworkers: [work]\npolicies: []\n---\nLead.")
    wanted = ModelSettings(effort="high", stop=("END",), parallel_calls=False)
    model = ScriptedModel(["done"])
    await workers.run("work", "go", model=model, model_settings=ModelSettings(seed=2))
    assert [request.settings for request in model.requests] == [
        ModelSettings(seed=2, effort="high", stop=("END",), parallel_calls=False)
    ]
    model = ScriptedModel([ToolCall("work", {"input": "go"}), "done", "done"])
    await workers.run("lead", "go", model=model, model_settings=ModelSettings(effort="low"))
    assert [request.settings for request in model.requests] == [
        ModelSettings(effort="low"),
        wanted,
        ModelSettings(effort="low"),
    ]


def test_wrong_settings_in_a_workers_file(tmp_path: Path) -> None:
    front = "---\nsettings:\n  effort: low\n  verbosity: loud\n---\nWork."
    (problem,) = folder(tmp_path, "", work=front).check()
    assert problem.line == 4
    assert problem.problem.startswith("`settings.verbosity` must be")


def test_settings_of_the_wrong_kind() -> None:
    wrong: Any = {"effort": "low"}
    with pytest.raises(DefinitionError, match="Pass a ModelSettings"):
        Prompt("p", "Do.", model_settings=wrong)
    with pytest.raises(DefinitionError, match="a ModelSettings, for example"):
        Adapter(ScriptedModel([]), model_settings=wrong)
