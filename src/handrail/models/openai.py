"""`OpenAIModel`: OpenAI's two wires, and every server that speaks one of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from handrail.errors import DefinitionError
from handrail.messages import ModelPart, ModelRequest, Price, Traits
from handrail.models import chat_completions, responses
from handrail.models.http import Provider, refuse_key

_OPENAI = "https://api.openai.com/v1"


class OpenAIModel:
    """A model behind an OpenAI-compatible server.

    `OpenAIModel("gpt-5")` is OpenAI's own, with its key in `OPENAI_API_KEY`. For any other server (vLLM,
    Ollama, llama.cpp, Azure) pass its `base_url`. `key_variable` names the environment variable with its
    key, if it needs one, and `key_header="api-key"` sends the key as Azure expects it. `options` are
    further fields of the request, such as `{"reasoning_effort": "low"}`.
    """

    def __init__(
        self,
        name: str,
        *,
        api: Literal["chat", "responses"] = "chat",
        base_url: str = _OPENAI,
        key_variable: str | None = "OPENAI_API_KEY",
        key_header: str = "authorization",
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        native_output: bool = True,
        price: Price | None = None,
        silence: float = 300.0,
        api_key: None = None,
    ) -> None:
        refuse_key(api_key, key_variable)
        if api not in ("chat", "responses"):
            raise DefinitionError(f"OpenAIModel has no API {api!r}. Give 'chat' or 'responses'.")
        self.name = f"openai:{name}"
        self.traits = Traits(price, native_output)
        self._wire = chat_completions if api == "chat" else responses
        own = base_url == _OPENAI
        self._provider = Provider(
            self.name,
            base_url,
            key_variable=key_variable,
            key_header=key_header.lower(),
            key_prefix="Bearer " if key_header.lower() == "authorization" else "",
            key_needed=own,
            headers=headers,
            silence=silence,
        )
        self._fields = {"model": name, **(options or {})}
        self._most = "max_completion_tokens" if own else "max_tokens"

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        return self._wire.stream(self._provider, self._fields, request, self._most)

    def __repr__(self) -> str:
        return f"OpenAIModel({self.name!r})"
