"""A program whose run waits for the answer to a handoff, and which later answers and resumes that run.

python parked_app.py FOLDER wait      runs until killed, and writes what the client sees to FOLDER/wire
python parked_app.py FOLDER answer    answers and resumes the run three days later
"""

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from handrail import (
    Adapter,
    Handoff,
    LaterEnvironment,
    Parked,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
)
from handrail.clock import SystemClock
from handrail.errors import AnswerRefused
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.tools import RunMode, ToolResult

MARKER = "the-ace-of-spades-is-third"


def note(folder: Path, file: str, what: str) -> None:
    fd = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{what}\n".encode())
    os.close(fd)


@dataclass
class Deal:
    cards: int


@dataclass
class Deck:
    """The private part of the handoff."""

    secret: str


@dataclass
class Offer:
    """The public part of the handoff."""

    backs: list[str]


@dataclass
class Pick:
    number: int


def handoff(folder: Path) -> Handoff[Any, Any]:
    pick_card = Handoff("pick_card", "Let the other side pick a card.", params=Deal)

    @pick_card.before
    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        note(folder, "world", "before")
        return Parked(Deck(MARKER), Offer(["back"] * params.cards))

    @pick_card.after
    async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        note(folder, "world", f"after {pick.number} {deck.secret == MARKER}")
        return ToolResult.ok(f"card {pick.number}")

    return pick_card


class Client(Environment):
    """A connected client that is shown a question and never answers it."""

    run_mode: RunMode = "user"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def ask(self, question: Question, /) -> Answer:
        note(self._folder, "wire", f"{question!r} {json.dumps(question.payload)}")
        print("asked", flush=True)
        return await asyncio.get_running_loop().create_future()


class DaysLater(SystemClock):
    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(days=3)


def answered(request: Any) -> Any:
    last = request.messages[-1]
    return f"It is {last.text}." if hasattr(last, "results") else ToolCall("pick_card", {"cards": 3})


async def main(folder: Path, mode: str) -> None:
    if mode == "wait":
        journal = SqliteJournal(folder / "runs.db")
        adapter = Adapter(ScriptedModel(answered), journal=journal, environment=Client(folder))
        prompt = Prompt("game", "Play.", tools=[handoff(folder)])
        await adapter.evaluate(prompt, "go", run_id="game")
        return
    clock = DaysLater()
    journal = SqliteJournal(folder / "runs.db", clock=clock)
    adapter = Adapter(ScriptedModel(answered), journal=journal, environment=LaterEnvironment(), clock=clock)
    prompt = Prompt("game", "Play.", tools=[handoff(folder)])
    [question] = await journal.questions.open("game")
    note(folder, "wire", repr(question))
    given = Answer(
        question_id=question.id, digest=question.digest, by=question.principal, value={"number": 2}
    )
    journal.questions.answer(given)
    journal.questions.answer(given)  # repeating the same answer is harmless
    try:
        journal.questions.answer(
            Answer(
                question_id=question.id, digest=question.digest, by=question.principal, value={"number": 1}
            )
        )
        print("taken twice")
    except AnswerRefused as refused:
        note(folder, "wire", str(refused))
    response = await adapter.resume("game", prompt)
    again = await adapter.resume("game", prompt)
    print(response.text, again.text == response.text)
    journal.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
