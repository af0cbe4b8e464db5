"""Tests with fuzzed answers from providers: a run returns or fails with a `ModelError`, and the conversation stays well-formed."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import event, given, target
from hypothesis import strategies as st

from handrail import PromptResponse
from handrail.errors import ModelError
from handrail.events import ToolInvoked
from support.provider_streams import EVENTS, WHOLE, WIRES, answered, body_of


@st.composite
def broken(draw: st.DrawFn, body: bytes) -> bytes:
    """Draw a body in which bytes are replaced, removed or repeated in at most two places."""
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(body)))
        until = min(at + draw(st.integers(0, 12)), len(body))
        junk = draw(
            st.binary(max_size=3)
            | st.sampled_from([b"\xff", b"\xe2\x82", b"\n\n", b"[" * 3000, b"data: ", b"\r"])
        )
        body = body[:at] + draw(st.sampled_from([junk, body[at:until] * 2, b""])) + body[until:]
    return body


@st.composite
def chunks(draw: st.DrawFn, body: bytes) -> list[bytes]:
    """Draw the chunks in which a body arrives."""
    cuts = sorted({0, len(body), *draw(st.lists(st.integers(0, len(body)), max_size=4))})
    return [body[start:end] for start, end in itertools.pairwise(cuts)]


def run(wire: str, bodies: list[list[bytes]], stream: bool) -> None:
    outcome = asyncio.run(answered(wire, bodies, stream))
    assert isinstance(outcome, PromptResponse | ModelError)
    if isinstance(outcome, ModelError):
        event(type(outcome).__name__)
    else:
        calls = len(outcome.session[ToolInvoked].all())
        event(f"{min(calls, 3)} calls")
        target(float(calls), label="calls")


@pytest.mark.parametrize("wire", WIRES)
@given(st.data())
def test_any_complete_answer(wire: str, data: st.DataObject) -> None:
    """Whatever the body, the run returns or fails with a `ModelError`, and every wire accepts the conversation."""
    answers = data.draw(
        st.lists(WHOLE[wire].map(lambda each: body_of([each], False)), min_size=1, max_size=2)
    )
    run(wire, [[data.draw(broken(each))] for each in answers], False)


@pytest.mark.parametrize("wire", WIRES)
@given(st.data())
def test_any_stream_of_events(wire: str, data: st.DataObject) -> None:
    """Whatever events and chunks arrive, the run returns or fails with a `ModelError`, and every wire accepts the conversation."""
    answers = data.draw(st.lists(EVENTS[wire].map(lambda each: body_of(each, True)), min_size=1, max_size=2))
    run(wire, [data.draw(broken(each).flatmap(chunks)) for each in answers], True)


@pytest.mark.parametrize("wire", WIRES)
@given(st.data())
async def test_the_chunks_of_a_stream_do_not_matter(wire: str, data: st.DataObject) -> None:
    """A run's outcome does not depend on how a stream is split into chunks."""
    body = data.draw(EVENTS[wire].map(lambda each: body_of(each, True)).flatmap(broken))
    pieces = data.draw(chunks(body))

    whole, split = [await answered(wire, [each], True) for each in ([body], pieces)]
    assert type(whole) is type(split)
    if isinstance(whole, PromptResponse) and isinstance(split, PromptResponse):
        assert (whole.text, whole.stop_reason, whole.usage) == (
            split.text,
            split.stop_reason,
            split.usage,
        )
