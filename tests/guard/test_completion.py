"""Completion checks that fail: the run is held as often as the checker's cap allows, and the model is told why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Adapter, Deadline, Prompt, ScriptedModel, Session, ToolCall, ToolContext, tool
from handrail.errors import DefinitionError, PromptEvaluationError
from handrail.events import Advised, PromptExecuted
from handrail.guard import CommandPassing, FilesThere, OutputFilled, all_of, any_of
from handrail.guard.feedback import RunState
from handrail.protocols import Filesystem
from handrail.resources import Binding
from handrail.resources.bindings import given as bound
from handrail.resources.memory import MemoryFilesystem
from handrail.testing import FakeShell, VirtualClock, run_virtual


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def _raise_later(state: RunState) -> str | None:
    await asyncio.sleep(1)
    raise OSError("the disk is full")


async def _await_cancelled(state: RunState) -> str | None:
    waiting = asyncio.get_running_loop().create_future()
    waiting.cancel()
    return await waiting


async def _cancel_own_task(state: RunState) -> str | None:
    task = asyncio.ensure_future(asyncio.sleep(10))
    await asyncio.sleep(0)
    task.cancel()
    await task
    return None


async def _gather_failing(state: RunState) -> str | None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_raise_later(state))  # pyright: ignore[reportArgumentType]  # any coroutine
    return None


def _raising(error: Exception) -> Callable[[RunState], Any]:
    def missing(state: RunState) -> str | None:
        raise error

    return missing


def _returning(value: Any) -> Callable[[RunState], Any]:
    return lambda state: value


async def _returning_later(state: RunState) -> Any:
    await asyncio.sleep(0)
    return {"missing": []}


class Checker:
    def __init__(self, missing: Callable[[RunState], Any], cap: int = 2, name: str = "mine") -> None:
        self.missing, self.cap, self.name = missing, cap, name


BROKEN: dict[str, Callable[[RunState], Any]] = {
    "raises": _raising(ValueError("broken")),
    "raises without words": _raising(Wordless()),
    "raises a group": _raising(ExceptionGroup("many", [OSError("one"), ValueError("two")])),
    "raises late": _raise_later,
    "awaits a cancelled future": _await_cancelled,
    "awaits a cancelled task": _cancel_own_task,
    "a failing task group": _gather_failing,
    "returns True": _returning(True),
    "returns False": _returning(False),
    "returns 0": _returning(0),
    "returns a list": _returning([]),
    "returns a coroutine function": _returning(_await_cancelled),
    "returns a dict later": _returning_later,
    "returns bytes": _returning(b""),
}

HOLDS = Checker(_returning("The tests are not written."))
FINE = Checker(_returning(None))


def ended(*completion: Any, answers: int = 12, **options: Any) -> tuple[Any, ScriptedModel]:
    """Run a model that answers "Done." every time, and return the response and the model."""
    model = ScriptedModel(["Done."] * answers)
    prompt = Prompt("p", "Go.", completion=completion)

    async def main() -> Any:
        return await Adapter(model).evaluate(prompt, "hi", **options)

    return run_virtual(main), model


broken = st.sampled_from(sorted(BROKEN)).map(lambda how: Checker(BROKEN[how]))
fails = st.recursive(
    broken,
    lambda inner: st.one_of(
        st.lists(st.one_of(inner, st.just(FINE)), max_size=2).flatmap(
            lambda more: inner.map(lambda one: all_of(one, *more, cap=2))
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: any_of(*each, cap=2)),
    ),
    max_leaves=4,
)


@given(checkers=st.lists(st.one_of(fails, st.just(FINE), st.just(HOLDS)), max_size=2), one=fails)
def test_a_check_that_fails_never_lets_a_run_end_as_done(checkers: list[Any], one: Any):
    """However a check fails, alone, composed or beside others, the run is held twice and then ends as incomplete."""
    response, model = ended(*checkers, one)
    assert response.stop_reason == "incomplete"
    assert len(model.requests) == 3  # the cap of each checker is 2, so the run is held twice
    assert "failed: " in model.requests[1].messages[-1].text


@pytest.mark.parametrize("how", sorted(BROKEN))
def test_the_model_is_told_which_check_failed_and_why(how: str):
    """If a check fails, the message to the model names it and says why, and the failure is recorded in the session."""
    response, model = ended(Checker(BROKEN[how], cap=1))
    said = model.requests[1].messages[-1].text
    assert said.startswith("It can't be confirmed that the task is finished. The check 'mine' failed: ")
    (advised,) = response.session[Advised].all()
    assert advised.failed
    assert advised.text.rstrip(".") in said


def test_any_of_is_satisfied_by_one_check_that_works():
    """`any_of` is satisfied if one check passes, even if another one fails."""
    response, _ = ended(any_of(Checker(BROKEN["raises"]), FINE))
    assert response.stop_reason == "done"


def test_what_is_missing_is_said_beside_a_check_that_failed():
    """The model is told both what is missing and which check failed."""
    _, model = ended(HOLDS, Checker(BROKEN["raises"]))
    said = model.requests[1].messages[-1].text
    assert said == (
        "The task is not finished. The tests are not written. The check 'mine' failed: ValueError: broken. "
        "Continue, then answer again."
    )


def test_a_check_that_recovers_lets_the_run_end():
    """A check that fails once and then passes does not make the run incomplete."""
    answers: list[Any] = [OSError("not yet"), None]

    def missing(state: RunState) -> str | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    response, model = ended(Checker(missing))
    assert response.stop_reason == "done"
    assert len(model.requests) == 2


@pytest.mark.parametrize("swallows", [False, True])
def test_a_check_that_hangs_ends_with_the_deadline(swallows: bool):
    """A run whose check hangs fails at its deadline, even if the check suppresses the cancellation and reports nothing missing."""

    async def missing(state: RunState) -> str | None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            if not swallows:
                raise
        return None

    session = Session()

    async def main() -> None:
        clock = VirtualClock()
        prompt, deadline = Prompt("p", "Go.", completion=[Checker(missing)]), Deadline.after(5, clock=clock)
        adapter = Adapter(ScriptedModel(["Done."]), clock=clock)
        await adapter.evaluate(prompt, "hi", session=session, deadline=deadline)

    with pytest.raises(PromptEvaluationError) as caught:
        run_virtual(main)
    assert caught.value.phase == "deadline"
    (executed,) = session[PromptExecuted].all()
    assert executed.stop_reason.startswith("failed")


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.virtual_time
async def test_a_run_cancelled_during_a_check_is_cancelled(swallows: bool):
    """A cancellation during a check reaches the caller of the run, even if the check suppresses it."""

    async def missing(state: RunState) -> str | None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            if not swallows:
                raise
        return None

    session = Session()

    prompt = Prompt("p", "Go.", completion=[Checker(missing)])
    run = asyncio.create_task(Adapter(ScriptedModel(["Done."])).evaluate(prompt, "hi", session=session))
    await asyncio.sleep(1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    (executed,) = session[PromptExecuted].all()
    assert executed.stop_reason == "cancelled"


# --- files and commands ----------------------------------------------------------------------------


@tool(effect="staged")
async def write(path: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, "text")
    return path


async def _opened_later(resources: Any) -> MemoryFilesystem:
    await asyncio.sleep(1)
    return MemoryFilesystem()


@pytest.mark.parametrize(
    "binding",
    [
        lambda: bound(Filesystem, MemoryFilesystem()),  # pyright: ignore[reportArgumentType]  # a protocol as a key
        lambda: Binding(Filesystem, lambda resources: MemoryFilesystem()),  # pyright: ignore[reportArgumentType]  # the same
    ],
    ids=["given", "made"],
)
@pytest.mark.parametrize("writes", [True, False])
def test_files_that_are_bound_as_a_resource_are_checked(binding: Any, writes: bool):
    """A check uses the filesystem that the run's calls share, whether it is bound as an object or made by a provider."""
    script: list[Any] = ["Done.", ToolCall("write", {"path": "a.md"}), "Done."] if writes else ["Done."] * 3
    prompt = Prompt("p", "Go.", tools=[write], completion=[FilesThere("a.md", cap=2)], resources=[binding()])
    response = Adapter(ScriptedModel(script)).evaluate(prompt, "hi").wait()
    assert response.stop_reason == ("done" if writes else "incomplete")


def test_files_with_an_async_provider_are_checked():
    """A check waits for an async provider to make the filesystem."""
    binding: Any = Binding(Filesystem, _opened_later)  # pyright: ignore[reportArgumentType]  # a protocol as a key
    response, _ = ended(FilesThere("a.md", cap=1), resources=[binding])
    assert response.stop_reason == "incomplete"
    assert not response.session[Advised].all()[0].failed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Give the run a filesystem"),
        ({"resources": [Binding(Filesystem, lambda resources: MemoryFilesystem(), "call")]}, "scope 'run'"),  # pyright: ignore[reportArgumentType]  # a protocol as a key
        ({"resources": [Binding(Filesystem, lambda resources: 1 / 0)]}, "ZeroDivisionError"),  # pyright: ignore[reportArgumentType]  # the same
    ],
    ids=["none", "each call's own", "broken"],
)
@pytest.mark.parametrize("checker", [FilesThere("a.md", cap=1), CommandPassing(FakeShell({}), "make", cap=1)])
def test_files_that_are_not_there_hold_the_run(options: Any, words: str, checker: Any):
    """If a check can't get the run's files, the run is held, and the model is told why."""
    response, model = ended(checker, **options)
    assert response.stop_reason == "incomplete"
    assert words in model.requests[1].messages[-1].text


def test_output_that_is_not_there_holds_the_run():
    """A check of output fields holds a run without structured output, and the run ends as incomplete."""
    response, _ = ended(OutputFilled("notes", cap=1))
    assert response.stop_reason == "incomplete"


# --- definitions -----------------------------------------------------------------------------------


class NoCap:
    name = "no cap"

    def missing(self, state: RunState, /) -> str | None:
        return None


@pytest.mark.parametrize(
    ("checker", "words"),
    [
        (NoCap(), "has no 'cap'"),
        (Checker(_returning(None), cap=-1), "the cap of completion[0] is -1"),
        (Checker(_returning(None), cap=float("inf")), "the cap of completion[0] is inf"),  # pyright: ignore[reportArgumentType]  # wrong on purpose
        (Checker(_returning(None), cap=None), "the cap of completion[0] is None"),  # pyright: ignore[reportArgumentType]  # wrong on purpose
    ],
)
def test_a_checker_without_a_bound_is_refused(checker: Any, words: str):
    """A prompt refuses a checker whose `cap` is missing or invalid."""
    with pytest.raises(DefinitionError) as caught:
        Prompt("p", "Go.", completion=[checker])
    assert words in str(caught.value)
