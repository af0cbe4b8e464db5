"""A real folder as a filesystem. Each call's changes are a transaction, and the most recent ones can be undone."""

from handrail.resources.directory.filesystem import DIRECTORY_LIMITS, DirectoryFilesystem, Recovered
from handrail.resources.directory.fork import DirectoryFork
from handrail.resources.mount import Layers

__all__ = ["DIRECTORY_LIMITS", "DirectoryFilesystem", "DirectoryFork", "Layers", "Recovered"]
