"""`HeardQuestions`: the questions of a run, and what people said along with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from handrail.question import Answer, Question

if TYPE_CHECKING:
    from handrail.journals import Check, Mask, Questions
    from handrail.protocols import Asker
    from handrail.records import QuestionRecord


class HeardQuestions:
    """Asks questions through another `Questions`, and keeps the answers that have a remark until the run's model is told."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self.remarks: dict[str, Answer] = {}
        """The answers whose remarks the model has not been told, by question id, in the order in which they arrived."""

    async def ask(
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
        /,
    ) -> Answer:
        answer = await self._questions.ask(question, asker, check, mask)
        if answer.has_remark:
            self.remarks[question.id] = answer
        return answer

    def answer(self, answer: Answer, /) -> None:
        self._questions.answer(answer)

    async def open(self, run_id: str | None = None, /, *, principal: str | None = None) -> Sequence[Question]:
        return await self._questions.open(run_id, principal=principal)

    async def history(self, run_id: str, /) -> Sequence[QuestionRecord]:
        return await self._questions.history(run_id)

    async def withdraw(self, question_id: str, /) -> None:
        await self._questions.withdraw(question_id)

    async def withdraw_all(self, prefix: str, /) -> None:
        await self._questions.withdraw_all(prefix)
