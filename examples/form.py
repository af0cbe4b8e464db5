"""A person at a terminal or a model fills in a form, with the same tool and the same checks.

    python examples/form.py                                   # at a terminal you fill it in; piped, a rule does
    python examples/form.py --by model                        # a model fills it in from a note (scripted)
    python examples/form.py --by model --model openai:gpt-5   # a real one

The form is generated from the answer's type, with its nested parts, choices and bounds. The person or model
does not see the private limit that is checked afterwards.
"""

from __future__ import annotations

import argparse
from datetime import date
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from handrail import (
    AgentEnvironment,
    Handoff,
    Parked,
    ScriptedModel,
    TerminalEnvironment,
    ToolContext,
    ToolResult,
    open_gate,
)
from handrail.protocols import Environment
from handrail.testing import Person


class Expense(BaseModel):
    """One item that was paid for."""

    what: Literal["train", "hotel", "meal", "other"]
    euros: Annotated[float, Field(gt=0, le=5000, description="what it cost")]


class Trip(BaseModel):
    """The answer, with the fields of the form."""

    place: Annotated[str, Field(min_length=2, description="where the trip went")]
    day: Annotated[date, Field(description="when it began")]
    expenses: Annotated[list[Expense], Field(min_length=1)]
    note: str | None = None


class Traveller(BaseModel):
    """The arguments of the tool."""

    name: str
    note: str


class Shown(BaseModel):
    """The public part, shown with the form."""

    traveller: str
    note: str


class Limits(BaseModel):
    """The private part: the account, and the limit that the filled-in form is checked against."""

    account: str
    most: float


claim = Handoff(
    "claim", "Have a traveller claim the expenses of a trip.", params=Traveller, answer=Trip, effect="read"
)


@claim.before
async def look_up(params: Traveller, *, context: ToolContext) -> Parked[Limits, Shown]:
    return Parked(Limits(account="4711", most=400), Shown(traveller=params.name, note=params.note))


@claim.after
async def book(limits: Limits, trip: Trip, *, context: ToolContext) -> ToolResult[float]:
    total = sum(expense.euros for expense in trip.expenses)
    if total > limits.most:
        return ToolResult.error(f"{total:.2f} is more than a trip may cost. Ask the traveller's manager.")
    return ToolResult.ok(total, f"{total:.2f} for {trip.place} on {trip.day} go to account {limits.account}.")


NOTE = "Went to Bergen on 3 March 2026. Train 120, one night at 150."
FILLED = '{"place": "Bergen", "day": "2026-03-03", "expenses": [{"what": "train", "euros": 120}, {"what": "hotel", "euros": 150}]}'


def choose_environment(by: str, model: str | None) -> Environment:
    """Return the environment of the person or model that fills in the form."""
    if by == "model":
        return AgentEnvironment(model or ScriptedModel([FILLED]))
    terminal = TerminalEnvironment()
    if terminal.run_mode == "user":
        return terminal
    train = {"what": "train", "euros": 120}
    answer = {"place": "Oslo", "day": "2026-03-04", "expenses": [train], "note": "window seat"}
    return Person(answers={"claim": answer})


def main() -> None:
    options = argparse.ArgumentParser(description="A form, filled in by a person or by a model.")
    options.add_argument("--by", choices=["person", "model"], default="person")
    options.add_argument(
        "--model", help="provider:name of the model that fills in the form; without it, a scripted model"
    )
    options.add_argument(
        "--note", default=NOTE, help="the traveller's note, from which a model fills in the form"
    )
    given = options.parse_args()
    environment = choose_environment(given.by, given.model)
    print(f"{type(environment).__name__} fills the form in.")
    gate = open_gate([claim], environment=environment)
    print(gate.invoke("claim", {"name": "Ada", "note": given.note}).wait().render())


if __name__ == "__main__":
    main()
