"""What a command is not shown: the environment but for a few names, and the usual places of secrets."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from collections.abc import Iterable

_PASSED = ("PATH", "LANG", "LANGUAGE", "TZ", "TERM")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_IN_HOME = [
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
_OF_THE_MACHINE = (
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/sudoers",
    "/etc/krb5.keytab",
)


def cleaned_environment(home: str, temporary: str) -> dict[str, str]:
    """The names that are harmless and needed; everything else is passed on purpose or not at all."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED or (name.startswith("LC_") and name.isupper())
    }
    # Without relative folders: what is in the folder itself is not found by its bare name.
    folders = [folder for folder in kept.get("PATH", _PATH).split(":") if folder.startswith("/")]
    return {"TERM": "dumb", **kept, "PATH": ":".join(folders) or _PATH, "HOME": home, "TMPDIR": temporary}


def hidden_places(more: Iterable[str]) -> list[str]:
    """Where secrets usually lie, as far as there is something, and what else is to be hidden."""
    homes = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):  # a user without a name has no home either
        homes.add(pwd.getpwuid(os.geteuid()).pw_dir)
    usual = [f"{home.rstrip('/')}/{name}" for home in sorted(homes) for name in _IN_HOME]
    places = [
        os.path.realpath(place) for place in (*usual, *_OF_THE_MACHINE, *more) if os.path.lexists(place)
    ]
    return sorted(set(places))


def interpreter_folders() -> list[str]:
    """The folders of the Python that runs Handrail: a command can use it wherever it is installed."""
    return sorted({os.path.realpath(prefix) for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)})
