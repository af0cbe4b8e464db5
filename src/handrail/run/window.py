"""`Window`: how much of its model's window a conversation takes, and its compaction when that is nearly full."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from handrail.concurrency.cancellation import finish
from handrail.concurrency.threads import call_either
from handrail.errors import DefinitionError
from handrail.messages import Compaction, Message, Model, Piece, Sent, Usage, Why
from handrail.models.prices import window_of
from handrail.prompt.compact import Compact, Strategy
from handrail.run.answer import FailedRequest, RecordedCompaction
from handrail.run.compaction import message_of, pieces_of, trimmed, weight_of
from handrail.run.conversation import check_well_formed
from handrail.run.limits import charge_again
from handrail.run.place import Place
from handrail.schema.problems import describe_kind
from handrail.text.raised_errors import described

if TYPE_CHECKING:
    from handrail.run.evaluation import Evaluation

Summarise = Callable[["Evaluation", list[FailedRequest]], Awaitable[str]]
"""A function that asks for a summary and returns a note with it, or "", and adds what it cost to the list."""


_DENSITY = 3.0
"""The weight of a token as long as the provider has not reported how many there are, and at most for what came after its last count."""
_MOST_DENSE = 8.0


class Window:
    """How much of the model's window the next request of an evaluation takes, and what is done when too little is left."""

    __slots__ = ("_counted", "_fixed", "_last", "_sent", "_spent", "_weighed", "how", "limit")

    def __init__(self, how: Compact) -> None:
        self.how = how
        self.limit: int | None = None
        """The number of tokens above which the conversation is compacted; None if it never is."""
        self._counted = (0, 0)
        """The number of messages in the provider's last count, and the tokens that it counted; zeros if there is none."""
        self._weighed = (0, 0)
        """The number of messages sent so far whose weights are known, and the sum of these."""
        self._fixed = (-1, 0)
        """The number of tools, and the weight of the system text and of these."""
        self._sent: Sent[Message] | None = None
        """The messages that the figures are about."""
        self._spent: dict[int, tuple[FailedRequest, ...]] = {}
        """What summaries before an answer have cost, by the answer's number."""
        self._last: Usage | None = None
        """The usage of the last request, if the provider reported it."""

    def use(self, model: Model) -> None:
        """Measure by the window of this model from now on. A different model may count the same messages differently."""
        self.limit = self.how.limit(window_of(model.name, model.traits))
        self._counted = (0, 0)

    def count(self, evaluation: Evaluation, usage: Usage) -> None:
        """Take note of the provider's count for the messages sent and the answer that came, before that is added to them."""
        self._last = usage
        if usage.tokens and self.limit is not None:
            self._counted = (len(evaluation.conversation.sent) + 1, usage.tokens)

    def is_full(self, evaluation: Evaluation) -> bool:
        """Return whether the conversation has to be compacted before the next request."""
        return self.limit is not None and self.tokens(evaluation) > self.limit

    def tokens(self, evaluation: Evaluation) -> int:
        """Return about how many tokens the next request has. Only what came after the provider's last count is estimated."""
        known, tokens = self._counted
        if not known:
            return int((self._weight(evaluation) + self._fixed_weight(evaluation)) / _DENSITY)
        new = sum(map(weight_of, evaluation.conversation.sent.since(known)))
        return tokens + int(new / min(self._density(evaluation), _DENSITY))

    def _density(self, evaluation: Evaluation) -> float:
        """Return the weight of a token, by the provider's last count."""
        known, tokens = self._counted
        if not known:
            return _DENSITY
        new = sum(map(weight_of, evaluation.conversation.sent.since(known)))
        return min(
            max((self._weight(evaluation) - new + self._fixed_weight(evaluation)) / tokens, 1.0), _MOST_DENSE
        )

    def _weight(self, evaluation: Evaluation) -> int:
        sent = evaluation.conversation.sent
        known, weight = self._weighed if sent is self._sent else (0, 0)
        weight += sum(map(weight_of, sent.since(known)))
        self._sent, self._weighed = sent, (len(sent), weight)
        return weight

    def _fixed_weight(self, evaluation: Evaluation) -> int:
        if self._fixed[0] != len(evaluation.tools):
            self._fixed = (len(evaluation.tools), len(evaluation.system.encode()) + evaluation.offered_size())
        return self._fixed[1]

    def restore(self, evaluation: Evaluation, place: Place) -> None:
        """Repeat the compaction that is recorded before the answer at a place, if there is one."""
        recorded = evaluation.run.log.find("compaction", place, RecordedCompaction)
        if recorded is not None:
            for each in recorded.spent:
                charge_again(evaluation.run, each)
            self._apply(evaluation, recorded)

    async def compact(self, evaluation: Evaluation, summarise: Summarise, why: Why = "full") -> bool:
        """Compact the conversation, record that, and return whether less is sent from now on.

        Raises `PromptEvaluationError` if a function that decides what is sent fails. The conversation then stays as it is.
        """
        conversation = evaluation.conversation
        if conversation.is_to_be_compacted:
            evaluation.run.session.is_to_be_compacted, why = False, "asked"
        given, messages, tokens = conversation.pieces, conversation.messages, self.tokens(evaluation)
        last, spent = self._last, list[FailedRequest]()
        if callable(self.how.by) and why != "refused":
            by = getattr(self.how.by, "__name__", type(self.how.by).__name__)
            pieces = await _chosen(evaluation, self.how.by, by)
        else:
            note = ""
            if self.how.by == "summary" and why != "refused" and not conversation.masks:
                note = await summarise(evaluation, spent)
            by = "summary" if note else "trim"
            density, limit = self._density(evaluation), min(self.limit or tokens, tokens)
            room = int(self.how.keep * limit * density) - self._fixed_weight(evaluation) - len(note.encode())
            pinned = {offered.tool.name for offered in evaluation.tools if offered.tool.pinned}
            pieces = trimmed(
                given, messages, room=max(room, 0), limit=int(limit * density), pinned=pinned, note=note
            )
        before, after = (
            sum(weight_of(message_of(each, messages)) for each in some) for some in (given, pieces)
        )
        if after >= before:
            if (
                why == "full"
            ):  # nothing can be left out. A request that is too long is refused by the provider.
                self.limit = None
            return False
        before_now = self._spent.get(evaluation.answers, ())
        usage = [each.usage for each in spent if each.usage is not None]
        compaction = Compaction(
            len(messages), pieces, by, tokens, why, last, sum(usage, Usage()) if usage else None
        )
        recorded = RecordedCompaction(compaction, (*before_now, *spent))
        evaluation.leave_record()
        await finish(evaluation.run.log.note("compaction", evaluation.place_of_answer, recorded))
        self._apply(evaluation, recorded)
        return True

    def _apply(self, evaluation: Evaluation, recorded: RecordedCompaction) -> None:
        evaluation.conversation.compact(
            recorded.compaction, evaluation.run.run_context.run_id, again=evaluation.replays
        )
        evaluation.forget_request()
        self._counted = (0, 0)
        self._spent = {evaluation.answers: recorded.spent}


async def _chosen(evaluation: Evaluation, strategy: Strategy, name: str) -> tuple[Piece, ...]:
    """Return what a function decides to send. Raises `PromptEvaluationError` if it fails or returns something that can't be sent."""
    conversation = evaluation.conversation
    given = [message_of(each, conversation.messages) for each in conversation.pieces]
    try:
        returned: Any = await call_either(strategy, given)
        if not isinstance(returned, Sequence) or isinstance(returned, str):
            raise DefinitionError(f"it returned {describe_kind(returned)}. Return a list of messages.")
        found: Sequence[Message] = list(cast("Sequence[Message]", returned))
        check_well_formed(found)
        return pieces_of(found, conversation.pieces, conversation.messages)
    except Exception as error:
        problem = DefinitionError(f"compact={name} can't be used: {described(error)}")
        raise evaluation.failed(problem, "compaction") from error
