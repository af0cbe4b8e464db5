"""Amounts are reserved before they are spent and settled afterwards, so that concurrent work stays within a budget's limits."""

from __future__ import annotations

import asyncio
import decimal
import threading
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from handrail.errors import BudgetExceededError, DefinitionError
from handrail.run.limits import UNKNOWN, Budget, BudgetTracker, Reservation

UNITS = ("tokens", "money", "requests", "tool_calls")


async def test_eight_children_under_four_requests_get_four():
    """Eight concurrent children that share a limit of four requests make exactly four."""
    root = BudgetTracker(Budget(requests=4))
    got: list[int] = []

    async def child(number: int) -> None:
        tracker = root.share(Budget(requests=2))
        for _ in range(2):
            with_one = tracker.reserve(requests=1)
            await asyncio.sleep(0)
            with_one.settle()
            got.append(number)

    ended = await asyncio.gather(*[child(number) for number in range(8)], return_exceptions=True)
    assert len(got) == 4
    assert all(isinstance(end, BudgetExceededError) for end in ended)
    assert root.spent() == {"requests": 4}
    assert root.remaining() == {"requests": 0}


def test_eight_threads_under_four_requests_get_four():
    """Eight threads that share a limit of four requests make exactly four."""
    for _ in range(50):
        root = BudgetTracker(Budget(requests=4))
        together = threading.Barrier(8)
        got: list[Reservation] = []

        def child(
            root: BudgetTracker = root, together: threading.Barrier = together, got: list[Reservation] = got
        ):
            tracker = root.share()
            together.wait()
            try:
                got.append(tracker.reserve(requests=1))
            except BudgetExceededError:
                return
            got[-1].settle()

        threads = [threading.Thread(target=child) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 4
        assert root.remaining() == {"requests": 0}


def test_checking_and_setting_aside_are_one_step():
    """A reservation is atomic: a thread that reserves during another thread's check waits, and finds nothing left."""
    tracker = BudgetTracker(Budget(money=1))
    got: list[Reservation] = []

    def other() -> None:
        with suppress(BudgetExceededError):
            got.append(tracker.reserve(money=1))

    thread = threading.Thread(target=other)

    class Slow(Decimal):
        """An amount whose comparison gives the other thread time to run."""

        def __gt__(self, left: Any) -> bool:
            thread.start()
            thread.join(0.05)
            return super().__gt__(left)

    got.append(tracker.reserve(money=Slow(1)))
    thread.join()
    assert len(got) == 1
    assert tracker.remaining() == {"money": 0}


def test_a_spend_is_charged_to_every_run_above():
    """A child's spending counts against every tracker above it, and the tightest limit determines what remains."""
    root = BudgetTracker(Budget(tokens=100, money=1))
    child = root.share(Budget(tokens=30))
    child.share().reserve(tokens=10).settle(tokens=7)
    root.reserve(tokens=80)
    assert child.spent() == root.spent() == {"tokens": 7}
    assert child.remaining() == {"tokens": 13, "money": 1}
    assert root.remaining() == {"tokens": 13, "money": 1}
    with pytest.raises(BudgetExceededError) as raised:
        child.reserve(tokens=20)
    assert (raised.value.unit, raised.value.wanted, raised.value.left) == ("tokens", 20, 13)
    assert raised.value.of_root
    assert "the run's budget for tokens is too low: 20 wanted, 13 left" in str(raised.value)


def test_whose_bound_it_was_is_said():
    """If a child's own limit would be exceeded, the error names the child's share, not the root's budget."""
    child = BudgetTracker(Budget(tokens=100)).share(Budget(tokens=5))
    with pytest.raises(BudgetExceededError, match="this run's share") as raised:
        child.reserve(tokens=6)
    assert not raised.value.of_root


def test_refused_means_nothing_was_set_aside():
    """If one of several units exceeds its limit, nothing is reserved at any level."""
    root = BudgetTracker(Budget(tokens=10, requests=1))
    child = root.share(Budget(tokens=100))
    with pytest.raises(BudgetExceededError):
        child.reserve(requests=1, tokens=11)
    assert root.remaining() == {"tokens": 10, "requests": 1}
    assert child.remaining() == {"tokens": 10, "requests": 1}


def test_a_reservation_ends_once():
    """Once a reservation is settled or released, settling or releasing it again has no effect."""
    tracker = BudgetTracker(Budget(tokens=10))
    reservation = tracker.reserve(tokens=8)
    reservation.settle(tokens=3)
    reservation.settle(tokens=5)
    reservation.release()
    assert tracker.spent() == {"tokens": 3}
    assert tracker.remaining() == {"tokens": 7}
    given_back = tracker.reserve(tokens=7)
    given_back.release()
    given_back.settle()
    assert tracker.remaining() == {"tokens": 7}


def test_a_reservation_ends_once_from_many_threads():
    """Eight threads that settle the same reservation charge it only once."""
    for _ in range(50):
        tracker = BudgetTracker(Budget(tokens=10))
        reservation = tracker.reserve(tokens=1)
        threads = [threading.Thread(target=reservation.settle) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tracker.spent() == {"tokens": 1}
        assert tracker.remaining() == {"tokens": 9}


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, KeyboardInterrupt])
def test_what_raised_is_given_back(error: type[BaseException]):
    """A reservation that was not settled in its `with` block is released at the end, even if the block raises an error."""
    tracker = BudgetTracker(Budget(tokens=10))
    with pytest.raises(error), tracker.reserve(tokens=10):
        raise error
    assert tracker.remaining() == {"tokens": 10}
    reservation = tracker.reserve(tokens=10)
    reservation.settle(tokens=4)
    with pytest.raises(error), reservation:
        raise error
    assert tracker.remaining() == {"tokens": 6}
    with tracker.reserve(tokens=6):
        pass
    assert tracker.remaining() == {"tokens": 6}


def test_an_unknown_price_is_refused_under_a_money_limit_only():
    """An unknown price is refused if money is limited for the tracker or one above it. Otherwise, it is not counted."""
    for limited in (BudgetTracker(Budget(money=5)), BudgetTracker(Budget(money=5)).share(Budget(tokens=9))):
        with pytest.raises(
            BudgetExceededError, match="limited in money and an unknown amount would be spent"
        ):
            limited.reserve(money=UNKNOWN, tokens=1)
        assert limited.remaining()["money"] == 5
        assert limited.spent() == {}
    free = BudgetTracker(Budget(tokens=5))
    free.reserve(money=UNKNOWN, tokens=1).settle(money=UNKNOWN)
    assert free.spent() == {"tokens": 1}
    free.reserve(money=UNKNOWN).settle(money=Decimal("0.02"))
    assert free.spent() == {"tokens": 1, "money": Decimal("0.02")}


def test_what_was_really_spent_is_recorded_beyond_the_bound():
    """Usage beyond the limit is charged in full, and further reservations of that unit are refused."""
    root = BudgetTracker(Budget(tokens=10))
    child = root.share(Budget(tokens=9))
    child.reserve(tokens=9).settle(tokens=12, requests=1)
    assert root.spent() == child.spent() == {"tokens": 12, "requests": 1}
    assert root.remaining() == {"tokens": -2}
    assert child.remaining() == {"tokens": -3}
    with pytest.raises(BudgetExceededError, match="-3 left"):
        child.reserve(tokens=0)
    root.reserve(requests=100)


def test_cents_add_up():
    """Amounts of money add up exactly, even in a decimal context with three digits and for huge numbers."""
    tracker = BudgetTracker(Budget(money=10))
    with decimal.localcontext() as context:
        context.prec = 3
        for _ in range(99):
            tracker.reserve(money=0.1).settle()
        assert tracker.remaining() == {"money": pytest.approx(0.1)}
        tracker.reserve(money=Decimal("0.1")).settle(money=Decimal("0.0999999999"))
        with pytest.raises(BudgetExceededError):
            tracker.reserve(money=Decimal("0.0000000002"))
        tracker.reserve(money=Decimal("0.00000000001")).release()
        assert tracker.remaining() == {"money": 1e-10}
    assert tracker.spent() == {"money": Decimal("9.9999999999")}
    huge = BudgetTracker(Budget(tokens=10**400))
    huge.reserve(tokens=10**400).settle(tokens=10**399)
    huge.reserve(money=10**40).settle()
    huge.reserve(money=Decimal("1e-40")).settle()
    assert Fraction(huge.spent()["money"]) == 10**40 + Fraction(1, 10**40)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda tracker: tracker.reserve(tokenz=1),
            "no unit 'tokenz'. Its units are tokens, money, requests, tool_calls",
        ),
        (lambda tracker: tracker.reserve(tokens=1, cents=1), "no unit 'cents'"),
        (lambda tracker: tracker.reserve(tokens=5).settle(token=1), "no unit 'token'"),
        (lambda tracker: tracker.reserve(tokens=-1), "-1 tokens can't be spent"),
        (lambda tracker: tracker.reserve(requests=-0.5), "-0.5 requests can't be spent"),
        (lambda tracker: tracker.reserve(tokens=float("nan")), "nan tokens can't be spent"),
        (lambda tracker: tracker.reserve(requests=float("inf")), "inf requests can't be spent"),
        (lambda tracker: tracker.reserve(money=Decimal("NaN")), "NaN.*money can't be spent"),
        (lambda tracker: tracker.reserve(tokens=True), "True tokens can't be spent"),
        (lambda tracker: tracker.reserve(tokens="5"), "'5' tokens can't be spent"),
        (lambda tracker: tracker.reserve(tokens=5).settle(tokens=-1), "-1 tokens can't be spent"),
        (lambda tracker: Budget(tokens=-1), "a budget of -1 tokens is invalid"),
        (lambda tracker: Budget(money=Decimal("NaN")), "NaN.*money is invalid"),
        (lambda tracker: Budget(money=float("nan")), "nan money"),
        (lambda tracker: Budget(requests=True), "True requests"),
        (lambda tracker: Budget(tool_calls="5"), "'5' tool_calls.*at least 0, or None"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_be_a_unit_or_an_amount_is_refused(wrong: Callable[[BudgetTracker], object], words: str):
    """An invalid unit or amount is refused, the error names it, and nothing is spent."""
    tracker = BudgetTracker(Budget(tokens=5, money=5))
    with pytest.raises(DefinitionError, match=words):
        wrong(tracker)
    assert tracker.spent() == {}
    assert tracker.remaining()["tokens"] in (0, 5)


def test_without_bounds_everything_is_counted():
    """Without limits nothing is refused, and spending is still counted."""
    tracker = BudgetTracker()
    tracker.reserve(tokens=10**12, money=1).settle(money=0.25)
    assert tracker.spent() == {"tokens": 10**12, "money": Decimal("0.25")}
    assert all(isinstance(amount, Decimal) for amount in tracker.spent().values())
    assert tracker.remaining() == {}
    assert BudgetTracker(Budget(money=float("inf"))).reserve(money=1e300)


amounts = st.one_of(
    st.integers(0, 8), st.decimals(0, 8, places=3), st.sampled_from([0.1, 0.2, 0.3, 1.7, 2.0**-40])
)
spends = st.dictionaries(st.sampled_from(UNITS), amounts, min_size=1)
budgets = st.builds(lambda limits: Budget(**limits), st.dictionaries(st.sampled_from(UNITS), amounts))


def exact(amount: Any) -> Fraction:
    return Fraction(str(amount))


class Spending(RuleBasedStateMachine):
    """Random reservations, settlements and releases in a tree of trackers, compared with exact fractions."""

    trackers = Bundle("trackers")
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[BudgetTracker, list[BudgetTracker]] = {}
        self.limits: dict[BudgetTracker, dict[str, Fraction]] = {}
        self.held: dict[BudgetTracker, dict[str, Fraction]] = {}
        self.spent: dict[BudgetTracker, dict[str, Fraction]] = {}

    def _known(self, tracker: BudgetTracker, budget: Budget, above: list[BudgetTracker]) -> BudgetTracker:
        self.lines[tracker] = [tracker, *above]
        self.limits[tracker] = {u: exact(getattr(budget, u)) for u in UNITS if getattr(budget, u) is not None}
        self.held[tracker] = dict.fromkeys(UNITS, Fraction(0))
        self.spent[tracker] = dict.fromkeys(UNITS, Fraction(0))
        return tracker

    @rule(target=trackers, budget=budgets)
    def root(self, budget: Budget) -> BudgetTracker:
        return self._known(BudgetTracker(budget), budget, [])

    @rule(target=trackers, parent=trackers, budget=budgets)
    def share(self, parent: BudgetTracker, budget: Budget) -> BudgetTracker:
        return self._known(parent.share(budget), budget, self.lines[parent])

    @rule(target=reservations, tracker=trackers, spend=spends)
    def reserve(self, tracker: BudgetTracker, spend: dict[str, Any]) -> Any:
        fits = all(
            self.held[each][unit] + self.spent[each][unit] + exact(amount) <= self.limits[each][unit]
            for each in self.lines[tracker]
            for unit, amount in spend.items()
            if unit in self.limits[each]
        )
        if not fits:
            with pytest.raises(BudgetExceededError):
                tracker.reserve(**spend)
            return None
        for each in self.lines[tracker]:
            for unit, amount in spend.items():
                self.held[each][unit] += exact(amount)
        return tracker, spend, tracker.reserve(**spend)

    @rule(reservation=consumes(reservations), real=spends)
    def settle(self, reservation: Any, real: dict[str, Any]) -> None:
        self._end(reservation, real, "settle")

    @rule(reservation=consumes(reservations))
    def release(self, reservation: Any) -> None:
        self._end(reservation, {}, "release")

    def _end(self, reservation: Any, real: dict[str, Any], how: str) -> None:
        if reservation is None:
            return
        tracker, spend, held = reservation
        getattr(held, how)(**real)
        for each in self.lines[tracker]:
            for unit, amount in spend.items():
                self.held[each][unit] -= exact(amount)
            for unit, amount in ({**spend, **real} if how == "settle" else {}).items():
                self.spent[each][unit] += exact(amount)

    @invariant()
    def the_sums_are_exact(self) -> None:
        for tracker, line in self.lines.items():
            spent = tracker.spent()
            assert all(Fraction(spent.get(unit, 0)) == self.spent[tracker][unit] for unit in UNITS)
            for unit, left in tracker.remaining().items():
                bounds = [
                    self.limits[each][unit] - self.held[each][unit] - self.spent[each][unit]
                    for each in line
                    if unit in self.limits[each]
                ]
                assert left == float(min(bounds))


def test_no_order_of_spending_passes_a_bound():
    """In any order of spending, exactly the reservations that fit are allowed, and every sum in the tree is exact."""
    run_state_machine_as_test(Spending)
