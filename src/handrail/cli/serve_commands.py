"""`handrail serve`, a page for people in browsers and AG-UI for programs, and `handrail mcp`, an app or a gateway as an MCP server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.cli.command_options import (
    McpOptions,
    ServeOptions,
    find_model,
    is_module,
    open_files,
    open_journal,
    parse_approvals,
    parse_spend,
    search_here,
)
from handrail.cli.outcome import DONE, UsageError, divert_stdout, fail, journal_path, print_line
from handrail.cli.server_token import OIDC_VARIABLE, BrowserFile, read_token, take_variable
from handrail.text.rendering import counted, escape_line

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from handrail.content import Attachment
    from handrail.journal.protocol import Journal
    from handrail.mcp.apps import App
    from handrail.mcp.issuer import Issuer
    from handrail.mcp.server import ToolServer
    from handrail.notify import Notify
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.workspace import Workspace
    from handrail.serve.app import ServedApp
    from handrail.serve.oidc import OidcProvider
    from handrail.serve.people import People
    from handrail.serve.server import Tls
    from handrail.serve.sources import Loaded, PrincipalFiles
    from handrail.serve.thread import Submit, Thread


def serve(options: ServeOptions) -> int:
    """Serve the app until it is stopped, and return the exit code."""
    try:
        if options.files is not None:
            _check_apart(options, _folder_of(options.files).resolve())
        token = read_token(options.token_file)  # read before the app's code runs
        secret = take_variable(OIDC_VARIABLE)
        check_extra()
        from handrail.cli.fleet_commands import parse_retention
        from handrail.serve.app import asgi

        tls = tls_of(options.tls_cert, options.tls_key)
        with divert_stdout():
            loaded = _load(options)
        with (
            contextlib.closing(open_journal(options.journal, loaded.source.files)) as journal,
            contextlib.closing(_people_of(options, journal)) as people,
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
                retention=parse_retention(options.keep_runs or (), loaded.source.app),
                notify=_notify(options, loaded),
                public_url=options.public_url,
            )
            asyncio.run(_serve(options, app, listen_at(options.host, options.port), tls))
    except Exception as error:
        return fail(error)
    return DONE


def _notify(options: ServeOptions, loaded: Loaded) -> Notify:
    """Return the app's settings for notifications, with the addresses of the command line.

    Raises `DefinitionError` if an address is invalid, or if apprise is needed for it and can't use it.
    """
    from handrail.notify import Notify
    from handrail.notify.sender import check

    found = (loaded.notify or Notify()).with_addresses(tuple(options.notify or ()))
    for each in found.addresses:
        asyncio.run(check(each))
    return found


def _submit(options: ServeOptions, loaded: Loaded, journal: Journal) -> Submit:
    """Return a function that submits a message as a run for workers.

    Raises `UsageError` for `--files`, `--spend` and an `--approve` other than `ask`, because workers take these options themselves.
    """
    from handrail.fleet import FleetApp, Submission, submit
    from handrail.run.record.begin import code_of

    for name, is_given in (
        ("--files", options.files is not None),
        ("--approve", options.approve != "ask"),
        ("--spend", options.spend is not None),
    ):
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
    from handrail.serve.server import address_of, run

    address = address_of(listening, "http" if tls is None else "https", options.prefix)
    principals, browser = app.principals, BrowserFile()

    def entrance() -> str:
        return f"{address}#link={principals.new_link()}" if principals.has_links else address

    def ready() -> None:
        at = entrance()
        print_line(f"{escape_line(app.threads.source.name)} is at {at} (Ctrl-C stops it{page_note()})")
        _warn_of_readers(tls, listening)
        if options.open:
            browser.open(at)

    def link_used() -> None:
        browser.remove()
        print_line(f"The link was used. To open the page elsewhere, use the next one: {entrance()}")

    def stopping(runs: int) -> None:
        parked = "" if not runs else f", parking {counted(runs, 'run')}"
        print_line(f"Stopping{parked}. Nothing is lost; press again to quit at once.")

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


def _load(options: ServeOptions) -> Loaded:
    """Load the app to serve. By default, a worker gets the `files` folder beside it, if there is one.

    Raises `UsageError` if the app is neither a folder, a worker's file nor a module, and `DefinitionError` if it can't
    be loaded.
    """
    from handrail.run.limits import caps_of
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
    loaded = load(
        str(path) if is_worker else options.app,
        model=find_model(options.model),
        approvals=parse_approvals(options.approve),
        files=_open_files(options, folder) if is_worker or options.files is not None else None,
    )
    loaded.source.spend = caps_of(parse_spend(options.spend))
    return loaded


# --- handrail mcp ---


def serve_mcp(options: McpOptions) -> int:
    """Serve an app or a gateway until its input ends or it is stopped, and return the exit code. An error is printed."""
    if bool(options.app) == (options.proxy is not None):
        return fail(UsageError("handrail mcp needs an APP, or --proxy with an mcp.json. Pass exactly one."))
    if (options.issuer is not None and not options.http) or (
        options.issuer is None and (options.audience or options.scopes)
    ):
        return fail(
            UsageError("--issuer needs --http, and --audience and --scope need --issuer. Pass them together.")
        )
    if options.proxy is not None:
        return _serve_gateway(options, options.proxy)
    try:
        token = read_token(options.token_file) if options.http else None  # read before the app's code runs
        search_here()
        with divert_stdout(even_on_a_terminal=True):
            from handrail.mcp import ToolServer
            from handrail.mcp.apps import load_app
            from handrail.serve.sources import files_of

            app = load_app(options.app, find_model(options.model))
        if options.files is not None:
            _check_apart(options, _folder_of(options.files))
        files = _open_files(options, app.folder)
        if options.resources is not None and files is None:
            raise UsageError(
                "--resources needs --files FOLDER, whose files clients can then read. Pass both."
            )
        if options.no_journal and options.journal is not None:
            raise UsageError("--journal and --no-journal contradict each other. Pass only one of them.")
        with contextlib.ExitStack() as during:
            journal = None
            if not options.no_journal:
                journal = during.enter_context(contextlib.closing(open_journal(options.journal, files)))
            served = ToolServer(
                app.prompt,
                adapter=app.adapter,
                more=app.more,
                journal=journal,
                files=lambda principal: files_of(files, principal),
                resource_address=options.resources,
                sections=app.sections,
                approvals=parse_approvals(options.approve),
            )
            if options.http:
                with contextlib.closing(_people_of(options, journal)) as people:
                    asyncio.run(_serve_mcp_http(options, app, served, token, people))
            else:
                asyncio.run(served.serve_stdio())
    except Exception as error:
        return fail(error)
    return DONE


def _serve_gateway(options: McpOptions, servers: Path) -> int:
    """Serve the tools of other MCP servers behind policies, and return the exit code. An error is printed."""
    try:
        token = read_token(options.token_file) if options.http else None
        if options.policies is None:
            raise UsageError(
                "--proxy needs --policies FILE, which says which calls are allowed, need approval or are denied."
            )
        if options.no_journal:
            raise UsageError("--proxy needs a journal for approvals and the audit. Leave out --no-journal.")
        from handrail.mcp.apps import App
        from handrail.mcp.gateway import Gateway, load_rules

        rules = load_rules(options.policies, trust_client=options.trust_client)
        with contextlib.ExitStack() as during:
            journal = during.enter_context(contextlib.closing(open_journal(options.journal, None)))
            people = during.enter_context(contextlib.closing(_people_of(options, journal)))
            callers_are_users = options.http and options.issuer is None and people.has_users()

            def who_may_vote(role: str | None, principal: str) -> Mapping[str, float]:
                voters = people.who_may_vote(role, principal)  # reads the users again, so it comes first
                caller = people.find(principal)
                may_run = not callers_are_users or (caller is not None and caller.may("run"))
                return voters if may_run else {}

            voters = None if options.trust_client else who_may_vote
            gateway = Gateway(servers, rules, voters=voters, journal=journal)
            app = App(gateway.tools.prompt)

            async def work() -> None:
                try:
                    await (
                        _serve_mcp_http(options, app, gateway, token, people)
                        if options.http
                        else gateway.serve_stdio()
                    )
                finally:
                    await gateway.close()

            asyncio.run(work())
    except Exception as error:
        return fail(error)
    return DONE


async def _serve_mcp_http(
    options: McpOptions, app: App, served: ToolServer, token: str | None, people: People
) -> None:
    from handrail.mcp.http import PATH, HttpServer
    from handrail.serve.server import address_of, run

    tls = tls_of(options.tls_cert, options.tls_key)
    with contextlib.closing(listen_at(options.host, options.port)) as listening:
        scheme = "http" if tls is None else "https"
        address = address_of(listening, scheme, options.prefix).rstrip("/") + PATH
        issuer = _issuer_of(options, address)
        if issuer is not None and token is not None:
            raise UsageError(
                "--issuer and a token contradict each other. Leave out --token-file and $HANDRAIL_TOKEN."
            )
        printed = None
        if issuer is None and token is None and app.authenticate is None and not people.has_users():
            token = printed = secrets.token_urlsafe(32)
        server = HttpServer(
            served,
            token=token,
            authenticate=app.authenticate,
            issuer=issuer,
            people=people,
            hosts=options.hosts or (),
            origins=options.origins or (),
            prefix=options.prefix,
            access_log=options.access_log,
        )

        def ready() -> None:
            print_line(f"{escape_line(served.tools.name)} is at {address} (Ctrl-C stops it)")
            if printed is not None:
                print_line(f"Clients send this header: Authorization: Bearer {printed}")
            if issuer is not None:
                print_line(
                    f"Clients send access tokens of {issuer.address} for the audience {escape_line(issuer.audience)}"
                )
            _warn_of_readers(tls, listening)

        def stopping(calls: int) -> None:
            parked = "" if not calls else f", parking {counted(calls, 'call')}"
            print_line(f"Stopping{parked}. Press again to quit at once.")

        await run(server, listening, tls=tls, ready=ready, stopping=stopping)


def _issuer_of(options: McpOptions, address: str) -> Issuer | None:
    """Return the issuer that the options name, or None if they name none.

    An audience that is a URL is also published as the server's address.
    """
    if options.issuer is None:
        return None
    from handrail.mcp.issuer import Issuer

    audience = options.audience or address
    is_url = audience.startswith(("https://", "http://"))
    resource = audience if is_url else address
    return Issuer(options.issuer, resource=resource, audience=audience, scopes=options.scopes or ())


# --- what both servers need ---


def check_extra() -> None:
    """Raise `DefinitionError` if a package of the `serve` extra is missing."""
    from handrail.serve import REQUIRED, missing_extra

    for name in REQUIRED:
        if importlib.util.find_spec(name) is None:
            raise missing_extra(name)


def _people_of(options: ServeOptions | McpOptions, journal: Journal | None) -> People:
    from handrail.serve.people import People, people_path

    return People.of(journal, people_path(journal_path(options.journal)))


def _folder_of(files: Path) -> Path:
    """Return the folder that `--files` names, or the one that has a folder for each person."""
    return Path(str(files).partition("{")[0] or ".")


def _check_apart(options: ServeOptions | McpOptions, folder: Path) -> None:
    """Raise `UsageError` if the token file, TLS key or access log is in this folder, which tools may change."""
    for name, path in (
        ("--token-file", options.token_file),
        ("--tls-key", options.tls_key),
        ("--access-log", options.access_log),
    ):
        if path is not None and path.resolve().is_relative_to(folder.resolve()):
            raise UsageError(
                f"{name} {path} is in {folder}, which tools may read and change. Move it elsewhere."
            )


def _open_files(
    options: ServeOptions | McpOptions, folder: Path | None
) -> DirectoryFilesystem | Workspace | PrincipalFiles | None:
    from handrail.serve.sources import PLACEHOLDER, PrincipalFiles

    files, startup_files = options.files, options.startup_files
    if files is not None and PLACEHOLDER in str(files):
        return PrincipalFiles(str(files), startup_files or ())
    return open_files(files, folder, startup_files)


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


def _warn_of_readers(tls: Tls | None, listening: socket.socket) -> None:
    """Say that others can read the traffic, if it leaves this machine without TLS."""
    from handrail.serve.server import is_reachable

    if tls is None and is_reachable(listening):
        print_line(
            "Others on the network can read the traffic. Use --tls-cert and --tls-key, or a proxy with TLS."
        )
