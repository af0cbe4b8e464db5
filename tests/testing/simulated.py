"""Scenarios that the simulation crashes at every point.

Together they cover nested runs, questions, approvals, handoffs, retries, threads, previews, budgets and expiry.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from handrail import (
    Adapter,
    Budget,
    Handoff,
    Parked,
    Prompt,
    Tool,
    ToolContext,
    ToolResult,
    TransientError,
    UserContext,
    tool,
)
from handrail.environment import LaterEnvironment
from handrail.errors import QuestionTimedOut
from handrail.guard import CapabilityPolicy, RateLimitPolicy
from handrail.question import Answer, Question
from handrail.run.call import ToolCall
from handrail.session import kept
from handrail.testing import Person
from handrail.testing.simulation import Play, Scenario, Seen, Stage, World

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
