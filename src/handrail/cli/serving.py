"""`handrail serve`: an app for people in browsers, and for AG-UI clients."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.cli import options
from handrail.cli.codes import DONE
from handrail.cli.ending import UsageError, refused
from handrail.cli.streams import nothing_printed
from handrail.environment.text import escape_line

if TYPE_CHECKING:
    import socket

    from handrail.records import Journal
    from handrail.serve.app import ServedApp
    from handrail.serve.source import Loaded

_MODULE = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeAsked:
    """The options of `serve`."""

    app: str
    host: str = "127.0.0.1"
    port: int = 8600
    token: str | None = None
    model: str | None = None
    files: Path | None = None
    journal: Path | None = None
    approve: str = "ask"
    open: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


def serve(asked: ServeAsked) -> int:
    """Serve until told to stop; the exit code."""
    try:
        _check_installed()
        with nothing_printed():
            loaded = _loaded(asked)
        with contextlib.closing(options.opened_journal(asked.journal)) as journal:
            app = _app(asked, loaded, journal)
            asyncio.run(_serve(asked, app, _listening(asked, app)))
    except Exception as error:
        return refused(error)
    return DONE


async def _serve(asked: ServeAsked, app: ServedApp, listening: socket.socket) -> None:
    from handrail.serve.server import address_of, run

    token = _token(asked)
    address = address_of(listening) + (f"#token={token}" if token is not None else "")

    def ready() -> None:
        _say(f"{escape_line(app.threads.source.name)} is at {address} (Ctrl-C stops it)")
        if asked.open:
            import webbrowser

            webbrowser.open(address)

    def stopping(runs: int) -> None:
        what = "" if not runs else f", parking {runs} run{'s' if runs > 1 else ''}"
        _say(f"Stopping{what}. Nothing is lost; once more ends it at once.")

    await run(app, listening, ready=ready, stopping=stopping)


def _listening(asked: ServeAsked, app: ServedApp) -> socket.socket:
    from handrail.serve.server import listen

    try:
        return listen(asked.host, asked.port, app)
    except OSError as error:
        raise UsageError(_cannot_listen(asked, error)) from None


def _app(asked: ServeAsked, loaded: Loaded, journal: Journal) -> ServedApp:
    from handrail.serve.app import asgi

    return asgi(
        loaded.source,
        journal=journal,
        authenticate=loaded.authenticate,
        token=_token(asked),
        renderers=loaded.renderers,
        hosts=asked.hosts,
        origins=asked.origins,
    )


def _loaded(asked: ServeAsked) -> Loaded:
    """What is served. Workers have the files beside them, as `run` and `chat` give them."""
    from handrail.serve.source import load

    path = Path(asked.app)
    if not path.exists() and path.with_suffix(".md").is_file():
        path = path.with_suffix(".md")  # folder/main, as `run` takes it too
    is_worker = path.is_dir() or path.suffix == ".md"
    if not is_worker and not path.suffix == ".py" and not _can_be_module(asked.app):
        raise UsageError(
            f"there is no {asked.app}: no folder, no worker's file and no module. Name one of these; "
            "`handrail new demo` makes a folder with workers."
        )
    folder = path if path.is_dir() else path.parent
    return load(
        str(path) if is_worker else asked.app,
        model=options.model(asked.model),
        approvals=options.approvals(asked.approve),
        files=options.filesystem(asked.files, folder) if is_worker or asked.files is not None else None,
    )


def _can_be_module(named: str) -> bool:
    """Is there a module of this name, here or installed? `file.py:prompt` is a file's."""
    module = named.partition(":")[0]
    if module.endswith(".py"):
        return True
    if not _MODULE.fullmatch(module):
        return False
    options.look_here()
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _token(asked: ServeAsked) -> str | None:
    return asked.token or os.environ.get("HANDRAIL_TOKEN") or None


def _cannot_listen(asked: ServeAsked, error: OSError) -> str:
    where = f"{asked.host}:{asked.port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where} is taken. Name another port: --port {asked.port + 1}, or --port 0 for any that is free."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{where} may not be listened at. Name a port over 1023: --port 8600."
    return (
        f"{where} can't be listened at ({error.strerror or error}). Name another address: --host 127.0.0.1."
    )


def _check_installed() -> None:
    from handrail.serve import REQUIRED, missing_extra

    for name in REQUIRED:
        if importlib.util.find_spec(name) is None:
            raise missing_extra(name)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
