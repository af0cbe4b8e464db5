"""The loop under attack: threads, broken text, odd moments."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from handrail import Adapter, Budget, OpenAIModel, Prompt, ScriptedModel, Session, tool
from handrail.errors import ConversationBusy
from handrail.messages import AssistantMessage, UserMessage
from handrail.models.scripted import Reply
from handrail.session import load, save
from raw_server import raw_server, said

PLAIN = Prompt("p", "Go.")


# --- threads -----------------------------------------------------------------------------------


@pytest.fixture
def threads_take_turns() -> Iterator[None]:
    """Threads change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_take_turns")
def test_two_threads_meet_in_a_session_that_was_just_loaded() -> None:
    """One evaluates with all that was ever said; the other is refused, or comes after it."""
    history = [each for _ in range(5000) for each in (UserMessage("u"), AssistantMessage("a"))]
    session = Session()
    Adapter(ScriptedModel(["x"])).evaluate(PLAIN, "hi", session=session, history=history).wait()
    raw = save(session)
    for _ in range(4):
        both, came = threading.Barrier(2), list[str]()
        loaded, model = load(raw), ScriptedModel(lambda request: Reply("ok", delay=0.05))

        async def evaluate(loaded: Session = loaded, model: ScriptedModel = model) -> None:
            await Adapter(model).evaluate(PLAIN, "hi", session=loaded)

        def on_a_loop_of_its_own(
            both: threading.Barrier = both, came: list[str] = came, evaluate: Any = evaluate
        ) -> None:
            both.wait()
            try:
                asyncio.run(evaluate())
            except ConversationBusy:
                came.append("busy")
            else:
                came.append("answered")

        threads = [threading.Thread(target=on_a_loop_of_its_own) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "answered" in came
        assert {len(request.messages) for request in model.requests} <= {10003, 10005}


# --- text --------------------------------------------------------------------------------------


@tool
async def list_files() -> str:
    """List the files."""
    return os.fsdecode(b"caf\xe9.txt, \xc3\xa9t\xc3\xa9.txt")


async def test_half_a_character_does_not_end_a_conversation() -> None:
    """A file name that is not UTF-8, or a message with half a character, is sent with a sign in its place."""
    call = {"id": "a", "type": "function", "function": {"name": "list_files", "arguments": "{}"}}
    async with raw_server(said(None, tool_calls=[call]), said("ok")) as raw:
        adapter = Adapter(OpenAIModel("m", base_url=raw.url, key_variable=None))
        session = Session()
        prompt = Prompt("p", "Go.", tools=[list_files])
        await adapter.evaluate(prompt, "half \ud83d, whole \ud83d\ude00", session=session)
        response = await adapter.evaluate(prompt, "Again.", session=session, budget=Budget(tokens=100_000))
    assert response.text == "ok"
    user, _, result = raw.bodies[1]["messages"][1:]
    assert user["content"] == "half \ufffd, whole \U0001f600"
    assert result["content"] == "caf\ufffd.txt, \u00e9t\u00e9.txt"
