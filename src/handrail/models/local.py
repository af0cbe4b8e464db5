"""`LocalModel`: a small model that runs in this process. It needs no key and no network, and costs nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from pydantic_core import from_json

from handrail.concurrency.operation import Operation
from handrail.errors import DefinitionError
from handrail.messages import (
    AssistantMessage,
    CallPart,
    ModelPart,
    ModelRequest,
    Price,
    SentPart,
    StopPart,
    TextPart,
    ToolMessage,
    Traits,
    UsagePart,
    UserMessage,
)
from handrail.models import ModelRequestRefused
from handrail.models.blocks import encode
from handrail.models.engine import Body, Ended, Engine, EngineSettings, engine_of, find_weights
from handrail.models.media import said_in_words
from handrail.models.parts import ONLY_TEXT, only_in_words
from handrail.models.request_settings import settings_fields
from handrail.schema import JsonSchema
from handrail.text.spelling import checked_arguments
from handrail.tools import Tool

_NAME = "smollm2-135m"
_SYSTEM = "You are a helpful assistant."
"""The default system prompt. Without one, or with the one that comes with the weights, answers are poor."""
_SEED = 1
_COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""The JSON layout that the grammar allows. Without it, the model spends its tokens on whitespace."""

Turn = tuple[str, str]
"""The role of a turn (`system`, `user`, `assistant`) and its text."""


@checked_arguments
class LocalModel:
    """The embedded SmolLM2: a **135M demo model** that writes about 28 tokens a second on one core.

    Given a few examples it extracts and classifies well. It can't choose among tools, it can't
    calculate, and its facts are often wrong. So it never decides by itself to call a tool. Name a tool in
    `first_call`, and the model answers each user message with a call to that tool, and then in text.
    For the call it sees the newest message, the tool's description and the tool's `examples`, each
    `description` as a message and each `input` as the arguments. Give two or three examples.

    Arguments and structured answers are constrained by their JSON Schema while they are generated, and
    checked afterwards like those of any other model. Answers are repeatable: temperature 0 unless the
    request says otherwise, and a fixed seed. Objects with the same `threads` and `context` share one
    engine, which generates one answer at a time and takes about 300 MB. Raises `DefinitionError` if the engine or
    the weights are not installed, if there is no embedded model of this name, or if a number is too small.
    """

    def __init__(
        self,
        name: str = _NAME,
        *,
        first_call: str | Tool[Any, Any] | None = None,
        max_tokens: int = 256,
        threads: int = 1,
        context: int = 4096,
    ) -> None:
        if name != _NAME:
            raise DefinitionError(f"there is no embedded model {name!r}. The only one is {_NAME!r}.")
        for what, number, least in (
            ("max_tokens", max_tokens, 1),
            ("threads", threads, 1),
            ("context", context, 256),
        ):
            if number < least:
                raise DefinitionError(f"LocalModel: {what} is {number}. Pass {least} or more.")
        find_weights()  # report missing packages now, not in the middle of a run
        self.name = f"local:{name}"
        self.traits = Traits(Price(Decimal(0), Decimal(0)), native_output=True)
        self._first_call = first_call.name if isinstance(first_call, Tool) else first_call
        self._max_tokens = max_tokens
        self._settings = EngineSettings(threads, context)

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        tool = self._to_call(request)
        if tool is not None:
            turns, schema = _turns_for_call(request, tool), tool.json_schema
        else:
            turns = _turns(request)
            schema = None if request.output is None else request.output.json_schema
        settings_fields(self.name, request, {})  # refuses every setting, because the engine has none of them
        body: Body = {
            "prompt": _chat(turns),
            "n_predict": request.max_tokens or self._max_tokens,
            "temperature": request.temperature or 0,
            "seed": _SEED,
        }
        if schema is not None:
            body["grammar"] = _json_grammar(schema)
        yield SentPart(encode(body), {})
        if tool is not None:
            yield CallPart(0, name=tool.name)
        whole: list[str] = []
        answer = self._engine().generate(body)
        try:
            async for piece in answer:
                if isinstance(piece, Ended):
                    if whole and not request.stream:
                        yield _part(tool, "".join(whole))
                    yield UsagePart(piece.usage)
                    yield StopPart("length" if piece.cut else "done" if tool is None else "calls")
                    return
                if not whole and schema is not None and not piece.startswith("{"):
                    raise ModelRequestRefused(
                        self.name, "its engine can't enforce this JSON Schema. Use a simpler one"
                    )
                whole.append(piece)
                if request.stream:
                    yield _part(tool, piece)
        finally:
            await answer.aclose()

    def complete(self, text: str, *, choices: Sequence[str]) -> Operation[str]:
        """Return the choice with which the model continues the text.

        The model classifies best by example: give it a few lines that each end in a label, then the new case, ending
        where its label belongs:

            "Review: lovely\\nSentiment: good\\n\\nReview: broken\\nSentiment: bad\\n\\nReview: a joy\\nSentiment:"

        Raises `DefinitionError` if `choices` is empty or a single string, or has a blank item.
        """
        if isinstance(choices, str) or not choices or not all(choice.strip() for choice in choices):
            raise DefinitionError(f"choices is {choices!r}. Pass a list of words to choose from.")
        return Operation(lambda: self._complete(text, choices), f"complete({list(choices)!r})")

    async def _complete(self, text: str, choices: Sequence[str]) -> str:
        body: Body = {
            "prompt": _plain(text.rstrip()),
            "n_predict": max(len(choice.encode()) for choice in choices) + 2,
            "temperature": 0,
            "seed": _SEED,
            # A space belongs to the word after it, as in the model's training text.
            "grammar": f"root ::= {' | '.join(_literal(' ' + choice) for choice in choices)}",
        }
        pieces = [piece async for piece in self._engine().generate(body)]
        return "".join(piece for piece in pieces if isinstance(piece, str))[1:]

    def _engine(self) -> Engine:
        return engine_of(self.name, self._settings)

    def _to_call(self, request: ModelRequest) -> Tool[Any, Any] | None:
        """Return the tool that this answer must call, or None if the answer is text.

        Raises `ModelRequestRefused` if the tool is not offered, or if the model would have to choose one.
        """
        last = request.messages[-1]
        by_user = isinstance(last, UserMessage) and not last.by_run
        wanted = self._first_call if by_user else None
        if wanted is None and not request.must_call:
            return None
        offered = {each.tool.name: each.tool for each in request.tools}
        if wanted is None and len(offered) == 1:
            return next(iter(offered.values()))
        if wanted is None:
            raise ModelRequestRefused(
                self.name,
                f"it can't choose among {len(offered)} tools. Offer only one, or name one in `first_call`",
            )
        if wanted not in offered:
            raise ModelRequestRefused(
                self.name,
                f"`first_call` is {wanted!r}, which is not among the tools offered: {', '.join(offered) or 'none'}. Name one that is",
            )
        return offered[wanted]

    def __repr__(self) -> str:
        first = "" if self._first_call is None else f", first_call={self._first_call!r}"
        return f"<LocalModel {self.name!r}{first}: a 135M demo model>"


def _part(tool: Tool[Any, Any] | None, text: str) -> ModelPart:
    return TextPart(text) if tool is None else CallPart(0, arguments=text)


# --- prompts ----------------------------------------------------------------------------------


def _turns_for_call(request: ModelRequest, tool: Tool[Any, Any]) -> list[Turn]:
    """Build a prompt that asks only for a call's arguments, because more context would confuse the model."""
    turns = [
        ("system", f"Answer with the arguments of this function, as JSON. {tool.name}: {tool.description}")
    ]
    for example in tool.examples:
        params: Any = example.input
        params = tool.parse(params) if isinstance(params, Mapping) else params  # pyright: ignore[reportUnknownArgumentType]
        # in the layout that the grammar allows
        arguments = json.dumps(from_json(tool.dump(params)), ensure_ascii=False)
        turns += [("user", example.description), ("assistant", arguments)]
    said = [
        only_in_words(message.text, message.attachments)
        for message in request.messages
        if isinstance(message, UserMessage)
    ]
    return [*turns, ("user", said[-1] if said else "")]


def _turns(request: ModelRequest) -> list[Turn]:
    """Build the prompt for an answer in text.

    Results of calls are added to the user's message before them, if there is one. Messages with calls are omitted, because the
    model would copy the calls.
    """
    turns: list[Turn] = [("system", request.system or _SYSTEM)]
    for message in request.messages:
        if isinstance(message, UserMessage):
            turns.append(("user", only_in_words(message.text, message.attachments)))
        elif isinstance(message, AssistantMessage):
            if not message.calls:
                turns.append(("assistant", said_in_words(message, ONLY_TEXT)))
        else:
            _add_results(turns, message)
    return turns


def _add_results(turns: list[Turn], message: ToolMessage) -> None:
    results = "\n".join(
        f"{result.name}: {only_in_words(result.text, result.attachments)}" for result in message.results
    )
    who, said = turns[-1]
    if who == "user":
        turns[-1] = (who, f"{said}\n\n{results}")
    else:
        turns.append(("user", results))


def _chat(turns: Iterable[Turn]) -> str:
    """Format turns with the markers that the model was trained on."""
    said = "".join(f"<|im_start|>{who}\n{_plain(text)}<|im_end|>\n" for who, text in turns)
    return f"{said}<|im_start|>assistant\n"


def _plain(text: str) -> str:
    """Return the text with its turn markers broken up, so that they mean nothing to the model."""
    return text.replace("<|", "< |")


def _json_grammar(schema: JsonSchema) -> str:
    return "%llguidance {}\nstart: %json " + encode({**schema, **_COMPACT}).decode()


def _literal(text: str) -> str:
    """Quote a string as a literal of the grammar."""
    return encode(text).decode()
