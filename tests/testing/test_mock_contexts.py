"""`handrail.testing`: mock contexts with prepared answers."""

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import BaseModel, TypeAdapter

from handrail import Attachment, CallFailed, Declined, ToolContext, ToolResult
from handrail.errors import DefinitionError, NotSupported, QuestionTimedOut, ToolValidationError
from handrail.question import Wording
from handrail.testing import (
    Recorded,
    agent_context,
    expire,
    headless_context,
    recorded,
    user_context,
)
from support.operations import run


class Choice(BaseModel):
    selected: str
    amount: int = 1


@dataclass
class Point:
    x: int


# --- a person ------------------------------------------------------------------------------------


def test_a_person_answers_by_kind():
    """A person gives the prepared answer for the question's kind."""
    context = user_context({"pick": {"selected": "tea"}, "how many": 3})
    assert context.wait_for("pick", {}, Choice).wait() == Choice(selected="tea")
    assert context.wait_for("how many", {}, int).wait() == 3


@pytest.mark.parametrize(
    ("answer", "schema", "expected"),
    [
        ({"selected": "tea", "amount": 2}, Choice, Choice(selected="tea", amount=2)),
        (Choice(selected="tea"), Choice, Choice(selected="tea")),
        ({"x": 1}, Point, Point(1)),
        (Point(1), Point, Point(1)),
        ("a", TypeAdapter(Literal["a", "b"]), "a"),
        (["a"], list[str], ["a"]),
        (None, type(None), None),
        (False, bool, False),
        (0, int, 0),
    ],
)
def test_an_answer_is_taken_in_as_a_real_one(answer: Any, schema: Any, expected: Any):
    """A prepared answer is validated and returned as the schema's type, even if it is falsy."""
    got = user_context({"kind": answer}).wait_for("kind", {}, schema).wait()
    assert (got, type(got)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"selected": 3}, "selected"),
        ({}, "selected"),
        ({"selected": "tea", "sugar": True}, "sugar"),
        ("tea", "object"),
        ({"selected": "tea", "amount": "2"}, "amount"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(answer: Any, words: str):
    """A prepared answer that does not match the schema is refused, so that no test passes with an impossible answer."""
    with pytest.raises(ToolValidationError, match=words):
        user_context({"pick": answer}).wait_for("pick", {}, Choice).wait()
    with pytest.raises(ToolValidationError, match=words):
        agent_context({"pick": answer}).prompt_model("please pick", Choice).wait()


def test_an_answer_may_be_a_function_of_the_payload():
    """A prepared answer that is a function is called with the payload, for a person who reacts to what is shown."""
    context = user_context({"pick": lambda payload: {"selected": payload["choices"][-1]}})
    assert context.wait_for("pick", {"choices": ["a", "b"]}, Choice).wait().selected == "b"


@pytest.mark.parametrize("error", [Declined("pick", "not today"), QuestionTimedOut("pick"), KeyError("odd")])
def test_an_answer_may_be_an_error(error: Exception):
    """A prepared answer that is an exception is raised, for a person who declines or does not answer."""
    with pytest.raises(type(error)) as caught:
        user_context({"pick": error}).wait_for("pick", {}, Choice).wait()
    assert caught.value is error


def test_a_question_without_an_answer_is_declined():
    """A question without a prepared answer is declined, and the error names the question."""
    with pytest.raises(Declined, match="no answer was prepared for 'pick'") as caught:
        user_context({"other": 1}).wait_for("pick", {}, Choice).wait()
    assert caught.value.question == "pick"


# --- a model -------------------------------------------------------------------------------------


def test_a_model_replies_by_a_piece_of_the_prompt():
    """A prompt gets the first prepared reply whose key occurs in it."""
    context = agent_context(
        {"drink": {"selected": "tea"}, "eat": {"selected": "cake"}, "": {"selected": "?"}}
    )
    replies = [
        context.prompt_model(prompt, Choice).wait().selected
        for prompt in ("what to eat", "a drink to eat?", "neither")
    ]
    assert replies == ["cake", "tea", "?"]


def test_a_reply_may_be_a_function_of_the_prompt_or_an_error():
    """A prepared reply may be a function, which is called with the prompt, or an exception, which is raised."""
    context = agent_context({"loud": lambda prompt: {"selected": prompt.upper()}, "fail": KeyError("odd")})
    assert context.prompt_model("loud please", Choice).wait().selected == "LOUD PLEASE"
    with pytest.raises(KeyError, match="odd"):
        context.prompt_model("fail please", Choice).wait()


def test_a_prompt_without_a_reply_says_what_to_lay_out():
    """The error for a prompt without a prepared reply quotes the prompt and says how to prepare one."""
    with pytest.raises(
        NotSupported, match=r"No reply was prepared for the prompt 'hello'\. Add one to the context's replies"
    ):
        agent_context({"bye": 1}).prompt_model("hello", int).wait()


def test_the_options_of_a_prompt_are_taken():
    """`prompt_model` and `wait_for` accept their options in a mock context."""
    context = agent_context({"x": 1})
    operation = context.prompt_model(
        "x", int, system="s", model="provider:m", temperature=0.5, tools=(), on_text=print
    )
    assert operation.wait() == 1
    assert user_context({"x": 1}).wait_for("x", {}, int, timeout=5).wait() == 1


# --- approvals, calls, workers and `once` --------------------------------------------------------


def test_approvals_are_denied_unless_told_otherwise():
    """Approvals and permissions are denied unless the test approves them. If `approve` is a text, it is the reason for the denial."""
    assert not headless_context().request_approval("delete it").wait()
    assert headless_context(approve=True).request_approval("delete it").wait()
    assert headless_context(approve=True).request_permission("fs.write").wait()
    denied = headless_context(approve="too risky").request_approval("delete it").wait()
    assert (bool(denied), denied.reason, denied.outcome) == (False, "too risky", "denied")


def test_calls_give_what_was_laid_out():
    """A prepared value becomes a result, a prepared result is returned as it is, and a function gets the arguments.

    A call to a tool without a prepared result fails.
    """
    context = headless_context(
        results={"add": lambda given: given["a"] + given["b"], "no": ToolResult.error("broken"), "one": 1}
    )
    assert context.call("add", a=1, b=2).wait() == ToolResult.ok(3)
    assert context.call("no").wait() == ToolResult.error("broken")
    assert context.call("one").wait().value == 1
    unknown = context.call("unknown").wait()
    assert (unknown.success, unknown.message) == (False, "unknown tool 'unknown'")


def test_a_worker_gives_its_value_or_raises():
    """`call_worker` returns the value of a success, and raises `CallFailed` with the result of a failure."""
    context = headless_context(results={"worker": {"done": True}, "broken": ToolResult.error("no luck")})
    assert context.call_worker("worker", "input").wait() == {"done": True}
    with pytest.raises(CallFailed, match="broken failed: no luck") as caught:
        context.call_worker("broken", "input").wait()
    assert caught.value.result == ToolResult.error("no luck")
    with pytest.raises(CallFailed, match="unknown tool"):
        context.call_worker("unknown", "input").wait()


def test_once_runs_once():
    """A step that succeeded in `once` is not run again, and its value is returned. A step that failed is run again."""
    ran: list[str] = []

    def pay() -> int:
        ran.append("pay")
        return 7

    async def mail() -> str:
        ran.append("mail")
        return "sent"

    def fails() -> None:
        ran.append("fails")
        raise KeyError

    context = headless_context()
    assert [context.once("pay", pay).wait() for _ in range(3)] == [7, 7, 7]
    assert [context.once("mail", mail).wait() for _ in range(2)] == ["sent", "sent"]
    for _ in range(2):  # it failed, so it runs again
        with pytest.raises(KeyError):
            context.once("fails", fails).wait()
    assert ran == ["pay", "mail", "fails", "fails"]


# --- the record ----------------------------------------------------------------------------------


def test_everything_done_is_recorded_in_order():
    """Progress, events, approvals, questions, calls, steps and beats are recorded, those of each kind in order."""
    context = user_context({"pick": {"selected": "tea"}}, results={"add": 3, "worker": 4})
    assert recorded(context) == Recorded()
    context.report_progress("begun")
    context.report_progress("half", done=1, total=2)
    context.emit(Choice(selected="tea"))
    context.beat()
    context.beat()
    context.request_approval("sure?").wait()
    context.request_permission("fs.write").wait()
    context.wait_for("pick", {"choices": []}, Choice).wait()
    context.call("add", a=1).wait()
    context.call_worker("worker", "input").wait()
    context.once("key", lambda: "value").wait()
    assert recorded(context) == Recorded(
        progress=[("begun", None, None), ("half", 1, 2)],
        emitted=[Choice(selected="tea")],
        approvals=["sure?", "fs.write"],
        questions=[("pick", {"choices": []})],
        wordings=[Wording("Please answer: pick.", "Pick")],
        prompts=[],
        calls=[("add", {"a": 1}), ("worker", {"input": "input"})],
        workers=[("worker", "input", ())],
        once={"key": "value"},
        beats=2,
    )


def test_the_attachments_of_a_prompt_are_recorded():
    """The record has the attachments of each prompt. A single attachment in place of a list is refused."""
    context, photo = agent_context({"what": "a cat"}), Attachment(b"photo", "photo.png")
    assert context.prompt_model("what?", str, attachments=[photo]).wait() == "a cat"
    assert context.prompt_model("what else?", str).wait() == "a cat"
    assert recorded(context).prompt_attachments == [(photo,), ()]
    with pytest.raises(DefinitionError, match="a single Attachment"):
        context.prompt_model("what?", str, attachments=photo)  # pyright: ignore[reportArgumentType, reportCallIssue]  # the mistake under test


def test_a_question_is_recorded_though_it_got_no_answer():
    """A question or a prompt is recorded even if it gets no valid answer."""
    person, model = user_context(), agent_context({"x": "not a number"})
    with pytest.raises(Declined):
        person.wait_for("pick", 1, Choice).wait()
    with pytest.raises(ToolValidationError):
        model.prompt_model("x", int).wait()
    assert (recorded(person).questions, recorded(model).prompts) == ([("pick", 1)], ["x"])


def test_an_operation_not_awaited_is_not_recorded():
    """An operation that is never awaited is not recorded, because operations are lazy."""
    context = headless_context(approve=True)
    operation = context.request_approval("sure?")
    assert recorded(context).approvals == []
    operation.close()


def test_only_contexts_made_here_have_a_record():
    """`recorded` refuses a context that `handrail.testing` did not make."""
    foreign: Any = object()
    with pytest.raises(NotSupported, match=r"Only contexts created by `handrail\.testing` keep a record"):
        recorded(ToolContext(foreign))


@dataclass(frozen=True)
class Kept:
    """A piece of state that a test adds to a session."""

    number: int


# --- members that were not given -----------------------------------------------------------------


@pytest.mark.parametrize(
    "member",
    [
        "adapter",
        "prompt",
        "resources",
    ],
)
def test_a_member_that_was_not_given_says_how_to_give_it(member: str):
    """Using a member that was not given raises an error that names the member and says how to give it."""
    with pytest.raises(NotSupported) as caught:
        getattr(headless_context(), member)
    assert str(caught.value) == (
        f"`context.{member}` is not available in this run. "
        f"Give it when creating the context: `...context({member}=...)`."
    )
    assert caught.value.member == member
    assert isinstance(caught.value, NotImplementedError)


def test_session_files_and_limits_are_there_in_memory():
    """By default, each context has its own session, files, heartbeat and budget without limits, all in memory."""
    context, other = headless_context(), headless_context()
    heard: list[object] = []
    context.event_bus.subscribe(Kept, heard.append)
    context.session.dispatch(Kept(1))
    context.filesystem.write("a.txt", "text")
    context.heartbeat.beat()
    assert context.session[Kept].latest() == Kept(1)
    assert heard == [Kept(1)]
    assert context.filesystem.read("a.txt") == "text"
    assert context.heartbeat.last_beat is not None
    assert context.cost_tracker is context.budget_tracker
    assert context.budget_tracker.remaining() == {}
    assert other.session[Kept].latest() is None
    assert not other.filesystem.exists("a.txt")


@pytest.mark.parametrize("make", [user_context, agent_context, headless_context])
def test_a_member_that_does_not_exist_is_refused_with_those_that_do(make: Any):
    """A misspelt member is refused with a list of the members that exist."""
    with pytest.raises(TypeError, match=r"no member 'filesytem'\. Members: adapter, .*filesystem.*signal"):
        make(filesytem=object())


def test_an_unknown_attribute_is_an_attribute_error():
    """An unknown attribute of a mock context raises `AttributeError`."""
    context: Any = headless_context()
    assert not hasattr(context, "nonsense")
    assert not hasattr(context._source, "nonsense")


# --- event loops ---------------------------------------------------------------------------------


def test_made_on_a_loop_it_runs_there_and_made_in_a_script_on_the_shared_one():
    """A context's operations run on the event loop that it was made on or, in a script, on the background loop."""

    async def main() -> None:
        context = user_context({"pick": {"selected": "tea"}})
        assert context._source.home.loop is asyncio.get_running_loop()
        assert (await context.wait_for("pick", {}, Choice)).selected == "tea"

    run(main)
    assert user_context({"n": 1}).wait_for("n", {}, int).wait() == 1


def test_contexts_are_independent():
    """Expiring one context, or recording in it, does not affect other contexts."""
    one, two = headless_context(), headless_context()
    one.beat()
    expire(one)
    two.beat()
    two.beat()
    assert (recorded(one).beats, recorded(two).beats) == (1, 2)
