"""One worker sorts support messages, and others handle them. Refunds need approval, and can be undone.

    python examples/support.py                                   # four messages, scripted models, a rule that answers
    python examples/support.py --model anthropic:claude-sonnet-5   # a real model; you are asked at the terminal
    python examples/support.py --model openai:gpt-5 "I am bob, and my order never came."

The workers are files in `examples/support`, with their tools in `tools.py`. A refund can't be rolled back like a
file, so its tool declares a compensation. If the call around the refund fails, the customer is charged again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from handrail import Budget, ScriptedModel, Session, TerminalEnvironment, ToolCall, WorkerRegistry
from handrail.events import ToolInvoked, ToolRolledBack
from handrail.messages import ModelRequest
from handrail.question import Question
from handrail.testing import Person

MESSAGES = (
    "I am ada. You took 20.00 from me twice!",
    "bob here: I want my 900.00 back, the thing is ugly.",
    "This is eve. 15.00 were taken twice.",
    "The app does not open on my phone.",
)


def triage(request: ModelRequest) -> str | ToolCall:
    """Answer as the main worker's model might: delegate, then answer with the result."""
    about_money = ".00" in request.messages[0].text
    kind = "billing" if about_money else "technical"
    if len(request.messages) == 1:
        return ToolCall(kind, {"input": request.messages[0].text})
    return json.dumps({"kind": kind, "answer": request.messages[-1].text})


def billing(request: ModelRequest) -> str | ToolCall:
    """Answer as the billing worker's model might: look up, settle, report."""
    said = request.messages[0].text
    customer, cents = next(
        (who, sum) for who, sum in (("ada", 2000), ("bob", 90000), ("eve", 1500)) if who in said
    )
    last = request.messages[-1].text
    steps: list[str | ToolCall] = [
        ToolCall("payments_of", {"customer": customer}),
        ToolCall("settle", {"customer": customer, "cents": cents}),
        f"You have {cents / 100:.2f} back."
        if "has" in last
        else "I could not give it back; a colleague will write.",
    ]
    return steps[len(request.messages) // 2]


def technical(request: ModelRequest) -> str | ToolCall:
    """Answer as the technical worker's model might."""
    return ToolCall("status", {}) if len(request.messages) == 1 else "Please use the web page until tonight."


def rule(question: Question) -> bool | str:
    """Answer in place of a person, and approve only small sums."""
    sum = question.payload["arguments"]["cents"]
    print(
        f"  ? {' > '.join(question.asked_by)}: {sum / 100:.2f} for {question.payload['arguments']['customer']}"
    )
    return True if sum <= 5000 else "more than 50.00 needs a signature"


def show(event: ToolInvoked) -> None:
    """Print one line for a call, with the path that led to it."""
    print(f"  {' > '.join(('main', *event.path))}: {event.status}, {event.result.render().splitlines()[0]}")


def undone(event: ToolRolledBack) -> None:
    if event.compensated:
        print(f"  {event.tool} failed, so these calls were undone: {', '.join(event.compensated)}")


def main() -> None:
    options = argparse.ArgumentParser(description="Sort and answer the messages of customers.")
    options.add_argument("messages", nargs="*", default=MESSAGES)
    options.add_argument(
        "--model", help="provider:name; without it, scripted models handle the sample messages"
    )
    given = options.parse_args()
    if given.messages != MESSAGES and not given.model:
        options.error("the scripts only know the sample messages. Name a model: --model provider:name.")
    registry = WorkerRegistry(Path(__file__).with_name("support"))
    for message in given.messages:
        session = Session()
        session.dispatcher.subscribe(ToolInvoked, show)
        session.dispatcher.subscribe(ToolRolledBack, undone)
        scripts = {"main": triage, "billing": billing, "technical": technical}
        print(f'"{message}"')
        response = registry.run(
            "main",
            message,
            model=given.model,
            models={} if given.model else {name: ScriptedModel(script) for name, script in scripts.items()},
            environment=TerminalEnvironment() if given.model else Person(approve=rule),
            session=session,
            budget=Budget(requests=20),
        ).wait()
        print(f"  {response.output['kind']}: {response.output['answer']}\n")


if __name__ == "__main__":
    main()
