"""A handoff for tests, in which a person picks one of several face-down cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from handrail import Handoff, Parked, ToolContext, ToolResult
from support.rig import leave_traces


@dataclass(frozen=True)
class Deal:
    """The arguments of the model's call."""

    cards: int = 3


@dataclass(frozen=True)
class Deck:
    """The private part of what `before` returns: the cards of the deck."""

    cards: list[str]


@dataclass(frozen=True)
class Offer:
    """The public part of what `before` returns: the number of cards offered."""

    backs: int


@dataclass(frozen=True)
class Pick:
    """The person's answer."""

    index: int


def card_game(
    name: str = "pick_card",
    *,
    client: Any = None,
    before: Any = None,
    after: Any = None,
    secret: str = "ace",
    **options: Any,
) -> Handoff[Deal, Pick]:
    """Make a handoff whose `before` and `after` leave traces, unless the caller replaces them."""
    options.setdefault("effect", "staged")
    game = Handoff(
        name,
        "Let the other side pick a card.",
        params=Deal,
        answer=Pick,
        **options,
    )

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        leave_traces(context, f"{name}-dealt")
        return Parked(Deck([f"{secret} {index}" for index in range(params.cards)]), Offer(params.cards))

    async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        leave_traces(context, f"{name}-settled")
        if not 0 <= pick.index < len(deck.cards):
            return ToolResult.error(f"There is no card {pick.index}.")
        return ToolResult.ok(f"card {pick.index}")

    game.before(before or deal)
    if client is not None:
        game.client(client)
    game.after(after or settle)
    return game
