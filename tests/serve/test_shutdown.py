"""Tests for a shutdown while clients are connected: it is prompt, completes the streams, and logs no error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from handrail import SqliteJournal
from handrail.serve import Limits, asgi
from handrail.serve.feed import EventStream, Feed, Streams, follow
from handrail.serve.lifespan import on_stop_signal
from handrail.serve.metrics import EVENTS_SENT, MemoryMetrics
from support import PATIENCE, warm_python
from support.reserved_port import reserved_port
from support.serving import BEARER, TOKEN, Client, serving, source

APP = """
from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal
from handrail.serve import PromptSource, asgi

adapter = Adapter(ScriptedModel(lambda request: "hello"))
app = asgi(
    PromptSource(Prompt("desk", "Help."), adapter), journal=SqliteJournal("runs.db"), token="a-token-that-nobody-guesses"
)
"""


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


async def _until_served(client: Client) -> None:
    while True:
        try:
            assert (await client.ask("GET", "/health")).status == 200
            return
        except OSError:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_another_server_stops_although_a_client_is_connected(tmp_path: Path, number: signal.Signals):
    """Under uvicorn's own command, the app stops on a signal, and completes the stream that a client follows."""
    (tmp_path / "desk.py").write_text(APP)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        process = warm_python.start(
            ["-m", "uvicorn", "desk:app", "--port", str(port)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": "."},
        )
        stack.callback(process.close)
        client = Client(f"http://127.0.0.1:{port}", None, BEARER)  # type: ignore[arg-type]
        await _until_served(client)
        await client.say("a", "hello")
        await client.idle("a")
        async with client.stream("GET", "/threads/a/events?follow=1") as stream:
            process.send_signal(number)
            async with asyncio.timeout(PATIENCE):
                await stream.all()  # reading to the end succeeds only if the response is complete
        _, log = await asyncio.to_thread(process.communicate, timeout=300)
    assert "Application shutdown complete." in log
    assert "Exception in ASGI application" not in log
    assert "exceeded" not in log


async def test_a_server_that_cancels_a_stream_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A server that is stopped without a signal cancels its streams after a second, and the app logs no error."""
    journal = SqliteJournal(tmp_path / "runs.db")
    app = asgi(source(), journal=journal, token=TOKEN)
    config = uvicorn.Config(
        app,
        port=0,
        lifespan="on",
        log_config=None,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=300,
        access_log=False,
    )
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    going = asyncio.create_task(server._serve([listening]))  # pyright: ignore[reportPrivateUsage]  # without signals
    client = Client(f"http://127.0.0.1:{port}", app, BEARER)
    await _until_served(client)
    await client.say("a", "hello")
    await client.idle("a")
    async with client.stream("GET", "/threads/a/events?follow=1") as stream:
        server.should_exit = True
        await stream.all()
    await going
    journal.close()
    assert [each for each in errors(caplog) if "exceeded" not in each] == []


async def test_a_reader_that_reads_nothing_does_not_delay_the_shutdown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    async with serving(tmp_path) as client:
        await client.say("a", "hello")
        await client.idle("a")
        raw.connect((client.name, client.port))
        raw.sendall(client.head("GET", "/threads/a/events?follow=1"))
        for _ in range(60):
            sent = client.app.metrics.value(EVENTS_SENT)
            await client.say("a", "long 1000")
            await client.idle("a")
            await asyncio.sleep(0.1)
            if sent == client.app.metrics.value(EVENTS_SENT):
                break
        else:
            raise AssertionError("the server never stopped sending")
    assert errors(caplog) == []
    raw.close()


async def test_a_stream_that_opens_during_shutdown_is_ended_too():
    streams = Streams(Limits(), MemoryMetrics())
    stream = EventStream(streams, streams.take("anna"), follow(Feed("boot"), 0))
    streams.close()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(PATIENCE):
        await stream({"type": "http"}, asyncio.Future, send)
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert streams.count == 0


async def test_a_signal_reaches_the_earlier_handler_and_the_app():
    heard: list[object] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    ours = signal.getsignal(signal.SIGTERM)
    try:
        with on_stop_signal(lambda: heard.append("the app")):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0)
        assert heard == [signal.SIGTERM, "the app"]
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_signal_that_nobody_listens_for_is_left_alone():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with on_stop_signal(lambda: None):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
