"""`handrail worker` and `handrail submit`: runs that wait in a journal, and the processes that execute them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.cli.command_options import (
    FleetOptions,
    find_model,
    open_files,
    open_journal,
    parse_approvals,
    parse_spend,
    read_input,
    search_here,
)
from handrail.cli.outcome import DONE, UsageError, divert_stdout, fail, print_json, runs_command
from handrail.cli.server_token import DISPATCH_VARIABLE, take_variable
from handrail.clock import SYSTEM_CLOCK
from handrail.ids import check_id
from handrail.journal.postgres.address import with_password
from handrail.journal.records import OVER, WORKSPACE
from handrail.runs import Retention
from handrail.text.rendering import counted, escape_line

if TYPE_CHECKING:
    import socket

    from handrail.fleet import Engine, FleetApp, Runner
    from handrail.journal.protocol import Journal

_SPAN = re.compile(r"(\d+)([smhd])")
_ADDRESS = re.compile(r"(?:\[([^\]\s]+)\]|([^:/\s]+)):(\d{1,5})")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def work(
    options: FleetOptions,
    dispatcher: str | None,
    limit: int,
    host: str | None,
    grace: float,
    address: str | None,
    keep_runs: Sequence[str],
    spend: list[str] | None,
) -> int:
    """Execute runs until SIGTERM or Ctrl-C, and return the exit code."""
    from handrail.run.limits import caps_of

    try:
        with contextlib.ExitStack() as during:
            listening = None if address is None else during.enter_context(_listen(address))
            with divert_stdout():
                app = _load(options)
            app.source.spend = caps_of(parse_spend(spend))
            journal = during.enter_context(
                contextlib.closing(open_journal(options.journal, app.source.files))
            )
            rules = parse_retention(keep_runs, app.name)
            runner = _runner(options, journal, app, dispatcher, limit, host, rules)
            asyncio.run(_work(runner, grace, listening, f"{app.name}, version {app.code[:12]}", dispatcher))
    except Exception as error:
        return fail(error)
    return DONE


def _runner(
    options: FleetOptions,
    journal: Journal,
    app: FleetApp,
    dispatcher: str | None,
    limit: int,
    host: str | None,
    retention: Sequence[Retention],
) -> Runner:
    from handrail.fleet import Runner

    report: Callable[[str], None] = _print if options.log == "text" else lambda line: None  # it is logged too
    engine = _engine(dispatcher, journal)
    return Runner(
        journal, [app], dispatcher=engine, limit=limit, host=host or "", report=report, retention=retention
    )


async def _work(
    runner: Runner, grace: float, listening: socket.socket | None, app: str, engine: str | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, _stop, stop, runner)
    async with contextlib.AsyncExitStack() as during:
        if listening is not None:
            from handrail.fleet.status import StatusServer
            from handrail.serve.metrics import new_metrics
            from handrail.serve.server import address_of

            status = StatusServer(runner, new_metrics({}), stop.is_set)
            await during.enter_async_context(status.listen(listening))
            _print(f"Metrics are at {address_of(listening)}metrics")
        by = "" if engine is None else f", started by {engine}"
        _print(
            f"Worker {runner.journal.owner} on {runner.host} executes up to {runner.limit} runs of {app}{by}."
        )
        await runner.run(stop, grace=grace)
    _print("Stopped.")


def _listen(address: str) -> socket.socket:
    """Open a listening socket. Raises `UsageError` if the address is malformed or can't be used."""
    from handrail.cli.serve_commands import check_extra
    from handrail.serve.server import listen

    check_extra()
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[3]) > 65535:
        raise UsageError(
            f"--listen {address!r} is not an address. Write HOST:PORT, such as 127.0.0.1:9464 or [::]:9464."
        )
    try:
        return listen(found[1] or found[2], int(found[3]))
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"can't listen on {address}: {reason}. Give --listen another address, or port 0 for any free one."
        ) from None


def _stop(stop: asyncio.Event, runner: Runner) -> None:
    _print(f"Draining: {counted(len(runner.running), 'run')} left, and no more are taken.")
    stop.set()


def _engine(named: str | None, journal: Journal) -> Engine | None:
    """Return the engine with this name, on the database that `HANDRAIL_DISPATCH_URL` names; None without a name.

    Raises `UsageError` if the name is unknown or the variable is not set.
    """
    if named is None:
        return None
    if named not in ("dbos", "procrastinate"):
        raise UsageError(f"--dispatcher {named!r} is not one of dbos, procrastinate.")
    url = take_variable(DISPATCH_VARIABLE)
    if not url:
        raise UsageError(
            f"--dispatcher {named} needs a database. Set {DISPATCH_VARIABLE}, for example to postgresql://host/handrail."
        )
    if named == "dbos":
        from handrail.fleet.dbos import DbosDispatcher

        return DbosDispatcher(with_password(url), journal)
    from handrail.fleet.procrastinate import ProcrastinateDispatcher

    return ProcrastinateDispatcher(with_password(url), journal)


def submit(
    options: FleetOptions,
    message: str | None,
    at: str | None,
    every: str | None,
    key: str,
    session: str | None,
    attachments: Sequence[Path],
    as_json: bool,
) -> int:
    """Record a run for a worker, print its id, and return the exit code."""
    from handrail import fleet
    from handrail.cli.run_command import check_attachment

    try:
        text = read_input(message)
        with divert_stdout():
            app = _load(options)
        due = None if at is None else parse_due(at)
        if session is not None:
            check_id("session id", session)
        span = None if every is None else parse_span(every, "--every")
        folder = "" if options.files is None else _address(options.files)
        submission = fleet.Submission(
            text,
            session_id=session or "",
            at=due,
            every=span,
            key=key,
            folder=folder,
            startup_files=tuple(options.startup_files or ()),
            attachments=[check_attachment(path) for path in attachments],
        )
        with contextlib.closing(open_journal(options.journal, app.source.files)) as journal:
            row = asyncio.run(fleet.submit(journal, app, submission))
            show = runs_command("show", row.record.id, journal.path)
    except Exception as error:
        return fail(error, as_json=as_json)
    data = {
        "run_id": row.record.id,
        "session_id": row.record.session_id,
        "status": row.status,
        "queue": row.queue,
        "host": row.host,
        "due_at": row.due_at,
    }
    if as_json:
        print_json({"ok": True, "exit_code": DONE, **data})
    else:
        sys.stdout.write(f"{row.record.id}\n")
        _print(f"It is {row.status}. See `{show}`.")
    return DONE


def _address(files: Path) -> str:
    """Return the `folder` for a `Submission`: the absolute path of the folder `files`, or `workspace:NAME`."""
    return str(files) if str(files).startswith(WORKSPACE) else str(files.resolve())


def _load(options: FleetOptions) -> FleetApp:
    from handrail.fleet import FleetApp

    search_here()
    path = Path(options.app)
    is_worker = path.is_dir() or path.suffix == ".md"
    folder = (path if path.is_dir() else path.parent) if is_worker else None
    return FleetApp.load(
        options.app,
        model=find_model(options.model),
        approvals=parse_approvals(options.approve, can_park=True),
        files=open_files(options.files, folder, options.startup_files),
    )


def parse_span(text: str, option: str) -> float:
    """Parse a span of time, such as `15m`, and return it in seconds. Raises `UsageError` if it is invalid."""
    found = _SPAN.fullmatch(text)
    if found is None or not int(found[1]):
        raise UsageError(f"{option} {text!r} is not a span of time above zero. Write 30s, 15m, 12h or 7d.")
    return float(int(found[1]) * _UNITS[found[2]])


def parse_retention(given: Sequence[str], app: str) -> Sequence[Retention]:
    """Parse how long finished runs of an app are kept, such as `90d` or `failed=7d`. Raises `UsageError` if it is invalid."""
    rules: list[Retention] = []
    for text in given:
        standing, _, span = text.rpartition("=")
        if standing and standing not in OVER:
            raise UsageError(
                f"--keep-runs {text!r} does not begin with {', '.join(sorted(OVER))}. Write 90d or failed=7d."
            )
        keep = timedelta(seconds=parse_span(span, "--keep-runs"))
        states: Any = {standing} if standing else OVER
        rules.append(Retention(keep, states, app))
    return rules


def parse_due(text: str) -> float:
    """Parse the time at which a run is due: a date and time, by default in the local time zone, or a span from now.

    Returns seconds since 1970. Raises `UsageError` if the text is neither.
    """
    if _SPAN.fullmatch(text):
        return (SYSTEM_CLOCK.now() + timedelta(seconds=parse_span(text, "--at"))).timestamp()
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"--at {text!r} is not a time. Write 2026-01-31T08:00, or 30s, 15m, 12h or 7d."
        ) from None


def _print(line: str) -> None:
    sys.stderr.write(f"{escape_line(line)}\n")
    sys.stderr.flush()
