"""Tests for the parts of scripts/wheel.py that check the contents of a wheel and the digests of downloads."""

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from support import ROOT

PACKAGE = ROOT / "src" / "handrail"
VENDOR = "handrail/serve/page/vendor"


def wheel(folder: Path, *, without: str = "", adding: str = "") -> Path:
    """Make a wheel of the package and return its path. Leave out files that match `without`, and add an empty file named `adding`."""
    made = folder / "handrail-0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as opened:
        for path in PACKAGE.rglob("*"):
            name = path.relative_to(PACKAGE.parent).as_posix()
            if path.is_file() and "__pycache__" not in name and not (without and re.search(without, name)):
                opened.write(path, name)
        opened.writestr("handrail-0.dist-info/licenses/LICENSE", "MIT")
        if adding:
            opened.writestr(adding, "")
    return made


def look(made: Path) -> tuple[int, list[str]]:
    command = [sys.executable, ROOT / "scripts" / "wheel.py", "--look", made]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ended.stderr == ""
    return ended.returncode, ended.stdout.splitlines()


def test_the_package_as_it_lies_here_is_whole(tmp_path: Path):
    """A wheel of this checkout has no problems, and contains the libraries that scripts/page installed."""
    assert look(wheel(tmp_path)) == (0, [])


@pytest.mark.parametrize(
    "name",
    ["handrail/py.typed", "handrail/workers/worker.schema.json", "handrail/cli/starter/tools.py.txt"],
)
def test_a_file_that_was_left_out_is_found(tmp_path: Path, name: str):
    """A file of the package that is missing from the wheel is reported."""
    assert look(wheel(tmp_path, without=re.escape(name))) == (
        1,
        [f"{name} is missing: it is in the package, but not in the wheel"],
    )


@pytest.mark.parametrize("name", ["tests/rig.py", "handrail/notes.txt", "scripts/wheel.py"])
def test_what_does_not_belong_in_it_is_found(tmp_path: Path, name: str):
    """A file in the wheel that is not part of the package is reported."""
    assert look(wheel(tmp_path, adding=name)) == (1, [f"{name} is superfluous: the package has no such file"])


def test_a_page_without_its_libraries_is_refused_with_a_hint(tmp_path: Path):
    """A wheel without the page's libraries and their licences is refused, with a hint to run scripts/page."""
    status, findings = look(wheel(tmp_path, without=re.escape(VENDOR)))
    assert status == 1
    hint = ": run scripts/page, then build again"
    assert f"{VENDOR}/standalone.js is missing, and a script of the page imports it{hint}" in findings
    assert (
        f"the licence of marked is missing, so the library itself is probably missing too{hint}" in findings
    )


def test_a_wheel_with_a_changed_library_is_refused(tmp_path: Path):
    """A wheel is refused if the digest of a library differs from package.sha256."""
    made = wheel(tmp_path, without=".*vendor/marked.js")
    with zipfile.ZipFile(made, "a") as opened:
        opened.writestr(f"{VENDOR}/marked.js", "changed")
    status, findings = look(made)
    assert status == 1
    assert any(f"the digest of {VENDOR}/marked.js differs from package.sha256" in each for each in findings)


def test_a_download_with_another_digest_is_refused_by_name(tmp_path: Path):
    """A download is refused if its digest is not one of those in requirements/dev.txt."""
    spec = importlib.util.spec_from_file_location("wheel_script", ROOT / "scripts" / "wheel.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in ("anyio-4.16.0-py3-none-any.whl", "handrail-0-py3-none-any.whl"):
        (tmp_path / name).write_text("changed")
    [changed] = script.look_at_downloads(tmp_path, "handrail-0-py3-none-any.whl")
    assert changed.startswith("the digest of anyio-4.16.0-py3-none-any.whl is not in requirements/dev.txt")


def test_every_requirement_is_pinned_by_version_and_digest():
    """Each package that dev.in and the package itself ask for is in dev.txt with one version and digests, or pip would refuse the file."""
    locked = (ROOT / "requirements" / "dev.txt").read_text()
    entries = re.findall(
        r"^([\w.-]+)==(\S+)(?: ;[^\\\n]*)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", locked, re.MULTILINE
    )
    pinned = {name for name, _, _ in entries}
    assert len(pinned) == len(entries) == len(re.findall(r"^\S", locked, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
        *re.findall(r"^\w.*", (ROOT / "requirements" / "dev.in").read_text(), re.MULTILINE),
    ]
    names = {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in wanted} - {"handrail"}
    assert names <= pinned
