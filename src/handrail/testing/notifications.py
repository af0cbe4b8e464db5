"""`RecordingSender`: receivers of notifications for tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from handrail.notify.address import Address
from handrail.notify.message import Message


class RecordingSender:
    """Records the notifications that a server sends, and sends none: `asgi(..., sender=RecordingSender())`.

    `answer` is called with each URL and returns "" if the receiver has the message, or else why not.
    """

    def __init__(self, answer: Callable[[str], str] = lambda url: "") -> None:
        self.answer = answer
        self.attempts: list[tuple[str, Message]] = []
        """The URL and the message of every attempt, oldest first."""
        self._arrived: list[tuple[str, Message]] = []

    async def send(self, address: Address, message: Message, /) -> str:
        self.attempts.append((address.url, message))
        problem = self.answer(address.url)
        if not problem:
            self._arrived.append((address.url, message))
        return problem

    def events(self, url: str) -> list[dict[str, Any]]:
        """Return the events that have arrived at a URL, oldest first, each with its `type` and `data`."""
        return [json.loads(message.body) for where, message in self._arrived if where == url]
