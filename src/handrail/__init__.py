"""Handrail: a runtime for the tools of AI agents, where every call is a transaction.

The names below are the public surface. Each is loaded when it is first used, so `import handrail`
itself costs next to nothing and parts that need an extra are only met by those who use them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.adapter import Adapter, PromptResponse
    from handrail.adapter.redeeming import redeem
    from handrail.agent import Agent
    from handrail.clock import Clock, SystemClock
    from handrail.context import (
        PROVIDER_REQUEST_ID,
        RATE_LIMIT,
        TRACING_SPAN,
        AgentContext,
        Approval,
        Attachment,
        ExtraKey,
        ToolContext,
        UserContext,
        WorkerContext,
    )
    from handrail.deadline import Deadline
    from handrail.dispatch import Gate, ToolCall, open_gate, run_turn
    from handrail.environment import (
        AgentEnvironment,
        HeadlessEnvironment,
        LaterEnvironment,
        TerminalEnvironment,
    )
    from handrail.errors import (
        CallFailed,
        CapabilityMissing,
        ContextExpired,
        Declined,
        HandrailError,
        NoAnswer,
        PromptEvaluationError,
        PromptValidationError,
        QuestionCancelled,
        QuestionTimedOut,
        ToolDefinitionError,
        ToolValidationError,
        TransientError,
        WorkerError,
    )
    from handrail.guard import (
        ApprovalMemory,
        Broker,
        CapabilityPolicy,
        RateLimitPolicy,
        ReadBeforeWritePolicy,
        SequentialDependencyPolicy,
        approvals_of,
    )
    from handrail.handoff import Handoff, Parked, run_as_agent
    from handrail.journal import MemoryJournal
    from handrail.journal.sqlite import SqliteJournal
    from handrail.limits import Budget
    from handrail.models.anthropic import AnthropicModel
    from handrail.models.local import LocalModel
    from handrail.models.openai import OpenAIModel
    from handrail.models.scripted import ScriptedModel
    from handrail.operation import Operation, gather
    from handrail.prompt import MarkdownSection, Prompt, RenderedPrompt, Section
    from handrail.prompt.overrides import Overrides
    from handrail.protocols import PolicyDecision, ToolPolicy
    from handrail.resources import Binding
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.memory import MemoryFilesystem
    from handrail.resources.shell import Allow, Shell
    from handrail.sections import FileTools, ShellTools
    from handrail.session import Session, kept
    from handrail.tools import (
        Effect,
        FunctionTool,
        PathArg,
        Tool,
        ToolExample,
        ToolResult,
        legacy_handler,
        tool,
        tool_context,
    )
    from handrail.workers import Worker, WorkerRegistry

_HOMES = {
    "handrail.adapter": "Adapter PromptResponse",
    "handrail.adapter.redeeming": "redeem",
    "handrail.agent": "Agent",
    "handrail.clock": "Clock SystemClock",
    "handrail.context": (
        "PROVIDER_REQUEST_ID RATE_LIMIT TRACING_SPAN AgentContext Approval Attachment ExtraKey "
        "ToolContext UserContext WorkerContext"
    ),
    "handrail.deadline": "Deadline",
    "handrail.dispatch": "Gate ToolCall open_gate run_turn",
    "handrail.environment": "AgentEnvironment HeadlessEnvironment LaterEnvironment TerminalEnvironment",
    "handrail.errors": (
        "CallFailed CapabilityMissing ContextExpired Declined HandrailError NoAnswer PromptEvaluationError "
        "PromptValidationError QuestionCancelled QuestionTimedOut ToolDefinitionError ToolValidationError TransientError "
        "WorkerError"
    ),
    "handrail.guard": "ApprovalMemory Broker CapabilityPolicy RateLimitPolicy ReadBeforeWritePolicy SequentialDependencyPolicy approvals_of",
    "handrail.handoff": "Handoff Parked run_as_agent",
    "handrail.journal": "MemoryJournal",
    "handrail.journal.sqlite": "SqliteJournal",
    "handrail.limits": "Budget",
    "handrail.models.anthropic": "AnthropicModel",
    "handrail.models.local": "LocalModel",
    "handrail.models.openai": "OpenAIModel",
    "handrail.models.scripted": "ScriptedModel",
    "handrail.operation": "Operation gather",
    "handrail.prompt": "MarkdownSection Prompt RenderedPrompt Section",
    "handrail.prompt.overrides": "Overrides",
    "handrail.protocols": "PolicyDecision ToolPolicy",
    "handrail.resources": "Binding",
    "handrail.resources.directory": "DirectoryFilesystem",
    "handrail.resources.memory": "MemoryFilesystem",
    "handrail.resources.shell": "Allow Shell",
    "handrail.sections": "FileTools ShellTools",
    "handrail.session": "Session kept",
    "handrail.tools": (
        "Effect FunctionTool PathArg Tool ToolExample ToolResult legacy_handler tool tool_context"
    ),
    "handrail.workers": "Worker WorkerRegistry",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__version__ = "0.1.0"

__all__ = [
    "PROVIDER_REQUEST_ID",
    "RATE_LIMIT",
    "TRACING_SPAN",
    "Adapter",
    "Agent",
    "AgentContext",
    "AgentEnvironment",
    "Allow",
    "AnthropicModel",
    "Approval",
    "ApprovalMemory",
    "Attachment",
    "Binding",
    "Broker",
    "Budget",
    "CallFailed",
    "CapabilityMissing",
    "CapabilityPolicy",
    "Clock",
    "ContextExpired",
    "Deadline",
    "Declined",
    "DirectoryFilesystem",
    "Effect",
    "ExtraKey",
    "FileTools",
    "FunctionTool",
    "Gate",
    "Handoff",
    "HandrailError",
    "HeadlessEnvironment",
    "LaterEnvironment",
    "LocalModel",
    "MarkdownSection",
    "MemoryFilesystem",
    "MemoryJournal",
    "NoAnswer",
    "OpenAIModel",
    "Operation",
    "Overrides",
    "Parked",
    "PathArg",
    "PolicyDecision",
    "Prompt",
    "PromptEvaluationError",
    "PromptResponse",
    "PromptValidationError",
    "QuestionCancelled",
    "QuestionTimedOut",
    "RateLimitPolicy",
    "ReadBeforeWritePolicy",
    "RenderedPrompt",
    "ScriptedModel",
    "Section",
    "SequentialDependencyPolicy",
    "Session",
    "Shell",
    "ShellTools",
    "SqliteJournal",
    "SystemClock",
    "TerminalEnvironment",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolDefinitionError",
    "ToolExample",
    "ToolPolicy",
    "ToolResult",
    "ToolValidationError",
    "TransientError",
    "UserContext",
    "Worker",
    "WorkerContext",
    "WorkerError",
    "WorkerRegistry",
    "approvals_of",
    "gather",
    "kept",
    "legacy_handler",
    "open_gate",
    "redeem",
    "run_as_agent",
    "run_turn",
    "tool",
    "tool_context",
]


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'handrail' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
