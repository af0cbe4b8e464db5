"""Commands on a folder, run in a sandbox with their writes captured."""

from handrail.resources.mount import Layers
from handrail.resources.shell.execution import CommandResult
from handrail.resources.shell.rules import Allow
from handrail.resources.shell.shell import Shell
from handrail.resources.shell.support import Support, probe

__all__ = ["Allow", "CommandResult", "Layers", "Shell", "Support", "probe"]
