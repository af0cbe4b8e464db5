"""Startup files: files that a program later runs automatically, outside any sandbox, such as `.git/hooks/pre-commit`.

To approve a change to one is to approve that it will run. So a diff marks them, and a call that changes one
needs an approval of its own.

The list has files that run without anybody naming them, because somebody enters a folder, commits, pushes, opens
an editor or starts Python. Files that run when somebody asks for it, such as a `Makefile`, are not in it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

_RUN_BY = {
    "a shell": (
        *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".kshrc"),
        *(".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".cshrc", ".tcshrc", ".login"),
        *(".config/fish/config.fish", ".config/fish/conf.d/*", ".xprofile", ".xinitrc", ".xsession"),
    ),
    "direnv or mise": (".envrc", ".mise.toml", "mise.toml", ".config/mise/*", ".config/mise.toml"),
    "git": (
        *(".git", ".git/hooks/*", ".git/config", ".git/config.worktree", ".git/info/attributes"),
        *(".git/modules/*", ".git/worktrees/*"),
        *(".gitconfig", ".config/git/*", ".githooks/*", ".husky/*", ".pre-commit-config.yaml"),
        *(".pre-commit-hooks.yaml", "lefthook.yml", ".lefthook.yml", "lefthook.yaml", ".lefthook.yaml"),
    ),
    "pytest": ("conftest.py",),
    "Python": ("sitecustomize.py", "usercustomize.py", "*.pth"),
    "Handrail": ("tools.py",),
    "an editor": (
        *(".vscode/*", ".idea/*", ".devcontainer/*", ".devcontainer.json", ".dir-locals.el", ".exrc"),
        *(".vimrc", ".nvimrc", ".nvim.lua", ".vim/*", ".config/nvim/*", ".emacs", ".emacs.d/*"),
    ),
    "an agent": (".claude/*", ".mcp.json", ".cursor/*", ".codex/*", ".gemini/*"),
    "a debugger": (".gdbinit", ".lldbinit", ".pdbrc"),
    "a build service": (
        *(".github/workflows/*", ".github/actions/*", ".gitlab-ci.yml", ".circleci/*", "Jenkinsfile"),
        *("azure-pipelines.yml", ".travis.yml", "bitbucket-pipelines.yml", ".woodpecker/*", ".forgejo/*"),
    ),
    "a package manager": (
        *(".npmrc", ".yarnrc", ".yarnrc.yml", ".pnpmfile.cjs", ".cargo/config", ".cargo/config.toml"),
    ),
    "the system": (
        *(".config/autostart/*", ".config/systemd/*", ".ssh/rc", ".ssh/authorized_keys", ".ssh/config"),
        *(".pam_environment", ".config/environment.d/*", ".tmux.conf", ".screenrc"),
    ),
}
"""What runs the files at these paths, in any folder. `/*` at the end stands for everything in a folder."""
_NAMES = {each.casefold(): program for program, paths in _RUN_BY.items() for each in paths if "/" not in each}
_BELOW: dict[str, list[tuple[list[str], str]]] = {}
for _program, _paths in _RUN_BY.items():
    for _first, *_rest in (each.split("/") for each in _paths if "/" in each):
        _BELOW.setdefault(_first, []).append((_rest, _program))
_GIT = ("hooks", "config", "config.worktree")
"""What git runs in the folders of its modules and worktrees."""
_MANY = 32
"""Maximum number of names in a path that may begin a rule. A path with more can't be what it seems."""
_LISTED = 10
"""Maximum number of files that are named in a reason. A diff marks them all."""

HOOKS = (".git/hooks", ".githooks", ".husky")
PLACES: dict[str, list[str]] = {name: [name] for name in _NAMES.keys() - {".git"}}
"""Paths in a root that may be links to what runs, by their first name."""
for _path in (
    *HOOKS,
    *(f"{name}/{rest[0]}" for name, rules in _BELOW.items() for rest, _ in rules if len(rest) == 1),
):
    if not _path.endswith("*"):
        PLACES.setdefault(_path.split("/")[0], []).append(_path)


@runtime_checkable
class HasStartupFiles(Protocol):
    """A fork of files that run by themselves once they are committed, unlike files in memory."""

    def startup_files(self) -> list[tuple[str, str]]:
        """Return the changed startup files, each with what runs it, unless they are allowed by name."""
        ...


def run_by(path: str, *, is_link: bool = False) -> str:
    """Return what runs the file at this path by itself, or "" if nothing is known to.

    Neither case nor invisible characters make a difference, since they make none on some disks. A link may also
    stand in the place of a folder of such files.
    """
    if not path.isascii():
        kept = (each for each in unicodedata.normalize("NFKC", path) if unicodedata.category(each) != "Cf")
        path = "".join(kept)
    names = path.casefold().split("/")
    if names[-1].endswith(".pth"):
        return "Python"
    if names[-1] in _NAMES:
        return _NAMES[names[-1]]
    last = len(names) if is_link else len(names) - 1
    found = [at for at, name in enumerate(names[:last]) if name in _BELOW or name.endswith(".git")]
    for at in found[:_MANY]:
        name = ".git" if names[at].endswith(".git") else names[at]
        for rest, program in _BELOW[name]:
            if _matches(names, at + 1, rest, is_link) and not _is_idle(names, at + 1):
                return program
    return "a program" if len(found) > _MANY else ""


def _matches(names: list[str], at: int, rest: list[str], is_link: bool) -> bool:
    """Return whether the names from `at` on are those of a rule or, for a link, the first of them."""
    left = len(names) - at
    if left < len(rest):
        return is_link and names[at:] == rest[:left]
    if rest[-1] == "*":
        return names[at : at + len(rest) - 1] == rest[:-1]
    return left == len(rest) and names[at:] == rest


def _is_idle(names: list[str], at: int) -> bool:
    """Return whether a file in a folder of git's is one that git does not run."""
    if names[at : at + 1] == ["hooks"]:
        return names[-1].endswith(".sample")
    if names[at : at + 1] in (["modules"], ["worktrees"]) and len(names) > at + 1:
        return not any(each in _GIT for each in names[at + 1 :])
    return False


def is_allowed(path: str, allowed: Collection[str]) -> bool:
    """Return whether one of these patterns names the path. A pattern without a slash names files in any folder."""
    name = path.rpartition("/")[2]
    return any(fnmatchcase(path if "/" in pattern else name, pattern) for pattern in allowed)


def reason_to_ask(files: Sequence[tuple[str, str]]) -> str:
    """Return why changes to these startup files, each with what runs it, need an approval."""
    listed = "; ".join(f"{path} (run by {program})" for path, program in files[:_LISTED])
    more = f"; and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    return f"it changes files that run later by themselves, outside the sandbox: {listed}{more}"


def why_not_covered(paths: Sequence[str]) -> str:
    """Return why nothing but an answer of a person approves a change to these files, and what to do."""
    return (
        "files that run later by themselves need a person's approval, which nothing else stands in for. To let calls "
        f"change them, allow them by name: DirectoryFilesystem(folder, startup_files={list(paths[:_LISTED])!r}), "
        "or --startup-files PATH"
    )
