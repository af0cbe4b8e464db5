"""The command line: `handrail run`, `chat`, `new`, `workers`, `serve`, `runs`.

Only this file is loaded without the extra `cli`; what needs typer and rich is imported when it is used.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

_NEEDED = ("typer", "rich", "jinja2", "yaml")


def main() -> None:
    """The program `handrail`."""
    from handrail.cli.streams import give_up_printing, open_closed_streams

    open_closed_streams()
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
    except ImportError as missing:
        if (missing.name or "").partition(".")[0] not in _NEEDED:
            raise
        sys.stderr.write(
            f"handrail: the command line needs {missing.name}, which is not installed. "
            "Install it with: pip install 'handrail[cli]'\n"
        )
        raise SystemExit(2) from None
    except OSError as error:  # commands say their own: it is what they print that could not be written
        give_up_printing()
        if not isinstance(error, BrokenPipeError):  # then whoever read it has seen enough
            sys.stderr.write(f"handrail: what there is to say can't be written: {error.strerror}.\n")
        raise SystemExit(1) from None


def _run() -> None:
    if sys.argv[1:] == ["--version"]:  # answered without the extra, and without loading it
        from handrail import __version__

        print(f"handrail {__version__}")
        return
    from handrail.cli.app import app

    app()
