"""Tests for sending, over real connections: signed webhooks as their reference library reads them, and real apprise.

Receivers are on loopback. Some of them are down, hang, redirect, or never end.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from handrail.errors import DefinitionError
from handrail.notify import Address, sender
from handrail.notify.message import Item, Message, News, body_of, words_of
from handrail.notify.sender import NetworkSender, check
from support.serving import Still

KEY = b"k" * 32
NOW = Still().now()
PAGE = "https://desk.example/"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def item(id: str = "run?1", tool: str = "pay") -> Item:
    return Item(id, "desk", tool, f"{PAGE}#/q/{id}", NOW)


def message(*news: News, waiting: int = 1) -> Message:
    body = body_of(news or (News("opened", item()),), at=NOW, waiting=waiting, page=PAGE)
    return Message("msg_1", body)


class Receiver:
    """An HTTP server that records requests and answers each with these bytes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.requests.append((first, headers, body))
            writer.write(self.answer)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass


@asynccontextmanager
async def receiving(
    answer: bytes = b"HTTP/1.1 204 No Content\r\n\r\n", handle: Answer | None = None
) -> AsyncGenerator[Receiver]:
    receiver = Receiver(answer)
    handling: set[asyncio.Task[None]] = set()

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        try:
            await (handle or receiver.handle)(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(handled, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    receiver.url = f"http://{host}:{port}/hook?token=s3cret"
    try:
        yield receiver
    finally:
        server.close()
        await asyncio.gather(*handling, return_exceptions=True)
        await asyncio.sleep(0)


async def test_a_webhook_is_signed_as_its_reference_library_expects():
    async with receiving(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n{}") as receiver:
        address = Address(receiver.url)
        assert await NetworkSender(KEY).send(address, message()) == ""
    [(first, headers, body)] = receiver.requests
    assert first == "POST /hook?token=s3cret HTTP/1.1"
    assert headers["webhook-id"] == "msg_1"
    event = Webhook(address.secret(KEY)).verify(body, headers)
    assert event["type"] == "question.opened"
    with pytest.raises(WebhookVerificationError):
        Webhook(address.secret(KEY)).verify(body.replace(b"pay", b"sey"), headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(Address(f"{receiver.url}2").secret(KEY)).verify(body, headers)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 500 Oh\r\n\r\n", "500"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/internal\r\n\r\n",
            "redirects are not followed",
        ),
        (b"HTTP/1.1 307 Again\r\nLocation: http://169.254.169.254/\r\n\r\n", "redirects are not followed"),
        (b"", "IncompleteReadError"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "not HTTP"),
        (b"x" * 100_000, "not HTTP"),
    ],
)
async def test_a_receiver_that_does_not_accept(answer: bytes, problem: str):
    async with receiving(answer) as receiver:
        told = await NetworkSender(KEY).send(Address(receiver.url), message())
    assert problem in told
    assert "s3cret" not in told
    assert len(receiver.requests) == 1


async def test_a_receiver_that_is_not_there():
    async with receiving() as receiver:
        pass
    told = await NetworkSender(KEY).send(Address(receiver.url), message())
    assert "can't be reached" in told
    told = await NetworkSender(KEY).send(Address("https://no-such-host.invalid/s3cret"), message())
    assert "can't be reached" in told
    assert "s3cret" not in told


async def test_an_answer_without_end_is_not_read():
    """The status is enough. The connection is closed whatever else comes."""
    closed = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        except ConnectionError:
            closed.set()

    async with receiving(handle=endless) as receiver:
        assert await NetworkSender(KEY).send(Address(receiver.url), message()) == ""
        await closed.wait()


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 103 Early Hints\r\n"])
async def test_a_receiver_that_hangs_is_given_up(beginning: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sender, "_WEBHOOK_SECONDS", 0.05)
    hang = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(beginning)
        await hang.wait()

    async with receiving(handle=silent) as receiver:
        assert await NetworkSender(KEY).send(Address(receiver.url), message()) == "it did not answer in time"
        hang.set()


# --- apprise -------------------------------------------------------------------------------------------


def through_apprise(receiver: Receiver) -> Address:
    return Address(receiver.url.replace("http://", "json://"))


async def test_apprise_tells_the_same_in_words(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    async with receiving(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as receiver:
        address = through_apprise(receiver)
        await check(address)
        assert receiver.requests == [], "checking sends nothing"
        closed = News("closed", item(), "answered", "fay")
        assert await NetworkSender(KEY).send(address, message()) == ""
        assert await NetworkSender(KEY).send(address, message(closed)) == ""
    told: list[Any] = [json.loads(body) for _, _, body in receiver.requests]
    assert told[0]["title"] == "desk waits for an answer"
    assert told[0]["message"] == f"pay waits for an answer.\n{PAGE}#/q/run?1"
    assert told[1]["message"] == "pay: answered by fay"
    assert "s3cret" not in caplog.text


async def test_apprise_follows_no_redirect_and_its_failure_is_said():
    async with receiving(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as internal:
        location = internal.url.encode()
        async with receiving(
            b"HTTP/1.1 307 Go\r\nContent-Length: 0\r\nLocation: %s\r\n\r\n" % location
        ) as receiver:
            told = await NetworkSender(KEY).send(through_apprise(receiver), message())
    assert "refused" in told
    assert (len(receiver.requests), internal.requests) == (1, [])


async def test_apprise_is_killed_if_it_takes_too_long(monkeypatch: pytest.MonkeyPatch):
    hang, asked = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await hang.wait()

    async with receiving(handle=silent) as receiver:
        address = Address(receiver.url.replace("http://", "json://") + "&rto=300")
        sending = asyncio.ensure_future(NetworkSender(KEY).send(address, message()))
        await asked.wait()
        sending.cancel()
        assert isinstance((await asyncio.gather(sending, return_exceptions=True))[0], asyncio.CancelledError)
        hang.set()
    monkeypatch.setattr(sender, "_APPRISE_SECONDS", 0.01)
    assert await NetworkSender(KEY).send(address, message()) == "it did not answer in time"


async def test_a_url_that_apprise_does_not_know_is_refused():
    with pytest.raises(DefinitionError, match="apprise can't use this URL"):
        await check(Address("nosuch://s3cret"))
    assert (
        await NetworkSender(KEY).send(Address("nosuch://s3cret"), message()) == "apprise can't use this URL"
    )


# --- words ---------------------------------------------------------------------------------------------


def test_a_summary_lists_a_hundred_questions_and_counts_the_others():
    news = [News("opened", item(f"run?{number}", f"tool{number % 7}")) for number in range(999)]
    news.append(News("closed", item("run?999"), "timed out"))
    body = message(*news, waiting=1500).body
    data = json.loads(body)["data"]
    assert (data["opened"], data["closed"], data["waiting"], len(data["questions"])) == (999, 1, 1500, 100)
    title, text = words_of(body)
    assert title == "1500 questions wait for an answer"
    assert text.count("\n") == 2
    assert text.endswith(f"1 question closed.\n{PAGE}")


@pytest.mark.parametrize(
    ("news", "words"),
    [
        (News("reminder", item(tool="")), "a question still waits for an answer."),
        (News("closed", item(), "timed out"), "pay: timed out"),
        (News("closed", item(), "answered", "fay\x1b[2J"), r"pay: answered by fay\x1b[2J"),
    ],
)
def test_words(news: News, words: str):
    assert words_of(message(news).body)[1].splitlines()[0] == words
