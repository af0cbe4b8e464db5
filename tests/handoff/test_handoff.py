"""Handoffs: calls in three acts, each of which passes through the gate."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import pytest

from handrail import (
    Adapter,
    Budget,
    CapabilityPolicy,
    Deadline,
    Handoff,
    MemoryFilesystem,
    Parked,
    Prompt,
    PromptEvaluationError,
    RateLimitPolicy,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    ToolExample,
    ToolResult,
    TransientError,
    UserContext,
    gather,
    open_gate,
    tool,
)
from handrail.errors import ToolDefinitionError
from handrail.events import ApprovalRequested, QuestionAsked, ToolInvoked, ToolRolledBack
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import Usage
from handrail.models.scripted import Reply
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.testing import Nobody, Person, RecordingSubscriber, VirtualClock, run_virtual
from support.cards import Deal, Deck, Offer, Pick, card_game
from support.parked_runs import answer_to
from support.rig import Note, Rig, leave_traces
from support.texts import ANSWER_NOT_DECLARED

PICKS = Person(answers={"pick_card": {"index": 1}})


async def first(offer: Offer, *, context: ToolContext) -> Pick:
    """Pick the first card without asking anybody."""
    return Pick(0)


# --- one call in three acts ------------------------------------------------------------------------


def test_a_model_sees_what_after_returns_and_a_person_what_is_public() -> None:
    """The person gets a form with the public part, and the model gets what `after` returns."""
    person = Person(answers={"pick_card": {"index": 1}})
    model = ScriptedModel([ToolCall("pick_card", {"cards": 2}), "Done."])
    session = Session()
    Adapter(model, environment=person).evaluate(
        Prompt("p", "Play.", tools=[card_game()]), "go", session=session, filesystem=MemoryFilesystem()
    ).wait()
    assert model.requests[1].messages[-1].results[0].text == "card 1"  # pyright: ignore
    [question] = person.questions
    assert (question.kind, question.name, question.payload) == ("handoff", "pick_card", {"backs": 2})
    assert question.message == "Let the other side pick a card."
    assert question.schema["properties"] == {"index": {"type": "integer"}}
    assert question.asked_by == ("pick_card", "pick_card.client")


async def test_acts_are_inner_calls_with_ids_by_order() -> None:
    """Each act is an inner call with its own start and end, and all acts are committed together."""
    rig = Rig([card_game()], environment=PICKS)
    assert (await rig.call("pick_card")).value == "card 1"
    ended = rig.of(ToolInvoked)
    outer = ended[-1].call_id
    assert [(each.call_id, each.path, each.status) for each in ended] == [
        (f"{outer}.1", ("pick_card", "pick_card.before"), "ok"),
        (f"{outer}.2", ("pick_card", "pick_card.client"), "ok"),
        (f"{outer}.3", ("pick_card", "pick_card.after"), "ok"),
        (outer, ("pick_card",), "ok"),
    ]
    rig.assert_paired()
    assert rig.notes == ["pick_card-dealt", "pick_card-settled"]
    notes = [index for index, event in enumerate(rig.events) if isinstance(event, Note)]
    assert min(notes) > rig.events.index(ended[2])  # published once, with the outermost commit
    assert [each.asked_by for each in rig.of(QuestionAsked)] == [("pick_card", "pick_card.client")]


@pytest.mark.parametrize("failing", ["before", "client", "after"])
async def test_when_an_act_fails_nothing_is_left_of_any(failing: str) -> None:
    """When an act fails, the files and state of all acts are rolled back, and the model is told which act failed."""

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        leave_traces(context, "dealt")
        if failing == "before":
            raise ValueError("no cards")
        return Parked(Deck(["ace"]), Offer(1))

    async def choose(offer: Offer, *, context: ToolContext) -> Pick:
        leave_traces(context, "chosen")
        if failing == "client":
            raise ValueError("can't decide")
        return Pick(0)

    async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        leave_traces(context, "settled")
        raise ValueError("torn")

    rig = Rig([card_game(before=deal, client=choose, after=settle)])
    result = await rig.call("pick_card")
    assert not result.success
    assert result.message.startswith(f"pick_card.{failing} failed: ")
    rig.assert_untouched()
    rig.assert_paired()


async def test_before_may_be_the_end_of_it() -> None:
    """If `before` returns a `ToolResult`, that is the call's result, and nobody is asked."""

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer] | ToolResult[str]:
        if params.cards == 0:
            return ToolResult.error("With no cards there is nothing to pick.")
        return ToolResult.ok("the only card", "There was no choice.", exclude_value_from_context=True)

    person = Person(answers={"pick_card": {"index": 0}})
    rig = Rig([card_game(before=deal)], environment=person)
    result = await rig.call("pick_card", cards=1)
    assert result == ToolResult("There was no choice.", "the only card", True, True)
    assert (await rig.call("pick_card", cards=0)).message == "With no cards there is nothing to pick."
    assert person.questions == []
    assert [each.path[-1] for each in rig.of(ToolInvoked)] == ["pick_card.before", "pick_card"] * 2


async def test_acts_may_give_results_of_different_types() -> None:
    """`before` and `after` may return different result types. If `after` takes `Any`, the answer's type comes from `client`."""

    async def deal(params: Deal, *, context: ToolContext) -> Parked[None, Offer] | ToolResult[str]:
        return Parked(None, Offer(1)) if params.cards else ToolResult.ok("no cards")

    async def settle(deck: None, pick: Any, *, context: ToolContext) -> ToolResult[None]:
        assert pick == Pick(0)
        return ToolResult.ok(None, "picked")

    game = Handoff("pick_card", "Let the other side pick a card.", params=Deal, effect="read")
    game.before(deal)
    game.client(first)
    game.after(settle)
    rig = Rig([game])
    assert (await rig.call("pick_card", cards=0)).value == "no cards"
    assert (await rig.call("pick_card")).message == "picked"
    assert game.acts.answer.annotation is Pick


async def test_client_and_after_may_take_params() -> None:
    """`client` and `after` may take the params, by position or by keyword."""
    seen: list[Any] = []

    def choose(offer: Offer, params: Deal, *, context: ToolContext) -> Pick:
        seen.append(params)
        return Pick(params.cards - 1)

    def settle(deck: Deck, pick: Pick, *, params: Deal, context: ToolContext) -> ToolResult[str]:
        seen.append(params)
        return ToolResult.ok(f"{pick.index} of {params.cards}")

    rig = Rig([card_game(client=choose, after=settle)])
    assert (await rig.call("pick_card", cards=4)).value == "3 of 4"
    assert seen == [Deal(4), Deal(4)]


async def test_acts_may_be_plain_functions() -> None:
    """Acts may be plain functions, which run in threads and call `.wait()` on what the context's verbs return."""

    def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        return Parked(Deck(["a"]), Offer(1))

    def choose(offer: Offer, *, context: UserContext) -> Pick:
        return context.wait_for("which", offer, Pick).wait()

    rig = Rig([card_game(before=deal, client=choose)], environment=Person(answers={"which": {"index": 0}}))
    assert (await rig.call("pick_card")).value == "card 0"


async def test_a_handoff_in_other_words_is_the_same_handoff() -> None:
    """A handoff with a different description, for example from an override, still runs all acts."""
    game = card_game(client=first)
    open_gate([game])
    rig = Rig([game.with_words(description="Pick!")])
    assert (await rig.call("pick_card")).value == "card 0"


# --- acts, policies and effects --------------------------------------------------------------------


@pytest.mark.parametrize("act", ["before", "client", "after"])
async def test_an_act_can_be_called_by_nobody(act: str) -> None:
    """Neither a model nor `context.call` can call an act."""

    @tool
    async def cheat(context: ToolContext) -> str:
        """Call an act."""
        return (await context.call(f"pick_card.{act}")).message

    rig = Rig([card_game(client=first), cheat])
    assert "There is no tool" in (await rig.call(f"pick_card.{act}")).message
    assert "There is no tool" in (await rig.call("cheat")).value


async def test_one_call_is_approved_once_and_counted_once() -> None:
    """A handoff is approved once, and rate limits, the budget and the depth limit count it as one call."""
    person = Person(approve=True, answers={"pick_card": {"index": 0}})
    rig = Rig(
        [card_game(effect="irreversible")],
        policies=[CapabilityPolicy(), RateLimitPolicy(1, 60)],
        environment=person,
        budget=Budget(tool_calls=1),
        depth_limit=0,
    )
    assert (await rig.call("pick_card")).value == "card 0"
    assert [each.asked_by for each in rig.of(ApprovalRequested)] == [("pick_card",)]
    assert rig.gate.run.costs.tracker.spent()["tool_calls"] == 1
    assert (await rig.call("pick_card")).success is False


async def test_a_staged_handoff_is_approved_before_anybody_is_asked() -> None:
    """A staged handoff is approved before it runs. It has no preview, as that would run it and ask the person first."""
    asked: list[str] = []

    def approve(question: Question) -> tuple[bool, str]:
        asked.append("approval")
        return False, "not today"

    person = Person(approve=approve, answers={"pick_card": lambda _: asked.append("handoff")})
    rig = Rig(
        [card_game(capabilities={"fs.write"})],
        policies=[CapabilityPolicy({"fs.write": "ask"})],
        environment=person,
    )
    assert "not today" in (await rig.call("pick_card")).message
    assert asked == ["approval"]
    rig.assert_untouched()


async def test_what_an_act_calls_is_held_to_the_policies() -> None:
    """Acts need no approval, but the tools that they call are checked by the policies."""

    @tool
    async def pay(context: ToolContext) -> str:
        """Pay."""
        return "paid"

    async def choose(offer: Offer, *, context: ToolContext) -> Pick:
        assert "was not approved" in (await context.call("pay")).message
        return Pick(0)

    rig = Rig(
        [card_game(client=choose, effect="irreversible"), pay],
        policies=[CapabilityPolicy()],
        environment=Person(approve=lambda question: question.name == "pick_card"),
    )
    assert (await rig.call("pick_card")).value == "card 0"


async def test_an_act_does_no_more_than_the_handoff_says() -> None:
    """In a handoff that only reads, `client` may neither dispatch an event nor call a tool that writes."""

    @tool(effect="staged")
    async def write(context: ToolContext) -> str:
        """Write."""
        return "written"

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        return Parked(Deck(["a"]), Offer(1))

    async def choose(offer: Offer, *, context: ToolContext) -> Pick:
        assert "may not call write" in (await context.call("write")).message
        context.session.dispatch(Note("no"))
        return Pick(0)

    async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok("done")

    rig = Rig([card_game(before=deal, client=choose, after=settle, effect="read"), write])
    assert "may not dispatch Note" in (await rig.call("pick_card")).message


# --- effects outside the transaction, retries and conflicts ----------------------------------------


async def test_what_before_did_to_the_world_is_named_when_nobody_answers() -> None:
    """If the person declines, the model is told that an irreversible `before` could not be undone."""
    rig = Rig([card_game(effect="irreversible")], environment=Person())
    result = await rig.call("pick_card")
    assert result.message == (
        "pick_card.client failed: question 'pick_card': declined: no answer was prepared for 'pick_card'. "
        "Could not be undone: pick_card.before. Find out what it changed before you do it again."
    )
    [back] = rig.rolled_back("pick_card")
    assert back.not_undone == ("pick_card.before",)


async def test_a_handoff_that_succeeded_answers_as_a_whole() -> None:
    """If the outer call fails after a handoff succeeded, the handoff as a whole is compensated or reported as not undone."""
    undone: list[object] = []

    async def undo(params: Deal, value: str, *, context: ToolContext) -> None:
        undone.append((params, value))

    @tool
    async def outer(name: str, context: ToolContext) -> str:
        """Let somebody pick, then fail."""
        (await context.call(name)).unwrap()
        raise ValueError("too late")

    games = [
        card_game("sure", client=first, effect="irreversible"),
        card_game("undoable", client=first, effect="compensable", compensate=undo),
    ]
    rig = Rig([*games, outer])
    assert "Could not be undone: sure." in (await rig.call("outer", name="sure")).message
    assert "undone" not in (await rig.call("outer", name="undoable")).message
    assert undone == [(Deal(), "card 0")]


async def test_a_passing_failure_is_tried_again_act_by_act() -> None:
    """If `before` fails with a transient error, it is retried, and the person is asked only once."""
    tries: list[int] = []

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        tries.append(context.invocation.attempt)
        if len(tries) < 3:
            raise TransientError("the dealer sleeps", retry_after=0)
        return Parked(Deck(["a"]), Offer(1))

    person = Person(answers={"pick_card": {"index": 0}})
    rig = Rig([card_game(before=deal)], environment=person)
    assert (await rig.call("pick_card")).value == "card 0"
    assert (tries, len(person.questions)) == ([1, 2, 3], 1)


async def test_nobody_is_asked_twice_because_something_changed_meanwhile() -> None:
    """If something that a handoff read has changed, it ends in a conflict and is not rerun, so nobody is asked twice."""
    begun: list[int] = []

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        begun.append(len(context.session[Note].all()))
        context.session.dispatch(Note("dealt"))
        return Parked(Deck(["a"]), Offer(1))

    session = Session()

    def meanwhile(payload: object) -> dict[str, int]:
        session.dispatch(Note("somebody else's"))
        return {"index": 0}

    person = Person(answers={"pick_card": meanwhile})
    rig = Rig([card_game(before=deal)], environment=person, session=session)
    result = await rig.call("pick_card")
    assert rig.status("pick_card") == "conflict"
    assert "Note" in result.message
    assert (begun, len(person.questions), rig.notes) == ([0], 1, ["somebody else's"])


# --- answers ---------------------------------------------------------------------------------------


async def test_an_answer_that_does_not_fit_is_not_taken() -> None:
    """After an invalid answer, a person is asked again. If a client function returns one, the call fails."""
    person = Person(answers={"pick_card": {"index": 2}}, wrong_first={"index": "the first"})
    rig = Rig([card_game()], environment=person)
    assert (await rig.call("pick_card")).value == "card 2"
    assert len(person.questions) == 2

    async def confused(offer: Offer, *, context: ToolContext) -> Any:
        return {"index": 1, "card": "ace"}

    async def wrapped(offer: Offer, *, context: ToolContext) -> Any:
        return ToolResult.ok(Pick(1))

    async def plain(offer: Offer, *, context: ToolContext) -> Any:
        return {"index": 1}

    rig = Rig([card_game("a", client=confused), card_game("b", client=wrapped), card_game("c", client=plain)])
    assert "its answer does not fit: card: unknown" in (await rig.call("a")).message
    assert "return the answer itself" in (await rig.call("b")).message
    assert (await rig.call("c")).value == "card 1"


async def test_the_first_answer_is_the_answer() -> None:
    """Repeating the first answer is harmless, a different answer is refused, and `after` runs once."""
    journal = MemoryJournal()
    settled: list[Pick] = []

    async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        settled.append(pick)
        return ToolResult.ok(f"card {pick.index}")

    waiting = Person(after=asyncio.Event())
    rig = Rig([card_game(after=settle)], environment=waiting, journal=journal)
    called = asyncio.ensure_future(rig.call("pick_card"))
    while not (lying := await journal.questions.open()):
        await asyncio.sleep(0)
    given = answer_to(lying[0], {"index": 2})
    journal.questions.answer(given)
    journal.questions.answer(given)
    with pytest.raises(ValueError, match="the question is over"):
        journal.questions.answer(answer_to(lying[0], {"index": 0}))
    assert (await called).value == "card 2"
    assert settled == [Pick(2)]


@pytest.mark.parametrize("returned", ["a deck", Deck(["a"]), None])
async def test_before_must_park(returned: Any) -> None:
    """If `before` returns neither a `Parked` nor a `ToolResult`, the call fails and says what to return."""

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        return returned

    rig = Rig([card_game(before=deal)], environment=PICKS)
    assert "return `Parked(private, public)`, or a ToolResult" in (await rig.call("pick_card")).message


async def test_the_client_gets_what_is_declared_public_and_no_more() -> None:
    """The client gets only the declared public fields: an instance of a subclass loses its other fields, and a dict with others is refused."""

    @dataclass(frozen=True)
    class Marked(Offer):
        marks: str = ""

    seen: list[Offer] = []

    async def choose(offer: Offer, *, context: ToolContext) -> Pick:
        seen.append(offer)
        return Pick(0)

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        return Parked(Deck([]), Marked(1, "x"))

    rig = Rig([card_game(before=deal, client=choose)])
    await rig.call("pick_card")
    assert [(type(each), each) for each in seen] == [(Offer, Offer(1))]

    async def undeclared(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        shown: Any = {"backs": 1, "marks": "x"}
        return Parked(Deck([]), shown)

    rig = Rig([card_game(before=undeclared, client=choose)])
    assert (await rig.call("pick_card")).message == (
        "pick_card.before failed: the public part it parked does not match its type, Offer, at marks."
    )
    assert len(seen) == 1


# --- concurrent and nested handoffs ----------------------------------------------------------------


class Table(Environment):
    """A person who answers each question when told to."""

    run_mode: Any = "user"

    def __init__(self) -> None:
        self.asked: dict[str, tuple[Question, asyncio.Future[Any]]] = {}
        self.order: list[str] = []

    async def ask(self, question: Question, /) -> Answer:
        said: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked["/".join(question.asked_by)] = question, said
        return answer_to(question, await said)

    async def until(self, count: int) -> None:
        while len(self.asked) < count:
            await asyncio.sleep(0)

    def answer(self, path: str, index: int) -> None:
        self.order.append(path)
        self.asked[path][1].set_result({"index": index})


async def test_several_wait_at_once_and_each_gets_its_own_answer() -> None:
    """Concurrent and nested handoffs each get their own answer, even if the second question is answered first."""

    async def choose(offer: Offer, *, context: ToolContext) -> Pick:
        left, right = await gather(context.call("left"), context.call("right", cards=9))
        return Pick(int(left.unwrap()[-1]) + int(right.unwrap()[-1]))

    async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(f"{pick.index}, then {(await context.call('last')).unwrap()}")

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        return Parked(Deck([]), Offer(1))

    table = Table()
    inner = [card_game(name) for name in ("left", "right", "last")]
    rig = Rig([card_game("outer", before=deal, client=choose, after=settle), *inner], environment=table)
    called = asyncio.ensure_future(rig.call("outer"))
    await table.until(2)
    assert [question.payload for question, _ in table.asked.values()] == [{"backs": 3}, {"backs": 9}]
    table.answer("outer/outer.client/right/right.client", 8)
    table.answer("outer/outer.client/left/left.client", 1)
    await table.until(3)
    table.answer("outer/outer.after/last/last.client", 2)
    assert (await called).value == "9, then card 2"
    rig.assert_paired()
    assert len({each.call_id for each in rig.of(ToolInvoked)}) == 16
    assert rig.notes == [
        "right-dealt",
        "right-settled",
        "left-dealt",
        "left-settled",
        "last-dealt",
        "last-settled",
    ]


async def test_when_the_outer_one_fails_the_inner_ones_are_undone() -> None:
    """When an outer handoff fails, its inner handoffs are rolled back too."""

    async def choose(offer: Offer, *, context: ToolContext) -> Pick:
        return Pick(int((await context.call("inner")).unwrap()[-1]) + 90)

    rig = Rig(
        [card_game("outer", client=choose), card_game("inner")],
        environment=Person(answers={"inner": {"index": 1}}),
    )
    assert (await rig.call("outer")).message == "There is no card 91."
    rig.assert_untouched()


async def test_handoffs_nest_as_deep_as_calls() -> None:
    """The depth limit counts handoffs but not their acts, and a call beyond it fails."""

    async def deeper(offer: Offer, *, context: ToolContext) -> Pick:
        result = await context.call("pick_card")
        return Pick(0 if result.success else 1)

    rig = Rig([card_game(client=deeper)], depth_limit=3)
    assert (await rig.call("pick_card")).success
    depths = [len(each.path) for each in rig.of(ToolInvoked) if each.status == "ok"]
    assert max(depths) == 8  # four handoffs with one act each
    [refused] = [each for each in rig.of(ToolInvoked) if each.status == "error"]
    assert "limit" in refused.result.message


# --- cancellation, time and cost at every level ----------------------------------------------------


def nested(client: Any, **options: Any) -> list[Any]:
    """Return an outer handoff whose client calls an inner handoff, and the inner one with the given client."""

    async def call_inner(offer: Offer, *, context: ToolContext) -> Pick:
        (await context.call("inner")).unwrap()
        return Pick(0)

    return [card_game("outer", client=call_inner, **options), card_game("inner", client=client)]


def test_a_cancel_reaches_every_level() -> None:
    """Cancelling the run ends the innermost wait, and all levels are rolled back."""

    async def main() -> Rig:
        forever = Person(after=asyncio.Event())
        rig = Rig([*nested(None)], environment=forever)
        called = asyncio.ensure_future(rig.call("outer"))
        while not forever.questions:
            await asyncio.sleep(0)
        rig.gate.cancel("enough")
        with pytest.raises(asyncio.CancelledError):
            await called
        return rig

    rig = run_virtual(main)
    rig.assert_untouched()
    rig.assert_paired()
    assert {each.status for each in rig.of(ToolInvoked) if "before" not in each.tool} == {"cancelled"}


def test_the_deadline_reaches_every_level() -> None:
    """A deadline that passes during the innermost act ends the run, and all acts are rolled back."""

    async def slow(offer: Offer, *, context: ToolContext) -> Pick:
        await asyncio.sleep(60)
        return Pick(0)

    async def main() -> Rig:
        loop: Any = asyncio.get_running_loop()
        clock = VirtualClock(loop)
        rig = Rig([*nested(slow)], deadline=Deadline.after(10, clock=clock), clock=clock)
        with pytest.raises(PromptEvaluationError, match="deadline"):
            await rig.call("outer")
        assert loop.time() == 10
        return rig

    rig = run_virtual(main)
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.parametrize(("person", "client"), [(3600, 0), (0, 3600)])
def test_time_a_person_takes_does_not_count_towards_the_timeout(person: int, client: int) -> None:
    """The time that a person takes does not count towards a timeout, but an act's own time does."""

    async def choose(offer: Offer, *, context: ToolContext) -> Pick:
        await asyncio.sleep(client)
        assert context.wait_for
        return await context.wait_for("which", offer, Pick)

    async def main() -> tuple[ToolResult[Any], Rig]:
        somebody = Person(answers={"which": {"index": 0}}, after=float(person))
        rig = Rig([*nested(choose, timeout=5)], environment=somebody)
        return await rig.call("outer"), rig

    result, rig = run_virtual(main)
    if person:
        assert result.value == "card 0"
    else:
        assert result.message.startswith("outer took longer than 5 seconds")
        rig.assert_untouched()


def test_cost_is_counted_through_every_level() -> None:
    """A nested model request's usage is part of the response's usage, and counts towards the root run's budget."""

    async def ask(offer: Offer, *, context: ToolContext) -> Pick:
        assert context.prompt_model
        return await context.prompt_model("Choose", Pick)

    def script() -> ScriptedModel:
        return ScriptedModel(
            [
                Reply(calls=[ToolCall("outer")], usage=Usage(10, 1, 0, 0, 1)),
                Reply('{"index": 0}', usage=Usage(20, 2, 0, 0, 1)),
                Reply("Done.", usage=Usage(30, 3, 0, 0, 1)),
            ]
        )

    prompt = Prompt("p", "Play.", tools=nested(ask))
    session = Session(run_mode="agent")
    run = Adapter(script()).evaluate(prompt, "go", session=session, filesystem=MemoryFilesystem())
    assert run.wait().usage == Usage(60, 6, 0, 0, 3)
    with pytest.raises(PromptEvaluationError, match="requests"):
        Adapter(script()).evaluate(
            prompt,
            "go",
            session=Session(run_mode="agent"),
            budget=Budget(requests=1),
            filesystem=MemoryFilesystem(),
        ).wait()


# --- definitions -----------------------------------------------------------------------------------


async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
    return Parked(Deck([]), Offer(0))


async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok("")


async def no_context(params: Deal) -> Parked[Deck, Offer]: ...  # pyright: ignore
async def other_params(params: Offer, *, context: ToolContext) -> Parked[Deck, Offer]: ...  # pyright: ignore
async def says_nothing(params: Deal, *, context: ToolContext): ...  # pyright: ignore
async def bare(params: Deal, *, context: ToolContext) -> Parked: ...  # pyright: ignore
async def parks_not(params: Deal, *, context: ToolContext) -> Offer: ...  # pyright: ignore
async def never_hands_over(params: Deal, *, context: ToolContext) -> ToolResult[str]: ...  # pyright: ignore
async def two_kinds(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer] | Parked[str, str]: ...  # pyright: ignore
async def keeps_a_lock(params: Deal, *, context: ToolContext) -> Parked[asyncio.Lock, Offer]: ...  # pyright: ignore
async def takes_a_deck(deck: Deck, *, context: ToolContext) -> Pick: ...  # pyright: ignore
async def takes_nothing(*, context: ToolContext) -> Pick: ...  # pyright: ignore
async def other_answer(offer: Offer, *, context: ToolContext) -> Offer: ...  # pyright: ignore
async def result_answer(offer: Offer, *, context: ToolContext) -> ToolResult[Pick]: ...  # pyright: ignore
async def wrong_params(offer: Offer, params: Pick, *, context: ToolContext) -> Pick: ...  # pyright: ignore
async def needs_a_person(offer: Offer, *, context: UserContext) -> Pick: ...  # pyright: ignore
async def other_private(deck: Offer, pick: Pick, *, context: ToolContext) -> ToolResult[str]: ...  # pyright: ignore
async def forgets_the_answer(deck: Deck, *, context: ToolContext) -> ToolResult[str]: ...  # pyright: ignore
async def gives_text(deck: Deck, pick: Pick, *, context: ToolContext) -> str: ...  # pyright: ignore
async def takes_whatever(deck: Deck, pick, *, context: ToolContext) -> ToolResult[str]: ...  # pyright: ignore
async def more_arguments(offer: Offer, more: int, *, context: ToolContext) -> Pick: ...  # pyright: ignore


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"before": None}, "what is private without a `before` is None"),
    ({"after": None}, ANSWER_NOT_DECLARED),
    ({"before": no_context}, "its `before` takes no `context`"),
    ({"before": other_params}, "`params` is Deal and what its `before` takes is annotated Offer"),
    ({"params": None}, "its `before` takes Deal, but the handoff has no params"),
    ({"before": says_nothing}, "its `before` does not say what it parks"),
    ({"before": bare}, "does not say what"),
    ({"before": parks_not}, "its `before` returns Offer"),
    ({"before": never_hands_over}, "its `before` never hands over"),
    ({"before": two_kinds}, "its `before` parks different things"),
    ({"before": keeps_a_lock}, "its private part can't be recorded"),
    ({"before": "deal"}, "its `before` is 'deal', not a function"),
    (
        {"client": takes_a_deck},
        "what its `before` shows is Offer and what its `client` takes is annotated Deck",
    ),
    ({"client": takes_nothing}, "its `client` takes 0 arguments besides `context`, but is called with 1"),
    ({"client": other_answer}, "what its `client` returns is Offer and the answer its `after` takes"),
    ({"client": result_answer}, "its `client` returns ToolResult"),
    ({"client": wrong_params}, "params is Deal and `params` of its client is annotated Pick"),
    ({"client": more_arguments}, "its `client` takes 2 arguments besides `context`"),
    (
        {"client": needs_a_person, "run_mode": "agent"},
        "requires UserContext, which run_mode 'agent' never has",
    ),
    (
        {"after": other_private},
        "what its `before` keeps private is Deck and the first parameter of its `after`",
    ),
    ({"after": forgets_the_answer}, "its `after` takes 1 arguments besides `context`"),
    ({"after": gives_text}, "its `after` returns str"),
    ({"after": takes_whatever}, ANSWER_NOT_DECLARED),
    ({"answer": Offer}, "its `answer` is Offer and the answer its `after` takes is annotated Pick"),
    ({"effect": "compensable"}, "a `compensate` handler"),
    ({"effect": "harmless"}, "effect is 'harmless'"),
    ({"name": "pick card"}, "the name 'pick card' is not allowed"),
    ({"timeout": 0}, "timeout is 0"),
    (
        {"examples": [ToolExample("One", Deal(1), 7)]},
        "the output of examples[0] is invalid",
    ),
]


@pytest.mark.parametrize(("wrong", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
@pytest.mark.parametrize(
    "order", [("before", "client", "after"), ("after", "client", "before")], ids=["in order", "from behind"]
)
def test_what_is_wrong_with_a_definition_is_said_with_its_name(
    wrong: dict[str, Any], said: str, order: tuple[str, ...]
) -> None:
    """A wrong definition is refused no later than when the handoff is first used, and the error names the handoff."""
    given: dict[str, Any] = {"params": Deal, "before": deal, "after": settle, **wrong}
    acts = {name: given.pop(name, None) for name in order}
    name = given.pop("name", "pick_card")

    def define() -> None:
        game = Handoff(name, "Let the other side pick a card.", **given)
        for act, function in acts.items():
            if function is not None:
                getattr(game, act)(function)
        Prompt("p", "Play.", tools=[game])

    with pytest.raises(ToolDefinitionError, match=re.escape(said)) as refused:
        define()
    assert refused.value.tool == name
    assert refused.value.hint


def test_an_act_is_defined_once_and_before_it_is_used() -> None:
    """A second act of the same kind is refused, and so is an act that is defined after the handoff was used."""
    game = Handoff("pick_card", "Let the other side pick a card.", params=Deal)
    game.before(deal)
    with pytest.raises(ToolDefinitionError, match="`before` is defined twice"):
        game.before(deal)
    for use in (open_gate, lambda tools: Prompt("p", "Go.", tools=tools)):  # pyright: ignore
        with pytest.raises(ToolDefinitionError, match=ANSWER_NOT_DECLARED):
            use([game])  # pyright: ignore
    game.after(settle)
    open_gate([game])
    with pytest.raises(ToolDefinitionError, match="after the handoff was used"):
        game.client(first)


def test_a_handoff_without_params_and_with_plain_types() -> None:
    """A handoff needs no params, and its private part, public part and answer may be plain JSON values."""
    ask = Handoff("ask", "Ask for a word.", effect="pure")

    @ask.before
    def begin(params: None, *, context: ToolContext) -> Parked[dict[str, int], str]:
        return Parked({"a": 1}, "Which word?")

    @ask.after
    def end(private: dict[str, int], word: str, *, context: ToolContext) -> ToolResult[list[str]]:
        return ToolResult.ok([word, *private])

    gate = open_gate([ask], environment=Person(answers={"ask": "tea"}))
    assert gate.invoke("ask").wait().value == ["tea", "a"]
    assert ask.json_schema["properties"] == {}


def test_acts_are_found_in_whatever_scope() -> None:
    """Acts may use types that are local to a function."""

    @dataclass
    class Hidden:
        word: str

    @dataclass
    class Shown:
        size: int

    guess = Handoff("guess", "Guess.", answer=str, effect="pure")

    @guess.before
    async def begin(params: None, *, context: ToolContext) -> Parked[Hidden, Shown]:
        return Parked(Hidden("tea"), Shown(3))

    @guess.after
    async def end(hidden: Hidden, word: str, *, context: ToolContext) -> ToolResult[bool]:
        return ToolResult.ok(hidden.word == word)

    assert (
        open_gate([guess], environment=Person(answers={"guess": "tea"})).invoke("guess").wait().value is True
    )


def test_a_rolled_back_handoff_says_so_once_for_each_act() -> None:
    """When a handoff is rolled back, every start has one end, and the failed act and the handoff each report one rollback."""
    session = Session()
    with RecordingSubscriber(session) as seen:
        gate = open_gate([card_game()], session=session, filesystem=MemoryFilesystem(), environment=Nobody())
        assert not gate.invoke("pick_card").wait().success
    seen.assert_paired()
    assert [each.tool for each in seen.of(ToolRolledBack)] == ["pick_card.client", "pick_card"]
