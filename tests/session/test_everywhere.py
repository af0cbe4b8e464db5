"""Subscriptions to the facts of every session in the process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from handrail import Prompt, ScriptedModel, ToolCall, tool
from handrail.errors import EventRefused
from handrail.events import CallAccepted, Emitted, Fact, ModelRequested, ToolInvoked, ToolStarted
from handrail.run import open_gate
from handrail.run.adapter import Adapter
from handrail.session import Dispatcher, Session
from handrail.session.bus import subscribe_everywhere


@tool(effect="pure")
async def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello, {name}."


def greeting() -> Adapter:
    return Adapter(ScriptedModel([ToolCall("greet", {"name": "Ada"}), "Done."]))


async def test_existing_and_new_sessions_are_heard_until_the_end():
    """Sessions that existed before and those created later are heard, each fact once, until the subscription ends."""
    before = Session()
    open_gate([greet], session=before)
    assert not before.dispatcher.listens_for(ToolInvoked)
    heard: list[ToolInvoked] = []
    stop = subscribe_everywhere(ToolInvoked, heard.append)
    await open_gate([greet], session=before).invoke("greet", {"name": "Ada"})
    await open_gate([greet]).invoke("greet", {"name": "Bo"})
    assert [fact.result.value for fact in heard] == ["Hello, Ada.", "Hello, Bo."]
    stop()
    assert not before.dispatcher.listens_for(ToolInvoked)
    await open_gate([greet], session=before).invoke("greet", {"name": "Cy"})
    assert len(heard) == 2


async def test_only_the_wanted_facts_are_created():
    """A subscription everywhere to one fact makes no other fact worth creating, nor what tools emit."""
    stop = subscribe_everywhere(ToolInvoked, lambda fact: None)
    dispatcher = Session().dispatcher
    assert dispatcher.listens_for(ToolInvoked)
    assert not any(dispatcher.listens_for(kind) for kind in (ToolStarted, ModelRequested, Emitted))
    stop()


async def test_details_are_created_for_their_listeners_only():
    """A run asks `matching` before it creates a detail, from its first call on. It has the listeners of the session and those everywhere."""
    before, heard = Session(), list[CallAccepted]()

    def wants(session: Session) -> bool:
        return bool(session.dispatcher.matching.get(CallAccepted, True))

    before.dispatcher.subscribe(Fact, lambda fact: None)
    assert not wants(before)
    assert not wants(Session())
    stop = subscribe_everywhere(CallAccepted, heard.append)
    assert all(wants(each) for each in (before, Session()))
    await open_gate([greet], session=before).invoke("greet", {"name": "Ada"})
    stop()
    assert not any(wants(each) for each in (before, Session()))
    end = before.dispatcher.subscribe(CallAccepted, heard.append)
    assert wants(before)
    await open_gate([greet], session=before).invoke("greet", {"name": "Bo"})
    assert [fact.arguments for fact in heard] == [{"name": "Ada"}, {"name": "Bo"}]
    end()
    assert not wants(before)


async def test_a_fact_that_is_forwarded_to_a_bus_is_heard_once():
    """A run whose events are forwarded to another dispatcher is heard once, and the bus has the event too."""
    heard: list[Any] = []
    forwarded: list[Any] = []
    bus = Dispatcher()
    bus.subscribe(ToolInvoked, forwarded.append)
    stop = subscribe_everywhere(ToolInvoked, heard.append)
    await greeting().evaluate(Prompt("p", "Greet.", tools=[greet]), "Hi", bus=bus, session=Session())
    stop()
    assert len(heard) == len(forwarded) == 1


async def test_a_listener_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture):
    """An error in a listener is logged, and neither the run nor other listeners notice."""
    heard: list[Any] = []

    def fail(fact: Fact) -> None:
        raise ValueError("broken")

    stops = [subscribe_everywhere(ToolInvoked, fail), subscribe_everywhere(ToolInvoked, heard.append)]
    result = await open_gate([greet]).invoke("greet", {"name": "Ada"})
    for stop in stops:
        stop()
    assert result.success
    assert len(heard) == 1
    assert "a subscriber to ToolInvoked raised" in caplog.text


def test_sessions_are_not_kept_alive():
    """A dispatcher that nobody uses any more is freed, although subscriptions reach it."""
    stop = subscribe_everywhere(ToolInvoked, lambda fact: None)
    gone = weakref.ref(Session().dispatcher)
    gc.collect()
    assert gone() is None
    stop()


@pytest.mark.parametrize("kind", [object, int, ToolCall, "ToolInvoked"])
def test_only_facts_are_delivered_everywhere(kind: Any):
    """A type that is no fact is refused, because tools' own events are not delivered everywhere."""
    with pytest.raises(EventRefused):
        subscribe_everywhere(kind, print)


@pytest.mark.parametrize("listener", [None, "later"])
def test_a_listener_must_be_a_plain_function(listener: Any):
    """What can't be called when a fact is published is refused."""

    async def later(fact: ToolInvoked) -> None: ...

    refused: Any = later if listener else None
    with pytest.raises(EventRefused):
        subscribe_everywhere(ToolInvoked, refused)
