"""`handrail doctor`: checks the installation and its surroundings, and says what to do about each problem."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from handrail.cli.command_options import search_here
from handrail.cli.outcome import DONE, FAILED, divert_stdout, fail, journal_path, journal_url, print_json
from handrail.cli.streams import unguarded
from handrail.clock import SYSTEM_CLOCK
from handrail.errors import HandrailError, JournalError
from handrail.text.rendering import counted, escape_line
from handrail.text.terminal import Style, Styler, wants_colour

if TYPE_CHECKING:
    from handrail.fleet import FleetApp
    from handrail.models.availability import Availability

State = Literal["ok", "warning", "problem"]
_COLOURS: dict[State, Style] = {"ok": "green", "warning": "yellow", "problem": "red"}
_EXTRA = re.compile(r"([\w.-]+).*extra == ['\"](\w+)['\"]")
_NEWEST_TESTED = (3, 13)
_SKEW_SECONDS = 2.0
"""The difference between two clocks that is still normal between machines that synchronize theirs."""
_SPARE_BYTES = 256 * 2**20
_MOST_RUNS, _NEWEST_RUNS = 1000, 20
"""The size of a journal up to which all runs are verified, and how many of a larger one."""
_CONNECT_SECONDS = 5


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. Unless it is `ok`, the text also says what to do."""

    check: str
    state: State
    text: str


def doctor(app: str | None, journal: str | None, network: bool, strict: bool, as_json: bool) -> int:
    """Print the findings, and return 0 if there is no problem, or with `strict` neither a problem nor a warning."""
    try:
        search_here()
        with divert_stdout():
            findings = [*_installation(), *_storage(journal), *_app(app, network)]
    except Exception as error:
        return fail(error, as_json=as_json)
    bad = [each for each in findings if each.state == "problem" or (strict and each.state == "warning")]
    code = FAILED if bad else DONE
    if as_json:
        print_json({"ok": not bad, "exit_code": code, "findings": msgspec.to_builtins(findings)})
        return code
    style, out = Styler(wants_colour(sys.stdout)), unguarded(sys.stdout)
    for each in findings:
        out.write(
            f"{style(f'{each.state:8}', _COLOURS[each.state])} {each.check:9} {escape_line(each.text)}\n"
        )
    out.write(f"{counted(len(bad), 'problem')} to solve.\n" if bad else "Everything that is needed works.\n")
    return code


# --- the installation ---


def _installation() -> Iterator[Finding]:
    running = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] > _NEWEST_TESTED:
        newest = ".".join(map(str, _NEWEST_TESTED))
        yield Finding("python", "warning", f"{running}: Handrail is tested up to {newest}. Use that.")
    else:
        yield Finding("python", "ok", f"{running}, {sys.executable}, handrail {version('handrail')}")
    yield _extras()
    yield _sandbox()


def _extras() -> Finding:
    """Report which extras are installed. Nobody needs all of them, and what needs a missing one is a problem of its own."""
    found: dict[str, list[str]] = {}
    for each in requires("handrail") or ():
        if (match := _EXTRA.match(each)) and match[1] != "handrail":
            lacking = found.setdefault(match[2], [])
            if not _is_installed(match[1]):
                lacking.append(match[1])
    complete = [name for name, lacking in found.items() if not lacking]
    missing = "; ".join(f"{name} lacks {', '.join(lacking)}" for name, lacking in found.items() if lacking)
    advice = f". To add one, run: pip install 'handrail[NAME]' ({missing})" if missing else ""
    return Finding("extras", "ok", f"{', '.join(complete) or 'none'}{advice}")


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _sandbox() -> Finding:
    from handrail.resources.shell.execution import probe

    with tempfile.TemporaryDirectory(prefix="handrail-doctor-") as folder:
        support = probe(Path(folder))
    if not support.contained:
        return Finding(
            "sandbox",
            "warning",
            f"commands of a Shell are refused, because this machine lacks {'; '.join(support.missing)}. If the app runs "
            "commands, allow user namespaces, or in a container its seccomp and AppArmor profiles to let them through.",
        )
    if not support.overlay:
        return Finding(
            "sandbox",
            "warning",
            f"commands work on copies of their folders, which is slow: {'; '.join(support.missing)}. Use a disk "
            "that takes overlay mounts, such as ext4 or xfs.",
        )
    return Finding("sandbox", "ok", f"commands run in {support.isolation} namespaces, with overlays")


# --- the journal ---


def _storage(journal: str | None) -> Iterator[Finding]:
    url = journal_url(journal)
    yield from _file(journal_path(journal)) if url is None else _database(url)


def _file(path: Path) -> Iterator[Finding]:
    from handrail.journal.digest import KEY_FILE_VARIABLE, given_key, key_beside

    shown, folder = str(path), path.parent
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        yield Finding(
            "journal", "problem", f"{shown}: can't write in {folder}. Use another file: --journal FILE."
        )
        return
    if (free := shutil.disk_usage(folder).free) < _SPARE_BYTES:
        yield Finding("disk", "warning", f"{folder} has only {free // 2**20} MB left. Free some space.")
    if path.exists() or given_key() or os.environ.get(KEY_FILE_VARIABLE):
        try:
            key_beside(shown, False)
        except JournalError as error:
            yield Finding("key", "problem", str(error))
            return
        yield Finding("key", "ok", _key_source(f"{shown}.key"))
    if path.exists():
        yield from _journal(shown)
    else:
        yield Finding(
            "journal",
            "ok",
            f"{shown} does not exist yet; the first run creates it, and its key unless it has one",
        )


def _key_source(beside: str) -> str:
    from handrail.journal.digest import KEY_FILE_VARIABLE, KEY_VARIABLE, given_key

    if given_key():
        return f"from {KEY_VARIABLE}"
    return f"from the file {os.environ.get(KEY_FILE_VARIABLE) or beside}"


def _database(url: str) -> Iterator[Finding]:
    from handrail.journal.digest import shared_key
    from handrail.journal.postgres.address import parse_url

    address = parse_url(url)
    try:
        shared_key(address.shown, None)
        yield Finding("key", "ok", _key_source(""))
    except JournalError as error:
        yield Finding("key", "problem", str(error))
    try:
        import psycopg
    except ModuleNotFoundError:
        yield Finding(
            "database",
            "problem",
            "psycopg is not installed. Install it with: pip install 'handrail[postgres]'",
        )
        return
    from handrail.journal.postgres.pooler import check_pooler

    def connect() -> psycopg.Connection:
        return psycopg.connect(address.conninfo, autocommit=True, connect_timeout=_CONNECT_SECONDS)

    try:
        with connect() as raw:
            check_pooler(address.shown, raw, connect)
            row = raw.execute(_FACTS, (f'"{address.schema}".about',)).fetchone()
            here = SYSTEM_CLOCK.now().timestamp()
    except JournalError as error:
        yield Finding("database", "problem", str(error))
        return
    except psycopg.Error as error:
        reason = address.without_secret(str(error)).strip().splitlines()[0].rstrip(".")
        advice = (
            "Check the URL and the password, and that the server is running and reachable from this machine."
        )
        yield Finding("database", "problem", f"{address.shown}: {reason}. {advice}")
        return
    assert row is not None
    server, most, used, is_writable, there, is_created = row
    yield _connections(server, most, used, is_writable)
    yield _clock(float(there) - here)
    if is_created:
        yield from _journal(url)
    else:
        yield Finding("journal", "ok", f"{address.shown} has no journal yet; the first process creates it")


_FACTS = """SELECT split_part(current_setting('server_version'), ' ', 1), current_setting('max_connections')::int,
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'), NOT pg_is_in_recovery(),
    extract(epoch FROM clock_timestamp())::float8, to_regclass(%s) IS NOT NULL"""


def _connections(server: str, most: int, used: int, is_writable: bool) -> Finding:
    text = f"PostgreSQL {server}, {used} of {most} connections in use"
    if not is_writable:
        return Finding("database", "problem", f"{text}; it is a standby. Connect to the primary.")
    if used * 5 > most * 4:
        advice = "Each server and worker needs two: raise max_connections."
        return Finding("database", "warning", f"{text}. {advice}")
    return Finding("database", "ok", text)


def _clock(ahead: float) -> Finding:
    if abs(ahead) <= _SKEW_SECONDS:
        return Finding("clock", "ok", f"{abs(ahead):.1f} s from the database's")
    way = "behind" if ahead > 0 else "ahead of"
    return Finding(
        "clock",
        "warning",
        f"this machine is {abs(ahead):.0f} s {way} the database, so times of submitted runs and of sign-ins are off. "
        "Synchronize both, for example with systemd-timesyncd.",
    )


def _journal(named: str) -> Iterator[Finding]:
    """Open an existing journal and verify it, or only the newest runs if it has many."""
    from handrail.journal.any_journal import open_by_name
    from handrail.journal.sql.schema import VERSION

    try:
        journal = open_by_name(named, watches=False)
    except HandrailError as error:
        yield Finding("journal", "problem", str(error))
        return

    async def verify() -> tuple[str, list[str]]:
        rows = await journal.runs.list(limit=_MOST_RUNS)
        if len(rows) < _MOST_RUNS:
            found, what = [await journal.runs.verify()], counted(len(rows), "run")
        else:
            found = [await journal.runs.verify(row.record.id) for row in rows[:_NEWEST_RUNS]]
            what = f"the newest {_NEWEST_RUNS} runs"
        return what, [str(altered) for each in found for altered in each.altered]

    try:
        what, altered = asyncio.run(verify())
        if altered:
            yield Finding("journal", "problem", altered[0])  # it says how to list the others
        else:
            yield Finding("journal", "ok", f"{journal.path}, schema {VERSION}, {what} verified")
    except HandrailError as error:
        yield Finding("journal", "problem", str(error))
    finally:
        journal.close()


# --- the app and its models ---


def _app(named: str | None, network: bool) -> Iterator[Finding]:
    """Load the app, if one is named, and report which models work here. No server is contacted without `network`."""
    from handrail.fleet import FleetApp
    from handrail.models.availability import survey

    app: FleetApp | None = None
    if named is not None:
        try:
            app = FleetApp.load(named)
            yield Finding(
                "app", "ok", f"{app.name}, version {app.code[:12]}, model {app.source.model or 'unnamed'}"
            )
        except Exception as error:
            kind = "" if isinstance(error, HandrailError) else f"{type(error).__name__}: "
            yield Finding("app", "problem", f"{named}: {kind}{error}")
    yield _models(asyncio.run(survey(contact=network)), app)


def _models(found: list[Availability], app: FleetApp | None) -> Finding:
    wanted = "" if app is None else app.source.model.partition(":")[0]
    for each in found:
        if each.provider == wanted and each.state not in ("ready", "not asked"):
            return Finding("models", "problem", f"{wanted}: {each.detail}")
    ready = [each.provider for each in found if each.state == "ready"]
    return Finding("models", "ok", f"ready: {', '.join(ready)}. `handrail models` says what the others need")
