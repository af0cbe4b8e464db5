"""Invalid definitions: each is refused where it is made, with an error that says what is wrong and what to do.

A row of a table has the action, the error class, and two parts of the message, in order: what is wrong, and what to do.
"""

import functools
import math
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, RootModel
from typing_extensions import TypedDict

from handrail import (
    AgentContext,
    Deadline,
    HandrailError,
    PathArg,
    Tool,
    ToolContext,
    ToolExample,
    ToolResult,
    UserContext,
    tool,
)
from handrail.context import ExtraKey, Extras, Ticket
from handrail.errors import DefinitionError, ExtraKeyError, TicketError, ToolDefinitionError
from handrail.tools import legacy_handler, tool_context

# Many calls here are wrong on purpose, so they use names that pyright does not check.
# pyright: reportMissingParameterType=false, reportUndefinedVariable=false
any_tool: Any = tool
any_tool_class: Any = Tool
any_tool_context: Any = tool_context
any_legacy_handler: Any = legacy_handler
any_example: Any = ToolExample
any_path_arg: Any = PathArg
any_extra_key: Any = ExtraKey


@dataclass
class Params:
    city: str = "Rome"


@dataclass
class Other:
    city: str = "Rome"


class Typed(TypedDict):
    city: str


class Root(RootModel[list[int]]):
    pass


class Unserialisable:
    pass


@dataclass
class HoldsUnserialisable:
    part: Unserialisable


@dataclass
class HoldsUnresolved:
    part: "Nowhere"  # noqa: F821  # undefined on purpose


@dataclass
class HoldsFunction:
    part: Callable[[], int]


@dataclass
class HoldsIterable:
    part: Iterable[int]


@dataclass
class MarksNumber:
    path: Annotated[int, PathArg("read")]


@dataclass
class MarksList:
    paths: Annotated[list[str], PathArg("read")]


@dataclass
class Writes:
    path: Annotated[str, PathArg("write")]


any_params: Any = Params


def handler(params: Params, *, context: ToolContext) -> ToolResult[int]:
    return ToolResult.ok(1)


def make(**changed: Any) -> Tool[Any, Any]:
    """Return a valid tool with some arguments replaced."""
    return any_tool_class(
        **{"name": "weather", "description": "Tell the weather.", "handler": handler, **changed}
    )


def make_of(function: Any, **changed: Any) -> Tool[Any, Any]:
    return make(handler=function, **changed)


def make_from(params: Any) -> Tool[Any, Any]:
    return make(handler=None, params=params)


Row = tuple[Callable[[], object], type[HandrailError], str, str]


# --- the fields of a tool ------------------------------------------------------------------------

FIELDS: dict[str, Row] = {
    "name-capitals": (lambda: make(name="GetWeather"), ToolDefinitionError, "'GetWeather'", "'get_weather'"),
    "name-blank": (lambda: make(name="get weather"), ToolDefinitionError, "'get weather'", "'get_weather'"),
    "name-empty": (lambda: make(name=""), ToolDefinitionError, "the name ''", "1 to 64 of the characters"),
    "name-long": (lambda: make(name="a" * 65), ToolDefinitionError, "a" * 65, "1 to 64"),
    "name-newline": (lambda: make(name="a\n"), ToolDefinitionError, r"'a\n'", "for example 'a'"),
    "name-other-letters": (lambda: make(name="météo"), ToolDefinitionError, "'météo'", "a-z, 0-9"),
    "name-number": (lambda: make(name=3), ToolDefinitionError, "the name 3", "a-z, 0-9"),
    "description-missing": (
        lambda: make(description=""),
        ToolDefinitionError,
        "no description",
        "Describe in one sentence what it does",
    ),
    "description-blank": (
        lambda: make(description=" \n"),
        ToolDefinitionError,
        "no description",
        "Describe in",
    ),
    "description-none": (
        lambda: make(description=None),
        ToolDefinitionError,
        "no description",
        "Describe in",
    ),
    "run-mode": (
        lambda: make(run_mode="browser"),
        ToolDefinitionError,
        "run_mode is 'browser'",
        "Use one of 'user', 'agent', 'headless', None",
    ),
    "effect-far": (
        lambda: make(effect="zzz"),
        ToolDefinitionError,
        "effect is 'zzz'",
        "'pure', 'read', 'staged', 'idempotent', 'compensable', 'irreversible'",
    ),
    "effect-none": (lambda: make(effect=None), ToolDefinitionError, "effect is None", "Use one of 'pure'"),
    "timeout-zero": (lambda: make(timeout=0), ToolDefinitionError, "timeout is 0", "positive number"),
    "timeout-negative": (lambda: make(timeout=-1.5), ToolDefinitionError, "-1.5", "positive number"),
    "timeout-text": (lambda: make(timeout="5"), ToolDefinitionError, "'5'", "positive number of seconds"),
    "timeout-true": (lambda: make(timeout=True), ToolDefinitionError, "True", "positive number"),
    "timeout-nan": (lambda: make(timeout=math.nan), ToolDefinitionError, "nan", "None for no timeout"),
    "timeout-infinite": (lambda: make(timeout=math.inf), ToolDefinitionError, "inf", "None for no timeout"),
    "capabilities-text": (
        lambda: make(capabilities="fs.read"),
        ToolDefinitionError,
        "capabilities is 'fs.read'",
        "a set of words, for example {'fs.read'}",
    ),
    "capability-capitals": (
        lambda: make(capabilities={"FS.Read"}),
        ToolDefinitionError,
        "'FS.Read'",
        "lower-case words joined by dots, as in 'fs.read'",
    ),
    "capability-effect": (
        lambda: make(effect="staged", capabilities={"read"}),
        ToolDefinitionError,
        "'read' is an effect, not a capability",
        "effect='read'",
    ),
    "returns-bytes": (
        lambda: make(result=list[bytes | None]),
        ToolDefinitionError,
        "returns list[",
        "an Attachment",
    ),
    "capability-list": (lambda: make(capabilities=[["net"]]), ToolDefinitionError, "['net']", "as in"),
    "read-with-write-capability": (
        lambda: make(effect="read", capabilities={"fs.write"}),
        ToolDefinitionError,
        "effect is 'read' but it has the capability 'fs.write'",
        "Set effect='staged', or remove the write",
    ),
    "pure-with-write-path": (
        lambda: make(handler=None, params=Writes, effect="pure"),
        ToolDefinitionError,
        "effect is 'pure' but it has a PathArg('write')",
        "Set effect='staged'",
    ),
}


# --- handlers ------------------------------------------------------------------------------------


def plain_result(params: Params, *, context: ToolContext) -> int:
    return 1


def wants_number(params: Params, *, context: int) -> ToolResult[int]:
    return ToolResult.ok(1)


def positional_context(params: Params, context: ToolContext) -> ToolResult[int]:
    return ToolResult.ok(1)


def without_params(*, context: ToolContext) -> ToolResult[int]:
    return ToolResult.ok(1)


def two_params(params: Params, more: int, *, context: ToolContext) -> ToolResult[int]:
    return ToolResult.ok(1)


def more_keywords(params: Params, *, context: ToolContext, more: int) -> ToolResult[int]:
    return ToolResult.ok(1)


def yields(params: Params, *, context: ToolContext) -> Iterator[int]:
    yield 1


async def yields_async(params: Params, *, context: ToolContext) -> AsyncIterator[int]:
    yield 1


def unresolved(params: "Nowhere", *, context: ToolContext) -> ToolResult[int]:  # noqa: F821  # undefined on purpose
    return ToolResult.ok(1)


def unreadable(params: Params, *, context: ToolContext) -> ToolResult[int]:
    return ToolResult.ok(1)


unreadable.__annotations__["params"] = "Params["


def asks_user(params: Params, *, context: UserContext) -> ToolResult[int]:
    return ToolResult.ok(1)


def asks_model(params: Params, *, context: AgentContext) -> ToolResult[int]:
    return ToolResult.ok(1)


class Thing:
    def method(self, params: Params, *, context: ToolContext) -> ToolResult[int]:
        return ToolResult.ok(1)

    def plain(self, city: str) -> str:
        """Return the city."""
        return city


FORM = "(params, *, context: ToolContext) -> ToolResult[...]"
HANDLERS: dict[str, Row] = {
    "handler-text": (lambda: make_of("handler"), ToolDefinitionError, "'handler'", "Pass a function"),
    "handler-without-context": (
        lambda: make_of(lambda params: None),
        ToolDefinitionError,
        "its handler takes no `context`",
        "Add `*, context: ToolContext` to its parameters; to migrate an old one, wrap it in `legacy_handler`",
    ),
    "handler-with-positional-context": (
        lambda: make_of(positional_context),
        ToolDefinitionError,
        "`context` of its handler is not keyword-only",
        "Put `*,` before it",
    ),
    "handler-lambda": (
        lambda: make_of(lambda params, *, context: None),
        ToolDefinitionError,
        "its handler's parameter 'params' has no annotation",
        "or pass `params=`",
    ),
    "handler-context-number": (
        lambda: make_of(wants_number),
        ToolDefinitionError,
        "`context` of its handler is annotated int",
        "Annotate it `ToolContext`",
    ),
    "handler-no-params": (lambda: make_of(without_params), ToolDefinitionError, "takes 0 arguments", FORM),
    "handler-two-params": (lambda: make_of(two_params), ToolDefinitionError, "takes 2 arguments", FORM),
    "handler-more-keywords": (lambda: make_of(more_keywords), ToolDefinitionError, "'more'", FORM),
    "handler-unbound-method": (
        lambda: make_of(Thing.method),
        ToolDefinitionError,
        "takes 2 arguments",
        "Pass the bound method",
    ),
    "handler-generator": (
        lambda: make_of(yields),
        ToolDefinitionError,
        "its handler yields",
        "Return the result",
    ),
    "handler-async-generator": (
        lambda: make_of(yields_async),
        ToolDefinitionError,
        "its handler yields",
        "`context.emit(...)`",
    ),
    "handler-plain-result": (
        lambda: make_of(plain_result),
        ToolDefinitionError,
        "its handler returns int",
        "annotate `-> ToolResult[...]`",
    ),
    "handler-unresolved-name": (
        lambda: make_of(unresolved),
        ToolDefinitionError,
        "the name 'Nowhere'",
        "Import it at the top of the module, outside `if TYPE_CHECKING:`",
    ),
    "handler-unreadable-annotation": (
        lambda: make_of(unreadable),
        ToolDefinitionError,
        "the annotations of its handler can't be read",
        "Write them as types",
    ),
    "handler-builtin": (
        lambda: make_of(dict),
        ToolDefinitionError,
        "the signature of its handler can't be read",
        "Wrap it in a Python function",
    ),
    "user-context-in-agent-mode": (
        lambda: make_of(asks_user, run_mode="agent"),
        ToolDefinitionError,
        "requires UserContext, which run_mode 'agent' never has",
        "Change one of them",
    ),
    "agent-context-in-headless-mode": (
        lambda: make_of(asks_model, run_mode="headless"),
        ToolDefinitionError,
        "requires AgentContext, which run_mode 'headless' never has",
        "Change one of them",
    ),
    "legacy-with-context": (
        lambda: any_legacy_handler(handler),
        ToolDefinitionError,
        "'handler': it already takes `context`",
        "Use it without `legacy_handler`",
    ),
    "legacy-number": (lambda: any_legacy_handler(3), ToolDefinitionError, "3, not a", "Pass a function"),
    "legacy-two-params": (
        lambda: any_legacy_handler(lambda params, more: None),
        ToolDefinitionError,
        "takes 2 arguments",
        FORM,
    ),
    "legacy-no-params": (
        lambda: any_legacy_handler(lambda: None),
        ToolDefinitionError,
        "takes 0 arguments",
        FORM,
    ),
}


# --- types of params and results -----------------------------------------------------------------

INSTEAD = "Use a dataclass, a pydantic model, a JSON Schema, or None"
USE = "Use dataclasses, pydantic models, enums, lists, dicts and plain JSON values"
TYPES: dict[str, Row] = {
    "params-typed-dict": (lambda: make_from(Typed), ToolDefinitionError, "its params are Typed", INSTEAD),
    "params-dict": (
        lambda: make_from(dict[str, int]),
        ToolDefinitionError,
        "its params are dict[str, int]",
        INSTEAD,
    ),
    "params-number": (lambda: make_from(int), ToolDefinitionError, "its params are int", INSTEAD),
    "params-root-model": (lambda: make_from(Root), ToolDefinitionError, "its params are Root", INSTEAD),
    "params-list": (lambda: make_from(list[Params]), ToolDefinitionError, "list[Params]", INSTEAD),
    "params-optional": (lambda: make_from(Params | None), ToolDefinitionError, "Params | None", INSTEAD),
    "params-any": (lambda: make_from(Any), ToolDefinitionError, "its params are Any", INSTEAD),
    "params-instance": (lambda: make_from(Params()), ToolDefinitionError, "Params(city='Rome')", INSTEAD),
    "params-text": (lambda: make_from("Params"), ToolDefinitionError, "'Params'", INSTEAD),
    "params-against-handler": (
        lambda: make(params=Other),
        ToolDefinitionError,
        "`params` is Other, but 'params' of its handler is annotated Params",
        "Make them the same type",
    ),
    "params-unserialisable-field": (
        lambda: make_from(HoldsUnserialisable),
        ToolDefinitionError,
        "HoldsUnserialisable can't be described",
        USE,
    ),
    "params-unresolved-field": (
        lambda: make_from(HoldsUnresolved),
        ToolDefinitionError,
        "the name 'Nowhere' in the annotations of HoldsUnresolved",
        "Import it at the top",
    ),
    "params-function-field": (lambda: make_from(HoldsFunction), ToolDefinitionError, "HoldsFunction", USE),
    "params-iterable-field": (
        lambda: make_from(HoldsIterable),
        ToolDefinitionError,
        "the items of an Iterable are validated only when they are read",
        USE,
    ),
    "result-unserialisable": (
        lambda: make(handler=None, result=Unserialisable),
        ToolDefinitionError,
        "Unserialisable can't be described",
        USE,
    ),
    "result-list-of-unserialisable": (
        lambda: make(handler=None, result=list[Unserialisable]),
        ToolDefinitionError,
        "list[Unserialisable]",
        USE,
    ),
    "result-against-handler": (
        lambda: make(result=str),
        ToolDefinitionError,
        "`result` is str but its handler returns int",
        "Remove `result=`",
    ),
    "path-marks-a-number": (
        lambda: make_from(MarksNumber),
        ToolDefinitionError,
        "PathArg('read') marks int",
        "only text and paths can be marked",
    ),
    "path-marks-a-list": (
        lambda: make_from(MarksList),
        ToolDefinitionError,
        "PathArg('read') marks list[str]",
        "mark the items: `list[Annotated[str, PathArg(...)]]`",
    ),
    "path-access": (
        lambda: any_path_arg("rw"),
        DefinitionError,
        "PathArg('rw')",
        'Write `Annotated[str, PathArg("read")]`',
    ),
}


# --- compensate, probe, examples -----------------------------------------------------------------


def undo(params: Params, value: int, *, context: ToolContext) -> None:
    pass


def undo_other(params: Other, value: int, *, context: ToolContext) -> None:
    pass


def happened(params: Params, *, context: ToolContext) -> bool | None:
    return None


def happened_other(params: Other, *, context: ToolContext) -> bool | None:
    return None


UNDO = "(params, value, *, context: ToolContext) -> None"
PROBE = "(params, *, context: ToolContext) -> bool | None"
COMPANIONS: dict[str, Row] = {
    "compensable-without-compensate": (
        lambda: make(effect="compensable"),
        ToolDefinitionError,
        "effect='compensable' and a `compensate` handler belong together",
        "Pass both, or neither",
    ),
    "compensate-without-compensable": (
        lambda: make(compensate=undo),
        ToolDefinitionError,
        "only one of them was passed",
        "Pass both, or neither",
    ),
    "compensate-text": (
        lambda: make(effect="compensable", compensate="undo"),
        ToolDefinitionError,
        "its compensate is 'undo'",
        "Pass a function",
    ),
    "compensate-without-value": (
        lambda: make(effect="compensable", compensate=happened),
        ToolDefinitionError,
        "its compensate takes 1 arguments",
        UNDO,
    ),
    "compensate-without-context": (
        lambda: make(effect="compensable", compensate=lambda params, value: None),
        ToolDefinitionError,
        "its compensate takes no `context`",
        "Add `*, context: ToolContext`",
    ),
    "compensate-of-other-params": (
        lambda: make(effect="compensable", compensate=undo_other),
        ToolDefinitionError,
        "'params' of its compensate is annotated Other",
        "Make them the same type",
    ),
    "probe-that-nobody-asks": (
        lambda: make(effect="read", probe=happened),
        ToolDefinitionError,
        "it has a `probe`, but its effect is 'read'",
        "Remove the probe, or set effect='compensable' or 'irreversible'",
    ),
    "probe-with-value": (lambda: make(probe=undo), ToolDefinitionError, "its probe takes 2", PROBE),
    "probe-without-context": (
        lambda: make(probe=lambda params: None),
        ToolDefinitionError,
        "its probe takes no `context`",
        "Add `*, context: ToolContext`",
    ),
    "probe-of-other-params": (
        lambda: make(probe=happened_other),
        ToolDefinitionError,
        "'params' of its probe is annotated Other",
        "Make them the same type",
    ),
    "example-number": (
        lambda: make(examples=[3]),
        ToolDefinitionError,
        "examples[0] is 3",
        "Pass ToolExample(description=..., input=..., output=...)",
    ),
    "example-without-description": (
        lambda: make(examples=[ToolExample("", Params(), 1)]),
        ToolDefinitionError,
        "examples[0] has a description of 0 characters",
        "Describe in 1 to 200 characters",
    ),
    "example-long-description": (
        lambda: make(examples=[ToolExample("ok", Params(), 1), ToolExample("a" * 201, Params(), 1)]),
        ToolDefinitionError,
        "examples[1] has a description of 201 characters",
        "Describe in 1 to 200 characters",
    ),
    "example-of-other-type": (
        lambda: make(examples=[ToolExample("ok", 3, 1)]),
        ToolDefinitionError,
        "the input of examples[0] is 3",
        "Pass an instance of Params",
    ),
    "example-input": (
        lambda: make(examples=[ToolExample("ok", {"city": 5, "town": 1}, 1)]),
        ToolDefinitionError,
        "the input of examples[0] is invalid: city: must be text, got the number 5; town: unknown",
        "Make it match the input's type",
    ),
    "example-input-instance": (
        lambda: make(examples=[ToolExample("ok", any_params(5), 1)]),
        ToolDefinitionError,
        "city: must be text, got the number 5",
        "Make it match the input's type",
    ),
    "example-output": (
        lambda: make(examples=[ToolExample("ok", Params(), "one")]),
        ToolDefinitionError,
        'the output of examples[0] is invalid: must be a whole number, got the text "one"',
        "Make it match the output's type",
    ),
    "example-input-for-no-params": (
        lambda: make(handler=None, examples=[ToolExample("ok", {"city": "a"}, 1)]),
        ToolDefinitionError,
        "the tool takes no arguments",
        "Make it match",
    ),
}


# --- @tool and @tool_context ---------------------------------------------------------------------


def without_docstring() -> object:
    @tool
    def weather(city: str) -> str:
        return city

    return weather


def without_annotation() -> object:
    @tool
    def weather(city) -> str:
        """Tell the weather."""
        return ""

    return weather


def context_without_annotation() -> object:
    @tool
    def weather(ctx) -> str:
        """Tell the weather."""
        return ""

    return weather


def any_positionals() -> object:
    @tool
    def weather(*cities: str) -> str:
        """Tell the weather."""
        return ""

    return weather


def any_named() -> object:
    @tool
    def weather(**cities: str) -> str:
        """Tell the weather."""
        return ""

    return weather


def in_a_class() -> object:
    class Station:
        @tool
        def weather(self, city: str) -> str:
            """Tell the weather."""
            return ""

    return Station


def capital_name() -> object:
    @tool
    def GetWeather(city: str) -> str:
        """Tell the weather."""
        return ""

    return GetWeather


any_text: Any = "two"
any_nothing: Any = None


def wrong_default() -> object:
    @tool
    def weather(days: int = any_text) -> str:
        """Tell the weather."""
        return ""

    return weather


def none_default() -> object:
    @tool
    def weather(days: int = any_nothing) -> str:
        """Tell the weather."""
        return ""

    return weather


def field_default() -> object:
    @tool
    def weather(days: int = Field(description="How many.")) -> str:
        """Tell the weather."""
        return ""

    return weather


def docstring_of_another() -> object:
    @tool
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            town: Which one.
        """
        return ""

    return weather


def two_contexts() -> object:
    @tool
    def weather(a: ToolContext, b: UserContext) -> str:
        """Tell the weather."""
        return ""

    return weather


def marked_and_annotated() -> object:
    @tool
    @tool_context
    def weather(a: ToolContext, ctx) -> str:
        """Tell the weather."""
        return ""

    return weather


def marked_but_something_else() -> object:
    @tool
    @tool_context(param="city")
    def weather(city: str) -> str:
        """Tell the weather."""
        return ""

    return weather


def marked_but_missing() -> object:
    @tool
    @tool_context
    def weather(city: str) -> str:
        """Tell the weather."""
        return ""

    return weather


def marked_above() -> object:
    @any_tool_context
    @tool
    def weather(city: str, ctx: ToolContext) -> str:
        """Tell the weather."""
        return ""

    return weather


def made_twice() -> object:
    @any_tool
    @tool
    def weather(city: str) -> str:
        """Tell the weather."""
        return ""

    return weather


def function_that_yields() -> object:
    @tool
    def weather(city: str) -> Iterator[str]:
        """Tell the weather."""
        yield ""

    return weather


def indescribable_parameter() -> object:
    @tool
    def weather(city: str, how: Callable[[], str]) -> str:
        """Tell the weather."""
        return ""

    return weather


def indescribable_default() -> object:
    @tool
    def weather(days: Iterable[int] = ()) -> str:
        """Tell the weather."""
        return ""

    return weather


def indescribable_result() -> object:
    @tool
    def weather(city: str) -> Unserialisable:
        """Tell the weather."""
        return Unserialisable()

    return weather


def unresolved_parameter() -> object:
    @tool
    def weather(city: "Nowhere") -> str:  # noqa: F821  # undefined on purpose
        """Tell the weather."""
        return ""

    return weather


def numbered_name() -> object:
    options: Any = {"name": 3}

    @tool(**options)
    def weather(city: str) -> str:
        """Tell the weather."""
        return ""

    return weather


def wrong_example() -> object:
    @tool(examples=[ToolExample("In Rome.", {"town": "Rome"}, "sunny")])
    def weather(city: str) -> str:
        """Tell the weather."""
        return ""

    return weather


FUNCTIONS: dict[str, Row] = {
    "no-docstring": (
        without_docstring,
        ToolDefinitionError,
        "it has no docstring",
        "or pass `@tool(description=...)`",
    ),
    "no-annotation": (
        without_annotation,
        ToolDefinitionError,
        "'city' has no annotation",
        "for example `city: str`",
    ),
    "context-no-annotation": (
        context_without_annotation,
        ToolDefinitionError,
        "'ctx' has no annotation",
        "Annotate it `ctx: ToolContext`, or put `@tool_context(param='ctx')` below `@tool`",
    ),
    "any-positionals": (any_positionals, ToolDefinitionError, "'*cities'", "Name each parameter"),
    "any-named": (any_named, ToolDefinitionError, "'**cities'", "Name each parameter"),
    "method": (in_a_class, ToolDefinitionError, "'self' has no annotation", "`tool(thing.method)`"),
    "unbound-method": (
        lambda: any_tool(Thing.plain),
        ToolDefinitionError,
        "tool 'plain': 'self' has no annotation",
        "Make a tool of the bound method",
    ),
    "capital-name": (capital_name, ToolDefinitionError, "'GetWeather'", "for example 'get_weather'"),
    "lambda-without-annotation": (
        lambda: any_tool(lambda city: city, name="weather", description="Tell."),
        ToolDefinitionError,
        "'city' has no annotation",
        "Annotate it",
    ),
    "lambda-without-name": (
        lambda: any_tool(lambda: 1),
        ToolDefinitionError,
        "'<lambda>'",
        "`@tool(description=...)`",
    ),
    "default-of-other-type": (
        wrong_default,
        ToolDefinitionError,
        "the default 'two' of 'days' does not match its annotation: must be a whole number",
        "Change one of them",
    ),
    "default-none": (
        none_default,
        ToolDefinitionError,
        "the default None of 'days'",
        "`... | None` allows None",
    ),
    "default-field": (
        field_default,
        ToolDefinitionError,
        "the default of 'days' is a pydantic Field",
        "`Annotated[..., Field(...)] = default`",
    ),
    "docstring-of-another": (
        docstring_of_another,
        ToolDefinitionError,
        "its docstring describes 'town'",
        "Correct the docstring",
    ),
    "two-contexts": (
        two_contexts,
        ToolDefinitionError,
        "'a' and 'b' are both declared as the context",
        "Keep one",
    ),
    "marked-and-annotated": (
        marked_and_annotated,
        ToolDefinitionError,
        "'a' and 'ctx' are both declared",
        "Keep one",
    ),
    "marked-but-something-else": (
        marked_but_something_else,
        ToolDefinitionError,
        "marks 'city', which is annotated str",
        "mark another parameter",
    ),
    "marked-but-missing": (
        marked_but_missing,
        ToolDefinitionError,
        "`@tool_context` marks 'ctx', but the function has no such parameter",
        "Add the parameter 'ctx'",
    ),
    "marked-above": (
        marked_above,
        ToolDefinitionError,
        "`@tool_context` is above `@tool`",
        "Put `@tool` above",
    ),
    "made-twice": (made_twice, ToolDefinitionError, "'weather': it is already a tool", "Use `@tool` once"),
    "function-yields": (
        function_that_yields,
        ToolDefinitionError,
        "its function yields",
        "Return the result",
    ),
    "parameter-indescribable": (
        indescribable_parameter,
        ToolDefinitionError,
        "'how': Callable[[], str] can't be described",
        USE,
    ),
    "parameter-iterable": (
        indescribable_default,
        ToolDefinitionError,
        "'days': Iterable[int] can't be described",
        USE,
    ),
    "result-indescribable": (indescribable_result, ToolDefinitionError, "Unserialisable", USE),
    "parameter-unresolved": (unresolved_parameter, ToolDefinitionError, "'Nowhere'", "Import it at the top"),
    "function-number": (lambda: any_tool(3), ToolDefinitionError, "its function is 3", "Pass a function"),
    "function-builtin": (lambda: any_tool(print), ToolDefinitionError, "'*args'", "Name each parameter"),
    "partial-without-annotation": (
        lambda: any_tool(functools.partial(lambda a, b: None, 1)),
        ToolDefinitionError,
        "'b' has no annotation",
        "Annotate it",
    ),
    "option-name-number": (numbered_name, ToolDefinitionError, "the name 3", "a-z, 0-9"),
    "option-example": (
        wrong_example,
        ToolDefinitionError,
        "city: required, and missing; town: unknown",
        "Make it match the input's type",
    ),
}


# --- extras, deadlines and tickets ---------------------------------------------------------------

KEY = b"k" * 16
OTHERS: dict[str, Row] = {
    "extra-key-capitals": (
        lambda: ExtraKey("RateLimit", int),
        ExtraKeyError,
        "extra 'RateLimit': it is not a snake_case ASCII name",
        "Use a name like 'rate_limit'",
    ),
    "extra-key-other-letters": (lambda: ExtraKey("größe", int), ExtraKeyError, "'größe'", "Use a name like"),
    "extra-key-number": (
        lambda: any_extra_key(3, int),
        ExtraKeyError,
        "extra 3",
        "Use a name like",
    ),
    "extra-key-opaque-without-words": (
        lambda: ExtraKey("handle", int, opaque=True),
        ExtraKeyError,
        "extra 'handle': it is opaque",
        "Say in `about` how long the object lives",
    ),
    "extras-name": (lambda: Extras({"a-b": 1}), ExtraKeyError, "extra 'a-b'", "Use a name like 'rate_limit'"),
    "extras-value": (
        lambda: Extras({"handle": object()}),
        ExtraKeyError,
        "extra 'handle': its value can't be written as JSON",
        "`ExtraKey(..., opaque=True)`",
    ),
    "deadline-without-zone": (
        lambda: Deadline(datetime(2030, 1, 1)),
        DefinitionError,
        "deadline 2030-01-01T00:00:00 has no time zone",
        "or use `Deadline.after(300)`",
    ),
    "deadline-after-nothing": (
        lambda: Deadline.after(0),
        DefinitionError,
        "after 0 seconds",
        "positive number",
    ),
    "deadline-after-negative": (lambda: Deadline.after(-5), DefinitionError, "after -5", "positive number"),
    "deadline-after-nan": (lambda: Deadline.after(math.nan), DefinitionError, "after nan", "positive number"),
    "ticket-short-key": (
        lambda: Ticket.open("a.b", b"short"),
        TicketError,
        "the key has 5 bytes",
        "Use at least 16 random bytes",
    ),
    "ticket-no-ticket": (
        lambda: Ticket.open("junk", KEY),
        TicketError,
        "this is not a ticket",
        "Pass on the text that `context.ticket()` returned, unchanged",
    ),
    "ticket-forged": (
        lambda: Ticket.open("e30.e30", KEY),
        TicketError,
        "its signature is wrong",
        "with which it was sealed",
    ),
}

TABLE: dict[str, Row] = {**FIELDS, **HANDLERS, **TYPES, **COMPANIONS, **FUNCTIONS, **OTHERS}


def test_no_row_hides_another():
    """No row of one table replaces a row of another, and there are at least 45 rows."""
    parts = (FIELDS, HANDLERS, TYPES, COMPANIONS, FUNCTIONS, OTHERS)
    assert len(TABLE) == sum(map(len, parts))
    assert len(TABLE) >= 45


@pytest.mark.parametrize("name", TABLE)
def test_wrong_definition(name: str):
    """A wrong definition raises the row's error, whose message is one line with both parts in order."""
    act, kind, thing, hint = TABLE[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # legacy_handler must check before it warns
        with pytest.raises(HandrailError) as caught:
            act()
    assert type(caught.value) is kind
    text = str(caught.value)
    assert thing in text
    assert hint in text[text.index(thing) :]
    assert text.endswith((".", "?"))
    assert "\n" not in text


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row[1] is ToolDefinitionError])
def test_a_tool_s_error_carries_its_parts(name: str):
    """A `ToolDefinitionError` has the tool, the problem and the hint as attributes, and its message is made of them."""
    with pytest.raises(ToolDefinitionError) as caught:
        TABLE[name][0]()
    error = caught.value
    assert str(error) == f"tool {error.tool!r}: {error.problem}. {error.hint}"
    assert isinstance(error, ValueError)


def test_the_tool_that_the_rows_change_is_right():
    """The tool that the rows change is valid without the change, so each row is refused because of its change."""
    assert make().params is Params
    assert make(effect="compensable", compensate=undo, probe=happened).compensate is undo


class Later(BaseModel):
    city: str


@pytest.mark.parametrize(
    "act",
    [
        lambda: make(name="a" * 64),
        lambda: make(name="a-b_9"),
        lambda: make(description="a" * 5000),
        lambda: make(timeout=0.001),
        lambda: make(capabilities=["fs.read", "net"]),
        lambda: make(run_mode="headless"),
        lambda: make_of(asks_user, run_mode="user"),
        lambda: make_of(asks_model, run_mode="agent"),
        lambda: make_of(lambda params, *, context: None, params=Later),
        lambda: make_of(functools.partial(two_params, more=1)),
        lambda: make(params=Params, result=int),
        lambda: make(effect="staged", capabilities={"fs.write"}),
        lambda: make(examples=(each for each in [ToolExample("a" * 200, {"city": "x"}, 1)])),
        lambda: make_from(Later),
        lambda: any_tool(lambda: 1, name="one", description="One."),
    ],
    ids=range(15),
)
def test_what_is_at_the_edge_is_accepted(act: Callable[[], object]):
    """Valid definitions are accepted, even extremes such as a name of 64 characters or a timeout of a millisecond."""
    assert isinstance(act(), Tool)
