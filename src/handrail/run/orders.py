"""Orders to a run: to pause, to wrap up, or to stop. Each is carried out before the next step of the run's model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from handrail.journal.digest import keyed_digest
from handrail.question import Question
from handrail.run.mailbox import GO_ON
from handrail.run.questions import RunAsker
from handrail.run.record.notices import next_remark, tell_nobody, tell_remarks, tell_undone
from handrail.run.request import while_asking

if TYPE_CHECKING:
    from handrail.run.evaluation import Evaluation
    from handrail.run.place import Place
    from handrail.run.response import Outcome

_SCHEMA: dict[str, Any] = {"type": "string", "enum": [GO_ON]}
_PAUSED = "The run is paused. Continue it?"


async def hear(evaluation: Evaluation) -> bool:
    """Tell the model of the outermost run what happened and was said since its last step, and pause the run if that is ordered.

    A nested run hears nothing. Returns whether the run goes on. It does not if it was ordered to stop, or if somebody declined to continue it.
    """
    run = evaluation.run
    if run.parking is not None and run.parked:
        raise asyncio.CancelledError  # the run was parked during a shielded step
    if run.outer is not None:
        return True
    answer = run.place.answer(evaluation.answers + 1)
    if run.log.is_kept:
        await tell_undone(evaluation, answer)
    pauses = 0
    while True:
        if evaluation.order is None:
            await tell_remarks(evaluation)
        order, evaluation.order = evaluation.order, None
        if order == "stop":
            return False
        if order == "pause":
            pauses += 1
            if not await _continued(evaluation, answer.question(f"pause-{pauses}")):
                return False
        elif order == "wrap up":
            evaluation.is_last = True
        elif not run.log.has("remark", next_remark(evaluation)):
            return True


async def end_as_ordered(evaluation: Evaluation, outcome: Outcome) -> Outcome:
    """End the run although messages may wait. The session's next run reads them."""
    run = evaluation.run
    while run.log.has("remark", next_remark(evaluation)):
        await tell_remarks(evaluation)
    while run.end is not None and not await run.end(outcome):
        await tell_nobody(run, evaluation.conversation)
    return outcome


async def _continued(evaluation: Evaluation, place: Place) -> bool:
    """Wait until somebody continues the run, which may be parked meanwhile. Returns False if they declined to."""
    run = evaluation.run
    people, context, parking = run.people, run.run_context, run.parking
    id, principal = place.id(context.run_id), run.session.principal
    question = Question(
        id=id,
        kind="pause",
        name="pause",
        message=_PAUSED,
        payload=None,
        schema=_SCHEMA,
        digest=keyed_digest(people.key, "pause", id, _PAUSED, principal),
        principal=principal,
        asked_by=(),
        call_id="",
        asked_at=run.clock.now(),
        run_id=context.run_id,
        title="Paused",
    )
    if parking is not None:
        parking.asks()
    asking = people.questions.ask(question, None if people.environment is None else RunAsker(run))
    return (await while_asking(evaluation, asking)).outcome == "answered"
