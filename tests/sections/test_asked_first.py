"""If a command can reach something outside its folder, a person is asked before it runs.

A listener on the host stands in for what a command could reach: a Unix socket in an exposed folder, or a port on this
machine if network access is on. It answers each message, so a command that ran to its end has been heard.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    open_gate,
    tool,
)
from handrail.errors import RunParked
from handrail.question import Question
from handrail.resources.shell import Allow, Shell, probe
from handrail.sections.commands import ShellTools, run_command_tool
from handrail.testing import Person
from support.folders import PYTHON, outside_tmp
from support.parked_runs import answer_to
from support.worker_folders import sound

ASK = CapabilityPolicy({"proc.exec": "ask", "worker": "allow"}, effects={"irreversible": "allow"})


class Listener:
    """A daemon on the host that records what it receives, and answers `ok`."""

    def __init__(self, kind: Literal["exposed", "network"], place: Path) -> None:
        self.heard: list[bytes] = []
        if kind == "network":
            self._socket = socket.create_server(("127.0.0.1", 0))
            where, family = repr(self._socket.getsockname()), "AF_INET"
            self.shell = Shell([Allow(...)], network=True)
            self.named = "the network"
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(str(place / "daemon"))
            self._socket.listen()
            where, family = repr(str(place / "daemon")), "AF_UNIX"
            self.shell = Shell([Allow(...)], expose=[place])
            self.named = str(place)
        code = f"import socket; s = socket.socket(socket.{family}); s.connect({where}); s.sendall(b'hello'); s.recv(2)"
        self.command = [PYTHON, "-c", f"{code}; open('a.txt', 'w').write('changed')"]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                talk, _ = self._socket.accept()
            except OSError:
                return
            with talk:
                self.heard.append(talk.recv(5))
                talk.sendall(b"ok")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture(params=["exposed", "network"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    support = probe(tmp_path)
    if not support.contained:
        pytest.skip("; ".join(support.missing))
    with (
        tempfile.TemporaryDirectory(dir=outside_tmp(), prefix=".d-") as place,
        closing(Listener(request.param, Path(place))) as made,
    ):
        yield made


@pytest.fixture
def files(tmp_path: Path) -> DirectoryFilesystem:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("as it was")
    return DirectoryFilesystem(tmp_path / "work")


class Watching:
    """A person who approves or denies, and records how many messages the listener had received when they were asked."""

    def __init__(self, listener: Listener, approves: bool) -> None:
        self.questions: list[Question] = []
        self.heard_before: list[int] = []
        self._listener = listener
        self._approves = approves
        self.person = Person(approve=self._answer)

    def _answer(self, question: Question) -> bool:
        self.questions.append(question)
        self.heard_before.append(len(self._listener.heard))
        return self._approves


def check(listener: Listener, watching: Watching, files: DirectoryFilesystem, approved: bool) -> None:
    """Check that nothing was heard before the question, nothing after a denial, and one message after an approval."""
    assert watching.heard_before == [0]
    (question,) = watching.questions
    assert "It has not run yet, because it can reach" in question.message
    assert listener.named in question.message
    assert "diff" not in question.payload
    assert listener.heard == ([b"hello"] if approved else [])
    assert files.read("a.txt") == ("changed" if approved else "as it was")


Way = Callable[[Listener, DirectoryFilesystem, Watching], Any]


async def directly(listener: Listener, files: DirectoryFilesystem, watching: Watching) -> None:
    gate = open_gate(
        [run_command_tool(listener.shell)], filesystem=files, policies=[ASK], environment=watching.person
    )
    await gate.invoke("run_command", {"command": listener.command})


async def nested(listener: Listener, files: DirectoryFilesystem, watching: Watching) -> None:
    @tool(effect="irreversible")
    async def outer(context: ToolContext) -> str:
        """Run the command in an inner call."""
        return str(await context.call("run_command", command=listener.command))

    gate = open_gate(
        [outer, run_command_tool(listener.shell)],
        filesystem=files,
        policies=[ASK],
        environment=watching.person,
    )
    await gate.invoke("outer")


async def in_a_nested_run(listener: Listener, files: DirectoryFilesystem, watching: Watching) -> None:
    @tool(effect="irreversible")
    async def outer(context: ToolContext) -> str:
        """Run the command in a nested run."""
        inner = Prompt("inner", "Run.", tools=[run_command_tool(listener.shell)], policies=[ASK])
        return (await context.adapter.evaluate(inner, "go")).text

    model = ScriptedModel(
        [ToolCall("outer"), ToolCall("run_command", {"command": listener.command}), "done", "done"]
    )
    adapter = Adapter(model, filesystem=files, environment=watching.person)
    await adapter.evaluate(Prompt("p", "Do.", tools=[outer], policies=[ASK]), "go")


async def beside_others(listener: Listener, files: DirectoryFilesystem, watching: Watching) -> None:
    @tool(effect="staged", capabilities={"fs.write"})
    async def write(context: ToolContext) -> str:
        """Write another file."""
        context.filesystem.write("b.txt", "b")
        return "written"

    calls = [ToolCall("write"), ToolCall("run_command", {"command": listener.command}), ToolCall("write")]
    adapter = Adapter(ScriptedModel([calls, "done"]), filesystem=files, environment=watching.person)
    prompt = Prompt("p", [ShellTools(listener.shell)], tools=[write], policies=[ASK])
    await adapter.evaluate(prompt, "go")


@pytest.mark.parametrize("approved", [True, False])
@pytest.mark.parametrize("way", [directly, nested, in_a_nested_run, beside_others])
async def test_nothing_is_heard_before_the_approval(
    listener: Listener, files: DirectoryFilesystem, way: Way, approved: bool
) -> None:
    """Wherever the call comes from, the command has not run when the person is asked, and does not run if they deny it."""
    watching = Watching(listener, approved)
    await way(listener, files, watching)
    check(listener, watching, files, approved)


@pytest.mark.parametrize("approved", [True, False])
async def test_nothing_is_heard_in_a_worker(
    listener: Listener, files: DirectoryFilesystem, tmp_path: Path, approved: bool
) -> None:
    """A command that a nested worker's own tool runs also waits for the approval."""
    tools = f"""
    from handrail import ToolContext, tool
    from handrail.resources.shell import Allow, Shell

    shell = Shell([Allow(...)], network={listener.shell.network}, expose={list(listener.shell.exposed)!r})

    @tool(effect="staged", capabilities={{"proc.exec"}})
    async def build(command: list[str], context: ToolContext) -> str:
        \"""Build it.\"""
        return (await shell.run_on(context.filesystem, command)).render()
    """
    registry = sound(
        tmp_path / "workers",
        tools,
        main="---\nworkers: [inner]\n---\nGo.",
        inner="---\ntools: [build]\npolicies: [capability: {ask: [proc.exec]}]\n---\nRun.",
    )
    watching = Watching(listener, approved)
    await registry.run(
        "main",
        "go",
        models={
            "main": ScriptedModel([ToolCall("inner", {"input": "go"}), "done"]),
            "inner": ScriptedModel([ToolCall("build", {"command": listener.command}), "done"]),
        },
        filesystem=files,
        environment=watching.person,
    )
    assert watching.heard_before == [0]
    assert "It has not run yet" in watching.questions[0].message
    assert listener.heard == ([b"hello"] if approved else [])


@pytest.mark.parametrize("approved", [True, False])
async def test_nothing_is_heard_before_the_answer_to_a_parked_run(
    listener: Listener, files: DirectoryFilesystem, tmp_path: Path, approved: bool
) -> None:
    """A parked run has not run its command. When it is resumed, the command runs once, or never if it was denied."""
    prompt = Prompt("p", [ShellTools(listener.shell)], policies=[ASK])
    model = ScriptedModel([ToolCall("run_command", {"command": listener.command}), "done"])
    with closing(SqliteJournal(tmp_path / "journal.db")) as journal:
        adapter = Adapter(model, journal=journal, filesystem=files, environment=LaterEnvironment())
        with pytest.raises(RunParked):
            await adapter.evaluate(prompt, "go", run_id="run")
        assert listener.heard == []
        with pytest.raises(RunParked):  # nobody has answered yet
            await adapter.resume("run", prompt)
        assert listener.heard == []
        (question,) = await journal.questions.open("run")
        assert listener.named in question.message
        journal.questions.answer(answer_to(question, {"approved": approved}))
        await adapter.resume("run", prompt)
        await adapter.resume("run", prompt)  # the finished run is not run again
    assert listener.heard == ([b"hello"] if approved else [])
    assert files.read("a.txt") == ("changed" if approved else "as it was")


async def test_a_tool_of_ones_own_that_runs_commands_is_asked_first(
    listener: Listener, files: DirectoryFilesystem
) -> None:
    """A person is asked before a staged tool with `proc.exec` runs if it does not declare what its commands reach."""

    @tool(effect="staged", capabilities={"proc.exec"})
    async def build(context: ToolContext) -> str:
        """Run the command."""
        return (await listener.shell.run_on(context.filesystem, listener.command)).render()

    watching = Watching(listener, False)
    gate = open_gate([build], filesystem=files, policies=[ASK], environment=watching.person)
    await gate.invoke("build")
    assert watching.heard_before == [0]
    assert "what they can reach is not known" in watching.questions[0].message
    assert listener.heard == []


@pytest.mark.parametrize("listener", ["exposed"], indirect=True)
async def test_a_staged_call_can_not_run_it_for_its_preview(
    listener: Listener, files: DirectoryFilesystem
) -> None:
    """A staged call, which is previewed by running it, can't run a command that reaches outside its folder."""

    @tool(effect="staged", capabilities={"fs.write"})
    async def outer(context: ToolContext) -> str:
        """Try to run the command in an inner call."""
        return str(await context.call("run_command", command=listener.command))

    watching = Watching(listener, False)
    ask = CapabilityPolicy({"fs.write": "ask", "proc.exec": "allow"})
    gate = open_gate(
        [outer, run_command_tool(listener.shell)],
        filesystem=files,
        policies=[ask],
        environment=watching.person,
    )
    await gate.invoke("outer")
    assert listener.heard == []


async def test_a_command_that_reaches_nothing_is_still_previewed(files: DirectoryFilesystem) -> None:
    """Without network access or exposed folders, a command runs first, and the person approves its diff."""
    asked: list[Question] = []
    person = Person(approve=lambda question: asked.append(question) or True)
    gate = open_gate(
        [run_command_tool(Shell([Allow(...)]))], filesystem=files, policies=[ASK], environment=person
    )
    await gate.invoke("run_command", {"command": ["sh", "-c", "echo changed > a.txt"]})
    (question,) = asked
    assert "+changed" in question.payload["diff"]
    assert "It has not run yet" not in question.message


def test_an_uncontained_shell_reaches_everything() -> None:
    """Without a sandbox, the tool for commands is irreversible and declares that they can reach everything on the machine."""
    made = run_command_tool(Shell([Allow(...)], contained=False))
    assert made.effect == "irreversible"
    assert made.reach is not None
    assert "everything on this machine" in made.reach
