"""The table of providers: for each, its API (its wire), its address, its keys, and its differences from that API.

A provider whose API is supported needs only a row in the table. Other providers are reached through the bridge.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from handrail.errors import DefinitionError
from handrail.messages import Price, Takes
from handrail.models.grammar import CHAT_ID, MISTRAL_ID
from handrail.models.media import AUDIO, CHAT_TAKES, DOCUMENTS, IMAGES, ONLY_AUDIO, ONLY_IMAGES, ONLY_TEXT

Wire = Literal["chat", "anthropic", "gemini", "embedded", "demo"]
"""The API that a provider speaks. Each has a class in `WIRES`."""

WIRES: Mapping[Wire, tuple[str, str]] = {
    "chat": ("handrail.models.openai", "OpenAIModel"),
    "anthropic": ("handrail.models.anthropic", "AnthropicModel"),
    "gemini": ("handrail.models.gemini", "GeminiModel"),
    "embedded": ("handrail.models.local", "LocalModel"),
    "demo": ("handrail.models.scripted", "DemoModel"),
}
"""Module and class of each wire's models."""


class Key(msgspec.Struct, frozen=True):
    """The environment variable that holds an API key, and the header in which the key is sent."""

    variable: str
    header: str = "authorization"
    prefix: str = "Bearer "

    def find(self) -> str:
        """Return the key, or "" if its variable is not set."""
        return os.environ.get(self.variable, "").strip()


class Quirks(msgspec.Struct, frozen=True, kw_only=True):
    """The ways in which a server differs from OpenAI's chat completions."""

    limit: str = "max_tokens"
    """The field that limits the length of an answer."""
    seed: str = "seed"
    """The field for the `seed` in `ModelSettings`."""
    stream_options: bool = True
    """Whether a request for a stream may have `stream_options`. A server that refuses them reports its tokens anyway."""
    native_output: bool = True
    """Whether every model can be constrained to a JSON Schema, even while it has tools."""
    ids: re.Pattern[str] = CHAT_ID
    """Matches the call ids that the server accepts."""
    user_after_tool: bool = True
    """Whether a user's message may follow the result of a call directly."""
    sent_back: tuple[str, ...] | None = None
    """The fields that the server adds to its answers and requires back; None for all that it adds.

    Content with parts that are not text counts as a field, and what the server adds to a call is always sent back.
    """
    thought_with_calls: str = ""
    """The field for the model's thinking, which the server requires in each answer with calls that is sent back to it; "" if there is none."""
    lacks: frozenset[str] = frozenset()
    """The settings in `ModelSettings` that the server does not have."""
    forced: re.Pattern[str] = re.compile("")
    """Matches the names of the models that can be forced to answer with a call. Other models refuse a request that forces a call."""
    finds_tools: re.Pattern[str] = re.compile("(?!)")
    """Matches the names of the models that find tools by themselves, with the responses API's `tool_search`."""
    takes: Takes = CHAT_TAKES
    """The attachments that the model in use takes. The table does not set this field, because it depends on the model's name."""


class Address(msgspec.Struct, frozen=True):
    """An environment variable with the address of a server, and the path to append to it."""

    variable: str
    path: str = ""
    port: int | None = None
    """The port to add to an http address without one, as in `OLLAMA_HOST=10.0.0.5`; None to add none."""

    def find(self) -> str:
        """Return the address in the variable, with the port and the path added if they are missing, or "" if it is not set."""
        given = os.environ.get(self.variable, "").strip().rstrip("/")
        if not given:
            return ""
        if self.port is not None:
            given = _with_port(given, self.port)
        return given if given.endswith(self.path) else given + self.path


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider, as a row of the table."""

    wire: Wire = "chat"
    address: str = ""
    """The default address; "" if each user has a different one, or if there is no server."""
    addresses: tuple[Address, ...] = ()
    """The variables that replace the default address. The first that is set counts."""
    keys: tuple[Key, ...] = ()
    """The keys to look for. The first one whose variable is set is sent."""
    headers: Mapping[str, str] = {}
    """Additional headers, each with the environment variable that has its value."""
    is_own: bool = False
    """Whether people run the server themselves. Such a server needs no key, and its tokens cost nothing."""
    quirks: Quirks = Quirks()
    takes: Mapping[str, Takes] = {}
    """The attachments that models take, by a pattern that matches the beginning of their names. The first match counts.

    The rows follow the providers' own lists of models. A model without a match is sent whatever the wire can send, and its
    provider refuses what the model does not take.
    """
    start: str = ""
    """The command that starts a self-hosted server; "" if there is no such command."""

    def find_address(self) -> str:
        """Return the address to use: from the environment, or else the default one."""
        return next((found for each in self.addresses if (found := each.find())), self.address)

    def find_headers(self) -> dict[str, str]:
        """Return the additional headers whose variables are set."""
        found = {name: os.environ.get(variable, "").strip() for name, variable in self.headers.items()}
        return {name: value for name, value in found.items() if value}

    def needs_key(self, address: str) -> bool:
        """Return whether requests to a server at this address need a key.

        A self-hosted server needs none, nor does a server that replaces the provider's own.
        """
        return not self.is_own and (not self.address or address == self.address)

    def quirks_at(self, address: str) -> Quirks:
        """Return the quirks of a server at this address.

        A different server that stands in for the provider may know only the older `max_tokens`. It gets back all fields
        that it adds, unless the provider's own row names some.
        """
        own = self.quirks
        if not self.address or address == self.address or self.is_own:
            return own
        return msgspec.structs.replace(
            own, limit="max_tokens", sent_back=own.sent_back or None, finds_tools=Quirks().finds_tools
        )

    def takes_at(self, address: str, model: str, wire: Takes) -> Takes:
        """Return which of the attachments that a wire can send are taken by a model at this address.

        Nothing is known about the models of a server that replaces the provider's own, so they may be sent everything.
        """
        if self.address and address != self.address and not self.is_own:
            return wire
        found = (each for names, each in self.takes.items() if re.match(names, model))
        return wire.within(next(found, wire))


def _with_port(given: str, port: int) -> str:
    """Return a complete address for a host, a host with a port, or an address.

    `0.0.0.0` and `::` become 127.0.0.1. An http address without a port gets `port`.
    """
    parts = urlsplit(given if "://" in given else f"http://{given}")
    host = parts.hostname or ""
    host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    own = parts.port if parts.port is not None else port if parts.scheme == "http" else None
    return f"{parts.scheme}://{host}{'' if own is None else f':{own}'}{parts.path}"


# --- servers ---


class ModelServer(msgspec.Struct, frozen=True):
    """The server of one model: the provider's own, or one that replaces it."""

    model: str
    """The full name of the model."""
    row: Provider
    address: str
    keys: tuple[Key, ...]
    takes: Takes
    """The attachments that the model takes."""


def server_of(
    wire: Wire,
    sends: Takes,
    provider: str,
    name: str,
    base_url: str | None,
    key_variable: str | None,
    takes: Takes | None,
    api_key: object,
    key_header: str = "",
) -> ModelServer:
    """Return the server of a model, from the arguments of its constructor. `sends` are the attachments that the wire can send.

    The keys to look for are the row's, or one with this variable or header. If `key_variable` is None, there are none. Raises
    `DefinitionError` if no provider of this name speaks this wire, if it has no address, or if a key was passed in code instead of the environment.
    """
    row = PROVIDERS.get(provider)
    if row is None or row.wire != wire:
        known = ", ".join(name for name, each in PROVIDERS.items() if each.wire == wire)
        raise DefinitionError(f"no provider {provider!r} speaks this API. Pass one of {known}.")
    keys = _keys_of(row, key_variable, key_header)
    if api_key is not None:
        variable = keys[0].variable if keys else "a variable"
        raise DefinitionError(
            f"a model takes no api_key: keys come from the environment. Set {variable}, or name a different one with "
            "`key_variable`."
        )
    model = f"{provider}:{name}"
    address = row.find_address() if base_url is None else base_url.strip().rstrip("/")
    if not address:
        variables = " or ".join(each.variable for each in row.addresses)
        raise DefinitionError(
            f"model {model!r} has no address. Set {variables} in the environment, or pass base_url."
        )
    taken = row.takes_at(address, name, sends) if takes is None else sends.within(takes)
    return ModelServer(model, row, address, keys, taken)


def _keys_of(row: Provider, variable: str | None, header: str) -> tuple[Key, ...]:
    if variable is None:
        return ()
    first = row.keys[0]
    if not variable and not header:
        return row.keys
    name = header.lower() or first.header
    prefix = first.prefix if name == first.header else "Bearer " if name == "authorization" else ""
    return (Key(variable or first.variable, name, prefix),)


# --- the table ---

FREE = Price(Decimal(0), Decimal(0))
"""The price of tokens from a self-hosted server."""

PROVIDERS: Mapping[str, Provider] = {
    "openai": Provider(
        address="https://api.openai.com/v1",
        addresses=(Address("OPENAI_BASE_URL"),),
        keys=(Key("OPENAI_API_KEY"),),
        headers={"openai-organization": "OPENAI_ORG_ID", "openai-project": "OPENAI_PROJECT_ID"},
        quirks=Quirks(
            limit="max_completion_tokens",
            sent_back=(),
            finds_tools=re.compile(r"gpt-(5\.[4-9]|[6-9])(?!.*-nano)"),
        ),
        takes={
            r"(ft:)?(gpt-3\.5|gpt-4(-\d{4}|-32k|-turbo-preview)*(:|-preview|$)|davinci|babbage)": ONLY_TEXT,
            r"o1-(mini|preview)|o3-mini|gpt-4o(-mini)?-search": ONLY_TEXT,
            r"gpt-(4o-(mini-)?)?audio": ONLY_AUDIO,
            "": Takes(IMAGES | DOCUMENTS, IMAGES | DOCUMENTS),
        },
    ),
    "anthropic": Provider(
        wire="anthropic",
        address="https://api.anthropic.com",
        addresses=(Address("ANTHROPIC_BASE_URL"),),
        keys=(Key("ANTHROPIC_API_KEY", "x-api-key", ""), Key("ANTHROPIC_AUTH_TOKEN")),
        takes={"claude-(2|instant)": ONLY_TEXT},
    ),
    "google": Provider(
        wire="gemini",
        address="https://generativelanguage.googleapis.com/v1beta",
        addresses=(Address("GOOGLE_GEMINI_BASE_URL", "/v1beta"),),
        keys=(Key("GOOGLE_API_KEY", "x-goog-api-key", ""), Key("GEMINI_API_KEY", "x-goog-api-key", "")),
        takes={
            r"(models/)?(gemma-3-1b|gemini-.*-tts)": ONLY_TEXT,
            r"(models/)?(gemma-(3-|4)|gemini-.*-image)": ONLY_IMAGES,
        },
    ),
    "azure": Provider(
        addresses=(Address("AZURE_OPENAI_ENDPOINT", "/openai/v1"),),
        keys=(Key("AZURE_OPENAI_API_KEY", "api-key", ""),),
        quirks=Quirks(limit="max_completion_tokens", sent_back=()),
    ),
    "deepseek": Provider(
        address="https://api.deepseek.com",
        addresses=(Address("DEEPSEEK_BASE_URL"),),
        keys=(Key("DEEPSEEK_API_KEY"),),
        quirks=Quirks(
            lacks=frozenset(["verbosity", "service_tier", "seed", "parallel_calls", "cache_key"]),
            native_output=False,
            sent_back=("reasoning_content",),
            thought_with_calls="reasoning_content",
            forced=re.compile("deepseek-chat"),  # all others think, and can't be forced
        ),
        takes={r"deepseek-(v4(\.1)?-)?flash": ONLY_IMAGES, "": ONLY_TEXT},
    ),
    "groq": Provider(
        address="https://api.groq.com/openai/v1",
        addresses=(Address("GROQ_BASE_URL", "/openai/v1"),),
        keys=(Key("GROQ_API_KEY"),),
        quirks=Quirks(
            lacks=frozenset(["verbosity", "cache_key"]),
            limit="max_completion_tokens",
            native_output=False,
            sent_back=(),
        ),
        takes={r"meta-llama/llama-4|qwen/qwen3\.8": ONLY_IMAGES, "": ONLY_TEXT},
    ),
    "mistral": Provider(
        address="https://api.mistral.ai/v1",
        addresses=(Address("MISTRAL_BASE_URL"),),
        keys=(Key("MISTRAL_API_KEY"),),
        quirks=Quirks(
            lacks=frozenset(["verbosity", "service_tier", "cache_key"]),
            seed="random_seed",
            stream_options=False,
            ids=MISTRAL_ID,
            user_after_tool=False,
            sent_back=("content",),
        ),
        takes={
            r"codestral|devstral|mistral-code|open-|(zai-)?glm|mistral-(tiny|embed|saba|nemo)": ONLY_TEXT,
            r"(mistral|ministral)-.*-24\d\d$|mistral-small-2501$": ONLY_TEXT,
            "voxtral": ONLY_AUDIO,
            "": ONLY_IMAGES,
        },
    ),
    "moonshotai": Provider(
        address="https://api.moonshot.ai/v1",
        addresses=(Address("MOONSHOTAI_BASE_URL"), Address("MOONSHOT_BASE_URL")),
        keys=(Key("MOONSHOTAI_API_KEY"), Key("MOONSHOT_API_KEY")),
        quirks=Quirks(
            lacks=frozenset(["verbosity", "service_tier", "seed", "parallel_calls"]),
            limit="max_completion_tokens",
            native_output=False,
            sent_back=("reasoning_content",),
            thought_with_calls="reasoning_content",
            forced=re.compile("moonshot-v1"),  # Kimi models think, and then choose for themselves
        ),
        takes={r"moonshot-v1-(8k|32k|128k|auto)$|kimi-k2(-|$)": ONLY_TEXT, "": Takes(IMAGES)},
    ),
    "openrouter": Provider(
        address="https://openrouter.ai/api/v1",
        addresses=(Address("OPENROUTER_BASE_URL"),),
        keys=(Key("OPENROUTER_API_KEY"),),
        quirks=Quirks(native_output=False, sent_back=("reasoning_details", "images")),
    ),
    "lmstudio": Provider(
        address="http://localhost:1234/v1",
        addresses=(Address("LMSTUDIO_BASE_URL"),),
        keys=(Key("LMSTUDIO_API_KEY"),),
        is_own=True,
        start="lms server start",
        takes={"": Takes(IMAGES - {"image/gif"})},
        quirks=Quirks(lacks=frozenset(["verbosity", "service_tier", "parallel_calls", "cache_key"])),
    ),
    "ollama": Provider(
        address="http://localhost:11434/v1",
        addresses=(Address("OLLAMA_BASE_URL"), Address("OLLAMA_HOST", "/v1", 11434)),
        keys=(Key("OLLAMA_API_KEY"),),
        is_own=True,
        start="ollama serve",
        takes={"": Takes(IMAGES - {"image/gif"})},
        quirks=Quirks(
            lacks=frozenset(["verbosity", "service_tier", "parallel_calls", "tool_choice", "cache_key"])
        ),
    ),
    "vllm": Provider(
        address="http://localhost:8000/v1",
        addresses=(Address("VLLM_BASE_URL"),),
        keys=(Key("VLLM_API_KEY"),),
        is_own=True,
        start="vllm serve MODEL",
        takes={"": Takes(IMAGES | AUDIO, IMAGES)},
        quirks=Quirks(lacks=frozenset(["verbosity", "service_tier", "cache_key"])),
    ),
    "local": Provider(wire="embedded", is_own=True),
    "demo": Provider(wire="demo", is_own=True),
}

BRIDGED = frozenset(
    [
        "alibaba",
        "bedrock",
        "bedrock-mantle",
        "cerebras",
        "cohere",
        "crusoe",
        "fireworks",
        "gateway",
        "github",
        "google-cloud",
        "google-gla",
        "google-vertex",
        "grok",
        "heroku",
        "huggingface",
        "litellm",
        "meta",
        "nebius",
        "openai-chat",
        "openai-decisions",
        "openai-responses",
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
"""The providers of the bridge. These names always mean a provider, so a module of the same name is never imported."""
