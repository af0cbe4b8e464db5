"""Tests for scripts/page, which installs only files whose digests are in the repository."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support import ROOT

VENDOR = "handrail/serve/page/vendor"

LIBRARIES = {
    "standalone.js": "htm/preact/standalone.module.js",
    "marked.js": "marked/lib/marked.esm.js",
    "dompurify.js": "dompurify/dist/purify.es.mjs",
    "LICENSE.dompurify-mpl": "dompurify/LICENSE-MPL",
    **{f"LICENSE.{name}": f"{name}/LICENSE" for name in ("htm", "preact", "marked", "dompurify")},
}
INSTALLED = ROOT / "src" / VENDOR


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Fixture: a checkout, beside an npm in `bin` that "downloads" the files in `registry`."""
    made = tmp_path / "checkout"
    (made / "scripts").mkdir(parents=True)
    for name in ("scripts/page", "package.json", "package.sha256"):
        shutil.copy(ROOT / name, made / name)
    for name, source in LIBRARIES.items():
        target = tmp_path / "registry" / source
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED / name, target)
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ncp -r "{tmp_path}/registry" "$3/node_modules"\n')
    program.chmod(0o755)
    return made


def install(checkout: Path) -> subprocess.CompletedProcess[str]:
    path = f"{checkout.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", checkout / "scripts" / "page"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_files_with_the_right_digests_are_installed(checkout: Path) -> None:
    """Files with the expected digests are installed, and a second run has nothing to install."""
    ended = install(checkout)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(path.name for path in (checkout / "src" / VENDOR).iterdir()) == sorted(
        [*LIBRARIES, "stamp"]
    )
    assert install(checkout).stdout == ""


@pytest.mark.parametrize("name", ["marked.js", "LICENSE.preact"])
def test_a_changed_download_is_refused_by_name(checkout: Path, name: str) -> None:
    """If the registry delivers a different file, nothing is installed, and the message names the file."""
    with (checkout.parent / "registry" / LIBRARIES[name]).open("a") as file:
        file.write("\nfetch('https://elsewhere.example')")
    ended = install(checkout)
    assert ended.returncode == 1
    assert f"the digest of {name} differs from package.sha256" in ended.stderr
    assert not (checkout / "src" / VENDOR).exists()


def test_an_installed_file_that_changed_is_replaced(checkout: Path) -> None:
    """A file that was changed after its installation is installed again."""
    install(checkout)
    changed = checkout / "src" / VENDOR / "marked.js"
    changed.write_text("changed")
    assert install(checkout).returncode == 0
    assert changed.read_bytes() == (INSTALLED / "marked.js").read_bytes()


def test_a_file_without_a_digest_is_refused(checkout: Path) -> None:
    """A file without a digest in package.sha256 is not installed."""
    digests = checkout / "package.sha256"
    digests.write_text(
        "".join(line for line in digests.read_text().splitlines(True) if "marked.js" not in line)
    )
    ended = install(checkout)
    assert ended.returncode == 1
    assert "package.sha256 has no digest of marked.js" in ended.stderr
