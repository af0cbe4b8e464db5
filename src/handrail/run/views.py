"""The session, bus, approvals and cancel signal, as handlers and policies see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from handrail.concurrency.operation import Operation
from handrail.errors import EffectRefused, EventRefused
from handrail.events import ApprovalRemembered, Fact
from handrail.guard.remembered import remembered_in
from handrail.protocols import Slice
from handrail.run.call_log import dispatch_recorded
from handrail.run.current_call import entered
from handrail.session.slices import readable, shared

if TYPE_CHECKING:
    from handrail.run.call import Attempt

T = TypeVar("T")


class CallBus:
    """The event bus as a tool sees it. A tool can't publish Handrail's own facts."""

    __slots__ = ("_attempt",)

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def publish(self, event: object, /) -> None:
        """Publish an event, as `context.emit(event)` does. Raises `EventRefused` for one of Handrail's own facts."""
        self._attempt.home.check()
        if isinstance(event, Fact):
            raise reserved(event)
        self._attempt.emit(event)

    def subscribe(self, kind: type[T], listener: Callable[[T], None], /) -> Callable[[], None]:
        """Subscribe to events of one type. Returns a function that unsubscribes.

        The subscription ends with the call: the last event that it hears is the call's own end.
        """
        attempt = self._attempt
        attempt.home.check()
        stop = attempt.run.session.dispatcher.subscribe(kind, listener)
        held = attempt.run.subscriptions.setdefault(attempt, set())
        held.add(stop)

        def unsubscribe() -> None:
            stop()
            held.discard(stop)

        if attempt.home.closed:  # the call has ended since, and left this thread behind
            unsubscribe()
            if not held:
                attempt.run.subscriptions.pop(attempt, None)
            attempt.home.check()
        return unsubscribe

    def listens_for(self, kind: type, /) -> bool:
        """Return whether an event of this type could reach a subscriber. If not, the event need not be created."""
        return self._attempt.run.session.dispatcher.listens_for(kind)


def end_subscriptions(attempt: Attempt) -> None:
    """End the subscriptions that were made through the contexts of an attempt."""
    for stop in attempt.run.subscriptions.pop(attempt, ()):
        stop()


class CallSession:
    """The session as a tool sees it. Reads and dispatches go to the call's fork."""

    __slots__ = ("_attempt",)

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    @property
    def id(self) -> str:
        return self._attempt.run.session.id

    @property
    def principal(self) -> str:
        return self._attempt.run.session.principal

    @property
    def config(self) -> Mapping[str, Any]:
        return self._attempt.run.session.config

    @property
    def dispatcher(self) -> CallBus:
        return CallBus(self._attempt)

    def __getitem__(self, kind: type[T], /) -> Slice[T]:
        attempt = self._attempt
        attempt.check()
        found = attempt.open_transaction.session[kind]
        return found if kind in shared else readable(kind, found)

    def dispatch(self, event: object, /) -> None:
        """Reduce an event into the call's fork.

        Changes to state reach the session when the call commits. Additions to logs reach it immediately. Raises
        `EffectRefused` if the tool's effect allows no changes, and `EventRefused` for one of Handrail's own facts.
        """
        attempt = self._attempt
        attempt.check()
        if isinstance(event, Fact):
            raise reserved(event)
        transaction = attempt.open_transaction
        if not transaction.writable:
            raise EffectRefused(
                attempt.name,
                attempt.tool.effect,
                f"it may not dispatch {type(event).__name__}, which requires effect='staged'",
            )
        if attempt.run.journal is None:
            transaction.session.dispatch(event)
        else:
            dispatch_recorded(attempt, transaction.session, event)


class CallApprovals:
    """The run's approvals as a tool sees them, read-only."""

    __slots__ = ("_attempt",)

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    @property
    def mode(self) -> str | None:
        return self._attempt.run.people.mode

    def list(self) -> tuple[ApprovalRemembered, ...]:
        """Return the remembered decisions in force in this session."""
        self._attempt.check()
        return remembered_in(self._attempt.run.session)


class _CallListener:
    """Lets the signal of a call fire before the call is cancelled."""

    __slots__ = ("stop", "work")

    def __init__(self, attempt: Attempt) -> None:
        self.work = attempt
        self.stop = attempt.stop

    def is_cancelled_from_outside(self) -> bool:
        # Timers and tasks run in a copy of the context in which they were started, so `entered` shows whether this call started them.
        running = None if (found := entered.get()) is None else found()
        inside = running is not None and any(each is self.work for each in running.with_outer())
        return not inside and not self.work.stopped


class CallSignal:
    """Tells a handler whether its call, or a call around it, was cancelled or has run out of time.

    The signal fires one pass of the loop before the cancellation lands in an async handler, so that a task that
    waits for the signal can clean up. If the caller's own task is cancelled, the signal fires that early only if the
    handler read `context.signal` before it began to wait. Otherwise the signal fires when the cancellation has landed. If it is
    first read then, it can't tell a cancellation from outside from one by a timeout inside the handler, until that is over.
    """

    __slots__ = ("_attempt",)

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        for each in attempt.with_outer():
            scope = each.run.live.get(each)
            if scope is not None:
                scope.listen(_CallListener(each))
                if each.run.live.get(each) is not scope:
                    scope.ignore()  # the call has ended since, and left this thread behind

    @property
    def cancelled(self) -> bool:
        """Whether the call must stop. It stays true after the call, for a thread that outlives the call."""
        attempt = self._attempt
        return attempt.run.cancellation.cancelled or any(map(_is_stopped, attempt.with_outer()))

    def wait(self) -> Operation[None]:
        """Wait until the call must stop."""
        attempt = self._attempt
        attempt.home.check()
        return Operation(self._stopped, "signal.wait()", attempt.home)

    async def _stopped(self) -> None:
        if self.cancelled:
            return
        loop = asyncio.get_running_loop()
        stopped: asyncio.Future[None] = loop.create_future()
        wake = lambda: None if stopped.done() else stopped.set_result(None)  # noqa: E731  # it is only ever passed on
        forget = [each.on_stop(wake) for each in self._attempt.with_outer()]
        forget.append(self._attempt.run.cancellation.on_cancel(wake))
        try:
            await stopped
        finally:
            for each in forget:
                each()


def _is_stopped(attempt: Attempt) -> bool:
    return attempt.stopped or ((scope := attempt.run.live.get(attempt)) is not None and scope.landed)


def reserved(event: object) -> EventRefused:
    return EventRefused(event, "it is one of Handrail's own facts", "Publish an event class of your own.")
