"""What may run: a list of rules, each allowing some commands. Whatever none allows is refused.

A command is a list of arguments and is compared argument by argument; no text is ever taken apart, so
there is nothing to quote and nothing to smuggle through. Rules say what a model may ask for; what a
command can reach, whichever it is, is held by the walls around it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from types import EllipsisType

from handrail.errors import CommandRefused, RuleError

MAX_ARGUMENT = 128 * 1024 - 1
"""Bytes in one argument, which is what Linux takes."""
MAX_COMMAND = 1024 * 1024
"""Bytes in all of them."""
_SHOWN = 200

# These run whatever their arguments name, so a rule that leaves the arguments open allows everything.
_WRAPPERS = frozenset(
    [
        "busybox",
        "chroot",
        "command",
        "doas",
        "env",
        "eval",
        "exec",
        "find",
        "flock",
        "ionice",
        "nice",
        "nohup",
        "nsenter",
        "parallel",
        "runuser",
        "script",
        "setarch",
        "setpriv",
        "setsid",
        "ssh",
        "stdbuf",
        "strace",
        "su",
        "sudo",
        "systemd-run",
        "taskset",
        "time",
        "timeout",
        "unshare",
        "watch",
        "xargs",
    ]
)
# These do so with the right option, or with a program given as an argument.
_INTERPRETERS = frozenset(
    [
        "ash",
        "awk",
        "bash",
        "bun",
        "csh",
        "dash",
        "deno",
        "expect",
        "fish",
        "gawk",
        "git",
        "gdb",
        "ksh",
        "lua",
        "mawk",
        "node",
        "perl",
        "php",
        "python",
        "pypy",
        "Rscript",
        "ruby",
        "sed",
        "sh",
        "tclsh",
        "tcsh",
        "vi",
        "vim",
        "zsh",
    ]
)
_UP = re.compile(r"(?:^|[/=:,])\.\.(?:$|/)")
_WILD = re.compile(r"\*\*|\*|\?")


class Allow:
    """Commands that may run: a program, then its arguments one by one.

        Allow("git", "status")              exactly this
        Allow("pytest", ...)                this program, with any arguments
        Allow("git", "diff", ...)           these, then any arguments
        Allow("cat", "docs/**")             one argument that fits
        Allow(...)                          every command there is

    The program is compared as it is written: `git` is not `/usr/bin/git` and not `./git`. In arguments
    `*` and `?` stand for anything but `/`, and `**` for anything. A pattern that begins with one of
    them fits no option and no absolute path, and none fits a path with `..` in it: write those out.
    """

    __slots__ = ("_open", "_pattern", "_tests")

    def __init__(self, *pattern: str | EllipsisType) -> None:
        self._pattern = pattern
        self._open = pattern[-1:] == (...,)
        self._check()
        words = [word for word in pattern if isinstance(word, str)]
        self._tests = [_Argument(word) for word in words]

    def fits(self, argv: Sequence[str]) -> bool:
        if len(argv) < len(self._tests) or (len(argv) > len(self._tests) and not self._open):
            return False
        return all(test.fits(argument) for test, argument in zip(self._tests, argv, strict=False))

    def __str__(self) -> str:
        words = [shlex.quote(word) if not _WILD.search(word) else word for word in self._words()]
        return " ".join([*words, "…"] if self._open else words)

    def __repr__(self) -> str:
        return f"Allow({', '.join('...' if word is ... else repr(word) for word in self._pattern)})"

    def _words(self) -> list[str]:
        return [word for word in self._pattern if isinstance(word, str)]

    def _check(self) -> None:
        words = self._words()
        if not self._pattern:
            raise RuleError(repr(self), "it names no program", "Write Allow(...) if every command may run.")
        if len(words) != len(self._pattern) - self._open:
            raise RuleError(
                repr(self),
                "it is made of texts, and '...' stands at its end",
                "Write one text for each argument.",
            )
        if not words:
            return
        program, *arguments = words
        if not program or program != program.strip() or len(program.split()) > 1:
            mend = f"Write one text for each argument: Allow({', '.join(map(repr, program.split()))})."
            raise RuleError(repr(self), f"no program is called {program!r}", mend)
        if _WILD.search(program):
            raise RuleError(repr(self), "a program is named in full", "Write a rule for each program.")
        if not _plain(program):
            raise RuleError(repr(self), "its program is a path with detours", "Write the path without them.")
        if _runs_anything(program, arguments, is_open=self._open):
            raise RuleError(
                repr(self),
                f"{program!r} can run any other program, so this would allow every command",
                "Write the arguments out, as in Allow('python', '-m', 'pytest', ...) or Allow('git', 'diff', ...), "
                "or say Allow(...) if every command may run.",
            )


def _plain(program: str) -> bool:
    """Whether a program is a name, or a path with one spelling."""
    steps = program.removeprefix("./").removeprefix("/").split("/")
    return all(step not in ("", ".", "..") for step in steps)


def _runs_anything(program: str, arguments: Sequence[str], *, is_open: bool) -> bool:
    name = program.rpartition("/")[2]
    family = re.sub(r"[\d.]+$", "", name)
    if name in _WRAPPERS:
        return is_open or any(_WILD.search(argument) for argument in arguments)
    if name in _INTERPRETERS or family in _INTERPRETERS:
        return is_open and all(argument.startswith("-") for argument in arguments)
    return False


class _Argument:
    """One argument of a rule."""

    __slots__ = ("_regex", "_word")

    def __init__(self, word: str) -> None:
        self._word = word
        self._regex: re.Pattern[str] | None = None
        if _WILD.search(word):
            meanings = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
            parts = (meanings.get(part) or re.escape(part) for part in re.split(r"(\*\*|\*|\?)", word))
            start = "(?![-/])" if word[0] in "*?" else ""
            self._regex = re.compile(start + "".join(parts), re.DOTALL)

    def fits(self, argument: str) -> bool:
        if self._regex is None:
            return argument == self._word
        return self._regex.fullmatch(argument) is not None and not _UP.search(argument)


class Rules:
    """The rules of one shell."""

    __slots__ = ("_rules",)

    def __init__(self, rules: Iterable[Allow]) -> None:
        if isinstance(rules, str | Allow):
            word = rules if isinstance(rules, str) else "make"
            raise RuleError(repr(rules), "a shell takes a list of rules", f"Write Shell([Allow({word!r})]).")
        self._rules = tuple(rules)
        for rule in self._rules:
            if not isinstance(rule, Allow):  # pyright: ignore[reportUnnecessaryIsInstance]  (a caller's mistake)
                word: object = rule if type(rule) is str else "make"
                raise RuleError(repr(rule), "it is not a rule", f"Write Allow({word!r}).")

    @property
    def worded(self) -> tuple[str, ...]:
        """Each rule as somebody would type it; `…` is whatever else."""
        return tuple(str(rule) if rule.fits(()) is False else "any command" for rule in self._rules)

    def check(self, argv: Sequence[str]) -> None:
        """Raise `CommandRefused` unless a rule allows this command."""
        _check_form(argv)
        if any(rule.fits(argv) for rule in self._rules):
            return
        allowed = self.worded
        if not allowed:
            problem = "no command may run here"
        else:
            listed = ", ".join(f"`{rule}`" for rule in allowed)
            problem = f"this may not run here. What may run: {listed}"
            if any(rule.endswith("…") for rule in allowed):
                problem += " (… is any further arguments)"
        raise CommandRefused(
            shown(argv),
            f"{problem}. It is run without a shell: no pipes, no `&&`, no redirection, no variables.",
            allowed,
        )


def shown(argv: Sequence[str]) -> str:
    """A command as somebody would type it, not too long."""
    text = shlex.join(argv)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _check_form(argv: Sequence[object]) -> None:
    if isinstance(argv, str):
        try:
            words = shlex.split(argv)
        except ValueError:
            words = argv.split()
        raise CommandRefused(
            argv[:_SHOWN], f"a command is a list of arguments, not one text: write {words!r}."
        )
    if not isinstance(argv, list | tuple) or not argv:
        raise CommandRefused("", "a command is a list of arguments, the program first: ['git', 'status'].")
    if not argv[0]:
        raise CommandRefused("", "the program's name is empty: name one, as in ['git', 'status'].")
    size = sum(_size(argument) + 9 for argument in argv)  # with its end and a pointer to it
    if size > MAX_COMMAND:
        raise CommandRefused(
            "", f"the arguments are {size} bytes long, and {MAX_COMMAND} is the limit. Use a file."
        )


def _size(argument: object) -> int:
    if not isinstance(argument, str):
        raise CommandRefused("", f"every argument is text, and {argument!r} is not: write {str(argument)!r}.")
    if "\0" in argument:
        raise CommandRefused("", f"{argument[:40]!r} has a NUL in it. Leave it out.")
    try:
        length = len(argument.encode())
    except UnicodeEncodeError:
        raise CommandRefused(
            "", f"{argument[:40]!r} can't be written as UTF-8. Use ordinary characters."
        ) from None
    if length > MAX_ARGUMENT:
        raise CommandRefused(
            "", f"an argument is {length} bytes long, and {MAX_ARGUMENT} is the limit. Use a file."
        )
    return length
