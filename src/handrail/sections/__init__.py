"""Ready-made sections with tools for files and commands."""

from handrail.sections.background import BackgroundTools
from handrail.sections.commands import ShellTools
from handrail.sections.files import FileTools

__all__ = ["BackgroundTools", "FileTools", "ShellTools"]
