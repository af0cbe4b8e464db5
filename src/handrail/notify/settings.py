"""`Notify`: who is told about an app's questions besides those who may answer, and when."""

from __future__ import annotations

from handrail.concurrency.deadline import is_span
from handrail.errors import DefinitionError
from handrail.notify.address import Address
from handrail.text.spelling import checked_arguments


@checked_arguments
class Notify:
    """When people are told that a question of an app waits, and where else. A module that is served defines it as `notify`.

    A user who may answer is told at their own addresses (`handrail users add NAME --notify URL`). These `addresses`, such as that of
    a team's channel, are told about every question of the app. Raises `DefinitionError` for an invalid address or number.

    - `after`: seconds that a question waits before anybody is told.
    - `every`: minimum seconds between two messages to one address. Questions that begin to wait meanwhile are told together.
    - `remind`: seconds after which a question that still waits is told again, repeatedly; None means never.
    """

    __slots__ = ("addresses", "after", "every", "remind")

    def __init__(
        self, *addresses: str, after: float = 10.0, every: float = 60.0, remind: float | None = None
    ) -> None:
        for name, value in (("after", after), ("every", every), ("remind", remind)):
            if not is_span(value) and (value is not None or name != "remind"):
                raise DefinitionError(f"Notify(): {name} is {value!r}. Pass a number of seconds above 0.")
        self.addresses = tuple(dict.fromkeys(map(Address, addresses)))
        self.after = after
        self.every = every
        self.remind = remind

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, map(str, self.addresses)))
        return f"Notify({shown}{', ' if shown else ''}after={self.after}, every={self.every}, remind={self.remind})"

    def with_addresses(self, addresses: tuple[str, ...]) -> Notify:
        """Return these settings with more addresses."""
        urls = (*(each.url for each in self.addresses), *addresses)
        return Notify(*urls, after=self.after, every=self.every, remind=self.remind)
