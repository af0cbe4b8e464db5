"""Markdown as lines of a terminal, while it is being written.

What a model wrote is escaped twice: before it is parsed, and again after, because entities and encoded addresses can stand for
invisible characters. A link is followed by its address, and no link is hidden in text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box
from rich import markdown as rich_markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from handrail.text.rendering import escape
from handrail.text.terminal import wrap

_CODE = "cyan"
_MOST_OPEN = 2000
"""The number of characters after which a block is ended, so that a long one does not take longer and longer to lay out."""
_PORTION = 200
"""The number of characters that are laid out together. All of them are parsed again for each block, so a long piece is divided."""
_MIN_COLUMN = 6
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_LANGUAGE = re.compile(r"[\w+#.-]*")
_MARKUP = re.compile(r"[*`~\[<|]|(?<!\w)_|_(?!\w)")
_CLEAR = re.compile(r"\s*(?!`{3}|~{3})\S+\s+\S")
"""Matches a line that is not complete but already shows what kind of block it belongs to."""
_UNSURE = re.compile(r"(?:[*_`~\[<|=\\-] *|^ {0,3}(?:`{3}|~{3}).*)\Z", re.MULTILINE)
"""Matches the end of a text whose next character may make something else of its last line."""
_HALF = re.compile(r"[\s*_~`\[]+$")

# Text is not lost: HTML is shown as it was written, and definitions of links are not taken out of it.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("reference")


class MarkdownFlow:
    """Lays out Markdown that arrives in pieces.

    A line that was returned never changes. `tail` has the lines that may still change: usually the one that is being written,
    and more for a table or while emphasis is open. A blank line separates blocks, as a page does. An answer that begins with
    `{` is JSON, and is shown as it is.
    """

    def __init__(self, console: Console, width: int) -> None:
        self.width = max(width, 10)
        self.tail: list[Text] = []
        self._console = console
        self._source = ""
        """The blocks that are not complete yet: one and, until its end is certain, the one before it."""
        self._shown = 0
        """The number of lines of these that were returned."""
        self._number: int | None = None
        """The number of the next item of a list whose earlier items are complete."""
        self._fence = ""
        """The fence that the current code block began with; "" outside code."""
        self._begun = self._literal = self._gap = self._return = False

    def resize(self, width: int) -> None:
        """Use another width, from the next block on if lines of this one were returned already."""
        if not self._shown:
            self.width = max(width, 10)

    def whole(self, text: str, *, literal: bool = False) -> list[Text]:
        """Lay out a whole text. A `literal` one is not Markdown."""
        self._literal = literal
        return [*self.feed(text), *self.end()]

    def feed(self, piece: str) -> list[Text]:
        """Add a piece of text, and return the lines that are now complete."""
        if self._return:
            piece, self._return = f"\r{piece}", False
        if piece.endswith("\r"):  # this may be the first half of \r\n
            piece, self._return = piece[:-1], True
        lines: list[Text] = []
        text = escape(piece)
        for at in range(0, len(text), _PORTION):
            self._source += text[at : at + _PORTION]
            if not self._begun:
                self._source = self._source.lstrip("\n")
                self._begun = bool(self._source.strip())
                self._literal = self._literal or self._source.lstrip().startswith("{")
            while (block := self._next()) is not None:
                lines += block
        return lines + self._open()

    def end(self) -> list[Text]:
        """End the text, and return the lines that were still open."""
        if self._fence or self._literal:
            lines = self._code(self._source) if self._is_code(self._source) else []
        else:
            lines = self._finish(len(self._source))
        self.__init__(self._console, self.width)
        return lines

    # --- complete blocks ---

    def _next(self) -> list[Text] | None:
        """Return the lines of what is complete at the beginning of the source, and remove it; None if nothing is."""
        line, found, _ = self._source.partition("\n")
        if self._fence or self._literal:
            if not found:
                return None
            self._source = self._source[len(line) + 1 :]
            if self._fence and _ends(line, self._fence):
                self._fence, self._gap = "", True
                return []
            return self._code(line)
        if not self._source.strip():
            return None
        end = self._source.rfind("\n") + 1
        if _CLEAR.match(self._source, end):
            end = len(self._source)
        tokens = _PARSER.parse(self._source[:end])
        begins = list(_beginnings(tokens))
        lines = self._source[:end].splitlines(keepends=True)
        if begins and lines[begins[0]].endswith("\n") and (fence := _FENCE.match(lines[begins[0]])):
            gap, info = self._separator(), lines[begins[0]][fence.end() :].strip()
            self._fence, self._number = fence[1], None
            self._source = self._source[len("".join(lines[: begins[0] + 1])) :]
            return gap + (
                [] if _LANGUAGE.fullmatch(info) else [Text(each, "dim") for each in wrap(info, self.width)]
            )
        if len(begins) > 1:
            return self._finish(len("".join(lines[: begins[1]])))
        if len(self._source) <= _MOST_OPEN:
            return None
        head, row = "".join(lines[: begins[0] + 2]) if begins else "", self._source.rfind("\n") + 1
        if begins and tokens[0].type == "table_open" and row > len(head):
            rows, self._source = self._finish(row), head + self._source
            return rows
        return self._finish(max(self._source.rfind(mark) + 1 for mark in " \n") or len(self._source))

    def _separator(self) -> list[Text]:
        gap, self._gap = self._gap, False
        return [Text()] if gap else []

    def _finish(self, end: int) -> list[Text]:
        """Return the rest of the lines of the source up to `end`, and remove it."""
        block, self._source = self._source[:end], self._source[end:]
        if not block.strip():
            return []
        tokens = _PARSER.parse(block)
        lines = self._rendered(tokens)[self._shown :]
        before = [] if self._shown else self._separator()
        self._shown, self._number = 0, _number_after(tokens, self._number)
        # The items of a list are as far apart as they were written. A block that was too long has no end.
        after = self._source.lstrip("\n").partition("\n")[0]
        is_next_item = _is_list(tokens) and _is_list(_PARSER.parse(after))
        self._gap = block.endswith("\n\n") if is_next_item else end < _MOST_OPEN
        if not is_next_item:
            self._number = None
        return before + lines

    def _code(self, line: str) -> list[Text]:
        before = self._separator()
        return [*before, *(Text(each, _CODE if self._fence else "") for each in _wrapped(line, self.width))]

    def _is_code(self, line: str) -> bool:
        """Return whether a line that is not complete is more than nothing or the beginning of the closing fence."""
        return bool(line.strip(f"{self._fence[:1]} "))

    # --- the open block ---

    def _open(self) -> list[Text]:
        """Set `tail`, and return the lines of the open block that can't change any more."""
        if self._fence or self._literal:
            style = _CODE if self._fence else ""
            shown = _wrapped(self._source, self.width) if self._is_code(self._source) else []
            self.tail = [Text(each, style) for each in shown]
            return []
        if not self._source.strip():
            self.tail = []
            return []
        tokens = _PARSER.parse(self._source)
        is_open = (
            any(_MARKUP.search(each) for each in _texts(tokens))
            or bool(_UNSURE.search(self._source))
            or tokens[0].type == "table_open"
            or len(list(_beginnings(tokens))) > 1  # the last line may still belong to the first block
        )
        lines = self._rendered(_PARSER.parse(_closed(self._source)) if is_open else tokens)
        settled = lines[self._shown : -1] if not is_open and len(lines) > 1 else []
        before = self._separator() if settled and not self._shown else []
        self._shown += len(settled)
        gap = [Text()] if self._gap and not self._shown else []
        self.tail = [*gap, *lines[self._shown :]]
        return before + settled

    def _rendered(self, tokens: list[Token]) -> list[Text]:
        if self._number is not None and tokens and tokens[0].type == "ordered_list_open":
            tokens[0].attrs["start"] = self._number
        options = self._console.options.update(width=self.width, height=None)
        lines = self._console.render_lines(_Markdown(tokens), options, pad=False)
        texts = [Text.assemble(*((part.text, part.style or "") for part in line)) for line in lines]
        for text in texts:
            text.rstrip()
        written = [at for at, text in enumerate(texts) if text.plain]
        return texts[written[0] : written[-1] + 1] if written else []


def _beginnings(tokens: Sequence[Token]) -> Iterator[int]:
    """Yield the lines at which blocks begin. Each item of a list counts as one."""
    for token in tokens:
        is_item = token.level == 1 and token.type == "list_item_open"
        is_block = token.level == 0 and token.nesting >= 0 and not _is_list([token])
        if token.map and (is_item or is_block):
            yield token.map[0]


def _is_list(tokens: Sequence[Token]) -> bool:
    return bool(tokens) and tokens[0].type in ("bullet_list_open", "ordered_list_open")


def _number_after(tokens: Sequence[Token], number: int | None) -> int | None:
    """Return the number of the item that follows a list."""
    if not tokens or tokens[0].type != "ordered_list_open":
        return None
    items = sum(token.type == "list_item_open" and token.level == 1 for token in tokens)
    return (int(tokens[0].attrs.get("start", 1)) if number is None else number) + items


def _ends(line: str, fence: str) -> bool:
    """Return whether a line ends a block of code."""
    found = _FENCE.match(line)
    return found is not None and found[1].startswith(fence) and not line[found.end() :].strip()


def _texts(tokens: Iterable[Token]) -> Iterator[str]:
    for token in tokens:
        if token.type == "text":
            yield token.content
        yield from _texts(token.children or ())


def _closed(source: str) -> str:
    """Close the emphasis and the code that the last line leaves open, so that its marks are not shown until then."""
    source = _HALF.sub("", source)
    last = source.rpartition("\n")[2]
    for mark in ("`", "**", "~~"):
        if last.count(mark) % 2:
            return source + mark
    return source


def _wrapped(line: str, width: int) -> list[str]:
    """Wrap a line of code. What follows has the indent of the line."""
    line = line.expandtabs(4)
    indent = line[: len(line) - len(line.lstrip(" "))]
    if len(indent) > width // 2:
        indent = ""
    first, *more = wrap(line[len(indent) :], width - len(indent))
    return [f"{indent}{each}" for each in (first, *more)]


# --- elements ---


class _Heading(rich_markdown.Heading):
    LEVEL_ALIGN: ClassVar[dict[str, Any]] = {}


class _Code(rich_markdown.CodeBlock):
    """Code inside a list or a quotation."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip("\n")
        for line in code.split("\n"):
            for each in _wrapped(line, options.max_width):
                yield Text(each, _CODE)


class _List(rich_markdown.ListElement):
    """A list in which numbers are followed by a point. Items that come one after another are in one column up to 99."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        begin = 1 if self.list_start is None else self.list_start
        is_numbered = self.list_type == "ordered_list_open"
        marks = [f"{begin + at}." if is_numbered else "•" for at in range(len(self.items))]
        column = max([3 if is_numbered else 1, *map(len, marks)])
        style = console.get_style("markdown.item.number")
        for mark, item in zip(marks, self.items, strict=True):
            inner = options.update(width=max(options.max_width - column - 1, 1))
            for at, line in enumerate(
                console.render_lines(item.elements, inner, style=item.style, pad=False)
            ):
                yield Text.assemble(
                    (f"{'' if at else mark:>{column}} ", style),
                    *((part.text, part.style or "") for part in line),
                )
            if not item.elements:
                yield Text(f"{mark:>{column}}", style)


class _Table(rich_markdown.TableElement):
    """A table that loses no text: long words are folded, and with too many columns the rows are listed."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = [] if self.header is None or self.header.row is None else self.header.row.cells
        rows = [] if self.body is None else self.body.rows
        if len(head) * _MIN_COLUMN > options.max_width:
            for row in rows:
                for name, cell in zip(head, row.cells, strict=False):
                    yield Text.assemble(name.content, ": ", cell.content, overflow="fold")
                yield Text()
            return
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, style="markdown.table.border", show_edge=False)
        for cell in head:
            table.add_column(
                cell.content,
                header_style="markdown.table.header",
                overflow="fold",
                justify=cell.content.justify or "default",
            )
        for row in rows:
            table.add_row(*(cell.content for cell in row.cells))
        yield table


class _Markdown(rich_markdown.Markdown):
    elements: ClassVar[dict[str, Any]] = {
        **rich_markdown.Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "bullet_list_open": _List,
        "ordered_list_open": _List,
        "table_open": _Table,
    }

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = list(_plain(tokens))


def _plain(tokens: Iterable[Token]) -> Iterator[Token]:
    """Yield tokens that need no interpretation by rich: links and pictures are text, line breaks are kept, and text is escaped."""
    links: list[tuple[str, list[str]]] = []
    for token in tokens:
        content, href = (
            escape(token.content),
            escape(str(token.attrs.get("href") or token.attrs.get("src") or "")),
        )
        if token.type == "link_open":
            links.append((href, []))
            continue
        if token.type == "link_close":
            href, words = links.pop()
            shown = "".join(words)
            yield _text("" if href.removeprefix("mailto:") == shown else f" ({href})")
            continue
        if token.type == "image":
            token = _text(f"[{content}] ({href})")
        elif token.type == "softbreak":
            token = Token("hardbreak", "br", 0)
        elif token.children:
            token.children = list(_plain(token.children))
        elif content != token.content:
            token.content = content
        if links:
            links[-1][1].append(token.content)
        yield token


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)
