"""`FileTools`: a section with tools that read, search and change files.

Searches may read many files, so they run on threads. They don't hold up other runs or timeouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from handrail.context import ToolContext
from handrail.errors import FileError
from handrail.guard.read_before_write import ReadBeforeWritePolicy
from handrail.prompt import MarkdownSection
from handrail.protocols import ToolPolicy
from handrail.text.rendering import counted
from handrail.text.spelling import checked_arguments
from handrail.tools import PathArg, Tool, ToolResult, tool

PAGE_LINES = 400
"""Maximum number of lines that `read_file` shows at once."""
_LONG_LINE = 2000
_STEP = 1 << 16
"""Number of characters to search for line endings at a time."""
_PAGE_ITEMS = 200
"""Maximum number of entries or matches to show at once."""

ReadPath = Annotated[str, PathArg("read"), Field(description="A path relative to the folder, with `/`.")]
WritePath = Annotated[str, PathArg("write"), Field(description="A path relative to the folder, with `/`.")]


@tool(
    effect="read",
    capabilities={"fs.read"},
    description="Show a text file. Each line begins with its number and a tab. Long files are shown in pages.",
)
async def read_file(
    path: ReadPath,
    from_line: Annotated[int, Field(ge=1, description="The first line to show.")] = 1,
    lines: Annotated[int, Field(ge=1, le=PAGE_LINES, description="How many lines to show.")] = PAGE_LINES,
    *,
    context: ToolContext,
) -> ToolResult[str]:
    try:
        text = context.filesystem.read(path)
    except FileError as error:
        return ToolResult.error(
            str(error).replace(". Use read_bytes to read its bytes", ", so it can't be shown")
        )
    return ToolResult.ok(page_of(path, text, from_line, lines))


@tool(
    effect="staged",
    capabilities={"fs.write"},
    description="Create a file, or replace all of a file that was read before. To change a part of a file, use edit_file.",
)
async def write_file(
    path: WritePath,
    text: Annotated[str, Field(description="The whole content of the file.")],
    *,
    context: ToolContext,
) -> ToolResult[str]:
    return _changed(lambda: context.filesystem.write(path, text), f"Wrote {_size(text)} to {path}.")


@tool(
    effect="staged",
    capabilities={"fs.write"},
    description="Replace text in a file that was read before. `old` must occur exactly once, unless `all` is true.",
)
async def edit_file(
    path: WritePath,
    old: Annotated[
        str, Field(description="The exact text to replace, as it is in the file, without line numbers.")
    ],
    new: Annotated[str, Field(description="The text to put in its place.")],
    all: Annotated[bool, Field(description="Replace every occurrence of `old`.")] = False,
    *,
    context: ToolContext,
) -> ToolResult[str]:
    try:
        count = context.filesystem.edit(path, old, new, all=all)
    except FileError as error:
        return ToolResult.error(str(error))
    return ToolResult.ok(f"Changed {path} in {counted(count, 'place')}.")


@tool(
    effect="read",
    capabilities={"fs.read"},
    description="List a folder: its files with their sizes, its folders with a `/`.",
)
async def list_folder(
    path: Annotated[str, PathArg("read"), Field(description="A folder; `.` is the top.")] = ".",
    *,
    context: ToolContext,
) -> ToolResult[str]:
    try:
        found = context.filesystem.list(path)
    except FileError as error:
        return ToolResult.error(str(error))
    entries = [
        f"{each.path}/" if each.is_directory else f"{each.path}  ({each.size} bytes)" for each in found
    ]
    return ToolResult.ok(_shown(entries, "The folder is empty.", "List one of its folders instead."))


@tool(
    effect="read",
    capabilities={"fs.read"},
    description="Find the files whose paths match a glob.",
)
def find_files(
    pattern: Annotated[
        str, Field(description="A glob such as `src/**/*.py`; `**` matches any number of folders.")
    ],
    *,
    context: ToolContext,
) -> ToolResult[str]:
    try:
        found = context.filesystem.glob(pattern)
    except FileError as error:
        return ToolResult.error(str(error))
    return ToolResult.ok(_shown(found, f"No file matches {pattern}.", "Pass a narrower pattern."))


@tool(
    effect="read",
    capabilities={"fs.read"},
    description="Find the lines that match a pattern. Each one is shown as path:line: text.",
)
def search_files(
    pattern: Annotated[
        str,
        Field(
            description="A regular expression to find in each line. Lookaround and backreferences are not supported."
        ),
    ],
    files: Annotated[str, Field(description="A glob of the files to search.")] = "**",
    *,
    context: ToolContext,
) -> ToolResult[str]:
    try:
        found = [
            f"{each.path}:{each.line}: {each.text}" for each in context.filesystem.grep(pattern, glob=files)
        ]
    except FileError as error:
        return ToolResult.error(str(error))
    return ToolResult.ok(
        _shown(found, f"No line matches {pattern}.", "Pass a narrower pattern or fewer files.")
    )


@tool(
    effect="staged",
    capabilities={"fs.delete", "fs.write"},
    description="Delete a file that was read before, or a folder.",
)
async def delete_file(
    path: WritePath,
    recursive: Annotated[bool, Field(description="Delete a folder and everything in it.")] = False,
    *,
    context: ToolContext,
) -> ToolResult[str]:
    return _changed(lambda: context.filesystem.delete(path, recursive=recursive), f"Deleted {path}.")


@tool(
    effect="staged",
    capabilities={"fs.write"},
    description="Move or rename a file or a folder. The target must not exist yet.",
)
async def move_file(source: WritePath, target: WritePath, *, context: ToolContext) -> ToolResult[str]:
    return _changed(lambda: context.filesystem.move(source, target), f"Moved {source} to {target}.")


READING: tuple[Tool[Any, Any], ...] = (read_file, list_folder, find_files, search_files)
WRITING: tuple[Tool[Any, Any], ...] = (write_file, edit_file, delete_file, move_file)

_TEMPLATE = "Paths are relative to one folder and can't lead out of it."
_TEMPLATE_WRITING = (
    f"{_TEMPLATE} Read a file before you change it. A call that fails changes nothing. "
    "If someone else has changed a file, you are told so. Then read it again."
)


@checked_arguments
@dataclasses.dataclass(frozen=True, init=False)
class FileTools(MarkdownSection[Any]):
    """A section with tools that read, list, find and search the run's files.

    With `writes`, it also has tools that write, edit, delete and move files, under `ReadBeforeWritePolicy` unless
    `policies` is given. The tools work on the run's filesystem: `evaluate(..., filesystem=DirectoryFilesystem(folder))`.
    """

    needs_files: ClassVar[bool] = True

    def __init__(
        self,
        *,
        writes: bool = True,
        policies: Iterable[ToolPolicy] | None = None,
        title: str = "Files",
        key: str = "files",
    ) -> None:
        attached = (ReadBeforeWritePolicy(),) if policies is None and writes else tuple(policies or ())
        super().__init__(
            title=title,
            key=key,
            template=_TEMPLATE_WRITING if writes else _TEMPLATE,
            tools=(*READING, *WRITING) if writes else READING,
            policies=attached,
        )


def _changed(change: Any, said: str) -> ToolResult[str]:
    try:
        change()
    except FileError as error:
        return ToolResult.error(str(error))
    return ToolResult.ok(said)


def page_of(path: str, text: str, first: int, count: int) -> str:
    """Return some lines of a file's text with their numbers, and a note on the others."""
    if not text:
        return f"{path} is empty."
    text = text.removesuffix("\n")
    total = text.count("\n") + 1  # lines end only at "\n", as in a search, so that line numbers agree
    if first > total:
        return f"{path} has {counted(total, 'line')}; there is no line {first}."
    shown = text[_start_of(text, first) :].split("\n", count)[:count]
    last = first + len(shown) - 1
    numbered = [f"{number}\t{_cut(line)}" for number, line in enumerate(shown, first)]
    if first > 1 or last < total:
        more = f" Continue with from_line={last + 1}." if last < total else ""
        numbered.append(f"(lines {first} to {last} of {total}.{more})")
    return "\n".join(numbered)


def _start_of(text: str, line: int) -> int:
    """Return the index at which a line starts.

    The text is not split, because a list of short lines takes far more memory.
    """
    at, left = 0, line - 1
    while (ends := text.count("\n", at, at + _STEP)) < left:
        at, left = at + _STEP, left - ends
    for _ in range(left):
        at = text.index("\n", at) + 1
    return at


def _cut(line: str) -> str:
    line = line.removesuffix("\r")
    if len(line) <= _LONG_LINE:
        return line
    return f"{line[:_LONG_LINE]}… ({len(line) - _LONG_LINE} more characters)"


def _shown(entries: Sequence[str], nothing: str, narrower: str) -> str:
    if not entries:
        return nothing
    if len(entries) <= _PAGE_ITEMS:
        return "\n".join(entries)
    left = len(entries) - _PAGE_ITEMS
    return "\n".join([*entries[:_PAGE_ITEMS], f"({left} more are not shown. {narrower})"])


def _size(text: str) -> str:
    return counted(len(text.encode()), "byte")
