"""Startup files: files that a program runs by itself, later and outside any sandbox, such as `.git/hooks/pre-commit`.

Whoever approves a change to one approves that it will run. So a diff marks them, and a call that
changes one needs an approval of its own.
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
    "direnv or mise, when somebody enters the folder": (".envrc", ".mise.toml", "mise.toml"),
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
    "the system, when somebody logs in": (
        *(".config/autostart/*", ".config/systemd/*", ".ssh/rc", ".ssh/authorized_keys", ".ssh/config"),
        *(".pam_environment", ".config/environment.d/*", ".tmux.conf", ".screenrc"),
    ),
}
_PATTERNS = [(pattern, who) for who, patterns in _RUN_BY.items() for pattern in patterns]


def run_by(path: str) -> str:
    """Return who runs the file at this path by itself, or "" if nobody is known to. Case does not matter."""
    folded = path.casefold()
    for pattern, who in _PATTERNS:
        wanted = pattern.casefold()
        if fnmatchcase(folded, wanted) or fnmatchcase(folded, f"*/{wanted}"):
            return who
    return ""


def is_allowed(path: str, allowed: Collection[str]) -> bool:
    """Return whether one of these patterns names the path."""
    return any(fnmatchcase(path, pattern) for pattern in allowed)


def reason_to_ask(paths: Iterable[str]) -> str:
    """Return why changes to these startup files need an approval."""
    listed = "; ".join(f"{path} (run by {run_by(path)})" for path in paths)
    return f"it changes files that run later by themselves, outside the sandbox: {listed}"
