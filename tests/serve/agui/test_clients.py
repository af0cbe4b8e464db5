"""Tests of the server with two versions of AG-UI's own client.

Every scenario runs with both versions. A client has to accept the stream without a warning, and the stream also has to
satisfy our own grammar (agui_grammar.py). `python tests/serve/agui/test_clients.py` runs everything and prints a table
of the outcomes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serve.agui.agui_app import source_of
from serve.agui.agui_grammar import Checker
from support import PATIENCE, ROOT, importing_support, warm_python
from support.reserved_port import reserved_port
from support.served import GATES, serving
from support.serving import BEARER, TOKEN

pytestmark = pytest.mark.once

VERSIONS = ("1.0.0", "0.0.59")
DRIVER = Path(__file__).with_name("drive.mjs")
MAP = {
    "name": "showMap",
    "description": "Show a map to the person.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


@dataclass
class Came:
    """A client's state after one request, and the events it received."""

    messages: list[dict[str, Any]]
    state: Any
    interrupts: list[dict[str, Any]]
    events: list[dict[str, Any]]
    warnings: list[str]
    error: str | None

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    @property
    def text(self) -> str:
        """The content of the client's last message, or "" if it has none."""
        return self.messages[-1].get("content", "")

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def outcome(self) -> str:
        (end,) = [event for event in self.events if event["type"] in ("RUN_FINISHED", "RUN_ERROR")]
        return end.get("outcome", {"type": "success"})["type"] if end["type"] == "RUN_FINISHED" else "error"

    def results(self) -> dict[str, str]:
        return {
            message["toolCallId"]: message["content"]
            for message in self.messages
            if message["role"] == "tool"
        }


class Driver:
    """A node process that runs all clients of one version."""

    def __init__(self, version: str) -> None:
        folder = ROOT / ".components" / f"agui-{version}"
        if not (folder / "node").exists():
            raise AssertionError("AG-UI's client is not installed: run scripts/components")
        self.clients = 0
        self._process = subprocess.Popen(
            [folder / "node", DRIVER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OLDER": "1" if version != "1.0.0" else "0",
                "NO_PROXY": "*",
                "TOKEN": TOKEN,
            },
        )

    def tell(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


_drivers: dict[str, Driver] = {}


def driver_of(version: str) -> Driver:
    """Return the node process for this client version, which is started on first use."""
    if version not in _drivers:
        _drivers[version] = Driver(version)
    return _drivers[version]


def close_drivers() -> None:
    while _drivers:
        _drivers.popitem()[1].close()


@pytest.fixture(scope="module", autouse=True)
def drivers() -> Iterator[None]:
    """End the node processes that this module's tests have started."""
    yield
    close_drivers()


@dataclass
class Client:
    """A client of one version, on one thread."""

    version: str
    url: str
    thread: str
    checker: Checker = field(init=False)

    def __post_init__(self) -> None:
        self.checker = Checker(older=self.older)
        self._driver = driver_of(self.version)
        self._driver.clients += 1
        self._number = self._driver.clients

    @property
    def older(self) -> bool:
        return self.version != "1.0.0"

    def do(
        self, what: str, *, left: bool = False, joined: Callable[[], object] | None = None, **told: Any
    ) -> Came:
        who = {"client": self._number, "url": self.url, "thread": self.thread}
        self._driver.tell({"do": what, "joined": joined is not None, **told, **who})
        if joined is not None:
            assert self._driver.hear() == {"joined": True}
            joined()
        came = Came(**self._driver.hear())
        assert came.warnings == [], came.warnings
        if what == "connect":
            self.checker = Checker(older=self.older)
        if not left and came.events:
            self.checker.feed(came.events)
            assert self.checker.leg is None, "the stream ended in the middle of a leg"
        return came

    def say(self, text: str, **told: Any) -> Came:
        return self.do("say", text=text, **told)

    def resume(self, *answers: tuple[dict[str, Any], Any], **told: Any) -> Came:
        """Answer interrupts. The value None abandons an interrupt."""
        entries = [
            {"interruptId": interrupt["id"], "status": "cancelled"}
            if value is None
            else {"interruptId": interrupt["id"], "status": "resolved", "payload": value}
            for interrupt, value in answers
        ]
        return self.do("say" if "text" in told else "run", resume=entries, **told)


@dataclass
class Place:
    """A server, and clients of one version that use it."""

    version: str
    folder: Path
    url: str

    def client(self, thread: str = "thread-1") -> Client:
        return Client(self.version, self.url, thread)

    @property
    def older(self) -> bool:
        return self.version != "1.0.0"

    def get(self, path: str) -> Any:
        made = urllib.request.Request(f"{self.url}{path}", headers=BEARER)
        with urllib.request.urlopen(made, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: Any) -> Any:
        made = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json", **BEARER}
        )
        with urllib.request.urlopen(made, timeout=PATIENCE) as answer:
            return json.loads(answer.read() or b"null")

    def delete(self, path: str) -> None:
        made = urllib.request.Request(f"{self.url}{path}", headers=BEARER, method="DELETE")
        with urllib.request.urlopen(made, timeout=PATIENCE):
            pass


@contextlib.contextmanager
def place(version: str, folder: Path) -> Generator[Place]:
    with serving(folder, source=source_of(folder), token=TOKEN) as server:
        try:
            yield Place(version, folder, server.url)
        except BaseException:
            close_drivers()  # otherwise the next client would read this client's late output as its own
            raise


# --- scenarios --------------------------------------------------------------------------------------------


def text(place: Place) -> None:
    """Text is streamed as the model writes it, and a second message continues the conversation."""
    client = place.client()
    came = client.say("hello")
    assert came.outcome == "success"
    assert came.text == "Hello to you."
    assert len(came.of("TEXT_MESSAGE_CONTENT")) > 1
    came = client.say("show")
    assert [message["role"] for message in came.messages] == ["user", "assistant"] * 2
    assert came.of("RUN_FINISHED")[0]["usage"][0]["inputTokens"] == 1200


def thinking(place: Place) -> None:
    """A model's thinking arrives in a separate message with the role `reasoning`."""
    came = place.client().say("think")
    assert [(each["role"], each["content"]) for each in came.messages[1:]] == [
        ("reasoning", "Let me think about it."),
        ("assistant", "So it is."),
    ]


def streamed_arguments(place: Place) -> None:
    """The streamed pieces of a call's arguments add up to what the model wrote."""
    came = place.client().say("map", tools=[MAP])
    assert len(came.of("TOOL_CALL_ARGS")) > 1
    (call,) = came.messages[1]["toolCalls"]
    assert json.loads(call["function"]["arguments"]) == {"place": "Oslo"}


def taken_back(place: Place) -> None:
    """If the connection to the model is lost, the text, the calls and the pictures that were already streamed are withdrawn.

    An older client keeps a withdrawn picture's message without its content.
    """
    came = place.client().say("flaky")
    assert came.outcome == "success"
    assert "This is not to " in [event["delta"] for event in came.of("TEXT_MESSAGE_CONTENT")]
    kept = [each for each in came.messages if each["role"] != "activity"]
    assert [(each["role"], each["content"]) for each in kept] == [
        ("user", "flaky"),
        ("assistant", "Now it is whole."),
    ]
    left = [(each["activityType"], each["content"]) for each in came.messages if each["role"] == "activity"]
    assert left == ([("handrail.withdrawn", {})] if place.older else [])


def taken_back_later(place: Place) -> None:
    """What is withdrawn takes nothing else with it: earlier pictures stay, and a client of today keeps other activities too."""
    GATES["sheep"].set()
    client = place.client()
    before = [each for each in client.say("sheep").messages if each["role"] == "activity"]
    drawn = [
        each for each in client.say("draw").messages if each.get("activityType") == "handrail.attachment"
    ]
    came = client.say("flaky")
    assert [each["activityType"] for each in came.of("ACTIVITY_SNAPSHOT")] == [
        "handrail.attachment",
        "handrail.withdrawn",
    ]
    at = [each["content"] for each in came.messages].index("flaky")
    assert [(each["role"], each["content"]) for each in came.messages[at:]] == [
        ("user", "flaky"),
        ("assistant", "Now it is whole."),
    ]
    assert len(drawn) == 3
    assert all(each in came.messages for each in drawn)
    assert place.older or all(each in came.messages for each in before)


def progress(place: Place) -> None:
    """A call's progress is shown as one activity, which later reports update."""
    GATES["sheep"].set()
    came = place.client().say("sheep")
    (shown,) = [message for message in came.messages if message["role"] == "activity"]
    assert shown["activityType"] == "progress"
    assert shown["content"]["done"] == shown["content"]["total"] == 8
    assert (len(came.of("ACTIVITY_SNAPSHOT")), len(came.of("ACTIVITY_DELTA"))) == (1, 7)
    assert came.outcome == "success"


def drawing(place: Place) -> None:
    """What a model makes is an activity in its answer. A client that sends it back with the next message continues."""
    client = place.client()
    assert client.say("draw").outcome == "success"
    came = client.say("draw")
    assert came.outcome == "success"
    roles = ["user", "assistant", "activity", "activity", "assistant", "tool", "assistant", "activity"]
    assert [each["role"] for each in came.messages] == roles * 2
    made = [each["content"] for each in came.messages if each["role"] == "activity"]
    assert [each["name"] for each in made] == ["cat.png", "song.wav", "cat.png"] * 2
    joined = place.client().do("connect")
    assert [(each["id"], each["role"]) for each in joined.messages] == [
        (each["id"], each["role"]) for each in came.messages
    ]


def state(place: Place) -> None:
    """The state is sent when a run starts, and its changes when a call commits."""
    client = place.client()
    came = client.say("book")
    assert came.state == {"Booking": []}
    came = client.resume((came.interrupts[0], {"seats": 4, "day": "2026-05-30"}))
    assert came.state == {"Booking": [{"seats": 4, "day": "2026-05-30"}]}
    assert "STATE_DELTA" in came.types


def approve(place: Place) -> None:
    """A request for approval is sent as an interrupt. The next leg contains the call's result, but does not repeat the call."""
    client = place.client()
    came = client.say("pay")
    assert came.outcome == "interrupt"
    (asked,) = came.interrupts
    (call,) = came.messages[-1]["toolCalls"]
    assert (asked["reason"], asked["toolCallId"]) == ("tool_call", call["id"])
    assert asked["responseSchema"] == {
        "type": "object",
        "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}},
        "required": ["approved"],
    }
    came = client.resume((asked, {"approved": True}))
    assert "TOOL_CALL_START" not in came.types
    assert "paid 30" in came.results()[call["id"]]
    assert came.text == "Paid."


def deny(place: Place) -> None:
    """After a denial, the model receives the reason and the run continues."""
    client = place.client()
    came = client.say("pay")
    came = client.resume((came.interrupts[0], {"approved": False, "reason": "too dear"}))
    (told,) = came.results().values()
    assert "too dear" in told
    assert "paid" not in told
    assert came.outcome == "success"


def abandoned(place: Place) -> None:
    """Abandoning an interrupt does not approve the call."""
    client = place.client()
    came = client.say("pay")
    came = client.resume((came.interrupts[0], None))
    (told,) = came.results().values()
    assert "paid" not in told
    assert came.outcome == "success"


def cancel(place: Place) -> None:
    """A waiting run can be cancelled from outside. The thread then accepts new messages."""
    client = place.client()
    client.say("pay")
    place.post("/threads/thread-1/cancel", {})
    assert place.get("/threads/thread-1")["status"] == "cancelled"
    client = place.client()
    came = client.do("connect")
    assert came.interrupts == []
    assert client.say("hello").text == "Hello to you."


def cancelled_at_work(place: Place) -> None:
    """If a run is cancelled while a client follows it, the stream ends as cancelled (older clients get an error)."""
    GATES["wait"].clear()
    client = place.client()
    client.do("leave", text="wait", after=6, left=True)
    came = place.client().do("connect", joined=lambda: place.post("/threads/thread-1/cancel", {}))
    assert came.outcome == ("error" if place.older else "cancelled")
    assert place.get("/threads/thread-1")["status"] == "cancelled"


def wait_for(place: Place) -> None:
    """A tool's question carries its schema. After an invalid answer has been refused, a valid one is accepted."""
    client = place.client()
    came = client.say("book")
    (asked,) = came.interrupts
    assert asked["reason"] == "input_required"
    assert asked["responseSchema"]["required"] == ["seats", "day"]
    assert asked["metadata"]["handrail"]["payload"] == {"for": "Anna"}
    wrong = client.resume((asked, {"seats": 40, "day": "2026-05-30"}))
    assert wrong.outcome == "error"
    assert "seats" in wrong.of("RUN_ERROR")[0]["message"]
    came = client.resume((asked, {"seats": 4, "day": "2026-05-30"}))
    assert "booked for 4" in next(iter(came.results().values()))


def frontend_tool(place: Place) -> None:
    """A call to a client's own tool is left to the client, and the client's tool message continues the run."""
    client = place.client()
    came = client.say("map", tools=[MAP])
    assert came.outcome == "success"
    if not place.older:
        assert came.of("RUN_FINISHED")[0]["outcome"]["pendingToolCallIds"] == ["map-1"]
    came = client.do("answer", call="map-1", content="Oslo is in the north.")
    assert came.text == "You have seen it."
    assert "TOOL_CALL_START" not in came.types
    assert client.say("hello").text == "Hello to you."


def frontend_tool_and_approval(place: Place) -> None:
    """One request can give the result of a client's tool call and answer an approval question from the same leg."""
    client = place.client()
    came = client.say("map and pay", tools=[MAP])
    assert came.outcome == "interrupt"
    (asked,) = came.interrupts
    assert asked["toolCallId"] == "pay-2"
    came = client.do(
        "answer",
        call="map-2",
        content="seen",
        resume=[{"interruptId": asked["id"], "status": "resolved", "payload": {"approved": True}}],
    )
    assert came.text == "Seen and paid."


def nested_agent(place: Place) -> None:
    """A nested agent's question reaches the client, and the agent continues in the next leg."""
    client = place.client()
    came = client.say("research")
    (asked,) = came.interrupts
    outer = came.messages[1]["toolCalls"][0]["id"]
    if place.older:
        assert asked["toolCallId"] == outer
        assert "SUBAGENT_STARTED" not in came.types
    else:
        started = {event["subagentRunId"]: event for event in came.of("SUBAGENT_STARTED")}
        assert sorted(event["name"] for event in started.values()) == ["reader", "reader", "researcher"]
        assert asked["toolCallId"] != outer
        assert started[asked["subagentRunId"]]["parentToolCallId"] == outer
        ended = {
            each["subagentRunId"]: each.get("outcome", {}).get("type")
            for each in came.of("SUBAGENT_FINISHED")
        }
        assert ended[asked["subagentRunId"]] == "suspended"
    came = client.resume((asked, {"approved": True}))
    assert came.text == "It is known now."
    assert came.results()[outer] == "Umbrellas help against rain."
    if not place.older:
        assert "paid 12" in came.results()[asked["toolCallId"]]


def error(place: Place) -> None:
    """A failed run ends with an error, and the thread then accepts new messages."""
    client = place.client()
    came = client.say("fail")
    assert came.outcome == "error"
    assert client.say("hello").text == "Hello to you."


def reconnect(place: Place) -> None:
    """A client that disconnects does not end the run, and a client that joins in the middle follows it to the end."""
    GATES["wait"].clear()
    client = place.client()
    client.do("leave", text="wait", after=6, left=True)
    came = place.client().do("connect", joined=GATES["wait"].set)
    assert came.of("MESSAGES_SNAPSHOT")
    assert [message["role"] for message in came.messages if message["role"] != "activity"] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert came.text == "I waited."
    assert came.outcome == "success"


def steered(place: Place) -> None:
    """A client that follows a run sees what happens to messages to it. What is told is the user's message, also in its next request."""
    GATES["wait"].clear()
    place.client().do("leave", text="wait", after=6, left=True)
    queue = f"/threads/thread-1/runs/{place.get('/threads/thread-1')['runs'][0]['id']}/messages"

    def steer() -> None:
        place.post(queue, {"text": "hullo", "id": "m1"})
        place.post(f"{queue}/m1", {"text": "hello"})
        place.post(queue, {"text": "hurry", "id": "m2"})
        place.delete(f"{queue}/m2")
        GATES["wait"].set()

    client = place.client()
    came = client.do("connect", joined=steer)
    states = [
        (event["value"]["text"], event["value"]["state"])
        for event in came.of("CUSTOM")
        if event["name"] == "handrail.queued"
    ]
    assert states == [
        ("hullo", "waiting"),
        ("hello", "waiting"),
        ("hurry", "waiting"),
        ("hurry", "withdrawn"),
        ("hello", "told"),
    ]
    shown = [(each["role"], each.get("content")) for each in came.messages if each["role"] != "activity"]
    assert [role for role, _ in shown] == ["user", "assistant", "tool", "user", "assistant"]
    assert [content for _, content in shown[3:]] == ["hello", "Hello to you."]
    assert client.say("colour").interrupts
    assert [
        each["content"] for each in place.get("/threads/thread-1")["messages"] if each["role"] == "user"
    ] == [
        "wait",
        "hello",
        "colour",
    ]


def paused(place: Place) -> None:
    """A paused run ends the leg with an interrupt that belongs to no call, and its answer continues the run."""
    GATES["wait"].clear()
    place.client().do("leave", text="wait", after=6, left=True)
    run_id = place.get("/threads/thread-1")["runs"][0]["id"]

    def pause() -> None:
        place.post(f"/threads/thread-1/runs/{run_id}/orders", {"order": "pause"})
        GATES["wait"].set()

    client = place.client()
    (asked,) = client.do("connect", joined=pause).interrupts
    assert (asked["reason"], asked.get("toolCallId")) == ("input_required", None)
    assert asked["metadata"]["handrail"]["kind"] == "pause"
    came = client.resume((asked, "continue"))
    assert (came.outcome, came.text) == ("success", "I waited.")


def reconnect_to_question(place: Place) -> None:
    """A client that connects later finds the open question, and can answer it."""
    place.client().say("pay")
    later = place.client()
    came = later.do("connect")
    (asked,) = came.interrupts
    came = later.resume((asked, {"approved": True}))
    assert came.text == "Paid."


def two_questions(place: Place) -> None:
    """One `resume` can answer two questions."""
    client = place.client()
    came = client.say("pay two")
    one, two = came.interrupts
    came = client.resume((one, {"approved": True}), (two, {"approved": False, "reason": "no"}))
    assert "paid 1" in came.results()["pay-a"]
    assert "paid" not in came.results()["pay-b"]
    assert came.text == "Both paid."


def partial_resume(place: Place) -> None:
    """A `resume` that answers only one of two interrupts is refused, and both can still be answered."""
    client = place.client()
    came = client.say("pay two")
    one, two = came.interrupts
    wrong = client.resume((one, {"approved": True}), forget=True)
    assert wrong.outcome == "error"
    assert two["id"] in wrong.of("RUN_ERROR")[0]["message"]
    came = client.resume((one, {"approved": True}), (two, {"approved": True}))
    assert came.text == "Both paid."


def said_meanwhile(place: Place) -> None:
    """A message sent while a question is open is refused. If it is sent again with the answer, the model reads it."""
    client = place.client()
    came = client.say("pay")
    wrong = client.say("hello", forget=True)
    assert wrong.outcome == "error"
    assert wrong.of("RUN_ERROR")[0]["code"] == "QuestionsOpen"
    came = client.resume((came.interrupts[0], {"approved": True}))
    assert "paid 30" in came.results().values()
    assert came.text == "Hello to you."


def answer_and_message(place: Place) -> None:
    """A message that comes with an answer is read after the result, in the same run, once, and by clients that join later."""
    client = place.client()
    came = client.say("pay")
    came = client.resume((came.interrupts[0], {"approved": True}), text="hello")
    assert "paid 30" in came.results().values()
    assert came.text == "Hello to you."
    again = client.say("show")
    assert again.outcome == "success"
    joined = place.client().do("connect")
    assert [(each["role"], each.get("content")) for each in joined.messages[:5]] == [
        ("user", "pay"),
        ("assistant", ""),
        ("tool", "paid 30"),
        ("user", "hello"),
        ("assistant", "Hello to you."),
    ]
    assert {each["id"] for each in joined.messages} == {each["id"] for each in again.messages}
    assert [each["content"] for each in joined.messages if each["role"] == "user"] == ["pay", "hello", "show"]


def abandoned_and_message(place: Place) -> None:
    """Somebody who says something else instead of answering abandons the interrupt, and the model reads the message."""
    client = place.client()
    came = client.say("pay")
    came = client.resume((came.interrupts[0], None), text="hello")
    assert "paid 30" not in came.results().values()
    assert came.text == "Hello to you."


def tool_result_and_message(place: Place) -> None:
    """A message after the result of the client's own tool is read after it."""
    client = place.client()
    client.say("map", tools=[MAP])
    came = client.do("answer", call="map-1", content="seen", text="hello")
    assert came.text == "Hello to you."


def answered_again(place: Place) -> None:
    """Sending an answer again only returns the current state. A different answer is refused."""
    client = place.client()
    came = client.say("pay")
    asked = came.interrupts[0]
    client.resume((asked, {"approved": True}))
    client.checker = Checker(older=place.older)
    again = client.resume((asked, {"approved": True}))
    assert again.text == "Paid."
    assert [result for result in again.results().values() if "paid" in result] == ["paid 30"]
    other = client.resume((asked, {"approved": False}))
    assert other.outcome == "error"


SCENARIOS: Mapping[str, Callable[[Place], None]] = {
    scenario.__name__.replace("_", " "): scenario
    for scenario in (
        text,
        thinking,
        streamed_arguments,
        taken_back,
        taken_back_later,
        progress,
        drawing,
        state,
        approve,
        deny,
        abandoned,
        cancel,
        cancelled_at_work,
        wait_for,
        frontend_tool,
        frontend_tool_and_approval,
        nested_agent,
        error,
        reconnect,
        reconnect_to_question,
        steered,
        paused,
        two_questions,
        partial_resume,
        said_meanwhile,
        answer_and_message,
        abandoned_and_message,
        tool_result_and_message,
        answered_again,
    )
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_client_of_either_version_plays_every_scenario(scenario: str, version: str, tmp_path: Path) -> None:
    """Each scenario has the expected outcome with both clients, and neither of them warns."""
    with place(version, tmp_path) as found:
        SCENARIOS[scenario](found)


# --- a server that is killed ---------------------------------------------------------------------------


@contextlib.contextmanager
def process(folder: Path, port: int) -> Generator[warm_python.Program]:
    started = warm_python.start(
        [Path(__file__).with_name("agui_app.py"), folder, str(port)], env=importing_support()
    )
    try:
        while True:
            assert started.poll() is None, "the server exited before it accepted connections"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield started
    finally:
        started.close()


def restart(version: str, folder: Path) -> None:
    """Kill a server while questions are open, and answer them on a new server with the same journal."""
    with reserved_port() as port:
        found = Place(version, folder, f"http://127.0.0.1:{port}")
        with process(folder, port) as server:
            asking, calling = found.client("thread-research"), found.client("thread-map")
            asked = asking.say("research", tools=[MAP])
            calling.say("map", tools=[MAP])
            server.send_signal(signal.SIGKILL)
            server.wait()
        with process(folder, port):
            joined = found.client("thread-research").do("connect")
            assert [each["id"] for each in joined.interrupts] == [each["id"] for each in asked.interrupts]
            assert asking.resume((asked.interrupts[0], {"approved": True})).text == "It is known now."
            assert calling.do("answer", call="map-1", content="seen").text == "You have seen it."


@pytest.mark.parametrize("version", VERSIONS)
def test_a_question_outlives_a_server_that_is_killed(version: str, tmp_path: Path) -> None:
    """Questions survive a killed server: a new client sees them, and the old clients' answers are accepted."""
    restart(version, tmp_path)


def main() -> int:
    """Run all scenarios with both clients, and print the outcomes."""
    print(f"{'':34}" + "".join(f"{version:>10}" for version in VERSIONS))
    wrong: list[str] = []
    for name in (*SCENARIOS, "restart"):
        cells: list[str] = []
        for version in VERSIONS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    if name == "restart":
                        restart(version, Path(folder))
                    else:
                        with place(version, Path(folder)) as found:
                            SCENARIOS[name](found)
                    cells.append("ok")
                except Exception as raised:
                    cells.append("FAILS")
                    wrong.append(f"{name} with {version}: {type(raised).__name__}: {str(raised)[:600]}")
        print(f"{name:34}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    close_drivers()
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
