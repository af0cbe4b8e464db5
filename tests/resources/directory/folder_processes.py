"""Several processes that read and change one folder at the same time, while an editor saves a file in it.

The processes are killed and started again. Run as a script, this runs rounds and prints one JSON report per round:

    python tests/resources/directory/folder_processes.py --seconds 300 --seed 1
    python tests/resources/directory/folder_processes.py --processes 2 3 4 8 --updates 2000 --kills 20 --rounds 10 --journaled both

Each call reads some files and writes one or two of them, or writes to the file that the editor saves. With a journal,
the calls are made by runs, which the next process resumes after a kill. Afterwards, a serial order of the calls must
explain what each of them read and the files (`support.histories`). If a round is not clean, its folder is kept: each
process has logged every attempt at a call before it could commit, and every result before the next call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from handrail import (
    Adapter,
    DirectoryFilesystem,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    ToolResult,
    open_gate,
    tool,
)
from handrail.errors import PromptEvaluationError, RunUnknown
from handrail.events import ToolInvoked
from handrail.messages import AssistantMessage
from handrail.session import Session
from resources.directory.crashing import KillingDisk, Points
from support.histories import NOBODY, Attempt, History

SHARED = tuple(f"shared/{number}" for number in range(6))
EDITED = "edited"
_TOKEN = re.compile(r"w\d+\.\d+\.\d+\.\d+\.\d+")
_POINTS = 16
"""The approximate number of kill points that one call passes."""
_TURNS = (1, 2, 1)
"""How many calls a run makes in each turn of its model."""
_PARALLEL = 2
"""How many calls a process without a journal makes at a time."""
_BETWEEN_KILLS = 1.2
"""Seconds between kills at arbitrary moments, on average, if a round has a time."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one round."""

    processes: int
    updates: int = 0
    """How many calls each process makes; 0 if it goes on until the time is over."""
    seconds: float = 0
    """How long the processes go on; 0 if they make a number of calls. Only such a round has kills at arbitrary moments."""
    journaled: bool = False
    kills: int = 0
    """How often each process is killed at a random point of a commit, unless it finishes first."""
    editor: bool = True
    seed: int = 0


class Report(msgspec.Struct, kw_only=True):
    """The findings of one round. Every field after `kills` must be 0 or empty."""

    succeeded: int = 0
    """Calls whose success was told to their process, or is recorded in the journal."""
    attempts: int = 0
    conflicts: int = 0
    """Calls that failed because of the editor."""
    saves: int = 0
    kills: int = 0
    problem: str = ""
    """Why no serial order of the calls explains what they read and the files."""
    failures: list[str] = []
    """Messages of calls that failed although the editor was not in their way."""
    torn: list[str] = []
    """Files whose content is not what one call wrote."""
    lost_saves: int = 0
    """How often the editor found that its last save was no longer the first line."""
    crashed: int = 0
    """Processes that ended with an error."""

    @property
    def is_clean(self) -> bool:
        return not (self.problem or self.failures or self.torn or self.lost_saves or self.crashed)


# --- files --------------------------------------------------------------------------------------------


def content_of(token: str) -> str:
    """Return what an attempt writes to a file: lines enough that a torn file is noticed."""
    return f"{token}\n" * (1 + sum(map(ord, token)) % 300)


def version_of(text: str) -> str:
    """Return the token of the attempt that wrote a file. Raises `ValueError` if the file is torn."""
    token = text.partition("\n")[0]
    if text and text != content_of(token):
        raise ValueError(f"torn: {text[:200]!r}")
    return token or NOBODY


# --- a process ----------------------------------------------------------------------------------------


class Log:
    """What one process and those after it did: every attempt before it can commit, and every result."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, kind: str, **what: Any) -> None:
        os.write(self._fd, json.dumps({"kind": kind, "at": time.time(), **what}).encode() + b"\n")

    def entries(self) -> Iterator[dict[str, Any]]:
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            yield json.loads(line)

    def close(self) -> None:
        os.close(self._fd)


class Worker:
    """A process that makes calls. If it is killed, the next process continues where it stopped."""

    def __init__(self, base: Path, number: int, round: Round, life: int = 0) -> None:
        self._base, self._number, self._round, self._life = base, number, round, life
        self._log = Log(base / "outcomes" / str(number))
        self._draw = random.Random(f"{round.seed} {number} {life}")
        self._attempts = count()
        self._done = {entry["call"] for entry in self._log.entries() if entry["kind"] == "result"}
        self._names = count(sum(entry["kind"] in ("call", "run") for entry in self._log.entries()))

        @tool(effect="staged", description="Read files, and write some of them.")
        async def touch(name: str, reads: list[str], writes: list[str], context: ToolContext) -> str:
            return self._touch(name, reads, writes, context)

        self._tool = touch

    def _touch(self, name: str, reads: list[str], writes: list[str], context: ToolContext) -> str:
        files = context.filesystem
        token = f"w{self._number}.{self._life}.{next(self._attempts)}.{os.getpid()}.{len(reads)}"
        versions = [(path, version_of(files.read(path) if files.exists(path) else "")) for path in reads]
        for path in writes:
            if path == EDITED:
                first = files.read(path).partition("\n")[0]
                files.write(path, f"{first}\n{token}\n")
            else:
                files.write(path, content_of(token))
        kept = tuple(path for path in writes if path != EDITED)
        attempt = Attempt(call=name, token=token, reads=tuple(versions), writes=kept)
        self._log.add("attempt", attempt=msgspec.to_builtins(attempt))
        return token

    def _arguments(self, draw: random.Random, name: str) -> dict[str, Any]:
        own = f"own/{self._number}"
        if self._round.editor and draw.random() < 0.15:
            return {"name": name, "reads": draw.sample(SHARED, 2), "writes": [EDITED]}
        reads = [*draw.sample(SHARED, draw.randint(1, 4)), *[own] * (draw.random() < 0.3)]
        return {"name": name, "reads": reads, "writes": reads[-draw.randint(1, min(2, len(reads))) :]}

    def _note(self, name: str, result: ToolResult[Any], writes: list[str]) -> None:
        self._log.add(
            "result", call=name, ok=result.success, told=str(result.value if result.success else result.message),
            edited=writes == [EDITED],
        )  # fmt: skip
        self._done.add(name)

    def _is_over(self) -> bool:
        return (self._base / "over").exists() or bool(
            self._round.updates and len(self._done) >= self._round.updates
        )

    def _points(self) -> Points:
        if self._life >= self._round.kills:
            return Points(0)
        left = max(1, self._round.updates - len(self._done)) if self._round.updates else 100
        return Points(self._draw.randint(1, max(2, left * _POINTS // (self._round.kills - self._life + 1))))

    async def run(self) -> None:
        files = DirectoryFilesystem(self._base / "root", disk=KillingDisk(self._points()))
        if self._round.journaled:
            journal = SqliteJournal(self._base / "journal.db")
            await files.recover(journal)
            await self._make_runs(journal, files)
            journal.close()
        else:
            gate = open_gate([self._tool], filesystem=files)
            await asyncio.gather(*(self._make_calls(gate) for _ in range(_PARALLEL)))
            await gate.close()
        files.close()
        self._log.close()

    async def _make_calls(self, gate: Any) -> None:
        while not self._is_over():
            name = f"{self._number}.{next(self._names)}"
            arguments = self._arguments(self._draw, name)
            self._log.add("call", call=name)
            self._note(name, await gate.invoke("touch", arguments), arguments["writes"])

    async def _make_runs(self, journal: SqliteJournal, files: DirectoryFilesystem) -> None:
        for run_id in self._unfinished():
            await self._make_run(run_id, journal, files, resumed=True)
        while not self._is_over():
            run_id = f"run{self._number}.{next(self._names)}"
            self._log.add("run", run=run_id)
            await self._make_run(run_id, journal, files, resumed=False)

    def _unfinished(self) -> list[str]:
        entries = list(self._log.entries())
        ended = {entry["run"] for entry in entries if entry["kind"] == "ended"}
        return [entry["run"] for entry in entries if entry["kind"] == "run" and entry["run"] not in ended]

    async def _make_run(
        self, run_id: str, journal: SqliteJournal, files: DirectoryFilesystem, *, resumed: bool
    ) -> None:
        """Make or resume a run. What it calls depends only on its id."""

        def script(request: Any) -> Any:
            turn = sum(isinstance(message, AssistantMessage) for message in request.messages)
            if turn == len(_TURNS):
                return "done"
            draw = random.Random(f"{self._round.seed} {run_id} {turn}")
            names = [f"{run_id}.{turn}.{number}" for number in range(_TURNS[turn])]
            return [ToolCall("touch", self._arguments(draw, name)) for name in names]

        def ended(event: ToolInvoked) -> None:
            self._note(event.params.name, event.result, event.params.writes)

        prompt = Prompt("work", "Work.", tools=[self._tool])
        adapter = Adapter(ScriptedModel(script), journal=journal, filesystem=files)
        if resumed:
            bus = Session().dispatcher
            bus.subscribe(ToolInvoked, ended)
            try:
                await adapter.resume(run_id, prompt, bus=bus)
            except RunUnknown:
                resumed = False  # its process ended before the run had begun
            except PromptEvaluationError as error:
                if "was set aside" not in str(error):
                    raise
                self._log.add("set aside", run=run_id)  # it was killed too often; its open calls never commit
        if not resumed:
            session = Session()
            session.dispatcher.subscribe(ToolInvoked, ended)
            await adapter.evaluate(prompt, "go", run_id=run_id, session=session)
        self._log.add("ended", run=run_id)


# --- the editor ---------------------------------------------------------------------------------------


def edit(base: Path, out: int) -> None:
    """Save a file in place or by a rename, as editors do, until the workers end. Then write the numbers of saves and of lost saves to `out`."""
    path, aside = base / "root" / EDITED, base / "root" / ".edited.swp"
    lost = 0
    for number in count(1):
        lost += _first_line(path) != f"save {number - 1}"
        if (base / "ended").exists():
            os.write(out, json.dumps([number - 1, lost]).encode())
            return
        if number % 2:
            path.write_text(f"save {number}\n")
        else:
            aside.write_text(f"save {number}\n")
            aside.rename(path)
        time.sleep(0.0005 * (number % 3))


def _first_line(path: Path) -> str:
    """Return the first line of a file. The folder's lock ensures that no commit is between two renames."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        return path.read_text().partition("\n")[0]
    finally:
        os.close(folder)


# --- a round ------------------------------------------------------------------------------------------


def forked(work: Any) -> int:
    """Start the work in a child process, and return the child's process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


class Living:
    """The processes of a round. One that was killed is started again, until the round is over."""

    def __init__(self, base: Path, round: Round) -> None:
        self._base, self._round = base, round
        self._alive: dict[int, tuple[int, int]] = {}
        self.kills = self.crashed = 0

    def start(self, number: int, life: int = 0) -> None:
        run = lambda: asyncio.run(Worker(self._base, number, self._round, life).run())  # noqa: E731  # it is only passed as an argument
        self._alive[forked(run)] = (number, life)

    def wait(self, until: float = 0) -> None:
        """Wait until all have ended. Kill one of them now and then before `until`, after which they are told to end."""
        draw = random.Random(self._round.seed)
        following = time.monotonic() + draw.uniform(0, 2 * _BETWEEN_KILLS)
        while self._alive:
            child, status = os.waitpid(-1, os.WNOHANG if until else 0)
            if child:
                self._ended(child, os.waitstatus_to_exitcode(status))
                continue
            time.sleep(0.01)
            if time.monotonic() > until:
                until = 0
                (self._base / "over").touch()
            elif time.monotonic() > following:
                following += draw.uniform(0, 2 * _BETWEEN_KILLS)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(sorted(self._alive)), signal.SIGKILL)

    def _ended(self, child: int, code: int) -> None:
        if child not in self._alive:
            self.crashed += 1  # the editor, which ends only afterwards
            return
        number, life = self._alive.pop(child)
        self.crashed += code not in (0, -9)
        if code == -9:
            self.kills += 1
            self.start(number, life + 1)


def run_round(base: Path, round: Round) -> Report:
    """Run one round in an empty folder, and return what was found."""
    (base / "outcomes").mkdir()
    for path in (*SHARED, EDITED, "own/x"):
        (base / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (base / "root" / path).write_text("save 0\n" if path == EDITED else "")
    if round.journaled:
        child = forked(
            lambda: SqliteJournal(base / "journal.db").close()
        )  # threads of it would outlive a fork
        os.waitpid(child, 0)
    report = Report()
    read, write = os.pipe()
    editor = forked(lambda: edit(base, write)) if round.editor else 0
    living = Living(base, round)
    for number in range(round.processes):
        living.start(number)
    living.wait(time.monotonic() + round.seconds if round.seconds else 0)
    (base / "ended").touch()
    if editor:
        os.waitpid(editor, 0)
        report.saves, report.lost_saves = json.loads(os.read(read, 100))
    os.close(read)
    os.close(write)
    report.kills, report.crashed = living.kills, living.crashed
    recorded = asyncio.run(_settle(base, round))
    _check(base, round, report, recorded)
    return report


async def _settle(base: Path, round: Round) -> set[str]:
    """Finish what was left of commits, and return the tokens of the calls whose success is recorded."""
    files = DirectoryFilesystem(base / "root")
    tokens: set[str] = set()
    if round.journaled:
        journal = SqliteJournal(base / "journal.db")
        await files.recover(journal)
        for row in await journal.runs.list():
            for unit in await journal.calls.load(row.record.id):
                if unit.status == "ok":
                    tokens.update(_TOKEN.findall(unit.result.decode()))
        journal.close()
    files.write("last", "")
    files.close()
    return tokens


def _check(base: Path, round: Round, report: Report, recorded: set[str]) -> None:
    attempts: dict[str, Attempt] = {}
    committed: set[str] = set(recorded)
    refused: set[str] = set()
    for number in range(round.processes):
        for entry in Log(base / "outcomes" / str(number)).entries():
            if entry["kind"] == "attempt":
                attempt = msgspec.convert(entry["attempt"], Attempt)
                attempts[attempt.token] = attempt
            elif entry["kind"] == "result" and entry["ok"]:
                committed.add(entry["told"])
            elif entry["kind"] == "result":
                refused.add(entry["call"])
                is_conflict = "has changed" in entry["told"] or "is writing to" in entry["told"]
                if entry["edited"] and is_conflict:
                    report.conflicts += 1
                else:
                    report.failures.append(entry["told"])
    report.succeeded, report.attempts = len(committed), len(attempts)
    final: dict[str, str] = {}
    for path in sorted((base / "root").glob("*/*")):
        try:
            final[str(path.relative_to(base / "root"))] = version_of(path.read_text())
        except ValueError as torn:
            report.torn.append(f"{path.name} is {torn}")
    unknown = [each for each in attempts.values() if each.token not in committed and each.call not in refused]
    history = History(
        committed=[attempts[token] for token in sorted(committed)],
        possible=unknown,
        final={path: version for path, version in final.items() if version},
    )
    report.problem = history.problem()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[8])
    parser.add_argument("--updates", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--journaled", choices=["yes", "no", "both"], default="both")
    parser.add_argument("--where", default=None)
    given = parser.parse_args()
    if not given.updates and not given.seconds:
        parser.error("say how long: --seconds or --updates")
    journaled = {"yes": [True], "no": [False], "both": [False, True]}[given.journaled]
    clean = True
    for seed in range(given.seed, given.seed + given.rounds):
        for processes in given.processes:
            for recorded in journaled:
                round = Round(
                    processes=processes, updates=given.updates, seconds=given.seconds,
                    journaled=recorded, kills=given.kills, seed=seed,
                )  # fmt: skip
                clean &= _report(round, given.where)
    sys.exit(not clean)


def _report(round: Round, where: str | None) -> bool:
    """Run a round, print its report, and return whether it is clean. The folder of a round that is not clean is kept."""
    base = Path(tempfile.mkdtemp(prefix="handrail-processes-", dir=where))
    report = run_round(base, round)
    told = {"processes": round.processes, "journaled": round.journaled, **msgspec.to_builtins(report)}
    told["failures"] = [
        *sorted({re.sub("[0-9a-f]{32}|[0-9]+", "#", each) for each in report.failures})[:3],
        len(report.failures),
    ]
    if report.is_clean:
        with contextlib.suppress(OSError):
            shutil.rmtree(base)
    else:
        told["kept"] = str(base)
    print(json.dumps({**told, "clean": report.is_clean}), flush=True)
    return report.is_clean


if __name__ == "__main__":
    main()
