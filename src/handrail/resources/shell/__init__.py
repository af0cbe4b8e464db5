"""Shell commands that run in a sandbox on a folder, with their writes captured."""

from handrail.resources.mount import Layers
from handrail.resources.shell.execution import CommandLimits, CommandResult
from handrail.resources.shell.rules import Allow
from handrail.resources.shell.shell import Shell
from handrail.resources.shell.support import Support, probe

__all__ = ["Allow", "CommandLimits", "CommandResult", "Layers", "Shell", "Support", "probe"]
