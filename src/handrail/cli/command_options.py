"""The options of `run`, `chat`, `worker`, `submit`, `serve` and `mcp`, and the functions that interpret options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from handrail.cli.outcome import UsageError, journal_path, journal_url, print_error
from handrail.imports import find_app, search
from handrail.text.terminal import is_terminal

if TYPE_CHECKING:
    from handrail.concurrency.deadline import Deadline
    from handrail.journal.any_journal import AnyJournal
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.workspace import Workspace
    from handrail.run.limits import Budget, Spend
    from handrail.workers import Worker

_MODES = {"ask": None, "all": "approve_all", "strict": "strict"}
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_INPUT = 16 * 1024 * 1024
_MODULE = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*")


def _use_log_format(format: str) -> str:
    if format == "json":
        from handrail.cli.json_log import use_json

        use_json()
    return format


LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option(
        "--log",
        metavar="FORMAT",
        callback=_use_log_format,
        is_eager=True,
        help="What standard error gets. text: lines for people; json: a JSON object for each line and log record.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Use this model instead: provider:name, or module:name for your own model.",
    ),
]
FilesFolder = Annotated[
    Path | None,
    typer.Option(
        "--files",
        metavar="FOLDER",
        help="The folder tools may change, or `workspace:NAME`. Default: `files` beside the worker, if any.",
    ),
]
StartupFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--startup-files",
        metavar="PATH",
        help="Files that tools may change without a separate approval although other programs run them "
        "automatically, such as .github/workflows/*; repeatable.",
    ),
]
SpendCaps = Annotated[
    list[str] | None,
    typer.Option(
        "--spend",
        metavar="AMOUNT",
        help="Most that each person's runs may spend in a day: 20 for US dollars, or 500000tokens. 20/app is for everybody "
        "together, and 20@Europe/Berlin for days there. At the cap, runs wait. Repeatable.",
    ),
]
JournalFile = Annotated[
    str | None,
    typer.Option(
        "--journal",
        metavar="FILE",
        help="Where runs are recorded: a file, or postgresql://USER@HOST/DATABASE. Default: $HANDRAIL_JOURNAL, "
        "or else a file for the current folder under $XDG_STATE_HOME/handrail.",
    ),
]

App = Annotated[
    str,
    typer.Argument(
        metavar="APP",
        help="A module (pkg.mod, pkg.mod:prompt, app.py), a worker's file, or a folder of workers.",
    ),
]
Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS", help="The address to listen on. 0.0.0.0 is every interface; use TLS with it."
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port, or 0 for any free one.")]
TlsCertificate = Annotated[
    Path | None,
    typer.Option("--tls-cert", metavar="FILE", help="A certificate in PEM, to serve over TLS."),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="The certificate's private key.")
]
AccessLog = Annotated[
    Path | None,
    typer.Option("--access-log", metavar="FILE", help="Append every request to this file, as JSON lines."),
]
KeepRuns = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-runs",
        metavar="SPAN",
        help="Delete finished runs of this app after 12h, 90d, or for those in one state failed=7d; repeatable. Default: keep them.",
    ),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="Another host name that this server answers to, such as proxy.example; repeatable.",
    ),
]
Origins = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        metavar="URL",
        help="Another site that may use this server, such as https://chat.example; repeatable.",
    ),
]
Prefix = Annotated[
    str,
    typer.Option(
        "--prefix",
        metavar="PATH",
        help="The path below which a proxy offers this server, such as /agents, whether or not the proxy removes it.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Message = Annotated[
    str | None, typer.Argument(metavar="INPUT", help="Your message; - or nothing reads standard input.")
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of `run` and `chat`."""

    worker: Annotated[
        str,
        typer.Argument(
            help="A worker's file (demo/main.md), a folder of workers (demo), or an agent (app.py, pkg.mod:agent)."
        ),
    ]
    model: ModelName = None
    approve: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="What happens to calls that need approval. ask: ask at the terminal, deny elsewhere; all: approve; "
            "strict: deny; later: park the run until `handrail runs answer`.",
        ),
    ] = "ask"
    files: FilesFolder = None
    startup_files: StartupFiles = None
    mcp: Annotated[
        Path | None,
        typer.Option(
            "--mcp",
            metavar="FILE",
            help="An mcp.json: the tools of its MCP servers can be used too. Each call needs approval.",
        ),
    ] = None
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time limit of a run: 90s, 5m, 1h. Time spent waiting for you does not count.",
        ),
    ] = None
    tokens: Annotated[
        int | None, typer.Option("--budget-tokens", min=0, metavar="N", help="Maximum tokens.")
    ] = None
    money: Annotated[
        float | None, typer.Option("--budget-money", min=0, metavar="N", help="Maximum US dollars.")
    ] = None
    requests: Annotated[
        int | None, typer.Option("--budget-requests", min=0, metavar="N", help="Maximum requests to models.")
    ] = None
    calls: Annotated[
        int | None, typer.Option("--budget-calls", min=0, metavar="N", help="Maximum tool calls.")
    ] = None
    spend: SpendCaps = None
    journal: JournalFile = None
    no_journal: Annotated[bool, typer.Option("--no-journal", help="Record nothing.")] = False
    continues: Annotated[
        bool, typer.Option("--continue", "-c", help="Continue your newest recorded conversation with it.")
    ] = False
    log: LogFormat = "text"
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")] = False
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Print details, and tracebacks (as HANDRAIL_DEBUG=1 does)."),
    ] = False

    def parse_budget(self) -> Budget | None:
        limits = (self.tokens, self.money, self.requests, self.calls)
        if all(limit is None for limit in limits):
            return None
        from handrail.run.limits import Budget

        return Budget(*limits)

    def start_deadline(self) -> Deadline | None:
        """Return a deadline that starts now, or None without `--deadline`. Raises `UsageError` if the duration is invalid.

        Time spent waiting for a person's answer does not count.
        """
        if self.deadline is None:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", self.deadline.strip())
        if found is None or not float(found[1]):
            raise UsageError(
                f"--deadline {self.deadline!r} is not a duration above zero. Write seconds, or 90s, 5m, 1h."
            )
        from handrail.concurrency.deadline import Deadline

        return Deadline.after(float(found[1]) * _UNITS[found[2]], pauses_for_people=True)

    def open_journal(self, files: object) -> AnyJournal | None:
        """Open the journal. Returns None with `--no-journal`, so that the run is not recorded.

        If the default journal can't be opened, prints a warning and returns None. Raises `UsageError` if a named journal can't
        be opened, if tools or other users could read or change the journal, or if `--journal` and `--no-journal` are both given.
        """
        from handrail.errors import JournalExposed

        if self.no_journal and self.journal is not None:
            raise UsageError("--journal and --no-journal contradict each other. Pass only one of them.")
        if self.no_journal:
            return None
        try:
            return open_journal(self.journal, files)
        except UsageError as error:
            if _is_named(self.journal) or isinstance(error.__cause__, JournalExposed):
                raise
            print_error(f"This run is not recorded. {error}", "yellow")
            return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of `worker` and `submit`."""

    app: App
    model: ModelName = None
    files: Annotated[
        Path | None,
        typer.Option(
            "--files",
            metavar="FOLDER",
            help="The folder tools may change, which pins the run to this host, or `workspace:NAME`, which moves with the run.",
        ),
    ] = None
    startup_files: StartupFiles = None
    journal: JournalFile = None
    approve: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="What happens to calls that need approval. later: the run waits for `handrail runs answer`; "
            "all: approve; strict: deny.",
        ),
    ] = "later"
    log: LogFormat = "text"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `serve`."""

    app: App
    host: Host = "127.0.0.1"
    port: Port = 8600
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="A file with the token that programs send; or set $HANDRAIL_TOKEN. Without a token, the page "
            "is opened with a link that works once.",
        ),
    ] = None
    tls_cert: TlsCertificate = None
    tls_key: TlsKey = None
    model: ModelName = None
    files: Annotated[
        Path | None,
        typer.Option(
            "--files",
            metavar="FOLDER",
            help="The folder tools may change; 'work/{principal}' gives each person their own. Default: `files` "
            "beside the worker, if any.",
        ),
    ] = None
    startup_files: StartupFiles = None
    spend: SpendCaps = None
    journal: JournalFile = None
    approve: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="What happens to calls that need approval. ask: ask on the page; all: approve; strict: deny.",
        ),
    ] = "ask"
    submit: Annotated[
        bool,
        typer.Option(
            "--submit",
            help="Let workers execute the runs (`handrail worker APP`), and only show them here. The journal must be in "
            "PostgreSQL.",
        ),
    ] = False
    oidc_issuer: Annotated[
        str | None,
        typer.Option(
            "--oidc-issuer",
            metavar="URL",
            help="Let users sign in with this OpenID Connect provider; they are named by their email address.",
        ),
    ] = None
    oidc_client: Annotated[
        str | None,
        typer.Option(
            "--oidc-client",
            metavar="ID",
            help="The client id at that provider. The client's secret is read from $HANDRAIL_OIDC_SECRET.",
        ),
    ] = None
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify",
            metavar="URL",
            help="Where to tell about every question that waits: a webhook, or a URL that apprise reaches; repeatable. Needs --public-url.",
        ),
    ] = None
    public_url: Annotated[
        str,
        typer.Option(
            "--public-url",
            metavar="URL",
            help="The URL at which people open the page. Users with addresses are then told about questions that wait for them.",
        ),
    ] = ""
    access_log: AccessLog = None
    keep_runs: KeepRuns = None
    log: LogFormat = "text"
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False
    hosts: Hosts = None
    origins: Origins = None
    prefix: Prefix = ""


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
    host: Host = "127.0.0.1"
    port: Port = 8603
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
    tls_cert: TlsCertificate = None
    tls_key: TlsKey = None
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
    access_log: AccessLog = None
    log: LogFormat = "text"
    hosts: Hosts = None
    origins: Origins = None
    prefix: Prefix = ""


def takes_options(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's first parameter, an options dataclass, with one parameter for each field.

    The dataclass's first field comes first, then the command's own parameters, then the other fields.
    """
    fields = dataclasses.fields(options)
    hints = get_type_hints(options, include_extras=True)
    first, *others = (
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**given: Any) -> None:
            command(options(**{field.name: given.pop(field.name) for field in fields}), **given)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        return with_signature(call, [first, *own, *others])

    return decorate


def with_signature(command: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """Set the signature from which typer reads a command's options, and return the command."""
    by_name = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    command.__signature__ = inspect.Signature(by_name)  # pyright: ignore[reportFunctionMemberAccess]  # `inspect` reads this attribute
    command.__annotations__ = {}  # typer would read these annotations instead of the signature
    return command


# --- interpreting the options ---


_CAP = re.compile(r"(\d+(?:\.\d+)?)(tokens|requests)?(/app)?(?:@(.+))?")


def parse_spend(given: list[str] | None) -> tuple[Spend, ...]:
    """Return the caps that `--spend` names. Raises `UsageError` for one that is malformed."""
    from handrail.run.limits import Budget, Spend

    found: list[Spend] = []
    for each in given or ():
        match = _CAP.fullmatch(each.strip())
        if match is None or (match[2] and "." in match[1]):
            raise UsageError(
                f"--spend {each!r} is not an amount. Write US dollars, such as 20, or 500000tokens or 300requests. "
                "Add /app for everybody together, and @ZONE for days in a time zone."
            )
        unit, amount = match[2] or "money", match[1]
        limits: Any = {unit: Decimal(amount) if unit == "money" else int(amount)}
        found.append(Spend(Budget(**limits), by="app" if match[3] else "principal", zone=match[4] or "UTC"))
    return tuple(found)


def parse_approvals(word: str, *, can_park: bool = False) -> Any:
    """Return the approval mode for `--approve`, or None for the default. Raises `UsageError` for an unknown word.

    `later` is known only with `can_park`, for a run that can be parked.
    """
    modes = {**_MODES, "later": None} if can_park else _MODES
    if word not in modes:
        raise UsageError(f"--approve {word!r} is not one of {', '.join(modes)}.")
    return modes[word]


def search_here() -> None:
    """Let `import_app` and `find_app` find modules in the current folder, without adding the folder to `sys.path`."""
    search(Path.cwd())


def find_model(named: str | None, folder: Path | None = None) -> Any:
    """Return the model that the user named, or None without a name. Raises `DefinitionError` if there is no such model.

    The module of a `module:name` may also be in `folder` or in the current folder.
    """
    if named is None:
        return None
    from handrail.models.names import give, model_named

    search_here()
    give(named)
    return model_named(named, folder)


def open_files(
    files: Path | None, folder: Path | None, startup_files: Sequence[str] | None = None
) -> DirectoryFilesystem | Workspace | None:
    """Open the folder that tools may change: the given one, or else `files` beside the worker.

    Returns None if there is neither, and a `Workspace` for `workspace:NAME`, which each run opens for itself. Raises
    `UsageError` if the given folder does not exist.
    """
    from handrail.journal.records import WORKSPACE

    if files is not None and str(files).startswith(WORKSPACE):
        from handrail.resources.workspace import Workspace

        return Workspace.named(str(files), startup_files=startup_files or ())
    if files is not None and not files.is_dir():
        raise UsageError(f"--files {files}: no such folder. Create it first, or give another one.")
    if files is None and folder is not None:
        files = folder / "files"
    if files is None or not files.is_dir():
        return None
    from handrail.resources.directory import DirectoryFilesystem

    return DirectoryFilesystem(files, startup_files=startup_files or ())


def open_journal(given: str | None, files: object = None) -> AnyJournal:
    """Open the journal, creating it if needed.

    Raises `UsageError` if that fails, or if tools or other users could read or change the journal's file.
    """
    from handrail.errors import HandrailError, JournalError, JournalExposed
    from handrail.journal.any_journal import open_by_name
    from handrail.journal.location import check_out_of_reach
    from handrail.resources.paths import folder_of

    advice = "Use another file: --journal FILE."
    url = journal_url(given)
    if url is not None:
        try:
            return open_by_name(url)
        except HandrailError as error:  # the message says what to do
            raise UsageError(str(error)) from None
    try:
        path = prepare_journal(given)
        check_out_of_reach(str(path), folder_of(files))
        return open_by_name(path)
    except JournalExposed as error:
        raise UsageError(str(error)) from error
    except JournalError as error:
        raise UsageError(f"{error} {advice}") from None


def prepare_journal(given: str | None) -> Path:
    """Return the journal's path, creating its folder if needed. The default folder is private to its owner.

    Raises `UsageError` if the folder can't be created, or if others could read or change a journal in the default
    folder.
    """
    from handrail.errors import JournalExposed
    from handrail.journal.location import create_folders, make_private_folder

    path = journal_path(given)
    try:
        if _is_named(given):
            create_folders(path.parent)
        else:
            make_private_folder(path.parent, Path.cwd())
    except JournalExposed as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"can't create the journal {str(path)!r}: {error.strerror}. Use another file: --journal FILE."
        ) from None
    return path


def _is_named(journal: str | None) -> bool:
    """Return whether the user chose the journal, by option or environment variable."""
    return journal is not None or bool(os.environ.get("HANDRAIL_JOURNAL"))


def read_input(given: str | None) -> str:
    """Return the run's message. If it is missing or `-`, it is read from standard input.

    Raises `UsageError` if there is no input, or if the input is empty, too large or not UTF-8.
    """
    if given is not None and given != "-":
        return given
    advice = 'Pass it as INPUT, "like this", or pipe it in.'
    if given is None and is_terminal(sys.stdin):
        raise UsageError(f"there is no input. {advice}")
    raw = sys.stdin.buffer.read(_MAX_INPUT + 1)
    if len(raw) > _MAX_INPUT:
        raise UsageError(f"the input is larger than {_MAX_INPUT // 2**20} MiB. Attach it as a file: -a FILE.")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise UsageError("the input is not UTF-8 text. Attach it as a file: -a FILE.") from None
    if not text.strip():
        raise UsageError(f"the input is empty. {advice}")
    return text


def find_worker(named: str) -> Worker:
    """Find a worker by `folder/main.md`, `folder/main` or `folder`. A folder stands for its `main` or its only worker.

    Raises `WorkerError` if there is no such worker, or if it has a problem.
    """
    from handrail.workers import WorkerRegistry

    return WorkerRegistry.worker_at(Path(named))


def is_module(named: str) -> bool:
    """Return whether `named`, up to a colon, ends in `.py` or is a module, installed or in the current folder."""
    module = named.partition(":")[0]
    if module.endswith(".py"):
        return True
    if not _MODULE.fullmatch(module):
        return False
    search_here()
    return find_app(module) is not None
