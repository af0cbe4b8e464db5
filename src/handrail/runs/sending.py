"""Messages to runs: edit or withdraw what a run's model was not told yet; and orders: pause, go on, wrap up, stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from handrail.errors import MessageRefused
from handrail.journal.records import OVER, Order, QueuedMessage, When
from handrail.question import Answer, Question
from handrail.run.mailbox import GO_ON, Receipt, change, check_root, ring, send

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal

__all__ = ["Receipt", "edit", "go_on", "messages", "pause", "send", "stop", "withdraw", "wrap_up"]


async def edit(
    journal: Journal,
    run_id: str,
    message_id: str,
    text: str | None = None,
    *,
    when: When | None = None,
    by: str | None = None,
) -> None:
    """Replace the text of a message that the run's model was not told yet, or when it is told, or both.

    Raises `MessageRefused` if it was told or withdrawn, and the errors of `send`.
    """
    await change(journal.messages, run_id, message_id, text=text, when=when, by=by)
    await ring(journal, run_id)


async def withdraw(journal: Journal, run_id: str, message_id: str, *, by: str | None = None) -> None:
    """Take back a message that the run's model was not told yet. Raises `MessageRefused` if it was told or withdrawn."""
    await change(journal.messages, run_id, message_id, by=by, withdrawn=True)
    await ring(journal, run_id)


async def messages(journal: Journal, run_id: str) -> Sequence[QueuedMessage]:
    """Return the messages that were sent to a run, in the order in which they were accepted. Raises `RunUnknown` if there is no such run."""
    return await journal.messages.list(run_id)


async def pause(journal: Journal, run_id: str, text: str = "", *, by: str | None = None) -> Receipt:
    """Pause a run before its next step, until `go_on` continues it. It is parked meanwhile, if its environment parks runs.

    With a text, the model is told it when the run goes on. A run that is done first does not pause. Raises the errors of `send`.
    """
    return await send(journal, run_id, text, by=by, order="pause")


async def stop(journal: Journal, run_id: str, text: str = "", *, by: str | None = None) -> Receipt:
    """End a run after its current step, with what it has done. Its stop reason is then `stopped`, and nothing is undone.

    The session's next run reads the text, and whatever else its model was not told. A paused run ends at once. Raises the errors of `send`.
    """
    return await _ordered(journal, run_id, text, by, "stop")


async def wrap_up(journal: Journal, run_id: str, text: str = "", *, by: str | None = None) -> Receipt:
    """Let a run's model finish: it has one last turn, in which it can't call tools. Its stop reason is then `wrapped up`.

    A paused run goes on with that turn. Raises the errors of `send`.
    """
    return await _ordered(journal, run_id, text, by, "wrap up")


async def go_on(journal: Journal, run_id: str, text: str = "", *, by: str | None = None) -> None:
    """Continue a paused run, or take back a pause that has not begun. With a text, the model is told it.

    Raises `MessageRefused` if the run is not paused, and the errors of `send`.
    """
    waiting = [each for each in await messages(journal, check_root(run_id)) if each.state == "waiting"]
    pauses = [each for each in waiting if each.order == "pause"]
    question = await _pause_of(journal, run_id)
    if not pauses and question is None:
        row = await journal.runs.get(run_id)
        todo = (
            "There is nothing to continue." if row.status in OVER else "If it is about to pause, try again."
        )
        raise MessageRefused(run_id, "it is not paused", todo)
    for each in pauses:
        await withdraw(journal, run_id, each.id, by=by)
    if text:
        await send(journal, run_id, text, by=by)
    if question is not None:
        _continue(journal, question, by)


async def _ordered(journal: Journal, run_id: str, text: str, by: str | None, order: Order) -> Receipt:
    """Give an order to a run, and continue it if it is paused, so that it carries the order out."""
    receipt = await send(journal, run_id, text, by=by, order=order)
    question = await _pause_of(journal, run_id)
    if question is not None:
        _continue(journal, question, by)
    return receipt


async def _pause_of(journal: Journal, run_id: str) -> Question | None:
    return next((each for each in await journal.questions.open(run_id) if each.kind == "pause"), None)


def _continue(journal: Journal, question: Question, by: str | None) -> None:
    said = question.principal if by is None else by
    journal.questions.answer(Answer(question_id=question.id, digest=question.digest, by=said, value=GO_ON))
