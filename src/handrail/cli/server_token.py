"""The program's secrets: the server's token, the link that opens the page without it, and the secrets in the environment.

None is written to a file that other users may read, or passed as an argument to a process, and the variables are removed
from the environment: tools, and the commands that they run, could read arguments and environments.
"""

from __future__ import annotations

import contextlib
import ctypes
import html
import os
import stat
import sys
import tempfile
from pathlib import Path

from handrail.cli.outcome import UsageError

VARIABLE, OIDC_VARIABLE, DISPATCH_VARIABLE = "HANDRAIL_TOKEN", "HANDRAIL_OIDC_SECRET", "HANDRAIL_DISPATCH_URL"
_taken: dict[str, str] = {}
"""The variables that `take_secrets` has removed and `take_variable` has not returned yet."""


def take_secrets() -> None:
    """Remove the variables with secrets from the environment of this process, before the app's code runs.

    The journal's key and the database's password are handed to the modules that need them, even if it is for a connection
    that is opened again later. Only the program calls this: a process that embeds Handrail keeps its environment.
    Raises `UsageError` if HANDRAIL_JOURNAL names no file and its URL can't be read, because its password can't be told apart.
    """
    for name in (VARIABLE, OIDC_VARIABLE, DISPATCH_VARIABLE):
        if name in os.environ:
            _taken[name] = take_variable(name) or ""
    if "HANDRAIL_KEY" in os.environ:
        from handrail.journal.digest import hold_key

        hold_key(take_variable("HANDRAIL_KEY") or "")
    if "PGPASSWORD" in os.environ:
        from handrail.journal.postgres.address import hold_password

        hold_password(take_variable("PGPASSWORD") or "")
    if journal := take_variable("HANDRAIL_JOURNAL"):
        from handrail.errors import JournalError
        from handrail.journal.postgres.address import hold_name

        try:
            os.environ["HANDRAIL_JOURNAL"] = hold_name(journal)
        except JournalError as error:
            raise UsageError(f"HANDRAIL_JOURNAL: {error}") from None


def read_token(file: Path | None) -> str | None:
    """Return the token from the file or $HANDRAIL_TOKEN, or None if neither is given.

    The variable is removed from the environment. Raises `UsageError` if both are given, or if the file can't be read or
    others may read it.
    """
    from_environment = take_variable(VARIABLE)
    if file is None:
        return from_environment
    if from_environment is not None:
        raise UsageError(f"${VARIABLE} and --token-file both give a token. Use only one of them.")
    try:
        mode = file.stat().st_mode
        if stat.S_ISREG(mode) and stat.S_IMODE(mode) & 0o077:
            raise UsageError(f"--token-file {file}: others may read it. Run: chmod 600 {file}")
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--token-file {file}: {reason}. Give a file with the token in it.") from None


def take_variable(variable: str) -> str | None:
    """Remove an environment variable and return its value, or None if it is unset or empty."""
    value = _taken.pop(variable, None) or os.environ.pop(variable, None) or None
    _erase(variable)
    return value


def _erase(variable: str) -> None:
    """Overwrite a variable's value in the memory that Linux shows as this process's environment.

    `os.environ.pop` hides the variable from child processes. But /proc/PID/environ still shows the environment
    with which the process was started, to every process of the same user.
    """
    if sys.platform != "linux":
        return
    name = f"{variable}=".encode()
    with contextlib.suppress(OSError, ValueError):
        shown = Path("/proc/self/environ").read_bytes()
        # the field `env_start`
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
        at = 0
        for entry in shown.split(b"\0"):
            if start and entry.startswith(name):
                ctypes.memset(start + at + len(name), ord("-"), len(entry) - len(name))
            at += len(entry) + 1


class BrowserFile:
    """A file that redirects a browser to an address, so that the address appears in no process's arguments."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self, address: str) -> None:
        """Write the file, and open it in a browser."""
        import webbrowser

        self._folder = tempfile.TemporaryDirectory(prefix="handrail-")  # created with mode 0700
        path = Path(self._folder.name) / "open.html"
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(
                f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(address)}"><title>Handrail</title>'
            )
        webbrowser.open(path.as_uri())

    def remove(self) -> None:
        """Delete the file, if there is one."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
