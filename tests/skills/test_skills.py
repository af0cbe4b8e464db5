"""Skills: folders with a `SKILL.md`, as sections that a model opens, reads and runs scripts of."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    Prompt,
    ScriptedModel,
    Session,
    Shell,
    Skills,
    ToolCall,
    tool,
)
from handrail.errors import DefinitionError
from handrail.events import ToolInvoked
from handrail.testing import Person

FILL = """\
import pathlib, sys
here = pathlib.Path(__file__).parent.parent
template = pathlib.Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else "none"
pathlib.Path("form.txt").write_text(template + (here / "SKILL.md").read_text()[:3])
try:
    (here / "planted.txt").write_text("mine")
except OSError as error:
    print("read-only:", error.errno)
"""


def skill(folder: Path, name: str, more: str = "", body: str = "Do it.", **files: str) -> Path:
    """Write a skill into a folder of skills. The names of `files` have `__` for a `/`, and `_DOT_` for a dot."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "SKILL.md").write_text(f"---\nname: {name}\ndescription: How to {name}.\n{more}---\n{body}\n")
    for path, content in files.items():
        file = place / path.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return place


@pytest.fixture
def skills(tmp_path: Path) -> Path:
    """Provide a folder with a skill that has a script and a template."""
    top = tmp_path / "skills"
    skill(
        top,
        "fill-forms",
        body="Run `scripts/fill.py` for $5.",
        scripts__fill_DOT_py=FILL,
        templates__a_DOT_txt="template ",
    )
    return top


def run(section: Any, *calls: ToolCall, files: Any = None, **options: Any) -> tuple[ScriptedModel, list[Any]]:
    """Make these calls in order in one run, and return the model and the calls' results."""
    session, model = Session(), ScriptedModel([*calls, "Done."])
    prompt = Prompt("p", [section], **options)
    adapter = Adapter(model, environment=Person(approve=lambda question: True))
    adapter.evaluate(prompt, "go", session=session, filesystem=files).wait()
    return model, [each.result for each in session[ToolInvoked].all()]


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_a_skill_is_its_description_until_it_is_opened(skills: Path) -> None:
    """A prompt has a skill's description, and its instructions only once the model opens its section."""
    section = Skills(skills)
    text = Prompt("p", [section]).render().text
    assert "How to fill-forms." in text
    assert "Run `scripts" not in text
    model, (opened,) = run(section, ToolCall("open_sections", {"sections": ["skills.fill-forms"]}))
    assert "Run `scripts/fill.py` for $5." in opened.render()
    assert "templates/a.txt" in opened.render()
    first, second = (request.tools for request in model.requests)
    assert [each.tool.name for each in second] == [each.tool.name for each in first]


def test_a_script_runs_in_the_sandbox_and_its_folder_is_read_only(skills: Path, tmp_path: Path) -> None:
    """A script changes the run's folder and sees its own, which neither it nor what it leaves behind can change."""
    work = tmp_path / "work"
    work.mkdir()
    before = sorted(skills.rglob("*"))
    arguments = {"skill": "fill-forms", "script": "scripts/fill.py", "arguments": ["{skill}/templates/a.txt"]}
    _, (result,) = run(
        Skills(skills), ToolCall("run_skill_script", arguments), files=DirectoryFilesystem(work)
    )
    assert result.success, result.render()
    assert (work / "form.txt").read_text() == "template ---"
    assert "read-only: 30" in result.render()
    assert sorted(skills.rglob("*")) == before


def test_a_skill_below_the_runs_folder_is_read_only_too(tmp_path: Path) -> None:
    """The skill's folder can't be written even where the command may write all around it."""
    skill(tmp_path / "work" / "skills", "fill-forms", scripts__fill_DOT_py=FILL)
    call = ToolCall("run_skill_script", {"skill": "fill-forms", "script": "scripts/fill.py"})
    _, (result,) = run(
        Skills(tmp_path / "work" / "skills"), call, files=DirectoryFilesystem(tmp_path / "work")
    )
    assert result.success
    assert "read-only: 30" in result.render()
    assert (tmp_path / "work" / "form.txt").exists()
    assert not (tmp_path / "work" / "skills" / "fill-forms" / "planted.txt").exists()


def test_the_mount_makes_no_script_irreversible(skills: Path) -> None:
    """A script is staged, and not asked about for its mount; a shell that reaches the network is what makes it irreversible."""
    tools = {each.name: each for each in Skills(skills).tools}
    assert (tools["run_skill_script"].effect, tools["run_skill_script"].reach) == ("staged", "")
    tools = {each.name: each for each in Skills(skills, shell=Shell(network=True)).tools}
    assert tools["run_skill_script"].effect == "irreversible"
    assert "the network" in str(tools["run_skill_script"].reach)


def test_a_failed_script_changes_nothing(tmp_path: Path) -> None:
    """What a script wrote is dropped if it exits with another code than 0."""
    code = "open('half.txt', 'w').write('x'); raise SystemExit(3)"
    skill(tmp_path / "skills", "fails", scripts__a_DOT_py=code)
    (tmp_path / "work").mkdir()
    call = ToolCall("run_skill_script", {"skill": "fails", "script": "scripts/a.py"})
    _, (result,) = run(Skills(tmp_path / "skills"), call, files=DirectoryFilesystem(tmp_path / "work"))
    assert not result.success
    assert os.listdir(tmp_path / "work") == []


def test_a_policy_decides_on_scripts(skills: Path, tmp_path: Path) -> None:
    """`proc.exec` can be denied for scripts as for any command, whatever `allowed-tools` says."""
    skill(skills, "greedy", "allowed-tools: run_skill_script Bash(*)\n", scripts__a_DOT_py="open('x', 'w')")
    (tmp_path / "work").mkdir()
    call = ToolCall("run_skill_script", {"skill": "greedy", "script": "scripts/a.py"})
    _, (result,) = run(
        Skills(skills),
        call,
        files=DirectoryFilesystem(tmp_path / "work"),
        policies=[CapabilityPolicy({"proc.exec": "deny"})],
    )
    assert not result.success
    assert os.listdir(tmp_path / "work") == []


def test_only_the_files_of_a_skill_are_read(skills: Path, tmp_path: Path) -> None:
    """A model reads the files below a skill's folder, by paths that can't lead out of it."""
    (tmp_path / "secret.txt").write_text("secret")

    def read(path: str, name: str = "fill-forms") -> ToolCall:
        return ToolCall("read_skill_file", {"skill": name, "path": path})

    _, results = run(
        Skills(skills),
        read("templates/a.txt"),
        read("../../secret.txt"),
        read("/etc/passwd"),
        read("templates"),
        read("templates/a.txt", "nothing"),
    )
    assert results[0].render() == "1\ttemplate "
    assert [each.success for each in results] == [True, False, False, False, False]
    assert "scripts/fill.py, templates/a.txt" in results[3].render()
    assert "fill-forms" in results[4].render()


def test_a_file_that_becomes_a_link_is_not_followed(skills: Path, tmp_path: Path) -> None:
    """A link that appears after the skill was loaded is neither read nor shown to a script."""
    section = Skills(skills)
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "work").mkdir()
    file = skills / "fill-forms" / "templates" / "a.txt"
    file.unlink()
    file.symlink_to(tmp_path / "secret.txt")
    _, (result, ran) = run(
        section,
        ToolCall("read_skill_file", {"skill": "fill-forms", "path": "templates/a.txt"}),
        ToolCall("run_skill_script", {"skill": "fill-forms", "script": "scripts/fill.py"}),
        files=DirectoryFilesystem(tmp_path / "work"),
    )
    assert not result.success
    assert not ran.success
    assert os.listdir(tmp_path / "work") == []


BAD = {
    "no front matter": ("Just text.", 1),
    "not closed": ("---\nname: bad\n", 1),
    "no YAML": ("---\nname: bad\ndescription: [\n---\n", 3),
    "a list": ("---\n- name\n---\n", 2),
    "no name": ("---\ndescription: x\n---\n", 1),
    "another folder's name": ("---\ndescription: x\nname: other\n---\n", 3),
    "capital letters": ("---\ndescription: x\nname: Bad\n---\n", 3),
    "two hyphens": ("---\ndescription: x\nname: b--d\n---\n", 3),
    "a long name": (f"---\ndescription: x\nname: {'b' * 65}\n---\n", 3),
    "no description": ("---\nname: bad\n---\n", 1),
    "a blank description": ("---\nname: bad\ndescription: ' '\n---\n", 3),
    "a long description": (f"---\nname: bad\ndescription: {'x' * 1025}\n---\n", 3),
    "a key twice": ("---\nname: bad\nname: bad\ndescription: x\n---\n", 3),
    "a number for tools": ("---\nname: bad\ndescription: x\nallowed-tools: 5\n---\n", 4),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_skill_is_a_warning_and_the_others_load(
    case: str, skills: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the file and the line of what is wrong."""
    text, line = BAD[case]
    place = skills / "bad"
    place.mkdir()
    (place / "SKILL.md").write_text(text)
    section = Skills(skills)
    assert list(section.skills) == ["fill-forms"]
    assert [(each.file, each.line) for each in section.problems] == [(str(place / "SKILL.md"), line)]
    assert f"{place / 'SKILL.md'}:{line}: " in warnings_of(caplog)


def test_the_limits_of_names_and_descriptions_are_allowed(tmp_path: Path) -> None:
    """A name of 64 characters and a description of 1,024 are within the limits."""
    name = "b" * 64
    place = skill(tmp_path, name)
    (place / "SKILL.md").write_text(f"---\nname: {name}\ndescription: {'x' * 1024}\n---\n")
    assert list(Skills(tmp_path).skills) == [name]


@pytest.mark.parametrize(
    "kind",
    ["link out", "linked SKILL.md", "link to a folder", "hidden link", "socket", "pipe", "many", "large"],
)
def test_a_skill_has_only_files(
    kind: str, skills: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skill with a link, a socket, or too much in it is left out, and the warning says what it is."""
    place = skill(skills, "bad", scripts__a_DOT_py="")
    expected = "x"
    if kind == "link out":
        (place / "x").symlink_to("/etc/passwd")
    elif kind == "linked SKILL.md":
        (place / "SKILL.md").unlink()
        (place / "SKILL.md").symlink_to("/dev/zero")
        expected = "/dev/zero"
    elif kind == "link to a folder":
        (place / "x").symlink_to(tmp_path)
    elif kind == "hidden link":
        (place / ".hidden").mkdir()
        (place / ".hidden" / "x").symlink_to("/etc/passwd")
    elif kind == "socket":
        monkeypatch.chdir(place)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("x")
    elif kind == "pipe":
        os.mkfifo(place / "x")
    elif kind == "many":
        for number in range(513):
            (place / str(number)).touch()
        expected = "512 files"
    else:
        with open(place / "x", "wb") as file:
            file.truncate(16 * 2**20 + 1)
        expected = "16 MiB"
    assert list(Skills(skills).skills) == ["fill-forms"]
    assert str(place / "SKILL.md") in warnings_of(caplog)
    assert expected in warnings_of(caplog)


def test_a_name_twice_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two skills with the same name the first is kept, and the warning names both files."""
    for group in ("a", "b"):
        skill(tmp_path / group, "same", body=group)
    section = Skills(tmp_path)
    assert section.skills["same"].body == "a"
    for group in ("a", "b"):
        assert str(tmp_path / group / "same" / "SKILL.md") in warnings_of(caplog)
    assert [each.line for each in section.problems] == [2]


def test_what_allowed_tools_names_and_the_prompt_lacks_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the line and the missing tools, and no others."""
    place = skill(tmp_path, "greedy", "license: MIT\nallowed-tools: search Bash(git:*) Read\n")

    @tool(effect="pure")
    async def search(q: str) -> str:
        """Search."""
        return q

    section = Skills(tmp_path)
    assert warnings_of(caplog) == ""
    prompt = Prompt("p", [section], tools=[search])
    assert f"{place / 'SKILL.md'}:5: " in warnings_of(caplog)
    assert "Bash, Read" in warnings_of(caplog)
    assert "search" not in warnings_of(caplog)
    assert [each.name for each in prompt.render().tools] == ["search", "read_skill_file"]


def test_a_skill_without_scripts_runs_nothing(tmp_path: Path) -> None:
    """Where no skill has a script, the model is offered no tool that runs one."""
    skill(tmp_path, "reads", references__a_DOT_md="x")
    assert [each.name for each in Skills(tmp_path).tools] == ["read_skill_file"]


def test_only_scripts_are_run(skills: Path, tmp_path: Path) -> None:
    """A file whose suffix names no program is not run, and neither is one outside the skill."""
    (tmp_path / "work").mkdir()

    def start(script: str) -> ToolCall:
        return ToolCall("run_skill_script", {"skill": "fill-forms", "script": script})

    _, results = run(
        Skills(skills),
        start("templates/a.txt"),
        start("../../x.py"),
        files=DirectoryFilesystem(tmp_path / "work"),
    )
    assert [each.success for each in results] == [False, False]


def test_without_a_real_folder_a_script_is_refused(skills: Path) -> None:
    """A run without a folder can't run scripts, and the model is told so."""
    _, (result,) = run(
        Skills(skills), ToolCall("run_skill_script", {"skill": "fill-forms", "script": "scripts/fill.py"})
    )
    assert not result.success
    assert "--files" in result.render()


@pytest.mark.parametrize("make", [lambda top: Skills(), lambda top: Skills(top / "none")])
def test_a_folder_that_does_not_exist_is_an_error(make: Any, tmp_path: Path) -> None:
    """A missing folder is a mistake in the program, not in a skill."""
    with pytest.raises(DefinitionError):
        make(tmp_path)


def test_scripts_run_only_in_a_sandbox(skills: Path) -> None:
    """A shell that may run commands without a sandbox is refused."""
    with pytest.raises(DefinitionError, match="contained"):
        Skills(skills, shell=Shell(contained=False))


def test_a_skills_own_folder_may_be_a_link(skills: Path, tmp_path: Path) -> None:
    """Skills are often installed as links to folders. Such a skill is loaded from where its link leads."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "fill-forms").symlink_to(skills / "fill-forms")
    assert Skills(tmp_path / "installed").skills["fill-forms"].folder == (skills / "fill-forms").resolve()


def test_links_are_followed_only_to_a_skill(skills: Path, tmp_path: Path) -> None:
    """Links to the whole disk, to themselves, or in a circle neither stop the load nor take time, and nothing is found twice."""
    for name, leads in {"all": "/", "round": skills, "self": "self", "nowhere": tmp_path / "none"}.items():
        (skills / name).symlink_to(leads)
    (tmp_path / "linked").symlink_to(skills)
    for folder in (skills, tmp_path / "linked"):
        section = Skills(folder)
        assert (list(section.skills), section.problems) == (["fill-forms"], ())


def test_a_skill_is_named_by_its_folder_however_it_is_given(
    skills: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Skills(".")` in a skill's own folder is that skill."""
    monkeypatch.chdir(skills / "fill-forms")
    for folder in (".", "../fill-forms/", "scripts/.."):
        assert list(Skills(folder).skills) == ["fill-forms"]


def test_what_cannot_be_read_is_a_warning(
    skills: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that can't be listed, or a file that is removed while its skill is loaded, leaves out no other skill."""
    skill(skills, "leaves", references__a_DOT_md="x")
    (skills / "sealed").mkdir()
    iterdir, lstat = Path.iterdir, os.lstat

    def listing(folder: Path) -> Any:
        if folder.name == "sealed":
            raise PermissionError(13, "Permission denied", str(folder))
        return iterdir(folder)

    def status(path: Any, **options: Any) -> os.stat_result:
        if os.fspath(path).endswith("references/a.md"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return lstat(path, **options)

    monkeypatch.setattr(Path, "iterdir", listing)
    monkeypatch.setattr(os, "lstat", status)
    section = Skills(skills)
    assert list(section.skills) == ["fill-forms"]
    assert f"{skills / 'sealed'}:1: it can't be read: Permission denied." in warnings_of(caplog)
    assert f"{skills / 'leaves' / 'SKILL.md'}:1: " in warnings_of(caplog)


def test_a_skill_that_is_gone_is_an_error_for_the_model(skills: Path, tmp_path: Path) -> None:
    """A script whose folder was removed after the skill was loaded is not run, and the model is told so."""
    section = Skills(skills)
    (skills / "fill-forms").rename(tmp_path / "elsewhere")
    (tmp_path / "work").mkdir()
    call = ToolCall("run_skill_script", {"skill": "fill-forms", "script": "scripts/fill.py"})
    _, (result,) = run(section, call, files=DirectoryFilesystem(tmp_path / "work"))
    assert not result.success
    assert result.render().startswith("scripts/fill.py was not run.")


def test_any_name_of_a_file_can_be_sent(tmp_path: Path) -> None:
    """A name that is not UTF-8, or has a line break, is spelled with escapes, and the file is read and run by that spelling."""
    place = skill(tmp_path / "skills", "odd")
    for name in (b"caf\xe9.txt", b"two\nlines.py"):
        Path(os.fsdecode(os.fsencode(place) + b"/" + name)).write_text("print('here')")
    (tmp_path / "work").mkdir()
    _, results = run(
        Skills(tmp_path / "skills"),
        ToolCall("open_sections", {"sections": ["skills.odd"]}),
        ToolCall("read_skill_file", {"skill": "odd", "path": "caf\\xe9.txt"}),
        ToolCall("run_skill_script", {"skill": "odd", "script": "two\\x0alines.py"}),
        files=DirectoryFilesystem(tmp_path / "work"),
    )
    assert [each.success for each in results] == [True, True, True], results
    assert "caf\\xe9.txt, two\\x0alines.py" in results[0].render()
    assert ["here" in each.render() for each in results] == [False, True, True]
