"""`ReadBeforeWritePolicy`, which requires that a file be read before it is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from handrail.context import ToolContext, call_behind
from handrail.errors import FileError, FileMissing, HandrailError, ResourceError
from handrail.guard.policy import PolicyNote
from handrail.protocols import Filesystem, PolicyDecision
from handrail.resources.paths import HasLinks, parse_path
from handrail.tools import EFFECTS, Tool, ToolResult

Edit = tuple[str, bytes | None, bytes | None]
"""A changed file: its path, its old bytes and its new bytes. None means that there is no file."""


class ReadBeforeWritePolicy:
    """Requires that the current content of an existing file be read before the file is changed or deleted.

    A file that this session wrote counts as read. New files may be written. A call that names no path to write is
    denied if its tool has the capability `fs.write`. A call that names one is denied if there is no filesystem. If a call
    has changed existing files in its fork without declaring them, it is rejected unless these files were read.
    """

    name = "read_before_write"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        paths = [named.path for named in tool.paths(params) if named.access == "write"]
        if "fs.write" not in tool.capabilities and not paths:
            return PolicyDecision.allow()
        if not paths:
            return PolicyDecision.deny(
                f"{tool.name} writes files, but this call names no path to write. "
                "Use a tool that names the file it writes."
            )
        try:
            files = context.filesystem
        except HandrailError:
            return PolicyDecision.deny(
                f"{tool.name} writes files, and this run has no filesystem. Continue without writing files."
            )
        for path in paths:
            if not self._may_write(path, files, context):
                return PolicyDecision.deny(
                    f"{path} exists, and its current content was not read. Read it first, then write it."
                )
        return PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        """Raise `FileError` if the call changed an existing file that was neither declared nor read.

        Otherwise note the files that the session now knows.
        """
        if EFFECTS[tool.effect].writes:
            source: Any = call_behind(context)  # a policy's view of the call
            edits: list[Edit] = list(source.changed_files())
            if edits:
                self._judge(tool, params, edits, source, context)
                for path, _, new in edits:
                    if new is not None:
                        context.session.dispatch(PolicyNote(self.name, path, _digest(new)))
        self.note_result(tool, params, context=context)

    def note_result(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> None:
        """Note the content of the files that a call has named, which the session has now read or written."""
        named = tool.paths(params)
        if not named:
            return
        try:
            files = context.filesystem
        except ResourceError:
            return  # without a filesystem nothing was read, and `check` denies writes
        for path in sorted(_parsed(each.path for each in named)):
            content = _content_digest(files, path)
            if content is not None:
                context.session.dispatch(PolicyNote(self.name, path, content))

    def _may_write(self, path: str, files: Filesystem, context: ToolContext) -> bool:
        try:
            at = parse_path(path).path
        except FileError:
            return True  # an invalid path, which the filesystem itself reports
        current = _content_digest(files, at)
        if current is None:
            return True
        seen = context.session[PolicyNote].get((self.name, at))
        return seen is not None and seen.value == current and current != _UNREADABLE

    def _judge(
        self, tool: Tool[Any, Any], params: Any, edits: list[Edit], source: Any, context: ToolContext
    ) -> None:
        """Raise `FileError` if the call changed an existing file that was not read.

        Files that the call declared are skipped, because `check` has judged them.
        """
        declared = _parsed(each.path for each in tool.paths(params) if each.access == "write")
        files = context.filesystem
        if isinstance(files, HasLinks):
            declared |= _resolved(files, declared)
        transaction = source.open_transaction
        earlier = transaction.session.before(PolicyNote)
        for path, old, new in edits:
            if old is None or old == new or path in declared:
                continue
            if new is None and any(path.startswith(f"{folder}/") for folder in declared):
                continue  # the call declared a folder around the file, and deleted or moved the folder
            note = earlier.get((self.name, path))
            inner = (each.value for each in transaction.events if _is_note(each, self.name, path))
            if _digest(old) not in (note and note.value, *inner):
                what = "deletes" if new is None else "changes"
                raise FileError(
                    path, f"{tool.name} {what} it, and its current content was not read. Read it first"
                )


def _is_note(event: object, policy: str, path: str) -> bool:
    """Return whether an event is this policy's note about this file."""
    return isinstance(event, PolicyNote) and event.policy == policy and event.key == path


def _parsed(paths: Iterable[str]) -> set[str]:
    """Return the paths in canonical form. Invalid ones are left out."""
    found: set[str] = set()
    for path in paths:
        with suppress(FileError):
            found.add(parse_path(path).path)
    return found


def _resolved(files: HasLinks, paths: Iterable[str]) -> set[str]:
    """Return where the paths lead. A path that can't be resolved is left out."""
    found: set[str] = set()
    for path in paths:
        with suppress(FileError):
            found.add(files.resolved(path))
    return found


_UNREADABLE = "unreadable"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _content_digest(files: Filesystem, path: str) -> str | None:
    """Return a digest of a file's content; `_UNREADABLE` if it can't be read, and None if the path names or leads to no file."""
    if not path:
        return None  # the root, which is a folder
    try:
        return _digest(files.read_bytes(path))
    except FileMissing:
        return None
    except FileError:
        try:
            return _UNREADABLE if files.exists(path) and not files.stat(path).is_directory else None
        except FileError:
            return None  # a link that leads out, which the filesystem itself reports
