"""Rules for commands, and the messages that refuse a command."""

import pytest

from handrail.errors import DefinitionError, StateError
from handrail.resources.shell import Allow, Shell
from handrail.resources.shell.rules import MAX_ARGUMENT, Rules
from handrail.resources.shell.shell_errors import CommandRefused, RuleError


def allowed(rules: list[Allow], *argv: str) -> bool:
    try:
        Rules(rules).check(list(argv))
    except CommandRefused:
        return False
    return True


@pytest.mark.parametrize(
    ("rule", "argv"),
    [
        (Allow("git", "status"), ["git", "status"]),
        (Allow("pytest", ...), ["pytest"]),
        (Allow("pytest", ...), ["pytest", "-x", "tests/a.py::test_b[c]"]),
        (Allow("git", "diff", ...), ["git", "diff", "--stat", "HEAD"]),
        (Allow("cat", "docs/*.md"), ["cat", "docs/a.md"]),
        (Allow("cat", "docs/**"), ["cat", "docs/a/b.md"]),
        (Allow("cat", "**"), ["cat", "a/b"]),
        (Allow("ls", "-?"), ["ls", "-l"]),
        (Allow("npm", "run", "test:*"), ["npm", "run", "test:unit"]),
        (Allow("echo", "[a]"), ["echo", "[a]"]),
        (Allow("./configure"), ["./configure"]),
        (Allow("/usr/bin/git", "status"), ["/usr/bin/git", "status"]),
        (Allow("/home/a b/bin/git", "status"), ["/home/a b/bin/git", "status"]),
        (Allow("python", "-m", "pytest", ...), ["python", "-m", "pytest", "-q"]),
        (Allow("python3.11", "*.py", ...), ["python3.11", "a.py", "-c"]),
        (Allow("sh", "build.sh"), ["sh", "build.sh"]),
        (Allow("printf", "*"), ["printf", "two\nlines"]),
        (Allow(...), ["anything", "at", "all"]),
    ],
)
def test_a_rule_allows_what_it_says(rule: Allow, argv: list[str]):
    """A rule matches the program and its arguments one by one, and `...` matches all remaining arguments."""
    assert allowed([rule], *argv)


@pytest.mark.parametrize(
    ("rule", "argv"),
    [
        (Allow("git", "status"), ["git", "status", "--porcelain"]),
        (Allow("git", "status"), ["git"]),
        (Allow("git", "status"), ["/usr/bin/git", "status"]),
        (Allow("git", "status"), ["./git", "status"]),
        (Allow("git", "status"), ["git ", "status"]),
        (Allow("git", "status"), ["GIT", "status"]),
        (Allow("git", "status", ...), ["git", "-c", "core.pager=sh", "status"]),
        (Allow("git", "status", ...), ["env", "git", "status"]),
        (Allow("git", "status", ...), ["sh", "-c", "git status"]),
        (Allow("git", "status", ...), ["git", "status;rm"]),
        (Allow("/bin/ls", ...), ["/bin/../bin/ls"]),
        (Allow("/bin/ls", ...), ["//bin/ls"]),
        (Allow("ls", ...), ["/bin/ls"]),
        (Allow("cat", "docs/*"), ["cat", "docs/../secret"]),
        (Allow("cat", "docs/*"), ["cat", "docs/a/b"]),
        (Allow("cat", "docs/**"), ["cat", "docs/.."]),
        (Allow("cat", "**"), ["cat", "/etc/passwd"]),
        (Allow("cat", "**"), ["cat", "../a"]),
        (Allow("cat", "**"), ["cat", "-A"]),
        (Allow("tool", "--in=**"), ["tool", "--in=../x"]),
        (Allow("git", "log", "*"), ["git", "log", "--output=x"]),
        (Allow("git", "*"), ["git", "-c"]),
        (Allow("python", "*.py", ...), ["python", "-c", "x.py"]),
        (Allow("pytest", ...), ["pytest2"]),
        (Allow("cat", "a?"), ["cat", "a/"]),
    ],
)
def test_a_rule_allows_nothing_else(rule: Allow, argv: list[str]):
    """A rule does not match wrappers, other names of the program or paths to it, or extra or missing arguments.

    A pattern that starts with a wildcard matches no options or absolute paths. No wildcard matches `..`, and
    only `**` matches `/`.
    """
    assert not allowed([rule], *argv)


@pytest.mark.parametrize(
    "pattern",
    [
        (),
        ("git status",),
        ("/usr/bin/git status",),
        ("",),
        (" git",),
        ("*",),
        ("py*",),
        ("../run",),
        ("/bin/../bin/sh",),
        ("git", ..., "status"),
        ("git", 3),
        ("sh", ...),
        ("sh", "-c", ...),
        ("/bin/bash", ...),
        ("env", ...),
        ("env", "A=1", ...),
        ("env", "*"),
        ("xargs", ...),
        ("timeout", "10", ...),
        ("find", ".", ...),
        ("sudo", ...),
        ("git", ...),
        ("git", "-c", ...),
        ("python", ...),
        ("python3.12", ...),
        ("python3", "-m", ...),
        ("node", ...),
    ],
)
def test_a_rule_that_can_not_be_meant_is_refused_where_it_is_written(pattern: tuple[object, ...]):
    """A rule is refused if its program or pattern is invalid, or if it would let a command run any other program."""
    with pytest.raises(RuleError) as caught:
        Allow(*pattern)  # pyright: ignore[reportArgumentType]
    assert isinstance(caught.value, DefinitionError)
    assert str(caught.value).startswith("rule Allow(")


def test_the_hint_for_a_rule_without_a_program_is_a_rule():
    """The hint for `Allow("")` is a valid rule for one command, not the rule that allows every command."""
    with pytest.raises(RuleError, match=r"Allow\('git', 'status'\)"):
        Allow("")
    assert Allow("git", "status").matches(["git", "status"])


@pytest.mark.parametrize("word", ["**a**a**a**b", "*a*a*a*a*b", "docs/**x**x**x.md", "?*?*?*?*?*b"])
def test_a_long_argument_is_compared_at_once(word: str):
    """Comparing a rule with several wildcards to an argument of the maximum length is fast.

    A backtracking comparison would not end before the test's timeout.
    """
    rule = Allow("cat", word)
    for argument in ("a" * MAX_ARGUMENT, "docs/" + "x" * (MAX_ARGUMENT - 5)):
        assert not rule.matches(["cat", argument])


def test_a_rule_with_too_long_a_pattern_is_refused_where_it_is_written():
    """A pattern that is too long is refused when the rule is created."""
    with pytest.raises(RuleError, match="Write a shorter argument"):
        Allow("cat", "a" * 2000 + "*")


def test_nothing_may_run_without_a_rule():
    """Without rules, every command is denied."""
    with pytest.raises(CommandRefused, match="no command is allowed here"):
        Shell().rules.check(["true"])


def test_a_refusal_says_what_may_run():
    """A refusal tells the model which commands it may run, and that there is no shell."""
    with pytest.raises(CommandRefused) as caught:
        Rules([Allow("git", "status"), Allow("pytest", ...), Allow("cat", "docs/**")]).check(
            ["rm", "-rf", "a b"]
        )
    assert str(caught.value) == (
        "`rm -rf 'a b'`: this command is not allowed here. Allowed: `git status`, `pytest …`, `cat docs/**` "
        "(… stands for any further arguments). Commands run without a shell: no pipes, no `&&`, no redirection, no variables."
    )
    assert caught.value.allowed == ("git status", "pytest …", "cat docs/**")
    assert isinstance(caught.value, StateError)
    assert isinstance(caught.value, PermissionError)


def test_one_text_is_refused_with_the_list_it_should_be():
    """A command given as one string is refused, and the message shows the equivalent list if it can be split."""
    with pytest.raises(CommandRefused, match=r"Write \['git', 'commit', '-m', 'two words'\]"):
        Rules([Allow(...)]).check("git commit -m 'two words'")
    with pytest.raises(CommandRefused, match="not one string"):
        Rules([Allow(...)]).check("echo 'open")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        None,
        {"git"},
        [""],
        ["a", 1],
        ["a\0b"],
        ["\udcff"],
        ["a", "x" * 200_000],
        ["x" * 100_000] * 20,
        [["a"]],
    ],
)
def test_what_is_not_a_command_is_refused_even_where_everything_may_run(argv: object):
    """An invalid command is refused with a reason, not with a system error, even if every command is allowed."""
    with pytest.raises(CommandRefused):
        Rules([Allow(...)]).check(argv)  # pyright: ignore[reportArgumentType]


def test_only_rules_are_rules():
    """A list of strings in place of a rule is refused when the shell is created."""
    with pytest.raises(RuleError, match="not a rule"):
        Shell([["git", "status"]])  # pyright: ignore[reportArgumentType]
