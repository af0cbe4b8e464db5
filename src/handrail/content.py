"""`Attachment`: a picture, a recording, a document or any other file in a message or in a tool's result."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote, urlsplit

import msgspec

from handrail.errors import DefinitionError, ToolValidationError
from handrail.text.spelling import checked_arguments

AttachmentKind = Literal["image", "audio", "document", "file"]

MAX_BYTES = 32 * 1024 * 1024
"""Largest size of an attachment, in bytes."""
_MAX_NAME = 200
_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}/[a-z0-9][a-z0-9!#$&^_.+-]{0,100}")
_ADDRESS = re.compile(r"data:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
"""Matches the beginning of an address with a scheme, such as `https://`. A real path is unlikely to begin like this."""
_TOKENS_PER_PAGE = 5000
"""Upper estimate of the tokens for a picture at the highest resolution, or for a page of a document."""
_BYTES_PER_TOKEN = 10
"""Lower estimate of the bytes in a PDF or a recording for each token that a provider counts."""
_WAV_BYTES_PER_TOKEN = 100
"""The same for a WAV file. Even a compressed one has 4,000 bytes for each second, and providers count at most 32 tokens for it."""
_UNKNOWN = "application/octet-stream"

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
    (b"\xff\xf3", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}
_SPELLINGS = {
    "image/jpg": "image/jpeg",
    "audio/x-wav": "audio/wav",
    "audio/wave": "audio/wav",
    "audio/vnd.wave": "audio/wav",
    "audio/mp3": "audio/mpeg",
    "audio/x-flac": "audio/flac",
    "application/x-pdf": "application/pdf",
}
_TEXTS = frozenset(
    {"application/json", "application/xml", "application/yaml", "application/toml", "application/javascript"}
    | {"application/x-yaml", "application/x-sh", "application/sql", "image/svg+xml"}
)
_SUFFIXES = {
    "image/jpeg": ".jpg",
    "image/webp": ".webp",
    "audio/wav": ".wav",
    "audio/mpeg": ".mp3",
    "text/plain": ".txt",
}


@checked_arguments
@dataclass(frozen=True, init=False)
class Attachment:
    """A picture, a recording, a document or any other file, for a model, a person or a tool.

    `Attachment(b"...")` holds bytes, `Attachment(Path("report.pdf"))` or `Attachment("report.pdf")` reads a file now, and
    `Attachment("https://...")` names an address that the provider fetches itself. A media type that is not passed is
    recognised from the first bytes, otherwise from the name, otherwise from whether the bytes are text. Two attachments
    are equal if their bytes or addresses, names and media types are equal. Raises `DefinitionError` if the file can't be
    read or is too large, or if an argument is invalid.

    The bytes are not a field. In a record, a message or an event, an attachment is encoded as a reference, with only the
    fields below. A journal stores the bytes once, under `digest`.
    """

    media_type: str
    """The media type in lower case, such as "image/png"."""
    name: str
    """A name to show, without control characters. It can be a path: `filename` is its last part."""
    digest: str
    """Hexadecimal SHA-256 of the bytes, or of `address` if it is set."""
    size: int
    """The number of bytes; 0 if they are at an address."""
    address: str = ""
    """The http or https address of the bytes; "" if the attachment was made from bytes or a file."""

    def __init__(
        self, source: bytes | Path | str, /, name: str | None = None, *, media_type: str | None = None
    ) -> None:
        content, address = b"", ""
        if isinstance(source, str) and _ADDRESS.match(source):
            address = _checked_address(source)
            given = unquote(urlsplit(address).path.rpartition("/")[2])
        elif isinstance(source, Path | str):
            content, given = _read(Path(source)), Path(source).name
        elif isinstance(source, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            content, given = bytes(source), ""
        else:
            raise DefinitionError(
                f"an attachment is made from bytes, a path or an http address, not from {type(source).__name__}. "
                "Pass one of these."
            )
        name = given if name is None else name
        _check_size(name, len(content))
        kind = _checked_type(media_type) if media_type is not None else guess_type(content, name)
        known = content or address.encode()
        fill = self.__dict__  # the class is frozen
        fill["media_type"] = kind
        fill["name"] = _clean_name(name) or _name_for(kind)
        fill["digest"] = hashlib.sha256(known).hexdigest()
        fill["size"] = len(content)
        fill["address"] = address
        if not address:
            fill["_content"] = content

    @property
    def kind(self) -> AttachmentKind:
        """The kind of content: "image", "audio", "document" for a PDF, or "file" for everything else, including SVG."""
        main = self.media_type.partition("/")[0]
        if main == "image" and self.media_type != "image/svg+xml":
            return "image"
        if main == "audio":
            return "audio"
        return "document" if self.media_type == "application/pdf" else "file"

    @property
    def filename(self) -> str:
        """The last part of `name`, without folders. If nothing is left, a name that fits the media type."""
        return re.split(r"[/\\]", self.name)[-1].strip(" .") or _name_for(self.media_type)

    @property
    def content(self) -> bytes:
        """The bytes. Raises `ToolValidationError` if `is_here` is false."""
        found: bytes | None = self.__dict__.get("_content")
        if found is None:
            why = (
                f"they are at {self.address}. Fetch them from there"
                if self.address
                else "only a reference was recorded. Load them from the run's journal"
            )
            raise ToolValidationError(f"the bytes of the attachment {self.name!r} are not here: {why}")
        return found

    @property
    def is_here(self) -> bool:
        """Whether the bytes are in memory.

        They are not if the attachment has an address, or if it is a reference from a journal and `load` has not been called.
        """
        return "_content" in self.__dict__

    def read(self) -> bytes:
        """Return the bytes, as `content` does."""
        return self.content

    def text(self) -> str:
        """Return the bytes as text. Raises `ToolValidationError` if they are not UTF-8, or not in memory."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            raise ToolValidationError(
                f"the attachment {self.name!r} is not text: its {self.size} bytes are not valid UTF-8"
            ) from None

    @property
    def has_text_type(self) -> bool:
        """Whether the media type is that of a text format. The bytes need not be valid text."""
        return self.media_type.startswith("text/") or self.media_type in _TEXTS

    @cached_property
    def is_text(self) -> bool:
        """Whether the bytes are in memory, are valid UTF-8, and have the media type of a text format."""
        if not self.is_here or not self.has_text_type:
            return False
        try:
            self.content.decode()
        except UnicodeDecodeError:
            return False
        return True

    @property
    def token_bound(self) -> int:
        """An estimate of the tokens that a provider counts, for a budget. The provider's own count is charged.

        For an image, or if the bytes are in memory, it is an upper estimate. The size of anything else at an address is
        unknown, so one page is assumed.
        """
        if self.is_text:
            return self.size
        if self.kind == "image" or self.address:
            return _TOKENS_PER_PAGE
        each = _WAV_BYTES_PER_TOKEN if self.media_type == "audio/wav" else _BYTES_PER_TOKEN
        return max(_TOKENS_PER_PAGE, self.size // each)

    def render(self) -> str:
        """Return one line about the attachment, for a model or a person."""
        where = f"at {self.address}" if self.address else shown_size(self.size)
        return f"[{self.kind} {self.name}: {self.media_type}, {where}]"

    def load(self, content: bytes) -> None:
        """Give a reference its bytes. Raises `DefinitionError` if their digest differs, or if the bytes are at an address."""
        if self.address:
            raise DefinitionError(
                f"the attachment {self.name!r} is at the address {self.address}, so no bytes can be loaded into it. "
                "Attach the bytes themselves instead: Attachment(content, name)."
            )
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise DefinitionError(
                f"these are not the bytes of the attachment {self.name!r}. Pass the bytes that have its digest."
            )
        self.__dict__["_content"] = content
        self.__dict__.pop("is_text", None)  # it depends on the bytes

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        """Return the pydantic schema of a reference, so that a recorded result can be read again."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(_validated)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: object, handler: object) -> dict[str, Any]:
        return {"type": "object", "format": REFERENCE, "description": "A reference to an attachment."}

    def __repr__(self) -> str:
        return f"Attachment({self.name!r}, {self.media_type!r}, {self.address or shown_size(self.size)!r})"


REFERENCE = "handrail-attachment"
"""The `format` of an attachment in a JSON Schema.

A model can't write an attachment, so no tool takes one as an argument.
"""

AttachmentSource = Attachment | Path | str
"""An attachment, the path of a file on disk, or an http address."""


def attachments_of(given: Iterable[AttachmentSource]) -> tuple[Attachment, ...]:
    """Return the attachments that a caller passed, made from paths and addresses where needed.

    Raises `DefinitionError` for anything else, and for a path or address that can't be attached.
    """
    if isinstance(given, Attachment | Path | str | bytes):
        raise DefinitionError(
            f"attachments is a single {type(given).__name__}. Pass a list: attachments=[...]."
        )
    found: list[Attachment] = []
    for each in given:
        if not isinstance(each, Attachment | Path | str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise DefinitionError(
                f"an attachment has the type {type(each).__name__}. Pass a Path, an http address, or "
                "Attachment(bytes, name)."
            )
        found.append(each if isinstance(each, Attachment) else Attachment(each))
    return tuple(found)


def attachments_in(value: object) -> tuple[Attachment, ...]:
    """Return the attachments in a value that a handler returned: the value itself, or items of a list or tuple."""
    if isinstance(value, Attachment):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple([each for each in cast("list[Any]", value) if isinstance(each, Attachment)])
    return ()


def guess_type(content: bytes, name: str = "") -> str:
    """Guess a media type from the first bytes, otherwise from the name, otherwise from whether the bytes are text."""
    recognised = recognise_type(content)
    if recognised is not None:
        return recognised
    import mimetypes  # only attachments need it

    guessed = mimetypes.guess_type(name, strict=False)[0]
    if guessed is not None and _MEDIA_TYPE.fullmatch(guessed.lower()):
        return _SPELLINGS.get(guessed.lower(), guessed.lower())
    if not content or b"\0" in content:
        return _UNKNOWN
    try:
        content.decode()
    except UnicodeDecodeError:
        return _UNKNOWN
    return "text/plain"


def recognise_type(content: bytes) -> str | None:
    """Return the media type that the first bytes show; None if they show none."""
    if content.startswith(b"RIFF") and content[8:12] in _RIFF:
        return _RIFF[content[8:12]]
    return next((media_type for start, media_type in _MAGIC if content.startswith(start)), None)


def shown_size(size: int) -> str:
    """Return a size in bytes for people, such as "12 kB"."""
    if size < 1000:
        return f"{size} byte{'' if size == 1 else 's'}"
    if size < 1_000_000:
        return f"{size / 1000:.3g} kB"
    return f"{size / 1_000_000:.3g} MB"


def _validated(value: object) -> Attachment:
    if isinstance(value, Attachment):
        return value
    try:
        return msgspec.convert(value, Attachment)
    except msgspec.ValidationError as error:
        raise ValueError(f"is not a reference to an attachment: {error}") from None


def _read(path: Path) -> bytes:
    try:
        _check_size(path.name, path.stat().st_size)
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)  # the file may have grown, and a device reports no size
    except (OSError, ValueError) as error:  # a path with a null character raises ValueError
        why = error.strerror if isinstance(error, OSError) else error
        raise DefinitionError(
            f"the attachment {str(path)[:200]!r} can't be read: {why}. Pass a different file."
        ) from None


def _check_size(name: str, size: int) -> None:
    if size > MAX_BYTES:
        which = f"the attachment {name!r}" if name else "the attachment"
        raise DefinitionError(
            f"{which} has {size} bytes, and at most {MAX_BYTES} are allowed. "
            "Attach a smaller file, or the address of this one."
        )


def _checked_type(media_type: str) -> str:
    plain = media_type.partition(";")[0].strip().lower()
    if not _MEDIA_TYPE.fullmatch(plain):
        raise DefinitionError(f"{media_type[:80]!r} is not a media type. Write it like 'image/png'.")
    return _SPELLINGS.get(plain, plain)


def _checked_address(address: str) -> str:
    if not address.lower().startswith(("https://", "http://")):
        raise DefinitionError(
            f"{address[:80]!r} is not an http or https address, so no provider can fetch it. Pass the bytes, or a path."
        )
    try:
        parts = urlsplit(address)
    except ValueError:  # for example because a bracket is not closed
        parts = urlsplit("")
    if not parts.hostname or "@" in parts.netloc or not address.isprintable() or " " in address:
        raise DefinitionError(
            f"{address[:80]!r} is not an address that can be attached. Write it like 'https://host/plot.png', without "
            "a user name or password."
        )
    return address


def _clean_name(name: str) -> str:
    """Return a name with "_" for unprintable characters. The start of a long name is cut off."""
    return "".join([each if each.isprintable() else "_" for each in name]).strip()[-_MAX_NAME:]


def _name_for(media_type: str) -> str:
    import mimetypes

    suffix = _SUFFIXES.get(media_type) or mimetypes.guess_extension(media_type) or ""
    main = media_type.partition("/")[0]
    return f"{main if main in ('image', 'audio', 'text') else 'file'}{suffix}"
