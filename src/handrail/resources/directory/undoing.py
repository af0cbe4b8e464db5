"""Undoing a commit that was applied: the opposite steps, as a commit of their own."""

from __future__ import annotations

import msgspec

from handrail.errors import Conflict, UndoRefused
from handrail.resources.directory.area import Area
from handrail.resources.directory.commit import Commit
from handrail.resources.directory.jail import Jail
from handrail.resources.directory.plan import Step, opposites, shown_version
from handrail.resources.directory.stored import version_of


def undo(jail: Jail, area: Area, commit: Commit) -> tuple[str, ...]:
    """Take an applied commit back, or `UndoRefused` and nothing was done."""
    steps = opposites([step for step in commit.manifest.steps if commit.is_done(step)])
    call_id = commit.manifest.call_id
    against = sorted(step.where for step in steps if not _is_as_it_was_left(jail, step))
    if against:
        raise UndoRefused(call_id, against, "changed since by another call or by somebody else")
    manifest = msgspec.structs.replace(commit.manifest, steps=steps, journal="")
    at_work = area.take_up(commit, manifest)
    try:
        at_work.apply(lenient=True)
    except Conflict as conflict:
        area.give_back(at_work, commit)
        raise UndoRefused(
            call_id, conflict.places, "changed just now by another call or by somebody else"
        ) from None
    area.disk.forget(at_work.folder)
    return tuple(sorted(step.where for step in steps))


def _is_as_it_was_left(jail: Jail, step: Step) -> bool:
    """Whether a path holds what the step that takes it back expects there."""
    found = jail.look(step.where)
    if found is None:
        return step.do == "put" and not step.before
    return step.do == "mode" or shown_version(version_of(found[0])) == step.before
