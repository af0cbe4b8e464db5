"""`Cassette` records real traffic, without secrets, and replays it without a server or a key."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import (
    Adapter,
    AnthropicModel,
    Attachment,
    GeminiModel,
    OpenAIModel,
    Prompt,
    PromptEvaluationError,
    tool,
)
from handrail.events import TextDelta
from handrail.run.adapter import Retry
from handrail.testing import Cassette, CassetteError
from handrail.testing.cassette import (
    Secret,
    _difference,  # pyright: ignore[reportPrivateUsage]
)
from support.provider_streams import DONE, WIRES, body_of
from support.raw_server import delta, raw_server, streamed

KEY = "sk-very-secret-0123456789"
CALL: dict[str, dict[bool, Any]] = {
    "chat": {
        False: {
            "choices": [
                {
                    "message": {
                        "content": None,
                        "tool_calls": [
                            {"id": "c1", "function": {"name": "look", "arguments": '{"where": "there"}'}}
                        ],
                    },
                    "finish_reason": "tool_calls",
                }
            ]
        }
    }
}


@tool(effect="pure")
async def look(where: str = "here") -> str:
    """Look somewhere."""
    return f"seen {where}"


PROMPT = Prompt("streams", "Answer.", tools=[look])


@pytest.fixture(autouse=True)
def no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "HANDRAIL_CASSETTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CASSETTE_TEST_KEY", KEY)


def a_model(wire: str, url: str) -> Any:
    if wire == "messages":
        return AnthropicModel("m", key_variable="CASSETTE_TEST_KEY", base_url=url)
    if wire == "gemini":
        return GeminiModel("m", key_variable="CASSETTE_TEST_KEY", base_url=url)
    api: Any = wire
    return OpenAIModel("m", api=api, key_variable="CASSETTE_TEST_KEY", base_url=url)


def response(body: bytes, stream: bool, status: str = "200 OK", length: int | None = None) -> bytes:
    kind = "text/event-stream" if stream else "application/json"
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nx-request-id: r-{KEY}\r\ncontent-length: {size}\r\n\r\n"
    return head.encode() + body


async def ask(wire: str, url: str, message: str = "Where?", stream: bool = False, attempts: int = 1) -> str:
    adapter = Adapter(a_model(wire, url), retry=Retry(attempts=attempts, first_wait=0.001))
    if stream:
        return (await adapter.stream(PROMPT, message).response).text
    return (await adapter.evaluate(PROMPT, message)).text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wire", WIRES)
async def test_a_recording_replays_without_a_server_or_a_key(
    wire: str, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deep" / "hello.json"
    async with raw_server(response(body_of([DONE[wire][stream]], stream), stream)) as server:
        with Cassette(file) as recorded:
            said = await ask(wire, server.url, stream=stream)
    assert not recorded.replays
    assert KEY not in file.read_text()
    monkeypatch.delenv("CASSETTE_TEST_KEY")
    with Cassette(file) as replayed:
        assert await ask(wire, server.url, stream=stream) == said
    assert replayed.replays


async def test_a_tool_loop_is_replayed_in_order(tmp_path: Path) -> None:
    file = tmp_path / "loop.json"
    answers = [
        response(json.dumps(each).encode(), False) for each in (CALL["chat"][False], DONE["chat"][False])
    ]
    async with raw_server(*answers) as server:
        with Cassette(file):
            said = await ask("chat", server.url)
        assert len(server.bodies) == 2
    with Cassette(file):
        assert await ask("chat", server.url) == said
    assert "seen there" in file.read_text()


async def recorded(file: Path, message: str = "Where?", body: bytes | None = None, **options: Any) -> str:
    """Record one request, and return the address of its server, which has stopped by then."""
    async with raw_server(response(body or body_of([DONE["chat"][False]], False), False)) as server:
        with Cassette(file, mode="record", **options):
            await ask("chat", server.url, message)
        return server.url


async def test_a_changed_request_names_its_first_difference(tmp_path: Path) -> None:
    url = await recorded(tmp_path / "a.json")
    with pytest.raises(CassetteError) as failed, Cassette(tmp_path / "a.json"):
        await ask("chat", url, "When?")
    said = str(failed.value)
    assert 'recorded "Where?", now "When?"' in said
    assert "request 1 is not in" in said
    assert "body.messages[1].content" in said


async def test_what_differs_in_consequence_is_told_as_the_first_difference(tmp_path: Path) -> None:
    """After a request that was not recorded, the error names that request: at a later one, and at the end if nothing else failed."""
    async with raw_server(*[response(body_of([DONE["chat"][False]], False), False)] * 2) as server:
        with Cassette(tmp_path / "a.json"):
            await ask("chat", server.url)
            await ask("chat", server.url, "And then?")
    cassette = Cassette(tmp_path / "a.json")
    cassette.__enter__()
    for message in ("When?", "It failed."):
        with pytest.raises(CassetteError, match=r'request 1 .* now "When\?"'):
            await ask("chat", server.url, message)
    with pytest.raises(CassetteError, match=r'request 1 .* now "When\?"'):
        cassette.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("test", "failed"),
    [
        ("agent.run('When?').wait()", 'now "When?"'),
        ("assert agent.run('When?').wait()", 'now "When?"'),
        ("assert 1 == 2", "assert 1 == 2"),
    ],
)
async def test_a_test_that_fails_is_told_once(tmp_path: Path, test: str, failed: str) -> None:
    """A test that has failed is not also told by its fixture that requests were not made."""
    url = await recorded(tmp_path / "cassettes" / "test_app" / "test_it.json")
    (tmp_path / "conftest.py").write_text("from handrail.testing.fixtures import cassette\n")
    (tmp_path / "test_app.py").write_text(
        "from handrail import Agent, OpenAIModel\n"
        f"agent = Agent(OpenAIModel('m', key_variable='CASSETTE_TEST_KEY', base_url={url!r}), 'Answer.')\n"
        f"def test_passes():\n    pass\n"
        f"def test_it(cassette):\n    {test}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1].startswith("1 failed, 1 passed in "), done.stdout
    assert failed in done.stdout


async def test_a_request_too_many_and_one_too_few_are_errors(tmp_path: Path) -> None:
    url = await recorded(tmp_path / "a.json")
    too_many = "all of its 1 recorded requests were already answered"
    with Cassette(tmp_path / "a.json"):
        await ask("chat", url)
        with pytest.raises(CassetteError, match=too_many):
            await ask("chat", url)
    with pytest.raises(CassetteError, match="of which 1 were not made"), Cassette(tmp_path / "a.json"):
        pass


async def test_an_error_in_the_block_is_not_hidden_by_requests_that_were_not_made(tmp_path: Path) -> None:
    await recorded(tmp_path / "a.json")
    with pytest.raises(ZeroDivisionError), Cassette(tmp_path / "a.json"):
        _ = 1 / 0


async def test_configured_secrets_are_replaced_everywhere(tmp_path: Path) -> None:
    secret = 'pass"word\nwith é'
    body = body_of([DONE["chat"][False]], False).replace(
        b"Done", json.dumps(f"it is {secret}")[1:-1].encode()
    )
    url = await recorded(tmp_path / "a.json", f"It is {secret}", body, secrets=[secret])
    text = (tmp_path / "a.json").read_text()
    for form in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
        assert form not in text
    assert KEY not in text
    with Cassette(tmp_path / "a.json", secrets=[secret]):
        await ask("chat", url, f"It is {secret}")


async def test_a_secret_that_comes_in_pieces_is_never_written(tmp_path: Path) -> None:
    events = [delta(content=KEY[:9]), delta(content=KEY[9:]), DONE["chat"][True]]
    async with raw_server(response(body_of(events, True), True)) as server:
        cassette = Cassette(tmp_path / "a.json")
        with pytest.raises(CassetteError, match="the answer to request 1 contains a secret in"), cassette:
            await ask("chat", server.url, stream=True)
    assert list(tmp_path.iterdir()) == []


ODD = 's3cr3t-"pässwörd/+&=x'
"""A secret that looks different in JSON, in an address and in base64."""
_CALL = json.dumps({"where": ODD})
BEGUN, REST = _CALL[:20], _CALL[20:]


@pytest.mark.parametrize(
    "form",
    [
        ODD,
        json.dumps(ODD),
        json.dumps(json.dumps(ODD)),
        json.dumps(ODD, ensure_ascii=False).replace("/", "\\/"),
        quote(ODD, safe=""),
        quote(ODD, safe="").lower(),
        quote_plus(ODD),
        *[base64.b64encode(b"%PDF" + b"." * more + ODD.encode() + b" end").decode() for more in range(3)],
        base64.urlsafe_b64encode(b"?>" + ODD.encode()).decode().rstrip("="),
        "data:image/png;base64," + base64.b64encode(ODD.encode()).decode(),
    ],
)
def test_a_secret_is_found_in_every_form(form: str) -> None:
    """A secret is replaced in each encoding, and the text around it stays."""
    clean = Secret(ODD).replaced_in(f"before {form} after")
    assert clean.startswith("before ")
    assert clean.endswith(" after")
    assert form not in clean
    assert Secret(ODD).replaced_in(clean) == clean
    other = Secret("another-secret").replaced_in(f"before {form} after")
    assert other == f"before {form} after"


async def test_a_secret_inside_of_a_file_is_not_written(tmp_path: Path) -> None:
    """A secret in an attachment's bytes or an address is replaced, so a replay with a different secret matches."""

    async def send(url: str, secret: str) -> None:
        attached = Attachment(b"%PDF-1.4 " + secret.encode() + b" end", "a.pdf")
        model = OpenAIModel("m", base_url=f"{url}/{quote(secret, safe='')}", key_variable=None)
        await Adapter(model).evaluate(PROMPT, "Read.", attachments=[attached])

    file = tmp_path / "a.json"
    async with raw_server(response(body_of([DONE["chat"][False]], False), False)) as server:
        with Cassette(file, mode="record", secrets=[ODD]):
            await send(server.url, ODD)
    assert base64.b64encode(b"%PDF-1.4 [secret] end").decode() in file.read_text()
    assert "/[secret]/chat/completions" in file.read_text()
    with Cassette(file, mode="replay", secrets=["a new one"]):
        await send(server.url, "a new one")


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, BEGUN), (0, REST)],
        [(0, BEGUN), (1, '{"where": "x"}'), (0, REST)],
    ],
    ids=["escaped", "between"],
)
async def test_a_secret_in_the_pieces_of_calls_is_never_written(
    pieces: list[tuple[int, str]], tmp_path: Path
) -> None:
    """A secret that arrives in pieces is found, even if it is escaped or pieces of a different call are in between.

    Recording then fails, and no file is written.
    """
    calls = [
        delta(tool_calls=[{"index": index, "id": f"c{index}", "function": {"name": "look", "arguments": ""}}])
        for index in sorted({index for index, _ in pieces})
    ]
    more = [delta(tool_calls=[{"index": index, "function": {"arguments": piece}}]) for index, piece in pieces]
    done = streamed(delta(content="ok", finish="stop"))
    file = tmp_path / "a.json"
    async with raw_server(streamed(*calls, *more, delta(finish="tool_calls")), done) as server:
        with (
            pytest.raises(CassetteError, match="in several pieces"),
            Cassette(file, mode="record", secrets=[ODD]),
        ):
            await ask("chat", server.url, stream=True)
    assert not file.exists()


async def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CassetteError, match="a secret of 2 characters"):
        Cassette(tmp_path / "a.json", secrets=["ab"])


async def test_failures_are_replayed_too(tmp_path: Path) -> None:
    done = body_of([DONE["chat"][False]], False)
    limited = response(b'{"error": {"message": "slow down"}}', False, "429 Too Many")
    async with raw_server(limited, response(done, False)) as server:
        with Cassette(tmp_path / "a.json"):
            said = await ask("chat", server.url, attempts=2)
    with Cassette(tmp_path / "a.json"):
        assert await ask("chat", server.url, attempts=2) == said
    with (
        pytest.raises(PromptEvaluationError, match="can't be reached") as first,
        Cassette(tmp_path / "b.json"),
    ):
        await ask("chat", server.url)  # the server is down
    with (
        pytest.raises(PromptEvaluationError, match="can't be reached") as second,
        Cassette(tmp_path / "b.json"),
    ):
        await ask("chat", server.url)
    assert str(first.value) == str(second.value)


async def test_a_lost_connection_is_replayed(tmp_path: Path) -> None:
    said: list[str] = []
    url = ""
    for _ in range(2):
        # The server sends less than it announced, and is stopped when the first words have arrived.
        async with raw_server(response(body_of([delta(content="Hal")], True), True, length=9_999)) as server:
            url = url or server.url
            with Cassette(tmp_path / "a.json"):
                run = Adapter(a_model("chat", url), retry=Retry(attempts=1)).stream(PROMPT, "Where?")
                async for event in run:
                    if isinstance(event, TextDelta):
                        server.close()
                with pytest.raises(PromptEvaluationError) as failed:
                    await run.response
        said.append(str(failed.value))
    assert "the connection was lost in the middle" in said[0]
    assert said[0] == said[1]


async def test_normalise_decides_what_is_compared(tmp_path: Path) -> None:
    def without_time(request: Any) -> Any:
        return {**request, "messages": "[changes]"}

    url = await recorded(tmp_path / "a.json", "It is 12:00", normalise=without_time)
    with Cassette(tmp_path / "a.json", normalise=without_time):
        await ask("chat", url, "It is 12:01")


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda file: None, "there is no recording"),
        (lambda file: file.write_text("{"), "is not a recording"),
        (lambda file: file.write_text('{"version": 9, "exchanges": []}'), "has the format 9"),
    ],
    ids=["missing", "broken", "newer"],
)
def test_an_unusable_file_is_refused_in_words(
    prepare: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    prepare(tmp_path / "a.json")
    with pytest.raises(CassetteError, match=said):
        Cassette(tmp_path / "a.json", mode="replay").__enter__()


async def test_a_build_server_never_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(CassetteError, match="Run the test with HANDRAIL_CASSETTES=record"):
        Cassette(tmp_path / "a.json").__enter__()
    monkeypatch.setenv("HANDRAIL_CASSETTES", "record")
    with Cassette(tmp_path / "a.json") as used:
        assert not used.replays
    monkeypatch.setenv("HANDRAIL_CASSETTES", "sometimes")
    with pytest.raises(CassetteError, match="'sometimes'"):
        Cassette(tmp_path / "a.json").__enter__()


def test_the_fixture_keeps_one_file_for_each_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from handrail.testing.fixtures import cassette\n")
    (tmp_path / "test_more.py").write_text(
        "import pytest\n\n\n@pytest.fixture\ndef cassette_options():\n"
        "    return {'secrets': ['hunter2'], 'mode': 'record'}\n\n\n"
        "def test_options(cassette):\n    assert [each.text for each in cassette._secrets] == ['hunter2'] and not cassette.replays\n"
    )
    (tmp_path / "test_app.py").write_text(
        "def test_it(cassette):\n"
        "    assert cassette.path.parts[-3:] == ('cassettes', 'test_app', 'test_it.json')\n"
        "    assert not cassette.replays\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert "2 passed" in done.stdout, done.stdout


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(JSON, JSON)
def test_two_values_that_differ_have_a_first_difference(one: Any, other: Any) -> None:
    """`_difference` returns a place and the two values there, which look different unless they are shortened."""
    if one == other:
        return
    where, old, new = _difference({"body": one}, {"body": other})
    assert where.startswith("body")
    assert old != new or "characters)" in old
