"""Valid definitions: no check refuses them, and their tools work."""

import enum
import functools
import math
import operator
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NoReturn, TypeVar

import pytest
from pydantic import BaseModel, Field

from handrail import (
    CapabilityPolicy,
    MarkdownSection,
    Prompt,
    Tool,
    ToolContext,
    ToolExample,
    ToolResult,
    UserContext,
    open_gate,
    tool,
)
from handrail.errors import PromptDefinitionError, PromptRenderError, ToolDefinitionError
from handrail.session import Session

# Many calls here are valid, but pyright would refuse them.
any_tool: Any = Tool
any_function: Any = tool
any_section: Any = MarkdownSection

T = TypeVar("T")


@dataclass
class Params:
    city: str = "Rome"


class Model(BaseModel):
    city: str = "Rome"


@dataclass
class Box(Generic[T]):
    item: T


class Colour(enum.Enum):
    RED = "red"


async def call(made: Tool[Any, Any], **arguments: Any) -> Any:
    """Call the tool once through a gate, and return its value."""
    return (await open_gate([made]).invoke(made.name, arguments)).unwrap()


# --- handlers ------------------------------------------------------------------------------------


def handler(params: Params, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(params.city)


async def async_handler(params: Params, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(params.city)


def with_more(prefix: str, params: Params, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(params.city)


def awaitable(params: Params, *, context: ToolContext) -> Awaitable[ToolResult[str]]:
    return async_handler(params, context=context)


def coroutine(params: Params, *, context: ToolContext) -> Coroutine[Any, Any, ToolResult[str]]:
    return async_handler(params, context=context)


def either(params: Params, *, context: ToolContext) -> ToolResult[str] | ToolResult[int]:
    return ToolResult.ok(params.city)


def any_context(params: Params, *, context: Any) -> ToolResult[str]:
    return ToolResult.ok(params.city)


def optional_context(params: Params, *, context: ToolContext | None = None) -> ToolResult[str]:
    assert context is not None
    return ToolResult.ok(params.city)


def annotated(
    params: Annotated[Params, "a note"], *, context: Annotated[ToolContext, "a note"]
) -> ToolResult[str]:
    return ToolResult.ok(params.city)


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Station:
    def __call__(self, params: Params, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(params.city)

    async def tell(self, params: Params, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(params.city)

    @classmethod
    def of_class(cls, params: Params, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(params.city)

    @staticmethod
    def of_nobody(params: Params, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(params.city)


HANDLERS: dict[str, Any] = {
    "callable object": Station(),
    "bound method": Station().tell,
    "class method": Station.of_class,
    "static method": Station.of_nobody,
    "partial": functools.partial(with_more, "in "),
    "partial of a bound method": functools.partial(Station().tell),
    "awaitable": awaitable,
    "coroutine": coroutine,
    "either result": either,
    "any context": any_context,
    "optional context": optional_context,
    "annotated": annotated,
    "wrapper without wraps": undecorated(handler),
    "wrapper with wraps": functools.wraps(handler)(undecorated(handler)),
    "lambda": lambda params, *, context: ToolResult.ok(params.city),
}


@pytest.mark.parametrize("name", HANDLERS)
async def test_a_handler_may_be_any_callable(name: str):
    """Any callable can be a handler, and `params=` supplies the type if the callable has no annotations."""
    made = any_tool("weather", "Tell the weather.", HANDLERS[name], params=Params)
    assert await call(made, city="Oslo") == "Oslo"


@pytest.mark.parametrize("name", ["awaitable", "coroutine", "either result", "annotated", "partial"])
def test_annotations_say_the_types(name: str):
    """A handler's annotations give its types, even if they are awaitables, unions or `Annotated`."""
    made = any_tool("weather", "Tell the weather.", HANDLERS[name])
    assert made.result in (str, str | int)
    assert made.is_async == (name in ("awaitable", "coroutine"))


async def test_a_handler_may_close_over_a_name_that_is_bound_later():
    """A handler may close over a name that is bound only after the tool is defined."""

    def tell(params: Params, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(shout(params.city))

    made = Tool("weather", "Tell the weather.", tell)
    shout = str.upper
    assert await call(made, city="Oslo") == "OSLO"


async def test_a_function_may_close_over_a_name_that_is_bound_later():
    """A function with `@tool` may close over a name that is bound only after the tool is defined."""

    @tool
    async def weather(city: str) -> str:
        """Tell the weather."""
        return shout(city)

    shout = str.upper
    assert await call(weather, city="Oslo") == "OSLO"


def test_a_description_may_be_of_any_length():
    """A tool's description may have any length. Only an example's description is limited, to 200 characters."""
    text = "Tell the weather. " * 400
    assert any_tool("weather", text, handler).description == text
    shown = ToolExample("a" * 201, Params(), "sunny")
    with pytest.raises(ToolDefinitionError, match="Describe in 1 to 200 characters"):
        any_tool("weather", text, handler, examples=[shown])


def test_a_docstring_may_be_of_any_length():
    """The first paragraph of the docstring is the description, however long it is."""

    def weather(city: str) -> str:
        return city

    weather.__doc__ = "long " * 500
    assert len(tool(weather).description) == 2499


# --- capabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["s3.write", "fs.writes", "proc.exe", "workers", "git-hub.push", "a.b.c.*"])
def test_any_well_formed_capability_can_be_decided_on(word: str):
    """A policy can decide on any well-formed capability, even one that resembles a built-in tool's."""
    policy = CapabilityPolicy({word: "ask"})
    made = any_tool("do", "Do it.", handler, capabilities={word.removesuffix(".*")}, effect="idempotent")
    decision = policy.check(made, Params(), context=Any)  # pyright: ignore[reportArgumentType]  # the policy does not use it
    assert decision.kind == "ask"


# --- @tool ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "default"),
    [
        (float, math.inf),
        (float, 1),
        (bytes, b"\xff"),
        (Any, threading.Lock()),
        (object, None),
        (re.Pattern[str], re.compile("a+")),
        (Colour, Colour.RED),
        (list[int], []),
        (tuple[int, ...], ()),
        (frozenset[str], frozenset({"a"})),
        (Params, Params()),
        (Model, Model()),
        (Box[int], Box(3)),
        (Annotated[int | None, Field(ge=1)], None),
        ("int | None", None),
    ],
    ids=range(15),
)
async def test_a_default_may_be_anything_of_its_type(annotation: Any, default: Any):
    """A default may be any value of its type, even one that is not JSON, because a model never has to send it."""

    def weather(days: Any = default) -> bool:
        return days == default

    weather.__annotations__["days"] = annotation
    assert await call(tool(description="Tell the weather.")(weather))


@pytest.mark.parametrize(
    ("returns", "result"),
    [
        (str | ToolResult[str], str),
        (ToolResult[int] | None, int | None),
        (NoReturn, Any),
        (ToolResult, Any),
        (Box[int], Box[int]),
        (None, type(None)),
        (Awaitable[str], str),
    ],
    ids=str,
)
def test_a_function_may_return_a_value_or_a_result(returns: Any, result: Any):
    """A tool's result type is taken from the return annotation, even from a union or an awaitable."""

    def weather(city: str) -> Any:
        return city

    weather.__annotations__["return"] = returns
    assert tool(description="Tell the weather.")(weather).result == result


async def test_a_parameter_may_be_positional_only():
    """Parameters may be positional-only, and a model still sends them by name."""

    @tool
    def weather(city: str, days: int = 1, /, *, unit: str = "C") -> str:
        """Tell the weather."""
        return f"{city} {days} {unit}"

    assert await call(weather, city="Oslo", unit="F") == "Oslo 1 F"


async def test_a_context_may_be_optional():
    """A context parameter may be optional (`ToolContext | None = None`), for functions that are also called directly."""

    @tool
    def weather(city: str, context: ToolContext | None = None) -> str:
        """Tell the weather."""
        return f"{city} {context is not None}"

    assert list(weather.json_schema["properties"]) == ["city"]
    assert await call(weather, city="Oslo") == "Oslo True"
    assert weather.function("Oslo") == "Oslo False"


def test_an_optional_context_can_require_a_person():
    """An optional `UserContext` requires a person just as a required one does."""

    @tool
    def weather(context: UserContext | None) -> str:
        """Tell the weather."""
        return ""

    assert weather.needs == {"user"}


# --- prompts -------------------------------------------------------------------------------------


@dataclass
class Trip:
    city: str
    long: bool = False


class IsLong:
    def __call__(self, params: Trip) -> bool:
        return params.long


CONDITIONS: dict[str, Any] = {
    "lambda": lambda params: params.long,
    "through a helper": lambda params: IsLong()(params),
    "closure": lambda params: vars(params)["long"],
    "callable object": IsLong(),
    "bound method": IsLong().__call__,
    "partial": functools.partial(lambda params, field: getattr(params, field), field="long"),
    "default": lambda params, at_least=True: params.long is at_least,
    "any keywords": lambda **given: given["params"].long,
    "cached": functools.wraps(lambda params: True)(lambda params: params.long),
}


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("long", [True, False])
def test_a_condition_may_be_any_callable(name: str, long: bool):
    """A condition may be any callable, and may read the params in any way."""
    section: Any = MarkdownSection[Trip]
    prompt = Prompt("p", ["Hello.", section("Trip", "trip", "$city", enabled=CONDITIONS[name])])
    assert ("Rome" in prompt.render(Trip("Rome", long)).text) == long


def test_a_condition_may_close_over_a_name_that_is_bound_later():
    """A condition may close over a name that is bound later, because it is called only when the prompt is rendered."""

    def enabled(params: Trip) -> bool:
        return params.long == wanted

    prompt = Prompt("p", [MarkdownSection[Trip]("Trip", "trip", "$city", enabled=enabled)])
    wanted = True
    assert prompt.render(Trip("Rome", True)).text == "## Trip\n\nRome"


def test_a_condition_may_be_a_function_of_c():
    """A condition may be a C function without parameters, which is called without arguments."""
    event = threading.Event()
    lock = threading.Lock()
    prompt = Prompt("p", ["Hello.", any_section("A", "a", "A", enabled=event.is_set)])
    assert prompt.render().text == "Hello."
    prompt = Prompt("p", ["Hello.", any_section("A", "a", "A", enabled=lock.locked)])
    assert prompt.render().text == "Hello."


def test_a_condition_that_takes_something_else_is_refused():
    """A condition with parameters other than `params` and `session` is refused, at the latest when it is called."""
    with pytest.raises(PromptDefinitionError, match=r"takes 'trip'.* `params`"):
        any_section("A", "a", "A", enabled=lambda trip: True)
    # Since Python 3.13, the signature shows the parameters. Before that, the condition is refused when it is called.
    with pytest.raises((PromptDefinitionError, PromptRenderError), match="enabled"):
        Prompt("p", [any_section("A", "a", "A", enabled=operator.attrgetter("long"))]).render()


async def test_any_keywords_get_the_session_too():
    """A condition that takes `**given` gets both the params and the session."""
    seen: dict[str, Any] = {}

    def enabled(**given: Any) -> bool:
        seen.update(given)
        return True

    session = Session()
    Prompt("p", [any_section("A", "a", "A", enabled=enabled)]).render(session=session)
    assert seen == {"params": None, "session": session}


def test_names_may_have_capitals():
    """Prompt names and section keys may contain capitals."""
    prompt = Prompt("TravelGuide", [any_section("A", "HowTo", "Text.")])
    assert prompt.render().text == "## A\n\nText."
