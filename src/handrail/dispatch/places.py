"""The places a call goes to, as far as they are known: what scopes of approvals are made of."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from handrail.errors import FileError
from handrail.protocols import Filesystem
from handrail.resources.paths import parse_path
from handrail.session import SessionFork

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt


def places_of(attempt: Attempt, params: Any, ran: bool) -> tuple[str, ...] | None:
    """The paths a call names, and where they lead; after it ran in its fork, also what it changed.

    None where that can't be known: a path that is none, or a change in something that is no files.
    """
    found: list[str] = []
    try:
        named = [parse_path(each.path).path for each in attempt.tool.paths(params)]
        found += named
        if named and not ran:
            found += _followed(attempt, named)
    except FileError:
        return None
    if ran:
        changed = _changed(attempt)
        if changed is None:
            return None
        found += changed
    return tuple(dict.fromkeys(found))


def spelled(attempt: Attempt, params: Any) -> dict[str, str]:
    """The paths a call names, each with its one spelling; those that are none are left out."""
    found: dict[str, str] = {}
    for each in attempt.tool.paths(params):
        with contextlib.suppress(FileError):
            found[each.path] = parse_path(each.path).path
    return found


def _followed(attempt: Attempt, paths: list[str]) -> list[str]:
    """Where these lead: a link may lie in one folder and lead into another."""
    frame = attempt.frame
    files: Any = frame.filesystem
    if files is None:
        files = attempt.filesystem if frame.resources.binds(Filesystem) else None
    elif attempt.parent is not None:
        files = attempt.parent.open_transaction.fork_of(files)  # the call around it may have made a link
    resolved = getattr(files, "resolved", None)
    return [] if resolved is None else [resolved(path) for path in paths if path]


def _changed(attempt: Attempt) -> list[str] | None:
    """What is different in its forks. A folder is left out where something in it is said."""
    changed: list[str] = []
    for fork in attempt.open_transaction.touched:
        if isinstance(fork, SessionFork):
            continue
        paths: tuple[str, ...] | None = getattr(fork, "changed", None)
        if paths is None:
            return None
        changed += [
            path.rstrip("/")
            for path in paths
            if not (path.endswith("/") and any(other != path and other.startswith(path) for other in paths))
        ]
    return changed
