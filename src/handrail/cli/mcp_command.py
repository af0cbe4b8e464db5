"""`handrail mcp`: an app, or a gateway to other servers, as an MCP server."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.cli.command_options import find_model, open_files, open_journal, parse_approvals, search_here
from handrail.cli.outcome import DONE, UsageError, divert_stdout, fail, journal_path
from handrail.cli.server_token import read_token
from handrail.text.rendering import counted, escape_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from handrail.cli.mcp_options import McpOptions
    from handrail.journal.protocol import Journal
    from handrail.mcp.apps import App
    from handrail.mcp.issuer import Issuer
    from handrail.mcp.server import ToolServer
    from handrail.serve.people import People


def serve(options: McpOptions) -> int:
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
        files = _open_files(options, app)
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
                    asyncio.run(_serve_http(options, app, served, token, people))
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
                        _serve_http(options, app, gateway, token, people)
                        if options.http
                        else gateway.serve_stdio()
                    )
                finally:
                    await gateway.close()

            asyncio.run(work())
    except Exception as error:
        return fail(error)
    return DONE


def _people_of(options: McpOptions, journal: Journal | None) -> People:
    from handrail.serve.people import People, people_path

    return People.of(journal, people_path(journal_path(options.journal)))


async def _serve_http(
    options: McpOptions, app: App, served: ToolServer, token: str | None, people: People
) -> None:
    from handrail.cli.serve_command import listen_at, tls_of
    from handrail.mcp.http import PATH, HttpServer
    from handrail.serve.server import address_of, is_reachable, run

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
            _print(f"{escape_line(served.tools.name)} is at {address} (Ctrl-C stops it)")
            if printed is not None:
                _print(f"Clients send this header: Authorization: Bearer {printed}")
            if issuer is not None:
                _print(
                    f"Clients send access tokens of {issuer.address} for the audience {escape_line(issuer.audience)}"
                )
            if tls is None and is_reachable(listening):
                _print(
                    "Others on the network can read the traffic. Use --tls-cert and --tls-key, or a proxy with TLS."
                )

        def stopping(calls: int) -> None:
            parked = "" if not calls else f", parking {counted(calls, 'call')}"
            _print(f"Stopping{parked}. Press again to quit at once.")

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


def _open_files(options: McpOptions, app: App) -> Any:
    from handrail.serve.sources import PLACEHOLDER, PrincipalFiles

    if options.files is not None:
        _check_apart(options, Path(str(options.files).partition("{")[0] or "."))
    if options.files is not None and PLACEHOLDER in str(options.files):
        return PrincipalFiles(str(options.files), options.startup_files or ())
    return open_files(options.files, app.folder, options.startup_files)


def _check_apart(options: McpOptions, files: Path) -> None:
    """Raise `UsageError` if the token file, TLS key or access log is in the folder `files`, which tools may change."""
    for name, path in (
        ("--token-file", options.token_file),
        ("--tls-key", options.tls_key),
        ("--access-log", options.access_log),
    ):
        if path is not None and path.resolve().is_relative_to(files.resolve()):
            raise UsageError(
                f"{name} {path} is in {files}, which tools may read and change. Move it elsewhere."
            )


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
