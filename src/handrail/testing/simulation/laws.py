"""The laws that hold for every run, wherever its process died. Each yields descriptions of its violations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import msgspec

from handrail.errors import DefinitionError
from handrail.messages import Message
from handrail.run.conversation import check_well_formed
from handrail.run.place import Place
from handrail.testing.simulation.scenario import Happening

_NOT_KNOWN = "not known"
"""Words in the message that tells a model that a call's outcome is unknown."""
_UNREPEATABLE = ("irreversible", "compensable")

Details = Mapping[str, Any]


class History:
    """The events from all processes in one trial."""

    def __init__(self, happened: Sequence[Happening], peeked: int | None = None) -> None:
        self.happened = happened
        self.peeked = peeked
        """The number of the process that only tried to take the run while another owned it; None if none tried."""
        self.last = max((each.process for each in happened), default=0)

    def of(self, what: str, process: int | None = None) -> list[Details]:
        return [
            each.details for each in self.happened if each.what == what and process in (None, each.process)
        ]

    @property
    def ended(self) -> Details | None:
        """The last process's report on the run's end, or None if it made no report."""
        found = self.of("ended", self.last)
        return found[0] if found else None

    @property
    def over(self) -> Details | None:
        """The state that the last process to end reported, even if it had been overtaken; None if none reported one."""
        found = self.of("over")
        return found[-1] if found else None

    def restarts(self) -> Iterator[tuple[int, Details]]:
        """Yield the number of each process that continued the run, with the state that it found."""
        for each in self.happened:
            if each.what == "began" and each.process not in (0, self.peeked):
                yield each.process, each.details

    @cached_property
    def cut(self) -> list[Details]:
        """The interrupted calls whose outcome may be unknown."""
        found: list[Details] = []
        entered: list[Details] = []
        steps: set[str] = set()
        for each in self.happened:
            if each.what == "entered":
                entered.append(each.details)
            elif each.what == "step begun":
                steps.add(each.details["key"])
            elif each.what == "began":
                unsettled = steps - set(each.details["settled"])
                found += [
                    call
                    for call in entered
                    if call["place"] not in each.details["finished"]
                    and (is_unrepeatable(call) or any(key.startswith(f"{call['key']}/") for key in unsettled))
                ]
        return found

    def said(self) -> dict[tuple[int, int, str], list[Any]]:
        """Return the messages, grouped by process, replay attempt and conversation."""
        found: dict[tuple[int, int, str], list[Any]] = {}
        for what, process, details in self.happened:
            if what == "said":
                key = (process, details["attempt"], details["conversation"])
                found.setdefault(key, []).append(details["message"])
        return found

    @cached_property
    def whole(self) -> dict[str, list[Any]]:
        """The longest version of each conversation, by its key."""
        found: dict[str, list[Any]] = {}
        for (_, _, key), messages in self.said().items():
            if len(messages) > len(found.get(key, ())):
                found[key] = messages
        return found

    def entered_at(self, attempt: str) -> Details | None:
        """Return the call whose handler was entered in this attempt, or None if no handler was."""
        return next((call for call in self.of("entered") if call["attempt"] == attempt), None)


class Trial(NamedTuple):
    """The history of a crashed run, and the uncrashed history with which it is compared."""

    seen: History
    uncrashed: History
    overtaken: bool
    secrets: Sequence[str]
    unrecorded: Sequence[str]
    recorded: bytes
    """The content of the journal, or b"" if the scenario has no `unrecorded` texts."""

    def doubtful(self) -> frozenset[str]:
        """Return the ids of the calls whose results may differ from those in the uncrashed run.

        These are the interrupted calls whose outcome may be unknown, the calls whose start was recorded but whose handler
        was not entered yet, the calls whose request was recorded without the secret in it, and the calls around them.
        """
        found = list(self.seen.cut)
        for _, began in self.seen.restarts():
            marked = (self.uncrashed.entered_at(begun) for begun in began["begun"])
            lost = (call for call in self.uncrashed.of("entered") if self._lost(call, began))
            found += [
                call
                for call in (*marked, *lost)
                if call is not None and call["place"] not in began["finished"]
            ]
        return frozenset(id for call in found for id in call["ids"])

    def _lost(self, call: Details, began: Details) -> bool:
        """Return whether the call's request contained a secret and has been recorded without it."""
        ended = self.uncrashed.ended
        if not call["secret"] or ended is None:
            return False
        answers = [message for message in ended["messages"] if message["type"] == "assistant"]
        asked = [any(each["id"] == call["ids"][-1] for each in answer.get("calls", ())) for answer in answers]
        return True in asked and f"#{asked.index(True) + 1}" in began["model"]


def is_unrepeatable(call: Details) -> bool:
    return call["secret"] or (call["effect"] in _UNREPEATABLE and not call["reenters"])


def the_run_ends(trial: Trial) -> Iterator[str]:
    """Check that the run ends as it does without a crash. Its text and output are not compared if a call's result may differ."""
    ended, expected = trial.seen.ended, trial.uncrashed.ended
    if ended is None:
        failed = trial.seen.of("failed", trial.seen.last)
        why = f"{failed[-1]['error']}: {failed[-1]['message']}" if failed else "its process died"
        yield f"it did not end: {why}"
    elif expected is not None:
        for what in (
            ("status", "stop_reason") if trial.doubtful() else ("status", "stop_reason", "text", "output")
        ):
            if ended[what] != expected[what]:
                yield f"its {what} is {ended[what]!r}, not {expected[what]!r}"


def each_call_has_its_result(trial: Trial) -> Iterator[str]:
    """Check that the run's conversation is well-formed, and that no conversation deviates from that of the uncrashed run.

    Results that may differ, and what follows them, are not compared. Nor are the conversations of an overtaken process.
    """
    ended, expected = trial.seen.ended, trial.uncrashed.ended
    if ended is None or expected is None:
        return
    doubtful = trial.doubtful()
    try:
        check_well_formed(msgspec.convert(ended["messages"], list[Message]))
    except (DefinitionError, msgspec.ValidationError) as error:
        yield f"the conversation is not well-formed: {error}"
    for message in ended["messages"]:
        for result in message.get("results", ()):
            if _NOT_KNOWN in result["text"] and result["id"] not in doubtful:
                yield f"{result['name']} was not cut off, and the model is told {result['text']!r}"
    yield from _differences("root", ended["messages"], expected["messages"], doubtful, True)
    for (process, _, key), messages in trial.seen.said().items():
        other = trial.uncrashed.whole.get(key)
        if other is None:
            yield f"there is a conversation {key!r} that the uncrashed run does not have"
        elif not trial.overtaken or process:
            yield from _differences(key, messages, other, doubtful, False)


def _differences(
    key: str, messages: Any, expected: Any, doubtful: frozenset[str], whole: bool
) -> Iterator[str]:
    differed = False
    for number, (message, other) in enumerate(zip(messages, expected, strict=False), 1):
        if message == other:
            continue
        results, others = message.get("results"), other.get("results")
        same = results and others and [each["id"] for each in results] == [each["id"] for each in others]
        if not same:
            if not differed:  # a model that was given a different result may answer differently
                yield f"message {number} of {key!r} is {message!r}, not {other!r}"
            return
        for result, wanted in zip(results, others, strict=True):
            if result != wanted:
                differed = True
                if result["id"] not in doubtful:
                    yield f"the result of {result['name']} in {key!r} is {result['text']!r}, not {wanted['text']!r}"
    if len(messages) != len(expected) and not differed and (whole or len(messages) > len(expected)):
        yield f"{key!r} has {len(messages)} messages, not {len(expected)}"


def no_answer_of_the_model_is_asked_for_again(trial: Trial) -> Iterator[str]:
    """Check that no restarted process asks again for a recorded model answer, and that none is changed or lost."""
    seen = trial.seen
    for process, began in seen.restarts():
        over = seen.of("over", process)
        if not over:
            continue
        asked, new = len(seen.of("asked", process)), len(over[0]["model"]) - len(began["model"])
        if asked > new:
            yield f"process {process} asked the model {asked} times and recorded {new} answers"
        for place, answer in began["model"].items():
            if over[0]["model"].get(place) != answer:
                yield f"the recorded answer at {place} was changed or lost"


def no_finished_call_runs_again(trial: Trial) -> Iterator[str]:
    seen = trial.seen
    for process, began in seen.restarts():
        for call in seen.of("entered", process):
            done = [place for place in began["finished"] if _is_inside(call["place"], place)]
            if done:
                yield f"{call['tool']} at {call['place']} was finished ({done[0]}) and its handler was entered again"


def what_is_settled_stays(trial: Trial) -> Iterator[str]:
    """Check that a settled `once` does not run again, and that its value does not change."""
    seen = trial.seen
    for process, began in seen.restarts():
        for step in seen.of("step begun", process):
            if step["key"] in began["settled"]:
                yield f"once {step['key']!r} was settled and was run again"
        if seen.over is not None:
            for key, value in began["settled"].items():
                if seen.over["settled"].get(key) != value:
                    yield f"the settled value of {key!r} was changed or lost"


def what_cant_be_repeated_is_not(trial: Trial) -> Iterator[str]:
    """Check that the handler of a call that must not be repeated is entered at most once in each attempt.

    If an irreversible call is interrupted, the model must be told that the outcome is unknown. Calls to tools that have
    a probe are not checked.
    """
    seen = trial.seen
    entered = [call for call in seen.of("entered") if is_unrepeatable(call) and not call["probed"]]
    for attempt, times in Counter(call["attempt"] for call in entered).items():
        if times > 1:
            yield f"the irreversible call at {attempt} was entered {times} times"
    ended = seen.ended
    if ended is None:
        return
    told = {
        result["id"]: result["text"]
        for messages in (ended["messages"], *seen.whole.values())
        for message in messages
        for result in message.get("results", ())
    }
    for call in seen.cut:
        if call["effect"] == "irreversible" and is_unrepeatable(call) and not call["probed"]:
            text = told.get(call["ids"][0])
            if text is not None and _NOT_KNOWN not in text:
                yield f"{call['tool']} was cut off, and the model is told {text!r}"


def answers_are_taken_once(trial: Trial) -> Iterator[str]:
    seen = trial.seen
    for twice in seen.of("answered twice"):
        yield f"a second, different answer to {twice['question']} was accepted"
    for _, began in seen.restarts():
        for question, answer in began["answered"].items():
            if seen.over is not None and seen.over["answered"].get(question) != answer:
                yield f"the answer to {question} was changed or lost"


def files_are_never_torn(trial: Trial) -> Iterator[str]:
    """Check that the files after each recovery match a state in the uncrashed run.

    The final files must match those of the uncrashed run, unless an interrupted call that must not run again may have
    lost changes.
    """
    uncrashed, seen = trial.uncrashed, trial.seen
    states = [each["files"] for what in ("began", "committed") for each in uncrashed.of(what)]
    for process, began in seen.restarts():
        if began["files"] not in states:
            yield f"process {process} found the files in a state that no commit left: {_short(began['files'])}"
    if seen.over is None or uncrashed.over is None or _may_have_lost(trial):
        return
    files, expected = seen.over["files"], uncrashed.over["files"]
    if files != expected:
        yield f"at the end the files are {_short(files)}, not {_short(expected)}"


def the_state_is_the_same(trial: Trial) -> Iterator[str]:
    ended, expected = trial.seen.ended, trial.uncrashed.ended
    if ended is None or expected is None or _may_have_lost(trial):
        return
    if ended["state"] != expected["state"]:
        yield f"at the end the state is {_short(ended['state'])}, not {_short(expected['state'])}"


def logs_are_whole(trial: Trial) -> Iterator[str]:
    """Check that each log has as many items as without a crash, or fewer if a call that must not run again was interrupted."""
    ended, expected = trial.seen.ended, trial.uncrashed.ended
    if ended is None or expected is None:
        return
    cut = any(is_unrepeatable(call) for call in trial.seen.cut) or bool(trial.doubtful())
    for kind in {**ended["logs"], **expected["logs"]}:
        items, others = len(ended["logs"].get(kind, ())), len(expected["logs"].get(kind, ()))
        if items > others or (items < others and not cut):
            yield f"the log {kind} has {items} items, not {others}"


def ids_are_the_same(trial: Trial) -> Iterator[str]:
    """Check that calls and nested runs have the same ids as without a crash, and that no call ends twice."""
    known = set(_ids(trial.uncrashed))
    for found in dict.fromkeys(_ids(trial.seen)):
        if found not in known:
            yield f"there is a call {found[0]!r} in run {found[1]!r} that the uncrashed run does not have"
    ended = trial.seen.ended
    if ended is not None:
        for (id, run), times in Counter((call[0], call[1]) for call in ended["calls"]).items():
            if times > 1:
                yield f"the call {id!r} of {run!r} ended {times} times"


def nothing_secret_is_shown(trial: Trial) -> Iterator[str]:
    """Check that no person is shown a secret, and that the journal contains none that must stay unrecorded."""
    shown = json.dumps(trial.seen.of("shown"))
    for secret in (*trial.secrets, *trial.unrecorded):
        if json.dumps(secret)[1:-1] in shown:
            yield f"{secret!r} was shown"
    for secret in trial.unrecorded:
        if secret.encode() in trial.recorded or json.dumps(secret)[1:-1].encode() in trial.recorded:
            yield f"{secret!r} was recorded"


def usage_is_counted_once(trial: Trial) -> Iterator[str]:
    ended, expected = trial.seen.ended, trial.uncrashed.ended
    over, model = trial.seen.over, trial.uncrashed.over
    if ended is None or expected is None or over is None or model is None:
        return
    if set(over["model"]) == set(model["model"]) and ended["usage"] != expected["usage"]:
        yield f"the usage is {ended['usage']}, not {expected['usage']}"


def each_begun_call_is_charged_once(trial: Trial) -> Iterator[str]:
    """Check that the budget was charged once for every call that began, however often its process died.

    A run that was overtaken is not checked.
    """
    charged = [ended["charged"] for ended in trial.seen.of("ended") if ended["charged"] is not None]
    if not charged or trial.overtaken:
        return
    marked = (
        trial.uncrashed.entered_at(begun) for _, began in trial.seen.restarts() for begun in began["begun"]
    )
    begun = [call for call in (*trial.seen.of("entered"), *marked) if call is not None and call["counts"]]
    expected = len({call["place"] for call in begun})
    if charged[-1] != expected:
        yield f"{charged[-1]} calls were charged, and {expected} began"


def a_run_has_one_owner(trial: Trial) -> Iterator[str]:
    """Check that an overtaken run has one owner at a time, and that the overtaken process changes nothing more and ends."""
    seen = trial.seen
    if not trial.overtaken:
        return
    if seen.peeked is not None and [each["error"] for each in seen.of("failed", seen.peeked)] != ["RunBusy"]:
        yield "another process was given the run while the first had it"
    after, last = seen.of("over", seen.last), seen.over
    if not after or last is None:
        return
    for what in ("status", "finished", "model", "settled", "answered", "files"):
        if after[0][what] != last[what]:
            yield f"the process that was overtaken changed {what}: {_changed(after[0][what], last[what])}"
    if not seen.of("over", 0):
        yield "the process that was overtaken did not end"


def the_journal_verifies(trial: Trial) -> Iterator[str]:
    """Check that verification finds no alteration in the journal that each process left."""
    for verified in trial.seen.of("verified"):
        for altered in verified["altered"]:
            yield f"the journal does not verify: {altered}"


def _is_inside(place: str, call: str) -> bool:
    """Return whether a place is the call's own or inside one of its attempts."""
    return place == call or Place.parse(place).attempt_at(Place.parse(call)) is not None


def _ids(history: History) -> Iterator[tuple[str, str]]:
    """Yield the id and run id of every call, except compensations and probes, which the uncrashed run does not have."""
    undoing = {each["id"] for each in history.of("undoing")}
    for call in history.of("entered"):
        yield call["ids"][0], call["run"]
    for ended in history.of("ended"):
        for id, run in ended["calls"]:
            if id not in undoing:
                yield id, run


def _may_have_lost(trial: Trial) -> bool:
    """Return whether an interrupted call that must not run again may have lost changes to files or state."""
    over = trial.uncrashed.over
    assert over is not None
    return any(
        changed and _is_inside(place, call["place"])
        for call in trial.seen.cut
        if is_unrepeatable(call)
        for place, changed in over["finished"].items()
    )


def _changed(was: Any, now: Any) -> str:
    if not isinstance(was, dict):
        return f"{_short(was)} to {_short(now)}"
    before, after = cast(Details, was), cast(Details, now)
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return _short({key: (before.get(key), after.get(key)) for key in keys})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 600 else f"{text[:600]}..."


LAWS = (
    the_run_ends,
    each_call_has_its_result,
    no_answer_of_the_model_is_asked_for_again,
    no_finished_call_runs_again,
    what_is_settled_stays,
    what_cant_be_repeated_is_not,
    answers_are_taken_once,
    files_are_never_torn,
    the_state_is_the_same,
    logs_are_whole,
    ids_are_the_same,
    nothing_secret_is_shown,
    usage_is_counted_once,
    each_begun_call_is_charged_once,
    a_run_has_one_owner,
    the_journal_verifies,
)
