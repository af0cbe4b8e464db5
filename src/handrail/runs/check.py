"""Replays a run: checks the recorded model answers against the current tools, prompt and policies."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Literal

import msgspec
import pydantic_core

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.content import Attachment
from handrail.context import ToolContext, call_behind
from handrail.errors import (
    HandrailError,
    PromptDefinitionError,
    PromptRenderError,
    SessionError,
    ToolValidationError,
)
from handrail.guard.outer_policy import OuterPolicy
from handrail.guard.policy import within_scope
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit, RunRow
from handrail.messages import CallAsked
from handrail.prompt import OPENER, Prompt, RenderedPrompt
from handrail.protocols import Filesystem
from handrail.resources.bindings import Binding
from handrail.resources.diff import unified_diff
from handrail.resources.paths import folder_id_of, folder_of
from handrail.resources.staging import FileFork
from handrail.run.answer import RecordedAnswer, offer_of
from handrail.run.call import Attempt, new_call
from handrail.run.conversation import root_conversation
from handrail.run.evaluation import shown_sections
from handrail.run.failures import Refused
from handrail.run.gate import Gate
from handrail.run.large_results import READER
from handrail.run.options import DEPTH_LIMIT, RunOptions
from handrail.run.place import RUN, Place
from handrail.run.policies import check_policies, close_policies
from handrail.run.record.begin import RunBegin, schema_of, tools_of
from handrail.run.record.format import LONGEST_DIFF, is_masked, read_result
from handrail.run.record.recorded_session import ResumedRun, load_resumed
from handrail.run.response import Output
from handrail.run.run import Run, open_run
from handrail.run.search import CALLER, SEARCHER, unwrapped
from handrail.run.transaction import new_transaction
from handrail.runs.reversal import meet
from handrail.runs.tree import answers_in
from handrail.session import Session
from handrail.session.serialization import decode_item
from handrail.tools import EFFECTS, Tool, ToolResult
from handrail.tools.result import clean_text, shown_text, whole_of, with_excerpt
from handrail.tools.toolbox import NO_TOOLS

_Shown = Literal["prompt", "attachments", "tools", "schema", "section"]
What = Literal[_Shown, "arguments", "policy", "result", "files", "output", "call", "message", "answer", "end"]

Source = Literal["real", "recorded"]
"""Where a replay takes the results of a tool's calls from: it runs them, whatever their effect, or it uses the recorded results."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between a replay and the record."""

    step: int
    """The number of the model answer that the difference follows; 0 if it is before the first request."""
    what: What
    where: str
    """The name of the prompt, tool or call that differs."""
    recorded: str
    now: str
    call_id: str = ""

    def diff(self, first: str = "recorded", second: str = "now") -> str:
        """Return the lines that differ, as a unified diff of texts with these names."""
        was, now = self.recorded.splitlines(), self.now.splitlines()
        return "\n".join(line.rstrip("\n") for line in unified_diff(was, now, first, second, 1))

    def __str__(self) -> str:
        at = "before the first step" if not self.step else f"at step {self.step}"
        return f"{at}, {_WORDS[self.what]} {self.where}".rstrip()


_WORDS: dict[What, str] = {
    "prompt": "the system text differs:",
    "attachments": "the attachments of the sections differ:",
    "tools": "the offered tools differ:",
    "schema": "the schema of the answer differs:",
    "section": "what the model is shown of an opened section differs:",
    "arguments": "the arguments are parsed differently:",
    "policy": "the policies decide differently:",
    "result": "the result differs:",
    "files": "the changed files differ:",
    "output": "the answer is no longer valid:",
    "call": "no result is recorded for the call:",
    "message": "the message differs:",
    "answer": "the model's answer differs",
    "end": "the end differs:",
}


class Tally(msgspec.Struct):
    """Counters of a replay's progress."""

    steps: int = 0
    ran: int = 0
    """The number of calls that ran again, in forks that were dropped."""
    taken: int = 0
    """The number of calls whose recorded result was used."""


async def replay(
    journal: Journal,
    run_id: str,
    prompt: Prompt[Any],
    *,
    params: object = None,
    filesystem: Filesystem | None = None,
    resources: Iterable[Binding[Any]] = (),
    session: Session | None = None,
    tools: Mapping[str, Source] = {},
    lacking: Collection[str] = (),
    tally: Tally | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Divergence | None:
    """Replay a recorded run with the current code. Returns the first difference; None if there is none.

    What the model was shown is compared with what it would be shown now: the system text, the attachments, the descriptions
    and schemas of the tools, the schema of the answer, the sections that it opened, the results of its calls, and what they
    changed in files. The decisions of policies are compared without their reasons.

    No model is asked and nothing is changed. Calls with effect `pure`, `read` and `staged` run in a transaction
    that is dropped. The recorded result is used for all other calls, and for calls that

    - asked somebody, were given a secret, ran a nested prompt or used another recorded verb,
    - ended with a status other than `ok` and `error`,
    - need a person, a model or a worker,
    - used a tool that only the original caller provided,
    - were undone, or
    - worked on files that the run or a later call in the folder has changed.

    `filesystem` must contain the files as they were when the run began, except for the paths in `lacking`. Calls that used one of
    these are not run, nor is any that used files if there is no `filesystem`.
    `tools` says otherwise for single tools, by name: a `real` one runs, even if its effect can't be undone, and a `recorded` one
    does not. `params` override the recorded ones. If the run's session was created with its own slice rules, pass `session`: an empty
    session with the recorded id. `tally` receives the counts. Raises `HandrailError` if the replay itself fails.
    """
    row = await journal.runs.get(run_id)
    resumed = await load_resumed(journal, row, session, clock)
    begin = resumed.begin
    try:
        rendered = prompt.render(
            resumed.params() if params is None else params, session=resumed.session, opened=begin.opened
        )
    except (PromptRenderError, PromptDefinitionError, SessionError) as error:
        return Divergence(step=0, what="prompt", where=prompt.name, recorded=begin.system, now=str(error))
    found = _compare_prompt(prompt, rendered, resumed)
    if found is not None:
        return found
    for path in root_conversation(resumed.session).opened:
        with contextlib.suppress(ToolValidationError):  # it is open, or does not exist any more
            rendered = rendered.open([path]).rendered  # an earlier run of the session has opened it
    entries = await journal.calls.entries(run_id)
    answers = answers_in(entries)
    asking = [Place.parse(entry.key) for entry in entries if entry.kind == "verb"]
    undone = {entry.key for entry in entries if entry.kind == "undone"}
    units = await journal.calls.load(run_id)
    changed = [*await _changed_since(journal, units, filesystem), *(f"file {path}" for path in lacking)]
    run = _run(prompt, resumed, filesystem, (*prompt.resources, *resources), clock)
    walk = _Walk(run, prompt, rendered, units, asking, undone, changed, begin, tools, tally or Tally())
    try:
        return await walk.go([answers[RUN.answer(number)] for number in range(1, len(answers) + 1)])
    finally:
        await run.world.resources.close_logged()


def _compare_prompt(
    prompt: Prompt[Any], rendered: RenderedPrompt[Any], resumed: ResumedRun
) -> Divergence | None:
    begin, differs = resumed.begin, partial(Divergence, step=0, where=prompt.name)
    if rendered.text != begin.system:
        return differs(what="prompt", recorded=begin.system, now=rendered.text)
    files = _lines_of(rendered.attachments)
    if begin.shown_files is not None and files != (was := _lines_of(begin.shown_files)):
        return differs(what="attachments", recorded=was, now=files)
    names = [tool.name for tool in tools_of(rendered)]
    if names != begin.tools:
        return differs(what="tools", recorded="\n".join(begin.tools), now="\n".join(names))
    schema = schema_of(rendered)
    if begin.output is not None and schema != begin.output:
        return differs(what="schema", recorded=laid_out(begin.output), now=laid_out(schema))
    offered = {name: offer for name, offer in begin.offered.items() if name not in begin.added}
    return _compare_tools(0, offered, tools_of(rendered))


def _compare_tools(
    step: int, recorded: Mapping[str, str], tools: Iterable[Tool[Any, Any]]
) -> Divergence | None:
    """Compare what the model was shown of its tools with what it is shown now."""
    offers = {tool.name: tool for tool in tools}
    for name, was in recorded.items():
        tool = offers.get(name)
        now = f"there is no tool {name!r}" if tool is None else offer_of(tool)
        if was != now:
            now = now if tool is None else laid_out(now)
            return Divergence(step=step, what="tools", where=name, recorded=laid_out(was), now=now)
    return None


def laid_out(json: str) -> str:
    return msgspec.json.format(json.encode(), indent=2).decode() if json else ""


def _lines_of(attachments: Iterable[Attachment]) -> str:
    """Return one line about each attachment. It differs if the bytes do."""
    return "\n".join(f"{each.render()} {each.digest[:16]}" for each in attachments)


async def _changed_since(
    journal: Journal, units: Sequence[CommitUnit], filesystem: Filesystem | None
) -> list[str]:
    """Return the places of all files that this run's first call in the folder, or any later call of any run, wrote there."""
    folder = folder_of(filesystem), folder_id_of(filesystem)
    first = next((unit for unit in units if unit.is_in(*folder)), None) if folder[0] else None
    if first is None:
        return []
    since = (first, *await journal.calls.later(first))
    return [
        place for unit in since if unit.is_in(*folder) for place in unit.writes if place.startswith("file ")
    ]


def outer_policies_of(row: RunRow) -> tuple[OuterPolicy, ...]:
    """Return the policies of the run that began a background run, as they apply in that; none for any other run."""
    if row.record.parent is None:
        return ()
    policies_of: Any = import_module("handrail.fleet.background").policies_of  # of a higher layer
    return policies_of(row.record.parent)


def _run(
    prompt: Prompt[Any],
    resumed: ResumedRun,
    filesystem: Filesystem | None,
    resources: Iterable[Binding[Any]],
    clock: Clock,
) -> Run:
    options = RunOptions(
        session=resumed.session,
        filesystem=filesystem,
        resources=tuple(resources),
        outer_policies=outer_policies_of(resumed.row),
        approvals="approve_all",
        depth_limit=DEPTH_LIMIT + 1,
        clock=clock,
    )
    return open_run(options, prompt=prompt)


class _Dropped(Exception):
    """Raised to end the transaction around the whole replay, so that none of its changes are kept."""


class _Walk:
    """Replays one call after another, all inside one call whose transaction is dropped."""

    def __init__(
        self,
        run: Run,
        prompt: Prompt[Any],
        rendered: RenderedPrompt[Any],
        units: Sequence[CommitUnit],
        asking: Sequence[Place],
        undone: Collection[str],
        changed: Iterable[str],
        begin: RunBegin,
        tools: Mapping[str, Source],
        tally: Tally,
    ) -> None:
        self._run = run
        self._gate = Gate(run)
        self._prompt = prompt
        self._rendered = rendered
        self._units = {Place.parse(unit.place): unit for unit in units}
        self._asking = asking
        self._undone = undone
        self._unknown = {place[5:] for place in changed}
        self._lacks_files = run.world.filesystem is None and (
            bool(begin.folder) or any(paths_of(unit) for unit in units)
        )
        self._added = frozenset(begin.added)
        self._tools = tools
        self._tally = tally
        self._found: Divergence | None = None
        self._output = None if rendered.output_schema is None else Output(rendered.output_schema)

    async def go(self, answers: Sequence[RecordedAnswer]) -> Divergence | None:
        async def walk(params: None, *, context: ToolContext) -> ToolResult[Any]:
            self._show()
            self._found = await self._walk(call_behind(context), answers)
            raise _Dropped

        effect = "irreversible" if "real" in self._tools.values() else "staged"
        driver: Tool[Any, Any] = Tool("replay", "Go through a recorded run.", walk, effect=effect)
        self._run.show(NO_TOOLS.plus([driver]), ())
        result = await self._gate.invoke("replay")
        if self._found is None and _Dropped.__name__ not in result.message:
            raise HandrailError(f"the replay stopped before the end of the recorded run: {result.message}")
        return self._found

    def _show(self) -> None:
        rendered = self._rendered
        extra = [] if self._output is None else [self._output.tool()]
        policies = [within_scope(scoped.policy, scoped.tools) for scoped in rendered.policies]
        self._run.show(rendered.offer.toolbox.plus(extra), policies)

    async def _walk(self, outer: Attempt, answers: Sequence[RecordedAnswer]) -> Divergence | None:
        made = 0
        for step, answer in enumerate(answers, 1):
            found = _compare_tools(step - 1, answer.offered, tools_of(self._rendered))
            if found is not None:
                return found
            self._tally.steps = step
            opened: list[str] = []
            for call in answer.calls:
                made += 1
                unit = self._units.get(RUN.child(made))
                if unit is None:
                    return None  # the record ends here, because the call had not finished
                if unit.tool == OPENER:
                    found = self._compare_sections(step, unit, opened)
                else:
                    found = await self._call(outer, step, call, unit)
                if found is not None:
                    return found
            self._open(opened)
            if not answer.calls and step == len(answers) and self._output is not None:
                return self._answer(step, answer.text)
        return None

    def _answer(self, step: int, text: str) -> Divergence | None:
        assert self._output is not None
        try:
            self._output.parse(text)
        except ToolValidationError as error:
            return Divergence(
                step=step, what="output", where=self._prompt.name, recorded=text, now=str(error)
            )
        return None

    async def _call(self, outer: Attempt, step: int, asked: CallAsked, unit: CommitUnit) -> Divergence | None:
        asked = unwrapped(asked, self._run.tools)
        tool = self._run.tools.get(asked.name)
        if tool is None and (asked.name in self._added or asked.name in (READER, SEARCHER, CALLER)):
            self._take(
                outer, unit
            )  # the original caller, or the run itself, provided this tool, which is missing here
            return None
        if tool is None:
            return self._missing(step, unit)
        if tool.secret and is_masked(asked.arguments):
            self._take(outer, unit)  # the call was given a secret, which is not recorded
            return None
        found, params = self._parse(step, tool, asked, unit)
        if found is None and params is not None:
            found = await self._decide(outer, step, tool, asked, unit)
        if found is not None:
            return found
        if params is None or not self._can_run(tool, unit):
            self._take(outer, unit)
            return None
        self._tally.ran += 1
        attempt = self._gate.open(new_call(self._gate, tool.name, asked.arguments, parent=outer))
        result = await self._gate.pass_through(attempt.call, attempt)
        recorded = read_result(tool, unit.result)
        was, now = _told(recorded), _told(_shortened_like(recorded, result))
        if was != now:
            return self._differs(step, "result", unit, was, now)
        changed = _file_diff(attempt)
        if changed == unit.diff or (not unit.diff and any(_is_file(place) for place in unit.writes)):
            return None  # a journal has no diff of files that it does not keep, such as those in memory
        return self._differs(step, "files", unit, unit.diff, changed)

    def _differs(self, step: int, what: What, unit: CommitUnit, recorded: str, now: str) -> Divergence:
        where = f"{unit.tool} ({unit.call_id})"
        return Divergence(step=step, what=what, where=where, recorded=recorded, now=now, call_id=unit.call_id)

    def _missing(self, step: int, unit: CommitUnit) -> Divergence | None:
        if unit.status == "invalid":
            self._tally.taken += 1
            return None  # the recorded call did not run either: it had no such tool, or invalid arguments
        return self._differs(step, "tools", unit, unit.tool, f"there is no tool {unit.tool!r}")

    def _compare_sections(self, step: int, unit: CommitUnit, opened: list[str]) -> Divergence | None:
        """Compare the sections that the model opened in the recorded run, and add those that are not open yet to `opened`."""
        self._tally.taken += 1
        if unit.status != "ok":
            return None
        paths: list[str] = msgspec.json.decode(unit.result)["value"]
        where, was = ", ".join(paths), _told(read_result(None, unit.result))
        try:
            now = _told(shown_sections(self._rendered.open(paths), paths))
        except ToolValidationError as error:
            now = str(error)
        if was != now:
            return Divergence(
                step=step, what="section", where=where, recorded=was, now=now, call_id=unit.call_id
            )
        opened += [path for path in paths if path not in opened]
        return None

    def _open(self, paths: Sequence[str]) -> None:
        """Open sections, so that their tools can be called."""
        closed = [path for path in paths if path not in self._rendered.opened]
        if closed:
            self._rendered = self._rendered.open(closed).rendered
            self._show()

    def _parse(
        self, step: int, tool: Tool[Any, Any], asked: CallAsked, unit: CommitUnit
    ) -> tuple[Divergence | None, Any]:
        """Parse the arguments of a call with the current code.

        Returns the difference, or None, and the params as JSON, which are None if they are invalid or differ.
        """
        try:
            now = tool.dump(tool.parse(asked.arguments)).decode()
        except ToolValidationError as error:
            if unit.status == "invalid":
                return None, None
            return self._differs(step, "arguments", unit, unit.arguments, str(error)), None
        if unit.status == "invalid":
            return self._differs(step, "arguments", unit, read_result(tool, unit.result).text, now), None
        if unit.arguments and pydantic_core.from_json(unit.arguments) != pydantic_core.from_json(now):
            return self._differs(step, "arguments", unit, unit.arguments, now), None
        return None, now

    async def _decide(
        self, outer: Attempt, step: int, tool: Tool[Any, Any], asked: CallAsked, unit: CommitUnit
    ) -> Divergence | None:
        """Check a call against the current policies, without running it. Returns None if they decide as they did before."""
        was, now = unit.decision or "allow", "allow"
        if self._run.policies:
            call = new_call(self._gate, tool.name, asked.arguments, parent=outer)
            outer.inner -= 1  # this call only checks the policies and must not use up a number
            attempt = self._gate.open(call)
            attempt.resolve(tool)
            attempt.params = tool.parse(asked.arguments)
            attempt.transaction = new_transaction(attempt, tool)
            try:
                waiting = check_policies(attempt, iter(self._run.policies))
                if waiting is not None:
                    await waiting
                now = attempt.passage.decision
            except Refused as refused:
                now = f"deny: {refused}"
            finally:
                close_policies(attempt)
                attempt.close()
                attempt.transaction.drop()
        if was.partition(":")[0] == now.partition(":")[0]:
            return None
        return self._differs(step, "policy", unit, was, now)

    def _can_run(self, tool: Tool[Any, Any], unit: CommitUnit) -> bool:
        source = self._tools.get(tool.name)
        if source == "real":
            return True
        if source == "recorded" or unit.call_id in self._undone:
            return False
        if unit.status not in ("ok", "error") or not EFFECTS[tool.effect].transactional or tool.needs:
            return False
        place = Place.parse(unit.place)
        if any(each.attempt_at(place) for each in self._asking):
            return False
        paths = paths_of(unit)
        if paths and self._lacks_files:
            return False
        if unit.status == "error" and (self._lacks_files or self._unknown):
            return False  # which files a call that failed has read is not recorded
        return not any(meet(changed, path) for changed in self._unknown for path in paths)

    def _take(self, outer: Attempt, unit: CommitUnit) -> None:
        """Apply the recorded events of a call, and of the inner calls that committed separately, instead of running it."""
        self._tally.taken += 1
        if unit.call_id in self._undone:
            return  # nothing that came before its undo depends on what it did
        call = Place.parse(unit.place)
        for place, each in self._units.items():  # in the order of their commits
            if place.within(call):
                for event in each.events:
                    outer.open_transaction.session.redo(decode_item(bytes(event), self._run.session.id))
                self._unknown.update(place[5:] for place in each.writes if place.startswith("file "))


def _is_file(place: str) -> bool:
    return place.startswith("file ")


def paths_of(unit: CommitUnit) -> list[str]:
    """Return the paths that a call has read or changed."""
    return [place[5:] for place in (*unit.reads, *unit.writes) if _is_file(place)]


def _file_diff(attempt: Attempt) -> str:
    """Return what the last attempt at a call has changed in durable files, in the form in which the journal records it."""
    transaction = attempt.newest.transaction
    forks: Any = () if transaction is None else transaction.touched
    return "".join(fork.diff() or "" for fork in forks if fork.is_durable or isinstance(fork, FileFork))[
        :LONGEST_DIFF
    ]


def _shortened_like(recorded: ToolResult[Any], result: ToolResult[Any]) -> ToolResult[Any]:
    """Return a result with the recorded excerpt, if its text is the one that was shortened, and as it is otherwise."""
    whole = whole_of(recorded)
    if whole is None or whole.digest != hashlib.sha256(clean_text(shown_text(result)).encode()).hexdigest():
        return result
    return with_excerpt(result, shown_text(recorded), whole)


def _told(result: ToolResult[Any]) -> str:
    """Return what the model is shown of a result, with a line about each attachment."""
    text = clean_text(shown_text(result))
    shown = "\n".join(filter(None, (text, _lines_of(result.attachments))))
    return shown if result.success else f"failed: {shown}"
