"""Handrail: a runtime for the tools of AI agents, where every call is a transaction.

The names below are the public API. Each is imported on first use, so `import handrail` itself is fast, and a module that
needs an extra is imported only by programs that use one of its names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.agent import Agent
    from handrail.code import CodeMode
    from handrail.concurrency.deadline import Deadline
    from handrail.concurrency.operation import Operation, gather
    from handrail.content import Attachment
    from handrail.context import AgentContext, ToolContext, UserContext, WorkerContext
    from handrail.environment import (
        AgentEnvironment,
        HeadlessEnvironment,
        LaterEnvironment,
        TerminalEnvironment,
    )
    from handrail.errors import (
        CallFailed,
        DeadlineExceededError,
        Declined,
        HandrailError,
        NoAnswer,
        PromptEvaluationError,
        RunParked,
        TransientError,
        VisibilityExpansionRequired,
    )
    from handrail.events import ToolInvoked
    from handrail.guard import (
        CapabilityPolicy,
        RateLimitPolicy,
        ReadBeforeWritePolicy,
        SequentialDependencyPolicy,
    )
    from handrail.handoff import Handoff, Parked, run_as_agent
    from handrail.journal.postgres.journal import PostgresJournal
    from handrail.journal.protocol import Journal
    from handrail.journal.sqlite import MemoryJournal, SqliteJournal
    from handrail.messages import Model, ModelSettings
    from handrail.models.anthropic import AnthropicModel
    from handrail.models.gemini import GeminiModel
    from handrail.models.local import LocalModel
    from handrail.models.names import by, first_that_works
    from handrail.models.openai import OpenAIModel
    from handrail.models.scripted import ScriptedModel
    from handrail.notify.settings import Notify
    from handrail.prompt import MarkdownSection, Prompt, Section
    from handrail.prompt.compact import Compact
    from handrail.protocols import Environment, EventBus, Filesystem, PolicyDecision, ToolPolicy
    from handrail.question import Answer
    from handrail.resources import Binding, given
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.memory import MemoryFilesystem
    from handrail.resources.shell import Allow, Shell
    from handrail.resources.workspace import Workspace
    from handrail.run import open_gate
    from handrail.run.adapter import Adapter
    from handrail.run.call import ToolCall
    from handrail.run.limits import Budget, Spend
    from handrail.run.response import PromptResponse
    from handrail.sections import BackgroundTools, FileTools, ShellTools
    from handrail.session import Session, kept
    from handrail.skills import Skills
    from handrail.tools import PathArg, ProviderTool, Tool, ToolExample, ToolResult, tool, tool_context
    from handrail.workers import Worker, WorkerRegistry

_HOMES = {
    "handrail.run.adapter": "Adapter PromptResponse",
    "handrail.agent": "Agent",
    "handrail.code": "CodeMode",
    "handrail.content": "Attachment",
    "handrail.context": "AgentContext ToolContext UserContext WorkerContext",
    "handrail.concurrency.deadline": "Deadline",
    "handrail.run": "open_gate",
    "handrail.run.call": "ToolCall",
    "handrail.environment": "AgentEnvironment HeadlessEnvironment LaterEnvironment TerminalEnvironment",
    "handrail.errors": "CallFailed DeadlineExceededError Declined HandrailError NoAnswer PromptEvaluationError RunParked TransientError VisibilityExpansionRequired",
    "handrail.events": "ToolInvoked",
    "handrail.guard": "CapabilityPolicy RateLimitPolicy ReadBeforeWritePolicy SequentialDependencyPolicy",
    "handrail.handoff": "Handoff Parked run_as_agent",
    "handrail.journal.postgres.journal": "PostgresJournal",
    "handrail.journal.sqlite": "MemoryJournal SqliteJournal",
    "handrail.journal.protocol": "Journal",
    "handrail.run.limits": "Budget Spend",
    "handrail.messages": "Model ModelSettings",
    "handrail.models.anthropic": "AnthropicModel",
    "handrail.models.names": "by first_that_works",
    "handrail.models.gemini": "GeminiModel",
    "handrail.models.local": "LocalModel",
    "handrail.models.openai": "OpenAIModel",
    "handrail.models.scripted": "ScriptedModel",
    "handrail.notify.settings": "Notify",
    "handrail.concurrency.operation": "Operation gather",
    "handrail.prompt": "MarkdownSection Prompt Section",
    "handrail.prompt.compact": "Compact",
    "handrail.protocols": "Environment EventBus Filesystem PolicyDecision ToolPolicy",
    "handrail.question": "Answer",
    "handrail.resources": "Binding given",
    "handrail.resources.directory": "DirectoryFilesystem",
    "handrail.resources.workspace": "Workspace",
    "handrail.resources.memory": "MemoryFilesystem",
    "handrail.resources.shell": "Allow Shell",
    "handrail.sections": "BackgroundTools FileTools ShellTools",
    "handrail.session": "Session kept",
    "handrail.skills": "Skills",
    "handrail.tools": "PathArg ProviderTool Tool ToolExample ToolResult tool tool_context",
    "handrail.workers": "Worker WorkerRegistry",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__version__ = "0.2.0"

__all__ = [
    "Adapter",
    "Agent",
    "AgentContext",
    "AgentEnvironment",
    "Allow",
    "Answer",
    "AnthropicModel",
    "Attachment",
    "BackgroundTools",
    "Binding",
    "Budget",
    "CallFailed",
    "CapabilityPolicy",
    "CodeMode",
    "Compact",
    "Deadline",
    "DeadlineExceededError",
    "Declined",
    "DirectoryFilesystem",
    "Environment",
    "EventBus",
    "FileTools",
    "Filesystem",
    "GeminiModel",
    "Handoff",
    "HandrailError",
    "HeadlessEnvironment",
    "Journal",
    "LaterEnvironment",
    "LocalModel",
    "MarkdownSection",
    "MemoryFilesystem",
    "MemoryJournal",
    "Model",
    "ModelSettings",
    "NoAnswer",
    "Notify",
    "OpenAIModel",
    "Operation",
    "Parked",
    "PathArg",
    "PolicyDecision",
    "PostgresJournal",
    "Prompt",
    "PromptEvaluationError",
    "PromptResponse",
    "ProviderTool",
    "RateLimitPolicy",
    "ReadBeforeWritePolicy",
    "RunParked",
    "ScriptedModel",
    "Section",
    "SequentialDependencyPolicy",
    "Session",
    "Shell",
    "ShellTools",
    "Skills",
    "Spend",
    "SqliteJournal",
    "TerminalEnvironment",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolExample",
    "ToolInvoked",
    "ToolPolicy",
    "ToolResult",
    "TransientError",
    "UserContext",
    "VisibilityExpansionRequired",
    "Worker",
    "WorkerContext",
    "WorkerRegistry",
    "Workspace",
    "by",
    "first_that_works",
    "gather",
    "given",
    "kept",
    "open_gate",
    "run_as_agent",
    "tool",
    "tool_context",
]


if not TYPE_CHECKING:  # a type checker would take every name for one of the package's

    def __getattr__(name: str) -> Any:
        module = _HOME_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'handrail' has no attribute {name!r}")
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
