"""Resources: their three scopes, when they are created and closed, and how providers depend on each other."""

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

import pytest

from handrail import Deadline, ToolContext, ToolResult, TransientError, gather, tool
from handrail.errors import ContextExpired, ResourceError
from handrail.protocols import BudgetTrackerProtocol, Filesystem, PolicyDecision
from handrail.resources import Binding, given
from handrail.resources import scopes as scopes_module
from handrail.resources.memory import MemoryFilesystem
from handrail.run import open_gate
from handrail.run.call import Attempt
from handrail.run.gate import Gate
from handrail.run.limits import Budget, BudgetTracker
from handrail.session import Session
from handrail.testing import RecordingSubscriber


class Thing:
    """A resource that logs when it is created and when it is closed."""

    log: list[str]

    def __init__(self, name: str, log: list[str], needs: Any = None) -> None:
        self.name = name
        self.log = log
        self.needs = needs
        log.append(f"+{name}")

    def close(self) -> None:
        self.log.append(f"-{self.name}")


class AsyncThing(Thing):
    async def aclose(self) -> None:
        await asyncio.sleep(1)
        self.log.append(f"-{self.name} async")


class A(Protocol): ...


class B(Protocol): ...


class C(Protocol): ...


Body = Callable[[ToolContext], Awaitable[Any]]


class Scene:
    """A gate with the given bindings and a single tool, whose body the test provides."""

    def __init__(self, *bindings: Binding[Any], **options: Any) -> None:
        self.body: Body | None = None

        @tool(effect="idempotent", timeout=options.pop("timeout", None))
        async def do(context: ToolContext) -> Any:
            """Run the test's body."""
            assert self.body is not None
            return await self.body(context)

        self.session = Session()
        self.seen = RecordingSubscriber(self.session)
        self.gate: Gate = open_gate([do], resources=bindings, session=self.session, **options)

    async def call(self, body: Body) -> ToolResult[Any]:
        self.body = body
        result = await self.gate.invoke("do")
        self.seen.assert_paired()
        return result


def getting(*protocols: Any) -> Body:
    async def body(context: ToolContext) -> list[str]:
        return [context.resources.get(protocol).name for protocol in protocols]

    return body


def numbered(log: list[str], prefix: str = "") -> Callable[[Any], Thing]:
    made: list[int] = []

    def provide(resources: Any) -> Thing:
        made.append(1)
        return Thing(f"{prefix}{len(made)}", log)

    return provide


# --- scopes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "got", "log"),
    [
        ("run", [["1", "1"], ["1", "1"]], ["+1", "end", "end", "-1"]),
        ("call", [["1", "1"], ["2", "2"]], ["+1", "-1", "end", "+2", "-2", "end"]),
        ("fresh", [["1", "2"], ["3", "4"]], ["+1", "+2", "-2", "-1", "end", "+3", "+4", "-4", "-3", "end"]),
    ],
)
@pytest.mark.virtual_time
async def test_three_scopes(scope: Any, got: Any, log: list[str]):
    """A resource is created once per run, once per call or at each request, and closed when the run or the call ends."""
    found: list[str] = []

    scene = Scene(Binding(A, numbered(found), scope))
    results: list[Any] = []
    for _ in range(2):
        results.append((await scene.call(getting(A, A))).value)
        found.append("end")
    await scene.gate.close()
    assert results == got
    assert found == log


@pytest.mark.virtual_time
async def test_calls_at_once_share_what_is_the_runs_and_nothing_else():
    """Concurrent calls share a resource with the scope `run`, and each has its own resource with the scope `call`."""
    log: list[str] = []

    async def body(context: ToolContext) -> tuple[str, str]:
        one = context.resources.get(A)
        await asyncio.sleep(1)
        two = context.resources.get(B)
        return one.name, two.name  # pyright: ignore[reportAttributeAccessIssue]  # the attribute of the real class

    scene = Scene(Binding(A, numbered(log, "run")), Binding(B, numbered(log, "call"), "call"))
    scene.body = body
    results = await asyncio.gather(*(scene.gate.invoke("do") for _ in range(3)))
    assert sorted(result.value for result in results) == [
        ("run1", "call1"),
        ("run1", "call2"),
        ("run1", "call3"),
    ]


@pytest.mark.virtual_time
async def test_a_given_thing_is_never_closed():
    """An object passed to `given` is never closed, because it belongs to the caller."""
    log: list[str] = []

    scene = Scene(given(A, Thing("mine", log)), Binding(B, lambda resources: resources.get(A), "call"))
    assert (await scene.call(getting(A, B))).value == ["mine", "mine"]
    await scene.gate.close()
    assert log == ["+mine"]


@pytest.mark.virtual_time
async def test_another_name_for_a_thing_does_not_close_it():
    """A resource that a second binding also returns is closed once, with the scope in which it was created."""
    log: list[str] = []

    scene = Scene(Binding(A, numbered(log)), Binding(B, lambda resources: resources.get(A), "call"))
    for _ in range(2):
        assert (await scene.call(getting(B))).value == ["1"]
    await scene.gate.close()
    assert log == ["+1", "-1"]


async def test_threads_make_one_of_the_runs_scope():
    """Sync handlers in several threads that request a run's resource at the same time get the same one."""
    log: list[str] = []
    together = threading.Barrier(4)

    @tool
    def grab(context: ToolContext) -> str:
        """Return the name of resource A."""
        together.wait()
        return context.resources.get(A).name  # pyright: ignore[reportAttributeAccessIssue]  # the attribute of the real class

    gate = open_gate([grab], resources=[Binding(A, numbered(log))])
    assert ({result.value for result in await asyncio.gather(*(gate.invoke("grab") for _ in range(4)))}) == {
        "1"
    }
    assert log == ["+1"]


# --- closing -------------------------------------------------------------------------------------


def chain(log: list[str]) -> list[Binding[Any]]:
    """Return bindings in which A needs B and B needs C, with several kinds of providers."""

    def make_b(resources: Any) -> Iterator[Thing]:
        thing = Thing("b", log, resources.get(C))
        try:
            yield thing
        finally:
            log.append("-b generator")

    return [
        Binding(A, lambda resources: AsyncThing("a", log, resources.get(B)), "call"),
        Binding(B, make_b, "call"),
        Binding(C, lambda resources: Thing("c", log), "call"),
    ]


CHAIN = ["+c", "+b", "+a", "-a async", "-b generator", "-c"]


@pytest.mark.parametrize("how", ["ok", "raises", "says no", "times out", "cancels itself", "retried"])
@pytest.mark.virtual_time
async def test_what_a_call_made_is_closed_in_reverse_however_it_ends(how: str):
    """However a call ends, its resources are closed in reverse order of creation, and a retry creates new ones."""
    log: list[str] = []

    async def body(context: ToolContext) -> Any:
        context.resources.get(A)
        if how == "raises":
            raise ValueError("no")
        if how == "says no":
            return ToolResult.error("no")
        if how == "times out":
            await asyncio.sleep(100)
        if how == "cancels itself":
            raise asyncio.CancelledError
        if how == "retried" and context.invocation.attempt == 1:
            raise TransientError("again", retry_after=1)
        return "ok"

    scene = Scene(*chain(log), timeout=10)
    result = await scene.call(body)
    assert result.success is (how in ("ok", "retried"))
    assert log == (CHAIN * 2 if how == "retried" else CHAIN)


@pytest.mark.virtual_time
async def test_what_a_call_made_is_closed_when_the_run_is_cancelled():
    """When a run is cancelled, its calls' resources are closed, and the cancellation does not interrupt an async `aclose`."""
    log: list[str] = []

    async def body(context: ToolContext) -> Any:
        context.resources.get(A)
        await asyncio.sleep(100)

    scene = Scene(*chain(log))
    scene.body = body
    calling = asyncio.ensure_future(scene.gate.invoke("do"))
    await asyncio.sleep(1)
    scene.gate.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    scene.seen.assert_paired()
    assert log == CHAIN


@pytest.mark.virtual_time
async def test_closed_before_the_call_is_said_to_be_over():
    """A call's resources are closed before its `ToolInvoked` event is published."""
    log: list[str] = []

    scene = Scene(*chain(log))
    scene.session.dispatcher.subscribe(object, lambda event: log.append(type(event).__name__))
    await scene.call(getting(A))
    assert log[-1] == "ToolInvoked"
    assert log[-2] == "-c"


class Stubborn(Thing):
    def close(self) -> None:
        super().close()
        raise RuntimeError(f"{self.name} does not close")


class Fickle(Thing):
    async def aclose(self) -> None:
        self.log.append(f"-{self.name}")
        raise asyncio.CancelledError


class Endless(Thing):
    async def aclose(self) -> None:
        self.log.append(f"-{self.name}")
        await asyncio.sleep(1e9)


def raising_generator(log: list[str]) -> Callable[[Any], Iterator[Thing]]:
    def provide(resources: Any) -> Iterator[Thing]:
        yield Thing("b", log)
        log.append("-b")
        raise RuntimeError("b does not close")

    return provide


@pytest.mark.parametrize("kind", ["sync", "cancelled", "endless", "generator"])
@pytest.mark.virtual_time
async def test_one_that_fails_to_close_keeps_no_other_open(kind: str, caplog: pytest.LogCaptureFixture):
    """If a resource fails to close, the others are closed, the call's result stands, and the error is logged."""
    log: list[str] = []
    wrong: dict[str, Any] = {
        "sync": lambda _: Stubborn("b", log),
        "cancelled": lambda _: Fickle("b", log),
        "endless": lambda _: Endless("b", log),
        "generator": raising_generator(log),
    }

    with caplog.at_level(logging.ERROR):
        scene = Scene(
            Binding(A, lambda _: Thing("a", log), "call"),
            Binding(B, wrong[kind], "call"),
            Binding(C, lambda _: Thing("c", log), "call"),
        )
        async with asyncio.timeout(100):
            assert (await scene.call(getting(A, B, C))).value == ["a", "b", "c"]
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert "closing a resource of do raised" in caplog.text


@pytest.mark.virtual_time
async def test_failures_to_close_the_runs_are_raised_together():
    """All of a run's resources are closed even if some fail. The errors are raised together, each with its resource's name."""
    log: list[str] = []

    bindings: list[Binding[Any]] = [
        Binding(kind, lambda _, name=kind.__name__: Stubborn(name, log)) for kind in (A, B)
    ]
    scene = Scene(*bindings, Binding(C, lambda _: Thing("C", log)))
    await scene.call(getting(C, A, B))
    with pytest.raises(ExceptionGroup) as failed:
        await scene.gate.close()
    assert [str(error) for error in failed.value.exceptions] == ["B does not close", "A does not close"]
    assert failed.value.exceptions[0].__notes__ == ["while closing the resource B"]
    await scene.gate.close()
    assert log[3:] == ["-B", "-A", "-C"]


@pytest.mark.virtual_time
async def test_closing_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """A resource that takes too long to close is abandoned with an error that names it. A `TimeoutError` that closing raises itself is kept."""

    class Slow:
        async def aclose(self) -> None:
            await asyncio.sleep(100)

    class TimesOut:
        async def aclose(self) -> None:
            raise TimeoutError("its own")

    monkeypatch.setattr(scopes_module, "_CLOSE_SECONDS", 50)
    scoped = scopes_module.Scoped()
    scoped.closes(scopes_module.Closer("Slow", Slow().aclose))
    scoped.closes(scopes_module.Closer("TimesOut", TimesOut().aclose))
    assert [str(error) for error in await scoped.close()] == [
        "its own",
        "resource Slow: closing it took longer than 50 seconds. Make closing faster.",
    ]


async def test_a_thing_made_by_a_thread_that_outlived_its_call_is_closed():
    """If a thread creates a resource after its call has ended, the resource is closed, and the thread gets `ContextExpired`."""
    log: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()
    refused: list[BaseException] = []
    over = threading.Event()

    def slow(resources: Any) -> Thing:
        begun.set()
        goes_on.wait(timeout=300)
        return Thing("late", log)

    @tool
    def grab(context: ToolContext) -> str:
        """Request a resource that is created only after the call has ended."""
        try:
            return context.resources.get(A).name  # pyright: ignore[reportAttributeAccessIssue]  # never returned
        except BaseException as error:
            refused.append(error)
            raise
        finally:
            over.set()

    gate = open_gate([grab], resources=[Binding(A, slow, "call")])
    call = asyncio.ensure_future(gate.invoke("grab"))
    assert await asyncio.to_thread(begun.wait, 300)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    goes_on.set()
    assert await asyncio.to_thread(over.wait, 300)
    async with asyncio.timeout(300):
        while len(log) < 2:
            await asyncio.sleep(0.01)
    assert log == ["+late", "-late"]
    assert [type(error) for error in refused] == [ContextExpired]


@pytest.mark.virtual_time
async def test_nothing_is_made_once_the_run_has_ended():
    """No resource is created after the run has ended, because it would never be closed."""
    log: list[str] = []

    scene = Scene(Binding(A, numbered(log)))
    await scene.gate.close()
    assert "the run has ended" in (await scene.call(getting(A))).message
    assert log == []


# --- dependencies of providers -------------------------------------------------------------------


def needs(protocol: Any) -> Callable[[Any], Any]:
    return lambda resources: Thing("x", [], resources.get(protocol))


@pytest.mark.parametrize("scope", ["run", "call", "fresh"])
@pytest.mark.virtual_time
async def test_circles_are_named_with_their_path(scope: Any):
    """The error for a cycle names only the members of the cycle, and a second request gives the same error."""
    scene = Scene(Binding(A, needs(B), scope), Binding(B, needs(C), scope), Binding(C, needs(B), scope))
    for message in [(await scene.call(getting(A))).message for _ in range(2)]:
        assert "resource B: it needs itself: B -> C -> B. Break the cycle" in message


@pytest.mark.virtual_time
async def test_a_thing_that_needs_itself():
    """A resource that needs itself is refused as a cycle."""
    assert "it needs itself: A -> A" in (await Scene(Binding(A, needs(A))).call(getting(A))).message


@pytest.mark.parametrize("by_way_of", [False, True])
@pytest.mark.virtual_time
async def test_what_lives_for_a_call_can_not_be_held_by_the_run(by_way_of: bool):
    """A run's resource can't hold a call's resource, not even through a fresh resource in between."""
    bindings = [
        Binding(A, needs(C if by_way_of else B)),
        Binding(B, numbered([]), "call"),
        Binding(C, needs(B), "fresh"),
    ]
    message = (await Scene(*bindings).call(getting(A))).message
    assert "resource B: it lives for one call, but a resource with the scope 'run' requests it" in message
    assert "Give it the scope 'run', or give the resource that requests it the scope 'call'." in message


@pytest.mark.virtual_time
async def test_a_fork_can_not_be_held_by_the_run():
    """A run's resource can't hold a call's fork, because the fork would have expired by the next call."""
    files = MemoryFilesystem({"a": "1"})
    held = Binding(A, lambda resources: Thing("x", [], resources.get(Filesystem)))
    scene = Scene(
        held,
        Binding(B, lambda resources: Thing("y", [], resources.get(Filesystem)), "call"),
        filesystem=files,
    )

    async def read(context: ToolContext) -> str:
        return context.resources.get(B).needs.read("a")  # pyright: ignore[reportAttributeAccessIssue]  # the attribute of the real class

    assert [(await scene.call(read)).value for _ in range(2)] == ["1", "1"]
    for message in [(await scene.call(getting(A))).message for _ in range(2)]:
        assert "each call works on its own fork of it" in message
        assert "Give the resource" in message


@pytest.mark.virtual_time
async def test_a_fresh_thing_of_the_runs_is_closed_with_the_run():
    """A fresh resource that a run's resource requested is closed with the run."""
    log: list[str] = []

    scene = Scene(Binding(A, needs(B)), Binding(B, numbered(log), "fresh"))
    await scene.call(getting(A))
    assert log == ["+1"]
    await scene.gate.close()
    assert log == ["+1", "-1"]


@pytest.mark.virtual_time
async def test_a_provider_that_raises_leaves_nothing_behind_and_is_tried_again():
    """A provider that raises is called again at the next request. The resource that it had requested is closed with the run."""
    log: list[str] = []
    tries: list[int] = []

    def flaky(resources: Any) -> Thing:
        tries.append(1)
        need = resources.get(B)
        if len(tries) == 1:
            raise OSError("not yet")
        return Thing("a", log, need)

    scene = Scene(Binding(A, flaky), Binding(B, numbered(log)))
    assert "OSError: not yet" in (await scene.call(getting(A))).message
    assert (await scene.call(getting(A))).value == ["a"]
    await scene.gate.close()
    assert log == ["+1", "+a", "-a", "-1"]


# --- async providers -----------------------------------------------------------------------------


def async_kinds(log: list[str]) -> dict[str, Any]:
    async def function(resources: Any) -> Thing:
        await asyncio.sleep(1)
        return Thing("a", log)

    async def generator(resources: Any) -> AsyncIterator[Thing]:
        await asyncio.sleep(1)
        yield Thing("a", log)
        await asyncio.sleep(1)
        log.append("-a")

    return {
        "function": function,
        "generator": generator,
        "lambda": lambda resources: function(resources),
        "lambda of a generator": lambda resources: generator(resources),
    }


def opening(*protocols: Any) -> Body:
    async def body(context: ToolContext) -> list[str]:
        return [(await context.resources.open(protocol)).name for protocol in protocols]

    return body


@pytest.mark.parametrize("kind", ["function", "generator", "lambda", "lambda of a generator"])
@pytest.mark.virtual_time
async def test_an_async_binding_is_opened_and_not_gotten(kind: str):
    """`get` refuses an async binding and says what to write instead. After `open`, `get` returns the resource."""
    log: list[str] = []

    scene = Scene(Binding(A, async_kinds(log)[kind]))
    message = (await scene.call(getting(A))).message
    assert "resource A: its provider is async. Write `await context.resources.open(A)`" in message
    assert (await scene.call(opening(A, A))).value == ["a", "a"]
    assert (await scene.call(getting(A))).value == ["a"]
    await scene.gate.close()
    assert log == ["+a", "-a"]


@pytest.mark.virtual_time
async def test_open_is_for_every_binding():
    """`open` works for async, plain and given bindings, and a sync handler can wait for it."""
    log: list[str] = []

    @tool
    def grab(context: ToolContext) -> str:
        """Return the name of resource A."""
        return context.resources.open(A).wait().name  # pyright: ignore[reportAttributeAccessIssue]  # the attribute of the real class

    scene = Scene(Binding(A, numbered(log)), given(B, Thing("b", log)))
    assert (await scene.call(opening(A, B, A))).value == ["1", "b", "1"]
    gate = open_gate([grab], resources=[Binding(A, async_kinds(log)["function"])])
    assert (await gate.invoke("grab")).value == "a"


@pytest.mark.parametrize("scope", ["run", "call"])
@pytest.mark.virtual_time
async def test_opened_by_several_at_once_it_is_made_once(scope: Any):
    """Concurrent requests in the resource's scope wait for the first one and share its result."""
    log: list[str] = []

    async def body(context: ToolContext) -> bool:
        one, two = await gather(context.resources.open(A), context.resources.open(A))
        return one is two

    scene = Scene(Binding(A, async_kinds(log)["function"], scope))
    scene.body = body
    results = await asyncio.gather(*(scene.gate.invoke("do") for _ in range(3)))
    assert [result.value for result in results] == [True] * 3
    await scene.gate.close()
    assert sorted(log) == (["+a", "-a"] if scope == "run" else ["+a"] * 3 + ["-a"] * 3)


@pytest.mark.virtual_time
async def test_two_different_ones_opened_at_once_are_no_circle():
    """Opening different resources concurrently is not mistaken for a cycle."""
    log: list[str] = []

    async def body(context: ToolContext) -> list[str]:
        opened = await gather(*(context.resources.open(kind) for kind in (A, B, C)))
        return [thing.name for thing in opened]  # pyright: ignore[reportAttributeAccessIssue]  # the attribute of the real class

    def slow(seconds: int) -> Any:
        async def provide(resources: Any) -> Thing:
            await asyncio.sleep(seconds)
            return Thing(str(seconds), log)

        return provide

    assert (await Scene(Binding(A, slow(3)), Binding(B, slow(1)), Binding(C, slow(2))).call(body)).value == [
        "3",
        "1",
        "2",
    ]


@pytest.mark.virtual_time
async def test_the_next_tries_when_the_first_could_not_open_it():
    """If opening a resource fails or is cancelled, the next request that waits for it opens it."""
    log: list[str] = []
    tries: list[int] = []

    async def flaky(resources: Any) -> Thing:
        tries.append(1)
        await asyncio.sleep(1)
        if len(tries) == 1:
            raise OSError("not yet")
        await asyncio.sleep(10 if len(tries) == 2 else 0)
        return Thing(str(len(tries)), log)

    scene = Scene(Binding(A, flaky))
    scene.body = opening(A)
    first, second, third = (asyncio.ensure_future(scene.gate.invoke("do")) for _ in range(3))
    assert "OSError" in (await first).message
    await asyncio.sleep(2)
    second.cancel()
    assert (await third).value == ["3"]
    assert len(tries) == 3


@pytest.mark.virtual_time
async def test_async_providers_may_need_async_ones():
    """Async providers may open other async resources, and cycles and scope errors are reported there too."""
    log: list[str] = []

    def opens(protocol: Any, name: str) -> Any:
        async def provide(resources: Any) -> Thing:
            return Thing(name, log, await resources.open(protocol))

        return provide

    scene = Scene(
        Binding(A, opens(B, "a")), Binding(B, opens(C, "b")), Binding(C, async_kinds(log)["function"])
    )
    assert (await scene.call(opening(A))).value == ["a"]
    await scene.gate.close()
    assert log == ["+a", "+b", "+a", "-a", "-b", "-a"]
    circle = Scene(Binding(A, opens(B, "a")), Binding(B, opens(A, "b")))
    assert "it needs itself: A -> B -> A" in (await circle.call(opening(A))).message
    captive = Scene(Binding(A, opens(B, "a")), Binding(B, numbered(log), "call"))
    assert "it lives for one call" in (await captive.call(opening(A))).message


@pytest.mark.virtual_time
async def test_a_circle_through_two_calls_is_found_and_not_waited_for():
    """A cycle across two calls, each opening what the other needs, is reported instead of causing a deadlock."""

    def opens(protocol: Any) -> Any:
        async def provide(resources: Any) -> Thing:
            await asyncio.sleep(1)
            return Thing("x", [], await resources.open(protocol))

        return provide

    scene = Scene(Binding(A, opens(B)), Binding(B, opens(A)))

    async def body(context: ToolContext) -> Any:
        return (await context.resources.open(A if context.call_id == "one" else B)).name  # pyright: ignore[reportAttributeAccessIssue]  # never reached

    scene.body = body
    async with asyncio.timeout(100):
        results = await asyncio.gather(*(scene.gate.invoke("do", call_id=name) for name in ("one", "two")))
    for message in [result.message for result in results]:
        assert "it needs itself" in message


def none(resources: Any) -> Iterator[Any]:
    yield from ()


def two(resources: Any) -> Iterator[Any]:
    yield Thing("1", [])
    yield Thing("2", [])


async def none_async(resources: Any) -> AsyncIterator[Any]:
    for each in ():
        yield each


async def two_async(resources: Any) -> AsyncIterator[Any]:
    yield Thing("1", [])
    yield Thing("2", [])


@pytest.mark.parametrize(
    ("provide", "how_often"),
    [(none, "nothing"), (none_async, "nothing"), (two, "twice"), (two_async, "twice")],
)
@pytest.mark.virtual_time
async def test_a_generator_yields_once(provide: Any, how_often: str, caplog: pytest.LogCaptureFixture):
    """A generator that yields nothing causes an error on request, and one that yields twice causes an error on close."""
    with caplog.at_level(logging.ERROR):
        message = (await Scene(Binding(A, provide, "call")).call(opening(A))).message
    words = f"resource A: its provider is a generator and yielded {how_often}. Yield the resource once"
    assert words in (message if how_often == "nothing" else caplog.text)


# --- forks, budget, policies ---------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_forkable_of_the_run_is_the_calls_fork():
    """A call gets its own fork of a run's forkable resource. The fork is committed or dropped with the call."""
    files = MemoryFilesystem()

    async def body(context: ToolContext) -> bool:
        mine = context.resources.get(Filesystem)
        mine.write("a", "new")
        assert not files.exists("a")
        return mine is context.filesystem is await context.resources.open(Filesystem) is not files

    async def fails(context: ToolContext) -> None:
        context.filesystem.write("b", "new")
        raise ValueError("no")

    scene = Scene(filesystem=files)
    assert (await scene.call(body)).value is True
    assert files.read("a") == "new"
    await scene.call(fails)
    assert not files.exists("b")


@pytest.mark.parametrize("scope", ["call", "fresh"])
@pytest.mark.virtual_time
async def test_a_forkable_of_the_call_is_its_own(scope: Any):
    """A forkable resource with the scope `call` or `fresh` is used directly, without a fork."""

    async def body(context: ToolContext) -> list[str]:
        first = context.resources.get(Filesystem)
        first.write("a", "x")
        return [type(first).__name__, type(context.resources.get(Filesystem)).__name__]

    assert (await Scene(Binding(Filesystem, lambda _: MemoryFilesystem(), scope)).call(body)).value == [
        "MemoryFilesystem",
        "MemoryFilesystem",
    ]


@pytest.mark.parametrize("budget", [None, Budget(tool_calls=5)])
@pytest.mark.virtual_time
async def test_the_budget_is_one_object(budget: Any):
    """The budget is the same object on the context, in a provider, and when requested by class or by protocol."""

    async def body(context: ToolContext) -> bool:
        resources = context.resources
        return (
            resources.get(BudgetTracker)
            is resources.get(BudgetTrackerProtocol)
            is await resources.open(BudgetTracker)
            is resources.get(A).needs  # pyright: ignore[reportAttributeAccessIssue]  # the attribute of the real class
            is context.budget_tracker
        )

    assert (await Scene(Binding(A, needs(BudgetTracker)), budget=budget).call(body)).value is True


class Looks:
    """A policy that requests a resource."""

    name = "looks"

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> Any:
        context.resources.get(A)
        return PolicyDecision.allow()

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        return None


@pytest.mark.virtual_time
async def test_what_a_policy_made_for_the_call_is_closed_with_it():
    """A resource that a policy requested for a call is closed with the call."""
    log: list[str] = []

    await Scene(Binding(A, numbered(log), "call"), policies=[Looks()]).call(getting())
    assert log == ["+1", "-1"]


async def test_a_dead_context_gives_no_resources():
    """An expired context refuses `get` and `open`, and so do the `resources` that the provider of a call's resource kept."""
    kept: list[Any] = []

    def keeps(resources: Any) -> Thing:
        kept.append(resources)
        return Thing("x", [])

    async def body(context: ToolContext) -> None:
        context.resources.get(A)
        kept.append(context.resources)

    scene = Scene(Binding(A, keeps, "call"), Binding(B, keeps), deadline=Deadline.after(3600))
    await scene.call(body)
    for resources in kept:
        for verb in (resources.get, resources.open):
            with pytest.raises(ContextExpired):
                verb(B)


@pytest.mark.virtual_time
async def test_resources_of_the_run_may_ask_later():
    """A run's provider may keep its `resources` and request more of the run's resources later."""
    log: list[str] = []

    async def later(context: ToolContext) -> str:
        return context.resources.get(A).needs.get(B).name  # pyright: ignore[reportAttributeAccessIssue]  # the attribute of the real class

    scene = Scene(Binding(A, lambda resources: Thing("a", log, resources)), Binding(B, numbered(log)))
    await scene.call(getting(A))
    assert (await scene.call(later)).value == "1"


def test_resource_errors_are_ours_and_carry_the_resource():
    """A `ResourceError` is a `LookupError`, and its `resource` is the resource's name."""
    with pytest.raises(ResourceError) as caught:
        Binding(A, numbered([]), "always")  # pyright: ignore[reportArgumentType]  # wrong on purpose
    assert isinstance(caught.value, LookupError)
    assert caught.value.resource == "A"


async def test_a_call_that_asked_for_resources_is_freed_when_it_is_over():
    """A finished call that used resources is freed by reference counting alone."""
    scene = Scene(given(Thing, Thing("shared", [])), Binding(A, numbered([]), "call"))
    others = _attempts()  # objects of other tests, which may still be referenced
    gc.disable()
    try:
        for _ in range(3):
            assert (await scene.call(getting(Thing, A))).success
        left = [each for each in _attempts() if not any(each is other for other in others)]
    finally:
        gc.enable()
    assert left == []


def _attempts() -> list[Attempt]:
    return [each for each in gc.get_objects() if type(each) is Attempt]
