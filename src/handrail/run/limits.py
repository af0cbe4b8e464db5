"""Budgets: spending limits, reservations that are made before spending and settled afterwards, cost totals, and what a request cost."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import BudgetExceededError, DefinitionError
from handrail.journal.records import Amounts, SpendCap
from handrail.messages import Model, Usage, is_choice
from handrail.text.spelling import checked_arguments

if TYPE_CHECKING:
    from handrail.run.run import Run

Unit = Literal["tokens", "money", "requests", "tool_calls"]
UNITS: tuple[Unit, ...] = get_args(Unit)
Amount = int | float | Decimal
UNKNOWN = None
"""An unknown amount, such as the cost of a request whose price is not known.

`reserve` refuses it if its unit is limited, and otherwise reserves nothing for it.
"""

_Exact = int | Decimal
"""An exact amount. Integers stay integers, because adding them is fast and exact."""


@checked_arguments
@dataclass(frozen=True, slots=True)
class Budget:
    """Spending limits. None means no limit."""

    tokens: int | None = None
    money: Amount | None = None
    """The limit on cost, in US dollars."""
    requests: int | None = None
    tool_calls: int | None = None

    def __post_init__(self) -> None:
        for unit in UNITS:
            limit = getattr(self, unit)
            if limit is not None and not _is_amount(limit):
                raise DefinitionError(
                    f"a budget of {limit!r} {unit} is invalid. "
                    "Pass a number of at least 0, or None for no limit."
                )

    def limits(self) -> dict[Unit, int | Decimal]:
        """Return the limits that are set, as exact numbers."""
        found: dict[Unit, Amount | None] = {unit: getattr(self, unit) for unit in UNITS}
        return {unit: _exact(limit) for unit, limit in found.items() if limit is not None}


@checked_arguments
@dataclass(frozen=True, slots=True)
class Spend:
    """A cap on what is spent in a day, by all runs of all processes that share a journal: `Spend(per_day=20)` is 20 US dollars.

    Each request to a model reserves what it may cost at most, and is charged what it did cost. At the cap, the run asks somebody who may raise
    it, and waits. It goes on once they have, or when the day is over. Raises `DefinitionError` if an argument is invalid.
    """

    per_day: Budget | Amount
    """US dollars, or a budget for tokens, money and requests."""
    by: Literal["principal", "app"] = "principal"
    """Whether each principal has a cap of their own, or all principals of an app share one."""
    zone: str = "UTC"
    """The time zone in which the day begins and ends, such as `Europe/Berlin`."""
    raised_by: str = "admin"
    """The role of the users who may raise the cap. Nobody raises a cap for their own run, except the only user, `local`."""
    warn_at: float = 0.8
    """The part of the cap at which a warning is given."""
    app: str = ""
    """The name of the app whose runs share the cap. By default, it is the name of the run's prompt."""

    def __post_init__(self) -> None:
        if not isinstance(self.per_day, Budget):
            object.__setattr__(self, "per_day", Budget(money=self.per_day))
        limits = self.cap.limits
        if not limits or "tool_calls" in limits:
            raise DefinitionError(
                f"Spend(per_day={self.per_day!r}) caps {'tool calls' if limits else 'nothing'}. Pass US dollars, or a Budget of tokens, "
                "money or requests. A RateLimitPolicy limits tool calls."
            )
        if self.by not in get_args(_By):
            raise DefinitionError(f"Spend(by={self.by!r}) is invalid. Pass 'principal' or 'app'.")
        if self.app and self.by != "app":
            raise DefinitionError(f"Spend(app={self.app!r}) caps each principal. Pass by='app' with it.")
        if not isinstance(self.raised_by, str) or not self.raised_by:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise DefinitionError(f"Spend(raised_by={self.raised_by!r}) is invalid. Pass the name of a role.")
        if not _is_amount(self.warn_at) or not 0 < self.warn_at <= 1:
            raise DefinitionError(
                f"Spend(warn_at={self.warn_at!r}) is invalid. Pass a number above 0 and at most 1."
            )
        try:
            self.cap.window("", 0)
        except (KeyError, ValueError, TypeError, OSError):
            raise DefinitionError(
                f"Spend(zone={self.zone!r}) is not a time zone that this machine knows. Pass one such as 'Europe/Berlin', and "
                "install the package tzdata if the system has no time zones."
            ) from None

    @property
    def cap(self) -> SpendCap:
        """The cap as runs have it."""
        assert isinstance(self.per_day, Budget), "a number was made a budget"
        limits: Amounts = {str(unit): limit for unit, limit in self.per_day.limits().items()}
        return SpendCap(
            limits=limits,
            by=self.by,
            zone=self.zone,
            raised_by=self.raised_by,
            warn_at=self.warn_at,
            app=self.app,
        )


_By = Literal["principal", "app"]


def caps_of(spend: Spend | SpendCap | Iterable[Spend | SpendCap]) -> tuple[SpendCap, ...]:
    """Return one cap or several as a tuple. Raises `DefinitionError` for anything else."""
    several = spend if isinstance(spend, Iterable) else (spend,)
    found = tuple(each.cap if isinstance(each, Spend) else each for each in several)
    for each in found:
        if not isinstance(each, SpendCap):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise DefinitionError(
                f"spend is {each!r}. Pass a Spend, for example Spend(per_day=20), or a list of them."
            )
    return found


def check_price(caps: Iterable[SpendCap], model: Model, tariff: Callable[[Usage], Decimal | None]) -> None:
    """Raise `DefinitionError` if there is a cap on money, and the price of the model is not known.

    A choice passes if it does not know its models yet, because the one that it chooses is checked when it is asked.
    """
    if not any("money" in each.limits for each in caps):
        return
    is_known = is_choice(model) or tariff(Usage(1, 1)) is not None
    if name := getattr(model, "unpriced", "") if is_known else model.name:
        raise DefinitionError(
            f"a Spend caps money, and the price of the model {name!r} is not known. Give the model a price, run "
            "`pip install 'handrail[prices]'`, which has the prices of many models, or cap tokens: Spend(per_day=Budget(tokens=...))."
        )


class Reservation:
    """An upper bound that is reserved for one spend. Settle it with the actual amount, or release it.

    Used as a context manager, it is released on exit unless it was settled.
    """

    __slots__ = ("_amounts", "_over", "_tracker")

    def __init__(self, tracker: BudgetTracker, amounts: Mapping[Unit, _Exact]) -> None:
        self._tracker = tracker
        self._amounts = amounts
        self._over = False

    def settle(self, **spent: Amount | None) -> Mapping[Unit, int | Decimal]:
        """Charge the actual amounts instead of the reserved ones, and return them.

        A unit that is omitted or None is charged at its reserved amount. If the reservation was already settled or released,
        nothing is charged, but the amounts are still returned.
        """
        real: Mapping[Unit, _Exact] = {**self._amounts, **_checked(spent)} if spent else self._amounts
        self._end(real)
        return real

    def release(self) -> None:
        """Give the whole reservation back to the budget. Does nothing if it was settled or released before."""
        self._end({})

    def _end(self, real: Mapping[Unit, _Exact]) -> None:
        tracker = self._tracker
        with tracker.lock:
            if not self._over:
                self._over = True
                tracker.settle(self._amounts, real)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class BudgetTracker:
    """The amounts that a run has spent and has left, within its own limits and those of every outer run.

    A spend is charged to this tracker and all its ancestors together, under one lock, so concurrent
    reservations never exceed a limit. The actual amount of a spend is always recorded, even if it is more than
    was reserved; the remaining amount can then be negative.
    """

    __slots__ = ("_above", "_limits", "_reserved", "_spent", "lock")

    def __init__(self, budget: Budget | None = None, *, parent: BudgetTracker | None = None) -> None:
        self._limits: dict[Unit, _Exact] = (budget or Budget()).limits()
        self._above: tuple[BudgetTracker, ...] = () if parent is None else (parent, *parent._above)
        self.lock: threading.Lock = threading.Lock() if parent is None else parent.lock
        self._reserved: dict[Unit, _Exact] = {}
        self._spent: dict[Unit, _Exact] = {}

    def share(self, budget: Budget | None = None) -> BudgetTracker:
        """Create a tracker for a run nested in this one, with additional limits."""
        return BudgetTracker(budget, parent=self)

    def reserve(self, **amounts: Amount | None) -> Reservation:
        """Reserve an upper bound. If less than that is left of a limit, reserves nothing and raises `BudgetExceededError`.

        An unknown amount (None) exceeds any limit on its unit. Without a limit, nothing is reserved for it.
        """
        exact = _checked(amounts)
        with self.lock:
            for tracker in (self, *self._above):
                for unit in tracker._limits:
                    if unit in amounts:
                        tracker._check(unit, exact.get(unit))
            for tracker in (self, *self._above):
                _add(tracker._reserved, exact)
        return Reservation(self, exact)

    def give_back(self, amounts: Mapping[Unit, _Exact]) -> None:
        """Return what is left of a share that this run and every outer run were charged. A negative amount was spent beyond the share."""
        with self.lock:
            for tracker in (self, *self._above):
                _add(tracker._spent, {unit: -amount for unit, amount in amounts.items()})

    def recall(self, **amounts: Amount | None) -> None:
        """Count what this run spent before its process ended. Outer runs are not charged, because they count it themselves."""
        with self.lock:
            _add(self._spent, _checked(amounts))

    @property
    def limits(self) -> Mapping[Unit, int | Decimal]:
        """The limits of this run itself."""
        return self._limits

    def remaining(self) -> Mapping[str, float]:
        """Return the remaining amount of each limited unit: the smallest that this run and its outer runs have left."""
        return {unit: float(amount) for unit, amount in self.left().items()}

    def left(self) -> Mapping[str, int | Decimal]:
        """Return the remaining amounts like `remaining`, but as exact numbers instead of floats."""
        left: dict[str, _Exact] = {}
        with self.lock:
            for tracker in (self, *self._above):
                for unit in tracker._limits:
                    here = tracker._left(unit)
                    left[unit] = min(here, left.get(unit, here))
        return left

    def spent(self) -> Mapping[str, Decimal]:
        """Return the amounts that this run and everything nested in it have actually spent."""
        with self.lock:
            return {unit: Decimal(amount) for unit, amount in self._spent.items()}

    def settle(self, reserved: Mapping[Unit, _Exact], real: Mapping[Unit, _Exact]) -> None:
        """Replace reserved amounts with the actual ones. A reservation calls this while it holds the lock."""
        for tracker in (self, *self._above):
            for unit, amount in reserved.items():
                tracker._reserved[unit] = _less(tracker._reserved[unit], amount)
            _add(tracker._spent, real)

    def _check(self, unit: Unit, amount: _Exact | None) -> None:
        left = self._left(unit)
        if amount is None or amount > left:
            wanted = "an unknown amount" if amount is None else amount
            raise BudgetExceededError(unit, wanted, left, of_root=not self._above)

    def _left(self, unit: Unit) -> _Exact:
        return _less(_less(self._limits[unit], self._spent.get(unit, 0)), self._reserved.get(unit, 0))


_EXACTLY = Context(prec=1000)
"""A decimal context that is precise enough to keep sums exact, whatever context the caller has set."""


def _sum(one: _Exact, other: _Exact) -> _Exact:
    if type(one) is int and type(other) is int:
        return one + other
    return _EXACTLY.add(one, other)


def _less(one: _Exact, other: _Exact) -> _Exact:
    if type(one) is int and type(other) is int:
        return one - other
    return _EXACTLY.subtract(one, other)


def _add(to: dict[Unit, _Exact], amounts: Mapping[Unit, _Exact]) -> None:
    for unit, amount in amounts.items():
        to[unit] = _sum(to.get(unit, 0), amount)


def _checked(amounts: Mapping[str, Amount | None]) -> dict[Unit, _Exact]:
    """Return the known amounts as exact numbers. Raises `DefinitionError` for an invalid unit or amount."""
    exact: dict[Unit, _Exact] = {}
    for unit, amount in amounts.items():
        if unit not in UNITS:
            raise DefinitionError(f"a budget has no unit {unit!r}. Its units are {', '.join(UNITS)}.")
        if type(amount) is int and amount >= 0:
            exact[unit] = amount
        elif amount is not None:
            if not _is_amount(amount) or amount == inf:
                raise DefinitionError(
                    f"{amount!r} {unit} can't be spent. Pass a finite number of at least 0, or None if it is unknown."
                )
            exact[unit] = _exact(amount)
    return exact


def _is_amount(amount: object) -> bool:
    """Return whether `amount` is a number of at least 0. Booleans and NaN are not."""
    if isinstance(amount, bool) or not isinstance(amount, (int, float, Decimal)):
        return False
    return amount == amount and amount >= 0


def _exact(amount: Amount) -> _Exact:
    """Return the amount as an exact number, as it was written: 0.1 dollars is ten cents, not a binary fraction."""
    return Decimal(str(amount)) if isinstance(amount, float) else amount


_NOTHING = Usage()
_FREE = Decimal(0)


class CostTracker:
    """A running total of model usage and cost. Every addition also counts towards the outer runs.

    The cost becomes None as soon as one part of it is unknown, since an unknown price is not zero.
    """

    __slots__ = ("_above", "cost", "usage")

    def __init__(self, above: CostTracker | None = None) -> None:
        self._above = above
        self.usage = _NOTHING
        self.cost: Decimal | None = _FREE

    def add(self, usage: Usage, cost: Decimal | None) -> None:
        """Add the usage and the cost of a request. A cost of None is unknown."""
        spending: CostTracker | None = self
        while spending is not None:
            spending.usage += usage
            if cost is None:
                spending.cost = None
            elif cost and spending.cost is not None:
                spending.cost += cost
            spending = spending._above

    def spent(self) -> Mapping[str, Decimal]:
        """Return usage and cost by unit. The cost is omitted if it is unknown."""
        found = {"tokens": Decimal(self.usage.tokens), "requests": Decimal(self.usage.requests)}
        if self.cost is not None:
            found["money"] = self.cost
        return found


log = logging.getLogger("handrail.run.limits")


@runtime_checkable
class Lease(Protocol):
    """A claim on a job that expires unless it is extended."""

    @property
    def interval(self) -> float:
        """Seconds between extensions, short enough that the lease does not expire."""
        ...

    def extend(self) -> None:
        """Extend the lease.

        This must be quick and must not block: it runs on the event loop or on a handler's thread.
        """
        ...


class Heartbeat:
    """Extends the job's lease while one call runs.

    If the handler never calls `beat`, beats are sent for it until it ends or times out. After the handler's first own
    beat, only its own beats count, so a handler that hangs loses the job. Once the call has ended, nothing extends the
    lease, not even a beat from a thread that outlived the call.

    A tool with `heartbeat=30` promises to beat at least every 30 seconds. Its call is stopped if it does not.
    """

    __slots__ = ("_clock", "_lease", "_over", "_timer", "beats_itself", "heard", "last_beat")

    def __init__(self, lease: Lease | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        if lease is not None and not lease.interval > 0:
            raise DefinitionError(
                f"the lease's interval is {lease.interval!r} seconds. Make it a positive number."
            )
        self.last_beat: float | None = None
        self.beats_itself = False
        self.heard: Callable[[], None] | None = None
        """A function that is called for each of the handler's own beats; None if its tool does not promise any."""
        self._lease = lease
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def beat(self) -> None:
        """Record a beat from the handler itself and extend the lease, if there is one. Raises whatever the lease raises.

        Does nothing once the handler has ended.
        """
        if not self._over:
            self.beats_itself = True
            if self.heard is not None:
                self.heard()
            self._extend()

    def keep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send beats for the handler from now on, until it calls `beat` itself or `stop` is called.

        Without a lease, nothing is sent. If the lease can't be extended, the error is logged, and the next beat tries again.
        """
        self.stop()
        self._over = False
        if self._lease is None or self.beats_itself:
            return
        try:
            self._extend()
        except Exception:
            log.exception("the lease could not be extended; trying again in %s s", self._lease.interval)
        self._timer = loop.call_later(self._lease.interval, self.keep, loop)

    def stop(self) -> None:
        """Stop sending beats and ignore later ones. This is called when the handler has ended."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _extend(self) -> None:
        if self._lease is not None:
            self._lease.extend()
        self.last_beat = self._clock.monotonic()


Charged = Mapping[Unit, int | Decimal]
"""The amounts that a budget was charged, by unit."""


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What a recorded request to a model used and cost."""

    usage: Usage | None = None
    """The tokens used; None if the provider did not report them, or the request failed before any answer came."""
    cost: Decimal | None = None
    """The cost in US dollars; None if it is unknown."""
    charged: Charged = {}
    """The amounts that the budget was charged, if the provider did not report the usage; otherwise empty."""

    def spent(self) -> Charged:
        """Return the amounts that a budget is charged for the request."""
        if self.charged or self.usage is None:
            return self.charged or {"requests": 1}
        known: Charged = {"requests": 1, "tokens": self.usage.tokens}
        return known if self.cost is None else {**known, "money": self.cost}


class AnswerCharge(Charge, frozen=True):
    """What a recorded answer used and cost, with the earlier requests for it, which failed or were not used."""

    failed: tuple[Charge, ...] = ()


class SummaryCharge(msgspec.Struct, frozen=True):
    """What the requests for a summary before a compaction used and cost."""

    spent: tuple[Charge, ...] = ()


def charge_again(run: Run, request: Charge) -> None:
    """Charge a recorded request that is not sent again. The limits are not checked: they were checked before it was sent."""
    if request.usage is not None:
        run.costs.models.add(request.usage, request.cost)
    if run.budget is not None:
        run.budget.reserve().settle(**request.spent())
