"""The event bus: facts on their way to whoever subscribed."""

from __future__ import annotations

import dataclasses
import logging
import threading
from asyncio import CancelledError
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from handrail.errors import EventRefused

T = TypeVar("T")
Listener = Callable[[Any], None]

log = logging.getLogger("handrail.events")


class Dispatcher:
    """Publishes events to subscribers, in the order they subscribed, at once and on this thread.

    A subscriber that raises is logged and neither stops the others nor the run. `subscribe` takes a
    type and gets its subclasses too; `subscribe(object, ...)` gets everything. Whoever comes or goes
    while an event is published is heard from the next event on.
    """

    __slots__ = ("_listeners", "_lock", "matching")

    def __init__(self) -> None:
        self._listeners: list[_Subscription] = []
        self.matching: dict[type, tuple[Listener, ...]] = {}
        """Who is to be told of each type, as far as it was asked; emptied when anybody comes or goes."""
        self._lock = threading.Lock()

    def subscribe(self, kind: type[T], listener: Callable[[T], None], /) -> Callable[[], None]:
        """Call `listener` with every event of that type; call what is returned to stop."""
        _check_subscription(kind, listener)
        subscription = _Subscription(kind, listener)
        with self._lock:
            self._listeners.append(subscription)
            self.matching.clear()

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not subscription]
                self.matching.clear()

        return unsubscribe

    def publish(self, event: object, /) -> None:
        """Tell every subscriber. Only typed objects are events; a bare dict or text is refused."""
        try:
            listeners = self.matching[type(event)]
        except KeyError:
            check_event(event)
            listeners = self._match(type(event))
        for listener in listeners:
            try:
                listener(event)
            except (Exception, CancelledError):
                subscriber_raised(event)

    def listens_for(self, kind: type) -> bool:
        """Is anybody interested in this type? Then it is worth making one."""
        listeners = self.matching.get(kind)
        return bool(self._match(kind) if listeners is None else listeners)

    def _match(self, kind: type) -> tuple[Listener, ...]:
        with self._lock:
            found = tuple(each.listener for each in self._listeners if issubclass(kind, each.kind))
            self.matching[kind] = found
        return found


def subscriber_raised(event: object) -> None:
    """Log what is being handled: a subscriber's error is nobody else's."""
    log.exception("a subscriber to %s raised; the run goes on", type(event).__name__)


class _Subscription:
    """One listener's wish. The same wish twice is two, and each ends by itself."""

    __slots__ = ("kind", "listener")

    def __init__(self, kind: type, listener: Listener) -> None:
        self.kind = kind
        self.listener = listener


def _check_subscription(kind: object, listener: object) -> None:
    if not isinstance(kind, type):
        raise EventRefused(
            kind, "a subscription is for a type", "Give the event's class, or `object` for all."
        )
    try:
        issubclass(int, kind)
    except TypeError as error:
        raise EventRefused(
            kind, f"nothing can be told to be a {kind.__name__}: {error}", "Give the event's own class."
        ) from None
    if not callable(listener) or iscoroutinefunction(listener):
        raise EventRefused(
            listener,
            "a subscriber is a plain function, called with the event",
            "Give a `def` that takes it; start a task in there for what has to be awaited.",
        )


def check_unchangeable(event: object) -> None:
    """What a session keeps is shared by every fork of it, so it must not change afterwards."""
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
            "it can be changed after it was dispatched, and then nothing could be undone",
            "Make it frozen: `@dataclass(frozen=True)`, `frozen=True` for a Struct or in a model's config.",
        )


def check_event(event: object) -> None:
    """An event is an object of a class of its own, so that somebody can ask for it by type."""
    if isinstance(event, type):
        raise EventRefused(event, f"{event.__name__} is a class, not an event", "Make an instance of it.")
    if type(event).__module__ == "builtins":
        raise EventRefused(
            event, "it is a plain value, and nobody could ask for it by type", "Make it a frozen dataclass."
        )
