"""The front matter of a worker's file: its settings, and a parser that knows the line of every value."""

from __future__ import annotations

import json
import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from handrail.errors import ToolValidationError, WorkerError
from handrail.messages import ModelSettings
from handrail.schema import JsonSchema, Schema
from handrail.schema.problems import location_of
from handrail.text.spelling import nearest
from handrail.tools.definition import LEAST_LIMIT

Refuse = Callable[[str, str, str], None]
"""A function that reports a problem, given its place in the front matter, what is wrong there, and a hint."""


class WorkerProblem(msgspec.Struct, frozen=True):
    """One problem in a worker's file, or in `tools.py`."""

    file: str
    line: int
    problem: str
    hint: str
    column: int | None = None

    def __str__(self) -> str:
        stop = "" if self.problem.endswith("?") else "."
        return f"{self.file}:{self.line}: {self.problem}{stop} {self.hint}"


class Finder:
    """Collects the problems in one file."""

    def __init__(self, file: Path | str) -> None:
        self.file = str(file)
        self.problems: list[WorkerProblem] = []

    def add(self, line: int, problem: str, hint: str, column: int | None = None) -> None:
        self.problems.append(WorkerProblem(self.file, line, problem.rstrip("."), hint, column))


def line_in(file: Path | str, error: BaseException, otherwise: int = 1) -> int:
    """Return the innermost line of a file that an error came through, or `otherwise` if it came through none."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((each.lineno or otherwise for each in frames if each.filename == str(file)), otherwise)


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the name that was probably meant, or all known names."""
    near = nearest(name, known)
    return f"Did you mean {near!r}?" if near else f"There are: {', '.join(known) or 'none'}."


def refuse(problems: Iterable[WorkerProblem]) -> WorkerError:
    """Create one error from all problems, sorted by file and line."""
    found = sorted(problems, key=lambda each: (each.file, each.line))
    return WorkerError("\n".join(map(str, found)), found)


def needed(module: str) -> Any:
    """Import a module that the `workers` extra installs. Raises `WorkerError` if it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != missing:
            raise
        raise WorkerError(
            f"workers need {missing}, which is not installed. Run `pip install 'handrail[workers]'`."
        ) from None


SCHEMA_FILE = Path(__file__).with_name("worker.schema.json")
"""The JSON Schema of the front matter. A line `# yaml-language-server: $schema=<this file>` points an editor to it."""

Name = Annotated[str, Field(min_length=1, max_length=64)]
Count = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """Base class of the mappings in the front matter. Unknown keys in a file are refused."""

    model_config = ConfigDict(frozen=True)


class Limits(Part):
    """Limits on one run of the worker, including everything that it calls."""

    requests: Annotated[Count | None, Field(description="Requests to models.")] = None
    tokens: Annotated[Count | None, Field(description="Tokens sent and received.")] = None
    money: Annotated[float | None, Field(ge=0, description="US dollars.")] = None
    tool_calls: Annotated[Count | None, Field(description="Calls of tools and workers.")] = None
    seconds: Annotated[float | None, Field(gt=0, description="Time for one run.")] = None
    depth: Annotated[Count | None, Field(description="Maximum depth of calls below this worker.")] = None


class SettingsRule(Part):
    """How the worker's model answers. A setting that is left out is the caller's, or the model's default."""

    effort: Annotated[str | None, Field(min_length=1, description="How much the model thinks.")] = None
    verbosity: Literal["low", "medium", "high"] | None = None
    service_tier: Annotated[str | None, Field(min_length=1)] = None
    seed: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        Field(min_length=1, description="Texts at which the model stops writing."),
    ] = None
    parallel_calls: Annotated[
        bool | None, Field(description="Whether the model may ask for several calls at once.")
    ] = None
    tool_choice: Annotated[
        str | None,
        Field(min_length=1, description="`auto`, `required`, `none`, or the name of the tool to call."),
    ] = None
    cache_key: Annotated[str | None, Field(min_length=1)] = None
    cache_ttl: Literal["5m", "1h"] | None = None

    def model_settings(self) -> ModelSettings:
        """Return the settings that are set, as `ModelSettings`."""
        given: dict[str, Any] = self.model_dump(exclude_none=True)
        if self.stop is not None:
            given["stop"] = tuple(self.stop)
        return ModelSettings(**given)


class CompactRule(Part):
    """When and how a long conversation of the worker is compacted. See `Compact`."""

    by: Literal["trim", "summary"] = "trim"
    at: Annotated[
        float, Field(gt=0, le=1, description="The share of the model's window at which it is compacted.")
    ] = 0.8
    tokens: Annotated[
        int | None, Field(ge=1, description="Tokens at which it is compacted at the latest.")
    ] = None
    keep: Annotated[float, Field(gt=0, le=0.9, description="The share of these tokens that is kept.")] = 0.5


class AttachmentRule(Part):
    """The files that the worker may be given. Without this rule, it may be given none."""

    count: Annotated[int, Field(ge=0, le=1000, description="Maximum number of files.")] = 1
    max_bytes: Annotated[
        int, Field(ge=1, le=100_000_000, description="Maximum size of each file in bytes.")
    ] = 1_000_000
    suffixes: Annotated[
        list[str] | None, Field(description="Allowed suffixes, such as `.md`. By default, all are allowed.")
    ] = None


class CapabilityRules(Part):
    """Decisions on tools' capabilities, such as `fs.write`, `fs.*` or `*`."""

    allow: Annotated[list[str], Field(description="Runs without asking.")] = []
    ask: Annotated[list[str], Field(description="Runs if somebody approves.")] = []
    deny: Annotated[list[str], Field(description="Never runs.")] = []
    scope: Annotated[list[str] | None, Field(description="Folders that may be written to.")] = None


class RateRule(Part):
    """A rate limit: at most `most` calls in `per_seconds` seconds."""

    most: Annotated[int, Field(ge=1)]
    per_seconds: Annotated[float, Field(gt=0)]
    tools: Annotated[list[str] | None, Field(description="The tools to which the limit applies.")] = None


class PolicyEntry(Part):
    """One policy with its settings. Exactly one key must be set."""

    capability: CapabilityRules | None = None
    rate_limit: RateRule | None = None
    sequential: Annotated[
        dict[str, list[str]] | None,
        Field(description="For each tool, the tools that must have succeeded before it."),
    ] = None


class ShellEntry(Part):
    """The tool `run_command`, for these commands only."""

    shell: Annotated[
        list[Annotated[list[str], Field(min_length=1)]],
        Field(description='Commands as lists of arguments; a last "..." stands for any arguments.'),
    ]


class CreationDefaults(Part):
    """Defaults for a worker that this one creates."""

    model: str | None = None
    tools: list[str] | None = None
    workers: list[str] | None = None
    limits: Limits | None = None


def _joined_names(model: object) -> object:
    """Join a list of model names with commas. Any other value is returned unchanged, and validated as it is."""
    if not isinstance(model, list):
        return model
    names = cast("list[object]", model)
    return ", ".join(map(str, names)) if names and all(isinstance(each, str) for each in names) else names


class FrontMatter(Part):
    """The settings between the two `---` lines of a worker's file."""

    name: Annotated[
        Name | None, Field(description="The worker's name. By default, the file's name without `.md`.")
    ] = None
    description: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=200,
            description="What the worker does, for the people and models that call it.",
        ),
    ] = None
    model: Annotated[
        str | None,
        BeforeValidator(_joined_names, list[str] | str | None),
        Field(
            description="The model, `provider:name`, or `module:name` for one of your own. From a list, the first that works. "
            "By default, the caller's."
        ),
    ] = None
    tools: Annotated[
        list[str | ShellEntry],
        Field(
            description="Functions and tools that `tools.py` beside the file defines, `files`, `files.read`, or `shell: [...]`."
        ),
    ] = []
    policies: Annotated[
        list[Literal["capability", "read_before_write"] | PolicyEntry] | None,
        Field(description="Policies in place of the default, `capability`; [] for none."),
    ] = None
    output: Annotated[
        dict[str, Any] | None, Field(description="A JSON Schema that the answer must match.")
    ] = None
    attachments: AttachmentRule | None = None
    limits: Limits = Limits()
    commit: Annotated[
        Literal["all", "each"],
        Field(
            description="`each` if each call commits separately; by default, all commit together when the worker succeeds."
        ),
    ] = "all"
    settings: SettingsRule = SettingsRule()
    compact: CompactRule = CompactRule()
    result_limit: Annotated[
        int | None,
        Field(ge=LEAST_LIMIT, description="Characters of a result that the worker's model is shown whole."),
    ] = None
    workers: Annotated[
        list[str] | Literal["*"],
        Field(description='The workers that this one may call; "*" for all in the folder.'),
    ] = []
    locked: Annotated[
        bool, Field(description="Whether its name is reserved, so that no created worker may use it.")
    ] = False
    create: Annotated[
        bool, Field(description="Whether its model may create workers. Each must be approved.")
    ] = False
    creation_defaults: CreationDefaults | None = None


POLICY_NAMES = sorted({"capability", "read_before_write", *PolicyEntry.model_fields})

FRONT_MATTER: Schema[FrontMatter] = Schema(FrontMatter)


def front_matter_schema() -> JsonSchema:
    """Return the JSON Schema of the front matter, which is the content of `worker.schema.json`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The front matter of a Handrail worker",
        **FRONT_MATTER.json_schema,
    }


def schema_text() -> str:
    """Return the text of `worker.schema.json`."""
    return json.dumps(front_matter_schema(), indent=2, ensure_ascii=False) + "\n"


# --- reading ---

MOST_BYTES = 256 * 1024
"""Maximum size of a worker's file in bytes."""
MOST_FRONT_MATTER = 64 * 1024
_DEEPEST = 24

Place = tuple[str | int, ...]

_FENCE = re.compile(r"---[ \t]*\Z")
_POLICY = re.compile(r"policies\[\d+\]")
_AS = re.compile(r" \(as .*\)\Z")
_KINDS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))


class Text(msgspec.Struct, frozen=True):
    """The parsed content of a worker's file: its settings, its body, and their line numbers."""

    front: FrontMatter
    body: str
    body_line: int
    """The number of the line at which the body begins."""
    lines: dict[str, int]
    """The line number of each value, by its place, such as `limits.requests`."""

    def line_of(self, where: str) -> int:
        """Return the line number of a place in the front matter, or of the nearest place that contains it; 1 if there is none."""
        return _line_of(where, self.lines)


def has_front_matter(text: str) -> bool:
    return bool(_FENCE.match(text.removeprefix("\ufeff").split("\n", 1)[0].rstrip("\r")))


def read_text(path: Path, find: Finder) -> str | None:
    """Read a file. If it can't be read, is too large or is not UTF-8, reports this to `find` and returns None."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        find.add(1, f"it can't be read: {error.strerror}", "Make it a readable file.")
        return None
    if len(raw) > MOST_BYTES:
        find.add(1, f"it has more than {MOST_BYTES} bytes", "Shorten it.")
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        find.add(raw.count(b"\n", 0, error.start) + 1, "it is not UTF-8", "Save it as UTF-8.")
        return None


class Sheet(msgspec.Struct, frozen=True):
    """A file's front matter as plain data, before it is checked, and its body."""

    data: Any
    places: dict[Place, int]
    """The line number of each value, by its place."""
    body: str
    body_line: int

    def line_of(self, key: str) -> int:
        """Return the line number of a key, or 1 if the front matter does not have it."""
        return self.places.get((key,), 1)


def parse_sheet(text: str, find: Finder) -> Sheet | None:
    """Split a file into front matter and body, and parse the front matter as YAML.

    Returns None, and reports the problem to `find`, if the front matter is missing, not closed or too long, or if its YAML has a
    problem.
    """
    lines = [line.rstrip("\r") for line in text.removeprefix("\ufeff").split("\n")]
    if not _FENCE.match(lines[0]):
        find.add(
            1, "it has no front matter", "Begin the file with a line `---`, its settings, and another `---`."
        )
        return None
    end = next((number for number, line in enumerate(lines[1:], 1) if _FENCE.match(line)), None)
    if end is None:
        find.add(1, "its front matter is not closed", "Put a line `---` below the settings.")
        return None
    front = "\n".join(lines[1:end])
    if len(front) > MOST_FRONT_MATTER:
        find.add(1, f"its front matter has more than {MOST_FRONT_MATTER} characters", "Shorten it.")
        return None
    before = len(find.problems)
    data, places = _Yaml(front, find).read()
    if len(find.problems) > before:
        return None
    return Sheet(data, places, "\n".join(lines[end + 1 :]).rstrip(), end + 2)


def parse_file(text: str, find: Finder) -> Text | None:
    """Parse front matter and body, and report the problems in the front matter to `find`.

    Invalid settings are left out. Returns None if `parse_sheet` does, if the front matter is not a mapping, or if it has too
    many invalid settings.
    """
    sheet = parse_sheet(text, find)
    taken = None if sheet is None else _validated(sheet.data, sheet.places, find)
    if sheet is None or taken is None:
        return None
    found = {location_of(place): line for place, line in sheet.places.items()}
    return Text(taken, sheet.body, sheet.body_line, found)


def _validated(data: Any, places: dict[Place, int], find: Finder) -> FrontMatter | None:
    try:
        return FRONT_MATTER.parse(pydantic_core.to_json(data, inf_nan_mode="constants"))
    except ToolValidationError as error:
        said: dict[str, str] = {}
        # Each member of a union reports an error, but together they are one problem.
        for problem in error.problems:
            where = _AS.sub("", problem.where)
            said[where] = f"{said[where]}; or {problem.what}" if where in said else problem.what
    for where, what in said.items():
        line = _line_of(where, {location_of(place): line for place, line in places.items()})
        hint = "Correct it; worker.schema.json defines what is allowed."
        if _POLICY.fullmatch(where):
            what, hint = "is not a policy", f"Policies are {', '.join(POLICY_NAMES)}."
        find.add(line, f"`{where}` {what}" if where else what, hint)
    return _valid_part(data, {re.split(r"[.\[]", where)[0] for where in said})


def _valid_part(data: Any, invalid: set[str]) -> FrontMatter | None:
    """Return the settings without the invalid ones, so that the rest of the file can be checked.

    The result is locked, so that no created worker can take the name. Returns None if the front matter is not
    a mapping, or if the rest is invalid too.
    """
    if not isinstance(data, dict) or "" in invalid:
        return None
    valid = {key: value for key, value in cast("dict[str, Any]", data).items() if key not in invalid}
    try:
        return FRONT_MATTER.parse(pydantic_core.to_json({**valid, "locked": True}))
    except ToolValidationError:
        return None  # if there are very many problems, only the first were reported, and `valid` still has others


def _line_of(where: str, lines: dict[str, int]) -> int:
    """Return the line number of a place, or of the nearest place that contains it; 1 if there is none."""
    while where and where not in lines:
        where = where[: max(where.rfind("."), where.rfind("["), 0)]
    return lines.get(where, 1)


def _whole(text: str) -> str:
    """Join surrogate pairs, which YAML reads as two characters if they are written as JSON escapes.

    Raises `ValueError` for a lone surrogate.
    """
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ValueError("half a character (a lone surrogate)") from None


class _Yaml:
    """Reads YAML as plain data, and reports by line what is not allowed, such as aliases, tags and repeated keys."""

    def __init__(self, text: str, find: Finder) -> None:
        self._text = text
        self._find = find
        self._yaml: Any = needed("yaml")
        self._places: dict[Place, int] = {(): 1}

    def read(self) -> tuple[Any, dict[Place, int]]:
        yaml = self._yaml
        try:
            if not self._is_plain():
                return None, self._places
            loader = yaml.SafeLoader(self._text)
            try:
                node = loader.get_single_node()
                return ({} if node is None else self._value(loader, node, ())), self._places
            finally:
                loader.dispose()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            said = getattr(error, "problem", None) or str(error).split("\n", 1)[0]
            line, column = (1, None) if mark is None else (mark.line + 2, mark.column + 1)
            self._find.add(
                line, f"it is not YAML: {said}", "Correct it; quote text that contains `: ` or `#`.", column
            )
        return None, self._places

    def _is_plain(self) -> bool:
        """Return whether the YAML has no anchors or aliases and is not nested too deeply. Reports the first problem.

        This is checked before anything is built from the YAML.
        """
        yaml = self._yaml
        depth = 0
        for event in yaml.parse(self._text, Loader=yaml.SafeLoader):
            line, column = event.start_mark.line + 2, event.start_mark.column + 1
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                self._find.add(line, "an anchor or alias is not allowed here", "Write the value out.", column)
                return False
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                self._find.add(line, f"it is nested more than {_DEEPEST} deep", "Make it flatter.", column)
                return False
        return True

    def _value(self, loader: Any, node: Any, place: Place) -> Any:
        yaml = self._yaml
        self._places.setdefault(place, node.start_mark.line + 2)
        if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
            return dict(self._members(loader, node, place))
        if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
            items = enumerate(cast("list[Any]", node.value))
            return [self._value(loader, item, (*place, index)) for index, item in items]
        if not isinstance(node, yaml.ScalarNode):
            return self._tagged(node)
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value  # dates are read as text
        if node.tag not in _KINDS:
            return self._tagged(node)
        try:
            value = loader.construct_object(node)
            if isinstance(value, str):
                return _whole(value)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError("not a finite number")
            return value
        except ValueError as error:
            self._find.add(node.start_mark.line + 2, f"{str(node.value)[:40]!a} is {error}", "Correct it.")
            return None

    def _members(self, loader: Any, node: Any, place: Place) -> Iterator[tuple[str, Any]]:
        seen: dict[str, int] = {}
        for key, value in node.value:
            line, column = key.start_mark.line + 2, key.start_mark.column + 1
            name = key.value if isinstance(key, self._yaml.ScalarNode) else None
            if name is None or key.tag == "tag:yaml.org,2002:merge":
                self._find.add(line, "a key is not a plain word", "Write `key: value`.", column)
                continue
            if name in seen:
                self._find.add(
                    line, f"`{name}` is given twice, first in line {seen[name]}", "Keep one of them.", column
                )
                continue
            try:
                _whole(name)
            except ValueError as error:
                self._find.add(line, f"a key is {error}", "Correct it.", column)
                continue
            seen[name] = line
            self._places[*place, name] = line
            yield name, self._value(loader, value, (*place, name))

    def _tagged(self, node: Any) -> None:
        self._find.add(
            node.start_mark.line + 2, f"the tag {node.tag!r} is not allowed here", "Write a plain value."
        )
