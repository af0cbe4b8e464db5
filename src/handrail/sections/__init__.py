"""Ready-made sections for files and commands."""

from handrail.sections.files import FileTools
from handrail.sections.shell import ShellTools

__all__ = ["FileTools", "ShellTools"]
