"""Tests that remembered decisions outlive the server, whether it is killed or restarted, until they are revoked."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from handrail.serve.agui.interrupts import question_json
from support import warm_python
from support.programs import handrail
from support.served_threads import give, over, plan, served, settle, texts
from support.serving import BEARER, TOKEN, Client

pytestmark = pytest.mark.once

APP = '''
import json
from handrail import Adapter, CapabilityPolicy, Prompt, ScriptedModel, ToolCall, ToolContext, tool
from handrail.messages import ToolMessage

@tool
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    return f"paid {amount}"

@tool
async def send(to: str, context: ToolContext) -> str:
    """Send something."""
    return f"sent to {to}"

inner = Prompt("inner", "Help.", tools=[send], policies=[CapabilityPolicy()])

@tool(effect="idempotent")
async def delegate(context: ToolContext) -> str:
    """Let another agent send something."""
    return (await context.adapter.evaluate(inner, '[["send", {"to": "ann"}]]')).text

def play(request):
    last = request.messages[-1]
    if isinstance(last, ToolMessage):
        return "; ".join(result.text for result in last.results)
    return [ToolCall(name, given) for name, given in json.loads(last.text)]

prompt = Prompt("desk", "Help.", tools=[pay, send, delegate], policies=[CapabilityPolicy(effects={"idempotent": "allow"})])
adapter = Adapter(ScriptedModel(play))
'''
PAY, SEND = '[["pay", {"amount": 5}]]', '[["send", {"to": "ann"}]]'
NEVER = {"approved": False, "remember": "scope", "reason": "not from here"}
ALWAYS = {"approved": True, "remember": "scope"}


@contextmanager
def started(folder: Path, *given: str) -> Generator[Client]:
    """Run `handrail serve` while the block runs, then kill it."""
    program = ["-m", "handrail", "serve", "desk.py", "--port", "0", "--journal", "runs.db"]
    process = warm_python.start([*program, *given], cwd=folder, env={**os.environ, "HANDRAIL_TOKEN": TOKEN})
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        found = re.search(r"http://\S+?/", line)
        assert found is not None
        yield Client(found[0], None, BEARER)  # type: ignore[arg-type]
    finally:
        process.close()  # this sends SIGKILL to the process


async def answered(client: Client, thread: str, said: str, value: Any) -> str:
    """Send a message, answer the only question that it leads to, and return the model's last text."""
    await client.say(thread, said)
    asked = await client.asked(thread)
    given = {"question_id": asked["id"], "digest": asked["digest"], "value": value}
    assert (await client.ask("POST", f"/threads/{thread}/answers", given)).status == 200
    return await unasked(client, thread)


async def unasked(client: Client, thread: str, said: str = "") -> str:
    """Send the message, if any, wait until the run ends without a question, and return the model's last text."""
    if said:
        await client.say(thread, said)
    return (await client.idle(thread))["messages"][-1]["content"]


async def listed(client: Client, thread: str) -> list[tuple[str, bool]]:
    kept = (await client.ask("GET", f"/threads/{thread}/approvals")).json["approvals"]
    return [(each["scope"], each["approved"]) for each in kept]


def test_decisions_outlive_a_server_that_was_killed(tmp_path: Path) -> None:
    """Decisions outlive a server that is killed, and hold only in their own thread. A denial holds even with `--approve all`.

    The command line lists and revokes them while the server runs, and so does the server's HTTP interface. A revocation
    outlives the server too.
    """
    (tmp_path / "desk.py").write_text(APP)
    both = [("pay (any arguments)", False), ("send (any arguments)", True)]

    async def decide(client: Client) -> None:
        assert "not from here" in await answered(client, "a", PAY, NEVER)
        assert await answered(client, "a", SEND, ALWAYS) == "sent to ann"
        assert await answered(client, "other", PAY, {"approved": True}) == "paid 5"

    async def later(client: Client) -> None:
        assert await listed(client, "a") == both
        assert await listed(client, "other") == []
        assert "not from here" in await unasked(client, "a", PAY)
        assert await unasked(client, "a", SEND) == "sent to ann"
        assert await unasked(client, "other", PAY) == "paid 5"

    with started(tmp_path) as client:
        asyncio.run(decide(client))
    with started(tmp_path, "--approve", "all") as client:
        asyncio.run(later(client))
        said = handrail("runs", "list", "--journal", "runs.db", "--json", cwd=tmp_path).stdout
        run = next(each for each in json.loads(said)["runs"] if each["session_id"].endswith("/a"))["run_id"]
        named = ("runs", "approvals", run, "--journal", "runs.db")
        shown = handrail(*named, cwd=tmp_path).stdout.splitlines()
        assert shown[0].startswith("1  denied  pay: pay (any arguments)  (not from here)")
        assert shown[1].startswith("2  approved  send: send (any arguments)")
        wrong = handrail(*named, "--revoke", "3", cwd=tmp_path)
        assert (wrong.returncode, "Pass a number from 1 to 2." in wrong.stderr) == (2, True)
        taken = json.loads(handrail(*named, "--revoke", "1", "--json", cwd=tmp_path).stdout)
        assert (taken["ok"], taken["revoked"]["tool"]) == (True, "pay")
        assert asyncio.run(listed(client, "a")) == both[1:]
        assert asyncio.run(unasked(client, "a", PAY)) == "paid 5", (
            "the running server did not notice the revocation"
        )
    with started(tmp_path) as client:

        async def revoke() -> None:
            assert await unasked(client, "a", SEND) == "sent to ann"
            assert await answered(client, "deep", '[["delegate", {}]]', ALWAYS) == "sent to ann"
            for thread in ("a", "deep"):  # in `deep`, an agent inside a call asked the question
                [kept] = (await client.ask("GET", f"/threads/{thread}/approvals")).json["approvals"]
                at = f"/threads/{thread}/approvals/{quote(kept['id'], safe='')}"
                assert (await client.ask("DELETE", at)).status == 200

        asyncio.run(revoke())
    with started(tmp_path) as client:
        assert asyncio.run(listed(client, "a")) == asyncio.run(listed(client, "deep")) == []
        asyncio.run(client.say("a", SEND))
        assert asyncio.run(client.asked("a"))["payload"]["tool"] == "send"


async def test_a_thread_that_was_parked_and_is_opened_anew_remembers(tmp_path: Path) -> None:
    """After parking and a restart, a thread's decisions hold and can be revoked. Another principal sees none."""
    async with served(tmp_path, park_after=0.0, most_kept=0) as app:
        thread = app.thread()
        await thread.say(plan([["send", {"text": "a"}]], "ok"))
        await over(thread)
        [asked] = await thread.questions()
        assert "decision_keys" not in question_json(asked), (
            "a client can see the keys of remembered decisions"
        )
        await give(thread, asked, NEVER)
        await over(thread)
        await app.restart()
        thread = app.thread()
        [kept] = await thread.approvals()
        assert (kept.scope, kept.approved) == ("send (any arguments)", False)
        await thread.say(plan([["send", {"text": "b"}]], "ok"))
        await over(thread)
        assert "not from here" in texts(await thread.messages())[-2]
        assert list(await app.thread("t", "eve").approvals()) == []
        await thread.revoke(kept.id)
        await app.restart()
        thread = app.thread()
        assert list(await thread.approvals()) == []
        await thread.say(plan([["send", {"text": "c"}]], "ok"))
        await settle(thread)
        await over(thread)
        assert len(await thread.questions()) == 1
