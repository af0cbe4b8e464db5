"""`handrail runs adopt` moves a parked run to changed code, unless that code can't continue it: then it names what changed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from handrail import SqliteJournal
from support import PATIENCE, importing_support
from support.parked_runs import answer_to

APP = '''
from dataclasses import dataclass
from handrail import Adapter, Prompt, ScriptedModel, ToolCall, ToolContext, kept, tool
from handrail.messages import ToolMessage

{type}

@tool(effect="staged")
async def note(*, context: ToolContext) -> str:
    """Note something."""
    context.session.dispatch({item})
    return "noted"

@tool(effect="pure")
async def ask(*, context: ToolContext) -> str:
    """Ask somebody."""
    return await context.wait_for("name", schema=str)

def answer(request):
    results = [each for each in request.messages if isinstance(each, ToolMessage)]
    return [ToolCall("note"), ToolCall("ask"), "end"][len(results)]

adapter = Adapter(ScriptedModel(answer))
prompt = Prompt("{prompt}", "Do.", tools=[note, ask])
'''
WAS = "@dataclass(frozen=True)\nclass Note:\n    text: str"
IS = "@dataclass(frozen=True)\nclass Note:\n    title: str"
READ = f"@kept(upgrade=lambda value: Note(value['text']))\n{IS}"


def write(folder: Path, type: str, prompt: str = "shop") -> None:
    (folder / "shop.py").write_text(APP.format(type=type, item='Note("milk")', prompt=prompt))


def handrail(folder: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "handrail", *words, "--journal", "runs.db"]
    done = subprocess.run(command, cwd=folder, env=importing_support(), capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def work(folder: Path, status: str) -> None:
    """Let a worker execute the run until it stands like this."""
    command = [sys.executable, "-m", "handrail", "worker", "shop.py", "--journal", "runs.db"]
    with subprocess.Popen(command, cwd=folder, env=importing_support(), stdout=subprocess.DEVNULL) as worker:
        end = time.monotonic() + PATIENCE
        while json.loads(handrail(folder, "runs", "list", "--json"))["runs"][0]["standing"] != status:
            assert worker.poll() is None
            assert time.monotonic() < end
        worker.send_signal(signal.SIGTERM)


def test_a_parked_run_is_adopted_only_by_code_that_can_continue_it(tmp_path: Path):
    """Another prompt, or a class that no longer reads what was recorded, is refused by name. With a function for it, the run goes on."""
    write(tmp_path, WAS)
    run = json.loads(handrail(tmp_path, "submit", "shop.py", "go", "--json"))["run_id"]
    work(tmp_path, "parked")
    with closing(SqliteJournal(tmp_path / "runs.db", watch=None)) as journal:
        (question,) = asyncio.run(journal.questions.open(run))
        journal.questions.answer(answer_to(question, "ann"))
    write(tmp_path, WAS, prompt="market")
    refused = handrail(tmp_path, "runs", "adopt", run, code=2)
    assert all(each in refused for each in ("'shop'", "'market'", "--app module:name"))
    write(tmp_path, IS)
    refused = handrail(tmp_path, "runs", "adopt", run, code=1)
    assert "an item of Note does not match its type: title: Field required" in refused
    write(tmp_path, READ)
    handrail(tmp_path, "runs", "adopt", run)
    work(tmp_path, "done")
