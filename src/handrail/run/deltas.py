"""`Deltas`: publishes an answer as it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.events import AttachmentDelta, CallDelta, PartialOutput, TextDelta, ThoughtDelta
from handrail.messages import AttachmentPart, CallPart, ModelPart, StopPart, TextPart, ThinkingPart
from handrail.run.mask import StreamMask
from handrail.run.response import ANSWER_TOOL
from handrail.run.run import Run

if TYPE_CHECKING:
    from handrail.run.evaluation import Evaluation
    from handrail.schema.partial_values import PartialValue

_COPIED = 4
"""Maximum number of values that are copied into partial outputs for each character of the answer, so that the cost is linear."""


class Deltas:
    """Publishes the parts of one answer as they arrive, with secrets masked, and the part of a typed answer that is complete."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        masking = evaluation.masking
        self._mask = None if masking is None else StreamMask(masking)
        listens = evaluation.output is not None and evaluation.run.session.dispatcher.listens_for(
            PartialOutput
        )
        self._output = evaluation.output if listens else None
        self._names: dict[int, str] = {}
        """The name of each call, as far as it has arrived."""
        self._growing: dict[int, _Growing | None] = {}
        """The typed answer of each call that gives one, or that of the text at -1."""

    def publish(self, part: ModelPart) -> None:
        """Publish a part of the answer."""
        evaluation, run = self._evaluation, self._evaluation.run
        if isinstance(part, TextPart):
            evaluation.has_shown = True
            if evaluation.on_text is not None:
                evaluation.on_text(part.text)
            run.publish(TextDelta(part.text, run.run_context))
            if self._output is not None and not evaluation.answers_by_call:
                self._grow(-1, part.text)
        elif isinstance(part, CallPart):
            if self._mask is not None:
                part = self._mask.take(part)
                if not (part.id or part.name or part.arguments):
                    return
            evaluation.has_shown = True
            run.publish(CallDelta(part.index, part.id, part.name, part.arguments, run.run_context))
            if self._output is not None and evaluation.answers_by_call:
                self._names[part.index] = name = self._names.get(part.index, "") + part.name
                if name == ANSWER_TOOL:
                    self._grow(part.index, part.arguments)
        elif isinstance(part, AttachmentPart):
            evaluation.has_shown = True
            run.publish(AttachmentDelta(part.attachment, run.run_context))
        elif isinstance(part, ThinkingPart):
            evaluation.has_shown = True
            run.publish(ThoughtDelta(part.text, run.run_context))
        elif isinstance(part, StopPart) and self._mask is not None:
            for rest in self._mask.rest():
                run.publish(CallDelta(rest.index, "", "", rest.arguments, run.run_context))

    def _grow(self, index: int, text: str) -> None:
        if index not in self._growing:
            assert self._output is not None
            partial = self._output.partial()
            begun = "".join(self._evaluation.begun) if index < 0 else ""
            self._growing[index] = None if partial is None else _Growing(self._evaluation.run, partial, begun)
        growing = self._growing[index]
        if growing is not None:
            growing.take(text)


class _Growing:
    """A typed answer that is published as it arrives. `begun` is the text of earlier answers that this one continues."""

    def __init__(self, run: Run, partial: PartialValue, begun: str) -> None:
        self._run = run
        self._partial = partial
        self._published = 0
        """The number of changes that have been published."""
        self._may_copy = 0
        if begun:
            partial.take(begun)
            self._published = partial.changes

    def take(self, text: str) -> None:
        partial = self._partial
        partial.take(text)
        self._may_copy += _COPIED * len(text)
        if partial.changes and not self._published:
            self._published = 1
            self._publish([] if partial.is_list else {})
        if partial.changes > self._published and (partial.is_complete or partial.size <= self._may_copy):
            self._published = partial.changes
            self._may_copy -= partial.size
            self._publish(partial.copy())

    def _publish(self, value: object) -> None:
        self._run.publish(PartialOutput(value, self._run.run_context))
