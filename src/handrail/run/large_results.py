"""`LargeResults`: shortens results that are longer than a limit, and offers the tool that reads on in them.

The whole text is a blob of the run's journal, or in memory in a run without a journal. The record of the call refers to it, so it is found
again by the call's id: in a resumed run, in a later run of the session, and in a fork.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from handrail.context import ToolContext
from handrail.errors import BlobNotFoundError, ToolValidationError
from handrail.events import ResultShortened
from handrail.messages import ToolMessage
from handrail.prompt import OPENER
from handrail.text.rendering import counted
from handrail.tools import Tool, ToolResult
from handrail.tools.result import Whole, shown_text, with_excerpt

if TYPE_CHECKING:
    from handrail.prompt import RenderedPrompt
    from handrail.run.call import Attempt
    from handrail.run.conversation import Conversation
    from handrail.run.run import Run

READER = "read_result"
"""The tool with which a model reads on in a shortened result."""

_AROUND = 100
"""Most characters that are shown on either side of a match, within its line."""
_LONGEST_SEARCH = 200
_NAMED = re.compile(rf'To read them, call {READER} with call_id=("(?:[^"\\\n]|\\.)*") ')
"""The call that an excerpt names."""


@dataclass(frozen=True)
class ReadResult:
    """Arguments of the tool that reads on in a shortened result."""

    call_id: Annotated[str, Field(description="The id of the call, as its shortened result gives it.")]
    start: Annotated[
        int | None, Field(ge=0, description="The first character to read. The first of the text is 0.")
    ] = None
    end: Annotated[int | None, Field(ge=0, description="Read up to this character, without it.")] = None
    first_line: Annotated[
        int | None, Field(ge=1, description="The first line to read, instead of `start`. The first is 1.")
    ] = None
    last_line: Annotated[int | None, Field(ge=1, description="The last line to read, instead of `end`.")] = (
        None
    )
    search: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=_LONGEST_SEARCH,
            description="Text to search for, whatever its case. Only the places where it stands are shown.",
        ),
    ] = None


class LargeResults:
    """The results of one run that are longer than a limit."""

    __slots__ = ("_conversation", "_last", "_page", "_run", "limit")

    def __init__(self, run: Run, conversation: Conversation, limit: int | None, page: int) -> None:
        """`limit` is that of the run, and `page` the number of characters that are read at a time."""
        self.limit = limit
        self._run = run
        self._conversation = conversation
        self._page = page
        self._last = Whole(0), ""
        """The text that was read last, because a model often reads several parts of it."""

    async def shorten(self, attempt: Attempt, result: ToolResult[Any]) -> ToolResult[Any]:
        """Return what the model is shown of a result: the result itself, or an excerpt if it is longer than its limit.

        The whole text is stored first, so that the call's record never refers to a missing text.
        """
        call, log = attempt.call, attempt.run.log
        limit = attempt.tool.result_limit or self.limit
        if limit is None or call.message_id is None or call.name in (OPENER, READER) or log.closed:
            return result  # a result that is too long, or that no model is shown
        text = shown_text(result)
        if len(text) <= limit:
            return result
        if log.is_kept:
            digest = await log.journal.blobs.put(text.encode(), run_id=log.run_id)
            return with_excerpt(result, excerpt(text, limit, call.id), Whole(len(text), digest))
        return with_excerpt(result, excerpt(text, limit, call.id), Whole(len(text), text=text))

    def reader(self) -> Tool[ReadResult, str]:
        """Create the tool that reads on. Its own results are never longer than a page, apart from a line that says what they are."""

        async def read_result(params: ReadResult, *, context: ToolContext) -> ToolResult[str]:
            text = await self._find(params.call_id)
            if isinstance(text, ToolResult):
                return text
            start, end = _range_of(params, text)
            if params.search is not None:
                return ToolResult.ok(matches(text, params.search, start, end, self._page))
            return ToolResult.ok(page(text, start, end, self._page))

        return Tool(
            READER,
            "Read on in the result of an earlier call of which only a part was shown: a range of its characters or lines, or "
            "the places where a text stands.",
            read_result,
            accepts_overrides=False,
            effect="pure",
        )

    async def _find(self, call_id: str) -> str | ToolResult[Any]:
        """Return the whole text that a call of this session returned, or a result that says why it can't be read.

        A result that was not shortened is found in the run's own conversation only.
        """
        fact = self._fact_of(call_id)
        if fact is not None:
            return await self._load(fact)
        messages = self._conversation.messages
        for at in range(len(messages) - 1, -1, -1):
            message = messages[at]
            for result in message.results if isinstance(message, ToolMessage) else ():
                if result.id == call_id:
                    named = _NAMED.search(result.text)  # in a fork, the calls before it have other ids now
                    fact = None if named is None else self._fact_of(json.loads(named[1]))
                    return result.text if fact is None else await self._load(fact)
        return ToolResult.error(
            f"There is no result of a call {json.dumps(call_id)} in this session. Pass the `call_id` that a shortened result gives."
        )

    def _fact_of(self, call_id: str) -> ResultShortened | None:
        """Return the newest fact that a result of a call was shortened; None if there is none."""
        facts = self._run.session[ResultShortened].all()
        return next((each for each in reversed(facts) if each.call_id == call_id), None)

    async def _load(self, fact: ResultShortened) -> str | ToolResult[Any]:
        whole, journal = fact.whole, self._run.journal
        if not whole.digest:
            return whole.text
        if self._last[0] == whole:
            return self._last[1]
        try:
            if journal is None:
                raise BlobNotFoundError(whole.digest)
            text = (await journal.blobs.get(whole.digest)).decode()
        except BlobNotFoundError:
            return ToolResult.error(
                f"The whole result of {fact.tool} is not stored any more. Call {fact.tool} again if you still need it."
            )
        self._last = whole, text
        return text


def large_results(
    run: Run, own: int | None, rendered: RenderedPrompt[Any], conversation: Conversation
) -> LargeResults | None:
    """Return what shortens a run's results, or None if neither the run nor one of its tools has a limit.

    The limit of a run is its option, or else `own`, that of its prompt, or else that of the run around it.
    """
    limit, added = run.options.result_limit or own, run.options.tools
    if limit is None and run.outer is not None and run.outer.run.large is not None:
        limit = run.outer.run.large.limit
    if not (rendered.every_tool or rendered.live or added):
        return None  # it makes no calls
    page = limit or max(rendered.result_limit, *(tool.result_limit or 0 for tool in added), 0)
    return LargeResults(run, conversation, limit, page) if page else None


# --- what is shown of a text -----------------------------------------------------------------------------


def excerpt(text: str, limit: int, call_id: str) -> str:
    """Return the beginning and the end of a text, at most `limit` characters in all, and between them how to read the rest."""
    head = _whole_lines(text, 0, limit * 2 // 3)
    tail = len(text) - (limit - limit * 2 // 3)
    line_end = text.find("\n", tail - 1, tail + limit // 6) + 1
    tail = line_end or tail
    lines = _Lines(text)
    return (
        f"{text[:head]}\n[… {tail - head:,} of {len(text):,} characters are left out here: {head} to {tail}, in the lines "
        f"{lines.at(head)} to {lines.at(tail - 1)} of {lines.total}. To read them, call {READER} with call_id="
        f"{json.dumps(call_id, ensure_ascii=False)} and a start, a first_line or a search.]\n{text[tail:]}"
    )


def page(text: str, start: int, end: int, limit: int) -> str:
    """Return a line that says which part of a text this is, and then this part, exactly as it is, at most `limit` characters."""
    stop = end if end - start <= limit else _whole_lines(text, start, start + limit)
    lines = _Lines(text)
    more = f" Read on with start={stop}." if stop < end else ""
    return (
        f"[Characters {start} to {stop} of {len(text)}, lines {lines.at(start)} to {lines.at(max(stop - 1, start))} of "
        f"{lines.total}.{more}]\n{text[start:stop]}"
    )


def matches(text: str, search: str, start: int, end: int, limit: int) -> str:
    """Return the places in a part of a text where another text stands, whatever its case, each with its line, at most `limit` characters."""
    folded, sought = _folded(text), _folded(search)
    lines = _Lines(text)
    shown: list[str] = []
    size = 0
    for at in _places(folded, sought, start, end):
        before = max(folded.rfind("\n", 0, at) + 1, at - _AROUND)
        line_end = folded.find("\n", at + len(sought))
        after = min(len(text) if line_end < 0 else line_end, at + len(sought) + _AROUND)
        entry = f"line {lines.at(at)}, character {at}: {text[before:after].strip()}"[:limit]
        size += len(entry) + 1
        if shown and size > limit:
            more = f", of which {len(shown)} are shown. Search on with start={at}"
            break
        shown.append(entry)
    else:
        more = ""
    number = folded.count(sought, start, end)
    header = f"[{counted(number, 'place')} with {json.dumps(search, ensure_ascii=False)}{more}.]"
    return "\n".join([header, *shown])


def _places(folded: str, sought: str, start: int, end: int) -> Iterator[int]:
    """Yield where a text stands. What is shown around one place is not shown again for the next."""
    while (at := folded.find(sought, start, end)) >= 0:
        yield at
        line_end = folded.find("\n", at + len(sought), at + len(sought) + _AROUND)
        start = at + len(sought) + _AROUND if line_end < 0 else line_end


def _folded(text: str) -> str:
    """Return a text without the difference between cases, each character in its place."""
    return (
        text.replace("İ", "i").lower().replace("ς", "σ")
    )  # others keep their length, and the second depends on its place


def _whole_lines(text: str, start: int, stop: int) -> int:
    """Return where a part of a text ends that begins at `start` and ends at `stop`, or with the last line in its second half."""
    return text.rfind("\n", start + (stop - start) // 2, stop) + 1 or stop


class _Lines:
    """The lines of a text, which a line feed ends."""

    __slots__ = ("_line", "_seen", "_text", "total")

    def __init__(self, text: str) -> None:
        self._text = text
        self._seen, self._line = 0, 1
        self.total = text.count("\n") + (not text.endswith("\n"))

    def at(self, place: int) -> int:
        """Return the number of the line at a place, which is not before the place that was asked for last."""
        self._line += self._text.count("\n", self._seen, place)
        self._seen = max(self._seen, place)
        return self._line


def _range_of(params: ReadResult, text: str) -> tuple[int, int]:
    """Return the range of characters that is asked for. Raises `ToolValidationError` if there is none."""
    start, end = params.start, params.end
    if (start is not None and params.first_line is not None) or (
        end is not None and params.last_line is not None
    ):
        raise ToolValidationError("pass either `start` and `end`, or `first_line` and `last_line`")
    if start is None:
        start = 0 if params.first_line is None else _start_of(text, params.first_line)
    if end is None:
        end = len(text) if params.last_line is None else _start_of(text, params.last_line + 1, len(text))
    if start is None or start > len(text) or (start == len(text) and text):
        lines = _Lines(text).total
        raise ToolValidationError(f"the result has only {len(text)} characters in {lines} lines")
    end = min(end or 0, len(text))
    if end < start:
        raise ToolValidationError("the range ends before it begins")
    return start, end


def _start_of(text: str, line: int, otherwise: int | None = None) -> int | None:
    """Return where a line begins, counted from 1; `otherwise` if the text has fewer lines."""
    parts = text.split("\n", line - 1)
    return len(text) - len(parts[-1]) if len(parts) == line else otherwise
