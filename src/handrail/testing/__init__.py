"""Contexts, people, shells, clocks and recordings for testing applications that are built on Handrail."""

from handrail.testing.cassette import Cassette, CassetteError
from handrail.testing.contexts import (
    TICKET_KEY,
    Recorded,
    agent_context,
    cancel,
    expire,
    headless_context,
    recorded,
    user_context,
    worker_context,
)
from handrail.testing.notifications import RecordingSender
from handrail.testing.people import Agent, Nobody, Person, RecordingSubscriber, SimulatedPerson
from handrail.testing.resource_laws import check_resource
from handrail.testing.shells import FakeShell
from handrail.testing.virtual_time import VirtualClock, VirtualTimeLoop, run_virtual

__all__ = [
    "TICKET_KEY",
    "Agent",
    "Cassette",
    "CassetteError",
    "FakeShell",
    "Nobody",
    "Person",
    "Recorded",
    "RecordingSender",
    "RecordingSubscriber",
    "SimulatedPerson",
    "VirtualClock",
    "VirtualTimeLoop",
    "agent_context",
    "cancel",
    "check_resource",
    "expire",
    "headless_context",
    "recorded",
    "run_virtual",
    "user_context",
    "worker_context",
]
