"""The tools of the support desk. Each worker gets only those it lists."""

from typing import Any

from handrail import ToolContext, ToolResult, tool

PAYMENTS = {"ada": [2000, 2000], "bob": [90000], "eve": [1500, 1500]}
"""The payments of each customer, in cents. They stand for a bank, whose state Handrail can't roll back."""


@tool(effect="read")
async def payments_of(customer: str) -> list[int]:
    """List what a customer has paid, in cents."""
    return PAYMENTS.get(customer, [])


async def take_back(params: Any, value: int, *, context: ToolContext) -> None:
    """Undo a refund. The customer is charged again."""
    PAYMENTS[params.customer].append(value)
    print(f"    bank: {value / 100:.2f} charged to {params.customer} again")


@tool(effect="compensable", compensate=take_back, capabilities={"money"})
async def refund(customer: str, cents: int) -> ToolResult[int]:
    """Refund a payment. Somebody has to approve it."""
    if cents not in PAYMENTS.get(customer, []):
        return ToolResult.error(f"{customer} never paid {cents}. Look up the payments.")
    PAYMENTS[customer].remove(cents)
    print(f"    bank: {cents / 100:.2f} to {customer}")
    return ToolResult.ok(cents, f"{cents / 100:.2f} refunded")


@tool(effect="idempotent", capabilities={"mail"})
async def send_receipt(customer: str, context: ToolContext) -> str:
    """Send a customer the receipt of a refund."""
    if customer == "eve":
        raise ConnectionError("eve's mailbox is full")
    await context.once("mail", lambda: print(f"    mail: a receipt to {customer}"))
    return "sent"


@tool(capabilities={"desk"})
async def settle(customer: str, cents: int, context: ToolContext) -> str:
    """Refund a payment and send the receipt. Either both happen or neither does."""
    (await context.call("refund", customer=customer, cents=cents)).unwrap()
    (await context.call("send_receipt", customer=customer)).unwrap()
    return f"{customer} has {cents / 100:.2f} back, and a receipt"


@tool(effect="read")
async def status() -> str:
    """Say what is broken at the moment."""
    return "The app has not opened on phones since this morning; the web page works."
