"""Writes a journal with the version of Handrail that is installed, for the tests of later versions.

python write.py FOLDER          in the file FOLDER/runs.db, with its users in FOLDER/runs.people.db
python write.py FOLDER URL      in PostgreSQL

It has runs that are done, parked, undone, queued, forked, imported and cut off, with files, sessions, decisions and users.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import released_shop as shop

from handrail import Attachment, Deadline, PostgresJournal, RunParked, Session, SqliteJournal, Workspace
from handrail import runs as recorded
from handrail.errors import UndoRefused
from handrail.question import Answer, Vote

APP = "released_shop:prompt"


def open_journal(folder: Path, url: str | None) -> Any:
    """Open the journal to write."""
    return SqliteJournal(folder / "runs.db", watch=None) if url is None else PostgresJournal(url, watch=None)


def reply(question: Any, value: Any) -> Answer:
    """Return an answer to a question."""
    return Answer(question_id=question.id, digest=question.digest, by=question.principal, value=value)


async def park(journal: Any, run_id: str, *turns: Any, prompt: Any = shop.prompt, **options: Any) -> Any:
    """Run until the run parks, and return its question."""
    files = options.pop("files", None)
    try:
        await shop.adapter_on(journal, files).evaluate(prompt, shop.said(*turns), run_id=run_id, **options)
    except RunParked as parked:
        return parked.questions[0]
    raise AssertionError(f"{run_id} did not park")


async def work(journal: Any, run_id: str, *turns: Any, prompt: Any = shop.prompt, **options: Any) -> str:
    """Carry out a run, and return its text."""
    files = options.pop("files", None)
    done = await shop.adapter_on(journal, files).evaluate(prompt, shop.said(*turns), run_id=run_id, **options)
    return done.text


async def write(journal: Any, folder: Path) -> None:
    """Record the runs."""
    await work(journal, "old", ("note", {"topic": "z", "text": "z"}), session=Session(id="old"))
    await recorded.forget(journal, before=datetime.now(UTC))
    files: Any = Workspace("books")
    both = [("write", {"path": "a.txt", "text": "one"}), ("write", {"path": "d/b.txt", "text": "two"})]
    await work(journal, "done", both, ("note", {"topic": "x", "text": "first"}), files=files, app=APP)
    await work(
        journal,
        "undone",
        ("write", {"path": "a.txt", "text": "changed"}),
        ("write", {"path": "c.txt", "text": "three"}),
        files=files,
    )
    units = await journal.calls.load("undone")
    await recorded.undo(journal, "undone", units[0].call_id, files)
    await recorded.undo(journal, "undone", units[1].call_id, files)
    await work(journal, "again", ("write", {"path": "c.txt", "text": "four"}), files=files)
    await work(journal, "lent", ("lend", {"what": "cup"}))
    (unit,) = await journal.calls.load("lent")
    with suppress(UndoRefused):  # since schema 17, of a call with an effect that an undo can't reverse
        await recorded.undo(journal, "lent", unit.call_id)
    await work(journal, "untold", ("note", {"topic": "y", "text": "gone"}), session=Session(id="untold"))
    (unit,) = await journal.calls.load("untold")
    await recorded.undo(journal, "untold", unit.call_id)

    session = Session(id="ledger", principal="ann")
    await work(journal, "ledger-1", ("note", {"topic": "x", "text": "one"}), session=session)
    await work(journal, "ledger-2", ("note", {"topic": "x", "text": "two"}), session=session)
    asked = await park(
        journal, "ledger-3", ("sell", {"what": "cup"}), ("sell", {"what": "cup"}), session=session
    )
    journal.questions.answer(reply(asked, {"approved": True, "remember": "exact"}))
    await park(
        journal,
        "ledger-4",
        ("sell", {"what": "cup"}),
        ("sell", {"what": "jug"}),
        session=Session(id="other", principal="ann"),
    )

    await park(journal, "asks", ("pay", {"what": "rent"}), ("choose", {"what": "tea"}), app=APP)
    await park(journal, "advises", ("pay", {"what": "tax"}), ("choose", {"what": "tea"}), prompt=shop.advised)
    await park(journal, "approves", ("pay", {"what": "ads"}), ("sell", {"what": "jug"}))
    house = await park(journal, "votes", ("sell", {"what": "house"}))
    vote = Vote(
        question_id=house.id, digest=house.digest, by="bob", roles=("approver",), approved=True, at=1.0
    )
    await journal.votes.cast("votes", vote)
    await park(journal, "hands", ("cash", {"cents": 250}))
    await park(journal, "nests", ("nested", {"what": "cake"}), files=Workspace("kitchen"))
    picture = Attachment(b"\x89PNG\r\n\x1a\n" + bytes(64), "a.png")
    await park(journal, "shows", ("choose", {"what": "tea"}), attachments=[picture])
    limit = Deadline(datetime(2100, 1, 1, tzinfo=UTC), pauses_for_people=True)
    await park(journal, "pauses", ("choose", {"what": "tea"}), deadline=limit)

    await recorded.fork(journal, "done", 2, new_id="forked")
    export = folder / "export.jsonl"
    await recorded.export(journal, "ledger-2", export)
    await recorded.import_(journal, export, run_id="imported")
    export.unlink()


async def submit(journal: Any) -> None:
    """Record a run for a worker to begin."""
    from handrail.fleet import FleetApp, Submission
    from handrail.fleet import submit as put

    asked = Submission(shop.said(("pay", {"what": "hire"})), run_id="queued")
    await put(journal, FleetApp.load("released_shop.py:prompt"), asked)


def add_users(folder: Path) -> None:
    """Record users, one of whom has signed in."""
    from handrail.serve.people import People, people_path

    people = People(people_path(folder / "runs.db"))
    people.add("ann", ["user"], "the secret of ann, who buys")
    people.add("bob", ["approver"], "the secret of bob, who votes")
    people.note("", "user added", user="ann")
    people.close()


def cut_off(folder: Path, url: str | None) -> None:
    """Record a run whose process is killed during its second call."""
    command = [sys.executable, __file__, str(folder), *([url] if url else []), "--cut-off"]
    process = subprocess.Popen(command)
    seen = Path(os.environ["SHOP_WORLD"])
    while "lingers" not in (seen.read_text() if seen.exists() else ""):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def main(arguments: list[str]) -> None:
    """Write the journal."""
    lingers = "--cut-off" in arguments
    folder, url = Path(arguments[0]), next((each for each in arguments[1:] if "://" in each), None)
    os.environ["SHOP_WORLD"] = str(folder / "world")
    if lingers:
        os.environ["SHOP_LINGERS"] = "1"
        turns = ("pay", {"what": "wages"}), ("linger", {})
        asyncio.run(work(open_journal(folder, url), "cut", *turns, files=Workspace("shelf")))
        return
    journal = open_journal(folder, url)
    asyncio.run(write(journal, folder))
    asyncio.run(submit(journal))
    journal.close()
    cut_off(folder, url)
    open_journal(folder, url).close()  # which empties the log that the killed process has left
    add_users(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
