"""The command line: `handrail run`, `chat`, `serve`, `mcp`, `worker`, `submit`, `runs` and the other commands.

This module works without the `cli` extra. Modules that need typer and rich are imported when they are used.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO, cast

__all__ = ["main"]

_EXTRA = ("typer", "rich", "jinja2", "yaml")


def main() -> None:
    """Run the `handrail` program.

    Exits with a message if a package of the `cli` extra is missing or the output can't be written. If the reader of a
    pipe has closed it, exits without a message.
    """
    _prepare_streams()
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
    except ImportError as missing:
        if (missing.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(
            f"handrail: the command line needs {missing.name}, which is not installed. "
            "Install it with: pip install 'handrail[cli]'\n"
        )
        raise SystemExit(2) from None
    except OSError as error:  # commands report their own OSErrors, so this one comes from printing
        _discard_output()
        if not isinstance(error, BrokenPipeError):  # the reader of a pipe may close it early
            sys.stderr.write(f"handrail: can't write the output: {error.strerror}.\n")
        raise SystemExit(1) from None


def _run() -> None:
    if sys.argv[1:] == ["--version"]:  # `--version` works without the `cli` extra
        from handrail import __version__

        print(f"handrail {__version__}")
        return
    from handrail.cli.commands import app
    from handrail.cli.outcome import UsageError, fail
    from handrail.cli.server_token import take_secrets
    from handrail.errors import DefinitionError

    telemetry = None
    try:
        take_secrets()
        if sys.argv[1:2] in _EXECUTING or sys.argv[1:3] in _EXECUTING:
            from handrail.telemetry import start_from_environment

            telemetry = start_from_environment()
    except (UsageError, DefinitionError) as error:
        raise SystemExit(fail(error, as_json="--json" in sys.argv)) from None
    try:
        app()
    finally:
        if telemetry is not None:
            telemetry.stop()


_EXECUTING = (["run"], ["chat"], ["serve"], ["mcp"], ["worker"], ["runs", "resume"], ["runs", "undo"])
"""The commands that execute runs or undo them, so that there is something to observe."""


def _prepare_streams() -> None:
    """Open missing streams on the null device, make standard output escape what it can't encode, and guard the streams.

    The next file that is opened would otherwise get the descriptor of a missing stream, and output would end up in
    that file. Environment variables that claim a terminal of size zero are removed.
    """
    from handrail.cli.streams import guard_streams

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # stays open until the program ends
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "").strip("0"):  # a terminal of size zero would show nothing
            os.environ.pop(name, None)
    out: TextIO = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        cast("io.TextIOWrapper", out).reconfigure(errors="backslashreplace")
    guard_streams()


def _discard_output() -> None:
    """Redirect standard output to the null device, so that Python does not report the same error again at exit."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())
