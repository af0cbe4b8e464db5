"""Tests for the input from AG-UI clients: what is accepted, and how each problem is reported."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import open_gate
from handrail.errors import DefinitionError, ToolValidationError
from handrail.messages import AssistantMessage, UserMessage
from handrail.serve.agui.inputs import parse_input
from handrail.serve.agui.interrupts import Outcome, frontend_tool, frontend_tools_of
from handrail.serve.refusals import RequestRefused
from handrail.testing import Person

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}


def user(text: Any, id: str = "u1") -> dict[str, Any]:
    return {"id": id, "role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"id": f"a {text}", "role": "assistant", "content": text, **more}


def sent(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return an input as a client of version 0.0.59 sends it."""
    given = {
        "threadId": "t",
        "runId": "r",
        "state": {},
        "messages": list(messages),
        "tools": [],
        "context": [],
    }
    return {**given, "forwardedProps": {}, **more}


def test_only_messages_after_the_last_answer_are_new() -> None:
    """Only messages after the last assistant message are new. In a new thread, the earlier ones become its history."""
    asked = parse_input(sent(user("one"), said("two"), user("three", "u3"), user("four", "u4")))
    assert asked.said == ("three", "four")
    assert asked.history == (UserMessage("one"), AssistantMessage("two"))
    assert asked.named == (("u1", "one"), ("u3", "three"), ("u4", "four"))
    assert not asked.sees_nested


def test_a_client_of_1_0_says_so_and_sees_nested_runs() -> None:
    assert parse_input(sent(user("x"), protocolVersion="1.0")).sees_nested


def test_parts_of_text_are_taken_together() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parse_input(sent(user(parts))).said == ("one\ntwo",)


def test_answers_and_outcomes_are_found() -> None:
    """Each answer is read with its question's id, and each tool message with the id of its call."""
    call = {"id": "c1", "type": "function", "function": {"name": "show", "arguments": "{}"}}
    result = {"id": "m", "role": "tool", "toolCallId": "c1", "content": "seen", "error": "badly"}
    entries = [
        {"interruptId": "run.1~1!1#0123456789abcdef", "status": "resolved", "payload": {"approved": True}},
        {"interruptId": "run.2~1?1#0123456789abcdef", "status": "cancelled"},
    ]
    asked = parse_input(sent(user("x"), said("", toolCalls=[call]), result, resume=entries))
    assert asked.outcomes == {"c1": Outcome("seen", "badly")}
    assert [(each.question_id, each.resolved, each.value) for each in asked.answers] == [
        ("run.1~1!1", True, {"approved": True}),
        ("run.2~1?1", False, None),
    ]
    assert asked.said == ()


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ("no object", "/"),
        ({}, "/threadId"),
        (sent(user("x"), threadId="a b"), "/threadId"),
        (sent(user("x"), threadId="x" * 129), "/threadId"),
        (sent(user("x"), runId="../up"), "/runId"),
        (sent({"id": "1", "role": "stranger", "content": "x"}), "/messages/0"),
        (
            sent(user([{"type": "image", "source": {"type": "url", "value": "file:///etc/passwd"}}])),
            "/messages/0/content/0/source",
        ),
        (sent(user("x"), resume=[{"interruptId": "nothing", "status": "resolved"}]), "/resume/0/interruptId"),
        (sent(user("x"), resume=[{"interruptId": "a#b", "status": "maybe"}]), "/resume/0/status"),
        (
            sent(user("x"), resume=[{"interruptId": "a#b", "status": "cancelled"}] * 2),
            "/resume/1/interruptId",
        ),
        (sent(user("x"), tools=[{"name": "a b", "description": "x"}]), "/tools/0"),
        (sent(user("x"), tools=[{"name": "a", "description": "x", "parameters": "none"}]), "/tools/0"),
        (sent(user("x"), tools=[{"name": "a", "description": "x"}] * 2), "/tools/1/name"),
        (sent(user("x"), tools=[{"name": f"a{n}", "description": "x"} for n in range(129)]), "/tools"),
    ],
)
def test_a_problem_is_reported_with_its_place(wrong: Any, where: str) -> None:
    """Invalid input is refused with status 422 and an error that says where the problem is."""
    with pytest.raises(RequestRefused) as refused:
        parse_input(wrong)
    assert refused.value.status == 422
    assert any(place.startswith(where) for place, _ in refused.value.fields), refused.value.fields
    assert where in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: JSON | st.just([user("x")])
            for name in ("threadId", "runId", "messages", "tools", "resume", "protocolVersion", "state")
        },
    )
)
def test_any_input_is_accepted_or_refused(value: Any) -> None:
    """Any input, however broken, is either accepted or refused with `RequestRefused`."""
    with contextlib.suppress(RequestRefused):
        parse_input({"threadId": "t", "runId": "r", "messages": [], **value})


# --- tools of the client's own --------------------------------------------------------------------------


async def test_a_frontend_tool_is_a_question_that_the_client_answers() -> None:
    """A client's tool has the client's description and schema, and the client's answer becomes the call's result.

    Arguments that do not fit the schema are refused.
    """

    def answers(payload: Any) -> Any:
        return {"content": f"shown: {payload['arguments']['place']}"}

    made = frontend_tool("showMap", "x" * 500, SCHEMA)
    assert (made.name, len(made.description), made.json_schema) == ("showMap", 500, SCHEMA)
    person = Person(answers={"frontend_tool": answers})
    gate = open_gate([made], environment=person)
    result = await gate.invoke("showMap", '{"place": "Oslo"}')
    assert (result.success, result.render()) == (True, "shown: Oslo")
    assert person.questions[0].payload == {"tool": "showMap", "arguments": {"place": "Oslo"}}
    refused = await gate.invoke("showMap", '{"plaice": 1}')
    assert not refused.success
    assert "place" in refused.message


async def test_a_frontend_tool_that_failed_is_a_failed_call() -> None:
    person = Person(answers={"frontend_tool": {"content": "", "error": "no map here"}})
    result = await open_gate([frontend_tool("show", "Show.")], environment=person).invoke("show", "{}")
    assert (result.success, result.message) == (False, "no map here")


def test_the_tools_of_a_recorded_run_are_found_in_its_record() -> None:
    """A client's tools can be restored from a run's record, without the client."""
    from handrail.run.record.begin import offer_of

    made = frontend_tool("showMap", "Show it.", SCHEMA)
    (again,) = frontend_tools_of({"showMap": offer_of(made), "other": "[]"}, ["showMap"])
    assert (again.name, again.description, again.json_schema) == ("showMap", "Show it.", SCHEMA)


@pytest.mark.parametrize("arguments", ["[]", "{", '{"place": 1}', "7"])
def test_arguments_that_do_not_fit_the_clients_schema_are_refused(arguments: str) -> None:
    with pytest.raises(ToolValidationError):
        frontend_tool("show", "Show.", SCHEMA).parse(arguments)


def test_a_name_that_no_model_takes_is_refused() -> None:
    with pytest.raises(DefinitionError, match="letters"):
        frontend_tool("show map", "Show.")


@pytest.mark.parametrize("value", [{}, 0, None], ids=["object", "number", "null"])
@pytest.mark.parametrize("field", ["messages", "tools", "context", "resume"])
def test_an_input_with_too_many_values_is_refused_before_it_is_validated(field: str, value: Any):
    """An input with too many values is refused before it is validated, because validating them could take seconds."""
    with pytest.raises(RequestRefused) as refused:
        parse_input({**sent(user("x")), field: [value] * 20_001})
    assert (refused.value.status, refused.value.kind) == (413, "InputTooLarge")
    assert field in str(refused.value)


def test_a_refusal_lists_a_hundred_fields():
    """A refusal's message names one invalid field and counts the others. Its `fields` list the first hundred."""
    with pytest.raises(RequestRefused, match=r"and 4,999 more") as refused:
        parse_input({**sent(user("x")), "resume": [0] * 5000})
    assert len(refused.value.fields) == 100
