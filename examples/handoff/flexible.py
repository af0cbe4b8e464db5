"""Pattern 3: a model or a person takes part. One tool asks a model, asks a person, or decides by itself.

python examples/handoff/flexible.py
"""

from dataclasses import dataclass

from handrail import (
    AgentEnvironment,
    Handoff,
    HeadlessEnvironment,
    Parked,
    ScriptedModel,
    ToolContext,
    ToolResult,
    open_gate,
)
from handrail.testing import Person


@dataclass(frozen=True)
class Order:
    guest: str


@dataclass(frozen=True)
class Prices:
    of: dict[str, int]


@dataclass(frozen=True)
class Menu:
    choices: list[str]


@dataclass(frozen=True)
class Choice:
    selected: str


make_choice = Handoff("make_choice", "Let a guest choose a drink.", params=Order, effect="read")


@make_choice.before
async def look_up(params: Order, *, context: ToolContext) -> Parked[Prices, Menu]:
    prices = {"tea": 3, "coffee": 4, "water": 0}
    return Parked(Prices(prices), Menu(list(prices)))


@make_choice.client
async def choose(menu: Menu, *, context: ToolContext) -> Choice:
    if context.prompt_model:
        return await context.prompt_model(f"Choose from: {', '.join(menu.choices)}", Choice)
    if context.wait_for:
        return await context.wait_for("pick", menu, Choice, message="Which one do you choose?")
    return Choice(menu.choices[-1])


@make_choice.after
async def charge(prices: Prices, choice: Choice, *, context: ToolContext) -> ToolResult[int]:
    if choice.selected not in prices.of:
        return ToolResult.error(f"{choice.selected} is not on the menu.")
    return ToolResult.ok(prices.of[choice.selected], choice.selected)


def main() -> None:
    """Run the same tool in three environments."""
    for environment in (
        Person(answers={"pick": {"selected": "tea"}}),
        AgentEnvironment(ScriptedModel(['{"selected": "coffee"}'])),
        HeadlessEnvironment(),
    ):
        result = (
            open_gate([make_choice], environment=environment).invoke("make_choice", {"guest": "Ada"}).wait()
        )
        print(f"{type(environment).__name__}: {result.message} for {result.value}")


if __name__ == "__main__":
    main()
