"""Recorded runs from outside: looked at, ended, forked, undone, replayed, carried elsewhere, forgotten.

Everything here works on a journal. None of it needs the process that ran the run.
"""

from handrail.runs.carrying import export, import_
from handrail.runs.deciding import approvals
from handrail.runs.ending import cancel
from handrail.runs.forking import fork
from handrail.runs.listing import RunLine, list_runs
from handrail.runs.replaying import Divergence, replay
from handrail.runs.retention import forget
from handrail.runs.saying import said, session
from handrail.runs.tree import CallNode, RunTree, Turn, show
from handrail.runs.undoing import Undoing, undo

__all__ = [
    "CallNode",
    "Divergence",
    "RunLine",
    "RunTree",
    "Turn",
    "Undoing",
    "approvals",
    "cancel",
    "export",
    "forget",
    "fork",
    "import_",
    "list_runs",
    "replay",
    "said",
    "session",
    "show",
    "undo",
]
