"""Tickets: signed texts with which another process can run a call's tool."""

import base64
import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Deadline, Tool
from handrail.context import Ticket
from handrail.errors import ContextError, TicketError
from handrail.testing import TICKET_KEY, headless_context
from support import PATIENCE

KEY = bytes(range(32))
TICKET = Ticket(
    run_id="run-1",
    place=".2~1.3",
    call_id="call-1",
    session_id="session-1",
    tool="search",
    path=("outer", "search"),
    depth=1,
    deadline=datetime(2030, 1, 1, 12, 30, tzinfo=UTC),
    budget={"tokens": 1000.0, "usd": 0.25},
    capabilities=("fs.read", "net"),
    effect="read",
)


def body_of(text: str) -> Any:
    """Return a ticket's body, read without the key."""
    encoded = text.partition(".")[0]
    return json.loads(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))


def test_a_ticket_comes_back_as_it_was():
    """A ticket that is sealed and opened with the same key keeps every field."""
    assert Ticket.open(TICKET.seal(KEY), KEY) == TICKET


def test_a_ticket_without_deadline_or_budget_comes_back_too():
    """A ticket without a deadline, a budget or capabilities is opened without them."""
    bare = msgspec.structs.replace(TICKET, deadline=None, budget={}, capabilities=())
    assert Ticket.open(bare.seal(KEY), KEY) == bare


def test_the_text_is_stable_and_fits_into_a_url():
    """The same ticket and key always give the same URL-safe text, whatever the order of the budget's units."""
    other_order = msgspec.structs.replace(TICKET, budget={"usd": 0.25, "tokens": 1000.0})
    assert TICKET.seal(KEY) == other_order.seal(KEY)
    assert set(TICKET.seal(KEY)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def test_it_carries_what_the_other_side_needs_and_nothing_more():
    """A ticket contains ids, tool, path, place, depth, deadline, budget share, capabilities, effect and version only."""
    assert body_of(TICKET.seal(KEY)) == {
        "v": 1,
        "run_id": "run-1",
        "place": ".2~1.3",
        "call_id": "call-1",
        "session_id": "session-1",
        "tool": "search",
        "path": ["outer", "search"],
        "depth": 1,
        "deadline": "2030-01-01T12:30:00Z",
        "budget": {"tokens": 1000.0, "usd": 0.25},
        "capabilities": ["fs.read", "net"],
        "effect": "read",
    }


def test_another_process_opens_it():
    """Another process needs only the text and the key to open a ticket."""
    code = (
        "import sys; from handrail.context import Ticket; "
        "t = Ticket.open(sys.argv[1], bytes.fromhex(sys.argv[2])); print(t.call_id, t.budget['usd'], t.deadline)"
    )
    command = [sys.executable, "-c", code, TICKET.seal(KEY), KEY.hex()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (result.stdout, result.stderr) == ("call-1 0.25 2030-01-01 12:30:00+00:00\n", "")


@pytest.mark.parametrize(
    "field", ["depth", "budget", "deadline", "tool", "capabilities", "session_id", "place", "effect"]
)
def test_a_changed_ticket_is_refused(field: str):
    """A ticket that was changed without the key is refused."""
    body, signature = TICKET.seal(KEY).split(".")
    changed = body_of(body)
    changed[field] = {"depth": 0, "budget": {"usd": 9e9}, "capabilities": ["proc.exec"]}.get(field, "x")
    encoded = base64.urlsafe_b64encode(json.dumps(changed, sort_keys=True).encode()).rstrip(b"=").decode()
    with pytest.raises(TicketError, match="its signature is wrong"):
        Ticket.open(f"{encoded}.{signature}", KEY)


@given(st.data())
def test_any_flipped_character_is_refused(data: st.DataObject):
    """A ticket with one changed character is refused, or it still decodes to the same ticket."""
    text = TICKET.seal(KEY)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("ABCdef019-_.~ä"))
    changed = text[:place] + other + text[place + 1 :]
    try:
        opened = Ticket.open(changed, KEY)
    except TicketError:
        return
    assert opened == TICKET  # the last base64 character has unused bits


@given(st.text() | st.text("abcABC012-_.=", max_size=80))
def test_whatever_is_not_a_ticket_is_refused_as_such(text: str):
    """Any text that is not a ticket is refused with `TicketError`."""
    with pytest.raises(TicketError):
        Ticket.open(text, KEY)


@pytest.mark.parametrize("text", ["", "hello", "a.b.c", ".", "ä.ö", "eyJ9.", "not a ticket."])
def test_the_words_for_what_is_no_ticket(text: str):
    """The error for an invalid ticket says what is wrong and what to do, and is a `ValueError`."""
    with pytest.raises(TicketError, match=r"^ticket refused: .+\. [A-Z].+\.$") as caught:
        Ticket.open(text, KEY)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ContextError)


def test_another_key_does_not_open_it():
    """A ticket can't be opened with a different key."""
    with pytest.raises(TicketError, match="with which it was sealed") as caught:
        Ticket.open(TICKET.seal(KEY), bytes(32))
    assert caught.value.problem == "its signature is wrong"


@pytest.mark.parametrize("length", [0, 15])
def test_a_short_key_is_refused(length: int):
    """A key of fewer than 16 bytes is refused, both for sealing and for opening."""
    with pytest.raises(TicketError, match=f"the key has {length} bytes. Use at least 16 random bytes"):
        TICKET.seal(bytes(length))
    with pytest.raises(TicketError, match=f"the key has {length} bytes"):
        Ticket.open(TICKET.seal(KEY), bytes(length))


def test_another_version_is_refused_by_number(monkeypatch: pytest.MonkeyPatch):
    """A ticket with a different version is refused, and the error names both versions."""
    monkeypatch.setattr("handrail.context.facts._VERSION", 2)
    newer = TICKET.seal(KEY)
    monkeypatch.undo()
    with pytest.raises(TicketError, match="its version is 2, and this process supports 1"):
        Ticket.open(newer, KEY)


def test_a_contexts_ticket_is_one():
    """`context.ticket()` seals the call's own ids, tool, depth, deadline and capabilities."""
    deadline = Deadline(datetime(2031, 5, 1, tzinfo=UTC))
    context = headless_context(
        call_id="call-9",
        tool=Tool("fetch", "Fetches.", capabilities=frozenset({"net", "fs.write"})),
        depth=2,
        deadline=deadline,
    )
    ticket = Ticket.open(context.ticket(), TICKET_KEY)
    assert (ticket.call_id, ticket.tool, ticket.depth) == ("call-9", "fetch", 2)
    assert (ticket.deadline, ticket.capabilities) == (deadline.at, ("fs.write", "net"))
    assert (ticket.run_id, ticket.session_id) == (context.run_context.run_id, context.run_context.session_id)
    assert context.ticket() == context.ticket()
