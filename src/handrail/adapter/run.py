"""`Run`: everything one evaluation holds while it lasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from handrail.adapter.conversation import Conversation
from handrail.adapter.masking import Masking
from handrail.adapter.options import Settings
from handrail.adapter.output import ANSWER_TOOL, Output
from handrail.dispatch import Gate
from handrail.dispatch.frame import Frame
from handrail.errors import DeadlineExceededError, LimitError, PromptEvaluationError
from handrail.events import PromptExecuted, PromptRendered
from handrail.guard.policy import within_scope
from handrail.messages import Message, ModelRequest, Offered, Sent, Usage
from handrail.place import Place
from handrail.prompt import RenderedPrompt
from handrail.protocols import Filesystem, SessionView
from handrail.tools import Tool

_AROUND = 128
"""Bytes that a wire puts around the schema of a tool, or of an answer, at most."""


class Run:
    """One evaluation: a prompt on a model, in a frame, with a conversation."""

    def __init__(
        self,
        settings: Settings,
        frame: Frame,
        conversation: Conversation,
        rendered: RenderedPrompt[Any],
        *,
        prompt_name: str,
        output: Output | None,
        added: Sequence[Tool[Any, Any]] = (),
        extra_tools: Sequence[Tool[Any, Any]] = (),
        feedback: Sequence[Any] = (),
        completion: Sequence[Any] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.model = settings.model
        self.retry = settings.retry
        self.throttle = settings.throttle
        self.tariff = settings.tariff
        self.max_tokens = settings.max_tokens
        self.frame = frame
        self.gate = Gate(frame)
        self._masking = Masking(frame, conversation)
        self.conversation = conversation
        self.rendered = rendered
        self.prompt_name = prompt_name
        self.system = rendered.text
        """What is sent first. It stays as it is, also when sections are opened."""
        self.output = output
        self.feedback = feedback
        self.completion = completion
        self.on_text = on_text
        native = settings.model.traits.native_output
        self.answers_by_call = output is not None and (not native or output.schema.secret)
        """By a call also where an answer has secrets: those of a call are masked, those of a text can't be."""
        self._extra_tools = [
            *added,
            *extra_tools,
            *([output.tool()] if output and self.answers_by_call else []),
        ]
        self.counted: tuple[int, int] = (0, 0)
        """How many messages have been counted, and how many tokens they are at most, or by the provider's count."""
        self.calls = 0
        self.answers = 0
        """How many answers of the model this run has had, or is waiting for."""
        self.again = False
        """Is it gone through again, and has not come past its record yet?"""
        self._began_with = rendered
        self._request: ModelRequest | None = None
        shown = [tool for tool in rendered.tools if frame.offers(tool)]
        self.tools: Sent[Offered] = Sent(Offered(tool) for tool in (*shown, *self._extra_tools))
        self._allow(rendered)

    # What is said of it.

    def begin(self) -> None:
        """It begins; where it is gone through again, whoever listens hears so once it comes past its record."""
        frame = self.frame
        self.again = frame.log.has_begun(frame.place)
        if not self.again:
            self._tell()

    def goes_on(self) -> None:
        """What comes now is not in the record."""
        if self.again:
            self.again = False
            self._tell()

    def _tell(self) -> None:
        frame, rendered = self.frame, self._began_with
        if frame.told.get(PromptRendered, True):
            names = tuple(tool.name for tool in rendered.tools)
            frame.publish(PromptRendered(self.prompt_name, rendered.text, names, frame.run_context))

    def end(self, ended: str) -> None:
        """It is over. A nested run that is over in the record has said so before."""
        frame, spending = self.frame, self.frame.spending
        fact = PromptExecuted(self.prompt_name, ended, spending.usage, spending.cost, frame.run_context)
        if self.again and frame.outer is not None and ended != "cancelled":
            frame.session.keep(fact)
        else:
            self.goes_on()
            frame.session.record(fact)
        if frame.parking is not None and frame.outer is not None:
            frame.parking.let_go_on(frame.outer)

    def say(self, message: Message) -> None:
        """Add to the conversation; what is recorded has been heard before."""
        masking = self.masking
        shown = message if masking is None else masking.message(message)
        self.conversation.add(message, self.frame.run_context.run_id, again=self.again, shown=shown)

    @property
    def masking(self) -> Masking | None:
        """What masks the secrets a model writes; None where none of its tools takes any, nor was one written before."""
        return self._masking if self.frame.secretive or self.conversation.masks else None

    # What is asked of the model.

    def request(self, max_tokens: int | None = None) -> ModelRequest:
        """The next request. The conversation and the tools in it grow by themselves."""
        most = max_tokens or self.settings.max_tokens
        request = self._request
        if request is None or request.max_tokens != most:
            output = self.output
            request = self._request = ModelRequest(
                self.system,
                self.conversation.messages,
                self.tools,
                None if output is None or self.answers_by_call else output.schema,
                self.settings.temperature,
                most,
                self.settings.streaming,
                self.answers_by_call,
            )
        return request

    def next_place(self) -> Place:
        """Where in the record the next answer of the model belongs."""
        self.answers += 1
        return self.place_of_answer

    @property
    def place_of_answer(self) -> Place:
        """Where in the record the newest answer of the model belongs."""
        return self.frame.place.answer(self.answers)

    def offered_size(self) -> int:
        """The bytes of what is said of the tools, and of the answer that is wanted, at most."""
        schema = None if self.output is None or self.answers_by_call else self.output.schema.json_schema
        tools = sum(_size_of(offered.tool) for offered in self.tools)
        return tools if schema is None else tools + len(msgspec.json.encode(schema)) + _AROUND

    def uncounted_cost(self) -> Decimal | None:
        """What a request cost whose usage nobody has told: unknown, unless the model is free."""
        one = self.tariff(Usage(1, 1))
        return None if one is None or one else one

    # Tools come into view.

    def open(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Show more sections: their tools can be called from now on. Returns the tools' names."""
        opening = self.rendered.open(paths)
        self.rendered = opening.rendered
        shown = [tool for tool in opening.tools if self.frame.offers(tool)]
        for tool in shown:
            self.tools.append(Offered(tool, deferred=True))
        known, tokens = self.counted
        if known:  # what was counted was sent without them
            self.counted = (known, tokens + sum(map(_size_of, shown)))
        self._allow(opening.rendered)
        return tuple(tool.name for tool in shown)

    def _allow(self, rendered: RenderedPrompt[Any]) -> None:
        policies = [within_scope(scoped.policy, scoped.tools) for scoped in rendered.policies]
        self.frame.rendered_prompt = rendered
        self.frame.secretive = self.frame.secretive or rendered.secretive
        self.frame.show([*rendered.tools, *self._extra_tools], policies)

    # How it ends.

    def failed(self, error: Exception, phase: str, more: str = "") -> PromptEvaluationError:
        """What ends the run. A limit that is not the run's own ends the ones around it as well."""
        shared = isinstance(error, LimitError) and self._is_shared(error)
        return PromptEvaluationError(
            f"prompt {self.prompt_name!r}: {str(error).rstrip('.')}.{more}",
            phase=phase,
            run_id=None if shared else self.frame.run_context.run_id,
        )

    def _is_shared(self, error: LimitError) -> bool:
        outer = self.frame.outer
        if outer is None:
            return False
        if isinstance(error, DeadlineExceededError):
            return self.frame.deadline is outer.frame.deadline
        return bool(getattr(error, "of_root", False))

    # What those who watch over it see.

    @property
    def session_view(self) -> SessionView:
        outer = self.frame.outer
        return self.frame.session if outer is None else outer.session

    @property
    def filesystem(self) -> Filesystem | None:
        outer = self.frame.outer
        if outer is not None:
            return outer.filesystem if self.frame.filesystem is not None else None
        files: Any = self.frame.filesystem
        return files

    def answer_tool(self, name: str) -> bool:
        """Is this the call by which the run is answered?"""
        return self.answers_by_call and name == ANSWER_TOOL


def _size_of(tool: Tool[Any, Any]) -> int:
    """The bytes of what is said of a tool, at most."""
    return len(msgspec.json.encode([tool.name, tool.description, tool.json_schema])) + _AROUND
