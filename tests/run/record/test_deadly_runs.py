"""A run that kills every process that executes it is set aside, so that no further process executes it."""

import asyncio
import signal
import textwrap
from pathlib import Path

import pytest

from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal, runs
from handrail.errors import PromptEvaluationError
from handrail.run.record.begin import decode_outcome
from support import warm_python

APP = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal, ToolContext, tool
    from handrail.run.call import ToolCall
    from handrail.session import Session

    @tool(effect="staged")
    async def note(text: str) -> str:
        '''Note something.'''
        return text

    @tool(effect="staged")
    async def die(context: ToolContext) -> str:
        '''End the process.'''
        await context.call("note", text="about to die")
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    prompt = Prompt("desk", "Help.", tools=[note, die])

    async def main(path, begins):
        journal = SqliteJournal(path)
        model = ScriptedModel([[ToolCall("die", {})], "It is still alive."])
        adapter = Adapter(model, journal=journal)
        if begins == "begin":
            await adapter.evaluate(prompt, "Go on.", run_id="deadly", session=Session(id="s", principal="ann"))
        else:
            await adapter.resume("deadly", prompt)

    asyncio.run(main(*sys.argv[1:]))
    """
)


def test_a_run_that_ends_every_process_is_set_aside(tmp_path: Path):
    """If three processes die while they execute a run, the next one ends the run and says why. The run's session can continue."""
    (tmp_path / "deadly.py").write_text(APP)
    path = tmp_path / "runs.db"
    for begins in ("begin", "resume", "resume"):
        done = warm_python.run([tmp_path / "deadly.py", str(path), begins], cwd=tmp_path)
        assert done.returncode == -signal.SIGKILL, done.stderr
    done = warm_python.run([tmp_path / "deadly.py", str(path), "resume"], cwd=tmp_path)
    assert done.returncode == 1
    assert b"3 processes in a row ended while they executed it" in done.stderr
    asyncio.run(look(path))


SLOW = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal, tool
    from handrail.run.call import ToolCall

    @tool(effect="staged")
    async def step(number: int) -> str:
        '''Make a step, or end the process at the step in `sys.argv`.'''
        if number == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return str(number)

    async def main(path, steps):
        adapter = Adapter(ScriptedModel([*(ToolCall("step", {"number": n}) for n in range(5)), "End."]),
                          journal=SqliteJournal(path))
        prompt = Prompt("desk", "Help.", tools=[step])
        if steps == "0":
            await adapter.evaluate(prompt, "Go on.", run_id="slow")
        else:
            print((await adapter.resume("slow", prompt)).text)

    asyncio.run(main(*sys.argv[1:]))
    """
)


def test_a_run_that_gets_further_each_time_is_not_set_aside(tmp_path: Path):
    """Deaths do not count if something new is recorded between them: five processes die, and the sixth finishes the run."""
    (tmp_path / "slow.py").write_text(SLOW)
    for steps in range(5):
        done = warm_python.run([tmp_path / "slow.py", str(tmp_path / "runs.db"), str(steps)], cwd=tmp_path)
        assert done.returncode == -signal.SIGKILL, done.stderr
    done = warm_python.run([tmp_path / "slow.py", str(tmp_path / "runs.db"), "5"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, b"End.\n"), done.stderr


async def look(path: Path) -> None:
    journal = SqliteJournal(path)
    row = await journal.runs.get("deadly")
    assert (row.status, row.owner) == ("failed", "")
    outcome = decode_outcome(row)
    assert (outcome.usage.requests, outcome.cost) == (1, None)
    assert not (await journal.runs.verify()).altered
    prompt = Prompt("desk", "Help.")
    adapter = Adapter(ScriptedModel(lambda request: str(len(request.messages))), journal=journal)
    with pytest.raises(PromptEvaluationError, match="was set aside: 3 processes") as error:
        await adapter.resume("deadly", prompt)
    assert error.value.phase == "set aside"
    session = await runs.session(journal, "s", principal="ann")
    again = await adapter.evaluate(prompt, "And now?", session=session)
    assert again.text
    journal.close()
