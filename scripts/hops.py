"""Count the functions and files of Handrail that are entered on the way to a tool's handler, and on the way back.

    python scripts/hops.py [--list]

The ways are those of a call without a journal, of a call with one, of a run that is parked for an approval, of the answer to it, and
of the call in the resumed run. Each is gone once before it is counted, so that imports don't count. With --list, the files are
printed in the order in which they are entered.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import handrail
from handrail import Agent, CapabilityPolicy, RunParked, ScriptedModel, SqliteJournal, ToolCall, tool
from handrail.environment import LaterEnvironment
from handrail.question import Answer

PACKAGE = Path(handrail.__file__).parent


class Way:
    """The functions that are entered before the handler and after it, in the order in which they are first entered."""

    def __init__(self) -> None:
        self.there: dict[CodeType, None] = {}
        self.back: dict[CodeType, None] = {}
        self.arrived = False


current = Way()


def note(frame: FrameType, event: str, argument: object) -> None:
    """Add the function that is entered to the current way. Every step of a coroutine enters it again."""
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(str(PACKAGE)):
        (current.back if current.arrived else current.there)[code] = None


@tool(effect="staged", capabilities=["seats"])
async def book(seats: int) -> str:
    """Book seats."""
    current.arrived = True
    return f"{seats} booked"


async def walked(go: Callable[[], Awaitable[Any]]) -> Way:
    """Return the way that `go` takes."""
    global current
    way = current = Way()
    await go()
    current = Way()
    return way


async def walk(folder: Path) -> dict[str, Way]:
    """Go every way once. The journal is opened here, so that what its threads enter is counted."""
    model = ScriptedModel(
        lambda request: ToolCall("book", {"seats": 2}) if len(request.messages) < 3 else "Done."
    )
    journal = SqliteJournal(folder / "runs.db")
    agent = Agent(model, "Book.", tools=[book])
    asking = Agent(model, "Book.", tools=[book], policies=[CapabilityPolicy({"seats": "ask"})])
    parked: list[RunParked] = []

    async def park() -> None:
        try:
            await asking.run("Two seats.", journal=journal, environment=LaterEnvironment(), run_id="later")
        except RunParked as error:
            parked.append(error)

    async def answer() -> None:
        [question] = parked[0].questions
        allowed = Answer(
            question_id=question.id,
            digest=question.digest,
            by=question.principal,
            value={"approved": True},
        )
        journal.questions.answer(allowed)

    ways = {
        "a call without a journal": await walked(lambda: agent.run("Two seats.")),
        "a call with a journal": await walked(lambda: agent.run("Two seats.", journal=journal)),
        "a run that is parked": await walked(park),
        "an answered approval": await walked(answer),
        "a resumed run": await walked(
            lambda: asking.resume("later", journal=journal, environment=LaterEnvironment())
        ),
    }
    journal.close()
    return ways


def files_of(codes: dict[CodeType, None]) -> list[str]:
    """Return the files of these functions, relative to the package, in order."""
    return list(dict.fromkeys(str(Path(code.co_filename).relative_to(PACKAGE)) for code in codes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the files")
    listed: bool = parser.parse_args().list
    # Set before the first walk, because the second one uses the threads that the first one has started.
    threading.setprofile(note)
    sys.setprofile(note)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        asyncio.run(walk(Path(first)))
        ways = asyncio.run(walk(Path(second)))
    sys.setprofile(None)
    threading.setprofile(None)
    for name, way in ways.items():
        if not way.arrived and name not in ("a run that is parked", "an answered approval"):
            sys.exit(f"{name} never entered the tool's handler")
        for part, codes in (("until its handler", way.there), ("after it", way.back)):
            if codes:
                print(f"{name}, {part}: {len(codes)} functions in {len(files_of(codes))} files")
                if listed:
                    print(*(f"    {file}" for file in files_of(codes)), sep="\n")


if __name__ == "__main__":
    main()
