"""Tests of the page's diffs and files panel in a real browser, under the content security policy."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from handrail.resources.memory import MemoryFilesystem
from serve.page.widgets import Widgets, opened, shown
from support.browsers import browser
from support.filesystems import Folders

__all__ = ["browser", "opened", "shown"]

pytestmark = pytest.mark.once

IMAGE = "<img src=x onerror=alert(1)>"


def changed() -> str:
    """Return a diff as the filesystem writes it, followed by the description of a state change."""
    files = MemoryFilesystem(
        {
            "notes.md": "one\ntwo words here\nthree\n",
            "gone.txt": "bye\n",
            "old.txt": "same\n",
            "pic.png": b"\0\1",
        }
    )
    fork = files.fork("test")
    fork.write("notes.md", f"one\ntwo other words here\nthree\n{IMAGE}")
    fork.write("new.txt", "hello\n" * 3)
    fork.delete("gone.txt")
    fork.move("old.txt", "moved.txt")
    fork.write("pic.png", b"\0\2")
    return fork.diff() + 'state: Note {"text": "<b>bold</b>"}\n'


def file(page: Page, path: str) -> Locator:
    return page.get_by_role("region", name=f"Changes to {path}", exact=True)


def rows(page: Page, path: str) -> list[str]:
    """Return the text of each row in a file's table, with a space between its cells."""
    found = file(page, path).get_by_role("row").all()
    return [" ".join(cell.inner_text() for cell in row.get_by_role("cell").all()).strip() for row in found]


def test_a_diff_of_our_own(shown: Widgets):
    """Each changed file is shown under its name, and marked if it is new, deleted, moved or binary.

    Added and removed lines are labelled, not only coloured.
    """
    shown.show("diff", diff=changed())
    page = shown.page
    expect(page.get_by_text("5 files, 5 lines added, 2 removed")).to_be_visible()
    assert [line.split("\n")[0] for line in rows(page, "notes.md")] == [
        "@@ -1,3 +1,4 @@",
        "1 1  one",
        "2  −",
        " 2 +".strip(),
        "3 3  three",
        "4 +",
    ]
    removed = file(page, "notes.md").get_by_role("row").nth(2)
    added = file(page, "notes.md").get_by_role("row").nth(3)
    expect(removed.get_by_role("cell").nth(2)).to_contain_text("removed")
    expect(added.get_by_role("cell").nth(2)).to_contain_text("added")
    expect(added.get_by_role("insertion")).to_have_text("other ")
    expect(file(page, "gone.txt")).to_contain_text("deleted")
    expect(file(page, "new.txt").get_by_role("button")).to_contain_text("new")
    expect(file(page, "moved.txt")).to_contain_text("old.txt → moved.txt")
    expect(file(page, "pic.png")).to_contain_text("Binary files a/pic.png and b/pic.png differ")
    expect(page.get_by_role("list", name="Other changes")).to_contain_text(
        'state: Note {"text": "<b>bold</b>"}'
    )


def test_what_a_file_holds_stays_text(shown: Widgets):
    """Markup in a diff is shown as text."""
    shown.show("diff", diff=changed())
    expect(file(shown.page, "notes.md")).to_contain_text(IMAGE)
    assert shown.page.locator("#widget img, #widget b, #widget script").count() == 0


def test_notes_beside_the_lines(shown: Widgets, folders: Folders):
    """A diff's notes, such as `new file`, are shown, and a file name with spaces is shown as one name."""
    fork = folders({"plain": "x\n", "poem.txt": "z\n"}).fork("test")
    fork.write("my notes b/x.md", "y\n")
    fork.write("poem.txt", "z\n")
    fork.delete("plain")
    shown.show("diff", diff=fork.diff())
    expect(file(shown.page, "my notes b/x.md")).to_contain_text("new file")
    expect(file(shown.page, "plain")).to_contain_text("deleted file")
    expect(file(shown.page, "poem.txt")).to_contain_text("no change")


def test_side_by_side_is_remembered(shown: Widgets):
    """In the side-by-side view, each row shows both versions. The choice of this view applies to the next diff too.

    A narrow window has no side-by-side view.
    """
    page = shown.page
    shown.show("diff", diff=changed())
    page.get_by_role("button", name="Side by side").click()
    assert shown.said("mode") == ["split"]
    row = file(page, "notes.md").get_by_role("row").nth(2)
    assert row.get_by_role("cell").count() == 6
    expect(row.get_by_role("deletion")).to_have_count(0)
    expect(row.get_by_role("insertion")).to_have_text("other ")
    shown.show("diff", diff=changed())
    expect(page.get_by_role("button", name="Side by side")).to_have_attribute("aria-pressed", "true")
    page.set_viewport_size({"width": 390, "height": 800})
    expect(page.get_by_role("button", name="Side by side")).to_have_count(0)
    assert file(page, "notes.md").get_by_role("row").nth(2).get_by_role("cell").count() == 4
    assert shown.overflow() == 0


def test_files_fold(shown: Widgets):
    """Pressing Enter on a file's heading folds the file."""
    shown.show("diff", diff=changed())
    head = file(shown.page, "new.txt").get_by_role("button")
    expect(head).to_have_attribute("aria-expanded", "true")
    head.press("Enter")
    expect(head).to_have_attribute("aria-expanded", "false")
    expect(file(shown.page, "new.txt").get_by_role("table")).to_have_count(0)


def test_a_long_diff_is_folded(shown: Widgets):
    """A long diff shows its first lines, and a button that shows all of them and says how many there are."""
    fork = MemoryFilesystem({}).fork("test")
    fork.write("long.txt", "".join(f"line {number}\n" for number in range(1240)))
    shown.show("diff", diff=fork.diff())
    lines = file(shown.page, "long.txt").get_by_role("row")
    assert lines.count() == 201
    shown.page.get_by_role("button", name="Show all 1,240 lines").click()
    assert lines.count() == 1241


def change(**more: Any) -> dict[str, Any]:
    return {
        "run_id": "r", "call_id": "c1", "tool": "write_file", "at": "2026-05-31T14:30:00Z", "paths": ["notes.md"],
        "diff": changed(), "undone": False, "undoable": True, **more,
    }  # fmt: skip


def test_nothing_changed_yet(shown: Widgets):
    """An empty files panel says that no files have changed."""
    shown.show("files", changes=[])
    expect(shown.page.get_by_role("heading", name="No files changed")).to_be_visible()


def test_changes_are_listed_newest_first(shown: Widgets):
    """Changes are listed newest first, each with its tool, its paths and a folded diff."""
    shown.show("files", changes=[change(), change(call_id="c2", tool="edit_file", paths=["a.txt", "b.txt"])])
    page = shown.page
    articles = page.get_by_role("list", name="Changes, newest first").get_by_role("article")
    expect(articles).to_have_count(2)
    first = articles.first
    expect(first).to_contain_text("edit_file")
    expect(first.get_by_role("list", name="Paths").get_by_role("listitem")).to_have_text(["a.txt", "b.txt"])
    expect(first.get_by_role("table")).to_have_count(0)
    first.get_by_role("button", name="5 files, 5 lines added, 2 removed").click()
    expect(first.get_by_role("table").first).to_be_visible()


def test_the_files_are_a_tree_with_what_became_of_each(shown: Widgets):
    """Each file that was changed has a word for it. When it is opened, it has the diff and the undo of each call that changed it."""
    files = MemoryFilesystem({"docs/notes.md": "one\n", "gone.txt": "bye\n", "old.txt": "same\n"})
    first, second = files.fork("first"), files.fork("second")
    first.write("docs/notes.md", "two\n")
    first.write("docs/deep/new.md", "hello\n")
    second.delete("gone.txt")
    second.move("old.txt", "moved.txt")
    later = change(call_id="c2", tool="tidy", paths=["gone.txt", "old.txt", "moved.txt"], diff=second.diff())
    shown.show(
        "files",
        changes=[
            change(paths=["docs/notes.md", "docs/deep/new.md"], diff=first.diff()),
            later,
            change(call_id="c3", undone=True),
        ],
    )
    page = shown.page
    tree = page.get_by_role("group", name="Changed files")
    expect(page.get_by_role("heading", name="Files")).to_have_text(
        "Files 1 added, 1 changed, 1 moved, 1 removed"
    )
    for words in ("new.md added", "notes.md changed", "gone.txt removed", "moved.txt moved from old.txt"):
        expect(tree.get_by_role("button", name=words)).to_be_visible()
    tree.get_by_role("button", name="notes.md").press("Enter")
    steps = tree.get_by_role("list", name="Changes to docs/notes.md").get_by_role("listitem")
    expect(steps).to_have_count(1)
    expect(file(page, "docs/notes.md")).to_contain_text("two")
    expect(file(page, "docs/deep/new.md")).to_have_count(0)
    steps.get_by_role("button", name="Undo write_file").click()
    steps.get_by_role("group", name="Undo write_file?").get_by_role("button", name="Undo").click()
    assert shown.said("undo") == ["c1"]
    shown.update(changes=[change(undone=True)])
    expect(page.get_by_role("heading", name="Files")).to_contain_text("as they were before")
    expect(tree).to_have_count(0)


def test_undo_asks_once_more(shown: Widgets):
    """The undo button is replaced by a confirmation that has the focus. Escape and Keep change nothing."""
    page = shown.page
    shown.show("files", changes=[change()])
    page.get_by_role("button", name="Undo write_file").press("Enter")
    confirm = page.get_by_role("group", name="Undo write_file?")
    expect(confirm.get_by_role("button", name="Undo")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Undo write_file")).to_be_focused()
    page.keyboard.press("Enter")
    confirm.get_by_role("button", name="Keep").click()
    assert shown.said("undo") == []
    page.get_by_role("button", name="Undo write_file").click()
    confirm.get_by_role("button", name="Undo").click()
    assert shown.said("undo") == ["c1"]


def test_an_undo_that_is_refused_says_why(shown: Widgets):
    """If an undo is refused, the reason is shown."""
    shown.show("files", changes=[change()], refuse="notes.md was written again later")
    shown.page.get_by_role("button", name="Undo write_file").click()
    shown.page.get_by_role("group", name="Undo write_file?").get_by_role("button", name="Undo").click()
    expect(shown.page.get_by_role("alert")).to_have_text("notes.md was written again later")


def test_what_is_undone_or_can_not_be(shown: Widgets):
    """A change that was undone, can't be undone or is not applied says so and has no undo button.

    A busy thread allows no undo.
    """
    page = shown.page
    shown.show("files", changes=[change(undone=True, undoable=False)])
    expect(page.get_by_text("Undone", exact=True)).to_be_visible()
    expect(page.get_by_text("The changes were undone.")).to_be_visible()
    shown.show("files", changes=[change(undoable=False, problem="it is too old")])
    expect(page.get_by_text("This can’t be undone: it is too old.")).to_be_visible()
    expect(page.get_by_role("button", name="Undo")).to_have_count(0)
    shown.show("files", changes=[change(unapplied=True, undoable=False)])
    expect(page.get_by_text("Not applied", exact=True)).to_be_visible()
    expect(page.get_by_text("These changes are recorded, but not in the files")).to_be_visible()
    expect(page.get_by_role("button", name="Undo")).to_have_count(0)
    shown.show("files", changes=[change()], busy=True)
    expect(page.get_by_role("button", name="Undo write_file")).to_be_disabled()
    shown.show("files", changes=[change()], busy="c1")
    expect(page.get_by_role("status")).to_have_text("Undoing…")


def test_no_panel_is_wider_than_a_phone(shown: Widgets):
    """At a width of 390 pixels the page does not overflow, even with long names and an open confirmation."""
    shown.page.set_viewport_size({"width": 390, "height": 800})
    shown.show("files", changes=[change(paths=["folder/" * 40])])
    shown.page.get_by_role("button", name="Undo write_file").click()
    shown.page.get_by_role("button", name="5 files").click()
    assert shown.overflow() == 0
