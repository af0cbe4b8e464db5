"""Tools: typed functions a model may call."""

from handrail.tools.definition import Handler, Tool
from handrail.tools.effect import EFFECTS, Effect, EffectRules
from handrail.tools.example import Need, RunMode, ToolExample
from handrail.tools.function import FunctionTool, tool, tool_context
from handrail.tools.legacy import legacy_handler
from handrail.tools.paths import NamedPath, PathArg
from handrail.tools.result import Renders, ToolResult

__all__ = [
    "EFFECTS",
    "Effect",
    "EffectRules",
    "FunctionTool",
    "Handler",
    "NamedPath",
    "Need",
    "PathArg",
    "Renders",
    "RunMode",
    "Tool",
    "ToolExample",
    "ToolResult",
    "legacy_handler",
    "tool",
    "tool_context",
]
