"""Tests of the server over real connections: bodies, headers, health, readers, options and the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import MemoryJournal
from handrail.errors import DefinitionError, JournalAltered, JournalError
from handrail.ids import trace_of
from handrail.mcp.http import LIMITS
from handrail.schema.problems import location_of
from handrail.serve import asgi
from handrail.serve.limits import Limits, Quota, Rate, network_of
from handrail.serve.metrics import REFUSED, RUNS_ENDED, MemoryMetrics
from handrail.serve.middleware import CSP
from handrail.serve.pages import Pages
from handrail.serve.people import People
from handrail.serve.principals import Principals
from handrail.serve.refusals import RequestRefused, pointer_of
from handrail.serve.requests import parse_json
from handrail.serve.server import Connection, Connections, address_of, is_reachable, listen
from handrail.serve.thread import Thread
from support import PATIENCE, warm_python
from support.served_threads import over, texts
from support.serving import BEARER, TOKEN, Client, said_by, serving, signed_in, source
from support.warm_python import Program

pytestmark = pytest.mark.once  # sockets, processes and limits do not depend on the Python version


# --- bodies ---


async def test_a_thread_is_begun_followed_listed_and_forgotten(tmp_path: Path):
    async with serving(tmp_path) as client:
        about = (await client.ask("GET", "/about")).json
        assert about["name"] == "desk"
        assert about["principal"] == "local"
        assert about["files"] is False
        assert (await client.ask("GET", "/threads/a")).kind == "ThreadUnknown"
        run_id = await client.say("a", "hello")
        seen = await client.idle("a")
        assert said_by(seen["messages"]) == ["You said: hello"]
        [line] = (await client.ask("GET", "/threads?limit=5")).json["threads"]
        assert (line["id"], line["title"], line["status"], line["runs"]) == ("a", "hello", "idle", 1)
        assert line["usage"]["requests"] == 1
        tree = (await client.ask("GET", f"/threads/a/runs/{run_id}")).json
        [turn] = tree["turns"]
        assert (turn["said"], turn["text"]) == (["hello"], "You said: hello")
        assert tree["trace_id"] == trace_of(run_id)
        [run] = (await client.ask("GET", "/runs")).json["runs"]
        assert (run["id"], run["thread_id"]) == (run_id, "a")
        assert (await client.ask("DELETE", "/threads/a")).status == 200
        assert (await client.ask("GET", "/threads/a")).kind == "ThreadUnknown"
        assert (await client.ask("GET", "/threads")).json == {"threads": [], "next": None}


async def test_threads_are_paged_by_time(tmp_path: Path):
    async with serving(tmp_path) as client:
        for name in "abc":
            await client.say(name, "hello")
            await client.idle(name)
        first = (await client.ask("GET", "/threads?limit=2")).json["threads"]
        assert [each["id"] for each in first] == ["c", "b"]
        rest = await client.ask("GET", f"/threads?limit=2&before={first[-1]['updated_at']}")
        assert [each["id"] for each in rest.json["threads"]] == ["a"]
        for query in ("limit=0", "limit=x", "limit=-1", "before=yesterday", "before=9999999999999"):
            assert (await client.ask("GET", f"/threads?{query}")).status == 422, query
        for mark in ("x/a", "/", "nan/a", "inf/a", "1e999/a", "2026-05-31/a"):
            assert (await client.ask("GET", f"/threads?before={mark}")).kind == "BadTime", mark
        assert (await client.ask("GET", f"/threads?find={'x' * 201}")).kind == "BadSearch"


async def test_a_question_is_answered_and_a_busy_thread_says_so(tmp_path: Path):
    async with serving(tmp_path) as client:
        await client.say("a", "call order")
        asked = await client.asked("a")
        said = await client.ask("POST", "/threads/a/messages", {"text": "more"})
        assert (said.status, said.kind) == (409, "QuestionsOpen")
        good = {"question_id": asked["id"], "digest": asked["digest"], "value": {"seats": 2, "name": "Ann"}}
        assert (await client.ask("POST", "/threads/a/answers", good)).status == 200
        assert said_by((await client.idle("a"))["messages"])[-1] == "Done: 2 for Ann"
        await client.say("a", "hold")
        said = await client.ask("POST", "/threads/a/messages", {"text": "more"})
        assert (said.status, said.kind) == (409, "ThreadBusy")
        assert (await client.ask("DELETE", "/threads/a")).kind == "ThreadBusy"
        assert (await client.ask("POST", "/threads/a/cancel", {})).status == 202
        assert (await client.idle("a"))["status"] == "cancelled"


async def test_a_call_is_undone_and_a_decision_revoked(tmp_path: Path):
    files = tmp_path / "files"
    files.mkdir()
    async with serving(tmp_path, source(files)) as client:
        await client.say("a", 'call write {"path": "a.txt", "text": "one"}')
        await client.idle("a")
        [change] = (await client.ask("GET", "/threads/a/files")).json["changes"]
        assert change["paths"] == ["a.txt"]
        assert change["undoable"]
        assert (files / "a.txt").exists()
        undone = await client.ask("POST", f"/threads/a/calls/{change['call_id']}/undo", {})
        assert (undone.status, undone.json["paths"]) == (200, ["a.txt"])
        assert not (files / "a.txt").exists()
        again = await client.ask("POST", f"/threads/a/calls/{change['call_id']}/undo", {})
        assert (again.status, again.kind) == (409, "UndoRefused")
        await client.say("b", 'call pay {"amount": 5}')
        asked = await client.asked("b")
        value = {"approved": True, "remember": "exact"}
        given = {"question_id": asked["id"], "digest": asked["digest"], "value": value}
        assert (await client.ask("POST", "/threads/b/answers", given)).status == 200
        await client.idle("b")
        [kept] = (await client.ask("GET", "/threads/b/approvals")).json["approvals"]
        assert (kept["tool"], kept["approved"], kept["by"]) == ("pay", True, "local")
        assert (await client.ask("DELETE", f"/threads/b/approvals/{kept['id']}")).status == 200
        assert (await client.ask("GET", "/threads/b/approvals")).json == {"approvals": []}
        assert (await client.ask("DELETE", f"/threads/b/approvals/{kept['id']}")).status == 404


async def test_a_stream_continues_where_it_was_left(tmp_path: Path):
    async with serving(tmp_path) as client:
        await client.say("a", "call look")
        await client.idle("a")
        async with client.stream("GET", "/threads/a/events?follow=1") as stream:
            ids: list[str] = []
            await client.say("a", "hello")
            async for id, event in stream.events():
                if id:
                    ids.append(id)
                if id and event["type"] == "RUN_FINISHED":
                    break
        rest = ids[2:]
        async with client.stream(
            "GET", "/threads/a/events?follow=1", headers={"Last-Event-ID": ids[1]}
        ) as stream:
            again: list[str] = []
            async for id, _ in stream.events():
                again.append(id)
                if len(again) == len(rest):
                    break
        assert again == rest


async def test_an_agent_s_errors_are_json_before_the_stream_and_events_in_it(tmp_path: Path):
    async with serving(tmp_path) as client:
        wrong = await client.ask("POST", "/agent", {"threadId": "a"})
        assert wrong.status == 422
        assert wrong.headers["content-type"] == "application/json"
        body = {"threadId": "a", "runId": "r1", "messages": [{"id": "1", "role": "user", "content": "call look"}],
                "tools": [], "context": [], "state": {}, "forwardedProps": {}}  # fmt: skip
        async with client.stream("POST", "/agent", body) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            events = await stream.all()
        assert (events[0]["type"], events[-1]["type"]) == ("RUN_STARTED", "RUN_FINISHED")


# --- headers of every response ---


async def test_every_answer_carries_the_headers_that_guard_the_page(tmp_path: Path):
    async with serving(tmp_path) as client:
        await client.say("a", "hello")
        said = [
            await client.ask("GET", path)
            for path in ("/", "/about", "/health", "/nothing", "/assets/nothing.js", "/threads/a/events")
        ]
        said.append(await client.ask("GET", "/about", headers={"Host": "evil.example"}))
        for each in said:
            assert each.headers["content-security-policy"] == CSP
            assert each.headers["x-content-type-options"] == "nosniff"
            assert each.headers["referrer-policy"] == "no-referrer"
            assert each.headers["cross-origin-resource-policy"] == "same-origin"
            assert each.headers["cache-control"] in ("no-store", "no-cache")
            assert "server" not in each.headers


@pytest.mark.parametrize(
    "origin",
    ["", "*", "null", "https://*", "https://*.example", "chat.example", "https://", "https://a/path", "https://a b",
     "https://a:port", "https://ann@a", "https://a?b", "https://a,https://b", "https://é.example"],
)  # fmt: skip
def test_an_origin_that_no_page_can_have_is_refused_at_the_start(origin: str):
    """A wildcard allows nothing, so whoever writes one is told so, and does not look for the reason in a browser."""
    with pytest.raises(DefinitionError, match=re.escape(repr(origin))):
        asgi(source(), journal=MemoryJournal(), token=TOKEN, origins=[origin])


@pytest.mark.parametrize(
    "host", ["", "*", "*.example", "https://chat.example", "a/b", "a b", "ann@a", "a:port"]
)
def test_a_host_that_no_request_can_name_is_refused_at_the_start(host: str):
    with pytest.raises(DefinitionError, match=re.escape(repr(host))):
        asgi(source(), journal=MemoryJournal(), token=TOKEN, hosts=[host])


async def test_own_names_and_origins_are_served(tmp_path: Path):
    async with serving(tmp_path, hosts=["proxy.example"], origins=["https://chat.example"]) as client:
        port = client.port
        for host in (
            f"127.0.0.1:{port}",
            f"localhost:{port}",
            f"LOCALHOST:{port}",
            "proxy.example",
            "proxy.example:444",
        ):
            assert (await client.ask("GET", "/about", headers={"Host": host})).status == 200, host
        own = await client.ask(
            "POST", "/threads/a/messages", {"text": "x"}, {"Origin": f"http://{client.host}"}
        )
        assert own.status == 202
        other = await client.ask("GET", "/about", headers={"Origin": "https://chat.example"})
        assert other.headers["access-control-allow-origin"] == "https://chat.example"
        assert "origin" in other.headers["vary"]


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_it_serves_over_ipv6(tmp_path: Path):
    async with serving(tmp_path, host="::1") as client:
        assert client.address.startswith("http://[::1]:")
        assert (await client.ask("GET", "/about")).status == 200
        await client.serves()


async def test_an_internal_error_is_reported_without_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    async with serving(tmp_path) as client:

        def broken(*given: Any, **named: Any) -> Any:
            raise RuntimeError("the inside")

        monkeypatch.setattr(client.app.threads.journal.runs, "sessions", broken)
        said = await client.ask("GET", "/threads")
        assert (said.status, said.kind) == (500, "ServerError")
        assert "inside" not in said.body.decode()
        incident = said.json["error"]["message"].rpartition(" ")[2]
        assert incident in caplog.text
        assert "the inside" in caplog.text
        await client.serves()


@pytest.mark.parametrize("where", ["admission", "route", "login", "agent"])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (
            JournalError("postgresql://tests@db.internal/x", "it is gone", "Start it.", is_lost=True),
            503,
            "JournalLost",
        ),
        (
            JournalError("postgresql://tests@db.internal/x", "permission denied", "Grant it."),
            500,
            "ServerError",
        ),
        (
            JournalAltered("postgresql://tests@db.internal/x", "users", "", 3, "", "it is missing"),
            500,
            "JournalAltered",
        ),
    ],
    ids=["lost", "refused", "altered"],
)
async def test_an_error_of_the_journal_is_logged_and_does_not_tell_where_the_journal_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    where: str,
    error: JournalError,
    status: int,
    kind: str,
):
    """Not even to somebody who has not signed in. A client is to come back if the journal's database does not answer."""
    people = People(tmp_path / "people.db")
    people.add("ann", ["user"], "correct horse battery")
    people.close()
    async with serving(tmp_path) as client:
        ann = {"Authorization": "Bearer ann:correct horse battery"}
        assert (await client.ask("GET", "/threads", headers=ann)).status == 200

        def broken(*given: Any, **named: Any) -> Any:
            raise error

        served = client.app
        places: dict[str, tuple[Any, str]] = {
            "route": (served.threads.journal.runs, "sessions"),
            "agent": (Thread, "run_messages"),
        }
        monkeypatch.setattr(*places.get(where, (served.principals.people, "verify")), broken)
        if where == "login":
            said = await client.ask("POST", "/login", {"name": "ann", "password": "correct horse battery"})
        elif where == "agent":
            hello = {"id": "1", "role": "user", "content": "hello"}
            body = {"threadId": "a", "runId": "r", "messages": [hello], "tools": [], "context": []}
            said = await client.ask("POST", "/agent", body, headers=ann)
        else:
            said = await client.ask("GET", "/threads", headers=ann)
        assert (said.status, said.kind) == (status, kind)
        assert "db.internal" not in said.body.decode()
        assert "db.internal" in caplog.text
        assert ("retry-after" in said.headers) == (status == 503)
        monkeypatch.undo()
        assert (await client.ask("GET", "/threads", headers=ann)).status == 200


@pytest.mark.parametrize("act", ["sign_in", "revoke", "audit"])
async def test_a_journal_that_does_not_answer_keeps_only_those_waiting_who_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
):
    """Signing in and out and reading the audit log wait for the database. The server answers others meanwhile."""
    people = People(tmp_path / "people.db")
    people.add("ann", ["admin"], "correct horse battery")
    people.close()
    async with serving(tmp_path) as client:
        ann = await signed_in(client, name="ann", password="correct horse battery")
        answered, people = threading.Event(), client.app.principals.people
        usual = getattr(people, act)

        def slow(*given: Any, **named: Any) -> Any:
            assert answered.wait(20), "nobody was answered meanwhile"
            return usual(*given, **named)

        monkeypatch.setattr(people, act, slow)
        requests = {
            "sign_in": ("POST", "/login", {"name": "ann", "password": "correct horse battery"}),
            "revoke": ("POST", "/logout", {}),
            "audit": ("GET", "/audit", None),
        }
        waiting = asyncio.create_task(client.ask(*requests[act], headers=ann))
        await client.serves(ann)
        answered.set()
        assert (await waiting).status == 200


async def test_static_files_have_types_and_tags(tmp_path: Path):
    page = tmp_path / "page"
    (page / "vendor").mkdir(parents=True)
    (page / "index.html").write_text("<!doctype html>")
    (page / "main.js").write_text("1")
    (page / "secret.py").write_text("1")
    (page / "out.js").symlink_to("/etc/passwd")

    class Asked:
        def __init__(self, **headers: str) -> None:
            self.headers = headers

    pages = Pages(page)
    assert pages.page(Asked()).status_code == 503  # type: ignore[arg-type]
    assert b"scripts/page" in bytes(pages.page(Asked()).body)  # type: ignore[arg-type]
    (page / "vendor" / "standalone.js").write_text("1")
    assert pages.page(Asked()).status_code == 200  # type: ignore[arg-type]
    first = pages.asset(Asked(), "main.js")  # type: ignore[arg-type]
    assert first.headers["content-type"].startswith("text/javascript")
    same = pages.asset(Asked(**{"if-none-match": first.headers["etag"]}), "main.js")  # type: ignore[arg-type]
    assert (same.status_code, same.body) == (304, b"")
    (page / "main.js").write_text("22")
    changed = pages.asset(Asked(**{"if-none-match": first.headers["etag"]}), "main.js")  # type: ignore[arg-type]
    assert changed.status_code == 200
    assert changed.body == b"22"
    for name in ("secret.py", "out.js", "vendor", "../page/main.js"):
        with pytest.raises(RequestRefused):
            pages.asset(Asked(), name)  # type: ignore[arg-type]


# --- health and metrics ---


async def test_metrics_count_and_name_nobody(tmp_path: Path):
    async with serving(tmp_path, token=TOKEN) as client:
        await client.say("secret-thread", "hello", BEARER)
        await client.idle("secret-thread", BEARER)
        async with client.stream("GET", "/threads/secret-thread/events?follow=1", headers=BEARER) as stream:
            async for _ in stream.events():
                break
            assert (await client.ask("GET", "/metrics")).status == 401
            text = (await client.ask("GET", "/metrics", headers=BEARER)).body.decode()
        assert "secret-thread" not in text
        assert "local" not in text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        values = {name: float(value) for name, value in lines}
        assert values["handrail_runs_begun_total"] == 1
        assert values['handrail_runs_over_total{outcome="success"}'] == 1
        assert values["handrail_viewers"] == 1
        assert values['handrail_refused_total{reason="TokenMissing"}'] == 1
        posted = 'handrail_requests_total{method="POST",route="/threads/{id}/messages",status="202"}'
        assert values[posted] == 1
        assert values["handrail_events_sent_total"] > 0
        assert values["handrail_first_event_seconds_count"] == 1
        assert values['handrail_legs_total{handrail_run_outcome="done"}'] == 1
        health = (await client.ask("GET", "/health", headers=BEARER)).json
        assert health["status"] == "ok"
        assert health["runs"] == 0


async def test_a_run_that_waits_for_the_client_s_own_tools_is_not_counted_as_ended(tmp_path: Path):
    shown = {"name": "map", "description": "Show a map.", "parameters": {"type": "object"}}
    said = {"id": "1", "role": "user", "content": "call map {}"}
    body: Any = {"threadId": "t", "runId": "one", "messages": [said], "tools": [shown], "context": []}
    body["protocolVersion"] = "1.0"
    async with serving(tmp_path) as client:

        def ended() -> float:
            return client.app.metrics.value(RUNS_ENDED, outcome="success")

        async with client.stream("POST", "/agent", body) as stream:
            outcome = (await stream.all())[-1]["outcome"]
        (call_id,) = outcome["pendingToolCallIds"]
        assert (outcome["type"], ended()) == ("success", 0)
        answer = {"id": "2", "role": "tool", "toolCallId": call_id, "content": "seen"}
        async with client.stream(
            "POST", "/agent", {**body, "runId": "two", "messages": [said, answer]}
        ) as stream:
            assert (await stream.all())[-1]["outcome"]["type"] == "success"
        assert ended() == 1


async def test_a_server_that_stops_says_so_parks_and_ends_its_streams(tmp_path: Path):
    async with serving(tmp_path) as client:
        await client.say("a", "call order")
        await client.asked("a")
        async with client.stream("GET", "/threads/a/events?follow=1") as stream:
            await client.app.stop()
            async with asyncio.timeout(PATIENCE):
                await stream.all()
        said = await client.ask("POST", "/threads/b/messages", {"text": "hello"})
        assert (said.status, said.kind) == (503, "Stopping")
        health = await client.ask("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "stopping")
        ready = await client.ask("GET", "/readyz")
        assert (ready.status, ready.json) == (503, {"status": "stopping"})
    async with serving(tmp_path) as client:
        asked = await client.asked("a")
        given = {"question_id": asked["id"], "digest": asked["digest"], "value": {"seats": 1}}
        assert (await client.ask("POST", "/threads/a/answers", given)).status == 200
        assert (await client.idle("a"))["status"] == "idle"


# --- readers ---


async def test_a_reader_that_stalls_blocks_nobody_and_is_disconnected(tmp_path: Path):
    """A reader that stalls is disconnected once its buffers are full. Meanwhile, runs and other requests continue."""
    async with serving(tmp_path, limits=Limits(write_seconds=0.5)) as client:
        await client.say("a", "hello")
        await client.idle("a")
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.connect((client.name, client.port))
        raw.sendall(client.head("GET", "/threads/a/events?follow=1"))
        thread = client.app.threads.thread("local", "a")
        for number in range(60):
            # not over HTTP, because a snapshot of the thread would be so long that its reader might stall too
            await thread.say("long 1000")
            await over(thread)
            assert texts(await thread.messages())[-1].startswith("word ")
            if number % 5 == 0:
                await client.serves()
            if client.app.metrics.value(REFUSED, reason="ReaderStalled"):
                break
        assert client.app.metrics.value(REFUSED, reason="ReaderStalled") == 1
        while client.app.streams.count:
            await asyncio.sleep(0.02)
        raw.close()
        await client.serves()


async def test_a_reader_that_leaves_is_noticed_at_once_and_cancels_nothing(tmp_path: Path):
    async with serving(tmp_path) as client:
        await client.say("a", "call order")
        await client.asked("a")
        async with client.stream("GET", "/threads/a/events?follow=1"):
            assert client.app.streams.count == 1
        while client.app.streams.count:
            await asyncio.sleep(0.02)
        assert (await client.asked("a"))["name"] == "order"


@pytest.mark.virtual_time
async def test_a_client_is_not_refused_for_the_time_in_which_the_server_was_busy():
    """A client whose headers are late is refused, but time in which the server's event loop was blocked does not count."""
    loop: Any = asyncio.get_running_loop()
    transport, inner = Mock(**{"is_closing.return_value": False}), Mock()
    transport.get_extra_info.return_value = ("127.0.0.1", 1)
    Connection(Connections(Limits(header_seconds=10), MemoryMetrics()), inner).connection_made(transport)
    loop.advance(20)  # the loop stood still
    await asyncio.sleep(9)
    transport.write.assert_not_called()
    await asyncio.sleep(2)
    [refusal] = transport.write.call_args.args
    assert refusal.startswith(b"HTTP/1.1 408")


async def test_many_runs_stream_at_once(tmp_path: Path):
    """Sixty concurrent runs all complete. This is a smaller version of the load in `bench/serving.py`."""
    limits = Limits(streams=200, runs_per_principal=200, burst=1000)
    async with serving(tmp_path, limits=limits) as client:

        async def one(number: int) -> str:
            body = {"threadId": f"t{number}", "runId": "r", "tools": [], "context": [], "state": {}, "forwardedProps": {},
                    "messages": [{"id": "1", "role": "user", "content": "call look"}]}  # fmt: skip
            async with client.stream("POST", "/agent", body) as stream:
                return (await stream.all())[-1]["type"]

        assert set(await asyncio.gather(*map(one, range(60)))) == {"RUN_FINISHED"}
        assert client.app.streams.count == 0


async def test_idle_viewers_do_not_wake_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While nothing happens, sixty viewers cause fewer than sixty iterations of the event loop in two seconds.

    The loop does not wait for these seconds: its clock jumps to the next timer.
    """
    async with serving(tmp_path) as client, contextlib.AsyncExitStack() as stack:
        await client.say("a", "hello")
        await client.idle("a")
        for _ in range(60):
            stream = await stack.enter_async_context(client.stream("GET", "/threads/a/events?follow=1"))
            async for _, event in stream.events():
                if event["type"] == "MESSAGES_SNAPSHOT":
                    break
        turns: list[float] = []
        loop: Any = asyncio.get_running_loop()
        select, time = loop._selector.select, loop.time

        def jump(timeout: float) -> Any:
            ready = select(0)
            turns.append(0 if ready else timeout)
            return ready

        monkeypatch.setattr(loop, "time", lambda: time() + sum(turns))
        with monkeypatch.context() as patch:
            patch.setattr(loop._selector, "select", jump)
            await asyncio.sleep(2)
        assert len(turns) < 60


# --- options of the app ---


def test_a_rate_limit_allows_a_burst_and_refills():
    class Clock:
        at = 0.0

        def monotonic(self) -> float:
            return self.at

    clock: Any = Clock()
    rate = Rate(2.0, 3, clock=clock)
    assert [rate.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert rate.take("b") == 0
    clock.at = 0.5
    assert rate.wait("a") == 0
    assert rate.take("a") == 0
    assert rate.take("a") == 0.5


@pytest.mark.parametrize("limits", [Limits(), LIMITS])
def test_all_that_one_client_may_have_in_progress_leaves_room_for_others(limits: Limits):
    """It may have requests and streams as a principal, and requests to the paths that need no credentials."""
    assert 4 * limits.requests <= limits.connections
    assert limits.requests + limits.streams + limits.requests <= 0.8 * limits.connections


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans())))
def test_a_quota_is_never_exceeded(steps: list[tuple[str, bool]]):
    quota = Quota(2, "TooMany", "too many", 3)
    taken: list[str] = []
    for who, takes in steps:
        if takes:
            full = taken.count(who) >= 2 or len(taken) >= 3
            try:
                quota.take(who)
                taken.append(who)
                assert not full
            except RequestRefused:
                assert full
        elif who in taken:
            taken.remove(who)
            quota.give_back(who)
        assert quota.total == len(taken)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)  # fmt: skip


@given(VALUES)
def test_plain_json_is_read_as_it_is(value: Any):
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.lists(st.text(min_size=1) | st.integers(0, 99)))
def test_a_place_becomes_the_json_pointer_of_the_same_parts(parts: list[str | int]):
    found = pointer_of(location_of(tuple(parts)))
    read = [part.replace("~1", "/").replace("~0", "~") for part in found.split("/")[1:]]
    assert read == [str(part) for part in parts]


def test_tokens_that_are_weak_or_beside_a_hook_are_refused():
    for options in (
        {"token": "short"},
        {"token": "with a space in it"},
        {"token": TOKEN, "authenticate": print},
    ):
        with pytest.raises(DefinitionError):
            Principals(People(), limits=Limits(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, -1, float("inf"), float("nan"), True, "5", None])
def test_an_invalid_limit_is_refused_where_it_is_given(given: Any):
    for name in ("streams", "requests_per_second", "body_bytes"):
        with pytest.raises(DefinitionError, match=rf"{name}=.*positive"):
            Limits(**{name: given})


def test_an_address_for_all_is_shown_as_this_machine_s_own():
    with listen("0.0.0.0", 0) as listening:
        assert address_of(listening).startswith("http://127.0.0.1:")
        assert is_reachable(listening)
    with listen("127.0.0.1", 0) as listening:
        assert not is_reachable(listening)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_client_with_a_whole_network_is_counted_once(address: str, network: str):
    assert network_of(address) == network


# --- the command ---

APP = '''"""A desk that says hello."""
from handrail import Adapter, Prompt, ScriptedModel
prompt = Prompt("desk", "Help.")
other = Prompt("other", "Help.")
adapter = Adapter(ScriptedModel(lambda request: "hello"))
'''

DEAF = """
import asyncio, contextlib

class Deaf(ScriptedModel):
    async def stream(self, request, /):
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        yield

adapter = Adapter(Deaf([]))
"""
"""Code that gives the app a model that never answers and can't be cancelled."""


def command(folder: Path, *given: str, **env: str) -> Program:
    kept = {name: value for name, value in os.environ.items() if name != "HANDRAIL_TOKEN"}
    return warm_python.start(["-m", "handrail", "serve", *given], cwd=folder, env={**kept, **env})


@contextlib.contextmanager
def started(folder: Path, *given: str, **env: str) -> Generator[tuple[Program, str]]:
    """Start `handrail serve` on a free port, and yield the program and the first line that it prints."""
    process = command(folder, *given, "--port", "0", **env)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, line
    finally:
        process.close()


def client_of(line: str) -> Client:
    found = re.search(r"http://\S+?/", line)
    assert found is not None
    return Client(found[0], None, BEARER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("app", "name"),
    [
        ("desk.py", "desk"),
        ("desk", "desk"),
        ("desk:other", "other"),
        ("desk.py:other", "other"),
        ("apps/json.py", "desk"),
    ],
)
def test_the_command_serves_a_module(tmp_path: Path, app: str, name: str):
    (tmp_path / "apps").mkdir()
    for file in ("desk.py", "apps/json.py"):
        (tmp_path / file).write_text(APP)
    with started(tmp_path, app, HANDRAIL_TOKEN=TOKEN) as (process, line):
        assert line.startswith(f"{name} is at http://127.0.0.1:")
        asyncio.run(client_of(line).serves())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "")
        assert out.startswith("Stopping")


def test_the_command_serves_workers_with_a_token_and_parks(tmp_path: Path):
    folder = tmp_path / "team"
    folder.mkdir()
    (tmp_path / "model.py").write_text(
        "from handrail import ScriptedModel\nfrom handrail.models.scripted import Reply\n"
        "slow = ScriptedModel(lambda request: Reply('hello', delay=0 if 'hello' in request.messages[-1].text else 60))\n"
    )
    (folder / "main.md").write_text("---\nname: main\ndescription: Helps.\n---\nHelp.\n")
    with started(tmp_path, "team/main", "--model", "model:slow", HANDRAIL_TOKEN=TOKEN, PYTHONPATH=".") as (process, line):  # fmt: skip
        assert line.startswith("main is at ")
        assert TOKEN not in line
        client = client_of(line)
        asyncio.run(client.serves())
        asyncio.run(client.say("slow", "take your time"))
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        assert out.startswith("Stopping, parking 1 run.")


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path):
    (tmp_path / "desk.py").write_text(APP + DEAF)
    with started(tmp_path, "desk.py", HANDRAIL_TOKEN=TOKEN) as (process, line):
        asyncio.run(client_of(line).say("a", "take your time"))
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Stopping, parking 1 run.")
        process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
        assert process.returncode == 130


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nothing"], "neither a folder, a worker's file nor a module"),
        (["nothing.py"], "there is no file 'nothing.py'"),
        (["desk:none"], "no Agent or Prompt called 'none'"),
        (["desk.py", "--token", "a-long-token-in-arguments"], "No such option: --token"),
        (["desk.py", "--token-file", "desk.py"], "others may read it. Run: chmod 600 desk.py"),
        (["desk.py", "--token-file", "none"], "Give a file with the token in it"),
        (["desk.py", "--token-file", "token", "--files", "."], "which tools may read and change"),
        (
            ["desk.py", "--tls-key", "work/x/key", "--files", "work/{principal}"],
            "tools may read and change",
        ),
        (["desk.py", "--files", "work/{principal}"], "'work' is not a folder"),
        (["desk.py", "--tls-cert", "desk.py"], "Give both"),
        (
            ["desk.py", "--tls-cert", "desk.py", "--tls-key", "desk.py"],
            "can't be used as a certificate and its key",
        ),
        (["desk.py", "--host", "no.such.host.invalid"], "can't listen on no.such.host.invalid"),
        (["desk.py", "--approve", "later"], "is not one of ask, all, strict"),
        (["desk.py", "--journal", "/dev/null/x"], "--journal"),
    ],
)
def test_what_can_t_be_served_says_why(tmp_path: Path, given: list[str], words: str):
    (tmp_path / "desk.py").write_text(APP)
    process = command(tmp_path, *given)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in err) == (2, False)
    assert words in " ".join(err.split())


def test_a_port_that_is_taken_is_named(tmp_path: Path):
    (tmp_path / "desk.py").write_text(APP)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = command(tmp_path, "desk.py", "--port", str(port))
        _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert f"127.0.0.1:{port} is in use" in err
    assert f"--port {port + 1}" in err


def test_a_missing_extra_is_named(tmp_path: Path):
    (tmp_path / "desk.py").write_text(APP)
    code = (
        "import sys, importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'uvicorn' else find(name, *more)\n"
        "from handrail.cli import main\nsys.argv = ['handrail', 'serve', 'desk.py']\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 2
    assert "pip install 'handrail[serve]'" in done.stderr
