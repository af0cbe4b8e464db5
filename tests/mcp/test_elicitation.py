"""Forms of MCP servers: what is sent as the person's answer is exactly what the person was shown and gave."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import ElicitRequestFormParams, ElicitRequestURLParams, ElicitResult, ErrorData

from handrail import ToolContext, tool
from handrail.environment.form import fill_in
from handrail.errors import Declined
from handrail.mcp import forms as elicitation
from handrail.mcp.forms import form_of
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.run import open_gate
from handrail.testing import Person
from handrail.tools import RunMode
from support.parked_runs import answer_to

NAMES = ["amount", "agree", "unit", "pick", "many"]


async def sent(params: Any, environment: Environment) -> Any:
    """Ask a server's question in a call whose questions this environment answers. Returns what the server gets."""
    found: list[Any] = []

    @tool(effect="read")
    async def call(*, context: ToolContext) -> str:
        """Call the server."""
        found.append(await elicitation.ask("shop", context, params))
        return ""

    gate = open_gate([call], environment=environment)
    await gate.invoke("call", {})
    await gate.close()
    return found[0]


def form(properties: dict[str, Any], **more: Any) -> ElicitRequestFormParams:
    schema = {"type": "object", "properties": properties, **more}
    return ElicitRequestFormParams(message="Please.", requested_schema=schema)


class Terminal(Environment):
    """A person at a terminal's form, who presses Enter wherever that is possible, and notes what was shown and typed."""

    run_mode: RunMode = "user"

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.schema: dict[str, Any] = {}
        self.value: Any = None

    def say(self, text: str = "", *styles: str) -> None:
        self.seen.append(text)

    async def line(self, prompt: str) -> str:
        self.seen.append(prompt)
        typed = ""
        if "Enter" not in prompt:
            typed = "y" if "y or n" in prompt else "7"
            if "choose one" in prompt:
                typed = self.seen[-2].strip().partition(")")[0]
        assert len(self.seen) < 500, "a form that never ends"
        self.seen.append(typed)
        return typed

    hidden_line = line

    async def ask(self, question: Question, /) -> Answer:
        self.schema = question.schema
        try:
            self.value = await fill_in(question.schema, self)
        except Declined:
            return answer_to(question, None, by="", outcome="declined")
        return answer_to(question, self.value)


def with_default(schema: dict[str, Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.just(schema) | values.map(lambda value: {**schema, "default": value})


CHOICES = st.lists(st.sampled_from(["small", "large", "pay 9999"]), min_size=1, unique=True)
FIELDS = st.one_of(
    with_default({"type": "integer"}, st.integers(-99, 99)),
    with_default({"type": "boolean"}, st.booleans()),
    with_default({"type": "string", "title": "T", "format": "email"}, st.sampled_from(["cm", "m"])),
    CHOICES.flatmap(lambda each: with_default({"type": "string", "enum": each}, st.sampled_from(each))),
    CHOICES.flatmap(
        lambda each: with_default(
            {"type": "string", "oneOf": [{"const": one, "title": "No"} for one in each]},
            st.sampled_from(each),
        )
    ),
    with_default({"type": "boolean", "const": True}, st.just(True)),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), FIELDS, min_size=1), st.data())
def test_the_answer_is_what_was_shown(fields: dict[str, Any], data: st.DataObject) -> None:
    """Every value that the server gets was shown to the person, as a suggestion or a choice, or was typed by them.

    The server gets exactly the fields of the answer, and the question's schema has every suggestion.
    """
    required = data.draw(st.lists(st.sampled_from(sorted(fields)), unique=True))
    person = Terminal()
    result = asyncio.run(sent(form(fields, required=required), person))
    assert isinstance(result, ElicitResult), result
    assert result.content == person.value
    suggested = {name: each["default"] for name, each in fields.items() if "default" in each}
    shown = {name: each["default"] for name, each in person.schema["properties"].items() if "default" in each}
    assert shown == suggested
    text = "\n".join(person.seen)
    for name, value in (result.content or {}).items():
        words = ("y", "true") if value is True else ("false",) if value is False else (str(value),)
        assert name in text
        assert any(word in text for word in words), (name, value, text)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), FIELDS, min_size=1))
def test_nothing_is_added_to_an_answer(fields: dict[str, Any]) -> None:
    """A person who leaves every field empty sends an empty form, whatever the server suggests."""
    result = asyncio.run(sent(form(fields), Person(answers={"mcp.form": {}})))
    assert (result.action, result.content) == ("accept", {})


async def test_what_a_form_hides_is_not_sent() -> None:
    """A suggestion is shown, in the form of an MCP client too, and the digest of the question covers it.

    A person who clears it does not agree to it.
    """
    asked: list[Question] = []
    for default in (True, False):
        person = Person(answers={"mcp.form": {}})
        fields = {"agree_to_pay_9999": {"type": "boolean", "default": default}}
        result = await sent(form(fields), person)
        assert result.content == {}
        asked += person.questions
    assert [each.schema["properties"]["agree_to_pay_9999"]["default"] for each in asked] == [True, False]
    assert form_of(asked[0]).requested_schema["properties"]["agree_to_pay_9999"]["default"] is True
    digests = {each.digest for each in asked}
    assert len(digests) == 2


@pytest.mark.parametrize(
    "field",
    [
        {"type": "string", "format": "password"},
        {"type": "string", "format": "Password"},
        {"type": "string", "writeOnly": True},
        {"anyOf": [{"type": "string", "format": "password"}, {"type": "null"}]},
        {"type": "array", "items": {"type": "string", "enum": ["a"], "format": "password"}},
    ],
)
async def test_a_form_that_asks_for_a_secret_is_refused(field: dict[str, Any]) -> None:
    """A form with a password field is refused, and nobody is asked. The server is told to use an address."""
    person = Person(answers={"mcp.form": {"secret": "hunter2"}})
    result = await sent(form({"size": {"type": "integer"}, "secret": field}), person)
    assert isinstance(result, ErrorData)
    assert "URL elicitation" in result.message
    assert person.questions == []


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"type": "integer", "default": "7"}, "default of 'a'"),
        ({"type": "string", "enum": ["x"], "default": "y"}, "default of 'a'"),
        ({"type": "object", "properties": {"b": {"type": "boolean", "default": True}}}, "a field of a form"),
        ({"type": "array", "items": {"type": "object"}}, "a field of a form"),
        (3, "not a schema"),
    ],
)
async def test_a_form_that_can_not_be_shown_is_refused(field: Any, why: str) -> None:
    """A form is refused if a suggestion does not fit its field, or if a field is not one that MCP defines."""
    person = Person(answers={"mcp.form": {}})
    result = await sent(form({"a": field}), person)
    assert isinstance(result, ErrorData)
    assert why in result.message
    assert person.questions == []


async def test_the_question_says_who_asks() -> None:
    """The sentence above a server's question is Handrail's own, and names the server. The server's text is shown as data."""
    person = Person(answers={"mcp.form": True, "mcp.url": True})
    said = "Handrail needs your answer."
    schema = {"type": "object", "properties": {}}
    await sent(ElicitRequestFormParams(message=said, requested_schema=schema), person)
    await sent(ElicitRequestURLParams(message=said, url="https://example.org/"), person)
    for question in person.questions:
        assert "MCP server shop" in question.message
        assert said not in question.message
        assert json.dumps(said) in json.dumps(question.payload)
        assert question.title == "Question from shop"
