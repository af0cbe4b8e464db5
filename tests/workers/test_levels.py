"""Workers on five levels: usage, cost, budgets, depth and cancellation, and what `strict` prevents."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Budget,
    PromptEvaluationError,
    ScriptedModel,
    ToolCall,
    WorkerRegistry,
)
from handrail.errors import DepthExceededError
from handrail.events import MessageAdded, PromptExecuted, ToolInvoked
from handrail.messages import Price, Traits, Usage
from handrail.models.scripted import Reply
from handrail.run.conversation import check_well_formed
from handrail.testing import Nobody, Person
from support.worker_folders import PLAIN, Watched, sound

LEVELS = 5
PRICED = Traits(Price(Decimal(1_000_000), Decimal(10_000_000)), native_output=True)
"""Traits of a model that costs one dollar per input token and ten dollars per output token."""


def tower(at: Path, **front: str) -> WorkerRegistry:
    """Create workers w0 to w5, each of which may call the next. `front` adds front matter by worker name."""
    texts = {
        f"w{level}": f"---\nworkers: {[f'w{level + 1}'] if level < LEVELS else []}\n{front.get(f'w{level}', '')}\n---\nGo."
        for level in range(LEVELS + 1)
    }
    return sound(at, **texts)


def used(level: int, request: int) -> Usage:
    """Return the usage of a request, which differs from that of every other request."""
    return Usage(input=7**level + request, output=11**level, requests=1)


def scripts() -> dict[str, ScriptedModel]:
    """Return models that call the next worker and then answer. The last one only answers."""
    found: dict[str, ScriptedModel] = {}
    for level in range(LEVELS + 1):
        call = ToolCall(f"w{level + 1}", {"input": f"from {level}"})
        turns: list[Any] = [Reply(calls=[call], usage=used(level, 0))] if level < LEVELS else []
        turns.append(Reply(f"said by {level}", usage=used(level, 1)))
        found[f"w{level}"] = ScriptedModel(turns, traits=PRICED)
    return found


def own_usage(level: int) -> Usage:
    return used(level, 1) if level == LEVELS else used(level, 0) + used(level, 1)


def requests(models: dict[str, ScriptedModel]) -> int:
    return sum(len(model.requests) for model in models.values())


async def test_usage_and_cost_are_summed_exactly_at_every_level(tmp_path: Path) -> None:
    """At each level, a run reports its own usage and that of all levels below it, in tokens and in dollars."""
    registry, models, watched = tower(tmp_path), scripts(), Watched()
    response = await registry.run("w0", "go", models=models, session=watched.session)
    assert response.text == "said by 0"
    ended = {event.prompt: event for event in watched.events if isinstance(event, PromptExecuted)}
    total = Usage()
    for level in range(LEVELS, -1, -1):
        total += own_usage(level)
        assert ended[f"w{level}"].usage == total
        assert ended[f"w{level}"].cost == total.input + 10 * total.output
    assert (response.usage, response.cost) == (total, total.input + 10 * total.output)
    assert response.usage.requests == 2 * LEVELS + 1 == requests(models)
    paths = [path for path, status in watched.ended if status == "ok"]
    assert paths == [" > ".join(f"w{n}" for n in range(1, last + 1)) for last in range(LEVELS, 0, -1)]


@pytest.mark.parametrize("most", range(2 * LEVELS + 1))
async def test_a_budget_of_n_requests_stops_at_the_nth_at_any_level(tmp_path: Path, most: int) -> None:
    """A budget of n requests allows exactly n, at whichever level they are made, and then ends the run."""
    registry, models, watched = tower(tmp_path), scripts(), Watched()
    with pytest.raises(PromptEvaluationError, match="requests is too low"):
        await registry.run("w0", "go", models=models, session=watched.session, budget=Budget(requests=most))
    assert requests(models) == most
    watched.assert_paired()
    enough = Budget(requests=2 * LEVELS + 1)
    assert (await registry.run("w0", "go", models=scripts(), budget=enough)).text == "said by 0"


@pytest.mark.parametrize("share", range(1, 5))
async def test_a_share_that_is_spent_ends_its_own_level_only(tmp_path: Path, share: int) -> None:
    """When w3 has spent its share, w3 and the levels below stop, w2 is told and continues, and all usage is counted."""
    registry = tower(tmp_path, w3=f"limits: {{requests: {share}}}")
    models = scripts()
    response = await registry.run("w0", "go", models=models)
    assert response.text == "said by 0"
    assert sum(len(models[f"w{level}"].requests) for level in (3, 4, 5)) == share
    assert "w3 failed" in models["w2"].requests[1].messages[-1].text
    assert response.usage.requests == requests(models) == 6 + share


async def test_money_is_bounded_through_the_levels(tmp_path: Path) -> None:
    """A money limit at the root ends the run before a request that could exceed it."""
    registry, models = tower(tmp_path), scripts()
    with pytest.raises(PromptEvaluationError, match="money"):
        await registry.run("w0", "go", models=models, budget=Budget(money=5), max_tokens=1)
    assert requests(models) == 0


async def test_the_depth_limit_is_reported_with_its_path(tmp_path: Path) -> None:
    """A call beyond the depth limit fails, and the error shows its path. Within the limit, calls may form a cycle."""
    registry = sound(tmp_path, ping="---\nworkers: [pong]\n---\nGo.", pong="---\nworkers: [ping]\n---\nGo.")
    watched = Watched()
    following = {"ping": "pong", "pong": "ping"}

    def answer(request: Any) -> Any:
        last = request.messages[-1].text
        name = next(name for name in following if f"{name} here" in request.messages[0].text)
        return (
            f"{last}"
            if len(request.messages) > 1
            else ToolCall(following[name], {"input": f"{following[name]} here"})
        )

    response = await registry.run("ping", "ping here", model=ScriptedModel(answer), session=watched.session)
    way = "pong > ping > pong > ping > pong > ping"
    assert f"6 levels deep, and the limit is 5: {way}" in response.text
    (failed,) = [
        event for event in watched.events if isinstance(event, ToolInvoked) and event.status == "error"
    ]
    assert isinstance(failed.error, DepthExceededError)
    assert failed.error.path == tuple(way.split(" > "))
    shallow = Adapter(ScriptedModel(answer), depth_limit=1)
    assert "the limit is 1: pong > ping." in (await registry.run("ping", "ping here", adapter=shallow)).text


@pytest.mark.parametrize("level", range(LEVELS + 1))
async def test_a_cancel_ends_all_levels(tmp_path: Path, level: int) -> None:
    """After a cancel at any level, each call has exactly one end, each conversation is well formed, and no task is left."""
    registry, models, watched = tower(tmp_path), scripts(), Watched()
    reached = asyncio.Event()

    async def hang(request: Any) -> Any:
        reached.set()
        await asyncio.Event().wait()

    models[f"w{level}"] = ScriptedModel(hang)
    before = asyncio.all_tasks()
    task = asyncio.ensure_future(registry.run("w0", "go", models=models, session=watched.session))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    watched.assert_paired()
    assert watched.ended == [
        (" > ".join(f"w{n}" for n in range(1, last + 1)), "cancelled") for last in range(level, 0, -1)
    ]
    ended = [event.stop_reason for event in watched.events if isinstance(event, PromptExecuted)]
    assert ended == ["cancelled"] * (level + 1)
    said: dict[str, list[Any]] = {}
    for added in watched.session[MessageAdded].all():
        said.setdefault(added.conversation, []).append(added.message)
    assert len(said) == level + 1
    for messages in said.values():
        check_well_formed(messages)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()


# --- calls that need approval -------------------------------------------------------------------

TOOLS = '''
from pathlib import Path
from handrail import CallFailed, ToolContext, tool

def burn() -> str:
    """Burn something."""
    Path(__file__).with_name("burnt").touch()
    return "burnt"

@tool(effect="idempotent", capabilities={"own"})
async def by_call(context: ToolContext) -> str:
    """Reach it by call."""
    return (await context.call("burn")).message

@tool(effect="idempotent", capabilities={"own"})
async def by_worker(context: ToolContext) -> str:
    """Reach it by call_worker."""
    return await context.call_worker("helper", "burn")

@tool(effect="idempotent", capabilities={"own"})
async def by_call_of_worker(context: ToolContext) -> str:
    """Reach it by call, of a worker."""
    return (await context.call("helper", input="burn")).message

@tool(effect="idempotent", capabilities={"own"})
async def by_asking(context: ToolContext) -> str:
    """Ask for it."""
    if (await context.request_approval("burn it")).approved or (await context.request_permission("fire")).approved:
        burn()
    return "asked"

@tool(effect="idempotent", capabilities={"own"})
async def by_creating(context: ToolContext) -> str:
    """Create a worker for it."""
    made = await context.call("create_worker", name="arsonist", description="Burns.", instructions="Burn.", tools=["burn"])
    try:
        await context.call_worker("arsonist", "burn")
    except CallFailed as error:
        return f"{made.message} {error.result.message}"
    return "created"
'''
OWN = "policies: [capability: {allow: [own]}]"
PATHS = ["burn", "by_call", "by_worker", "by_call_of_worker", "by_asking", "by_creating"]
MAIN = f"---\ntools: [{', '.join(PATHS)}]\nworkers: [helper]\ncreate: true\n{OWN}\n---\nGo."
HELPER = f"---\ntools: [burn]\n{OWN}\n---\nHelp."


def every_path() -> list[Any]:
    """Return a script for a model that tries each tool, the worker as a tool, and a worker that it creates."""
    created = {"name": "pyro", "description": "Burns.", "instructions": "Burn.", "tools": ["burn"]}
    calls = [ToolCall(name, {}) for name in PATHS]
    calls += [ToolCall("helper", {"input": "burn"}), ToolCall("create_worker", created)]
    return [
        calls,
        ToolCall("call_worker", {"name": "pyro", "input": "x"}),
        ToolCall("pyro", {"input": "x"}),
        "end",
    ]


def burning(request: Any) -> Any:
    """Act as the model of a worker that calls `burn` and then answers with its result."""
    return ToolCall("burn", {}) if len(request.messages) == 1 else request.messages[-1].text


@pytest.mark.parametrize(
    ("approvals", "environment", "burns"),
    [
        ("strict", Person(approve=True), False),
        (None, None, False),
        (None, Nobody(), False),
        ("interactive", Person(approve=False), False),
        ("approve_all", None, True),
        ("interactive", Person(approve=True), True),
    ],
)
async def test_under_strict_nothing_that_needs_asking_ran_by_any_path(
    tmp_path: Path, approvals: Any, environment: Any, burns: bool
) -> None:
    """Without an approval, nothing that needs one runs, whether a model, a tool, a worker or a created worker calls it."""
    registry = sound(tmp_path, TOOLS, main=MAIN, helper=HELPER)
    watched = Watched()
    models = {name: ScriptedModel(burning) for name in ("helper", "pyro", "arsonist")}
    script = ScriptedModel(every_path())
    await registry.run(
        "main", "go", model=script, models=models, session=watched.session,
        approvals=approvals, environment=environment,
    )  # fmt: skip
    assert (tmp_path / "burnt").exists() is burns
    of_burn = [path for path, status in watched.ended if path.endswith("burn") and status == "ok"]
    made = [path for path, status in watched.ended if path.endswith("create_worker") and status == "ok"]
    if burns:  # the same calls with approval, to show that each of them works
        assert sorted(of_burn) == [
            "burn",
            "by_call > burn",
            "by_call_of_worker > helper > burn",
            "by_creating > arsonist > burn",
            "by_worker > helper > burn",
            "call_worker > pyro > burn",
            "helper > burn",
            "pyro > burn",
        ]
        assert sorted(made) == ["by_creating > create_worker", "create_worker"]
    else:
        assert (of_burn, made) == ([], [])
        assert len(models["pyro"].requests) == len(models["arsonist"].requests) == 0
    watched.assert_paired()


async def test_a_nested_worker_does_not_carry_its_callers_leave(tmp_path: Path) -> None:
    """A call that the caller's policies allow still needs approval in a worker that the caller calls."""
    registry = sound(
        tmp_path, TOOLS, main="---\ntools: [burn]\nworkers: [helper]\npolicies: []\n---\nGo.",
        helper="---\ntools: [burn]\n---\nHelp.", plain=PLAIN,
    )  # fmt: skip
    watched = Watched()
    script = ScriptedModel([ToolCall("helper", {"input": "x"}), "end"])
    await registry.run(
        "main", "x", model=script, models={"helper": ScriptedModel(burning)}, session=watched.session
    )
    assert watched.ended == [("helper > burn", "denied"), ("helper", "ok")]
