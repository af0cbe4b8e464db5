"""Common first mistakes: each error names the problem and the fix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    AnthropicModel,
    Budget,
    CapabilityPolicy,
    FileTools,
    MemoryFilesystem,
    OpenAIModel,
    Prompt,
    PromptEvaluationError,
    ScriptedModel,
    Session,
    Shell,
    ShellTools,
    ToolCall,
    kept,
    open_gate,
    tool,
    tool_context,
)
from handrail.errors import DefinitionError
from handrail.events import ToolInvoked
from handrail.messages import UserMessage
from handrail.resources.shell import Allow
from handrail.serve.sources import load
from handrail.testing import Person


@tool(effect="read")
async def weather(city: str) -> str:
    """Say what the weather is like in a city."""
    return f"It rains in {city}."


def wrongly(value: object) -> Any:
    """Return the value as `Any`, to hide its type from the type checker."""
    return value


def adapter(*answers: Any) -> Adapter:
    return Adapter(ScriptedModel([*answers, "Done."]))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: Prompt("p", wrongly([FileTools])), r"Create one: FileTools\(\.\.\.\)"),
        (
            lambda: Prompt("p", "x", tools=[wrongly(FileTools())]),
            "It is a section: put it among the sections",
        ),
        (lambda: ShellTools(wrongly([Allow("ls")])), "ShellTools takes a Shell, not a list"),
        (lambda: Shell(wrongly(Allow("make"))), "a shell takes a list of rules"),
        (lambda: Shell(wrongly("make")), r"Write Shell\(\[Allow\('make'\)\]\)"),
        (lambda: Shell(wrongly(["make"])), r"Write Allow\('make'\)"),
        (lambda: CapabilityPolicy({"fs write": "deny"}), "Write 'fs.write'"),
        (
            lambda: CapabilityPolicy({"irreversible": "ask"}),
            r"'irreversible' is an effect, .*CapabilityPolicy\(effects={'irreversible': ",
        ),
        (lambda: OpenAIModel("gpt-5", api_key=wrongly("k")), "Set OPENAI_API_KEY"),
        (lambda: AnthropicModel("claude", api_key=wrongly("k")), "Set ANTHROPIC_API_KEY"),
        (
            lambda: adapter().evaluate(Prompt("p", [FileTools()]), "hi").wait(),
            "prompt 'p' has FileTools, but the run has no files",
        ),
        (
            lambda: adapter().evaluate(Prompt("p", "x"), "hi", environment=wrongly(lambda q: True)).wait(),
            "environment is a function. Pass an instance of Environment",
        ),
    ],
)
def test_a_mistake_is_answered_with_a_hint(mistake: Any, words: str) -> None:
    """Each mistake is refused with an error that says what is wrong or what to write instead."""
    with pytest.raises(DefinitionError, match=words):
        mistake()


def test_an_unknown_price_under_a_limit_of_money() -> None:
    """A run with a money limit fails if its model has no known price. The error asks for a price."""
    with pytest.raises(
        PromptEvaluationError, match=r"Give the model a price, or run `pip install 'handrail\[prices\]'`"
    ):
        adapter().evaluate(Prompt("p", "x"), "hi", budget=Budget(money=1)).wait()


def test_a_stream_is_not_its_response() -> None:
    """Reading a response's attribute on a stream raises an error that says where the response is."""
    stream: Any = adapter().stream(Prompt("p", "x"), "hi")
    with pytest.raises(AttributeError, match=r"stream\.response\.wait\(\)"):
        stream.text  # noqa: B018  # reading it is the mistake
    assert stream.response.wait().text == "Done."


def test_text_among_sections() -> None:
    """A prompt may have several strings among its sections. They get no headings."""
    prompt = Prompt("p", ["Be brief.", FileTools(writes=False), "Be kind."], tools=[weather])
    text = prompt.render().text
    assert text.startswith("Be brief.\n\n## Files")
    assert text.endswith("Be kind.")
    assert [section.key for section in prompt.sections] == ["instructions", "files", "instructions-2"]


def test_commands_are_writes_too() -> None:
    """A policy that denies writing files also denies commands, because a command may write any file."""
    section = ShellTools(Shell([Allow("touch", ...)]))
    session = Session()
    model = ScriptedModel([ToolCall("run_command", {"command": ["touch", "x"]}), "Done."])
    prompt = Prompt("p", [section], policies=[CapabilityPolicy({"fs.write": "deny"})])
    Adapter(model, environment=Person(approve=True)).evaluate(
        prompt, "hi", session=session, filesystem=MemoryFilesystem()
    ).wait()
    assert [each.status for each in session[ToolInvoked].all()] == ["denied"]


def test_what_the_run_says_is_told_from_what_the_user_says() -> None:
    """Messages that the run adds are marked, so that they can be told apart from the user's."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Report:
        title: str

    model = ScriptedModel(["nothing", '{"title": "x"}'])
    Adapter(model).evaluate(Prompt("p", "x", output=Report), "hi").wait()
    said = [message for message in model.requests[1].messages if isinstance(message, UserMessage)]
    assert [message.by_run for message in said] == [False, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("x = 1\n\nx.y", r"AttributeError: .*served_wrongly\.py, line 3\)"),
        (
            "from handrail import Budget\nBudget(token=1)",
            r"TypeError: Budget takes no argument 'token'.*served_wrongly\.py, line 2\)",
        ),
        ("def (", r"SyntaxError: .*served_wrongly\.py, line 1\)"),
    ],
)
def test_a_module_that_does_not_load_is_its_own_mistake(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The error for a module that can't be loaded names the file and, where possible, the line."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "served_wrongly", sys)  # monkeypatch removes the entry after the test
    file = tmp_path / "served_wrongly.py"
    file.write_text(text)
    with pytest.raises(DefinitionError, match=rf"served_wrongly\.py can't be loaded: {words}"):
        load(str(file))


def test_an_answer_that_does_not_fit_is_said_with_one_full_stop():
    """When an answer is refused, the question is asked again, and its message ends with the hint."""
    person = Person(lambda question: {"approved": True, "scope": "all of it"})

    @tool(capabilities={"money"})
    async def pay() -> str:
        """Pay."""
        return "paid"

    gate = open_gate([pay], policies=[CapabilityPolicy({"money": "ask"})], environment=person)
    assert not gate.invoke("pay", {}).wait().success
    assert person.questions[1].message.endswith("Answer with remember='scope', or without a scope")


def test_a_folder_given_as_a_text_is_told_what_makes_it_files():
    """A string passed as the filesystem is refused, and the error shows how to open a folder."""
    with pytest.raises(DefinitionError, match=r"filesystem is a str.*DirectoryFilesystem\('folder'\)"):
        open_gate([weather], filesystem=wrongly("site"))


def test_decorators_that_need_parentheses_say_so():
    """`@kept` without parentheses, and decorators with a bare word, are refused where they stand, with what to write."""
    bare: Any = kept
    with pytest.raises(DefinitionError, match=r"@kept above Note has no arguments. Write @kept\(kind="):

        @bare
        class Note:
            pass

    mistakes: list[tuple[Any, str, str]] = [
        (tool_context, "ctx", r"@tool_context\(param='ctx'\)"),
        (tool, "fare", r"@tool\(name='fare'\)"),
        (bare, "log", r"@kept\(kind='log'\)"),
    ]
    for decorator, word, words in mistakes:
        with pytest.raises(DefinitionError, match=words):
            decorator(word)
