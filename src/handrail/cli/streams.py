"""The streams of the program: there although whoever started it closed them, and the answer alone in the answer's."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Generator
from typing import TextIO, cast

from handrail.environment.text import is_terminal


def open_closed_streams() -> None:
    """Before anything else: what is closed leads nowhere, and no letter is beyond an encoding.

    A closed stream's number would go to the next file that is opened, and what is written to the stream
    would end up in that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # for as long as the program
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "").strip("0"):  # a screen of no size would show nothing
            os.environ.pop(name, None)
    out: TextIO = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        cast("io.TextIOWrapper", out).reconfigure(errors="backslashreplace")


def give_up_printing() -> None:
    """What could not be written is written nowhere: Python would try once more at its end, and complain."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def nothing_printed(even_on_a_terminal: bool = False) -> Generator[None]:
    """While this lasts, what tools print, and the programs they start, goes to standard error.

    Standard output is the answer's. On a terminal there is no need to keep them apart.
    """
    out = sys.stdout
    if is_terminal(out) and not even_on_a_terminal:
        yield
        return
    out.flush()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        with contextlib.suppress(OSError, ValueError):  # a stream of no file has no children that write to it
            number, kept = out.fileno(), os.dup(out.fileno())
            stack.callback(os.close, kept)
            os.dup2(sys.stderr.fileno(), number)
            stack.callback(os.dup2, kept, number)
        yield
