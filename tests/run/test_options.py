"""Run options: which arguments are accepted, and what a nested run inherits or may only tighten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from handrail import (
    Adapter,
    Agent,
    Attachment,
    Budget,
    Deadline,
    MemoryFilesystem,
    Prompt,
    ScriptedModel,
    Session,
    WorkerRegistry,
    open_gate,
    tool,
)
from handrail.clock import SYSTEM_CLOCK
from handrail.errors import DefinitionError
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import ModelSettings
from handrail.resources.bindings import given
from handrail.run.limits import BudgetTracker
from handrail.run.options import (
    DEPTH_LIMIT,
    GateArguments,
    HostArguments,
    ResumeArguments,
    RunArguments,
    RunOptions,
)
from handrail.run.redemption import redeem
from handrail.testing import Person
from support.worker_folders import PLAIN, sound

PROMPT = Prompt("guide", "Answer.")


@tool(effect="pure")
def nothing() -> None:
    """Do nothing."""


def adapter(**arguments: Any) -> Adapter:
    return Adapter(ScriptedModel(["hello"]), **arguments)


WRONG: dict[str, Callable[[], Any]] = {
    "evaluate": lambda: adapter().evaluate(PROMPT, "hi", dedline=None),  # pyright: ignore[reportCallIssue]
    "stream": lambda: adapter().stream(PROMPT, "hi", dedline=None),  # pyright: ignore[reportCallIssue]
    "resume": lambda: adapter().resume("run", PROMPT, sesion=None),  # pyright: ignore[reportCallIssue]
    "resume_stream": lambda: adapter().resume_stream("run", PROMPT, sesion=None),  # pyright: ignore[reportCallIssue]
    "Adapter": lambda: adapter(jurnal=None),
    "open_gate": lambda: open_gate(dedline=None),  # pyright: ignore[reportCallIssue]
    "redeem": lambda: redeem("", tool=nothing, journal=MemoryJournal(), aprovals=None),  # pyright: ignore
}


@pytest.mark.parametrize("verb", WRONG)
def test_a_misspelt_argument_is_named_and_the_right_one_suggested(verb: str) -> None:
    with pytest.raises(
        TypeError,
        match=rf"^{verb} takes no argument '(dedline|sesion|jurnal|aprovals)'\. Did you mean '(deadline|session|journal|approvals)'\?$",
    ):
        WRONG[verb]()


@pytest.mark.parametrize("verb", ["run", "stream"])
@pytest.mark.parametrize(
    ("wrong", "hint"), [("dedline", "deadline"), ("message_calback", "message_callback"), ("message", "")]
)
def test_an_argument_that_a_worker_does_not_take_is_named(
    verb: str, wrong: str, hint: str, tmp_path: Any
) -> None:
    """A registry's `run` and `stream` refuse an unknown argument, and suggest one with a similar name.

    `message` is refused, because the worker's input is the message.
    """
    registry: WorkerRegistry = sound(tmp_path, main=PLAIN)
    with pytest.raises(TypeError, match=rf"^{verb} takes no argument '{wrong}'\..*{hint}"):
        getattr(registry, verb)("main", "hi", model=ScriptedModel(["x"]), **{wrong: None})


@pytest.mark.parametrize("verb", ["run", "stream"])
def test_an_agent_takes_its_message_by_position_only(verb: str) -> None:
    with pytest.raises(TypeError, match=rf"^{verb} takes 'message' by position, .* {verb}\(message\)"):
        getattr(Agent(ScriptedModel(["x"]), "Answer."), verb)(message="hi")


@pytest.mark.parametrize(
    ("function", "values", "name", "hint"),
    [
        (lambda *values, **given: adapter().evaluate(*values, **given), [PROMPT], "params", "evaluate(prompt, params)"),
        (lambda *values, **given: adapter().resume(*values, **given), ["r"], "prompt", "resume(run_id, prompt)"),
        (Attachment, [], "source", "Attachment(source)"),
        (tool, [], "function", "tool(function)"),
    ],
    ids=["evaluate", "resume", "Attachment", "tool"],
)  # fmt: skip
def test_an_argument_by_position_is_not_said_to_be_unknown(
    function: Any, values: list[Any], name: str, hint: str
) -> None:
    """The error for an argument by name that is taken by position only says how to write the call."""
    with pytest.raises(TypeError, match="by position, not by name") as refused:
        function(*values, **{name: None})
    assert hint in str(refused.value)


TAKEN_BY: dict[Any, Callable[..., Any]] = {
    RunArguments: lambda **given: adapter().evaluate(PROMPT, "hi", **given),
    ResumeArguments: lambda **given: adapter().resume("run", PROMPT, **given),
    HostArguments: adapter,
    GateArguments: open_gate,
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in TAKEN_BY for name in sorted(kind.__annotations__)]
)
def test_a_value_of_the_wrong_type_is_refused_by_the_name_of_its_argument(kind: Any, name: str) -> None:
    """The number -5 is refused for every argument, and the error names the argument and what to pass."""
    said = rf"^((?:a|the) {name.replace('_', ' ')}|{name} is) .*\. Pass "
    with pytest.raises(DefinitionError, match=said):
        TAKEN_BY[kind](**{name: -5})


@pytest.mark.parametrize("name", ["tools", "history", "resources", "filesystem"])
def test_a_text_is_not_taken_for_a_list(name: str) -> None:
    with pytest.raises(DefinitionError, match=f"^{name} is a str"):
        TAKEN_BY[RunArguments](**{name: "x"})


def test_a_class_is_not_taken_for_what_it_makes() -> None:
    with pytest.raises(
        DefinitionError, match=r"^journal is the class MemoryJournal, not an instance\. Pass a Journal: "
    ):
        open_gate(journal=MemoryJournal)  # pyright: ignore[reportArgumentType]


def test_limits_of_a_worker_are_checked(tmp_path: Any) -> None:
    registry = sound(tmp_path, main=PLAIN)
    with pytest.raises(DefinitionError, match=r"^deadline is an int"):
        registry.run("main", "hi", model=ScriptedModel(["x"]), deadline=5)  # pyright: ignore[reportArgumentType]


def test_an_argument_that_another_verb_takes_is_refused() -> None:
    arguments: Any = {"clock": SYSTEM_CLOCK}
    with pytest.raises(TypeError, match="evaluate takes no argument 'clock'"):
        adapter().evaluate(PROMPT, "hi", **arguments)
    arguments = {"budget": Budget(requests=1)}
    with pytest.raises(TypeError, match="resume takes no argument 'budget'"):
        adapter().resume("run", PROMPT, **arguments)


def test_options_are_frozen() -> None:
    options: Any = RunOptions()
    with pytest.raises(AttributeError):
        options.deadline = Deadline.after(1)


def test_none_and_left_out_mean_the_same() -> None:
    person = Person()
    options = RunOptions(environment=person).updated("evaluate", RunArguments, {"environment": None})
    assert options.environment is person


def test_resources_are_added_and_all_else_is_replaced() -> None:
    one, two = given(str, "one"), given(int, 2)
    before = RunOptions(resources=(one,), session=Session(id="before"))
    after = before.updated("evaluate", RunArguments, {"resources": [two], "session": Session(id="after")})
    assert after.resources == (one, two)
    assert after.session is not None
    assert after.session.id == "after"


def test_an_iterable_is_taken_once_and_kept() -> None:
    options = RunOptions().updated("evaluate", RunArguments, {"tools": iter([nothing]), "opened": "guide"})
    assert options.tools == (nothing,)
    assert options.opened == ("guide",)


# --- nested runs ---------------------------------------------------------------------------------


def outer(**changes: Any) -> RunOptions:
    return RunOptions(
        session=Session(),
        environment=Person(),
        approvals="strict",
        approval_seconds=7,
        filesystem=MemoryFilesystem(),
        resources=(given(str, "one"),),
        journal=MemoryJournal(),
        run_id="r1",
        app="module:name",
        params={"a": 1},
        message="outer",
        opened=("guide",),
        tools=(nothing,),
        temperature=0.5,
        max_tokens=9,
        model_settings=ModelSettings(seed=1),
    ).replace(**changes)


INHERITED = (
    "session",
    "environment",
    "approvals",
    "approval_seconds",
    "filesystem",
    "extras",
    "journal",
    "lease",
    "clock",
    "new_id",
)
OWN = (
    "continues",
    "bus",
    "resources",
    "workers",
    "run_id",
    "traceparent",
    "app",
    "params",
    "message",
    "messages",
    "attachments",
    "history",
    "opened",
    "tools",
    "temperature",
    "max_tokens",
    "model_settings",
    "compact",
    "result_limit",
)


def test_every_option_is_inherited_limited_or_the_runs_own() -> None:
    """Every field of `RunOptions` is inherited by a nested run, limited by the outer run, or the nested run's own."""
    limits = ("deadline", "budget", "depth_limit", "spend", "outer_policies")
    assert sorted((*INHERITED, *OWN, *limits)) == sorted(RunOptions.__struct_fields__)


@pytest.mark.parametrize("name", INHERITED)
def test_a_nested_run_inherits(name: str) -> None:
    around = outer()
    nested = around.nested(RunOptions(session=Session(), approvals="approve_all"), BudgetTracker(), 1)
    assert getattr(nested, name) is getattr(around, name)


@pytest.mark.parametrize("name", OWN)
def test_a_nested_run_is_given_its_own(name: str) -> None:
    given_ = RunOptions(message="inner", params={"b": 2})
    assert getattr(outer().nested(given_, BudgetTracker(), 1), name) is getattr(given_, name)


def test_of_two_deadlines_the_earlier_holds() -> None:
    soon, late = Deadline.after(10), Deadline.after(100)
    assert outer(deadline=soon).nested(RunOptions(deadline=late), BudgetTracker(), 1).deadline is soon
    assert outer(deadline=late).nested(RunOptions(deadline=soon), BudgetTracker(), 1).deadline is soon
    assert outer(deadline=late).nested(RunOptions(), BudgetTracker(), 1).deadline is late
    assert outer().nested(RunOptions(deadline=late), BudgetTracker(), 1).deadline is late


def test_a_nested_run_spends_from_the_run_around_it() -> None:
    tracker = BudgetTracker(Budget(requests=3))
    nested = outer(budget=tracker).nested(RunOptions(budget=Budget(requests=9)), tracker, 1).budget
    assert isinstance(nested, BudgetTracker)
    nested.reserve(requests=2).settle()
    assert tracker.remaining() == {"requests": 1}
    assert nested.remaining() == {"requests": 1}
    assert outer().nested(RunOptions(), BudgetTracker(), 1).budget is None


def test_a_tracker_can_not_be_brought_into_a_nested_run() -> None:
    with pytest.raises(DefinitionError, match="Pass a Budget to a run inside a call"):
        outer().nested(RunOptions(budget=BudgetTracker()), BudgetTracker(), 1)


def test_depth_can_only_get_tighter() -> None:
    options = outer()
    assert options.nested(RunOptions(), BudgetTracker(), 1).depth_limit == DEPTH_LIMIT
    assert options.nested(RunOptions(), BudgetTracker(), 2, 1).depth_limit == 3
    assert options.nested(RunOptions(depth_limit=99), BudgetTracker(), 2, 50).depth_limit == DEPTH_LIMIT
    assert options.tightened(levels=2).depth_limit == 2


def test_limits_of_a_root_run_are_tightened_the_same_way() -> None:
    soon, late = Deadline.after(10), Deadline.after(100)
    options = RunOptions(deadline=late, budget=Budget(requests=5, tokens=10))
    tight = options.tightened(deadline=soon, budget=Budget(requests=9, tool_calls=1))
    assert tight.deadline is soon
    assert tight.budget == Budget(requests=5, tokens=10, tool_calls=1)
    assert options.tightened().budget == options.budget
