"""What a model makes, on each wire: it is in the response, and goes back to its provider in the provider's own form."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import msgspec
import pytest

from handrail import Adapter, Attachment, Budget, GeminiModel, MemoryJournal, OpenAIModel, Prompt, Session
from handrail.content import MAX_BYTES
from handrail.errors import PromptEvaluationError
from handrail.events import AttachmentDelta, TextDelta
from handrail.messages import AssistantMessage
from handrail.models.media import attachment_at, attachment_of
from handrail.models.providers import PROVIDERS
from handrail.run.adapter import Retry
from support.raw_server import Raw, delta, raw_server, said, streamed, whole

PROMPT = Prompt("artist", "Draw.")
ONCE = Retry(attempts=1)
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
RED, BLUE = PNG + b"red", PNG + b"blue"
WAVE = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0"


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def gemini(*parts: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"role": "model", "parts": list(parts)}, "finishReason": "STOP"}]}


def blob(content: bytes, kind: str = "image/png", **more: Any) -> dict[str, Any]:
    return {"inlineData": {"mimeType": kind, "data": b64(content)}, **more}


STEPS = [{"text": "First,"}, blob(RED, thoughtSignature="c2ln+/=="), {"text": "then"}, blob(BLUE)]
PICTURE = {
    "type": "image_generation_call",
    "id": "ig_1",
    "status": "completed",
    "output_format": "png",
    "revised_prompt": "A red square",
    "result": b64(RED),
}
TEXT = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Here.", "annotations": []}],
}
RESPONSE = {"id": "r", "status": "completed", "output": [PICTURE, TEXT]}
URL = {"type": "image_url", "index": 0, "image_url": {"url": f"data:image/png;base64,{b64(RED)}"}}


def chat(**message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop"}]}


def model_of(wire: str, url: str, **options: Any) -> Any:
    if wire == "gemini":
        return GeminiModel("gemini-3-pro-image", base_url=url, key_variable=None, options=options)
    api: Any = "responses" if wire == "responses" else "chat"
    return OpenAIModel("m", api=api, base_url=url, key_variable=None, options=options)


def sent(server: Raw, request: int = -1) -> Any:
    return server.bodies[request]


WIRES: dict[str, tuple[bytes, bytes, Any, list[bytes]]] = {
    "gemini": (
        whole(gemini(*STEPS)),
        streamed(*(gemini(each) for each in STEPS), end=b""),
        "First,then",
        [RED, BLUE],
    ),
    "responses": (
        whole(RESPONSE),
        streamed(
            {"type": "response.image_generation_call.partial_image", "partial_image_b64": b64(BLUE)},
            {"type": "response.output_item.done", "output_index": 0, "item": PICTURE},
            {"type": "response.output_text.delta", "item_id": "msg_1", "delta": "Here."},
            {"type": "response.output_item.done", "output_index": 1, "item": TEXT},
            {"type": "response.completed", "response": RESPONSE},
        ),
        "Here.",
        [RED],
    ),
    "chat": (
        whole(chat(content="Here.", images=[URL])),
        streamed(delta(content="Here."), delta(images=[URL]), delta("stop")),
        "Here.",
        [RED],
    ),
}
"""For each wire: a complete answer, the same answer as a stream, its text, and what the model made."""
BACK: dict[str, Any] = {
    "gemini": [*STEPS],
    "responses": [PICTURE, TEXT],
    "chat": {"role": "assistant", "content": "Here.", "images": [URL]},
}
"""How each answer goes back to its provider."""
AGAIN = {"gemini": whole(gemini({"text": "ok"})), "chat": said("ok")}
AGAIN["responses"] = whole({**RESPONSE, "output": [TEXT]})


def back_in(wire: str, body: Any) -> Any:
    """Return the first answer of the model in a request's body."""
    if wire == "gemini":
        return next(each["parts"] for each in body["contents"] if each["role"] == "model")
    if wire == "responses":
        return [each for each in body["input"] if each.get("role") != "user"]
    return next(each for each in body["messages"] if each["role"] == "assistant")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_what_a_model_makes_is_in_the_response_and_goes_back(wire: str, stream: bool) -> None:
    """A picture is in the response, the messages and the stream. A continued conversation sends it back as it came.

    The journal has its bytes once, as a blob, and none of its records repeat them.
    """
    complete, events, text, pictures = WIRES[wire]
    journal = MemoryJournal()
    async with raw_server(events if stream else complete, AGAIN[wire]) as server:
        adapter = Adapter(model_of(wire, server.url), journal=journal, retry=ONCE)
        if stream:
            run = adapter.stream(PROMPT, "draw", session=Session(id="s"), run_id="a")
            seen = [each async for each in run if isinstance(each, AttachmentDelta | TextDelta)]
            response = await run.response
            made = [each.attachment.content for each in seen if isinstance(each, AttachmentDelta)]
            assert made == pictures
        else:
            response = await adapter.evaluate(PROMPT, "draw", session=Session(id="s"), run_id="a")
        assert response.text == text
        assert [each.content for each in response.attachments] == pictures
        answer = response.messages[-1]
        assert isinstance(answer, AssistantMessage)
        assert answer.attachments == response.attachments
        restored = (await adapter.resume("a", PROMPT)).session
        await adapter.evaluate(PROMPT, "again", session=restored, run_id="b")
        assert back_in(wire, sent(server)) == BACK[wire]
    assert sorted(await journal.blobs.list("a")) == sorted(each.digest for each in response.attachments)
    row = await journal.runs.get("a")
    written = [row.record.begin, row.outcome, *(each.body for each in await journal.calls.entries("a"))]
    assert not any(
        b64(each)[:24].encode() in record or each in record for each in pictures for record in written
    )


async def test_a_restored_answer_has_its_pictures_in_order() -> None:
    """The texts and the pictures of an answer are in the order in which the model made them, also in a resumed run."""
    journal = MemoryJournal()
    async with raw_server(whole(gemini(*STEPS))) as server:
        adapter = Adapter(model_of("gemini", server.url), journal=journal, retry=ONCE)
        response = await adapter.evaluate(PROMPT, "draw", run_id="a")
        again = await adapter.resume("a", PROMPT)
    for each in (response, again):
        [answer] = [said for said in each.messages if isinstance(said, AssistantMessage)]
        assert [part if isinstance(part, str) else part.content for part in answer.parts] == [
            "First,",
            RED,
            "then",
            BLUE,
        ]
        assert [made.content for made in each.attachments] == [RED, BLUE]


@pytest.mark.parametrize("wire", ["anthropic", "chat", "gemini"])
async def test_another_provider_reads_about_the_picture_in_words(wire: str) -> None:
    """A picture that one provider's model made is described to the models of the others, in its place in the text."""
    from handrail import AnthropicModel

    picture = Attachment(RED, "red.png")
    message = AssistantMessage("AB", attachments=(picture,), offsets=(1,))
    made: Any = {"content": [{"type": "text", "text": "ok"}], "stop_reason": "end_turn", "usage": {}}
    async with raw_server(whole(made) if wire == "anthropic" else AGAIN[wire]) as server:
        model = (
            AnthropicModel("claude", base_url=server.url, key_variable=None)
            if wire == "anthropic"
            else model_of(wire, server.url)
        )
        from handrail.messages import UserMessage

        await Adapter(model, retry=ONCE).evaluate(PROMPT, "go", history=[UserMessage("hi"), message])
        text = json.dumps(sent(server))
    assert "A\\n\\n[image red.png: image/png, 31 bytes] (It is not shown to you" in text
    assert ".)\\n\\nB" in text


async def test_a_server_that_takes_no_pictures_back_reads_about_them() -> None:
    """DeepSeek's API takes only its own fields back, so a picture that came in another field is described."""
    async with raw_server(WIRES["chat"][0], AGAIN["chat"]) as server:
        quirks = PROVIDERS["deepseek"].quirks
        model = OpenAIModel("m", base_url=server.url, key_variable=None)
        model._quirks = msgspec.structs.replace(quirks, takes=model.traits.takes)  # pyright: ignore[reportPrivateUsage]
        adapter, session = Adapter(model, retry=ONCE), Session()
        await adapter.evaluate(PROMPT, "draw", session=session)
        await adapter.evaluate(PROMPT, "again", session=session)
        answer = back_in("chat", sent(server))
    assert answer["content"].startswith("Here.\n\n[image image.png: image/png, 31 bytes] (It is not")
    assert "images" not in answer


async def test_a_draft_is_not_part_of_the_answer() -> None:
    """A picture among Gemini's thoughts is neither in the response nor sent back."""
    parts = [blob(BLUE, thought=True), blob(RED, thoughtSignature="c2ln")]
    async with raw_server(whole(gemini(*parts)), AGAIN["gemini"]) as server:
        adapter, session = Adapter(model_of("gemini", server.url), retry=ONCE), Session()
        response = await adapter.evaluate(PROMPT, "draw", session=session)
        assert [each.content for each in response.attachments] == [RED]
        await adapter.evaluate(PROMPT, "again", session=session)
        assert back_in("gemini", sent(server)) == parts[1:]


async def test_samples_are_a_sound_that_can_be_played() -> None:
    """Bare samples of Gemini become a WAV file, and go back as the samples that they were."""
    samples = b"\1\2\3\4"
    part = blob(samples, "audio/L16;codec=pcm;rate=16000")
    async with raw_server(whole(gemini(part)), AGAIN["gemini"]) as server:
        adapter, session = Adapter(model_of("gemini", server.url), retry=ONCE), Session()
        response = await adapter.evaluate(PROMPT, "say it", session=session)
        [sound] = response.attachments
        await adapter.evaluate(PROMPT, "again", session=session)
        assert back_in("gemini", sent(server)) == [part]
    assert (sound.media_type, sound.content[:4], sound.content[-4:]) == ("audio/wav", b"RIFF", samples)
    assert int.from_bytes(sound.content[24:28], "little") == 16000


async def test_a_sound_that_arrives_in_pieces_is_one_sound() -> None:
    """Gemini streams a part for each fraction of a second. Consecutive parts with samples are one sound, and go back as one part.

    Empty parts between them change nothing. A part with something else, or samples at another rate, begins another sound.
    """
    kind, other = "audio/L16;codec=pcm;rate=24000", "audio/L16;codec=pcm;rate=16000"
    pieces = [bytes([number, 0] * 3) for number in range(6)]
    parts = [
        *(blob(piece, kind) for piece in pieces[:3]),
        {"text": ""},
        blob(pieces[3], kind),
        {"text": "and"},
        blob(pieces[4], kind),
        blob(pieces[5], other),
    ]
    events = [{"candidates": [{"content": {"parts": [part]}}]} for part in parts]
    async with raw_server(streamed(*events, gemini({"text": ""}), end=b""), AGAIN["gemini"]) as server:
        adapter, session = Adapter(model_of("gemini", server.url), retry=ONCE), Session()
        run = adapter.stream(PROMPT, "say it", session=session)
        told = [each.attachment async for each in run if isinstance(each, AttachmentDelta)]
        response = await run.response
        await adapter.evaluate(PROMPT, "again", session=session)
        assert back_in("gemini", sent(server)) == [
            blob(b"".join(pieces[:4]), kind),
            {"text": "and"},
            blob(pieces[4], kind),
            blob(pieces[5], other),
        ]
    sounds = [b"".join(pieces[:4]), pieces[4], pieces[5]]
    assert [each.content[44:] for each in response.attachments] == sounds
    assert tuple(told) == response.attachments
    answer = response.messages[-1]
    assert isinstance(answer, AssistantMessage)
    assert [part if isinstance(part, str) else part.content[44:] for part in answer.parts] == [
        sounds[0],
        "and",
        *sounds[1:],
    ]


async def test_a_budget_counts_what_is_sent_back() -> None:
    """Of a spoken answer, a budget counts the transcript, which is what the next request has, and not the sound."""
    sound = {"id": "a", "transcript": "Hello", "data": b64(WAVE + bytes(3_000_000))}
    async with raw_server(whole(chat(content=None, audio=sound)), AGAIN["chat"]) as server:
        model, session = model_of("chat", server.url), Session()
        response = await Adapter(model, retry=ONCE).evaluate(PROMPT, "say it", session=session)
        assert len(response.attachments) == 1
        again = Adapter(model, retry=ONCE).evaluate(
            PROMPT, "again", session=session, budget=Budget(tokens=3_000)
        )
        assert (await again).text == "ok"


async def test_a_budget_counts_the_pictures_that_go_back() -> None:
    """A picture that is sent back to its provider costs about as many tokens as one that a person attaches."""
    async with raw_server(whole(gemini(blob(RED))), AGAIN["gemini"]) as server:
        model, session = model_of("gemini", server.url), Session()
        await Adapter(model, retry=ONCE).evaluate(PROMPT, "draw", session=session)
        with pytest.raises(PromptEvaluationError, match="too low"):
            await Adapter(model, retry=ONCE).evaluate(
                PROMPT, "again", session=session, budget=Budget(tokens=3_000)
            )


@pytest.mark.parametrize("ends", [[], [delta("stop"), delta("stop")], [delta("length")]])
async def test_a_spoken_answer_has_its_sound_however_the_stream_ends(ends: list[Any]) -> None:
    """A server may leave out the stop reason, or repeat it. The sound is there once."""
    pieces = [delta(audio={"transcript": "Hi"}), delta(audio={"data": b64(WAVE)})]
    async with raw_server(streamed(*pieces, *ends)) as server:
        model = model_of("chat", server.url, modalities=["text", "audio"], audio={"format": "wav"})
        response = await Adapter(model, retry=ONCE).stream(PROMPT, "say it").response
    assert (response.text, [each.content for each in response.attachments]) == ("Hi", [WAVE])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_spoken_answer(stream: bool) -> None:
    """The transcript of a spoken answer is its text, and is what is sent back. Streamed samples are joined to a sound."""
    sound = {"id": "audio_1", "transcript": "Hello", "expires_at": 1}
    pieces = [
        {"id": "audio_1", "transcript": "Hel"},
        {"data": b64(b"\1\2")},
        {"transcript": "lo"},
        {"data": b64(b"\3\4")},
    ]
    events = streamed(*(delta(audio=each) for each in pieces), delta(audio={"expires_at": 1}), delta("stop"))
    complete = whole(chat(content=None, audio={**sound, "data": b64(WAVE)}))
    form = {"voice": "alloy", "format": "pcm16" if stream else "wav"}
    async with raw_server(events if stream else complete, AGAIN["chat"]) as server:
        model = model_of("chat", server.url, modalities=["text", "audio"], audio=form)
        adapter, session = Adapter(model, retry=ONCE), Session()
        run = adapter.stream if stream else adapter.evaluate
        response: Any = run(PROMPT, "say it", session=session)
        response = await (response.response if stream else response)
        assert response.text == "Hello"
        [made] = response.attachments
        assert made.media_type == "audio/wav"
        assert made.content.endswith(b"\1\2\3\4") if stream else made.content == WAVE
        await Adapter(model, retry=ONCE).evaluate(PROMPT, "again", session=session)
        assert back_in("chat", sent(server)) == {"role": "assistant", "content": "Hello"}


def broken(wire: str, data: Any) -> bytes:
    if wire == "gemini":
        return whole(gemini({"inlineData": {"mimeType": "image/png", "data": data}}))
    if wire == "responses":
        return whole({**RESPONSE, "output": [{**PICTURE, "result": data}]})
    image = copy.deepcopy(URL)
    image["image_url"] = {"url": f"data:image/png;base64,{data}"}
    return whole(chat(content="", images=[image]))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("data", "problem"),
    [("not base64!", "a picture or a sound in its answer is not valid base64"), ("=", "is empty")],
)
async def test_a_broken_picture_is_an_error_that_says_so(wire: str, data: str, problem: str) -> None:
    async with raw_server(broken(wire, data)) as server:
        with pytest.raises(PromptEvaluationError, match=problem):
            await Adapter(model_of(wire, server.url), retry=ONCE).evaluate(PROMPT, "draw")


async def test_a_picture_without_an_address_is_an_error() -> None:
    image = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    async with raw_server(whole(chat(content="", images=[image]))) as server:
        with pytest.raises(PromptEvaluationError, match="neither data nor an address"):
            await Adapter(model_of("chat", server.url), retry=ONCE).evaluate(PROMPT, "draw")


def test_a_picture_is_no_larger_than_other_attachments() -> None:
    from handrail.models import ModelAnswerBroken

    with pytest.raises(ModelAnswerBroken, match=f"at most {MAX_BYTES} are allowed"):
        attachment_of("m", b64(PNG + b"\0" * MAX_BYTES))


@pytest.mark.parametrize(
    ("content", "given", "wanted"),
    [
        (PNG, "image/jpeg", "image/png"),
        (PNG, "", "image/png"),
        (PNG, "png", "image/png"),
        (PNG, "image/svg+xml", "image/png"),
        (PNG, None, "image/png"),
        (b"\xff\xfe?", "image/x-raw", "image/x-raw"),
        (b"\xff\xfe?", "no type", "application/octet-stream"),
        (b"ID3 is a tag.", "text/plain", "text/plain"),
        (b"\xff\xfb\1\2", "audio/L16", "audio/wav"),
    ],
)
def test_the_bytes_show_what_a_picture_is(content: bytes, given: str | None, wanted: str) -> None:
    """What the bytes show comes before the provider's media type, because other providers refuse a wrong one. An invalid one is ignored."""
    assert attachment_of("m", b64(content), given).media_type == wanted


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{b64(PNG)}",
        f"DATA:image/png;charset=x;BASE64,{b64(PNG)}",
        f"data:;base64,{b64(PNG).replace('+', '%2B').replace('=', '%3D')}",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG),
    ],
)
def test_data_urls_have_several_forms(url: str) -> None:
    """The bytes may be in base64 or percent-encoded, and the names in any case."""
    made = attachment_at("m", url)
    assert (made.content, made.media_type) == (PNG, "image/png")


def test_an_svg_in_a_data_url_is_a_file() -> None:
    """An SVG is no picture that is shown, because it can contain scripts."""
    made = attachment_at("m", "data:image/svg+xml;utf8,<svg onload='alert(1)'/>")
    assert (made.kind, made.text()) == ("file", "<svg onload='alert(1)'/>")


def test_base64_of_other_alphabets_and_in_pieces_is_read() -> None:
    content = PNG + b"\xfb\xff\xfe"
    assert attachment_of("m", base64.urlsafe_b64encode(content).decode().rstrip("=")).content == content
    assert attachment_of("m", b64(content[:10]) + "\n" + b64(content[10:])).content == content
