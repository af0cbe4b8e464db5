"""Code mode: scripts that call the run's other tools, each call through the gate, and the script as one call."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr

from handrail import (
    Adapter,
    Budget,
    CapabilityPolicy,
    CodeMode,
    DirectoryFilesystem,
    LaterEnvironment,
    MemoryFilesystem,
    Prompt,
    PromptEvaluationError,
    ScriptedModel,
    SqliteJournal,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    open_gate,
    tool,
)
from handrail.code.interpreter import Interpreter
from handrail.code.script import Noted, Suspended
from handrail.code.stubs import function_names, signature
from handrail.errors import DefinitionError, RunParked
from handrail.messages import ToolMessage
from handrail.question import Answer, Question
from handrail.testing import Person
from support.parked_runs import answer_to

AnyTool = Tool[Any, Any]


class Shop:
    """Tools with each effect, and what they did outside of their transactions."""

    def __init__(self) -> None:
        self.mailed: list[str] = []
        self.counted = 0
        self.undone: list[str] = []

        @tool(effect="pure")
        def double(n: int) -> int:
            """Double a number."""
            self.counted += 1
            return 2 * n

        @tool(effect="read")
        async def read(path: str, context: ToolContext) -> str:
            """Read a file."""
            return context.filesystem.read(path)

        @tool(effect="staged")
        async def write(path: str, text: str, context: ToolContext) -> None:
            """Write a file."""
            context.filesystem.write(path, text)

        @tool
        async def send_mail(to: str) -> ToolResult[None]:
            """Send a mail."""
            self.mailed.append(to)
            return ToolResult.ok(message=f"sent to {to}")

        async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
            self.undone.append(value)

        @tool(effect="compensable", compensate=unbook)
        async def book(table: str) -> str:
            """Book a table."""
            return table

        @tool(effect="pure")
        async def fail(why: str = "no reason") -> ToolResult[str]:
            """Fail."""
            return ToolResult.error(why)

        @tool(effect="pure")
        async def login(key: SecretStr) -> str:
            """Log in."""
            return "in"

        self.tools: list[AnyTool] = [double, read, write, send_mail, book, fail, login]


MAIL = CapabilityPolicy(effects={"compensable": "allow"})
"""Mails must be approved."""


def prompt_of(shop: Shop, *policies: Any, **limits: Any) -> Prompt[Any]:
    return Prompt("p", ["Do it.", CodeMode(**limits)], tools=shop.tools, policies=policies)


async def told(
    *scripts: str, shop: Shop | None = None, policies: Any = (), limits: Any = None, **options: Any
):
    """Run scripts one after the other, and return what the model is told of each."""
    model = ScriptedModel([*(ToolCall("run_script", {"script": script}) for script in scripts), "done"])
    given: dict[str, Any] = {"filesystem": MemoryFilesystem({"a.md": "old"}), **options}
    adapter = Adapter(model, **given)
    await adapter.evaluate(prompt_of(shop or Shop(), *policies, **(limits or {})), "go")
    return [each.results[0] for each in model.requests[-1].messages if isinstance(each, ToolMessage)]


async def told_one(script: str, **options: Any) -> str:
    [result] = await told(script, **options)
    return result.text


# --- scripts ---------------------------------------------------------------------------------------------


async def test_a_script_calls_tools_and_returns_its_last_value():
    """The model is shown what the script prints, and its last value. A call returns plain data, or the message if it has no value."""
    script = """
import asyncio
two, four = await asyncio.gather(double(n=1), double(n=2))
print("counted", two)
said = await send_mail(to="ann")
await write(path="b.md", text=f"{two} and {four}")
[await read(path="b.md"), said]
"""
    assert await told_one(script) == 'counted 2\n\n["2 and 4","sent to ann"]'


async def test_a_tool_can_be_passed_on():
    """A tool's name is a value in a script."""
    script = "both = [await each(n=3) for each in (double, double)]\nboth"
    assert await told_one(script) == "[6,6]"


async def test_failed_calls_raise():
    """A failed call raises `RuntimeError` with the tool's words, and the script goes on if it catches it."""
    script = (
        'try:\n    await fail(why="too late")\nexcept RuntimeError as error:\n    said = str(error)\nsaid'
    )
    assert await told_one(script) == "too late"


async def test_a_script_that_fails_leaves_nothing_but_what_cannot_be_undone():
    """If a script fails at its fifth call, its changes are dropped, its booking is compensated, and its mail is named."""
    shop, files = Shop(), MemoryFilesystem({"a.md": "old"})
    script = """
await write(path="a.md", text="new")
await book(table="7")
await send_mail(to="ann")
print(await double(n=1))
await fail(why="the kitchen is closed")
"""
    text = await told_one(script, shop=shop, filesystem=files)
    assert files.fork("look").read("a.md") == "old"
    assert (shop.undone, shop.mailed) == (["7"], ["ann"])
    assert "the kitchen is closed" in text
    assert "It had printed:\n2. Could not be undone: send_mail" in text


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("await nothing()", "`nothing` used when not defined"),
        ('await double(n="x")', "Expected `int`"),
        ("await double(1)", "Too many positional"),
        ("double(n=1)", "not awaited"),
        ("1 + double(n=1)", "not supported"),
        ('await login(key="x")', "`login` used when not defined"),
        ('await run_script(script="1")', "`run_script` used when not defined"),
        ("x = (", "not run"),
        ("import statistics\n", "statistics"),
    ],
)
async def test_mistakes_are_refused_before_anything_happens(script: str, words: str):
    """A script with a mistake that a check finds does not begin, not even its first call."""
    shop = Shop()
    [result] = await told(f'await send_mail(to="ann")\n{script}', shop=shop, policies=[])
    assert result.failed
    assert words in result.text
    assert shop.mailed in ([], ["ann"] if "import" in script else [])


async def test_a_call_that_is_never_awaited_fails_the_script():
    """A call that the script makes, and never waits for, does not begin, and fails the script."""
    shop = Shop()
    assert "double without await" in await told_one("calls = [double(n=1)]\n1", shop=shop)
    assert shop.counted == 0


@pytest.mark.parametrize(("number", "effect"), [(1, "pure"), (2, "read"), (3, "staged"), (4, "irreversible")])
async def test_the_effect_is_the_strongest_of_the_tools(number: int, effect: str):
    """So a script has the strength that it needs, and no more."""
    gate = open_gate([*Shop().tools[:number], *CodeMode().tools])
    assert gate.run.tools["run_script"].effect == effect
    await gate.close()


def test_without_the_extra_an_error_names_it(monkeypatch: pytest.MonkeyPatch):
    """The error says which command installs what is missing."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DefinitionError, match=r"pip install 'handrail\[code\]'"):
        CodeMode()


def test_the_description_of_the_tool_says_what_scripts_lack_and_may_use():
    """It is in the tool's own description, so that clients of an MCP server see it too."""
    [run_script] = CodeMode(calls=7).tools
    for words in ("`yield`", "`create_task`", "no statistics", "7 calls", "64,000,000 bytes"):
        assert words in run_script.description


@pytest.mark.parametrize("wrong", [{"calls": 0}, {"seconds": "1"}, {"memory": 1.5}, {"output": True}])
def test_limits_are_positive_numbers(wrong: Any):
    with pytest.raises(DefinitionError, match=next(iter(wrong))):
        CodeMode(**wrong)


# --- the gate ----------------------------------------------------------------------------------------------


async def test_a_denied_call_is_a_permission_error_in_the_script():
    """The script can catch it, and goes on. Otherwise it fails."""
    script = 'try:\n    await send_mail(to="ann")\nexcept PermissionError:\n    pass\nawait double(n=1)'
    shop = Shop()
    assert await told_one(script, shop=shop, policies=[MAIL], environment=Person(approve=False)) == "2"
    text = await told_one('await send_mail(to="ann")', policies=[MAIL], environment=Person(approve=False))
    assert "PermissionError" in text
    assert shop.mailed == []


async def test_a_denial_cancels_the_calls_beside_it():
    """If one of several calls at once is denied, the script goes on at once, the others are cancelled, and what they did is undone."""
    shop, ended = Shop(), list[str]()

    @tool(effect="staged")
    async def wait_long(context: ToolContext) -> str:
        """Wait."""
        context.filesystem.write("slow.md", "begun")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("cancelled")
        raise AssertionError

    shop.tools.append(wait_long)
    files = MemoryFilesystem({})
    script = """
import asyncio
try:
    await asyncio.gather(wait_long(), send_mail(to="ann"))
except PermissionError:
    said = "denied"
await write(path="b.md", text=said)
said
"""
    options: Any = {"policies": [MAIL], "environment": Person(approve=False), "filesystem": files}
    assert await told_one(script, shop=shop, **options) == "denied"
    assert ended == ["cancelled"]
    assert (files.fork("look").exists("slow.md"), files.fork("look").read("b.md")) == (False, "denied")


async def test_denying_the_script_undoes_it(tmp_path: Path):
    """A person who is shown what a whole script changed may deny it, and then nothing of it is left."""
    (tmp_path / "docs").mkdir()
    files = DirectoryFilesystem(tmp_path)
    asked: list[Question] = []

    class Denies(Person):
        async def ask(self, question: Question, /) -> Answer:
            asked.append(question)
            return answer_to(question, {"approved": False})

    script = 'await write(path="docs/a.md", text="in")\nawait write(path=".envrc", text="out")\n1'
    text = await told_one(script, environment=Denies(approve=False), filesystem=files)
    assert [(each.name, each.asked_by) for each in asked] == [("run_script", ("run_script",))]
    assert "+out" in asked[0].payload["diff"]
    assert "not approved" in text
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["docs"]
    assert list((tmp_path / "docs").iterdir()) == []


async def test_each_call_is_charged():
    """The calls of a script count against the run's budget, and one that is not covered ends the run."""
    shop = Shop()
    script = "for n in range(9):\n    await double(n=n)"
    model = ScriptedModel([ToolCall("run_script", {"script": script}), "done"])
    with pytest.raises(PromptEvaluationError, match="budget"):
        await Adapter(model).evaluate(prompt_of(shop), "go", budget=Budget(tool_calls=4))
    assert shop.counted == 3


# --- limits and escapes -----------------------------------------------------------------------------------

BOMBS = {
    "an endless loop": ("while True:\n    pass", "TimeoutError"),
    "endless recursion": ("def f():\n    return f()\nf()", "RecursionError"),
    "a long text": ('"a" * 10**9', "MemoryError"),
    "a list that grows": ("x = [1]\nwhile True:\n    x += x", "MemoryError"),
    "a huge number": ("10 ** 10 ** 8", "MemoryError"),
    "endless printing": ('while True:\n    print("x" * 100)', "print"),
    "one long print": ('print("x" * 100_000)', "print"),
    "endless calls": ("while True:\n    await double(n=1)", "more than 20 calls"),
    "many calls at once": (
        "import asyncio\nawait asyncio.gather(*[double(n=n) for n in range(99)])",
        "20 calls",
    ),
    "a slow pattern": ('import re\nprint(re.match("(a+)+$", "a" * 40 + "b"))\n1 / 0', "None"),
    "deep nesting": ("x = []\nfor n in range(100000):\n    x = [x]\nx", ""),
    "endless questions to the host": (
        "import os\nwhile True:\n    try:\n        os.getenv('X')\n    except RuntimeError:\n        pass",
        "",
    ),
    "a sleep": ("import time\ntime.sleep(10**6)\n'slept'", "slept"),
}
ESCAPES = {
    "importing the system": '__import__("os").system("touch escaped")',
    "a file": 'open("/etc/passwd").read()',
    "a file by path": 'from pathlib import Path\nPath("/etc/passwd").read_text()',
    "the environment": "import os\nos.environ",
    "one variable": 'import os\nos.getenv("HOME", "none")',
    "a process": 'import subprocess\nsubprocess.run(["id"])',
    "a socket": "import socket\nsocket.socket()",
    "bases of an object": "().__class__.__base__.__subclasses__()",
    "the globals of a function": "def f(): pass\nf.__globals__",
    "the code of a function": "def f(): pass\nf.__code__",
    "the globals of a tool": "double.__globals__",
    "the frame of an error": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    x = error\nx.__traceback__.tb_frame",
    "built-in names": "__builtins__",
    "evaluation": "eval(\"__import__('os')\")",
    "random bytes of the system": "import os\nos.urandom(4)",
    "formatting": '"{0.__class__.__init__.__globals__}".format(double)',
    "the interpreter": "import sys\nsys._getframe()",
}


@pytest.mark.parametrize("name", BOMBS)
async def test_bombs_are_stopped(name: str):
    """A script that uses too much is stopped, and the model is told which limit it met."""
    script, words = BOMBS[name]
    limits = {"seconds": 1, "calls": 20, "output": 2000, "memory": 20_000_000}
    [result] = await told(script, limits=limits)
    assert words in result.text
    assert len(result.text) < 10_000
    assert result.failed or words == "slept" or name == "deep nesting"


@pytest.mark.parametrize("name", ESCAPES)
async def test_there_is_no_way_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A script reaches nothing but its tools: no files, no environment, no processes, and none of the program's own objects."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/root/of/secrets")
    for script in (
        ESCAPES[name],
        f"async def main():\n    {ESCAPES[name].replace(chr(10), chr(10) + '    ')}\nawait main()",
    ):
        [result] = await told(script)
        assert result.failed or "secrets" not in result.text
        assert "root:" not in result.text
    assert list(tmp_path.iterdir()) == []


async def test_the_worker_has_no_environment_and_is_the_one_that_was_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Neither `MONTY_BIN` nor `PATH` decides which program runs scripts, and no variable, such as a key, reaches it."""
    fake = tmp_path / "monty"
    fake.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    fake.chmod(0o700)
    monkeypatch.setenv("MONTY_BIN", str(fake))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    seen: list[bytes] = []
    settle = Interpreter.settle

    async def look(self: Any, id: int, outcome: Any) -> Any:
        seen.append(Path(f"/proc/{self._pid}/environ").read_bytes())
        return await settle(self, id, outcome)

    monkeypatch.setattr(Interpreter, "settle", look)
    assert await told_one("await double(n=1)") == "2"
    assert seen == [b""]
    assert [path.name for path in tmp_path.iterdir()] == ["monty"]


async def test_a_worker_that_dies_fails_only_its_script(monkeypatch: pytest.MonkeyPatch):
    """If the interpreter crashes, the script has failed, its changes are undone, and the next script runs."""
    promise = Interpreter.promise

    async def crash(self: Any) -> Any:
        monkeypatch.setattr(Interpreter, "promise", promise)
        os.kill(self._pid, signal.SIGKILL)
        return await promise(self)

    monkeypatch.setattr(Interpreter, "promise", crash)
    first, second = await told("await double(n=1)", "await double(n=2)")
    assert "crashed" in first.text
    assert second.text == "4"


# --- parking ------------------------------------------------------------------------------------------------

SIX = """
found = [await double(n=n) for n in range(3)]
await write(path="before.md", text="written before")
print(found)
await send_mail(to="ann")
total = sum(found) + await double(n=10)
await write(path="total.md", text=str(total))
total
"""


async def park(
    shop: Shop, script: str, journal: Any, files: Any, **limits: Any
) -> tuple[Adapter, Prompt[Any]]:
    """Run a script until it waits for an approval, and return what continues its run."""
    model = ScriptedModel([ToolCall("run_script", {"script": script}), "done"])
    options: Any = {"journal": journal, "environment": LaterEnvironment(), "filesystem": files}
    adapter, prompt = Adapter(model, **options), prompt_of(shop, MAIL, **limits)
    with pytest.raises(RunParked):
        await adapter.evaluate(prompt, "go", run_id="r")
    return adapter, prompt


async def decide(journal: Any, approved: bool = True) -> None:
    for question in await journal.questions.open("r"):
        journal.questions.answer(answer_to(question, {"approved": approved}))


def told_by(adapter: Adapter) -> str:
    model: Any = adapter.model
    return model.requests[-1].messages[-1].results[0].text


async def noted(journal: Any) -> Noted:
    return next(
        msgspec.msgpack.decode(each.body, type=Noted)
        for each in reversed(await journal.calls.entries("r"))
        if each.kind == "script"
    )


async def test_a_parked_script_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In another process it is loaded, not begun again: what it had computed and printed is there, and each call was made once."""
    shop, files, journal = Shop(), MemoryFilesystem({}), SqliteJournal(tmp_path / "runs.db")
    adapter, prompt = await park(shop, SIX, journal, files)
    assert shop.counted == 3
    await decide(journal)
    monkeypatch.delattr(Interpreter, "start")
    assert (await adapter.resume("r", prompt)).text == "done"
    assert told_by(adapter) == "[0, 2, 4]\n\n26"
    assert (shop.counted, shop.mailed) == (4, ["ann"])
    assert files.fork("look").read("total.md") == "26"
    assert files.fork("look").read("before.md") == "written before"


async def test_a_parked_script_whose_call_is_denied_can_go_on(tmp_path: Path):
    """The denial that comes later is a `PermissionError` too."""
    shop, journal = Shop(), SqliteJournal(tmp_path / "runs.db")
    script = 'try:\n    await send_mail(to="ann")\nexcept PermissionError:\n    said = "no mail"\nsaid'
    adapter, prompt = await park(shop, script, journal, MemoryFilesystem({}))
    await decide(journal, approved=False)
    await adapter.resume("r", prompt)
    assert told_by(adapter) == "no mail"
    assert shop.mailed == []


async def spoil(journal: Any, change: Callable[[Suspended], bytes]) -> None:
    """Let the record refer to another blob than the one with the suspended script."""
    get = journal.blobs.get
    digest = (await noted(journal)).digest
    body = change(msgspec.msgpack.decode(await get(digest), type=Suspended))

    async def changed(asked: str, /) -> bytes:
        return body if asked == digest else await get(asked)

    journal.blobs.get = changed


@pytest.mark.parametrize("kind", ["another version", "no record", "altered", "lost"])
async def test_a_script_that_cannot_be_loaded_runs_from_its_start_with_the_recorded_results(
    kind: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    """Nothing is lost: each call is still made once, and the log says why. Bytes that were tampered with are not loaded."""
    shop, files, journal = Shop(), MemoryFilesystem({}), SqliteJournal(tmp_path / "runs.db")
    clock = "import random, datetime\nx = str(random.random()), str(datetime.datetime.now())\nprint(x)\n"
    check = "\nassert x == (str(x[0]), x[1])\n"
    adapter, prompt = await park(shop, clock + SIX + check, journal, files)
    digest = (await noted(journal)).digest
    before = msgspec.msgpack.decode(await journal.blobs.get(digest), type=Suspended).printed
    if kind in ("altered", "lost"):
        import sqlite3

        with sqlite3.connect(tmp_path / "runs.db") as database:
            tables = [
                row[0]
                for row in database.execute(
                    "SELECT name FROM sqlite_master WHERE name LIKE '%blob%' AND type = 'table'"
                )
            ]
            assert tables
            for table in tables:
                columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
                if kind == "lost":
                    database.execute(f"DELETE FROM {table} WHERE digest = ?", (digest,))
                elif "data" in columns or "body" in columns:
                    column = "data" if "data" in columns else "body"
                    database.execute(f"UPDATE {table} SET {column} = ? WHERE digest = ?", (b"evil", digest))
    elif kind == "no record":
        await spoil(journal, lambda state: b"\x00")
    else:
        await spoil(
            journal, lambda state: msgspec.msgpack.encode(msgspec.structs.replace(state, dump=b"of 2.0"))
        )
    await decide(journal)
    with caplog.at_level(logging.WARNING, "handrail.code"):
        await adapter.resume("r", prompt)
    assert "runs from its start" in caplog.text
    assert told_by(adapter).startswith(before)
    assert told_by(adapter).count("[0, 2, 4]") == 1
    assert (shop.counted, shop.mailed) == (4, ["ann"])


async def test_another_sequence_of_calls_is_an_error(tmp_path: Path):
    """If a script that begins again makes another call than it did, it fails and its outcome is unknown, whatever it catches."""
    shop, journal = Shop(), SqliteJournal(tmp_path / "runs.db")
    script = """
try:
    found = [await double(n=n) for n in range(3)]
except RuntimeError:
    found = []
if found:
    await send_mail(to="ann")
"""
    adapter, prompt = await park(shop, script, journal, MemoryFilesystem({}))
    await spoil(journal, lambda state: b"")
    await decide(journal)
    start = Interpreter.start

    async def other(self: Any, code: str) -> Any:
        return await start(self, code.replace("range(3)", "range(1, 4)"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interpreter, "start", other)
        await adapter.resume("r", prompt)
    assert "the record has call double" in told_by(adapter)
    assert "not known whether it happened" in told_by(adapter)
    assert shop.mailed == []


PARALLEL = """
import asyncio

async def first():
    a = await double(n=1)
    sent = await send_mail(to="ann")
    return [a, sent, await double(n=a)]

async def second():
    b = await double(n=10)
    c = await double(n=b)
    return [b, c, await send_mail(to=str(c))]

await asyncio.gather(first(), second())
"""


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_parallel_calls_are_given_their_results_in_the_recorded_order(tmp_path: Path, is_loaded: bool):
    """Two branches that wait for approvals, answered one after the other in the other order, each make each call once."""
    shop, journal = Shop(), SqliteJournal(tmp_path / "runs.db")
    adapter, prompt = await park(shop, PARALLEL, journal, MemoryFilesystem({}))
    assert shop.counted == 3
    questions = sorted(
        await journal.questions.open("r"), key=lambda each: str(each.payload["arguments"]["to"])
    )
    for question in questions:
        if not is_loaded:
            await spoil(journal, lambda state: b"")
        journal.questions.answer(answer_to(question, {"approved": True}))
        try:
            await adapter.resume("r", prompt)
        except RunParked:
            continue
    assert json.loads(told_by(adapter)) == [[2, "sent to ann", 4], [20, 40, "sent to 40"]]
    assert (shop.counted, sorted(shop.mailed)) == (4, ["40", "ann"])


async def test_the_order_in_which_calls_ended_is_recorded(tmp_path: Path):
    """A script that begins again is given the outcomes of calls at once in the order in which it was given them before."""
    shop, journal, released = Shop(), SqliteJournal(tmp_path / "runs.db"), asyncio.Event()

    @tool(effect="pure")
    async def be_released() -> str:
        """Wait until somebody releases this."""
        await released.wait()
        return "free"

    @tool(effect="pure")
    async def release() -> str:
        """Release what waits."""
        released.set()
        return "released"

    shop.tools += [be_released, release]
    script = """
import asyncio

async def slow():
    return [await be_released(), await double(n=1)]

async def fast():
    return [await double(n=2), await release()]

both = await asyncio.gather(slow(), fast())
await send_mail(to="ann")
both
"""
    adapter, prompt = await park(shop, script, journal, MemoryFilesystem({}))
    await spoil(journal, lambda state: b"")
    await decide(journal)
    await adapter.resume("r", prompt)
    assert json.loads(told_by(adapter)) == [["free", 2], [4, "released"]]
    assert (shop.counted, shop.mailed) == (2, ["ann"])


async def test_a_call_whose_file_others_changed_is_made_again(tmp_path: Path):
    """If others change a file that the script had changed before its run was parked, that call is made again, and the script from its start."""
    shop, journal = Shop(), SqliteJournal(tmp_path / "runs.db")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.md").write_text("old")
    files = DirectoryFilesystem(tmp_path / "files")

    @tool(effect="staged")
    async def add(text: str, context: ToolContext) -> str:
        """Add to a file, and return all of it."""
        whole = context.filesystem.read("a.md") + text
        context.filesystem.write("a.md", whole)
        return whole

    shop.tools.append(add)
    script = 'text = await add(text="!")\nawait send_mail(to="ann")\ntext'
    adapter, prompt = await park(shop, script, journal, files)
    (tmp_path / "files" / "a.md").write_text("new")
    await decide(journal)
    await adapter.resume("r", prompt)
    assert (told_by(adapter), (tmp_path / "files" / "a.md").read_text()) == ("new!", "new!")
    assert shop.mailed == ["ann"]


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_a_denied_call_stays_denied(tmp_path: Path, is_loaded: bool):
    """A denial that the script has caught is a `PermissionError` again when its call is replayed."""
    shop, journal = Shop(), SqliteJournal(tmp_path / "runs.db")
    script = """
try:
    said = await send_mail(to="ann")
except PermissionError:
    said = await send_mail(to="bob")
said
"""
    adapter, prompt = await park(shop, script, journal, MemoryFilesystem({}))
    await decide(journal, approved=False)
    with pytest.raises(RunParked):
        await adapter.resume("r", prompt)
    if not is_loaded:
        await spoil(journal, lambda state: b"")
    await decide(journal)
    await adapter.resume("r", prompt)
    assert told_by(adapter) == "sent to bob"
    assert shop.mailed == ["bob"]


async def test_a_parallel_denial_after_parking(tmp_path: Path):
    """If one of two calls at once is denied after the run was parked, the other is not made, though its question is still open."""
    shop, journal = Shop(), SqliteJournal(tmp_path / "runs.db")
    script = """
import asyncio
try:
    await asyncio.gather(send_mail(to="ann"), send_mail(to="bob"))
except PermissionError:
    said = await double(n=1)
said
"""
    adapter, prompt = await park(shop, script, journal, MemoryFilesystem({}))
    questions = await journal.questions.open("r")
    journal.questions.answer(answer_to(questions[0], {"approved": False}))
    assert (await adapter.resume("r", prompt)).text == "done"
    assert told_by(adapter) == "2"
    assert shop.mailed == []


async def test_limits_hold_across_parking(tmp_path: Path):
    """A script that was parked has made the calls that it made before, so it does not get the number of calls anew."""
    shop, journal = Shop(), SqliteJournal(tmp_path / "runs.db")
    adapter, prompt = await park(shop, SIX, journal, MemoryFilesystem({}), calls=6)
    await decide(journal)
    await adapter.resume("r", prompt)
    assert "more than 6 calls" in told_by(adapter)


async def test_a_large_script_is_parked(tmp_path: Path):
    """A suspended script with 20,000 texts is kept too."""
    shop, journal = Shop(), SqliteJournal(tmp_path / "runs.db")
    script = (
        'texts = [f"text number {n} of many" for n in range(20_000)]\nawait send_mail(to="ann")\nlen(texts)'
    )
    adapter, prompt = await park(shop, script, journal, MemoryFilesystem({}))
    size = len(await journal.blobs.get((await noted(journal)).digest))
    assert 500_000 < size < 5_000_000
    await decide(journal)
    await adapter.resume("r", prompt)
    assert told_by(adapter) == "20000"


# --- stubs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "parameters"),
    [
        ({"q": {"type": "string"}}, "*, q: str = ..., **arguments: Any"),
        ({"q": {"type": ["integer", "null"]}}, "*, q: int | None = ..., **arguments: Any"),
        ({"q": {"enum": ["a", 1]}}, "*, q: Literal['a', 1] = ..., **arguments: Any"),
        ({"q": {"enum": [1.5]}}, "*, q: Any = ..., **arguments: Any"),
        (
            {"q": {"anyOf": [{"type": "number"}, {"type": "array"}]}},
            "*, q: float | list[Any] = ..., **arguments: Any",
        ),
        (
            {"q": {"type": "object", "additionalProperties": {"type": "boolean"}}},
            "*, q: dict[str, bool] = ..., **arguments: Any",
        ),
        ({"q": {"$ref": "#/$defs/node"}}, "*, q: dict[str, Any] = ..., **arguments: Any"),
        ({"q-r": {"type": "string"}}, "**arguments: Any"),
        ({"class": {"type": "string"}}, "**arguments: Any"),
        ({}, "**arguments: Any"),
    ],
)
def test_signatures_say_what_schemas_say(schema: Any, parameters: str):
    """What a type can't say is `Any`, and the gate checks it."""
    defs = {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}

    async def look(params: dict[str, Any], *, context: ToolContext) -> ToolResult[Any]:
        return ToolResult.ok(None)

    made = Tool("look", "Look.", look, params={"type": "object", "properties": schema, "$defs": defs})
    assert signature("look", made) == f"async def look({parameters}) -> Any: ..."


def test_arguments_that_a_pattern_names_can_be_passed():
    """Which they are is checked by the gate."""

    async def look(params: dict[str, Any], *, context: ToolContext) -> ToolResult[Any]:
        return ToolResult.ok(None)

    schema = {
        "type": "object",
        "patternProperties": {"^x": {"type": "string"}},
        "additionalProperties": False,
    }
    made = Tool("look", "Look.", look, params=schema)
    assert signature("look", made) == "async def look(**arguments: Any) -> Any: ..."


def test_names_of_functions_are_identifiers():
    """A name that is none, or that Python has itself, gets `tool_` in front. Of two that would be one, the first has it."""
    names = ["get-it", "get_it", "2nd", "class", "list", "_own"]
    tools = [Tool(name, "Do.", params=None) for name in names]
    assert {name: each.name for name, each in function_names(tools).items()} == {
        "get_it": "get-it",
        "tool_2nd": "2nd",
        "tool_class": "class",
        "tool_list": "list",
        "tool__own": "_own",
    }
