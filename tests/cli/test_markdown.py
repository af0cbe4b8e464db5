"""Tests for Markdown at the terminal: it is laid out while it arrives, loses nothing, and hides nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from handrail.cli import markdown
from handrail.cli.markdown import MarkdownFlow
from handrail.cli.screens import THEME
from support.programs import HANDRAIL, environment, handrail
from support.terminals import window

WORD = st.sampled_from(["rain", "a", "**bold words**", "`code_x`", "*it*", "[a page](http://docs.example/x)", "漢字", "snake_case"])  # fmt: skip
LINE = st.lists(WORD, min_size=1, max_size=9).map(" ".join)
BLOCK = st.one_of(
    LINE,
    st.lists(LINE, min_size=2, max_size=3).map("\n".join),
    LINE.map("## {}".format),
    LINE.map("> {}".format),
    st.lists(LINE, min_size=1, max_size=4).map(lambda items: "\n".join(f"- {each}" for each in items)),
    st.lists(LINE, min_size=1, max_size=4).map(lambda items: "\n".join(f"1. {each}" for each in items)),
    st.tuples(LINE, LINE).map(lambda each: f"- {each[0]}\n  - {each[1]}"),
    st.lists(LINE, min_size=1, max_size=4).map(lambda code: "```py\n{}\n```".format("\n\n    ".join(code))),
    st.tuples(LINE, LINE).map(lambda each: f"| name | what |\n| --- | --: |\n| {each[0]} | {each[1]} |"),
    st.just("---"),
)
ANYTHING = st.lists(
    st.sampled_from(["word ", "\n", "\n\n", "# ", "- ", "1. ", "> ", "```", "**", "`", "_", "|", "|-|\n", "[x](http://e.x)", "---", "    ",
                     "<http://q.r/%1b%5bx>", "漢", "{", "\t", "\\", "\x1b[2J", "\r\n", "\r", "&#x202e;", "![i](u)"]) | st.text(max_size=5),
    max_size=30,
)  # fmt: skip


def flow(width: int = 40) -> MarkdownFlow:
    return MarkdownFlow(Console(width=width, force_terminal=True, theme=THEME), width)


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def laid_out(source: str, width: int = 40) -> list[str]:
    return plain(flow(width).whole(source))


@given(st.lists(BLOCK, min_size=1, max_size=4).map("\n\n".join), st.sampled_from([20, 40, 80]))
def test_text_that_arrives_in_pieces_is_laid_out_as_a_whole_one(source: str, width: int):
    """Fed character by character, the lines are those of the whole text, and no line changes once it was returned."""
    letters = flow(width)
    lines: list[Text] = []
    for letter in source:
        lines += letters.feed(letter)
        assert all(cell_len(line.plain) <= width for line in letters.tail)
    lines += letters.end()
    assert plain(lines) == laid_out(source, width)
    assert all(cell_len(line.plain) <= width for line in lines)


@given(ANYTHING)
def test_whatever_is_written_nothing_controls_the_terminal(pieces: list[str]):
    """No piece of text, encoded or not, puts an invisible character on the screen or a line past its edge."""
    pieced = flow(30)
    lines = [line for piece in pieces for line in (*pieced.feed(piece), *pieced.tail)]
    for line in (*lines, *pieced.end()):
        assert cell_len(line.plain) <= 30
        assert not any(each < " " or each in "\x7f\x9b\u202e\u200b" for each in line.plain), line.plain
        assert not any("link" in str(span.style) for span in line.spans)


def test_a_page_of_markdown():
    """Headings, lists, code, quotations and tables are laid out, with a blank line between blocks, and marks are not shown."""
    source = """# Result
Some **bold** and `code`
on two lines.

1. first
1. the second item, which has to be wrapped
   - inner
1. third

```py
def f():

    return "a long line that has to be wrapped"
```
> said
"""
    assert laid_out(source) == [
        "Result", "", "Some bold and code", "on two lines.", "",
        " 1. first", " 2. the second item, which has to be", "    wrapped", "    • inner", " 3. third", "",
        "def f():", "", '    return "a long line that has to be w', "    rapped\"", "",
        "▌ said",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("[my bank](http://evil.example/x)", "my bank (http://evil.example/x)"),
        ("[http://bank.example](http://evil.example)", "http://bank.example (http://evil.example)"),
        ("<http://a.example>", "http://a.example"),
        ("![a cat](http://a.example/c.png)", "[a cat] (http://a.example/c.png)"),
        ("\x1b]8;;http://evil.example\x07text\x1b]8;;\x07", r"\x1b]8;;http://evil.example\x07text\x1b]8;;\x07"),
        ("<http://a/%1b%5b2J>", r"http://a/\x1b[2J (http://a/%1b%5b2J)"),
        ("a&#x202e;b", r"a\u202eb"),
        ("<b>x</b> List<int>", "<b>x</b> List<int>"),
        ("[1]: http://a.example", "[1]: http://a.example"),
        ('{"a": "**x**"}', '{"a": "**x**"}'),
        ("```a b c\nx\n```", "a b c x"),
    ],
)  # fmt: skip
def test_nothing_is_hidden(source: str, shown: str):
    """Addresses stand beside their texts, and what Markdown would drop is shown as it was written."""
    assert " ".join(laid_out(source, 80)) == shown


def test_a_table_that_does_not_fit_loses_no_text():
    """Long words are folded. With too many columns for the width, each row is a list of its cells."""
    narrow = "".join(laid_out("| a | b |\n|-|-|\n| incomprehensibilities | x |\n", 20))
    assert "incomprehensibilities"[:10] in narrow
    assert sorted(narrow.replace("─", "").replace(" ", "")) == sorted("abincomprehensibilitiesx")
    columns = "|".join("abcdefgh")
    assert laid_out(f"{columns}\n{'-|' * 8}\n{'1|' * 8}\n", 20)[:8] == [f"{each}: 1" for each in "abcdefgh"]


def test_marks_that_are_still_open_are_not_shown():
    """While emphasis is being written, its marks are hidden, and the line stays open until it is closed."""
    bold = flow()
    assert bold.feed("It is **very important to know") == []
    assert plain(bold.tail) == ["It is very important to know"]
    assert bold.feed(" what the rest of it") == []
    assert plain(bold.tail) == ["It is very important to know what the", "rest of it"]
    assert plain(bold.feed("** says")) == ["It is very important to know what the"]


def test_a_long_block_is_not_laid_out_again_and_again():
    """What is laid out with each piece is bounded, also for a text without a line break."""
    endless = flow()
    lines = [line for _ in range(400) for line in endless.feed("snake_case text ")]
    assert sum(len(line) for line in endless.tail) < 5000
    words = " ".join(plain([*lines, *endless.end()])).split()
    assert words == ["snake_case", "text"] * 400


def test_a_long_text_in_one_piece_is_divided(monkeypatch: pytest.MonkeyPatch):
    """What is parsed for a text grows with its length, not with its square, however much of it arrives at once."""
    parsed: list[str] = []
    parse = markdown._PARSER.parse
    monkeypatch.setattr(markdown._PARSER, "parse", lambda text: parsed.append(text) or parse(text))
    assert len(laid_out("- item\n" * 600)) == 600
    assert sum(map(len, parsed)) < 100 * 600 * len("- item\n")


def test_a_long_table_has_its_head_again():
    """A table that is too long to be laid out at once goes on below as a table."""
    rows = [f"| {number} | some words |" for number in range(300)]
    lines = laid_out("\n".join(["| n | text |", "|-|-|", *rows]))
    assert [line.split()[0] for line in lines if line.endswith("some words")] == [
        str(each) for each in range(300)
    ]
    assert not any("|" in line for line in lines)


APP = """from handrail import Agent, ScriptedModel
from handrail.models.scripted import Reply
agent = Agent(ScriptedModel([TEXT]), "x")
"""


@pytest.mark.once
@pytest.mark.parametrize(("columns", "colour"), [(80, {}), (40, {}), (40, {"NO_COLOR": "1"})])
def test_an_answer_on_a_terminal_and_in_a_pipe(tmp_path: Path, columns: int, colour: dict[str, str]):
    """On a terminal, Markdown is laid out, without a background, which could not be read on all terminals. A pipe gets the text itself."""
    text = "# Plan\n\nRead **this** and [that](http://a.example):\n\n1. `one`\n2. two\n"
    (tmp_path / "app.py").write_text(APP.replace("TEXT", repr(text)))
    with window(columns, 20) as seen:
        seen.start(
            [*HANDRAIL, "run", "app.py", "go", "--no-journal"], env=environment(**colour), cwd=tmp_path
        )
        seen.wait_for("1 request")
        assert seen.end() == 0
        assert "Plan\n\nRead this and that (http://a.example):\n\n 1. one\n 2. two\n" in seen.text()
        assert seen.line_colours("one") == ({"default"} if colour else {"cyan"})
        assert b"\x1b[4" not in seen.raw.replace(b"\x1b[4m", b"")
        assert b"]8;" not in seen.raw
    piped = handrail("run", "app.py", "go", "--no-journal", cwd=tmp_path, env=environment(**colour))
    assert piped.stdout == text
