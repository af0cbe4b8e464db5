"""An app without a token, under any ASGI server: only clients on the same machine have access."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handrail import SqliteJournal
from handrail.serve import asgi
from support.serving import TOKEN, source

HERE = ("127.0.0.1", 8600)
NEAR = ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "::1%lo"]
FAR = [
    "192.0.2.7",
    "10.0.0.1",
    "0.0.0.0",
    "::",
    "2001:db8::7",
    "::ffff:192.0.2.7",
    "fe80::1%eth0",
    "testclient",
    "",
]


async def asked(
    folder: Path, client: Any, server: Any = HERE, path: str = "/about", *, more: Any = (), **options: Any
) -> tuple[int, Any]:
    """Return the app's response to a connection between these addresses."""
    journal = SqliteJournal(folder / "runs.db")
    app = asgi(source(), journal=journal, **options)
    headers = [(b"host", b"127.0.0.1:8600"), *more]
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": headers, "client": client, "server": server, "scheme": "http"}  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    journal.close()
    return sent[0]["status"], json.loads(b"".join(each.get("body", b"") for each in sent[1:]))


@pytest.mark.parametrize("address", NEAR)
async def test_its_own_machine_comes_in(tmp_path: Path, address: str):
    status, told = await asked(tmp_path, (address, 50_000), (address, 8600))
    assert (status, told["principal"]) == (200, "local")


@pytest.mark.parametrize("client", [*[(address, 50_000) for address in FAR], None])
async def test_nobody_else_does(tmp_path: Path, client: Any):
    for path in ("/about", "/threads", "/metrics"):
        status, told = await asked(tmp_path, client, path=path)
        assert (status, told["error"]["kind"]) == (403, "TokenNeeded")
        assert "token=" in told["error"]["message"]
        assert "authenticate=" in told["error"]["message"]
    status, told = await asked(tmp_path, client, path="/health")
    assert (status, told) == (200, {"status": "ok"})


async def test_a_proxy_that_says_who_it_is_for_makes_nobody_near(tmp_path: Path):
    """A client address that a proxy reports as local gives no access if the server's own address is not local."""
    status, told = await asked(tmp_path, ("127.0.0.1", 50_000), ("192.0.2.1", 8600), hosts=["127.0.0.1"])
    assert (status, told["error"]["kind"]) == (403, "TokenNeeded")


async def test_where_it_was_said_who_comes_in_that_counts(tmp_path: Path):
    far = ("192.0.2.7", 50_000)
    bearer = [(b"authorization", f"Bearer {TOKEN}".encode())]
    assert (await asked(tmp_path, far, token=TOKEN, more=bearer))[0] == 200
    assert (await asked(tmp_path, far, token=TOKEN))[0] == 401
    status, told = await asked(tmp_path, far, authenticate=lambda request: "everybody")
    assert (status, told["principal"]) == (200, "everybody")
