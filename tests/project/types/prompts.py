"""Type inference for prompts and sections, which tests/project/test_types.py checks without running this file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, assert_type

from pydantic import BaseModel

from handrail import MarkdownSection, Prompt, RateLimitPolicy, Section, Tool, tool
from handrail.prompt import Opening, RenderedPrompt, ScopedPolicy, Visibility
from handrail.prompt.overrides import OverrideReport, Overrides, stale_overrides
from handrail.protocols import PromptView, RenderedPromptView, SessionView
from handrail.schema import Schema


@dataclass
class Trip:
    city: str
    careful: bool = False


class Report(BaseModel):
    text: str


@tool
def weather(city: str) -> int:
    """Tell the weather."""
    return 1


def function(city: str) -> int:
    return 1


# --- the output type is part of the prompt's type ------------------------------------------------

plain = Prompt("plain", "Answer.", tools=[weather])
typed = Prompt("typed", "Answer.", output=Report)

assert_type(plain, Prompt[None])
assert_type(typed, Prompt[Report])
assert_type(Prompt("typed", [MarkdownSection("A", "a", "")], output=Trip), Prompt[Trip])
assert_type(Prompt[Report]("typed", "Answer.", output=Report), Prompt[Report])
assert_type(Prompt("typed", "Answer.", output=list[Report]), Prompt[list[Report]])
assert_type(Prompt("typed", "Answer.", output=Report | str), Prompt[Any])
assert_type(Prompt("typed", "Answer.", output=Literal["yes", "no"]), Prompt[Any])
assert_type(plain.render().output_schema, Schema[None] | None)
assert_type(typed.render(), RenderedPrompt[Report])
assert_type(typed.render().output_schema, Schema[Report] | None)
assert_type(typed.render().open(["a"]), Opening[Report])
assert_type(typed.render().open(["a"]).rendered, RenderedPrompt[Report])
assert_type(typed.output, type[Report] | None)
assert_type(typed.sections, tuple[Section[Any], ...])
assert_type(typed.render().tools, tuple[Tool[Any, Any], ...])
assert_type(typed.render().policies, tuple[ScopedPolicy, ...])

Prompt("typed", "Answer.", output=Report(text="x"))  # expect-error: reportCallIssue, reportArgumentType
Prompt("typed", "Answer.", tools=[function])  # expect-error: reportArgumentType
Prompt("typed", [7])  # expect-error: reportArgumentType
Prompt("typed", "Answer.", overrides="prompts")  # expect-error: reportArgumentType
Prompt("typed")  # expect-error: reportCallIssue
typed.name = "other"  # expect-error: reportAttributeAccessIssue
typed.render("text", "more")  # expect-error: reportCallIssue

T = TypeVar("T")


def answer_of(prompt: Prompt[T]) -> T: ...


assert_type(answer_of(plain), None)
assert_type(answer_of(typed), Report)

# --- sections have typed params ------------------------------------------------------------------

known = MarkdownSection[Trip]("A", "a", "$city", enabled=lambda params: params.careful)
assert_type(known, MarkdownSection[Trip])
assert_type(MarkdownSection("A", "a", ""), MarkdownSection[Any])
assert_type(known.tools, Sequence[Tool[Any, Any]])


def by_both(session: SessionView, params: Trip) -> bool:
    return bool(session.id) and params.careful


def how(params: Trip) -> Visibility:
    return "full" if params.careful else "summary"


def by_number(params: int) -> bool:
    return True


async def asynchronous(params: Trip) -> bool:
    return True


MarkdownSection[Trip]("A", "a", "", enabled=by_both, visibility=how, summary="S")
MarkdownSection[Trip]("A", "a", "", enabled=lambda session: bool(session.id))
MarkdownSection[Trip]("A", "a", "", enabled=lambda params, session: bool(session.id) and params.careful)
MarkdownSection[Trip]("A", "a", "", enabled=lambda: True, visibility=lambda: "full", summary="S")
MarkdownSection("A", "a", "", tools=[weather], policies=[RateLimitPolicy(1, 60)], children=[known])

MarkdownSection[Trip]("A", "a", "", enabled=by_number)  # expect-error: reportArgumentType
MarkdownSection[Trip]("A", "a", "", enabled=asynchronous)  # expect-error: reportArgumentType
MarkdownSection[Trip]("A", "a", "", enabled=lambda x: True)  # expect-error: reportArgumentType
MarkdownSection[Trip]("A", "a", "", enabled="yes")  # expect-error: reportArgumentType
MarkdownSection[Trip]("A", "a", "", visibility="hidden")  # expect-error: reportArgumentType
MarkdownSection[Trip]("A", "a", "", visibility=by_both)  # expect-error: reportArgumentType
MarkdownSection("A", "a", "", tools=[function])  # expect-error: reportArgumentType
MarkdownSection("A", "a", "", policies=[RateLimitPolicy])  # expect-error: reportArgumentType
MarkdownSection("A", "a")  # expect-error: reportCallIssue
Section("A", "a", "")  # expect-error: reportAbstractUsage
known.title = "B"  # expect-error: reportAttributeAccessIssue

# --- protocols -----------------------------------------------------------------------------------

as_view: PromptView = typed
as_rendered: RenderedPromptView = typed.render()
assert_type(Overrides("prompts").check(typed), tuple[OverrideReport, ...])
assert_type(stale_overrides(plain), tuple[OverrideReport, ...])
