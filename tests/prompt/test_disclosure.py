"""Sections shown as summaries, and what opening them adds to the prompt."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Deadline, MarkdownSection, Prompt, RateLimitPolicy, ToolExample, tool
from handrail.errors import ToolValidationError
from handrail.prompt import OPENER, ClosedSection, ScopedPolicy, Visibility
from prompt.prompt_trees import Drawn, around, in_full, made, tool_names, trees


@tool(examples=[ToolExample("Cats", {"text": "cats"}, ["Tom"])])
def search(text: str) -> list[str]:
    """Search."""
    return []


@tool
def rank(hits: list[str]) -> list[str]:
    """Rank."""
    return hits


@tool
def answer(text: str) -> str:
    """Answer."""
    return text


@dataclass
class Topic:
    name: str


POLICY = RateLimitPolicy(5, 60)


def guidance(**changed: Any) -> Prompt[None]:
    """Return a prompt with an open section, a closed one inside it, and another closed one inside that."""
    ranking = MarkdownSection(
        "Ranking", "rank", "Rank by $name.", tools=[rank], summary="How to rank.", visibility="summary"
    )
    style = MarkdownSection("Style", "style", "Be kind.")
    searching = MarkdownSection[Topic](
        "Search",
        "search",
        "Search for $name.",
        tools=[search],
        policies=[POLICY],
        children=[ranking, style],
        summary="How to search for $name.",
        visibility="summary",
    )
    return Prompt(
        "guide", [MarkdownSection("Guidance", "guidance", "Hello.", children=[searching], tools=[answer])]
    )


CLOSED = guidance().render(Topic("cats"))


def names(tools: Any) -> list[str]:
    return [tool.name for tool in tools]


def test_a_summary_hides_body_children_and_tools_and_says_how_to_open_it():
    """A closed section shows its heading, its summary with values filled in, and the call that opens it."""
    assert CLOSED.text == (
        "## Guidance\n\nHello.\n\n"
        "### Search\n\nHow to search for cats.\n\n"
        'Call open_sections with {"sections": ["guidance.search"]} to see it in full.'
    )
    assert names(CLOSED.tools) == ["answer"]
    assert CLOSED.closed == (ClosedSection("guidance.search", "Search"),)
    assert OPENER == "open_sections"


def test_opening_gives_the_section_in_full_and_the_tools_that_came_with_it():
    """An opened section is shown in full with its tools, and its children follow their own visibility."""
    opening = CLOSED.open(["guidance.search"])
    assert opening.text == (
        "### Search\n\nSearch for cats.\n\n"
        'Examples:\n\n- search: Cats\n  input: {"text":"cats"}\n  output: ["Tom"]\n\n'
        "#### Ranking\n\nHow to rank.\n\n"
        'Call open_sections with {"sections": ["guidance.search.rank"]} to see it in full.\n\n'
        "#### Style\n\nBe kind."
    )
    assert names(opening.tools) == ["search"]
    assert names(opening.rendered.tools) == ["answer", "search"]
    assert opening.rendered.closed == (ClosedSection("guidance.search.rank", "Ranking"),)
    assert opening.text in opening.rendered.text


def test_opening_never_changes_what_was_rendered():
    """Opening a section does not change the earlier rendering, which may already have been sent."""
    before = (CLOSED.text, CLOSED.tools, CLOSED.closed, CLOSED.opened)
    CLOSED.open(["guidance.search"]).rendered.open(["guidance.search.rank"])
    assert (CLOSED.text, CLOSED.tools, CLOSED.closed, CLOSED.opened) == before


def test_a_section_in_a_closed_one_opens_both():
    """Opening a section inside a closed one opens both, and the text begins with the outer one."""
    opening = CLOSED.open(["guidance.search.rank"])
    assert opening.text.startswith("### Search\n\nSearch for cats.\n")
    assert "#### Ranking\n\nRank by cats.\n\n#### Style\n\nBe kind." in opening.text
    assert names(opening.tools) == ["search", "rank"]
    assert opening.rendered.closed == ()
    assert opening.rendered.opened == {"guidance.search", "guidance.search.rank"}


def test_a_section_in_full_inside_a_closed_one_opens_that():
    """Opening a section that is not closed itself, but lies inside a closed one, opens the closed one."""
    opening = CLOSED.open(["guidance.search.style"])
    assert opening.rendered == CLOSED.open(["guidance.search"]).rendered


def test_several_are_opened_at_once_in_the_order_of_the_tree():
    """Sections that are opened together are each shown once, in the order of the tree."""
    sections = [MarkdownSection(key, key, f"Body {key}", summary="S", visibility="summary") for key in "abc"]
    rendered = Prompt("p", sections).render()
    opening = rendered.open(["c", "a", "c"])
    assert opening.text == "## a\n\nBody a\n\n## c\n\nBody c"
    assert [closed.path for closed in opening.rendered.closed] == ["b"]


def test_policies_hold_before_their_section_is_open():
    """A closed section's policies already apply, and opening it adds no others."""
    wanted = (ScopedPolicy(POLICY, frozenset({"search", "rank"})),)
    opening = CLOSED.open(["guidance.search"])
    assert CLOSED.policies == opening.rendered.policies == wanted


def test_the_deadline_and_the_values_stay_those_of_the_rendering():
    """Opening a section does not read the params or evaluate conditions again, and keeps the deadline."""
    answers: list[Visibility] = ["full", "summary"]
    section = MarkdownSection[Topic]("A", "a", "$name", summary="S", visibility=answers.pop)
    deadline = Deadline.after(3600)
    topic = Topic("cats")
    rendered = Prompt("p", [section]).render(topic, deadline=deadline)
    topic.name = "dogs"
    opening = rendered.open("a")
    assert (opening.text, opening.rendered.deadline) == ("## A\n\ncats", deadline)


ALL_SHOWN = "Every section is shown in full."
OPEN = CLOSED.open(["guidance.search.rank"]).rendered


@pytest.mark.parametrize(
    ("rendered", "paths", "message"),
    [
        (CLOSED, ["search"], "there is no section 'search'. Sections that can be opened: 'guidance.search'."),
        (
            CLOSED,
            ["guidance"],
            "section 'guidance' is already open. Sections that can be opened: 'guidance.search'.",
        ),
        (
            CLOSED,
            ["guidance.search", "x", "guidance"],
            "there is no section 'x'; section 'guidance' is already open. Sections that can be opened: 'guidance.search'.",
        ),
        (CLOSED, [], "no section is named. Sections that can be opened: 'guidance.search'."),
        (
            OPEN,
            ["guidance.search"],
            f"section 'guidance.search' is already open. {ALL_SHOWN}",
        ),
        (OPEN, [""], f"there is no section ''. {ALL_SHOWN}"),
    ],
    ids=["unknown", "open", "several", "none", "opened-before", "empty"],
)
def test_what_can_not_be_opened_is_said_for_the_model(rendered: Any, paths: list[str], message: str):
    """The error says what is wrong with the paths, and which sections can be opened."""
    with pytest.raises(ToolValidationError) as caught:
        rendered.open(paths)
    assert str(caught.value) == message
    assert caught.value.problems


def test_a_disabled_section_can_not_be_opened():
    """A disabled section can't be opened, and the error is the same as for an unknown section."""
    sections = [
        MarkdownSection("A", "a", "", summary="S", visibility="summary"),
        MarkdownSection("B", "b", "", summary="S", visibility="summary", enabled=False),
    ]
    with pytest.raises(
        ToolValidationError, match=r"^there is no section 'b'\. Sections that can be opened: 'a'\.$"
    ):
        Prompt("p", sections).render().open(["b"])


@given(trees, st.data())
def test_opening_and_rendering_opened_are_the_same(tree: list[Drawn], data: st.DataObject):
    """Opening sections in any order gives the same text, tools and closed sections as `render(opened=...)`."""
    prompt = made(tree)
    rendered = prompt.render()
    for _ in range(3):
        if not rendered.closed:
            break
        chosen = data.draw(st.lists(st.sampled_from(rendered.closed), min_size=1, max_size=2, unique=True))
        paths = [closed.path for closed in chosen]
        opening = rendered.open(paths)
        again = prompt.render(opened=[*rendered.opened, *paths])
        assert (opening.rendered.text, opening.rendered.closed) == (again.text, again.closed)
        assert opening.rendered.opened == again.opened == rendered.opened | set(paths)
        assert names(opening.rendered.tools) == names(again.tools)
        before = set(names(rendered.tools))
        assert names(opening.tools) == [name for name in names(again.tools) if name not in before]
        rendered = opening.rendered
    shown = in_full(tree, rendered.opened)
    assert names(rendered.tools) == [name for path, one in shown for name in tool_names(one, path)]


@given(trees)
def test_what_opening_shows_is_what_was_hidden(tree: list[Drawn]):
    """The text of an opening has each newly shown body exactly once, and none that was visible before."""
    rendered = made(tree).render()
    for closed in rendered.closed:
        opening = rendered.open([closed.path])
        new = set(bodies(opening.rendered.text)) - set(bodies(rendered.text))
        assert sorted(bodies(opening.text)) == sorted(new)
        assert f"Body {closed.path}." in new
        assert opening.text in opening.rendered.text


@given(trees)
def test_the_call_that_a_summary_names_opens_it(tree: list[Drawn]):
    """The call that a section's summary names opens exactly that section."""
    rendered = made(tree).render()
    calls = re.findall(rf"^Call {OPENER} with (.*) to see it in full\.$", rendered.text, re.MULTILINE)
    assert [json.loads(call)["sections"] for call in calls] == [[closed.path] for closed in rendered.closed]
    for call in calls:
        [path] = json.loads(call)["sections"]
        assert rendered.open([path]).rendered.opened == {path}
        assert not set(around(path)[:-1]) & {closed.path for closed in rendered.closed}


def bodies(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("Body ")]
