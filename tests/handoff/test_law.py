"""The law of handoffs: whatever fails in a tree of handoffs, each one is kept as a whole or not at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from handrail import Handoff, Parked, ToolContext, ToolResult, gather
from handrail.events import ToolInvoked
from handrail.testing import Person
from support.cards import Deal, Deck, Offer, Pick, card_game
from support.rig import Note, Rig

Place = Literal["before", "client", "after"]


@dataclass
class Node:
    """A handoff that calls others in one of its acts, and may fail in one."""

    fails: Place | None
    how: Literal["raises", "says so"]
    calls_in: Place
    at_once: bool
    minds: bool
    """Whether this handoff fails if an inner one does."""
    asks: bool
    """Whether a person answers instead of the handoff's client."""
    inner: list[Node]
    name: str = ""
    begun: list[str] = field(default_factory=list[str])


nodes = st.recursive(
    st.builds(
        Node,
        st.sampled_from([None, None, None, "before", "client", "after"]),
        st.sampled_from(["raises", "says so"]),
        st.just("client"),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.just(list[Node]()),
    ),
    lambda smaller: st.builds(
        Node,
        st.sampled_from([None, None, None, "before", "client", "after"]),
        st.sampled_from(["raises", "says so"]),
        st.sampled_from(["before", "client", "after"]),
        st.booleans(),
        st.booleans(),
        st.just(value=False),
        st.lists(smaller, max_size=3),
    ),
    max_leaves=5,
)


def named(node: Node, name: str = "n") -> list[Node]:
    """Give each node of a tree a unique name, and return all nodes."""
    node.name = name
    return [node, *(each for i, inner in enumerate(node.inner) for each in named(inner, f"{name}_{i}"))]


async def act(node: Node, place: Place, context: ToolContext) -> str | None:
    """Record the act, call the inner handoffs if this is the act that calls them, and fail if the node says so.

    A failure is either raised or returned as its message. Returns None if the act does not fail.
    """
    node.begun.append(place)
    context.session.dispatch(Note(f"{node.name}-{place}"))
    if node.calls_in == place:
        calls = [lambda each=each: context.call(each.name) for each in node.inner]
        if node.at_once:
            results: list[ToolResult[Any]] = list(await gather(*[call() for call in calls]))
        else:
            results = [await call() for call in calls]
        if node.minds and not all(each.success for each in results):
            raise ValueError("an inner handoff failed")
    if node.fails != place:
        return None
    if node.how == "raises" or place == "client":
        raise ValueError("failed on purpose")
    return "it was to fail"


def handoff(node: Node) -> Handoff[Any, Any]:
    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer] | ToolResult[str]:
        why = await act(node, "before", context)
        return ToolResult.error(why) if why else Parked(Deck([]), Offer(1))

    async def choose(offer: Offer, *, context: ToolContext) -> Pick:
        await act(node, "client", context)
        return Pick(0)

    async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        why = await act(node, "after", context)
        return ToolResult.error(why) if why else ToolResult.ok(node.name)

    return card_game(node.name, before=deal, client=None if node.asks else choose, after=settle)


def expected(node: Node) -> tuple[bool, list[str]]:
    """Return whether the node succeeds, and the notes that it leaves in the session."""
    kept: list[str] = []
    places: tuple[Place, ...] = ("before", "client", "after")
    for place in places:
        if place == "client" and node.asks:
            if node.fails == "client":  # the person declines
                return False, []
            continue
        kept.append(f"{node.name}-{place}")
        if node.calls_in == place:
            came = [expected(each) for each in node.inner]
            if node.minds and not all(success for success, _ in came):
                return False, []
            kept += [note for _, notes in came for note in notes]
        if node.fails == place:
            return False, []
    return True, kept


@given(nodes)
async def test_a_tree_of_handoffs_is_kept_whole_or_not_at_all(root: Node) -> None:
    """Every act runs at most once, every start has its end, and exactly the successful work is kept."""
    tree = named(root)

    answers = {each.name: {"index": 0} for each in tree if each.fails != "client"}
    rig = Rig([handoff(each) for each in tree], environment=Person(answers=answers), depth_limit=20)
    result = await rig.call(root.name)
    success, kept = expected(root)
    assert result.success is success
    assert Counter(rig.notes) == Counter(kept)
    assert Counter(event.text for event in rig.of(Note)) == Counter(kept)
    rig.assert_paired()
    for each in tree:
        assert max(Counter(each.begun).values(), default=0) <= 1
        assert each.begun == sorted(each.begun, key=["before", "client", "after"].index)
    ok = [event.tool for event in rig.of(ToolInvoked) if event.status == "ok" and "." not in event.tool]
    assert (root.name in ok) is success
