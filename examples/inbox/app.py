"""Sort a family's inbox. A dozen messages are read and filed into folders, and the bills among them are booked.

With `make run` the embedded model sorts the messages, and a rule decides on the bills. With `make serve` a person sorts
and decides on a page, with the same tools.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    Handoff,
    LocalModel,
    Parked,
    Prompt,
    ToolContext,
    ToolResult,
    WorkerRegistry,
    gather,
    tool,
)
from handrail.journal.protocol import Journal

T = TypeVar("T")

HERE = Path(__file__).parent


# One message, sorted by a person or a model.


class Letter(BaseModel):
    """The message to sort."""

    path: str


class Shown(BaseModel):
    """The public part: the message's text, on one line."""

    text: str


class Slip(BaseModel):
    """Where the message belongs, and what it is about."""

    about: Annotated[
        str, Field(max_length=60)
    ]  # first, because a small model chooses a folder better after writing this
    folder: Literal["money", "travel", "health", "school"]
    sender: Annotated[str, Field(max_length=40)]


sort_message = Handoff("sort_message", "Sort one message.", params=Letter, effect="staged")


@sort_message.before
async def open_it(letter: Letter, *, context: ToolContext) -> Parked[Letter, Shown]:
    return Parked(letter, Shown(text=on_one_line(context.filesystem.read(letter.path))))


@sort_message.client
async def read_it(shown: Shown, *, context: ToolContext) -> Slip:
    if context.prompt_model:
        examples = (HERE / "clerk.md").read_text().strip()
        return await context.prompt_model(f"Message: {shown.text}\nSlip:", Slip, system=examples)
    if context.wait_for:
        return await context.wait_for("slip", shown, Slip, message="Please fill in the slip.")
    return Slip(about="nobody read it", folder="money", sender="unknown")


@sort_message.after
async def file_it(letter: Letter, slip: Slip, *, context: ToolContext) -> ToolResult[Slip]:
    text = context.filesystem.read(letter.path)
    context.filesystem.write(filed(letter.path, slip), f"From: {slip.sender}\nAbout: {slip.about}\n\n{text}")
    context.filesystem.delete(letter.path)
    return ToolResult.ok(slip, f"{Path(letter.path).stem} is filed under {slip.folder}")


def filed(path: str, slip: Slip) -> str:
    return f"filed/{slip.folder}/{Path(path).name}"


def on_one_line(text: str) -> str:
    return " ".join(text.split())


# Bills and how they are booked.


@tool(effect="staged", capabilities={"bills"})
async def book_bill(path: str, payee: str, sum: str, context: ToolContext) -> str:
    """Put a bill on the list of those to pay, and mark its message as booked."""
    files = context.filesystem
    text = files.read(path)
    files.append("bills.csv", f"{payee},{sum}\n")
    files.write(path, f"Booked: {sum} to {payee}\n{text}")
    if sum not in text:
        raise ValueError(f"the message does not mention {sum!r}")
    if not sum.endswith(" euros"):
        raise ValueError(f"{sum!r} can't be booked, only euros can")
    return f"{sum} to {payee}"


# The whole inbox.


@tool(effect="idempotent", capabilities={"fs.write"})
async def sort_inbox(context: ToolContext) -> str:
    """Sort every message of the inbox, and book the bills among them."""
    paths = context.filesystem.glob("inbox/*.txt")
    at_once = asyncio.Semaphore(
        3
    )  # a person on the page can sort several messages at once; the embedded model takes one at a time
    calls = [context.call("sort_message", path=path) for path in paths]
    slips = [result.unwrap() for result in await gather(*(one_of(at_once, call) for call in calls))]

    bills = [filed(path, slip) for path, slip in zip(paths, slips, strict=True) if slip.folder == "money"]
    booked = 0
    for bill in bills:
        text = context.filesystem.read(bill)
        found = await context.call_worker("bookkeeper", f"Message: {on_one_line(text)}\nAnswer:")
        booked += (await context.call("book_bill", path=bill, **found)).success
    return f"{len(paths)} messages sorted. {booked} of {len(bills)} bills booked."


async def one_of(some: asyncio.Semaphore, work: Awaitable[T]) -> T:
    async with some:
        return await work


# The app.

prompt = Prompt(
    "inbox",
    "You are a helpful assistant. Say in one sentence what was done.",
    tools=[sort_inbox, sort_message, book_bill],
    policies=[CapabilityPolicy({"fs.write": "allow", "bills": "ask"})],
)


def adapter_for(folder: Path, journal: Journal | None = None) -> Adapter:
    """Create an adapter for a family's folder. The environment and the approvals are set for each run."""
    return Adapter(
        LocalModel(first_call=sort_inbox, max_tokens=48),
        filesystem=DirectoryFilesystem(folder),
        workers=WorkerRegistry(HERE / "workers"),
        journal=journal,
    )


def new_mail(folder: Path, most: int | None = None) -> None:
    """Copy the sample messages, or the first `most` of them, into the inbox of a folder."""
    (folder / "inbox").mkdir(parents=True, exist_ok=True)
    for message in sorted((HERE / "messages").iterdir())[:most]:
        shutil.copy(message, folder / "inbox")
