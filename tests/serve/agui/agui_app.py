"""An app for the tests of AG-UI clients. Tests that kill it run it in its own process.

python agui_app.py FOLDER PORT
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

import uvicorn

from handrail import Adapter, Attachment, DirectoryFilesystem, SqliteJournal, ToolCall
from handrail.messages import AttachmentPart, CallPart, ModelPart, ModelRequest, TextPart, UserMessage
from handrail.models import ModelUnavailable
from handrail.models.scripted import Reply, Scripted
from handrail.run.adapter import Retry
from handrail.serve.app import asgi
from handrail.serve.sources import PromptSource
from support.served import PLAYS, PROMPT, READ, Booking, PlayedModel, said, source_in
from support.serving import TOKEN

CAT = Attachment(b"\x89PNG\r\n\x1a\n" + bytes(20), "cat.png")
SONG = Attachment(b"RIFF\x24\0\0\0WAVEfmt " + bytes(28), "song.wav")
PLANS: Mapping[str, Sequence[Scripted]] = {
    **PLAYS,
    "map": [said("Look.", ToolCall("showMap", {"place": "Oslo"}, "map-1")), said("You have seen it.")],
    "map and pay": [
        said("", ToolCall("showMap", {"place": "Oslo"}, "map-2"), ToolCall("pay", {"amount": 5}, "pay-2")),
        said("Seen and paid."),
    ],
    "pay two": [
        said("", ToolCall("pay", {"amount": 1}, "pay-a"), ToolCall("pay", {"amount": 2}, "pay-b")),
        said("Both paid."),
    ],
    "think": [Reply("So it is.", thinking="Let me think about it.", usage=said("").usage)],
    "draw": [
        Reply("One.", [READ], attachments=[CAT, SONG]),
        Reply(attachments=[CAT]),
    ],
    "flaky": [said("Now it is whole.")],
}


class FlakyModel(PlayedModel):
    """A `PlayedModel` that loses its connection once, in the middle of its answer to `flaky`."""

    lost = False

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        if request.messages[-1] == UserMessage("flaky") and not self.lost:
            self.lost = True
            yield TextPart("This is not to ")
            yield AttachmentPart(CAT)
            yield CallPart(0, "lost-1", "pay", '{"amo')
            raise ModelUnavailable(self.name, "the connection was lost")
        async for part in super().stream(request):
            yield part


def source_of(folder: Path) -> PromptSource:
    """Return a source like that of `source_in`, but with more plays, a `FlakyModel` and no wait before a retry."""
    source_in(folder)
    adapter = Adapter(
        FlakyModel(PLANS), filesystem=DirectoryFilesystem(folder / "work"), retry=Retry(first_wait=0.0)
    )
    return PromptSource(PROMPT, adapter, shown=(Booking,))


def main(folder: Path, port: int) -> None:
    app = asgi(source_of(folder), journal=SqliteJournal(folder / "runs.db"), token=TOKEN)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
