"""`Mailbox`: what was said to a run while it works, and is not told to its model yet; and how it is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

import msgspec

from handrail.concurrency.cancellation import CancelScope, scope_of
from handrail.errors import DefinitionError, MessageRefused
from handrail.events import BackgroundEnded, MessageQueued
from handrail.ids import random_id
from handrail.journal.local import LocalMessages
from handrail.journal.protocol import Journal, Messages
from handrail.journal.records import Entry, Order, QueuedMessage, RunStatus, When
from handrail.run.place import split_run_id
from handrail.run.record.log import Told
from handrail.tools.result import clean_text

if TYPE_CHECKING:
    from handrail.run.response import Outcome
    from handrail.run.run import Run


GO_ON = "continue"
"""The answer that ends a pause."""


class Mailbox:
    """The messages that wait for a run at the root. A run gets its mailbox with its first message."""

    __slots__ = ("_known", "_messages", "_run", "_stopping", "is_over", "waiting")

    def __init__(self, run: Run, messages: Messages) -> None:
        self._run = run
        self._messages = messages
        self._known: dict[str, QueuedMessage] | None = None
        self._stopping: CancelScope | None = None
        """The answer that is being stopped for a message; None if none is."""
        self.is_over = False
        """Whether the run is told nothing more, so that what still waits is left to the session's next run, and is no news."""
        self.waiting: Sequence[QueuedMessage] = ()
        """The messages that wait, as far as this process knows, in the order in which they were accepted."""

    async def look(self) -> None:
        """Find the messages that wait, and publish what has changed. If one is for `now`, the model's current answer is stopped.

        Called on the run's loop.
        """
        run = self._run
        known = await self._messages.list(run.run_context.run_id)
        if self.is_over:
            return
        before, self._known = self._known, {each.id: each for each in known}
        for each in known:
            # what was told or withdrawn before the run was resumed is no news
            is_news = each.state == "waiting" if before is None else before.get(each.id) != each
            if is_news and not each.child:
                run.publish(MessageQueued(each, run.run_context))
            elif is_news and each.state == "told":
                run.publish(BackgroundEnded(each, run.run_context))
        self.waiting = [each for each in known if each.state == "waiting"]
        is_urgent = any(each.when == "now" for each in self.waiting)
        if is_urgent and run.model.is_asked and run.task is not None and self._stopping is None:
            self._stopping = scope_of(run.task)
            self._stopping.end()

    def take_back(self) -> bool:
        """Return whether the model's answer was stopped for a message and for nothing else. The run then goes on."""
        stopping, self._stopping = self._stopping, None
        return stopping is not None and stopping.take_back() and not stopping.interrupted

    def is_due(self, *, is_done: bool) -> bool:
        """Return whether a message is told before the next request, or now that the model is done."""
        return any(is_done or each.when != "afterwards" for each in self.waiting)

    async def deliver(self, key: str, write: Write, *, is_done: bool) -> Told | None:
        """Record what is told before the next request under this key, and return the record; None if nothing is told."""
        run_id, now = self._run.run_context.run_id, self._run.log.now()
        told = await deliver(self._messages, run_id, key, now, write, is_done=is_done)
        await self.look()
        return told


async def look(run: Run, messages: Messages) -> None:
    """Let a run find the messages that were sent to it."""
    if run.mailbox is None:
        run.mailbox = Mailbox(run, messages)
    await run.mailbox.look()


def hear(run: Run, messages: LocalMessages) -> None:
    """Let a run without a record hear what is said to it from now on. It does not end while messages wait."""
    run.options = run.options.replace(messages=messages)
    mailbox = run.mailbox = Mailbox(run, messages)
    messages.look = mailbox.look

    async def end(outcome: Outcome) -> bool:
        has_ended = messages.end("done")
        if not has_ended:
            await mailbox.look()
        return has_ended

    run.end = end


Write = Callable[[Sequence[QueuedMessage]], Told | None]
"""A function that gets the messages that are due and returns the record of what is told; None if nothing is."""


async def deliver(
    messages: Messages,
    run_id: str,
    key: str,
    now: float,
    write: Write,
    *,
    is_done: bool = False,
    is_over: bool = False,
) -> Told | None:
    """Record what the model of a run is told under this key, and return the record; None if nothing is told.

    `write` is called when the record is made, so no message can be edited after that. With `is_done`, the model is told what is
    for afterwards, too. With `is_over`, it is told nothing more, so orders come too late, and the session's next run reads the rest.
    """
    told: Told | None = None

    def choose(waiting: Sequence[QueuedMessage]) -> tuple[Sequence[str], Entry] | None:
        nonlocal told
        due = [each for each in waiting if is_done or is_over or each.when != "afterwards"]
        ordered = None if is_over else next((at for at, each in enumerate(due) if each.order), None)
        if ordered is not None:
            del due[ordered + 1 :]  # what was said after an order is told once it is carried out
        told = write(due)
        if told is None:
            return None
        order = None if ordered is None else due[ordered].order
        told = msgspec.structs.replace(told, messages=[each.id for each in due], order=order)
        return told.messages, Entry("remark", key, now, msgspec.msgpack.encode(told))

    await messages.deliver(run_id, choose)
    return told


class Receipt(msgspec.Struct, frozen=True):
    """An accepted message, and the status of its run when it was accepted.

    A `running` run is told it as `when` says, a `parked` one after its answers, and a `queued` one before its first step.
    """

    message: QueuedMessage
    status: RunStatus


async def send(
    journal: Journal,
    run_id: str,
    text: str,
    *,
    when: When = "next step",
    by: str | None = None,
    id: str | None = None,
    order: Order | None = None,
) -> Receipt:
    """Say something to a run while it works, in this process or another, and return the receipt once it is recorded.

    The run's model is told it once: before its `next step`; `now`, which also stops the answer that it is giving; or
    `afterwards`, when it would be done. A run does not end before that. `by` is the principal who says it; by default the run's
    own. Sending a message with an `id` again is harmless. `order` also tells the run what to do: `pause`, `stop` and `wrap_up` give it.

    Raises `DefinitionError` for a text or a time that can't be sent, `MessageRefused` if the run is over, nested, or another principal's, and
    `RunUnknown` if there is no such run.
    """
    row = await journal.runs.get(check_root(run_id))
    message = new_message(text, when, row.record.principal if by is None else by, id, order)
    status = await journal.messages.send(run_id, message)
    await ring(journal, run_id)
    return Receipt(message, status)


async def say(heard: LocalMessages | Journal, run_id: str, text: str, when: When) -> QueuedMessage:
    """Say something to a run of this process, with or without a journal, and return the accepted message."""
    if not isinstance(heard, LocalMessages):
        return (await send(heard, run_id, text, when=when)).message
    message = new_message(text, when, heard.principal)
    await heard.send(run_id, message)
    await heard.notify()
    return message


async def take_back(heard: LocalMessages | Journal, run_id: str, message_id: str) -> None:
    """Withdraw a message to a run of this process, with or without a journal."""
    if isinstance(heard, LocalMessages):
        await change(heard, run_id, message_id, withdrawn=True)
        await heard.notify()
    else:
        await change(heard.messages, run_id, message_id, withdrawn=True)
        await ring(heard, run_id)


async def change(
    messages: Messages,
    run_id: str,
    message_id: str,
    *,
    text: str | None = None,
    when: When | None = None,
    by: str | None = None,
    withdrawn: bool = False,
) -> None:
    """Edit or withdraw a message that the run's model was not told yet, as `handrail.runs.edit` and `withdraw` promise."""
    known = {each.id: each for each in await messages.list(check_root(run_id))}
    old = known.get(message_id) or QueuedMessage(id=message_id, text="-")
    text, by = old.text if text is None else text, old.by if by is None else by
    new = new_message(text, when or old.when, by, message_id, old.order)
    state, edited = ("withdrawn", old.edited) if withdrawn else ("waiting", True)
    await messages.edit(run_id, msgspec.structs.replace(new, state=state, edited=edited))


def new_message(
    text: str, when: When, by: str, id: str | None = None, order: Order | None = None
) -> QueuedMessage:
    """Create a message. Raises `DefinitionError` for a text or a time that can't be sent."""
    if not isinstance(text, str) or not (order or text.strip()):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be unchecked
        raise DefinitionError("a message to a run is empty. Say something.")
    if when not in get_args(When):
        options = ", ".join(map(repr, get_args(When)))
        raise DefinitionError(f"when is {when!r}. Pass one of {options}.")
    return QueuedMessage(
        id=id or random_id(), text=clean_text(text.strip() and text), order=order, when=when, by=by
    )


def check_root(run_id: str) -> str:
    """Return the id of a run. Raises `MessageRefused` if it is that of a nested run."""
    outer, _ = split_run_id(run_id)
    if outer != run_id:
        raise MessageRefused(run_id, "it is nested in another run", f"Say it to that run, {outer!r}.")
    return run_id


async def ring(journal: Journal, run_id: str) -> None:
    """Let a run of this process look for messages now. Another process looks when it next renews the run's lease, or sooner."""
    from handrail.run.record.lease import renew_now

    await renew_now(journal, run_id)
