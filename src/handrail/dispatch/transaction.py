"""Transactions: one call's forks of the session and of the forkable resources that it uses, committed together."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import msgspec

from handrail.errors import ContextExpired
from handrail.place import RUN, Place
from handrail.protocols import DurableFork, Fork, Forkable
from handrail.records import CallKey, WorkspaceDelta
from handrail.resources.startup_files import HasStartupFiles
from handrail.session import Session, SessionFork
from handrail.threads import forget_closed
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt


log = logging.getLogger("handrail.gate")


class Settled:
    """An external effect of a call, which a rollback must compensate or report."""

    __slots__ = ("call_id", "params", "place", "tool", "value", "what")

    def __init__(
        self,
        what: str,
        call_id: str,
        tool: Tool[Any, Any] | None = None,
        params: Any = None,
        value: Any = None,
        place: Place = RUN,
    ) -> None:
        self.what = what
        self.call_id = call_id
        self.tool = tool
        """The tool whose compensation undoes the effect; None if it can't be undone."""
        self.params = params
        self.value = value
        self.place = place
        """The compensated call's place in the run."""


@runtime_checkable
class RecordedFork(Protocol):
    """A durable fork of files that are recorded in the journal. It is committed by recording the call."""

    def delta(self) -> WorkspaceDelta | None:
        """Return the staged changes that the journal must record, or None if there are none."""
        ...

    def content(self, digest: str, /) -> bytes:
        """Return the staged bytes with this digest."""
        ...


NOTHING: list[Fork] = []


class Transaction(msgspec.Struct, eq=False):
    """The forks that one call works on. Each is created on first use.

    Inside another call's transaction, forks are made from that call's forks and are committed into them.
    """

    _root: Session
    owner: str
    """The call's name, for the forks' error messages."""
    writable: bool
    parent: Transaction | None = None
    settled: list[Settled] | None = None
    touched: list[Fork] = NOTHING
    """The forks created so far, with everything that the call has read or changed. A rollback drops them."""
    durable: list[DurableFork] | None = None
    """The forks whose changes outlive the process; None if there are none. They are applied first, because applying them may fail."""
    closed: bool = False
    commits_each: bool = False
    """Whether inner calls commit past this transaction, into its parent or the session, and stand even if this call fails."""
    kept: tuple[str, ...] = ()
    """The names of the calls that have committed past this transaction and changed something."""
    passed: tuple[Any, ...] = ()
    """The recorded changes of calls that have committed past this transaction, if an outer call may need them after a crash."""
    _session: SessionFork | None = None
    _forks: dict[int, Any] | None = None

    @property
    def session(self) -> SessionFork:
        """This call's fork of the session."""
        return self._session or self._fork_session()

    @property
    def around_inner(self) -> Transaction | None:
        """The transaction that inner calls fork from and commit into; None for the session and the resources themselves."""
        return self.parent if self.commits_each else self

    def _fork_session(self) -> SessionFork:
        with self._root.lock:
            self._check_open()
            if self._session is None:
                base = self._root if self.parent is None else self.parent.session
                self._session = base.fork(self.owner)
                self.touched = [*self.touched, self._session]
            return self._session

    def fork_of(self, resource: Forkable) -> Any:
        """Return this call's fork of a resource. Raises `ContextExpired` if a new one is needed and the call is over."""
        if self._forks is not None:
            fork = self._forks.get(id(resource))
            if fork is not None:
                return fork
        return self._fork_resource(resource)

    def made_fork_of(self, resource: object) -> Any:
        """Return this call's fork of a resource if the call has used it; otherwise None."""
        return None if self._forks is None else self._forks.get(id(resource))

    def _fork_resource(self, resource: Forkable) -> Any:
        with self._root.lock:
            self._check_open()
            forks = self._forks = self._forks or {}
            fork = forks.get(id(resource))
            if fork is None:
                base = resource if self.parent is None else self.parent.fork_of(resource)
                fork = forks[id(resource)] = base.fork(self.owner, writable=self.writable)
                self.touched = [*self.touched, fork]
                if self.parent is None and fork.is_durable:
                    self.durable = [*(self.durable or ()), fork]
            return fork

    @property
    def events(self) -> list[object]:
        """The state events of the call and of the inner calls that committed into it."""
        return [] if self._session is None else self._session.events

    def reads(self) -> list[str]:
        """Return the names of the slices and paths that the call read.

        An earlier call that changed one of them can no longer be undone.
        """
        return [place for fork in self.touched for place in fork.read_places()]

    def writes(self) -> list[str]:
        """Return the names of the slices and paths that the call changed."""
        return [place for fork in self.touched for place in fork.written_places()]

    def startup_files(self) -> list[tuple[str, str]]:
        """Return each changed startup file with the program that runs it, except files that may change without a separate approval.

        For an inner call this is empty, because its changes are part of the outer call's.
        """
        if self.parent is not None:
            return []  # approved with the outer call, once it is known which changes reach the folder
        forks = self.durable or ()
        return [file for fork in forks if isinstance(fork, HasStartupFiles) for file in fork.startup_files()]

    def file_diff(self) -> str:
        """Return the changes in the call's durable forks as text."""
        return "".join(fork.diff() or "" for fork in self.durable or ())

    def stale(self) -> tuple[str, ...]:
        """Return the names of everything that the call has read and others have changed since.

        Nothing counts as stale if inner calls commit separately, because each of them was checked.
        """
        if self.commits_each:
            return ()
        found: tuple[str, ...] = ()
        for fork in self.touched:
            places = fork.stale()
            if places:
                found = (*found, *places)
        return found

    def seal(self) -> None:
        """Make the forks of files refuse further changes, so that exactly the files that are shown now are applied later.

        The session's fork still accepts events.
        """
        for fork in self.touched:
            fork.seal()

    def prepare(self) -> None:
        """Close every fork and check that each can be applied. Raises the fork's error if one can't; nothing is applied then."""
        self.closed = True
        for fork in self.touched:
            fork.prepare()

    def apply(self) -> None:
        """Apply every fork, after `prepare`. If there are durable forks, use `apply_all` instead."""
        for fork in self.touched:
            fork.apply()

    def apply_all(self, key: CallKey) -> None:
        """Apply every fork, including durable ones. If one can't be applied, the durable ones are reverted."""
        self.stage(key)
        self.apply_durable()
        self.apply_others()
        self.confirm()

    def stage(self, key: CallKey, synced: bool = False) -> list[Mapping[str, Any]]:
        """Store what the durable forks are about to change, and return their manifests. Nothing is applied yet.

        With `synced`, what is stored survives a power cut.
        """
        staged = [fork.stage(key, synced=synced) for fork in self.durable or ()]
        return [manifest for manifest in staged if manifest is not None]

    def recorded_forks(self) -> list[RecordedFork]:
        """Return the staged forks that have changes and are committed by recording these in the journal."""
        forks = [fork for fork in self.durable or () if isinstance(fork, RecordedFork)]
        return [fork for fork in forks if fork.delta() is not None]

    def apply_durable(self, synced: bool = False) -> None:
        """Apply the durable forks.

        If this raises, none of them is applied, unless the error says otherwise. With `synced`, the result survives a
        power cut.
        """
        done: list[DurableFork] = []
        try:
            for fork in self.durable or ():
                fork.apply(synced=synced)
                done.append(fork)
        except BaseException:
            self._revert(done)
            raise

    def apply_others(self) -> None:
        """Apply the other forks. If one fails, the durable ones are reverted. Call `confirm` afterwards."""
        durable = self.durable or []
        try:
            for fork in self.touched:
                if fork not in durable:
                    fork.apply()
        except BaseException:
            self._revert(durable)
            raise

    def confirm(self) -> None:
        """Finish the durable forks. Their changes can no longer be reverted."""
        for fork in self.durable or ():
            fork.applied()

    def _revert(self, forks: list[DurableFork]) -> None:
        for fork in reversed(forks):
            fork.revert()

    def publish(self) -> None:
        """Publish the call's state events, if they have been committed into the session itself."""
        if self._session is not None:
            self._session.publish()

    def drop(self) -> None:
        """Discard the changes in the call's forks, and release them. If dropping one fails, the others are still dropped."""
        with self._root.lock:
            self.closed = True
            forks, self.touched, self.durable = self.touched, NOTHING, None
            self._session = self._forks = None
        for fork in forks:
            try:
                fork.drop()
            except Exception:
                log.exception("dropping a fork of %s failed", self.owner)

    def _check_open(self) -> None:
        if self.closed:
            raise ContextExpired(self.owner)

    def settle(self, done: Settled) -> None:
        """Note an external effect, for a rollback of this transaction."""
        if self.settled is None:
            self.settled = []
        self.settled.append(done)

    def let_past(self, name: str, changed: bool, records: Iterable[Any]) -> None:
        """Note an inner call that has committed past this transaction, and refresh this call's fork of the session, if there is one."""
        if changed:
            self.kept += (name,)
        self.passed += tuple(records)
        if self._session is not None:
            self._session.refresh()

    def inherit(self, inner: Transaction) -> None:
        """Take over the effects of an inner transaction that has committed into this one."""
        for done in inner.settled or ():
            self.settle(done)


def new_transaction(attempt: Attempt, tool: Tool[Any, Any]) -> Transaction:
    """Create the transaction of one attempt at a call, inside the outer call's transaction if there is one.

    Raises `ContextExpired` if the attempt was undone.
    """
    if attempt.is_undone:
        raise ContextExpired(attempt.call.id)
    outer = attempt.call.parent
    parent = None if outer is None or outer.is_undone else outer.open_transaction.around_inner
    return Transaction(attempt.frame.session, attempt.call.name, tool.writes, parent)


def note_past(attempt: Attempt, changed: bool, *records: Any, name: str = "") -> None:
    """Tell the calls around a committed call that it has committed past their transactions.

    `records` are its recorded changes, which the calls around it record too, unless it has committed into the session.
    `name` is the name that they note; by default, it is the name of the call.
    """
    outer, into = attempt.parent, attempt.open_transaction.parent
    assert outer is not None, "only an inner call commits past another"
    for around in outer.with_outer():
        if around.transaction is None or around.transaction is into:
            return
        around.transaction.let_past(name or attempt.name, changed, records if into is not None else ())


def key_of(attempt: Attempt, journal: str = "") -> CallKey:
    """Return the key of a call's commit. `journal` is the id of the journal that records it; "" if none does."""
    call = attempt.call
    return CallKey(call.id, attempt.run_context.request_id, str(call.place), journal)


# --- one commit at a time ----------------------------------------------------------------------------

_WAIT = 0.001
"""Seconds to wait before trying again to take a lock that another event loop holds."""


class CommitLock:
    """A lock that allows only one commit to a session at a time.

    It is fair among the tasks of one event loop, but not between loops.
    """

    def __init__(self) -> None:
        self._between_loops = threading.Lock()
        self._within: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._held: asyncio.Lock
        """The lock of the loop whose task holds this one."""

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        within = self._within.get(loop)
        if within is None:
            forget_closed(self._within)
            within = self._within[loop] = asyncio.Lock()
        await within.acquire()
        try:
            while not self._between_loops.acquire(blocking=False):
                await asyncio.sleep(_WAIT)
        except BaseException:
            within.release()
            raise
        self._held = within

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        within = self._held
        self._between_loops.release()
        within.release()


_locks: WeakKeyDictionary[Session, CommitLock] = WeakKeyDictionary()


def commit_lock_of(session: Session) -> CommitLock:
    """Return the session's commit lock, which all callers share."""
    lock = _locks.get(session)
    if lock is None:
        lock = _locks.setdefault(session, CommitLock())
    return lock
