"""Resources that fail to close after a run, and connections that only one thread may use."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, Prompt, ScriptedModel, ToolCall, ToolContext, tool
from handrail.errors import PromptEvaluationError, ResourceError
from handrail.resources import Binding
from handrail.run import open_gate

pytestmark = [  # from Python 3.13 on, `sqlite3` warns about connections that are not closed
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Thing:
    """A resource that logs when it is closed."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def close(self) -> None:
        self.log.append(type(self).__name__)


class Stubborn(Thing):
    def close(self) -> None:
        super().close()
        raise RuntimeError("it does not close")


class Leaver(Thing):
    def close(self) -> None:
        super().close()
        raise SystemExit(3)


def using(*protocols: type) -> Any:
    @tool(effect="idempotent")
    async def use(context: ToolContext) -> str:
        """Use resources."""
        return "".join(type(context.resources.get(protocol)).__name__ for protocol in protocols)

    return use


def test_a_resource_that_does_not_close_does_not_discard_a_finished_run(caplog: pytest.LogCaptureFixture):
    """If resources fail to close, a finished run still returns its response. The errors are in `unclosed` and are logged."""
    log: list[str] = []
    bindings = [
        Binding(Thing, lambda _: Thing(log)),
        Binding(Leaver, lambda _: Leaver(log)),
        Binding(Stubborn, lambda _: Stubborn(log)),
    ]
    adapter = Adapter(ScriptedModel([ToolCall("use"), "done"]), resources=bindings)
    response = adapter.evaluate(Prompt("p", "Go.", tools=[using(Thing, Leaver, Stubborn)]), "go").wait()
    assert response.text == "done"
    assert log == ["Stubborn", "Leaver", "Thing"]
    assert [type(error) for error in response.unclosed] == [RuntimeError, ResourceError]
    assert "it does not close" in caplog.text
    assert "closing it raised SystemExit" in caplog.text


def test_a_resource_that_does_not_close_does_not_hide_the_error_of_a_run(caplog: pytest.LogCaptureFixture):
    """A failed run's error is raised, with a note about the resource that could not be closed."""
    log: list[str] = []
    bindings = [Binding(Stubborn, lambda _: Stubborn(log))]
    adapter = Adapter(ScriptedModel([ToolCall("use")]), resources=bindings)
    with pytest.raises(PromptEvaluationError, match="no answer to request 2") as failed:
        adapter.evaluate(Prompt("p", "Go.", tools=[using(Stubborn)]), "go").wait()
    assert "while closing the resource Stubborn: RuntimeError: it does not close" in failed.value.__notes__[0]
    assert "it does not close" in caplog.text


# --- connections to SQLite ----------------------------------------------------------------------------


def connecting(path: Path, **options: Any) -> Binding[Any]:
    return Binding(sqlite3.Connection, lambda _: sqlite3.connect(path, **options))


async def query(context: ToolContext) -> int:
    """Use the connection on the loop's thread."""
    (row,) = context.resources.get(sqlite3.Connection).execute("select 1")
    return row[0]


def threaded() -> Any:
    @tool(name="in_thread", effect="idempotent")
    def in_thread(context: ToolContext) -> int:
        """Use the connection on a thread."""
        (row,) = context.resources.get(sqlite3.Connection).execute("select 1")
        return row[0]

    return in_thread


@pytest.mark.parametrize("first", ["query", "in_thread"])
async def test_a_connection_fails_at_its_first_use_on_another_thread(first: str, tmp_path: Path):
    """An SQLite connection that belongs to one thread fails on another one, and the message says how to share it."""
    tools = [tool(effect="idempotent")(query), threaded()]
    gate = open_gate(tools, resources=[connecting(tmp_path / "a.db")])
    assert (await gate.invoke(first)).value == 1
    (second,) = {"query", "in_thread"} - {first}
    result = await gate.invoke(second)
    assert "sqlite3.connect(..., check_same_thread=False)" in result.message
    assert (await gate.invoke(second)).success is False
    with contextlib.suppress(ExceptionGroup):
        await gate.close()


async def test_a_shared_connection_works_on_every_thread(tmp_path: Path):
    """With `check_same_thread=False`, one connection serves the run's handlers on all threads and can be closed."""
    tools = [tool(effect="idempotent")(query), threaded()]
    gate = open_gate(tools, resources=[connecting(tmp_path / "a.db", check_same_thread=False)])
    for name in ("in_thread", "query", "in_thread"):
        assert (await gate.invoke(name)).value == 1
    await gate.close()


def test_a_connection_that_does_not_close_says_why(tmp_path: Path):
    """A connection that a tool opened on its own thread can't be closed after the run.

    The response is still returned, with an error that says why.
    """
    adapter = Adapter(
        ScriptedModel([ToolCall("in_thread"), "done"]), resources=[connecting(tmp_path / "a.db")]
    )
    response = adapter.evaluate(Prompt("p", "Go.", tools=[threaded()]), "go").wait()
    assert response.text == "done"
    (error,) = response.unclosed
    assert "check_same_thread=False" in error.__notes__[0]
