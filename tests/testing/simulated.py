"""Scenarios that the simulation crashes at every point.

Together they cover nested runs, questions, approvals, handoffs, retries, threads, previews, budgets and expiry.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel

from handrail import (
    Adapter,
    Budget,
    CodeMode,
    Compact,
    Handoff,
    Parked,
    Prompt,
    ScriptedModel,
    Tool,
    ToolContext,
    ToolResult,
    TransientError,
    UserContext,
    tool,
)
from handrail.environment import LaterEnvironment
from handrail.errors import MessageRefused, QuestionTimedOut
from handrail.guard import CapabilityPolicy, RateLimitPolicy
from handrail.messages import ModelPart, ModelRequest, ToolMessage, Traits, Usage, UserMessage
from handrail.models.scripted import Reply
from handrail.question import Answer, Question
from handrail.run.call import ToolCall
from handrail.run.mailbox import ring, send
from handrail.run.record.notices import WRAP_UP
from handrail.runs import cancel, children, edit, withdraw
from handrail.session import kept
from handrail.testing import Person
from handrail.testing.simulation import Play, Scenario, Seen, Stage, World
from support.background_app import HELPER

AnyTool = Tool[Any, Any]
SECRET = "the supplier's own price is 3"


@dataclass(frozen=True)
class Noted:
    """A piece of state that the tools add."""

    text: str


@kept(kind="log")
@dataclass(frozen=True)
class Weighed:
    """An entry of a log, made by a call that fails."""

    call: str


class Colour(BaseModel):
    """The colour that a person picks."""

    name: str


@dataclass(frozen=True)
class Ask:
    """The asking price of the paint."""

    amount: int


@dataclass(frozen=True)
class Own:
    """What the paint costs us."""

    price: str


@dataclass(frozen=True)
class Bid:
    """The customer's bid."""

    amount: int


def research_tools() -> list[AnyTool]:
    @tool(effect="staged")
    async def jot(text: str, context: ToolContext) -> str:
        """Note something down."""
        context.session.dispatch(Noted(text))
        context.filesystem.write("research/notes.md", f"{text}\n")
        return f"noted {text}"

    @tool(effect="read")
    async def notes(context: ToolContext) -> str:
        """Read the notes."""
        return context.filesystem.read("research/notes.md").strip()

    return [jot, notes]


def shop_tools(stage: Stage) -> list[AnyTool]:
    world = stage.world
    inner = Prompt("research", "You research one thing.", tools=research_tools())

    @tool(effect="idempotent")
    async def research(topic: str, context: ToolContext) -> str:
        """Let another agent research, and a person choose."""
        found = await context.adapter.evaluate(inner, f"Find out about {topic}.")
        assert context.wait_for is not None
        colour = await context.wait_for("colour", {"found": found.text}, Colour)
        told = await context.call("jot_down", text=f"{topic} in {colour.name}")
        return f"{found.text} {colour.name} {told.message}"

    @tool(effect="staged")
    async def jot_down(text: str, context: ToolContext) -> str:
        """Write a note into the book."""
        book = context.filesystem.read("book.md")
        context.filesystem.write("book.md", f"{book}{text}\n")
        context.filesystem.write("last.md", text)
        context.session.dispatch(Noted(text))
        return f"wrote {text}"

    @tool(effect="idempotent")
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay the supplier."""
        world.happened("asked to pay", amount=amount)

        async def transfer() -> str:
            world.happened("paid", amount=amount)
            return "receipt 17"

        async def was_paid() -> bool:
            return world.count("paid", amount=amount) > 0

        receipt = await context.once("transfer", transfer, probe=was_paid)
        context.filesystem.write("paid.md", f"{amount}\n")
        return f"paid {amount}: {receipt or 'the receipt is with the bank'}"

    @tool
    async def send_mail(to: str, context: ToolContext) -> str:
        """Send the order."""
        world.happened("mailed", to=to)
        return f"sent to {to}"

    @tool(effect="pure")
    def price() -> int:
        """Return the price."""
        return 4

    return [research, jot_down, pay, send_mail, price, haggling(world)]


def haggling(world: World) -> AnyTool:
    """Return a handoff that keeps our cost private and shows the asking price."""
    haggle = Handoff("haggle", "Agree on a price.", params=Ask, effect="idempotent")

    @haggle.before
    async def look_up(params: Ask, *, context: ToolContext) -> Parked[Own, Ask]:
        world.happened("looked up")
        return Parked(Own(SECRET), params)

    @haggle.client
    async def offer(asked: Ask, *, context: UserContext) -> Bid:
        return await context.wait_for("bid", asked, Bid)

    @haggle.after
    async def agree(own: Own, bid: Bid, *, context: ToolContext) -> ToolResult[int]:
        world.happened("agreed", knew=own.price == SECRET)
        context.filesystem.write("price.md", f"{bid.amount}\n")
        return ToolResult.ok(bid.amount, f"agreed on {bid.amount}")

    return haggle


SHOP = [
    [ToolCall("price"), ToolCall("research", {"topic": "paint"})],
    [ToolCall("jot_down", {"text": "ordered"}), ToolCall("send_mail", {"to": "supplier"})],
    ToolCall("pay", {"amount": 4}),
    ToolCall("haggle", {"amount": 9}),
    ToolCall("jot_down", {"text": "all is paid"}),
    "The paint is ordered.",
]
RESEARCH = [ToolCall("jot", {"text": "paint dries"}), ToolCall("notes"), "Paint dries."]


def play(stage: Stage) -> Play:
    """Return the play of a shop that orders paint."""
    prompt = Prompt(
        "shop",
        "You run a shop.",
        tools=shop_tools(stage),
        policies=[CapabilityPolicy(effects={"idempotent": "allow"})],
    )
    adapter = Adapter(
        stage.model({"You run a shop": SHOP, "You research": RESEARCH}),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    return Play(
        adapter,
        prompt,
        "Order paint.",
        Person(approve=True, answers={"colour": {"name": "blue"}, "bid": {"amount": 7}}),
    )


def paid_once(seen: Seen) -> str | None:
    """Return a problem if the bill was not paid exactly once, and otherwise None.

    If another process took over the run, the bill may be paid twice.
    """
    paid = seen.world.count("paid")
    return None if paid == 1 or (seen.overtaken and paid == 2) else f"it was paid {paid} times"


def mailed_at_most_once(seen: Seen) -> str | None:
    mailed = seen.world.count("mailed")
    return None if mailed <= 1 else f"the mail was sent {mailed} times"


def knew_its_own_price(seen: Seen) -> str | None:
    """Return None if `after` received the private part that `before` returned, perhaps in another process.

    Otherwise, return the problem.
    """
    agreed = seen.world.all("agreed")
    return None if agreed and all(each.details["knew"] for each in agreed) else f"agreed: {agreed}"


SHOPPING = Scenario(
    name="a shop orders paint",
    play=play,
    files={"book.md": "# Book\n", "other.txt": "nobody touches this\n"},
    laws=[paid_once, mailed_at_most_once, knew_its_own_price],
    secrets=[SECRET],
)


# --- a second scenario: concurrency, retries, threads and previews --------------------------------------


def scout_prompt(where: str, stage: Stage) -> Prompt[Any]:
    """Return the prompt of an agent that leaves a mark, and then sends a signal, which must be approved."""

    @tool(effect="staged")
    async def mark(context: ToolContext) -> str:
        """Leave a mark."""
        context.filesystem.write(f"{where}.md", "was here\n")
        context.session.dispatch(Noted(where))
        return "marked"

    @tool
    async def signal(context: ToolContext) -> str:
        """Send a signal."""
        stage.world.happened("signalled", where=where)
        return "signalled"

    return Prompt(
        f"scout_{where}", f"You scout {where}.", tools=[mark, signal], policies=[CapabilityPolicy()]
    )


def errand_tools(stage: Stage) -> list[AnyTool]:
    world = stage.world
    prompts = {where: scout_prompt(where, stage) for where in ("north", "south")}

    @tool(effect="idempotent")
    async def scout(where: str, context: ToolContext) -> str:
        """Send a scout."""
        seen = await context.adapter.evaluate(prompts[where], f"Go {where}.")
        assert context.wait_for is not None
        colour = await context.wait_for("colour", {"where": where}, Colour)
        return f"{seen.text} {colour.name}"

    @tool(effect="read")
    async def flaky(context: ToolContext) -> str:
        """Fail once, then succeed."""
        if context.invocation.attempt == 1:
            raise TransientError("not now", retry_after=5)
        return "worked"

    async def was_booked(params: Any, *, context: ToolContext) -> bool:
        return world.count("booked") > 0

    async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
        world.happened("unbooked")

    @tool(effect="compensable", compensate=unbook, probe=was_booked)
    async def book(context: ToolContext) -> str:
        """Book a table."""
        world.happened("booked")
        return "booked"

    @tool(effect="idempotent")
    def stamp(context: ToolContext) -> str:
        """Stamp a letter, in a thread. There is no way to probe whether it was done."""
        context.once("stamp", lambda: world.happened("stamped")).wait()
        context.session.dispatch(Noted("stamped"))
        return "stamped"

    @tool(effect="staged", capabilities={"fs.write"})
    async def sign(context: ToolContext) -> str:
        """Sign the contract, after a person has seen the preview."""
        context.filesystem.write("contract.md", context.filesystem.read("contract.md") + "signed\n")
        return "signed"

    return [scout, flaky, book, stamp, sign]


def errands(stage: Stage) -> Play:
    """Return the play of two concurrent scouts and several errands."""
    prompt = Prompt(
        "errands",
        "You run errands.",
        tools=errand_tools(stage),
        policies=[
            CapabilityPolicy({"fs.write": "ask"}, effects={"idempotent": "allow", "compensable": "allow"})
        ],
    )
    scouting = [ToolCall("mark"), ToolCall("signal"), "All is quiet."]
    said = {
        "You run errands": [
            [ToolCall("scout", {"where": "north"}), ToolCall("scout", {"where": "south"}), ToolCall("flaky")],
            [ToolCall("book"), ToolCall("sign")],
            ToolCall("stamp"),
            "All is done.",
        ],
        "You scout north": scouting,
        "You scout south": scouting,
    }
    adapter = Adapter(
        stage.model(said),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    answers = {
        "colour": lambda payload: {"name": f"{payload['where']}ern"},
        "did 'stamp' happen": lambda _: {"happened": stage.world.count("stamped") > 0},
    }
    return Play(adapter, prompt, "Go.", Person(approve=True, answers=answers), one_at_a_time=True)


def signalled_and_stamped_once(seen: Seen) -> str | None:
    for what, most in (("signalled", 2), ("booked", 1), ("stamped", 1)):
        if seen.world.count(what) > most + seen.overtaken:
            return f"{what} {seen.world.count(what)} times"
    return None


ERRANDS = Scenario(
    name="errands", play=errands, files={"contract.md": "# Contract\n"}, laws=[signalled_and_stamped_once]
)


# --- a third scenario: decisions that hold for a whole session ------------------------------------------


def deciding_tools(stage: Stage) -> list[AnyTool]:
    world = stage.world

    @tool(effect="idempotent", capabilities={"door"})
    async def knock(door: str, context: ToolContext) -> str:
        """Knock, ask for permission to shout, and wait until the door is opened."""
        world.happened("knocked", door=door)
        allowed = await context.request_permission("shout")
        assert context.wait_for is not None
        colour = await context.wait_for("colour", {"door": door, "loud": allowed.approved}, Colour)
        return f"{door} is {colour.name}"

    @tool
    async def kick(door: str, context: ToolContext) -> str:
        """Kick the door in."""
        world.happened("kicked", door=door)
        return "kicked"

    return [knock, kick]


def deciding(stage: Stage) -> Play:
    """Return a play in which a decision for the session also applies to other calls, both concurrent and later ones."""
    prompt = Prompt(
        "visits",
        "You visit people.",
        tools=deciding_tools(stage),
        policies=[CapabilityPolicy({"door": "ask"})],
    )
    visits = [
        [ToolCall("knock", {"door": "red"}), ToolCall("kick", {"door": "red"})],
        [ToolCall("knock", {"door": "blue"}), ToolCall("kick", {"door": "blue"})],
        ToolCall("knock", {"door": "red"}),
        "All were at home.",
    ]
    adapter = Adapter(
        stage.model({"You visit people": visits}),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )

    def decides(question: Question) -> Any:
        return {"approved": question.name != "kick", "remember": "scope", "reason": "for good"}

    answers = {"colour": lambda payload: {"name": payload["door"]}}
    return Play(adapter, prompt, "Go.", Person(approve=decides, answers=answers), one_at_a_time=True)


def nothing_was_kicked(seen: Seen) -> str | None:
    kicked = seen.world.count("kicked")
    return None if not kicked else f"kicked {kicked} times, and that was denied for the session"


def approvals_shown(world: World) -> set[str]:
    asked = [each.details["question"] for each in world.all("shown")]
    return {each["id"] for each in asked if each["kind"] == "approval"}


def asked_once_for_each(seen: Seen) -> str | None:
    """Return None if a person was asked to approve knocking, kicking and shouting, each once, and nothing else.

    Otherwise, return the problem.
    """
    shown = approvals_shown(seen.world)
    return None if shown == approvals_shown(seen.uncrashed) and len(shown) == 3 else f"asked: {shown}"


DECIDING = Scenario(name="visits", play=deciding, laws=[nothing_was_kicked, asked_once_for_each])


# --- a fourth scenario: inner calls, which must not be repeated, and must be charged even after a crash -------------


def delivering_tools(stage: Stage) -> list[AnyTool]:
    world = stage.world

    @tool(effect="pure")
    async def price() -> int:
        """Return the price."""
        return 4

    @tool
    async def send(context: ToolContext) -> str:
        """Send a parcel."""
        world.happened("sent")
        return "sent"

    @tool
    async def deliver(context: ToolContext) -> str:
        """Ask for the price, and deliver, which can't be undone."""
        told = await context.call("price")
        world.happened("delivered")
        return f"delivered for {told.value}"

    @tool(effect="staged")
    async def weigh(context: ToolContext) -> ToolResult[str]:
        """Log the attempt to weigh, and fail."""
        context.session.dispatch(Weighed(context.call_id))
        return ToolResult.error("the scales are broken")

    @tool(effect="read")
    async def quote(context: ToolContext) -> str:
        """Ask for the price at both attempts. The first attempt fails."""
        told = await context.call("price")
        if context.invocation.attempt == 1:
            raise TransientError("not now", retry_after=5)
        return f"quoted {told.value}"

    courier = Prompt("courier", "You are a courier.", tools=[price, send, weigh])

    @tool(effect="idempotent")
    async def dispatch(context: ToolContext) -> str:
        """Let an agent with a budget of its own send a parcel."""
        sent = await context.adapter.evaluate(courier, "Send it.", budget=Budget(tool_calls=3))
        return sent.text

    return [price, send, deliver, quote, dispatch, weigh]


def delivering(stage: Stage) -> Play:
    """Return the play of a run whose calls make inner calls and start a nested run."""
    said = {
        "You deliver": [
            [ToolCall("price"), ToolCall("deliver"), ToolCall("quote")],
            [ToolCall("dispatch"), ToolCall("weigh")],
            ToolCall("send"),
            "All is delivered.",
        ],
        "You are a courier": [[ToolCall("price"), ToolCall("send"), ToolCall("weigh")], "It is sent."],
    }
    adapter = Adapter(
        stage.model(said),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    limit = RateLimitPolicy(100, 1_000_000, clock=stage.clock)
    prompt = Prompt("parcels", "You deliver parcels.", tools=delivering_tools(stage), policies=[limit])
    return Play(adapter, prompt, "Go.")


def counted_once(seen: Seen) -> str | None:
    """Check that the rate limit has counted each call that began once. A run that was overtaken is not checked."""
    ended = seen.world.all("ended")
    if not ended or seen.overtaken:
        return None
    cells = [json.loads(each)["item"] for each in ended[-1].details["logs"]["RateCell"]]
    counted = sorted(cell["call"] for cell in cells if cell["part"] == "call")
    marks = {mark for each in seen.world.all("began") for mark in each.details["begun"]}
    entered = [*seen.world.all("entered"), *seen.uncrashed.all("entered")]
    began = sorted(
        {
            each.details["key"]
            for number, each in enumerate(entered)
            if each.details["counts"]
            and (number < seen.world.count("entered") or each.details["attempt"] in marks)
        }
    )
    return None if counted == began else f"counted {counted}, and these began: {began}"


DELIVERING = Scenario(name="parcels", play=delivering, laws=[counted_once])


# --- a fifth scenario: questions that expire, whether their process is alive, parked or dead --------------------------


UNANSWERED = ("brief", "send_mail", "bid")
"""The names of the questions that nobody answers: one of `wait_for`, one for an approval, and one of a handoff."""


class Silent(Person):
    """A person who never answers some questions."""

    async def ask(self, question: Question, /) -> Answer:
        if question.name in UNANSWERED:
            await asyncio.get_running_loop().create_future()
        return await super().ask(question)


def expiring_tools(stage: Stage) -> list[AnyTool]:
    world = stage.world

    @tool(effect="staged")
    async def survey(context: UserContext) -> str:
        """Ask in vain, and then ask somebody else."""
        try:
            await context.wait_for("brief", {}, Colour, timeout=600)
        except QuestionTimedOut:
            context.session.dispatch(Noted("nobody answered"))
        colour = await context.wait_for("colour", {}, Colour, timeout=1_000_000)
        context.filesystem.write("survey.md", f"{colour.name}\n")
        return f"it is {colour.name}"

    @tool
    async def send_mail(to: str, context: ToolContext) -> str:
        """Send something, which nobody approves."""
        world.happened("mailed", to=to)
        return f"sent to {to}"

    haggle = Handoff("haggle", "Agree on a price.", params=Ask, effect="idempotent")

    @haggle.before
    async def look_up(params: Ask, *, context: ToolContext) -> Parked[Own, Ask]:
        return Parked(Own(SECRET), params)

    @haggle.client
    async def offer(asked: Ask, *, context: UserContext) -> Bid:
        return await context.wait_for("bid", asked, Bid, timeout=300)

    @haggle.after
    async def agree(own: Own, bid: Bid, *, context: ToolContext) -> ToolResult[int]:
        world.happened("agreed")
        return ToolResult.ok(bid.amount, "agreed")

    return [survey, send_mail, haggle]


def expiring(stage: Stage) -> Play:
    """Return a play in which nobody answers some of the questions in time."""
    prompt = Prompt(
        "late",
        "You wait in vain.",
        tools=expiring_tools(stage),
        policies=[CapabilityPolicy(effects={"idempotent": "allow"})],
    )
    said = [
        [ToolCall("survey"), ToolCall("send_mail", {"to": "supplier"})],
        ToolCall("haggle", {"amount": 9}),
        "Nobody was there.",
    ]
    adapter = Adapter(
        stage.model({"You wait in vain": said}),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
        approval_seconds=900,
    )
    return Play(adapter, prompt, "Wait.", Silent(answers={"colour": {"name": "blue"}}), unanswered=UNANSWERED)


def each_question_ends_once_in_the_same_way(seen: Seen) -> str | None:
    """Return None if the same questions ended in the same way as in the run that was not crashed, three without an answer.

    Otherwise, return the problem.
    """
    ends, expected = (
        {id: each["outcome"] for id, each in world.all("over")[-1].details["answered"].items()}
        for world in (seen.world, seen.uncrashed)
    )
    if ends != expected or sorted(ends.values()) != ["answered", *["timed out"] * 3]:
        return f"the questions ended as {ends}, and without a crash as {expected}"
    done = [each.what for each in seen.world.all() if each.what in ("mailed", "agreed")]
    return f"nobody allowed it: {done}" if done else None


EXPIRING = Scenario(
    name="waits in vain",
    play=expiring,
    laws=[each_question_ends_once_in_the_same_way],
    secrets=[SECRET],
)


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


# --- a seventh scenario: conversations that outgrow their windows, one trimmed and one summarised -------------------


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


# --- an eighth scenario: a run that is told things, pauses twice and wraps up ---------------------------------------


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


# --- a ninth scenario: a run that begins another one in the background ------------------------------------------------


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


# --- scripts: calls of a script, one after the other and several at once ---------------------------------


def scripting_tools(stage: Stage) -> list[AnyTool]:
    world = stage.world

    @tool(effect="pure")
    def weigh(n: int) -> int:
        """Weigh something."""
        return 2 * n

    @tool(effect="staged")
    async def enter(text: str, context: ToolContext) -> None:
        """Write into the book."""
        context.filesystem.write("book.md", f"{context.filesystem.read('book.md')}{text}\n")
        context.session.dispatch(Noted(text))

    @tool(effect="idempotent")
    async def stamp(what: str, context: ToolContext) -> str:
        """Stamp something."""

        async def was_stamped() -> bool:
            return world.count("stamped", what=what) > 0

        await context.once("stamp", lambda: world.happened("stamped", what=what), probe=was_stamped)
        return what

    async def was_booked(params: Any, *, context: ToolContext) -> bool:
        return world.count("booked") > 0

    async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
        world.happened("unbooked")

    @tool(effect="compensable", compensate=unbook, probe=was_booked)
    async def book(context: ToolContext) -> str:
        """Book a table."""
        world.happened("booked")
        return "booked"

    @tool(effect="staged", capabilities={"fs.write"})
    async def sign(name: str, context: ToolContext) -> str:
        """Sign the contract, after a person has seen what changes."""
        context.filesystem.write("contract.md", f"{context.filesystem.read('contract.md')}{name}\n")
        return name

    return [weigh, enter, stamp, book, sign]


SIX_CALLS = """
weight = await weigh(n=2)
print(await book())
await enter(text=f"it weighs {weight}")
name = await sign(name="ann")
stamped = await stamp(what=name)
await enter(text=f"{stamped} has signed")
weight
"""
AT_ONCE = """
import asyncio

async def first():
    weight = await weigh(n=1)
    return [weight, await sign(name="bob"), await weigh(n=weight)]

async def second():
    await enter(text="second")
    return [await weigh(n=10), await stamp(what="second")]

print(await asyncio.gather(first(), second()))
"""


def scripting(stage: Stage) -> Play:
    """Return the play of two scripts, in each of which a person must approve a call in the middle."""
    rules = CapabilityPolicy(
        {"fs.write": "ask"}, effects={"idempotent": "allow", "compensable": "allow", "staged": "allow"}
    )
    prompt = Prompt(
        "scripts", ["You write scripts.", CodeMode()], tools=scripting_tools(stage), policies=[rules]
    )
    said = [ToolCall("run_script", {"script": script}) for script in (SIX_CALLS, AT_ONCE)]
    adapter = Adapter(
        stage.model({"You write scripts": [*said, "All is done."]}),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    return Play(adapter, prompt, "Begin.", Person(approve=True))


def each_inner_call_made_once(seen: Seen) -> str | None:
    """Return a problem if something outside happened twice, although no other process took the run over."""
    for what, most in (("booked", 1), ("stamped", 2)):
        if seen.world.count(what) > most + (seen.overtaken and most):
            return f"{what} {seen.world.count(what)} times"
    return None


SCRIPTING = Scenario(
    name="scripts",
    play=scripting,
    files={"book.md": "# Book\n", "contract.md": "# Contract\n"},
    laws=[each_inner_call_made_once],
)
