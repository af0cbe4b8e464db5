"""Only `after` may receive a handoff's private part, which these tests mark and then search for."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from handrail import (
    Adapter,
    AgentEnvironment,
    Handoff,
    HeadlessEnvironment,
    MemoryFilesystem,
    Parked,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    ToolResult,
    TransientError,
    open_gate,
)
from handrail.journal.digest import keyed_digest
from handrail.protocols import Environment
from handrail.session import save
from handrail.testing import Person, RecordingSubscriber
from support.cards import Deal, Deck, Offer, Pick, card_game
from support.planted_secrets import Recording, everything

MARKER = "planted-91c0ffee"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Capture everything that is logged, at every level."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    root = logging.getLogger()
    root.addHandler(handler)
    monkeypatch.setattr(root, "level", logging.DEBUG)
    yield text
    root.removeHandler(handler)


class Watching(Person):
    """A person who approves everything and picks card 1, and whose `questions` record what they were shown."""

    def __init__(self) -> None:
        super().__init__(approve=True, answers={"pick_card": {"index": 1}, "which": {"index": 1}})


async def with_wait_for(offer: Offer, *, context: ToolContext) -> Pick:
    context.report_progress(f"looking at {offer}", done=1, total=2)
    context.emit(offer)
    if context.wait_for:
        return await context.wait_for("which", offer, Pick)
    if context.prompt_model:
        return await context.prompt_model(f"Choose from {offer}", Pick)
    return Pick(0)


async def with_approval(deck: Deck, pick: Pick, *, params: Deal, context: ToolContext) -> ToolResult[str]:
    """Request approval in an `after` that is given the marker."""
    assert MARKER in deck.cards[pick.index]
    approval = await context.request_approval("Turn the card?")
    return ToolResult.ok(f"turned: {approval.approved}")


async def raising(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
    try:
        raise KeyError(deck.cards[0])
    except KeyError:
        raise ValueError(f"can't find {deck.cards[0]}") from None


async def raising_a_chain(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
    try:
        raise KeyError(deck.cards[0])
    except KeyError as error:
        raise ValueError(str(deck)) from error


def raising_in_a_thread(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
    raise ValueError(str(deck))


async def passing(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
    raise TransientError(f"not yet: {deck}", retry_after=0)


async def raising_an_exit(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
    raise GeneratorExit(f"{deck.cards[0]} was picked")


def raising_an_exit_in_a_thread(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
    raise GeneratorExit(f"{deck.cards[0]} was picked")


async def raising_before(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
    raise ValueError(f"could not deal {MARKER}")


async def parking_badly(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
    cards: Any = [MARKER, 7]
    return Parked(Deck(cards), Offer(1))


async def swapping(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
    public: Any = Deck([MARKER])
    return Parked(Deck([MARKER]), public)


GAMES: dict[str, dict[str, Any]] = {
    "asked directly": {"after": with_approval},
    "by a client": {"client": with_wait_for, "after": with_approval},
    "after raises": {"client": with_wait_for, "after": raising},
    "after raises from another error": {"client": with_wait_for, "after": raising_a_chain},
    "after raises GeneratorExit": {"client": with_wait_for, "after": raising_an_exit},
    "after raises GeneratorExit in a thread": {"client": with_wait_for, "after": raising_an_exit_in_a_thread},
    "after raises in a thread": {"client": with_wait_for, "after": raising_in_a_thread},
    "after raises a passing failure": {"client": with_wait_for, "after": passing},
    "before raises": {"before": raising_before},
    "private does not fit": {"before": parking_badly},
    "public is the private": {"before": swapping},
    "irreversible": {"client": with_wait_for, "after": raising, "effect": "irreversible"},
}


def environment(kind: str) -> tuple[Environment, ScriptedModel]:
    choosing = ScriptedModel(lambda _: '{"index": 1}')
    if kind == "model":
        return AgentEnvironment(choosing), choosing
    return (Watching() if kind == "person" else HeadlessEnvironment()), choosing


@pytest.mark.parametrize("who", ["person", "model", "nobody"])
@pytest.mark.parametrize("game", GAMES)
def test_the_private_part_is_shown_nowhere(game: str, who: str, logged: io.StringIO) -> None:
    """No event, question, model request, log line, journal row, saved session or response contains the private part."""
    handoff = card_game(secret=MARKER, **GAMES[game])
    there, choosing = environment(who)
    model = ScriptedModel([ToolCall("pick_card", {"cards": 2}), "Done."])
    session, journal = Session(), Recording()
    with RecordingSubscriber(session) as seen:
        response = (
            Adapter(model, environment=there, journal=journal)
            .evaluate(Prompt("p", "Play.", tools=[handoff]), session=session, filesystem=MemoryFilesystem())
            .wait()
        )
    seen.assert_paired()
    assert seen.statuses()[0][0] == "pick_card.before"
    shown = [
        *(
            everything(seen.events),
            everything(journal.rows),
            everything(asyncio.run(journal.questions.open())),
        ),
        *(everything(model.requests), everything(choosing.requests), everything(response)),
        *(save(session).decode(), repr(handoff), logged.getvalue()),
        everything(getattr(there, "questions", ())),
    ]
    for text in shown:
        assert MARKER not in text


def test_the_marker_would_be_found() -> None:
    """If `after` puts the marker into its result, the same search finds it, so the search works."""

    async def telling(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(deck.cards[pick.index])

    session = Session()
    with RecordingSubscriber(session) as seen:
        Adapter(ScriptedModel([ToolCall("pick_card"), "Done."]), environment=Watching()).evaluate(
            Prompt("p", "Play.", tools=[card_game(secret=MARKER, after=telling)]),
            session=session,
            filesystem=MemoryFilesystem(),
        ).wait()
    assert MARKER in everything(seen.events)


def test_the_repr_of_what_is_parked_shows_the_public_part_only() -> None:
    """The repr of `Parked` shows only the public part."""
    assert repr(Parked(Deck([MARKER]), Offer(1))) == "Parked(public=Offer(backs=1))"


def test_what_an_act_raised_is_told_by_its_type_and_place(logged: io.StringIO) -> None:
    """An act's exception is reported with its type and place, but without its message."""
    session = Session()
    with RecordingSubscriber(session) as seen:
        Adapter(ScriptedModel([ToolCall("pick_card"), "Done."])).evaluate(
            Prompt("p", "Play.", tools=[card_game(secret=MARKER, client=with_wait_for, after=raising)]),
            session=session,
            filesystem=MemoryFilesystem(),
        ).wait()
    from handrail.errors import ActFailed
    from handrail.events import ToolInvoked

    failed = next(each for each in seen.of(ToolInvoked) if each.tool == "pick_card.after")
    assert failed.result.message == (
        "pick_card.after failed: it raised ValueError (its message is withheld, as it may contain private data)"
    )
    assert isinstance(failed.error, ActFailed)
    assert failed.error.raised == "ValueError"
    assert failed.error.__context__ is None
    assert "test_privacy.py" in failed.error.where[-1]
    assert failed.error.where[-1].endswith("in raising")


def test_a_private_part_that_does_not_fit_is_named_by_place() -> None:
    """The error for an invalid private part names the place of the mistake, but not the value there."""
    gate = open_gate([card_game(before=parking_badly)])
    message = gate.invoke("pick_card").wait().message
    assert message.startswith("pick_card.before failed: the private part")
    assert message.endswith(", Deck, at cards[1].")
    assert "7" not in message


def test_a_digest_gives_nothing_away() -> None:
    """A digest does not contain the value it was made from."""
    assert MARKER not in keyed_digest(b"key", MARKER)


def test_a_handoff_whose_private_part_has_a_secret_keeps_it() -> None:
    """`after` receives the private part with its secrets unmasked."""
    from dataclasses import dataclass

    from pydantic import SecretStr

    @dataclass
    class Login:
        password: SecretStr

    login = Handoff("login", "Log in.", effect="pure")

    @login.before
    def begin(params: None, *, context: ToolContext) -> Parked[Login, str]:
        return Parked(Login(SecretStr(MARKER)), "Who are you?")

    @login.client
    def who(question: str, *, context: ToolContext) -> Login:
        return Login(SecretStr(MARKER))

    @login.after
    def end(private: Login, answer: Login, *, context: ToolContext) -> ToolResult[bool]:
        return ToolResult.ok(
            private.password.get_secret_value() == answer.password.get_secret_value() == MARKER
        )

    assert open_gate([login]).invoke("login").wait().value is True
