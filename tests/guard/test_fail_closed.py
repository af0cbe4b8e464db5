"""Whatever a policy or an approval broker does, a call that it has not allowed does not run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Deadline, Session, Tool, ToolContext, ToolResult
from handrail.context import Approval
from handrail.events import ToolInvoked
from handrail.protocols import PolicyDecision
from handrail.resources.memory import MemoryFilesystem
from handrail.run import open_gate
from handrail.run.evaluation import why_withheld
from handrail.run.place import RUN
from handrail.testing import VirtualClock, run_virtual
from handrail.tools import ProviderTool


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raise(error: BaseException) -> Any:
    raise error


async def _later(value: Any) -> Any:
    await asyncio.sleep(1)
    return value() if callable(value) else value


async def _cancelled() -> Any:
    waiting = asyncio.get_running_loop().create_future()
    waiting.cancel()
    return await waiting


ANSWERS: dict[str, Any] = {
    "raises": lambda: _raise(ValueError("broken")),
    "raises without words": lambda: _raise(Wordless()),
    "raises a group": lambda: _raise(ExceptionGroup("many", [OSError("one")])),
    "raises a cancellation": lambda: _raise(asyncio.CancelledError()),
    "raises GeneratorExit": lambda: _raise(GeneratorExit()),
    "raises GeneratorExit late": lambda: _later(lambda: _raise(GeneratorExit())),
    "raises late": lambda: _later(lambda: _raise(ValueError("broken"))),
    "awaits something cancelled": _cancelled,
    "hangs until the deadline": lambda: asyncio.sleep(10_000),
    "returns nothing": lambda: None,
    "returns True": lambda: True,
    "returns True later": lambda: _later(True),
    "returns a text": lambda: "allow",
    "returns a similar object": lambda: SimpleNamespace(
        approved="no", kind="approved", reason="", quorums=()
    ),
    "returns a similar object later": lambda: _later(SimpleNamespace(approved="no", kind="no", reason="")),
    "returns an unknown kind": lambda: PolicyDecision("perhaps"),  # pyright: ignore[reportArgumentType]  # wrong on purpose
    "returns an approval that is a text": lambda: Approval("no", "", "", "denied"),  # pyright: ignore[reportArgumentType]  # wrong on purpose
    "returns a denial later": lambda: _later(PolicyDecision.deny("no")),
}


class Answering:
    """A policy that is also a broker, and answers in a given way."""

    def __init__(self, how: str, name: str = "answering") -> None:
        self.name = name
        self._how = how

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> Any:
        return ANSWERS[self._how]()

    def on_result(self, *_: Any, **__: Any) -> None: ...

    async def decide(self, request: Any) -> Any:
        answer = ANSWERS[self._how]()
        return await answer if asyncio.iscoroutine(answer) else answer


class Asks(Answering):
    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> Any:
        return PolicyDecision.ask("sure?") if self._how == "ask" else PolicyDecision.allow()


class AllowsLater(Answering):
    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> Any:
        return _later(PolicyDecision.allow())


def ran_with(policies: list[Any], **options: Any) -> int:
    """Make one call under these policies, check that it does not succeed, and return how often the handler ran."""
    ran: list[None] = []

    async def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        ran.append(None)
        return ToolResult.ok(None, "done")

    async def main() -> None:
        session, clock = Session(), VirtualClock()
        tool = Tool("work", "Work.", handler)
        deadline = Deadline.after(60, clock=clock)
        gate = open_gate(
            [tool], session=session, policies=policies, clock=clock, deadline=deadline, **options
        )
        try:
            result = await gate.invoke("work")
        except Exception:
            result = ToolResult.error("the run ended")
        assert not result.success
        (ended,) = session[ToolInvoked].all()
        assert ended.status != "ok"

    run_virtual(main)
    return len(ran)


@given(before=st.integers(0, 2), how=st.sampled_from(sorted(ANSWERS)), after=st.integers(0, 2))
def test_a_policy_that_does_not_allow_a_call_lets_nothing_through(before: int, how: str, after: int):
    """A call that one policy does not allow doesn't run, even if the policies before and after that one allow it."""
    allowing = [Asks("allow", f"allowing {index}") for index in range(before + after)]
    assert ran_with([*allowing[:before], Answering(how), *allowing[before:]]) == 0


@pytest.mark.parametrize(
    "waiting", [(True,), (True, False), (False, True), (True, True), (True, False, True)]
)
def test_policies_after_one_that_waits_are_checked(waiting: tuple[bool, ...]):
    """The last policy is checked, and keeps the call from running, even if the policies before it allow the call, some after waiting."""
    kinds = [AllowsLater if waits else Asks for waits in waiting]
    allowing = [kind("allow", f"allowing {index}") for index, kind in enumerate(kinds)]
    assert ran_with([*allowing, Answering("returns an unknown kind")]) == 0


@pytest.mark.parametrize("how", sorted(ANSWERS))
def test_a_broker_that_does_not_approve_a_call_lets_nothing_through(how: str):
    """A call does not run if the broker raises, hangs, or returns anything but an `Approval` whose `approved` is True."""
    assert ran_with([Asks("ask")], approvals=Answering(how)) == 0


class Raising:
    """A policy that raises an error at one point of a call."""

    name = "raising"

    def __init__(self, point: str, error: BaseException) -> None:
        self._point, self._error = point, error

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> Any:
        return self._raise("check", PolicyDecision.allow())

    def on_result(self, *_: Any, **__: Any) -> Any:
        return self._raise("on_result", None)

    def _raise(self, at: str, otherwise: Any) -> Any:
        if self._point == at:
            raise self._error
        return self._later() if self._point == f"{at}, later" else otherwise

    async def _later(self) -> Any:
        await asyncio.sleep(1)
        raise self._error


@pytest.mark.parametrize(
    "error", [ValueError("no"), GeneratorExit("no")], ids=["ValueError", "GeneratorExit"]
)
@pytest.mark.parametrize("point", ["check", "check, later", "on_result", "on_result, later"])
@pytest.mark.parametrize("nested", [False, True], ids=["outermost", "nested"])
@pytest.mark.virtual_time
async def test_a_policy_that_raises_denies_the_call(point: str, error: BaseException, nested: bool):
    """Whatever a policy raises, and whenever, its call is denied, names the policy, and leaves nothing behind."""
    session, files = Session(), MemoryFilesystem()

    async def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        context.filesystem.write("a.txt", "x")
        return ToolResult.ok(None, "done")

    async def run_work(params: None, *, context: ToolContext) -> ToolResult[Any]:
        return await context.call("work")

    work = Tool("work", "Work.", handler, effect="staged")
    outer = Tool("outer", "Call work.", run_work, effect="staged")

    class OnWork(Raising):
        def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> Any:
            return super().check(tool, params, context=context) if tool is work else PolicyDecision.allow()

        def on_result(self, tool: Any, *rest: Any, **named: Any) -> Any:
            return super().on_result(tool, *rest, **named) if tool is work else None

    gate = open_gate(
        [work, outer],
        session=session,
        filesystem=files,
        policies=[OnWork(point, error)],
        clock=VirtualClock(),
    )
    result = await gate.invoke("outer" if nested else "work")
    assert not result.success
    ended = session[ToolInvoked].all()[0]
    assert (ended.tool, ended.status) == ("work", "denied")
    assert "'raising'" in ended.result.message
    assert not files.exists("a.txt")


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.virtual_time
async def test_a_policy_that_raises_generator_exit_withholds_a_providers_tool(waits: bool):
    """The offer of a tool that the provider runs is decided as a call is."""
    policy = Raising("check, later" if waits else "check", GeneratorExit())
    gate = open_gate([], policies=[policy], clock=VirtualClock())
    why = await why_withheld(gate, ProviderTool("web_search"), RUN.child(1))
    assert why is not None
    assert "'raising'" in why
