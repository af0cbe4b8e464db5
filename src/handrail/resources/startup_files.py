"""Startup files: files that a program later runs automatically, outside any sandbox, such as `.git/hooks/pre-commit`.

A person who approves a change to such a file also approves that it will run. So diffs mark startup files, and a call
that changes one needs a separate approval.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

_RUN_BY = {
    "a shell, when it starts": (
        *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".kshrc"),
        *(".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".cshrc", ".tcshrc", ".login"),
        *(".config/fish/config.fish", ".config/fish/conf.d/*", ".xprofile", ".xinitrc", ".xsession"),
    ),
    "direnv or mise, when someone enters the folder": (".envrc", ".mise.toml", "mise.toml"),
    "git": (
        *(".git/hooks/*", ".git/config", ".git/config.worktree", ".git/info/attributes", ".git/modules/*"),
        *(".gitconfig", ".config/git/config", ".githooks/*", ".husky/*", ".pre-commit-config.yaml"),
        *(".pre-commit-hooks.yaml", "lefthook.yml", ".lefthook.yml"),
    ),
    "pytest": ("conftest.py",),
    "Python, when it starts": ("sitecustomize.py", "usercustomize.py", "*.pth"),
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
        ".npmrc",
        ".yarnrc",
        ".yarnrc.yml",
        ".pnpmfile.cjs",
        ".cargo/config",
        ".cargo/config.toml",
    ),
    "the system, when someone logs in": (
        *(".config/autostart/*", ".config/systemd/*", ".ssh/rc", ".ssh/authorized_keys", ".ssh/config"),
        *(".pam_environment", ".config/environment.d/*", ".tmux.conf", ".screenrc"),
    ),
}
_PATTERNS = [(pattern, who) for who, patterns in _RUN_BY.items() for pattern in patterns]


def run_by(path: str) -> str:
    """Return the program that runs the file at this path automatically, or "" if none is known. Ignores case."""
    folded = path.casefold()
    for pattern, who in _PATTERNS:
        wanted = pattern.casefold()
        if fnmatchcase(folded, wanted) or fnmatchcase(folded, f"*/{wanted}"):
            return who
    return ""


def is_allowed(path: str, allowed: Collection[str]) -> bool:
    """Return whether one of these patterns matches the path."""
    return any(fnmatchcase(path, pattern) for pattern in allowed)


def reason_to_ask(paths: Iterable[str]) -> str:
    """Return the reason, as text, why changes to these startup files need an approval."""
    listed = "; ".join(f"{path} (run by {run_by(path)})" for path in paths)
    return f"it changes files that are later run automatically, outside the sandbox: {listed}"
