"""`handrail serve`: a page for people in browsers, and AG-UI for programs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
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
from handrail.cli.outcome import DONE, UsageError, divert_stdout, fail, journal_path
from handrail.cli.server_token import OIDC_VARIABLE, BrowserFile, read_token, take_variable
from handrail.text.rendering import counted, escape_line

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from handrail.content import Attachment
    from handrail.journal.protocol import Journal
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.workspace import Workspace
    from handrail.serve.app import ServedApp
    from handrail.serve.oidc import OidcProvider
    from handrail.serve.server import Tls
    from handrail.serve.sources import Loaded, PrincipalFiles
    from handrail.serve.thread import Submit, Thread


def serve(options: ServeOptions) -> int:
    """Serve the app until it is stopped, and return the exit code."""
    try:
        _check_apart(options)
        token = read_token(options.token_file)  # read before the app's code runs
        secret = take_variable(OIDC_VARIABLE)
        _check_extra()
        from handrail.serve.app import asgi
        from handrail.serve.people import People, people_path

        tls = tls_of(options.tls_cert, options.tls_key)
        with divert_stdout():
            loaded = _load(options)
        with (
            contextlib.closing(open_journal(options.journal, loaded.source.files)) as journal,
            contextlib.closing(People.of(journal, people_path(journal_path(options.journal)))) as people,
        ):
            app = asgi(
                loaded.source,
                journal=journal,
                authenticate=loaded.authenticate,
                people=people,
                oidc=_oidc(options, secret),
                token=token,
                renderers=loaded.renderers,
                hosts=options.hosts or (),
                origins=options.origins or (),
                prefix=options.prefix,
                access_log=options.access_log,
                submit=_submit(options, loaded, journal) if options.submit else None,
            )
            asyncio.run(_serve(options, app, listen_at(options.host, options.port), tls))
    except Exception as error:
        return fail(error)
    return DONE


def _submit(options: ServeOptions, loaded: Loaded, journal: Journal) -> Submit:
    """Return a function that submits a message as a run for workers.

    Raises `UsageError` for `--files` and for an `--approve` other than `ask`, because workers take these options themselves.
    """
    from handrail.fleet import FleetApp, Submission, submit
    from handrail.run.apps import code_of

    for name, is_given in (("--files", options.files is not None), ("--approve", options.approve != "ask")):
        if is_given:
            raise UsageError(
                f"{name} has no effect with --submit, because workers execute the runs. Give it to them: handrail worker APP {name} ..."
            )
    app = FleetApp(options.app, loaded.source, code_of(loaded.source.app))

    async def submitted(text: str, attachments: Sequence[Attachment], run_id: str, thread: Thread) -> None:
        asked = Submission(
            text,
            attachments=attachments,
            session_id=thread.session_id,
            principal=thread.principal,
            run_id=run_id,
        )
        await submit(journal, app, asked)

    return submitted


def page_note() -> str:
    """Return a note if the page is not built, as in a fresh source checkout; otherwise ""."""
    from handrail.serve.pages import is_built

    return "" if is_built() else "; its page is not built yet: run scripts/page in the source checkout"


async def _serve(options: ServeOptions, app: ServedApp, listening: socket.socket, tls: Tls | None) -> None:
    from handrail.serve.server import address_of, is_reachable, run

    address = address_of(listening, "http" if tls is None else "https", options.prefix)
    principals, browser = app.principals, BrowserFile()

    def entrance() -> str:
        return f"{address}#link={principals.new_link()}" if principals.has_links else address

    def ready() -> None:
        at = entrance()
        _print(f"{escape_line(app.threads.source.name)} is at {at} (Ctrl-C stops it{page_note()})")
        if tls is None and is_reachable(listening):
            _print(
                "Others on the network can read the traffic. Use --tls-cert and --tls-key, or a proxy with TLS."
            )
        if options.open:
            browser.open(at)

    def link_used() -> None:
        browser.remove()
        _print(f"The link was used. To open the page elsewhere, use the next one: {entrance()}")

    def stopping(runs: int) -> None:
        parked = "" if not runs else f", parking {counted(runs, 'run')}"
        _print(f"Stopping{parked}. Nothing is lost; press again to quit at once.")

    principals.link_used = link_used
    try:
        await run(app, listening, tls=tls, ready=ready, stopping=stopping)
    finally:
        browser.remove()


def _oidc(options: ServeOptions, secret: str | None) -> OidcProvider | None:
    from handrail.serve.oidc import OidcProvider

    if options.oidc_issuer is None and options.oidc_client is None:
        return None
    if not (options.oidc_issuer and options.oidc_client and secret):
        raise UsageError(
            "OpenID Connect needs an issuer, a client and its secret. Give --oidc-issuer URL --oidc-client ID, and set "
            "$HANDRAIL_OIDC_SECRET."
        )
    return OidcProvider(options.oidc_issuer, options.oidc_client, secret)


def _check_apart(options: ServeOptions) -> None:
    """Raise `UsageError` if the token file, TLS key or access log is in the folder that `--files` lets tools change."""
    if options.files is None:
        return
    folder = Path(str(options.files).partition("{")[0] or ".").resolve()
    for name, path in (
        ("--token-file", options.token_file),
        ("--tls-key", options.tls_key),
        ("--access-log", options.access_log),
    ):
        if path is not None and path.resolve().is_relative_to(folder):
            raise UsageError(
                f"{name} {path} is in {folder}, which tools may read and change. Move it elsewhere."
            )


def tls_of(certificate: Path | None, key: Path | None) -> Tls | None:
    """Return the certificate and its key, or None if neither is given.

    Raises `UsageError` if only one is given, and `DefinitionError` if they can't be read or are not a certificate and
    its key.
    """
    from handrail.serve.server import Tls

    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UsageError("TLS needs a certificate and its key. Give both: --tls-cert FILE --tls-key FILE.")
    tls = Tls(certificate, key)
    tls.check()
    return tls


def _load(options: ServeOptions) -> Loaded:
    """Load the app to serve. By default, a worker gets the `files` folder beside it, if there is one.

    Raises `UsageError` if the app is neither a folder, a worker's file nor a module, and `DefinitionError` if it can't
    be loaded.
    """
    from handrail.serve.sources import load

    path = Path(options.app)
    if not path.exists() and path.with_suffix(".md").is_file():
        path = path.with_suffix(".md")  # `folder/main` is accepted, as in `run`
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
        files=_open_files(options, folder) if is_worker or options.files is not None else None,
    )


def _open_files(
    options: ServeOptions, folder: Path
) -> DirectoryFilesystem | Workspace | PrincipalFiles | None:
    from handrail.serve.sources import PLACEHOLDER, PrincipalFiles

    files, startup_files = options.files, options.startup_files
    if files is not None and PLACEHOLDER in str(files):
        return PrincipalFiles(str(files), startup_files or ())
    return open_files(files, folder, startup_files)


def listen_at(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises `UsageError` if that is not possible."""
    from handrail.serve.server import listen

    where = f"{host}:{port}"
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = f"Use another port: --port {port + 1}, or --port 0 for any free one."
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
