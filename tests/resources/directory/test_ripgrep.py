"""Searches with ripgrep find the same matches as searches without it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import DirectoryFilesystem
from handrail.errors import FileError
from handrail.resources.directory import store

WORDS = ("one", "two", "One", "naïve", "a.b", "x", " ", "\t", "\r", "\0", "#", "-e")


@pytest.fixture
def rg(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Put the ripgrep of the tests' environment on PATH, and return its path."""
    here = Path(sys.executable).parent / "rg"
    assert here.exists(), "ripgrep is missing: run scripts/venv"
    monkeypatch.setenv("PATH", f"{here.parent}:/usr/bin:/bin")
    store._ripgrep.cache_clear()
    yield str(here)
    store._ripgrep.cache_clear()


def fill(root: Path, contents: list[bytes]) -> None:
    for number, content in enumerate(contents):
        file = root / f"folder {number % 3}" / f"-file{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


contents = st.lists(
    st.one_of(
        st.lists(st.sampled_from([*WORDS, "\n"]), max_size=6).map(lambda words: "".join(words).encode()),
        st.binary(max_size=8),
        st.just("one".encode("utf-16")),
        st.just(b"\xef\xbb\xbfone\n"),
    ),
    min_size=1,
    max_size=12,
)


@given(
    contents, st.sampled_from([*WORDS, "two one", "o.e", "(one)", "^one", "one|two", "[ot]", "\\\\w+", ""])
)
def test_it_changes_nothing_but_the_time(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[bytes], pattern: str
) -> None:
    """For any files and pattern, searches with and without ripgrep find the same matches, in a folder and in a fork."""
    root = tmp_path_factory.mktemp("work")
    fill(root, drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "WORTH", 0)
        patch.setattr(store, "_ripgrep", lambda: None)
        files = DirectoryFilesystem(root)
        fork = files.fork("reader")
        fork.write("new.txt", "one\ntwo one\n")
        expected = [files.grep(pattern), fork.grep(pattern)]
        patch.setattr(store, "_ripgrep", lambda: shutil.which("rg", path=Path(sys.executable).parent))
        again = files.fork("reader")
        again.write("new.txt", "one\ntwo one\n")
        assert [files.grep(pattern), again.grep(pattern)] == expected
        fork.drop()
        again.drop()
        files.close()


def test_it_is_asked_for_plain_text_in_many_files(
    rg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ripgrep is used to search many files for plain text. It is not used for a regular expression or for a few files."""
    fill(tmp_path, [b"here\n" if number == 7 else b"nothing\n" for number in range(100)])
    asked: list[tuple[str, int]] = []
    real = store.files_holding

    def watched(root: Path, text: str, paths: list[str]) -> set[str] | None:
        asked.append((text, len(paths)))
        return real(root, text, paths)

    monkeypatch.setattr(store, "files_holding", watched)
    files = DirectoryFilesystem(tmp_path)
    assert [match.path for match in files.grep("here")] == ["folder 1/-file7.txt"]
    assert len(files.grep("h.re")) == 1
    assert len(files.grep("here", glob="folder 1/-file7*")) == 1
    assert asked == [("here", 100)]


def test_what_it_passed_over_counts_as_read(rg: str, tmp_path: Path) -> None:
    """A file in which ripgrep found nothing counts as read, so a change to it makes the fork stale."""
    fill(tmp_path, [b"nothing\n"] * 50)
    files = DirectoryFilesystem(tmp_path)
    fork = files.fork("reader")
    assert fork.grep("here") == ()
    fork.write("result.txt", "none\n")
    (tmp_path / "folder 0" / "-file3.txt").write_text("here\n")
    assert "folder 0/-file3.txt" in str(fork.stale())
    fork.drop()


def test_a_ripgrep_that_fails_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ripgrep fails, the search continues without it and finds all matches."""
    fill(tmp_path, [b"here\n"] * 40)
    broken = tmp_path / "rg"
    broken.write_text("#!/bin/sh\nexit 2\n")
    broken.chmod(0o755)
    monkeypatch.setattr(store, "_ripgrep", lambda: str(broken))
    assert len(DirectoryFilesystem(tmp_path).grep("here")) == 40


def test_a_bad_pattern_is_refused_first(tmp_path: Path) -> None:
    """An invalid regular expression is refused, even if there is nothing to search."""
    with pytest.raises(FileError, match="not a valid regular expression"):
        DirectoryFilesystem(tmp_path).grep("(")
