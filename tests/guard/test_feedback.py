"""Feedback providers and completion checkers: when they give advice, how often, and what follows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from handrail import (
    Adapter,
    Budget,
    Deadline,
    MemoryFilesystem,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import DefinitionError
from handrail.events import Advised, Progress
from handrail.guard import (
    BudgetFeedback,
    DeadlineFeedback,
    FilesThere,
    OutputFilled,
    RunState,
    Trigger,
    all_of,
    any_of,
)
from handrail.messages import ToolMessage, UserMessage
from handrail.testing import VirtualClock, run_virtual


def wrongly(value: object) -> Any:
    """Return the value as `Any`, to hide its type from the type checker."""
    return value


@tool
async def step(seconds: int, context: ToolContext) -> str:
    """Take a step."""
    await asyncio.sleep(seconds)
    if seconds == 7:
        context.report_progress("seven")
    return "taken"


@tool(effect="staged")
async def write(path: str, text: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return path


@dataclass(frozen=True)
class Says:
    """A provider that reports how many calls were made and how often it gave advice, or raises."""

    trigger: Trigger
    cap: int = 3
    name: str = "says"
    raises: bool = False

    def advise(self, state: RunState, /) -> str | None:
        if self.raises:
            raise ValueError("no idea")
        return f"{state.calls} calls, said {state.given}"


def steps(*seconds: int) -> ScriptedModel:
    """Return a model that takes steps of these durations in seconds, and then finishes."""
    return ScriptedModel([*(ToolCall("step", {"seconds": each}) for each in seconds), "Done."])


def advice(model: ScriptedModel) -> list[str]:
    """Return the advice in the model's last request."""
    return [message.text for message in model.requests[-1].messages if isinstance(message, UserMessage)][1:]


def evaluate(model: ScriptedModel, *feedback: Any, **options: Any) -> Session:
    """Run the model in virtual time with these feedback providers, and return the session."""
    session = Session()

    async def scenario() -> None:
        clock = VirtualClock()
        late = options.pop("late", None)
        if late is not None:
            options["deadline"] = Deadline.after(late, clock=clock)
        prompt = Prompt("p", "Go.", tools=[step], feedback=feedback)
        await Adapter(model, clock=clock).evaluate(prompt, "hi", session=session, **options)

    run_virtual(scenario)
    return session


def test_every_so_many_calls_up_to_the_cap() -> None:
    """With `calls=2`, advice comes after every second call, up to the default cap of three."""
    model = steps(*[1] * 9)
    session = evaluate(model, Says(Trigger(calls=2)))
    assert advice(model) == ["[says] 2 calls, said 0", "[says] 4 calls, said 1", "[says] 6 calls, said 2"]
    assert [(each.kind, each.by, each.failed) for each in session[Advised].all()] == [
        ("feedback", "says", False)
    ] * 3


def test_every_so_many_seconds() -> None:
    """With `seconds=7`, advice comes after a turn that ends at least seven seconds after the start or the last advice."""
    model = steps(4, 4, 4, 4)
    evaluate(model, Says(Trigger(seconds=7)))
    assert advice(model) == ["[says] 2 calls, said 0", "[says] 4 calls, said 1"]


def test_on_an_event() -> None:
    """With `event=`, advice comes after the turn in which the event was published."""
    model = steps(1, 7, 1)
    evaluate(model, Says(Trigger(event=Progress)))
    assert advice(model) == ["[says] 2 calls, said 0"]


def test_a_provider_that_raises_is_reported_and_the_run_continues() -> None:
    """If a provider raises, the run continues, the error is recorded in the session, and the model is told nothing."""
    model = steps(1, 1)
    session = evaluate(model, Says(Trigger(calls=1), raises=True))
    assert advice(model) == []
    assert [(each.failed, each.text) for each in session[Advised].all()] == [
        (True, "ValueError: no idea")
    ] * 2


@dataclass(frozen=True)
class Gone(Says):
    """A provider that raises `GeneratorExit`, or later if `waits`."""

    waits: bool = False

    def advise(self, state: RunState, /) -> Any:
        if self.waits:
            return self._later()
        raise GeneratorExit

    async def _later(self) -> str:
        await asyncio.sleep(1)
        raise GeneratorExit


@pytest.mark.parametrize("waits", [False, True])
def test_a_provider_that_raises_generator_exit_is_reported_too(waits: bool) -> None:
    """`GeneratorExit` is an error like any other, and does not end the run."""
    model = steps(1)
    session = evaluate(model, Gone(Trigger(calls=1), waits=waits))
    assert advice(model) == []
    (told,) = session[Advised].all()
    assert told.failed
    assert "GeneratorExit" in told.text


def test_deadline_feedback() -> None:
    """Each time the remaining time falls below a threshold, the model is told once how much is left."""
    model = steps(10, 30, 1, 35, 1)
    evaluate(model, DeadlineFeedback(at=(60, 30)), late=90)
    said = advice(model)
    assert len(said) == 2
    assert "About 50 seconds are left" in said[0]
    assert "About 14 seconds are left" in said[1]


def test_budget_feedback() -> None:
    """Each time the spending reaches a threshold, the model is told once how much is left."""
    model = steps(*[1] * 9)
    evaluate(model, BudgetFeedback(at=(0.5, 0.8)), budget=Budget(tool_calls=10))
    said = advice(model)
    assert ["tool calls: 5" in said[0], "tool calls: 2" in said[1]] == [True, True]
    assert len(said) == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Trigger(), "never fires"),
        (lambda: Trigger(calls=0), "Pass a whole number"),
        (lambda: Trigger(seconds=0), "Pass a positive number"),
        (lambda: FilesThere(), "Pass at least one"),
        (lambda: OutputFilled(), "Pass at least one"),
        (lambda: all_of(), "nothing to check"),
        (lambda: Trigger(seconds=wrongly("5")), "Pass a positive number"),
    ],
)
def test_bad_definitions(wrong: Any, words: str) -> None:
    """Invalid triggers, and checkers with nothing to check, are refused when they are created."""
    with pytest.raises(DefinitionError, match=words):
        wrong()


# --- completion --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    title: str
    notes: str = ""


def finish(model: ScriptedModel, *completion: Any, output: Any = None) -> Any:
    """Run the model with these completion checkers, and return the response."""
    prompt: Any = Prompt("p", "Go.", tools=[write], completion=completion, output=output)
    return Adapter(model).evaluate(prompt, "hi", filesystem=MemoryFilesystem()).wait()


WRITE_A = ToolCall("write", {"path": "a.md", "text": "a"})
WRITE_B = ToolCall("write", {"path": "b.md", "text": "b"})


def test_a_run_that_stops_too_early_is_held() -> None:
    """A run that would end without a required file is held, and the model is told which file is missing."""
    model = ScriptedModel(["Done.", WRITE_A, "Done now."])
    response = finish(model, FilesThere("a.md"))
    assert (response.text, response.stop_reason) == ("Done now.", "done")
    assert "not there: a.md" in model.requests[1].messages[-1].text


def test_a_checker_holds_a_run_up_to_its_cap() -> None:
    """A checker holds a run as many times as its cap allows. Then the run ends as incomplete."""
    model = ScriptedModel(["One.", "Two.", "Three."])
    response = finish(model, FilesThere("a.md", cap=2))
    assert (response.text, response.stop_reason) == ("Three.", "incomplete")
    assert [each.kind for each in response.session[Advised].all()] == ["completion", "completion"]


def test_output_fields_must_be_filled() -> None:
    """If a field that `OutputFilled` names is empty, the run is held, and the model is told which field."""
    model = ScriptedModel(['{"title": "x"}', '{"title": "x", "notes": "y"}'])
    response = finish(model, OutputFilled("notes"), output=Report)
    assert response.output == Report("x", "y")
    assert "notes" in model.requests[1].messages[-1].text


def test_a_field_there_is_not_is_named() -> None:
    """If a checker names an unknown field, the run is held, and the error is recorded in the session."""
    model = ScriptedModel(['{"title": "x"}'] * 2)
    response = finish(model, OutputFilled("titel", cap=1), output=Report)
    (advised,) = response.session[Advised].all()
    assert advised.failed
    assert "a Report has no field 'titel'. Name fields of the prompt's output" in advised.text
    assert response.stop_reason == "incomplete"


@pytest.mark.parametrize(
    ("checker", "script", "requests"),
    [
        (all_of(FilesThere("a.md"), FilesThere("b.md")), [WRITE_A, "Done.", WRITE_B, "Done."], 4),
        (any_of(FilesThere("a.md"), FilesThere("b.md")), [WRITE_B, "Done."], 2),
        (any_of(FilesThere("a.md"), FilesThere("b.md")), ["Done.", WRITE_B, "Done."], 3),
    ],
)
def test_checkers_compose(checker: Any, script: list[Any], requests: int) -> None:
    """`all_of` holds a run until all its checkers are satisfied, and `any_of` until one of them is."""
    model = ScriptedModel(script)
    assert finish(model, checker).stop_reason == "done"
    assert len(model.requests) == requests


def test_an_async_checker_is_awaited() -> None:
    """An async checker is awaited before the run ends."""

    class Slow:
        name = "slow"
        cap = 1

        async def missing(self, state: RunState, /) -> str | None:
            await asyncio.sleep(0)
            return None if "finally" in state.text else "Say finally."

    model = ScriptedModel(["Done.", "finally"])
    assert finish(model, Slow()).text == "finally"


def test_advice_comes_between_whole_turns() -> None:
    """Advice follows the results of a whole turn and never comes between them."""
    model = ScriptedModel([[ToolCall("step", {"seconds": 0})] * 2, "Done."])
    evaluate(model, Says(Trigger(calls=1)))
    kinds = [type(message) for message in model.requests[-1].messages]
    assert kinds[-2:] == [ToolMessage, UserMessage]
