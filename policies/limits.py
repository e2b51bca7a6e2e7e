"""What a tenant may use, as arithmetic: rates by the generic cell rate algorithm, requests at once by counting.

A rate is kept as one number, the moment at which the limit is unused again (the theoretical arrival time of ITU-T
I.371). What is used is the time until then; a request moves it on by its cost and fits while no more than `room` is
used. That is the token bucket, turned over: it is refilled by time passing, and nothing has to be refilled. All times
and costs are whole microseconds, which a double holds exactly, so that a store may count the same in Lua.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

MINUTE_US = 60_000_000
RETRY_CONCURRENT_US = 1_000_000  # nobody knows when a running request ends


class Kind(StrEnum):
    """What is counted."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class Limit:
    """`amount` units a minute, of which `burst` may come at one moment; or `amount` requests at once. It holds for one
    model, or for all together where `model` is empty. `room` is what fits, in costs."""

    kind: Kind
    amount: int
    burst: int = 0
    model: str = ""
    drains: bool = field(init=False)
    unit: int = field(init=False)
    room: int = field(init=False)

    def __post_init__(self) -> None:
        """`unit` is what one request costs, 0 where tokens are counted."""
        drains, unit = True, -(-MINUTE_US // self.amount)
        if self.kind is Kind.TOKENS:
            unit = 0
        elif self.kind is Kind.CONCURRENT:
            drains, unit = False, 1
        object.__setattr__(self, "drains", drains)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "room", self.cost(self.burst if drains else self.amount))

    def cost(self, units: int) -> int:
        """Microseconds of the limit, or requests at once. Rounded up, so that no limit is exceeded: requests one by
        one, since `burst` of them are to fit, and tokens together, since one of them may cost less than a
        microsecond."""
        return units * self.unit or -(-units * MINUTE_US // self.amount)

    def units(self, cost: int) -> int:
        """Whole requests or tokens in a cost."""
        return cost // self.unit if self.unit else cost * self.amount // MINUTE_US


Need = tuple[int, int]
"""The index of a limit among a tenant's, and a cost there."""


@dataclass(frozen=True, slots=True)
class Denied:
    """The limit that refused: of several the one with the longest wait. `used` and `requested` are in its units;
    `wait_us` is the time until the request fits if nobody else comes, None where it never will."""

    limit: Limit
    used: int
    requested: int
    wait_us: int | None


class Standing(NamedTuple):
    """How much of a limit is left, in its units, and the microseconds until all of it is."""

    limit: Limit
    used: int
    remaining: int
    reset_us: int


class Tally:
    """What is used of one limit."""

    __slots__ = ("_mark", "limit")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._mark = 0  # the moment at which it is unused again, or the requests that run

    def __repr__(self) -> str:
        return f"<Tally {self.limit.kind} {self._mark}>"

    def used(self, now: int) -> int:
        """As a cost. More than the room where more was used than had been asked for."""
        return max(0, self._mark - now) if self.limit.drains else self._mark

    def become(self, limit: Limit, now: int) -> None:
        """Go on under another limit of the same kind: as many requests or tokens are used of it."""
        used = converted(self.used(now), self.limit, limit)
        self.limit = limit
        self.set(used, now)

    def set(self, used: int, now: int) -> None:
        """It is known from elsewhere what is used."""
        self._mark = now + used if self.limit.drains else used

    def add(self, cost: int, now: int) -> None:
        """Use more, or less: what is given back after the limit was unused again is nothing."""
        self._mark = max(self._mark, now) + cost if self.limit.drains else self._mark + cost

    def denies(self, cost: int, now: int, share: int = 1) -> Denied | None:
        """Why a cost does not fit. One of `share` replicas pays as many times its own costs; where nothing is used one
        request fits all the same, or a small limit would be none at all."""
        limit, used = self.limit, self.used(now)
        charge = cost * share
        if used + charge <= limit.room or (share > 1 and used == 0 and cost <= limit.room):
            return None
        return denied(limit, cost, limit.room - used, min(used, used + charge - limit.room))


def denied(limit: Limit, cost: int, free: int, wait_us: int) -> Denied:
    """A refusal by a limit of which `free` is left."""
    wait = wait_us if limit.drains else RETRY_CONCURRENT_US
    used = limit.units(limit.room) - limit.units(max(0, free))
    return Denied(limit, used, limit.units(cost), None if cost > limit.room else wait)


def longest(refusals: Sequence[Denied]) -> Denied | None:
    """The one to tell: who waits for it has waited for the others."""
    return max(refusals, key=lambda each: MINUTE_US**2 if each.wait_us is None else each.wait_us, default=None)


class Book:
    """All limits of one tenant, exact for one process: a request is charged to all of its limits or to none."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        self.limits = tuple(limits)
        self._tallies = [Tally(limit) for limit in limits]

    def __repr__(self) -> str:
        return f"<Book {self._tallies}>"

    def take(self, needs: Sequence[Need], now: int) -> Denied | None:
        """None where the request is let through, and charged."""
        tallies = self._tallies
        for index, cost in needs:
            if tallies[index].denies(cost, now) is not None:
                return longest([no for i, c in needs if (no := tallies[i].denies(c, now)) is not None])
        for index, cost in needs:
            tallies[index].add(cost, now)
        return None

    def give(self, index: int, cost: int, now: int) -> None:
        """Part of a charge comes back; what is less than nothing is charged on top. The charge is one under this
        book's limits, whatever they have become since."""
        tally = self._tallies[index]
        tally.add(-converted(cost, self.limits[index], tally.limit), now)

    def standing(self, index: int, now: int) -> Standing:
        """How a limit stands."""
        tally = self._tallies[index]
        return standing(tally.limit, tally.limit.room - tally.used(now), tally.used(now))

    def inherit(self, other: Book, now: int) -> None:
        """Go on with what another book has of the same kinds and models, as when the limits change. Both have these
        tallies from now on: what was charged by the other one still comes back there."""
        before = {(tally.limit.kind, tally.limit.model): tally for tally in other._tallies}
        for index, limit in enumerate(self.limits):
            tally = before.get((limit.kind, limit.model))
            if tally is not None:
                tally.become(limit, now)
                self._tallies[index] = tally


def standing(limit: Limit, free: int, reset_us: int) -> Standing:
    """How a limit stands of which `free` is left."""
    whole = limit.units(limit.room)
    remaining = limit.units(min(limit.room, max(0, free)))
    return Standing(limit, whole - remaining, remaining, reset_us if limit.drains else 0)


def converted(cost: int, old: Limit, new: Limit) -> int:
    """A cost at another rate: the same requests or tokens."""
    return cost * old.amount // new.amount if old.drains and old.amount != new.amount else cost
