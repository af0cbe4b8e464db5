"""Tools as values: results, plain functions, docstrings, contexts, examples and effects.

The annotations in this file are strings (PEP 563) and most classes are local, which is the harder case.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import itertools
import json
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, Field, SecretStr

from handrail import AgentContext, PathArg, Tool, ToolContext, ToolExample, ToolResult, UserContext, tool
from handrail.errors import ToolDefinitionError, ToolValidationError
from handrail.schema import Schema
from handrail.testing import agent_context, headless_context, user_context
from handrail.tools import EFFECTS, Effect, FunctionTool, Renders, legacy_handler, tool_context
from handrail.tools.effect import effect_refusal


@dataclass
class City:
    name: str
    days: int = 1


def forecast(params: City, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(f"{params.name} for {params.days}")


def call(made: Tool[Any, Any], arguments: Any = "", context: ToolContext | None = None) -> ToolResult[Any]:
    """Parse the arguments and call the handler, as the gate does."""
    assert made.handler is not None
    result: Any = made.handler(made.parse(arguments), context=context or headless_context())
    assert made.is_async == inspect.iscoroutine(result)
    return asyncio.run(result) if made.is_async else result


# --- ToolResult ----------------------------------------------------------------------------------


def test_ok_is_a_success_with_its_value():
    """`ToolResult.ok` makes a success from a value and an optional message."""
    assert ToolResult.ok(3) == ToolResult("", 3, True, False)
    assert ToolResult.ok(3, "three") == ToolResult("three", 3)
    assert ToolResult.ok(3, exclude_value_from_context=True).exclude_value_from_context is True


def test_ok_takes_a_message_without_a_value():
    """A success may have a message without a value. Without either, it renders as `done`."""
    result = ToolResult.ok(message="The lamp is on.")
    assert (result.success, result.value, result.render()) == (True, None, "The lamp is on.")
    assert ToolResult.ok().render() == "done"
    typed: ToolResult[None] = result
    assert typed is result


def test_error_is_a_failure_with_its_message():
    """`ToolResult.error` makes a failure from a message and an optional value."""
    assert ToolResult.error("no") == ToolResult("no", None, False, False)
    assert ToolResult.error("no", 3) == ToolResult("no", 3, False)


@pytest.mark.parametrize("name", ["message", "value", "success", "exclude_value_from_context"])
def test_a_result_is_frozen(name: str):
    """No field of a result can be set."""
    result = ToolResult.ok(1)
    with pytest.raises(AttributeError):
        setattr(result, name, "other")


class Spoken:
    def render(self) -> str:
        return "spoken"


class Guest(BaseModel):
    name: str
    code: SecretStr = SecretStr("hunter2")


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (ToolResult.ok(None), "done"),
        (ToolResult.ok(None, "Sent."), "Sent."),
        (ToolResult.ok("sunny"), "sunny"),
        (ToolResult.ok("", ""), "done"),
        (ToolResult.ok("sunny", "Found it."), "Found it.\nsunny"),
        (ToolResult.ok(3, "Found it."), "Found it.\n3"),
        (ToolResult.ok(0), "0"),
        (ToolResult.ok(False), "false"),
        (ToolResult.ok([]), "[]"),
        (ToolResult.ok({"a": [1, None]}), '{"a":[1,null]}'),
        (ToolResult.ok(City("Zürich")), '{"name":"Zürich","days":1}'),
        (ToolResult.ok([City("a"), City("b", 2)]), '[{"name":"a","days":1},{"name":"b","days":2}]'),
        (ToolResult.ok(Guest(name="a")), '{"name":"a","code":"**********"}'),
        (ToolResult.ok(Spoken()), "spoken"),
        (ToolResult.ok(Spoken(), "It says:"), "It says:\nspoken"),
        (ToolResult.ok("long", "Kept.", exclude_value_from_context=True), "Kept."),
        (ToolResult.ok(Spoken(), exclude_value_from_context=True), "done"),
        (ToolResult.error("No such city."), "No such city."),
        (ToolResult.error("Not there.", City("a")), 'Not there.\n{"name":"a","days":1}'),
        (ToolResult.error(""), "failed"),
    ],
)
def test_render_is_what_the_model_sees(result: ToolResult[Any], shown: str):
    """A result renders as its message and then its value, unless the value is excluded, and never as empty text."""
    assert result.render() == shown


def test_a_value_that_renders_itself_is_known():
    """A value with a `render` method satisfies the `Renders` protocol."""
    assert isinstance(Spoken(), Renders)
    assert not isinstance(City("a"), Renders)


# --- Tool ----------------------------------------------------------------------------------------


def test_a_tool_takes_its_types_from_the_handler():
    """A tool's params and result types come from the handler's annotations."""
    made = Tool("forecast", "Tell the weather.", forecast)
    assert (made.params, made.result) == (City, str)
    assert (made.is_async, made.context_type, made.needs) == (False, ToolContext, frozenset())
    assert made.json_schema == Schema(City).json_schema
    assert call(made, '{"name": "Rome"}') == ToolResult.ok("Rome for 1")


def test_the_defaults_of_a_tool():
    """A tool is irreversible by default, accepts overrides, and has no examples, capabilities or timeout."""
    made = Tool("forecast", "Tell the weather.", forecast)
    assert made.effect == "irreversible"
    assert made.accepts_overrides is True
    assert made.alone is False
    assert (made.examples, made.capabilities) == ((), frozenset())
    assert (made.timeout, made.run_mode, made.compensate, made.probe) == (None, None, None, None)


def test_a_tool_is_a_frozen_value():
    """Tools with equal definitions are equal and have equal hashes, and no attribute can be set."""
    one = Tool("forecast", "Tell the weather.", forecast, capabilities=frozenset({"net"}))
    two = Tool("forecast", "Tell the weather.", forecast, capabilities=frozenset({"net"}))
    assert one == two
    assert hash(one) == hash(two)
    assert one != dataclasses.replace(one, timeout=3)
    wrong: Any = one
    with pytest.raises(dataclasses.FrozenInstanceError):
        wrong.name = "other"


def test_a_copy_with_changes_is_checked_again():
    """`dataclasses.replace` makes a new tool, which is checked like any other."""
    made = Tool("forecast", "Tell the weather.", forecast)
    assert dataclasses.replace(made, description="Other.").params is City
    with pytest.raises(ToolDefinitionError, match="timeout is -1"):
        dataclasses.replace(made, timeout=-1)


def test_an_async_handler():
    """A tool with an async handler is marked as async."""

    async def handler(params: City, *, context: ToolContext) -> ToolResult[City]:
        return ToolResult.ok(params)

    made = Tool("forecast", "Tell the weather.", handler)
    assert made.is_async is True
    assert call(made, {"name": "Rome"}).value == City("Rome")


def test_a_tool_without_handler_is_only_declared():
    """A tool without a handler still has a schema and parses arguments."""
    made = Tool[City, Any]("forecast", "Tell the weather.", params=City)
    assert made.handler is None
    assert made.parse('{"name": "Rome"}') == City("Rome")


def test_types_are_named_where_the_handler_has_no_annotations():
    """`params=` and `result=` give the types of a handler without annotations."""
    made = Tool("forecast", "Tell.", lambda params, *, context: ToolResult.ok(1), params=City, result=int)
    assert (made.params, made.result) == (City, int)
    assert call(made, {"name": "Rome"}).value == 1


def test_a_handler_that_does_not_say_its_result():
    """A handler whose return annotation is a bare `ToolResult` has the result type `Any`."""

    def bare(params: None, *, context: ToolContext) -> ToolResult:  # pyright: ignore[reportMissingTypeArgument]  # bare on purpose
        return ToolResult.ok(1)

    assert Tool("bare", "Bare.", bare).result is Any


def test_handlers_that_are_methods_partials_and_objects():
    """Any callable that takes params and context can be a handler."""

    class Station:
        def handle(self, params: City, *, context: ToolContext) -> ToolResult[str]:
            return ToolResult.ok(f"method {params.name}")

        async def __call__(self, params: City, *, context: ToolContext) -> ToolResult[str]:
            return ToolResult.ok(f"object {params.name}")

    def bound(station: str, params: City, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(f"{station} {params.name}")

    method = Tool("weather", "Tell.", Station().handle)
    thing = Tool("weather", "Tell.", Station())
    partial = Tool("weather", "Tell.", functools.partial(bound, "partial"))
    assert [made.is_async for made in (method, thing, partial)] == [False, True, False]
    assert [made.params for made in (method, thing, partial)] == [City, City, City]
    assert call(method, {"name": "a"}).value == "method a"
    assert call(thing, {"name": "a"}).value == "object a"
    assert call(partial, {"name": "a"}).value == "partial a"


def test_a_wrapped_handler_keeps_its_types():
    """A handler wrapped with `functools.wraps` keeps its types."""

    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    assert Tool("forecast", "Tell.", logged(forecast)).params is City


# --- what a tool requires ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "needs"), [(ToolContext, set[str]()), (UserContext, {"user"}), (AgentContext, {"model"})]
)
def test_the_context_s_type_is_what_a_tool_needs(wanted: type[ToolContext], needs: set[str]):
    """The annotation of the context parameter determines whether a tool requires a person or a model."""

    def handler(params: None, *, context: wanted) -> ToolResult[None]:  # pyright: ignore[reportInvalidTypeForm]
        return ToolResult.ok(None)

    def function(where: wanted) -> None:  # pyright: ignore[reportInvalidTypeForm]
        """Do nothing."""

    for made in (Tool("do", "Do it.", handler), tool(function)):
        assert made.context_type is wanted
        assert made.needs == needs
        assert made.json_schema["properties"] == {}


# --- parse and dump ------------------------------------------------------------------------------

NOTHING: list[Any] = ["", "  ", "{}", "{ }", " {} ", "null", " null\n", b"", b"{}", b"null", {}]


@pytest.mark.parametrize("arguments", NOTHING, ids=repr)
def test_no_arguments_can_be_said_in_many_ways(arguments: Any):
    """Empty text, `null` and an empty object, as text, bytes or a mapping, all call a tool without arguments."""

    @tool
    def now() -> str:
        """Say the time."""
        return "noon"

    assert Tool[None, Any]("now", "Say the time.").parse(arguments) is None
    assert dataclasses.asdict(now.parse(arguments)) == {}
    assert call(now, arguments).value == "noon"


@pytest.mark.parametrize(
    "arguments", ['{"a":1}', {"a": 1}, "[]", "1", "nonsense", '{"context":{}}'], ids=repr
)
def test_a_tool_without_params_takes_none(arguments: Any):
    """A tool without params refuses any argument, and the error says what to send."""
    with pytest.raises(ToolValidationError) as caught:
        Tool[None, Any]("now", "Say the time.").parse(arguments)
    assert str(caught.value) == "now takes no arguments. Call it with {}."


def test_a_tool_without_params_says_so_in_its_schema():
    """The JSON Schema of a tool without params is a closed, empty object, and each tool has its own copy."""
    one, two = Tool("one", "One."), Tool("two", "Two.")
    assert one.json_schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert one.json_schema is not two.json_schema


@pytest.mark.parametrize("nothing", ["", "null", "{}", {}], ids=repr)
def test_what_is_missing_is_named_when_nothing_is_sent(nothing: Any):
    """If a tool with params gets no arguments, the error names the required ones."""
    with pytest.raises(ToolValidationError, match=r"^name: required, and missing$"):
        Tool("forecast", "Tell.", forecast).parse(nothing)


def test_parse_takes_text_bytes_and_mappings():
    """Arguments given as text, bytes or a mapping are parsed to the same params, by the same rules."""
    made = Tool("forecast", "Tell.", forecast)
    assert made.parse('{"name":"Rome"}') == City("Rome")
    assert made.parse(b'{"name":"Rome"}') == City("Rome")
    assert made.parse({"name": "Rome"}) == City("Rome")
    for wrong in ('{"name":1,"x":2}', b'{"name":1,"x":2}', {"name": 1, "x": 2}):
        with pytest.raises(ToolValidationError) as caught:
            made.parse(wrong)
        assert [problem.where for problem in caught.value.problems] == ["name", "x"]


def test_dump_is_the_json_a_model_would_have_sent():
    """Dumped params parse to the same value, except that secrets are masked in the dump."""

    @tool
    def send(
        to: list[City], sender: Annotated[str, Field(alias="from")], key: SecretStr | None = None
    ) -> None:
        """Send something."""

    params = send.parse('{"to": [{"name": "Rome"}], "from": "me"}')
    assert json.loads(send.dump(params)) == {"to": [{"name": "Rome", "days": 1}], "from": "me", "key": None}
    assert send.parse(send.dump(params)) == params
    assert b"hunter2" not in send.dump(send.parse('{"to": [], "from": "me", "key": "hunter2"}'))
    assert Tool[None, Any]("now", "Say the time.").dump(None) == b"{}"


# --- @tool ---------------------------------------------------------------------------------------


@tool
def plain(x: int) -> int:
    """Double it."""
    return 2 * x


@tool
async def plain_async(x: int) -> int:
    """Double it."""
    return 2 * x


@tool
def result(x: int) -> ToolResult[int]:
    """Double it."""
    return ToolResult.ok(2 * x, "doubled")


@tool
async def result_async(x: int) -> ToolResult[int]:
    """Double it."""
    return ToolResult.ok(2 * x, "doubled")


@pytest.mark.parametrize(
    ("made", "is_async", "message"),
    [
        (plain, False, ""),
        (plain_async, True, ""),
        (result, False, "doubled"),
        (result_async, True, "doubled"),
    ],
)
def test_tool_of_a_plain_function(made: FunctionTool[..., Any], is_async: bool, message: str):
    """A sync or async function that returns a value or a `ToolResult` becomes a tool that returns a `ToolResult`."""
    assert made.is_async is is_async
    assert made.result is int
    assert made.description == "Double it."
    assert made.json_schema == {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    assert call(made, '{"x": 3}') == ToolResult.ok(6, message)


def test_the_function_stays_reachable():
    """The tool's `function` attribute is the decorated function."""
    assert plain.function(4) == 8


def test_a_failed_result_of_a_function_is_kept():
    """If a function returns a failed `ToolResult`, that is the call's result."""

    @tool
    def fail() -> ToolResult[int]:
        """Fail."""
        return ToolResult.error("No.")

    assert call(fail) == ToolResult.error("No.")


def test_a_function_that_returns_nothing():
    """A function that returns None succeeds without a value."""

    @tool
    def nothing() -> None:
        """Do nothing."""

    assert call(nothing) == ToolResult.ok(None)
    assert call(nothing).render() == "done"


def test_options_of_tool_reach_the_tool():
    """Options that are given to `@tool` become attributes of the tool."""

    def undo(params: Any, value: int, *, context: ToolContext) -> None:
        pass

    def probe(params: Any, *, context: ToolContext) -> bool | None:
        return None

    @tool(
        name="pay-it",
        description="Pay.",
        accepts_overrides=False,
        examples=[ToolExample("One.", {"amount": 1}, 1)],
        capabilities=["net"],
        timeout=2.5,
        effect="compensable",
        alone=True,
        compensate=undo,
        probe=probe,
        run_mode="headless",
    )
    def pay(amount: int) -> int:
        return amount

    assert (pay.name, pay.description, pay.accepts_overrides) == ("pay-it", "Pay.", False)
    assert (pay.capabilities, pay.timeout, pay.effect) == (frozenset({"net"}), 2.5, "compensable")
    assert (pay.alone, pay.compensate, pay.probe, pay.run_mode) == (True, undo, probe, "headless")
    assert pay.examples == (ToolExample("One.", {"amount": 1}, 1),)


def test_tool_with_empty_parentheses():
    """`@tool()` is the same as `@tool`."""

    @tool()
    def now() -> str:
        """Say the time."""
        return "noon"

    assert now.name == "now"
    assert call(now).value == "noon"


def test_tools_of_methods_partials_and_objects():
    """A tool can be made from a method, a partial or a callable object, and is described by its docstring."""

    class Station:
        factor = 3

        def scale(self, x: int, context: ToolContext) -> int:
            """Scale a number."""
            return x * self.factor

        @classmethod
        def scale_class(cls, x: int) -> int:
            """Scale a number by the factor of the class."""
            return x * cls.factor

        @staticmethod
        async def same(x: int) -> int:
            """Return the number unchanged."""
            return x

        def __call__(self, x: int) -> int:
            """Call it."""
            return x * self.factor

    def power(base: int, exponent: int) -> int:
        """Raise it.

        Args:
            base: What is raised.
            exponent: How often.
        """
        return base**exponent

    assert call(tool(Station().scale), {"x": 2}).value == 6
    assert call(tool(Station.scale_class), {"x": 2}).value == 6
    assert call(tool(Station.same), {"x": 2}).value == 2
    called = tool(name="station")(Station())
    assert (called.description, call(called, {"x": 2}).value) == ("Call it.", 6)
    cube = tool(functools.partial(power, exponent=3))
    assert (cube.name, cube.description) == ("power", "Raise it.")
    assert cube.json_schema["properties"]["exponent"] == {
        "type": "integer",
        "default": 3,
        "description": "How often.",
    }
    assert [call(cube, sent).value for sent in ({"base": 2}, {"base": 2, "exponent": 2})] == [8, 4]
    two_to_the = tool(functools.partial(power, 2))
    assert list(two_to_the.json_schema["properties"]) == ["exponent"]
    assert call(two_to_the, {"exponent": 5}).value == 32


def test_parameters_with_names_of_every_kind():
    """Parameters may have names that begin or end with an underscore, or that generated classes use themselves."""

    @tool
    def odd(
        _x: int, class_: str, copy: int, model_name: str, items: list[int], params: int, self_: int
    ) -> str:
        """Take odd names."""
        return f"{_x}{class_}{copy}{model_name}{items}{params}{self_}"

    sent = {"_x": 1, "class_": "c", "copy": 2, "model_name": "m", "items": [3], "params": 4, "self_": 5}
    assert list(odd.json_schema["properties"]) == list(sent)
    assert call(odd, sent).value == "1c2m[3]45"


def test_local_classes_as_parameters_and_results():
    """Annotations that name classes local to a function are resolved, even if the classes are nested or recursive."""

    @dataclass
    class Leaf:
        size: int

    @dataclass
    class Tree:
        leaf: Leaf
        trees: list[Tree] = field(default_factory=list["Tree"])

    class Garden(BaseModel):
        tree: Tree

    @tool
    def grow(tree: Tree, spare: Tree | None = None, garden: Garden | None = None) -> Tree:
        """Return the first tree inside a tree."""
        return tree.trees[0]

    def handler(params: Tree, *, context: ToolContext) -> ToolResult[Leaf]:
        return ToolResult.ok(params.leaf)

    sent = {"leaf": {"size": 1}, "trees": [{"leaf": {"size": 2}}]}
    assert call(grow, {"tree": sent, "spare": sent, "garden": {"tree": sent}}).value == Tree(Leaf(2))
    assert call(Tool("grow", "Grow it.", handler), sent).value == Leaf(1)
    assert call(Tool[Tree, Leaf]("grow", "Grow it.", handler), sent).value == Leaf(1)
    assert Schema[Tree](Tree, locals()).parse(json.dumps(sent)).trees == [Tree(Leaf(2))]
    with pytest.raises(ToolValidationError, match=r"^tree\.trees\[0\]\.leaf\.odd: unknown"):
        grow.parse({"tree": {"leaf": {"size": 1}, "trees": [{"leaf": {"size": 2, "odd": 1}}]}})


# --- defaults ------------------------------------------------------------------------------------


def test_defaults_are_shown_in_the_schema():
    """Simple, mutable and structured defaults are shown as JSON in the schema."""

    @tool
    def search(
        text: str = "all",
        limit: int | None = None,
        tags: list[str] = ["new"],  # noqa: B006  # defaults are copied
        city: City = City("Rome", 2),  # noqa: B008  # defaults are copied
        weights: dict[str, float] = {"a": 0.5},  # noqa: B006  # defaults are copied
    ) -> None:
        """Search."""

    properties = search.json_schema["properties"]
    assert {name: part["default"] for name, part in properties.items()} == {
        "text": "all",
        "limit": None,
        "tags": ["new"],
        "city": {"name": "Rome", "days": 2},
        "weights": {"a": 0.5},
    }
    assert "required" not in search.json_schema


def test_mutable_defaults_are_not_shared_between_calls():
    """A call that changes a mutable default affects neither other calls nor the schema."""

    @tool
    def collect(
        seen: list[int] = [],  # noqa: B006  # defaults are copied
        cities: list[City] = [City("a")],  # noqa: B006, B008  # defaults are copied
        city: City = City("b"),  # noqa: B008  # defaults are copied
    ) -> list[int]:
        """Change the defaults, and return what they contain."""
        seen.append(len(seen))
        cities[0].days += 1
        city.days += 1
        return [*seen, cities[0].days, city.days]

    assert [call(collect).value for _ in range(3)] == [[0, 2, 2]] * 3
    assert collect.json_schema["properties"]["cities"]["default"] == [{"name": "a", "days": 1}]


def test_a_secret_default_is_used_and_not_shown():
    """A secret default is used, but is shown neither in the schema nor in the tool's repr."""

    @tool
    def login(key: SecretStr = SecretStr("hunter2")) -> int:  # noqa: B008  # a secret is immutable
        """Log in."""
        return len(key.get_secret_value())

    assert call(login).value == 7
    assert "default" not in login.json_schema["properties"]["key"]
    assert "hunter2" not in repr(login)


# --- docstrings ----------------------------------------------------------------------------------

STYLES = {
    "google": """Tell the weather
    of a city.

    More about it.

    Args:
        city: Where it is,
            in any language.
        days (int): How far ahead.
        context: Not for the model.

    Returns:
        The weather.
    """,
    "google-without-blank": """Tell the weather of a city.
    Args:
        city: Where it is, in any language.
        days: How far ahead.
    """,
    "numpy": """Tell the weather of a city.

    Parameters
    ----------
    city : str
        Where it is,
        in any language.
    days : int, optional
        How far ahead.

    Returns
    -------
    str
        The weather.
    """,
    "sphinx": """Tell the weather of a city.

    :param city: Where it is,
        in any language.
    :param int days: How far ahead.
    :returns: The weather.
    """,
    "sphinx-without-blank": """Tell the weather of a city.
    :param city: Where it is, in any language.
    :param days: How far ahead.
    """,
}


@pytest.mark.parametrize("style", STYLES)
def test_docstrings_describe_tool_and_parameters(style: str):
    """In each docstring style, the first paragraph is the description, and each parameter gets its own description."""

    def weather(city: str, context: ToolContext, days: int = 1) -> str:
        return city

    weather.__doc__ = STYLES[style]
    made = tool(weather)
    assert made.description == "Tell the weather of a city."
    assert made.json_schema["properties"] == {
        "city": {"type": "string", "description": "Where it is, in any language."},
        "days": {"type": "integer", "default": 1, "description": "How far ahead."},
    }


def test_a_docstring_without_parameters_describes_none():
    """Without a parameter section in the docstring, the parameters have no descriptions."""

    @tool
    def weather(city: str) -> str:
        """Tell the weather: args are a city.

        The parameters: see above.
        """
        return city

    assert weather.description == "Tell the weather: args are a city."
    assert weather.json_schema["properties"] == {"city": {"type": "string"}}


def test_a_description_in_the_annotation_wins():
    """`Field(description=...)` takes precedence over the docstring. Other metadata does not replace the docstring's text."""

    @tool
    def weather(
        city: Annotated[str, Field(description="From the annotation.")],
        days: Annotated[int, Field(gt=0)] = 1,
        path: Annotated[str, PathArg("read")] = "a",
    ) -> str:
        """Tell the weather.

        Args:
            city: From the docstring.
            days: How far ahead.
            path: Where to look.
        """
        return city

    properties = weather.json_schema["properties"]
    assert properties["city"]["description"] == "From the annotation."
    assert properties["days"] == {
        "type": "integer",
        "exclusiveMinimum": 0,
        "default": 1,
        "description": "How far ahead.",
    }
    assert properties["path"]["description"] == "Where to look."
    assert weather.paths(weather.parse({"city": "Rome"}))[0].path == "a"


def test_a_given_description_stands_for_the_docstring_s():
    """A given description replaces the docstring's, and the docstring still describes the parameters."""

    @tool(description="Given.")
    def weather(city: str) -> str:
        """Written.

        Args:
            city: Where.
        """
        return city

    assert weather.description == "Given."
    assert weather.json_schema["properties"]["city"]["description"] == "Where."


# --- contexts of plain functions -----------------------------------------------------------------


def test_the_context_is_injected_and_never_shown():
    """The context parameter is found by its annotation or mark, in any position, and is not in the schema."""

    @tool
    def annotated(x: int, where: ToolContext, y: int = 2) -> str:
        """Return the call's id and the arguments."""
        return f"{where.call_id} {x} {y}"

    @tool
    @tool_context
    def marked(x: int, ctx, y: int = 2) -> str:  # pyright: ignore[reportMissingParameterType]
        """Return the call's id and the arguments."""
        return f"{ctx.call_id} {x} {y}"

    @tool
    @tool_context(param="here")
    async def marked_by_name(here, x: int, y: int = 2) -> str:  # pyright: ignore[reportMissingParameterType]
        """Return the call's id and the arguments."""
        return f"{here.call_id} {x} {y}"

    @tool
    @tool_context(param="ctx")
    def marked_and_annotated(x: int, ctx: ToolContext, y: int = 2) -> str:
        """Return the call's id and the arguments."""
        return f"{ctx.call_id} {x} {y}"

    names = {annotated: "where", marked: "ctx", marked_by_name: "here", marked_and_annotated: "ctx"}
    for made, name in names.items():
        assert list(made.json_schema["properties"]) == ["x", "y"]
        assert call(made, {"x": 1}, headless_context(call_id="call-7")).value == "call-7 1 2"
        with pytest.raises(ToolValidationError, match=rf"^{name}: unknown; remove it\. Known here: x, y$"):
            made.parse({"x": 1, name: {}})


async def test_a_narrower_context_has_its_verb():
    """A function with a `UserContext` or an `AgentContext` can use the verb that this context adds."""

    @tool
    async def ask(context: UserContext) -> int:
        """Ask a person for a number."""
        return await context.wait_for("number", None, int)

    @tool
    async def think(context: AgentContext) -> int:
        """Ask a model for a number."""
        return await context.prompt_model("Which number?", int)

    results: list[Any] = []
    for made, context in (
        (ask, user_context({"number": 3})),
        (think, agent_context({"Which": 4})),
    ):
        assert made.handler is not None
        outcome = made.handler(made.parse(""), context=context)
        results.append((await outcome if isinstance(outcome, Awaitable) else outcome).value)
    assert results == [3, 4]


def test_a_marked_function_is_still_the_function():
    """A function marked with `tool_context` can still be called directly."""

    @tool_context
    def marked(x: int, ctx: Any) -> tuple[int, Any]:
        return x, ctx

    assert marked(1, 2) == (1, 2)


# --- examples ------------------------------------------------------------------------------------


def test_examples_that_fit_are_kept():
    """An example's input may be params or a mapping, and its output may be a value of the result type or plain data."""

    def handler(params: City, *, context: ToolContext) -> ToolResult[list[City]]:
        return ToolResult.ok([params])

    examples = (
        ToolExample("As params.", City("Rome"), [City("Rome")]),
        ToolExample("As a mapping.", {"name": "Rome", "days": 2}, [{"name": "Rome"}]),
    )
    assert Tool("cities", "Find.", handler, examples=examples).examples == examples


def test_examples_of_a_tool_without_params():
    """For a tool without params, an example's input is None or an empty mapping."""
    examples = (ToolExample("One.", None, 1), ToolExample("Two.", {}, "any"))
    assert Tool[None, Any]("now", "Say the time.", examples=examples).examples == examples


def test_examples_are_checked_by_what_a_model_may_send():
    """An example's input may be an instance, even if its class has aliases or fields that can't be sent."""

    @dataclass
    class Letter:
        sender: Annotated[str, Field(alias="from")]
        length: int = field(init=False, default=0)

    given = (ToolExample("Instance.", Letter("me"), None), ToolExample("Mapping.", {"from": "me"}, None))
    assert Tool("send", "Send.", params=Letter, examples=given).examples == given


# --- legacy_handler ------------------------------------------------------------------------------


def test_a_legacy_handler_is_called_without_context():
    """Sync and async legacy handlers keep their types, and each warns once, when it is defined."""

    def old(params: City) -> ToolResult[str]:
        return ToolResult.ok(params.name)

    async def old_async(params: City) -> ToolResult[str]:
        return ToolResult.ok(params.name)

    functions: list[Callable[[City], Any]] = [old, old_async]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = [Tool("old", "Old.", legacy_handler(function)) for function in functions]
        assert len(caught) == 2
        results = [call(each, {"name": "Rome"}) for each in made for _ in range(2)]
    assert [(each.params, each.result, each.is_async) for each in made] == [
        (City, str, False),
        (City, str, True),
    ]
    assert results == [ToolResult.ok("Rome")] * 4
    assert [each.category for each in caught] == [DeprecationWarning] * 2
    assert {each.filename for each in caught} == {__file__}
    assert str(caught[0].message) == (
        "handler 'old' does not take `context`: add `*, context: ToolContext` and drop `legacy_handler`"
    )


def test_a_legacy_handler_without_annotations_takes_given_params():
    """`params=` supplies the params type of a legacy handler without annotations."""
    with pytest.warns(DeprecationWarning, match="does not take `context`"):
        wrapped = legacy_handler(lambda params: ToolResult.ok(params.name))
    assert call(Tool("old", "Old.", wrapped, params=City), {"name": "Rome"}).value == "Rome"


# --- effects -------------------------------------------------------------------------------------

# The effect table: whether a call is retried, what happens after a crash, whether it is previewed, and the
# decision of CapabilityPolicy.
EFFECT_TABLE: dict[str, tuple[bool, str, bool, str]] = {
    "pure": (True, "run again", False, "allow"),
    "read": (True, "run again", False, "allow"),
    "staged": (True, "run again", True, "allow in scope"),
    "idempotent": (True, "run again with the same key", False, "by capability"),
    "compensable": (False, "probe, else compensate", False, "ask"),
    "irreversible": (False, "outcome unknown", False, "ask"),
}


def test_effects_are_those_of_the_specification():
    """There are six effects, in the order of the table above and with its values."""
    found = {
        effect: (rules.retried, rules.after_crash, rules.previewed, rules.policy)
        for effect, rules in EFFECTS.items()
    }
    assert found == EFFECT_TABLE
    assert list(EFFECTS) == list(EFFECT_TABLE) == list(get_args(Effect))


def test_only_pure_and_read_may_not_write():
    """Tools with the effect `pure` or `read` may not change state or files. All others may."""
    assert [effect for effect, rules in EFFECTS.items() if not rules.writes] == ["pure", "read"]


def test_only_three_effects_are_all_inside_the_transaction():
    """Only the effects `pure`, `read` and `staged` stay inside the transaction."""
    assert [effect for effect, rules in EFFECTS.items() if rules.transactional] == ["pure", "read", "staged"]


REFUSED = {
    "pure": ["read", "staged", "idempotent", "compensable", "irreversible"],
    "read": ["staged", "idempotent", "compensable", "irreversible"],
    "staged": ["idempotent", "compensable", "irreversible"],
}


@pytest.mark.parametrize(("outer", "inner"), list(itertools.product(EFFECT_TABLE, EFFECT_TABLE)))
def test_effects_compose(outer: Effect, inner: Effect):
    """A pure, read or staged call may not use a tool with a stronger effect, and the error names both effects."""
    refused = inner in REFUSED.get(outer, [])
    words = f"a {outer!r} call may not use a tool whose effect is {inner!r}"
    assert effect_refusal(outer, inner) == (words if refused else None)


@pytest.mark.parametrize("effect", ["idempotent", "compensable", "irreversible"])
def test_what_is_outside_the_transaction_may_use_anything(effect: Effect):
    """A tool whose effect is outside the transaction may call tools with any effect."""
    assert [effect_refusal(effect, inner) for inner in EFFECTS] == [None] * 6


def test_a_probe_goes_with_what_is_probed():
    """Compensable and irreversible tools may have a probe."""

    def undo(params: City, value: str, *, context: ToolContext) -> None:
        pass

    async def probe(params: City, *, context: ToolContext) -> bool | None:
        return None

    made = Tool("pay", "Pay.", forecast, effect="compensable", compensate=undo, probe=probe)
    assert (made.compensate, made.probe) == (undo, probe)
    assert Tool("pay", "Pay.", forecast, probe=probe).effect == "irreversible"


def test_a_coroutine_is_what_an_async_tool_gives():
    """The handler of a tool made from an async function returns a coroutine."""
    assert plain_async.handler is not None
    outcome = plain_async.handler(plain_async.parse({"x": 1}), context=headless_context())
    assert isinstance(outcome, Coroutine)
    outcome.close()
