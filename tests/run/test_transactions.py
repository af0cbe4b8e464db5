"""The law of transactions, for any interleaving of parallel, nested, failing and cancelled calls.

A random program has calls that sleep, write, append, delete, dispatch, count, call others alone or in parallel, and
succeed or fail. It runs in virtual time. Then the successful calls are replayed one after another, in commit order,
on a plain dict and list, and the end state must be the same.
"""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail import ToolContext, ToolResult, gather, tool
from handrail.events import ToolInvoked
from handrail.run.transaction import new_transaction
from support.rig import Note, Rig

PATHS = ("a", "b", "c/d")


@dataclass
class Spec:
    """One call: its actions in order, and how it ends."""

    tag: str
    effect: str
    acts: list[Any]
    ending: str


@dataclass
class Trace:
    """The actions of one attempt at a call, each with what it returned: a value, or ids of committed inner calls."""

    spec: Spec
    acts: list[tuple[str, Any, Any]] = field(default_factory=list)


simple = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(PATHS)),
    st.tuples(st.just("append"), st.sampled_from(PATHS)),
    st.tuples(st.just("delete"), st.sampled_from(PATHS)),
    st.tuples(st.just("note"), st.just(None)),
    st.tuples(st.just("count"), st.just(None)),
    st.tuples(st.just("sleep"), st.integers(0, 3)),
)
endings = st.sampled_from(["ok", "ok", "ok", "ok", "raise", "error", "hang", "cancel itself"])


def specs(effects: tuple[str, ...], depth: int) -> st.SearchStrategy[Spec]:
    """Return a strategy for calls with these effects. The calls that they make never have a stronger effect."""

    def build(effect: str) -> st.SearchStrategy[Spec]:
        act: st.SearchStrategy[Any] = simple
        if depth:
            inner = specs(effects[: effects.index(effect) + 1], depth - 1)
            act = st.one_of(
                simple,
                st.tuples(st.just("call"), inner),
                st.tuples(st.just("parallel"), st.lists(inner, min_size=2, max_size=3)),
            )
        return st.builds(
            Spec, st.text("xyz", min_size=1, max_size=3), st.just(effect), st.lists(act, max_size=5), endings
        )

    return st.sampled_from(effects).flatmap(build)


class Programs:
    """Runs specs through a real gate, and records each call's last attempt."""

    def __init__(self) -> None:
        self.specs: dict[int, Spec] = {}
        self.traces: dict[str, Trace] = {}
        self.rig = Rig([self.tool_for(effect) for effect in ("staged", "idempotent")], depth_limit=9)

    def tool_for(self, effect: Any) -> Any:
        @tool(name=effect, description="Do what a spec says.", effect=effect, timeout=20)
        async def play(spec: int, context: ToolContext) -> Any:
            return await self.play(self.specs[spec], context)

        return play

    def number(self, spec: Spec) -> dict[str, int]:
        self.specs[id(spec)] = spec
        return {"spec": id(spec)}

    async def play(self, spec: Spec, context: ToolContext) -> Any:
        trace = self.traces[context.call_id] = Trace(spec)
        for act, about in spec.acts:
            trace.acts.append((act, about, await self.act(act, about, spec, context)))
        if spec.ending == "raise":
            raise RuntimeError("drawn")
        if spec.ending == "error":
            return ToolResult.error("drawn")
        if spec.ending == "hang":
            await asyncio.sleep(100)
        if spec.ending == "cancel itself":
            raise asyncio.CancelledError
        return spec.tag

    async def act(self, act: str, about: Any, spec: Spec, context: ToolContext) -> Any:
        files, session = context.filesystem, context.session
        match act:
            case "write":
                files.write(about, spec.tag)
            case "append":
                text = (files.read(about) if files.exists(about) else "") + spec.tag
                files.write(about, text)
                return text
            case "delete":
                if files.exists(about):
                    files.delete(about)
                    return True
                return False
            case "note":
                session.dispatch(Note(spec.tag))
                return spec.tag
            case "count":
                text = f"{spec.tag}{len(session[Note])}"
                session.dispatch(Note(text))
                return text
            case "sleep":
                await asyncio.sleep(about)
            case "call":
                return await self.call([about], context)
            case _:
                return await self.call(about, context)
        return None

    async def call(self, specs: list[Spec], context: ToolContext) -> list[str]:
        """Make these calls concurrently, and return the ids of those that committed, in commit order."""
        before = len(self.rig.events)
        results = await gather(*[context.call(each.effect, **self.number(each)) for each in specs])
        ended = [event for event in self.rig.events[before:] if isinstance(event, ToolInvoked)]
        mine = [event for event in ended if caller_of(event.call_id) == context.call_id]
        ids = [event.call_id for event in mine if event.status == "ok"]
        assert len(ids) == sum(result.success for result in results)
        return ids


def caller_of(call_id: str) -> str | None:
    """Return the id of the call that made this one, or None if no call did.

    An inner call's id is its caller's id, then `~` and the attempt if it is not the first, then `.` and a number.
    """
    found = re.fullmatch(r"(.+?)(?:~\d+)?\.\d+", call_id)
    return found and found.group(1)


class Model:
    """Applies the actions of committed calls to plain data, one after another."""

    def __init__(self, programs: Programs) -> None:
        self.files: dict[str, str] = {}
        self.notes: list[str] = []
        self.programs = programs

    def play(self, call_id: str, anew: bool) -> None:
        """Replay a committed call, with its actions recomputed if `anew`, and otherwise with their recorded values."""
        trace = self.programs.traces[call_id]
        for act, about, value in trace.acts:
            self.act(act, about, value, trace.spec, anew)

    def act(self, act: str, about: Any, value: Any, spec: Spec, anew: bool) -> None:
        match act:
            case "write":
                self.files[about] = spec.tag
            case "append":
                self.files[about] = self.files.get(about, "") + spec.tag if anew else value
            case "delete":
                if anew or value:
                    self.files.pop(about, None)
            case "note":
                self.notes.append(spec.tag)
            case "count":
                self.notes.append(f"{spec.tag}{len(self.notes)}" if anew else value)
            case "call" | "parallel":
                for inner in value:
                    self.play(inner, anew)
            case _:
                pass


def check(programs: Programs) -> None:
    """Check that the end state equals that of replaying the successful calls one after another, in commit order."""
    rig, model = programs.rig, Model(programs)
    for event in rig.of(ToolInvoked):
        if event.status == "ok" and len(event.path) == 1:
            model.play(event.call_id, anew=event.tool == "staged")
    assert rig.notes == model.notes
    assert {path: rig.files.read(path) for path in rig.paths} == model.files
    published = [event.text for event in rig.events if isinstance(event, Note)]
    assert published == model.notes
    rig.assert_paired()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), specs(("staged", "idempotent"), 2)), min_size=1, max_size=5),
    st.lists(st.integers(0, 12), max_size=2),
)
@pytest.mark.virtual_time
async def test_any_interleaving_is_as_if_one_after_another(
    calls: list[tuple[int, Spec]], cancels: list[int]
) -> None:
    """Parallel, nested, failing and cancelled calls leave the same state as the successful ones replayed one after another."""
    programs = Programs()

    async def start(after: int, spec: Spec) -> None:
        await asyncio.sleep(after)
        await programs.rig.gate.invoke(spec.effect, programs.number(spec))

    tasks = [asyncio.ensure_future(start(after, spec)) for after, spec in calls]
    for index, after in enumerate(cancels):
        asyncio.get_running_loop().call_later(after, tasks[index % len(tasks)].cancel)
    await asyncio.gather(*tasks, return_exceptions=True)
    check(programs)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), specs(("staged",), 1)), min_size=2, max_size=6))
@pytest.mark.virtual_time
async def test_staged_calls_are_serialisable(calls: list[tuple[int, Spec]]) -> None:
    """Staged calls are serialisable: recomputing the committed ones in commit order gives the same state."""
    programs = Programs()

    async def start(after: int, spec: Spec) -> None:
        await asyncio.sleep(after)
        await programs.rig.gate.invoke(spec.effect, programs.number(spec))

    await asyncio.gather(*[start(after, spec) for after, spec in calls])
    check(programs)


class Created:
    """Records each transaction that an attempt creates on first use, and whether another thread could create one meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
        self.names: list[str] = []
        self.unguarded = False
        self._lock = rig.session.lock
        monkeypatch.setattr("handrail.run.call.new_transaction", self._create)

    def _create(self, attempt: Any, tool: Any) -> Any:
        self.names.append(attempt.name)
        other = threading.Thread(target=self._try)
        other.start()
        other.join()
        return new_transaction(attempt, tool)

    def _try(self) -> None:
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self.unguarded = True


async def test_transactions_are_created_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that uses no state has no transaction. While a call's transaction is created, no other thread can create one."""

    @tool(effect="staged")
    async def idle(context: ToolContext) -> None:
        """Use nothing."""

    @tool(effect="staged")
    async def busy(context: ToolContext) -> None:
        """Use the session and the files."""
        context.session.dispatch(Note("busy"))
        context.filesystem.write("a", "busy")

    rig = Rig([idle, busy])
    created = Created(monkeypatch, rig)
    assert (await rig.gate.invoke("idle")).success
    assert created.names == []
    assert (await rig.gate.invoke("busy")).success
    assert created.names == ["busy"]
    assert not created.unguarded
