"""The record of a run: its steps, its questions, and what each call committed."""

from handrail.journal.desk import QuestionDesk
from handrail.journal.digest import digest, new_key
from handrail.journal.memory import MemoryJournal

__all__ = ["MemoryJournal", "QuestionDesk", "digest", "new_key"]
