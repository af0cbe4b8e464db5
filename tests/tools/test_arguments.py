"""Misspelt arguments of the public classes and of `@tool`: the error names what was called and the nearest name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import handrail
from handrail import Agent, Budget, Handoff, Prompt, ScriptedModel, Tool, tool
from handrail.errors import DefinitionError

NOT_WRITTEN_BY_USERS = {"Operation", "Section", "Worker"}
"""Classes that are not checked: two that Handrail itself creates, and the abstract `Section`."""

REQUIRED: dict[str, tuple[Any, ...]] = {
    "Adapter": (ScriptedModel([]),),
    "Handoff": ("pick", "Let the other side pick."),
}


def written_classes() -> list[str]:
    """Return the names of the public classes to check. Exceptions, protocols and structs are left out."""
    found: list[str] = []
    for name in sorted(set(handrail.__all__) - NOT_WRITTEN_BY_USERS):
        public: Any = getattr(handrail, name)
        is_ours = inspect.isclass(public) and inspect.isfunction(public.__init__)
        if (
            is_ours
            and not issubclass(public, BaseException)
            and not getattr(public, "_is_protocol", False)
            and "__struct_fields__" not in dir(public)
        ):
            found.append(name)
    return found


@pytest.mark.parametrize("name", written_classes())
def test_a_public_class_names_itself_and_the_unknown_argument(name: str) -> None:
    """For each class in `written_classes`, the error for an unknown argument names the class and the argument."""
    with pytest.raises(TypeError, match=rf"^{name} takes no argument 'zzz'\. It takes "):
        getattr(handrail, name)(*REQUIRED.get(name, ()), zzz=1)


def test_the_list_of_classes_is_not_empty() -> None:
    """`written_classes` finds at least six well-known classes."""
    assert {"Agent", "Budget", "Prompt", "Tool", "MarkdownSection", "SqliteJournal"} <= set(written_classes())


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda wrong: tool(**wrong("efect")), "@tool takes no argument 'efect'. Did you mean 'effect'?"),
        (
            lambda wrong: Agent(ScriptedModel([]), "x", **wrong("tool")),
            "Agent takes no argument 'tool'. Did you mean 'tools'?",
        ),
        (lambda wrong: Budget(**wrong("request")), "Budget takes no argument 'request'. Did you mean 'requests'?"),
        (
            lambda wrong: Handoff("a", "b", **wrong("timout")),
            "Handoff takes no argument 'timout'. Did you mean 'timeout'?",
        ),
        (
            lambda wrong: Tool[Any, Any](**wrong("nam")),
            "Tool takes no argument 'nam'. Did you mean 'name'?",
        ),
    ],
)  # fmt: skip
def test_a_misspelt_argument_gets_the_nearest_name(mistake: Any, words: str) -> None:
    """The error names the function or class that the user called, the argument, and the nearest known name."""
    with pytest.raises(TypeError) as caught:
        mistake(lambda name: {name: 1})
    assert str(caught.value) == words


def test_two_tools_with_one_name_in_one_place() -> None:
    """If two tools with the same name are in the same place, the error names the place once."""

    @tool
    def fare() -> str:
        """Look up a fare."""
        return ""

    with pytest.raises(DefinitionError) as caught:
        Prompt("p", "x", tools=[fare, fare])
    assert "two tools are named 'fare', both in the prompt itself. Rename one or drop one." in str(
        caught.value
    )


def test_a_lambda_is_no_tool() -> None:
    """A lambda, which has no name, is refused as a tool. The error says to write a function."""
    given: Any = lambda city: city  # noqa: E731  # the mistake itself
    with pytest.raises(DefinitionError, match="Write it as a function with a name and a docstring"):
        Prompt("p", "x", tools=[given])
