"""google-adk: a `BaseLlm` stub in process, and LiteLlm over HTTP (in a venv of its own).

Creating a session is part of each run. A session's state must be plain data, so it contains a key that identifies the
run's context.
"""

# pyright: basic, reportMissingImports=false
# The framework is installed in its own venv, which the type checker does not see.

from __future__ import annotations

import itertools
import logging
import os
from typing import Any

os.environ["OTEL_SDK_DISABLED"] = "true"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise prices are fetched at import

from google.adk.agents import LlmAgent, RunConfig
from google.adk.models import BaseLlm, LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools import ToolContext
from google.genai import types

from peer import Peer, main
from work import PROMPT, SYSTEM, Context

logging.getLogger("google_adk").setLevel(logging.ERROR)
CONTEXTS: dict[str, Context] = {}
KEYS = itertools.count()
RUN_CONFIG = RunConfig(max_llm_calls=1_000_000)  # the default stops after 500 model calls


class StubLlm(BaseLlm):
    script: Any

    async def generate_content_async(self, llm_request, stream=False):
        newest = llm_request.contents[-1].parts[-1]
        result = newest.function_response
        turn = await self.script.aturn(result.response if result else newest.text or "")
        parts = [
            types.Part(function_call=types.FunctionCall(id=call.id, name=call.name, args=call.args))
            for call in turn.calls
        ]
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=10, candidates_token_count=5, total_token_count=15
        )
        content = types.Content(role="model", parts=parts or [types.Part(text=turn.text)])
        yield LlmResponse(content=content, usage_metadata=usage)


async def work(index: int, label: str, tool_context: ToolContext) -> dict:
    """Do one unit of work and return its record."""
    return CONTEXTS[tool_context.state["run"]].work(index, label)


class Adk(Peer):
    name = "adk"
    dists = ("google-adk", "google-genai", "litellm", "openai", "pydantic", "aiohttp")

    def __init__(self, options):
        super().__init__(options)
        if self.http:
            import litellm
            from google.adk.models.lite_llm import LiteLlm

            litellm.telemetry = False
            litellm.suppress_debug_info = True
            self.lite = LiteLlm

    def build(self, script):
        if self.http:
            model = self.lite(model="openai/" + script.model_name, api_base=self.base_url, api_key="x")
        else:
            model = StubLlm(model="stub", script=script)
        agent = LlmAgent(name="agent", description="Works.", instruction=SYSTEM, model=model, tools=[work])
        return Runner(app_name="bench", agent=agent, session_service=InMemorySessionService())

    async def run(self, agent, context):
        key = f"r{next(KEYS)}"
        CONTEXTS[key] = context
        session = await agent.session_service.create_session(
            app_name="bench", user_id="u", state={"run": key}
        )
        message = types.Content(role="user", parts=[types.Part(text=PROMPT)])
        answer = None
        async for event in agent.run_async(
            user_id="u", session_id=session.id, run_config=RUN_CONFIG, new_message=message
        ):
            if event.is_final_response() and event.content and event.content.parts:
                answer = "".join(part.text or "" for part in event.content.parts)
        del CONTEXTS[key]
        return answer


if __name__ == "__main__":
    main(Adk)
