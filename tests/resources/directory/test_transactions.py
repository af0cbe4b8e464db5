"""However calls and a person's edits on a real folder interleave, the result is that of some serial order of the commits.

This is the state machine of test_memory_transactions.py on a real folder, with concurrent and nested calls and a
person who edits the folder without Handrail. In addition, every untouched file keeps its inode and modification time,
and the files in `.venv`, which nobody changes, survive.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis.stateful import invariant, rule

from handrail.resources.directory import DirectoryFilesystem
from resources.file_transactions import Plain, Transactions, deeds, plainly
from support.filesystems import fill, marks, outcome, tree


def by_hand(folder: Path, verb: str, *args: str) -> None:
    """Make a change as a person with an editor and a shell would. The caller checks that the change is possible."""
    at = folder / args[0]
    if verb == "write":
        at.write_text(args[1])
    elif verb == "append":
        with at.open("a") as file:
            file.write(args[1])
    elif verb == "mkdir":
        at.mkdir(parents=True, exist_ok=True)
    elif verb == "delete":
        at.rmdir() if at.is_dir() else at.unlink()
    elif verb == "prune":
        shutil.rmtree(at) if at.is_dir() else at.unlink()
    elif verb == "move":
        (folder / args[1]).parent.mkdir(parents=True, exist_ok=True)
        at.rename(folder / args[1])


class DirectoryTransactions(Transactions):
    """Transactions on a real folder, which a person edits at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.model.update(dict.fromkeys([".venv", ".venv/lib", ".venv/bin"]))
        self.model.update(self.beside)

    def new_root(self, files: Mapping[str, str]) -> Any:
        self.base = Path(tempfile.mkdtemp(prefix="handrail-test-"))
        self.folder = self.base / "root"
        self.folder.mkdir()
        fill(self.folder, files)
        self.beside = {".venv/lib/x.py": "ignored", ".venv/bin/python": "ignored"}
        fill(self.folder, self.beside)
        self.last = marks(self.folder)
        self.done: set[str] = set()
        return DirectoryFilesystem(self.folder)

    def teardown(self) -> None:
        for call in self.calls:
            call.fork.drop()
        assert list(self.base.glob(".root.handrail/at-work/*/*")) == []
        self.root.close()
        shutil.rmtree(self.base)

    def note(self, deed: tuple[str, ...], call: Any) -> None:
        super().note(deed, call)
        self.done.update(deed[1 : 3 if deed[0] == "move" else 2])

    @rule(deed=deeds)
    def person(self, deed: tuple[str, ...]) -> None:
        """Edit the folder as a person who does not know about the calls would."""
        if deed[0] not in ("write", "append", "mkdir", "delete", "prune", "move"):
            return
        deed = self.filled(deed)
        trial: Plain = dict(self.model)
        if not isinstance(outcome(lambda: plainly(trial, *deed)), type):
            for parent in [str(each) for each in Path(deed[1]).parents][::-1]:
                if parent != "." and deed[0] in ("write", "append"):
                    (self.folder / parent).mkdir(exist_ok=True)
            by_hand(self.folder, *deed)
            plainly(self.model, *deed)
            self.note(deed, None)

    @invariant()
    def the_root_is_the_model(self) -> None:
        assert tree(self.root) == self.model
        assert self.root._store.claimed == {}

    @invariant()
    def what_nobody_touched_is_untouched(self) -> None:
        """Check that untouched files keep their inodes and times. A path counts as touched until no call is in progress."""
        now = marks(self.folder)
        for path, mark in self.last.items():
            if path not in self.done and not any(path.startswith(f"{each}/") for each in self.done):
                assert now.get(path) == mark, path
        self.last = now
        if not self.calls:
            self.done.clear()

    @invariant()
    def what_is_ignored_is_there(self) -> None:
        for path, text in self.beside.items():
            assert (self.folder / path).read_text() == text


TestDirectoryTransactions = DirectoryTransactions.TestCase
TestDirectoryTransactions.settings = settings(stateful_step_count=30)
