"""Operations on recorded runs: list, show, cancel, fork, send messages, undo, discard, replay, export, import, forget and erase.

There are also operations that copy files into workspaces and out of them. All operations work on a journal, and none needs the
process that executed the run. Each is imported on first use, so that listing runs does not load the gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.imports import names_on_first_use
from handrail.journal.records import WorkspaceLine

if TYPE_CHECKING:
    from handrail.runs.cases import Case, CaseResult, make_case, replay_case
    from handrail.runs.catalog import RunLine, approvals, cancel, children, forget, list_runs
    from handrail.runs.check import Divergence, replay
    from handrail.runs.comparison import RunComparison, RunSummary, compare
    from handrail.runs.copies import FilesPut, export, fork, get_files, import_, list_workspaces, put_files
    from handrail.runs.erasure import Erasure, PersonExport, erase, export_person
    from handrail.runs.retention import Retention, sweep
    from handrail.runs.reversal import Undoing, discard, unapplied, undo, undo_problems
    from handrail.runs.sending import Receipt, edit, go_on, messages, pause, send, stop, withdraw, wrap_up
    from handrail.runs.totals import UsageLine, UsageReport, usage
    from handrail.runs.tree import CallNode, RunTree, Turn, said, session, show

__all__ = [
    "CallNode",
    "Case",
    "CaseResult",
    "Divergence",
    "Erasure",
    "FilesPut",
    "PersonExport",
    "Receipt",
    "Retention",
    "RunComparison",
    "RunLine",
    "RunSummary",
    "RunTree",
    "Turn",
    "Undoing",
    "UsageLine",
    "UsageReport",
    "WorkspaceLine",
    "approvals",
    "cancel",
    "children",
    "compare",
    "discard",
    "edit",
    "erase",
    "export",
    "export_person",
    "forget",
    "fork",
    "get_files",
    "go_on",
    "import_",
    "list_runs",
    "list_workspaces",
    "make_case",
    "messages",
    "pause",
    "put_files",
    "replay",
    "replay_case",
    "said",
    "send",
    "session",
    "show",
    "stop",
    "sweep",
    "unapplied",
    "undo",
    "undo_problems",
    "usage",
    "withdraw",
    "wrap_up",
]

if not TYPE_CHECKING:  # a type checker would take every name for one of the package's
    __getattr__ = names_on_first_use(
        __name__,
        {
            "cases": "Case CaseResult make_case replay_case",
            "catalog": "RunLine approvals cancel children forget list_runs",
            "check": "Divergence replay",
            "comparison": "RunComparison RunSummary compare",
            "copies": "FilesPut export fork get_files import_ list_workspaces put_files",
            "erasure": "Erasure PersonExport erase export_person",
            "retention": "Retention sweep",
            "tree": "CallNode RunTree Turn said session show",
            "totals": "UsageLine UsageReport usage",
            "sending": "Receipt edit go_on messages pause send stop withdraw wrap_up",
            "reversal": "Undoing discard unapplied undo undo_problems",
        },
    )
