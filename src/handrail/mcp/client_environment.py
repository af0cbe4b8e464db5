"""`ClientEnvironment`: the environment of a call whose questions an MCP client's user answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.protocols import Environment, RunMode
from handrail.question import Answer, Question
from handrail.replay.parked_run import Parking

if TYPE_CHECKING:
    from handrail.mcp.calls import LiveCall


class ClientEnvironment(Environment):
    """The environment of a call whose questions the client's user answers."""

    run_mode: RunMode = "user"
    keeps_secrets = True

    def __init__(self, call: LiveCall) -> None:
        self._call = call
        self.parks = call.journal is not None

    async def ask(self, question: Question, /) -> Answer | None:
        return await self._call.ask(question)

    def run_started(self, parking: Parking) -> None:
        self._call.parking = parking

    def run_waiting(self, parking: Parking) -> None:
        self._call.rest()
