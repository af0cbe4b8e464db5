"""Tests for attachments on the wires: a provider gets those that it accepts, in its own format, and descriptions of the others."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Attachment
from handrail.errors import PromptEvaluationError
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    Message,
    ModelRequest,
    Sent,
    Takes,
    ToolMessage,
    Traits,
    UserMessage,
)
from handrail.models import ModelRequestRefused, openai, responses
from handrail.models import media as parts
from handrail.models.anthropic import AnthropicModel
from handrail.models.gemini import GeminiModel
from handrail.models.openai import OpenAIModel
from handrail.models.providers import Quirks
from handrail.models.scripted import ScriptedModel
from handrail.prompt import Prompt
from handrail.run.adapter import Adapter
from support.wire_grammar import problems

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
DATA = base64.b64encode(PNG).decode()
PDF = b"%PDF-1.7"
PLOT = Attachment(PNG, "out/plot.png")
PAPER = Attachment(PDF, "paper.pdf")
CLIP = Attachment(b"RIFF\0\0\0\0WAVEfmt ", "clip.wav")
NOTES = Attachment(b"a,b\n1,2", "notes.csv")
FAR = Attachment("https://example.org/far.png")

ASKED = AssistantMessage("", (CallAsked("c1", "plot", "{}"),))


def request_of(*messages: Message) -> ModelRequest:
    return ModelRequest("", Sent(messages), Sent())


def sent(wire: str, *messages: Message) -> list[Any]:
    """Return the messages as a wire sends them, after checking the request against the strict grammar."""
    request = request_of(*messages)
    if wire == "chat":
        body = openai._body({"model": "m"}, request, Quirks(), "chat:openai")  # pyright: ignore[reportPrivateUsage]
    elif wire == "gemini":
        body = GeminiModel("m")._body(request)  # pyright: ignore[reportPrivateUsage]
    elif wire == "responses":
        body = responses._body({"model": "m"}, request, "responses:openai")  # pyright: ignore[reportPrivateUsage]
    else:
        body = AnthropicModel("m", cache=False)._body(request)  # pyright: ignore[reportPrivateUsage]
    assert problems(wire, body) == []
    return json.loads(body)[{"responses": "input", "gemini": "contents"}.get(wire, "messages")]


def returned(*attachments: Attachment, text: str = "done") -> tuple[Message, ...]:
    return UserMessage("go"), ASKED, ToolMessage((CallAnswered("c1", "plot", text, attachments=attachments),))


# --- a tool returns a picture ---


def test_a_picture_from_a_tool_on_the_chat_wire() -> None:
    """The chat API takes only text in a tool's message, so the tool's picture follows in a user message that names the tool."""
    *_, result, picture = sent("chat", *returned(PLOT))
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "done"}
    told, shown = picture["content"]
    assert "plot" in told["text"]
    assert "not from a person" in told["text"]
    assert shown == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}


def test_a_picture_from_a_tool_on_the_responses_wire() -> None:
    """A picture that a tool returns is part of the call's output."""
    output = sent("responses", *returned(PLOT))[-1]["output"]
    assert output == [
        {"type": "input_text", "text": "done"},
        {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{DATA}"},
    ]


def test_a_picture_from_a_tool_on_the_anthropic_wire() -> None:
    """A picture that a tool returns is a block in the call's result."""
    (result,) = sent("messages", *returned(PLOT))[-1]["content"]
    assert result["content"] == [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
        {"type": "text", "text": "done"},
    ]


def test_a_picture_from_a_tool_on_the_gemini_wire() -> None:
    """A tool's picture follows the tool's response in the same content, after a text that names the tool."""
    response, told, shown = sent("gemini", *returned(PLOT))[-1]["parts"]
    assert response["functionResponse"]["response"] == {"output": "done"}
    assert "plot" in told["text"]
    assert shown == {"inlineData": {"mimeType": "image/png", "data": DATA}}


# --- a person attaches files ---


@pytest.mark.parametrize(
    ("wire", "kinds"),
    [
        ("chat", ["text", "image_url", "file", "input_audio", "image_url"]),
        ("responses", ["input_text", "input_image", "input_file", "input_image"]),
        ("messages", ["image", "document", "image", "text"]),
    ],
)
def test_a_message_has_every_part_that_the_wire_takes(wire: str, kinds: list[str]) -> None:
    """Pictures, documents and sounds become parts, and text files become text. What a wire can't send is described in the text."""
    (message,) = sent(wire, UserMessage("look", attachments=(PLOT, PAPER, CLIP, NOTES, FAR)))
    assert [each["type"] for each in message["content"]] == kinds
    text = next(each["text"] for each in message["content"] if "text" in each)
    assert text.startswith("look")
    assert "a,b\n1,2" in text
    assert ("clip.wav" in text) == (wire != "chat")
    assert ("takes no audio" in text) == (wire != "chat")


KINDS = [
    *(PLOT, PAPER, CLIP, NOTES, FAR, Attachment(b"\0\xff", "x.bin"), Attachment(b"II*\0", "a.tiff")),
    *(
        Attachment("https://example.org/a.pdf"),
        Attachment("https://example.org/a.wav"),
        Attachment(b"", "none.png"),
    ),
]


@given(
    st.lists(st.sampled_from(KINDS), max_size=4),
    st.lists(st.sampled_from(KINDS), max_size=4),
    st.text(max_size=5),
)
def test_nothing_is_dropped_on_any_wire(
    attached: list[Attachment], found: list[Attachment], text: str
) -> None:
    """Each attachment is sent as its bytes or address, or is described in words, and the request always matches the grammar."""
    text = text.encode(errors="replace").decode()
    for wire, takes in (
        ("chat", parts.CHAT_TAKES),
        ("responses", parts.RESPONSES_TAKES),
        ("messages", parts.ANTHROPIC_TAKES),
        ("gemini", parts.GEMINI_TAKES),
    ):
        messages = (UserMessage(text, attachments=tuple(attached)), *returned(*found)[1:])
        body = json.dumps(sent(wire, *messages))
        for each in (*attached, *found):
            if takes.sends(each):
                assert (each.address or base64.b64encode(each.content).decode()) in body
            else:
                assert json.dumps(each.render())[1:-1] in body


def test_a_reference_without_bytes_is_described() -> None:
    """If the bytes of an attachment are missing, the model gets a description in their place."""
    lost = msgspec.json.decode(msgspec.json.encode(PLOT), type=Attachment)
    for wire in ("chat", "responses", "messages"):
        said = json.dumps(sent(wire, UserMessage("look", attachments=(lost,))))
        assert "no longer available" in said


@pytest.mark.parametrize(
    ("model", "attached", "said"),
    [
        (AnthropicModel("claude-x"), CLIP, "clip.wav: it takes no audio"),
        (OpenAIModel("gpt-x", api="responses"), CLIP, "clip.wav: it takes no audio"),
        (OpenAIModel("gpt-x"), CLIP, "clip.wav: it takes no audio"),
        (
            OpenAIModel("m", base_url="http://localhost:1/v1"),
            Attachment(b"OggS", "a.ogg"),
            "takes no audio/ogg, only audio/mpeg, audio/wav",
        ),
        (
            OpenAIModel("gpt-x"),
            Attachment("https://x.org/a.pdf"),
            "takes no document by its address, only as bytes",
        ),
        (OpenAIModel("deepseek-chat", provider="deepseek"), PLOT, "plot.png: it takes no image"),
        (AnthropicModel("claude-x"), Attachment(b"II*\0", "a.tiff"), "takes no image/tiff, only image/gif"),
        (AnthropicModel("claude-x"), Attachment(b"\0\xff", "x.bin"), "takes no application/octet-stream"),
        (ScriptedModel(["x"], traits=Traits()), PLOT, "plot.png: it takes no image"),
        (OpenAIModel("gpt-x"), Attachment(b"caf\xe9", "a.txt"), "a.txt: its text is not valid UTF-8"),
        (AnthropicModel("claude-x"), Attachment(b"\xe9", "a.json"), "a.json: its text is not valid"),
    ],
)
async def test_a_person_is_told_what_a_model_does_not_take(
    model: Any, attached: Attachment, said: str
) -> None:
    """A run with an attachment that its model does not take fails, and the error names the model and the reason."""
    with pytest.raises(PromptEvaluationError) as refused:
        await Adapter(model).evaluate(Prompt("p", "x"), "look", attachments=[attached])
    assert (refused.value.phase, type(refused.value.__cause__)) == ("request", ModelRequestRefused)
    assert said in str(refused.value)
    assert model.name in str(refused.value)


# --- which attachments a model takes ---

ALL = (PLOT, PAPER, CLIP, FAR)


@pytest.mark.parametrize(
    ("model", "taken"),
    [
        (OpenAIModel("gpt-5"), (PLOT, PAPER, FAR)),
        (OpenAIModel("gpt-5", api="responses"), (PLOT, PAPER, FAR)),
        (OpenAIModel("gpt-4o-audio-preview"), (CLIP,)),
        (OpenAIModel("gpt-4-turbo"), (PLOT, PAPER, FAR)),
        (OpenAIModel("gpt-4-turbo-preview"), ()),
        (OpenAIModel("gpt-4"), ()),
        (OpenAIModel("gpt-4-0613"), ()),
        (OpenAIModel("gpt-4.1-mini"), (PLOT, PAPER, FAR)),
        (OpenAIModel("ft:gpt-3.5-turbo-0125:me::x"), ()),
        (OpenAIModel("o3-mini"), ()),
        (OpenAIModel("o3"), (PLOT, PAPER, FAR)),
        (OpenAIModel("gpt-4", base_url="http://localhost:1/v1"), ALL),
        (OpenAIModel("m", takes=Takes(frozenset({"image/png", "audio/ogg"}))), (PLOT,)),
        (OpenAIModel("deepseek-chat", provider="deepseek"), ()),
        (OpenAIModel("deepseek-v4-pro", provider="deepseek"), ()),
        (OpenAIModel("deepseek-flash", provider="deepseek"), (PLOT, FAR)),
        (OpenAIModel("deepseek-v4-flash-vision-exp", provider="deepseek"), (PLOT, FAR)),
        (OpenAIModel("qwen/qwen3.8-27b", provider="groq"), (PLOT, FAR)),
        (OpenAIModel("qwen/qwen3-32b", provider="groq"), ()),
        (OpenAIModel("mistral-code-latest", provider="mistral"), ()),
        (OpenAIModel("glm-5-2", provider="mistral"), ()),
        (OpenAIModel("mistral-small-2501", provider="mistral"), ()),
        (OpenAIModel("labs-devstral-small-2512", provider="mistral"), (PLOT, FAR)),
        (GeminiModel("gemma-4-26b-a4b-it"), (PLOT,)),
        (OpenAIModel("meta-llama/llama-4-scout", provider="groq"), (PLOT, FAR)),
        (OpenAIModel("openai/gpt-oss-120b", provider="groq"), ()),
        (OpenAIModel("mistral-large-2411", provider="mistral"), ()),
        (OpenAIModel("mistral-medium-latest", provider="mistral"), (PLOT, FAR)),
        (OpenAIModel("voxtral-small-latest", provider="mistral"), (CLIP,)),
        (OpenAIModel("kimi-k2-turbo", provider="moonshotai"), ()),
        (OpenAIModel("kimi-k2.6", provider="moonshotai"), (PLOT,)),
        (OpenAIModel("llava", provider="ollama"), (PLOT,)),
        (OpenAIModel("any", provider="vllm"), (PLOT, CLIP, FAR)),
        (OpenAIModel("any", provider="openrouter"), ALL),
        (AnthropicModel("claude-sonnet-5"), (PLOT, PAPER, FAR)),
        (AnthropicModel("claude-2.1"), ()),
        (AnthropicModel("m", takes=parts.ONLY_IMAGES), (PLOT, FAR)),
        (GeminiModel("gemini-3-pro"), (PLOT, PAPER, CLIP)),
        (GeminiModel("models/gemma-3-27b-it"), (PLOT,)),
        (GeminiModel("gemma-3-1b-it"), ()),
        (GeminiModel("m", takes=parts.ONLY_TEXT), ()),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_what_a_model_takes_depends_on_the_model(model: Any, taken: tuple[Attachment, ...]) -> None:
    """Models of the same provider may take different attachments. A model gets a description of those that it does not take."""
    takes = model.traits.takes
    assert tuple(each for each in ALL if takes.sends(each)) == taken
    body = written(model, request_of(UserMessage("look", attachments=ALL), *returned(*ALL)[1:])).decode()
    for each in ALL:
        bytes_of = each.address or base64.b64encode(each.content).decode()
        if each in taken:
            assert body.count(bytes_of) == 2
            assert each.render() not in body
        else:
            assert body.count(f"{each.render()} (It is not shown") == 2
            assert each.address or bytes_of not in body


def written(model: Any, request: ModelRequest) -> bytes:
    """Return the body that a model sends for a request."""
    if isinstance(model, OpenAIModel):
        quirks: Quirks = model._quirks  # pyright: ignore[reportPrivateUsage]
        if model._wire.startswith("chat"):  # pyright: ignore[reportPrivateUsage]
            return openai._body({"model": "m"}, request, quirks, "chat:x")  # pyright: ignore[reportPrivateUsage]
        return responses._body({"model": "m"}, request, "responses:x", quirks.takes)  # pyright: ignore[reportPrivateUsage]
    return model._body(request)


# --- conversations that grow ---


def every_wire() -> list[Any]:
    return [
        OpenAIModel("m", base_url="http://localhost:1/v1"),
        OpenAIModel("m", provider="mistral", takes=parts.CHAT_TAKES),
        OpenAIModel("gpt-5", api="responses"),
        AnthropicModel("m"),
        GeminiModel("m"),
    ]


@pytest.mark.parametrize("model", every_wire(), ids=lambda model: model.name)
def test_an_attachment_is_encoded_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many messages follow, a wire encodes an attachment's bytes once."""
    counted: list[str] = []
    encoded = parts.encoded
    monkeypatch.setattr(parts, "encoded", lambda each: counted.append(each.name) or encoded(each))
    request = request_of(UserMessage("look", attachments=(PLOT,)), *returned(PAPER)[1:])
    for turn in range(5):
        written(model, request)
        request.messages.append(UserMessage(f"and {turn}?"))
        request.messages.append(UserMessage("?"))
        request.messages.append(AssistantMessage(f"turn {turn}"))
    assert sorted(counted) == ["out/plot.png", "paper.pdf"]


TURNS: list[tuple[Message, ...]] = [
    (UserMessage("hi"),),
    (UserMessage("look", attachments=(PLOT, CLIP)),),
    (AssistantMessage("yes"),),
    (ASKED, ToolMessage((CallAnswered("c1", "plot", "done"),))),
    (ASKED, ToolMessage((CallAnswered("c1", "plot", "done", attachments=(PLOT,)),))),
    (ASKED, ToolMessage((CallAnswered("c1", "plot", "done", attachments=(NOTES,)),))),
]


@given(st.lists(st.sampled_from(TURNS), min_size=1, max_size=6))
def test_a_conversation_that_grows_is_sent_as_if_it_were_new(turns: list[tuple[Message, ...]]) -> None:
    """Each request of a growing conversation is the same as if the conversation were new.

    Mistral and Gemini get roles in an order that they accept.
    """
    for model in every_wire():
        growing = request_of()
        for turn in turns:
            for message in turn:
                growing.messages.append(message)
            body = written(model, growing)
            assert body == written(model, request_of(*growing.messages))
        said = json.loads(body)  # pyright: ignore[reportPossiblyUnboundVariable]
        if model.name == "mistral:m":
            roles = [each["role"] for each in said["messages"]]
            assert ("tool", "user") not in itertools.pairwise(roles)
            assert roles.count("user") >= sum(
                isinstance(each, UserMessage) for turn in turns for each in turn
            )
        if isinstance(model, GeminiModel):
            roles = [each["role"] for each in said["contents"]]
            assert roles == ["user", "model"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)


def test_a_local_model_reads_words() -> None:
    """A model that takes only text gets the content of text files, and a description of other attachments."""
    assert parts.only_in_words("look", []) == "look"
    told = parts.only_in_words("look", [NOTES, PLOT])
    assert "a,b\n1,2" in told
    assert "out/plot.png: image/png" in told
    assert "it takes no image" in told


def test_everything_is_taken_by_a_script() -> None:
    """A scripted model takes attachments of every kind, because it stands in for any model.

    A text file is accepted even by a model that takes no attachments.
    """
    takes = ScriptedModel([]).traits.takes
    assert all(takes.sends(each) for each in (PLOT, PAPER, CLIP, FAR))
    assert Takes().problem(NOTES) is None
