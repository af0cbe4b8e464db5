"""`--log json`: one JSON object for each log record, and for each line of text, that a command writes to standard error.

    {"time": "2026-11-20T09:30:00.125+00:00", "level": "WARNING", "logger": "shop", "message": "slow", "run_id": "4f…", "call_id": "4f….1"}

Secrets are hidden in every string. Lines are ASCII, so nothing in them can control a terminal.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TextIO, cast

from handrail.cli.streams import unguarded
from handrail.text.secrets import hide_all

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_TOO_LARGE = 1 << 63
"""Integers from here on are texts, since many readers of JSON can't take them as numbers."""
_STANDARD = frozenset(
    [*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"]
)  # uvicorn's `color_message` repeats the message


def use_json() -> None:
    """From now on, write standard error as JSON lines, with the records of every logger from INFO on."""
    stream = JsonStream(unguarded(sys.stderr))
    sys.stderr = cast("TextIO", stream)
    handler = logging.StreamHandler(stream.behind)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object in one line.

    Besides `time`, `level`, `logger`, `message` and `exception`, it has the fields of `extra`, and the ids of the call whose
    handler logged it.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": time,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        return json.dumps(
            {name: _plain(value) for name, value in (fields | _call_ids() | extra | fields).items()}
        )


class JsonStream:
    """A text stream that writes each line as a JSON object. All other attributes are those of the stream `behind`."""

    def __init__(self, behind: TextIO) -> None:
        self.behind = behind
        self._lock = threading.Lock()
        self._format = JsonFormatter().format
        self._unfinished = ""

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            self._write_line(line)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        with self._lock:
            line, self._unfinished = self._unfinished, ""
        self._write_line(line)
        self.behind.flush()

    def isatty(self) -> bool:
        return False  # so that nothing draws on it

    def report(self, level: int, message: str, **extra: str) -> None:
        """Write a message of the command itself."""
        record = logging.LogRecord("handrail", level, "", 0, message, None, None)
        vars(record).update(extra)
        self.behind.write(f"{self._format(record)}\n")
        self.behind.flush()

    def _write_line(self, line: str) -> None:
        if line.strip():
            record = logging.LogRecord("stderr", logging.INFO, "", 0, _COLOUR.sub("", line), None, None)
            self.behind.write(f"{self._format(record)}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def _plain(value: object) -> object:
    """Return the value of a field as a number, a Boolean, None, or a text without secrets."""
    is_plain = value is None or isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value))
    if is_plain or (isinstance(value, int) and abs(value) < _TOO_LARGE):
        return value
    try:
        return hide_all(str(value))
    except Exception as error:  # whatever an app logs, the record itself is not lost
        return f"[{type(value).__name__} can't be shown: {type(error).__name__}]"


def _call_ids() -> dict[str, str]:
    """Return the ids of the call whose handler runs this code, and of its run; {} outside of handlers."""
    from handrail.ids import call_span_of
    from handrail.run.current_call import entered  # not at the top, since `--version` loads this module

    reference = entered.get()
    attempt = None if reference is None else reference()
    if attempt is None:
        return {}
    run = attempt.run_context
    return {
        "run_id": run.run_id,
        "session_id": run.session_id,
        "call_id": attempt.id,
        "trace_id": run.trace_id,
        "span_id": call_span_of(run.run_id, attempt.id, run.attempt),
    }
