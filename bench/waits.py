"""Measure what people wait for, in wall-clock time, at this commit and at an older one.

    python bench/waits.py [COMMIT] [--quick] [--where FOLDER]

With COMMIT, a checkout of it is measured in turn with the working tree, so a busy machine slows both. Servers, workers and the
command line are processes of their own, whose model answers at once and writes down when each request arrived. A figure is the
median of the rounds, each the median of its repetitions. It takes about three minutes, or seconds and tiny sizes with `--quick`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import commits
from handrail import Answer, DirectoryFilesystem, RunParked, SqliteJournal, open_gate, runs
from handrail.fleet import FleetApp, submit
from handrail.question import Question
from handrail.sections.files import search_files
from waits_app import HANGING, LOG, Client, adapter_with, prompt

ROOT = Path(__file__).resolve().parents[1]
APP = Path(__file__).with_name("waits_app.py")
SECONDS, ENOUGH = 120.0, 4.0
"""Seconds after which a round of one side is given up, and after which a wait is not measured once more."""
PAUSE = 0.002
"""Seconds between two looks at what another process has written."""


class Sizes(NamedTuple):
    rounds: int = 3
    times: int = 3  # in each round
    messages: int = 1_000
    calls: int = 1_000
    files: int = 20_000


FULL, QUICK = Sizes(), Sizes(rounds=1, times=1, messages=4, calls=3, files=10)


class Waits:
    """The waits of one round of a side. What takes long to prepare stays in its folder for the next rounds."""

    def __init__(self, where: Path, sizes: Sizes) -> None:
        self.where, self.sizes = where, sizes
        self.log, self.folder = where / "log", where / "folder"
        self.log.write_text("")
        self.folder.mkdir(exist_ok=True)
        os.environ |= {LOG: str(self.log), "XDG_STATE_HOME": str(where)}
        self.figures: dict[str, list[float]] = {}

    def add(self, row: str, began: int, ended: int) -> None:
        self.figures.setdefault(row, []).append((ended - began) / 1e6)

    async def repeat(self, row: str, once: Callable[[str], Awaitable[None]]) -> None:
        """Measure a row. The first figure, which includes what processes import lazily, is dropped."""
        end = time.monotonic() + ENOUGH
        for number in range(self.sizes.times + 1):
            if number < 2 or time.monotonic() < end:
                await once(row)
        del self.figures[row][0]

    async def arrival(self, row: str, began: int, request: str) -> None:
        """Wait until the app's model has got a request, and add the time until then."""
        while not (found := re.search(rf"^{request} .*?(\d+)$", self.log.read_text(), re.MULTILINE)):
            await asyncio.sleep(PAUSE)
        self.add(row, began, int(found[1]))

    @contextlib.contextmanager
    def child(self, *arguments: str | Path) -> Generator[subprocess.Popen[str]]:
        """Start Python with these arguments, and end it afterwards."""
        command = [sys.executable, *arguments]
        with subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.terminate()

    @contextlib.contextmanager
    def server(self, park_after: float = 300) -> Generator[Client]:
        with self.child(APP, self.where / "served.db", str(park_after)) as process:
            assert process.stdout is not None
            yield Client(int(process.stdout.readline()))

    async def measure(self) -> None:
        with self.server() as here, self.server() as there, self.server(0) as parking:
            await self.approvals(here, there, parking)
            await self.thread(here, there)
        for part in (self.fleet, self.command, self.cancel, self.resume, self.search):
            await part()

    async def approvals(self, here: Client, there: Client, parking: Client) -> None:
        with closing(SqliteJournal(self.where / "served.db")) as journal:

            async def once(row: str, asking: Client, answering: Client, parks: bool = False) -> None:
                text = f"send {time.monotonic_ns()}"
                thread = f"/threads/{text.replace(' ', '-')}"
                run_id = asking.request("POST", f"{thread}/messages", {"text": text})["run_id"]
                asked = await question(journal, run_id, parks=parks)
                began = time.monotonic_ns()
                value = {"question_id": asked.id, "digest": asked.digest, "value": {"approved": True}}
                answering.request("POST", f"{thread}/answers", value)
                await self.arrival(row, began, f"{text} 1")

            until = "until the next request"
            await self.repeat(f"approved on its server, {until}", lambda row: once(row, here, here))
            await self.repeat(f"approved on another server, {until}", lambda row: once(row, here, there))
            parked = f"approved on another server after it was parked, {until}"
            await self.repeat(parked, lambda row: once(row, parking, there, True))

    async def thread(self, here: Client, there: Client) -> None:
        size = self.sizes.messages
        for number in range(0 if (self.where / "long").exists() else size // 2):
            here.say("long", f"hello {number}")
        (self.where / "long").touch()

        async def once(row: str) -> None:
            began = time.monotonic_ns()
            snapshot = there.request("GET", "/threads/long")
            self.add(row, began, time.monotonic_ns())
            assert len(snapshot["messages"]) == size

        await once(f"opened on a server for the first time, a thread of {size:,} messages")
        await self.repeat(f"opened again, a thread of {size:,} messages", once)

    async def fleet(self) -> None:
        path, app = self.where / "fleet.db", FleetApp.load(str(APP))
        worker = self.child("-m", "handrail", "worker", APP, "--journal", path)
        with closing(SqliteJournal(path)) as journal, worker:
            while not await journal.queue.workers():
                await asyncio.sleep(PAUSE)

            async def start(row: str) -> None:
                text = f"hello {time.monotonic_ns()}"
                began = time.monotonic_ns()
                await submit(journal, app, text)
                await self.arrival(row, began, f"{text} 0")

            async def approve(row: str) -> None:
                text = f"send {time.monotonic_ns()}"
                asked = await question(journal, (await submit(journal, app, text)).record.id)
                began = time.monotonic_ns()
                journal.questions.answer(answer(asked, {"approved": True}))
                await self.arrival(row, began, f"{text} 1")

            await self.repeat("approved, until the next request of a worker's run", approve)
            await self.repeat("submitted, until the worker's first request", start)

    async def command(self) -> None:
        async def once(row: str) -> None:
            text = f"hello {time.monotonic_ns()}"
            began = time.monotonic_ns()
            with self.child("-m", "handrail", "run", f"{APP}:agent", text) as process:
                await self.arrival(row, began, f"{text} 0")
                process.wait(30)

        await self.repeat("`handrail run`, until its first request", once)

    async def cancel(self) -> None:
        path = self.where / "cancel.db"
        with closing(SqliteJournal(path)) as journal, closing(SqliteJournal(path)) as other:
            adapter = adapter_with(journal)

            async def once(row: str) -> None:
                run_id = f"run-{time.monotonic_ns()}"
                HANGING.clear()
                running = asyncio.ensure_future(adapter.evaluate(prompt, "hang", run_id=run_id))
                await HANGING.wait()
                began = time.monotonic_ns()
                await runs.cancel(other, run_id)
                while (await other.runs.get(run_id)).status != "cancelled":
                    await asyncio.sleep(PAUSE)
                self.add(row, began, time.monotonic_ns())
                await asyncio.gather(running, return_exceptions=True)

            await self.repeat("cancelled through another journal object, until recorded", once)

    async def resume(self) -> None:
        calls, path = self.sizes.calls, self.where / "resume.db"
        is_new = not path.exists()
        with closing(SqliteJournal(path)) as journal:
            if is_new:
                with contextlib.suppress(RunParked):
                    await adapter_with(journal).evaluate(prompt, f"look {calls}", run_id="long")

            async def once(row: str) -> None:
                journal.questions.answer(answer(await question(journal, "long"), 1))
                self.log.write_text("")
                began = time.monotonic_ns()
                with contextlib.suppress(RunParked):
                    await adapter_with(journal).resume("long", prompt)
                await self.arrival(row, began, f"look {calls}")

            await self.repeat(f"resumed, until the next request of a run of {calls:,} calls", once)

    async def search(self) -> None:
        root, count = self.where / "files", self.sizes.files
        for number in range(0 if root.exists() else count):
            folder = root / str(number // 100)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_text(f"line {number}\n" * 10)
        with closing(DirectoryFilesystem(root)) as files:
            gate = open_gate([search_files], filesystem=files)

            async def once(row: str) -> None:
                began = time.monotonic_ns()
                result = await gate.invoke("search_files", {"pattern": f"line {count - 1}$"})
                self.add(row, began, time.monotonic_ns())
                assert result.success

            await self.repeat(f"search_files in {count:,} files", once)
            await gate.close()


def answer(asked: Question, value: Any) -> Answer:
    return Answer(question_id=asked.id, digest=asked.digest, by=asked.principal, value=value)


async def question(journal: SqliteJournal, run_id: str, *, parks: bool = True) -> Question:
    """Wait until a run has asked its question and, if it parks, until no process has it."""
    while True:
        for asked in await journal.questions.open(run_id):
            row = await journal.runs.get(run_id)
            if not parks or (row.status == "parked" and not row.held):
                return asked
        await asyncio.sleep(PAUSE)


def measure(where: Path, sizes: Sizes) -> None:
    """Measure a round, and print the median of each row. This is the main function of a side's process."""
    waits, tasks = Waits(where, sizes), commits.Row("directory", "process", tasks=commits.CONTENDERS)
    asyncio.run(commits.contend(commits.Row("memory"), where, 0, lambda: None))  # imports before any fork
    commit = commits.measured(tasks, where).median / 1e3
    waits.figures[f"committed, a call among {tasks.tasks} tasks on one folder"] = [commit]
    asyncio.run(asyncio.wait_for(waits.measure(), SECONDS))
    print(json.dumps({row: statistics.median(figures) for row, figures in waits.figures.items()}))


# --- both sides ---------------------------------------------------------------------------------------


def measured(tree: Path, where: Path, sizes: Sizes) -> dict[str, float]:
    """Measure a round of a checkout in a process of its own."""
    where.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--measure", "--where", where, *["--quick"] * (sizes is QUICK)]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "CALLS": "4" if sizes is QUICK else "40"}
    result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    if result.returncode:
        raise SystemExit(result.stderr.decode())
    return json.loads(result.stdout)


def main(commit: str, where: Path | None, sizes: Sizes) -> None:
    with tempfile.TemporaryDirectory(prefix=".handrail-bench-", dir=where) as folder:
        base = Path(folder).resolve()
        old = base / "old"
        trees = {f"at {commit[:10]}": old, "here": ROOT} if commit else {"here": ROOT}
        if commit:
            subprocess.run(["git", "worktree", "add", "--detach", "-q", old, commit], cwd=ROOT, check=True)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        try:
            for number in range(sizes.rounds):
                for name in list(trees)[:: 1 if number % 2 else -1]:
                    rounds[name].append(measured(trees[name], base / name.replace(" ", "-"), sizes))
        finally:
            if commit:
                subprocess.run(["git", "worktree", "remove", "--force", old], cwd=ROOT, check=True)
    heading = f"Median of {sizes.rounds} rounds in ms (fastest, slowest)"
    print(f"{heading:72}" + " |".join(f"{name:>28}" for name in rounds))
    for row in rounds["here"][0]:
        columns = [sorted(each[row] for each in side) for side in rounds.values()]
        figures = [f"{statistics.median(each):9,.1f} ({each[0]:,.1f}, {each[-1]:,.1f})" for each in columns]
        print(f"{row:72}" + " |".join(f"{each:>28}" for each in figures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("commit", nargs="?", default="")
    parser.add_argument("--where", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = QUICK if given.quick else FULL
    if given.measure:
        measure(given.where, sizes)
    else:
        main(given.commit, given.where, sizes)
