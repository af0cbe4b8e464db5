"""What a worker's tools see of the worker: what it was given, and what it may call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.errors import ToolValidationError

if TYPE_CHECKING:
    from handrail.messages import Message


class Attachment(msgspec.Struct, frozen=True):
    """A file that a worker was given: a name and bytes. It stays as it was when it was handed over."""

    name: str
    content: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content)

    def read(self) -> bytes:
        """All of it."""
        return self.content

    def text(self) -> str:
        """The same as text, or `ToolValidationError` where it is none."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            raise ToolValidationError(
                f"the attachment {self.name!r} is not text: it has {self.size} bytes that are not UTF-8"
            ) from None


class RegistryView(msgspec.Struct, frozen=True):
    """The workers that a worker may call, to look at: their names, and what each says it does."""

    descriptions: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.descriptions)


class WorkerMessage(msgspec.Struct, frozen=True):
    """One message of a worker's conversation, as it was added."""

    path: tuple[str, ...]
    """The worker that was started, and the calls that led from it to the one that speaks."""
    message: Message

    @property
    def worker(self) -> str:
        """Whose conversation it is."""
        return self.path[-1]


MessageCallback = Callable[[WorkerMessage], None]


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a worker's run has beside what every run has."""

    name: str
    registry: RegistryView
    creation_defaults: Mapping[str, Any]
    attachments: tuple[Attachment, ...]
    message_callback: MessageCallback | None
