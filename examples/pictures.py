"""Send a picture to an agent, and let its tool return one.

Everything is in memory, and the model is scripted. To use a real model, pass its name to `Agent`, such as
"anthropic:claude-sonnet-5".
"""

from __future__ import annotations

import asyncio
import struct
import zlib

from handrail import Agent, Attachment, MemoryJournal, ScriptedModel, ToolCall, tool
from handrail.messages import ToolMessage, UserMessage
from handrail.run.record.log import attached_to


def png(rows: list[list[int]]) -> bytes:
    """Return a picture in shades of grey as a PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@tool(effect="read")
def plot(values: list[int]) -> Attachment:
    """Plot whole numbers from 0 to 9 as bars."""
    rows = [
        [0 if value > height else 255 for value in values for _ in range(8)] for height in range(9, -1, -1)
    ]
    return Attachment(png(rows), "bars.png")


async def main() -> None:
    model = ScriptedModel([ToolCall("plot", {"values": [3, 1, 4, 1, 5]}), "The bars match your sketch."])
    journal = MemoryJournal()
    agent = Agent(model, "Compare plots.", tools=[plot])
    sketch = Attachment(png([[255, 0, 255, 0]]), "sketch.png")
    response = await agent.run(
        "Plot 3, 1, 4, 1, 5. Is my sketch right?", attachments=[sketch], journal=journal
    )
    print(response.text, "\n")

    print("The model was sent:")
    for message in model.requests[-1].messages:
        if isinstance(message, UserMessage | ToolMessage):
            for each in attached_to([message]):
                print(
                    "  ",
                    each.render(),
                    "from a tool" if isinstance(message, ToolMessage) else "from a person",
                )
    print("The journal has the bytes once each:", len(await journal.blobs.list(response.run_id)), "blobs")


if __name__ == "__main__":
    asyncio.run(main())
