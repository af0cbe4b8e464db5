"""Tests for the list of threads: it is paged, contains each thread once, and can be searched by what was said in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from handrail.journal.records import Mark, RunCopy, RunRecord, RunRow
from handrail.journal.sqlite import MemoryJournal
from handrail.serve import threads as threads_module
from handrail.serve.requests import PRINCIPAL, before_of, format_mark
from handrail.serve.threads import ThreadList, Threads
from support.examples import at_most
from support.served_threads import begin
from support.serving import serving, source

SESSIONS = st.lists(
    st.tuples(
        # time of the last change, which several threads may share
        st.floats(0, 2e9) | st.integers(0, 2).map(float),
        st.sampled_from(["local/t{}", "t{}", "local/no thread {}", "local/a/t{}", "/local/t{}"]),
        st.sampled_from(["", "red", "Red and BLUE", "blue\nred"]),
    ),
    max_size=14,
)


async def listing(sessions: list[tuple[float, str, str]]) -> ThreadList:
    journal = MemoryJournal()
    for number, (changed, named, words) in enumerate(sessions):
        record = RunRecord(
            id=f"run{number}",
            session_id=named.format(number),
            principal="local",
            prompt="desk",
            model="m",
            began_at=1.0,
            begin=begin(words),
        )
        await journal.runs.add(RunCopy(row=RunRow(record=record, status="done", changed_at=changed)))
    return ThreadList(Threads(source(), journal))


def by_wire(mark: Mark) -> Mark | None:
    """Return a mark as the server reads it when a client sends it back."""
    scope = {"type": "http", "headers": [], "query_string": b"", PRINCIPAL: "local"}
    text = format_mark(Request(scope), mark)
    return before_of(Request({**scope, "query_string": f"before={quote(text, safe='')}".encode()}))


@settings(max_examples=at_most(200), deadline=None)
@given(
    sessions=SESSIONS,
    limit=st.integers(1, 5),
    words=st.sampled_from(["", "red", "BLUE", "red blue", "green", " "]),
)
def test_pages_have_every_thread_once_in_order(
    sessions: list[tuple[float, str, str]], limit: int, words: str
):
    async def main() -> list[str]:
        made = await listing(sessions)
        found: list[str] = []
        before: Mark | None = None
        for _ in range(len(sessions) + 1):
            page, next = await made.page("local", limit=limit, before=before, words=words)
            assert len(page) <= limit
            found += [each["id"] for each in page]
            if next is None:
                return found
            before = by_wire(next)
            assert before == next
        raise AssertionError("the list never ends")

    wanted = words.lower().split()
    threads = [
        (changed, f"local/t{number}")
        for number, (changed, named, said) in enumerate(sessions)
        if named == "local/t{}" and all(word in said.lower() for word in wanted)
    ]
    in_order = [id.removeprefix("local/") for _, id in sorted(threads, reverse=True)]
    assert asyncio.run(main()) == in_order


async def test_one_request_does_not_look_through_everything(monkeypatch: pytest.MonkeyPatch):
    """One search request looks at a limited number of threads, and returns the mark from which to continue."""
    monkeypatch.setattr(threads_module, "_MOST_SEARCHED", 4)
    made = await listing([(float(at), "local/t{}", "red" if at == 0 else "blue") for at in range(10)])
    page, next = await made.page("local", limit=2, words="red")
    assert page == []
    assert next == (6.0, "local/t6")
    page, next = await made.page("local", limit=2, words="red", before=(1.0, "local/t1"))
    assert ([each["id"] for each in page], next) == (["t0"], None)


async def test_a_search_for_one_thread_queries_the_journal_no_more_often_than_one_for_many():
    """A search with `limit=1` makes only a few large queries, because each query sorts all of the principal's threads."""
    made = await listing([(float(at), "local/t{}", "red" if at == 0 else "blue") for at in range(300)])
    asked: list[int] = []
    sessions = made._journal.runs.sessions

    async def counted(principal: str, **which: Any) -> Any:
        asked.append(which["limit"])
        return await sessions(principal, **which)

    made._journal.runs.sessions = counted
    page, next = await made.page("local", limit=1, words="red")
    assert ([each["id"] for each in page], next) == (["t0"], None)
    assert 1 <= len(asked) <= 3


async def test_the_server_pages_and_finds(tmp_path: Path):
    async with serving(tmp_path) as client:
        for name, text in (("a", "Book a table"), ("b", "count sheep"), ("c", "book a room")):
            await client.say(name, text)
            await client.idle(name)
        first = (await client.ask("GET", "/threads?limit=2")).json
        assert [each["id"] for each in first["threads"]] == ["c", "b"]
        rest = (await client.ask("GET", f"/threads?limit=2&before={quote(first['next'], safe='')}")).json
        assert ([each["id"] for each in rest["threads"]], rest["next"]) == (["a"], None)
        found = (await client.ask("GET", "/threads?find=a+BOOK")).json
        assert ([each["id"] for each in found["threads"]], found["next"]) == (["c", "a"], None)


async def test_whole_threads_are_searched_but_only_ones_own(tmp_path: Path):
    """A search finds what people and the model said in any run, over or not, and never in another person's thread."""
    async with serving(tmp_path, authenticate=lambda request: request.headers["x-name"]) as client:
        ann, bob = ({"X-Name": name} for name in ("ann", "bob"))
        for text in ("Book a table", "and a ROOM"):
            await client.say("a", text, ann)
            await client.idle("a", ann)
        await client.say("a", "call order", ann)
        await client.asked("a", ann)

        async def found(words: str, by: dict[str, str]) -> list[str]:
            page = (await client.ask("GET", f"/threads?find={quote(words)}", headers=by)).json
            return [each["id"] for each in page["threads"]]

        assert await found("room table", ann) == ["a"]
        assert await found("you said", ann) == ["a"]
        assert await found("room cellar", ann) == []
        assert await found("order table", ann) == ["a"]
        assert await found("room", bob) == []
        await client.say("a", "nothing", bob)
        await client.idle("a", bob)
        assert await found("room", bob) == []
        assert await found("nothing", ann) == []


async def test_one_request_reads_a_limited_number_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads_module, "_MOST_SEARCHED", 3)
    async with serving(tmp_path) as client:
        for name, text in (("old", "red"), ("a", "one"), ("a", "two"), ("a", "three"), ("a", "four")):
            await client.say(name, text)
            await client.idle(name)
        first = (await client.ask("GET", "/threads?find=red")).json
        assert first["threads"] == []
        rest = (await client.ask("GET", f"/threads?find=red&before={quote(first['next'], safe='')}")).json
        assert [each["id"] for each in rest["threads"]] == ["old"]
