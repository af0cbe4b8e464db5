"""`ToolContext`: a thin, frozen view of one call, which expires with the call."""

import asyncio
import inspect
import re
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import AgentContext, Deadline, Operation, Tool, ToolContext, ToolResult, UserContext, tool
from handrail.concurrency.operation import Done
from handrail.concurrency.threads import run_in_thread
from handrail.context import (
    PROVIDER_REQUEST_ID,
    Approval,
    Invocation,
    RequestView,
    ResponseAccumulator,
    RunContext,
)
from handrail.errors import ContextError, ContextExpired, NotRendered
from handrail.testing import agent_context, expire, headless_context, user_context
from handrail.testing.contexts import MockCall
from support import PATIENCE
from support.operations import run


class Choice(BaseModel):
    selected: str


class Everything(UserContext, AgentContext, frozen=True, eq=False):
    """A context with every capability, as a user might define it."""


def everything() -> ToolContext:
    """Return a context on which every verb can be called, even those that need an environment."""
    answer = {"pick": {"selected": "tea"}}
    call: Any = MockCall(answer, answer, approve=True, results={"add": 3})
    return Everything(call)


VERBS: dict[str, Callable[[Any], Any]] = {
    "once": lambda context: context.once("key", lambda: 1),
    "beat": lambda context: context.beat(),
    "report_progress": lambda context: context.report_progress("half", done=1, total=2),
    "emit": lambda context: context.emit(Choice(selected="tea")),
    "request_approval": lambda context: context.request_approval("sure?"),
    "request_permission": lambda context: context.request_permission("fs.write"),
    "call": lambda context: context.call("add", a=1),
    "call_worker": lambda context: context.call_worker("add", {"a": 1}),
    "spawn": lambda context: context.spawn("helper", "hello"),
    "ticket": lambda context: context.ticket(),
    "wait_for": lambda context: context.wait_for("pick", {}, Choice),
    "prompt_model": lambda context: context.prompt_model("pick", Choice),
}
AT_ONCE = {"beat", "report_progress", "emit", "ticket", "spawn"}

# --- contents ------------------------------------------------------------------------------------

MEMBERS = (
    "prompt",
    "rendered_prompt",
    "adapter",
    "session",
    "event_bus",
    "request",
    "response_accumulator",
    "deadline",
    "signal",
    "heartbeat",
    "budget_tracker",
    "cost_tracker",
    "resources",
    "filesystem",
    "approval_controller",
)


@pytest.mark.parametrize("member", MEMBERS)
def test_each_member_is_read_from_the_call_behind_it(member: str):
    """Reading a member of a context returns the same object as reading it from the call behind the context."""
    thing = object()
    context = headless_context(**{member: thing})
    assert getattr(context, member) is thing
    assert getattr(context, member) is getattr(context._source, member)


@pytest.mark.parametrize(
    "member", ["tool", "invocation", "run_context", "depth", "extras", "wait_for", "prompt_model"]
)
def test_the_calls_own_facts_are_read_from_it_too(member: str):
    """The facts that every call has are read from the call behind the context."""
    context = headless_context()
    assert getattr(context, member) is getattr(context._source, member)


def test_the_table_of_the_specification_is_all_there():
    """`ToolContext` has exactly the public members and verbs that this test lists."""
    this_call = {"call_id", "tool", "invocation"}
    the_run = {"prompt", "rendered_prompt", "adapter", "session", "event_bus", "run_context", "depth"}
    providers_side = {"request", "response_accumulator", "extras"}
    limits = {"deadline", "signal", "heartbeat", "budget_tracker", "cost_tracker"}
    things = {"resources", "filesystem", "approval_controller"}
    wanted = this_call | the_run | providers_side | limits | things | {"require_rendered"} | set(VERBS)
    assert {name for name in dir(ToolContext) if not name.startswith("_")} == wanted


def test_the_call_it_shows_is_the_one_it_was_made_for():
    """A context's call id, tool, invocation, depth and extras are those of its call."""
    search = Tool("search", "Searches.")
    context = headless_context(
        call_id="call-3", tool=search, depth=2, extras={"provider_request_id": "req-8"}
    )
    assert (context.call_id, context.tool, context.depth) == ("call-3", search, 2)
    assert context.invocation == Invocation(
        "call-3", datetime(2030, 1, 1, tzinfo=UTC), 1, "call-3/key", None, ("search",)
    )
    assert context.extras.get(PROVIDER_REQUEST_ID) == "req-8"


def test_the_runs_ids_are_all_there_from_the_start():
    """Every field of a context's `run_context` is set, and its fields are those that this test lists. Only what started it may be unknown."""
    ids = headless_context().run_context
    assert all(getattr(ids, name) for name in RunContext.__struct_fields__ if name != "traceparent")
    assert set(RunContext.__struct_fields__) == {
        *("run_id", "request_id", "session_id", "attempt", "worker_id", "trace_id", "span_id", "traceparent")
    }


def test_what_a_provider_gives_is_optional():
    """The request, the accumulator, the deadline and the rendered prompt are None unless they were given."""
    context = headless_context()
    assert (context.request, context.response_accumulator) == (None, None)
    assert (context.deadline, context.rendered_prompt) == (None, None)
    request = RequestView("provider:model", {"temperature": 0}, {"authorization": "redacted"})
    accumulator = ResponseAccumulator("so far", ("call-1",))
    deadline = Deadline(datetime(2031, 1, 1, tzinfo=UTC))
    context = headless_context(request=request, response_accumulator=accumulator, deadline=deadline)
    assert (context.request, context.response_accumulator) == (request, accumulator)
    assert context.deadline is deadline


def test_require_rendered_gives_it_or_names_the_prompt():
    """`require_rendered` returns the rendered prompt. Before there is one, it raises an error that names the prompt."""
    prompt = SimpleNamespace(name="reviewer", sections=())
    with pytest.raises(NotRendered, match="prompt 'reviewer' has not been rendered yet") as caught:
        headless_context(prompt=prompt).require_rendered()
    assert caught.value.prompt == "reviewer"
    assert isinstance(caught.value, LookupError)
    rendered = SimpleNamespace(text="# Review", tools=())
    context = headless_context(prompt=prompt, rendered_prompt=rendered)
    assert context.require_rendered() is context.rendered_prompt is rendered


# --- identity and repr ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["call_id", "deadline", "wait_for", "_call", "something_new"])
@pytest.mark.parametrize("kind", [headless_context, user_context, agent_context])
def test_it_is_frozen(kind: Callable[[], Any], name: str):
    """No attribute of a context can be set or deleted, whether or not it exists."""
    context = kind()
    call = context._source
    with pytest.raises(AttributeError):
        setattr(context, name, None)
    with pytest.raises(AttributeError):
        delattr(context, name)
    assert context._source is call


def test_it_holds_one_thing():
    """A context has a single field, which holds the call behind it."""
    for context in (headless_context(), user_context(), agent_context()):
        assert type(context).__struct_fields__ == ("_source",)
        assert not hasattr(context, "__dict__")


def test_two_contexts_are_never_the_same():
    """Contexts of different calls are unequal, and contexts are hashable."""
    one, two = headless_context(), headless_context()
    assert one != two
    assert len({one, two, one}) == 2


@pytest.mark.parametrize(
    ("make", "name"),
    [(headless_context, "ToolContext"), (user_context, "UserContext"), (agent_context, "AgentContext")],
)
def test_its_repr_names_the_call_the_tool_and_whether_it_has_ended(make: Callable[..., Any], name: str):
    """A context's repr shows the call, the tool and whether the call has ended, and none of the call's content."""
    context = make(call_id="call-4", tool=Tool("search", "Searches."))
    assert repr(context) == f"<{name} call-4 of search>"
    expire(context)
    assert repr(context) == f"<{name} call-4 of search, ended>"


def test_a_mock_call_is_a_call():
    """The mock call behind a context has every member that contexts read from an attempt."""
    members = set(re.findall(r"\._source\.(\w+)", inspect.getsource(sys.modules[ToolContext.__module__])))
    assert len(members) > 30
    given = dict.fromkeys(MEMBERS, object())
    call = headless_context(**given)._source
    assert [name for name in members if not hasattr(call, name)] == []


# --- verbs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [name for name in VERBS if name not in AT_ONCE])
async def test_verbs_that_wait_return_an_operation(verb: str):
    """Verbs that wait return an operation that has the call's `home` and can be awaited."""
    context = everything()
    operation = VERBS[verb](context)
    assert isinstance(operation, Operation)
    assert operation.home is context._source.home
    await operation


@pytest.mark.parametrize("verb", [name for name in VERBS if name in AT_ONCE - {"ticket", "spawn"}])
def test_verbs_that_act_at_once_return_done(verb: str):
    """Verbs that act at once, except `ticket` and `spawn`, return `Done`, which need not be awaited."""
    assert isinstance(VERBS[verb](headless_context()), Done)


@pytest.mark.parametrize("verb", VERBS)
async def test_every_verb_refuses_after_the_end(verb: str):
    """After the call has ended, every verb raises `ContextExpired` with the call's id and a hint."""
    context = everything()
    expire(context)
    with pytest.raises(
        ContextExpired, match=r"the call 'call-1' has ended.*before the handler returns"
    ) as caught:
        VERBS[verb](context)
    assert caught.value.call == "call-1"
    assert isinstance(caught.value, ContextError)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_after_the_end_from_another_thread(verb: str):
    """After the call has ended, its verbs refuse even in a thread that outlived it, and outside an event loop."""

    async def main() -> None:
        context = everything()
        began, ended = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def outlives() -> str:
            loop.call_soon_threadsafe(began.set)
            ended.wait(PATIENCE)
            with pytest.raises(ContextExpired):
                VERBS[verb](context)
            return "refused"

        handler = asyncio.ensure_future(run_in_thread(outlives))
        await began.wait()
        expire(context)
        ended.set()
        assert await handler == "refused"

    run(main)
    context = everything()
    expire(context)
    with pytest.raises(ContextExpired):
        VERBS[verb](context)


@pytest.mark.parametrize("verb", [name for name in VERBS if name not in AT_ONCE])
async def test_an_operation_made_before_the_end_is_refused_after(verb: str):
    """Awaiting an operation after its call has ended raises `ContextExpired`, even if a verb returned it before the end."""
    context = everything()
    operation = VERBS[verb](context)
    expire(context)
    with pytest.raises(ContextExpired):
        await operation


def test_facts_can_be_read_after_the_end():
    """A call's facts can be read after its end, for example in a late log line."""
    context = headless_context(call_id="call-5")
    expire(context)
    assert (context.call_id, context.depth, context.invocation.attempt) == ("call-5", 0, 1)


def test_expire_ends_what_a_thread_waits_for():
    """`.wait()` in a thread raises `ContextExpired` when another thread ends the call."""
    context = user_context({"pick": {"selected": "tea"}})
    began = threading.Event()

    async def never() -> None:
        began.set()
        await asyncio.Event().wait()

    seen: list[BaseException] = []

    def body() -> None:
        try:
            context.once("stuck", never).wait()
        except ContextExpired as error:
            seen.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    assert began.wait(PATIENCE)
    expire(context)
    thread.join()
    assert len(seen) == 1


def test_expire_works_after_the_loop_has_gone():
    """A context whose event loop is closed can still be expired, and its verbs then refuse."""

    async def main() -> ToolContext:
        return headless_context()

    context = asyncio.run(main())
    expire(context)
    with pytest.raises(ContextExpired):
        context.beat()


async def test_call_passes_any_argument_name_on():
    """`call` passes on arguments named `name`, `self` or `arguments`, which do not clash with its own parameters."""
    context = headless_context(results={"greet": lambda arguments: dict(arguments)})
    result = await context.call("greet", name="Ada", self=1, arguments=2)
    assert result == ToolResult.ok({"name": "Ada", "self": 1, "arguments": 2})


# --- capabilities --------------------------------------------------------------------------------


def test_presence_follows_the_environment():
    """A user context has `wait_for`, an agent context has `prompt_model`, and a headless context has neither."""
    user, agent, nobody = user_context(), agent_context(), headless_context()
    assert [context.wait_for is not None for context in (user, agent, nobody)] == [True, False, False]
    assert [context.prompt_model is not None for context in (user, agent, nobody)] == [False, True, False]
    assert (type(user), type(agent), type(nobody)) == (UserContext, AgentContext, ToolContext)


def test_the_narrower_contexts_say_what_was_missing():
    """Using a narrower context where its capability is missing raises an error that says where the capability is available."""
    with pytest.raises(AssertionError, match="only where somebody can be asked"):
        UserContext(headless_context()._source).wait_for  # noqa: B018
    with pytest.raises(AssertionError, match="only where there is a model"):
        AgentContext(headless_context()._source).prompt_model  # noqa: B018


@pytest.mark.parametrize("outcome", ["denied", "timed out", "cancelled", "nobody there"])
def test_an_approval_is_true_exactly_when_approved(outcome: Any):
    """An `Approval` is truthy if the request was approved, and falsy otherwise."""
    assert Approval(True, "", "ada", "approved")
    assert not Approval(False, "no", "ada", outcome)


@tool
async def make_choice(choices: list[str], context: ToolContext) -> str:
    """Pick one of the choices."""
    if context.prompt_model:
        return (await context.prompt_model(f"Choose from: {choices}", Choice)).selected
    if context.wait_for:
        return (await context.wait_for("pick", {"choices": choices}, Choice)).selected
    return choices[0]


@tool
def make_choice_sync(choices: list[str], context: ToolContext) -> str:
    """Pick one of the choices."""
    if context.prompt_model:
        return context.prompt_model(f"Choose from: {choices}", Choice).wait().selected
    if context.wait_for:
        return context.wait_for("pick", {"choices": choices}, Choice).wait().selected
    return choices[0]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: user_context({"pick": {"selected": "tea"}}), "tea"),
        (lambda: agent_context({"Choose from": {"selected": "milk"}}), "milk"),
        (headless_context, "coffee"),
    ],
    ids=["user", "agent", "headless"],
)
def test_one_tool_in_any_environment(make: Callable[[], ToolContext], expected: str):
    """One tool runs unchanged with a person, with a model, and with neither."""
    params = make_choice.parse({"choices": ["coffee", "tea", "milk"]})

    async def main() -> None:
        handler: Any = make_choice.handler
        assert await handler(params, context=make()) == ToolResult.ok(expected)
        in_thread: Any = make_choice_sync.handler
        context = make()
        assert await run_in_thread(lambda: in_thread(params, context=context)) == ToolResult.ok(expected)

    run(main)
    in_script: Any = make_choice_sync.handler
    assert in_script(params, context=make()) == ToolResult.ok(expected)
