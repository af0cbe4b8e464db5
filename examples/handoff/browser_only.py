"""Pattern 1: only a person takes part. `client` takes a `UserContext`, so the tool needs a person.

python examples/handoff/browser_only.py
"""

from dataclasses import dataclass

from handrail import Handoff, HeadlessEnvironment, Parked, ToolContext, ToolResult, UserContext, open_gate
from handrail.testing import Person


@dataclass(frozen=True)
class Wanted:
    fields: list[str]


@dataclass(frozen=True)
class Account:
    number: int


@dataclass(frozen=True)
class Form:
    fields: list[str]


@dataclass(frozen=True)
class Filled:
    values: dict[str, str]


get_user_input = Handoff("get_user_input", "Let the user fill in a form.", params=Wanted, effect="read")


@get_user_input.before
async def find_account(params: Wanted, *, context: ToolContext) -> Parked[Account, Form]:
    return Parked(Account(4711), Form(params.fields))


@get_user_input.client
async def fill_in(form: Form, *, context: UserContext) -> Filled:
    return await context.wait_for("input-form", form, Filled, message="Please fill in this form.")


@get_user_input.after
async def save(account: Account, filled: Filled, *, context: ToolContext) -> ToolResult[dict[str, str]]:
    return ToolResult.ok(filled.values, f"Saved to account {account.number}.")


def main() -> None:
    """Call the handoff once with a person who fills in the form, and once with nobody, which fails."""
    person = Person(answers={"input-form": {"values": {"city": "Oslo"}}})
    for environment in (person, HeadlessEnvironment()):
        gate = open_gate([get_user_input], environment=environment)
        print(gate.invoke("get_user_input", {"fields": ["city"]}).wait().render())
    print("the person was shown", person.questions[0].payload)


if __name__ == "__main__":
    main()
