"""Routes: the slices that events of one type go into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from handrail.errors import ReducerError
from handrail.session.items import Items
from handrail.session.slices import Contents, Reducer, SliceRules, append

State = dict[type, Contents]
"""The slices by type. Never modified once a session or fork has it; a change creates another."""

EMPTY: Items[object] = Items()


class Target:
    """One slice that an event goes into, and its reducer."""

    __slots__ = ("is_log", "is_plain_log", "reducer", "rules", "slice")

    def __init__(self, slice_: type, reducer: Reducer, rules: SliceRules) -> None:
        self.slice = slice_
        self.reducer = reducer
        self.rules = rules
        self.is_log = rules.kind == "log"
        self.is_plain_log = rules.is_plain_log

    def reduce(self, contents: Contents | None, event: object) -> Contents:
        """Return the slice with the event reduced into it. Raises `ReducerError`."""
        try:
            before = self.rules.empty() if contents is None else contents
            changed = self.reducer(before, event)
        except Exception as error:
            raise ReducerError(_name_of(self.reducer), event, error) from error
        if type(changed) is not type(before):
            wrong = TypeError(
                f"it returned a {type(changed).__name__}, not the slice: use slice.append or slice.replace"
            )
            raise ReducerError(_name_of(self.reducer), event, wrong)
        return changed


class Route:
    """All targets of one type of event, sorted once so that dispatching need not."""

    __slots__ = ("appends_to", "logs", "plain_logs", "reduced_logs", "state", "targets")

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = tuple(targets)
        self.state = tuple(target for target in targets if not target.is_log)
        self.logs = tuple(target for target in targets if target.is_log)
        self.plain_logs = tuple(target.slice for target in self.logs if target.is_plain_log)
        self.reduced_logs = tuple(target for target in self.logs if not target.is_plain_log)
        self.appends_to = self._only_appends_to()
        """The one state slice without a key that such events are merely appended to; else None."""

    def _only_appends_to(self) -> type | None:
        if len(self.targets) != 1:
            return None
        only = self.targets[0]
        simple = only.reducer is append and only.rules.key is None and not only.is_log
        return only.slice if simple else None


def reduce_into(state: Mapping[type, Contents], event: object, targets: Sequence[Target]) -> State:
    """Return the new slices of these targets. Raises `ReducerError` and changes nothing."""
    return {target.slice: target.reduce(state.get(target.slice), event) for target in targets}


def _name_of(reducer: Reducer) -> str:
    return getattr(reducer, "__qualname__", repr(reducer))
