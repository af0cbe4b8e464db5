"""`read`: what an AG-UI client sends, checked before anything is done with it.

Clients of protocol 1.0 and of 0.0.59 send the same shape, but for the version. A client sends all it knows of
the conversation each time. We have that already, so only what is new in it is taken: what the person said
after everything we said, answers to interrupts, and the outcomes of the client's own tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ag_ui.core import Message, ResumeEntry, RunAgentInput, ToolMessage, UserMessage
from pydantic import ValidationError

from handrail.errors import DefinitionError, RequestRefused
from handrail.messages import AssistantMessage as Said
from handrail.messages import Message as OurMessage
from handrail.messages import UserMessage as SaidByUser
from handrail.serve.agui.frontend_tools import FrontendTool, Outcome, frontend_tool
from handrail.serve.naming import ID, ID_IN_WORDS

_LONGEST_ID = 200
_MOST_TOOLS = 128


class Given(NamedTuple):
    """An answer to an interrupt."""

    question_id: str
    digest: str
    """The beginning of the digest of what was seen."""
    resolved: bool
    """Was it answered, or abandoned?"""
    value: Any


class Asked(NamedTuple):
    """What a client asks for."""

    thread_id: str
    run_id: str
    """Of the leg that this is to be told in."""
    said: tuple[str, ...]
    """What the person said after everything that was said to them."""
    named: tuple[tuple[str, str], ...]
    """All that the person said in words, each with the id that the client has for it."""
    answers: tuple[Given, ...]
    outcomes: Mapping[str, Outcome]
    """What came of calls of the client's own tools, by the calls' ids."""
    tools: tuple[FrontendTool, ...]
    history: tuple[OurMessage, ...]
    """What was said before in the client's conversation, in words only: for a thread that begins with it."""
    sees_nested: bool
    """Does the client read events of nested runs?"""


def read(value: Any) -> Asked:
    """What an input asks for; `RequestRefused` says what is wrong with it and the mend."""
    try:
        given = RunAgentInput.model_validate(value)
    except ValidationError as error:
        raise _refused(
            [("/" + "/".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
        ) from None
    return Asked(
        thread_id=_id("threadId", given.thread_id),
        run_id=_id("runId", given.run_id),
        said=tuple(_said(given.messages)),
        named=tuple(_named(given.messages)),
        answers=tuple(_answers(given.resume or ())),
        outcomes=dict(_outcomes(given.messages)),
        tools=_tools(given),
        history=tuple(_history(given.messages)),
        sees_nested=given.protocol_version is not None,
    )


def _id(field: str, id: str) -> str:
    if not ID.fullmatch(id):
        raise _refused([(f"/{field}", ID_IN_WORDS)])
    return id


# --- what was said --------------------------------------------------------------------------------------


def _news(messages: Sequence[Message]) -> int:
    """Where begins what we have not answered: after the last thing that was said to the person."""
    return next(
        (at for at in range(len(messages), 0, -1) if messages[at - 1].role in ("assistant", "tool")), 0
    )


def _said(messages: Sequence[Message]) -> Iterator[str]:
    news = _news(messages)
    for at, message in enumerate(messages[news:], news):
        if isinstance(message, UserMessage):
            yield _text(f"/messages/{at}/content", message.content)


def _named(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    for message in messages:
        if (
            isinstance(message, UserMessage)
            and isinstance(message.content, str)
            and len(message.id) <= _LONGEST_ID
        ):
            yield message.id, message.content


def _text(place: str, content: Any) -> str:
    """Plain text, or parts of text. Anything else would be lost, so it is refused."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for at, part in enumerate(cast("Sequence[Any]", content)):
        if part.type != "text":
            wrong = (
                f"a part of type {part.type!r} can't be taken: say it in text, {{type: 'text', text: '...'}}"
            )
            raise _refused([(f"{place}/{at}", wrong)])
        texts.append(part.text)
    return "\n".join(texts)


def _history(messages: Sequence[Message]) -> Iterator[OurMessage]:
    for message in messages[: _news(messages)]:
        if isinstance(message, UserMessage) and isinstance(message.content, str):
            yield SaidByUser(message.content)
        elif message.role == "assistant" and isinstance(message.content, str) and message.content:
            yield Said(message.content)


# --- answers ----------------------------------------------------------------------------------------------


def _answers(resume: Sequence[ResumeEntry]) -> Iterator[Given]:
    seen: set[str] = set()
    for at, entry in enumerate(resume):
        question_id, _, digest = entry.interrupt_id.rpartition("#")
        if not question_id or not digest:
            wrong = f"{entry.interrupt_id!r} is no interrupt of ours: give the id as it was sent"
            raise _refused([(f"/resume/{at}/interruptId", wrong)])
        if entry.interrupt_id in seen:
            raise _refused([(f"/resume/{at}/interruptId", "it is answered twice: answer each once")])
        seen.add(entry.interrupt_id)
        yield Given(question_id, digest, entry.status == "resolved", entry.payload)


def _outcomes(messages: Sequence[Message]) -> Iterator[tuple[str, Outcome]]:
    """Every tool message: which of them answer calls that are open, the thread knows."""
    for at, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            text = message.content
            if not isinstance(text, str) and any(part.type != "text" for part in text):
                continue  # one of ours is text; refused only where it answers a call, which then stays open
            yield message.tool_call_id, Outcome(_text(f"/messages/{at}/content", text), message.error)


def _tools(given: RunAgentInput) -> tuple[FrontendTool, ...]:
    tools = given.tools or []
    if len(tools) > _MOST_TOOLS:
        raise _refused([("/tools", f"at most {_MOST_TOOLS} tools")])
    made: dict[str, FrontendTool] = {}
    for at, tool in enumerate(tools):
        if tool.name in made:
            raise _refused([(f"/tools/{at}/name", f"two tools are called {tool.name!r}: rename one")])
        try:
            made[tool.name] = frontend_tool(tool.name, tool.description, tool.parameters)
        except DefinitionError as error:
            raise _refused([(f"/tools/{at}", str(error))]) from None
    return tuple(made.values())


def _refused(fields: Sequence[tuple[str, str]]) -> RequestRefused:
    where, what = fields[0]
    more = f" (and {len(fields) - 1} more)" if len(fields) > 1 else ""
    return RequestRefused(
        422, "InputUnfit", f"the body is no RunAgentInput: at {where}: {what}{more}", fields=fields
    )
