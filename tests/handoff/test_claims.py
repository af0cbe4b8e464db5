"""A handoff that `start` parked is finished at most once, even by several processes that share a journal."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Handoff,
    MemoryJournal,
    Parked,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    ToolResult,
    UserContext,
    tool,
)
from handrail.errors import AnswerRefused, DefinitionError, OutcomeUnknown
from handrail.handoff import halves as claims
from support.parked_runs import park_and_resume


class Till:
    """A handoff whose `after` records who pays, and may end in a way that a test chooses."""

    def __init__(self) -> None:
        self.paid: list[str] = []
        self.ends: list[Any] = []
        made = self.handoff = Handoff("pay", "Ask who pays.", answer=str, effect="idempotent")

        @made.before
        async def bill(params: None, *, context: ToolContext) -> Parked[int, str]:
            return Parked(3, "a table")

        @made.after
        async def settle(cents: int, who: str, *, context: ToolContext) -> ToolResult[str]:
            self.paid.append(who)
            for end in self.ends[:1]:
                del self.ends[0]
                return await end()
            return ToolResult.ok(f"{who} pays {cents}")

    async def start(self, **options: Any) -> Parked[Any, Any]:
        parked = await self.handoff.start(**options)
        assert isinstance(parked, Parked)
        return parked


async def test_a_second_finish_is_refused() -> None:
    """Only the first `finish` succeeds.

    A later one is refused, even with a copy of the parked data, and so is a concurrent one.
    """
    till = Till()
    parked = await till.start()
    copied = Parked[Any, Any](parked.private, parked.public, parked.id)
    assert (await till.handoff.finish(parked, "Ada")).value == "Ada pays 3"
    for again in (parked, copied):
        with pytest.raises(AnswerRefused, match="the handoff 'pay' was finished already"):
            await till.handoff.finish(again, "Bob")
    other = await till.start()
    assert other.id != parked.id
    both = [till.handoff.finish(other, who) for who in ("Ada", "Bob")]
    said = await asyncio.gather(*both, return_exceptions=True)
    assert [type(each) for each in said] == [ToolResult, AnswerRefused]
    assert till.paid == ["Ada", "Ada"]


async def test_parked_data_without_its_id_is_refused() -> None:
    till = Till()
    parked = await till.start()
    with pytest.raises(DefinitionError, match=r"has no id.*Parked\(private, public, id\)"):
        await till.handoff.finish(Parked(parked.private, parked.public), "Ada")
    assert till.paid == []


@pytest.mark.parametrize("journaled", [False, True])
async def test_what_was_undone_can_be_finished_again(journaled: bool) -> None:
    """If `after` fails or is cancelled, the handoff can be finished again."""
    options: Any = {"journal": MemoryJournal()} if journaled else {}
    till = Till()
    begun = asyncio.Event()

    async def fail() -> ToolResult[str]:
        return ToolResult.error("The card was declined.")

    async def hang() -> ToolResult[str]:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    till.ends = [fail, hang]
    parked = await till.start(**options)
    assert not (await till.handoff.finish(parked, "Ada", **options)).success

    async def finish(who: str) -> ToolResult[Any]:
        return await till.handoff.finish(parked, who, **options)

    hanging = asyncio.create_task(finish("Bob"))
    await begun.wait()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert (await finish("Eve")).value == "Eve pays 3"
    with pytest.raises(AnswerRefused):
        await finish("Ada")
    assert till.paid == ["Ada", "Bob", "Eve"]


ELSEWHERE = """
import asyncio, os, sys
from handrail import Parked, SqliteJournal, ToolResult
from handrail.errors import AnswerRefused
sys.path.insert(0, {tests!r})
from handoff.test_claims import Till

till = Till()

async def die():
    os._exit(9)

async def main():
    if {dies}:
        till.ends = [die]
    journal = SqliteJournal({path!r})
    try:
        result = await till.handoff.finish(Parked(3, "a table", {id!r}), "Bob", journal=journal)
        print(result.render())
    except AnswerRefused as error:
        print("refused")

asyncio.run(main())
"""


async def test_another_process_with_the_same_journal_is_refused(tmp_path: Path) -> None:
    """A handoff that one process has finished can't be finished in another.

    If a process died during `after`, another one's `finish` raises `OutcomeUnknown`.
    """
    path = str(tmp_path / "runs.db")
    till = Till()

    async def elsewhere(parked: Parked[Any, Any], *, dies: bool = False) -> str:
        tests = str(Path(__file__).parents[1])
        program = textwrap.dedent(ELSEWHERE).format(path=path, id=parked.id, dies=dies, tests=tests)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert done.returncode == (9 if dies else 0), done.stderr
        return done.stdout.strip()

    with closing(SqliteJournal(path)) as journal:
        here, there, interrupted = [await till.start(journal=journal) for _ in range(3)]
        await till.handoff.finish(here, "Ada", journal=journal)
        assert await elsewhere(here) == "refused"
        assert await elsewhere(there) == "Bob pays 3"
        with pytest.raises(AnswerRefused):
            await till.handoff.finish(there, "Ada", journal=journal)
        await elsewhere(interrupted, dies=True)
        with pytest.raises(OutcomeUnknown, match="did not record the end"):
            await till.handoff.finish(interrupted, "Ada", journal=journal)
    assert till.paid == ["Ada"]


async def test_a_resumed_run_keeps_its_claim_and_refuses_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that is entered again gets the recorded result of its `finish`, and a second `finish` is refused again."""
    till = Till()
    refused: list[str] = []

    @tool(effect="idempotent")
    async def outer(context: UserContext) -> str:
        """Finish twice, then ask."""
        monkeypatch.setattr(claims, "_claims", type(claims._claims)())  # pyright: ignore[reportPrivateUsage]  # as in a new process
        parked = await till.start()
        first = (await till.handoff.finish(parked, "Ada")).unwrap()
        try:
            await till.handoff.finish(parked, "Bob")
        except AnswerRefused as error:
            refused.append(error.problem)
        said = await context.wait_for("go_on", {})
        return f"{first}: {said}"

    def answer(request: Any) -> Any:
        return ToolCall("outer", {}) if len(request.messages) == 1 else request.messages[-1].results[0].text

    adapter = Adapter(ScriptedModel(answer), journal=MemoryJournal())
    assert await park_and_resume(adapter, Prompt("root", "Root.", tools=[outer])) == "Ada pays 3: yes"
    assert till.paid == ["Ada"]
    assert len(refused) == 2
