"""Where journals are: below the state folder by default, private to their owner, and never where tools may write."""

import grp
import os
import pwd
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Adapter, DirectoryFilesystem, Prompt, ScriptedModel, SqliteJournal
from handrail import imports as neighbours
from handrail.cli import main
from handrail.cli.outcome import runs_command
from handrail.errors import DefinitionError, JournalError, JournalExposed
from handrail.journal.location import check_out_of_reach, check_secret, default_journal
from handrail.serve.people import People

pytestmark = pytest.mark.once  # files have the same places and permissions under every Python version


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_default_lies_below_the_state_folder(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The default journal is below `XDG_STATE_HOME`, or below the home folder if the variable is empty or relative."""
    found = default_journal(tmp_path / "my project")
    assert found.parent.parent == state / "handrail"
    assert found.parent.name.startswith("my_project-")
    for value in ("", "relative/state"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert default_journal(tmp_path).is_relative_to(tmp_path / "home" / ".local" / "state" / "handrail")


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60)


@given(st.lists(names, min_size=2, max_size=2, unique=True))
def test_projects_never_share_a_journal(pair: list[str]):
    """Different projects have different journal folders, whose names are valid whatever the projects are called."""
    one, other = (default_journal(Path("/nowhere", each)).parent for each in pair)
    if os.path.realpath(Path("/nowhere", pair[0])) != os.path.realpath(Path("/nowhere", pair[1])):
        assert one.name.lower() != other.name.lower()
    assert one.name.isascii()
    assert len(one.name) < 100
    assert one.name not in (".", "..")


def test_a_link_to_a_project_has_the_same_journal(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert default_journal(tmp_path / "link") == default_journal(tmp_path / "real")
    assert default_journal(tmp_path / "real" / ".." / "real") == default_journal(tmp_path / "real")


def test_new_journals_are_private(tmp_path: Path):
    """A new journal, its key and SQLite's files beside it are readable only by their owner."""
    before = os.umask(0)
    try:
        journal = SqliteJournal(tmp_path / "runs.db")
        found = {path.name: mode_of(path) for path in tmp_path.iterdir()}
        journal.close()
    finally:
        os.umask(before)
    assert found == dict.fromkeys(("runs.db", "runs.db-wal", "runs.db-shm", "runs.db.key"), 0o600)


@pytest.mark.parametrize("part", ["runs.db", "runs.db.key"])
def test_a_journal_that_others_can_use_is_refused(tmp_path: Path, part: str):
    """A journal that other users can read is refused, and the error gives a command that makes it private."""
    SqliteJournal(tmp_path / "runs.db").close()
    (tmp_path / part).chmod(0o640)
    with pytest.raises(JournalExposed, match=rf"mode 640.*`chmod 600 {tmp_path / part}`"):
        SqliteJournal(tmp_path / "runs.db")
    (tmp_path / part).chmod(0o600)
    SqliteJournal(tmp_path / "runs.db").close()


# --- other users ---

NOBODY = 65534
PARTS = (
    "runs.db",
    "runs.db.key",
    "runs.db-wal",
    "runs.db-shm",
    "runs.db-journal",
    "people.db",
    "people.db-wal",
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


def opened(folder: Path, part: str) -> None:
    """Open the journal or the user database that a file belongs to."""
    if part.startswith("people"):
        People(folder / "people.db").close()
    else:
        SqliteJournal(folder / "runs.db").close()


@as_root
@pytest.mark.parametrize("part", PARTS)
def test_files_of_another_user_are_refused(tmp_path: Path, part: str):
    """A file that belongs to another user is refused even with mode 0600, because its owner can change it."""
    opened(tmp_path, part)
    (tmp_path / part).touch(mode=0o600)
    os.chown(tmp_path / part, NOBODY, NOBODY)
    with pytest.raises(
        (JournalExposed, DefinitionError), match=rf"{part}' belongs to another user \(nobody\)"
    ):
        opened(tmp_path, part)
    os.chown(tmp_path / part, 0, 0)
    opened(tmp_path, part)


@pytest.mark.parametrize("part", ["runs.db-journal", "runs.db-wal", "people.db-journal"])
def test_leftovers_that_others_can_write_are_refused_before_they_are_read(tmp_path: Path, part: str):
    """A leftover file that others can write to is refused before SQLite opens the database, because SQLite would apply it."""
    opened(tmp_path, part)
    (tmp_path / part).write_bytes(b"planted")
    (tmp_path / part).chmod(0o666)
    with pytest.raises((JournalExposed, DefinitionError), match=f"chmod 600 {tmp_path / part}"):
        opened(tmp_path, part)
    assert (tmp_path / part).read_bytes() == b"planted"


@pytest.mark.parametrize("part", ["runs.db", "people.db"])
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, part: str, exists: bool, level: int):
    """A folder that others can write to is refused, because they could replace the files. In a sticky folder they can't."""
    folder = tmp_path / "above" / "inside"
    folder.mkdir(parents=True, mode=0o755)
    wide = (folder, folder.parent)[level]
    if exists:
        opened(folder, part)
    wide.chmod(0o777)
    with pytest.raises((JournalExposed, DefinitionError), match=rf"write.*`chmod go-w {wide}`"):
        opened(folder, part)
    assert exists or list(folder.iterdir()) == []
    wide.chmod(0o1777)
    opened(folder, part)


def test_the_folder_behind_a_link_is_checked(tmp_path: Path):
    """A journal opened through a link is refused if others can write to the link's folder or to the folder that it leads to."""
    for name in ("private", "wide"):
        (tmp_path / name).mkdir(mode=0o700)
    SqliteJournal(tmp_path / "wide" / "runs.db").close()
    (tmp_path / "private" / "runs.db").symlink_to(tmp_path / "wide" / "runs.db")
    (tmp_path / "wide").chmod(0o777)
    with pytest.raises(JournalExposed, match=f"chmod go-w {tmp_path / 'wide'}"):
        SqliteJournal(tmp_path / "private" / "runs.db")
    (tmp_path / "wide").chmod(0o700)
    (tmp_path / "private").chmod(0o777)
    with pytest.raises(JournalExposed, match=f"chmod go-w {tmp_path / 'private'}"):
        SqliteJournal(tmp_path / "private" / "runs.db")


@as_root
def test_the_folder_of_another_user_is_refused(tmp_path: Path):
    """A folder that belongs to another user is refused, because its owner could replace the journal and its key."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(JournalExposed, match=rf"'{folder}' belongs to another user \(nobody\)"):
        SqliteJournal(folder / "runs.db")


@as_root
@pytest.mark.parametrize("alone", [False, True])
def test_a_group_may_write_to_the_folder_if_it_is_the_user_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
):
    """A group-writable folder is accepted only if the group is the user's own and has no other member."""
    me = pwd.getpwuid(os.geteuid()).pw_name
    own = grp.struct_group((me, "x", 0, [] if alone else ["somebody"]))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: own)
    tmp_path.chmod(0o775)
    if alone:
        SqliteJournal(tmp_path / "runs.db").close()
    else:
        with pytest.raises(JournalExposed, match="chmod go-w"):
            SqliteJournal(tmp_path / "runs.db")


# --- journals in reach of tools ---


def refused(journal: Path, folder: Path) -> str:
    with pytest.raises(JournalExposed) as error:
        check_out_of_reach(str(journal), str(folder))
    return str(error.value)


def test_a_journal_in_a_folder_of_tools_is_refused(tmp_path: Path):
    """A journal that tools could reach is refused, even through links in either path or through a second hard link."""
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    SqliteJournal(work / "sub" / "x.db").close()
    SqliteJournal(tmp_path / "outside.db").close()
    (tmp_path / "way in").symlink_to(work / "sub")
    (tmp_path / "alias.db").symlink_to(work / "sub" / "x.db")
    (tmp_path / "alias").symlink_to(work)
    for journal in (
        work / "sub" / "x.db",
        work / "new.db",
        tmp_path / "way in" / "x.db",
        tmp_path / "alias.db",
    ):
        assert "which tools may change. Choose a file outside it" in refused(journal, work)
    refused(work / "x.db", tmp_path / "alias")
    check_out_of_reach(str(tmp_path / "outside.db"), str(work))
    check_out_of_reach(str(tmp_path / "outside.db"), "")
    check_out_of_reach(":memory:", str(work))
    check_out_of_reach(str(tmp_path / "workbook.db"), str(work))
    os.link(tmp_path / "outside.db.key", work / "key")
    assert "has 2 hard links" in refused(tmp_path / "outside.db", work)


def test_a_reserved_folder_may_hold_a_journal(tmp_path: Path):
    """A journal may be in `.handrail`, which tools can't see, unless that is a link to a folder that they can see."""
    check_out_of_reach(str(tmp_path / ".handrail" / "runs.db"), str(tmp_path))
    (tmp_path / "seen").mkdir()
    (tmp_path / ".handrail").symlink_to("seen")
    refused(tmp_path / ".handrail" / "runs.db", tmp_path)


async def test_a_run_with_its_journal_among_its_files_is_refused(tmp_path: Path):
    """A run whose tools could change its journal is refused before anything is recorded."""
    journal = SqliteJournal(tmp_path / "runs.db")
    with DirectoryFilesystem(tmp_path) as files:
        adapter = Adapter(ScriptedModel(["Hello."]), journal=journal, filesystem=files)
        with pytest.raises(JournalExposed):
            await adapter.evaluate(Prompt("desk", "Help."), "Hello?")
    assert not await journal.runs.list()
    journal.close()


# --- the commands ---


def program(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["handrail", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


MODELS = "from handrail import ScriptedModel\nmodel = ScriptedModel(lambda request: 'Hello.')\n"


@pytest.fixture
def project(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "hello.md").write_text("---\n---\nSay hello.\n")
    (folder / "the_models.py").write_text(MODELS)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("HANDRAIL_JOURNAL", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "the_models", raising=False)
    monkeypatch.setattr(neighbours._finder, "searched", {})  # as in a new process
    return folder


RUN = ("run", "hello.md", "Hello?", "--model", "the_models:model", "-q")


def test_commands_agree_on_the_default(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """Without `--journal`, `run` and `runs list` use the same private file outside the project.

    Printed commands name the journal only if it is not the default.
    """
    before = sorted(each.name for each in project.iterdir() if each.name != "__pycache__")
    assert program(monkeypatch, *RUN) == 0
    assert sorted(each.name for each in project.iterdir() if each.name != "__pycache__") == before
    journal = default_journal(project)
    assert [mode_of(each) for each in (journal.parent.parent, journal.parent, journal)] == [
        0o700,
        0o700,
        0o600,
    ]
    capsys.readouterr()
    assert program(monkeypatch, "runs", "list") == 0
    assert "\tdone\t" in capsys.readouterr().out
    assert runs_command("show", "tea", str(journal)) == "handrail runs show tea"
    assert runs_command("show", "tea", "x.db") == "handrail runs show tea --journal x.db"


def test_a_moved_project_is_told_where_its_runs_are(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """In a folder that was moved, `runs list` names its former journal, and that journal still has the runs."""
    assert program(monkeypatch, *RUN) == 0
    former = default_journal(project)
    moved = project.rename(project.with_name("moved project"))
    monkeypatch.chdir(moved)
    capsys.readouterr()
    assert program(monkeypatch, "runs", "list") == 2
    assert f"its runs are in its former journal: --journal {former}." in capsys.readouterr().err
    assert program(monkeypatch, "runs", "list", "--journal", str(former)) == 0
    assert "\tdone\t" in capsys.readouterr().out


def test_a_copied_project_is_a_new_one(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """In a copy of a project, `runs list` fails, and its error names no former journal."""
    assert program(monkeypatch, *RUN) == 0
    monkeypatch.chdir(shutil.copytree(project, project.with_name("copy")))
    assert program(monkeypatch, "runs", "list") == 2
    assert "former" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "first", [("users", "add", "ann"), ("users", "list"), ("runs", "list"), RUN], ids=lambda words: words[0]
)
@pytest.mark.parametrize("chosen", [False, True])
def test_every_folder_that_a_command_creates_is_private(
    project: Path,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    first: tuple[str, ...],
    chosen: bool,
):
    """Whichever command comes first, the journal's files and folders are private, and later commands accept them."""
    more = ("--journal", state / "some" / "where" / "x.db") if chosen else ()
    before = os.umask(0o022)
    try:
        program(monkeypatch, *first, *more)
        modes = {str(each): mode_of(each) for each in (state, *state.rglob("*")) if each.exists()}
        assert {path: mode for path, mode in modes.items() if mode & 0o077} == {}
        assert program(monkeypatch, *RUN, *more) == 0
        assert program(monkeypatch, "users", "add", "bob", *more) == 0
    finally:
        os.umask(before)
    assert not [each for each in (state, *state.rglob("*")) if mode_of(each) & 0o077]


def test_users_of_a_folder_that_others_can_use_are_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """`users` refuses a default folder that others can use, as the other commands do."""
    assert program(monkeypatch, "users", "add", "ann") == 0
    wide = default_journal(project).parent
    wide.chmod(0o755)
    assert program(monkeypatch, "users", "add", "bob") == 2
    assert f"`chmod 700 {wide}`" in capsys.readouterr().err


@pytest.mark.parametrize("level", [0, 1])
def test_a_default_folder_that_others_can_use_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, level: int
):
    """If others can access the default folder, `run` is refused instead of running without a journal."""
    assert program(monkeypatch, *RUN) == 0
    wide = default_journal(project).parents[level]
    wide.chmod(0o755)
    assert program(monkeypatch, *RUN) == 2
    assert f"`chmod 700 {wide}`" in capsys.readouterr().err


def test_commands_refuse_a_journal_among_the_files(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """A journal inside the `--files` folder is refused, because a tool could use it to answer its own questions."""
    for more in (("--journal", "./x.db"), ("--journal", "sub/x.db")):
        assert program(monkeypatch, *RUN, "--files", ".", *more) == 2
        assert "which tools may change. Choose a file outside it" in capsys.readouterr().err
    monkeypatch.setenv("XDG_STATE_HOME", str(project / "state"))
    assert program(monkeypatch, *RUN, "--files", ".") == 2
    assert "which tools may change" in capsys.readouterr().err
    (project / "app.py").write_text(
        "from handrail import Adapter, Prompt\nfrom the_models import model\n"
        "prompt = Prompt('desk', 'Help.')\nadapter = Adapter(model)\n"
    )
    assert program(monkeypatch, "serve", "app.py", "--files", ".", "--journal", "x.db", "--port", "0") == 2
    assert "which tools may change" in capsys.readouterr().err


def test_no_home_is_said(monkeypatch: pytest.MonkeyPatch):
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(JournalError, match=r"there is no home folder to keep it in. Set XDG_STATE_HOME"):
        default_journal(Path("/"))


@pytest.mark.parametrize(
    ("owner", "mode", "problem"),
    [
        (1000, 0o400, ""),
        (1000, 0o440, "other users can access.*chmod 600"),
        (0, 0o400, ""),
        (0, 0o440, ""),  # as systemd and Kubernetes volumes with an `fsGroup` provide it
        (0, 0o460, "other users can access.*chmod 640"),
        (0, 0o444, "other users can access.*chmod 640"),
        (2000, 0o400, "belongs to another user"),
    ],
)
def test_root_may_give_a_secret_to_a_service_and_its_group(
    owner: int, mode: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "key"
    file.write_text("secret")
    look = os.lstat

    def look_as_owned(path: Any, **options: Any) -> os.stat_result:
        found = look(path, **options)
        if str(path) != str(file):
            return found
        return os.stat_result((stat.S_IFREG | mode, *found[1:4], owner, *found[5:]))

    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        patched.setattr(os, "lstat", look_as_owned)
        if problem:
            with pytest.raises(JournalExposed, match=problem):
                check_secret("runs", file)
        else:
            check_secret("runs", file)
