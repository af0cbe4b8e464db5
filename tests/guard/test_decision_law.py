"""A session's questions, decisions and results are the same whether or not its process restarts between steps."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from handrail import (
    Adapter,
    CapabilityPolicy,
    LaterEnvironment,
    PathArg,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    runs,
    tool,
)
from handrail.errors import QuestionCancelled, RunParked
from handrail.guard import ApprovalMemory, approvals_of
from handrail.messages import AssistantMessage, ModelRequest, ToolMessage
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.testing import VirtualClock, run_virtual
from handrail.tools import RunMode
from support.parked_runs import answer_to


@tool(effect="idempotent", capabilities={"fs.write"})
async def put(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
    """Put something at a path."""
    return f"put {path}"


@tool(effect="idempotent", capabilities={"fs.write"})
async def build(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
    """Build something at a path. The handler asks two questions and requests a permission between them."""
    assert context.wait_for
    await context.wait_for("begin", {"path": path}, bool)
    allowed = await context.request_permission("net")
    await context.wait_for("end" if allowed.approved else "give up", {"path": path}, bool)
    return f"built {path} {allowed.approved}"


@tool(effect="idempotent", capabilities={"fs.write"})
async def unlock(password: SecretStr, context: ToolContext) -> str:
    """Unlock something with a password that is not shown to the person."""
    return "unlocked"


PROMPT: Prompt[None] = Prompt(
    "law",
    "Do it.",
    tools=[put, build, unlock],
    policies=[CapabilityPolicy({"fs.write": "ask"}, effects={"idempotent": "allow"})],
)
CALLS = [
    *(ToolCall(name, {"path": path}) for name in ("put", "build") for path in ("docs/a", "docs/b", "src/c")),
    *(ToolCall("unlock", {"password": password}) for password in ("hunter2", "hunter3")),
]


@dataclass(frozen=True)
class Say:
    """A person's answer to an open question, or the revocation of a decision if `approved` is None."""

    which: int
    approved: bool | None
    remember: Literal["once", "exact", "scope"] = "once"


@dataclass(frozen=True)
class Turn:
    """One run of the session: its concurrent calls and the person's answers."""

    calls: Sequence[ToolCall]
    says: Sequence[Say]
    approve_all: bool = False


says = st.builds(
    Say,
    st.integers(0, 7),
    st.sampled_from([True, True, False, False, None]),
    st.sampled_from(["once", "exact", "scope", "scope"]),
)
turns = st.builds(
    Turn,
    st.lists(st.sampled_from(CALLS), min_size=1, max_size=3),
    st.lists(says, max_size=6),
    st.sampled_from([False, False, True]),
)


class Desk(Environment):
    """An environment whose person never answers: all answers are given through the journal."""

    run_mode: RunMode = "user"

    async def ask(self, question: Question, /) -> Answer:
        await asyncio.Event().wait()
        raise QuestionCancelled(question.name)


class World:
    """A session and its journal, with a record of what can be observed from outside."""

    def __init__(self, base: Path) -> None:
        self.path = base / "runs.db"
        self.clock = VirtualClock()
        self.journal = self.open()
        self.turn = Turn((), ())
        self.seen: list[Any] = []

    def open(self) -> SqliteJournal:
        return SqliteJournal(self.path, clock=self.clock, watch=None, inline=True)

    def model(self) -> ScriptedModel:
        def says(request: ModelRequest) -> Any:
            said = [each for each in request.messages if isinstance(each, AssistantMessage)]
            return "done" if len(said) % 2 else self.turn.calls

        return ScriptedModel(says)

    def given(self) -> Any:
        return {"approvals": "approve_all" if self.turn.approve_all else None}

    async def go(self, number: int, turn: Turn) -> None:
        """Play one run from start to end."""
        self.turn = turn
        run_id = f"run{number}"
        await self.begin(run_id)
        left = list(turn.says)
        while True:
            memory = await self.memory()
            asked = sorted(await self.journal.questions.open(run_id), key=lambda each: each.id)
            self.seen.append([each.id for each in asked])
            self.seen.append([(each.id.rpartition("-")[0], each.scope, each.approved) for each in memory])
            if not asked:
                break
            say = left.pop(0) if left else Say(0, approved=True)
            if say.approved is None:
                kept = memory.list()
                if kept:
                    memory.revoke(kept[say.which % len(kept)].id)
            else:
                question = asked[say.which % len(asked)]
                self.journal.questions.answer(_answer(question, say))
            await self.hear(run_id)
        self.seen.append(await self.results(run_id))

    async def results(self, run_id: str) -> list[str]:
        said = [each for each in await runs.said(self.journal, run_id) if isinstance(each, ToolMessage)]
        return [result.text for message in said for result in message.results]

    async def begin(self, run_id: str) -> None: ...
    async def hear(self, run_id: str) -> None: ...
    async def memory(self) -> ApprovalMemory:
        raise NotImplementedError


class Lasting(World):
    """A world in which one process with one session and one adapter does everything."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.session = Session(id="ada/s", principal="ada")
        self.adapter = Adapter(self.model(), journal=self.journal, environment=Desk(), clock=self.clock)
        self.running: asyncio.Future[Any] | None = None

    async def begin(self, run_id: str) -> None:
        going = self.adapter.evaluate(PROMPT, "go", session=self.session, run_id=run_id, **self.given())
        self.running = asyncio.ensure_future(going)
        await asyncio.sleep(1)

    async def hear(self, run_id: str) -> None:
        await asyncio.sleep(1)

    async def memory(self) -> ApprovalMemory:
        return approvals_of(self.session)


class Restarted(World):
    """A world that opens the journal again and loads the session from it at every step, as a new process would.

    A run with a secret can't be parked, so a single process runs it to its end.
    """

    held: asyncio.Future[Any] | None = None

    async def begin(self, run_id: str) -> None:
        self.restart()
        secret = any(call.name == "unlock" for call in self.turn.calls)
        session = Session(id="ada/s", principal="ada")
        if await self.journal.runs.list(session_id="ada/s"):
            session = await runs.session(self.journal, "ada/s", principal="ada")
        adapter = self.adapter(Desk() if secret else LaterEnvironment())
        going = adapter.evaluate(PROMPT, "go", session=session, run_id=run_id, **self.given())
        if secret:
            self.held = asyncio.ensure_future(going)
            await asyncio.sleep(1)
        else:
            self.held = None
            await self.carry(going)

    async def hear(self, run_id: str) -> None:
        if self.held is not None:
            await asyncio.sleep(1)
            return
        self.restart()
        adapter = self.adapter(LaterEnvironment())
        await self.carry(adapter.resume(run_id, PROMPT, **self.given()))

    def adapter(self, environment: Environment) -> Adapter:
        return Adapter(self.model(), journal=self.journal, environment=environment, clock=self.clock)

    async def carry(self, going: Any) -> None:
        try:
            await going
        except RunParked:
            return

    async def memory(self) -> ApprovalMemory:
        return await runs.approvals(self.journal, "ada/s", principal="ada")

    def restart(self) -> None:
        self.journal.close()
        self.journal = self.open()


def _answer(question: Question, say: Say) -> Answer:
    value: Any = True
    if question.kind == "approval":
        offered = question.payload["scopes"]
        remember = "exact" if say.remember == "scope" and not offered else say.remember
        value = {"approved": say.approved, "remember": remember}
        if remember == "scope":
            value["scope"] = offered[-1]
    return answer_to(question, value)


def played(kind: type[World], turns: Sequence[Turn]) -> list[Any]:
    """Play these turns in a world, and return its record of what could be observed."""
    with tempfile.TemporaryDirectory() as base:

        async def main() -> list[Any]:
            world = kind(Path(base))
            for number, turn in enumerate(turns):
                await world.go(number, turn)
            world.journal.close()
            return world.seen

        return run_virtual(main)


PUT_A, PUT_B, PUT_C, BUILD_A, BUILD_B, *_, UNLOCK, _ = CALLS


@settings(max_examples=25, deadline=None)
@given(st.lists(turns, min_size=1, max_size=3))
@example([Turn([PUT_A], [Say(0, False, "scope")]), Turn([PUT_B, PUT_C], [], approve_all=True)])
@example([Turn([UNLOCK], [Say(0, False, "exact")]), Turn([UNLOCK], [], approve_all=True)])
@example([Turn([PUT_A], [Say(0, True, "scope"), Say(0, None)]), Turn([PUT_B], [])])
# A call allowed by a one-time approval continues even if a later answer denies calls of its kind.
@example([Turn([BUILD_A, BUILD_B], [Say(0, True), Say(1, False, "scope")])])
# A call allowed by a remembered approval continues even if that approval is revoked.
@example([Turn([PUT_A], [Say(0, True, "scope")]), Turn([BUILD_B], [Say(0, None)])])
@example([Turn([BUILD_A], [Say(0, True), Say(0, True), Say(0, True, "scope"), Say(0, None)])])
def test_a_session_that_is_restarted_at_every_step_remembers_what_one_does_that_never_was(
    turns: list[Turn],
) -> None:
    """Restarting a session's process between steps does not change its open questions, remembered decisions or results."""
    assert played(Restarted, turns) == played(Lasting, turns)
