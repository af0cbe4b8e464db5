"""Worker files: all problems are reported at once, with file, line and hint, and the work of a template is bounded."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import nodes
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.tests import TESTS as DEFAULT_TESTS

from handrail import MemoryFilesystem, ScriptedModel, ToolCall
from handrail.errors import WorkerError
from handrail.workers import WORKER_SCHEMA, WorkerRegistry
from handrail.workers.front_matter import Finder, FrontMatter, parse_file, schema_text
from handrail.workers.instructions import ALLOWED, FILTERS, MOST_OUTPUT, TESTS, Instructions
from handrail.workers.output_schema import output_type
from support.examples import at_most
from support.worker_folders import PLAIN, folder, sound


def test_the_shipped_schema_is_that_of_the_model() -> None:
    """worker.schema.json is the schema generated from the types, and `WORKER_SCHEMA` is its path."""
    assert WORKER_SCHEMA.read_text() == schema_text(), (
        "worker.schema.json is out of date. Write it again with: .venv/bin/python -c "
        '"from handrail.workers.front_matter import *; SCHEMA_FILE.write_text(schema_text())"'
    )
    schema = json.loads(schema_text())
    assert set(schema["properties"]) == set(FrontMatter.model_fields)
    assert schema["additionalProperties"] is False


WRONG: list[tuple[str, str, list[tuple[int, str]]]] = [
    ("no front matter", "Just text.", [(1, "no front matter")]),
    ("no end", "---\nname: x\n", [(1, "is not closed")]),
    ("unknown key", "---\nmodel: openai:b\ntool: [x]\n---\nGo.", [(3, "did you mean tools")]),
    ("wrong type", "---\nlocked: 3\nlimits:\n  requests: many\n---\nGo.", [(2, "locked"), (4, "limits.requests")]),
    ("negative", "---\nlimits: {requests: -1}\n---\nGo.", [(2, "limits.requests")]),
    ("bad yaml", "---\nname: [x\n---\nGo.", [(2, "not YAML")]),
    ("bad yaml in the middle", "---\nname: x\ndescription: a: b\n---\nGo.", [(3, "not YAML")]),
    ("twice", "---\nname: a\nlocked: true\nname: b\n---\nGo.", [(4, "`name` is given twice, first in line 2")]),
    ("alias", "---\ntools: &a [x]\nworkers: *a\n---\nGo.", [(2, "anchor or alias")]),
    ("tag", "---\nname: !!python/object/apply:os.system [true]\n---\nGo.", [(2, "the tag")]),
    ("merge", "---\n<<: {name: x}\n---\nGo.", [(2, "not a plain word")]),
    ("deep", f"---\noutput: {'[' * 30}{']' * 30}\n---\nGo.", [(2, "nested more than")]),
    ("a list", "---\n- a\n---\nGo.", [(1, "object")]),
    ("infinite", "---\nlimits: {money: .inf}\n---\nGo.", [(2, "not a finite number")]),
    ("half a character", '---\ndescription: "\\ud83d"\n"\\ud83d": 1\n---\nGo.', [(2, "half a character"), (3, "half a character")]),
    ("bad name", "---\nname: Main Worker\n---\nGo.", [(2, "'main_worker'")]),
    ("reserved name", "---\nname: create_worker\n---\nGo.", [(2, "the name of a built-in tool")]),
    ("no instructions", "---\n---\n\n", [(3, "no instructions")]),
    ("missing function", "---\ntools:\n  - files\n  - helo\n---\nGo.", [(4, "Did you mean 'hello'")]),
    ("imported function", "---\ntools: [dumps]\n---\nGo.", [(2, "no function 'dumps'")]),
    ("private function", "---\ntools: [_hidden]\n---\nGo.", [(2, "no function '_hidden'")]),
    ("listed twice", "---\ntools: [hello, hello]\n---\nGo.", [(2, "listed twice")]),
    ("missing worker", "---\nworkers: [maim]\n---\nGo.", [(2, "Did you mean 'main'")]),
    ("shell", "---\ntools: [shell: [[sh, -c, '...']]]\n---\nGo.", [(2, "rule")]),
    ("policy", "---\npolicies: [capabilty]\n---\nGo.", [(2, "policies[0]")]),
    ("capability word", "---\npolicies: [capability: {allow: [FS.Write]}]\n---\nGo.", [(2, "fs.write")]),
    ("an effect as a capability", "---\npolicies:\n  - capability:\n      ask: [net]\n      allow: [irreversible]\n---\nGo.", [(5, "'irreversible' is an effect")]),
    ("two verdicts", "---\npolicies: [capability: {allow: [net], ask: [net]}]\n---\nGo.", [(2, "'net' is listed twice")]),
    ("two in one", "---\npolicies: [{capability: {}, sequential: {}}]\n---\nGo.", [(2, "exactly one")]),
    ("output word", "---\noutput:\n  type: object\n  properties:\n    a: {$ref: '#/b'}\n---\nGo.", [(5, "`$ref` is not supported")]),
    ("output word of a root object", "---\noutput: {type: object, properties: {a: {type: string}}, minProperties: 1}\n---\nGo.", [(2, "`minProperties` is not supported")]),
    ("output bound of another type", "---\noutput: {type: integer, minLength: 3}\n---\nGo.", [(2, "`minLength` would not be checked with this type")]),
    ("output bound beside an enum", "---\noutput: {enum: [a, b], pattern: a}\n---\nGo.", [(2, "`pattern` would not be checked beside `enum`")]),
    ("output type beside a union", "---\noutput: {type: string, anyOf: [{type: string}]}\n---\nGo.", [(2, "`type` would not be checked beside `anyOf`")]),
    ("output bound without a type", "---\noutput: {minimum: 3}\n---\nGo.", [(2, "`minimum` would not be checked without a type")]),
    ("output required without fields", "---\noutput: {type: object, required: [a]}\n---\nGo.", [(2, "its fields are not named")]),
    ("output without fields", "---\noutput: {type: object, additionalProperties: false}\n---\nGo.", [(2, "its fields are not named")]),
    ("output type", "---\noutput: {type: text}\n---\nGo.", [(2, "no type 'text'")]),
    ("output required", "---\noutput:\n  type: object\n  properties: {a: {type: string}}\n  required: [b]\n---\nGo.", [(5, "'b' is required")]),
    ("template name", "---\n---\nHello\n{{ inputt }}\n{{ user }}", [(4, "'inputt'"), (5, "'user'")]),
    ("template syntax", "---\n---\nHello\n{% if %}", [(4, "can't be read")]),
    ("template call", "---\n---\n{{ input.upper() }}", [(3, "calls a function")]),
    ("template set", "---\n---\n{% set a = input %}", [(3, "'Assign'")]),
    ("template filter", "---\n---\n{{ input|replace('', input) }}", [(3, "the filter 'replace'")]),
    ("template maths", "---\n---\n{{ 'x' * 1000000000 }}", [(3, "'Mul'")]),
    ("template range in", "---\n---\n{{ 'a' in range(999999999999) }}", [(3, "calls a function")]),
    ("template range is in", "---\n---\n{{ 'a' is in range(999999999999) }}", [(3, "calls a function")]),
    ("template range value", "---\n---\n{{ range(999999999999)|tojson }}", [(3, "calls a function")]),
    ("template range star", "---\n---\n{% for a in range(*attachments) %}{% endfor %}", [(3, "calls a function")]),
    ("template power", "---\n---\n{{ 10 ** 10 ** 10 }}", [(3, "'Pow'")]),
    ("template list times", "---\n---\n{{ [0] * 10000000000 }}", [(3, "'Mul'")]),
    ("template width", "---\n---\n{{ '%9999999999d' % 1 }}", [(3, "'Mod'")]),
    ("template concatenation", "---\n---\n{{ input ~ input }}", [(3, "'Concat'")]),
    ("template macro", "---\n---\n{% macro m() %}{{ m() }}{% endmacro %}", [(3, "'Macro'")]),
    ("template recursion", "---\n---\n{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", [(3, "nested more than"), (3, "calls a function")]),
    ("template number", "---\n---\n{{ " + "9" * 5000 + " }}", [(3, "can't be read")]),
    ("template size", "---\n---\n{{ [" + "1," * 6000 + "] }}", [(3, "more than 10000 words")]),
    ("template loop", "---\n---\n{% for a in input %}{% endfor %}", [(3, "may be large")]),
    ("template shadow", "---\n---\n{% for attachments in ['a'] %}{% for b in attachments %}{% endfor %}{% endfor %}", [(3, "'attachments'")]),
    ("template list", "---\n---\n{% for a in [[1, 2], [input]] %}{{ a }}{% endfor %}", [(3, "other than constants")]),
    ("template meter", "---\n---\n{{ input|handrail_within }}", [(3, "the filter 'handrail_within'")]),
    ("template include", "---\n---\n{% include '/etc/passwd' %}", [(3, "'Include'")]),
    ("all at once", "---\nmodel: gpt\ntools: [nothing]\nworkers: [nobody]\n---\n{{ oops }}", [(2, "provider:name"), (3, "'nothing'"), (4, "'nobody'"), (6, "'oops'")]),
]  # fmt: skip

TOOLS = '''
from json import dumps

def hello(name: str) -> str:
    """Greet."""
    return f"Hello, {name}"

def _hidden() -> None:
    """Hidden."""
'''


@pytest.mark.parametrize(("text", "wanted"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_problems_are_reported_with_file_line_and_fix(
    tmp_path: Path, text: str, wanted: list[tuple[int, str]]
) -> None:
    """Each problem is reported at its line with a hint, and only the worker in that file is unavailable."""
    registry = folder(tmp_path, TOOLS, wrong=text, main=PLAIN)
    found = registry.check()
    assert [problem.line for problem in found] == [line for line, _ in wanted]
    for problem, (_, said) in zip(found, wanted, strict=True):
        assert said in str(problem)
        assert problem.file == str(tmp_path / "wrong.md")
        assert problem.hint
    assert registry["main"].name == "main"
    bad = "create_worker" if "create_worker" in text else "Main Worker" if "Main Worker" in text else "wrong"
    if "name: x" not in text:
        with pytest.raises(WorkerError) as raised:
            registry[bad]
        assert list(raised.value.problems) == found
    assert "wrong" not in registry.workers


def test_names_that_collide_are_refused_with_both_files(tmp_path: Path) -> None:
    """If two workers, or a worker and a function, have the same name, each worker's problem says where the other is."""
    registry = folder(
        tmp_path, TOOLS, one="---\nname: same\n---\nGo.", two="---\nname: same\n---\nGo.", hello=PLAIN
    )
    said = [str(problem) for problem in registry.check()]
    assert len(said) == 3
    assert "hello.md:1" in said[0]
    assert f"{tmp_path / 'tools.py'}:4 also defines a function 'hello'" in said[0]
    assert "one.md:2" in said[1]
    assert f"{tmp_path / 'two.md'} is also a worker named 'same'" in said[1]
    assert str(tmp_path / "one.md") in said[2]
    for name in ("same", "hello"):
        with pytest.raises(WorkerError):
            registry[name]


@pytest.mark.parametrize(
    ("tools", "line", "said"),
    [
        ("x = 1\ndef hello(:\n", 2, "not Python"),
        ("x = 1\n\n1 / 0\n", 3, "ZeroDivisionError"),
        ("raise SystemExit(3)\n", 1, "SystemExit"),
        ("\ndef hello(name) -> str:\n    'Greet.'\n", 2, "no annotation"),
        ("def hello() -> str:\n    return ''\n", 1, "no docstring"),
    ],
)
def test_errors_in_tools_py_name_the_file_and_the_line(
    tmp_path: Path, tools: str, line: int, said: str
) -> None:
    """Errors in loading tools.py, or in turning a listed function into a tool, are reported with file and line."""
    registry = folder(tmp_path, tools, main="---\ntools: [hello]\n---\nGo.", plain=PLAIN)
    (problem,) = registry.check()
    assert (problem.file, problem.line) == (str(tmp_path / "tools.py"), line)
    assert said in problem.problem
    with pytest.raises(WorkerError):
        registry["main"]
    assert registry["plain"].tools == ()


async def test_tools_py_is_loaded_once_and_is_a_module_of_its_own(tmp_path: Path) -> None:
    """tools.py is loaded once, under a unique module name, so two folders stay separate and its classes are found."""
    text = '''
    from __future__ import annotations
    from dataclasses import dataclass
    from handrail import ToolContext, ToolResult, Tool, tool

    LOADED = []
    LOADED.append(1)

    @dataclass
    class Order:
        item: str

    @tool(name="buy", effect="pure")
    def order(order: Order) -> str:
        """Order."""
        return f"{order.item} {len(LOADED)}"

    async def count(params: Order, *, context: ToolContext) -> ToolResult[int]:
        return ToolResult.ok(len(params.item))

    counting = Tool("counting", "Count.", count, effect="pure")
    '''
    for place in ("one", "two"):
        registry = sound(
            tmp_path / place,
            text,
            main="---\ntools: [buy, counting]\n---\nGo.",
            other="---\ntools: [buy]\n---\nGo.",
        )
        assert registry["main"].tools == ("buy", "counting")
        script = ScriptedModel(
            [[ToolCall("buy", {"order": {"item": "tea"}}), ToolCall("counting", {"item": "tea"})], "end"]
        )
        await registry.run("main", "go", model=script)
        assert script.requests[1].messages[-1].text == "tea 1\n3"
    assert sum(name.startswith("handrail_worker_tools_") for name in sys.modules) >= 2


def test_which_files_are_workers(tmp_path: Path) -> None:
    """Hidden files, folders and a README without front matter are not workers. A README with front matter is one."""
    (tmp_path / "folder.md").mkdir(parents=True)
    (tmp_path / ".hidden.md").write_text(PLAIN)
    (tmp_path / "README.md").write_text("# Read me\n")
    (tmp_path / "notes.txt").write_text(PLAIN)
    assert sound(tmp_path, main=PLAIN).names == ("main",)
    (tmp_path / "README.md").write_text("---\nname: readme\n---\nGo.")
    assert sound(tmp_path).names == ("readme", "main")


def test_bytes_that_are_no_text_and_files_too_large(tmp_path: Path) -> None:
    """A file that is not UTF-8 or is too large is reported, and its name stays reserved. Windows line endings are accepted."""
    (tmp_path / "bad.md").write_bytes(b"---\n---\n\xff")
    (tmp_path / "big.md").write_bytes(b"---\n---\n" + b"x" * 300_000)
    (tmp_path / "windows.md").write_bytes("\ufeff---\r\nlocked: true\r\n---\r\nHello\r\nyou".encode())
    registry = folder(tmp_path)
    assert [(p.line, p.problem) for p in registry.check()] == [
        (3, "it is not UTF-8"),
        (1, "it has more than 262144 bytes"),
    ]
    assert (registry["windows"].locked, registry["windows"].instructions) == (True, "Hello\nyou")
    assert registry.locked == {"bad", "big", "windows"}


async def test_files_and_shell_as_built_in_tools(tmp_path: Path) -> None:
    """`files` has a read-before-write policy unless `policies: []` removes it, `files.read` can't write, and `shell` adds `run_command`."""
    registry = sound(
        tmp_path, full="---\ntools: [files, shell: [[ls, '...']]]\n---\nGo.", reads="---\ntools: [files.read]\n---\nGo.",
        bare="---\ntools: [files]\npolicies: []\n---\nGo.",
    )  # fmt: skip
    assert {"read_file", "write_file", "run_command"} <= set(registry["full"].tools)
    assert "write_file" not in registry["reads"].tools
    for name, status in (("full", True), ("bare", False)):
        files = MemoryFilesystem()
        files.write("a.txt", "old")
        script = ScriptedModel([ToolCall("write_file", {"path": "a.txt", "text": "new"}), "end"])
        await registry.run(name, "go", model=script, filesystem=files)
        assert ("Read it first" in script.requests[1].messages[-1].text) is status
        assert files.read("a.txt") == ("old" if status else "new")


# --- templates ----------------------------------------------------------------------------------


def rendered(text: str, **values: Any) -> str:
    template = Instructions(text, "x.md", 5)
    find = Finder("x.md")
    template.check(find)
    assert find.problems == []
    return template.render({"input": "in", "attachments": (), "worker": "main", **values})


def test_templates_say_what_they_are_given() -> None:
    """Templates may use values, conditions, loops and filters, and inserted text is never treated as a template."""
    assert rendered("{{ worker }}: {{ input|upper }}") == "main: IN"
    assert rendered("{{ input }}", input="{{ 7 * 7 }} $x") == "{{ 7 * 7 }} $x"
    text = "{% for a in attachments %}{{ loop.index }}. {{ a }}\n{% else %}none{% endfor %}"
    assert rendered(text) == "none"
    assert rendered(text, attachments=("a", "b")) == "1. a\n2. b\n"
    assert rendered("{% if input == 'in' and not attachments %}yes{% endif %}") == "yes"
    assert (
        rendered("{% for a, b in [('x', 1), ('y', -2)] %}{{ loop.length }}{{ a }}{{ b }}{% endfor %}")
        == "2x12y-2"
    )
    assert rendered("{% if 'i' in input and 'z' not in input and 'n' is in input %}yes{% endif %}") == "yes"
    assert rendered("{{ [1, 'b']|join('-') }} {{ ' a b '|trim|title }} {{ [3, 4]|last }}") == "1-b A B 4"
    assert rendered("{{ attachments|join(', ') }} {{ input|truncate(1) }} {{ input|tojson }}") == ' i… "in"'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb {{ input.nothing }}", "x.md:6: the template fails: 'str object' has no attribute 'nothing'"),
        ("{{ input.__class__ }}", "unsafe"),
        (
            "{% for a in range(200) %}{% for b in range(200) %}{% endfor %}{% endfor %}",
            "more than 10000 iterations",
        ),
        ("{% for a in range(9000) %}{{ input }}{% endfor %}", "more than 200000 characters"),
        ("{{ input|join }}", "takes a list"),
        (
            f"{{% for a in [{'1,' * 120}] %}}{{% for b in [{'1,' * 120}] %}}{{% endfor %}}{{% endfor %}}x",
            "more than 10000 iterations",
        ),
        ("{% for a in range(9000) %}{% if input|upper|lower == 'x' %}{% endif %}{% endfor %}x", "characters"),
        ("{% for a in range(9000) %}{% if 'y' in input %}{% endif %}{% endfor %}x", "processes more than"),
        (
            "{% for a in range(9000) %}{% if 'y' is in input %}{% endif %}{% endfor %}x",
            "processes more than",
        ),
        (f"{{{{ [{'1,' * 4000}]|join(input)|length }}}}", "processes more than"),
        ("{% for a in range(9000) if input|truncate(1) == 'x' %}{% endfor %}x", "processes more than"),
        (
            f"{{% for a in range(9000) if 'x' in [{'1,' * 2000}] %}}{{% endfor %}}x",
            "processes more than",
        ),
        ("{% for a in range(99999999999999) %}{% if loop.length %}{% endif %}{% endfor %}x", "iterations"),
        ("{{ '%9999999999d' is odd }}", "need a whole number"),
        ("{{ '%9999999999d' is even }}", "need a whole number"),
        ("{{ 1 in 3 }}", "needs text or a list"),
        (
            f"{{% for a in range(9000) %}}{'{% if worker %}{% endif %}' * 900}{{% endfor %}}x",
            "processes more than",
        ),
    ],
)
def test_templates_fail_with_their_line_and_are_bounded(text: str, said: str) -> None:
    """A template that fails, or does too much work, raises an error that says why and names the file."""
    with pytest.raises(WorkerError) as raised:
        rendered(text, input="x" * 6000)
    assert said in str(raised.value)
    assert raised.value.problems[0].file == "x.md"


def test_only_listed_parts_of_the_template_language_are_taken() -> None:
    """Each filter or test that is not listed is refused, and no arithmetic operator is allowed."""
    for kind, names in (("filter", DEFAULT_FILTERS), ("test", DEFAULT_TESTS)):
        taken = FILTERS if kind == "filter" else TESTS
        for name in set(names) - taken:
            find = Finder("x.md")
            sign = "|" if kind == "filter" else " is "
            Instructions(f"{{{{ input{sign}{name} }}}}", "x.md", 1).check(find)
            assert len(find.problems) == 1, name
    calculating = {each.__name__ for each in nodes.BinExpr.__subclasses__()} - {"And", "Or"}
    assert calculating >= {"Add", "Mul", "Pow", "Mod"}
    assert not calculating & ALLOWED


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_every_filter_is_metered_or_takes_one_step(name: str) -> None:
    """In a loop, every filter counts the text that it processes, takes constant time, or refuses text."""
    text = f"{{% for a in range(9000) %}}{{% if input|{name} is none %}}{{% endif %}}{{% endfor %}}x"
    if name in ("length", "count", "first", "last", "default"):
        assert rendered(text, input="x" * 6000) == "x"
    else:
        with pytest.raises(WorkerError, match=r"processes more than|takes a list"):
            rendered(text, input="x" * 6000)


PIECES = st.sampled_from(
    ["{{", "}}", "{%", "%}", " input ", "worker", "attachments", "|upper", "|join", "for x in ", "range(3)", "endfor",
     "if ", "endif", "else", " a ", "\n", "set y=", ".x", "[0]", "''", "__class__", "~", "*9", "(", ")", "macro m()", "{#", "#}"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=14).map("".join))
@settings(max_examples=at_most(300), deadline=None)
def test_any_template_is_rendered_or_refused_in_words(text: str) -> None:
    """Any text used as a template gives a bounded result, problems or a `WorkerError`, and never another error."""
    template = Instructions(text, "x.md", 1)
    find = Finder("x.md")
    template.check(find)
    if not find.problems:
        with contextlib.suppress(WorkerError):  # the error names the line, as the table above shows
            assert len(template.render({"input": "i", "attachments": ("a",), "worker": "w"})) <= MOST_OUTPUT


YAML = st.sampled_from(
    ["name", "tools", "limits", "output", ": ", ":\n  ", "\n", "- ", "[", "]", "{", "}", "&a ", "*a", "!!str ", "'", '"',
     "#", "requests", "1", "-1", "1e999", "true", "null", "2020-13-45", "? ", "|", ">", "---", "%", "\t", "é", "0x", "_"]
)  # fmt: skip


@given(st.lists(YAML, max_size=16).map("".join))
@settings(max_examples=at_most(400), deadline=None)
def test_any_front_matter_is_taken_or_refused_in_words(front: str) -> None:
    """Any text used as front matter is parsed or gives problems with valid line numbers. Parsing never raises."""
    find = Finder("x.md")
    taken = parse_file(f"---\n{front}\n---\nGo.", find)
    assert find.problems or taken is not None
    assert not find.problems or taken is None or taken.front.locked
    assert all(1 <= problem.line <= front.count("\n") + 3 for problem in find.problems)


# --- output schemas -----------------------------------------------------------------------------

LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "boolean"},
        {"enum": ["a", 1]},
        {"type": ["string", "null"]},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map(lambda each: {"type": "array", "items": each}),
        st.dictionaries(
            st.sampled_from(["a", "model_x", "schema", "a b", "ünï", "class"]), inner, min_size=1, max_size=3
        ).map(lambda fields: {"type": "object", "properties": fields, "required": list(fields)}),
    ),
    max_leaves=6,
)


def fitting(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema["type"]
    if kind == "object":
        return {name: fitting(each) for name, each in schema["properties"].items()}
    if kind == "array":
        return [fitting(schema["items"])]
    return {"string": "x", "integer": 3, "boolean": True}.get(str(kind))


def broken(schema: dict[str, Any], value: Any) -> Any:
    """Return a copy of the value in which the first innermost part is invalid."""
    if schema.get("type") == "object":
        name = next(iter(value))
        return {**value, name: broken(schema["properties"][name], value[name])}
    if schema.get("type") == "array":
        return [broken(schema["items"], value[0])]
    return {"not": "this"}


@given(SCHEMAS)
@settings(max_examples=at_most(150), deadline=None)
def test_an_output_schema_takes_what_fits_and_nothing_else(schema: dict[str, Any]) -> None:
    """A valid value is returned unchanged. With an invalid part or an extra field, it is refused."""
    from handrail.errors import ToolValidationError
    from handrail.schema import Schema

    kind = output_type(schema, lambda *problem: pytest.fail(str(problem)))
    taking: Schema[Any] = Schema(kind)
    value = fitting(schema)
    whole = schema.get("type") == "object"
    assert taking.parse_value(value if whole else {"value": value}) == value
    bad = broken(schema, value)
    with pytest.raises(ToolValidationError):
        taking.parse_value(bad if whole else {"value": bad})
    with pytest.raises(ToolValidationError):
        taking.parse_value({**(value if whole else {"value": value}), "one more": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 2.5},
        {"type": "string", "minLength": True},
        {"type": "array", "items": {"type": "string"}, "maxItems": "2"},
        {"type": "integer", "minimum": "x"},
        {"type": "string", "pattern": "(?=a)"},
    ],
)
def test_a_malformed_bound_of_an_output_schema_is_a_problem(schema: dict[str, Any]) -> None:
    """A bound or a pattern that can't be used is reported like any other problem. A count may be written as 2.0."""
    found: list[tuple[str, str, str]] = []
    assert output_type(schema, lambda *problem: found.append(problem)) is None
    assert [where.partition(".")[0] for where, _, _ in found] == ["output"]
    kind = output_type({"type": "string", "maxLength": 2.0}, lambda *problem: pytest.fail(str(problem)))
    assert kind is not None
    assert kind.model_json_schema()["properties"]["value"]["maxLength"] == 2


def test_without_the_extra_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    """Without jinja2 and yaml, `WorkerRegistry` can be imported, and using it says what to install."""
    (tmp_path / "main.md").write_text(PLAIN)
    program = (
        "import sys; sys.modules['yaml'] = sys.modules['jinja2'] = None\n"
        "from handrail import WorkerRegistry\nfrom handrail.errors import WorkerError\n"
        f"try: WorkerRegistry({str(tmp_path)!r})['main']\n"
        "except WorkerError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert (run.stderr, run.returncode) == ("", 0)
    assert "pip install 'handrail[workers]'" in run.stdout


def test_a_check_reports_every_mistake_at_once(tmp_path: Path) -> None:
    """Invalid settings do not hide unknown models, tools and workers, or errors in the template."""
    (tmp_path / "main.md").write_text(
        "---\nmodel: opnai:gpt\nlimts: {requests: 3}\npolicies:\n  - capabilty\ntools: [nope]\nworkers: [nobody]\n---\n{{ x\n"
    )
    found = WorkerRegistry(tmp_path).check()
    assert [each.line for each in found] == [2, 3, 5, 6, 7, 9]
    assert WorkerRegistry.check_file(tmp_path / "main.md") == found
    said = "\n".join(map(str, found))
    assert "Did you mean openai:gpt?" in said
    assert "Policies are capability, rate_limit, read_before_write, sequential." in said


def test_an_unknown_provider_is_only_reported_by_a_check(tmp_path: Path) -> None:
    """A check reports a model of an unknown provider, but the worker can still be loaded."""
    (tmp_path / "main.md").write_text("---\nmodel: opnai:gpt\n---\nGo.\n")
    registry = WorkerRegistry(tmp_path)
    assert [each.line for each in registry.check()] == [2]
    assert registry["main"].model == "opnai:gpt"


def test_a_file_with_an_invalid_setting_keeps_its_name(tmp_path: Path) -> None:
    """The name of a worker with invalid settings stays reserved, because the file may have been meant to be locked."""
    (tmp_path / "main.md").write_text("---\nlocked: maybe\n---\nGo.\n")
    assert WorkerRegistry(tmp_path).locked == {"main"}
