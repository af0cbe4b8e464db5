"""Every Python example in the README and the docs runs and prints what it says.

A block is run in a namespace and a folder of its own. Lines directly before a fence steer it:
`<!-- continues -->` before a python fence: goes on where the previous python block ended;
`<!-- prints -->` before a text fence: exactly this is printed by the python block before it.
"""

import contextlib
import io
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from handrail import Session

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,})\s*(?P<language>[\w+-]*)[^`]*")
CONTINUES, PRINTS = "<!-- continues -->", "<!-- prints -->"


@dataclass
class Block:
    """A python block; `line` is where its first line of code stands in the document."""

    line: int
    code: str
    continues: bool
    prints: str | None = None


class BadDocument(ValueError):
    """The document's fences or marks do not fit together."""


def extract(document: Path) -> list[Block]:
    """Return the python blocks of a document in their order."""
    lines = document.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    position = 0
    while position < len(lines):
        opening = FENCE.fullmatch(lines[position])
        mark = lines[position - 1].strip() if position else ""
        language = opening["language"] if opening else ""
        here = f"{document}:{position + 1}"
        position += 1
        if mark == CONTINUES and language != "python":
            raise BadDocument(f"{here}: a python fence has to follow {CONTINUES} directly")
        if mark == PRINTS and language != "text":
            raise BadDocument(f"{here}: a text fence has to follow {PRINTS} directly")
        if not opening:
            continue
        line = position + 1
        content = ""
        while position < len(lines) and not re.fullmatch(rf" *{opening['ticks']}`*\s*", lines[position]):
            content += lines[position].removeprefix(opening["indent"]) + "\n"
            position += 1
        if position == len(lines):
            raise BadDocument(f"{here}: this fence is never closed")
        position += 1
        if mark in (CONTINUES, PRINTS) and not blocks:
            raise BadDocument(f"{here}: there is no python block before this")
        if language == "python":
            blocks.append(Block(line, content, continues=mark == CONTINUES))
        elif mark == PRINTS:
            blocks[-1].prints = content
    return blocks


def chains(document: Path) -> list[list[Block]]:
    """Return the blocks grouped: each group is run in one namespace."""
    groups: list[list[Block]] = []
    for block in extract(document):
        if block.continues:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def run(document: Path, blocks: list[Block], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Run the blocks one after another as a reader would: as `__main__`, in `folder`."""
    patch.chdir(folder)
    module = ModuleType("__main__")
    patch.setitem(sys.modules, "__main__", module)
    for block in blocks:
        printed = io.StringIO()
        try:
            # The empty lines in front make the lines of the traceback those of the document.
            code = compile("\n" * (block.line - 1) + block.code, str(document), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(printed):
                exec(code, module.__dict__)
        except (Exception, SystemExit) as error:
            line = failing_line(error, document) or block.line
            trace = "".join(traceback.format_exception(error))
            pytest.fail(f"{document}:{line}: the example raised {error!r}\n\n{trace}", pytrace=False)
        if block.prints is not None and printed.getvalue() != block.prints:
            pytest.fail(
                f"{document}:{block.line}: the example printed\n\n{printed.getvalue()}\n"
                f"but the document says it prints\n\n{block.prints}",
                pytrace=False,
            )


def failing_line(error: BaseException, document: Path) -> int | None:
    """Return the innermost line of the document that the error went through."""
    if isinstance(error, SyntaxError) and error.filename == str(document):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(document)), None)


def examples() -> list[object]:
    """Return the groups of the README and the docs, named by file and line."""
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        pytest.param(document, group, id=f"{document.relative_to(ROOT)}:{group[0].line}")
        for document in documents
        if document.exists()
        for group in chains(document)
    ]


@pytest.mark.parametrize(("document", "blocks"), examples())
def test_example_runs(document: Path, blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the documentation shows is true."""
    run(document, blocks, tmp_path, monkeypatch)


def test_hello_world_is_ten_lines_on_either_model():
    """The two differ in the line that makes the model, and in its name among the imports."""
    scripted, local = [block.code.splitlines() for block in extract(ROOT / "README.md")[:2]]
    assert [len([line for line in code if line]) for code in (scripted, local)] == [8, 8]
    assert len(scripted) == len(local) == 10
    assert [
        number for number, (one, other) in enumerate(zip(scripted, local, strict=True)) if one != other
    ] == [0, 7]


def test_hello_world_on_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its call is made, through the gate, and its answer is text: structure, not prose."""
    from handrail.adapter import adapter as module
    from handrail.events import ModelResponded, ToolInvoked

    sessions: list[Session] = []
    monkeypatch.setattr(module, "Session", lambda **given: sessions.append(Session(**given)) or sessions[-1])
    block = extract(ROOT / "README.md")[1]
    run(ROOT / "README.md", [block], tmp_path, monkeypatch)
    (session,) = sessions
    (invoked,) = session[ToolInvoked].all()
    assert (invoked.tool, invoked.status) == ("fare", "ok")
    assert isinstance(invoked.params.city, str)
    assert session[ModelResponded].all()[0].stop_reason == "calls"
    assert session[ModelResponded].all()[-1].usage.output > 0


DOCUMENT = """\
# Title

```python
from dataclasses import dataclass

@dataclass
class Point:
    x: int
```

Words.

<!-- continues -->
```python
print(Point(x=1).x)
```

<!-- prints -->
```text
1
```

```console
$ rm -rf nothing
```

1. In a list:

   ````python
   if __name__ == "__main__":
       print("```")
   ````

   <!-- prints -->
   ````text
   ```
   ````
"""


def written(folder: Path, text: str) -> Path:
    document = folder / "document.md"
    document.write_text(text, encoding="utf-8")
    return document


def test_extract_finds_the_python_blocks(tmp_path: Path):
    """Blocks come with their line, mark and expected output; other fences are left out."""
    first, second, third = extract(written(tmp_path, DOCUMENT))
    assert (first.line, first.continues, first.prints) == (4, False, None)
    assert second == Block(15, "print(Point(x=1).x)\n", continues=True, prints="1\n")
    assert third == Block(
        30, 'if __name__ == "__main__":\n    print("```")\n', continues=False, prints="```\n"
    )


def test_run_accepts_a_true_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Continued blocks share names, others do not, and nothing remains behind."""
    before = sys.modules["__main__"]
    document = written(tmp_path, DOCUMENT)
    groups = chains(document)
    assert [len(group) for group in groups] == [2, 1]
    for group in groups:
        with monkeypatch.context() as patch:
            run(document, group, tmp_path, patch)
    assert sys.modules["__main__"] is before


def run_all(document: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    for group in chains(document):
        run(document, group, folder, patch)


def failure(folder: Path, text: str, patch: pytest.MonkeyPatch) -> str:
    document = written(folder, text)
    with patch.context() as inner, pytest.raises(pytest.fail.Exception) as caught:
        run_all(document, folder, inner)
    return str(caught.value)


@pytest.mark.parametrize(
    ("code", "line", "error"),
    [
        ("x = 1\nx.nothing\n", 5, "AttributeError"),
        ("def f():\n    return 1 / 0\n\nf()\n", 5, "ZeroDivisionError"),
        ("x = 1\ny = = 2\n", 5, "SyntaxError"),
        ("import sys\nsys.exit(0)\n", 5, "SystemExit"),
        ("import warnings\nwarnings.warn('old')\n", 5, "UserWarning"),
    ],
)
def test_run_names_the_line_that_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, line: int, error: str
):
    """A failing example is named by file and line, with what it raised."""
    message = failure(tmp_path, f"Words.\n\n```python\n{code}```\n", monkeypatch)
    assert message.startswith(f"{tmp_path}/document.md:{line}: the example raised {error}")


def test_run_keeps_blocks_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A block that is not marked does not see the names of the one before."""
    message = failure(tmp_path, "```python\nx = 1\n```\n\n```python\nprint(x)\n```\n", monkeypatch)
    assert message.startswith(f"{tmp_path}/document.md:6: the example raised NameError")


@pytest.mark.parametrize("said", ["1\n2\n", "1", "1 \n", ""])
def test_run_compares_what_is_printed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str):
    """More, less or other output than the document shows is a failure."""
    said = said and said.rstrip("\n") + "\n"
    code = "print(1)\n" if said != "1\n" else "print(1, end='')\n"
    text = f"```python\n{code}```\n\n<!-- prints -->\n```text\n{said}```\n"
    message = failure(tmp_path, text, monkeypatch)
    assert message.startswith(f"{tmp_path}/document.md:2: the example printed")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nx = 1\n", "document.md:1: this fence is never closed"),
        ("<!-- prints -->\n\n```text\n```\n", "document.md:2: a text fence has to follow"),
        ("<!-- prints -->\n```python\n```\n", "document.md:2: a text fence has to follow"),
        ("<!-- continues -->\n\n```python\n```\n", "document.md:2: a python fence has to follow"),
        ("<!-- continues -->\n```python\n```\n", "document.md:2: there is no python block before"),
        ("<!-- prints -->\n```text\n```\n", "document.md:2: there is no python block before"),
    ],
)
def test_extract_refuses_marks_that_do_nothing(tmp_path: Path, text: str, complaint: str):
    """A mark out of place is an error, or an example would go unchecked in silence."""
    with pytest.raises(BadDocument, match=re.escape(complaint)):
        extract(written(tmp_path, text))
