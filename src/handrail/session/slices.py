"""Slices: their kinds, keys and reducers, and which events go into which slice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from handrail.errors import DefinitionError, ReducerError
from handrail.events import Fact
from handrail.schema.problems import describe_kind
from handrail.session.items import Items, Table
from handrail.session.kinds import declare

SliceKind = Literal["state", "log"]
"""A change to *state* is undone if the call that made it fails; a *log* keeps what happened, whatever the outcome."""

Contents = Items[Any] | Table[Any]
Reducer = Callable[[Any, Any], Any]
"""A function `(slice, event) -> slice`. It must be pure, since it may run again when a call commits, and fast, since it runs under a lock."""

F = TypeVar("F", bound=type)

_RULES = "__handrail_slice__"


@dataclass(frozen=True, slots=True)
class SliceRules:
    """Rules for how a session stores the items of one type."""

    kind: SliceKind = "state"
    key: Callable[[Any], Hashable] | None = None
    """A function that returns an item's key. An appended item replaces an earlier one with the same key.

    Without such a function, appending an item replaces nothing.
    """
    reducers: Mapping[type, Reducer] = field(default_factory=dict[type, Reducer])
    """The slice's reducers, by event type.

    An event that no slice has a reducer for is appended to the slice of its own type. An event whose
    type is a log is also appended to that log, unless the log has a reducer for it.
    """

    def __post_init__(self) -> None:
        if self.kind not in ("state", "log"):
            raise DefinitionError(f"the kind of a slice is {self.kind!r}. Use kind='state' or kind='log'.")
        if self.key is not None and not callable(self.key):
            raise DefinitionError(
                f"the key of a slice is {self.key!r}, not a function. "
                "Pass a function of the item: key=lambda item: item.id."
            )
        for event, reducer in self.reducers.items():
            check_reducer(event, reducer)

    def empty(self) -> Contents:
        return Items() if self.key is None else Table(self.key)

    @property
    def is_plain_log(self) -> bool:
        """Whether items are only ever appended, so that a list is enough."""
        return self.kind == "log" and self.key is None and not self.reducers


def check_reducer(event: object, reducer: object) -> None:
    """Raise `DefinitionError` unless `event` is a type and `reducer` is a function."""
    if not isinstance(event, type):
        raise DefinitionError(f"a reducer handles a type of event, not {event!r}. Pass the event's class.")
    if not callable(reducer):
        raise DefinitionError(
            f"the reducer for {event.__name__} is {describe_kind(reducer)}. "
            "Pass a function: (slice, event) -> slice."
        )


_DEFAULT = SliceRules()
_LOG = SliceRules("log")


def kept(
    nothing: None = None,
    /,
    *,
    kind: SliceKind = "state",
    key: Callable[[Any], Hashable] | None = None,
    reducers: Mapping[type, Reducer] | None = None,
) -> Callable[[F], F]:
    """Declare on a type how a session stores its items, as in `@kept(key=lambda todo: todo.id)`.

    The arguments are the fields of `SliceRules`.
    """
    given: Any = nothing
    if isinstance(given, str):
        raise DefinitionError(
            f"@kept({given!r}) has an argument without a name. Write @kept(kind={given!r})."
        )
    if given is not None:
        name = getattr(given, "__name__", repr(given))
        raise DefinitionError(
            f"@kept above {name} has no arguments. Write @kept(kind=...), or leave it out: items are state by default."
        )
    rules = SliceRules(kind, key, dict(reducers or {}))

    def mark(type_: F) -> F:
        setattr(type_, _RULES, rules)
        declare(type_)
        for event in rules.reducers:
            declare(event)
            slices = _marked.setdefault(event, [])
            if type_ not in slices:
                slices.append(type_)
        return type_

    return mark


_marked: dict[type, list[type]] = {}
"""Maps each event type to the slices whose own declaration has a reducer for it."""


def slices_marked_for(event: type) -> list[type]:
    """Return the slices whose own declaration has a reducer for this event type."""
    return [slice_ for slice_ in _marked.get(event, ()) if event in rules_of(slice_).reducers]


def rules_of(type_: type) -> SliceRules:
    """Return the declared rules of a type. By default, Handrail's facts are logs and everything else is state.

    Raises `DefinitionError` if `@kept(reducers=...)` decorated a class that another decorator then replaced.
    """
    own = type_.__dict__.get(_RULES)
    if isinstance(own, SliceRules):
        if any(type_ not in _marked.get(event, ()) for event in own.reducers):
            raise DefinitionError(
                f"{type_.__name__} was decorated with @kept, and another decorator, such as @dataclass(slots=True), then "
                "replaced the class. Put @kept above the other decorators."
            )
        return own
    return _LOG if issubclass(type_, Fact) else _DEFAULT


def append(contents: Contents, event: Any) -> Contents:
    """Append the event itself as an item. This is the default reducer."""
    return contents.append(event)


State = dict[type, Contents]
"""Maps types to slices. A state is never modified once a session or fork has it; a change creates a new one."""

EMPTY: Items[object] = Items()


class Target:
    """A slice into which an event goes, with its reducer."""

    __slots__ = ("is_log", "is_plain_log", "reducer", "rules", "slice")

    def __init__(self, slice_: type, reducer: Reducer, rules: SliceRules) -> None:
        self.slice = slice_
        self.reducer = reducer
        self.rules = rules
        self.is_log = rules.kind == "log"
        self.is_plain_log = rules.is_plain_log

    def reduce(self, contents: Contents | None, event: object) -> Contents:
        """Return the slice with the event reduced into it.

        Raises `ReducerError` if the reducer raises or does not return a slice of the same class.
        """
        try:
            before = self.rules.empty() if contents is None else contents
            changed = self.reducer(before, event)
        except (Exception, GeneratorExit) as error:
            raise ReducerError(_name_of(self.reducer), event, error) from error
        if type(changed) is not type(before):
            wrong = TypeError(
                f"it returned {describe_kind(changed)}, not the slice: use slice.append or slice.replace"
            )
            raise ReducerError(_name_of(self.reducer), event, wrong)
        return changed


class Route:
    """All targets of one event type, grouped once instead of at every dispatch."""

    __slots__ = ("appends_to", "logs", "plain_logs", "reduced_logs", "state", "targets")

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = tuple(targets)
        self.state = tuple(target for target in targets if not target.is_log)
        self.logs = tuple(target for target in targets if target.is_log)
        self.plain_logs = tuple(target.slice for target in self.logs if target.is_plain_log)
        self.reduced_logs = tuple(target for target in self.logs if not target.is_plain_log)
        self.appends_to = self._only_appends_to()
        """The slice of the only target, if it is state without a key and events are simply appended to it; otherwise None."""

    def _only_appends_to(self) -> type | None:
        if len(self.targets) != 1:
            return None
        only = self.targets[0]
        simple = only.reducer is append and only.rules.key is None and not only.is_log
        return only.slice if simple else None


def reduce_into(state: Mapping[type, Contents], event: object, targets: Sequence[Target]) -> State:
    """Return the new slices of these targets. Raises `ReducerError` if a reducer fails."""
    return {target.slice: target.reduce(state.get(target.slice), event) for target in targets}


def _name_of(reducer: Reducer) -> str:
    return getattr(reducer, "__qualname__", repr(reducer))
