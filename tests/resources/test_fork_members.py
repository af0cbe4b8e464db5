"""A custom resource whose forks lack a member is refused when it is first forked, and the member is named."""

from __future__ import annotations

from typing import Any

import pytest

from handrail import ToolContext, given, open_gate, tool
from handrail.errors import ResourceError
from handrail.protocols import DurableFork, Fork
from handrail.run import transaction as fork_members

FORK = {"fork", *(name for name in vars(Fork) if not name.startswith("_"))}
DURABLE = FORK | {name for name in vars(DurableFork) if not name.startswith("_")}


class Counter:
    """A resource whose forks have the given members."""

    def __init__(self, members: dict[str, Any]) -> None:
        self.count = 0
        self.kind: type = type("CounterFork", (), {"count": 0, **members})

    def fork(self, owner: str, /, *, writable: bool = True) -> Any:
        return self.kind()


def members_of(names: set[str], is_durable: bool) -> dict[str, Any]:
    """Return members with these names, which do nothing."""
    made: dict[str, Any] = {name: lambda self, *args, **options: () for name in names}
    made |= {name: lambda self, *args, **options: None for name in ("stage", "diff") if name in names}
    if "is_durable" in names:
        made["is_durable"] = is_durable
    return made


@tool(effect="staged")
async def count(context: ToolContext) -> str:
    """Count one up."""
    try:
        context.resources.get(Counter).count += 1
    except ResourceError as error:
        refused.append(error)
        raise
    return "counted"


refused: list[ResourceError] = []


@pytest.fixture(autouse=True)
def nothing_refused() -> None:
    refused.clear()


@pytest.mark.parametrize(
    ("name", "is_durable"),
    [*((name, False) for name in sorted(FORK)), *((name, True) for name in sorted(DURABLE - {"is_durable"}))],
)
async def test_a_missing_member_is_named(name: str, is_durable: bool) -> None:
    """The error names the resource, the class of its forks, the missing member, and the protocol that declares it."""
    counter = Counter(members_of((DURABLE if is_durable else FORK) - {name}, is_durable))
    gate = open_gate([count], resources=[given(Counter, counter)])
    for number in (1, 2):  # each call is refused, not only the first
        result = await gate.invoke("count")
        assert not result.success
        assert len(refused) == number
    protocol = "DurableFork" if is_durable else "Fork"
    assert all(
        f"resource Counter: fork() returned CounterFork, which lacks {name}. " in str(each)
        for each in refused
    )
    assert all(f"`handrail.protocols.{protocol}`" in str(each) for each in refused)
    assert all(each.resource == "Counter" for each in refused)


@pytest.mark.parametrize("is_durable", [False, True])
async def test_a_fork_with_every_member_is_accepted(is_durable: bool) -> None:
    """A fork needs no base class if it has every member. Its class is checked once."""
    counter = Counter(members_of(DURABLE if is_durable else FORK, is_durable))
    gate = open_gate([count], resources=[given(Counter, counter)])
    for _ in range(2):
        result = await gate.invoke("count")
        assert result.success, result.message
    assert counter.kind in fork_members.complete


@pytest.mark.parametrize("protocol", [Fork, DurableFork])
async def test_a_member_that_is_only_declared_is_missing(protocol: type) -> None:
    """A subclass of the protocol defines what the protocol only declares. Otherwise its changes would silently be lost."""
    counter = Counter({})
    counter.kind = type("CounterFork", (protocol,), {"fork": counter.fork, "stale": lambda self: ()})
    await open_gate([count], resources=[given(Counter, counter)]).invoke("count")
    (error,) = refused
    lacking = [
        "prepare",
        "apply",
        "drop",
        *(["stage", "revert", "applied"] if protocol is DurableFork else []),
    ]
    assert f"which lacks {', '.join(lacking)}. " in str(error)


async def test_a_resource_that_returns_no_fork_is_named() -> None:
    """All missing members are named at once."""
    counter = Counter({})
    counter.fork = lambda owner, /, *, writable=True: None  # pyright: ignore[reportAttributeAccessIssue]
    await open_gate([count], resources=[given(Counter, counter)]).invoke("count")
    (error,) = refused
    assert "fork() returned NoneType" in str(error)
    assert all(name in str(error) for name in FORK)


async def test_a_refused_fork_is_not_committed_or_dropped() -> None:
    """A handler that goes on without the refused resource succeeds, because its transaction has no such fork."""

    @tool(effect="staged")
    async def without(context: ToolContext) -> str:
        """Go on without the counter."""
        with pytest.raises(ResourceError):
            context.resources.get(Counter)
        return "fine"

    gate = open_gate([without], resources=[given(Counter, Counter({}))])
    assert (await gate.invoke("without")).success
