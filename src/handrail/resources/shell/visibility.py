"""What a command can see: a clean environment, no secrets, and the interpreter that runs Handrail."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from collections.abc import Iterable

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
    """Return the harmless variables a program needs. Every other one must be passed explicitly."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_VARIABLES or (name.startswith("LC_") and name.isupper())
    }
    # No relative folders: a program in the project is not found by its bare name.
    folders = [folder for folder in kept.get("PATH", _PATH).split(":") if folder.startswith("/")]
    return {"TERM": "dumb", **kept, "PATH": ":".join(folders) or _PATH, "HOME": home, "TMPDIR": temporary}


def hidden_paths(more: Iterable[str]) -> list[str]:
    """Return the existing paths to hide: the usual places of secrets, and `more`."""
    homes = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):  # a user without an entry has no home either
        homes.add(pwd.getpwuid(os.geteuid()).pw_dir)
    usual = [f"{home.rstrip('/')}/{name}" for home in sorted(homes) for name in _HOME_SECRETS]
    return sorted(
        {os.path.realpath(path) for path in (*usual, *_SYSTEM_SECRETS, *more) if os.path.lexists(path)}
    )


def interpreter_folders() -> list[str]:
    """Return the folders of the running Python, so that commands can use it wherever it is installed."""
    return sorted({os.path.realpath(prefix) for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)})
