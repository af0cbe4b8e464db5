"""Claims: which calls are committing to a resource, and which parts of it each of them read and changed.

A call claims everything that it read or changed before it checks that its reads still hold, and gives its claims up
once its changes are applied. Claims that clash are taken one after another, in the order in which they were asked for.
So no other commit comes between a call's check and its last change. Nobody holds a claim while a handler, a policy,
a model or a person is at work.

A call claims all parts of one resource at once, and several resources in the order of their `Claims.order`, so calls
never wait for each other in a circle. The claims that custom resources offer across processes come after those, in the
order of their names, because processes create their resources in different orders. The claims here cover one process. `handrail.resources.directory.claim_table` covers
the processes that use a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from handrail.concurrency.threads import is_on_loop

READ, USE, ADD, WRITE = 1, 2, 4, 8
"""What a call did with a place: it depends on what is there, needs the folder to stay, adds a name to the folder, or changes it."""

Places = Mapping[str, int]
"""What a call did with each place of a resource, as a sum of `READ`, `USE`, `ADD` and `WRITE`."""

WHOLE: Places = {"": WRITE}
"""Everything in a resource whose parts are not known."""
WHOLE_READ: Places = {"": READ}

_numbers = count(1)


class GaveUp(Exception):
    """Raised if a caller no longer wants to wait."""


Stop = Callable[[], bool]
"""A function that returns True once its caller no longer wants to wait."""


def never() -> bool:
    """Wait as long as it takes."""
    return False


def clash(one: Places, other: Places) -> str | None:
    """Return a place that two calls can't commit at the same time; None if there is none.

    Two calls may read a place, use a folder and add to a folder together, but whoever reads a folder's names excludes those who add to them.
    A change excludes everything else.
    """
    if len(other) < len(one):
        one, other = other, one
    for place, mine in one.items():
        theirs = other.get(place, 0)
        if theirs and (
            (mine | theirs) & WRITE or (mine & READ and theirs & ADD) or (mine & ADD and theirs & READ)
        ):
            return place
    return None


def together(each: Sequence[Places]) -> Places:
    """Return what one call did with each place through several forks."""
    if len(each) == 1:
        return each[0]
    places: dict[str, int] = {}
    for one in each:
        for place, did in one.items():
            places[place] = places.get(place, 0) | did
    return places


class Claim:
    """One call's claim on one resource."""

    __slots__ = ("grant", "places")

    def __init__(self, places: Places) -> None:
        self.places = places
        self.grant: Callable[[], object] | None = None
        """Called when a claim that had to wait is granted."""


class Claims:
    """The claims on one resource in this process. All methods may be called from any thread."""

    __slots__ = ("__weakref__", "_active", "_waiting", "commits", "lock", "order", "turns")

    def __init__(self, order: tuple[Any, ...] = (), lock: Any = None) -> None:
        self.order = (*(order or (1,)), next(_numbers))
        """Where this resource comes in the order in which a call claims several."""
        self.lock: Any = lock or threading.RLock()
        """Held while claims are entered and given up, and during a commit that needs no claim because it does not wait."""
        self.commits = 0
        """How many calls have committed to the resource in this process."""
        self.turns = Turns()
        self._active: list[Claim] = []
        self._waiting: list[Claim] = []

    @property
    def is_busy(self) -> bool:
        """Whether a call holds a claim or waits for one."""
        return bool(self._active)

    def blocked(self, places: Places) -> str | None:
        """Return a place that an active claim excludes others from; None if there is none."""
        with self.lock:
            return next(
                (found for each in self._active if (found := clash(each.places, places)) is not None), None
            )

    def try_enter(self, claim: Claim) -> bool:
        """Take a claim if nothing clashes with it, and return whether it was taken."""
        with self.lock:
            if self._must_wait(claim, self._waiting):
                return False
            self._active.append(claim)
            return True

    async def enter(self, claim: Claim) -> None:
        """Take a claim, after all clashing claims that were asked for before. If this is cancelled, nothing is claimed."""
        loop = asyncio.get_running_loop()
        with self.lock:
            if self.try_enter(claim):
                return
            granted: asyncio.Future[None] = loop.create_future()
            claim.grant = lambda: loop.call_soon_threadsafe(_set, granted)
            self._waiting.append(claim)
        try:
            await granted
        except BaseException:
            self.leave(claim)
            raise

    def enter_blocking(self, claim: Claim, seconds: float) -> bool:
        """Take a claim as `enter` does, while this thread waits. Returns False if it was not granted in time."""
        granted = threading.Event()
        with self.lock:
            if self.try_enter(claim):
                return True
            claim.grant = granted.set
            self._waiting.append(claim)
        if granted.wait(seconds):
            return True
        self.leave(claim)
        return False

    def leave(self, claim: Claim) -> None:
        """Give a claim up, or stop waiting for it. Then grant the claims that waited for it."""
        with self.lock:
            (self._active if claim in self._active else self._waiting).remove(claim)
            still: list[Claim] = []
            for each in self._waiting:
                if self._must_wait(each, still):
                    still.append(each)
                    continue
                try:
                    assert each.grant is not None, "a claim that waits has somebody to tell"
                    each.grant()
                except RuntimeError:  # its event loop is closed, so nobody waits for it any more
                    continue
                self._active.append(each)
            self._waiting = still

    def _must_wait(self, claim: Claim, before: list[Claim]) -> bool:
        return any(clash(each.places, claim.places) is not None for each in (*self._active, *before))


def _set(granted: asyncio.Future[None]) -> None:
    if not granted.done():
        granted.set_result(None)


class Turns:
    """Lets calls that conflicted with each other run again one after another.

    A turn is a courtesy, not a claim: calls that have not conflicted don't wait for it. A call that waits gives
    up once nobody has finished their turn for a while, because the handler whose turn it is may wait for that call.
    """

    __slots__ = ("_holder", "_lock", "_queue")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object = None
        self._queue: deque[tuple[object, Callable[[], object]]] = deque()

    async def take(self, who: object, seconds: float) -> bool:
        """Wait for a turn, and return whether `who` has it. Gives up when the same turn has lasted this long."""
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._holder is None or self._holder is who:
                self._holder = who
                return True
            self._queue.append((who, lambda: loop.call_soon_threadsafe(_set, granted)))
        try:
            while True:
                holder = self._holder
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(granted), seconds)
                if granted.done():
                    return True
                if self._holder is holder:
                    self.leave(who)
                    return False
        except BaseException:
            self.leave(who)
            raise

    def leave(self, who: object) -> None:
        """End a turn, or stop waiting for one. Harmless if there is none."""
        with self._lock:
            self._queue = deque(each for each in self._queue if each[0] is not who)
            if self._holder is not who:
                return
            self._holder = None
            while self._queue:
                self._holder, grant = self._queue.popleft()
                try:
                    grant()
                    return
                except RuntimeError:  # its event loop is closed
                    self._holder = None


_folders: WeakValueDictionary[tuple[int, int], Claims] = WeakValueDictionary()
_known: WeakKeyDictionary[Any, Claims] = WeakKeyDictionary()
_unknown = Claims()
"""The claims on all resources that can't be referred to weakly, or have no hash, such as dataclasses."""
_registry = threading.Lock()


def claims_of(resource: Any) -> Claims:
    """Return the claims on a resource: its own, if it has a member `claims`, or those that are kept here for it."""
    own = getattr(resource, "claims", None)
    if isinstance(own, Claims):
        return own
    with _registry:
        try:
            return _known.get(resource) or _known.setdefault(resource, Claims())
        except TypeError:
            return _unknown


def claims_on_folder(device: int, inode: int) -> Claims:
    """Return the claims on a folder, which all objects for this folder share."""
    with _registry:
        claims = _folders.get((device, inode))
        if claims is None:
            claims = _folders[device, inode] = Claims((2, device, inode))
        return claims


T = TypeVar("T")

SLICE = 256
"""How many entries of long work are handled before others get a turn. Work on fewer entries is done at once."""
_TURN = 0.0005
"""Seconds for which a lock is given up between two slices, so that a thread that waits for it can take it."""
_SECONDS = 1.0
"""Seconds before the progress of work is reported, and between two reports."""

Report = Callable[[str, float, float], object]
"""A function that is told what is done, how many entries of it are done, and how many there are. A thread calls it."""


class Pace:
    """How one piece of work goes through its entries: when it stops, and whom it tells how far it is."""

    __slots__ = ("_clock", "_report", "_told", "stop")

    def __init__(
        self, stop: Stop = never, report: Report | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.stop = stop
        self._report = report
        self._clock = clock
        self._told = 0.0 if clock is None else clock()

    def to_its_end(self) -> Pace:
        """Return a pace for the work that follows this one and must not stop. It reports like this one."""
        pace = Pace(report=self._report, clock=self._clock)
        pace._told = self._told
        return pace

    def each(self, entries: Collection[T], doing: str = "", *, lock: Any = None) -> Iterator[T]:
        """Yield the entries. After each slice of them, raise `GaveUp` if the work must stop.

        If `doing` says what is done, progress is reported about once a second. A `lock` that the caller holds, however often, is given
        up for a moment after each slice, so what it protects may change there. On an event loop, nobody gets a turn.
        """
        total = len(entries)
        if total <= SLICE:
            return iter(entries)
        return self._sliced(entries, doing, total, lock)

    def _sliced(self, entries: Collection[T], doing: str, total: int, lock: Any) -> Iterator[T]:
        for done, entry in enumerate(entries, 1):
            yield entry
            if not done % SLICE:
                self.turn(lock)
                self._tell(doing, done, total)

    def turn(self, lock: Any = None) -> None:
        """End a slice. Raises `GaveUp` if the work must stop."""
        if self.stop():
            raise GaveUp
        if lock is not None and not is_on_loop():
            threading.Condition(lock).wait(_TURN)  # gives up an `RLock` completely, and takes it again

    def _tell(self, doing: str, done: int, total: int) -> None:
        if doing and self._report is not None and self._clock is not None:
            now = self._clock()
            if now - self._told >= _SECONDS:
                self._told = now
                self._report(doing, done, total)


AT_ONCE = Pace()
"""A pace that neither stops nor reports."""
