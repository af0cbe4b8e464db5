"""Calls with a secret after a crash: they are never rerun with a mask in place of the secret."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import SecretStr

from handrail import (
    Adapter,
    Handoff,
    Parked,
    Prompt,
    ScriptedModel,
    ToolCall,
    ToolContext,
    ToolResult,
    tool,
)
from handrail.errors import RunParked
from handrail.guard import CapabilityPolicy
from handrail.journal.sqlite import MemoryJournal
from handrail.runs import fork, replay, show
from handrail.schema.secrets import MASK
from support.parked_runs import answer_to
from support.planted_secrets import MARK, Cut, Key, login_with
from support.texts import NO_EFFECTS, OUTCOME_UNKNOWN


@pytest.mark.parametrize(
    ("effect", "told"),
    [
        ("pure", NO_EFFECTS),
        ("read", NO_EFFECTS),
        ("staged", NO_EFFECTS),
        ("idempotent", OUTCOME_UNKNOWN),
        ("compensable", OUTCOME_UNKNOWN),
        ("irreversible", OUTCOME_UNKNOWN),
    ],
)
async def test_a_call_with_a_secret_is_not_run_again(effect: Any, told: str) -> None:
    """After a crash, a call with a secret is not rerun, probed or compensated, whatever its effect."""
    reached = asyncio.Event()

    did: list[Any] = []

    async def never(params: Any, value: Any = None, *, context: ToolContext) -> Any:
        did.append(params)

    async def cut() -> None:
        reached.set()
        await asyncio.Event().wait()

    options = {"compensate": never, "probe": never} if effect == "compensable" else {}
    login = login_with(effect, cut, **options)
    run = Cut([login.tool], ToolCall("login", login.arguments))
    await run.cut_when(reached)
    said = await run.told()
    assert told in said
    assert "secret" in said
    assert (login.got, did) == ([MARK], [])


async def test_a_call_that_had_no_secret_is_run_again() -> None:
    """A call without its tool's optional secret is rerun after a crash."""
    reached, got = asyncio.Event(), list[Any]()

    @tool(effect="read")
    async def login(user: str, key: SecretStr | None = None) -> str:
        """Log in."""
        got.append(user)
        if not reached.is_set():
            reached.set()
            await asyncio.Event().wait()
        return f"{user} is in"

    run = Cut([login], ToolCall("login", {"user": "ann"}))
    await run.cut_when(reached)
    assert "ann is in" in await run.told()
    assert got == ["ann", "ann"]


async def test_an_approval_of_a_call_with_a_secret_keeps_its_run_in_memory() -> None:
    """A run is not parked while a call with a secret waits for approval, unless by force.

    If it is parked by force and resumed, the question is withdrawn, and the call fails.
    """
    login, waiting = login_with("irreversible"), list[int]()

    @tool(effect="read")
    async def peek() -> str:
        """Look at the open questions while the run continues."""
        waiting.append(len(await run.journal.questions.open("run")))
        return "seen"

    run = Cut(
        [login.tool, peek],
        ToolCall("login", login.arguments),
        ToolCall("peek"),
        policies=[CapabilityPolicy()],
    )
    going = asyncio.ensure_future(run.adapter.evaluate(run.prompt, "go", run_id="run"))
    parking = await run.there.until_rest()
    assert not parking.may_park
    assert len(await run.journal.questions.open("run")) == 1
    assert parking.park(by_force=True)
    with pytest.raises(RunParked):
        await going
    await run.told()
    told: Any = run.model.requests[1].messages[-1]
    assert "key: is masked" in told.results[0].text
    assert waiting == [0]
    assert login.got == []


async def test_a_parked_handoff_with_a_secret_is_not_gone_on_with() -> None:
    """A parked handoff with a secret in its params is not continued after a crash, because `after` would need the secret."""
    acts: list[str] = []
    pick: Any = Handoff("pick", "Let somebody pick.", params=Key)

    @pick.before
    async def before(params: Any, *, context: ToolContext) -> Parked[int, str]:
        acts.append(f"before {params.key.get_secret_value()}")
        return Parked(1, "which?")

    @pick.after
    async def after(private: int, answer: str, params: Any, *, context: ToolContext) -> ToolResult[str]:
        acts.append(f"after {params.key.get_secret_value()}")
        return ToolResult.ok(answer)

    run = Cut([pick], ToolCall("pick", {"key": MARK}))
    await run.cut_when()
    assert run.there.rested == [False]
    assert "given a secret" in await run.told()
    assert not await run.journal.questions.open("run")
    assert acts == [f"before {MARK}"]


async def test_a_finished_call_with_a_secret_is_taken_from_the_record() -> None:
    """On resume, the result of a finished call with a secret is taken from the record, even in a nested run."""
    login = login_with("read")
    inner = Prompt("inner", "Log in.", tools=[login.tool])

    @tool(effect="staged")
    async def nest(context: ToolContext) -> str:
        """Have somebody log in, then ask."""
        text = (await context.adapter.evaluate(inner, "go")).text
        assert context.wait_for is not None
        return f"{text} {await context.wait_for('ok', {}, bool)}"

    asked = ToolCall("login", login.arguments)
    run = Cut([login.tool, nest], asked, ToolCall("nest"), asked, "inside")
    await run.cut_when()
    (question,) = await run.journal.questions.open("run")
    run.journal.questions.answer(answer_to(question, True))
    assert "inside True" in await run.told()
    assert login.got == [MARK, MARK]


async def test_what_can_only_be_undone_with_a_secret_is_named_after_a_crash() -> None:
    """If an outer call fails, an inner call that was given a secret is compensated with that secret.

    After a crash the secret is gone, and the inner call is reported as not undone.
    """
    undone: list[Any] = []

    async def take_back(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append(params.key.get_secret_value())

    book = login_with("compensable", compensate=take_back)

    @tool(effect="idempotent")
    async def outer(context: ToolContext) -> str:
        """Book, ask, and fail."""
        await context.call("login", key=SecretStr(MARK))
        assert context.wait_for is not None
        await context.wait_for("ok", {}, bool)
        raise ValueError("the booking failed")

    for crash in (False, True):
        undone.clear()
        run = Cut([book.tool, outer], ToolCall("outer"))
        if crash:
            await run.cut_when()
            going = asyncio.ensure_future(run.adapter.resume("run", run.prompt))
        else:
            going = asyncio.ensure_future(run.adapter.evaluate(run.prompt, "go", run_id="run"))
        await run.there.until_rest()
        run.journal.questions.answer(answer_to((await run.journal.questions.open("run"))[0], True))
        await going
        last: Any = run.model.requests[-1].messages[-1]
        assert undone == ([] if crash else [MARK])
        assert ("login" in last.results[0].text) == crash


async def test_a_fork_and_a_replay_run_nothing_with_a_mask() -> None:
    """A fork or a replay takes a finished call's result from the record, and never runs a call with a mask."""
    login = login_with("read")
    journal = MemoryJournal()
    prompt = Prompt("p", "Do.", tools=[login.tool])
    model = ScriptedModel([ToolCall("login", login.arguments), "done"])
    await Adapter(model, journal=journal).evaluate(prompt, "go", run_id="run")
    assert await replay(journal, "run", prompt) is None
    for step in (0, 1):
        script = [ToolCall("login", login.arguments)] if not step else []
        forked = await fork(journal, "run", step=step)
        await Adapter(ScriptedModel([*script, "done"]), journal=journal).resume(forked.record.id, prompt)
    assert login.got == [MARK, MARK]
    tree = await show(journal, "run")
    assert [call.arguments for call in tree.calls] == [f'{{"key":"{MASK}"}}']
