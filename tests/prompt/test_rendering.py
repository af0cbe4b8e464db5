"""Rendering prompts: what a model sees, and what it depends on."""

import enum
import operator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from handrail import (
    Deadline,
    MarkdownSection,
    Prompt,
    RateLimitPolicy,
    Section,
    SequentialDependencyPolicy,
    Session,
    Tool,
    ToolContext,
    ToolExample,
    tool,
)
from handrail.errors import PromptDefinitionError, PromptRenderError, PromptValidationError
from handrail.prompt import RenderedPrompt, ScopedPolicy
from handrail.prompt.section import template_of
from handrail.protocols import PromptView, RenderedPromptView
from prompt.prompt_trees import Drawn, enabled, in_full, made, tool_names, trees, walk

T = TypeVar("T")


@dataclass
class Trip:
    city: str
    days: int = 2
    careful: bool = False


class Stay(BaseModel):
    hotel: str
    nights: int


@tool(examples=[ToolExample("Rain", {"city": "Oslo"}, 12.5), ToolExample("Sun", {"city": "Rome"}, 0.0)])
def weather(city: str) -> float:
    """Tell the rain in a city."""
    return 0.0


@tool
def trains(city: str) -> list[str]:
    """List the trains to a city."""
    return []


@tool
def hotels(city: str) -> list[str]:
    """List the hotels of a city."""
    return []


UNCALLABLE = Tool[Any, Any]("later", "Not there yet.", examples=(ToolExample("One", {}, None),))


def sections_of_a_trip() -> list[Section[Any]]:
    return [
        MarkdownSection[Trip](
            "Task",
            "task",
            """
            Plan $days days in ${city}s.

                indented $$5
            """,
            tools=[weather],
            children=[MarkdownSection("Trains", "trains", "Prefer trains.", tools=[trains])],
        ),
        MarkdownSection[Trip](
            "Care", "care", "Be careful.", tools=[hotels], enabled=lambda params: params.careful
        ),
    ]


TRIP = Prompt("trip", sections_of_a_trip())


# --- text ----------------------------------------------------------------------------------------


def test_the_text_is_markdown_in_the_order_of_the_tree():
    """A rendered prompt has headings by depth, values in place of placeholders, and each tool's examples in its section."""
    assert TRIP.render(Trip("Rome", 3)).text == (
        "## Task\n\nPlan 3 days in Romes.\n\n    indented $5\n\n"
        "Examples:\n\n"
        '- weather: Rain\n  input: {"city":"Oslo"}\n  output: 12.5\n'
        '- weather: Sun\n  input: {"city":"Rome"}\n  output: 0.0\n\n'
        "### Trains\n\nPrefer trains."
    )


def test_a_prompt_given_as_a_text_has_no_heading():
    """A prompt given as text is rendered without a heading, followed by its tools' examples."""
    prompt = Prompt("guide", "Answer briefly.", tools=[trains])
    assert prompt.render().text == "Answer briefly."
    assert [section.key for section in prompt.sections] == ["instructions"]
    text = Prompt("guide", "Answer briefly.", tools=[weather]).render().text
    assert text.startswith("Answer briefly.\n\n## Examples\n\n- weather: Rain\n")


def test_headings_stop_at_the_sixth_level():
    """Headings below the sixth level stay at the sixth, because Markdown has no seventh."""
    inner = MarkdownSection("Deepest", "k", "Body")
    for _ in range(7):
        inner = MarkdownSection("Outer", "k", "", children=[inner])
    assert Prompt("deep", [inner]).render().text.endswith("\n\n###### Outer\n\n###### Deepest\n\nBody")


def test_a_section_can_be_of_another_kind():
    """A subclass of `Section` can define its own heading."""

    @dataclass(frozen=True)
    class Tagged(Section[T]):
        def heading(self, depth: int) -> str:
            return f"<{self.key} depth={depth}>"

    prompt = Prompt(
        "tags", [Tagged("A", "a", "Body", children=[Tagged[Trip]("B", "b", "$city $days $careful")])]
    )
    assert prompt.render(Trip("Rome")).text == "<a depth=0>\n\nBody\n\n<b depth=1>\n\nRome 2 False"


def test_examples_are_written_as_the_model_would_send_them():
    """An example's input is written as the model would send it. A missing input is written as {}."""

    @dataclass
    class Query:
        text: str

    def search(params: Query, *, context: ToolContext) -> Any: ...
    def ping(params: None, *, context: ToolContext) -> Any: ...

    searching = Tool("search", "Search.", search, examples=(ToolExample("One", Query("x"), {"a": None}),))
    pinging = Tool("ping", "Ping.", ping, examples=(ToolExample("Two", None, "pong"),))
    text = Prompt("p", "Text.", tools=[searching, pinging]).render().text
    assert '- search: One\n  input: {"text":"x"}\n  output: {"a":null}\n' in text
    assert text.endswith('- ping: Two\n  input: {}\n  output: "pong"')


# --- templates -----------------------------------------------------------------------------------

names = st.sampled_from(["a", "b_2", "größe", "_x"])
pieces = st.lists(st.tuples(names, st.sampled_from(["bare", "braced"]), st.text()), max_size=5)


@given(st.text(), pieces, st.dictionaries(names, st.text(), min_size=4))
def test_values_are_put_in_as_they_are(start: str, rest: list[tuple[str, str, str]], values: dict[str, str]):
    """Text keeps its characters, `$$` becomes a dollar sign, and dollar signs in a value are not expanded."""
    template, wanted = "x" + start.replace("$", "$$"), "x" + start
    for name, form, after in rest:
        # A letter right after a bare name would be part of the name.
        after = f" {after}" if form == "bare" else after
        template += (f"${name}" if form == "bare" else f"${{{name}}}") + after.replace("$", "$$")
        wanted += values[name] + after
    template, wanted = template + "|", wanted + "|"
    assert template_of(template).fill(values) == wanted
    assert template_of(template).names == {name for name, _, _ in rest}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(3, "3"), (None, "None"), (["$x"], "['$x']"), (enum.Enum("Colour", "RED").RED, "Colour.RED")],
)
def test_values_are_made_text_by_str(value: Any, shown: str):
    """Values are inserted as the text that `str()` returns for them."""

    @dataclass
    class Any1:
        x: Any

    prompt = Prompt("p", [MarkdownSection[Any1]("T", "t", "<$x>")])
    assert prompt.render(Any1(value)).text == f"## T\n\n<{shown}>"


# --- params --------------------------------------------------------------------------------------


def test_params_can_be_a_mapping():
    """Params given as a mapping are rendered like an instance, and conditions get an instance."""
    assert TRIP.render({"city": "Rome", "careful": True}).text == TRIP.render(Trip("Rome", 2, True)).text


def test_params_can_be_a_pydantic_model():
    """Params of a pydantic type may be given as an instance or as a mapping."""
    prompt = Prompt("stay", [MarkdownSection[Stay]("Stay", "stay", "$nights nights at $hotel")])
    assert prompt.params_type is Stay
    assert (
        prompt.render(Stay(hotel="Ritz", nights=2)).text == prompt.render({"hotel": "Ritz", "nights": 2}).text
    )
    assert "2 nights at Ritz" in prompt.render({"hotel": "Ritz", "nights": 2}).text


PASS_A_TRIP = "Pass `Trip(...)`, or a mapping with its fields."


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (TRIP, None, f"prompt 'trip': no params were passed. {PASS_A_TRIP}"),
        (TRIP, "Rome", f"prompt 'trip': its params are a str. {PASS_A_TRIP}"),
        (TRIP, Stay(hotel="a", nights=1), f"prompt 'trip': its params are a Stay. {PASS_A_TRIP}"),
        (
            TRIP,
            {"days": "3", "town": 1},
            "prompt 'trip': its params do not fit Trip: city: required, and missing; days: must be a whole number, "
            'got the text "3"; town: unknown; remove it. Known here: careful, city, days. Correct the mapping.',
        ),
        (
            Prompt("plain", "Text."),
            Trip("Rome"),
            "prompt 'plain': params were passed (a Trip), but its sections use none. "
            "Leave them out, or write MarkdownSection[Params](...).",
        ),
    ],
    ids=["missing", "text", "other-type", "mapping", "none-wanted"],
)
def test_wrong_params_are_refused(prompt: Prompt[None], params: Any, message: str):
    """Wrong params are refused. The error has the prompt's name, the problem and what to do."""
    with pytest.raises(PromptRenderError) as caught:
        prompt.render(params)
    assert str(caught.value) == message
    assert caught.value.prompt == prompt.name
    assert isinstance(caught.value, ValueError)


def test_a_params_type_that_no_schema_describes_takes_instances():
    """If the params type has no schema, instances are accepted, and a mapping is refused with the reason."""

    @dataclass
    class Opaque:
        part: "operator.itemgetter[Any]"

    prompt = Prompt("p", [MarkdownSection[Opaque]("T", "t", "$part")])
    assert "itemgetter" in prompt.render(Opaque(operator.itemgetter(1))).text
    with pytest.raises(
        PromptRenderError, match=r"a mapping can't be checked: .*\. Pass `.*Opaque\(\.\.\.\)` itself\."
    ):
        prompt.render({"part": 1})


# --- conditions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    name: str


def test_conditions_are_asked_at_every_rendering():
    """A condition is evaluated at every rendering.

    It may take the params, the session, both in either order, or neither.
    """
    on = [True]

    def by_both(session: Any, params: Trip) -> bool:
        return params.careful and session[Mode].latest() is not None

    prompt = Prompt(
        "p",
        [
            MarkdownSection[Trip]("A", "a", "$city $days", enabled=lambda params: params.days > 1),
            MarkdownSection("B", "b", "", enabled=lambda session: session[Mode].latest() is not None),
            MarkdownSection[Trip]("C", "c", "", enabled=by_both),
            MarkdownSection("D", "d", "", enabled=lambda: on[0]),
        ],
    )
    session = Session()

    def shown(params: Trip) -> str:
        return prompt.render(params, session=session).text

    assert shown(Trip("Rome", 2)) == "## A\n\nRome 2\n\n## D"
    assert shown(Trip("Rome", 1, True)) == "## D"
    session.dispatch(Mode("fast"))
    assert shown(Trip("Rome", 1, True)) == "## B\n\n## C\n\n## D"
    on[0] = False
    assert shown(Trip("Rome", 1)) == "## B"


def failing(params: Any) -> bool:
    raise KeyError("nothing there.")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"enabled": lambda session: True},
            "prompt 'p': `enabled` of section 'a.b' asks for the session, and there is none. Pass `session=`.",
        ),
        (
            {"enabled": failing},
            "prompt 'p': `enabled` of section 'a.b' raised KeyError: 'nothing there.'. Correct the function.",
        ),
        (
            {"enabled": lambda params: params.city},
            "prompt 'p': `enabled` of section 'a.b' returned 'Rome'. It must return True or False.",
        ),
        (
            {"enabled": lambda: 1},
            "prompt 'p': `enabled` of section 'a.b' returned 1. It must return True or False.",
        ),
        (
            {"visibility": lambda: "ful", "summary": "S"},
            "prompt 'p': `visibility` of section 'a.b' returned 'ful'. It must return 'full' or 'summary'.",
        ),
        (
            {"visibility": lambda: ["full"], "summary": "S"},
            "prompt 'p': `visibility` of section 'a.b' returned ['full']. It must return 'full' or 'summary'.",
        ),
    ],
    ids=["no-session", "raises", "text", "one", "misspelt", "list"],
)
def test_a_condition_that_fails_is_named(changed: dict[str, Any], message: str):
    """The error for a condition that fails names the prompt, the section and the problem."""
    inner = MarkdownSection[Trip]("B", "b", "$city $days $careful", **changed)
    prompt = Prompt("p", [MarkdownSection("A", "a", "", children=[inner])])
    with pytest.raises(PromptRenderError) as caught:
        prompt.render(Trip("Rome"))
    assert str(caught.value) == message
    assert isinstance(caught.value.__cause__, KeyError | None)


def test_a_condition_below_a_disabled_section_is_not_asked():
    """A condition below a disabled section is not evaluated, because the whole subtree is disabled."""
    inner = MarkdownSection[Trip]("B", "b", "$city $days $careful", enabled=failing)
    prompt = Prompt(
        "p", [MarkdownSection("A", "a", "", children=[inner], enabled=False), MarkdownSection("C", "c", "")]
    )
    assert prompt.render(Trip("Rome")).text == "## C"


@given(trees)
def test_a_disabled_subtree_never_appears(tree: list[Drawn]):
    """No text, tool or summary of a disabled subtree is shown, even if all enabled sections are opened."""
    prompt, alive = made(tree), enabled(tree)
    everything = prompt.render(opened=list(alive))
    assert everything.closed == ()
    for rendered in (prompt.render(), everything):
        for path, drawn in walk(tree):
            if path in alive:
                continue
            assert f"Body {path}." not in rendered.text
            assert f"Summary {path}." not in rendered.text
            assert not {tool.name for tool in rendered.tools} & set(tool_names(drawn, path))
            assert path not in {closed.path for closed in rendered.closed}


@given(trees)
def test_rendering_is_deterministic_and_shows_what_it_must(tree: list[Drawn]):
    """Equal prompts always render the same text, with the bodies and tools of exactly the sections that are enabled and open."""
    first, second = made(tree), made(tree)
    rendered = first.render()
    assert (rendered.text, rendered.closed) == (second.render().text, second.render().closed)
    assert [tool.name for tool in rendered.tools] == [tool.name for tool in second.render().tools]
    again = first.render()
    assert (again.text, again.tools, again.closed) == (rendered.text, rendered.tools, rendered.closed)
    shown = in_full(tree)
    assert [tool.name for tool in rendered.tools] == [
        name for path, one in shown for name in tool_names(one, path)
    ]
    bodies = [line for line in rendered.text.splitlines() if line.startswith("Body ")]
    assert bodies == [f"Body {path}." for path, _ in shown]


# --- tools ---------------------------------------------------------------------------------------


def test_tools_come_in_the_order_of_declaration():
    """Tools come in the order of their declaration, without those of disabled sections and those without a handler."""
    prompt = Prompt("trip", sections_of_a_trip(), tools=[UNCALLABLE])
    careful = prompt.render(Trip("Rome", careful=True))
    assert [tool.name for tool in careful.tools] == ["weather", "trains", "hotels"]
    assert [tool.name for tool in prompt.render(Trip("Rome")).tools] == ["weather", "trains"]


def test_a_tool_without_a_handler_is_declared_but_not_offered():
    """If a tool has no handler, neither the tool nor its examples are shown, but its name is taken."""
    rendered = Prompt("p", "Text.", tools=[UNCALLABLE]).render()
    assert (rendered.tools, rendered.text) == ((), "Text.")
    with pytest.raises(PromptValidationError):
        Prompt("p", "Text.", tools=[UNCALLABLE, UNCALLABLE])


def test_two_tools_of_one_name_are_refused_where_both_are_enabled():
    """Two tools with the same name are refused if both are enabled, and the error names both places."""

    def one(name: str, condition: Any) -> Section[Any]:
        return MarkdownSection[Trip](name, name, "$city $days $careful", tools=[weather], enabled=condition)

    inner = one("b", lambda params: params.days > 1)
    prompt = Prompt(
        "p", [one("a", lambda params: params.careful), MarkdownSection("C", "c", "", children=[inner])]
    )
    assert [tool.name for tool in prompt.render(Trip("Rome")).tools] == ["weather"]
    with pytest.raises(PromptValidationError) as caught:
        prompt.render(Trip("Rome", 2, True))
    assert (caught.value.tool, caught.value.places) == ("weather", ("section 'a'", "section 'c.b'"))


def test_two_tools_of_one_name_are_refused_though_one_is_not_shown_yet():
    """Two tools with the same name are refused even if one of them is in a closed section."""
    hidden = MarkdownSection(
        "B", "b", "", tools=[weather], enabled=lambda: True, summary="S", visibility="summary"
    )
    prompt = Prompt("p", [MarkdownSection("A", "a", "", tools=[weather]), hidden])
    with pytest.raises(PromptValidationError, match="section 'a' and in section 'b'"):
        prompt.render()


# --- policies ------------------------------------------------------------------------------------


def test_a_policy_decides_on_the_tools_of_its_section_and_those_below():
    """A section's policy applies to the tools of the section and its subsections, and a prompt's policy to all tools."""
    every, outer, inner = (RateLimitPolicy(5, 60, name=name) for name in ("every", "outer", "inner"))
    below = MarkdownSection("B", "b", "", tools=[trains], policies=[inner])
    prompt = Prompt(
        "p",
        [MarkdownSection("A", "a", "", tools=[weather], policies=[outer], children=[below])],
        tools=[hotels],
        policies=[every],
    )
    policies = prompt.render().policies
    assert policies == (
        ScopedPolicy(every, None),
        ScopedPolicy(outer, frozenset({"weather", "trains"})),
        ScopedPolicy(inner, frozenset({"trains"})),
    )
    assert [policy.decides_on("weather") for policy in policies] == [True, True, False]


def test_a_policy_declared_twice_is_one_policy():
    """A policy that is declared in several places is one policy, and applies to the tools of all of them."""
    shared = RateLimitPolicy(5, 60)
    sections = [
        MarkdownSection("A", "a", "", tools=[weather], policies=[shared]),
        MarkdownSection("B", "b", "", tools=[trains], policies=[shared]),
    ]
    assert Prompt("p", sections).render().policies == (
        ScopedPolicy(shared, frozenset({"weather", "trains"})),
    )
    assert Prompt("p", sections, policies=[shared]).render().policies == (ScopedPolicy(shared, None),)


def test_two_policies_of_one_name_are_refused():
    """Two policies with the same name are refused if both are enabled, because their state is stored by name."""
    sections = [
        MarkdownSection("A", "a", "", policies=[RateLimitPolicy(5, 60)]),
        MarkdownSection[Trip](
            "B", "b", "", policies=[RateLimitPolicy(6, 60)], enabled=lambda params: params.careful
        ),
        MarkdownSection[Trip]("C", "c", "$city $days"),
    ]
    prompt = Prompt("p", sections)
    prompt.render(Trip("Rome"))
    with pytest.raises(PromptDefinitionError, match="two policies are named 'rate_limit'"):
        prompt.render(Trip("Rome", careful=True))


def test_a_disabled_section_takes_its_policies_with_it():
    """The policies in a disabled section and its subsections do not apply."""
    policy = SequentialDependencyPolicy({"trains": {"weather"}})
    inner = MarkdownSection("B", "b", "", tools=[trains], policies=[policy])
    prompt = Prompt("p", [MarkdownSection("A", "a", "", children=[inner], enabled=False)])
    assert prompt.render().policies == ()


# --- reuse of renderings -------------------------------------------------------------------------


def test_a_prompt_that_depends_on_nothing_is_rendered_once():
    """A prompt without params or conditions is rendered once for each set of opened sections, whatever the session and deadline."""
    prompt = Prompt("p", [MarkdownSection("A", "a", "Text", summary="S", visibility="summary")])
    assert prompt.render() is prompt.render()
    assert prompt.render(session=Session()) is prompt.render()
    assert prompt.render(opened=["a"]) is prompt.render(opened="a")
    assert prompt.render(opened=["a"]) is not prompt.render()
    deadline = Deadline.after(3600)
    assert prompt.render(deadline=deadline).deadline is deadline
    assert prompt.render(deadline=deadline).text is prompt.render().text
    assert prompt.render().deadline is None


def test_a_prompt_that_depends_on_something_is_rendered_anew():
    """A prompt that depends on its params is rendered again for new params."""
    words = ["one"]

    @dataclass
    class Word:
        text: str = field(default_factory=lambda: words[0])

    prompt = Prompt("p", [MarkdownSection[Word]("A", "a", "$text")])
    first = prompt.render(Word()).text
    words[0] = "two"
    assert (first, prompt.render(Word()).text) == ("## A\n\none", "## A\n\ntwo")


def test_not_every_set_of_opened_sections_is_kept():
    """Only a limited number of renderings with opened sections are cached."""
    count = 8
    sections = [MarkdownSection("A", f"s{i}", "", summary="S", visibility="summary") for i in range(count)]
    prompt = Prompt("p", sections)
    for bits in range(2**count):
        prompt.render(opened=[f"s{i}" for i in range(count) if bits >> i & 1])
    assert len(prompt._cached) <= 64


def test_a_section_that_is_not_there_can_not_be_opened():
    """Opening an unknown section is refused. A section that is disabled or already shown in full is ignored."""
    prompt = Prompt(
        "p", [MarkdownSection("A", "a", "Text"), MarkdownSection("B", "b", "", enabled=lambda: False)]
    )
    assert prompt.render(opened=["a", "b"]).opened == frozenset()
    with pytest.raises(PromptRenderError) as caught:
        prompt.render(opened=["c"])
    assert str(caught.value) == "prompt 'p': 'c' in `opened` is not a section. Its sections are 'a', 'b'."


def test_structured_output_has_a_schema():
    """The output schema parses a value of the declared output type. A prompt without an output type has no schema."""
    prompt = Prompt("p", "Text.", output=Stay)
    schema = prompt.render().output_schema
    assert schema is not None
    assert schema.parse('{"hotel": "Ritz", "nights": 2}') == Stay(hotel="Ritz", nights=2)
    assert Prompt("p", "Text.").render().output_schema is None


def test_prompts_are_what_contexts_show():
    """Prompts and rendered prompts satisfy the protocols of the views that a context gives to tools."""
    prompt: PromptView = TRIP
    rendered: RenderedPromptView = TRIP.render(Trip("Rome"))
    assert prompt.name == "trip"
    assert [section.key for section in prompt.sections] == ["task", "care"]
    assert rendered.text.startswith("## Task")
    assert [tool.name for tool in rendered.tools] == ["weather", "trains"]
    assert isinstance(rendered, RenderedPrompt)
