"""`FleetApp`: an app whose runs a worker executes, with the version of its code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handrail.errors import DefinitionError
from handrail.journal.records import WORKSPACE, queue_of
from handrail.messages import Model
from handrail.run.record.begin import code_of
from handrail.serve.sources import Source, load


@dataclass(slots=True)
class FleetApp:
    """An app and the digest of its code, which together name the queue that its runs wait in."""

    named: str
    """The app as the user named it."""
    source: Source
    code: str
    _folders: dict[tuple[str, tuple[str, ...]], Source] = field(default_factory=dict[Any, Any])

    @classmethod
    def load(
        cls, named: str, *, model: Model | None = None, approvals: Any = None, files: Any = None
    ) -> FleetApp:
        """Load an app: a module (`pkg.mod`, `pkg.mod:prompt`, `app.py`), a worker's file, or a folder of workers.

        Raises `DefinitionError` if it can't be loaded.
        """
        source = load(named, model=model, approvals=approvals, files=files).source
        return cls(named, source, code_of(source.app))

    @property
    def name(self) -> str:
        return self.source.app

    @property
    def queue(self) -> str:
        """The queue for runs of this app and this version of its code."""
        return queue_of(self.source.app, self.code)

    def in_folder(self, folder: str, startup_files: Sequence[str] = ()) -> Source:
        """Return the app's source for runs that work in a folder or workspace, or its ordinary source if `folder` is "".

        Raises `DefinitionError` if the folder is not on this host.
        """
        if not folder:
            return self.source
        if folder.startswith(WORKSPACE):  # not cached, because there may be very many workspaces
            return self.source.with_files(_open(folder, startup_files))
        key = folder, tuple(startup_files)
        if key not in self._folders:
            self._folders[key] = self.source.with_files(_open(folder, startup_files))
        return self._folders[key]


def _open(folder: str, startup_files: Sequence[str]) -> Any:
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.workspace import Workspace

    if (workspace := Workspace.named(folder, startup_files=startup_files)) is not None:
        return workspace
    if not Path(folder).is_dir():
        raise DefinitionError(
            f"the folder {folder!r} of a run is not on this host. Start a worker on the host that has it."
        )
    return DirectoryFilesystem(folder, startup_files=startup_files)
