"""Operations on recorded runs: list, show, cancel, fork, undo, discard, replay, export, import and forget.

There are also operations that copy files into workspaces and out of them. All operations work on a journal, and none needs the
process that executed the run.
"""

from handrail.journal.records import WorkspaceLine
from handrail.runs.catalog import RunLine, approvals, cancel, forget, list_runs
from handrail.runs.check import Divergence, replay
from handrail.runs.copies import FilesPut, export, fork, get_files, import_, list_workspaces, put_files
from handrail.runs.tree import CallNode, RunTree, Turn, said, session, show
from handrail.runs.undo import Undoing, discard, unapplied, undo, undo_problems

__all__ = [
    "CallNode",
    "Divergence",
    "FilesPut",
    "RunLine",
    "RunTree",
    "Turn",
    "Undoing",
    "WorkspaceLine",
    "approvals",
    "cancel",
    "discard",
    "export",
    "forget",
    "fork",
    "get_files",
    "import_",
    "list_runs",
    "list_workspaces",
    "put_files",
    "replay",
    "said",
    "session",
    "show",
    "unapplied",
    "undo",
    "undo_problems",
]
