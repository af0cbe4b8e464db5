"""`SessionFork`: a session's state as one call sees and changes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from handrail.concurrency.claims import WHOLE, WHOLE_READ, Places
from handrail.errors import Conflict, ContextExpired
from handrail.protocols import Slice
from handrail.session.bus import Dispatcher
from handrail.session.slices import State

if TYPE_CHECKING:
    from handrail.session.session import Session

T = TypeVar("T")


class SessionFork(msgspec.Struct, eq=False):
    """A working copy of a session, until it is committed or dropped.

    Reads see the parent's state as it was when the fork was made or last refreshed, plus the fork's own events. Logs
    are an exception: the whole session shares them. `commit` raises `Conflict` if others have changed a state slice
    that the fork has read. Otherwise it replays the fork's events onto the newest state. Once the fork is committed or
    dropped, reads and events raise `ContextExpired`, from any thread. `before` still works.
    """

    root: Session
    _parent: Any
    owner: str
    state: State
    _base: State
    events: list[object] = []
    """The fork's state events, including those of forks committed into it, in order."""
    _reads: set[type] = set()
    closed: bool = False
    _onto: State | None = None
    """The parent's state when this fork was prepared; None before that."""
    _merged: State | None = None
    _to_publish: bool = False
    meanwhile: list[object] = []
    """What was dispatched to the session itself since this fork was prepared."""

    @property
    def id(self) -> str:
        return self.root.id

    @property
    def principal(self) -> str:
        return self.root.principal

    @property
    def config(self) -> Mapping[str, Any]:
        return self.root.config

    @property
    def dispatcher(self) -> Dispatcher:
        return self.root.dispatcher

    def __getitem__(self, kind: type[T], /) -> Slice[T]:
        if self.closed:
            raise ContextExpired(self.owner)
        found = self.root.slice_in(self.state, kind)
        self._reads.add(kind)
        return found

    def before(self, kind: type[T], /) -> Slice[T]:
        """Return a slice as it was when this fork was made or last refreshed. A log is returned as it is now.

        This does not count as a read, and works on a closed fork too.
        """
        return self.root.slice_in(self._base, kind)

    def dispatch(self, event: object, /) -> None:
        """Reduce an event into this fork's state. Logs are shared by the whole session, and are written immediately.

        Raises `ContextExpired` if the fork is closed, `ReducerError` if a reducer fails, and `EventRefused` if the event is
        not valid.
        """
        root = self.root
        route = root.route_of(event)
        lock = root.lock
        lock.acquire()
        try:
            if self.closed:
                raise ContextExpired(self.owner)
            self.state = root.take(self.state, event, route)
            if route.state:
                self.events.append(event)
        finally:
            lock.release()
        if route.logs:
            root.dispatcher.publish(event)

    def redo(self, event: object) -> None:
        """Reduce an event that was recorded before into this fork's state. Its logs are restored with the session."""
        root = self.root
        route = root.route_of(event)
        with root.lock:
            if self.closed:
                raise ContextExpired(self.owner)
            self.state = {**self.state, **root.reduce(self.state, event, route.state)}
            self.events.append(event)

    def fork(self, owner: str = "fork", /) -> SessionFork:
        """Return a new fork, which commits into this one. Raises `ContextExpired` if this one is closed."""
        if self.closed:
            raise ContextExpired(self.owner)
        state = self.state
        return SessionFork(self.root, self, owner, state, state)

    def commit(self) -> None:
        """Commit everything into the parent. If this raises, the parent's state is unchanged.

        Raises `Conflict` and drops the fork if a slice that was read has changed. Raises `ContextExpired` if this fork or
        its parent is closed, and `ReducerError` if a reducer fails.
        """
        with self.root.lock:
            if self.closed or self._parent.closed:
                raise ContextExpired(self.owner)
            stale = self.stale()
            if stale:
                self.drop()
                raise Conflict(stale)
            self.prepare()
            self.apply()
        self.publish()

    # The `Fork` protocol, for transactions. The changes in a session's fork are its events.

    is_durable: ClassVar[bool] = False

    def places(self, *, reads: bool = True) -> Places:
        """Return what a commit of this fork claims: the whole session, because events may go into any slice."""
        return WHOLE if self.events else WHOLE_READ

    def seal(self) -> None:
        """Do nothing, because events are accepted until the fork is prepared."""

    def diff(self) -> str:
        """Return an empty string, because events are shown separately."""
        return ""

    def changed_paths(self) -> tuple[str, ...]:
        """Return no paths, because a session has no files."""
        return ()

    def file_changes(self) -> tuple[Any, ...]:
        """Return no file changes, because a session has no files."""
        return ()

    def read_places(self) -> list[str]:
        """Return the names of the slices that this fork or a fork of it has read."""
        return [f"slice {kind.__qualname__}" for kind in self._reads]

    def read_slices(self) -> set[type]:
        """Return the types of the state slices that this fork or a fork of it has read."""
        return {kind for kind in self._reads if self.root.rules_for(kind).kind != "log"}

    def count_as_read(self, kinds: Iterable[type]) -> None:
        """Count slices as read by this fork, because work that commits into it has read them elsewhere."""
        self._reads |= {*kinds}

    def written_places(self) -> list[str]:
        """Return the names of the slices that the fork's events change."""
        routes = (self.root.route_for(type(event)) for event in self.events)
        return sorted({f"slice {target.slice.__qualname__}" for route in routes for target in route.state})

    def stale(self) -> tuple[str, ...]:
        """Return the names of the slices that were read and that others have changed since this fork was made or last refreshed.

        Reads in forks of this fork count too.
        """
        now, base = self._parent.state, self._base
        if now is base:
            return ()
        return tuple(sorted(kind.__name__ for kind in self._reads if now.get(kind) is not base.get(kind)))

    def prepare(self) -> None:
        """Close the fork and compute its parent's new state, for `apply`.

        Raises `ContextExpired` if the fork or its parent is closed, and `ReducerError` if a reducer fails.
        """
        lock = self.root.lock
        lock.acquire()
        try:
            parent = self._parent
            if self.closed or parent.closed:
                raise ContextExpired(self.owner)
            self.closed = True
            now = parent.state
            self._merged = self.state if now is self._base else self._onto_newer(now)
            self._onto = now
            if parent is self.root:
                self.meanwhile = []
                parent.prepared = (*parent.prepared, self)
        finally:
            lock.release()

    def apply(self) -> None:
        """Make the prepared state the parent's state.

        Raises `ContextExpired` if nothing is prepared or the parent is closed. If the parent's state has changed since
        `prepare`, events may be reduced again, and `ReducerError` is raised if a reducer fails. If this method raises,
        nothing has changed.
        """
        lock = self.root.lock
        lock.acquire()
        try:
            merged, parent = self._merged, self._parent
            if merged is None or parent.closed:
                raise ContextExpired(self.owner)
            now = parent.state
            parent.state = merged if now is self._onto else self._before_others(merged, now)
            self._merged = None
            if parent is self.root:
                self._to_publish = True
                parent.prepared = ()  # the other forks were not prepared for this state
            else:
                parent.events.extend(self.events)
                parent._reads |= self._reads
        finally:
            lock.release()

    def publish(self) -> None:
        """Publish this fork's state events, if `apply` has added them to the root. Logged events were already published."""
        if self._to_publish:
            self._to_publish = False
            root = self.root
            for event in self.events:
                if not root.route_of(event).logs:
                    root.dispatcher.publish(event)

    def drop(self) -> None:
        """Discard the changes. Reads made in this fork still count as reads of the outer fork, if there is one."""
        with self.root.lock:
            self.closed = True
            self._merged = None
            if self._parent is not self.root:
                self._parent._reads |= self._reads
            elif self in self.root.prepared:
                self.root.prepared = tuple(fork for fork in self.root.prepared if fork is not self)

    def refresh(self) -> None:
        """Switch to the parent's newest state, unless this fork is closed or has events of its own."""
        with self.root.lock:
            if not self.closed and not self.events:
                self.state = self._base = self._parent.state

    def _before_others(self, merged: State, now: State) -> State:
        """Return the state in which this fork's events come before those that were dispatched since it was prepared.

        What this fork read was checked when it was prepared. If another fork was applied or a snapshot was restored since,
        this fork's events come last.
        """
        root = self.root
        if self._parent is not root or self not in root.prepared:
            return self._onto_newer(now)
        for event in self.meanwhile:
            merged = {**merged, **root.reduce(merged, event, root.route_for(type(event)).state)}
        return merged

    def _onto_newer(self, now: State) -> State:
        """Return a newer state with this fork's events replayed on top of it.

        A slice that nobody else has changed is copied from this fork. Events are reduced again only into the other slices.
        """
        root, base, mine = self.root, self._base, self.state
        merged = now.copy()
        for event in self.events:
            for target in root.route_for(type(event)).state:
                slice_ = target.slice
                if slice_ in mine and now.get(slice_) is base.get(slice_):
                    merged[slice_] = mine[slice_]
                else:
                    merged.update(root.reduce(merged, event, (target,)))
        return merged


class Snapshot(msgspec.Struct, frozen=True):
    """A session's state at one point in time, without logs. It can be restored into the same session."""

    session_id: str
    state: Any
