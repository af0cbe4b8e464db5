"""The threads that the page opens on at its first start. Scripted runs make them, with the same tools as everything after."""

from __future__ import annotations

from pathlib import Path

from app import adapter_for, prompt

from handrail import DirectoryFilesystem, ScriptedModel, Session, SqliteJournal, ToolCall
from handrail.context import Approval
from handrail.protocols import ApprovalRequest
from handrail.runs import show, undo

OWNER = "local"
"""The person whose threads these are: whoever opens the page of a server without users."""


class Decided:
    """Decides every approval in the same way, as its owner would have."""

    shows_previews = True

    def __init__(self, approved: bool, reason: str = "") -> None:
        self._approval = Approval(approved, reason, OWNER, "approved" if approved else "denied")

    async def decide(self, request: ApprovalRequest, /) -> Approval:
        return self._approval


async def make(journal: SqliteJournal, folder: Path, app: str) -> None:
    """Make three threads of an app: a call that is rolled back, one that is denied, and one that is undone."""
    script = Script(journal, folder, app)
    await script.play(
        "Book the cleaning.",
        {"path": "inbox/03-cleaning.txt", "payee": "Clara Rossi", "sum": "89 euros"},
        "89 euros to Clara Rossi are booked.",
        Decided(True),
        undone=True,
    )
    await script.play(
        "Book the invoice.",
        {"path": "inbox/07-invoice.txt", "payee": "Tom Becker", "sum": "1300 euros"},
        "You denied it, so nothing is booked.",
        Decided(False, "I paid it yesterday"),
    )
    await script.play(
        "Book the web address.",
        {"path": "inbox/01-web-address.txt", "payee": "Ben Ali", "sum": "210 dollars"},
        "The booking failed after it had changed two files. Both are as they were.",
        Decided(True),
    )


class Script:
    """Runs whose model follows a script, in a journal and a folder."""

    def __init__(self, journal: SqliteJournal, folder: Path, app: str) -> None:
        self._journal, self._folder, self._app = journal, folder, app

    async def play(
        self, message: str, bill: dict[str, str], said: str, approvals: Decided, *, undone: bool = False
    ) -> None:
        """Make a thread in which a person sends the message, and the model books the bill."""
        run_id = message.lower().rstrip(".").replace(" ", "-")
        adapter = adapter_for(self._folder, self._journal)
        adapter.model = ScriptedModel([ToolCall("book_bill", bill), said])
        session = Session(id=f"{OWNER}/{run_id}", principal=OWNER)
        await adapter.evaluate(
            prompt, message, run_id=run_id, session=session, app=self._app, approvals=approvals
        )
        if undone:
            (call,) = (await show(self._journal, run_id)).calls
            await undo(self._journal, run_id, call.id, DirectoryFilesystem(self._folder), session=session)
