"""Operations on recorded runs: list, show, cancel, fork, undo, discard, replay, export, import and forget.

They all work on a journal. None of them needs the process that executed the run.
"""

from handrail.runs.catalog import RunLine, approvals, cancel, forget, list_runs
from handrail.runs.copies import export, fork, import_
from handrail.runs.replay import Divergence, replay
from handrail.runs.transcript import said, session
from handrail.runs.tree import CallNode, RunTree, Turn, show
from handrail.runs.unapplied import discard, unapplied
from handrail.runs.undo import Undoing, undo

__all__ = [
    "CallNode",
    "Divergence",
    "RunLine",
    "RunTree",
    "Turn",
    "Undoing",
    "approvals",
    "cancel",
    "discard",
    "export",
    "forget",
    "fork",
    "import_",
    "list_runs",
    "replay",
    "said",
    "session",
    "show",
    "unapplied",
    "undo",
]
