"""The names of spans, attributes and metrics, in one place because OpenTelemetry's conventions for GenAI and MCP are in development.

`gen_ai.*` and `mcp.*` are the conventions' names, and `handrail.*` are for what they don't describe.
"""

from __future__ import annotations

from typing import Final

SCHEMA: Final = "https://opentelemetry.io/schemas/1.44.0"
SCOPE: Final = "handrail"
"""The name of the tracer and of the meter."""

# --- operations, which begin the names of spans ----------------------------------------------------

CHAT: Final = "chat"
INVOKE_AGENT: Final = "invoke_agent"
EXECUTE_TOOL: Final = "execute_tool"

QUESTION: Final = "handrail.question"
APPROVAL: Final = "handrail.approval"
COMMIT: Final = "handrail.commit"
ROLLBACK: Final = "handrail.rollback"
COMPACTION: Final = "handrail.compaction"
UNDO: Final = "handrail.undo"

# --- attributes of the conventions -----------------------------------------------------------------

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
AGENT_NAME: Final = "gen_ai.agent.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
CONVERSATION_COMPACTED: Final = "gen_ai.conversation.compacted"
OUTPUT_TYPE: Final = "gen_ai.output.type"

REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
REQUEST_REASONING_LEVEL: Final = "gen_ai.request.reasoning.level"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"

USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
USAGE_CACHE_WRITE_INPUT_TOKENS: Final = "gen_ai.usage.cache_write.input_tokens"
TOKEN_TYPE: Final = "gen_ai.token.type"
WORKFLOW_NAME: Final = "gen_ai.workflow.name"

TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_CALL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_CALL_RESULT: Final = "gen_ai.tool.call.result"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"

SKILL_NAME: Final = "gen_ai.skill.name"
SKILL_DESCRIPTION: Final = "gen_ai.skill.description"
SKILL_RESOURCE_NAME: Final = "gen_ai.skill.resource.name"
PROCESS_EXECUTABLE_NAME: Final = "process.executable.name"
PROCESS_EXIT_CODE: Final = "process.exit.code"

MCP_METHOD_NAME: Final = "mcp.method.name"
MCP_PROTOCOL_VERSION: Final = "mcp.protocol.version"
NETWORK_TRANSPORT: Final = "network.transport"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"

ERROR_TYPE: Final = "error.type"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

# --- attributes of ours ----------------------------------------------------------------------------

RUN_ID: Final = "handrail.run.id"
RUN_LEG: Final = "handrail.run.leg"
"""1 for the first leg of a run, and one more for each time it is resumed."""
RUN_OUTCOME: Final = "handrail.run.outcome"
RUN_COST: Final = "handrail.run.cost"
LEG_END: Final = "handrail.leg.end"
"""How the linked leg ended: "parked", or "lost" if its process ended, so that no span of it was exported."""
WORKER_ID: Final = "handrail.worker.id"
CALL_STATUS: Final = "handrail.call.status"
CALL_PATH: Final = "handrail.call.path"
CALL_ATTEMPTS: Final = "handrail.call.attempts"
CALL_STALE: Final = "handrail.call.stale"
REQUEST_ATTEMPT: Final = "handrail.request.attempt"
REQUEST_COST: Final = "handrail.request.cost"
REQUEST_NEXT_MODEL: Final = "handrail.request.next_model"
QUESTION_ID: Final = "handrail.question.id"
QUESTION_KIND: Final = "handrail.question.kind"
QUESTION_OUTCOME: Final = "handrail.question.outcome"
APPROVAL_OUTCOME: Final = "handrail.approval.outcome"
APPROVAL_DECIDED_BY: Final = "handrail.approval.decided_by"
APPROVAL_POLICY: Final = "handrail.approval.policy"
APPROVAL_REASON: Final = "handrail.approval.reason"
ROLLBACK_REASON: Final = "handrail.rollback.reason"
ROLLBACK_COMPENSATED: Final = "handrail.rollback.compensated"
ROLLBACK_NOT_UNDONE: Final = "handrail.rollback.not_undone"
COMPACTION_BY: Final = "handrail.compaction.by"
BACKGROUND_ID: Final = "handrail.background.id"
CACHE_USE: Final = "handrail.cache.use"
"""Whether tokens were read from the provider's cache or written to it: "read" or "write"."""

# --- metrics ---------------------------------------------------------------------------------------

CLIENT_OPERATION_DURATION: Final = "gen_ai.client.operation.duration"
CLIENT_TOKEN_USAGE: Final = "gen_ai.client.token.usage"
EXECUTE_TOOL_DURATION: Final = "gen_ai.execute_tool.duration"
INVOKE_AGENT_DURATION: Final = "gen_ai.invoke_agent.duration"
INVOKE_WORKFLOW_DURATION: Final = "gen_ai.invoke_workflow.duration"
COST: Final = "handrail.cost"
CACHE_TOKENS: Final = "handrail.cache.tokens"
QUEUE_WAIT: Final = "handrail.queue.wait"
QUESTION_WAIT: Final = "handrail.question.wait"
APPROVAL_WAIT: Final = "handrail.approval.wait"
LEGS: Final = "handrail.legs"

# --- values ----------------------------------------------------------------------------------------

PROVIDERS: Final = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "google": "gcp.gemini",
    "mistral": "mistral_ai",
    "vertex": "gcp.vertex_ai",
    "xai": "x_ai",
}
"""The conventions' names of providers that Handrail names differently."""
OTHER: Final = "_OTHER"
"""The conventions' value for what has no name of its own."""


def split_model(model: str) -> tuple[str | None, str]:
    """Return the conventions' name of a model's provider, None if it has none, and the rest of the model's name."""
    provider, colon, name = model.partition(":")
    return (PROVIDERS.get(provider, provider), name) if colon else (None, model)
