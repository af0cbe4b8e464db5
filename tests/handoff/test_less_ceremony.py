"""Handoffs with fewer than three acts, `start` and `finish`, events, and the types of answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import SecretStr
from typing_extensions import TypedDict

from handrail import (
    AgentEnvironment,
    CapabilityPolicy,
    Handoff,
    MemoryFilesystem,
    Parked,
    ScriptedModel,
    ToolContext,
    ToolResult,
    UserContext,
    open_gate,
    run_as_agent,
)
from handrail.errors import DefinitionError, ToolDefinitionError, ToolValidationError
from handrail.events import HandoffAnswered, HandoffParked, ToolInvoked
from handrail.session import Session
from handrail.testing import Person, RecordingSubscriber
from support.cards import Deal as CardDeal
from support.cards import Deck, Offer, card_game
from support.cards import Pick as CardPick
from support.rig import Rig
from support.texts import ANSWER_NOT_DECLARED, NO_PARAMS


class Slot(TypedDict):
    """An answer as a TypedDict."""

    day: str


@dataclass(frozen=True)
class Visit:
    """The params of a handoff."""

    street: str


ANSWERS: list[tuple[Any, Any]] = [
    (Any, {"day": "Monday"}),
    (Slot, {"day": "Monday"}),
    (list[Slot], [{"day": "Monday"}]),
    (dict[str, Any], {"day": "Monday"}),
    (Literal["Monday", "Tuesday"], "Monday"),
    (int | None, 3),
]


def only_client(answer: Any, act: Any) -> Handoff[Visit, Any]:
    """Make a handoff whose only act is this `client`, which is annotated to return this type of answer."""
    act.__annotations__["return"] = answer
    made = Handoff("book_visit", "Ask when we may come.", params=Visit, effect="staged")
    made.client(act)
    return made


# --- fewer than three acts -------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "value"), ANSWERS, ids=str)
@pytest.mark.parametrize("how", ["decides", "asks", "plays"])
async def test_an_answer_of_any_type_is_returned(how: str, answer: Any, value: Any) -> None:
    """A client's answer is returned whatever its type, whether the client decides, asks a person, or runs in `run_as_agent`."""

    async def decide(visit: Visit, *, context: ToolContext) -> Any:
        assert visit.street == "Main St"
        return value

    async def ask(visit: Visit, *, context: UserContext) -> Any:
        return await context.wait_for("visit", visit, answer)

    if how == "plays":
        given = run_as_agent(only_client(answer, decide), {"street": "Main St"}, model=ScriptedModel([]))
        assert await given == value
        return
    rig = Rig(
        [only_client(answer, ask if how == "asks" else decide)], environment=Person(answers={"visit": value})
    )
    result = await rig.call("book_visit", street="Main St")
    assert (result.success, result.value) == (True, value)
    assert [each.path[-1] for each in rig.of(ToolInvoked)] == ["book_visit.client", "book_visit"]


@pytest.mark.parametrize(("answer", "value"), ANSWERS, ids=str)
async def test_a_handoff_without_any_act_asks_for_its_answer(answer: Any, value: Any) -> None:
    """Without acts, a person sees the params and a model gets them in its prompt; the answer is the result."""
    made = Handoff("book_visit", "Ask when we may come.", params=Visit, answer=answer)
    person = Person(answers={"book_visit": value})
    assert (
        await open_gate([made], environment=person).invoke("book_visit", {"street": "Main St"})
    ).value == value
    [question] = person.questions
    assert (question.message, question.title) == ("Ask when we may come.", "Book visit")
    assert question.payload == {"street": "Main St"}
    model = ScriptedModel(
        [json.dumps(value), json.dumps({"value": value})]
    )  # if the bare value is refused, the model is asked for an object
    there = AgentEnvironment(model)
    assert (
        await open_gate([made], environment=there).invoke("book_visit", {"street": "Main St"})
    ).value == value
    assert "Main St" in str(model.requests[0].messages)


async def test_before_and_after_may_each_be_left_out() -> None:
    """Without `after`, the answer is the result. Without `before`, the params are public and nothing is private."""
    no_after = Handoff("pick", "Pick a card.", params=CardDeal, answer=int)

    @no_after.before
    async def deal(params: CardDeal, *, context: ToolContext) -> Parked[Deck, Offer]:
        return Parked(Deck(["ace"]), Offer(params.cards))

    no_before = Handoff("guess", "Guess the number of cards.", params=CardDeal)

    @no_before.after
    async def settle(private: None, guess: int, *, params: CardDeal, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok("right" if guess == params.cards else "wrong")

    person = Person(answers={"pick": 0, "guess": 3})
    gate = open_gate([no_after, no_before], environment=person)
    assert (await gate.invoke("pick", {"cards": 2})).value == 0
    assert (await gate.invoke("guess", {"cards": 3})).value == "right"
    assert [each.payload for each in person.questions] == [{"backs": 2}, {"cards": 3}]


def test_acts_that_do_not_fit_without_a_before_are_refused() -> None:
    """Without `before`, `client` must take the params, `after` must take None as the private part, and the answer's type must be declared."""

    async def wrong(offer: Offer, *, context: ToolContext) -> int: ...

    made = Handoff("book", "Book.", params=Visit)
    made.client(wrong)
    with pytest.raises(ToolDefinitionError, match="`params` is Visit and what its `client` takes"):
        made.check_complete()

    async def settle(deck: Deck, pick: int, *, context: ToolContext) -> ToolResult[int]: ...

    made = Handoff("book", "Book.", params=Visit)
    made.after(settle)
    with pytest.raises(ToolDefinitionError, match="private without a `before`"):
        made.check_complete()
    with pytest.raises(ToolDefinitionError, match=ANSWER_NOT_DECLARED):
        Handoff("book", "Book.", params=Visit).check_complete()


# --- the wording of questions ----------------------------------------------------------------------


async def test_people_read_a_sentence_and_never_the_name_of_a_function() -> None:
    """A question has the message and title that the handler passes. By default, both are made from the question's kind."""

    async def ask(visit: Visit, *, context: UserContext) -> str:
        said = await context.wait_for("visit", visit, message="When shall we come?", title="Your visit")
        return said + await context.wait_for("preferred_time-of day")

    person = Person(answers={"visit": "Monday, ", "preferred_time-of day": "at noon"})
    gate = open_gate([only_client(str, ask)], environment=person)
    assert (await gate.invoke("book_visit", {"street": "Main St"})).value == "Monday, at noon"
    first, second = person.questions
    assert (first.title, first.message) == ("Your visit", "When shall we come?")
    assert (second.title, second.message) == (
        "Preferred time of day",
        "Please answer: preferred time of day.",
    )
    assert second.schema == {"type": "string"}
    assert first.askers == second.askers == ("book_visit",)
    assert all(".client" not in f"{each.title}{each.message}" for each in person.questions)


@pytest.mark.parametrize("wording", [{"message": ""}, {"title": "  "}, {"message": 3}])
async def test_a_wording_that_nobody_can_read_is_refused(wording: dict[str, Any]) -> None:
    """A message or title that is empty or not text is refused, and the error names the question's kind."""

    async def ask(visit: Visit, *, context: UserContext) -> str:
        with pytest.raises(DefinitionError, match=r"wait_for\('visit'\): the (message|title) is"):
            context.wait_for("visit", visit, str, **wording)
        return "refused"

    gate = open_gate([only_client(str, ask)], environment=Person())
    assert (await gate.invoke("book_visit", {"street": "Main St"})).value == "refused"


async def test_a_digest_covers_the_title() -> None:
    """Two questions that differ only in their titles have different digests."""

    async def ask(visit: Visit, *, context: UserContext) -> str:
        await context.wait_for("visit", visit, str, message="When?", title=visit.street)
        return "asked"

    digests: set[str] = set()
    for title in ("One", "Two"):
        person = Person(answers={"visit": "now"})
        gate = open_gate([only_client(str, ask)], environment=person, new_id=lambda: "same")
        gate.run.people.deciders._key = b"key"
        await gate.invoke("book_visit", json.dumps({"street": title}))
        [question] = person.questions
        assert question.title == title
        digests.add(question.digest)
    assert len(digests) == 2


# --- events ----------------------------------------------------------------------------------------


async def test_a_handoff_says_when_it_is_parked_and_when_it_is_answered() -> None:
    """`HandoffParked` has the call's id and the public part, `HandoffAnswered` the id and the answer.

    Each is published between the ends of two acts.
    """
    rig = Rig([card_game()], environment=Person(answers={"pick_card": {"index": 1}}))
    await rig.call("pick_card", cards=2)
    [parked], [answered], ended = rig.of(HandoffParked), rig.of(HandoffAnswered), rig.of(ToolInvoked)
    assert (parked.call_id, parked.tool, parked.public) == (ended[-1].call_id, "pick_card", {"backs": 2})
    assert (answered.call_id, answered.tool, answered.answer) == (
        ended[-1].call_id,
        "pick_card",
        {"index": 1},
    )
    order = [rig.events.index(each) for each in (ended[0], parked, ended[1], answered, ended[2])]
    assert order == sorted(order)
    assert parked in rig.session[HandoffParked].all()


async def test_no_event_has_a_secret_of_a_handoff() -> None:
    """Secrets in the public data and in the answer are masked in the events."""

    @dataclass(frozen=True)
    class Login:
        password: SecretStr

    made = Handoff("log_in", "Log in.", params=Login)

    @made.client
    async def ask(login: Login, *, context: ToolContext) -> Login:
        assert login.password.get_secret_value() == "hunter2"
        return Login(SecretStr("hunter3"))

    rig = Rig([made])
    result = await rig.call("log_in", password="hunter2")
    assert result.value.password.get_secret_value() == "hunter3"
    [parked], [answered] = rig.of(HandoffParked), rig.of(HandoffAnswered)
    assert set(parked.public) == set(answered.answer) == {"password"}
    assert "hunter" not in f"{parked} {answered}"


# --- `start` and `finish` --------------------------------------------------------------------------


async def test_an_orchestrator_drives_the_halves_itself() -> None:
    """`start` returns the parked data, which may be stored as JSON. `finish` takes it with the answer and returns the result."""
    game, session, files = card_game(secret="xyzzy"), Session(), MemoryFilesystem()
    heard = RecordingSubscriber(session)
    parked = await game.start(CardDeal(2), session=session, filesystem=files)
    assert isinstance(parked, Parked)
    assert (parked.private, parked.public) == (Deck(["xyzzy 0", "xyzzy 1"]), Offer(2))
    stored = Parked[Any, Any](json.loads('{"cards": ["xyzzy 0", "xyzzy 1"]}'), {"backs": 2}, parked.id)
    result = await game.finish(stored, CardPick(1), session=session, filesystem=files)
    assert result.value == "card 1"
    assert "xyzzy" not in repr(heard.events)
    kinds = [type(each) for each in heard.events]
    assert (kinds.count(HandoffParked), kinds.count(HandoffAnswered)) == (1, 1)


async def test_a_half_takes_the_steps_of_the_gate() -> None:
    """A denied `start` returns a failed result. `finish` refuses an invalid answer, and returns a failed result of `after`."""
    denied = await card_game(capabilities=["fs.write"], effect="irreversible").start(
        CardDeal(2), policies=[CapabilityPolicy({"fs.write": "deny"})], filesystem=MemoryFilesystem()
    )
    assert isinstance(denied, ToolResult)
    assert not denied.success
    with pytest.raises(DefinitionError, match="has already ended"):
        await card_game().finish(denied, CardPick(0))  # pyright: ignore[reportArgumentType]
    files = MemoryFilesystem()
    parked = await card_game().start(CardDeal(2), filesystem=files)
    assert isinstance(parked, Parked)
    wrong: Any = {"index": "one"}
    with pytest.raises(ToolValidationError, match="index"):
        await card_game().finish(parked, wrong, filesystem=files)
    failed = await card_game().finish(parked, CardPick(7), filesystem=files)
    assert failed.message == "There is no card 7."


async def test_a_half_that_needs_params_says_so() -> None:
    """If `after` takes params, `finish` needs them."""
    guess = Handoff("guess", "Guess.", params=CardDeal)

    @guess.after
    async def settle(private: None, guess: int, *, params: CardDeal, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok("right" if guess == params.cards else "wrong")

    parked = await guess.start(CardDeal(3))
    assert isinstance(parked, Parked)
    with pytest.raises(DefinitionError, match=NO_PARAMS):
        await guess.finish(parked, 3)
    assert (await guess.finish(parked, 3, CardDeal(3))).value == "right"


async def test_a_finish_without_params_parses_none() -> None:
    """If `after` takes no params, `finish` needs none, even if the handoff requires some."""
    made = Handoff("book_visit", "Ask when we may come.", params=Visit)

    @made.after
    async def settle(private: None, day: str, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(f"on {day}")

    parked = await made.start(Visit("Main St"))
    assert isinstance(parked, Parked)
    assert (await made.finish(parked, "Monday")).value == "on Monday"


async def test_a_start_may_end_the_handoff() -> None:
    """If `before` returns a `ToolResult`, `start` returns it."""

    async def deal(params: CardDeal, *, context: ToolContext) -> Parked[Deck, Offer] | ToolResult[str]:
        return ToolResult.ok("no cards", "There was nothing to pick.")

    assert await card_game(before=deal).start(CardDeal(0)) == ToolResult(
        "There was nothing to pick.", "no cards"
    )
