"""The same tool in other words."""

from __future__ import annotations

import copy
from typing import Any

from handrail.tools.checking import check_words
from handrail.tools.definition import Tool
from handrail.tools.example import ToolExample


def reworded(
    tool: Tool[Any, Any],
    *,
    description: str | None = None,
    examples: tuple[ToolExample[Any, Any], ...] | None = None,
) -> Tool[Any, Any]:
    """A copy that differs in what a model reads of it, or `ToolDefinitionError` if that does not fit.

    Its handler is not read again: the names in its annotations may be local to where it was defined.
    """
    made = copy.copy(tool)
    if description is not None:
        object.__setattr__(made, "description", description)
    if examples is not None:
        object.__setattr__(made, "examples", examples)
    check_words(made)
    return made
