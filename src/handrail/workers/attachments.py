"""A worker's attachments: they are checked against the worker's rule, and shown to its model."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from handrail.content import Attachment
from handrail.context import WorkerContext
from handrail.errors import (
    DefinitionError,
    FileError,
    FileMissing,
    PathRefused,
    ResourceError,
    ToolValidationError,
)
from handrail.messages import Model
from handrail.protocols import Filesystem
from handrail.schema.problems import describe_kind
from handrail.tools import Tool, tool
from handrail.workers.front_matter import AttachmentRule

NO_ATTACHMENTS = AttachmentRule(count=0)
_SHOWN = 16 * 1024
"""Maximum total bytes of the text attachments that the message includes. The model reads the others with a tool."""
_PAGE = 400
_SHORT = 12
"""Length of the beginning of a digest that can stand for an attachment's name."""


@dataclass(frozen=True)
class FileArgument:
    """A file's bytes as an argument of a call."""

    name: str
    base64: str


FileOrPath = Annotated[str | FileArgument, WithJsonSchema({"type": "string"})]
"""An attachment in a call: the name of one of the caller's attachments, the path of a file or, only from code, a file's bytes."""

Input = Annotated[str, Field(description="The worker's task. It sees nothing else of this conversation.")]


# These classes have no docstrings, because models would see them.


@dataclass(frozen=True)
class WorkerCall:
    # For a worker that takes no attachments. A call's attachments are parsed, so that the error can say that the worker takes none.
    input: Input
    attachments: SkipJsonSchema[list[FileOrPath]] = field(default_factory=list["str | FileArgument"])


@dataclass(frozen=True)
class WorkerCallWithFiles:
    input: Input
    attachments: Annotated[
        list[FileOrPath],
        Field(description="Names of attachments in this conversation, or paths of files, to hand over."),
    ] = field(default_factory=list["str | FileArgument"])


def as_argument(given: Any) -> Any:
    """Convert an attachment to an argument of a call.

    The attachment is the name of one of the caller's attachments or the path of one of the run's files (`str`), a path on
    disk (`Path`), which is read now, or an `Attachment`. Raises `DefinitionError` for any other value, and if the file on
    disk can't be read. Raises `ToolValidationError` if the bytes of an `Attachment` are not in memory, for example because
    it has an address.
    """
    if isinstance(given, str):
        return given
    file = Attachment(given) if isinstance(given, Path) else given
    if not isinstance(file, Attachment):
        raise DefinitionError(
            f"an attachment is {describe_kind(file)}. Pass a path among the run's files, or Attachment(bytes, name)."
        )
    return {"name": file.name, "base64": base64.b64encode(file.content).decode()}


def accept(
    worker: str,
    rule: AttachmentRule,
    given: Sequence[Any],
    files: Callable[[], Filesystem],
    own: Sequence[Attachment] = (),
) -> tuple[Attachment, ...]:
    """Check a call's attachments against the worker's rule, and return them.

    A text is the name of one of the caller's attachments, `own`, or else the path of a file in the run's filesystem, which
    `files` returns.

    Raises `ToolValidationError` if the worker's rule does not allow them, if one has an invalid name or can't be read,
    or if two have the same name.
    """
    if not given:
        return ()
    if rule.count == 0:
        raise ToolValidationError(
            f"{worker} takes no attachments. Put what matters into the input, or allow them with `attachments:` in its file."
        )
    if len(given) > rule.count:
        raise ToolValidationError(
            f"{worker} takes at most {rule.count} attachments, not {len(given)}. Pass fewer."
        )
    problems: list[str] = []
    found: dict[str, Attachment] = {}
    for each in given:
        try:
            attachment = _accept_one(rule, each, files, own)
        except ToolValidationError as error:
            problems.append(str(error))
            continue
        if attachment.name in found:
            problems.append(
                f"two attachments are named {attachment.name}. Pass it once, or rename one of them"
            )
        found[attachment.name] = attachment
    if problems:
        raise ToolValidationError(
            f"{worker} did not run because of problems with its attachments. {'. '.join(problems)}."
        )
    return tuple(found.values())


def _accept_one(
    rule: AttachmentRule, given: Any, files: Callable[[], Filesystem], own: Sequence[Attachment]
) -> Attachment:
    if isinstance(given, str):
        given = _named(given, own) or given
    name = given if isinstance(given, str) else str(given.name)
    if not name or len(name) > 255 or not name.isprintable():
        raise ToolValidationError(
            f"{name[:40]!r} is not a file name of 1 to 255 printable characters. Rename the file"
        )
    if rule.suffixes is not None and not any(name.lower().endswith(end.lower()) for end in rule.suffixes):
        raise ToolValidationError(
            f"{name} does not end in {' or '.join(rule.suffixes)}. Pass a file that does"
        )
    if isinstance(given, Attachment):
        _check_size(rule, name, given.size)
        return given
    if isinstance(given, FileArgument):
        try:
            content = base64.b64decode(given.base64, validate=True)
        except (binascii.Error, ValueError):
            raise ToolValidationError(f"the base64 of {name} is invalid. Encode its bytes again") from None
        _check_size(rule, name, len(content))
        return Attachment(content, name)
    try:
        folder = files()
        stat = folder.stat(name)
        if stat.is_directory:
            raise ToolValidationError(f"{name} is a folder. Pass the files in it")
        _check_size(rule, name, stat.size)
        content = folder.read_bytes(name)
    except ResourceError:
        hint = _choices(own) or "Put what matters into the input, or pass an Attachment from code"
        raise ToolValidationError(
            f"{name} can't be read, because this run has no files, or they are not open yet. {hint}"
        ) from None
    except FileError as error:
        problem = str(error).rstrip(".")
        hint = _choices(own) if isinstance(error, FileMissing | PathRefused) else ""
        raise ToolValidationError(f"{problem}. {hint}" if hint else problem) from None
    _check_size(rule, name, len(content))
    return Attachment(content, name)


def _named(name: str, own: Iterable[Attachment]) -> Attachment | None:
    """Return the attachment with this name, or whose digest begins with it; None if there is none.

    Raises `ToolValidationError` if there are several, or if only a reference to it is in memory.
    """
    named = {each.digest: each for each in own if each.name == name}
    if not named and len(name) >= _SHORT:
        named = {each.digest: each for each in own if each.digest.startswith(name)}
    if len(named) > 1:
        choices = " and ".join(f"{each.digest[:_SHORT]} {each.render()}" for each in named.values())
        raise ToolValidationError(
            f"{len(named)} attachments are named {name}, oldest first: {choices}. Pass the code in front of one instead of the name"
        )
    found = next(iter(named.values()), None)
    if found is not None and not found.is_here and not found.address:
        raise ToolValidationError(f"the bytes of {name} are no longer available. Leave it out")
    return found


def _choices(own: Iterable[Attachment]) -> str:
    names = ", ".join(dict.fromkeys(each.name for each in own))
    return f"The attachments in this conversation are: {names}" if names else ""


def _check_size(rule: AttachmentRule, name: str, size: int) -> None:
    if size > rule.max_bytes:
        raise ToolValidationError(
            f"{name} has {size} bytes, and at most {rule.max_bytes} are allowed. Pass a smaller file"
        )


def visible_to(model: Model, attachments: Sequence[Attachment]) -> tuple[Attachment, ...]:
    """Return the attachments to send to a worker's model: the images, audio and documents that it accepts."""
    takes = model.traits.takes
    return tuple(each for each in attachments if each.kind != "file" and takes.sends(each))


def message_with(input: str, attachments: Sequence[Attachment], shown: Sequence[Attachment] = ()) -> str:
    """Build the message to the worker's model: the input, then the attachments.

    Text attachments are included in full, up to a total of `_SHOWN` bytes. For any other attachment, the message has
    its name and size, and says whether it is attached (if it is in `shown`), can be read with a tool, or is not text.
    """
    if not attachments:
        return input
    parts = [input, "Attachments:"]
    left = _SHOWN
    for each in attachments:
        text = _text(each)
        if text is None or each.size > left:
            what = "not text" if text is None else "read it with read_attachment"
            what = "attached" if each in shown else what
            parts.append(f"- {each.name} ({each.size} bytes, {what})")
        else:
            left -= each.size
            parts.append(f"- {each.name} ({each.size} bytes):\n\n{_fenced(text)}")
    return "\n\n".join(parts)


def _text(attachment: Attachment) -> str | None:
    try:
        return attachment.text()
    except ToolValidationError:
        return None


def _fenced(text: str) -> str:
    """Enclose the text in a code fence that does not occur in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.rstrip()}\n{fence}"


@tool(
    effect="read",
    description="Read a text file that you were given as an attachment, 400 lines at a time.",
)
def read_attachment(name: str, from_line: Annotated[int, Field(ge=1)] = 1, *, context: WorkerContext) -> str:
    found = next((each for each in context.attachments if each.name == name), None)
    if found is None:
        there = ", ".join(each.name for each in context.attachments) or "none"
        raise ToolValidationError(f"there is no attachment {name!r}. The attachments are: {there}.")
    lines = found.text().split("\n")
    shown = lines[from_line - 1 : from_line - 1 + _PAGE]
    if from_line - 1 + _PAGE < len(lines):
        shown.append(f"({len(lines)} lines in all. Continue with from_line={from_line + _PAGE}.)")
    return "\n".join(shown)


READ_ATTACHMENT: Tool[Any, Any] = read_attachment
