"""Tests for the costs of requests, including reads from and writes to a provider's cache."""

from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import genai_prices
import pytest
from genai_prices.types import ModelPrice

from handrail.messages import Price, Traits, Usage
from handrail.models.prices import _from_table, most_of, tariff_of  # pyright: ignore[reportPrivateUsage]

M = 1_000_000


def test_reads_and_writes_of_the_cache_have_prices_of_their_own() -> None:
    """Each input token is charged once: as read from the cache, as written to it, or as neither."""
    cost = tariff_of("x:y", Traits(Price(Decimal(4), Decimal(9), Decimal("0.4"), Decimal(5))))
    assert cost(Usage(3 * M, M, cached=M, cache_writes=M)) == Decimal(4) + Decimal("0.4") + Decimal(
        5
    ) + Decimal(9)
    assert most_of(cost, M, 0) == Decimal(5)


def test_cached_tokens_without_a_price_cost_what_others_do() -> None:
    cost = tariff_of("x:y", Traits(Price(Decimal(4), Decimal(9))))
    assert cost(Usage(3 * M, 0, cached=M, cache_writes=M)) == Decimal(12)


def test_the_table_prices_reads_and_writes_of_the_cache() -> None:
    """Anthropic charges less than usual for tokens read from the cache, and more for tokens written to it."""
    cost = tariff_of("anthropic:claude-sonnet-4-5", Traits())
    read, plain, written = (
        cost(Usage(1000, 0, **counts)) for counts in ({"cached": 1000}, {}, {"cache_writes": 1000})
    )
    assert read is not None
    assert plain is not None
    assert written is not None
    assert read < plain < written


@pytest.mark.parametrize(
    ("priced", "usage", "expected"),
    [
        ({}, Usage(M, M), None),
        ({"input_mtok": Decimal(4)}, Usage(M), Decimal(4)),
        ({"input_mtok": Decimal(4)}, Usage(M, 1), None),
        ({"output_mtok": Decimal(9)}, Usage(1, M), None),
        ({"input_mtok": Decimal(0), "output_mtok": Decimal(0)}, Usage(M, M), Decimal(0)),
        ({"input_mtok": Decimal(4), "output_mtok": Decimal(9)}, Usage(M, M), Decimal(13)),
        ({"input_mtok": Decimal(4), "output_mtok": Decimal(9)}, Usage(M, M, searches=1), None),
    ],
)
def test_usage_without_a_price_in_the_table_is_not_free(
    monkeypatch: pytest.MonkeyPatch, priced: dict[str, Decimal], usage: Usage, expected: Decimal | None
) -> None:
    """An entry of the table may have no price for a kind of usage, for which the table itself adds nothing."""

    def calc_price(used: Any, **_: Any) -> Any:
        price = ModelPrice(**priced)
        return SimpleNamespace(model_price=price, total_price=price.calc_price(used)["total_price"])

    monkeypatch.setattr(genai_prices, "calc_price", calc_price)
    tariff = _from_table.__wrapped__
    assert tariff("openrouter:vendor/model")(usage) == expected
    if not priced:
        assert tariff("openrouter:vendor/model:free")(usage) == 0
