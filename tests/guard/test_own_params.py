"""What one policy or the handler does to a call's params does not reach the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from handrail import PathArg, Tool, ToolContext, ToolResult, TransientError
from handrail.protocols import PolicyDecision
from handrail.run import open_gate
from handrail.testing import Person

pytestmark = pytest.mark.virtual_time

ORIGINAL = {"path": "secrets/key", "more": ["a", "b"], "inner": {"tags": ["x"]}}


@dataclass
class Plain:
    path: Annotated[str, PathArg("read")]


@dataclass(frozen=True)
class FrozenPlain:
    path: Annotated[str, PathArg("read")]


@dataclass(slots=True)
class Slotted:
    path: Annotated[str, PathArg("read")]


@dataclass
class Inner:
    tags: list[str]


@dataclass
class Deep:
    path: Annotated[str, PathArg("read")]
    more: list[str]
    inner: Inner = field(default_factory=lambda: Inner([]))


class Model(BaseModel):
    path: Annotated[str, PathArg("read")]


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True)
    path: Annotated[str, PathArg("read")]
    more: list[str]


KINDS: list[Any] = [Plain, FrozenPlain, Slotted, Deep, Model, FrozenModel]


def arguments_for(kind: Any) -> dict[str, Any]:
    fields = kind.model_fields if issubclass(kind, BaseModel) else kind.__dataclass_fields__
    return {name: value for name, value in ORIGINAL.items() if name in fields}


def as_seen(params: Any) -> dict[str, Any]:
    """Return the fields of the params as plain data that shares nothing with them."""
    found: dict[str, Any] = {"path": params.path}
    if hasattr(params, "more"):
        found["more"] = list(params.more)
    if hasattr(params, "inner"):
        found["inner"] = {"tags": list(params.inner.tags)}
    return found


def spoil(params: Any) -> None:
    """Rewrite everything in the params that can be rewritten."""
    for rewrite in (
        lambda: setattr(params, "path", "public/readme"),
        lambda: params.more.clear(),
        lambda: params.inner.tags.append("spoilt"),
    ):
        try:
            rewrite()
        except (AttributeError, TypeError, ValueError):
            continue


class Watching:
    """A policy that notes the params it sees and then spoils them, at once or after a pause."""

    def __init__(self, name: str, waits: bool = False, decisions: Callable[[], PolicyDecision] | None = None):
        self.name = name
        self._waits = waits
        self._decide = decisions or PolicyDecision.allow
        self.seen: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> Any:
        return self._checked_later(params) if self._waits else self._checked(params)

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Any:
        return self._told_later(params) if self._waits else self._told(params)

    def _checked(self, params: Any) -> PolicyDecision:
        self.seen.append(as_seen(params))
        spoil(params)
        return self._decide()

    def _told(self, params: Any) -> None:
        self.told.append(as_seen(params))
        spoil(params)

    async def _checked_later(self, params: Any) -> PolicyDecision:
        await asyncio.sleep(0)
        return self._checked(params)

    async def _told_later(self, params: Any) -> None:
        await asyncio.sleep(0)
        self._told(params)


def told_only(name: str, waits: bool = False) -> Any:
    """Return a policy that spoils its params in `on_result`, but not in `check`."""
    policy = Watching(name, waits)
    policy._checked = lambda params: (policy.seen.append(as_seen(params)), PolicyDecision.allow())[1]  # pyright: ignore[reportPrivateUsage]  # the test's own
    return policy


def reading(kind: Any, got: list[dict[str, Any]], failures: int = 0) -> Tool[Any, Any]:
    """Return a tool that notes its params, spoils them, and fails the given number of times before it succeeds."""

    async def handler(params: Any, *, context: ToolContext) -> ToolResult[None]:
        got.append(as_seen(params))
        spoil(params)
        if len(got) <= failures:
            raise TransientError("busy")
        return ToolResult.ok(None, "done")

    return Tool("read", "Read a file.", handler, params=kind, effect="staged")


@pytest.mark.parametrize("kind", KINDS)
@given(waits=st.lists(st.booleans(), min_size=1, max_size=4), failures=st.integers(0, 2))
async def test_whatever_policies_and_handler_do_to_params_each_sees_those_that_came(
    kind: Any, waits: list[bool], failures: int
):
    """Every policy and the handler see the original params, although each of them changes its own copy."""
    got: list[dict[str, Any]] = []
    policies = [Watching(f"rule {index}", slow) for index, slow in enumerate(waits)]
    last = told_only("last")

    gate = open_gate([reading(kind, got, failures)], policies=[*policies, last])
    assert (await gate.invoke("read", arguments_for(kind))).success
    came = arguments_for(kind)
    assert got == [came] * (failures + 1)
    assert all(policy.seen == [came] * (failures + 1) for policy in policies)
    assert last.told == [came]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_policy_that_spoils_params_in_on_result_does_not_change_what_the_next_is_told(kind: Any):
    """Each policy's `on_result` gets the original params, even if the `on_result` of an earlier policy changed its own copy."""
    policies = [told_only("first"), told_only("second", waits=True), told_only("third")]

    assert (
        await open_gate([reading(kind, [])], policies=policies).invoke("read", arguments_for(kind))
    ).success
    assert [policy.told for policy in policies] == [[arguments_for(kind)]] * 3


async def test_a_path_that_one_policy_rewrites_is_judged_by_the_next_as_it_came():
    """Even if one policy rewrites the path in its params, the next one checks, and here denies, the original path."""

    class PublicOnly(Watching):
        def _checked(self, params: Any) -> PolicyDecision:
            fine = params.path.startswith("public/")
            return PolicyDecision.allow() if fine else PolicyDecision.deny(f"{params.path} is not public.")

    got: list[dict[str, Any]] = []

    gate = open_gate([reading(Plain, got)], policies=[Watching("rewrites"), PublicOnly("public")])
    result = await gate.invoke("read", {"path": "secrets/key"})
    assert not result.success
    assert "secrets/key is not public" in result.message
    assert got == []


async def test_the_check_after_an_approval_sees_the_params_that_came():
    """A policy that changed its params gets the original ones when it checks the call again after an approval."""
    decisions = [PolicyDecision.ask("sure?"), PolicyDecision.allow()]
    policy = Watching("asks once", decisions=lambda: decisions.pop(0))
    tool = Tool("read", "Read a file.", reading(Deep, []).handler, params=Deep, effect="irreversible")

    gate = open_gate([tool], policies=[policy], environment=Person(approve=True))
    assert (await gate.invoke("read", arguments_for(Deep))).success
    assert policy.seen == [arguments_for(Deep)] * 2


@pytest.mark.parametrize(("kind", "parses"), [(FrozenPlain, 1), (Plain, 1), (Deep, 4)])
async def test_copies_are_made_by_parsing_only_where_fields_can_change(
    kind: Any, parses: int, monkeypatch: pytest.MonkeyPatch
):
    """With three policies, params that contain only immutable values are parsed once. Others are parsed four times."""
    counted: list[None] = []
    tool = reading(kind, [])
    parse = tool.parse
    object.__setattr__(tool, "parse", lambda arguments: (counted.append(None), parse(arguments))[1])  # pyright: ignore[reportUnknownLambdaType]  # a spy

    policies = [Watching(name) for name in ("one", "two", "three")]
    assert (await open_gate([tool], policies=policies).invoke("read", arguments_for(kind))).success
    assert len(counted) == parses
