"""`redeem`: run a tool under a ticket that a call in another process issued."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Unpack

import msgspec

from handrail.clock import Clock
from handrail.concurrency.cancellation import finish
from handrail.concurrency.deadline import Deadline
from handrail.concurrency.operation import Operation
from handrail.context.facts import Ticket
from handrail.errors import JournalError, PromptEvaluationError, TicketError
from handrail.events import CallStatus
from handrail.guard.remembered import keep_decisions
from handrail.journal.protocol import Journal
from handrail.journal.sql.leases import LEASE_SECONDS, new_owner
from handrail.protocols import ToolPolicy
from handrail.run.call import Attempt, Call, Passage, new_call
from handrail.run.effects import compensate
from handrail.run.gate import Arguments, Gate
from handrail.run.limits import Budget
from handrail.run.options import GuardArguments, RunOptions, check_kinds, check_value
from handrail.run.place import RUN, Place
from handrail.run.record.format import Deposit, read_result, record_of
from handrail.run.record.recorded_session import ResumedRun, load_resumed
from handrail.run.run import Run, open_run
from handrail.run.tickets import share_of
from handrail.run.transaction import Settled, Transaction
from handrail.session import Session
from handrail.session.serialization import read_digests
from handrail.tools import EFFECTS, Tool, ToolResult
from handrail.tools.effect import Effect, effect_refusal

log = logging.getLogger("handrail.run.adapter")


def redeem(
    ticket: str,
    arguments: Arguments = "{}",
    *,
    tool: Tool[Any, Any],
    journal: Journal,
    tools: Iterable[Tool[Any, Any]] = (),
    policies: Iterable[ToolPolicy] = (),
    session: Session | None = None,
    on_event: Callable[[object], None] | None = None,
    **surroundings: Unpack[GuardArguments],
) -> Operation[ToolResult[Any]]:
    """Run a ticket's tool in this process: `await redeem(text, {"page": 3}, tool=render, journal=journal)`.

    The tool runs through its own gate, under `policies` and the run's caps on spending, with the deadline and the share of the
    budget that the ticket carries, on the session as last committed. This process commits nothing: the
    changes are deposited in the journal and become part of the issuing call if that call succeeds. Once the tool has
    run, redeeming the ticket again returns the same result. A forged or expired ticket, or one for
    a different tool, raises `TicketError`, and so does one whose call is over or that another process is redeeming. If an
    earlier redemption was cut short and the tool may not run again, `OutcomeUnknown` is raised.

    - `tools`: other tools that the handler may call.
    - `session`: an empty session with the recorded id, if the run's session was created with its own slice rules.
    - `on_event`: a function that is called with every event.
    """
    check_kinds(tool=(tool, Tool, "the tool the ticket is for"), tools=(tools, Iterable, "a list of tools"))
    check_value("journal", journal)
    options = RunOptions(journal=journal).updated("redeem", GuardArguments, surroundings)
    clock = options.clock

    async def run() -> ToolResult[Any]:
        opened = Ticket.open(ticket, journal.key)
        _check(opened, tool, journal.clock)

        async def begin() -> Run:
            limits = share_of(opened)
            resumed = await _resumed(opened, journal, session, clock)
            given = options.replace(
                session=resumed.session,
                deadline=None if opened.deadline is None else Deadline(opened.deadline, clock=clock),
                budget=Budget(**limits) if limits else None,
                spend=resumed.begin.spend,
                run_id=opened.run_id,
            )
            return open_run(given, [tool, *tools], policies)

        return await _Redemption(opened, tool, journal).run(begin, arguments, on_event)

    return Operation(run, "redeem")


def _check(ticket: Ticket, tool: Tool[Any, Any], clock: Clock) -> None:
    """Raise `TicketError` if the ticket has expired, or is for a different tool or a different version of it."""
    if ticket.deadline is not None and clock.now() >= ticket.deadline:
        raise TicketError(
            f"its deadline, {ticket.deadline.isoformat()}, has passed",
            "Give the run more time, or redeem its tickets sooner.",
        )
    if tool.name != ticket.tool:
        raise TicketError(
            f"it is for the tool {ticket.tool!r}, not for {tool.name!r}",
            "Pass the tool that the ticket names.",
        )
    here, there = tuple(sorted(tool.capabilities)), ticket.capabilities
    if here != there:
        raise TicketError(
            f"{tool.name} has the capabilities {_listed(here)} here, and had {_listed(there)} where the ticket was issued",
            "Run the same version of the tool on both sides.",
        )
    why_not = effect_refusal(_effect_of(ticket), tool.effect)
    if why_not is not None:
        raise TicketError(
            f"{tool.name} does more here than where the ticket was issued: {why_not}",
            "Run the same version of the tool on both sides.",
        )


def _effect_of(ticket: Ticket) -> Effect:
    effect: Any = ticket.effect  # the ticket's signature was verified, so the value is valid
    return effect


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


async def _resumed(ticket: Ticket, journal: Journal, session: Session | None, clock: Clock) -> ResumedRun:
    """Return the ticket's run, with its session including all its commits that were not undone."""
    resumed = await load_resumed(journal, await journal.runs.get(ticket.run_id), session, clock)
    resumed.catch_up()
    await keep_decisions(resumed.session, journal, is_restored=True)
    return resumed


class _Redemption:
    """One ticket while it is being redeemed."""

    def __init__(self, ticket: Ticket, tool: Tool[Any, Any], journal: Journal) -> None:
        self._ticket = ticket
        self._tool = tool
        self._box = journal.tickets
        self._which = (ticket.run_id, ticket.place)
        self._by = new_owner()

    async def run(
        self, begin: Callable[[], Any], arguments: Arguments, on_event: Callable[[object], None] | None
    ) -> ToolResult[Any]:
        before = await self._box.claim(*self._which, self._by, self._tool.enters_again)
        if before:
            return read_result(self._tool, msgspec.msgpack.decode(before, type=Deposit).inner.result)
        try:
            run: Run = await begin()
        except BaseException:
            await finish(self._box.release(*self._which, self._by))
            raise
        if on_event is not None:
            run.session.dispatcher.subscribe(object, on_event)
        gate = Gate(run)
        around = self._stand_in(gate)
        try:
            async with self._held(gate):
                # A separate task, so that the work can be stopped without stopping the redeemer if the issuing call is over.
                return await asyncio.ensure_future(self._carry_out(gate, around, arguments))
        finally:
            around.open_transaction.drop()
            run.cancellation.close()
            await finish(run.world.resources.close_logged())

    async def _carry_out(self, gate: Gate, around: Attempt, arguments: Arguments) -> ToolResult[Any]:
        first = gate.open(new_call(gate, self._tool.name, arguments, parent=around))
        ended: BaseException | None = None
        try:
            await gate.pass_through(first.call, first)
        except GeneratorExit:
            raise
        except BaseException as error:
            ended = error
        passage = first.passage
        result, newest = passage.result, first.newest
        has_begun = newest.number > 1 or newest.token is not None
        if result is None or not has_begun:  # the ticket can still be redeemed
            await finish(self._box.release(*self._which, self._by))
        else:
            await finish(self._deposit(newest, result, passage.status, around.open_transaction))
        if result is None or (ended is not None and not isinstance(ended, PromptEvaluationError)):
            raise ended or asyncio.CancelledError
        return result

    async def _deposit(
        self, attempt: Attempt, result: ToolResult[Any], status: CallStatus, done: Transaction
    ) -> None:
        """Deposit the work for the issuing call. If that fails, for example because the call is over, undo the work.

        It then raises `TicketError` if some effects could not be undone, or else the error of the deposit.
        """
        run = attempt.run
        try:
            inner = record_of(attempt, _in_words(result), done, status)
            depends = done.has_session and EFFECTS[self._tool.effect].transactional
            deposit = Deposit(
                inner=inner,
                reads=read_digests(done.session) if depends else {},
                spent=dict(run.costs.tracker.spent()),
                usage=run.costs.models.usage,
                cost=run.costs.models.cost,
            )
            await self._box.deposit(*self._which, self._by, msgspec.msgpack.encode(deposit))
        except Exception as error:
            left = await self._undo(attempt.gate, done.settled or ())
            if not left:
                raise
            problem = error.problem if isinstance(error, TicketError) else str(error)
            raise TicketError(
                f"{problem}. Could not be undone: {', '.join(left)}", "Find out which of its effects remain."
            ) from error

    async def _undo(self, gate: Gate, settled: Iterable[Settled]) -> tuple[str, ...]:
        """Compensate external effects, in a transaction that is dropped afterwards.

        Returns what could not be undone.
        """
        around = self._stand_in(gate)
        failed = gate.open(new_call(gate, self._tool.name, "{}", parent=around))
        try:
            return (await compensate(failed, tuple(settled)))[1]
        finally:
            around.open_transaction.drop()

    def _stand_in(self, gate: Gate) -> Attempt:
        """Create a stand-in for the issuing call.

        The redeemed call commits into the stand-in's transaction, which is never committed. Ids derive from the
        ticket's place, so they are the same for every redeemer and unique in the run.
        """
        ticket, run = self._ticket, gate.run
        verb = Place.parse(ticket.place)
        place = verb.outer or RUN
        run.place = place.parent or RUN
        call = Call(
            gate,
            ticket.tool,
            None,
            ticket.call_id,
            ticket.path[:-1],
            asyncio.get_running_loop(),
            place.number,
            depth=ticket.depth - 1,
            tool=self._tool,
        )
        passage = Passage(started=run.monotonic() - run.began)
        around = Attempt(call, run, passage, verb.attempt_at(place) or 1, verb.number - 1)
        around.transaction = Transaction(run.session, ticket.tool, EFFECTS[_effect_of(ticket)].writes)
        return around

    @contextlib.asynccontextmanager
    async def _held(self, gate: Gate) -> AsyncGenerator[None]:
        """Renew the claim during the block. If the issuing call is over, or another process has the claim, stop the work under the ticket."""

        async def hold() -> None:
            while True:
                await asyncio.sleep(LEASE_SECONDS / 3)
                try:
                    await self._box.claim(*self._which, self._by, True)
                except TicketError as error:
                    gate.cancel(str(error))
                    return
                except JournalError as error:
                    log.log(
                        error.retry_level,
                        "the claim on ticket %s%s could not be renewed; will retry",
                        *self._which,
                        exc_info=True,
                    )

        holder = asyncio.get_running_loop().create_task(hold())
        try:
            yield
        finally:
            holder.cancel()


def _in_words(result: ToolResult[Any]) -> ToolResult[Any]:
    """Return the result without its attachments, and with a line for each of them in its message.

    Only the process that owns the run can store the bytes of attachments.
    """
    if not result.attachments:
        return result
    note = "(Its bytes stayed in the process that did the work.)"
    told = "\n".join(f"{each.render()} {note}" for each in result.attachments)
    return msgspec.structs.replace(result, message=f"{result.message}\n{told}".strip(), attachments=())
