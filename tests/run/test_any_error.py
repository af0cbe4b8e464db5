"""Whatever a handler or a compensation raises, each call ends exactly once, and every compensation runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handrail import ToolContext, TransientError, tool
from handrail.concurrency.cancellation import shielded
from handrail.errors import (
    CallFailed,
    Conflict,
    OutcomeUnknown,
    PromptEvaluationError,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from handrail.events import ToolInvoked, ToolRolledBack
from handrail.testing import run_virtual
from handrail.tools import ToolResult
from support.rig import Rig, leave_traces, staged


class Wordless(Exception):
    """An error without a message."""


class Mute(Exception):
    """An error whose `str` and `repr` raise."""

    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class Quitter(Exception):
    """An error whose `str` raises `SystemExit`."""

    def __str__(self) -> str:
        raise SystemExit(3)


class Numeric(Exception):
    """An error whose `str` returns a number."""

    def __str__(self) -> Any:
        return 3


class Disguised(Exception):
    """An error whose `__class__` raises."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ValueError("no class")


class Undecided(Exception):
    """An error whose `bool` raises."""

    def __bool__(self) -> bool:
        raise ValueError("neither")


class MuteOutcome(OutcomeUnknown):
    """An `OutcomeUnknown` error whose `str` raises."""

    __str__ = Mute.__str__


class MuteConflict(Conflict):
    """A `Conflict` error whose places are not text."""

    def __init__(self) -> None:
        super().__init__(["a"])
        self.places = (3,)  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]


def invalid() -> ToolValidationError:
    error = ToolValidationError("x")
    error.problems = 3  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    return error


def looped() -> Exception:
    error = ValueError("a loop")
    error.__context__ = error.__cause__ = Wordless()
    error.__cause__.__context__ = error
    return error


LEAVES: list[Callable[[], BaseException]] = [
    Wordless,
    Mute,
    Quitter,
    Numeric,
    Disguised,
    Undecided,
    MuteConflict,
    lambda: MuteOutcome("x"),
    invalid,
    looped,
    lambda: ValueError("caf\udce9"),
    lambda: ValueError("x" * 100_000),
    lambda: OSError(28, "the disk is full"),
    lambda: TransientError("busy", retry_after=0),
    lambda: CallFailed("inner", ToolResult.error("no")),
    lambda: VisibilityExpansionRequired(["docs"], "a child"),
    lambda: PromptEvaluationError("the model is gone", run_id="a child"),
    lambda: StopIteration(3),
    StopAsyncIteration,
    RecursionError,
    MemoryError,
    asyncio.CancelledError,
]
EXITS: list[Callable[[], BaseException]] = [
    KeyboardInterrupt,
    lambda: SystemExit(3),
    lambda: BaseException("odd"),
    lambda: PromptEvaluationError("this run's model is gone"),
    GeneratorExit,
]


def nested(error: BaseException, depth: int) -> BaseException:
    """Return the error, wrapped in `depth` exception groups, one inside another."""
    for _ in range(depth):
        error = BaseExceptionGroup("a group", [error])
    return error


Recipe = tuple[list[int], int]
"""The indexes of errors in `[*LEAVES, *EXITS]`, and the number of groups around them."""

RECIPES = st.tuples(
    st.lists(st.integers(0, len(LEAVES) + len(EXITS) - 1), min_size=1, max_size=3),
    st.sampled_from([0, 0, 1, 3, 2000]),
)
"""Errors are drawn as recipes, because Hypothesis prints what it draws, and some of these errors can't be printed."""


def made(recipe: Recipe | None) -> BaseException | None:
    if recipe is None:
        return None
    numbers, depth = recipe
    errors = [[*LEAVES, *EXITS][number]() for number in numbers]
    return nested(errors[0] if len(errors) == 1 else BaseExceptionGroup("several", errors), depth)


def booking(errors: list[BaseException | None], undone: list[str]) -> list[Any]:
    """Return `book` and `trip`, which books 0, 1 and 2 and raises `errors[0]`. Undoing booking n raises `errors[n + 1]`, if it is not None."""

    async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append(value)
        leave_traces(context, value)
        error = errors[1 + int(value)]
        if error is not None:
            raise error

    @tool(effect="compensable", compensate=unbook)
    async def book(what: str) -> str:
        """Book."""
        return what

    @tool(effect="irreversible")
    async def trip(context: ToolContext) -> None:
        """Book three times, then fail."""
        for number in range(3):
            await context.call("book", what=str(number))
        assert errors[0] is not None
        raise errors[0]

    return [book, trip]


@given(RECIPES, st.lists(st.none() | RECIPES, min_size=3, max_size=3), st.booleans())
@example(([12], 2000), [None, ([23], 0), None], True)
@example(([1], 0), [([22], 0), ([1], 0), ([1], 2000)], True)
def test_each_call_has_one_end_and_every_compensation_runs(
    recipe: Recipe, others: list[Recipe | None], logged: bool
) -> None:
    """Every call starts and ends once, every compensation runs once, and the result is text that can be encoded."""
    log = logging.getLogger("handrail.gate")
    level, records = log.level, _Formats()
    log.addHandler(records)
    log.setLevel(logging.DEBUG if logged else logging.CRITICAL)

    async def main() -> None:
        undone: list[str] = []
        rig = Rig(booking([made(recipe), *map(made, others)], undone))
        with contextlib.suppress(BaseException):  # the errors that end the run
            await rig.call("trip")
        (ended,) = [event for event in rig.of(ToolInvoked) if event.tool == "trip"]
        assert ended.result.render().encode()
        assert len(ended.result.render()) < 8_000
        assert undone == ["2", "1", "0"]
        rig.assert_paired()
        (rolled_back,) = rig.rolled_back("trip")
        assert len(rolled_back.compensated) == others.count(None)
        assert sorted(rig.notes, reverse=True) == [n for n in undone if others[int(n)] is None]

    try:
        run_virtual(main)
    finally:
        log.removeHandler(records)
        log.setLevel(level)


class _Formats(logging.Handler):
    """A log handler that formats each record and lets errors propagate, as an application's handler may."""

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)


@pytest.mark.parametrize("make", [KeyboardInterrupt, lambda: SystemExit(3)], ids=["keyboard", "exit"])
@pytest.mark.virtual_time
async def test_an_exit_in_a_compensation_counts_as_its_failure(make: Callable[[], BaseException]) -> None:
    """If a compensation raises `KeyboardInterrupt` or `SystemExit`, the other compensations still run, and the call fails as usual."""
    undone: list[str] = []
    rig = Rig(booking([ValueError("no hotel"), None, make(), None], undone))
    result = await rig.call("trip")
    assert undone == ["2", "1", "0"]
    assert f"book (compensating it failed: {type(make()).__name__}" in result.message
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_a_group_is_told_by_its_leaves() -> None:
    """The message for an exception group lists the errors in it."""

    async def fails(text: str, context: ToolContext) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(full())
            group.create_task(gone())

    async def full() -> None:
        raise OSError("the disk is full")

    async def gone() -> None:
        raise ValueError("the file is gone")

    rig = Rig([staged(fails)])
    message = (await rig.call("work", text="a")).message
    assert message == "work failed: OSError: the disk is full; ValueError: the file is gone"


@pytest.mark.virtual_time
async def test_a_wide_group_is_counted() -> None:
    """The model is told the first errors of a large group, and how many more there are."""

    async def fails(text: str, context: ToolContext) -> Any:
        raise ExceptionGroup("many", [ValueError(str(n)) for n in range(1000)])

    message = (await Rig([staged(fails)]).call("work", text="a")).message
    assert message.startswith("work failed: ValueError: 0; ValueError: 1;")
    assert message.endswith("; and 995 more")


@pytest.mark.parametrize("depth", [1, 2, 100])
@pytest.mark.virtual_time
async def test_a_transient_error_inside_a_group_is_retried(depth: int) -> None:
    """A call that raises a `TransientError` in exception groups is retried like one that raises it directly."""
    tries: list[str] = []

    async def fails(text: str, context: ToolContext) -> Any:
        tries.append(text)
        if len(tries) < 3:
            raise nested(TransientError("busy", retry_after=1), depth)
        return "done"

    rig = Rig([staged(fails)])
    assert (await rig.call("work", text="a")).value == "done"
    (ended,) = rig.of(ToolInvoked)
    assert ended.attempts == 3
    assert rig.notes == ["a"]


@pytest.mark.virtual_time
async def test_closing_a_call_records_what_is_owed() -> None:
    """A call whose coroutine is closed can't await its compensations. It ends once, and its result says what could not be undone."""
    undone: list[str] = []
    book, _ = booking([ValueError()], undone)

    @tool(effect="irreversible")
    async def trip(context: ToolContext) -> None:
        """Book, then wait."""
        await context.call("book", what="0")
        await asyncio.sleep(60)

    rig = Rig([book, trip])
    call = rig.gate.invoke("trip").__await__()
    next(call)
    call.close()
    (ended,) = [event for event in rig.of(ToolInvoked) if event.tool == "trip"]
    assert ended.status == "cancelled"
    assert "Could not be undone: book." in ended.result.message
    assert rig.rolled_back("trip")[0].not_undone == ("book",)
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_closing_a_call_that_is_being_undone_ends_it_once() -> None:
    """A call that is closed while a compensation waits ends once, and its result says what could not be undone."""

    async def wait(params: Any, value: Any, *, context: ToolContext) -> None:
        await asyncio.sleep(60)

    @tool(effect="compensable", compensate=wait)
    async def book() -> None:
        """Book."""

    @tool(effect="irreversible")
    async def trip(context: ToolContext) -> None:
        """Book, then fail."""
        await context.call("book")
        raise ValueError("no hotel")

    rig = Rig([book, trip])
    call = rig.gate.invoke("trip").__await__()
    next(call)
    call.close()
    (ended,) = [event for event in rig.of(ToolInvoked) if event.tool == "trip"]
    assert "Could not be undone: book." in ended.result.message


@pytest.mark.parametrize("kind", ["at once", "later", "in a thread"])
@pytest.mark.virtual_time
async def test_a_handler_that_raises_generator_exit_fails_like_any_other(kind: str) -> None:
    """A handler's own `GeneratorExit` fails its call like any other error, and an inner call is compensated."""
    undone: list[str] = []
    book, _ = booking([None, None], undone)

    @tool(effect="pure")
    def in_thread() -> None:
        """Fail."""
        raise GeneratorExit

    @tool(effect="irreversible")
    async def trip(context: ToolContext) -> None:
        """Book, then fail."""
        await context.call("book", what="0")
        if kind == "later":
            await asyncio.sleep(1)
        raise GeneratorExit

    rig = Rig([book, trip, in_thread])
    if kind == "in a thread":
        result = await rig.call("in_thread")
    else:
        result = await rig.call("trip")
        assert undone == ["0"]
    assert "GeneratorExit" in result.message
    rig.assert_paired()


async def test_shielded_work_that_raises_generator_exit_does_not_look_closed() -> None:
    """`GeneratorExit` from shielded work is raised as a `RuntimeError`, so that the coroutine around it does not look closed."""

    async def work() -> None:
        raise GeneratorExit

    with pytest.raises(RuntimeError, match="GeneratorExit"):
        await shielded(work())


@pytest.mark.virtual_time
async def test_the_traceback_is_there_while_the_event_is_published() -> None:
    """Listeners see the handler's frames in the error's traceback. It is cleared afterwards, since it would keep variables alive."""
    seen: list[str] = []

    async def fails(text: str, context: ToolContext) -> Any:
        raise ValueError("no")

    rig = Rig([staged(fails)])
    rig.session.dispatcher.subscribe(
        ToolInvoked, lambda event: seen.append("".join(traceback.format_exception(event.error)))
    )
    await rig.call("work", text="a")
    (ended,) = rig.of(ToolInvoked)
    assert "in fails" in seen[0]
    assert ended.error is not None
    assert ended.error.__traceback__ is None
    assert rig.of(ToolRolledBack)
