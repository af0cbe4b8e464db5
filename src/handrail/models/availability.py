"""Availability: which providers' models would work with the current setup, and what the others need."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from handrail.errors import DefinitionError, ModelError
from handrail.models import ModelUnavailable
from handrail.models.http import Endpoint
from handrail.models.local import find_weights
from handrail.models.providers import BRIDGED, PROVIDERS, Provider

SECONDS = 2.0
"""Maximum seconds to wait for a server to list its models."""

State = Literal["ready", "no key", "no address", "down", "refused", "not installed", "installed", "not asked"]


class Availability(msgspec.Struct, frozen=True):
    """Whether one provider's models would work with the current setup."""

    provider: str
    state: State
    detail: str
    """What the models are or how they are reached, or else what to do so that they work."""
    models: tuple[str, ...] = ()
    """The full names of the models, if they are built in or the server lists them."""


async def survey(*, contact: bool = True) -> list[Availability]:
    """Return the availability of every provider, with those that are ready first.

    The last item stands for all providers of the bridge. Only self-hosted servers, and servers that replace a provider's own, are contacted,
    and none without `contact`.
    """
    found = await asyncio.gather(*(_look(name, row, contact) for name, row in PROVIDERS.items()))
    return [*sorted(found, key=lambda each: each.state != "ready"), _bridge()]


async def _look(name: str, row: Provider, contact: bool) -> Availability:
    if row.wire == "embedded":
        return _embedded(name)
    if row.wire == "demo":
        return Availability(name, "ready", "fixed answers, for trying the commands", ("demo:notes",))
    address = row.find_address()
    if not address:
        needed = " and ".join([*(each.variable for each in row.addresses), row.keys[0].variable])
        return Availability(name, "no address", f"Set {needed}.")
    key = next((key.variable for key in row.keys if key.find()), None)
    if row.needs_key(address):
        if key is None:
            return Availability(name, "no key", f"Set {row.keys[0].variable}.")
        return Availability(name, "ready", f"{name}:NAME, with the key in {key}")
    return await _ask(name, row, address) if contact else Availability(name, "not asked", f"at {address}")


async def _ask(name: str, row: Provider, address: str) -> Availability:
    """Ask a server for its models, and return whether it can be used.

    A server that answers is ready even if it does not list its models, unless it refuses the key or says that it is
    unavailable.
    """
    variable = row.addresses[0].variable
    path = "/v1/models" if row.wire == "anthropic" else "/models"
    try:
        endpoint = Endpoint(name, address, keys=row.keys, key_needed=False)
        models = _names(name, await endpoint.get(path, SECONDS))
    except DefinitionError as error:  # an invalid address, or aiohttp is not installed
        return Availability(
            name, "not installed" if find_spec("aiohttp") is None else "no address", str(error)
        )
    except ModelUnavailable as error:
        if error.status is not None:
            return Availability(
                name, "down", f"{address} answered with status {error.status}. Try again later."
            )
        start = f"Start it with `{row.start}`, or set" if row.start else "Start it, or change"
        return Availability(name, "down", f"Nothing answers at {address}. {start} {variable}.")
    except ModelError as error:
        if error.status in (401, 403):
            return Availability(
                name, "refused", f"{address} requires a valid key. Set {row.keys[0].variable}."
            )
        models = ()  # not every server lists its models
    return Availability(name, "ready", f"at {address}", models)


class _Listed(msgspec.Struct):
    """The fields that are read from a server's list of models."""

    data: list[Any] = []
    models: list[Any] = []
    """The models as Google's API lists them."""


def _names(name: str, listed: Any) -> tuple[str, ...]:
    try:
        found = msgspec.convert(listed, _Listed)
        ids = [each["id"] for each in found.data if "id" in each]
        ids += [each["name"].removeprefix("models/") for each in found.models if "name" in each]
    except (msgspec.ValidationError, TypeError):
        return ()  # not every server lists its models in this form
    return tuple(f"{name}:{each}" for each in ids)


def _embedded(name: str) -> Availability:
    try:
        find_weights()
    except DefinitionError as error:
        return Availability(name, "not installed", str(error))
    return Availability(
        name, "ready", "embedded: 135M parameters, for trying things out", ("local:smollm2-135m",)
    )


def _bridge() -> Availability:
    names = ", ".join(sorted(BRIDGED - {"test", "outlines"}))
    if find_spec("pydantic_ai") is None:
        return Availability("others", "not installed", f"Run `pip install 'handrail[bridge]'` for {names}.")
    return Availability(
        "others", "installed", f"through pydantic-ai, with their own packages and keys: {names}"
    )
