"""Sessions: slices and their kinds, reducers, atomic dispatch, threads, and what may be an event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from handrail.context.facts import RunContext
from handrail.errors import DefinitionError, EventRefused, ReducerError, SessionError
from handrail.events import ToolStarted
from handrail.session import Items, Session, SliceRules, Table, check_serialisable, kept

RUN = RunContext("run", "request", "session", 1, "local", "trace", "span")


@dataclass(frozen=True)
class Note:
    """A state item without rules."""

    text: str


@kept(key=lambda todo: todo.id)
@dataclass(frozen=True)
class Todo:
    """A state item with a key."""

    id: int
    done: bool = False


@kept(kind="log")
@dataclass(frozen=True)
class Denied:
    """An item that is kept in a log."""

    tool: str


@dataclass(frozen=True)
class Add:
    """An event that other slices' reducers handle."""

    amount: int


@dataclass(frozen=True)
class Spare:
    """A state item unrelated to all other slices."""


def summed(total: Any, event: Add) -> Any:
    before = total.latest()
    return total.replace([Total(event.amount + (before.of if before else 0))])


@kept(reducers={Add: summed})
@dataclass(frozen=True)
class Total:
    """A state item whose class has a reducer for another event."""

    of: int


def started(number: int = 1) -> ToolStarted:
    return ToolStarted(str(number), "tool", ("tool",), 0.0, RUN)


def broken(_slice: Any, event: Any) -> Any:
    raise ZeroDivisionError("no such thing")


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in this many threads at once, and raise the first error."""
    failed: list[BaseException] = []
    together = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            together.wait()
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_an_event_without_rules_is_added_to_its_own_slice():
    """An event without rules is added to its own slice, which has `latest`, `all`, `where` and a length."""
    session = Session()
    assert session[Note].latest() is None
    for text in "abc":
        session.dispatch(Note(text))
    assert session[Note].latest() == Note("c")
    assert session[Note].all() == (Note("a"), Note("b"), Note("c"))
    assert session[Note].where(lambda note: note.text > "a") == (Note("b"), Note("c"))
    assert len(session[Note]) == 3
    assert len(session[Todo]) == 0


def test_a_keyed_slice_keeps_the_newest_of_each_key():
    """In a keyed slice, an item replaces the one with the same key."""
    session = Session()
    for todo in (Todo(1), Todo(2), Todo(1, True)):
        session.dispatch(todo)
    assert session[Todo].all() == (Todo(1, True), Todo(2))
    assert session[Todo].get(1) == Todo(1, True)
    assert session[Todo].get(3) is None


def test_what_was_read_does_not_change():
    """A slice that was read does not change later, whether it is state or a log."""
    session = Session()
    before = [session[Note], session[Denied], session[ToolStarted]]
    session.dispatch(Note("a"))
    session.dispatch(Denied("a"))
    session.record(started())
    then = [session[Note], session[Denied], session[ToolStarted]]
    session.dispatch(Denied("b"))
    session.record(started(2))
    assert [len(slice_) for slice_ in before] == [0, 0, 0]
    assert [slice_.all() for slice_ in before] == [(), (), ()]
    assert [slice_.latest() for slice_ in then] == [Note("a"), Denied("a"), started()]
    assert [len(slice_) for slice_ in then] == [1, 1, 1]
    assert session[Denied].where(lambda denied: denied.tool > "a") == (Denied("b"),)


def test_a_slice_is_selected_by_its_class():
    """A slice is selected by the class of its items. Anything else is refused, and so is `get` on a slice without a key."""
    session = Session(id="s1")
    with pytest.raises(SessionError, match=r"'s1'.*'Note' is not a type.*session\[Plan\]"):
        session["Note"]  # pyright: ignore[reportArgumentType]
    with pytest.raises(SessionError, match=r"list\[int\]"):
        session.fork()[list[int]]
    with pytest.raises(DefinitionError, match="no keys"):
        session[Denied].get("a")


def test_identity_and_config_are_read_only():
    """The id, principal, configuration and dispatcher of a session and of its forks can't be changed."""
    session = Session(id="a", principal="ann", config={"x": 1})
    for name in ("id", "principal", "config", "dispatcher"):
        with pytest.raises(AttributeError):
            setattr(session, name, "other")
        with pytest.raises(AttributeError):
            setattr(session.fork(), name, "other")
    with pytest.raises(TypeError):
        session.config["x"] = 2  # pyright: ignore[reportIndexIssue]
    assert (session.fork().id, session.fork().principal, session.fork().config) == ("a", "ann", {"x": 1})
    assert Session(new_id=lambda: "made").id == "made"


def test_reducers_from_the_mark_the_session_and_register_all_run():
    """An event goes to every slice that has a reducer for it, and to its own state slice only if no slice has one."""
    session = Session(
        slices={
            Note: SliceRules(reducers={Add: lambda slice_, event: slice_.append(Note(str(event.amount)))})
        }
    )
    session.register(Todo, on=Add, reducer=lambda slice_, event: slice_.append(Todo(event.amount)))
    session.dispatch(Add(3))
    session.dispatch(Add(4))
    assert session[Total].all() == (Total(7),)
    assert session[Note].all() == (Note("3"), Note("4"))
    assert session[Todo].get(4) == Todo(4)
    assert len(session[Add]) == 0


def test_registering_takes_effect_for_events_seen_before():
    """A newly registered reducer gets the next event, even if events of that type were dispatched before."""
    session = Session()
    session.dispatch(Note("a"))
    session.register(Todo, on=Note, reducer=lambda slice_, event: slice_.append(Todo(1)))
    session.dispatch(Note("b"))
    assert session[Note].all() == (Note("a"),)
    assert session[Todo].all() == (Todo(1),)


def test_a_log_keeps_its_own_events_when_another_slice_reduces_them():
    """A log keeps its own events even if a state slice reduces them too."""
    session = Session()
    session.register(Note, on=Denied, reducer=lambda slice_, event: slice_.append(Note(event.tool)))
    session.dispatch(Denied("rm"))
    assert session[Denied].all() == (Denied("rm"),)
    assert session[Note].all() == (Note("rm"),)


def test_a_log_with_a_reducer_keeps_what_it_held():
    """A log keeps its items when a reducer is registered on it, until that reducer replaces them."""
    session = Session()
    session.dispatch(Denied("a"))
    session.register(Denied, on=Note, reducer=lambda slice_, event: slice_.replace([Denied(event.text)]))
    session.dispatch(Denied("b"))
    assert session[Denied].all() == (Denied("a"), Denied("b"))
    session.fork().dispatch(Note("c"))
    assert session[Denied].all() == (Denied("c"),)


def test_facts_can_be_reduced_and_are_logged_in_any_case():
    """A slice may reduce Handrail's own facts. If its reducer raises, the fact is still kept and published."""
    session, heard = Session(), list[object]()
    session.dispatcher.subscribe(ToolStarted, heard.append)
    session.record(started(1))
    session.register(Note, on=ToolStarted, reducer=lambda slice_, fact: slice_.append(Note(fact.call_id)))
    session.record(started(2))
    session.register(Note, on=ToolStarted, reducer=broken)
    session.record(started(3))
    assert [fact.call_id for fact in session[ToolStarted].all()] == ["1", "2", "3"]
    assert session[Note].all() == (Note("2"),)
    assert heard == [started(1), started(2), started(3)]


def test_a_keyed_log_of_facts_is_recorded():
    """Rules given for one of Handrail's own facts apply when the fact is recorded."""
    session = Session(slices={ToolStarted: SliceRules("log", key=lambda fact: fact.call_id)})
    for number in (1, 2, 1):
        session.record(started(number))
    assert len(session[ToolStarted]) == 2
    assert session[ToolStarted].get("1") == started(1)


@pytest.mark.parametrize("into", [Todo, Denied])
def test_a_reducer_that_raises_undoes_the_whole_dispatch(into: type):
    """If a reducer raises, no slice or log keeps the event, and nothing is published."""
    session, heard = Session(), list[object]()
    session.register(Total, on=Add, reducer=lambda slice_, event: slice_.append(Total(event.amount)))
    session.register(Denied, on=Add, reducer=lambda slice_, event: slice_.append(Denied("added")))
    session.register(into, on=Add, reducer=broken)
    session.dispatcher.subscribe(object, heard.append)
    for place in (session, session.fork()):
        with pytest.raises(
            ReducerError, match="'broken' failed on the event Add with ZeroDivisionError: no such"
        ) as raised:
            place.dispatch(Add(1))
        assert raised.value.event == Add(1)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert [len(place[kind]) for kind in (Total, Denied, Todo, Add)] == [0, 0, 0, 0]
    assert heard == []


def test_a_reducer_that_raises_generator_exit_fails_like_any_other():
    """A reducer's `GeneratorExit` undoes the dispatch and is told as a reducer's error."""

    def gone(slice_: Any, event: Add) -> Any:
        raise GeneratorExit

    session = Session()
    session.register(Todo, on=Add, reducer=gone)
    with pytest.raises(ReducerError, match=r"'.*gone' failed on the event Add with GeneratorExit"):
        session.dispatch(Add(1))
    assert len(session[Add]) == 0


@pytest.mark.parametrize("nonsense", [None, [Todo(1)], (), Items([Todo(1)]), Note("a")])
def test_a_reducer_that_returns_something_else_is_told_so(nonsense: object):
    """A reducer must return a version of its own slice. Anything else is refused."""
    session = Session()
    session.register(Todo, on=Add, reducer=lambda slice_, event: nonsense)
    with pytest.raises(ReducerError, match=f"returned an? {type(nonsense).__name__}, not the slice"):
        session.dispatch(Add(1))
    assert isinstance(session[Todo], Table)
    assert len(session[Todo]) == 0


@pytest.mark.parametrize("target", [Note, Denied])
@pytest.mark.parametrize("act", ["dispatch", "fork", "restore"])
def test_a_reducer_that_dispatches_is_refused(act: str, target: type):
    """A reducer that dispatches or restores is refused, its event is undone, and the session stays usable."""
    session = Session()
    acts: dict[str, Callable[[], None]] = {
        "dispatch": lambda: session.dispatch(Spare()),
        "fork": lambda: session.fork().dispatch(Spare()),
        "restore": lambda: session.restore(session.snapshot()),
    }

    def reducer(slice_: Any, event: Any) -> Any:
        acts[act]()
        return slice_.append(event)

    session.register(target, on=Add, reducer=reducer)
    with pytest.raises(ReducerError, match="Reducers must be pure"):
        session.dispatch(Add(1))
    assert [len(session[kind]) for kind in (Note, Denied, Spare)] == [0, 0, 0]
    session.dispatch(Spare())
    assert session[Spare].all() == (Spare(),)


def test_a_key_that_raises_undoes_the_dispatch():
    """If a key function raises, the dispatch is undone as if a reducer had raised."""
    session = Session(slices={Note: SliceRules(key=lambda note: note.missing)})
    with pytest.raises(ReducerError, match="on the event Note with AttributeError"):
        session.dispatch(Note("a"))
    assert len(session[Note]) == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: kept(kind="logs"), "the kind of a slice is 'logs'"),  # pyright: ignore[reportArgumentType]
        (lambda: SliceRules("stat"), "is 'stat'"),  # pyright: ignore[reportArgumentType]
        (lambda: kept(key="id"), "is 'id', not a function"),  # pyright: ignore[reportArgumentType]
        (lambda: kept(reducers={"Add": broken}), "a type of event, not 'Add'"),  # pyright: ignore[reportArgumentType]
        (lambda: kept(reducers={Add: 3}), "reducer for Add is an int"),  # pyright: ignore[reportArgumentType]
        (lambda: Session().register(Note, on=Add, reducer=None), "reducer for Add is a NoneType"),  # pyright: ignore[reportArgumentType]
        (lambda: Session().register(Note, on="Add", reducer=broken), "not 'Add'"),  # pyright: ignore[reportArgumentType]
        (lambda: Session().register("Note", on=Add, reducer=broken), "'Note' is not a type"),  # pyright: ignore[reportArgumentType]
        (lambda: Session(slices={Note: "log"}), "slices contains .*Note.*SliceRules"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_wrong_rules_are_refused_where_they_are_given(wrong: Callable[[], object], words: str):
    """Invalid rules are refused where they are given, and the error says what is wrong."""
    with pytest.raises((DefinitionError, SessionError), match=words):
        wrong()


def test_a_mark_below_a_decorator_that_makes_another_class_is_found():
    """`@kept` below `@dataclass(slots=True)`, which replaces the class, is refused with a hint to put it above."""

    class Found:
        pass

    @dataclass(frozen=True, slots=True)
    @kept(reducers={Found: lambda slice_, event: slice_})
    class Lost:
        of: int = 0

    with pytest.raises(DefinitionError, match="Put @kept above"):
        Session()[Lost]


@pytest.mark.parametrize("event", ["text", 3, None, {"a": 1}, [Note("a")], Note, Session, broken, object()])
def test_plain_values_and_classes_are_not_events(event: object):
    """Plain values and classes are refused as events, and change nothing."""
    session = Session()
    for take in (session.dispatch, session.fork().dispatch, session.dispatcher.publish, session.record):
        with pytest.raises(EventRefused, match=r"Make|Pass"):
            take(event)
    assert session.state == {}
    assert session.logs() == {}


def test_what_cannot_be_saved_is_refused_at_its_first_dispatch():
    """With the check that a journal adds, an event that JSON can't restore unchanged is refused before it is added to a slice."""

    @dataclass(frozen=True)
    class Holds:
        value: Any

    session = Session()
    session.dispatch(Holds(object()))
    session.check_each(check_serialisable)
    for wrong in (Holds(object()), Holds(threading.Lock()), Holds({1: {2, 3}}), Holds(Note("a"))):
        for place in (session, session.fork()):
            with pytest.raises(EventRefused, match=r"has a journal.*plain data"):
                place.dispatch(wrong)
    session.dispatch(Holds({"a": [1, "b", None]}))
    assert len(session[Holds]) == 2


def test_ten_thousand_dispatches_from_eight_threads_lose_nothing():
    """Ten thousand dispatches from eight threads lose no event, and publish each `Add` once."""
    session, heard = Session(), list[object]()
    session.dispatcher.subscribe(Add, heard.append)
    session.register(Denied, on=Add, reducer=lambda slice_, event: slice_.append(Denied("")))

    def work(number: int) -> None:
        for _ in range(625):
            session.dispatch(Add(1))
            session.dispatch(Note(f"{number}"))

    in_threads(8, work)
    assert session[Total].latest() == Total(5000)
    assert len(session[Denied]) == len(heard) == 5000
    assert all(len(session[Note].where(lambda note, n=n: note.text == str(n))) == 625 for n in range(8))


async def test_ten_thousand_dispatches_from_tasks_lose_nothing():
    """Dispatches from tasks that yield in between, directly and through forks, lose no event."""
    session = Session()

    async def work() -> None:
        for _ in range(100):
            session.dispatch(Add(1))
            fork = session.fork()
            fork.dispatch(Add(1))
            await asyncio.sleep(0)
            fork.commit()

    await asyncio.gather(*[work() for _ in range(50)])
    assert session[Total].latest() == Total(10_000)


@pytest.mark.parametrize("kind", ["dataclass", "struct", "model"])
def test_what_can_be_changed_afterwards_is_not_kept(kind: str):
    """A mutable event is refused, because forks would share it and no rollback could undo a change to it."""

    @dataclass
    class Loose:
        number: int

    class LooseStruct(msgspec.Struct):
        number: int

    class LooseModel(BaseModel):
        number: int

    loose = {"dataclass": Loose, "struct": LooseStruct, "model": LooseModel}[kind]
    session = Session()
    with pytest.raises(EventRefused, match=r"it is mutable.*frozen=True"):
        session.dispatch(loose(number=1))
    assert len(session[loose]) == 0
