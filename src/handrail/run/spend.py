"""Caps on what is spent in a day: what a request reserves and is charged, and what happens at the cap."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import msgspec

from handrail.concurrency.cancellation import finish
from handrail.context import Approval
from handrail.errors import DefinitionError, HandrailError, SpendCapReached
from handrail.events import ApprovalDecided, SpendWarned
from handrail.guard.approval import APPROVAL_SCHEMA, Broker
from handrail.journal.digest import keyed_digest
from handrail.journal.records import Amounts, SpendCap, SpendRaise, SpendState, SpendWindow, negative, sum_of
from handrail.messages import is_choice
from handrail.protocols import ApprovalRequest
from handrail.question import Question, Quorum, ask
from handrail.run.limits import check_price
from handrail.run.questions import CallAsker, RunAsker, waiting_for_a_person

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal
    from handrail.run.adapter import Settings
    from handrail.run.evaluation import Evaluation
    from handrail.run.run import Run

log = logging.getLogger("handrail.run.spend")

ONLY_USER = "local"
"""The principal of programs on this machine, and of a server without users. Nobody else is there who could raise their cap."""
_NAME = "a higher cap"
_LOOK_SECONDS = 1.0
_MOST_LOOKS = 60
"""How many seconds to wait for what other processes have reserved, before somebody is asked to raise the cap."""
_numbers = itertools.count(1)


def check_caps(run: Run, settings: Settings) -> None:
    """Raise `DefinitionError` if a run has a cap and no journal, or a cap on money and a model whose price is not known."""
    caps = run.options.spend
    if caps and run.journal is None:
        raise DefinitionError(
            "a Spend counts what is spent in a journal, and this run has none. Pass one: journal=SqliteJournal('runs.db')."
        )
    check_price(caps, settings.model, settings.tariff)


def _journal(run: Run) -> Journal:
    """Return the journal in which a run's spending counts. The runs of gates and of tickets have one too, and no record in it."""
    assert run.journal is not None, "`check_caps` was called"
    return run.journal


class AtCap(Exception):
    """Raised if a cap leaves too little for a request."""

    def __init__(self, cap: SpendCap, state: SpendState, wanted: Amounts) -> None:
        super().__init__()
        self.cap, self.state, self.wanted = cap, state, wanted

    def has_room(self, state: SpendState) -> bool:
        """Return whether the cap leaves enough for the request in this state of its window."""
        return not state.missing(self.wanted, self.cap.limits)


class Hold(msgspec.Struct, frozen=True, eq=False):
    """What a request has reserved in the windows of its run's caps."""

    run: Run
    id: str
    reserved: Amounts
    warnings: Mapping[SpendWindow, Amounts]
    caps: Mapping[SpendWindow, SpendCap]
    """The windows in which it was reserved. The day may be over once the request has ended."""

    async def settle(self, spent: Mapping[str, int | Decimal | None]) -> None:
        """Count what the request has spent. A unit that is omitted or None counts as it was reserved."""
        known = {unit: amount for unit, amount in spent.items() if amount is not None}
        journal = _journal(self.run)
        try:
            near = await journal.spending.settle(self.id, {**self.reserved, **known}, self.warnings)
        except HandrailError:
            log.warning("what a request spent is not recorded, so what it reserved counts", exc_info=True)
            return
        for state in near:
            text = f"{_spent(state, self.caps[state.window])}. At the cap, runs wait until it is raised or the day is over"
            log.warning("%s", text, extra={"run_id": self.run.run_context.request_id})
            self.run.publish(SpendWarned(text, state.window.id, self.run.run_context))


async def hold(evaluation: Evaluation, bound: Mapping[str, int | Decimal | None]) -> Hold:
    """Reserve what a request may spend at most. What it can't spend is not checked. Raises `AtCap` if a cap leaves less, and `DefinitionError` if its price is not known."""
    run, caps = evaluation.run, evaluation.run.options.spend
    check_price(caps, evaluation.model, evaluation.tariff)
    assert not is_choice(evaluation.model), "one of its candidates is asked, which has a price"
    amounts: Amounts = {unit: amount for unit, amount in bound.items() if amount}
    limits: dict[SpendWindow, Amounts] = {}
    warnings: dict[SpendWindow, Amounts] = {}
    now = _journal(run).clock.now().timestamp()
    windows = [(cap.window(run.session.principal, now), cap) for cap in caps]
    for window, cap in windows:
        part = Decimal(str(cap.warn_at))
        _lower(limits.setdefault(window, {}), cap.limits)
        _lower(warnings.setdefault(window, {}), {unit: limit * part for unit, limit in cap.limits.items()})
    place = evaluation.place_of_answer.id(run.run_context.request_id)
    id = f"{place} {_journal(run).owner} {next(_numbers)}"
    spending = _journal(run).spending
    try:
        short = await finish(spending.reserve(id, amounts, limits))
    except asyncio.CancelledError:
        await finish(spending.settle(id, {}, warnings))
        raise
    if short is None:
        if run.log.resumed:  # an earlier leg may have asked for a raise that is no longer needed
            await run.people.questions.withdraw_all(f"{place}?spend-")
        return Hold(run, id, amounts, warnings, dict(reversed(windows)))
    found = (cap for window, cap in windows if window == short.window)
    raise AtCap(next(cap for cap in found if short.missing(amounts, cap.limits)), short, amounts)


def _lower(limits: Amounts, others: Amounts) -> None:
    for unit, limit in others.items():
        limits[unit] = min(limit, limits.get(unit, limit))


# --- at the cap ---------------------------------------------------------------------------------------


async def wait_at_cap(evaluation: Evaluation, short: AtCap) -> None:
    """Wait until the cap leaves room: because somebody raised it, requests cost less than they had reserved, or the day is over.

    Meanwhile, the run may be parked. Raises `PromptEvaluationError` if nobody raises the cap.
    """
    run, spending = evaluation.run, _journal(evaluation.run).spending
    place = run.place.answer(evaluation.answers)
    for _ in range(_MOST_LOOKS):
        if short.state.missing(sum_of(short.wanted, negative(short.state.in_flight)), short.cap.limits):
            break
        await _journal(run).queue.wait(_LOOK_SECONDS)
        short.state = await spending.get(short.state.window)
        if short.has_room(short.state):
            return
    ids = (place.question(f"spend-{number}").id(run.run_context.request_id) for number in itertools.count(1))
    question = _question(run, next(id for id in ids if id not in evaluation.raises), short)
    evaluation.raises.add(question.id)
    if (outer := run.outer) is None:
        approval = await _decide(run, question, short)
    else:
        with waiting_for_a_person(outer):
            approval = await _decide(run, question, short)
    if approval.outcome == "timed out" or (approval.outcome == "cancelled" and not approval.reason):
        return  # the day is over, or the question was withdrawn because the cap leaves room
    if not approval.approved:
        raise evaluation.failed(SpendCapReached(_wanted(short), _why(approval)), "budget")
    raised = msgspec.convert(question.payload["arguments"]["raise_by"], Amounts)
    await spending.add(short.state.window, SpendRaise(id=question.id, by=approval.by, amounts=raised))
    log.info("%s raised the cap of %s by %s", approval.by, short.state.window.id, raised)
    await _wake_others(run, short.state.window)


def _question(run: Run, id: str, short: AtCap) -> Question:
    """Return the question at this place. One that an earlier leg asked the same people about this window is asked again as it was."""
    state, cap, principal = short.state, short.cap, run.session.principal
    quorums: tuple[Quorum, ...] = () if principal == ONLY_USER else (ask(role=cap.raised_by),)
    before = run.log.asked.get(id)
    if before is not None and (_window_id(before.question), before.question.quorums) == (
        state.window.id,
        quorums,
    ):
        return before.question
    missing = state.missing(short.wanted, cap.limits)
    raised = {unit: max(cap.limits[unit], missing[unit]) for unit in missing}
    until = datetime.fromtimestamp(state.window.ends_at, ZoneInfo(cap.zone))
    message = (
        f"{_wanted(short)}. Raise the cap by {_shown(raised)} until {until:%Y-%m-%d %H:%M} ({cap.zone})?"
    )
    shown = {
        "spent": state.counted,
        "cap": state.limits(cap.limits),
        "raise_by": raised,
        "next_request": short.wanted,
    }
    shown = {name: {unit: each[unit] for unit in cap.limits if unit in each} for name, each in shown.items()}
    arguments = msgspec.to_builtins(shown)
    payload = {"tool": _NAME, "arguments": arguments, "reason": message, "window": state.window.id}
    now = _journal(run).clock.now()
    return Question(
        id=id,
        kind="approval",
        name=_NAME,
        message=message,
        payload=payload,
        schema=APPROVAL_SCHEMA,
        digest=keyed_digest(
            run.people.key, _NAME, id, message, payload, principal, [each.role for each in quorums]
        ),
        principal=principal,
        asked_by=() if run.outer is None else run.outer.path,
        call_id="" if run.outer is None else run.outer.id,
        asked_at=now,
        expires_at=until.astimezone(now.tzinfo),
        run_id=run.run_context.request_id,
        quorums=quorums,
        title="The cap on today's spending is reached",
    )


async def _decide(run: Run, question: Question, short: AtCap) -> Approval:
    """Ask for a raise of the cap, and return the decision. The question is withdrawn if the cap leaves room before there is one."""
    journal, people, parking = _journal(run), run.people, run.parking
    broker = Broker(people.questions, people.environment, "strict" if people.mode == "strict" else None)
    request = ApprovalRequest(
        question=question,
        tool=_NAME,
        arguments=question.payload["arguments"],
        through=lambda environment: RunAsker(run) if run.outer is None else CallAsker(run.outer, environment),
    )
    if parking is not None:
        parking.asks()
        parking.resting.add(run)
    deciding = asyncio.ensure_future(broker.decide(request))
    try:
        while not deciding.done():
            looking = asyncio.ensure_future(journal.queue.wait(_LOOK_SECONDS))
            try:
                await asyncio.wait({deciding, looking}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
            if not deciding.done() and short.has_room(await journal.spending.get(short.state.window)):
                await people.questions.withdraw(question.id)
        decided = deciding.result()
        run.publish(ApprovalDecided(question.id, question.call_id, _NAME, decided, run.run_context))
        return decided
    finally:
        deciding.cancel()
        await asyncio.gather(deciding, return_exceptions=True)
        if parking is not None:
            parking.resting.discard(run)


async def _wake_others(run: Run, window: SpendWindow) -> None:
    """Withdraw the other questions about this window, whose runs then find that the cap leaves room, or ask again."""
    journal = _journal(run)
    for question in await journal.questions.open():
        if _window_id(question) == window.id:
            with contextlib.suppress(HandrailError):
                await journal.questions.withdraw(question.id)
                await journal.queue.wake(question.run_id)


def _window_id(question: Question) -> str:
    """Return the id of the window that a question is about; "" for any other question."""
    return question.payload.get("window", "") if (question.kind, question.name) == ("approval", _NAME) else ""


def _why(approval: Approval) -> str:
    if approval.outcome == "nobody there":
        return "Nobody is there who could be asked to raise it"
    who = f" by {approval.by}" if approval.by else ""
    return f"A raise was {approval.outcome}{who}{f': {approval.reason}' if approval.reason else ''}"


def _spent(state: SpendState, cap: SpendCap) -> str:
    """Say how much of a cap was spent."""
    limits, window = state.limits(cap.limits), state.window
    counted = {unit: state.counted.get(unit, 0) for unit in limits}
    whose = f"the app {window.name!r}" if window.by == "app" else window.name
    below = any(counted[unit] > limits[unit] for unit in limits)
    more = ", which is below what was already spent" if below else ""
    return f"{whose} has spent {_shown(counted)} on {window.day}, and the cap is {_shown(limits)}{more}"


def _wanted(short: AtCap) -> str:
    wanted = {unit: short.wanted[unit] for unit in short.cap.limits if unit in short.wanted}
    return f"{_spent(short.state, short.cap)}; the next request may spend {_shown(wanted)}"


def _shown(amounts: Amounts) -> str:
    return " and ".join(
        f"{amount} {unit}" if unit != "money" else f"${amount:.2f}" if amount >= 1 else f"${amount:.4f}"
        for unit, amount in amounts.items()
    )
