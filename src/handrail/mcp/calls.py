"""`Calls`: the calls of a server's clients.

With a journal, each call is a recorded run. A call that asks a question waits in memory at first. After
`park_after` seconds, a recorded call is parked. The answer then resumes it, even after a restart of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Set
from typing import TYPE_CHECKING, Any, Unpack, cast

from handrail.errors import (
    AnswerRefused,
    HandrailError,
    PromptEvaluationError,
    QuestionCancelled,
    RunBusy,
    RunParked,
    RunUnknown,
)
from handrail.events import ApprovalDecided, Progress, PromptRendered, QuestionAnswered, ToolInvoked
from handrail.ids import random_id
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, RunRow
from handrail.mcp.forms import answer_of, key_of
from handrail.mcp.served_tools import CallMessage, CallModel, ServedTools
from handrail.prompt import Prompt
from handrail.question import Answer, Question
from handrail.run import open_gate
from handrail.run.host import Host
from handrail.run.options import GateArguments, ResumeArguments, SharedArguments
from handrail.run.record.begin import decode_begin, decode_outcome
from handrail.run.record.format import read_result
from handrail.run.record.log import load_attachments
from handrail.session import Dispatcher, Session
from handrail.tools import Tool, ToolResult

if TYPE_CHECKING:
    from handrail.run.record.parking import Parking


log = logging.getLogger("handrail.mcp")

MAX_WAITING = 1_000
"""Maximum number of calls that wait for answers in memory. Beyond that, the oldest is parked, or cancelled if it is not recorded."""
PARK_AFTER, STOP_SECONDS = 300.0, 5.0
"""Seconds after which a recorded call that waits for an answer is parked, and maximum seconds that `Calls.stop` waits for calls."""
NO_PAGE = (
    "it asks for a secret, and MCP forbids forms that ask for secrets. The person has to answer on a page of the server: "
    "serve the app with `handrail mcp --http` and a token or users, and use a client that opens addresses (URL elicitation)"
)
"""Why a question that asks for a secret is not asked if the person can't be sent to a page."""
_SETTLE = 0.01
"""Seconds to wait for further questions from a call, so that the client gets them together."""

_PLACE = ".1"
"""The place of the call in its run."""

Report = Callable[[float, float | None, str], Awaitable[None]]
"""A function that reports progress to the client: the amount done, the total (None if it is unknown), and a message."""


class CallUnknown(HandrailError, LookupError):
    """Raised if there is no such call, or if it belongs to a different principal."""


class CallRefused(HandrailError, RuntimeError):
    """Raised if a principal has as many calls in progress as the server allows, or if the server is stopping."""


class Calls:
    """The calls of a server's clients. With a journal they are recorded, and survive the process."""

    def __init__(
        self,
        tools: ServedTools,
        *,
        journal: Journal | None = None,
        files: Callable[[str], Any] = lambda principal: None,
        park_after: float = PARK_AFTER,
        **arguments: Unpack[SharedArguments],
    ) -> None:
        self.tools = tools
        self.journal = journal
        self.park_after = park_after
        self._files = files
        self._arguments = arguments
        self._live: dict[str, LiveCall] = {}
        self.is_stopping = False
        self.most: float = math.inf
        """Maximum number of a principal's calls in this process. At the limit, recorded calls can still be resumed."""
        self._left: dict[str, LiveCall] = {}
        """Unrecorded calls that ended between two requests of the client.

        They are kept until the client calls again, at most `MAX_WAITING` of them.
        """
        self.live_call: Callable[..., LiveCall] = LiveCall
        """Creates a call. It takes what `LiveCall` takes."""

    async def begin(
        self,
        tool: Tool[Any, Any],
        arguments: Mapping[str, Any],
        *,
        principal: str,
        asks: bool,
        opens: bool = False,
        report: Report | None = None,
    ) -> LiveCall:
        """Start a call. With `asks`, the client's user can be asked. With `opens`, they can be asked for secrets too, on a page.

        Raises `CallRefused` at the limit and while the server stops, `ToolValidationError` if the arguments can't be recorded,
        and the errors of `ServedTools.load`.
        """
        prompt = await self.tools.load(principal)
        if sum(each.principal == principal for each in self._live.values()) >= self.most:
            raise CallRefused(
                f"you have {self.most} calls in progress, which is the limit. Wait until one ends, or cancel one."
            )
        run_id = random_id()
        session = Session(principal=principal)
        call = self.live_call(self, run_id, tool.name, principal, session.dispatcher, asks, opens, report)
        options: GateArguments = {
            **self._arguments,
            "session": session,
            "run_id": run_id,
            "environment": call.environment,
            "filesystem": self._files(principal),
        }
        if self.journal is None:
            return self._start(call, lambda: self._invoke(prompt, tool.name, arguments, options))
        message = CallMessage.of(run_id, tool, arguments)
        adapter = self.tools.adapter(CallModel(message, self.tools.model, arguments))
        recorded: Any = {**options, "journal": self.journal}
        return self._start(call, lambda: adapter.evaluate(prompt, message=str(message), **recorded))

    async def _invoke(
        self, prompt: Prompt[Any], name: str, arguments: Mapping[str, Any], options: GateArguments
    ) -> ToolResult[Any]:
        """Make a call that is not recorded, directly through a gate."""
        gate = open_gate(prompt=prompt, adapter=self.tools.adapter(), **options)
        try:
            return await gate.invoke(name, arguments)
        finally:
            await gate.close()

    def find(self, run_id: str, principal: str) -> LiveCall | None:
        """Return a principal's call that this process is executing, or whose result it has kept; None if there is none."""
        call = self._live.get(run_id) or self._left.get(run_id)
        return call if call is not None and call.principal == principal else None

    def collect(self, call: LiveCall) -> None:
        """Note that the client has called again. The result of the call is no longer kept for it."""
        call.is_left = False
        self._left.pop(call.run_id, None)

    async def row(self, run_id: str, principal: str) -> tuple[RunRow, CallMessage]:
        """Return the record of a call, and the message in it. Raises `CallUnknown` if this principal has no such call."""
        unknown = CallUnknown("there is no such call, or it was given up")
        if self.journal is None:
            raise unknown
        try:
            row = await self.journal.runs.get(run_id)
        except RunUnknown:
            raise unknown from None
        record, message = row.record, CallMessage.read(decode_begin(row.record).message)
        if message is None or record.principal != principal or record.prompt != self.tools.name:
            raise unknown
        return row, message

    async def result(self, row: RunRow, message: CallMessage) -> ToolResult[Any]:
        """Return the recorded result of a call that is over; an error result if there is none, or if the tool is no longer served."""
        tool = (await self.tools.all(row.record.principal)).get(message.tool)
        for unit in await self.journal_of_tasks().calls.load(row.record.id):
            if tool is not None and unit.place == _PLACE:
                found = read_result(tool, unit.result)
                await load_attachments(self.journal_of_tasks(), row.record.id, found.attachments)
                return found
        return ToolResult.error(decode_outcome(row).error or f"The call was {row.status}.")

    async def answer(self, run_id: str, principal: str, responses: Mapping[str, Any]) -> None:
        """Record the answers to the open questions of a call that this process is not executing.

        Refused answers, and answers to questions that approvers decide, are ignored. Raises `CallUnknown` if there is no such call.
        """
        await self.row(run_id, principal)
        questions = self.journal_of_tasks().questions
        for question in await questions.open(run_id):
            given = None if question.quorums else answer_of(question, responses.get(key_of(question)))
            if given is not None:
                with contextlib.suppress(AnswerRefused):
                    questions.answer(given)

    async def resume(
        self, run_id: str, *, principal: str, asks: bool, opens: bool = False, report: Report | None = None
    ) -> LiveCall | ToolResult[Any]:
        """Continue a recorded call, with the options of `begin`. Returns its result if it is over, or else the live call.

        Raises `CallUnknown` if this principal has no such call, `RunBusy` if a different process executes it, `CallRefused` while
        the server stops, and what `ServedTools.load` raises.
        """
        row, message = await self.row(run_id, principal)
        if row.status in OVER:
            return await self.result(row, message)
        if row.held and row.owner != self.journal_of_tasks().owner:
            raise RunBusy(run_id, row.owner)
        prompt = await self.tools.load(principal)
        if (live := self.find(run_id, principal)) is not None:
            return live
        heard = Dispatcher()
        call = self.live_call(self, run_id, message.tool, principal, heard, asks, opens, report)
        adapter = self.tools.adapter(CallModel(message, self.tools.model))
        options: ResumeArguments = {
            **self._arguments,
            "bus": heard,
            "environment": call.environment,
            "filesystem": self._files(principal),
            "journal": self.journal,
        }
        return self._start(call, lambda: adapter.resume(run_id, prompt, **options))

    def _start(self, call: LiveCall, run: Callable[[], Awaitable[Any]]) -> LiveCall:
        if self.is_stopping:
            raise CallRefused("the server is stopping. No recorded call is lost. Try again soon.")
        self._live[call.run_id] = call
        call.start(run)
        waiting = [each for each in self._live.values() if each.rests]
        if len(waiting) > MAX_WAITING:
            waiting[0].remove()
        return call

    def journal_of_tasks(self) -> Journal:
        """Return the journal. Only recorded calls need it, so there is one."""
        assert self.journal is not None, "tasks need a journal"
        return self.journal

    def running(self) -> int:
        """Return the number of calls that this process is executing."""
        return len(self._live)

    def ended(self, call: LiveCall) -> None:
        """Forget a call that has ended or was parked. An unrecorded result is kept if the client has to call again for it."""
        if self._live.get(call.run_id) is call:
            del self._live[call.run_id]
            if self.journal is None and call.is_left and not call.task.cancelled():
                self._left[call.run_id] = call
                if len(self._left) > MAX_WAITING:
                    del self._left[next(iter(self._left))]

    def cancel_of(self, principal: str) -> None:
        """Cancel every call of a principal that this process is executing."""
        for call in list(self._live.values()):
            if call.principal == principal:
                call.cancel()

    async def stop(self) -> None:
        """Refuse new calls, and remove every call from memory, as `LiveCall.remove` does. Waits at most `STOP_SECONDS`."""
        self.is_stopping = True
        calls = list(self._live.values())
        for call in calls:
            call.remove()
        if calls:
            await asyncio.wait([call.task for call in calls], timeout=STOP_SECONDS)


class LiveCall(Host):
    """A call that this process is executing, across all of the client's requests that belong to it.

    If the client can ask its user, they answer the call's questions. Otherwise nobody can be asked.
    """

    def __init__(
        self,
        calls: Calls,
        run_id: str,
        name: str,
        principal: str,
        events: Dispatcher,
        asks: bool,
        opens: bool,
        report: Report | None,
    ) -> None:
        super().__init__(run_id, park_after=calls.park_after)
        self._calls = calls
        self.journal = calls.journal
        self.parks = self.journal is not None
        self.name, self.principal = name, principal
        self._asks, self._opens = asks, opens
        self.report = report
        self.questions: dict[str, Question] = {}
        """The open questions that were put to the client, by id."""
        self.problems: dict[str, str] = {}
        """Why the last answer to a question was refused, by the question's id."""
        self.is_parked = False
        self.is_left = False
        """Whether the client got the call's questions, and must call again for the result."""
        self.last_progress = ""
        """The message of the last progress that the call reported; "" before the first."""
        self._started = asyncio.Event()
        self._over = asyncio.Event()
        """Set once the call has ended or was parked, and has left memory. Only then is the client told."""
        self.task: asyncio.Task[ToolResult[Any]]
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self._changed = asyncio.Event()
        self._result: ToolResult[Any] | None = None
        self._reports: set[asyncio.Task[None]] = set()
        events.subscribe(ToolInvoked, self._take_result)
        events.subscribe(Progress, self._take_progress)
        events.subscribe(QuestionAnswered, lambda event: self._close(event.question_id))
        events.subscribe(ApprovalDecided, lambda event: self._close(event.question_id))
        if self.journal is not None:
            events.subscribe(PromptRendered, self._take_start)

    @property
    def environment(self) -> Host | None:
        """The environment of the call's run, or None if nobody can be asked."""
        return self if self._asks else None

    def start(self, run: Callable[[], Awaitable[Any]]) -> None:
        """Start the call's run in a separate task."""
        self.task = asyncio.get_running_loop().create_task(self._run(run), name=f"call {self.run_id}")
        self.task.add_done_callback(self._end)

    async def _run(self, run: Callable[[], Awaitable[Any]]) -> ToolResult[Any]:
        try:
            found = await run()
            if isinstance(found, ToolResult):
                return cast("ToolResult[Any]", found)
        except RunParked:
            self.is_parked = True
            raise
        except PromptEvaluationError as error:
            if self._result is None:
                return ToolResult.error(f"{self.name} did not finish: {error}")
        if self._result is None:  # the call ended and was recorded before its run was resumed
            row, message = await self._calls.row(self.run_id, self.principal)
            return await self._calls.result(row, message)
        return self._result

    def _end(self, task: asyncio.Task[ToolResult[Any]]) -> None:
        self._calls.ended(self)
        self.wake()
        for answer in self._answers.values():
            answer.cancel()
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved; the tasks that wait for the call raise it
        self._over.set()
        self._started.set()
        self._changed.set()

    async def recorded(self) -> None:
        """Wait until the call's run is recorded, or until the call ends, if that is sooner."""
        await self._started.wait()

    @property
    def is_over(self) -> bool:
        """Whether the call has ended or was parked, and has left memory."""
        return self._over.is_set()

    async def over(self) -> None:
        """Wait until the call has ended or was parked, and has left memory."""
        await self._over.wait()

    async def wait(self) -> bool:
        """Wait until the call is over or is waiting for answers. Returns False only if it is waiting for answers."""
        while not self.is_over:
            if self.rests:
                await asyncio.sleep(_SETTLE)
                if self.rests or self.is_over:
                    break
            self._changed.clear()
            await self._changed.wait()
        return self.is_over

    async def asking(self, question_id: str) -> Question | None:
        """Wait until the call asks this question, and return it; None if it ends, or waits for other answers, without asking it."""
        while question_id not in self.questions and not self.rests and not self.is_over:
            self._changed.clear()
            await self._changed.wait()
        return self.questions.get(question_id)

    def cancel(self) -> None:
        """Cancel the call. A recorded run gets the status `cancelled`."""
        self.task.cancel()

    def remove(self) -> None:
        """Remove the call from memory: park its run, by force if necessary.

        Cancels a run that is not recorded, has not started yet, or has no environment because the client can't ask.
        """
        if self.parking is None:
            self.task.cancel()
        elif not self.parking.park():
            self.cut()

    # Questions.

    def answer(self, responses: Mapping[str, Any], digests: Mapping[str, str] | None = None) -> bool:
        """Answer open questions. Returns whether any answer was accepted.

        A question without a usable response stays open. `digests` are the digests of the questions that the client was shown,
        by id. If they are given, an answer to a question that is not among them, or has changed, is refused.
        """
        taken = False
        for id, question in list(self.questions.items()):
            given = answer_of(question, responses.get(key_of(question)))
            if given is None:
                continue
            if digests is not None and digests.get(id) != question.digest:
                self.problems[id] = "The question has changed since it was asked. Please read it again."
                continue
            try:
                self.give(given)
            except AnswerRefused as error:
                self.problems[id] = f"The answer was refused: {error.problem}."
                continue
            taken = True
        return taken

    def give(self, answer: Answer) -> None:
        """Answer a question. Raises `AnswerRefused` if the question is not open or, with a journal, if the answer is invalid."""
        self._accept(answer)
        self._close(answer.question_id)

    def _close(self, question_id: str) -> None:
        """Stop offering a question to the client. Without questions, the call goes on."""
        self.problems.pop(question_id, None)
        self.questions.pop(question_id, None)
        if not self.questions:
            self.wake()
        self._changed.set()

    async def closed(self, ids: Set[str], seconds: float | None = None) -> None:
        """Wait until these questions are closed, or the call ends or is parked. `seconds` limits the wait; None means no limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.is_over and not ids.isdisjoint(self.questions):
                    self._changed.clear()
                    await self._changed.wait()

    def _accept(self, answer: Answer) -> None:
        if self.journal is not None:
            self.journal.questions.answer(answer)
            return
        future = self._answers.get(answer.question_id)
        if future is None or future.done():
            raise AnswerRefused(answer.question_id, "it is not open", "Call the tool again.")
        future.set_result(answer)

    async def ask(self, question: Question, /) -> Answer | None:
        """Put a question to the client. With a journal, returns None, because the answer comes through the journal.

        Raises `QuestionCancelled` if the question asks for a secret and the client's user can't be sent to a page.
        """
        if question.secret and not self._opens:
            raise QuestionCancelled(question.name, NO_PAGE)
        self.questions[question.id] = question
        self._changed.set()
        if self.journal is not None:
            return None
        self._answers[question.id] = asyncio.get_running_loop().create_future()
        self.rests = True
        try:
            return await self._answers[question.id]
        finally:
            del self._answers[question.id]
            self.questions.pop(question.id, None)

    def run_waiting(self, parking: Parking) -> None:
        super().run_waiting(parking)
        self._changed.set()

    # Events.

    def _take_result(self, event: ToolInvoked) -> None:
        if len(event.path) == 1 and event.run_context.run_id == self.run_id:
            self._result = event.result

    def _take_start(self, event: PromptRendered) -> None:
        if event.run_context.run_id == self.run_id:
            self._started.set()

    def _take_progress(self, event: Progress) -> None:
        self.last_progress = event.message
        if self.report is not None and event.done is not None:
            sent = asyncio.ensure_future(_report(self.report, event.done, event.total, event.message))
            self._reports.add(sent)
            sent.add_done_callback(self._reports.discard)

    async def flush(self) -> None:
        """Wait until the progress so far has been sent."""
        await asyncio.gather(*self._reports)


async def _report(report: Report, done: float, total: float | None, message: str) -> None:
    try:
        await report(done, total, message)
    except Exception:  # the client may be gone, which must not make the call fail
        log.debug("progress could not be sent", exc_info=True)
