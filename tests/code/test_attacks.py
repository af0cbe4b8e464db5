"""Attacks on code mode from outside: scripts as a hostile model would write them, and what becomes of each."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    CodeMode,
    LaterEnvironment,
    MemoryFilesystem,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    by,
    tool,
)
from handrail.code.interpreter import Interpreter
from handrail.errors import RunParked
from handrail.messages import ModelRequest, ToolMessage
from handrail.testing import Person
from support.parked_runs import answer_to

AnyTool = Tool[Any, Any]
ASK = CapabilityPolicy({"mail.send": "ask"}, effects={"irreversible": "allow"})
mailed: list[str] = []


@tool(effect="pure")
async def keep(x: Any) -> str:
    """Take anything."""
    return type(x).__name__


@tool(capabilities={"mail.send"})
async def send_mail(to: str) -> str:
    """Send a letter."""
    mailed.append(to)
    return f"sent to {to}"


@tool(effect="staged")
async def write(path: str, text: str, context: ToolContext) -> None:
    """Write a file."""
    context.filesystem.write(path, text)


@tool(effect="pure")
async def large(size: int) -> str:
    """Return a long text."""
    return "x" * size


def script(text: str) -> ToolCall:
    return ToolCall("run_script", {"script": text})


def prompt_of(*tools: AnyTool, policies: Any = (), **limits: Any) -> Prompt[Any]:
    given = tools or (keep, send_mail, write, large)
    return Prompt("p", ["Work.", CodeMode(**limits)], tools=given, policies=policies)


def told(model: ScriptedModel) -> list[Any]:
    return [each.results[0] for each in model.requests[-1].messages if isinstance(each, ToolMessage)]


async def run(text: str, *tools: AnyTool, files: Any = None, **options: Any) -> Any:
    """Run a script, and return what the model is told of it."""
    model = ScriptedModel([script(text), "done"])
    limits = {"seconds": 2, "calls": 20, "output": 2_000, "memory": 20_000_000}
    prompt = prompt_of(*tools, policies=options.pop("policies", ()), **limits)
    await Adapter(model, filesystem=files or MemoryFilesystem({}), **options).evaluate(prompt, "go")
    return told(model)[0]


# --- what leaves the interpreter ------------------------------------------------------------------------

NESTED = "x = [1] * 10\nfor i in range(30):\n    x = [x] * 10\n"
"""A list that takes a few kilobytes, and 10^31 numbers when it is written out."""
WRITTEN_OUT = {
    "a value": f"{NESTED}x",
    "a value beside something without JSON": f"{NESTED}[float('nan'), x]",
    "a value in a tuple": f"{NESTED}(x, 1)",
    "a value of an object": f"from dataclasses import dataclass\nfrom typing import Any\n@dataclass\nclass A:\n    x: Any\n{NESTED}A(x)",
    "dicts": "x = {'a': 1}\nfor i in range(90):\n    x = {'a': x, 'b': x}\nx",
    "a text a thousand times": "['a' * 1_000_000] * 1_000",
    "an argument": f"{NESTED}await keep(x=x)",
    "an argument by two names": f"{NESTED}await keep(**{{'x': x, 'y': x}})",
    "a text in an argument": "await keep(x=['a' * 1_000_000] * 1_000)",
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
async def test_what_is_small_only_in_the_interpreter_does_not_leave_it(name: str):
    """The size of a value and of arguments is bounded by what they take when they are written out, before anything writes them."""
    result = await run(WRITTEN_OUT[name])
    assert result.failed
    assert len(result.text) < 5_000
    assert "20,000,000 bytes" in result.text or "not too large" in result.text


SLOW_TO_HASH = {
    "a value": "t = (1, 2)\nfor i in range(30):\n    t = (t, t)\n{t: 1}",
    "an argument": "await keep(x={n * (2**61 - 1) for n in range(50_000)})",
}
"""Keys that the interpreter compares at once, and Python only in half a minute: it computes one hash 2^30 times, or all are equal."""


@pytest.mark.parametrize("name", SLOW_TO_HASH)
async def test_keys_that_are_slow_to_hash_fail_only_their_script(name: str):
    """Python takes over what a script hands over in another process, which is ended once it has computed for too long."""
    model = ScriptedModel([script(SLOW_TO_HASH[name]), script("1 + 1"), "done"])
    await Adapter(model).evaluate(prompt_of(seconds=0.5), "go")
    first, second = told(model)
    assert first.failed
    assert "took too long" in first.text
    assert second.text == "2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10 ** 5000", "1" + "0" * 5000),
        ("x = []\nx.append(x)\nx", '["[...]"]'),
        ("{(1, 2): 3}", '{"1,2":3}'),
        ("float('inf')", "inf"),
        ("print('\\ud800')", "\ufffd\n"),
        ("[1] * 5", "[1,1,1,1,1]"),
        ("from datetime import date\n[date(2026, 1, 2), float('nan')]", '["2026-01-02",nan]'),
    ],
)
async def test_odd_values_are_shown(text: str, expected: str):
    """A value without JSON is shown as text, and nothing that a script returns fails the run."""
    assert expected.lower() in (await run(text)).text.lower()


async def test_a_large_result_does_not_enter():
    """A result that does not fit the script's memory fails the script, and the next one runs."""
    model = ScriptedModel([script("len(await large(size=50_000_000))"), script("1 + 1"), "done"])
    await Adapter(model).evaluate(prompt_of(memory=20_000_000), "go")
    first, second = told(model)
    assert "MemoryError" in first.text
    assert second.text == "2"


@pytest.mark.parametrize(
    "calls", ["await gather(*[keep(x=text) for i in range(9)])", "[keep(x=text) for i in range(9)]"]
)
async def test_one_text_does_not_fill_the_host_by_way_of_many_calls(calls: str):
    """What a script passes to its calls is counted for each of them, as the host keeps it, though the script has it once."""
    result = await run(f"from asyncio import gather\ntext = 'a' * 5_000_000\n{calls}\n1")
    assert "it passed more than 20,000,000 bytes to its calls" in result.text


async def test_what_a_script_has_passed_counts_after_it_was_parked(tmp_path: Path):
    """A suspended script does not get to pass as much again."""
    mailed.clear()
    text = "text = 'a' * 6_000_000\nfor i in range(4):\n    await keep(x=text)\n    if i == 1:\n        await send_mail(to='ann')"
    prompt = prompt_of(policies=[ASK], memory=20_000_000)
    journal = SqliteJournal(tmp_path / "j.db")
    options: Any = {"journal": journal, "environment": LaterEnvironment()}
    with pytest.raises(RunParked) as parked:
        await Adapter(ScriptedModel([script(text), "done"]), **options).evaluate(prompt, "go")
    journal.questions.answer(answer_to(parked.value.questions[0], {"approved": True}))
    model = ScriptedModel(["done"])
    await Adapter(model, **options).resume(parked.value.run_id, prompt)
    assert "it passed more than 20,000,000 bytes to its calls" in told(model)[0].text
    assert mailed == ["ann"]


HOSTILE = {
    "brackets": ("(" * 50_000 + "1" + ")" * 50_000, "too deeply nested"),
    "operators": ("x = " + "-" * 100_000 + "1", "too deeply nested"),
    "a long sum": ("x = " + "+".join(["1"] * 200_000), "too deeply nested"),
    "half a million lines": ("x = 1\n" * 500_000, "memory"),
    "types that grow": (
        "x: object = 1\n" + "".join(f"if x == {n} or x == 'a{n}':\n    x = [x, {n}]\n" for n in range(2_000)),
        "",
    ),
    "a catch of everything": (
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
        "TimeoutError",
    ),
    "a catch of memory": (
        "while True:\n    try:\n        x = 'a' * 10**9\n    except BaseException:\n        pass",
        "MemoryError",
    ),
    "an endless `finally`": ("try:\n    1 / 0\nfinally:\n    while True:\n        pass", "TimeoutError"),
    "a wide format": ("'{:>1000000000}'.format(1)", "MemoryError"),
    "a slow digest": ("import hashlib\nhashlib.pbkdf2_hmac('sha256', b'a', b'b', 10**9)", "TimeoutError"),
    "a slow product": ("x = 10**1000\nfor i in range(30):\n    x = x * x", ""),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_source_and_slow_functions_are_stopped(name: str):
    """Parsing, the check of types and single slow functions are bounded like everything else, and nothing of it can be caught."""
    text, words = HOSTILE[name]
    result = await run(text)
    assert result.failed
    assert words in result.text
    assert len(result.text) < 5_000


# --- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["list", "print", "open", "type", "class", "await", "_own", "2nd", "get-it"])
async def test_tools_take_no_names_from_python(name: str):
    """A tool may be called like something in Python. Scripts call it by a name of its own, and Python's name means what it does."""

    @tool(name=name, effect="pure", description="Do it.")
    async def run_it(n: int) -> int:
        return n + 1

    function = name.replace("-", "_") if name == "get-it" else f"tool_{name}"
    result = await run(f"print(list((1, 2)), type(1) is int)\nawait {function}(n=1)", run_it)
    assert not result.failed
    assert result.text == "[1, 2] True\n\n2"


# --- failures that a script hides -----------------------------------------------------------------------

HIDING = """
for i in range(3):
    try:
        await send_mail(to=f"{i}")
    except BaseException as error:
        print(type(error).__name__)
    finally:
        await write(path=f"{i}.md", text="x")
"""


async def test_a_script_that_swallows_denials_gets_no_further():
    """Each denied call is denied, whatever the script catches. What it does in `finally` passes the gate like any other call."""
    mailed.clear()
    files = MemoryFilesystem({})
    result = await run(HIDING, files=files, environment=Person(approve=False), policies=[ASK])
    assert result.text.startswith("PermissionError\nPermissionError\nPermissionError\n")
    assert mailed == []
    assert sorted(each.path for each in files.fork("test").list()) == ["0.md", "1.md", "2.md"]


async def test_calls_after_a_failure_are_undone_with_the_others():
    """A call in `finally` of a script that fails is made, and undone with the script."""
    files = MemoryFilesystem({})
    text = "try:\n    1 / 0\nfinally:\n    await write(path='a.md', text='x')"
    result = await run(text, files=files)
    assert "ZeroDivisionError" in result.text
    assert list(files.fork("test").list()) == []


async def test_a_script_cannot_outlive_its_cancellation(monkeypatch: pytest.MonkeyPatch):
    """A script that catches everything ends when its run is cancelled. Its worker has ended by then, and no call begins any more."""
    begun, pids, calls = asyncio.Event(), list[int](), list[int]()

    @tool(effect="pure")
    async def hang(n: int) -> int:
        """Wait for ever."""
        calls.append(n)
        begun.set()
        await asyncio.Event().wait()
        return n

    settle = Interpreter.start

    async def note(self: Any, code: str) -> Any:
        pids.append(self._pid)
        return await settle(self, code)

    monkeypatch.setattr(Interpreter, "start", note)
    text = "while True:\n    try:\n        await hang(n=1)\n    except BaseException:\n        pass"
    model = ScriptedModel([script(text), "done"])
    task = asyncio.ensure_future(_evaluate(Adapter(model), prompt_of(hang)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == [1]
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


async def _evaluate(adapter: Adapter, prompt: Prompt[Any]) -> Any:
    return await adapter.evaluate(prompt, "go")


# --- scripts in scripts, and changed tools ---------------------------------------------------------------


def delegating() -> AnyTool:
    inner = Prompt("inner", ["Inside.", CodeMode()], tools=[send_mail], policies=[ASK])

    def answer(request: ModelRequest) -> ScriptedModel:
        called = isinstance(request.messages[-1], ToolMessage)
        return ScriptedModel(["sent" if called else script("await send_mail(to='ann')")])

    @tool(effect="idempotent")
    async def delegate(context: ToolContext) -> str:
        """Let an agent write a script."""
        return (await context.adapter.evaluate(inner, "Go.", model=by(answer))).text

    return delegate


async def test_a_script_of_an_agent_that_a_script_calls(tmp_path: Path):
    """Such a script is parked inside the other one, and both go on in another process. The call is made once."""
    mailed.clear()

    model = ScriptedModel([script("await delegate()\nawait delegate()"), "done"])
    adapter = Adapter(model, journal=SqliteJournal(tmp_path / "j.db"), environment=LaterEnvironment())
    rules = [CapabilityPolicy(effects={"idempotent": "allow"})]
    with pytest.raises(RunParked) as parked:
        await adapter.evaluate(prompt_of(delegating(), policies=rules), "go")
    (question,) = parked.value.questions
    assert (question.name, mailed) == ("send_mail", [])
    journal, prompt = SqliteJournal(tmp_path / "j.db"), prompt_of(delegating(), policies=rules)
    journal.questions.answer(answer_to(question, {"approved": True}))
    model = ScriptedModel(["done"])
    adapter = Adapter(model, journal=journal, environment=Person(approve=True))
    await adapter.resume(parked.value.run_id, prompt)
    assert told(model)[0].text == "sent"
    assert mailed == ["ann", "ann"]


PARKS = "a = await keep(x=1)\nb = await send_mail(to='ann')\nc = await keep(x='1')\n[a, b, c]"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("removed", "no tool is offered by that name"),
        ("another result", '["int","sent to ann","other"]'),
        ("other parameters", "missing\nCorrect them"),
    ],
)
async def test_a_parked_script_whose_tools_have_changed(change: str, words: str, tmp_path: Path):
    """A call that is over keeps its recorded result. A later call meets the tool as it is now, and fails if it does not fit."""
    mailed.clear()
    prompt = prompt_of(keep, send_mail, policies=[ASK])
    first = Adapter(
        ScriptedModel([script(PARKS), "done"]),
        journal=SqliteJournal(tmp_path / "j.db"),
        environment=LaterEnvironment(),
    )
    with pytest.raises(RunParked) as parked:
        await first.evaluate(prompt, "go")
    (question,) = parked.value.questions

    @tool(name="keep", effect="pure")
    async def other(x: Any) -> str:
        """Take anything."""
        return "other"

    @tool(name="keep", effect="pure")
    async def stricter(x: int, y: int) -> ToolResult[str]:
        """Take two numbers."""
        return ToolResult.ok("two")

    changed = {"removed": (), "another result": (other,), "other parameters": (stricter,)}[change]
    journal = SqliteJournal(tmp_path / "j.db")
    journal.questions.answer(answer_to(question, {"approved": True}))
    model = ScriptedModel(["done"])
    adapter = Adapter(model, journal=journal, environment=LaterEnvironment())
    later = prompt_of(send_mail, *changed, policies=[ASK])
    response = await adapter.resume(parked.value.run_id, later)
    assert response.text == "done"
    assert words in told(model)[0].text
    assert mailed == ["ann"]
