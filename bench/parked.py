"""Park ten thousand runs in one file, and measure the memory, the time to list them and to answer one.

    python bench/parked.py [RUNS]

Each run asks a question and is parked through `LaterEnvironment`. A second process then opens the file, lists
the runs, answers one question, and resumes that run.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pydantic import BaseModel

from handrail import Adapter, Prompt, SqliteJournal, ToolContext, tool
from handrail.environment import LaterEnvironment
from handrail.errors import RunParked
from handrail.models.scripted import ScriptedModel
from handrail.question import Answer
from handrail.run.call import ToolCall
from handrail.runs import list_runs


class Pick(BaseModel):
    """The type of the answer that is requested."""

    number: int


@tool(effect="staged")
async def choose(context: ToolContext) -> str:
    """Ask somebody for a number."""
    assert context.wait_for
    return str((await context.wait_for("pick", {"from": [1, 2, 3]}, Pick)).number)


PROMPT = Prompt("bench", "Do what is asked.", tools=[choose])


def resident() -> float:
    """Return the resident memory of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def say(what: str, figure: str) -> None:
    print(f"{what:<58}{figure:>16}")


async def park(path: Path, runs: int) -> None:
    journal = SqliteJournal(path)
    before = resident()
    began = time.perf_counter()
    for number in range(runs):
        adapter = Adapter(
            ScriptedModel([ToolCall("choose"), "thanks"]), journal=journal, environment=LaterEnvironment()
        )
        try:
            await adapter.evaluate(PROMPT, "go", run_id=f"run-{number:06}")
        except RunParked:
            continue
        raise AssertionError("a run was not parked")
    spent = time.perf_counter() - began
    say(f"{runs:,} runs parked: time per run", f"{spent / runs * 1e3:.2f} ms")
    say("resident memory before", f"{before:.0f} MB")
    say("resident memory with all runs parked", f"{resident():.0f} MB")
    journal.close()
    say("size of the file", f"{path.stat().st_size / 1e6:.1f} MB")


async def answer(path: Path) -> None:
    """List the runs, answer one question and resume its run. This runs in the second process."""
    before = resident()
    began = time.perf_counter()
    journal = SqliteJournal(path, watch=None)
    say("time to open the file in another process", f"{(time.perf_counter() - began) * 1e3:.1f} ms")
    for limit in (100, 1_000_000):
        began = time.perf_counter()
        found = await list_runs(journal, limit=limit)
        say(f"time to list {len(found):,} runs", f"{(time.perf_counter() - began) * 1e3:.1f} ms")
    one = found[len(found) // 2].id
    began = time.perf_counter()
    (question,) = await journal.questions.open(one)
    journal.questions.answer(
        Answer(question_id=question.id, digest=question.digest, by=question.principal, value={"number": 2})
    )
    say("time to answer one question", f"{(time.perf_counter() - began) * 1e3:.2f} ms")
    began = time.perf_counter()
    adapter = Adapter(ScriptedModel(["thanks"]), journal=journal, environment=LaterEnvironment())
    response = await adapter.resume(one, PROMPT)
    assert response.text == "thanks"
    say("time to resume the run and finish it", f"{(time.perf_counter() - began) * 1e3:.2f} ms")
    del found
    say("resident memory at the start and at the end", f"{before:.0f}, {resident():.0f} MB")
    journal.close()


def main() -> None:
    if sys.argv[1:2] == ["answer"]:
        asyncio.run(answer(Path(sys.argv[2])))
        return
    runs = int(sys.argv[1]) if sys.argv[1:] else 10_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.db"
        asyncio.run(park(path, runs))
        sys.stdout.flush()
        subprocess.run([sys.executable, __file__, "answer", str(path)], check=True)


if __name__ == "__main__":
    main()
