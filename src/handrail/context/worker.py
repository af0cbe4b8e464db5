"""What a worker's tools see of their worker: its attachments, and the workers it may call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.errors import ToolValidationError

if TYPE_CHECKING:
    from handrail.messages import Message


class Attachment(msgspec.Struct, frozen=True):
    """A file given to a worker: a name and bytes, as they were when it was given."""

    name: str
    content: bytes

    @property
    def size(self) -> int:
        """The size in bytes."""
        return len(self.content)

    def read(self) -> bytes:
        """The content as bytes."""
        return self.content

    def text(self) -> str:
        """The content as text; raises `ToolValidationError` if it is not UTF-8."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            raise ToolValidationError(
                f"the attachment {self.name!r} is not text: it has {self.size} bytes that are not UTF-8"
            ) from None


class RegistryView(msgspec.Struct, frozen=True):
    """The workers that a worker may call: their names and descriptions."""

    descriptions: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.descriptions)


class WorkerMessage(msgspec.Struct, frozen=True):
    """A message that was added to a worker's conversation."""

    path: tuple[str, ...]
    """The path of calls from the worker that was started to the one whose message it is."""
    message: Message

    @property
    def worker(self) -> str:
        """The name of the worker whose conversation it is."""
        return self.path[-1]


MessageCallback = Callable[[WorkerMessage], None]


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a worker's run has in addition to any run."""

    name: str
    registry: RegistryView
    creation_defaults: Mapping[str, Any]
    attachments: tuple[Attachment, ...]
    message_callback: MessageCallback | None
