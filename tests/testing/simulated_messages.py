"""Scenarios of what a run is told while it goes on: remarks, messages, summaries, and the ends of background runs.

The simulation crashes them at every point.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import re
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from handrail import Adapter, Budget, Compact, Prompt, ScriptedModel, ToolContext, UserContext, tool
from handrail.environment import LaterEnvironment
from handrail.errors import MessageRefused
from handrail.guard import CapabilityPolicy
from handrail.messages import ModelPart, ModelRequest, ToolMessage, Traits, Usage, UserMessage
from handrail.models.scripted import Reply
from handrail.question import Answer, Question
from handrail.run.call import ToolCall
from handrail.run.mailbox import ring, send
from handrail.run.record.notices import WRAP_UP
from handrail.runs import cancel, children, edit, withdraw
from handrail.testing import Person
from handrail.testing.simulation import Play, Scenario, Seen, Stage, World
from support.background_app import HELPER
from testing.simulated import AnyTool, Colour, Noted


class Talkative(Person):
    """A person who says something along with each answer."""

    async def ask(self, question: Question, /) -> Answer:
        answer = await super().ask(question)
        return msgspec.structs.replace(answer, remark=f"about {question.name}: hurry")


def remarking_tools(stage: Stage) -> list[AnyTool]:
    @tool(effect="staged")
    async def paint(context: UserContext) -> str:
        """Ask for a colour."""
        colour = await context.wait_for("colour", {}, Colour)
        context.session.dispatch(Noted(colour.name))
        return f"it is {colour.name}"

    @tool(effect="idempotent", capabilities={"money"})
    async def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    @tool(effect="staged")
    async def delegate(context: ToolContext) -> str:
        """Let an agent ask."""
        inner = Prompt("inner", "You are inside.", tools=[paint])
        return (await context.adapter.evaluate(inner, "Begin.")).text

    return [paint, pay, delegate]


def remarking(stage: Stage) -> Play:
    """Return a play whose person says something along with each answer, of which some come together."""
    prompt = Prompt(
        "remarks",
        "You listen.",
        tools=remarking_tools(stage),
        policies=[CapabilityPolicy({"money": "ask"}, effects={"idempotent": "allow"})],
    )
    said = [
        [ToolCall("paint"), ToolCall("pay", {"amount": 9})],
        ToolCall("delegate"),
        ToolCall("pay", {"amount": 1}),
        "Heard.",
    ]
    adapter = Adapter(
        stage.model({"You listen": said, "You are inside": [ToolCall("paint"), "Painted."]}),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    person = Talkative(approve=True, answers={"colour": {"name": "blue"}})
    return Play(adapter, prompt, "Listen.", person, one_at_a_time=True)


def heard_once(seen: Seen) -> str | None:
    """Return None if the model was told each remark once, after the results of the calls that were asked about.

    Otherwise, return the problem.
    """
    messages = seen.world.all("ended")[-1].details["messages"]
    heard = [each["text"] for each in messages if each.get("midway")]
    after = [before["type"] for before, each in itertools.pairwise(messages) if each.get("midway")]
    expected = [
        "about colour: hurry\n\nabout pay: hurry",
        "about colour: hurry",
        "about pay: hurry",
    ]
    return (
        None if heard == expected and set(after) == {"tool"} else f"the model was told {heard} after {after}"
    )


REMARKING = Scenario(name="remarks", play=remarking, laws=[heard_once])


# --- conversations that outgrow their windows, one trimmed and one summarised -------------------


PAGES = 6


class Reader:
    """A model that reads one page after the other, and then goes on as it is told. It keeps no state, and says what it was sent."""

    name = "scripted:reader"
    traits = Traits(native_output=True)

    def __init__(self, world: World) -> None:
        self._world = world

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        last, prompt = request.messages[-1], request.system.partition(".")[0]
        page = re.match(r"page (\d+)", last.text) if isinstance(last, ToolMessage) else None
        number = int(page[1]) if page else 0
        answer: Any
        if isinstance(last, UserMessage) and last.by_run:
            answer = "Six pages, all alike."
        elif number < PAGES and (page or isinstance(last, UserMessage)):
            answer = ToolCall("read", {"page": number + 1})
        else:
            answer = ToolCall("delegate") if number and prompt == "You read" else "All is read."
        text = "\0".join(each.text for each in request.messages)
        sent = hashlib.sha256(text.encode()).hexdigest()
        is_compacted = "left out" in text
        self._world.happened("sent", prompt=prompt, sent=sent, is_compacted=is_compacted)
        if not (isinstance(last, UserMessage) and last.by_run):
            self._world.happened("asked", prompt=prompt, message="", answer=0)
        await asyncio.sleep(1.0)
        usage = Usage(sum(len(each.text) for each in request.messages) // 4, 10, requests=1)
        reply = Reply(answer, usage=usage) if isinstance(answer, str) else Reply(calls=[answer], usage=usage)
        async for part in ScriptedModel([reply]).stream(request):
            yield part


def reading(stage: Stage) -> Play:
    """Return the play of a run and of an agent in it whose conversations are compacted, the agent's with summaries."""

    @tool(effect="pure")
    async def read(page: int) -> str:
        """Read a page."""
        return f"page {page} " + "all alike " * 200

    digest = Prompt("digest", "You digest.", tools=[read], compact=Compact(by="summary", tokens=1_500))

    @tool(effect="staged")
    async def delegate(context: ToolContext) -> str:
        """Let an agent read all of it."""
        said = await context.adapter.evaluate(digest, "Read it too.")
        context.session.dispatch(Noted(said.text))
        return said.text

    adapter = Adapter(
        Reader(stage.world),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    prompt = Prompt("reader", "You read.", tools=[read, delegate], compact=Compact(tokens=1_500))
    return Play(adapter, prompt, "Read it.")


def the_same_is_sent(seen: Seen) -> str | None:
    """Check that each request is one that is sent without a crash, that none of these is missing, and that both conversations were compacted."""
    sent, expected = (
        {each.details["sent"] for each in world.all("sent")} for world in (seen.world, seen.uncrashed)
    )
    compacted = {each.details["prompt"] for each in seen.world.all("sent") if each.details["is_compacted"]}
    if compacted != {"You read", "You digest"}:
        return f"only {sorted(compacted)} were compacted"
    return (
        None
        if sent == expected
        else f"{len(sent - expected)} other requests were sent, and {len(expected - sent)} were not"
    )


READING = Scenario(name="long", play=reading, laws=[the_same_is_sent])


# --- a run that is told things, pauses twice and wraps up ---------------------------------------


def steering(stage: Stage) -> Play:
    """Return a play of a run whose tool says things to it, edits and withdraws some, and orders two pauses and the end."""

    @tool(effect="idempotent", capabilities={"talk"})
    async def talk(round: int, context: ToolContext) -> str:
        """Say things to the run."""
        run_id = context.run_context.run_id

        async def say(text: str, **how: Any) -> None:
            await send(stage.journal, run_id, text, id=f"{text} {round}", **how)

        await say("first")
        await say("wrong")
        await say("last", when="afterwards")
        await say("never")
        with contextlib.suppress(MessageRefused):  # it was withdrawn before a crash
            await withdraw(stage.journal, run_id, f"never {round}")
        await edit(stage.journal, run_id, f"wrong {round}", f"right {round}")
        await say("wait", order="pause")
        if round == 2:
            await say("end", order="wrap up")
        return f"said {round}"

    said = [ToolCall("talk", {"round": 1}), "Heard.", ToolCall("talk", {"round": 2}), "All of it."]
    adapter = Adapter(
        stage.model({"You listen": said}),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    person = Person(answers={"pause": "continue"})
    return Play(adapter, Prompt("steered", "You listen.", tools=[talk]), "Begin.", person)


def told_once_in_order(seen: Seen) -> str | None:
    """Return None if the model was told each message once, in order, and was not told what was withdrawn. Otherwise, return the problem."""
    messages = seen.world.all("ended")[-1].details["messages"]
    heard = [each["text"].split("\n\n") for each in messages if each.get("midway")]
    expected = [
        ["first", "right 1", "wait"],
        ["last"],
        ["first", "right 2", "wait"],
        ["end", WRAP_UP],
        ["last"],
    ]
    return None if heard == expected else f"the model was told {heard}"


STEERING = Scenario(name="steering", play=steering, laws=[told_once_in_order])


# --- a run that begins another one in the background ------------------------------------------------


def begetting(stage: Stage) -> Play:
    """Return a play of a run whose first call begins a background run and fails, and whose second one begins another."""

    @tool(effect="idempotent")
    async def begin(fails: bool, context: ToolContext) -> str:
        """Begin a background run."""
        context.spawn(HELPER, "add 1", budget=Budget(tool_calls=3))
        context.filesystem.write("begun.md", str(fails))
        if fails:
            raise ValueError("it fails")
        return "begun"

    @tool(effect="idempotent")
    async def end(context: ToolContext) -> str:
        """End the background runs before a worker begins them."""
        run_id = context.run_context.run_id
        for row in await children(stage.journal, run_id):
            await cancel(stage.journal, row.record.id)
        await ring(stage.journal, run_id)
        rows = await stage.journal.runs.list()
        return " ".join(sorted(f"{row.record.prompt} {row.status}" for row in rows))

    @tool(effect="idempotent")
    async def left(context: ToolContext) -> str:
        """Look at the budget."""
        return f"{context.budget_tracker.remaining()['tool_calls']:g}"

    calls = [
        ToolCall("begin", {"fails": True}),
        ToolCall("begin", {"fails": False}),
        ToolCall("end"),
        ToolCall("left"),
    ]
    adapter = Adapter(
        stage.model({"You delegate": [*calls, "Done."]}),
        journal=stage.journal,
        filesystem=stage.files,
        clock=stage.clock,
        new_id=stage.new_id,
    )
    return Play(adapter, Prompt("begetter", "You delegate.", tools=[begin, end, left]), "Begin.")


def begun_and_told_once(seen: Seen) -> str | None:
    """Return None if the call that committed has begun one background run, whose end was told once, and if the budget is exact. Otherwise, return the problem."""
    messages = seen.world.all("ended")[-1].details["messages"]
    told = [each["text"] for each in messages if each.get("ends")]
    if len(told) != 1 or not told[0].endswith("(helper) was cancelled: it was cancelled before it began"):
        return f"the model was told {told}"
    results = [each["text"] for message in messages for each in message.get("results", ())]
    expected = ["begetter running helper cancelled", "999996"]
    return None if results[2:] == expected else f"the results were {results}"


BEGETTING = Scenario(name="begetting", play=begetting, files={"begun.md": ""}, laws=[begun_and_told_once])
