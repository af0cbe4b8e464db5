"""Sessions as JSON: a session is restored completely, or refused with an error that names the problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field

from handrail.context.facts import Approval, RunContext
from handrail.errors import EventRefused, SessionError
from handrail.events import (
    ApprovalDecided,
    ApprovalRemembered,
    ApprovalRevoked,
    Emitted,
    ToolInvoked,
    ToolStarted,
)
from handrail.guard.policy import PolicyNote
from handrail.session import Session, SliceRules, check_serialisable, kept, load, save
from handrail.tools import ToolResult

RUN = RunContext("run", "request", "session", 1, "local", "trace", "span")
AT = datetime(2030, 1, 1, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Plan:
    """A dataclass with fields of many types."""

    text: str
    at: datetime = datetime(2024, 2, 29, 12, tzinfo=UTC)
    cost: Decimal = Decimal("0.10")
    tags: tuple[str, ...] = ()
    seen: frozenset[int] = frozenset()
    raw: bytes = b"raw"
    counts: dict[int, float] = field(default_factory=dict[int, float])
    inner: Plan | None = None


class Model(BaseModel):
    """A strict pydantic model with an alias and a computed field."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    source: str = Field(alias="from")
    at: datetime = datetime(2024, 1, 1, tzinfo=UTC)

    @computed_field
    @property
    def shout(self) -> str:
        return self.source.upper()


class Record(msgspec.Struct, frozen=True):
    """A msgspec struct with fields that JSON has no types for, such as bytes and a dict with integer keys."""

    by_number: dict[int, datetime]
    raw: bytes
    cost: Decimal


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


class Login(BaseModel):
    """A model with a secret."""

    model_config = ConfigDict(frozen=True)
    user: str
    password: SecretStr


TYPES = [Plan, Model, Record, Todo, Denied, Login]
MOMENT = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
EVENTS: list[Any] = [
    Plan("a"),
    Plan(
        "ü\n\0", MOMENT, Decimal("1e-30"), ("x", ""), frozenset({1, 2}), b"", {-1: 0.1, 2: 1e300}, Plan("in")
    ),
    Plan("inf", counts={1: float("inf")}),
    Model.model_validate({"from": "x"}),
    Record({1: MOMENT, -2: MOMENT}, b"\xff\x00", Decimal("0.1")),
    Todo(1),
    Todo(2),
    Todo(1, True),
    Denied("rm"),
]


def invoked(params: Any, value: Any, error: BaseException | None = None) -> ToolInvoked:
    result = ToolResult.ok(value, "done")
    return ToolInvoked("1", "tool", ("tool",), "ok", result, params, 0.5, 1, ("Plan",), error, RUN)


def filled(events: list[Any], **options: Any) -> Session:
    session = Session(id="s1", principal="ann", config={"depth": 3, "list": [1, None]}, **options)
    for event in events:
        session.dispatch(event)
    return session


def changed(**change: Any) -> bytes:
    """Return a saved session with some fields of its JSON replaced."""
    return json.dumps({**json.loads(save(filled([Plan("a")]))), **change}).encode()


def test_everything_comes_back_as_it_was():
    """Dataclasses, models and structs are restored in order, with the session's id, principal and config."""
    session = filled(EVENTS)
    again = load(save(session), types=TYPES)
    for kind in TYPES:
        assert again[kind].all() == session[kind].all()
        assert all(type(item) is kind for item in again[kind].all())
    assert (again.id, again.principal, again.config) == ("s1", "ann", {"depth": 3, "list": [1, None]})
    assert save(again) == save(session)
    json.loads(save(session), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@given(
    st.lists(
        st.one_of(
            st.builds(
                Plan,
                st.text(),
                st.datetimes(timezones=st.just(UTC)),
                st.decimals(allow_nan=False, allow_infinity=False),
                st.lists(st.text(), max_size=3).map(tuple),
                st.frozensets(st.integers(), max_size=3),
                st.text().map(str.encode),
                st.dictionaries(st.integers(), st.floats(allow_nan=False), max_size=3),
            ),
            st.builds(Todo, st.integers(0, 3), st.booleans()),
            st.builds(Denied, st.text()),
        ),
        max_size=40,
    )
)
def test_any_session_comes_back_as_it_was(events: list[Any]):
    """Any session is restored as it was, and later dispatches continue from there."""
    session = filled(events)
    again = load(save(session), types=TYPES)
    for session_ in (session, again):
        session_.dispatch(Todo(2, True))
        session_.dispatch(Denied("later"))
    for kind in (Plan, Todo, Denied):
        assert again[kind].all() == session[kind].all()


def test_kinds_are_kept():
    """After loading, a keyed slice is still keyed, and a log is still unaffected by `restore`."""
    again = load(save(filled(EVENTS)), types=TYPES)
    assert again[Todo].get(1) == Todo(1, True)
    again.restore(Session(id="s1").snapshot())
    assert len(again[Todo]) == 0
    assert again[Denied].all() == (Denied("rm"),)
    again.record(ToolStarted("1", "tool", (), 0.0, RUN))
    twice = load(save(again), types=TYPES)
    twice.record(ToolStarted("2", "tool", (), 0.0, RUN))
    assert [fact.call_id for fact in twice[ToolStarted].all()] == ["1", "2"]


def test_a_log_with_reducers_is_kept():
    """A log with reducers is restored, and its reducers apply to later events."""
    rules = {
        Denied: SliceRules("log", reducers={Todo: lambda slice_, event: slice_.append(Denied(str(event.id)))})
    }
    again = load(save(filled([Denied("a"), Todo(1)], slices=rules)), types=TYPES, slices=rules)
    again.fork().dispatch(Todo(2))
    assert again[Denied].all() == (Denied("a"), Denied("1"), Denied("2"))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            SliceRules("log"),
            "Plan was saved as a 'log' slice without a key, but is a 'state' slice without a key here",
        ),
        (
            SliceRules(key=lambda plan: plan.text),
            "Plan was saved as a 'state' slice with a key, but is .* without",
        ),
    ],
)
def test_rules_that_were_given_must_be_given_again(rules: SliceRules, words: str):
    """Loading without the slice rules that the session had is refused, because slices would lose their kind or key."""
    session = filled([Plan("a"), Plan("a")], slices={Plan: rules})
    with pytest.raises(SessionError, match=rf"{words}.*slices="):
        load(save(session), types=[Plan])
    again = load(save(session), slices={Plan: rules})
    assert again[Plan].all() == session[Plan].all()


def test_our_own_facts_need_not_be_named():
    """Handrail's own events can be loaded without `types`. Params, results and emitted events become plain data."""
    session = Session(id="s1")
    facts = [
        ToolStarted("1", "tool", ("outer", "tool"), 0.25, RUN),
        invoked(Plan("p"), [Todo(1)], ValueError("what was said")),
        invoked(None, None),
        Emitted("1", "tool", Todo(3), RUN),
        ApprovalDecided("q", "1", "tool", Approval(True, "fine", "ann", "approved"), RUN, "remembered", "m"),
        ApprovalRemembered("m", "tool", "scope", "x", True, "", "ann", AT, ("outer", "tool"), "key", RUN),
        ApprovalRevoked("m", "tool", "scope", "ann", AT),
    ]
    for fact in facts:
        session.record(fact)
    session.dispatch(PolicyNote("policy", "key", "value"))
    again = load(save(session))
    assert again[ToolStarted].all() == session[ToolStarted].all()
    for kind in (ApprovalDecided, ApprovalRemembered, ApprovalRevoked):
        assert again[kind].all() == session[kind].all() != ()
    assert again[PolicyNote].all() == session[PolicyNote].all()
    first, second = again[ToolInvoked].all()
    assert first.params["text"] == "p"
    assert first.result == ToolResult("done", [{"id": 1, "done": False}])
    assert "ValueError: what was said" in str(first.error)
    assert second == invoked(None, None)
    (emitted,) = again[Emitted].all()
    assert emitted.event == {"id": 3, "done": False}
    assert save(again) == save(session)


def test_secrets_are_not_in_the_text():
    """Pydantic secrets are saved as asterisks, and the check that a journal adds refuses an event with a secret."""
    login = Login(user="ann", password=SecretStr("hunter2"))

    @dataclass(frozen=True)
    class Wraps:
        login: Login
        also: SecretStr

    wraps = Wraps(login, SecretStr("hunter2"))
    session = Session(config={"key": SecretStr("hunter2")})
    for event in (login, wraps):
        session.dispatch(event)
    for value in (login, wraps, SecretStr("hunter2"), {"a": [login]}):
        session.record(invoked(value, value))
        session.record(Emitted("1", "tool", value, RUN))
    text = save(session).decode()
    assert "hunter2" not in text
    assert "ann" in text
    for event in (login, wraps):
        with pytest.raises(EventRefused, match="it changes when it is saved") as refused:
            check_serialisable(event)
        assert "hunter2" not in str(refused.value)


def test_unknown_types_are_refused_by_name():
    """Unknown types are refused, and one error lists all of them."""
    with pytest.raises(
        SessionError, match=r"'s1': it contains the unknown types \S+Denied, \S+Record"
    ) as raised:
        load(save(filled(EVENTS)), types=[Plan, Todo, Model])
    assert "types=[...]" in str(raised.value)


def test_a_name_in_the_text_never_imports_or_finds_anything_else():
    """A type name in the text is refused if it is neither a given type nor one of Handrail's own, even if it can be imported."""
    slices = json.loads(save(filled([Plan("a")])))["slices"]
    (contents,) = slices.values()
    for name in ("os.system", "handrail.session.session.Session.fork", "handrail.errors.nothing", "sys", ""):
        with pytest.raises(SessionError, match="the unknown type"):
            load(changed(slices={name: contents}))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a saved session"),
        (b"{", "not a saved session"),
        (b"\xff\xfe", "not a saved session"),
        (changed(principal="ann").replace(b"ann", b"\xff"), "damaged"),
        (save(filled([Plan("zzz")])).replace(b"zzz", b"\xff"), "Plan does not match"),
        (save(filled([Record({}, b"", Decimal(1))])).replace(b'"1"', b'"\xff"'), "Record does not match"),
        (b"[]", "not a saved session"),
        (b'"text"', "not a saved session"),
        (b"{}", "format None, but this version of Handrail reads format 1"),
        (changed(version=2), "'s1'.*format 2, but .* reads format 1.*version of Handrail that saved it"),
        (changed(version="1"), "format '1', but"),
        (changed(slices=[]), "'s1'.*damaged.*slices"),
        (changed(slices={"a": 3}), "damaged"),
        (changed(slices={"a": {"kind": "table", "keyed": False, "items": []}}), "damaged.*table"),
        (changed(id=None), "damaged.*id"),
        (changed(principal=4), "damaged.*principal"),
        (changed(config=[]), "damaged.*config"),
        (save(filled([Plan("a")]))[:-3], "not a saved session"),
    ],
)
def test_damaged_text_is_refused(data: bytes, words: str):
    """Text that is damaged, or in another version of the format, raises a `SessionError` that says what is wrong."""
    with pytest.raises(SessionError, match=words):
        load(data, types=[Plan, Record])


@given(st.data())
def test_no_damage_makes_another_error(data: st.DataObject):
    """However the bytes are cut and changed, loading either works or raises `SessionError`."""
    text = bytearray(save(filled(EVENTS)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with suppress(SessionError):
        load(bytes(text), types=TYPES)


@pytest.mark.parametrize("kind", [Plan, Record, Model])
def test_a_type_that_changed_since_is_named(kind: type):
    """An item that no longer fits its type is refused with an explanation."""
    saved = json.loads(save(filled(EVENTS)))
    saved["slices"][f"{kind.__module__}.{kind.__qualname__}"]["items"] = [{"surprise": 1}]
    with pytest.raises(SessionError, match=rf"{kind.__name__} does not match its type.*changed since"):
        load(json.dumps(saved), types=TYPES)


def local_type(name: str) -> type:
    """Return a new class. All classes that this function returns have the same name."""

    @dataclass(frozen=True)
    class Local:
        value: Any = None

    Local.__doc__ = name
    return Local


class Bare:
    """A class that is neither a dataclass nor a model."""


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (lambda session: session.dispatch(Bare()), "a Bare can't be saved"),
        (lambda session: session.dispatch(local_type("a")(object())), "a Local can't be saved"),
        (lambda session: session.dispatch(Plan("x", raw=b"\xff")), "a Plan can't be saved"),
        (lambda session: session.record(invoked(object(), 1)), "a ToolInvoked can't be saved"),
        (
            lambda session: [session.dispatch(local_type(name)(1)) for name in "ab"],
            "two types named .*local_type.<locals>.Local",
        ),
    ],
)
def test_what_cannot_be_saved_is_named(fill: Callable[[Session], None], words: str):
    """`save` refuses an item or a config that can't be saved, and two types with one name. The error names the cause."""
    session = Session(id="s1")
    fill(session)
    with pytest.raises(SessionError, match=words):
        save(session)
    with pytest.raises(SessionError, match="its config can't be saved"):
        save(Session(config={"a": object()}))


def test_what_can_be_saved_passes_the_check():
    """`check_serialisable` accepts events that can be restored unchanged, and refuses others."""
    for event in EVENTS:
        check_serialisable(event)
    for wrong in (Bare(), Plan("x", raw=b"\xff"), local_type("a")(Todo(1)), local_type("a")((1, 2))):
        with pytest.raises(EventRefused, match="has a journal"):
            check_serialisable(wrong)


def test_a_type_that_cannot_be_loaded_is_refused():
    """A type without a schema is refused with a `SessionError`, not with pydantic's error."""
    data = save(filled([Plan("a")])).replace(f"{__name__}.Plan".encode(), f"{__name__}.Bare".encode())
    with pytest.raises(SessionError, match="Bare does not match"):
        load(data, types=[Bare])
