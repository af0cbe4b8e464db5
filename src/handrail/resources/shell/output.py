"""What a command said: its beginning and its end, and how much was between."""

from __future__ import annotations

import codecs


class Output:
    """Takes any amount of bytes and keeps at most `limit` of them, half from each end."""

    __slots__ = ("_head", "_head_limit", "_tail", "_tail_limit", "total")

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        """Bytes taken."""

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + 65536:  # seldom, so that each byte is moved about once
            del self._tail[: len(self._tail) - self._tail_limit]

    def read(self) -> tuple[str, int]:
        """The text, and how many bytes were left out of its middle.

        What is not UTF-8 is shown as `\\xff`; no character is cut in half.
        """
        tail = bytes(self._tail[max(0, len(self._tail) - self._tail_limit) :])
        if len(self._head) + len(tail) == self.total:
            return (bytes(self._head) + tail).decode(errors="backslashreplace"), 0
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        head = decoder.decode(bytes(self._head))
        begun = len(decoder.getstate()[0])
        cut = 0
        while cut < min(3, len(tail)) and tail[cut] & 0xC0 == 0x80:
            cut += 1
        omitted = self.total - len(self._head) - len(tail) + begun + cut
        text = tail[cut:].decode(errors="backslashreplace")
        return f"{head}\n… {omitted} bytes left out …\n{text}", omitted
