"""Transactions: one call's forks of the session and of the forkable resources that it uses, committed together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import msgspec

from handrail.concurrency.cancellation import shielded, unless_stopped
from handrail.concurrency.claims import (
    ADD,
    AT_ONCE,
    WHOLE,
    WHOLE_READ,
    WRITE,
    Claim,
    Claims,
    GaveUp,
    Pace,
    Places,
    Stop,
    Turns,
    claims_of,
    together,
)
from handrail.concurrency.threads import run_in_thread
from handrail.errors import ContextExpired, ResourceError
from handrail.events import BackgroundStarted
from handrail.journal.records import Amounts, CallKey, SpawnedRun, WorkspaceDelta
from handrail.protocols import DurableFork, Fork, Forkable
from handrail.resources.startup_files import HasStartupFiles
from handrail.run.limits import Reservation
from handrail.run.place import RUN, Place
from handrail.session import Session, SessionFork
from handrail.tools import EFFECTS, Tool

if TYPE_CHECKING:
    from handrail.run.call import Attempt


def _members(*protocols: type) -> tuple[str, ...]:
    return tuple(name for each in protocols for name in vars(each) if not name.startswith("_"))


_OF_ALL = (*_members(Fork), *_members(Forkable))
_OF_DURABLE = tuple(name for name in _members(DurableFork) if name not in _OF_ALL)

_STUBS: tuple[object, ...] = (
    *(Fork.stale, Fork.prepare, Fork.apply, Fork.drop),
    *(DurableFork.stage, DurableFork.apply, DurableFork.revert, DurableFork.applied),
)
"""Methods that the protocols only declare. A fork that inherits one would silently not do its work."""

complete: set[type] = set()
"""The classes whose forks have been found to have every member. They need not be checked again."""


def check_members(resource: object, fork: object) -> None:
    """Raise `ResourceError` if a custom resource's fork lacks a member that its calls need."""
    kind = type(fork)
    is_durable = getattr(fork, "is_durable", False)
    protocol = "DurableFork" if is_durable else "Fork"
    names = (*_OF_ALL, *_OF_DURABLE) if is_durable else _OF_ALL
    missing = [name for name in names if not hasattr(fork, name) or _is_stub(getattr(kind, name, None))]
    if missing:
        raise ResourceError(
            type(resource).__name__,
            f"fork() returned {kind.__name__}, which lacks {', '.join(missing)}",
            f"Derive {kind.__name__} from `handrail.protocols.{protocol}`, which has defaults for some, and define the others, "
            "as the page 'Resources of your own' of the docs shows.",
        )
    complete.add(kind)


def _is_stub(member: object) -> bool:
    return any(member is stub for stub in _STUBS)


log = logging.getLogger("handrail.gate")

T = TypeVar("T")


class Spawned(msgspec.Struct, frozen=True, eq=False):
    """A background run that a call begins when it commits."""

    begin: Callable[[], None]
    """Begins the run in this process, or tells that it was submitted. Called once the call has committed."""
    reserved: Reservation
    """The run's share of the budget."""
    record: SpawnedRun | None = None
    """The submission that the journal records with the call; None without a journal."""


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


@runtime_checkable
class SharedFork(Protocol):
    """A durable fork of something that other processes change too, which the claims of this process do not cover."""

    def enter(self, stop: Stop, *, keep: bool) -> None:
        """Claim what the fork read and changes, after waiting for other processes until `stop` returns True."""
        ...

    def others_committed(self) -> bool:
        """Return whether a call of any process may have committed since this fork was made."""
        ...


class Part(msgspec.Struct, eq=False):
    """One resource, or the session, that a call has forked."""

    fork: Any
    claims: Claims
    began: int
    """How many calls had committed to the resource when the fork was made."""
    claim: Any = None
    """The resource's own function that claims it across processes; None if it has none."""
    claim_key: str = ""
    """Where `claim` comes in the order in which calls of all processes take such claims."""


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
    spawned: tuple[Spawned, ...] = ()
    """The background runs that the call, and the inner calls that committed into it, begin."""
    touched: list[Fork] = NOTHING
    """The forks created so far, with everything that the call has read or changed. A rollback drops them."""
    durable: list[DurableFork] | None = None
    """The forks whose changes outlive the process; None if there are none. They are applied first, because applying them may fail."""
    closed: bool = False
    sealed: bool = False
    """Whether the forks of files refuse further changes."""
    judged: dict[int, list[str]] = {}
    """What policies have found out about the changes of a sealed transaction, by the policy's `id()`."""
    commits_each: bool = False
    """Whether inner calls commit past this transaction, into its parent or the session, and stand even if this call fails."""
    kept: tuple[str, ...] = ()
    """The names of the calls that have committed past this transaction and changed something."""
    passed: tuple[Any, ...] = ()
    """The recorded changes of calls that have committed past this transaction, if an outer call may need them after a crash."""
    is_serial: bool = True
    """Whether the call can commit only if what it has read is unchanged."""
    parts: tuple[Part, ...] = ()
    """Everything in `touched` that is committed to the session or a resource itself, in the order in which it is claimed."""
    only_read: bool = False
    """Whether the call has changed nothing, as far as is known once everything is claimed."""
    inner_turns: Turns | None = None
    inner_claims: Claims | None = None
    """The claims of the inner calls that take long to commit into this one; None if there was none."""
    _session: SessionFork | None = None
    _forks: dict[int, tuple[Any, Any]] | None = None
    """The fork of each resource, by the resource's `id()`, and what handlers and policies get of it; None until one is made."""

    @property
    def session(self) -> SessionFork:
        """This call's fork of the session."""
        return self._session or self._fork_session()

    @property
    def has_session(self) -> bool:
        """Whether the call has used the session."""
        return self._session is not None

    @property
    def around_inner(self) -> Transaction | None:
        """The transaction that inner calls fork from and commit into; None for the session and the resources themselves."""
        return self.parent if self.commits_each else self

    def _fork_session(self) -> SessionFork:
        with self._root.lock:
            self._check_open()
            if self._session is None:
                base = self._root if self.parent is None else self.parent.session
                began = self._root.claims.commits
                self._session = base.fork(self.owner)
                self.touched = [*self.touched, self._session]
                if self.parent is None:
                    self._add(Part(self._session, self._root.claims, began))
            return self._session

    def fork_of(self, resource: Forkable) -> Any:
        """Return this call's fork of a resource. Raises `ContextExpired` if a new one is needed and the call is over."""
        pair = None if self._forks is None else self._forks.get(id(resource))
        return (pair or self._fork_resource(resource))[0]

    def view_of(self, resource: Forkable) -> Any:
        """Return what the call's handler and policies get of its fork of a resource, which is the same object each time.

        Raises `ContextExpired` as `fork_of` does.
        """
        pair = None if self._forks is None else self._forks.get(id(resource))
        return (pair or self._fork_resource(resource))[1]

    def made_fork_of(self, resource: object) -> Any:
        """Return this call's fork of a resource if the call has used it; otherwise None."""
        pair = None if self._forks is None else self._forks.get(id(resource))
        return None if pair is None else pair[0]

    def _fork_resource(self, resource: Forkable) -> tuple[Any, Any]:
        with self._root.lock:
            self._check_open()
            forks = self._forks = self._forks or {}
            pair = forks.get(id(resource))
            if pair is None:
                base = resource if self.parent is None else self.parent.fork_of(resource)
                claims = claims_of(resource)
                began = claims.commits
                fork = base.fork(self.owner, writable=self.writable)
                if type(fork) not in complete:
                    check_members(resource, fork)
                view = getattr(fork, "handler_view", None)
                pair = forks[id(resource)] = fork, fork if view is None else view()
                self.touched = [*self.touched, fork]
                if self.parent is None:
                    claim = getattr(resource, "claim", None)
                    key = "" if claim is None else getattr(resource, "claim_key", type(resource).__qualname__)
                    self._add(Part(fork, claims, began, claim, key))
                    if fork.is_durable:
                        self.durable = [*(self.durable or ()), fork]
            return pair

    def _add(self, part: Part) -> None:
        self.parts = (*self.parts, part)
        if len(self.parts) > 1:
            self.parts = tuple(sorted(self.parts, key=_order))

    # --- many files ---------------------------------------------------------------------------------

    @property
    def is_large(self) -> bool:
        """Whether the call has touched so many files that going through them could stop the event loop."""
        for fork in self.touched:  # noqa: SIM110 (a loop costs less than `any`, and each commit asks several times)
            if fork.is_durable and getattr(fork, "is_large", False):
                return True
        return False

    def set_pace(self, pace: Pace) -> None:
        """Let work on all of the call's files proceed at this pace."""
        for fork in self._paced():
            fork.pace = pace

    def _paced(self) -> Iterator[Any]:
        """Iterate over the forks that may hold very many files: those of folders and workspaces."""
        return (fork for fork in self.touched if fork.is_durable and hasattr(type(fork), "is_large"))

    async def go_through(self, work: Callable[[], T]) -> T:
        """Do work that goes through everything the call has touched: in a thread if that is much, and here otherwise.

        If this task is cancelled meanwhile, waits until the work has stopped and then raises `CancelledError`.
        """
        if not self.is_large:
            return work()

        def begin(stop: Stop) -> T:
            self.set_pace(Pace(stop))
            try:
                value = work()
            finally:
                self.set_pace(AT_ONCE)
            if stop():
                raise GaveUp
            return value

        return await unless_stopped(begin)

    # --- claims -------------------------------------------------------------------------------------

    def lock(self) -> Sequence[Any] | None:
        """Take the locks of everything that the call touched, for a commit that does not wait, and return them.

        Returns None if the commit must claim everything instead: somebody else has a claim, or applying the changes may wait.
        """
        outer = self.parent
        if outer is not None:
            if self.is_large:
                return None
            self._root.lock.acquire()
            if outer.inner_claims is not None and outer.inner_claims.is_busy:
                self._root.lock.release()
                return None
            return (self._root.lock,)
        if self.durable is not None:
            return None
        locks: list[Any] = []
        for part in self.parts:
            lock = part.claims.lock
            lock.acquire()
            locks.append(lock)
            if part.claims.is_busy or part.claim is not None:
                for each in locks:
                    each.release()
                return None
        return locks

    async def claim(self, *, recorded: bool) -> HeldClaims:
        """Claim everything that the call read and changed. If it is `recorded`, also claim its session, whose calls are recorded in order.

        If this is cancelled or fails, nothing stays claimed.
        """
        held = HeldClaims()
        session = self._root.claims
        self.only_read = all(
            hasattr(part.fork, "places") for part in self.parts
        )  # a custom fork may ignore `writable`
        try:
            if recorded:
                await held.enter(session, WHOLE)
            for claims, places, has_changes in await self.go_through(self._all_places):
                self.only_read = self.only_read and not has_changes
                if not (recorded and claims is session):
                    await held.enter(claims, places)
            for part in sorted((part for part in self.parts if part.claim is not None), key=_outside_order):
                fork = part.fork
                await held.enter_outside(part.claim(fork.read_places(), fork.written_places()))
        except BaseException:
            await held.leave()
            raise
        return held

    async def claim_outer(self) -> HeldClaims:
        """Keep other inner calls from committing into the outer call. If this is cancelled, nothing stays claimed."""
        outer, held = self.parent, HeldClaims()
        assert outer is not None, "only an inner call commits into another"
        with self._root.lock:
            claims = outer.inner_claims = outer.inner_claims or Claims(lock=self._root.lock)
        await held.enter(claims, WHOLE)
        return held

    def _all_places(self) -> list[tuple[Claims, Places, bool]]:
        """Return what to claim, in order, and whether the call has changed any of it."""
        found: list[tuple[Claims, Places, bool]] = []
        for claims, parts in groupby(self.parts, _claims):
            # Resources that can't be told apart share their claims. A call that took them twice would wait for itself.
            places = together([self._places_of(part) for part in parts])
            found.append((claims, places, any(did & (ADD | WRITE) for did in places.values())))
        return found

    def _places_of(self, part: Part) -> Places:
        places = getattr(part.fork, "places", None)
        if places is not None:
            return places(reads=self.is_serial)
        return WHOLE if self.writable else WHOLE_READ

    def enter(self, stop: Stop, *, recorded: bool) -> None:
        """Claim what the call read and changed in folders that other processes change too. Call `stage` first. This blocks.

        What one commit without a record changes in one folder is checked when it is applied. What a call only read stays claimed
        no longer than the check takes, unless the call has changed something.
        """
        shared = [part.fork for part in self.parts if isinstance(part.fork, SharedFork)]
        for fork in shared:
            fork.enter(stop, keep=not self.only_read and (recorded or len(shared) > 1))

    def others_committed(self) -> bool:
        """Return whether other calls may have changed what this call touched since it began; True inside an outer call."""
        return self.parent is not None or any(map(_is_changed, self.parts))

    def turns(self) -> Turns:
        """Return the turns that calls which conflict with this one take."""
        if self.parent is not None:
            self.parent.inner_turns = self.parent.inner_turns or Turns()
            return self.parent.inner_turns
        changed = next((part for part in reversed(self.parts) if _is_changed(part)), None)
        return (self.parts[-1] if changed is None else changed).claims.turns

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
        self.sealed = True

    def prepare(self) -> None:
        """Close every fork and check that each can be applied. Raises the fork's error if one can't; nothing is applied then."""
        self.closed = True
        for fork in self.touched:
            fork.prepare()

    def apply(self) -> None:
        """Apply every fork, after `prepare`. If there are durable forks, use `apply_durable` and `apply_others` instead."""
        for fork in self.touched:
            fork.apply()
        self._count()

    async def apply_inside(self) -> None:
        """Apply every fork to the outer call's forks, after `prepare`. A thread applies those with many files."""
        large = [*self._paced()]

        def apply() -> None:
            for fork in large:
                fork.apply()

        await run_in_thread(apply)
        for fork in self.touched:
            if fork not in large:
                fork.apply()

    def _count(self) -> None:
        for part in self.parts:
            part.claims.commits += 1

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
        self._count()

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
            self.parts = ()
            spawned, self.spawned = self.spawned, ()
        for each in spawned:
            each.reserved.release()
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
        if inner.spawned:
            self.spawned, inner.spawned = (*self.spawned, *inner.spawned), ()

    def begin_spawned(self) -> None:
        """Begin the background runs of a call that has committed, and charge their shares, unless an outer call does."""
        if self.parent is None:
            spawned, self.spawned = self.spawned, ()
            for each in spawned:
                each.reserved.settle()
                each.begin()


class _Asked(msgspec.Struct):
    message: str


def stage_spawned(attempt: Attempt, transaction: Transaction, record: SpawnedRun) -> None:
    """Stage a background run that is submitted when the call is recorded. Raises `BudgetExceededError` if its share is not left."""
    run, parent = record.run, record.run.parent
    assert parent is not None, "a call begins it"
    message = msgspec.msgpack.decode(run.request, type=_Asked).message
    started = BackgroundStarted(run.id, run.prompt, message, parent.call_id, attempt.run_context)

    def begin() -> None:
        from handrail.run.questions import ask_here

        attempt.run.publish(started)
        ask_here(attempt, run.id)

    stage(attempt, transaction, parent.share, begin, record)


def stage(
    attempt: Attempt, into: Transaction, share: Amounts, begin: Callable[[], None], record: SpawnedRun | None
) -> None:
    """Reserve the share of a background run, and stage the run. Raises `BudgetExceededError` if the share is not left."""
    reserved = attempt.run.costs.tracker.reserve(**share)
    with attempt.run.session.lock:  # a handler's threads may each begin one
        into.spawned = (*into.spawned, Spawned(begin, reserved, record))


def new_transaction(attempt: Attempt, tool: Tool[Any, Any]) -> Transaction:
    """Create the transaction of one attempt at a call, inside the outer call's transaction if there is one.

    Raises `ContextExpired` if the attempt was undone.
    """
    if attempt.is_undone:
        raise ContextExpired(attempt.call.id)
    outer = attempt.call.parent
    parent = None if outer is None or outer.is_undone else outer.open_transaction.around_inner
    serial = EFFECTS[tool.effect].transactional
    return Transaction(attempt.run.session, attempt.call.name, tool.writes, parent, is_serial=serial)


def _order(part: Part) -> tuple[Any, ...]:
    return part.claims.order


def _claims(part: Part) -> Claims:
    return part.claims


def _outside_order(part: Part) -> tuple[Any, ...]:
    return part.claim_key, part.claims.order


def _is_changed(part: Part) -> bool:
    fork = part.fork
    if part.claim is not None:
        return True  # calls of other processes can't be told from anybody else
    return part.claims.commits != part.began or (isinstance(fork, SharedFork) and fork.others_committed())


class HeldClaims:
    """The claims that one call holds while it commits."""

    __slots__ = ("_entered", "_has_outside", "_outside")

    def __init__(self) -> None:
        self._entered: list[tuple[Claims, Claim]] = []
        self._outside = contextlib.AsyncExitStack()
        self._has_outside = False

    async def enter(self, claims: Claims, places: Places) -> None:
        claim = Claim(places)
        if not claims.try_enter(claim):
            await claims.enter(claim)
        self._entered.append((claims, claim))

    async def enter_outside(self, claim: contextlib.AbstractAsyncContextManager[Any]) -> None:
        """Take the claim that a resource offers across processes."""
        self._has_outside = True
        await self._outside.enter_async_context(claim)

    async def leave(self, *, but: Claims | None = None) -> None:
        """Give all claims up, in reverse order, except the claim on the session `but`."""
        if self._has_outside:
            try:
                await shielded(self._outside.aclose())
            except Exception:
                log.exception("giving up a resource's claim failed")
        entered, self._entered = self._entered, [each for each in self._entered if each[0] is but]
        for claims, claim in reversed(entered):
            if claims is not but:
                claims.leave(claim)


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
