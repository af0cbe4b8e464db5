"""The options of `handrail mcp`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from handrail.cli.command_options import JournalFile, ModelName, StartupFiles


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class McpOptions:
    """The options of `mcp`."""

    app: Annotated[
        str,
        typer.Argument(
            metavar="APP",
            help="A module (pkg.mod, pkg.mod:agent, app.py), a worker's file, or a folder of workers.",
        ),
    ] = ""
    proxy: Annotated[
        Path | None,
        typer.Option(
            "--proxy",
            metavar="FILE",
            help="In place of APP: an mcp.json, whose servers are put behind the gate (needs --policies).",
        ),
    ] = None
    policies: Annotated[
        Path | None,
        typer.Option(
            "--policies", metavar="FILE", help="With --proxy: the policies and limits, as in a worker's file."
        ),
    ] = None
    trust_client: Annotated[
        bool,
        typer.Option(
            "--trust-client",
            help="With --proxy: the client's user approves calls. By default, approvers do, in the inbox of `handrail serve` "
            "on the same journal.",
        ),
    ] = False
    http: Annotated[
        bool,
        typer.Option(
            "--http", help="Serve over HTTP, to any number of clients, instead of standard input and output."
        ),
    ] = False
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="The address to listen on. 0.0.0.0 is every interface; use TLS with it."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="The port, or 0 for any free one.")
    ] = 8603
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="A file with the token that clients send; or set $HANDRAIL_TOKEN. Without one, a token is printed.",
        ),
    ] = None
    issuer: Annotated[
        str | None,
        typer.Option(
            "--issuer",
            metavar="URL",
            help="An OAuth 2.1 issuer. Clients send its access tokens (JWTs), and each subject is a principal.",
        ),
    ] = None
    audience: Annotated[
        str | None,
        typer.Option(
            "--audience",
            metavar="URL",
            help="With --issuer: the audience that access tokens must have. Default: the address of this server's endpoint.",
        ),
    ] = None
    scopes: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            metavar="NAME",
            help="With --issuer: a scope that access tokens must have; repeatable.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="A certificate in PEM, to serve over TLS."),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="The certificate's private key.")
    ] = None
    model: ModelName = None
    files: Annotated[
        Path | None,
        typer.Option(
            "--files",
            metavar="FOLDER",
            help="The folder tools may change; 'work/{principal}' gives each person their own. Default: `files` "
            "beside the workers, if any.",
        ),
    ] = None
    resources: Annotated[
        str | None,
        typer.Option(
            "--resources",
            metavar="ADDRESS",
            help="Let clients read the files of --files as resources, at addresses that begin with ADDRESS, such as files:///",
        ),
    ] = None
    startup_files: StartupFiles = None
    journal: JournalFile = None
    no_journal: Annotated[
        bool,
        typer.Option(
            "--no-journal", help="Do not record calls. A call that waits for an answer ends with the server."
        ),
    ] = False
    approve: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="What happens to calls that need approval. ask: ask the client's user; all: approve; strict: deny.",
        ),
    ] = "ask"
    access_log: Annotated[
        Path | None,
        typer.Option(
            "--access-log", metavar="FILE", help="Append every request to this file, as JSON lines."
        ),
    ] = None
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Another host name that this server answers to, such as proxy.example; repeatable.",
        ),
    ] = None
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="URL",
            help="Another site that may use this server, such as https://chat.example; repeatable.",
        ),
    ] = None
    prefix: Annotated[
        str,
        typer.Option(
            "--prefix",
            metavar="PATH",
            help="The path below which a proxy offers this server, such as /agents, whether or not the proxy removes it.",
        ),
    ] = ""
