"""Tests for feeds: writers never wait for a reader, memory is bounded, and a position belongs to one feed."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.serve.feed import PING, Alarm, Event, Feed, FellBehind, follow


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
    readers = [asyncio.ensure_future(feed.after(0, 5)) for _ in range(50)]
    await asyncio.sleep(0)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    assert not [*feed._waiting, *feed._woken]  # pyright: ignore[reportPrivateUsage]
    assert not any(feed._alarm._waits.values())  # pyright: ignore[reportPrivateUsage]
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


async def test_events_are_encoded_once_for_all_readers_who_get_them_together() -> None:
    """Readers of a feed get the very same bytes, also after more events, and one who reads alone keeps none in the feed."""
    feed = Feed("boot", pause=0)
    readers = [follow(feed, 0, until=4) for _ in range(3)]
    for last in (2, 4):
        waiting = [asyncio.ensure_future(anext(each)) for each in readers]
        await asyncio.sleep(0)
        feed.append([token("a"), token("b")])
        first, *others = await asyncio.gather(*waiting)
        assert first.count(b"\n\n") == 2
        assert f"id: boot-{last}\n".encode() in first
        assert all(each is first for each in others)
    for each in readers:
        await each.aclose()
    assert feed._portion is None  # pyright: ignore[reportPrivateUsage]


async def test_readers_of_one_leg_get_only_its_events_and_the_others_get_the_rest() -> None:
    feed = Feed("boot")
    feed.append([token("a"), Event({"type": "RUN_FINISHED", "runId": "leg"}), token("b")])
    rest, leg = follow(feed, 0), follow(feed, 0, leg="leg")
    assert (await anext(rest)).count(b"data: ") == 3
    assert [chunk.count(b"data: ") async for chunk in leg] == [2]
    await rest.aclose()


@pytest.mark.virtual_time
async def test_quiet_readers_are_pinged_with_few_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand readers who came within a second are each pinged 15 s after they came, or at most half a second later."""
    loop, alarm = asyncio.get_running_loop(), Alarm()
    feeds = [Feed(f"boot{number}", alarm=alarm) for number in range(10)]
    timers: list[float] = []
    call_at: Any = loop.call_at

    def count(at: float, *others: Any, **options: Any) -> Any:
        if at > loop.time() + 10:
            timers.append(at)
        return call_at(at, *others, **options)

    monkeypatch.setattr(loop, "call_at", count)

    async def ping(number: int) -> float:
        await asyncio.sleep(number / 1000)
        came, stream = loop.time(), follow(feeds[number % 10], 0)
        assert await anext(stream) == PING
        await stream.aclose()
        return loop.time() - came

    waited = await asyncio.gather(*(ping(number) for number in range(1000)))
    assert min(waited) >= 15.0
    assert max(waited) <= 15.5
    assert len(timers) <= 3


@pytest.mark.virtual_time
async def test_a_reader_who_got_an_event_is_pinged_only_after_quiet_time() -> None:
    feed = Feed("boot")
    loop = asyncio.get_running_loop()
    stream = follow(feed, 0)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(10)
    feed.append([token("a")])
    assert b"data" in await waiting
    heard = loop.time()
    assert await anext(stream) == PING
    assert 15.0 <= loop.time() - heard <= 15.5
    await stream.aclose()
