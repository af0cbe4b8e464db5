"""Results as a model sees them. If a result can't be shown, the call fails, and the model is told why."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Adapter, Prompt, Tool, ToolContext, ToolResult, tool
from handrail.events import ToolInvoked
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import ToolMessage
from handrail.models.scripted import ScriptedModel
from handrail.resources.memory import MemoryFilesystem
from handrail.run.call import ToolCall
from handrail.session import Session
from support.rig import Rig, leave_traces

HALF = "caf\udce9"
"""A file name that is not valid UTF-8, as `os.listdir` returns it."""


@dataclasses.dataclass
class Locked:
    """A value that JSON can't express."""

    lock: Any = dataclasses.field(default_factory=threading.Lock)


class Shy:
    """A value whose `render` raises."""

    def render(self) -> str:
        raise RuntimeError("no")


class Odd:
    """A value whose `render` returns something other than text."""

    def render(self) -> Any:
        return 3


class Fickle:
    """A value that can be rendered only once."""

    def __init__(self) -> None:
        self.count = 0

    def render(self) -> str:
        self.count += 1
        if self.count > 1:
            raise RuntimeError("rendered twice")
        return "fine"


@dataclasses.dataclass
class Plain:
    """A value that renders as the text it was created with. Its field `text` is empty."""

    text: str

    def __post_init__(self) -> None:
        self.shown, self.text = self.text, ""

    def render(self) -> str:
        return self.shown


class OwnResult(ToolResult[Any], frozen=True):
    """A kind of result whose `render` raises."""

    def render(self) -> str:
        raise RuntimeError("no")


def some(value: Any) -> Any:
    return value


UNSHOWABLE: list[tuple[str, Any, Callable[[], Any], str]] = [
    ("half a character in a list", list[str], lambda: ["a", HALF], "can't be written as JSON"),
    ("bytes, undeclared", Any, lambda: b"\xff", "can't be written as JSON"),
    ("a lock", Any, Locked, "can't be written as JSON"),
    ("a lock inside", dict[str, Any], lambda: {"a": [Locked()]}, "can't be written as JSON"),
    ("render raises", Any, Shy, "Shy"),
    ("own result", Any, lambda: OwnResult("", 1), "RuntimeError: no"),
    ("an exception as the message", Any, lambda: ToolResult.error(some(OSError("no disk"))), "no disk"),
    ("an exception as a good message", Any, lambda: ToolResult.ok(1, some(OSError("x"))), "must be text"),
    ("None as the message", str, lambda: ToolResult.ok("a", some(None)), "must be text"),
    ("bytes as the message", int, lambda: ToolResult.ok(1, some(b"a")), "must be text"),
    ("a failure with an unshowable value", Any, lambda: ToolResult.error("Full.", Locked()), "Full."),
    ("a generator", Any, lambda: (n for n in range(3)), "return a list"),
    ("an iterator", Any, lambda: map(str, range(3)), "return a list"),
    ("an endless iterator", Any, lambda: iter(int, 1), "return a list"),
]


def returning(
    declared: Any, make: Callable[[], Any], effect: Any = "staged", **options: Any
) -> Tool[Any, Any]:
    async def work(context: ToolContext) -> Any:
        """Leave traces and return something."""
        leave_traces(context, "a")
        return make()

    work.__annotations__["return"] = declared
    return tool(effect=effect, **options)(work)


@pytest.mark.parametrize(
    ("declared", "make", "words"), [row[1:] for row in UNSHOWABLE], ids=[row[0] for row in UNSHOWABLE]
)
@pytest.mark.virtual_time
async def test_it_fails_is_undone_and_is_told(declared: Any, make: Callable[[], Any], words: str) -> None:
    """A result that can't be shown fails the call before anything is committed."""
    rig = Rig([returning(declared, make)])
    result = await rig.call("work")
    assert not result.success
    assert words in result.message
    result.render().encode()
    assert rig.status("work") == "error"
    assert len(rig.rolled_back("work")) == 1
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.parametrize("journal", [False, True], ids=["unrecorded", "recorded"])
@pytest.mark.parametrize(
    ("declared", "make", "words"), [row[1:] for row in UNSHOWABLE], ids=[row[0] for row in UNSHOWABLE]
)
async def test_the_run_goes_on(declared: Any, make: Callable[[], Any], words: str, journal: bool) -> None:
    """The model is told about a result that can't be shown, and the run continues."""
    model = ScriptedModel([ToolCall("work"), "bye"])
    adapter = Adapter(model, journal=MemoryJournal() if journal else None, filesystem=MemoryFilesystem())
    session = Session()
    answered = await adapter.evaluate(
        Prompt("p", "Work.", tools=[returning(declared, make, "staged")]), "go", session=session
    )
    assert answered.text == "bye"
    (ended,) = session[ToolInvoked].all()
    assert ended.status == "error"
    assert words in ended.result.message


async def test_a_result_is_rendered_once() -> None:
    """A value is rendered once, although the model, the record and the event all need its text."""
    model = ScriptedModel([ToolCall("work"), "bye"])
    journal = MemoryJournal()
    value = Fickle()

    @tool(effect="read")
    async def work() -> Any:
        """Return something that renders itself."""
        return ToolResult(
            "", dataclasses.make_dataclass("Value", [], namespace={"render": lambda self: value.render()})()
        )

    session = Session()
    adapter = Adapter(model, journal=journal)
    assert (await adapter.evaluate(Prompt("p", "Work.", tools=[work]), "go", session=session)).text == "bye"
    assert value.count == 1
    asked = model.requests[-1].messages[-1]
    assert isinstance(asked, ToolMessage)
    assert asked.results[0].text == "fine"


@pytest.mark.parametrize("journal", [False, True], ids=["unrecorded", "recorded"])
@pytest.mark.parametrize(
    "make",
    [lambda: HALF, lambda: ToolResult.ok(None, HALF), lambda: ToolResult.error(HALF), lambda: Plain(HALF)],
    ids=["value", "message", "error", "rendered"],
)
async def test_text_with_half_a_character_is_shown(make: Callable[[], Any], journal: bool) -> None:
    """A text with a lone surrogate is shown with the surrogate escaped, even if an outer call returns it."""
    inner: list[Any] = []

    @tool(effect="staged")
    async def outer(context: ToolContext) -> Any:
        """Call the other tool."""
        inner.append(await context.call("work"))
        return inner[0]

    model = ScriptedModel([ToolCall("work"), ToolCall("outer"), "bye"])
    adapter = Adapter(model, journal=MemoryJournal() if journal else None, filesystem=MemoryFilesystem())
    tools = [returning(Any, make), outer]
    assert (await adapter.evaluate(Prompt("p", "Work.", tools=tools), "go")).text == "bye"
    for request in model.requests[1:]:
        asked = request.messages[-1]
        assert isinstance(asked, ToolMessage)
        assert asked.results[0].text == r"caf\xe9"
    assert inner[0].render().replace("\udce9", r"\xe9") == r"caf\xe9"


async def test_a_generator_inside_a_value_is_told() -> None:
    """A generator inside a value is read once, and the model is shown its items."""
    model = ScriptedModel([ToolCall("work"), "bye"])

    @tool(effect="read")
    async def work() -> Any:
        """Return a generator in a dict."""
        return {"items": (n for n in range(3))}

    adapter = Adapter(model, journal=MemoryJournal())
    await adapter.evaluate(Prompt("p", "Work.", tools=[work]), "go")
    asked = model.requests[-1].messages[-1]
    assert isinstance(asked, ToolMessage)
    assert asked.results[0].text == '{"items":[0,1,2]}'


@pytest.mark.parametrize(
    "make", [lambda: None, lambda: [1], lambda: ToolResult.ok([HALF])], ids=["None", "list", "half"]
)
@pytest.mark.virtual_time
async def test_a_wrong_return_value_of_an_irreversible_handler_says_that_it_ran(
    make: Callable[[], Any],
) -> None:
    """If an irreversible handler's return value is wrong, the model is told that the call could not be undone."""

    async def handler(params: None, *, context: ToolContext) -> Any:
        return make()

    rig = Rig([Tool("pay", "Pay.", handler, params=None, result=Any)])
    result = await rig.call("pay")
    assert not result.success
    assert "Could not be undone: pay." in result.message
    assert rig.rolled_back("pay")[0].not_undone == ("pay",)


@pytest.mark.parametrize("make", [lambda: None, lambda: ToolResult.ok(Locked())], ids=["wrong", "unshowable"])
@pytest.mark.virtual_time
async def test_a_wrong_return_value_of_a_compensable_handler_is_compensated(make: Callable[[], Any]) -> None:
    """A compensable call with a wrong return value is compensated."""
    undone: list[Any] = []

    async def handler(params: None, *, context: ToolContext) -> Any:
        return make()

    async def undo(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append(value)

    book = Tool("book", "Book.", handler, params=None, result=Any, effect="compensable", compensate=undo)
    rig = Rig([book])
    result = await rig.call("book")
    assert not result.success
    assert len(undone) == 1
    assert rig.rolled_back("book")[0].compensated == ("book",)


async def test_a_kept_rendering_does_not_change_equality() -> None:
    """A result that the gate has rendered equals a new one with the same fields."""
    rig = Rig([returning(Any, lambda: {"a": 1}, "staged")])
    assert await rig.call("work") == ToolResult.ok({"a": 1})


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None, exclude_categories=[]))
    | st.binary()
    | st.builds(Locked)
    | st.builds(Shy)
    | st.builds(Odd)
    | st.builds(Fickle)
    | st.builds(object)
    | st.builds(lambda: iter([1]))
    | st.just(NotImplemented)
    | st.just(ToolResult),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3) | st.sets(st.text())
    ),
    max_leaves=5,
)
RESULTS = (
    VALUES
    | st.builds(ToolResult, VALUES, VALUES, st.booleans() | st.none(), st.booleans())
    | st.builds(OwnResult, st.text(), VALUES)
)


@given(RESULTS, st.sampled_from([Any, str, dict, list, int]))
async def test_any_return_value_leaves_a_conversation_that_can_be_sent(value: Any, declared: Any) -> None:
    """Whatever a handler returns, the run continues, and the model is sent text that can be encoded."""
    model = ScriptedModel([ToolCall("work"), "bye"])
    session = Session()
    answered = await Adapter(model, journal=MemoryJournal(), filesystem=MemoryFilesystem()).evaluate(
        Prompt("p", "Work.", tools=[returning(declared, lambda: value, "read")]), "go", session=session
    )
    assert answered.text == "bye"
    asked = model.requests[-1].messages[-1]
    assert isinstance(asked, ToolMessage)
    (told,) = asked.results
    assert isinstance(told.text, str)
    assert told.text.encode()
    assert len(session[ToolInvoked].all()) == 1
