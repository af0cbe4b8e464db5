"""The keeper's requests and replies, as JSON, and the environment and paths that a command gets.

A command gets a clean environment. Common locations of secrets are hidden from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from handrail.resources.installation import Place

Isolation = Literal["user", "root", "none"]
"""How a command is isolated: by namespaces in a user namespace, by namespaces alone, or not at all."""
View = Literal["overlay", "bind", "plain"]
"""How the command sees its folder: through an overlay, as a copy mounted at its path, or as an unmounted copy."""


INODE = 1024
"""Estimated bytes of kernel memory that each file in a tmpfs takes besides its content."""


class Limits(NamedTuple):
    """Limits for one command together with everything it starts."""

    memory: int
    cpu_seconds: float
    disk: int
    files: int
    processes: int

    @property
    def most_processes(self) -> int:
        """The kernel's limit on processes. It is above `processes`, so that Handrail ends the command first and reports why."""
        return self.processes + 32

    @property
    def most_memory(self) -> int:
        """The kernel's limit on memory. It is above `memory`, so that Handrail ends the whole command before the kernel kills one process."""
        return self.memory * 5 // 4

    @property
    def most_temporary_files(self) -> int:
        """Maximum number of files in each private folder. It is at least 1024, however small the limits are."""
        return max(1024, min(self.files, self.memory // INODE))


class Request(NamedTuple):
    """A request to run one command.

    Paths are absolute, except `cwd` and those in `kept`, which are relative to `root`. Links are resolved, except in `cwd`.
    """

    isolation: Isolation
    argv: list[str]
    """The program and its arguments. Empty for a probe, which tries the operations that an overlay must support."""
    environment: dict[str, str]
    root: str
    cwd: str
    view: View
    lowers: list[str]
    """The layers below `upper`, topmost first. If the command runs on a copy, this is only the copy, which the command changes."""
    upper: str
    work: str
    network: bool
    limits: Limits
    hidden: list[str]
    exposed: list[Place]
    """Files and folders on the host to show read-only, each at its own path and at the path that it led to."""
    kept: list[str]
    """Paths in the command's folder, relative to it, that the command can't change."""

    def encode(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def decode(data: bytes) -> Request:
        fields: dict[str, Any] = json.loads(data)
        fields["limits"] = Limits(*fields["limits"])
        fields["exposed"] = [Place(path, real, tuple(links)) for path, real, links in fields["exposed"]]
        return Request(**fields)


class Reply(NamedTuple):
    """How a command ended, or which step failed before it started."""

    status: int | None = None
    """The command's status as `waitpid` returns it, or the first process's if the command's was not reported.

    None if neither was reported. Each field below is "" or None if it was not reported.
    """
    mounted: str = ""
    """The type of filesystem mounted at `root` when the sandbox was set up."""
    limit: str = ""
    """The exceeded limit: memory, cpu, disk, files or processes. Also memory if the kernel killed a process for lack of it."""
    used: str = ""
    """The value of that limit, such as `512 MiB of memory`, or "" if the kernel enforced the limit."""
    limited: str = ""
    """`kernel` if the kernel limits the command's memory, in cgroups."""
    near: str = ""
    """The limit on processes, such as `1024 processes and threads`, if the command may have failed to start some because of it."""
    failed: str = ""
    """The step that failed: namespaces, layers, mounts, overlay, privileges, folder, exec or keeper."""
    error: int | None = None
    detail: str = ""

    def encode(self) -> bytes:
        """Encode the fields that are set as a line of JSON."""
        fields = {name: value for name, value in self._asdict().items() if value not in (None, "")}
        return json.dumps(fields).encode() + b"\n"

    @staticmethod
    def decode(data: bytes) -> Reply:
        """Merge all lines into one reply. If several lines set a field, the first one wins."""
        fields: dict[str, Any] = {}
        for line in data.splitlines():
            for name, value in json.loads(line).items():
                fields.setdefault(name, value)
        return Reply(**fields)


_PASSED_VARIABLES = ("PATH", "LANG", "LANGUAGE", "TZ", "TERM")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_HOME_SECRETS = [
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".kube",
    ".docker",
    ".netrc",
    ".pgpass",
    ".my.cnf",
    ".git-credentials",
    ".npmrc",
    ".pypirc",
    ".password-store",
    ".config/gcloud",
    ".config/gh",
    ".config/hub",
    ".config/git/credentials",
    ".config/op",
    ".config/containers",
    ".cargo/credentials",
    ".cargo/credentials.toml",
    ".gem/credentials",
    ".terraform.d",
    ".vault-token",
    ".local/share/keyrings",
    ".bash_history",
    ".zsh_history",
    ".python_history",
    ".psql_history",
    ".node_repl_history",
    ".mozilla",
    ".config/chromium",
    ".config/google-chrome",
    ".claude",
    ".codex",
    ".config/openai",
    ".anthropic",
    ".cache/huggingface/token",
]
_SYSTEM_SECRETS = (
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/sudoers",
    "/etc/krb5.keytab",
)


def clean_environment(home: str, temporary: str) -> dict[str, str]:
    """Return a command's environment: a few harmless variables of this process, TERM, PATH, HOME and TMPDIR."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_VARIABLES or (name.startswith("LC_") and name.isupper())
    }
    # Relative folders are dropped, so that a program in the project is not found by its name alone.
    folders = [folder for folder in kept.get("PATH", _PATH).split(":") if folder.startswith("/")]
    return {"TERM": "dumb", **kept, "PATH": ":".join(folders) or _PATH, "HOME": home, "TMPDIR": temporary}


def hidden_paths(more: Iterable[str]) -> list[str]:
    """Return the paths to hide: common locations of secrets and the paths in `more`, if they exist. Links are resolved."""
    homes = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):  # the user may have no password entry
        homes.add(pwd.getpwuid(os.geteuid()).pw_dir)
    usual = [f"{home.rstrip('/')}/{name}" for home in sorted(homes) for name in _HOME_SECRETS]
    return sorted(
        {os.path.realpath(path) for path in (*usual, *_SYSTEM_SECRETS, *more) if os.path.lexists(path)}
    )
