"""The contained runner: commands on a folder, with walls around them and their writes caught."""

from handrail.resources.layers import Layers
from handrail.resources.shell.finished import Finished
from handrail.resources.shell.rules import Allow
from handrail.resources.shell.shell import Shell
from handrail.resources.shell.support import Support, probe

__all__ = ["Allow", "Finished", "Layers", "Shell", "Support", "probe"]
