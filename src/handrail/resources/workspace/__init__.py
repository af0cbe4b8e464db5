"""A folder that Handrail owns, which moves with its run from host to host."""

from handrail.resources.workspace.workspace import IGNORED, Workspace, WorkspaceFilesystem, WorkspaceFork

__all__ = ["IGNORED", "Workspace", "WorkspaceFilesystem", "WorkspaceFork"]
