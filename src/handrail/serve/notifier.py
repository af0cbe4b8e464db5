"""`Notifier`: tells the people who may answer a question that it waits, and that it is closed.

What is to be told is derived from the open questions and from what was told before, so asking costs nothing more. Each address gets
one message at a time: while it can't be reached, the message is tried again with the same id, and everything else gathers for the next
one. Of several servers on a journal, one sends it. A message whose server was killed is sent again by any of them: it arrives at least once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache

import msgspec
from msgspec.structs import replace

from handrail.errors import DefinitionError, HandrailError, JournalError
from handrail.journal.protocol import Journal
from handrail.notify.address import Address, check_page, link_to
from handrail.notify.message import Item, Message, News, State, Told, body_of
from handrail.notify.sender import SEND_SECONDS, NetworkSender, Sender
from handrail.notify.settings import Notify
from handrail.question import Question
from handrail.serve.agui.interrupts import is_pending_call
from handrail.serve.inbox import Inbox
from handrail.serve.principals import Principals

log = logging.getLogger("handrail.notify")

_LOOK_SECONDS = 2.0
"""Minimum seconds between two looks. Looking takes at most a twentieth of the time, however many questions are open."""
_FIRST_RETRY = 5.0
_LAST_RETRY = 3600.0
"""Seconds until the second attempt, doubled for each later one, up to this limit."""
_MOST_ATTEMPTS = 80
"""Number of attempts, which take about three days, after which a message about closed questions only is dropped."""
_MOST_SENDING = 50


class Notifier:
    """Sends notifications about the questions of one app, and of gateways, on behalf of its server.

    `page` is the URL at which people open the page. `settings` says when people are told, and which addresses are told about every
    question, besides those of the users who may answer. The clock is the journal's. Raises `DefinitionError` for a bad URL, or if there
    are addresses and no URL.
    """

    def __init__(
        self,
        app: str,
        inbox: Inbox,
        principals: Principals,
        journal: Journal,
        page: str,
        settings: Notify | None = None,
        sender: Sender | None = None,
    ) -> None:
        self._settings = settings or Notify()
        if self._settings.addresses and not page:
            raise DefinitionError(
                "messages about questions link to the page, whose address is not known. Pass public_url='https://…' (--public-url URL), "
                "or leave out the addresses to notify."
            )
        self._page = check_page(page) if page else ""
        self._app = app
        self._inbox = inbox
        self._principals = principals
        self._journal = journal
        self._sender = sender or NetworkSender(journal.key, journal.clock)
        self._sending: dict[Address, asyncio.Task[None]] = {}
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for what there is to tell. Without a page to link to, nobody is told, and a warning says so."""
        if self._page:
            self._running = asyncio.get_running_loop().create_task(self._keep_looking())
        elif told := self._principals.people.addresses():
            who = ", ".join(told)
            log.warning("not told about questions, because there is no --public-url URL to link to: %s", who)

    async def stop(self) -> None:
        """Stop. A message that is being sent now is sent again later."""
        tasks = [*self._sending.values(), *([self._running] if self._running else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self.look()
            except Exception as error:
                level = error.retry_level if isinstance(error, JournalError) else logging.ERROR
                log.log(level, "could not look for questions to tell people about; will retry", exc_info=True)
            await asyncio.sleep(max(_LOOK_SECONDS, 20 * (loop.time() - began)))

    async def look(self) -> None:
        """Find what there is to tell, and begin to send it. `sent` waits until all of it was tried once."""
        people = self._principals.people.addresses()
        addresses = {each for urls in people.values() for each in urls} | {*self._settings.addresses}
        names = {each: each.receiver(self._journal.key) for each in addresses - self._sending.keys()}
        now = self._journal.clock.now()
        # The states are read first. So a question that a state has, and that is not open afterwards, is closed.
        if not names:
            return
        found = await self._journal.outbox.read(list(names.values()))
        states = {each: _decode(found[name]) if name in found else State() for each, name in names.items()}
        longest = max(_LAST_RETRY, self._settings.every)  # if it is due later, the clock was set back
        due = [each for each in names if not 0 < states[each].due_at - now.timestamp() <= longest]
        if not due:
            return
        questions = await self._journal.questions.open()
        mine, others = await self._audiences(questions, people)
        told = {id: each for address in due for id, each in states[address].told.items()}
        closed = await self._closed(told, {each.id for each in questions})
        for address in due[: _MOST_SENDING - len(self._sending)]:
            state = self._next(names[address], states[address], now, mine.get(address, {}), others, closed)
            before = found.get(names[address], b"")
            if state == states[address] or not await self._journal.outbox.replace(
                names[address], before, _encode(state)
            ):
                continue
            if state.message is not None:
                task = asyncio.get_running_loop().create_task(self._send(address, state, state.message))
                self._sending[address] = task
                task.add_done_callback(lambda _, address=address: self._sending.pop(address, None))

    async def sent(self) -> None:
        """Wait until every message that `look` found was tried once."""
        await asyncio.gather(*self._sending.values())

    async def _audiences(
        self, questions: Iterable[Question], people: Mapping[str, Sequence[Address]]
    ) -> tuple[Mapping[Address, Mapping[str, Question]], Collection[str]]:
        """Return the questions that each address is to know of, by id, and the ids of those that are not this server's."""
        mine: dict[Address, dict[str, Question]] = {}
        others: set[str] = set()
        voters = cache(self._principals.who_may_vote)
        for question in questions:
            names = await self._inbox.audience(question, voters)
            if names is None:
                others.add(question.id)
            elif question.kind == "pause" or is_pending_call(question):
                continue  # whoever paused it knows, and the client's own tools are not people
            elif self._inbox.waited(question) >= self._settings.after:
                theirs = (each for name in names for each in people.get(name, ()))
                for address in {*self._settings.addresses, *theirs}:
                    mine.setdefault(address, {})[question.id] = question
        return mine, others

    async def _closed(
        self, told: Mapping[str, Told], open_now: Collection[str]
    ) -> Mapping[str, tuple[str, str]]:
        """Return how the questions that receivers were told about have ended, and by whom."""
        closed = {id: ("withdrawn", "") for id in told if id not in open_now}
        for run_id in {told[id].run_id for id in closed}:
            try:
                records = await self._journal.questions.history(run_id)
            except HandrailError:  # the run was deleted or altered
                continue
            for record in records:
                if record.question.id in closed and record.answer is not None:
                    closed[record.question.id] = (record.answer.outcome, record.answer.by)
        return closed

    def _next(
        self,
        name: str,
        state: State,
        now: datetime,
        mine: Mapping[str, Question],
        others: Collection[str],
        closed: Mapping[str, tuple[str, str]],
    ) -> State:
        """Return a receiver's state with the message to send now: the one that did not arrive, or one about what has changed, or none."""
        at, told, before = now.timestamp(), dict(state.told), state.message
        if before is not None:
            if not before.tells and before.attempt >= _MOST_ATTEMPTS:
                log.error(
                    "gave up telling a receiver about closed questions, after %d attempts", before.attempt
                )
                return State({id: each for id, each in told.items() if id not in before.ends})
            if not before.tells or any(id in mine or id in others for id in before.tells):
                again = replace(before, attempt=before.attempt + 1)
                return replace(state, message=again, due_at=at + SEND_SECONDS)
        news: list[News] = []
        remind = self._settings.remind
        for id, question in mine.items():
            if id not in told or (remind is not None and at - told[id].at >= remind):
                news.append(News("reminder" if id in told else "opened", self._item(question)))
                told[id] = Told(question.run_id, at, news[-1].item)
        tells = tuple(each.item.question_id for each in news)
        ends = tuple(id for id in told if id in closed)
        news += [News("closed", told[id].item, *closed[id]) for id in ends]
        if not news:
            return replace(state, message=None)
        body = body_of(news, at=now, waiting=len(mine), page=self._page)
        unique = hashlib.sha256(f"{self._journal.id} {name}".encode() + _encode(state) + body).hexdigest()
        return State(told, Message(f"msg_{unique[:32]}", body, tells, ends), at + SEND_SECONDS)

    def _item(self, question: Question) -> Item:
        # The name and the message of a question may quote arguments, so only the tool is told.
        tool = question.askers[-1] if question.askers else ""
        link = link_to(self._page, question.id)
        return Item(question.id, self._app, tool, link, question.asked_at, question.expires_at)

    async def _send(self, address: Address, state: State, message: Message) -> None:
        """Send a message once, and record whether it has arrived. Errors are logged."""
        try:
            problem = await self._sender.send(address, message)
        except Exception as error:  # a sender of somebody else's
            problem = f"the sender failed with {type(error).__name__}"
        now = self._journal.clock.now().timestamp()
        if problem:
            pause = min(_FIRST_RETRY * 2 ** (message.attempt - 1), _LAST_RETRY)
            after = replace(state, due_at=now + pause)
            log.warning(
                "could not tell %s that questions wait: %s. Attempt %d, next in %.0f s; nothing is lost. Check the receiver, or the address.",
                *(address, problem, message.attempt, pause),
            )
        else:
            told = {id: each for id, each in state.told.items() if id not in message.ends}
            after = State(told, None, now + self._settings.every)
        try:
            name = address.receiver(self._journal.key)
            await self._journal.outbox.replace(name, _encode(state), _encode(after))
        except JournalError as error:
            log.log(
                error.retry_level,
                "could not record that %s was told; will tell it again",
                address,
                exc_info=True,
            )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(State).decode
