"""Rounds of concurrent calls on shared resources, from one session or several, in tasks, threads or processes.

Run as a script, this reads one order per line, runs each in forked processes, and answers with an outcome. So a round in
processes costs a few forks, and the import only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from handrail import (
    Adapter,
    DirectoryFilesystem,
    MemoryFilesystem,
    PostgresJournal,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    Workspace,
    open_gate,
    tool,
)
from handrail.errors import ToolError
from handrail.events import ToolInvoked
from handrail.resources import given
from handrail.session import Session
from isolation.plans import Baton, Plan, Recorder, Step, version_of
from isolation.shelves import FolderShelf, MemoryShelf, Shelf
from support import importing_support, postgres
from support.histories import Attempt, History

Resource = Literal[
    "memory", "directory", "directories", "workspace", "slices", "shelf", "folder shelf", "mixed"
]
"""What calls work on. With `directories`, each call has its own filesystem object on one folder. `mixed` is a directory, slices and a shelf."""
JournalKind = Literal["none", "process", "power", "postgres", "different"]
"""With `different`, the calls take turns with no journal and with two SQLite files of different durability."""
RESOURCES: Sequence[Resource] = get_args(Resource)
JOURNALS: Sequence[JournalKind] = get_args(JournalKind)


@dataclass(frozen=True)
class CellX:
    text: str


@dataclass(frozen=True)
class CellY:
    text: str


@dataclass(frozen=True)
class CellZ:
    text: str


CELLS = {"x": CellX, "y": CellY, "z": CellZ}


class Setting(msgspec.Struct, frozen=True):
    """Where the calls of a round run, and on what."""

    resource: Resource
    sessions: Literal["one", "several"] = "several"
    place: Literal["tasks", "threads", "processes"] = "tasks"
    journal: JournalKind = "none"

    def __str__(self) -> str:
        return f"{self.resource}, {self.sessions} session{'s'[: self.sessions != 'one']}, {self.place}, {self.journal} journal"

    @property
    def keys(self) -> Sequence[str]:
        """Three keys: `f:` is a file, `s:` a slice and `r:` an entry of a shelf."""
        if self.resource == "mixed":
            return ("f:x", "s:x", "r:x") if self.sessions == "one" else ("f:x", "f:y", "r:x")
        kind = {"slices": "s", "shelf": "r", "folder shelf": "r"}.get(self.resource, "f")
        return [f"{kind}:{name}" for name in "xyz"]

    @property
    def folder(self) -> str:
        """The folder that calls may list; "" if there is none."""
        return "f:d" if self.keys[0].startswith("f:") else ""


class World:
    """The resources, sessions and journals of a round, as one process has them."""

    def __init__(self, setting: Setting, base: Path, url: str = "") -> None:
        self.setting, self.base, self.url = setting, base, url
        self._closing = contextlib.ExitStack()
        self._session = Session()
        self._files = self._new_files()
        self.shelf = FolderShelf(base / "shelf") if setting.resource == "folder shelf" else MemoryShelf()
        self._journals: dict[tuple[str, object], Any] = {}

    def _new_files(self) -> Any:
        if self.setting.resource in ("memory", "slices"):
            return MemoryFilesystem()
        if self.setting.resource == "workspace":
            return Workspace("w", cache=self.base / "cache")
        files = DirectoryFilesystem(self.base / "root")
        self._closing.callback(files.close)
        return files

    def options(self, call: int) -> dict[str, Any]:
        """Return the options of the gate through which a call goes."""
        setting = self.setting
        return {
            "session": self._session if setting.sessions == "one" else Session(),
            "filesystem": self._new_files() if setting.resource == "directories" else self._files,
            "resources": [given(Shelf, self.shelf)],
            "journal": self._journal(call),
        }

    def _journal(self, call: int) -> Any:
        kind = self.setting.journal
        if kind == "different":
            kind = ("none", "process", "power")[call % 3]
        if kind == "none":
            return None
        shared = self.setting.place == "tasks"
        return self._journals.setdefault((kind, shared or call), None) or self._open_journal(
            kind, shared or call
        )

    def _open_journal(self, kind: JournalKind, key: object) -> Any:
        if kind == "postgres":
            journal: Any = PostgresJournal(self.url, key_file=self.base / "key")
        else:
            journal = SqliteJournal(self.base / f"{kind}.db", durability=kind)  # type: ignore[arg-type]
        self._closing.callback(journal.close)
        self._journals[kind, key] = journal
        return journal

    def open_journals(self, calls: int) -> None:
        """Open the journals of all calls, so that no two threads or processes create one at the same time."""
        for call in range(calls):
            self._journal(call)

    def final(self) -> dict[str, str]:
        """Return the version of each key that was written."""
        files = self._files
        if self.setting.resource == "workspace":
            [root] = (self.base / "cache").glob("*/w/1/files")
            files = DirectoryFilesystem(root, staging=self.base / "aside")
            self._closing.callback(files.close)
        paths = [f"f:{path}" for path in files.glob("**")]
        found: dict[str, str] = {}
        for key in (*self.setting.keys, *paths):
            kind, _, name = key.partition(":")
            if kind == "f":
                text = files.read(name) if files.exists(name) else ""
            else:
                text = self.shelf.read(name) if kind == "r" else _text(self._session[CELLS[name]].latest())
            found[key] = version_of(text)
        return {key: version for key, version in found.items() if version}

    def close(self) -> None:
        self._closing.close()


def _text(cell: Any) -> str:
    return "" if cell is None else cell.text


class Outcome(msgspec.Struct, frozen=True):
    """How a round ended."""

    committed: tuple[Attempt, ...]
    failures: dict[int, str]
    """The messages of the calls that failed although their plan has them succeed."""
    initial: dict[str, str] = {}
    final: dict[str, str] = {}
    attempts: int = 0

    @property
    def problem(self) -> str:
        """Why no serial order explains the calls that committed; "" if one does."""
        return History(committed=self.committed, initial=self.initial, final=self.final).problem()


class Round:
    """A plan's calls in one world. In a forked process, it makes only some of the calls."""

    def __init__(self, world: World, plan: Plan, name: str, baton: Baton | None = None) -> None:
        self._world, self._plan, self._name = world, plan, name
        self._baton = baton or Baton(plan.turns, len(plan.calls))
        self._pool = ThreadPoolExecutor(len(plan.calls))
        self._recorders: dict[int, Recorder] = {}
        self._numbers = [0] * len(plan.calls)
        self._marks: dict[str, tuple[int, int, int]] = {}
        """How much each attempt had recorded before its inner call."""
        self.results: dict[int, Any] = {}

    @property
    def attempts(self) -> int:
        return sum(self._numbers)

    # Handlers. Each of them waits for its turn before every step of its first attempt.

    def tools(self) -> list[Any]:
        made: list[Any] = []
        for effect, name in (("staged", "touch"), ("read", "look")):
            describe: dict[str, Any] = {"effect": effect, "description": "Take the steps of a call."}

            @tool(name=f"{name}_async", **describe)
            async def by_coroutine(call: int, context: ToolContext) -> Any:
                return await self._run(call, context, self._begin(call))

            @tool(name=f"{name}_plain", **describe)
            def by_function(call: int, context: ToolContext) -> Any:
                return asyncio.run(self._run(call, context, self._begin(call)))

            @tool(name=f"{name}_part", **describe)
            async def part(call: int, context: ToolContext) -> None:
                recorder = self._recorders[call]
                if recorder.token in self._marks:
                    self._baton.release(call)  # the inner call runs again, for which there are no turns
                mark = self._marks.setdefault(
                    recorder.token, (len(recorder.reads), len(recorder.lists), len(recorder.writes))
                )
                del recorder.reads[mark[0] :], recorder.lists[mark[1] :], recorder.writes[mark[2] :]
                steps = self._plan.calls[call].steps
                await self._take(call, context, recorder, steps[len(steps) // 2 :])

            @tool(name=f"{name}_nested", **describe)
            async def with_inner(call: int, context: ToolContext, name: str = name) -> Any:
                recorder = self._begin(call)
                steps = self._plan.calls[call].steps
                await self._take(call, context, recorder, steps[: len(steps) // 2])
                inner = await context.call(f"{name}_part", call=call)
                if not inner.success:
                    raise ToolError(inner.message)
                return await self._end(call, recorder)

            made += [by_coroutine, by_function, part, with_inner]
        return made

    def _begin(self, call: int) -> Recorder:
        self._numbers[call] += 1
        if self._numbers[call] > 1:
            self._baton.release(call)
        recorder = self._recorders[call] = Recorder(f"{self._name}c{call}", self._numbers[call])
        return recorder

    async def _run(self, call: int, context: ToolContext, recorder: Recorder) -> Any:
        await self._take(call, context, recorder, self._plan.calls[call].steps)
        return await self._end(call, recorder)

    async def _take(self, call: int, context: ToolContext, recorder: Recorder, steps: Iterable[Step]) -> None:
        for step in steps:
            await self._wait(call)
            _take_step(step, context, recorder)
            self._baton.took(call)

    async def _end(self, call: int, recorder: Recorder) -> Any:
        await self._wait(call)
        self._baton.took(call, is_last=True)
        if self._plan.calls[call].fails:
            raise ToolError("planned")
        return msgspec.to_builtins(recorder.attempt())

    async def _wait(self, call: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, self._baton.wait, call)

    # Calls.

    def _called(self, call: int) -> tuple[str, dict[str, Any]]:
        planned = self._plan.calls[call]
        return f"{'touch' if planned.writes else 'look'}_{planned.style}", {"call": call}

    async def make(self, calls: Sequence[int]) -> None:
        """Make calls concurrently, each through a gate of its own unless there is one session in one loop."""
        if self._world.setting.resource == "workspace":
            return await self._make_in_run(calls)
        alone = self._world.setting.sessions == "one"
        first = open_gate(self.tools(), **self._world.options(calls[0])) if alone else None
        gates = {call: first or open_gate(self.tools(), **self._world.options(call)) for call in calls}

        async def invoke(call: int) -> None:
            try:
                self.results[call] = await gates[call].invoke(*self._called(call))
            finally:
                self._baton.release(call)

        await asyncio.gather(*map(invoke, calls))
        for gate in {id(gate): gate for gate in gates.values()}.values():
            await gate.close()

    async def _make_in_run(self, calls: Sequence[int]) -> None:
        options = self._world.options(0)

        def ended(event: ToolInvoked) -> None:
            if "_part" not in event.tool:
                self.results[event.params.call] = event.result
                self._baton.release(event.params.call)

        options["session"].dispatcher.subscribe(ToolInvoked, ended)
        model = ScriptedModel([[ToolCall(*self._called(call)) for call in calls], "ok"])
        await Adapter(model).evaluate(
            Prompt("law", "Work.", tools=self.tools()), "go", run_id=self._name, **options
        )

    def make_in_threads(self) -> None:
        """Make each call in a thread of its own, with an event loop of its own."""
        errors: list[BaseException] = []

        def run(call: int) -> None:
            try:
                asyncio.run(self.make([call]))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(call,)) for call in range(len(self._plan.calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._pool.shutdown()

    def outcome(self) -> Outcome:
        committed = [
            msgspec.convert(result.value, Attempt) for result in self.results.values() if result.success
        ]
        failures = {
            call: result.message
            for call, result in self.results.items()
            if not result.success and not self._plan.calls[call].fails
        }
        return Outcome(tuple(committed), failures, attempts=self.attempts)


def _take_step(step: Step, context: ToolContext, recorder: Recorder) -> None:
    kind, _, name = step.key.partition(":")
    if step.verb == "list":
        recorder.listed(step.key, [path.rpartition("/")[2] for path in context.filesystem.glob(f"{name}/*")])
    elif step.verb == "create":
        context.filesystem.write(f"{name}/{recorder.token}", recorder.content())
        recorder.writes.append(f"{step.key}/{recorder.token}")
    elif step.verb == "read":
        recorder.read(step.key, _reader(kind, context)(name))
    else:
        _writer(kind, context)(name, recorder.content())
        recorder.writes.append(step.key)


def _reader(kind: str, context: ToolContext) -> Callable[[str], str]:
    if kind == "f":
        files = context.filesystem
        return lambda name: files.read(name) if files.exists(name) else ""
    if kind == "r":
        return context.resources.get(Shelf).read
    return lambda name: _text(context.session[CELLS[name]].latest())


def _writer(kind: str, context: ToolContext) -> Callable[[str, str], None]:
    if kind == "f":
        return context.filesystem.write
    if kind == "r":
        return context.resources.get(Shelf).write
    return lambda name, text: context.session.dispatch(CELLS[name](text))


class Rounds:
    """Rounds in one world, one after another: each begins with what the one before it left."""

    def __init__(self, world: World, forker: Forker | None) -> None:
        self._world, self._forker = world, forker
        self._number = 0
        self._state: dict[str, str] = {}

    def run(self, plan: Plan) -> Outcome:
        """Run a plan, and return its outcome."""
        world, name = self._world, f"r{self._number}"
        self._number += 1
        world.open_journals(len(plan.calls))
        if world.setting.place == "processes":
            assert self._forker is not None
            outcome = self._forker.run(Order(world.setting, plan, name, str(world.base), world.url))
        else:
            round = Round(world, plan, name)
            if world.setting.place == "tasks":
                asyncio.run(round.make(range(len(plan.calls))))
            else:
                round.make_in_threads()
            round.close()
            outcome = round.outcome()
        before, self._state = self._state, world.final()
        return msgspec.structs.replace(outcome, initial=before, final=self._state)


@contextlib.contextmanager
def rounds_in(setting: Setting, base: Path, forker: Forker | None = None) -> Generator[Rounds]:
    """Open a world in an empty folder. Only rounds in processes need a forker."""
    with _prepared(base, setting) as url:
        world = World(setting, base, url)
        try:
            yield Rounds(world, forker)
        finally:
            world.close()


@contextlib.contextmanager
def _prepared(base: Path, setting: Setting) -> Generator[str]:
    """Create what the world needs on disk, and yield the URL of a journal in PostgreSQL, if it needs one."""
    (base / "root").mkdir()
    if setting.journal != "postgres":
        yield ""
        return
    (base / "key").touch(mode=0o600)
    (base / "key").write_text(postgres.KEY)
    url = postgres.borrow_url()
    yield url
    postgres.give_back(url)


# --- processes ----------------------------------------------------------------------------------------


class Order(msgspec.Struct, frozen=True):
    """A round for the forking process."""

    setting: Setting
    plan: Plan
    name: str
    base: str
    url: str


class Forker:
    """A process that runs each round in forked processes, one for each call."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rounds.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=importing_support(),
        )

    def run(self, order: Order) -> Outcome:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(msgspec.json.encode(order) + b"\n")
        stdin.flush()
        return msgspec.json.decode(stdout.readline(), type=Outcome)

    def close(self) -> None:
        self._process.communicate()


def _run_forked(order: Order) -> Outcome:
    """Run a round: each call in a process of its own. This process has no other threads."""
    context = multiprocessing.get_context("fork")
    calls = range(len(order.plan.calls))
    shared = (
        context.Condition(),
        context.Array("i", len(calls), lock=False),
        context.Array("i", 1, lock=False),
    )
    pipes = [os.pipe() for _ in calls]
    children = [
        _forked(order, call, Baton(order.plan.turns, len(calls), *shared), pipes[call][1]) for call in calls
    ]
    found = [b"".join(iter(lambda pipe=pipe: os.read(pipe[0], 1 << 16), b"")) for pipe in pipes]
    for child, pipe in zip(children, pipes, strict=True):
        os.waitpid(child, 0)
        os.close(pipe[0])
    outcomes = [msgspec.json.decode(each, type=Outcome) for each in found]
    return Outcome(
        tuple(attempt for outcome in outcomes for attempt in outcome.committed),
        {call: message for outcome in outcomes for call, message in outcome.failures.items()},
        attempts=sum(outcome.attempts for outcome in outcomes),
    )


def _forked(order: Order, call: int, baton: Baton, pipe: int) -> int:
    """Make one call in a child, and return the child's process id. The pipe receives the outcome, and is closed here."""
    child = os.fork()
    if child:
        os.close(pipe)
        return child
    try:
        world = World(order.setting, Path(order.base), order.url)
        round = Round(world, order.plan, order.name, baton)
        try:
            asyncio.run(round.make([call]))
            outcome = round.outcome()
        finally:
            baton.release(call)
        world.close()
    except BaseException:
        outcome = Outcome((), {call: traceback.format_exc()})
    os.write(pipe, msgspec.json.encode(outcome))
    os._exit(0)


def main() -> None:
    for line in sys.stdin:
        outcome = _run_forked(msgspec.json.decode(line, type=Order))
        print(json.dumps(msgspec.to_builtins(outcome)), flush=True)


if __name__ == "__main__":
    main()
