"""Rules that allow commands. A command that no rule allows is refused.

A command is a list of arguments, which are compared one by one. No text is ever parsed, so quoting can't be
used to get around a rule. Rules limit what a model may run; the sandbox limits what any command can reach.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from types import EllipsisType

from handrail.resources.shell.shell_errors import CommandRefused, RuleError
from handrail.text.patterns import Pattern, compile_pattern
from handrail.text.spelling import checked_arguments

MAX_ARGUMENT = 128 * 1024 - 1
"""Maximum bytes in one argument, as in Linux."""
MAX_COMMAND = 1024 * 1024
"""Maximum bytes in all arguments together, including a terminating zero and a pointer for each."""
_SHOWN = 200

# These programs run the program that their arguments name, so a rule with open arguments would allow everything.
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
# With certain options, these programs run other programs, or code that is passed as an argument.
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
_WILD_PARTS = re.compile(r"(\*\*|\*|\?)")
_SPECIAL = re.compile(r"[\\.^$+{}\[\]|()]")
_STARS = frozenset("*?")


@checked_arguments
class Allow:
    """A rule that allows commands: a program, then its arguments one by one.

        Allow("git", "status")              exactly this command
        Allow("pytest", ...)                this program with any arguments
        Allow("git", "diff", ...)           this beginning, then any arguments
        Allow("cat", "docs/**")             one argument that matches the pattern
        Allow(...)                          every command

    The program is compared literally: `git` does not match `/usr/bin/git` or `./git`. In arguments, `*` matches any
    text without `/`, `?` matches one character except `/`, and `**` matches any text. A pattern that starts with a
    wildcard does not match options or absolute paths. A pattern with wildcards never matches a path with `..`. To allow
    such arguments, write them in full.
    """

    __slots__ = ("_open", "_pattern", "_tests")

    def __init__(self, *pattern: str | EllipsisType) -> None:
        self._pattern = pattern
        self._open = pattern[-1:] == (...,)
        self._check()
        words = [word for word in pattern if isinstance(word, str)]
        try:
            self._tests = [_Argument(word) for word in words]
        except ValueError as error:
            raise RuleError(repr(self), str(error), "Write a shorter argument.") from None

    def matches(self, argv: Sequence[str]) -> bool:
        if len(argv) < len(self._tests) or (len(argv) > len(self._tests) and not self._open):
            return False
        return all(test.matches(argument) for test, argument in zip(self._tests, argv, strict=False))

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
            raise RuleError(
                repr(self), "it names no program", "Name one, or write Allow(...) to allow every command."
            )
        if len(words) != len(self._pattern) - self._open:
            raise RuleError(
                repr(self),
                "its parts must be strings, with '...' only at the end",
                "Write one string for each argument.",
            )
        if not words:
            return
        program, *arguments = words
        name = program.rpartition("/")[2]  # the folders in the path may contain spaces
        if not program or program != program.strip() or len(name.split()) > 1:
            parts = ", ".join(map(repr, program.split())) or "'git', 'status'"
            hint = f"Write one string for each argument: Allow({parts})."
            raise RuleError(repr(self), f"{program!r} is not the name of a program", hint)
        if _WILD.search(program):
            raise RuleError(
                repr(self), "a program name can't have wildcards", "Write a rule for each program."
            )
        if not _plain(program):
            raise RuleError(
                repr(self), "its program is a path with '.', '..' or '//'", "Write the plain path."
            )
        if _runs_anything(program, arguments, is_open=self._open):
            raise RuleError(
                repr(self),
                f"{program!r} can run any other program, so this would allow every command",
                "Write the arguments in full, as in Allow('python', '-m', 'pytest', ...) or Allow('git', 'diff', ...), "
                "or write Allow(...) to allow every command.",
            )


def _plain(program: str) -> bool:
    """Return whether a program is a bare name or a normalized path."""
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
    """The pattern for one argument."""

    __slots__ = ("_from_start", "_pattern", "_word")

    def __init__(self, word: str) -> None:
        self._word = word
        self._pattern: Pattern | None = None
        self._from_start = word[:1] in _STARS
        if _WILD.search(word):
            meanings = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
            parts = (meanings.get(part) or _SPECIAL.sub(r"\\\g<0>", part) for part in _WILD_PARTS.split(word))
            self._pattern = compile_pattern(f"(?s)\\A{''.join(parts)}\\z")

    def matches(self, argument: str) -> bool:
        """Return whether an argument matches. An argument that is too long for the pattern never does."""
        if self._pattern is None:
            return argument == self._word
        if self._from_start and argument[:1] in ("-", "/"):
            return False
        if len(argument) > self._pattern.longest:
            return False
        return self._pattern.found_in(argument) and not _UP.search(argument)


class Rules:
    """The rules of one shell. Raises `RuleError` if it is given a single rule or a string, or if a rule is not an `Allow`."""

    __slots__ = ("_rules",)

    def __init__(self, rules: Iterable[Allow]) -> None:
        if isinstance(rules, str | Allow):
            word = rules if isinstance(rules, str) else "make"
            raise RuleError(repr(rules), "a shell takes a list of rules", f"Write Shell([Allow({word!r})]).")
        self._rules = tuple(rules)
        for rule in self._rules:
            if not isinstance(rule, Allow):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
                word: object = rule if type(rule) is str else "make"
                raise RuleError(repr(rule), "it is not a rule", f"Write Allow({word!r}).")

    @property
    def worded(self) -> tuple[str, ...]:
        """Each rule as the command line it allows, or `any command`. `…` stands for any further arguments."""
        return tuple(str(rule) if rule.matches(()) is False else "any command" for rule in self._rules)

    def check(self, argv: Sequence[str]) -> None:
        """Raise `CommandRefused` unless the command is well-formed and a rule allows it."""
        _check_form(argv)
        if any(rule.matches(argv) for rule in self._rules):
            return
        allowed = self.worded
        if not allowed:
            problem = "no command is allowed here"
        else:
            listed = ", ".join(f"`{rule}`" for rule in allowed)
            problem = f"this command is not allowed here. Allowed: {listed}"
            if any(rule.endswith("…") for rule in allowed):
                problem += " (… stands for any further arguments)"
        raise CommandRefused(
            shown(argv),
            f"{problem}. Commands run without a shell: no pipes, no `&&`, no redirection, no variables.",
            allowed,
        )


def shown(argv: Sequence[str]) -> str:
    """Format a command as a user would type it. A long command is cut at the end."""
    text = shlex.join(argv)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _check_form(argv: Sequence[object]) -> None:
    if isinstance(argv, str):
        try:
            words = shlex.split(argv)
        except ValueError:
            words = argv.split()
        raise CommandRefused(
            argv[:_SHOWN], f"a command is a list of arguments, not one string. Write {words!r}."
        )
    if not isinstance(argv, list | tuple) or not argv:
        raise CommandRefused(
            "",
            "a command is a list of arguments that starts with the program. Write it like ['git', 'status'].",
        )
    if not argv[0]:
        raise CommandRefused("", "the program's name is empty. Name one, as in ['git', 'status'].")
    size = sum(
        _size(argument) + 9 for argument in argv
    )  # each argument also takes a terminating zero and a pointer
    if size > MAX_COMMAND:
        raise CommandRefused(
            "", f"the arguments have {size} bytes, and the limit is {MAX_COMMAND}. Pass the data in a file."
        )


def _size(argument: object) -> int:
    if not isinstance(argument, str):
        raise CommandRefused(
            "", f"every argument must be a string, and {argument!r} is not. Write {str(argument)!r}."
        )
    if "\0" in argument:
        raise CommandRefused("", f"{argument[:40]!r} contains a NUL character. Remove it.")
    try:
        length = len(argument.encode())
    except UnicodeEncodeError:
        raise CommandRefused(
            "", f"{argument[:40]!r} can't be encoded as UTF-8. Use ordinary characters."
        ) from None
    if length > MAX_ARGUMENT:
        raise CommandRefused(
            "", f"an argument has {length} bytes, and the limit is {MAX_ARGUMENT}. Pass the data in a file."
        )
    return length
