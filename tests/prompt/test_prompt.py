"""Prompts and sections as values, and which definitions are refused."""

import dataclasses
import functools
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel, RootModel

from handrail import (
    Agent,
    Binding,
    MarkdownSection,
    Prompt,
    RateLimitPolicy,
    ScriptedModel,
    Section,
    Tool,
    ToolContext,
    ToolResult,
    tool,
)
from handrail.errors import DefinitionError, PromptDefinitionError, PromptValidationError
from handrail.guard import DeadlineFeedback, FilesThere

# Many calls here are wrong on purpose, so they use names that pyright does not check.
any_prompt: Any = Prompt
any_section: Any = MarkdownSection

T = TypeVar("T")


@dataclass
class Params:
    city: str


@dataclass
class Other:
    city: str


@dataclass
class Wide:
    city: str
    deep: bool = False


@dataclass
class Page(Generic[T]):
    item: T


@dataclass
class Holds:
    part: threading.Event


class Root(RootModel[list[int]]):
    pass


class Model(BaseModel):
    city: str


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return city


def function(city: str) -> str:
    return city


def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult.ok(None)


OPENER = Tool("open_sections", "Mine.", handler)


def section(**changed: Any) -> Any:
    """Return a valid section with some arguments replaced."""
    return any_section(**{"title": "Search", "key": "search", "template": "Text.", **changed})


def prompt(*sections: Any, **changed: Any) -> Any:
    """Return a valid prompt with some arguments replaced."""
    return any_prompt(**{"name": "guide", "sections": sections or "Text.", **changed})


def nested(inner: Any) -> Any:
    return prompt(section(title="Guidance", key="guidance", children=[inner]))


async def endless(params: Any) -> AsyncIterator[bool]:
    yield True


async def asynchronous(params: Any) -> bool:
    return True


Rows = dict[str, tuple[Callable[[], object], str]]

# --- one section ---------------------------------------------------------------------------------

SECTIONS: Rows = {
    "key-blank": (
        lambda: section(key="my key"),
        "section 'Search': the key 'my key' is not allowed. Use letters, digits, '_' and '-'.",
    ),
    "key-dot": (
        lambda: section(key="a.b"),
        "section 'Search': the key 'a.b' is not allowed. Use letters",
    ),
    "key-empty": (lambda: section(key=""), "section 'Search': the key '' is not allowed."),
    "key-newline": (lambda: section(key="a\n"), r"section 'Search': the key 'a\n' is not allowed."),
    "key-number": (lambda: section(key=3), "section 'Search': the key 3 is not allowed."),
    "template-number": (
        lambda: section(template=3),
        "section 'search': the template is an int. Pass a string.",
    ),
    "template-none": (
        lambda: section(template=None),
        "section 'search': the template is None. Pass a string.",
    ),
    "summary-number": (lambda: section(summary=3), "section 'search': the summary is an int. Pass a string."),
    "title-empty": (lambda: section(title=" "), "section 'search': the title is ' '. Pass one line of text."),
    "title-lines": (
        lambda: section(title="a\nb"),
        r"section 'search': the title is 'a\nb'. Pass one line of text.",
    ),
    "title-none": (
        lambda: section(title=None),
        "section 'search': the title is None. Pass one line of text.",
    ),
    "template-dollar": (
        lambda: section(template="\n  It\n  costs $5 now and then.\n"),
        "section 'search': '$5 now and t' in line 3 is not a placeholder of its template. "
        "Write `$name` or `${name}` for a field, and `$$` for a dollar sign.",
    ),
    "template-dollar-last": (
        lambda: section(template="US$"),
        "section 'search': '$' in line 1 is not a placeholder of its template.",
    ),
    "template-brace": (
        lambda: section(template="${city"),
        "section 'search': '${city' in line 1 is not a placeholder of its template.",
    ),
    "template-expression": (
        lambda: section(template="${city.name}"),
        "section 'search': '${city.name}' in line 1 is not a placeholder of its template.",
    ),
    "template-surrogate": (
        lambda: section(template="\ud800"),
        "section 'search': its template contains half a character (a lone surrogate), which can't be sent. "
        "Correct how the text was decoded.",
    ),
    "placeholder-without-a-field": (
        lambda: MarkdownSection[Params]("Search", "search", "$town in $city"),
        "section 'search': its template uses $town, and Params has no field 'town'. "
        "Its fields are $city. A dollar sign is `$$`.",
    ),
    "placeholder-in-summary": (
        lambda: MarkdownSection[Params]("Search", "search", "$city", summary="$town"),
        "section 'search': its summary uses $town, and Params has no field 'town'.",
    ),
    "summary-dollar": (
        lambda: section(summary="5 $"),
        "section 'search': '$' in line 1 is not a placeholder of its summary.",
    ),
    "summary-empty": (
        lambda: section(summary=" "),
        "section 'search': the summary is empty. Say in a sentence what the section contains.",
    ),
    "summary-missing": (
        lambda: section(visibility="summary"),
        "section 'search': it may be shown as a summary, but has none. Pass `summary=`, one or two sentences.",
    ),
    "summary-missing-function": (
        lambda: section(visibility=lambda: "full"),
        "section 'search': it may be shown",
    ),
    "visibility-misspelt": (
        lambda: section(visibility="hidden"),
        "section 'search': visibility is 'hidden'. Pass 'full', 'summary', or a function that returns one of them.",
    ),
    "visibility-list": (
        lambda: section(visibility=["full"]),
        "section 'search': visibility is ['full']. Pass 'full'",
    ),
    "enabled-text": (
        lambda: section(enabled="yes"),
        "section 'search': enabled is 'yes'. Pass True, False",
    ),
    "enabled-none": (lambda: section(enabled=None), "section 'search': enabled is None. Pass True, False"),
    "enabled-other-name": (
        lambda: section(enabled=lambda x: True),
        "section 'search': enabled is a function that takes 'x'. "
        "Write it as a function of `params`, of `session`, or of both, by these names.",
    ),
    "enabled-more": (
        lambda: section(enabled=lambda params, other: True),
        "section 'search': enabled is a function that takes 'other'. Write it as",
    ),
    "enabled-positional": (
        lambda: section(enabled=eval("lambda params, /: True")),
        "section 'search': enabled is a function that takes 'params'. Write it as",
    ),
    "enabled-async": (
        lambda: section(enabled=asynchronous),
        "section 'search': enabled is async or a generator, but rendering does not wait. "
        "Make it a plain function.",
    ),
    "enabled-async-generator": (
        lambda: section(enabled=endless),
        "section 'search': enabled is async or a generator",
    ),
    "visibility-other-name": (
        lambda: section(visibility=lambda p: "full", summary="S"),
        "section 'search': visibility is a function that takes 'p'. Write it as",
    ),
    "tools-function": (
        lambda: section(tools=[weather, function]),
        "section 'search': tools[1] is the function function. Put @tool on function.",
    ),
    "tools-class": (
        lambda: section(tools=[Params]),
        "section 'search': tools[0] is the class Params. Pass tools created with @tool or Tool(...).",
    ),
    "tools-names": (
        lambda: section(tools=["a"]),
        "section 'search': tools[0] is a str. Pass tools created with",
    ),
    "policies-class": (
        lambda: section(policies=[RateLimitPolicy]),
        "section 'search': policies[0] is the class RateLimitPolicy. Create one: RateLimitPolicy(...).",
    ),
    "policies-other": (
        lambda: section(policies=["no"]),
        "section 'search': policies[0] is a str. A policy has a `name`, `check` and `on_result`; see ToolPolicy.",
    ),
    "children-text": (
        lambda: section(children=["Text."]),
        "section 'search': children[0] is a str. Pass MarkdownSection(title, key, template).",
    ),
    "children-same-key": (
        lambda: section(children=[section(key="a"), section(key="b"), section(key="a")]),
        "section 'search': children[0] and children[2] both have the key 'a'. "
        "Keys are unique among siblings: rename one.",
    ),
    "params-plain": (
        lambda: any_section[int],
        "MarkdownSection[int]: int has no named fields for placeholders. Pass a class",
    ),
    "params-text": (lambda: any_section["Params"], "MarkdownSection['Params']: 'Params' has no named fields"),
    "params-list": (lambda: any_section[[1]], "MarkdownSection[[1]]: [1] has no named fields"),
    "params-root-model": (lambda: any_section[Root], "MarkdownSection[Root]: Root has no named fields"),
}

# --- a whole prompt ------------------------------------------------------------------------------

PROMPTS: Rows = {
    "name": (
        lambda: prompt(name="my guide"),
        "prompt 'my guide': the name 'my guide' is not allowed. Use 1 to 64 letters, digits, '_' and '-'.",
    ),
    "name-none": (lambda: prompt(name=None), "prompt None: the name None is not allowed. Use 1 to 64"),
    "name-no-letters": (
        lambda: prompt(name="?"),
        "the name '?' is not allowed. Use 1 to 64 letters",
    ),
    "text-empty": (
        lambda: prompt(sections=" \n"),
        "prompt 'guide': it is empty. Pass a string, or at least one section.",
    ),
    "sections-empty": (lambda: prompt(sections=[]), "prompt 'guide': it is empty. Pass a string"),
    "sections-none": (lambda: prompt(sections=None), "prompt 'guide': it is empty. Pass a string"),
    "sections-one": (
        lambda: prompt(sections=section()),
        "prompt 'guide': sections is a single section. Pass a list of sections, or a string.",
    ),
    "sections-texts": (
        lambda: prompt(section(), " "),
        "prompt 'guide': sections[1] is a str. Pass MarkdownSection(title, key, template).",
    ),
    "sections-same-key": (
        lambda: prompt(section(), section()),
        "prompt 'guide': sections[0] and sections[1] both have the key 'search'.",
    ),
    "tools-function": (
        lambda: prompt(tools=[function]),
        "prompt 'guide': tools[0] is the function function. Put @tool on function.",
    ),
    "tools-one": (
        lambda: prompt(tools=weather),
        "prompt 'guide': tools is a single tool. Pass a list of tools: [weather].",
    ),
    "tools-agent": (
        lambda: prompt(tools=[Agent(ScriptedModel([]), "Answer.")]),
        "prompt 'guide': tools[0] is an Agent. Pass it as a tool: agent.as_tool().",
    ),
    "tools-partial": (
        lambda: prompt(tools=[functools.partial(function, "a")]),
        "prompt 'guide': tools[0] is the function partial. Put @tool on partial.",
    ),
    "policies-other": (
        lambda: prompt(policies=[3]),
        "prompt 'guide': policies[0] is an int. A policy has a `name`",
    ),
    "feedback-text": (
        lambda: prompt(feedback="often"),
        "prompt 'guide': feedback[0] is a str. Pass feedback providers; see FeedbackProvider.",
    ),
    "resources-other": (
        lambda: prompt(resources=[Params]),
        "prompt 'guide': resources[0] is the class Params. Pass Binding(Protocol, provider).",
    ),
    "overrides-text": (
        lambda: prompt(overrides="prompts"),
        "prompt 'guide': overrides is a str. Pass Overrides(\"folder\").",
    ),
    "output-instance": (
        lambda: prompt(output=Params("Rome")),
        "prompt 'guide': output is a Params. Pass the type of the answer",
    ),
    "output-indescribable": (
        lambda: prompt(output=Holds),
        "prompt 'guide': its output: Holds can't be described",
    ),
    "placeholder-without-params": (
        lambda: nested(section(template="In $city")),
        "prompt 'guide', section 'guidance.search': its template uses $city, and no section declares the "
        "type of the params. Write MarkdownSection[Params](...), where Params is a dataclass with that field. "
        "A dollar sign is `$$`.",
    ),
    "placeholder-in-the-short-form": (
        lambda: prompt(sections="In $city."),
        "prompt 'guide', section 'instructions': its template uses $city, and no section declares",
    ),
    "placeholder-without-a-field": (
        lambda: prompt(MarkdownSection[Params]("A", "a", "$city"), section(template="$town")),
        "prompt 'guide', section 'search': its template uses $town, and Params has no field 'town'. "
        "Its fields are $city. A dollar sign is `$$`.",
    ),
    "placeholder-in-a-summary": (
        lambda: prompt(MarkdownSection[Params]("A", "a", "$city"), section(summary="$town")),
        "prompt 'guide', section 'search': its summary uses $town, and Params has no field 'town'.",
    ),
    "field-unused": (
        lambda: prompt(MarkdownSection[Wide]("A", "a", "$city")),
        "prompt 'guide': no section uses the field 'deep' of Wide. Write $deep where it belongs, or remove the field.",
    ),
    "function-without-params": (
        lambda: nested(section(enabled=lambda params: True)),
        "prompt 'guide', section 'guidance.search': a function takes the params, and no section declares "
        "their type. Write MarkdownSection[Params](...)",
    ),
    "two-params-types": (
        lambda: prompt(
            MarkdownSection[Params]("A", "a", "$city"),
            section(children=[MarkdownSection[Other]("B", "b", "$city")]),
        ),
        "prompt 'guide': section 'a' takes Params and section 'search.b' takes Other. "
        "A prompt has one params type: put the fields of both into one class.",
    ),
    "opener": (
        lambda: prompt(section(visibility="summary", summary="S"), tools=[OPENER]),
        "prompt 'guide': a tool of the prompt itself is called 'open_sections', like the built-in tool that opens "
        "sections. Give it another name.",
    ),
    "opener-in-a-section": (
        lambda: prompt(section(visibility=lambda: "full", summary="S", tools=[OPENER], enabled=False)),
        "prompt 'guide': a tool of section 'search' is called 'open_sections', like the built-in tool",
    ),
    "two-tools": (
        lambda: prompt(section(tools=[weather]), tools=[weather]),
        "prompt 'guide': two tools are named 'weather', in the prompt itself and in section 'search'. "
        "Rename one, drop one, or enable only one of the two at a time.",
    ),
    "two-policies": (
        lambda: prompt(section(policies=[RateLimitPolicy(1, 60)]), policies=[RateLimitPolicy(2, 60)]),
        "prompt 'guide': two policies are named 'rate_limit', so they would share their state. "
        "Give one of them a different `name`, or declare the same one in both places.",
    ),
    "two-tools-in-one-place": (
        lambda: prompt(section(tools=[weather, weather])),
        "prompt 'guide': two tools are named 'weather', both in section 'search'.",
    ),
}


@pytest.mark.parametrize(
    ("define", "message"), [*SECTIONS.values(), *PROMPTS.values()], ids=[*SECTIONS, *PROMPTS]
)
def test_a_wrong_definition_is_refused(define: Callable[[], object], message: str):
    """A wrong definition is refused with an error that has the place, the problem and a hint."""
    with pytest.raises(PromptDefinitionError) as caught:
        define()
    error = caught.value
    assert message in str(error)
    assert str(error) == f"{error.place}: {error.problem}. {error.hint}"
    assert error.hint.endswith((".", "?"))
    assert isinstance(error, DefinitionError)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("rows", [SECTIONS, PROMPTS], ids=["sections", "prompts"])
def test_what_the_rows_change_is_right_without_the_change(rows: Rows):
    """The section and the prompt that the table's rows change are valid without the change."""
    assert rows
    assert prompt(section()).render().text == "## Search\n\nText."
    assert prompt().render().text == "Text."
    assert nested(section()).render().text == "## Guidance\n\nText.\n\n### Search\n\nText."


def test_a_wrong_keyword_is_a_type_error():
    """An unknown keyword argument raises a `TypeError`."""
    with pytest.raises(TypeError, match="sectionz"):
        any_prompt("guide", "Text.", sectionz=[])
    with pytest.raises(TypeError, match="tool"):
        any_section("Title", "key", "Text.", tool=[])


# --- definitions that are accepted ---------------------------------------------------------------


def deep(params: Wide) -> bool:
    return params.deep


def deep_or_so(params: Wide, limit: int = 3) -> bool:
    return params.deep and limit > 2


def deep_at(params: Wide, session: Any) -> bool:
    return params.deep and session is not None


class Deep:
    def __call__(self, *, session: Any, params: Wide) -> bool:
        return bool(session) and params.deep


@pytest.mark.parametrize(
    "condition",
    [
        deep,
        deep_or_so,
        functools.partial(deep_or_so, limit=1),
        Deep(),
        lambda params: bool(params.city) and params.deep,
        lambda params: deep(params),
        lambda params: bool(params.city) and deep(params),
        lambda params, session: deep_at(params, session),
        lambda params: any(params.deep for _ in "ab"),
        lambda params: getattr(params, "deep"),  # noqa: B009  # this is under test
    ],
    ids=[
        "name",
        "default",
        "partial",
        "object",
        "two",
        "handed-on",
        "both",
        "handed-on-with-another",
        "inner-code",
        "getattr",
    ],
)
def test_a_field_that_a_condition_reads_is_used(condition: Any):
    """A condition that takes the params counts as using all their fields."""
    Prompt("p", [MarkdownSection[Wide]("A", "a", "$city", enabled=condition)])
    Prompt("p", [MarkdownSection[Wide]("A", "a", "$city", summary="S", visibility=condition)])


def test_tools_of_one_name_may_exclude_each_other():
    """Tools may have the same name if they are in sections that are not enabled together. Rendering checks that."""
    first = MarkdownSection("A", "a", "", tools=[weather], enabled=lambda: False)
    second = MarkdownSection("B", "b", "", tools=[weather], enabled=False)
    third = MarkdownSection("C", "c", "", tools=[weather])
    assert [one.name for one in Prompt("p", [first, second, third]).render().tools] == ["weather"]
    below_disabled = MarkdownSection("D", "d", "", children=[third], enabled=False)
    Prompt("p", [below_disabled, third])


def test_the_opener_s_name_is_free_where_nothing_is_closed():
    """A tool may have the opening tool's name, unless the prompt has sections that can be closed."""
    assert Prompt("p", "Text.", tools=[OPENER]).render().tools == (OPENER,)
    with pytest.raises(PromptDefinitionError):
        prompt(section(visibility="summary", summary="S", tools=[OPENER]))


def test_params_may_be_generic():
    """Params may be a parametrised generic dataclass, and each parametrisation is its own type."""
    one, other = MarkdownSection[Page[int]], MarkdownSection[Page[str]]
    assert one is not other
    rendered = Prompt("p", [one("A", "a", "$item")]).render(Page(3))
    assert rendered.text == "## A\n\n3"
    assert Prompt("p", [one("A", "a", "$item")]).render({"item": 4}).text == "## A\n\n4"


# --- values --------------------------------------------------------------------------------------


def test_the_class_that_knows_its_params_is_one():
    """`MarkdownSection[Params]` is the same class each time, and its name includes that of the params type.

    With `None` or `Any` it is `MarkdownSection` itself. A class that is subscripted can't be subscripted again.
    """
    known: Any = any_section[Params]
    assert known is MarkdownSection[Params]
    assert known is not MarkdownSection[Other]
    assert issubclass(known, MarkdownSection)
    assert known.params_type is Params
    assert MarkdownSection.params_type is None
    assert known.__name__ == "MarkdownSection[Params]"
    assert any_section[Any] is any_section[None] is MarkdownSection
    with pytest.raises(TypeError, match="not a generic class"):
        known.__class_getitem__(Other)


def test_a_section_of_ones_own_can_be_generic():
    """A user's generic section class can be subscripted with its params, as `MarkdownSection` can."""

    class Mine(MarkdownSection[T]):
        def heading(self, depth: int) -> str:
            return f"{self.title}:"

    class Fixed(MarkdownSection[Params]):
        pass

    mine: Any = Mine
    assert mine[Params].params_type is Params
    assert Fixed.params_type is Params
    text = (
        Prompt("p", [Mine[Params]("A", "a", "$city"), Fixed("B", "b", "$city")]).render(Params("Rome")).text
    )
    assert text == "A:\n\nRome\n\n## B\n\nRome"


def test_a_section_is_abstract():
    """`Section` itself can't be instantiated."""
    abstract: Any = Section
    with pytest.raises(TypeError, match="abstract"):
        abstract("A", "a", "Text")


def test_sections_are_values():
    """Sections are compared by content, are immutable, and can be copied with changes."""
    first, second = MarkdownSection[Params]("A", "a", "$city"), MarkdownSection[Params]("A", "a", "$city")
    assert first == second
    assert first != MarkdownSection[Other]("A", "a", "$city")
    assert (section(tools=[weather]).tools, section(children=[first]).children) == ((weather,), (first,))
    changed = dataclasses.replace(first, title="B")
    assert (changed.title, changed.params_type) == ("B", Params)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.title = "C"  # pyright: ignore[reportAttributeAccessIssue]  # this is under test


def test_prompts_are_values():
    """Prompts are compared by content, are hashable and immutable, and can be copied with a change."""
    first, second = Prompt("p", "Text.", tools=[weather]), Prompt("p", "Text.", tools=(weather,))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Prompt("p", "Text.")
    assert len({first, second}) == 1
    changed = dataclasses.replace(first, tools=[], name="q")
    assert (changed.render().text, changed.render().tools, changed.name) == ("Text.", (), "q")
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.name = "r"  # pyright: ignore[reportAttributeAccessIssue]  # this is under test
    assert "Text." in repr(first)


def test_a_prompt_keeps_what_it_is_given():
    """A prompt turns the lists it is given into tuples, and keeps everything else as it is."""
    policy, checker, provider = RateLimitPolicy(5, 60), FilesThere("a"), DeadlineFeedback()
    binding = Binding(Params, lambda resources: Params("Rome"))
    made = Prompt(
        "p",
        [MarkdownSection("A", "a", "Text.")],
        policies=[policy],
        feedback=[provider],
        completion=[checker],
        resources=[binding],
        output=Model,
    )
    assert made.policies == (policy,)
    assert (made.feedback, made.completion, made.resources) == ((provider,), (checker,), (binding,))
    assert (made.output, made.params_type, made.overrides) == (Model, None, None)
    assert isinstance(made.sections, tuple)


def test_a_prompt_can_be_subscripted():
    """A prompt made by `Prompt[Model](...)` equals one made by `Prompt(...)` with the same arguments."""
    assert Prompt[Model]("p", "Text.", output=Model) == Prompt("p", "Text.", output=Model)


def test_the_output_may_be_a_local_class():
    """The output type may be a local class with annotations that refer to other local classes."""

    @dataclass
    class Inner:
        x: int

    @dataclass
    class Report:
        inner: "Inner"

    schema = Prompt("p", "Text.", output=Report).render().output_schema
    assert schema is not None
    assert schema.parse('{"inner": {"x": 1}}') == Report(Inner(1))


def test_a_duplicate_says_which_tool_and_where():
    """The error for a duplicate tool has the tool's name and both places as attributes."""
    with pytest.raises(PromptValidationError) as caught:
        prompt(section(tools=[weather]), tools=[weather])
    assert (caught.value.tool, caught.value.places) == ("weather", ("the prompt itself", "section 'search'"))
