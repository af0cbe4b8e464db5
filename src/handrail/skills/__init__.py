"""Skills: folders with instructions, files and scripts for particular tasks, in the public Agent Skills format."""

from handrail.skills.section import Skills
from handrail.skills.skill import Skill

__all__ = ["Skill", "Skills"]
