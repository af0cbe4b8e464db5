"""Third-party model servers: they start, answer on their wires, and stop. The mock servers record requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from support import PATIENCE, importing_support
from support.servers import (
    CAN,
    CHAT,
    GEMINI,
    MESSAGES,
    RESPONSES,
    Aimock,
    Embedded,
    Llmock,
    Server,
    ServerFailed,
    aimock,
    embedded,
    llmock,
    running,
)

pytestmark = pytest.mark.once

WIRES = (CHAT, RESPONSES, MESSAGES)
STARTS = {"aimock": aimock, "llmock": llmock, "embedded": embedded}


def ask(
    server: Server, wire: str, text: str = "What is the capital of France?", **more: Any
) -> tuple[int, str]:
    """Send one request in the wire's format, and return the status and the raw body."""
    message = {"role": "user", "content": text}
    body: dict[str, Any] = {"model": "smollm2", **more}
    if wire == CHAT:
        url, body = f"{server.openai_url}/chat/completions", {"messages": [message], **body}
    elif wire == RESPONSES:
        url, body = f"{server.openai_url}/responses", {"input": [message], **body}
    else:
        url = f"{server.anthropic_url}/v1/messages"
        body = {"messages": [message], "max_tokens": 16, **body}

    async def send() -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, json=body) as response,
        ):
            return response.status, await response.text()

    return asyncio.run(send())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("wire", WIRES)
def test_aimock_answers_by_its_fixtures(aimock_server: Aimock, wire: str):
    """aimock returns its fixture's text, whole and streamed, and records the requests."""
    aimock_server.script([{"match": {"userMessage": "capital"}, "response": {"content": "Paris."}}])
    for stream in (False, True):
        status, body = ask(aimock_server, wire, stream=stream)
        assert status == 200
        assert "Paris." in body
    assert [seen.status for seen in aimock_server.requests()] == [200, 200]


@pytest.mark.parametrize("wire", WIRES)
def test_llmock_plays_its_script(llmock_server: Llmock, wire: str):
    """llmock plays a scripted failure and then the reply, and its verdict on the client is positive."""
    fail = {"type": "fail", "status": 429}
    llmock_server.script([fail, {"type": "reply", "text": "Paris."}])
    assert [ask(llmock_server, wire)[0] for _ in range(2)] == [429, 200]
    first, second = llmock_server.requests()
    assert (first.raw["retry_after"], first.status, second.status) == (None, 429, 200)
    assert llmock_server.verdict()["passed"]
    llmock_server.script([{**fail, "retry_after": 2}])
    ask(llmock_server, wire)
    assert [seen.raw["retry_after"] for seen in llmock_server.requests()] == [2]
    assert llmock_server.pending() == []


@pytest.mark.parametrize("wire", WIRES)
def test_llmock_finds_fault_with_a_client_that_takes_a_part_for_the_whole(llmock_server: Llmock, wire: str):
    """llmock's verdict blames a client that takes a truncated stream for a complete answer."""
    llmock_server.script([{"type": "stream_fault", "kind": "truncate", "after_chunks": 2}])
    assert ask(llmock_server, wire, stream=True)[0] == 200
    assert [finding["code"] for finding in llmock_server.verdict()["findings"]] == [
        "truncated_stream_accepted"
    ]


@pytest.mark.parametrize("wire", WIRES)
def test_the_embedded_model_answers(embedded_server: Embedded, wire: str):
    """The embedded model answers on each wire, and is idle afterwards."""
    status, body = ask(embedded_server, wire)
    assert status == 200
    assert "Paris" in body
    assert not embedded_server.busy()


@pytest.mark.parametrize("name", STARTS)
def test_a_server_ends_with_its_block(name: str):
    """A server's process has ended when its `with` block is left, even through an exception."""
    start: AbstractContextManager[Server] = STARTS[name]()
    with contextlib.suppress(KeyboardInterrupt), start as server:
        assert is_running(server.pid)
        raise KeyboardInterrupt
    assert not is_running(server.pid)


@pytest.mark.parametrize("name", STARTS)
def test_a_server_ends_with_the_process_that_started_it(name: str):
    """If the process that started a server is killed, the server stops too."""
    code = f"from support import servers\nwith servers.{name}() as server:\n    print(server.url, flush=True)\n    input()"
    command = [sys.executable, "-c", code]
    environment = importing_support()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        address = urlsplit(owner.stdout.readline().decode().strip())
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
            owner.kill()
            with contextlib.suppress(ConnectionResetError):  # a reset also means that the server has stopped
                assert connection.recv(1) == b""


def test_a_server_that_does_not_start_says_why():
    """If a server does not start, the error has the launcher's output. If the program is missing, it says what to run."""
    for code, words in (
        ("exit('no such model')", r"ended without printing its address:\nno such model"),
        ("print('loading'); input()", "printed 'loading', which is not its address"),
    ):
        with pytest.raises(ServerFailed, match=words), running(sys.executable, "-uc", code):
            pass
    with pytest.raises(ServerFailed, match="scripts/components"), running("./no-such-program"):
        pass


def test_a_script_that_is_refused_is_an_error(aimock_server: Aimock, llmock_server: Llmock):
    """A mistake in a script raises an error with the server's reason."""
    with pytest.raises(ServerFailed, match="Validation failed"):
        aimock_server.script([{"match": {}, "response": {"toolCalls": [{"name": "f", "arguments": "{"}]}}])
    with pytest.raises(ServerFailed, match="Unknown behaviour"):
        llmock_server.script([{"type": "sulk"}])


def test_every_case_has_a_server_for_every_wire():
    """Every case of the contract can be played on every wire by some third-party server, except for two cases on Gemini's."""
    for case, servers in CAN.items():
        whole_calls = {"arguments in pieces", "malformed arguments"}  # no server plays these on Gemini's wire
        wires = set(WIRES) if case in whole_calls else {*WIRES, GEMINI}
        assert set().union(*servers.values()) == wires, case
