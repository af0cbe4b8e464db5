"""Models, one class per kind of provider. Each implements the `Model` protocol, which streams an answer in parts.

This module also defines the errors of model requests. `ModelError`, their base class, is in `handrail.errors`.

ModelError
├── ModelRateLimited                     transient: too many requests
├── ModelUnavailable (ConnectionError)   transient: not reachable, or not able to answer
├── ModelAnswerBroken (ValueError)       transient: the answer was cut off or can't be read
└── ModelRequestRefused (ValueError)     the request is wrong: a retry won't help
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from handrail.errors import DefinitionError, ModelError
from handrail.messages import Model

PROVIDERS = {
    "openai": ("handrail.models.openai", "OpenAIModel"),
    "anthropic": ("handrail.models.anthropic", "AnthropicModel"),
    "local": ("handrail.models.local", "LocalModel"),
    "demo": ("handrail.models.scripted", "DemoModel"),
}
"""Module and class of each provider whose API Handrail implements itself. Other providers use `BridgedModel`."""

BRIDGED = frozenset(
    [
        "alibaba",
        "azure",
        "bedrock",
        "bedrock-mantle",
        "cerebras",
        "cohere",
        "crusoe",
        "deepseek",
        "fireworks",
        "gateway",
        "github",
        "google",
        "google-cloud",
        "google-gla",
        "google-vertex",
        "grok",
        "groq",
        "heroku",
        "huggingface",
        "litellm",
        "meta",
        "mistral",
        "moonshotai",
        "nebius",
        "ollama",
        "openai-chat",
        "openai-decisions",
        "openai-responses",
        "openrouter",
        "outlines",
        "ovhcloud",
        "sambanova",
        "snowflake",
        "test",
        "together",
        "typesafe",
        "vercel",
        "xai",
        "zai",
    ]
)
"""Names that always mean a provider, so that a module of the same name in a folder is never imported in its place."""


def model_named(name: str) -> Model:
    """Return the model named `provider:name`, which all callers share. It reads its API key from the environment."""
    provider, model = check_name(name)
    made = _made.get(name)
    if made is None:
        module, kind = PROVIDERS.get(provider, ("handrail.models.bridge", "BridgedModel"))
        make: Callable[[str], Model] = getattr(import_module(module), kind)
        made = _made[name] = make(model if provider in PROVIDERS else name)
    return made


def check_name(name: str) -> tuple[str, str]:
    """Split a model's name, `provider:name`, without loading the model. Raises `DefinitionError` for an invalid name."""
    provider, colon, model = name.partition(":")
    if not colon or not provider or not model:
        raise DefinitionError(
            f"{name!r} is not the name of a model. Write provider:name, for example openai:gpt-5, "
            "anthropic:claude-sonnet-5 or local:smollm2-135m."
        )
    import difflib

    near = difflib.get_close_matches(provider, PROVIDERS, n=1, cutoff=0.85)
    if provider not in PROVIDERS and (near or provider == "scripted"):
        hint = (
            f"Did you mean {near[0]}:{model}?"
            if near
            else "Create a ScriptedModel in code and pass it instead of a name."
        )
        raise DefinitionError(f"there is no provider {provider!r}. {hint}")
    return provider, model


_made: dict[str, Model] = {}
"""Models by name. All users of a name share one model and its connections."""


class ModelRateLimited(ModelError):
    """Raised if the provider's rate limit has been reached."""

    transient = True


class ModelUnavailable(ModelError, ConnectionError):
    """Raised if the provider can't be reached or can't answer."""

    transient = True


class ModelAnswerBroken(ModelError, ValueError):
    """Raised if the answer was cut off or can't be read. No part of the answer is used."""

    transient = True


class ModelRequestRefused(ModelError, ValueError):
    """Raised if a request is refused, for example because its key, model or settings are wrong. A retry won't help."""
