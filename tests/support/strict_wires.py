"""Applies the wire grammars to the requests of a test run, and fails the test that made a request they refuse.

Every request over HTTP is checked as the bytes that are sent, whichever server receives them. With `every`, each
request to any model, in-process ones included, is also encoded for all three wires and checked on each.
conftest.py calls `watch()` once and `take_refused()` after each test; `summary()` says how many requests were seen.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from handrail.adapter.run import Run
from handrail.messages import ModelRequest
from handrail.models import anthropic, openai, responses
from handrail.models.http import Provider
from support import wire_grammar

LONGEST = 64
"""Most messages of a conversation that is checked on all wires. Longer ones are those of tests that count."""

refused: list[str] = []
"""What the grammars refused since the last `take_refused()`."""
every = False
"""Whether requests to in-process models are checked too."""
asked = 0
"""The number of requests that were checked on all wires."""


def take_refused() -> list[str]:
    """Return what the grammars refused since the last call."""
    taken = refused[:]
    refused.clear()
    return taken


def summary() -> str:
    """Say how many requests were checked."""
    sent = ", ".join(f"{count} {wire}" for wire, count in sorted(wire_grammar.seen.items()))
    return f"wire grammars: {sent or 'no requests'} (of them {asked} requests on all three wires)"


def note(path: str, body: bytes) -> None:
    """Check a request, and keep what is refused for the end of the test."""
    try:
        wire_grammar.check(path, body)
    except wire_grammar.WireRefused as problem:
        refused.append(str(problem))


_ANTHROPIC = anthropic.AnthropicModel("m", key_variable=None)


def bodies(request: ModelRequest) -> dict[str, bytes]:
    """Return the body of a request on each wire."""
    fields = {"model": "m"}
    return {
        "chat": openai._body(fields, request, "max_tokens"),
        "responses": responses._body(fields, request),
        "messages": _ANTHROPIC._body(request),
    }


def check_everywhere(request: ModelRequest) -> list[str]:
    """Return what each wire would refuse in this request."""
    return [
        f"{wire}: {problem}"
        for wire, body in bodies(request).items()
        for problem in wire_grammar.problems(wire, body)
    ]


def watch() -> None:
    """Check all requests of this process from now on."""
    post, request = Provider._post, Run.request

    @asynccontextmanager
    async def checked_post(self: Provider, path: str, body: bytes) -> AsyncGenerator[Any]:
        note(path, body)
        async with post(self, path, body) as response:
            yield response

    def checked_request(self: Run, max_tokens: int | None = None) -> ModelRequest:
        global asked
        made = request(self, max_tokens)
        if every and len(made.messages) <= LONGEST:
            asked += 1
            refused.extend(check_everywhere(made))
        return made

    Provider._post = checked_post
    Run.request = checked_request
