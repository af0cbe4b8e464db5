"""`CodeMode`: a section with a tool that runs scripts, which call the other tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from handrail.code.host import Limits
from handrail.code.interpreter import ScriptError, ScriptRefused, check_installed
from handrail.code.script import Script
from handrail.code.stubs import function_names
from handrail.context import ToolContext
from handrail.errors import DefinitionError, NotSupported
from handrail.prompt import OPENER, MarkdownSection
from handrail.protocols import ToolPolicy
from handrail.run.call import attempt_of
from handrail.run.large_results import READER
from handrail.run.search import SearchTool
from handrail.text.spelling import checked_arguments
from handrail.tools import Tool, ToolResult

SCRIPT = "run_script"
_PRINTED = 2_000
"""How many of the last characters that a failed script has printed the model is shown."""

_TEMPLATE = (
    "Use `run_script` if you need several calls and only pass their results on, filter them or count them."
)
_DESCRIPTION = """\
Run a Python script that calls the other tools. In a script, each tool is an async function that takes keyword arguments:
`pages = await look_up(query="x")`. A `-` in a tool's name becomes `_`, and a name that Python has itself gets `tool_` in front:
`tool_list`. Tools that you find by searching are functions too, by their own names: search before you write the script. Several calls
run at once with `await asyncio.gather(first(a=1), second(b=2))`.

- A call returns the tool's value as plain data: text, numbers, lists and dicts. A call that fails raises an exception, a denied one
  `PermissionError`.
- You are shown what the script prints, and the value of its last expression. So end it with the data that you need.
- A script is one step. If it fails, everything it did is undone, as far as that is possible.
- It is checked first. So a call of an unknown tool, a wrong type, or a call without `await` is refused before anything happens. Don't
  give a variable the name of a tool.
- It is a subset of Python, without `yield`, `del`, `async with`, inheritance, `@property`, `create_task`, `wait_for` and keyword
  arguments of `gather`. It can import asyncio, base64, bisect, collections, copy, csv, dataclasses, datetime, decimal,
  functools, hashlib, itertools, json, math, random, re, time and typing, and nothing else: no statistics, no uuid. It has no files and
  no network, and its clock stands still.
- It may make {calls} calls, compute for {seconds:g} seconds, use {memory:,} bytes, and print {output:,}."""


@dataclasses.dataclass(frozen=True)
class RunScript:  # no docstring: it would be shown to the model
    script: Annotated[str, Field(description="The Python script.")]


class ScriptTool(Tool[Any, Any]):
    """The tool that runs scripts."""

    delegates: ClassVar[bool] = True
    spans: ClassVar[bool] = True


def script_tool(limits: Limits) -> Tool[Any, Any]:
    """Create the tool `run_script`. Its effect is the strongest of its run's other tools'."""

    async def run_script(params: RunScript, *, context: ToolContext) -> ToolResult[Any]:
        attempt = attempt_of(context)
        if attempt is None:
            raise NotSupported(SCRIPT, "Call it through a gate.")
        offered = [tool for tool in attempt.run.tools.values() if _is_offered(tool)]
        script = Script(attempt, params.script, function_names(offered), limits)
        try:
            value = await script.run()
        except ScriptRefused as error:
            return ToolResult.error(f"The script was not run: {error}")
        except ScriptError as error:
            printed = f"\nIt had printed:\n{script.printed[-_PRINTED:].rstrip()}" if script.printed else ""
            return ToolResult.error(
                f"The script failed, so what it did is undone if possible: {error}{printed}"
            )
        return ToolResult.ok(value, script.printed)

    tool = ScriptTool(
        SCRIPT,
        _DESCRIPTION.format(**msgspec.structs.asdict(limits)),
        run_script,
        capabilities=frozenset({"code"}),
        effect="pure",
    )
    object.__setattr__(tool, "reenters", True)
    return tool


def _is_offered(tool: Tool[Any, Any]) -> bool:
    """Return whether scripts can call a tool. They can't pass secrets, because what a script does is recorded."""
    for_the_model = tool.spans or isinstance(tool, SearchTool) or tool.name in (OPENER, READER)
    return tool.handler is not None and not (tool.secret or for_the_model)


@checked_arguments
@dataclasses.dataclass(frozen=True, init=False)
class CodeMode(MarkdownSection[Any]):
    """A section with the tool `run_script`, for scripts in which a model calls the run's other tools.

    Scripts can also call tools that the model finds by searching. `run_script` itself is always listed.

    Every call in a script passes the gate, and the script is one call: if it fails, everything it did is undone. `memory` is in
    bytes, `seconds` are those of computing, `calls` is the number of calls in one script, and `output` the bytes that it may print.
    Needs `pip install 'handrail[code]'`, and raises `DefinitionError` without it.
    """

    search: ClassVar[bool | None] = False

    def __init__(
        self,
        *,
        memory: int = 64_000_000,
        seconds: float = 10.0,
        calls: int = 200,
        output: int = 50_000,
        policies: Iterable[ToolPolicy] = (),
        title: str = "Scripts",
        key: str = "code",
    ) -> None:
        check_installed()
        limits = Limits(memory=memory, seconds=seconds, calls=calls, output=output)
        for name in Limits.__struct_fields__:
            value: Any = getattr(limits, name)
            kinds = (int, float) if name == "seconds" else (int,)
            if type(value) not in kinds or not 0 < value < float("inf"):
                raise DefinitionError(f"CodeMode: {name} is {value!r}. Pass a positive number.")
        super().__init__(
            title=title,
            key=key,
            template=_TEMPLATE,
            tools=(script_tool(limits),),
            policies=tuple(policies),
        )
