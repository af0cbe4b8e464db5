"""`handrail serve`: an app for people in browsers, and for AG-UI clients."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.cli import options
from handrail.cli.codes import DONE
from handrail.cli.commands import complain
from handrail.cli.ending import UsageError, debugging, trouble
from handrail.cli.streams import nothing_printed
from handrail.environment.visible import on_one_line

if TYPE_CHECKING:
    import socket

    from handrail.serve.http import ServedApp

_MODULE = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*(?::[^\W\d]\w*)?")
_NEEDED = ("starlette", "uvicorn", "ag_ui")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of `serve`."""

    app: str
    host: str = "127.0.0.1"
    port: int = 8600
    token: str | None = None
    model: str | None = None
    files: Path | None = None
    journal: Path | None = None
    approve: options.Approve = "ask"
    open: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


def serve(asked: Asked) -> int:
    """Serve until told to stop; the exit code."""
    try:
        _check_installed()
        from handrail.serve.process import listen

        with nothing_printed():
            app = _app(asked)
        try:
            listening = listen(asked.host, asked.port, app)
        except OSError as error:
            raise UsageError(_cannot_listen(asked, error)) from None
        asyncio.run(_serve(asked, app, listening))
    except Exception as error:
        complain(trouble(error).message)
        if debugging():
            traceback.print_exception(error)
        return trouble(error).code
    return DONE


async def _serve(asked: Asked, app: ServedApp, listening: socket.socket) -> None:
    from handrail.serve.process import address_of, run

    token = _token(asked)
    address = address_of(listening) + (f"#token={token}" if token is not None else "")

    def ready() -> None:
        _say(f"{on_one_line(app.threads.source.name)} is at {address} (Ctrl-C stops it)")
        if asked.open:
            import webbrowser

            webbrowser.open(address)

    def stopping(runs: int) -> None:
        what = "" if not runs else f", parking {runs} run{'s' if runs > 1 else ''}"
        _say(f"Stopping{what}. Nothing is lost; once more ends it at once.")

    await run(app, listening, ready=ready, stopping=stopping)


def _app(asked: Asked) -> ServedApp:
    from handrail.serve.http import asgi

    source, module = _source(asked)
    journal = options.journal(asked.journal, False)
    if journal is None:
        raise UsageError(
            "no journal can be made here, and threads live in one. Name a place: --journal FILE."
        )
    renderers: Any = getattr(module, "renderers", None)
    return asgi(
        source,
        journal=journal,
        authenticate=getattr(module, "authenticate", None),
        token=_token(asked),
        renderers=None if renderers is None else _beside(module, Path(renderers)),
        hosts=asked.hosts,
        origins=asked.origins,
    )


def _source(asked: Asked) -> tuple[Any, Any]:
    """What is served, and the module it is from where it is from one."""
    from handrail.serve.source import WorkersSource, load

    named = asked.app
    approvals = options.approvals(asked.approve)
    module_file = named.partition(":")[0].endswith(".py")
    if module_file or (not Path(named).exists() and _MODULE.fullmatch(named)):
        if asked.files is not None:
            raise UsageError("--files is for workers. Give the module's adapter a filesystem instead.")
        if not module_file and not _can_be_found(named):
            raise UsageError(
                f"there is no {named}: no folder, no worker's file and no module. `handrail new demo` makes a "
                "folder with workers."
            )
        source = load(named, model=options.model(asked.model), approvals=approvals)
        return source, sys.modules[source.app.partition(":")[0]]
    place = options.find_worker(named)
    made = WorkersSource(
        place.registry,
        place.name,
        model=options.model(asked.model),
        files=options.filesystem(asked.files, place.folder),
        approvals=approvals,
    )
    return made, None


def _can_be_found(named: str) -> bool:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(named.partition(":")[0]) is not None
    except ModuleNotFoundError:
        return False
    finally:
        sys.path.pop(0)


def _beside(module: Any, renderers: Path) -> Path:
    """A path that the module names is from where the module is."""
    found = Path(module.__file__).parent / renderers
    if not found.is_file() or found.suffix not in (".js", ".mjs"):
        raise UsageError(f"the app's renderers are to be in {found}, and no script is there.")
    return found


def _token(asked: Asked) -> str | None:
    return asked.token or os.environ.get("HANDRAIL_TOKEN") or None


def _cannot_listen(asked: Asked, error: OSError) -> str:
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
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            from handrail.serve.http import missing_extra

            raise missing_extra(name)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
