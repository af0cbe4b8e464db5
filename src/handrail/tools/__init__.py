"""Tools: typed functions that a model may call."""

from handrail.protocols import RunMode
from handrail.tools.definition import Handler, Tool
from handrail.tools.effect import EFFECTS, Effect, EffectRules
from handrail.tools.function import FunctionTool, legacy_handler, tool, tool_context
from handrail.tools.path_arguments import NamedPath, PathArg
from handrail.tools.provider_tool import ProviderTool
from handrail.tools.result import Renders, ToolExample, ToolResult
from handrail.tools.signature import Need

__all__ = [
    "EFFECTS",
    "Effect",
    "EffectRules",
    "FunctionTool",
    "Handler",
    "NamedPath",
    "Need",
    "PathArg",
    "ProviderTool",
    "Renders",
    "RunMode",
    "Tool",
    "ToolExample",
    "ToolResult",
    "legacy_handler",
    "tool",
    "tool_context",
]
