"""Claims, which ensure that a handoff that `start` parked is finished at most once.

A `finish` claims the handoff, by the id of its parked data, and gives the claim up if it does not succeed. The claim is
kept in this process and, if the run of the `finish` has a journal, in the journal, where other processes find it.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

from handrail.dispatch.frame import Frame
from handrail.errors import AnswerRefused, OutcomeUnknown
from handrail.tools import ToolResult

_KEPT = 10_000
"""Maximum number of claims that a process keeps. The oldest are dropped."""

Work = Callable[[], Awaitable[ToolResult[Any]]]


class _Unfinished(Exception):
    """Raised if `after` did not succeed, so that the handoff can be finished again."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Claim:
    """One attempt to finish a handoff, with the handoff's id and the key of the call that runs `after`."""

    __slots__ = ("_frame", "_id", "_key", "_name", "_result")

    def __init__(self, frame: Frame, id: str, name: str, key: str) -> None:
        self._frame = frame
        self._id = id
        self._name = name
        self._key = key
        self._result: ToolResult[Any] | None = None

    async def run(self, work: Work) -> ToolResult[Any]:
        """Claim the handoff and run the call. The claim is given up if the call does not succeed.

        Raises `AnswerRefused` if another call has claimed the handoff. Raises `OutcomeUnknown` if an earlier process ended
        while it was finishing the handoff, unless this call belongs to a resumed run.

        A call that is entered again, because its run was resumed or the call around it was attempted again, has the
        same key and keeps its claim.
        """
        before = _claims.take(self._id, self._key)
        if before not in ("", self._key):
            raise self._refusal()
        done = False
        try:
            result = await self._run_recorded(work)
            done = result.success
        finally:
            if not done and not before:
                _claims.release(self._id)
        return result

    async def _run_recorded(self, work: Work) -> ToolResult[Any]:
        """Run the call and record the claim in the journal, if there is one. Raises the errors that `run` names."""
        journal = self._frame.journal
        if journal is None:
            return await work()

        async def finish() -> str:
            try:
                self._result = await work()
            except GeneratorExit:
                raise
            except BaseException as error:  # also a cancellation; the gate has rolled the call back
                raise _Unfinished(error) from None
            if not self._result.success:
                raise _Unfinished(None)
            return self._key

        async def decide() -> str:
            if self._frame.outer is not None and self._frame.log.resumed:
                return await finish()  # the gate treats an interrupted call according to its effect
            raise OutcomeUnknown(
                self._name,
                "A process began to finish this handoff, and did not record the end. Find out what its `after` changed, "
                "then start the handoff again.",
            )

        try:
            by = await journal.steps.run(f"handoff {self._id}", finish, unsettled=decide)
        except _Unfinished as unfinished:
            if unfinished.error is not None:
                raise unfinished.error from None
            assert self._result is not None
            return self._result
        if self._result is not None:
            return self._result
        if by != self._key:
            raise self._refusal()
        return await work()

    def _refusal(self) -> AnswerRefused:
        return AnswerRefused(
            self._id,
            f"the handoff {self._name!r} was finished already, or is being finished",
            "The first answer counts. To ask again, start the handoff again.",
        )


class _Claims:
    """The claims of this process, by the id of the handoff. The newest are kept."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        self._lock = threading.Lock()

    def take(self, id: str, key: str) -> str:
        """Claim a handoff, unless it is claimed. Returns the key of the earlier claim; "" if there was none."""
        with self._lock:
            before = self._keys.get(id, "")
            if not before:
                self._keys[id] = key
                if len(self._keys) > _KEPT:
                    del self._keys[next(iter(self._keys))]
            return before

    def release(self, id: str) -> None:
        """Give up a claim, because the call did not succeed."""
        with self._lock:
            self._keys.pop(id, None)


_claims = _Claims()
