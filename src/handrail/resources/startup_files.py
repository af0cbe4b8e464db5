"""Startup files: files that a program later runs automatically, outside any sandbox, such as `.git/hooks/pre-commit`.

A person who approves a change to such a file also approves that it will run. So diffs mark these files, and a call that
changes one on disk needs a separate approval, unless the file is allowed by name.

The list contains files that run although nobody asks for them, for example when someone enters a folder, commits,
opens an editor or starts Python. Files that run only on request, such as a `Makefile`, are not in it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from handrail.resources.paths import ancestors, join, split

_RUN_BY = {
    "a shell": (
        *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".kshrc"),
        *(".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".cshrc", ".tcshrc", ".login"),
        *(".config/fish/config.fish", ".config/fish/conf.d/*", ".config/fish/functions/*"),
        *(".xprofile", ".xinitrc", ".xsession"),
        *(
            "bin/activate",
            "bin/activate.*",
            "Scripts/activate",
            "Scripts/activate.*",
            "Scripts/deactivate.bat",
        ),
    ),
    "direnv or mise": (
        *(".envrc", ".mise.toml", "mise.toml", ".mise.local.toml", "mise.local.toml"),
        *(".config/mise/*", ".config/mise.toml"),
    ),
    "git": (
        *(".git", ".git/hooks/*", ".git/config", ".git/config.worktree", ".git/commondir"),
        ".git/info/attributes",
        *(".git/modules/*", ".git/worktrees/*"),
        *(".gitconfig", ".config/git/*", ".githooks/*", ".husky/*", ".pre-commit-config.yaml"),
        *(".pre-commit-hooks.yaml", "lefthook.yml", ".lefthook.yml", "lefthook.yaml", ".lefthook.yaml"),
    ),
    "Mercurial": (".hgrc", ".hg/hgrc", ".hg/hgrc-not-shared", ".hg/sharedpath"),
    "pytest": ("conftest.py",),
    "Python": (
        *("sitecustomize", "sitecustomize.*", "sitecustomize/*"),
        *("usercustomize", "usercustomize.*", "usercustomize/*"),
        *(
            "*.pth",
            "site-packages/*",
            "dist-packages/*",
            "_distutils_hack/*",
            "_virtualenv.*",
            "__editable__*",
        ),
        *("pyvenv.cfg", ".venv/pyvenv.cfg", "venv/pyvenv.cfg", ".venv/lib/*", ".venv/lib64/*"),
        *("bin/activate_this.py", "bin/python", "bin/python3", "bin/python3.[0-9]*"),
        *("Scripts/activate_this.py", "Scripts/python.exe", "Scripts/pythonw.exe"),
    ),
    "Handrail": ("tools.py",),
    "an editor": (
        *(".vscode/*", ".idea/*", ".devcontainer/*", ".devcontainer.json", ".helix/*", ".zed/*", ".fleet/*"),
        *(".dir-locals.el", ".dir-locals-2.el", ".emacs", ".emacs.d/*"),
        *(".exrc", ".vimrc", ".nvimrc", ".nvim.lua", ".vim/*", ".config/nvim/*", "*.code-workspace"),
    ),
    "an agent": (
        *(
            ".claude/*",
            ".mcp.json",
            ".cursor/*",
            ".codex/*",
            ".gemini/*",
            ".windsurf/*",
            ".kiro/*",
            ".qwen/*",
        ),
        *(".opencode/*", "opencode.json", "opencode.jsonc", ".aider.conf.yml", ".continue/*", ".roo/*"),
        *(".amazonq/*", ".junie/*", ".factory/*", ".crush.json", "crush.json"),
    ),
    "a debugger": (".gdbinit", ".lldbinit", ".pdbrc", ".perldb", ".rdbgrc", ".byebugrc"),
    "an interpreter": (
        *(".Rprofile", ".Renviron", ".ghci", ".irbrc", ".pryrc", ".octaverc", ".iex.exs", ".erlang"),
        *(".ocamlinit", "startup.m", ".psqlrc", ".sqliterc", ".mongoshrc.js"),
    ),
    "a build service": (
        *(".github/workflows/*", ".github/actions/*", ".gitea/workflows/*", ".gitea/actions/*", ".forgejo/*"),
        *(".gitlab-ci.yml", ".circleci/*", "Jenkinsfile", "azure-pipelines.yml", ".travis.yml", ".drone.yml"),
        *("bitbucket-pipelines.yml", ".woodpecker/*", ".woodpecker.yml", ".woodpecker.yaml", ".buildkite/*"),
        *(".semaphore/*", ".teamcity/*", ".cirrus.yml", ".tekton/*", ".appveyor.yml", "appveyor.yml"),
        *(".builds/*", ".build.yml", "cloudbuild.yaml", "buildspec.yml"),
    ),
    "a package manager": (
        *(
            ".npmrc",
            ".yarnrc",
            ".yarnrc.yml",
            ".pnpmfile.cjs",
            ".cargo/config",
            ".cargo/config.toml",
            ".mvn/*",
        ),
        *(".yarn/releases/*", ".yarn/plugins/*", ".pnp.cjs", ".pnp.loader.mjs", "bunfig.toml"),
        *("rust-toolchain", "rust-toolchain.toml", "gradle/wrapper/*"),
    ),
    "the system": (
        *(".config/autostart/*", ".config/systemd/*", ".ssh/rc", ".ssh/authorized_keys", ".ssh/config"),
        *(".pam_environment", ".config/environment.d/*", ".tmux.conf", ".screenrc"),
    ),
}
"""The paths that each program runs, in any folder.

`/*` at the end stands for everything in a folder, at any depth. Elsewhere, `*` stands for any characters in the last name, and
`[0-9]` for a digit.
"""
_FOLDERS = {"HEAD": ".git", "pyvenv.cfg": ".venv"}
"""A folder of any name that contains this file counts as one with this name: a bare git repository, a virtual environment."""
_REPOSITORY = ("HEAD", "objects", "refs", "commondir")
"""The names by which git recognizes a repository: the first one, together with the last one or the two others."""
_NAMES: dict[str, str] = {}
_PATTERNS: list[tuple[str, str]] = []
_BELOW: dict[str, list[tuple[list[str], str]]] = {}
for _program, _paths in _RUN_BY.items():
    for _path in _paths:
        _first, *_rest = _path.casefold().split("/")
        if _rest:
            _BELOW.setdefault(_first, []).append((_rest, _program))
        elif "*" in _first:
            _PATTERNS.append((_first, _program))
        else:
            _NAMES[_first] = _program
_GIT = ("hooks", "config", "config.worktree", "commondir", "gitdir")
"""Names in the git folder of a submodule or worktree that git runs, or reads to find the files to run."""
_MANY = 32
"""Maximum number of names in a path at which rules are tried. A path with more names that begin a rule counts as a startup file."""
_LISTED = 10
"""Maximum number of startup files that a message names. A diff marks all of them."""

HOOKS = (".git/hooks", ".githooks", ".husky")
PLACES: dict[str, list[str]] = {}
"""Paths of startup files and of folders that contain them, relative to a root, by the first name in the path.

A link at one of these paths makes its target a startup file.
"""
for _path in sorted({each.removesuffix("/*") for paths in _RUN_BY.values() for each in paths} - {".git"}):
    if "*" not in _path:
        PLACES.setdefault(_path.split("/")[0], []).append(_path)


@runtime_checkable
class HasStartupFiles(Protocol):
    """A fork whose files other programs can run once they are committed, unlike files in memory."""

    def startup_files(self) -> list[tuple[str, str]]:
        """Return each changed or deleted startup file with the program that runs it, except the files that are allowed by name."""
        ...


def run_by(path: str, *, is_link: bool = False) -> str:
    """Return the program that runs the file at this path automatically, or "" if none is known.

    Case and invisible characters are ignored, because some disks ignore them. With `is_link`, the file is a link,
    which also counts if it is at the path of a folder of startup files.
    """
    if not path.isascii():
        kept = (each for each in unicodedata.normalize("NFKC", path) if unicodedata.category(each) != "Cf")
        path = "".join(kept)
    names = path.casefold().split("/")
    program = _NAMES.get(names[-1]) or next(
        (by for name, by in _PATTERNS if fnmatchcase(names[-1], name)), ""
    )
    if program:
        return program
    if names[-1] == "head" and not any(name.endswith(".git") for name in names):
        return "git"  # a file named HEAD can make its folder a repository, with hooks and a config
    last = len(names) if is_link else len(names) - 1
    found = [at for at, name in enumerate(names[:last]) if name in _BELOW or name.endswith(".git")]
    for at in found[:_MANY]:
        name = ".git" if names[at].endswith(".git") else names[at]
        for rest, program in _BELOW[name]:
            is_idle = name == ".git" and _is_idle(names, at + 1)
            if _matches(names, at + 1, rest, is_link) and not is_idle:
                return program
    return "a program" if len(found) > _MANY else ""


def run_by_folder(path: str, has: Callable[[str], bool], *, is_link: bool = False) -> str:
    """Return the program that runs a file because of the folder that it is in, whatever the folder is called, or "" if none is known.

    `has` returns whether there is something at another path.
    """
    for folder in ("", *ancestors(path)):
        for mark, name in _FOLDERS.items():
            program = run_by(join(name, path.removeprefix(f"{folder}/" if folder else "")), is_link=is_link)
            if program and has(join(folder, mark)):
                return program
    return ""


def makes_repository(path: str, before: Callable[[str], bool], after: Callable[[str], bool]) -> bool:
    """Return whether a new path turns its folder into a git repository, whose other files git then runs."""
    folder, name = split(path)
    return name in _REPOSITORY and _is_repository(folder, after) and not _is_repository(folder, before)


def _is_repository(folder: str, has: Callable[[str], bool]) -> bool:
    head, objects, refs, common = (has(join(folder, name)) for name in _REPOSITORY)
    return head and (common or (objects and refs))


def _matches(names: list[str], at: int, rest: list[str], is_link: bool) -> bool:
    """Return whether the names from `at` on match a rule or, for a link, the beginning of one."""
    left = len(names) - at
    if left < len(rest):
        return is_link and names[at:] == rest[:left]
    if rest[-1] == "*":
        return names[at : at + len(rest) - 1] == rest[:-1]
    return left == len(rest) and names[at:-1] == rest[:-1] and fnmatchcase(names[-1], rest[-1])


def _is_idle(names: list[str], at: int) -> bool:
    """Return whether a file is in git's `hooks`, `modules` or `worktrees` folder but is not one that git runs."""
    if names[at : at + 1] == ["hooks"]:
        return names[-1].endswith(".sample")
    if names[at : at + 1] in (["modules"], ["worktrees"]) and len(names) > at + 1:
        return not any(each in _GIT for each in names[at + 1 :])
    return False


def is_allowed(path: str, allowed: Collection[str]) -> bool:
    """Return whether a path matches one of these patterns. A pattern without a slash matches files in any folder."""
    name = path.rpartition("/")[2]
    return any(fnmatchcase(path if "/" in pattern else name, pattern) for pattern in allowed)


def allowed_in(files: object) -> list[str]:
    """Return the patterns of the startup files that calls may change in a filesystem without a separate approval."""
    return list(getattr(files, "allowed_startup_files", ()))


def why_ask_about(files: Sequence[tuple[str, str]]) -> str:
    """Return why changes to these startup files need an approval. Each file comes with the program that runs it."""
    listed = "; ".join(f"{path} (run by {program})" for path, program in files[:_LISTED])
    more = f"; and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    return f"it changes or deletes files that later run automatically, outside the sandbox: {listed}{more}"


def why_not_covered(paths: Sequence[str]) -> str:
    """Return why only a person can approve a change to these files, and what to do."""
    return (
        "files that later run automatically need a person's approval, and nothing can replace it. To let calls "
        f"change them anyway, allow them by name: DirectoryFilesystem(folder, startup_files={list(paths[:_LISTED])!r}), "
        "or --startup-files PATH"
    )
