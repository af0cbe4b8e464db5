"""`RunInput`: an AG-UI client's input, after validation. `submit` starts or continues a run with it.

Clients of protocol 1.0 and of 0.0.59 send the same fields, except for the version. A client sends the whole
conversation each time. Only the new parts start or continue a run: user messages after the last answer, answers to
interrupts, and results of the client's own tools. A thread that has no runs yet takes the earlier messages as history.

The protocol requires one input to answer every open interrupt. A user message that comes with the answers goes to the
model of the run that they continue; without answers, nothing can be said while an interrupt is open. If an input breaks
this rule, the response is a stream that contains the error, because clients show the events of a stream but hide the
body of a refused request. Sending the same answers again changes nothing, and the response shows the current state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ag_ui.core import Message, ResumeEntry, RunAgentInput, ToolMessage, UserMessage
from pydantic import ValidationError

from handrail.content import Attachment
from handrail.errors import AnswerRefused, DefinitionError, HandrailError, JournalError
from handrail.messages import AssistantMessage as OurAssistantMessage
from handrail.messages import Compaction
from handrail.messages import Message as OurMessage
from handrail.messages import UserMessage as OurUserMessage
from handrail.question import Answer, Question
from handrail.schema.size import exceeds
from handrail.serve.agui.interrupts import FrontendTool, Outcome, frontend_tool, interrupt_id, is_pending_call
from handrail.serve.agui.translator import Translator
from handrail.serve.agui.wire_events import Event
from handrail.serve.attachments import received
from handrail.serve.refusals import QuestionsOpen, RequestRefused
from handrail.serve.requests import ID, ID_RULE
from handrail.serve.thread_messages import RunMessage, next_remark_id, said_by_people

if TYPE_CHECKING:
    from handrail.journal.records import QuestionRecord, RunRow
    from handrail.serve.thread import Thread

Start = Callable[..., Awaitable[Any]]
"""A function that starts a run with a text, and returns the run's id.

It takes the keywords `leg`, `tools`, `history` and `attachments`.
"""
Check = Callable[[str, Sequence[Attachment]], None]
"""A function that raises `RequestRefused` if a message, with its attachments, is empty or too large."""

_MAX_ID = 200
_MAX_TOOLS = 128
_MAX_VALUES = 20_000
"""Maximum number of values, at any depth, in each list of an input.

Validation blocks the event loop, and takes much longer for invalid values than for valid ones.
"""
_MAX_PROBLEMS = 100
"""Maximum number of invalid fields that a refusal lists."""


class InterruptAnswer(NamedTuple):
    """A client's answer to one interrupt."""

    question_id: str
    digest: str
    """A prefix of the digest of the question that the client showed."""
    resolved: bool
    """True if the interrupt was answered, False if it was cancelled."""
    value: Any


class NewMessage(NamedTuple):
    """A user message after the last assistant or tool message of an input."""

    id: str
    """The id that the client gave to it."""
    text: str
    attachments: tuple[Attachment, ...]


class RunInput(NamedTuple):
    """A client's input, after validation."""

    thread_id: str
    run_id: str
    """The id for the leg that this input opens, if it opens one."""
    new: tuple[NewMessage, ...]
    named: tuple[tuple[str, str], ...]
    """The id and the text of each user message. The client chooses the ids. Messages with very long ids are left out."""
    answers: tuple[InterruptAnswer, ...]
    outcomes: Mapping[str, Outcome]
    """The results in tool messages that contain only text, by call id. Results of calls that the server executed are included."""
    tools: tuple[FrontendTool, ...]
    history: tuple[OurMessage, ...]
    """The text messages before the new ones. A thread that has no runs yet starts with them."""
    sees_nested: bool
    """Whether the client understands the events of nested runs."""

    @property
    def said(self) -> tuple[str, ...]:
        """The texts of the new messages."""
        return tuple(each.text for each in self.new)

    @property
    def attached(self) -> tuple[Attachment, ...]:
        """The attachments of the new messages."""
        return tuple(file for each in self.new for file in each.attachments)


def parse_input(value: Any) -> RunInput:
    """Validate a client's input and return it.

    Raises `RequestRefused` if the input is too large or invalid. The refusal of an invalid input names one or more of its
    invalid fields.
    """
    _check_size(value)
    try:
        given = RunAgentInput.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        fields = [("/" + "/".join(map(str, each["loc"])), each["msg"]) for each in found[:_MAX_PROBLEMS]]
        raise _refused(fields, len(found)) from None
    return RunInput(
        thread_id=_id("threadId", given.thread_id),
        run_id=_id("runId", given.run_id),
        new=tuple(_new_messages(given.messages)),
        named=tuple(_named_texts(given.messages)),
        answers=tuple(_answers(given.resume or ())),
        outcomes=dict(_outcomes(given.messages)),
        tools=_tools(given),
        history=tuple(_history(given.messages)),
        sees_nested=given.protocol_version is not None,
    )


def _check_size(value: Any) -> None:
    """Raise `RequestRefused` if a list in the input has too many values to be validated on the event loop."""
    if not isinstance(value, dict):
        return
    for name in ("messages", "tools", "context", "resume"):
        if exceeds(cast("dict[str, Any]", value).get(name), _MAX_VALUES):
            raise RequestRefused(
                413, "InputTooLarge", f"{name} contains more than {_MAX_VALUES:,} values. Send fewer."
            )


def _id(field: str, id: str) -> str:
    if not ID.fullmatch(id):
        raise _refused([(f"/{field}", f"use {ID_RULE}")])
    return id


# --- messages -----------------------------------------------------------------------------------------


def _first_new(messages: Sequence[Message]) -> int:
    """Return the index of the first message after the last assistant or tool message."""
    return next(
        (at for at in range(len(messages), 0, -1) if messages[at - 1].role in ("assistant", "tool")), 0
    )


def _new_messages(messages: Sequence[Message]) -> Iterator[NewMessage]:
    start = _first_new(messages)
    for at, message in enumerate(messages[start:], start):
        if isinstance(message, UserMessage):
            parts = () if isinstance(message.content, str) else cast("Sequence[Any]", message.content)
            files = (
                _file(f"/messages/{at}/content/{number}", part)
                for number, part in enumerate(parts)
                if part.type != "text"
            )
            yield NewMessage(message.id, _text(message.content), tuple(files))


def _file(place: str, part: Any) -> Attachment:
    """Convert a message part other than text to an attachment. Raises `RequestRefused` if that is not possible."""
    source, told = part.source, part.metadata
    told = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    name = str(told.get("name") or told.get("filename") or "")
    if source.type == "data":
        return received(place, source.value, name, source.mime_type)
    value = str(getattr(source, "value", ""))
    if source.type == "url" and value.startswith("data:"):
        head, _, data = value.partition(",")
        if not head.endswith(";base64"):
            raise _refused([(f"{place}/source", "the data URL is not in base64: encode it")])
        return received(place, data, name, source.mime_type or head[5:-7] or None)
    if source.type == "url" and value.startswith(("https://", "http://")):
        try:
            return Attachment(value, name or None, media_type=source.mime_type)
        except DefinitionError as error:
            raise _refused([(f"{place}/source", str(error))]) from None
    wrong = f"this source of type {source.type!r} can't be read: send the data, or an http address"
    raise _refused([(f"{place}/source", wrong)])


def _named_texts(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    for message in messages:
        if isinstance(message, UserMessage) and len(message.id) <= _MAX_ID:
            yield message.id, _text(message.content)


def _text(content: Any) -> str:
    """Return the text in a message's content, without the parts that are not text."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in cast("Sequence[Any]", content) if part.type == "text")


def _history(messages: Sequence[Message]) -> Iterator[OurMessage]:
    for message in messages[: _first_new(messages)]:
        if isinstance(message, UserMessage) and isinstance(message.content, str):
            yield OurUserMessage(message.content)
        elif message.role == "assistant" and isinstance(message.content, str) and message.content:
            yield OurAssistantMessage(message.content)


# --- answers and tools --------------------------------------------------------------------------------


def _answers(resume: Sequence[ResumeEntry]) -> Iterator[InterruptAnswer]:
    seen: set[str] = set()
    for at, entry in enumerate(resume):
        question_id, _, digest = entry.interrupt_id.rpartition("#")
        if not question_id or not digest:
            wrong = f"{entry.interrupt_id!r} is not the id of an interrupt: send the id that you received, unchanged"
            raise _refused([(f"/resume/{at}/interruptId", wrong)])
        if entry.interrupt_id in seen:
            raise _refused(
                [
                    (
                        f"/resume/{at}/interruptId",
                        "this interrupt is answered twice: answer each interrupt once",
                    )
                ]
            )
        seen.add(entry.interrupt_id)
        yield InterruptAnswer(question_id, digest, entry.status == "resolved", entry.payload)


def _outcomes(messages: Sequence[Message]) -> Iterator[tuple[str, Outcome]]:
    """Yield the call id and outcome of each tool message that contains only text.

    The messages may answer calls that are no longer open: `submit` decides which of them are used.
    """
    for message in messages:
        if isinstance(message, ToolMessage):
            text = message.content
            if not isinstance(text, str) and any(part.type != "text" for part in text):
                continue  # the call that this message would answer stays open
            yield message.tool_call_id, Outcome(_text(text), message.error)


def _tools(given: RunAgentInput) -> tuple[FrontendTool, ...]:
    tools = given.tools or []
    if len(tools) > _MAX_TOOLS:
        raise _refused([("/tools", f"there are more than {_MAX_TOOLS} tools: send fewer")])
    made: dict[str, FrontendTool] = {}
    for at, tool in enumerate(tools):
        if tool.name in made:
            raise _refused([(f"/tools/{at}/name", f"two tools are named {tool.name!r}: rename one")])
        try:
            made[tool.name] = frontend_tool(tool.name, tool.description, tool.parameters)
        except DefinitionError as error:
            raise _refused([(f"/tools/{at}", str(error))]) from None
    return tuple(made.values())


def _refused(fields: Sequence[tuple[str, str]], count: int = 1) -> RequestRefused:
    where, what = fields[0]
    more = f" (and {count - 1:,} more)" if count > 1 else ""
    return RequestRefused(
        422, "InputUnfit", f"the body is not a valid RunAgentInput. At {where}: {what}{more}", fields=fields
    )


# --- submitting ---------------------------------------------------------------------------------------


class Submitted(NamedTuple):
    """The response to an input: a leg to follow, or events to send.

    If there is neither, the input opened no leg in this process, and the client is sent the thread's current state.
    """

    leg: str
    """The id of the leg to follow, or "" if there is none."""
    refused: list[Event]
    """The events that report why the input was not accepted. Empty if it was."""


async def submit(
    thread: Thread,
    input: RunInput,
    rows: Sequence[RunRow],
    recorded: Sequence[QuestionRecord],
    start: Start,
    check: Check,
) -> Submitted:
    """Start a run, or continue one with answers. `rows` are the thread's runs, and `recorded` the questions of the newest one.

    A new message that comes with answers goes to the model of the run that they continue, if `check` accepts it.

    Raises `RequestRefused` if the input contains nothing new and no question is open, or if `start` or `check` raises it, and
    `JournalError`, whose text is not for clients. Any other `HandrailError` becomes events that report it.
    """
    try:
        return Submitted(await _submit(thread, input, rows, recorded, start, check), [])
    except (RequestRefused, JournalError):
        raise
    except HandrailError as error:
        told = Translator(thread.id, "")
        start_leg = told.begin_leg(input.run_id)
        return Submitted("", [*start_leg, *told.fail(str(error), type(error).__name__)])


async def _submit(
    thread: Thread,
    input: RunInput,
    rows: Sequence[RunRow],
    recorded: Sequence[QuestionRecord],
    start: Start,
    check: Check,
) -> str:
    open = [each.question for each in recorded if each.answer is None]
    answers = [_answer(thread.principal, given, recorded) for given in input.answers]
    answers += _tool_answers(thread.principal, input, open)
    # a run may have ended since, so its messages must not be taken from rows that say that it goes on
    said = await thread.run_messages(None if rows else rows)
    messages = [each for each in said if not isinstance(each.message, Compaction)]
    named = dict(_match_ids(messages, input.named))
    thread.named.update(named)
    new, attached = input.said[len(_repeated(messages, input.said)) :], input.attached
    if answers:
        _check_all_answered(thread.id, open, answers)
        new, attached = _remark(input, set(named.values()), messages)
        is_new = not {each.id for each in open}.isdisjoint(each.question_id for each in answers)
        if is_new or not (new or attached):
            remark = "\n\n".join(new)
            if remark or attached:
                check(remark, attached)
                thread.named[next_remark_id(messages)] = input.new[-1].id
            return await thread.answer(answers, leg=input.run_id, remark=remark, attachments=attached)
        await thread.answer(answers)  # they were accepted before, and the new message starts the next run
    if not new and not open:
        raise RequestRefused(
            422,
            "NothingSaid",
            "this input contains no new message. Add a user message, or answer an interrupt with `resume`.",
            fields=[("/messages", "there is no user message after the last answer")],
        )
    if open:
        raise QuestionsOpen(thread.id, len(open))
    history = () if rows else input.history
    run_id: str = await start(
        "\n\n".join(new), leg=input.run_id, tools=input.tools, history=history, attachments=attached
    )
    sent = RunMessage(run_id, OurUserMessage(new[-1]))
    thread.named.update(_match_ids([*messages, sent], input.named))
    return input.run_id


def _match_ids(messages: Sequence[RunMessage], named: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the id of each message of the user with the id that the client gave to it.

    Messages are matched by text and order. A message without a match is left out.
    """
    at = 0
    taken: set[str] = set()
    for own, said in said_by_people(messages):
        for number in range(at, len(named)):
            id, text = named[number]
            if text == said and id not in taken:
                taken.add(id)
                at = number + 1
                yield own, id
                break


def _remark(
    input: RunInput, known: Collection[str], messages: Sequence[RunMessage]
) -> tuple[tuple[str, ...], tuple[Attachment, ...]]:
    """Return the texts and the attachments of the new messages of an input with answers.

    A client that sends the same input again repeats a message that has been accepted. `known` are the client's ids of such messages.
    Several messages of one input were recorded as one.
    """
    new = [each for each in input.new if each.id not in known and (each.text.strip() or each.attachments)]
    texts = tuple(each.text for each in new)
    said = {
        each.message.text
        for each in messages
        if isinstance(each.message, OurUserMessage) and each.message.midway
    }
    if len(new) > 1 and "\n\n".join(texts) in said:
        return (), ()
    return texts, tuple(file for each in new for file in each.attachments)


def _repeated(messages: Sequence[tuple[str, Any]], now: Sequence[str]) -> list[str]:
    """Return the user messages recorded since the model's last answer, if `now` starts with them; otherwise an empty list.

    A client sends such messages again after their run has failed, for example.
    """
    last: list[str] = []
    for _, message in reversed(messages):
        if not isinstance(message, OurUserMessage):
            break
        if not message.by_run:
            last.insert(0, message.text)
    return last if tuple(last) == tuple(now[: len(last)]) else []


def _answer(principal: str, given: InterruptAnswer, recorded: Sequence[QuestionRecord]) -> Answer:
    found = next((each for each in recorded if each.question.id == given.question_id), None)
    if found is None or not found.question.digest.startswith(given.digest) or len(given.digest) < 16:
        raise AnswerRefused(
            given.question_id,
            "this thread has no such question",
            "Load the thread again: the question may be closed.",
        )
    question = found.question
    return Answer(
        question_id=question.id,
        digest=question.digest,
        by=principal,
        outcome="answered" if given.resolved else "cancelled",
        value=given.value if given.resolved else None,
    )


def _tool_answers(principal: str, input: RunInput, open: Sequence[Question]) -> list[Answer]:
    """Return answers for the open calls to the client's own tools whose results are in the input."""
    found: list[Answer] = []
    for question in open:
        outcome = input.outcomes.get(question.call_id)
        if outcome is not None and is_pending_call(question):
            value = {"content": outcome.content, "error": outcome.error}
            found.append(Answer(question_id=question.id, digest=question.digest, by=principal, value=value))
    return found


def _check_all_answered(thread_id: str, open: Sequence[Question], answers: Sequence[Answer]) -> None:
    """Raise `AnswerRefused` if some open interrupts are answered and others are not.

    Pending calls to the client's own tools may be answered one at a time.
    """
    given = {answer.question_id for answer in answers}
    left = [each for each in open if each.id not in given and not is_pending_call(each)]
    if left and any(each.id in given and not is_pending_call(each) for each in open):
        names = ", ".join(interrupt_id(each) for each in left)
        raise AnswerRefused(
            left[0].id,
            f"these interrupts are not answered: {names}",
            "Answer every open interrupt in one `resume`.",
        )
