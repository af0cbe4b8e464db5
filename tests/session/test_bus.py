"""The event bus: who receives which events, and how others are protected from a faulty subscriber."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import ToolContext, tool
from handrail.errors import EventRefused
from handrail.run import open_gate
from handrail.session import Dispatcher, Session


class Base(ABC):  # noqa: B024  # subscribers may name an abstract base
    """An abstract base class of events."""


@dataclass(frozen=True)
class One(Base):
    """An event whose class has an abstract base."""

    number: int = 0


@dataclass(frozen=True)
class Two(One):
    """An event that is also a `One`."""


@dataclass(frozen=True)
class Other:
    """An event that is not a `Base`."""


class HasNumber(Protocol):
    """A protocol that can't be checked at runtime."""

    number: int


class Member:
    """A class whose methods are listeners."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def hear(self, event: object) -> None:
        self.heard.append(event)

    async def hear_later(self, event: object) -> None:
        self.heard.append(event)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (object, [One(1), Two(2), Other()]),
        (Base, [One(1), Two(2)]),
        (One, [One(1), Two(2)]),
        (Two, [Two(2)]),
        (Other, [Other()]),
        (int, []),
    ],
)
def test_a_subscriber_hears_its_type_and_what_is_below(kind: type, wanted: list[object]):
    """A subscriber to a class, a base class, an abstract base or `object` receives all events of that type."""
    bus, heard = Dispatcher(), list[object]()
    bus.subscribe(kind, heard.append)
    for event in (One(1), Two(2), Other()):
        bus.publish(event)
    assert heard == wanted
    assert [bus.listens_for(type(event)) for event in (One(), Two(), Other())] == [
        type(event) in map(type, wanted) for event in (One(), Two(), Other())
    ]


def test_subscribers_are_told_in_the_order_they_came():
    """Subscribers are called in the order in which they subscribed, whether to the class or to a base."""
    bus, order = Dispatcher(), list[int]()
    for number, kind in enumerate((object, Two, Base, One)):
        bus.subscribe(kind, lambda event, n=number: order.append(n))
    bus.publish(Two())
    assert order == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "error", [ValueError("no"), RecursionError(), asyncio.CancelledError(), AssertionError(), GeneratorExit()]
)
def test_a_subscriber_that_raises_harms_nobody(error: BaseException, caplog: pytest.LogCaptureFixture):
    """If a subscriber raises, the error is logged with its traceback, and the publisher and the other subscribers continue."""
    bus, heard = Dispatcher(), list[object]()

    def bad(event: object) -> None:
        raise error

    bus.subscribe(One, heard.append)
    bus.subscribe(One, bad)
    bus.subscribe(One, heard.append)
    session = Session(dispatcher=bus)
    with caplog.at_level(logging.ERROR, "handrail.events"):
        for publish in (bus.publish, session.dispatch, session.record, session.record):
            publish(One(1))
    assert heard == [One(1)] * 8
    assert len(caplog.records) == 4
    for record in caplog.records:
        assert "a subscriber to One raised" in record.getMessage()
        assert record.exc_info
        assert record.exc_info[1] is error


def test_what_should_end_the_program_ends_it():
    """A `KeyboardInterrupt` in a subscriber reaches the publisher."""
    bus = Dispatcher()

    def interrupted(event: object) -> None:
        raise KeyboardInterrupt

    bus.subscribe(One, interrupted)
    with pytest.raises(KeyboardInterrupt):
        bus.publish(One())


def test_subscription_changes_take_effect_at_the_next_event():
    """Subscribing and unsubscribing inside a listener take effect at the next event."""
    bus, heard = Dispatcher(), list[str]()
    stop: list[Callable[[], None]] = []

    def first(event: One) -> None:
        heard.append(f"first {event.number}")
        if event.number == 1:
            for each in stop:
                each()
            bus.subscribe(One, lambda event: heard.append(f"new {event.number}"))

    stop.append(bus.subscribe(One, first))
    stop.append(bus.subscribe(One, lambda event: heard.append(f"second {event.number}")))
    bus.subscribe(One, lambda event: heard.append(f"third {event.number}"))
    bus.publish(One(1))
    assert heard == ["first 1", "second 1", "third 1"]
    bus.publish(One(2))
    assert heard[3:] == ["third 2", "new 2"]


def test_recorded_facts_reach_the_current_subscribers():
    """A recorded fact reaches the current subscribers through the dispatcher's `publish`, even if a subclass overrides it."""

    class Louder(Dispatcher):
        def publish(self, event: object, /) -> None:
            super().publish(event)
            super().publish(event)

    for bus, times in ((Dispatcher(), 1), (Louder(), 2)):
        session, heard = Session(dispatcher=bus), list[object]()
        session.record(One(1))
        end = bus.subscribe(Base, heard.append)
        session.record(One(2))
        session.record(One(3))
        end()
        session.record(One(4))
        assert heard == [One(2)] * times + [One(3)] * times


def test_the_same_listener_twice_is_two_subscriptions():
    """Subscribing a listener twice makes two subscriptions, and ending one of them twice does not end the other."""
    bus, member = Dispatcher(), Member()
    end = bus.subscribe(One, member.hear)
    bus.subscribe(One, member.hear)
    bus.publish(One(1))
    assert member.heard == [One(1), One(1)]
    end()
    end()
    bus.publish(One(2))
    assert member.heard == [One(1), One(1), One(2)]
    assert bus.listens_for(One)


def test_nobody_is_left_after_everyone_went():
    """`listens_for` is false after the last subscription has ended."""
    bus = Dispatcher()
    end = bus.subscribe(Base, print)
    assert bus.listens_for(Two)
    end()
    assert not bus.listens_for(Two)


@pytest.mark.parametrize(
    "event", ["text", b"", 1, 1.5, True, None, {}, [], (), set[int](), One, Base, object, print]
)
def test_plain_values_are_refused(event: object):
    """A value of a built-in type, or a class, is refused as an event, even if somebody subscribes to `object`."""
    bus, heard = Dispatcher(), list[object]()
    for _ in range(2):
        with pytest.raises(EventRefused, match=r"(Make it a frozen dataclass|Pass an instance)") as raised:
            bus.publish(event)
        assert raised.value.event is event
        bus.subscribe(object, heard.append)
    assert heard == []


@pytest.mark.parametrize(
    ("kind", "listener", "words"),
    [
        ("One", print, "Pass the event's class"),
        (One(1), print, "Pass the event's class"),
        (list[int], print, "Pass the event's class"),
        (HasNumber, print, "isinstance.. does not work with HasNumber"),
        (One, None, "Pass a function defined with `def`"),
        (One, Member().hear_later, "Pass a function"),
    ],
)
def test_wrong_subscriptions_are_refused_at_once(kind: Any, listener: Any, words: str):
    """An invalid subscription is refused when it is made, not at the first event."""
    bus = Dispatcher()
    with pytest.raises(EventRefused, match=words):
        bus.subscribe(kind, listener)
    bus.publish(One())


def test_events_from_many_threads_each_reach_everyone_once():
    """Many threads publish while other subscriptions begin and end, and each event reaches a subscriber exactly once."""
    bus, heard = Dispatcher(), list[One]()
    bus.subscribe(One, heard.append)

    def work(first: int) -> None:
        for number in range(first, first + 500):
            end = bus.subscribe(Base, lambda event: None)
            bus.publish(One(number))
            end()

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event.number for event in heard) == [1000 * n + i for n in range(8) for i in range(500)]


def test_an_event_reaches_everyone_subscribed_before_it():
    """An event reaches every listener that subscribed before its publication, even while another thread publishes."""
    bus, going = Dispatcher(), True

    def publish() -> None:
        while going:
            bus.publish(One(-1))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        for number in range(300):
            heard: list[One] = []
            end = bus.subscribe(One, heard.append)
            bus.publish(One(number))
            assert One(number) in heard
            end()
    finally:
        going = False
        thread.join()


@given(st.lists(st.tuples(st.sampled_from([object, Base, One, Two, Other]), st.booleans()), max_size=12))
def test_any_mixture_of_subscriptions_is_told_what_it_asked_for(wishes: list[tuple[type, bool]]):
    """In any mix of subscriptions, each receives exactly the events of its type that are published while it is active."""
    bus = Dispatcher()
    heard: list[list[object]] = [[] for _ in wishes]
    ends = [bus.subscribe(kind, heard[n].append) for n, (kind, _) in enumerate(wishes)]
    events: list[object] = [One(1), Two(2), Other()]
    for event in events:
        bus.publish(event)
    for end, (_, stays) in zip(ends, wishes, strict=True):
        if not stays:
            end()
    for event in events:
        bus.publish(event)
    for got, (kind, stays) in zip(heard, wishes, strict=True):
        assert got == [event for event in events if isinstance(event, kind)] * (2 if stays else 1)


@pytest.mark.parametrize("value", [{"a": 1}, "text", 3, None, ("a", 1), [1], One], ids=repr)
async def test_a_tool_may_publish_exactly_what_the_dispatcher_takes(value: object):
    """`emit` and `event_bus.publish` refuse plain values and classes, as the session's dispatcher does."""
    refused: list[type[Exception]] = []

    @tool
    async def tell(context: ToolContext) -> str:
        """Publish the value."""
        for publish in (Session().dispatcher.publish, context.emit, context.event_bus.publish):
            try:
                publish(value)
            except EventRefused as error:
                refused.append(type(error))
        return "told"

    session = Session()
    assert (await open_gate([tell], session=session).invoke("tell")).success
    assert refused == [EventRefused] * 3
