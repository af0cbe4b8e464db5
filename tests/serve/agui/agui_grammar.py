"""A checker of AG-UI streams that is stricter than the protocol's own clients.

Those clients accept results of unknown calls, and changes to activities that were never shown. `Checker` refuses both.
It also validates every event with the protocol's models, and refuses unknown fields and events that the models write differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ag_ui.core import Event
from pydantic import BaseModel, TypeAdapter

_EVENTS: TypeAdapter[Any] = TypeAdapter(Event)


class Wrong(AssertionError):
    """Raised when a stream breaks the grammar."""


class Checker:
    """Checks the events of one thread's legs, as a client that stays connected receives them."""

    def __init__(self, older: bool = False) -> None:
        self.older = older
        self.leg: str | None = None
        self.legs: list[str] = []
        self.outcomes: list[str] = []
        self.texts: dict[str, str] = {}
        self.calls: dict[str, str] = {}
        """The arguments of each call, by call id. A snapshot of all messages removes the calls that it does not contain."""
        self.names: dict[str, str] = {}
        self.results: dict[str, str] = {}
        self.state: Any = None
        self.custom: list[tuple[str, Any]] = []
        self.started: list[str] = []
        """The call ids, in the order in which the calls started."""
        self._open: dict[str, dict[str, str | None]] = {}
        self._owners: dict[tuple[str, str], str | None] = {}
        self._activities: set[str] = set()
        self._subagents: dict[str, str | None] = {}
        self._closed: set[str] = set()

    def feed(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        _check_shape(event)
        kind, tag = event["type"], event.get("subagentRunId")
        if self.older and (tag is not None or kind.startswith("SUBAGENT")):
            raise Wrong(f"an older client was sent {event}")
        if kind == "CUSTOM":
            self.custom.append((event["name"], event["value"]))
            return  # the page also accepts these events between legs
        if kind == "RUN_STARTED":
            return self._begin(event)
        if self.leg is None:
            raise Wrong(f"{kind} was sent outside a leg")
        if tag is not None and not kind.startswith("SUBAGENT") and tag not in self._subagents:
            raise Wrong(f"{kind} belongs to the nested run {tag}, which is not open")
        handler = getattr(self, f"_{kind.lower()}", None)
        if handler is None:
            raise Wrong(f"{kind} is an event that Handrail never sends")
        handler(event, tag)

    # --- legs ---

    def _begin(self, event: dict[str, Any]) -> None:
        if self.leg is not None:
            raise Wrong("RUN_STARTED was sent inside a leg")
        self.leg = event["runId"]
        if self.leg in self.legs:
            raise Wrong(f"the leg {self.leg} starts twice")
        self.legs.append(event["runId"])
        self._activities.clear()
        self._closed.clear()
        self.state = None

    def _run_finished(self, event: dict[str, Any], tag: str | None) -> None:
        if event["runId"] != self.leg:
            raise Wrong(f"the leg {event['runId']} ends inside the leg {self.leg}")
        if left := {kind: list(ids) for kind, ids in self._open.items() if ids}:
            raise Wrong(f"the leg ends with these open: {left}")
        if self._subagents:
            raise Wrong(f"the leg ends with these nested runs open: {list(self._subagents)}")
        outcome = event.get("outcome", {"type": "success"})
        for interrupt in outcome.get("interrupts", ()):
            call = interrupt.get("toolCallId")
            if call is not None and (call not in self.calls or call in self.results):
                raise Wrong(f"the leg ends with a question about {call}, which is not in progress")
            if call is not None and self._owners["call", call] != interrupt.get("subagentRunId"):
                raise Wrong(f"the leg ends with a question about {call}, which is a call of another run")
        pending = outcome.get("pendingToolCallIds", ())
        if any(call not in self.calls or call in self.results for call in pending):
            raise Wrong(f"a pending call is unknown or has a result: {pending}")
        self.outcomes.append(outcome["type"])
        self.leg = None

    def _run_error(self, event: dict[str, Any], tag: str | None) -> None:
        self._run_finished({"runId": self.leg, "outcome": {"type": "error"}}, tag)

    # --- events with a start and an end ---

    def _start(self, kind: str, id: str, tag: str | None) -> None:
        ids = self._open.setdefault(kind, {})
        if id in ids:
            raise Wrong(f"{kind} {id} is already open")
        if self._owners.setdefault((kind, id), tag) != tag:
            raise Wrong(f"{kind} {id} belongs to another run")
        ids[id] = tag

    def _at(self, kind: str, id: str, tag: str | None) -> None:
        if self._open.get(kind, {}).get(id, "none") != tag:
            raise Wrong(f"{kind} {id} of {tag} is not open")

    def _end(self, kind: str, id: str, tag: str | None) -> None:
        self._at(kind, id, tag)
        del self._open[kind][id]

    def _text_message_start(self, event: dict[str, Any], tag: str | None) -> None:
        if event["messageId"] in self.texts:
            raise Wrong(f"the message {event['messageId']} starts twice")
        self._start("message", event["messageId"], tag)
        self.texts[event["messageId"]] = ""

    def _text_message_content(self, event: dict[str, Any], tag: str | None) -> None:
        self._at("message", event["messageId"], tag)
        self.texts[event["messageId"]] += event["delta"]

    def _text_message_end(self, event: dict[str, Any], tag: str | None) -> None:
        self._end("message", event["messageId"], tag)

    def _reasoning_start(self, event: dict[str, Any], tag: str | None) -> None:
        self._start("span", event["messageId"], tag)

    def _reasoning_message_start(self, event: dict[str, Any], tag: str | None) -> None:
        self._at("span", event["messageId"], tag)
        self._start("reasoning", event["messageId"], tag)

    def _reasoning_message_content(self, event: dict[str, Any], tag: str | None) -> None:
        self._at("reasoning", event["messageId"], tag)

    def _reasoning_message_end(self, event: dict[str, Any], tag: str | None) -> None:
        self._end("reasoning", event["messageId"], tag)

    def _reasoning_end(self, event: dict[str, Any], tag: str | None) -> None:
        self._end("span", event["messageId"], tag)

    # --- calls ---

    def _tool_call_start(self, event: dict[str, Any], tag: str | None) -> None:
        call = event["toolCallId"]
        if call in self.calls:
            raise Wrong(f"the call {call} starts twice")
        self._start("call", call, tag)
        self.calls[call] = ""
        self.started.append(call)
        self.names[call] = event["toolCallName"]

    def _tool_call_args(self, event: dict[str, Any], tag: str | None) -> None:
        self._at("call", event["toolCallId"], tag)
        self.calls[event["toolCallId"]] += event["delta"]

    def _tool_call_end(self, event: dict[str, Any], tag: str | None) -> None:
        self._end("call", event["toolCallId"], tag)

    def _tool_call_result(self, event: dict[str, Any], tag: str | None) -> None:
        call = event["toolCallId"]
        if call not in self.calls:
            raise Wrong(f"a result was sent for the unknown call {call}")
        if call in self.results:
            raise Wrong(f"two results were sent for the call {call}")
        if call in self._open.get("call", {}):
            raise Wrong(f"a result was sent for the call {call} before its end")
        if self._owners["call", call] != tag:
            raise Wrong(f"the result of {call} belongs to another run")
        self.results[call] = event["content"]

    # --- activities and state ---

    def _activity_snapshot(self, event: dict[str, Any], tag: str | None) -> None:
        self._activities.add(event["messageId"])

    def _activity_delta(self, event: dict[str, Any], tag: str | None) -> None:
        if event["messageId"] not in self._activities:
            raise Wrong("the leg changes an activity that it has not shown")

    def _state_snapshot(self, event: dict[str, Any], tag: str | None) -> None:
        self.state = event["snapshot"]

    def _state_delta(self, event: dict[str, Any], tag: str | None) -> None:
        if self.state is None:
            raise Wrong("the leg changes the state before it has sent a snapshot of it")
        self.state = patched(self.state, event["delta"])

    def _messages_snapshot(self, event: dict[str, Any], tag: str | None) -> None:
        """Check a snapshot of all messages, and update the known calls and results.

        New calls are added, and the snapshot's results replace the old ones. Messages and calls that it lacks are forgotten.
        """
        messages = event["messages"]
        ids = [message["id"] for message in messages]
        if len(set(ids)) != len(ids):
            raise Wrong("the snapshot contains a message twice")
        calls = {call["id"]: call for message in messages for call in message.get("toolCalls", ())}
        results = {message["toolCallId"] for message in messages if message["role"] == "tool"}
        if results - calls.keys():
            raise Wrong(f"the snapshot has results of unknown calls: {results - calls.keys()}")
        self.texts = {id: text for id, text in self.texts.items() if id in ids}
        self.results = {each["toolCallId"]: each["content"] for each in messages if each["role"] == "tool"}
        for id, call in calls.items():
            self.calls.setdefault(id, call["function"]["arguments"])
        self.calls = {id: text for id, text in self.calls.items() if id in calls}
        for message in messages:
            tag = message.get("subagentRunId")
            if self.older and tag is not None:
                raise Wrong(f"an older client was sent {message}")
            self._owners["message", message["id"]] = tag
            for call in message.get("toolCalls", ()):
                self._owners["call", call["id"]] = tag
        for kind, known in (("message", ids), ("call", calls)):
            if lost := [id for id in self._open.get(kind, {}) if id not in known]:
                raise Wrong(f"these are open but missing from the snapshot: {lost}")

    # --- nested runs ---

    def _subagent_started(self, event: dict[str, Any], tag: str | None) -> None:
        run, outer = event["subagentRunId"], event.get("parentSubagentRunId")
        if run in self._subagents or run in self._closed:
            raise Wrong(f"the nested run {run} starts twice")
        if outer is not None and outer not in self._subagents:
            raise Wrong(f"the nested run {run} starts inside {outer}, which is not open")
        call = event.get("parentToolCallId")
        if call is None or call not in self.calls or call in self.results:
            raise Wrong(f"the nested run {run} starts inside the call {call}, which is not in progress")
        if self._owners["call", call] != outer:
            raise Wrong(f"the nested run {run} starts inside a call of another run")
        self._subagents[run] = outer

    def _subagent_finished(self, event: dict[str, Any], tag: str | None) -> None:
        run = event["subagentRunId"]
        if run not in self._subagents:
            raise Wrong(f"the nested run {run} is not open")
        if inner := [each for each, outer in self._subagents.items() if outer == run]:
            raise Wrong(f"the nested run {run} ends before {inner}")
        if left := [id for ids in self._open.values() for id, owner in ids.items() if owner == run]:
            raise Wrong(f"the nested run {run} ends with {left} open")
        del self._subagents[run]
        self._closed.add(run)

    _subagent_error = _subagent_finished

    def named(self, name: str) -> Iterator[Any]:
        """Return the values of the custom events with this name."""
        return (value for found, value in self.custom if found == name)


def _check_shape(event: dict[str, Any]) -> None:
    """Validate an event with the protocol's models, and refuse unknown fields."""
    parsed: BaseModel = _EVENTS.validate_python(event)
    unknown = list(_unknown(parsed))
    if unknown:
        raise Wrong(f"{event['type']} has unknown fields: {unknown}")
    dumped = parsed.model_dump(mode="json", by_alias=True)
    if dumped != event:
        raise Wrong(f"the protocol's models write {dumped}, and not {event}")


def _unknown(model: BaseModel) -> Iterator[str]:
    yield from model.model_extra or ()
    for name in type(model).model_fields:
        value = getattr(model, name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, BaseModel):
                yield from _unknown(each)


def patched(state: Any, operations: list[dict[str, Any]]) -> Any:
    """Apply a JSON Patch to a state of the form `{name: [items]}`, and return the new state.

    Raises `Wrong` if an operation replaces a missing name, and `KeyError` if an operation removes a missing name or appends to it.
    """
    state = {name: list(items) for name, items in state.items()}
    for operation in operations:
        _, name, *last = operation["path"].split("/")
        name = name.replace("~1", "/").replace("~0", "~")
        if operation["op"] == "remove":
            del state[name]
        elif last == ["-"]:
            state[name].append(operation["value"])
        elif operation["op"] == "add" or name in state:
            state[name] = list(operation["value"])
        else:
            raise Wrong(f"{operation} changes a missing item")
    return state
