"""`GivenIds`: the ids of spans, which follow from what the spans are about, so that any process can name them."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator


class GivenIds(IdGenerator):
    """Gives the next span of a thread the ids that were set for it, and other spans random ones."""

    def __init__(self) -> None:
        self._next = threading.local()
        self._random = RandomIdGenerator()

    @contextmanager
    def next(self, trace_id: int, span_id: int) -> Generator[None]:
        """Give the span that begins in this block these ids. A span id of 0 stands for a random one.

        The trace id is used only if the span has no parent.
        """
        self._next.ids = trace_id, span_id
        try:
            yield
        finally:
            self._next.ids = 0, 0

    def generate_trace_id(self) -> int:
        return getattr(self._next, "ids", (0, 0))[0] or self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        return getattr(self._next, "ids", (0, 0))[1] or self._random.generate_span_id()

    def is_trace_id_random(self) -> bool:
        return False
