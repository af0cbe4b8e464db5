"""Sort a family's inbox, and decide on its bills.

`make serve` opens it on a page, which begins with the threads that `threads.py` makes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from app import adapter_for, new_mail, prompt
from threads import make

from handrail import SqliteJournal

__all__ = ["adapter", "prompt", "starters"]

FOLDER, RECORD = Path(".handrail", "inbox-on-a-page"), Path(".handrail", "inbox-on-a-page.db")
"""The family's folder, and the journal that `make serve` names."""

starters = ["Please sort the inbox."]
is_first = not RECORD.exists()

if not list(FOLDER.glob("inbox/*.txt")):
    new_mail(FOLDER)  # the inbox is empty, so new mail is added

adapter = adapter_for(FOLDER)

if is_first:
    journal = SqliteJournal(RECORD)
    asyncio.run(make(journal, FOLDER, f"{__name__}:prompt"))
    journal.close()
