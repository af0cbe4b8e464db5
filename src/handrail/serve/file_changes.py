"""`file_changes`: the files that a thread's calls changed, and which of these changes are undone or unapplied."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from handrail import runs
from handrail.journal.protocol import Journal
from handrail.serve.agui.wire_events import format_time
from handrail.serve.live_run import LiveRun
from handrail.serve.thread import Thread


def paths_in(writes: Iterable[str]) -> list[str]:
    """Return the paths of the files among the places that a call wrote."""
    return [place.removeprefix("file ") for place in writes if place.startswith("file ")]


async def unapplied_calls(journal: Journal, live: LiveRun | None) -> Container[tuple[str, str]]:
    """Return pairs of a run id and a call id, for the calls whose file changes are recorded but not applied.

    Calls of the active run are left out, because it is about to apply their changes. The reasons why changes are not
    applied are left out too, because they contain paths of this machine. `handrail runs show` prints them.
    """
    active = "" if live is None else live.run_id
    return {(each.run_id, each.call_id) for each in await runs.unapplied(journal) if each.run_id != active}


async def file_changes(journal: Journal, seen: Thread) -> list[dict[str, Any]]:
    """Return the file changes of a thread's successful calls, oldest first, including undone and unapplied ones.

    Each says whether it can be undone, and if not, why. Raises `ThreadUnknown` if the thread has no runs.
    """
    await seen.check_known()
    marks = await journal.calls.marks(seen.session_id)
    undone = {entry.key for _, entry in marks if entry.kind == "undone"}
    unapplied = await unapplied_calls(journal, seen.live)
    problems = await runs.undo_problems(journal, seen.session_id, seen.files, principal=seen.principal)
    found: list[dict[str, Any]] = []
    for unit in await journal.calls.load_session(seen.session_id):
        paths = paths_in(unit.writes)
        if paths and unit.status == "ok":
            problem = problems.get((unit.run_id, unit.call_id), "")
            if unit.root and unit.root in problem:  # clients need not know paths of this machine
                problem = "its folder is not here"
            if seen.live is not None:
                problem = "a run of this conversation is in progress"
            found.append(
                {
                    "run_id": unit.run_id,
                    "call_id": unit.call_id,
                    "tool": unit.tool,
                    "at": format_time(unit.at),
                    "paths": paths,
                    "diff": unit.diff,
                    "undone": unit.call_id in undone,
                    "unapplied": (unit.run_id, unit.call_id) in unapplied,
                    "undoable": not problem,
                    "problem": problem or None,
                }
            )
    return found
