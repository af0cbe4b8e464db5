"""A conversation with a worker or an agent, and `handrail run`, which is a conversation of one turn."""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pydantic_core

from handrail.cli.activity import answer_text, attachments_data, format_summary
from handrail.cli.command_options import (
    WorkerOptions,
    find_model,
    find_worker,
    is_module,
    open_files,
    parse_approvals,
    parse_spend,
    read_input,
)
from handrail.cli.outcome import (
    CANCEL_NOTE,
    CANCELLED,
    DONE,
    NOT_APPROVED,
    TERMINATED,
    Failure,
    UsageError,
    classify_stop,
    divert_stdout,
    fail,
    is_debugging,
    print_error,
    print_json,
    print_traceback,
    runs_command,
)
from handrail.cli.screens import LiveView, PlainView, View
from handrail.cli.streams import configure_logging, terminal_environment
from handrail.clock import SYSTEM_CLOCK
from handrail.environment import LaterEnvironment
from handrail.journal.records import OVER, RunRow
from handrail.run.limits import BudgetTracker
from handrail.run.options import RunFiles
from handrail.schema import to_json
from handrail.session import Session
from handrail.text.spelling import nearest
from handrail.text.terminal import is_terminal

if TYPE_CHECKING:
    from types import ModuleType

    from handrail.mcp import McpTools
    from handrail.run.response import PromptResponse, RunStream
    from handrail.workers import Worker


Hear = Callable[["RunStream[Any] | None", str], Awaitable[None]]
"""A function that gets the run, or None if it did not begin, and a line that was typed while it worked."""


class TurnOutcome(NamedTuple):
    """The end of a turn: a response or a failure."""

    code: int
    seconds: float
    response: PromptResponse[Any] | None = None
    note: str = ""
    failure: Failure | None = None
    error: BaseException | None = None


class Subject(NamedTuple):
    """The worker or agent that a conversation is with."""

    name: str
    description: str
    model: str
    folder: Path | None
    """The worker's folder, or None for an agent."""
    app: str
    """What the runs with it record as their app."""
    stream: Callable[..., RunStream[Any]]
    servers: tuple[McpTools, ...] = ()
    """The MCP servers whose tools are added to the worker's own. An agent has them in its prompt."""

    @classmethod
    def find(cls, options: WorkerOptions) -> Subject:
        """Find the worker or agent that the options name, and apply the options' model and MCP servers to it.

        Raises `UsageError` or `DefinitionError` if it can't be found or loaded.
        """
        path = Path(options.worker)
        if path.is_dir() or path.suffix == ".md" or not is_module(options.worker):
            return cls._of_worker(find_worker(options.worker), options)
        return cls._of_agent(options)

    @classmethod
    def _of_worker(cls, worker: Worker, options: WorkerOptions) -> Subject:
        registry, model = worker.registry, find_model(options.model)
        stream = functools.partial(registry.stream, worker.name, models=registry.all_on(model))
        shown = str(options.model or worker.model or "no model")
        servers = _servers(options)
        app = str(worker.path.resolve())
        return cls(worker.name, worker.description or "", shown, registry.folder, app, stream, servers)

    @classmethod
    def _of_agent(cls, options: WorkerOptions) -> Subject:
        from handrail.agent import Agent
        from handrail.serve.sources import load_app_module

        module_name, _, name = options.worker.partition(":")
        name = name or "agent"
        module = load_app_module(module_name)
        found: Any = getattr(module, name, None)
        if not isinstance(found, Agent):
            raise UsageError(_no_agent(module, module_name, name))
        agent = cast("Agent[Any]", found)
        if options.model is not None:
            adapter = copy.copy(agent.adapter)
            adapter.model = find_model(options.model)
            agent = Agent(adapter, agent.prompt, description=agent.description)
        if options.mcp is not None:
            from handrail.guard import CapabilityPolicy

            prompt = agent.prompt.extended(_servers(options, policies=[CapabilityPolicy()]))
            agent = Agent(agent.model, prompt, description=agent.description)

        app = f"{module.__name__}:{name}"

        def stream(message: str, *, attachments: tuple[Path, ...], **arguments: Any) -> RunStream[Any]:
            return agent.stream(message, app=app, attachments=attachments, **arguments)

        return cls(agent.name, agent.description, agent.adapter.model.name, None, app, stream)


def _no_agent(module: ModuleType, module_name: str, name: str) -> str:
    """Return the message for a module without such an agent. It names what the module has instead, or says what to define."""
    from handrail.agent import Agent
    from handrail.prompt import Prompt

    missing = f"{module_name} has no Agent called {name!r}."
    agents = [each for each, value in vars(module).items() if isinstance(value, Agent)]
    if agents:
        return (
            f"{missing} Name one of its agents, such as {module_name}:{nearest(name, agents) or agents[0]}."
        )
    prompts = [each for each, value in vars(module).items() if isinstance(value, Prompt)]
    if prompts:
        return f"{missing} Serve its prompt: `handrail serve {module_name}:{prompts[0]}`."
    return f"{missing} Define one in it: {name} = Agent(MODEL, INSTRUCTIONS)."


def _servers(options: WorkerOptions, **more: Any) -> tuple[McpTools, ...]:
    """Return the MCP servers in the file that `--mcp` names, or none without `--mcp`."""
    if options.mcp is None:
        return ()
    from handrail.mcp import load_servers

    return load_servers(options.mcp, **more)


class Conversation:
    """A conversation with a worker or an agent, and what its turns share: files, journal, view, budget and session."""

    def __init__(
        self,
        subject: Subject,
        options: WorkerOptions,
        attachments: list[Path] | None = None,
        *,
        as_json: bool = False,
    ) -> None:
        self.subject = subject
        self.options = options
        self.session = Session()
        self.files = open_files(options.files, subject.folder, options.startup_files)
        self._attachments = tuple(check_attachment(path) for path in attachments or ())
        # With --json, a program reads the answer, so nobody is asked any questions.
        self.is_attended = not as_json and is_terminal(sys.stdin) and is_terminal(sys.stdout)
        self.view = self._make_view()
        self.journal = options.open_journal(self.files)
        self._approvals = parse_approvals(options.approve, can_park=True)
        self._environment: Any = terminal_environment(
            stdin=io.StringIO() if as_json else None, screen=self.view
        )
        if options.approve == "later":
            if self.journal is None:
                raise UsageError(
                    "--approve later needs a journal to record the questions in. Pass --journal FILE, without --no-journal."
                )
            self._environment = LaterEnvironment()
        options.start_deadline()  # report an invalid duration before anything runs
        self._spend = parse_spend(options.spend)
        budget = options.parse_budget()
        self._budget = None if budget is None else BudgetTracker(budget)

    def _make_view(self) -> View:
        options = self.options
        can_redraw = self.is_attended and os.environ.get("TERM", "dumb") not in ("dumb", "")
        if can_redraw and not options.quiet:
            return LiveView(SYSTEM_CLOCK, verbose=options.verbose)
        return PlainView(SYSTEM_CLOCK, verbose=options.verbose, quiet=options.quiet)

    async def recover(self) -> None:
        """Apply the changes that a killed process recorded but did not apply, and report those that can't be applied.

        Call this before the files are used. It does nothing without a journal, without files, or for a workspace. With
        `--continue`, the session is then the one of the newest conversation.
        """
        if self.files is not None and not isinstance(self.files, RunFiles) and self.journal is not None:
            recovered = await self.files.recover(self.journal)
            for each in recovered.unapplied:
                self.view.note(f"{each} `handrail runs show {each.run_id}` says more.", "yellow")
        if self.options.continues:
            await self.continue_newest()

    async def continue_newest(self) -> None:
        """Continue the newest recorded conversation with the same worker or agent.

        Raises `UsageError` if there is none, or if its last run is parked or was interrupted.
        """
        from handrail import runs

        if self.journal is None:
            raise UsageError(
                "--continue needs the journal that has the conversation. Leave out --no-journal."
            )
        before = None
        while rows := await self.journal.runs.list(principal=self.session.principal, before=before):
            for row in rows:
                if row.record.app == self.subject.app and row.status != "queued":
                    if row.status not in OVER and not row.held:
                        raise UsageError(self._unfinished(row, self.journal.path))
                    self.session = await runs.session(
                        self.journal, row.record.session_id, principal=self.session.principal
                    )
                    return
            before = rows[-1].record.mark
        raise UsageError(
            f"there is no conversation with {self.subject.name} in {self.journal.path}. "
            "Leave out --continue to begin one."
        )

    def _unfinished(self, row: RunRow, journal: str) -> str:
        """Say why a conversation whose last run is not over can't be continued, and what to do."""
        answer, resume, cancel = (
            runs_command(verb, row.record.id, journal) for verb in ("answer", "resume", "cancel")
        )
        name = self.subject.name
        then = "a worker continues it" if row.queue else f"continue it with `{resume}`"
        if row.questions:
            what = (
                f"the newest conversation with {name} waits for an answer. Answer with `{answer}`, and {then}"
            )
        else:
            what = f"the last run of the newest conversation with {name} is not finished. {then[0].upper()}{then[1:]}"
        return f"{what}; or cancel it: `{cancel}`."

    async def _begin(self, message: str) -> RunStream[Any]:
        """Connect the MCP servers and start a turn. Each turn has its own deadline, and all turns share one budget."""
        added: list[Any] = []
        for server in self.subject.servers:
            await server.connect(self.session.principal)
            added += server.current_tools(self.session.principal)
        return self.subject.stream(
            message,
            **({"tools": added} if added else {}),
            attachments=self._attachments,
            session=self.session,
            journal=self.journal,
            environment=self._environment,
            approvals=self._approvals,
            filesystem=self.files,
            deadline=self.options.start_deadline(),
            budget=self._budget,
            spend=self._spend,
        )

    async def turn(self, message: str, hear: Hear | None = None) -> TurnOutcome:
        """Run one turn and show its events. Ctrl-C or SIGTERM cancels the turn, and a second one ends the process.

        `hear` is called with each line that is typed meanwhile, one after the other. A failed run raises no exception. Its failure
        is in the outcome.
        """
        loop, view, started = asyncio.get_running_loop(), self.view, SYSTEM_CLOCK.monotonic()
        stream: RunStream[Any] | None = None
        begun = asyncio.Event()
        lines: asyncio.Queue[str | None] = asyncio.Queue()
        view.hear = None if hear is None else lines.put_nowait

        async def listen() -> None:
            await begun.wait()
            while (line := await lines.get()) is not None:
                if hear is not None:
                    await hear(stream, line)

        def take(event: object) -> None:
            view.show(event)
            if view.activity.root:
                begun.set()

        def show(event: object) -> None:
            if asyncio._get_running_loop() is loop:  # pyright: ignore[reportPrivateUsage]  # documented for this use
                take(event)
            else:
                loop.call_soon_threadsafe(take, event)

        async def respond() -> PromptResponse[Any]:
            nonlocal stream
            stream = await self._begin(message)
            return await stream.response

        with view.begin():
            unsubscribe = self.session.dispatcher.subscribe(object, show)
            task = loop.create_task(respond())
            canceller = _Canceller(task, view)
            loop.add_signal_handler(signal.SIGINT, canceller.press, CANCELLED)
            loop.add_signal_handler(signal.SIGTERM, canceller.press, TERMINATED)
            listening = loop.create_task(listen())
            try:
                await asyncio.wait([task])
                begun.set()
                lines.put_nowait(None)
                await listening
            finally:
                loop.remove_signal_handler(signal.SIGINT)
                loop.remove_signal_handler(signal.SIGTERM)
                unsubscribe()
            return self._outcome(task, canceller.code, SYSTEM_CLOCK.monotonic() - started)

    def _outcome(
        self, task: asyncio.Task[PromptResponse[Any]], cancelled: int, seconds: float
    ) -> TurnOutcome:
        if cancelled and (task.cancelled() or task.exception() is not None):
            return TurnOutcome(cancelled, seconds, failure=Failure(cancelled, "Cancelled", CANCEL_NOTE))
        error = asyncio.CancelledError("the run was cancelled") if task.cancelled() else task.exception()
        if error is not None:
            failure = Failure.of(error, "" if self.journal is None else self.journal.path)
            return TurnOutcome(failure.code, seconds, failure=failure, error=error)
        response = task.result()
        code, note = classify_stop(response.stop_reason, self.view.activity.denied)
        if code == NOT_APPROVED and not self.options.quiet:
            note = ""  # the calls' lines have said it
        return TurnOutcome(code, seconds, response, note)


class _Canceller:
    """Handles Ctrl-C and SIGTERM. The first one cancels the run and everything inside it. The second ends the process."""

    def __init__(self, task: asyncio.Task[Any], view: View) -> None:
        self._task = task
        self._view = view
        self.code = 0

    def press(self, code: int) -> None:
        if self.code:
            self._view.abandon()
            os._exit(code)
        self.code = code
        self._task.cancel()
        self._view.note("Cancelling, and undoing unfinished calls. Press again to quit at once.", "yellow")


def check_attachment(path: Path) -> Path:
    """Return the path of a file to attach. Raises `UsageError` if there is no such file."""
    if not path.is_file():
        raise UsageError(f"--attach {path}: no such file. Check the path.")
    return path


# --- handrail run ---


def run(options: WorkerOptions, given: str | None, attachments: list[Path], as_json: bool) -> int:
    """Run a worker or an agent once, print the outcome, and return the exit code."""
    configure_logging(options.verbose or is_debugging())
    try:
        with divert_stdout(as_json):
            subject = Subject.find(options)
        message = read_input(given)
        conversation = Conversation(subject, options, attachments, as_json=as_json)
        with asyncio.Runner() as runner, divert_stdout(as_json):
            runner.run(conversation.recover())
            outcome = runner.run(conversation.turn(message))
    except Exception as error:
        return fail(error, as_json=as_json, verbose=options.verbose)
    if as_json:
        print_json(_to_json(outcome, conversation.view))
    else:
        _print_outcome(outcome, conversation.view, options.quiet)
    if outcome.error is not None:
        print_traceback(outcome.error, options.verbose)
    return outcome.code


def _print_outcome(outcome: TurnOutcome, view: View, quiet: bool) -> None:
    response = outcome.response
    if response is None:
        if outcome.failure is not None:
            print_error(outcome.failure.message)
        return
    view.answer(answer_text(response), literal=not isinstance(response.output, str | None))
    if outcome.note:
        print_error(outcome.note, "yellow")
    if not quiet:
        view.note(format_summary(response.usage, response.cost, outcome.seconds), "dim")


def _to_json(outcome: TurnOutcome, view: View) -> dict[str, Any]:
    response = outcome.response
    data: dict[str, Any] = {"ok": outcome.code == DONE, "exit_code": outcome.code}
    if response is None:
        failure = outcome.failure or Failure(outcome.code, "", "")
        return {**data, "run_id": view.activity.root or None, "error": failure.as_json()}
    usage = response.usage
    return {
        **data,
        "text": response.text,
        "output": None if response.output is None else pydantic_core.from_json(to_json(response.output)),
        "attachments": attachments_data(response),
        "stop_reason": response.stop_reason,
        "not_approved": view.activity.denied,
        "usage": {
            "input": usage.input,
            "output": usage.output,
            "cached": usage.cached,
            "requests": usage.requests,
        },
        "cost": None if response.cost is None else str(response.cost),
        "run_id": response.run_id,
    }
