"""`handrail serve`: a page for people in browsers, and AG-UI for programs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.cli.command_options import (
    ServeOptions,
    find_model,
    is_module,
    open_files,
    open_journal,
    parse_approvals,
)
from handrail.cli.outcome import DONE, UsageError, divert_stdout, fail
from handrail.rendering import escape_line

if TYPE_CHECKING:
    import socket

    from handrail.serve.app import ServedApp
    from handrail.serve.sources import Loaded


def serve(options: ServeOptions) -> int:
    """Serve until told to stop, and return the exit code."""
    token = options.token or os.environ.get("HANDRAIL_TOKEN") or None
    try:
        _check_extra()
        from handrail.serve.app import asgi

        with divert_stdout():
            loaded = _load(options)
        with contextlib.closing(open_journal(options.journal, loaded.source.files)) as journal:
            app = asgi(
                loaded.source,
                journal=journal,
                authenticate=loaded.authenticate,
                token=token,
                renderers=loaded.renderers,
                hosts=options.hosts or (),
                origins=options.origins or (),
            )
            asyncio.run(_serve(options, app, _listen(options, app), token))
    except Exception as error:
        return fail(error)
    return DONE


async def _serve(options: ServeOptions, app: ServedApp, listening: socket.socket, token: str | None) -> None:
    from handrail.serve.server import address_of, run

    address = address_of(listening) + (f"#token={token}" if token is not None else "")

    def ready() -> None:
        _print(f"{escape_line(app.threads.source.name)} is at {address} (Ctrl-C stops it)")
        if options.open:
            import webbrowser

            webbrowser.open(address)

    def stopping(runs: int) -> None:
        parked = "" if not runs else f", parking {runs} run{'s' if runs > 1 else ''}"
        _print(f"Stopping{parked}. Nothing is lost; press again to quit at once.")

    await run(app, listening, ready=ready, stopping=stopping)


def _load(options: ServeOptions) -> Loaded:
    """Load the app to serve. Workers get the files beside them, as with `run` and `chat`."""
    from handrail.serve.sources import load

    path = Path(options.app)
    if not path.exists() and path.with_suffix(".md").is_file():
        path = path.with_suffix(".md")  # `folder/main` is accepted, as by `run`
    is_worker = path.is_dir() or path.suffix == ".md"
    if not is_worker and not path.suffix == ".py" and not is_module(options.app):
        raise UsageError(
            f"{options.app} is neither a folder, a worker's file nor a module. "
            "`handrail new demo` creates a folder of workers to start with."
        )
    folder = path if path.is_dir() else path.parent
    return load(
        str(path) if is_worker else options.app,
        model=find_model(options.model),
        approvals=parse_approvals(options.approve),
        files=open_files(options.files, folder) if is_worker or options.files is not None else None,
    )


def _listen(options: ServeOptions, app: ServedApp) -> socket.socket:
    from handrail.serve.server import listen

    where = f"{options.host}:{options.port}"
    try:
        return listen(options.host, options.port, app)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = f"Use another port: --port {options.port + 1}, or --port 0 for any free one."
            raise UsageError(f"{where} is in use. {advice}") from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise UsageError(
                f"not allowed to listen on {where}. Use a port above 1023: --port 8600."
            ) from None
        reason = error.strerror or error
        raise UsageError(
            f"can't listen on {where}: {reason}. Use another address: --host 127.0.0.1."
        ) from None


def _check_extra() -> None:
    from handrail.serve import REQUIRED, missing_extra

    for name in REQUIRED:
        if importlib.util.find_spec(name) is None:
            raise missing_extra(name)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
