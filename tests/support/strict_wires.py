"""Check the requests of a test run with the wire grammars, so that a test fails if it makes a request that they refuse.

Every request over HTTP is checked as the bytes that are sent, whichever server receives them. If `every` is set, each
request to any model, even one in process, is also encoded for all wires and checked on each, unless it is longer than
`LONGEST`. conftest.py calls `watch()` once and `take_refused()` after each test. `summary()` says how many requests were
checked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from handrail.messages import DEFAULT_SETTINGS, ModelRequest
from handrail.models import anthropic, gemini, openai, responses
from handrail.models.http import Endpoint
from handrail.models.providers import Quirks
from handrail.run.evaluation import Evaluation
from support import wire_grammar

LONGEST = 64
"""Maximum number of messages in a conversation that is checked on all wires. Longer ones are skipped."""

refused: list[str] = []
"""The problems that the grammars have found in requests since the last `take_refused()`."""
every = False
"""Whether requests to any model are checked on all wires."""
asked = 0
"""The number of requests that were checked on all wires."""


def take_refused() -> list[str]:
    """Return and clear the problems that the grammars have found since the last call."""
    taken = refused[:]
    refused.clear()
    return taken


def summary() -> str:
    """Return a line that says how many requests were checked."""
    sent = ", ".join(f"{count} {wire}" for wire, count in sorted(wire_grammar.seen.items()))
    return f"wire grammars: {sent or 'no requests'} (of them {asked} requests on all wires)"


def note(path: str, body: bytes) -> None:
    """Check a request. If it is refused, keep the problem until `take_refused()` returns it."""
    try:
        wire_grammar.check(path, body)
    except wire_grammar.WireRefused as problem:
        refused.append(str(problem))


_GEMINI = gemini.GeminiModel("m", key_variable=None)
_ANTHROPIC = anthropic.AnthropicModel("m", key_variable=None)


def bodies(request: ModelRequest) -> dict[str, bytes]:
    """Return the encoded bodies of a request, by wire. Only the wires that load deferred tools are sent such tools."""
    fields = {"model": "m"}
    # Settings and providers' tools are left out, because a wire refuses those that it does not have.
    request = msgspec.structs.replace(request, settings=DEFAULT_SETTINGS, provider_tools=())
    body = responses._body(fields, request, "responses:openai", searcher=request.searcher)
    loading = {"responses": body, "messages": _ANTHROPIC._body(request)}
    if request.searcher:
        return loading
    chat = openai._body(fields, request, Quirks(), "chat:openai")
    return {**loading, "chat": chat, "gemini": _GEMINI._body(request)}


def check_everywhere(request: ModelRequest) -> list[str]:
    """Return what the grammar of each wire refuses in this request."""
    return [
        f"{wire}: {problem}"
        for wire, body in bodies(request).items()
        for problem in wire_grammar.problems(wire, body)
    ]


def watch() -> None:
    """Start checking the requests that this process makes to models."""
    post, request = Endpoint._post, Evaluation.request

    @asynccontextmanager
    async def checked_post(self: Endpoint, path: str, body: bytes) -> AsyncGenerator[Any]:
        note(path, body)
        async with post(self, path, body) as response:
            yield response

    def checked_request(self: Evaluation, max_tokens: int | None = None) -> ModelRequest:
        global asked
        made = request(self, max_tokens)
        if every and len(made.messages) <= LONGEST:
            asked += 1
            refused.extend(check_everywhere(made))
        return made

    Endpoint._post = checked_post
    Evaluation.request = checked_request
