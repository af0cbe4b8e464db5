"""The event bus: delivers published events to subscribers."""

from __future__ import annotations

import dataclasses
import logging
import threading
from asyncio import (
    CancelledError,
    _get_running_loop,  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
)
from collections import deque
from collections.abc import Callable, Iterable
from inspect import iscoroutinefunction
from typing import Any, TypeVar
from weakref import WeakSet

import msgspec
from pydantic import BaseModel

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.timers import timers_of
from handrail.errors import EventRefused
from handrail.events import Detail, Emitted, Fact

log = logging.getLogger("handrail.events")

MOST = 10_000
"""How many events may wait for one subscriber. Later ones are dropped."""


class OwnThread:
    """A subscriber whose events are queued, and delivered in order on a daemon thread.

    The thread exists only while events wait. If more than `MOST` wait, the newest are dropped, and a warning says so once.
    """

    __slots__ = ("_is_running", "_lock", "_name", "_waiting", "_warned", "listener")

    def __init__(self, listener: Callable[[Any], None], name: str) -> None:
        self.listener = listener
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[object] = deque()
        self._is_running = False
        self._warned = False

    def __call__(self, event: object) -> None:
        with self._lock:
            if len(self._waiting) >= MOST:
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "%d events wait for the subscriber %s; newer ones are dropped", MOST, self._name
                    )
                return
            self._waiting.append(event)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._deliver, name=f"handrail-{self._name}", daemon=True).start()

    def stop(self) -> None:
        """Drop the events that wait, because the subscription has ended."""
        with self._lock:
            self._waiting.clear()

    def _deliver(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                event = self._waiting.popleft()
            try:
                self.listener(event)
            except (Exception, CancelledError, GeneratorExit):
                log.exception("a subscriber to %s raised; the run goes on", type(event).__name__)


T = TypeVar("T")
FactT = TypeVar("FactT", bound=Fact)
Listener = Callable[[Any], None]


SLOW = 0.1
"""Seconds after which a subscriber counts as blocking."""
ALLOWANCE = 30.0
"""Seconds for which a subscriber may block event loops. What it has used is restored by `_RESTORED` seconds each second."""
_RESTORED = 0.1
_SAME_CLOCK = 1.0
"""Two clocks whose times differ by less than this many seconds count as the same clock."""


class Dispatcher:
    """Delivers events to subscribers immediately, on the publisher's thread, in the order of subscription.

    An error in a subscriber is logged and stops neither the others nor the run. A subscription to a
    type also receives events of its subclasses. If the subscribers change while an event is delivered, the change takes
    effect with the next event.

    An event that a tool emits is published inside an `Emitted`. Subscribers to `Emitted` or a base class of it, such as
    `object`, receive the `Emitted`. Then subscribers to the event's own type receive the event itself, which counts as
    the next event.

    A subscriber that blocks is named in a warning, once for each type of event. The time for which it blocks the event
    loop is charged neither to the timeout nor to the duration of any call. Once it has blocked an event loop for longer than
    `ALLOWANCE` seconds, its further events are delivered in order on a thread of its own, and hold nobody up. A subscriber
    that never returns can't be interrupted.
    """

    __slots__ = ("__weakref__", "_listeners", "_lock", "_warned", "matching", "monotonic")

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._listeners: list[_Subscription] = []
        self.matching: dict[type, tuple[Listener, ...]] = {}
        """The listeners for each type that was published or queried since the subscribers last changed, and for details."""
        self._lock = threading.Lock()
        self._warned: set[tuple[int, type]] = set()
        self.monotonic = clock.monotonic
        with _everywhere.lock:
            _everywhere.dispatchers.add(self)
            self.matching.update(_everywhere.details)

    def subscribe(self, kind: type[T], listener: Callable[[T], None], /) -> Callable[[], None]:
        """Call `listener` with every event of this type from now on. Returns a function that unsubscribes it.

        Raises `EventRefused` if `kind` is not a type that `isinstance` accepts, or if `listener` is an async function or
        not callable.
        """
        _check_subscription(kind, listener)
        subscription = _Subscription(kind, listener)
        with self._lock:
            self._listeners.append(subscription)
            self._forget()

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not subscription]
                self._forget()
            if isinstance(subscription.listener, OwnThread):
                subscription.listener.stop()

        return unsubscribe

    def publish(self, event: object, /) -> None:
        """Publish an event to its subscribers. Raises `EventRefused` for a class, or a value of a built-in type."""
        try:
            listeners = self.matching[type(event)]
        except KeyError:
            check_event(event)
            listeners = self._match(type(event))
        monotonic = self.monotonic
        for listener in listeners:
            before = monotonic()
            try:
                listener(event)
            except (Exception, CancelledError, GeneratorExit):
                subscriber_raised(event)
            if (after := monotonic()) - before > SLOW:
                self.subscriber_blocked(listener, event, before, after)

    def relay(self, event: object, /) -> None:
        """Publish an event that another dispatcher has published, to all but the listeners of `subscribe_everywhere`, which have had it."""
        with self._lock:
            listeners = self._own(type(event))
        self._deliver(event, listeners)

    def subscriber_blocked(self, listener: Listener, event: object, before: float, after: float) -> None:
        """Warn about a slow subscriber, once for each type of event.

        If an event loop with the same clock runs in this thread, also note the time that the loop lost.
        """
        if listener == self._unwrap:
            return  # `_unwrap` measures each subscriber that it calls
        loop = _get_running_loop()
        if loop is not None and abs(loop.time() - after) < _SAME_CLOCK:
            timers_of(loop).lost.add(before, after)
        if loop is not None:
            self._charge(listener, before, after)
        which = (id(listener), type(event))
        if which not in self._warned:
            self._warned.add(which)
            log.warning(
                "the subscriber %s took %.2f s for the event %s. Everything on its thread waited. The time is charged to no call. "
                "Do slow work in a thread or a task of its own.",
                _name_of(listener),
                after - before,
                type(event).__name__,
            )

    def _charge(self, listener: Listener, before: float, after: float) -> None:
        """Note the time for which a subscriber has blocked an event loop, and move it to its own thread if that is too long."""
        with self._lock:
            for each in self._listeners:
                if each.listener is listener and each.charge(before, after) > ALLOWANCE:
                    name = _name_of(listener)
                    each.listener = OwnThread(listener, name)
                    self.matching.clear()
                    log.error(
                        "the subscriber %s has blocked the event loop for more than %.0f s. From now on, it gets its events on a "
                        "thread of its own.",
                        name,
                        ALLOWANCE,
                    )

    def listens_for(self, kind: type) -> bool:
        """Return whether an event of this type could reach a subscriber, so that creating the event is worthwhile.

        For `Emitted`, any subscription counts, because the type of the event inside is not known yet.
        """
        listeners = self.matching.get(kind)
        return bool(self._match(kind) if listeners is None else listeners)

    def forget_matches(self) -> None:
        """Match the listeners again when the next event is published, because the subscriptions everywhere have changed."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        """Match again from the next event on, except for details, which hardly anybody hears. The caller must hold the lock."""
        self.matching.clear()
        if not any(issubclass(each.kind, Detail) for each in self._listeners):
            self.matching.update(_everywhere.details)

    def _match(self, kind: type) -> tuple[Listener, ...]:
        with self._lock:
            found = self._own(kind) if self._listeners else ()
            if _everywhere.subscriptions:
                found += _listening(_everywhere.subscriptions, kind)
            self.matching[kind] = found
        return found

    def _own(self, kind: type) -> tuple[Listener, ...]:
        """Return this dispatcher's own listeners for events of a type. The caller must hold the lock."""
        found = _listening(self._listeners, kind)
        if kind is Emitted and any(not issubclass(kind, each.kind) for each in self._listeners):
            found += (self._unwrap,)
        return found

    def _unwrap(self, emitted: Emitted) -> None:
        """Deliver a tool's event to the subscribers to its type, except those that receive the `Emitted` around it."""
        event = emitted.event
        with self._lock:
            listeners = [
                each.listener
                for each in self._listeners
                if isinstance(event, each.kind) and not issubclass(Emitted, each.kind)
            ]
        self._deliver(event, listeners)

    def _deliver(self, event: object, listeners: Iterable[Listener]) -> None:
        for listener in listeners:
            before = self.monotonic()
            try:
                listener(event)
            except (Exception, CancelledError, GeneratorExit):
                subscriber_raised(event)
            if (after := self.monotonic()) - before > SLOW:
                self.subscriber_blocked(listener, event, before, after)


def _name_of(listener: Listener) -> str:
    named: Any = getattr(listener, "func", listener)  # what a `functools.partial` calls
    name = getattr(named, "__qualname__", None) or type(named).__qualname__
    module = getattr(named, "__module__", None)
    return f"{module}.{name}" if module else name


def subscriber_raised(event: object) -> None:
    """Log the current exception, which a subscriber raised. The run is not affected."""
    log.exception("a subscriber to %s raised; the run goes on", type(event).__name__)


class _Subscription:
    """One subscription. Subscribing twice creates two of them, which end independently."""

    __slots__ = ("_at", "_used", "kind", "listener")

    def __init__(self, kind: type, listener: Listener) -> None:
        self.kind = kind
        self.listener = listener
        self._used = self._at = 0.0

    def charge(self, before: float, after: float) -> float:
        """Add a time for which the subscriber blocked a loop, and return how much of its allowance is used."""
        self._used = max(0.0, self._used - _RESTORED * (before - self._at)) + after - before
        self._at = after
        return self._used


def _listening(subscriptions: Iterable[_Subscription], kind: type) -> tuple[Listener, ...]:
    bound = Detail if issubclass(kind, Detail) else object
    return tuple(
        [
            each.listener
            for each in subscriptions
            if issubclass(kind, each.kind) and issubclass(each.kind, bound)
        ]
    )


class _Everywhere:
    """The subscriptions to all dispatchers of this process, and the dispatchers, which are not kept alive."""

    __slots__ = ("details", "dispatchers", "lock", "subscriptions")

    def __init__(self) -> None:
        self.subscriptions: tuple[_Subscription, ...] = ()
        self.details: dict[type, tuple[Listener, ...]] = dict.fromkeys(Detail.__subclasses__(), ())
        """The listeners everywhere for each kind of detail, so that a new session need not find out that there are none."""
        self.dispatchers: WeakSet[Dispatcher] = WeakSet()
        self.lock = threading.RLock()

    def use(self, subscriptions: tuple[_Subscription, ...]) -> None:
        """Use these subscriptions from the next event on. The caller must hold the lock."""
        self.subscriptions = subscriptions
        self.details = {kind: _listening(subscriptions, kind) for kind in self.details}
        for dispatcher in self.dispatchers:
            dispatcher.forget_matches()


_everywhere = _Everywhere()


def subscribe_everywhere(kind: type[FactT], listener: Callable[[FactT], None], /) -> Callable[[], None]:
    """Call `listener` with every fact of this type that any session of this process publishes. Returns a function that unsubscribes it.

    It is called after the subscribers of the session's dispatcher, as they are: on the publisher's thread, and its errors are logged.
    It must return at once. One that blocks is named in a warning, and is not moved to a thread of its own. Raises `EventRefused` as
    `Dispatcher.subscribe` does, and for a type that is no `Fact`: the events that tools emit are not delivered everywhere.
    """
    _check_subscription(kind, listener)
    if not issubclass(kind, Fact):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
        raise EventRefused(
            kind,
            "only facts are delivered everywhere",
            "Pass a class of `handrail.events`, such as `ToolInvoked`.",
        )
    subscription = _Subscription(kind, listener)
    with _everywhere.lock:
        _everywhere.use((*_everywhere.subscriptions, subscription))

    def unsubscribe() -> None:
        with _everywhere.lock:
            _everywhere.use(tuple(each for each in _everywhere.subscriptions if each is not subscription))

    return unsubscribe


def publish_everywhere(fact: Fact) -> None:
    """Deliver a fact that belongs to no session to the listeners of `subscribe_everywhere`."""
    for listener in _listening(_everywhere.subscriptions, type(fact)):
        try:
            listener(fact)
        except (Exception, CancelledError, GeneratorExit):
            subscriber_raised(fact)


def _check_subscription(kind: object, listener: object) -> None:
    if not isinstance(kind, type):
        raise EventRefused(
            kind, "only a type can be subscribed to", "Pass the event's class, or `object` for all."
        )
    try:
        issubclass(int, kind)
    except TypeError as error:
        raise EventRefused(
            kind, f"isinstance() does not work with {kind.__name__}: {error}", "Pass the event's own class."
        ) from None
    if not callable(listener) or iscoroutinefunction(listener):
        raise EventRefused(
            listener,
            "a subscriber must be a plain function that takes the event",
            "Pass a function defined with `def`, and start a task in it for anything that has to be awaited.",
        )


def check_unchangeable(event: object) -> None:
    """Raise `EventRefused` for a dataclass, Struct or model that is not frozen, since all forks share a session's events."""
    kind = type(event)
    frozen: bool | None = None
    if dataclasses.is_dataclass(kind):
        frozen = getattr(kind, "__dataclass_params__").frozen  # noqa: B009  # not in the type stubs
    elif isinstance(event, msgspec.Struct):
        frozen = event.__struct_config__.frozen
    elif isinstance(event, BaseModel):
        frozen = bool(event.model_config.get("frozen"))
    if frozen is False:
        raise EventRefused(
            event,
            "it is mutable, and a change after it was dispatched could not be undone",
            "Make it frozen: `@dataclass(frozen=True)`, `frozen=True` for a Struct or in a model's config.",
        )


def check_event(event: object) -> None:
    """Raise `EventRefused` for a class, or for a value of a built-in type, which does not say what happened."""
    if isinstance(event, type):
        raise EventRefused(event, f"{event.__name__} is a class, not an event", "Pass an instance of it.")
    if type(event).__module__ == "builtins":
        raise EventRefused(
            event,
            "it is a value of a built-in type, which does not say what happened",
            "Make it a frozen dataclass.",
        )
