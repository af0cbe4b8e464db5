"""Shell commands that run in a sandbox on a folder, with their writes captured."""

from handrail.resources.mount import Layers
from handrail.resources.shell.execution import CommandLimits, CommandResult, Support, probe
from handrail.resources.shell.rules import Allow
from handrail.resources.shell.shell import Shell

__all__ = ["Allow", "CommandLimits", "CommandResult", "Layers", "Shell", "Support", "probe"]
