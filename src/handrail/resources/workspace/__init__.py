"""A folder that Handrail owns, which moves with its run from host to host."""

from handrail.resources.workspace.filesystem import WorkspaceFilesystem, WorkspaceFork
from handrail.resources.workspace.workspace import IGNORED, Workspace

__all__ = ["IGNORED", "Workspace", "WorkspaceFilesystem", "WorkspaceFork"]
