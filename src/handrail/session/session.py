"""`Session`: typed state, made of events that are reduced into slices. It can be forked, committed and restored."""

from __future__ import annotations

import logging
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast, get_args

from handrail.concurrency.claims import Claims
from handrail.errors import DefinitionError, ReducerError, SessionError
from handrail.events import ApprovalRemembered, ApprovalRevoked, Fact
from handrail.ids import NewId, check_id, random_id
from handrail.protocols import DecisionBook, RunMode, Slice
from handrail.schema.immutability import read_only
from handrail.session.bus import (
    SLOW,
    Dispatcher,
    Listener,
    check_event,
    check_unchangeable,
    subscriber_raised,
)
from handrail.session.fork import SessionFork, Snapshot
from handrail.session.slices import (
    EMPTY,
    Log,
    Reducer,
    Route,
    SliceRules,
    State,
    Target,
    append,
    check_reducer,
    declare,
    is_only_logged,
    reduce_into,
    rules_of,
    slices_marked_for,
)
from handrail.text.spelling import checked_arguments

T = TypeVar("T")

log = logging.getLogger("handrail.session")

_NO_CONFIG: Mapping[str, Any] = read_only({})


@checked_arguments
class Session:
    """Typed state, divided into slices. A call works on a fork of it.

    - `session[Plan].latest()`, `.all()` and `.where(...)` read a slice. Later events do not change a slice that was read.
    - `session.dispatch(event)` reduces an event into every slice that handles it or, if a reducer fails, into none.
    - The cost of a fork or a snapshot does not depend on the amount of state.
    - Concurrent dispatches, from tasks and threads, lose no updates.

    Sessions of different principals have nothing in common, even if their ids are equal. Raises `DefinitionError` if the id or
    the principal is not a string of 1 to 512 printable characters.
    """

    closed = False
    """Always false, because only forks are closed. Forks check this attribute of their parent."""

    def __init__(
        self,
        *,
        id: str | None = None,
        principal: str = "local",
        config: Mapping[str, Any] | None = None,
        slices: Mapping[type, SliceRules] | None = None,
        run_mode: RunMode | None = None,
        dispatcher: Dispatcher | None = None,
        new_id: NewId = random_id,
    ) -> None:
        self._id = new_id() if id is None else id
        check_id("session id", self._id)
        check_id("principal", principal)
        self._principal = principal
        self._config: Mapping[str, Any] = read_only(config) if config else _NO_CONFIG
        self._run_mode: RunMode | None = _checked_mode(run_mode)
        self._dispatcher = Dispatcher() if dispatcher is None else dispatcher
        self.lock = threading.RLock()
        self.claims = Claims((0, self._id), self.lock)
        """The calls that are committing to this session."""
        self.state: State = {}
        self._rules: dict[type, SliceRules] = dict(slices or {})
        self._logs: dict[type, list[Any]] = {}
        self._reduced_logs: State = {}
        self._routes: dict[type, Route] = {}
        self._recorders: dict[type, Callable[[Any], None]] = {}
        plain = type(self._dispatcher).publish is Dispatcher.publish
        self._told: dict[type, tuple[Listener, ...]] = self._dispatcher.matching if plain else {}
        self._checks: list[Callable[[object], None]] = []
        self._reducing = False
        self.prepared: tuple[SessionFork, ...] = ()
        """The forks that are about to be applied to this very state."""
        self.decisions: DecisionBook | None = None
        """The recorded decisions of this session, which outlive the process; None if decisions are not recorded."""
        self.call_ids: dict[str, int] = {}
        """The call ids and prefixes taken in this session, each with the number last used to make a unique id from it."""
        self.root: Any = None
        """The root conversation, which runs on this session share; None until the first run."""
        self.is_to_be_compacted = False
        """Whether the root conversation is to be compacted before its next request."""
        for kind, rules in self._rules.items():
            _check_rules(self._id, kind, rules)
            for each in (kind, *rules.reducers):
                declare(each)

    @property
    def id(self) -> str:
        return self._id

    @property
    def principal(self) -> str:
        return self._principal

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def run_mode(self) -> RunMode | None:
        """Who answers in this session's runs; None to use the environment's run mode."""
        return self._run_mode

    @property
    def dispatcher(self) -> Dispatcher:
        """The event bus on which the session publishes."""
        return self._dispatcher

    @property
    def is_new(self) -> bool:
        """Whether the session has neither state nor logs yet."""
        return not (self.state or self._logs or self._reduced_logs)

    # Reads and dispatches.

    def __getitem__(self, kind: type[T], /) -> Slice[T]:
        return self.slice_in(self.state, kind)

    def dispatch(self, event: object, /) -> None:
        """Reduce an event into its slices and publish it. If a reducer raises, nothing is changed or published.

        Raises `ReducerError` if a reducer fails, and `EventRefused` if the event is not valid.
        """
        route = self.route_of(event)
        lock = self.lock
        lock.acquire()
        try:
            self.state = self.take(self.state, event, route)
            for prepared in self.prepared:
                prepared.meanwhile.append(event)
        finally:
            lock.release()
        self._dispatcher.publish(event)

    def record(self, fact: object) -> None:
        """Log a fact and publish it.

        If a reducer raises, its error is logged. The fact is then kept only in logs that have neither a key nor reducers, and
        is still published.
        """
        kind = type(fact)
        try:
            keep, listeners = self._recorders[kind], self._told[kind]
        except KeyError:
            self._recorder_of(fact)(fact)
            self._dispatcher.publish(fact)
            return
        keep(fact)
        monotonic = (
            self._dispatcher.monotonic
        )  # the code of `publish`, inlined because this runs for every fact
        for listener in listeners:
            before = monotonic()
            try:
                listener(fact)
            except (Exception, CancelledError, GeneratorExit):
                subscriber_raised(fact)
            if (after := monotonic()) - before > SLOW:
                self._dispatcher.subscriber_blocked(listener, fact, before, after)

    def keep(self, fact: object) -> None:
        """Log a fact without publishing it."""
        keep = self._recorders.get(type(fact)) or self._recorder_of(fact)
        keep(fact)

    def redo(self, event: object) -> None:
        """Reduce an event that was committed before into its state slices, without publishing it. Logs are restored by `relog`."""
        route = self.route_of(event)
        with self.lock:
            self.state = {**self.state, **self.reduce(self.state, event, route.state)}

    def relog(self, event: object) -> None:
        """Add an event that was logged before to its logs, without publishing it. State is restored by `redo`.

        A fact is logged as `keep` logs it. Remembered decisions are left out, because they have a record of their own.
        """
        if isinstance(event, Fact):
            if not isinstance(event, ApprovalRemembered | ApprovalRevoked):
                self.keep(event)
            return
        route = self.route_of(event)
        with self.lock:
            self._reduced_logs.update(self.reduce(self._reduced_logs, event, route.reduced_logs))
            for kind in route.plain_logs:
                self._logs.setdefault(kind, []).append(event)

    def register(self, slice_: type, *, on: type, reducer: Reducer) -> None:
        """Reduce events of type `on` into the slice of type `slice_` from now on. Events of a subclass of `on` are not included.

        Raises `DefinitionError` if `on` is not a type or the reducer is not a function, and `SessionError` if `slice_` is
        not a type.
        """
        check_reducer(on, reducer)
        with self.lock:
            rules = self.rules_for(slice_)
            rules = SliceRules(rules.kind, rules.key, {**rules.reducers, on: reducer})
            self._rules[slice_] = rules
            if slice_ in self._logs:
                self._reduced_logs[slice_] = rules.empty().replace(self._logs.pop(slice_))
            self._forget_routes()

    # Forks and snapshots.

    def fork(self, owner: str = "fork", /) -> SessionFork:
        """Return a working copy of this session. `commit()` merges it back, and `drop()` discards it."""
        state = self.state
        return SessionFork(self, self, owner, state, state)

    def snapshot(self) -> Snapshot:
        """Return the current state, without logs."""
        return Snapshot(self._id, self.state)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot's state. Logs are not rolled back.

        Raises `SessionError` for a snapshot of another session, and `DefinitionError` if a reducer calls this.
        """
        if snapshot.session_id != self._id:
            raise SessionError(
                self._id,
                f"the snapshot belongs to session {snapshot.session_id!r}",
                "Restore it into that session.",
            )
        with self.lock:
            self._refuse_in_reducer()
            self.state = cast(State, snapshot.state)
            self.prepared = ()

    def compact(self) -> None:
        """Compact the session's conversation before its next request, in the active run or else in the next one. Nothing of it is lost.

        What is asked for is not recorded before that. It is dropped if nothing can be left out. The conversations of nested
        runs are not compacted.
        """
        self.is_to_be_compacted = True

    # For forks, transactions and policies.

    def slice_in(self, state: State, kind: type[T]) -> Slice[T]:
        """Return the slice of this type in one of this session's states. All states share the same logs."""
        contents: Any = state.get(kind)
        if contents is None:
            contents = self._log_of(kind)
        return contents

    @property
    def rules(self) -> Mapping[type, SliceRules]:
        """The rules that this session itself defines, by slice type."""
        return dict(self._rules)

    def rules_for(self, slice_: type) -> SliceRules:
        """Return the rules of the slice of this type. Raises `SessionError` if the argument is not a type."""
        if not isinstance(slice_, type):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise SessionError(
                self._id, f"{slice_!r} is not a type", "Select a slice by its class: session[Plan]."
            )
        return self._rules.get(slice_) or rules_of(slice_)

    def check_each(self, check: Callable[[object], None]) -> None:
        """Call `check` with the first dispatched event of each type, before the event is reduced. `check` raises to refuse it.

        If it is refused, the next event of its type is checked too. If rules or checks are added later, each type is checked once
        more. Facts passed to `record` and `keep` are not checked.
        """
        with self.lock:
            if check not in self._checks:
                self._checks.append(check)
                self._forget_routes()

    def targets_of(self, event: object) -> tuple[Target, ...]:
        """Return the slices that an event goes into, with their reducers."""
        return self.route_of(event).targets

    def route_of(self, event: object) -> Route:
        """Return the route of an event. It is computed once for each type, and again after rules or checks were added.

        When the route is computed, the event is checked. Raises `EventRefused` if it is not valid.
        """
        try:
            return self._routes[type(event)]
        except KeyError:
            check_event(event)
            check_unchangeable(event)
            with self.lock:
                for check in self._checks:
                    check(event)
                route = self._routes[type(event)] = Route(self._targets_for(type(event)))
            return route

    def route_for(self, kind: type) -> Route:
        """Return the route for a type whose events were accepted before."""
        return self._routes.get(kind) or Route(self._targets_for(kind))

    def take(self, state: State, event: object, route: Route) -> State:
        """Reduce an event into its logs, and return the state with the event reduced into its other slices.

        The caller must hold the lock. Raises `ReducerError` if a reducer fails, and `DefinitionError` if a reducer calls this.
        If it raises, nothing has changed.
        """
        slice_ = route.appends_to
        if slice_ is not None and not self._reducing:
            contents = state.get(slice_)
            changed = state.copy()
            changed[slice_] = (EMPTY if contents is None else contents).append(event)
            return changed
        logs = self.reduce(self._reduced_logs, event, route.reduced_logs)
        changes = self.reduce(state, event, route.state)
        self._reduced_logs.update(logs)
        for kind in route.plain_logs:
            self._logs.setdefault(kind, []).append(event)
        return {**state, **changes} if changes else state

    def reduce(self, state: State, event: object, targets: Sequence[Target]) -> State:
        """Reduce an event into these slices, and return the new slices. The caller must hold the lock.

        Raises `ReducerError` if a reducer fails, and `DefinitionError` if a reducer calls this, by dispatching an event.
        """
        self._refuse_in_reducer()
        self._reducing = True
        try:
            return reduce_into(state, event, targets)
        finally:
            self._reducing = False

    def logs(self) -> Mapping[type, Slice[Any]]:
        """Return the current log slices by type."""
        with self.lock:
            return {**{kind: Log(items) for kind, items in self._logs.items()}, **self._reduced_logs}

    def load_slice(self, kind: type, items: Iterable[Any]) -> None:
        """Replace the items of a slice, without calling its reducers. This is used for loading."""
        rules = self.rules_for(kind)
        with self.lock:
            if rules.is_plain_log:
                self._logs[kind] = list(items)
                self._recorders.pop(kind, None)
            elif rules.kind == "log":
                self._reduced_logs[kind] = rules.empty().replace(items)
            else:
                self.state = {**self.state, kind: rules.empty().replace(items)}

    # Internals.

    def _log_of(self, kind: type) -> Any:
        rules = self.rules_for(kind)
        if rules.is_plain_log:
            return Log(self._logs.get(kind) or [])
        return self._reduced_logs.get(kind) or rules.empty()

    def _targets_for(self, kind: type) -> list[Target]:
        own = self.rules_for(kind)
        targets = [
            Target(slice_, rules.reducers[kind], rules)
            for slice_, rules in self._rules.items()
            if kind in rules.reducers
        ]
        targets += [
            Target(slice_, rules_of(slice_).reducers[kind], rules_of(slice_))
            for slice_ in slices_marked_for(kind)
            if slice_ not in self._rules
        ]
        if not targets or (own.kind == "log" and kind not in own.reducers):
            targets.append(Target(kind, append, own))
        return targets

    def _recorder_of(self, fact: object) -> Callable[[Any], None]:
        """Return the function that logs facts of this fact's type.

        The function appends to a list if such facts go only into their own log, and that log has neither a key nor reducers.
        """
        kind = type(fact)
        with self.lock:
            keep: Callable[[Any], None]
            route = None
            if self._rules or not is_only_logged(kind):
                check_event(fact)
                route = Route(self._targets_for(kind))
            if route is None or (route.plain_logs == (kind,) and len(route.targets) == 1):
                keep = self._logs.setdefault(kind, []).append
            else:
                keep = partial(self._record_reduced, route)
            self._recorders[kind] = keep
        return keep

    def _record_reduced(self, route: Route, fact: object) -> None:
        with self.lock:
            try:
                self.state = self.take(self.state, fact, route)
            except (ReducerError, DefinitionError):
                for kind in route.plain_logs:
                    self._logs.setdefault(kind, []).append(fact)
                log.exception("a reducer refused a %s that was recorded", type(fact).__name__)

    def _forget_routes(self) -> None:
        self._routes = {}
        self._recorders = {}

    def _refuse_in_reducer(self) -> None:
        if self._reducing:
            raise DefinitionError(
                "a reducer dispatched an event or restored a snapshot. Reducers must be pure: return the new slice, "
                "and dispatch from a tool."
            )


def _checked_mode(run_mode: RunMode | None) -> RunMode | None:
    if run_mode is not None and run_mode not in get_args(RunMode):
        raise DefinitionError(
            f"the session's run_mode is {run_mode!r}. Use 'user', 'agent', 'headless', or None for the environment's run mode."
        )
    return run_mode


def _check_rules(session: str, kind: object, rules: object) -> None:
    if not isinstance(kind, type) or not isinstance(rules, SliceRules):
        raise SessionError(
            session,
            f"slices contains {kind!r}: {rules!r}",
            "Pass a class and its rules: slices={Plan: SliceRules(key=...)}.",
        )
