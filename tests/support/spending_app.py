"""Processes that spend from one cap until it is reached or they are killed. Each writes a bill of what it was charged, as a provider would.

    spending_app.py reserve JOURNAL BILL CAP SEED DIE      reserves and settles random amounts in the journal
    spending_app.py run JOURNAL BILL CAP RUNS DIE          begins or resumes these runs, separated by commas

With DIE above 0, the process kills itself (`kill -9`) in its DIE-th spend: after the reservation, and in half of the cases after the bill.
The others leave half of the cap to those until the file `over` is there, so that each of them gets as far as its end on a busy machine too.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from typing import Any

from handrail import Adapter, Agent, Budget, LaterEnvironment, ScriptedModel, Session, Spend, ToolCall, tool
from handrail.errors import RunParked, RunUnknown
from handrail.journal.any_journal import open_by_name
from handrail.journal.records import SpendCap
from handrail.messages import ModelRequest, Traits, Usage
from handrail.models.scripted import Reply
from handrail.question import Quorum

REQUESTS = 3
"""How many requests each run makes."""
TOKENS = 900
"""What each of them is billed."""
WINDOW = SpendCap(limits={}).window("ann", 1767225600.0)


class Bills:
    """Bills a spend, and kills the process in the middle of one."""

    def __init__(self, path: str, die: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._left = die

    def charge(self, amount: int) -> None:
        self._left -= 1
        if self._left == 0 and amount % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(self._file, f"{amount}\n".encode())
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


async def reserve(journal: Any, bills: Bills, cap: int, seed: int, dies: bool) -> None:
    """Spend random amounts until the cap does not leave the smallest one."""
    chance, number = random.Random(seed), 0
    while True:
        number += 1
        is_over = os.path.exists("over")
        caps: Any = {WINDOW: {"tokens": cap if dies or is_over else cap // 2}}
        bound = chance.randint(1, 20)
        spent = chance.randint(0, bound)
        short = await journal.spending.reserve(f"{journal.owner} {number}", {"tokens": bound}, caps)
        if short is not None and not is_over and not dies:
            await asyncio.sleep(0.005)
        elif short is not None and not short.in_flight and short.missing({"tokens": 1}, caps[WINDOW]):
            return
        if short is None:
            bills.charge(spent)
            await journal.spending.settle(f"{journal.owner} {number}", {"tokens": spent}, caps)


class Asked(LaterEnvironment):
    """An environment that parks, with one user who may raise caps."""

    def voters(self, quorum: Quorum, principal: str, /) -> dict[str, float]:
        return {"bob": 1.0}


@tool(effect="pure")
async def look() -> str:
    """Look."""
    return "seen"


async def run(journal: Any, bills: Bills, cap: int, ids: list[str]) -> None:
    """Begin or resume these runs, and print how each of them ends."""

    def answer(request: ModelRequest) -> Reply:
        bills.charge(TOKENS)
        said = sum(type(each).__name__ == "AssistantMessage" for each in request.messages)
        calls = [ToolCall("look", {})] if said + 1 < REQUESTS else []
        return Reply("done", calls, usage=Usage(0, TOKENS, requests=1))

    model = ScriptedModel(answer, traits=Traits())
    adapter = Adapter(model, journal=journal, spend=Spend(Budget(tokens=cap)), max_tokens=TOKENS)
    agent = Agent(adapter, "Look.", tools=[look])
    for id in ids:
        try:
            await journal.runs.get(id)
            operation = agent.resume(id, environment=Asked())
        except RunUnknown:
            session = Session(id=id, principal="ann")
            operation = agent.run("go", run_id=id, session=session, environment=Asked())
        try:
            print(id, (await operation).text, flush=True)
        except RunParked as parked:
            print(id, f"parked at {parked.questions[0].name}", flush=True)


def main(mode: str, where: str, bill: str, cap: str, given: str, die: str) -> None:
    journal, bills = open_by_name(where), Bills(bill, int(die))
    if mode == "reserve":
        asyncio.run(reserve(journal, bills, int(cap), int(given), dies=int(die) > 0))
    else:
        asyncio.run(run(journal, bills, int(cap), given.split(",")))
    journal.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
