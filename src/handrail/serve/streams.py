"""A thread's feed as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec

from handrail.serve.feed import Event, Feed, FellBehind

PING_SECONDS = 15.0


def encoded(data: bytes, id: str = "") -> bytes:
    """One event on the wire. Lines end in a bare newline: clients of AG-UI can't read anything else."""
    head = f"id: {id}\n".encode() if id else b""
    return b"%sdata: %s\n\n" % (head, data)


async def lines(
    feed: Feed,
    number: int,
    *,
    before: Sequence[Event] = (),
    leg: str = "",
    nested: bool = True,
    ping: float = PING_SECONDS,
) -> AsyncGenerator[bytes]:
    """What comes after a place in a feed, until a leg ends; without one, until the reader goes.

    A reader that has fallen out of what is kept is sent away: it comes again, and gets a snapshot.
    """
    for event in before:
        if nested or not event.nested:
            yield encoded(msgspec.json.encode(event.data))
    while True:
        try:
            items = await feed.after(number, ping)
        except FellBehind:
            return
        if not items:
            yield b": ping\n\n"
        out: list[bytes] = []
        for item in items:
            number = item.number
            if nested or not item.nested:
                out.append(encoded(item.data, feed.id_of(number)))
            if leg and item.ends in (leg, "*"):
                yield b"".join(out)
                return
        if out:
            yield b"".join(out)
