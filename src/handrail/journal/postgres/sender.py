"""Records that are sent to PostgreSQL from the event loop, so that most records need no other thread.

Handing a statement to the journal's thread and its outcome back takes longer than the statement itself. So while the
thread has nothing to do, the loop sends the statement that adds a record without blocking, and reads the answer when it
has arrived. Whatever else happens is left to the thread: it waits for the answers that are still missing before it uses
the connection, and it finds out what became of a statement that failed or whose connection was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import errors, pq

from handrail.journal.postgres.chains import FENCED, FencedRecord, PostgresChains
from handrail.journal.postgres.statements import PostgresConnection
from handrail.journal.sql.database import Job

_NAME = "handrail_add"
_TYPES = (
    *("bigint", "bytea", "bigint", "text", "bytea", "text"),  # the head of the chain
    *("bigint", "bigint", "text", "text", "double precision", "text", "bytea", "bytea", "text", "bigint"),
)
_parts = FENCED.split("?")
_PREPARE = f"PREPARE {_NAME} ({', '.join(_TYPES)}) AS {_parts[0]}" + "".join(
    f"${number}{part}" for number, part in enumerate(_parts[1:], 1)
)
_BINARY = [pq.Format.BINARY] * len(_TYPES)
_LONGEST = 65_536
"""Maximum size in bytes of a record that the loop sends."""
_BY_TYPE: Mapping[str, Callable[[Any], bytes]] = {
    "bigint": struct.Struct(">q").pack,
    "double precision": struct.Struct(">d").pack,
    "text": str.encode,
    "bytea": bytes,
}
_ENCODERS = [_BY_TYPE[each] for each in _TYPES]


class Addition(NamedTuple):
    """A record to be added by one statement. `deliver` is called in the loop once `job` is over."""

    record: FencedRecord
    job: Job[bool]
    """The same work for the journal's thread. It also finds out whether a record that was sent has been added."""
    loop: asyncio.AbstractEventLoop
    deliver: Callable[[Job[bool]], object]


class Sender:
    """Sends records from an event loop, one after another, on the connection of the journal's thread.

    The thread and the loop never use the connection at the same time. The loop uses it with `lock` held. It sends a record
    only if `is_idle` says that the thread has no job, and reads answers until the thread takes the queue. The thread calls
    `finish` before each job. `wake` gives the thread an empty job. `run` runs a job, and is called in the thread.
    """

    def __init__(
        self,
        connection: PostgresConnection,
        chains: PostgresChains,
        lock: threading.Lock,
        *,
        is_idle: Callable[[], bool],
        wake: Callable[[], None],
        run: Callable[[Job[Any]], None],
    ) -> None:
        self._connection = connection
        self._chains = chains
        self._lock = lock
        self._is_idle = is_idle
        self._wake = wake
        self._run = run
        self._process = os.getpid()
        """The process that has the thread. A forked child must not use the connection."""
        self._queue: deque[Addition] = deque()
        """The records that are being added, all from the same loop. Only the first one may have been sent."""
        self._result: pq.abc.PGresult | None = None
        """The result of the statement that was sent; None until it has arrived."""
        self._reader: _Reader | None = None
        """Reads answers in the loop that sent the last statement; None if nothing reads them."""

    # --- in the loop, with the lock held ---

    def begin(self, addition: Addition) -> bool:
        """Begin to add a record, after those that are still being added. Returns False if only the thread can add it."""
        if not self._is_idle() or os.getpid() != self._process:
            return False
        if self._queue:
            is_next = self._queue[0].loop is addition.loop
            if is_next:
                self._queue.append(addition)
            return is_next
        return self._send(addition)

    def _is_watching(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Watch the connection in this loop, and return whether the loop can do that."""
        reader, raw = self._reader, self._connection.raw
        if reader is not None and reader.loop is loop and reader.raw is raw:
            return True
        self._unwatch()
        try:
            self._reader = _Reader(loop, raw, self._read)
        except (NotImplementedError, OSError, psycopg.Error):
            return False
        return True

    def _unwatch(self) -> None:
        if self._reader is not None:
            self._reader.end()
            self._reader = None

    def _send(self, addition: Addition) -> bool:
        """Send a record as the first of the queue. Returns False, and sends nothing, if only the thread can add it."""
        connection, record = self._connection, addition.record
        pgconn = connection.raw.pgconn
        if connection.prepared is not connection.raw or len(record.body) > _LONGEST:
            return False
        if pgconn.transaction_status != pq.TransactionStatus.IDLE or not self._is_watching(addition.loop):
            return False
        try:
            values = self._chains.begin_fenced(record)
            if values is None:
                return False
            encoded = _encoded(values)
        except (ArithmeticError, AttributeError, TypeError, ValueError, struct.error):
            record.sent = None  # the thread reports it
            return False
        self._queue.appendleft(addition)
        try:
            pgconn.send_query_prepared(_NAME.encode(), encoded, _BINARY)
            is_sent = pgconn.flush() == 0
        except psycopg.Error:
            is_sent = False
        if not is_sent:  # the connection is lost, or its buffer is full
            self._hand_over()
        return True

    def _hand_over(self) -> None:
        """Leave the queue to the thread."""
        self._unwatch()
        self._wake()

    # --- in the loop ---

    def _read(self, reader: _Reader) -> None:
        """Read what has arrived. If the answer is complete, deliver it and send the next record."""
        with self._lock:
            if (
                reader is not self._reader or not self._queue
            ):  # the thread or another loop uses the connection
                reader.close()
                if reader is self._reader:
                    self._reader = None
                return
            try:
                if not self._has_answer():
                    return
            except psycopg.Error:
                self._hand_over()
                return
            changed = self._changed()
            if changed is None:
                self._hand_over()
                return
            over = self._queue.popleft()
            over.job.value = self._chains.end_fenced(over.record, changed)
            if self._queue:
                following = self._queue.popleft()
                if not self._is_idle() or not self._send(following):
                    self._queue.appendleft(following)
                    self._hand_over()
        over.deliver(over.job)

    # --- in the thread ---

    def prepare(self) -> None:
        """Prepare the statement on the current connection, unless it is prepared there. The thread calls this outside of transactions."""
        connection = self._connection
        if connection.prepared is not connection.raw:
            with contextlib.suppress(errors.DuplicatePreparedStatement):
                connection.raw.execute(_PREPARE, prepare=False)  # pyright: ignore[reportArgumentType, reportCallIssue]  # it contains no text from users
            connection.prepared = connection.raw

    def finish(self) -> None:
        """Finish everything that was begun, in order."""
        with self._lock:
            additions, self._queue = self._queue, deque()
        for each in additions:
            changed = None if each.record.sent is None else self._wait()
            if changed is None:
                self._run(each.job)
            else:
                each.job.value = self._chains.end_fenced(each.record, changed)
            each.job.finish()

    def close(self) -> None:
        """Finish everything that was begun, and stop watching the connection."""
        self.finish()
        with self._lock:
            self._unwatch()

    def _wait(self) -> int | None:
        """Wait for the answer to the statement that was sent, and return what `_changed` returns; None if the connection is lost."""
        pgconn = self._connection.raw.pgconn
        try:
            while not self._has_answer():
                waiting = select.poll()
                waiting.register(pgconn.socket, select.POLLIN | (select.POLLOUT if pgconn.flush() else 0))
                waiting.poll()
        except psycopg.Error:
            self._result = None
            return None
        return self._changed()

    # --- in either of them ---

    def _has_answer(self) -> bool:
        """Read what has arrived, and return whether the answer is complete. Raises `psycopg.Error` if the connection is lost."""
        pgconn = self._connection.raw.pgconn
        pgconn.consume_input()
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                return True
            self._result = result
        return False

    def _changed(self) -> int | None:
        """Return how many rows the statement has changed, or None if it has failed."""
        connection, result, self._result = self._connection, self._result, None
        if result is None or result.status != pq.ExecStatus.COMMAND_OK:
            connection.prepared = None  # the prepared statement may not exist any more
            return None
        changed = result.command_tuples or 0
        connection.total_changes += changed
        return changed


class _Reader:
    """Calls a function in a loop whenever something has arrived on a connection.

    It watches a duplicate of the connection's descriptor. The original is closed when the connection is lost, and its
    number can be given to another file before the loop stops watching.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        raw: psycopg.Connection[Any],
        read: Callable[[_Reader], None],
    ) -> None:
        self.loop = loop
        self.raw = raw
        self._descriptor = os.dup(raw.pgconn.socket)
        self._closed = weakref.finalize(self, os.close, self._descriptor)
        try:
            loop.add_reader(self._descriptor, read, self)
        except BaseException:
            self._closed()
            raise

    def end(self) -> None:
        """Stop watching soon. This may be called from any thread."""
        try:
            self.loop.call_soon_threadsafe(self.close)
        except RuntimeError:  # the loop is closed
            self.close()

    def close(self) -> None:
        """Stop watching. This is called in the loop, or after it was closed."""
        if self._closed.alive:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.remove_reader(self._descriptor)
            self._closed()


def _encoded(values: Sequence[Any]) -> Sequence[bytes]:
    """Return the values of the statement in PostgreSQL's binary format."""
    return tuple(encode(value) for encode, value in zip(_ENCODERS, values, strict=True))
