"""Servers that are killed while they send a notification: real processes, a real receiver, and `kill -9`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from handrail.journal.any_journal import open_by_name
from handrail.notify import Address
from handrail.serve.app import asgi
from handrail.serve.notifier import _decode
from handrail.serve.people import People
from support import PATIENCE, postgres
from support.serving import source

SERVER = """
import asyncio, os, sys
from handrail import Notify
from handrail.journal.any_journal import open_by_name
from handrail.serve import notifier
from handrail.serve.app import asgi
from support.serving import source

notifier.SEND_SECONDS, notifier._LOOK_SECONDS = 0.5, 0.05

async def serve():
    settings = Notify(os.environ["HOOK"], after=0.001, every=0.001)
    app = asgi(source(), journal=open_by_name(os.environ["JOURNAL"]), token="x" * 40, notify=settings, public_url="https://desk.example/")
    await app.start()
    await asyncio.Event().wait()

asyncio.run(serve())
"""
POSTGRES = pytest.param("postgres", marks=pytest.mark.once)


@pytest.fixture(params=["sqlite", POSTGRES])
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    return str(tmp_path / "runs.db") if request.param == "sqlite" else postgres.new_url()


async def test_a_message_whose_server_was_killed_arrives_with_the_same_id(name: str):
    """Two servers at a time, killed before they know that the receiver has the message. The next two send it again, once."""
    servers: list[subprocess.Popen[bytes]] = []
    requests: list[tuple[dict[str, str], bytes]] = []
    arrived = asyncio.Event()

    def start(port: int) -> None:
        hook = f"http://127.0.0.1:{port}/hook"
        env = {**os.environ, "JOURNAL": name, "HOOK": hook, "PYTHONPATH": str(Path(__file__).parents[1])}
        servers.extend(subprocess.Popen([sys.executable, "-c", SERVER], env=env) for _ in range(2))

    def kill() -> None:
        for each in servers:
            each.kill()
            each.wait()
        servers.clear()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.strip().split("\r\n")[1:]
            headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines)}
            requests.append((headers, await reader.readexactly(int(headers["content-length"]))))
            if len(requests) <= 2:
                kill()
                start(server.sockets[0].getsockname()[1])
            else:
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                await writer.drain()
                arrived.set()
        writer.transport.abort()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with contextlib.closing(open_by_name(name)) as journal:
        app = asgi(source(), journal=journal, people=People(), token="x" * 40, park_after=0)
        await app.start()
        await app.threads.thread("local", "t").say('call pay {"amount": 5}')
        while not await journal.questions.open():
            await asyncio.sleep(0.01)
        await app.stop()
        try:
            start(port)
            async with asyncio.timeout(PATIENCE):
                await arrived.wait()
                receiver = Address(f"http://127.0.0.1:{port}/hook").receiver(journal.key)
                while _decode((await journal.outbox.read([receiver]))[receiver]).message is not None:
                    await asyncio.sleep(0.01)
        finally:
            kill()
            server.close()
        assert len({headers["webhook-id"] for headers, _ in requests}) == 1
        assert len({body for _, body in requests}) == 1
        secret = Address(f"http://127.0.0.1:{port}/hook").secret(journal.key)
        assert Webhook(secret).verify(requests[-1][1], requests[-1][0])["type"] == "question.opened"
