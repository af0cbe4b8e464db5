"""Overrides: texts in files, which apply only to the original texts they were written for."""

import dataclasses
import logging
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import MarkdownSection, Prompt, Tool, ToolContext, ToolExample, ToolResult, tool
from handrail.errors import FileInTheWay, PromptDefinitionError
from handrail.prompt.overrides import (
    OverrideReport,
    Overrides,
    originals,
    stale_overrides,
    text_digest,
    toml_key,
    toml_string,
)


@dataclass
class Trip:
    city: str
    days: int = 2


@dataclass
class Spot:
    name: str
    rain: float | None = None


@tool(examples=[ToolExample("Rome in may", {"city": "Rome"}, Spot("Rome", None))])
def weather(city: str) -> Spot:
    """Tell the weather."""
    return Spot(city)


@tool(accepts_overrides=False)
def pay(amount: int) -> None:
    """Pay."""


BODY = "Plan $days days in $city."
SUMMARY = "How to plan for $city."


def trip(folder: Path | None, body: str = BODY, **changed: Any) -> Prompt[None]:
    """Return a prompt with one of everything that can be overridden, and with parts that can't be."""
    inner = MarkdownSection[Trip](
        "Plan", "plan", body, tools=[weather, pay], summary=SUMMARY, visibility="summary"
    )
    rules = MarkdownSection("Rules", "rules", "Never pay twice.", accepts_overrides=False)
    sections = [MarkdownSection("Task", "task", "Do it well.", children=[inner]), rules]
    overrides = None if folder is None else Overrides(folder)
    return Prompt("trip", sections, overrides=overrides, **changed)


def write(folder: Path, text: str) -> Path:
    file = folder / "trip.toml"
    file.write_text(text, encoding="utf-8")
    return file


def body_override(text: str, replaces: str = text_digest(BODY)) -> str:
    return f'[sections."task.plan".body]\nreplaces = "{replaces}"\ntext = {toml_string(text)}\n'


def examples_override(given: str = '{"city": "Oslo"}', output: str = '{"name": "Oslo"}') -> str:
    [replaces] = {
        one.replaces for one in originals(trip(None)) if (one.kind, one.path) == ("examples", "weather")
    }
    return (
        f'[tools.weather.examples]\nreplaces = "{replaces}"\n[[tools.weather.examples.example]]\n'
        f"description = \"Dry\"\ninput = '{given}'\noutput = '{output}'\n"
    )


def opened(prompt: Prompt[None]) -> str:
    return prompt.render(Trip("Rome"), opened=["task.plan"]).text


# --- overrides that apply ------------------------------------------------------------------------


def test_each_kind_of_words_is_replaced(tmp_path: Path):
    """A body, a summary, a description and examples are each replaced if the override has the hash of the original."""
    write(
        tmp_path,
        body_override("In $city: $days days!")
        + f'[sections."task.plan".summary]\nreplaces = "{text_digest(SUMMARY)}"\ntext = "Plans for $city."\n'
        + f'[tools.weather.description]\nreplaces = "{text_digest("Tell the weather.")}"\ntext = "Say how wet it is."\n'
        + examples_override(),
    )
    prompt = trip(tmp_path)
    assert "In Rome: 2 days!" in opened(prompt)
    assert "Plans for Rome." in prompt.render(Trip("Rome")).text
    tool = prompt.render(Trip("Rome"), opened=["task.plan"]).tools[0]
    assert (tool.name, tool.description) == ("weather", "Say how wet it is.")
    assert tool.handler is weather.handler
    assert weather.description == "Tell the weather."
    assert '- weather: Dry\n  input: {"city":"Oslo"}\n  output: {"name":"Oslo"}' in opened(prompt)
    assert "Rome in may" not in opened(prompt)
    assert Overrides(tmp_path).check(prompt) == (
        OverrideReport("task.plan", "body", "applied", ""),
        OverrideReport("task.plan", "summary", "applied", ""),
        OverrideReport("weather", "description", "applied", ""),
        OverrideReport("weather", "examples", "applied", ""),
    )


def test_the_tool_with_other_words_is_made_once(tmp_path: Path):
    """Every rendering has the same object for an overridden tool, and it parses arguments as before."""
    write(
        tmp_path,
        f'tools.weather.description = {{replaces = "{text_digest("Tell the weather.")}", text = "Wet?"}}',
    )
    prompt = trip(tmp_path)
    first = prompt.render(Trip("Rome"), opened=["task.plan"]).tools[0]
    assert prompt.render(Trip("Oslo"), opened=["task.plan"]).tools[0] is first
    assert first.parse('{"city": "Rome"}') == weather.parse('{"city": "Rome"}')
    assert prompt.sections[0].children[0].tools[0] is weather


def test_a_tool_whose_annotations_are_local_can_be_reworded(tmp_path: Path):
    """A tool with local types in its annotations can be overridden, because its handler is not inspected again."""

    def local() -> Tool[Any, Any]:
        @dataclass
        class Local:
            x: int

        def handler(params: "Local", *, context: ToolContext) -> "ToolResult[Local]":
            return ToolResult.ok(params)

        return Tool("local", "Old.", handler)

    (tmp_path / "p.toml").write_text(
        f'tools.local.description = {{replaces = "{text_digest("Old.")}", text = "New."}}'
    )
    [made] = Prompt("p", "Text.", tools=[local()], overrides=Overrides(tmp_path)).render().tools
    assert made.description == "New."


def test_the_text_of_a_plain_prompt_can_be_tuned(tmp_path: Path):
    """The text of a plain prompt can be overridden as the section `instructions`, and its tools can be too."""
    (tmp_path / "p.toml").write_text(
        f'sections.instructions.body = {{replaces = "{text_digest("Text.")}", text = "Better text."}}\n'
        f'tools.weather.description = {{replaces = "{text_digest("Tell the weather.")}", text = "Wet?"}}\n'
    )
    rendered = Prompt("p", "Text.", tools=[weather], overrides=Overrides(tmp_path)).render()
    assert rendered.text.startswith("Better text.\n\n## Examples")
    assert rendered.tools[0].description == "Wet?"


def test_without_a_file_nothing_changes(tmp_path: Path):
    """Nothing is overridden if the override file, or even its folder, is missing."""
    prompt = trip(tmp_path / "nowhere")
    assert opened(prompt) == opened(trip(None))
    assert (prompt.overrides is not None and prompt.overrides.check(prompt)) == ()
    assert stale_overrides(trip(None)) == ()


# --- overrides that do not apply -----------------------------------------------------------------


def test_a_stale_override_is_left_out_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """An override of an original that has changed is ignored with one warning, and the hint has the new hash."""
    write(tmp_path, body_override("Old tuning of $city $days.", text_digest("Some older text.")))
    with caplog.at_level(logging.WARNING, "handrail.prompt"):
        prompt = trip(tmp_path)
        assert "Plan 2 days in Rome." in opened(prompt)
        opened(prompt)
    hint = f'The text in the code has changed: compare both, then write replaces = "{text_digest(BODY)}".'
    report = OverrideReport("task.plan", "body", "stale", hint)
    assert stale_overrides(prompt) == Overrides(tmp_path).check(prompt) == (report,)
    assert [record.getMessage() for record in caplog.records] == [
        f"prompt 'trip': overrides in {tmp_path / 'trip.toml'} that are not applied: "
        f"body of 'task.plan' is stale. {hint}"
    ]


def test_the_hint_for_a_stale_override_makes_it_apply(tmp_path: Path):
    """A stale override applies once it is corrected as its hint says."""
    file = write(tmp_path, body_override("Tuned: $city $days.", "0" * 16))
    [report] = stale_overrides(trip(tmp_path))
    new = report.hint.split('"')[1]
    file.write_text(file.read_text().replace("0" * 16, new))
    assert "Tuned: Rome 2." in opened(trip(tmp_path))


LOCKED = "It has accepts_overrides=False: remove the override, or allow it there."
NO_SECTION = "There is no such section. There are 'rules', 'task', 'task.plan'."


@pytest.mark.parametrize(
    ("text", "report"),
    [
        (
            f'sections.rules.body = {{replaces = "{text_digest("Never pay twice.")}", text = "Pay."}}',
            OverrideReport("rules", "body", "refused", LOCKED),
        ),
        (
            f'tools.pay.description = {{replaces = "{text_digest("Pay.")}", text = "Pay often."}}',
            OverrideReport("pay", "description", "refused", LOCKED),
        ),
        (
            f'sections.plan.body = {{replaces = "{text_digest(BODY)}", text = "x"}}',
            OverrideReport("plan", "body", "unknown", NO_SECTION),
        ),
        (
            'sections.x.body = {replaces = "0", text = "x"}',
            OverrideReport("x", "body", "unknown", NO_SECTION),
        ),
        (
            'sections.task.summary = {replaces = "0", text = "x"}',
            OverrideReport("task", "summary", "unknown", "That section has no summary to replace."),
        ),
        (
            'tools.wether.description = {replaces = "0", text = "x"}',
            OverrideReport(
                "wether", "description", "unknown", "There is no such tool. There are 'pay', 'weather'."
            ),
        ),
    ],
    ids=["refused-section", "refused-tool", "unknown-section", "far-off", "no-summary", "unknown-tool"],
)
def test_what_can_not_be_applied_is_said(
    text: str, report: OverrideReport, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """An override that can't be applied is reported with its state and a hint, and the code's text is used."""
    write(tmp_path, text)
    prompt = trip(tmp_path)
    assert Overrides(tmp_path).check(prompt) == (report,)
    assert stale_overrides(prompt) == ()
    assert opened(prompt) == opened(trip(None))
    assert str(report) in caplog.text


def test_an_override_for_one_of_two_tools_of_a_name_reaches_that_one(tmp_path: Path):
    """If two tools have the same name, an override applies to the one whose text matches its hash."""

    def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok(None)

    one, two = Tool("go", "Go one way.", handler), Tool("go", "Go two ways.", handler)
    (tmp_path / "p.toml").write_text(
        f'tools.go.description = {{replaces = "{text_digest("Go two ways.")}", text = "Go both ways."}}'
    )
    first = [True]
    sections = [
        MarkdownSection("A", "a", "", tools=[one], enabled=lambda: first[0]),
        MarkdownSection("B", "b", "", tools=[two], enabled=lambda: not first[0]),
    ]
    prompt = Prompt("p", sections, overrides=Overrides(tmp_path))
    assert prompt.render().tools[0].description == "Go one way."
    first[0] = False
    assert prompt.render().tools[0].description == "Go both ways."


# --- wrong files ---------------------------------------------------------------------------------

REPLACES = f'replaces = "{text_digest(BODY)}"'
PLAN = f'[sections."task.plan".body]\n{REPLACES}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("= 3", "is not TOML: "),
        (
            'title = "Trip"',
            "it has the key 'title'. It can have 'sections', 'tools'. Names, types and structure stay",
        ),
        ("[section.a]", "it has the key 'section'. It can have 'sections', 'tools'."),
        ("sections = 3", "`sections` is 3. Make it a table."),
        ("[sections]\ntask = 3", "`sections.task` is 3. Make it a table."),
        (
            '[sections.task]\ntitle = "T"',
            "`sections.task` has the key 'title'. It can have 'body', 'summary'. "
            "Names, types and structure stay in the code.",
        ),
        ('[sections.task]\nbody = "T"', "`sections.task.body` is 'T'. Make it a table."),
        (
            '[tools.weather]\nname = "rain"',
            "`tools.weather` has the key 'name'. It can have 'description', 'examples'.",
        ),
        (PLAN, "`sections.task.plan.body` has no 'text'. Add it as a string."),
        (f"{PLAN}text = 3", "`sections.task.plan.body.text` is 3. Make it a string."),
        (
            f'{PLAN}texts = "a"',
            "`sections.task.plan.body` has the key 'texts'. It can have 'replaces', 'text'.",
        ),
        ('[tools.weather.description]\ntext = "a"', "`tools.weather.description` has no 'replaces'. Add it"),
        (
            '[tools.weather.examples]\nreplaces = "0"',
            "`tools.weather.examples` has no examples. Write each under [[tools.weather.examples.example]].",
        ),
        (
            examples_override("{city: 1}"),
            "`tools.weather.examples.example.input` is not JSON: ",
        ),
        (examples_override(output="NaN"), "`tools.weather.examples.example.output` is not JSON: "),
        (
            examples_override('{"town": "Oslo"}'),
            "tool 'weather': the input of examples[0] is invalid: city: required, and missing",
        ),
        (
            examples_override(output='{"name": 3}'),
            "tool 'weather': the output of examples[0] is invalid: name: must be text",
        ),
        (
            f'tools.weather.description = {{replaces = "{text_digest("Tell the weather.")}", text = " "}}',
            "tool 'weather': it has no description.",
        ),
        (
            body_override("$city $days $town"),
            "section 'task.plan': its template uses $town, and Trip has no field",
        ),
        (
            body_override("$city $days $5"),
            "section 'task.plan': '$5' in line 1 is not a placeholder of its template.",
        ),
        (
            f'[sections."task.plan".summary]\nreplaces = "{text_digest(SUMMARY)}"\ntext = " "',
            "section 'task.plan': the summary is empty.",
        ),
    ],
)
def test_a_wrong_file_is_refused_where_its_prompt_is_defined(text: str, message: str, tmp_path: Path):
    """An invalid override file is refused when its prompt is defined. The error has the path, the problem and a hint."""
    file = write(tmp_path, text)
    with pytest.raises(PromptDefinitionError) as caught:
        trip(tmp_path)
    assert str(caught.value).startswith(f"overrides {file}")
    assert message in str(caught.value)


def test_an_override_can_not_take_a_field_out_of_the_prompt(tmp_path: Path):
    """An override that drops a field is refused, because a param would silently be left out."""
    file = write(tmp_path, body_override("Plan something in $city."))
    with pytest.raises(PromptDefinitionError) as caught:
        trip(tmp_path)
    assert str(caught.value) == (
        f"prompt 'trip': with the overrides in {file} no section uses the field 'days'. "
        "Keep $days in one of the texts."
    )


def test_a_stale_override_is_not_held_to_today_s_fields(tmp_path: Path):
    """A stale override is ignored, and may use fields that the params don't have."""
    write(tmp_path, body_override("For $nobody.", "0" * 16))
    assert opened(trip(tmp_path)) == opened(trip(None))


@pytest.mark.parametrize("content", [b"\xff", None], ids=["not-utf-8", "a-folder"])
def test_a_file_that_can_not_be_read_is_named(content: bytes | None, tmp_path: Path):
    """An unreadable file is not treated as missing: the prompt is refused, and the error names the file."""
    file = tmp_path / "trip.toml"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(
        PromptDefinitionError,
        match=r"^overrides .*trip\.toml: can't be read: .* Make it a readable TOML file in UTF-8\.$",
    ):
        trip(tmp_path)


# --- starter files -------------------------------------------------------------------------------


def test_a_starter_changes_nothing_until_it_is_edited(tmp_path: Path):
    """A starter file has everything that can be overridden, and changes nothing until it is edited."""
    folder = tmp_path / "new" / "prompts"
    file = Overrides(folder).write_starter(trip(None))
    assert file == folder / "trip.toml"
    prompt = trip(folder)
    assert opened(prompt) == opened(trip(None))
    assert [(report.path, report.kind, report.state) for report in Overrides(folder).check(prompt)] == [
        ("task", "body", "applied"),
        ("task.plan", "body", "applied"),
        ("task.plan", "summary", "applied"),
        ("weather", "description", "applied"),
        ("weather", "examples", "applied"),
    ]
    file.write_text(file.read_text().replace("Do it well.", "Do it very well.").replace("Rome in may", "May"))
    assert "Do it very well." in opened(trip(folder))
    assert "- weather: May\n" in opened(trip(folder))


def test_a_starter_is_a_file_for_people(tmp_path: Path):
    """A starter file explains itself, and keeps long texts and JSON readable."""
    body = 'Plan $days days.\n\n- go to "$city"\n- look at C:\\trip'
    file = Overrides(tmp_path).write_starter(trip(None, body))
    text = file.read_text()
    assert text.startswith(
        "# The texts of the prompt trip, which can be tuned here instead of in the code.\n#\n"
    )
    assert (
        f'[sections."task.plan".body]\nreplaces = "{text_digest(body)}"\ntext = """\n'
        'Plan $days days.\n\n- go to "$city"\n- look at C:\\\\trip"""\n'
    ) in text
    assert (
        'description = "Rome in may"\ninput = \'{"city":"Rome"}\'\noutput = \'{"name":"Rome","rain":null}\'\n'
        in text
    )
    assert "pay" not in text.lower()


def test_a_starter_is_never_written_over_a_file(tmp_path: Path):
    """A starter never overwrites an existing file."""
    file = write(tmp_path, "# mine\n")
    with pytest.raises(FileInTheWay, match="it already exists; move it away to start again"):
        Overrides(tmp_path).write_starter(trip(None))
    assert file.read_text() == "# mine\n"


texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\"'\\\n\r\t$#"), max_size=40)


@given(texts)
def test_a_text_survives_being_written_as_toml(text: str):
    """Any text can be written as TOML and read back unchanged."""
    assert tomllib.loads(f"a = {toml_string(text)}\n") == {"a": text}


@given(texts, texts)
def test_a_key_survives_being_written_as_toml(first: str, second: str):
    """Each part of a TOML table's path is written as one key, whatever characters it has."""
    assert tomllib.loads(f"[{toml_key('tools', first, second)}]\n") == {"tools": {first: {second: {}}}}


@given(texts.map(lambda text: text.replace("$", "$$")), texts.map(lambda text: text.replace("$", "$$")))
def test_a_starter_round_trips(tmp_path_factory: pytest.TempPathFactory, body: str, summary: str):
    """A starter file that is read back has exactly the code's texts."""
    folder = tmp_path_factory.mktemp("starter")
    section = MarkdownSection("A", "a", body, summary=f"x{summary}", visibility="summary", tools=[weather])
    file = Overrides(folder).write_starter(Prompt("p", [section]))
    data = tomllib.loads(file.read_bytes().decode())
    assert data["sections"]["a"]["body"] == {"replaces": text_digest(body), "text": body}
    assert data["sections"]["a"]["summary"]["text"] == f"x{summary}"
    prompt = Prompt("p", [section], overrides=Overrides(folder))
    assert prompt.render(opened=["a"]).text == Prompt("p", [section]).render(opened=["a"]).text


# --- values --------------------------------------------------------------------------------------


def test_overrides_are_values():
    """Overrides of the same folder are equal, whether the folder is given as a string or as a path."""
    assert Overrides("prompts") == Overrides(Path("prompts"))
    assert len({Overrides("prompts"), Overrides("prompts"), Overrides("other")}) == 2
    assert Overrides("prompts") not in (Overrides("other"), "prompts", Path("prompts"))
    assert repr(Overrides("prompts")) == "Overrides('prompts')"
    assert Overrides("a").file_of(Prompt("p", "Text.")) == Path("a/p.toml")


def test_a_copied_prompt_takes_its_overrides_along(tmp_path: Path):
    """A copied prompt keeps its overrides, unless `dataclasses.replace` is given `overrides=None`."""
    write(tmp_path, body_override("Tuned: $city $days."))
    assert "Tuned: Rome 2." in opened(dataclasses.replace(trip(tmp_path), tools=[]))
    assert "Tuned" not in opened(dataclasses.replace(trip(tmp_path), overrides=None))
