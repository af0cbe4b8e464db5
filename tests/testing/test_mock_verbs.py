"""Mock contexts behave like real ones: signals, streamed text, approvals, wordings and workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

import pytest

from handrail.errors import NotSupported, RunError
from handrail.question import Wording
from handrail.testing import (
    agent_context,
    cancel,
    headless_context,
    recorded,
    user_context,
    worker_context,
)
from handrail.testing.contexts import MockApprovals


@dataclass(frozen=True)
class Name:
    """The type of the reply that a test asks a model for."""

    name: str


async def test_a_mock_signal_fires_when_the_context_is_cancelled() -> None:
    """`cancel` fires the signal: a wait that has begun returns, and so does any later one."""
    context = headless_context()
    assert not context.signal.cancelled
    waiting = asyncio.ensure_future(context.signal.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    cancel(context)
    await waiting
    await context.signal.wait()
    assert context.signal.cancelled


def test_a_sync_handler_waits_for_a_mock_signal() -> None:
    """In a script, waiting for a signal that has already fired returns immediately."""
    context = headless_context()
    cancel(context)
    context.signal.wait().wait()
    assert context.signal.cancelled


def test_only_a_mock_can_be_cancelled() -> None:
    """`cancel` refuses a context that was given its own signal."""
    with pytest.raises(NotSupported, match="cancelled this way"):
        cancel(headless_context(signal=object()))


async def test_on_text_gets_the_reply_in_chunks() -> None:
    """The chunks that `on_text` gets make up the reply as the model would write it."""
    chunks = list[str]()
    context = agent_context({"name": {"name": "Ada"}})
    assert await context.prompt_model("Your name?", Name, on_text=chunks.append) == Name("Ada")
    assert len(chunks) == 2
    assert "".join(chunks) == '{"name":"Ada"}'


async def test_an_async_on_text_is_awaited() -> None:
    """An async `on_text` is awaited for each chunk before the reply is returned."""
    chunks = list[str]()

    async def hear(chunk: str) -> None:
        await asyncio.sleep(0)
        chunks.append(chunk)

    context = agent_context({"name": {"name": "Ada"}})
    assert await context.prompt_model("Your name?", Name, on_text=hear) == Name("Ada")
    assert "".join(chunks) == '{"name":"Ada"}'


async def test_a_question_has_its_wording_and_may_ask_for_text() -> None:
    """Without a schema the answer is text.

    The record contains the message and the title that a person would read, even if they are defaults.
    """
    context = user_context({"visit": "noon", "meal": "fish"})
    assert await context.wait_for("visit", message="When shall we come?") == "noon"
    assert await context.wait_for("meal", {}, Literal["fish", "rice"]) == "fish"
    assert recorded(context).wordings == [
        Wording("When shall we come?", "Visit"),
        Wording("Please answer: meal.", "Meal"),
    ]


def test_a_mock_has_approvals() -> None:
    """By default, a mock context has no approval mode and remembers nothing. A test can pass its own controller."""
    assert (headless_context().approval_controller.mode, headless_context().approval_controller.list()) == (
        None,
        (),
    )
    assert headless_context(approval_controller=MockApprovals("strict")).approval_controller.mode == "strict"


async def test_a_worker_may_have_a_person_and_records_its_attachments() -> None:
    """A worker's context can have both a person and a model; by default it has no person.

    Its record lists the workers that were called, with their attachments.
    """
    context = worker_context(results={"reader": "read"}, answers={"meal": "fish"}, replies={"meal": "rice"})
    assert await context.call_worker("reader", "go", attachments=["a.txt"]) == "read"
    assert recorded(context).workers == [("reader", "go", ("a.txt",))]
    assert context.wait_for is not None
    assert context.prompt_model is not None
    assert await context.wait_for("meal") == "fish"
    assert await context.prompt_model("Which meal?", str) == "rice"
    assert worker_context().wait_for is None


async def test_background_runs_are_recorded_and_not_executed() -> None:
    """A mock context records what was begun, and returns a handle whose run has not begun."""
    context = headless_context()
    begun = context.spawn("helper", "hello")
    assert recorded(context).spawned == [("helper", "hello")]
    with pytest.raises(RunError, match="later call"):
        await begun.wait()
