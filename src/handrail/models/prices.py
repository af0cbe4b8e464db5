"""Costs of requests, from the price given with a model or from the price table of `genai-prices`."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from typing import Any

from handrail.messages import Price, Traits, Usage

_MILLION = 1_000_000
_THOUSAND = 1_000
_FREE = Decimal(0)

_TABLE_PRICES = {"input": "input_mtok", "output": "output_mtok", "searches": "web_searches_kcount"}
"""The prices in the table of `genai-prices`, by the field of `Usage` that they are for."""

Tariff = Callable[[Usage], Decimal | None]
"""A function that returns the cost of a `Usage` in US dollars, or None if the cost is unknown."""


def tariff_of(model: str, traits: Traits) -> Tariff:
    """Return the tariff of a model. If its price is unknown, the tariff returns None, never zero."""
    if traits.price is not None:
        price = traits.price
        return lambda usage: cost_at(price, usage)
    return _from_table(model)


def most_of(tariff: Tariff, input: int, output: int) -> Decimal | None:
    """Return the maximum cost of this many tokens, or None if it is unknown.

    The maximum covers both cases: the input is written to the provider's cache, or it is not.
    """
    plain, written = tariff(Usage(input, output)), tariff(Usage(input, output, cache_writes=input))
    return None if plain is None or written is None else max(plain, written)


def cost_at(price: Price, usage: Usage) -> Decimal:
    """Return the cost of a `Usage` at this price, in US dollars."""
    if not (price.input or price.output or price.searches):
        return _FREE
    cached = price.input if price.cached is None else price.cached
    writes = price.input if price.cache_writes is None else price.cache_writes
    fresh = max(usage.input - usage.cached - usage.cache_writes, 0)
    sent = price.input * fresh + cached * usage.cached + writes * usage.cache_writes
    searches = (price.searches or _FREE) * usage.searches / _THOUSAND
    return (sent + price.output * usage.output) / _MILLION + searches


@lru_cache(maxsize=256)
def _from_table(model: str) -> Tariff:
    """Return a model's tariff from the table of `genai-prices`.

    If the table has no such model, or the `prices` extra is not installed, every cost is unknown. So is the cost of usage of a
    kind that the model's entry has no price for: the table itself adds nothing for it.
    """
    provider, _, name = model.partition(":")
    try:
        table: Any = import_module("genai_prices")
        table.calc_price(table.Usage(input_tokens=1, output_tokens=1), model_ref=name, provider_id=provider)
    except (ImportError, LookupError):
        return _unknown

    is_free = name.endswith(":free")  # OpenRouter's free models, whose entries have no prices

    def cost(usage: Usage) -> Decimal | None:
        # the table refuses more cached tokens than input tokens, but some servers report them
        cached = min(usage.cached, usage.input)
        used = table.Usage(
            input_tokens=usage.input,
            output_tokens=usage.output,
            cache_read_tokens=cached or None,
            cache_write_tokens=min(usage.cache_writes, usage.input - cached) or None,
            web_searches=usage.searches or None,
        )
        found = table.calc_price(used, model_ref=name, provider_id=provider)
        priced = is_free or all(
            getattr(found.model_price, price) is not None
            for kind, price in _TABLE_PRICES.items()
            if getattr(usage, kind)
        )
        return found.total_price if priced else None

    return cost


@lru_cache(maxsize=256)
def _window_in_table(model: str) -> int | None:
    provider, _, name = model.partition(":")
    try:
        table: Any = import_module("genai_prices")
        found = table.calc_price(
            table.Usage(input_tokens=1, output_tokens=1), model_ref=name, provider_id=provider
        )
    except (ImportError, LookupError):
        return None
    return found.model.context_window


def window_of(model: str, traits: Traits) -> int | None:
    """Return the number of tokens that a model can take in a request; None if that is not known."""
    return _window_in_table(model) if traits.window is None else traits.window


def _unknown(usage: Usage) -> None:
    return None
