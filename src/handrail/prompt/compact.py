"""`Compact`: when and how a conversation is compacted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from handrail.errors import DefinitionError
from handrail.messages import Message
from handrail.text.spelling import checked_arguments

Strategy = Callable[[Sequence[Message]], Any]
"""A function that takes the messages that are sent now, and returns those to send from now on. It may be async."""


@checked_arguments
@dataclasses.dataclass(frozen=True, kw_only=True)
class Compact:
    """When and how a conversation is compacted, so that it fits the model's window: `Agent(..., compact=Compact(by="summary"))`.

    It is compacted before a request that would have more tokens than `at` times the model's window, or than `tokens`, whichever is less.
    For a model whose window is not known, only `tokens` counts. About `keep` times that many tokens are left.

    - `by="trim"` leaves out old messages: the newest ones are sent whole, and so is what the person said, up to a quarter of the limit.
    - `by="summary"` also asks the model for a summary of what is left out. If that fails, nothing takes its place.
    - `by=function` sends what the function returns for the messages that are sent now. It may leave out messages and add some of the
      user's, but not change the model's.

    Results of tools with `pinned=True` are kept, the newest of each tool.
    """

    by: Literal["trim", "summary"] | Strategy = "trim"
    at: float = 0.8
    tokens: int | None = None
    keep: float = 0.5

    def __post_init__(self) -> None:
        if self.by not in ("trim", "summary") and not callable(self.by):
            raise DefinitionError(f"by is {self.by!r}. Pass 'trim', 'summary' or a function of the messages.")
        for name in ("at", "keep"):
            share = getattr(self, name)
            if type(share) not in (int, float) or not 0 < share <= (1 if name == "at" else 0.9):
                most = "1" if name == "at" else "0.9"
                raise DefinitionError(f"{name} is {share!r}. Pass a share: more than 0, and at most {most}.")
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise DefinitionError(
                f"tokens is {self.tokens!r}. Pass a whole number of at least 1, or None for no such limit."
            )

    def limit(self, window: int | None) -> int | None:
        """Return the number of tokens above which a conversation is compacted; None if it never is."""
        limits = [] if window is None else [int(self.at * window)]
        return min([*limits, *([] if self.tokens is None else [self.tokens])], default=None)

    def recorded(self) -> tuple[str, float, int | None, float]:
        """Return these settings as plain data. A function is recorded as trimming."""
        return (self.by if isinstance(self.by, str) else "trim", self.at, self.tokens, self.keep)

    @classmethod
    def again(cls, by: Any, at: float, tokens: int | None, keep: float) -> Compact:
        """Return recorded settings."""
        return cls(by=by, at=at, tokens=tokens, keep=keep)


AT_THE_WINDOW = Compact()
"""How the conversations of runs are compacted whose prompt does not say it."""
