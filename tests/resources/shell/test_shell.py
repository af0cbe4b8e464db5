"""Commands on a folder: both backends redirect a command's changes to a layer above the folder, with the same result."""

import os
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail.errors import DefinitionError, FileError, FileMissing, PathRefused
from handrail.resources.shell import Allow, Shell, Support, probe
from handrail.resources.shell import execution as shell_module
from handrail.resources.shell.shell_errors import CommandMissing, CommandRefused, ShellUnavailable
from support.folders import PYTHON, Folder, anything, tree

BACKENDS = ["overlay", "copy"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    support = probe(tmp_path)
    if not support.contained or (request.param == "overlay" and not support.overlay):
        pytest.skip(f"not available here: {'; '.join(support.missing)}")
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """Provide a folder, and check afterwards that no command has changed it."""
    made = Folder(tmp_path / "a, b:c")
    made.add("kept.txt", "kept\n")
    made.add("docs/one.md", "one\n")
    made.add("docs/deep/two.md", "two\n")
    made.add("run.sh", "#!/bin/sh\necho ran\n", mode=0o755)
    (made.root / "empty").mkdir()
    (made.root / "link").symlink_to("docs/one.md")
    before = made.real()
    yield made
    assert made.real() == before
    assert list((made.base / "work").iterdir()) == []


# --- results -------------------------------------------------------------------------------------


def test_a_command_gives_its_output_and_its_exit_code(folder: Folder, backend: str):
    """The result contains the exit code and the output of both streams, in the order in which it was written."""
    finished = folder.sh(anything(backend), "echo out; echo err >&2; echo out again; exit 3")
    assert (finished.output, finished.exit_code, finished.signal) == ("out\nerr\nout again\n", 3, None)
    assert (finished.backend, finished.contained, finished.timed_out, finished.ok) == (
        backend,
        True,
        False,
        False,
    )
    assert finished.argv[0] == "sh"
    assert finished.seconds > 0


def test_a_command_works_at_the_folder_s_own_path(folder: Folder, backend: str):
    """A command runs at the folder's own path, and absolute paths into the folder work."""
    finished = folder.sh(anything(backend), f"pwd; echo $PWD; echo new > {shlex.quote(str(folder.root))}/abs")
    assert finished.output == f"{folder.root}\n{folder.root}\n"
    assert folder.caught() == [("written", "abs")]


def test_the_folder_really_is_the_mount(folder: Folder, backend: str):
    """Inside a command, the folder is a mount: a writable overlay, or a writable copy."""
    kind = {"overlay": "overlay", "copy": folder_kind(folder)}[backend]
    finished = folder.run(
        anything(backend), "findmnt", "-n", "-o", "FSTYPE,OPTIONS", "--mountpoint", str(folder.root)
    )
    kinds = [line.split()[0] for line in finished.output.splitlines()]
    assert kinds[-1] == kind
    assert finished.output.splitlines()[-1].split()[1].startswith("rw")


def folder_kind(folder: Folder) -> str:
    command = ["findmnt", "-n", "-o", "FSTYPE", "--target", str(folder.root)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_signal_is_a_negative_exit_code(folder: Folder, backend: str):
    """The result of a command that is killed by a signal names the signal, even one that a namespace's init process ignores."""
    for name, number in (("SEGV", 11), ("TERM", 15), ("KILL", 9)):
        finished = folder.sh(anything(backend), f"kill -{name} $$")
        assert (finished.exit_code, finished.signal, finished.timed_out) == (-number, number, False)


def test_megabytes_of_output_lose_their_middle(folder: Folder, backend: str):
    """Megabytes of output do not block the command. The beginning and the end are kept."""
    script = "echo first; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo last"
    finished = folder.sh(anything(backend, output_limit=1000), script)
    assert finished.ok
    assert finished.truncated
    assert finished.output.startswith("first\nxxx")
    assert finished.output.endswith("xxx\nlast\n")
    assert f"\n… {finished.omitted} bytes left out …\n" in finished.output
    assert finished.omitted == 20_000_000 + len("first\n\nlast\n") - 1000


def test_output_that_is_not_utf_8_is_shown(folder: Folder, backend: str):
    """Output bytes that are not UTF-8 are shown escaped."""
    assert folder.run(anything(backend), "printf", r"a\377b").output == "a\\xffb"


def test_standard_input_is_given(folder: Folder, backend: str):
    """Standard input may be text or bytes, missing, larger than a pipe's buffer, or more than the command reads."""
    shell = anything(backend)
    assert folder.run(shell, "cat", stdin="über").output == "über"
    assert folder.run(shell, "wc", "-c", stdin=b"x" * 3_000_000).output.strip() == "3000000"
    assert folder.run(shell, "true", stdin=b"x" * 3_000_000).ok
    assert folder.run(shell, "cat").output == ""


# --- commands that can't run ----------------------------------------------------------------------


def test_a_command_that_no_rule_allows_does_not_run(folder: Folder, backend: str):
    """A command that no rule allows is refused and does not run."""
    with pytest.raises(CommandRefused, match="Allowed: `git status`"):
        folder.run(Shell([Allow("git", "status")], backend=backend), "touch", "x")  # pyright: ignore[reportArgumentType]
    assert folder.caught() == []


def test_a_missing_program_is_said(folder: Folder, backend: str):
    """If a program is missing, can't be executed, is a folder or lacks its interpreter, the error names the program."""
    shell = anything(backend)
    folder.sh(
        shell,
        "printf '#!/no/such/thing\\n' > bad; chmod +x bad; echo text > plain; echo junk > junk; chmod +x junk",
    )
    for program in ("no-such-program", "./no-such", "./plain", "./bad", "./docs", "./junk", "./kept.txt/x"):
        with pytest.raises(CommandMissing, match=r"is not installed here|can.t be executed") as caught:
            folder.run(shell, program, "-x")
        assert caught.value.program == program


def test_a_script_of_the_folder_runs_by_its_path_only(folder: Folder, backend: str):
    """A script in the folder runs by its path, and is not found by its bare name."""
    shell = anything(backend, environment={})
    assert folder.run(shell, "./run.sh").output == "ran\n"
    with pytest.raises(CommandMissing):
        folder.run(shell, "run.sh")


def test_a_relative_path_entry_is_not_passed_on(
    folder: Folder, backend: str, monkeypatch: pytest.MonkeyPatch
):
    """Relative entries in PATH, such as `.`, are dropped, so that no file in the folder can stand in for a program."""
    monkeypatch.setenv("PATH", f".::relative:{os.environ['PATH']}")
    with pytest.raises(CommandMissing):
        folder.run(anything(backend), "run.sh")


def test_a_command_runs_in_a_folder_below(folder: Folder, backend: str):
    """`cwd` may be any folder inside the root, even one that an earlier command created."""
    shell = anything(backend)
    assert folder.run(shell, "cat", "two.md", cwd="docs/deep").output == "two\n"
    folder.run(shell, "mkdir", "made")
    assert folder.run(shell, "pwd", cwd="./made/").output == f"{folder.root}/made\n"


def test_a_folder_to_run_in_has_to_be_one_inside(folder: Folder, backend: str):
    """A `cwd` is refused if it is missing, a file, absolute, outside the root, or a link that leads outside."""
    shell = anything(backend)
    folder.run(shell, "ln", "-s", "/etc", "out")
    for cwd, error in {
        "nope": FileMissing,
        "kept.txt": FileError,
        "..": PathRefused,
        "/etc": PathRefused,
        "out": PathRefused,
    }.items():
        with pytest.raises(error):
            folder.run(shell, "true", cwd=cwd)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_is_a_time(folder: Folder, timeout: float):
    """A timeout must be positive and finite, both for a shell and for one run."""
    with pytest.raises(ValueError, match="above zero"):
        Shell(timeout=timeout)
    with pytest.raises(ValueError, match="above zero"):
        folder.run(anything(), "true", timeout=timeout)


def test_a_shell_with_nonsense_can_not_be_made():
    """Invalid arguments to a shell are refused when it is created, with an error that says what to pass."""
    for options, wrong in (
        ({"backend": "docker"}, "backend is 'docker'"),
        ({"output_limit": 1}, "output_limit is 1"),
        ({"environment": {"A=": "is"}}, "environment has 'A='"),
    ):
        with pytest.raises(DefinitionError, match=rf"{wrong}.* Pass "):
            Shell(**options)  # pyright: ignore[reportArgumentType]


def test_no_command_runs_on_the_machine_s_own_folders(tmp_path: Path):
    """Commands on `/`, on `/tmp` or on the kernel's folders are refused."""
    for root in ("/", "/proc", "/sys/kernel", "/dev", "/tmp"):
        folder = Folder(tmp_path)
        folder.layers = type(folder.layers)((Path(root),), folder.upper, folder.layers.work)
        with pytest.raises(CommandRefused, match="commands can't run on"):
            folder.run(anything(), "true")


# --- writes ---------------------------------------------------------------------------------------


def test_writes_are_caught(folder: Folder, backend: str):
    """Files, folders and links that a command creates, changes or deletes are recorded only in the upper layer."""
    script = """
        echo new > new.txt; echo more >> kept.txt; rm docs/one.md link; rmdir empty
        mkdir -p a/b; ln -s ../kept.txt a/link; chmod 600 docs/deep/two.md
    """
    assert folder.sh(anything(backend), script).ok
    assert folder.caught() == [
        ("folder", "a"),
        ("folder", "a/b"),
        ("written", "a/link"),
        ("folder", "docs"),
        ("folder", "docs/deep"),
        ("written", "docs/deep/two.md"),
        ("deleted", "docs/one.md"),
        ("deleted", "empty"),
        ("written", "kept.txt"),
        ("deleted", "link"),
        ("written", "new.txt"),
    ]
    assert (folder.upper / "kept.txt").read_text() == "kept\nmore\n"
    assert (folder.upper / "docs/deep/two.md").stat().st_mode & 0o777 == 0o600


def test_a_command_that_changes_nothing_leaves_nothing(folder: Folder, backend: str):
    """A command that changes nothing leaves the upper layer empty."""
    assert folder.sh(anything(backend), "cat kept.txt docs/*; find . -type f; ls -la").ok
    assert folder.caught() == []


def test_a_later_command_sees_what_an_earlier_one_wrote(folder: Folder, backend: str):
    """A later command sees an earlier command's writes in the upper layer."""
    shell = anything(backend)
    folder.sh(shell, "echo 1 > n; rm -r docs; rm kept.txt; mkdir kept.txt")
    finished = folder.sh(
        shell,
        "cat n; ls; echo 2 >> n; mkdir docs; echo mine > docs/one.md; rmdir kept.txt; echo f > kept.txt",
    )
    assert finished.output == "1\nempty\nkept.txt\nlink\nn\nrun.sh\n"
    assert folder.run(shell, "cat", "n", "docs/one.md", "kept.txt").output == "1\n2\nmine\nf\n"
    assert folder.caught() == [
        ("replaced", "docs"),
        ("written", "docs/one.md"),
        ("written", "kept.txt"),
        ("written", "n"),
    ]
    folder.run(shell, "rm", "docs/one.md")
    assert folder.caught()[:2] == [("replaced", "docs"), ("written", "kept.txt")]


def test_layers_between_are_read_and_left_alone(tmp_path: Path, backend: str):
    """Layers between the folder and the upper layer are read, with their deletions, and stay unchanged."""
    between: list[Path] = []
    for number in (1, 2):
        middle = Folder(tmp_path, over=between[::-1])
        middle.add("a/x", "0") if number == 1 else None
        middle.add("a/y", "0") if number == 1 else None
        middle.sh(
            anything(backend), f"echo {number} > n{number}; rm -f a/{'xy'[number - 1]}; echo {number} > a/z"
        )
        kept = tmp_path / f"layer{number}"
        middle.upper.rename(kept)
        between.append(kept)
    top = Folder(tmp_path, over=between[::-1])
    before = [tree(layer, exact=True) for layer in between]
    assert (
        top.sh(anything(backend), "ls . a; cat a/z; rm -r a; mkdir a").output == ".:\na\nn1\nn2\n\na:\nz\n2\n"
    )
    assert set(top.merged()) == {"a", "n1", "n2"}
    assert [tree(layer, exact=True) for layer in between] == before


def test_a_make_that_fails_half_way_changes_nothing_real(folder: Folder, backend: str):
    """A failing `make` writes only to the upper layer, and the real folder is unchanged."""
    folder.add("Makefile", "all: built\n\tfalse\nbuilt:\n\techo x > built\n\trm kept.txt\n")
    before = folder.real()
    finished = folder.run(anything(backend), "make")
    assert finished.exit_code == 2
    assert folder.caught() == [("written", "built"), ("deleted", "kept.txt")]
    assert folder.real() == before
    (folder.root / "Makefile").unlink()
    os.utime(folder.root)


@pytest.mark.parametrize("command", ["rm -rf ./* ./.[!.]*", "find . -delete", 'rm -rf "$PWD"'])
def test_everything_can_be_removed_and_is_still_there(folder: Folder, backend: str, command: str):
    """A command can remove everything, and the real folder is unchanged."""
    shell = anything(backend)
    folder.sh(shell, "echo x > docs/deep/new; mkdir docs/more; echo y > docs/more/y; mkdir made")
    finished = folder.sh(shell, f"{command}; ls -A")
    assert finished.output in ("", f"rm: cannot remove '{folder.root}': Device or resource busy\n")
    assert {kind for kind, _ in folder.caught()} == {"deleted"}
    assert {path for _, path in folder.caught()} == {"docs", "empty", "kept.txt", "link", "run.sh"}


def test_a_commit_in_a_repository_is_caught_whole(tmp_path: Path, backend: str):
    """A `git commit` writes only to the upper layer, and the real `.git` is unchanged."""
    folder = Folder(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(folder.root)]
    folder.add("a.txt", "a\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    before = folder.real()
    names = {
        f"GIT_{who}_{what}": "b@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    shell = anything(backend, environment=names)
    finished = folder.sh(shell, "echo b >> a.txt && git commit -qam second && git log --format=%s && exit 1")
    assert (finished.output, finished.exit_code) == ("second\nfirst\n", 1)
    assert folder.real() == before
    assert ("written", ".git/refs/heads/master") in folder.caught() or (
        "written",
        ".git/refs/heads/main",
    ) in folder.caught()
    assert folder.run(shell, "git", "status", "--porcelain").output == ""


def test_a_command_can_not_forge_the_marks_of_a_layer(folder: Folder, backend: str):
    """A command can't give files in the upper layer the extended attributes that an overlay interprets."""
    code = """
        import os
        os.mkdir("d"); open("f", "w").close()
        for path in ("d", "f", "docs"):
            for name in ("opaque", "redirect", "metacopy"):
                try: os.setxattr(path, f"user.overlay.{name}", b"y")
                except OSError: pass
    """
    assert folder.run(anything(backend), PYTHON, "-c", textwrap.dedent(code)).ok
    found = [name for path in folder.upper.iterdir() for name in os.listxattr(path, follow_symlinks=False)]
    assert [
        name
        for name in found
        if name in ("user.overlay.opaque", "user.overlay.redirect", "user.overlay.metacopy")
    ] == []
    assert set(folder.merged()) >= {"d", "f", "docs/one.md", "docs/deep/two.md"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_others_keep_their_owner(folder: Folder, backend: str):
    """A command run by root can change files of any owner, and the files keep their owner."""
    theirs = folder.add("theirs", "x")
    os.chown(theirs, 12345, 54321)
    before = folder.real()
    assert (
        folder.sh(
            anything(backend), "echo y >> theirs; touch mine; chown 777:888 mine; stat -c %u:%g theirs mine"
        ).output
        == "12345:54321\n777:888\n"
    )
    facts = (folder.upper / "theirs").stat()
    assert (facts.st_uid, facts.st_gid) == (12345, 54321)
    assert ((folder.upper / "mine").stat().st_uid) == 777
    assert folder.real() == before
    theirs.unlink()


def test_an_unreadable_file_is_left_alone(folder: Folder, backend: str):
    """A socket in the folder does not disturb a command, and is not copied to the upper layer."""
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(folder.root)
        server.bind("socket")
        os.chdir(here)
        assert folder.run(anything(backend), "touch", "x").ok
    assert folder.caught() == [("written", "x")]
    (folder.root / "socket").unlink()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "append", "rm", "mkdir", "mv", "chmod", "link", "touch", "hard"]),
        st.sampled_from(["a", "b", "d", "d/a", "d/e", "d/e/f", "g"]),
        st.sampled_from(["a", "b", "d", "d/a", "d/e", "g", "g/h"]),
    ),
    max_size=7,
)
SCRIPTS = {
    "write": "echo {0}{n} > {0}",
    "append": "echo {n} >> {0}",
    "rm": "rm -rf {0}",
    "mkdir": "mkdir -p {0}",
    "mv": "mv -T {0} {1}",
    "chmod": "chmod 7{n}0 {0}",
    "link": "ln -sfn {1} {0}",
    "touch": "touch -h -d @1000 {0}",
    "hard": "ln -f {0} {1}",
}


@settings(max_examples=25)
@given(rounds=st.lists(STEPS, min_size=1, max_size=2))
def test_both_back_ends_catch_the_same(rounds: list[Any], tmp_path_factory: pytest.TempPathFactory):
    """After any sequence of commands, both backends show the same folder, and the real folder is unchanged."""
    check_both_back_ends(rounds, tmp_path_factory.mktemp("same"))


def test_a_hard_link_lasts_from_one_command_to_the_next(tmp_path: Path):
    """If one command makes a hard link to a file and the next one writes to the file, both backends show the same folder."""
    check_both_back_ends([[("hard", "d/a", "a")], [("write", "a", "a")]], tmp_path)


def check_both_back_ends(rounds: list[Any], base: Path) -> None:
    if not probe(base).overlay:
        pytest.skip("one of the back ends is not available here")
    shown: list[Any] = []
    for backend in BACKENDS:
        folder = Folder(base / backend)
        for path in ("a", "d/a", "d/e/f"):
            folder.add(path, path)
        before = folder.real()
        for steps in rounds:
            lines = [SCRIPTS[step].format(one, two, n=n) for n, (step, one, two) in enumerate(steps)]
            script = "\n".join(f"{{ {line}; }} 2>/dev/null" for line in lines)
            finished = folder.sh(
                anything(backend), f"{script}\nfind . -mindepth 1 -printf '%P %y %m %l\\n' | sort"
            )
            seen = {line.split(" ")[0] for line in finished.output.splitlines()}
            assert seen == set(folder.merged())
        shown.append((folder.merged(), finished.output))  # pyright: ignore[reportPossiblyUnboundVariable]
        assert folder.real() == before
    assert shown[0] == shown[1]


# --- choosing a backend --------------------------------------------------------------------------------------


def support_is(monkeypatch: pytest.MonkeyPatch, support: Support) -> None:
    monkeypatch.setattr(shell_module, "probe", lambda folder: support)


def test_the_choice_can_be_seen(folder: Folder):
    """`auto` uses an overlay if one can be mounted. Both the shell and the result name the backend."""
    shell = anything()
    assert shell.backend == "auto"
    finished = folder.run(shell, "true")
    assert shell.backend == finished.backend == ("overlay" if probe(folder.base).overlay else "copy")


def test_without_an_overlay_a_copy_is_made_and_said(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """If no overlay can be mounted, the command runs on a copy, and the result says why and how much was copied."""
    support_is(monkeypatch, Support(probe(folder.base).isolation, False, ("an overlay mount here: no",)))
    finished = folder.run(anything(), "touch", "x")
    assert finished.backend == "copy"
    assert finished.notes[0] == "No overlay could be mounted: an overlay mount here: no."
    assert finished.notes[1].startswith("The command ran on a copy of the folder: 5 files, ")
    assert folder.caught() == [("written", "x")]
    with pytest.raises(ShellUnavailable, match=r"an overlay mount here: no.*Pass backend='auto'"):
        folder.run(anything("overlay"), "true")


def test_an_overlay_that_fails_after_all_becomes_a_copy(tmp_path: Path):
    """With more layers than the kernel can stack, `auto` falls back to a copy, and `overlay` raises an error."""
    layers = [tmp_path / f"layer{number}" for number in range(501)]
    for layer in layers:
        layer.mkdir()
    folder = Folder(tmp_path, over=layers)
    finished = folder.run(anything(), "touch", "x")
    assert (finished.ok, finished.backend) == (True, "copy")
    assert finished.notes[0].startswith("No overlay could be mounted: ")
    with pytest.raises(RuntimeError, match="could not be started"):
        folder.run(anything("overlay"), "true")


@pytest.mark.parametrize("backend", ["auto", "overlay", "copy"])
def test_without_namespaces_nothing_runs(folder: Folder, monkeypatch: pytest.MonkeyPatch, backend: str):
    """Where namespaces can't be created, no command runs, and the error says what is missing and what to do."""
    support_is(monkeypatch, Support("none", False, ("namespaces of its own: no",)))
    with pytest.raises(ShellUnavailable, match=r"lacks namespaces of its own: no\. Allow this process"):
        folder.run(anything(backend), "touch", "x")
    assert folder.caught() == []


def test_without_namespaces_and_told_so_it_runs_on_a_copy(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """Where namespaces can't be created, a shell with `contained=False` runs a command on a copy, and the result says so."""
    support_is(monkeypatch, Support("none", False, ("namespaces of its own: no",)))
    shell = anything(contained=False)
    finished = folder.sh(shell, "rm kept.txt; echo x > x; echo $HOME $TMPDIR; exit 4")
    assert (finished.exit_code, finished.contained, finished.backend) == (4, False, "copy")
    assert finished.notes[0].startswith("The command ran without a sandbox, because this machine lacks")
    assert folder.caught() == [("deleted", "kept.txt"), ("written", "x")]
    assert all(
        place.startswith(str(folder.base)) for place in finished.output.strip().split(f" {folder.base}")[:1]
    )


def test_walls_without_a_user_namespace_hold_writes_too(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, backend: str
):
    """A sandbox that root creates without a user namespace also redirects writes to the upper layer."""
    if os.geteuid() != 0:
        pytest.skip("this needs root")
    support_is(monkeypatch, Support("root", True))
    assert folder.sh(anything(backend), "echo x > x; rm -r docs; mkdir docs; touch /etc/x").exit_code == 1
    assert set(folder.merged()) == {"docs", "empty", "kept.txt", "link", "run.sh", "x"}


def test_python_runs_inside(folder: Folder, backend: str):
    """Inside a command, a Python program can use locks, temporary files, pseudo-terminals and a home folder."""
    code = (
        "import multiprocessing, tempfile, pty, os; multiprocessing.Lock(); tempfile.TemporaryFile();"
        "m, s = pty.openpty(); print(os.isatty(s), os.path.expanduser('~'))"
    )
    assert folder.run(anything(backend), PYTHON, "-c", code).output == "True /tmp/home\n"


def test_an_overlay_copies_nothing(tmp_path: Path):
    """With an overlay, a command that only reads copies nothing to the upper layer. bench/shell.py measures the time."""
    if not probe(tmp_path).overlay:
        pytest.skip("there is no overlay here")
    folder = Folder(tmp_path / "large")
    for number in range(1000):
        (folder.root / str(number)).touch()
    finished = folder.sh(anything("overlay"), "find . -type f | wc -l")
    assert (finished.backend, finished.output.strip()) == ("overlay", "1000")
    assert list(folder.upper.iterdir()) == []
