"""Tests for feeds: writers never wait for a reader, memory is bounded, and a position belongs to one feed."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.serve.feed import Event, Feed, FellBehind


def token(text: str) -> Event:
    return Event({"type": "TEXT_MESSAGE_CONTENT", "messageId": "m", "delta": text})


def numbers(items: Any) -> list[int]:
    return [item.number for item in items]


async def read_all(feed: Feed, number: int, until: int) -> list[int]:
    """Return the numbers of the events that a reader receives after `number`, up to `until`."""
    seen: list[int] = []
    while number < until:
        for item in await feed.after(number):
            number = item.number
            seen.append(number)
    return seen


async def test_each_event_is_encoded_once_and_read_by_all() -> None:
    feed = Feed("boot")
    readers = [asyncio.ensure_future(read_all(feed, 0, 10)) for _ in range(5)]
    for number in range(10):
        feed.append([token(str(number))])
        await asyncio.sleep(0)
    assert await asyncio.gather(*readers) == [list(range(1, 11))] * 5
    first, second = feed.since(0)[0], (await feed.after(0))[0]
    assert first.data is second.data
    assert msgspec.json.decode(first.data)["delta"] == "0"


@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    most_items=st.integers(1, 10),
    most_bytes=st.integers(1, 600),
)
def test_what_is_kept_is_bounded_and_the_newest(lengths: list[int], most_items: int, most_bytes: int) -> None:
    """If no reader waits, a feed keeps only the newest events that fit its limits, and always the last one."""
    feed = Feed("boot", most_items=most_items, most_bytes=most_bytes)
    for length in lengths:
        feed.append([token("x" * length)])
        items, size = feed.size
        assert items <= most_items
        assert size <= most_bytes or items == 1
        kept = feed.since(feed.last - items)
        assert numbers(kept) == list(range(feed.last - items + 1, feed.last + 1))
        assert size == sum(len(item.data) for item in kept)
        if feed.last > items:
            with pytest.raises(FellBehind):
                feed.since(feed.last - items - 1)
            assert feed.number_of(feed.id_of(feed.last - items - 1)) is None
        assert feed.number_of(feed.id_of(feed.last - items)) == feed.last - items


async def test_a_reader_that_sleeps_falls_out_and_holds_nothing() -> None:
    feed = Feed("boot", most_items=10)
    feed.append([token("begin")])
    assert numbers(await feed.after(0)) == [1]
    for number in range(1000):
        feed.append([token(str(number))])
    assert feed.size[0] == 10
    with pytest.raises(FellBehind):
        await feed.after(1)


@pytest.mark.parametrize(
    "id",
    [
        "",
        "-",
        "boot",
        "boot-",
        "boot--1",
        "boot-x",
        "boot-9",
        "other-1",
        "boot-1 ",
        "boot-٣",
        "boot-" + "9" * 400,
    ],
)
def test_invalid_ids_and_ids_of_another_feed_have_no_position(id: str) -> None:
    feed = Feed("boot")
    feed.append([token("a"), token("b")])
    assert feed.number_of(id) is None
    assert [feed.number_of(f"boot-{number}") for number in range(4)] == [0, 1, 2, None]


@pytest.mark.virtual_time
async def test_the_first_event_is_told_at_once_and_the_next_together() -> None:
    """The first event wakes a reader at once. Later events wake it in batches every 20 ms, and no event is lost."""
    feed = Feed("boot", pause=0.02)
    loop = asyncio.get_running_loop()
    woken: list[tuple[float, int]] = []

    async def read() -> None:
        number = 0
        while number < 1000:
            items = await feed.after(number)
            number = items[-1].number
            woken.append((loop.time() - began, len(items)))

    began = loop.time()
    reader = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    for _ in range(1000):
        feed.append([token("t")])
        await asyncio.sleep(0.001)
    await reader
    assert woken[0] == (0.0, 1), "the first event was delayed"
    assert sum(count for _, count in woken) == 1000
    assert len(woken) <= 1000 * 0.001 / 0.02 + 2


@pytest.mark.virtual_time
async def test_many_readers_are_woken_a_batch_and_not_a_token() -> None:
    """Each of 200 readers is woken at most once per batch, however many tokens the batch contains."""
    feed = Feed("boot", pause=0.02)
    wakes = 0

    async def read() -> None:
        nonlocal wakes
        number = 0
        while number < 500:
            number = (await feed.after(number))[-1].number
            wakes += 1

    readers = [asyncio.ensure_future(read()) for _ in range(200)]
    await asyncio.sleep(0)
    for _ in range(500):
        feed.append([token("t")])
        await asyncio.sleep(0.001)
    await asyncio.gather(*readers)
    assert wakes <= 200 * (500 * 0.001 / 0.02 + 2)


async def test_waiting_ends_after_the_given_time_with_nothing() -> None:
    feed = Feed("boot")
    assert list(await feed.after(0, 0.001)) == []


async def test_a_reader_that_leaves_is_forgotten() -> None:
    """A feed keeps nothing about a reader that left while it was waiting."""
    feed = Feed("boot")
    readers = [asyncio.ensure_future(feed.after(0)) for _ in range(50)]
    await asyncio.sleep(0)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    changed = feed._changed  # pyright: ignore[reportPrivateUsage]  # the future that the readers awaited
    assert changed is not None
    assert not changed._callbacks  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    feed.append([token("a")])
    assert numbers(await feed.after(0)) == [1]


async def test_a_reader_far_behind_is_given_its_events_in_portions() -> None:
    feed = Feed("boot")
    feed.append(token(str(number)) for number in range(1000))
    assert len(await feed.after(0)) < 1000
    assert await read_all(feed, 0, 1000) == list(range(1, 1001))


async def test_legs_end_where_their_run_finishes_or_fails() -> None:
    feed = Feed("boot")
    feed.append(
        [
            Event({"type": "RUN_STARTED", "runId": "a"}),
            Event({"type": "RUN_FINISHED", "runId": "a"}),
            Event({"type": "RUN_ERROR", "message": "no"}),
        ]
    )
    assert [item.ends for item in feed.since(0)] == ["", "a", "*"]


@pytest.mark.parametrize("large", [1, 3])
async def test_a_reader_that_waits_gets_what_comes_however_large(large: int) -> None:
    """A reader that keeps up receives a batch that is larger than the limit. The feed does not keep the batch afterwards."""
    feed = Feed("boot", most_bytes=1000)
    feed.append([token("before")])
    readers = [asyncio.ensure_future(read_all(feed, 1, 4 + large)) for _ in range(3)]
    await asyncio.sleep(0)
    feed.append([token("a")])  # this wakes the readers, but they read only when they run next
    feed.append([*[token("x" * 5000)] * large, token("b"), token("c")])
    assert await asyncio.gather(*readers) == [list(range(2, 5 + large))] * 3
    feed.append([token("d")])
    assert feed.size[1] <= 1000
    with pytest.raises(FellBehind):
        await feed.after(1)
