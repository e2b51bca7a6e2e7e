"""One limit as one of several replicas sees it, through leases on a store that all of them share.

The store keeps for each limit what is used of it and, per replica, a lease: a part of the room that the replica may
spend without asking. Leases take up room as if they were used, so all replicas together cannot exceed the limit,
whatever they know of each other. A replica reports what it spent, keeps or returns what it did not, and asks for more,
in one round trip. A lease lapses at its time of expiry: for a rate the store then counts it as spent, for requests at
once as returned. A lease is at most a share of what is free, so near the limit there are none and each request is
decided by the store.

Costs and times are whole microseconds of the replica's own monotonic clock, or requests at once.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.limits import RETRY_CONCURRENT_US, Denied, Limit, Standing, Tally, denied, standing

LEASE_US = 8_000_000  # a replica that dies blocks requests at once so long
USABLE_US = 7_000_000  # less than LEASE_US, for the way there and back and for clocks that drift
FIRST_WISH = 16  # requests like the one that asks
# How long it is believed that nothing has come back: what is given back elsewhere is not told to us.
BELIEVED_US = {True: 200_000, False: 50_000}  # rates, requests at once


class Report(NamedTuple):
    """What is told to the store: what was spent since the last report (of requests at once: how many run), how much of
    the lease stays here, how much more is wished for and what is the least that is of any use, and what was last known
    to be used, should the store have forgotten it."""

    spent: int
    kept: int
    wish: int
    least: int
    known: int


class Lease:
    """The view of one limit."""

    __slots__ = (
        "_cost",
        "_free",
        "_held",
        "_running",
        "_seen_at",
        "_spent",
        "_until",
        "_used",
        "_wish",
        "limit",
        "tally",
    )

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.tally = Tally(limit)  # what is used as far as is known here, for the time without the store
        self._held = 0
        self._until = 0
        self._spent = 0  # and not yet reported; less than nothing where more came back
        self._running = 0
        self._wish = 0
        self._cost = 1  # of the last request that had to ask
        self._free = limit.room
        self._used = 0
        self._seen_at = -BELIEVED_US[True]

    def __repr__(self) -> str:
        return f"<Lease {self.limit.kind} [{self._held} held, {self._spent} spent, {self._running} running]>"

    @property
    def running(self) -> int:
        """Requests at once, of this replica."""
        return self._running

    def active(self) -> bool:
        """Whether the store has to be told anything, or told again."""
        return bool(self._held or self._spent or self._running)

    def holds(self, cost: int, now: int) -> bool:
        """Whether a cost can be spent without asking."""
        return self._held >= cost and now < self._until

    def spend(self, cost: int) -> None:
        """Of what is held."""
        self._held -= cost
        if self.limit.drains:
            self._spent += cost
        else:
            self._running += cost

    def admitted(self, cost: int) -> None:
        """The store has charged a request of ours, and let it through."""
        if not self.limit.drains:
            self._running += cost

    def give(self, cost: int, now: int, share: int) -> None:
        """Part of a charge comes back; what is less than nothing is charged on top."""
        if self.limit.drains:
            self._spent -= cost
            self._held = max(0, self._held + min(0, cost))
            self.tally.add(-cost * share, now)
            return
        self._running -= cost
        if now < self._until:
            self._held += cost

    # -- with the store -----------------------------------------------------------------------------------------

    def report(self, now: int, asked: int, *, leaving: bool = False) -> Report:
        """What to tell it; `asked` is the cost of the request that made us ask, 0 where time did. What nobody here has
        use for goes back, as all does near the limit."""
        spent = self._spent if self.limit.drains else self._running
        self._spent = 0
        if asked:
            self._cost = asked
            self._wish = min(self.limit.room, max(2 * self._wish, FIRST_WISH * asked))
            self._held = 0  # it is too little
        elif leaving or not spent:
            self._wish = self._held = 0
        elif 4 * spent < self._wish:
            self._wish //= 2
        if now >= self._until or self.tight(now):
            self._held = 0
        return Report(spent, self._held, max(0, self._wish - self._held), self._cost, self._known(now))

    def _known(self, now: int) -> int:
        """What the store last said is used, less what came back since."""
        return max(0, self._used - (now - self._seen_at)) if self.limit.drains else 0

    def renewed(self, free: int, used: int, extra: int, sent_at: int) -> None:
        """Its answer to a report that was sent at `sent_at`: what is left for all, what is used, what we got."""
        self._held += extra
        self._until = sent_at + USABLE_US
        self._free, self._used, self._seen_at = free, used, sent_at
        if self.limit.drains:
            self.tally.set(self.limit.room - free, sent_at)  # the leases may all be spent by now

    def tight(self, now: int) -> bool:
        """Whether more than half is used: others may need what we do not."""
        return 2 * self._available(now) < self.limit.room

    def _available(self, now: int) -> int:
        """What the store has left at least, if nobody else has asked since."""
        return self._free + min(now - self._seen_at, self._used) if self.limit.drains else self._free

    def denies(self, cost: int, now: int) -> Denied | None:
        """Why the store would refuse a cost, where that is certain, or was only just now."""
        limit, free = self.limit, self._available(now) + self._held
        fresh = now - self._seen_at <= BELIEVED_US[limit.drains]
        if cost <= limit.room and (cost <= free or not fresh):
            return None
        return denied(limit, cost, free, cost - free)

    def refused(self, cost: int, now: int) -> Denied | None:
        """Why the store has just refused a cost, if it was for this limit."""
        if cost <= self._free:
            return None
        free = self._available(now) + self._held
        return denied(self.limit, cost, free, max(1000, cost - free))

    # -- without the store --------------------------------------------------------------------------------------

    def denies_alone(self, cost: int, now: int, share: int) -> Denied | None:
        """Why a cost does not fit into this replica's own part of the limit, one of `share`."""
        if self.limit.drains:
            return self.tally.denies(cost, now, share)
        room = max(1, self.limit.room // share)
        if self._running + cost <= room:
            return None
        return denied(self.limit, cost, room - self._running, RETRY_CONCURRENT_US)

    def spend_alone(self, cost: int, now: int, share: int) -> None:
        """Of the own part."""
        if self.limit.drains:
            self._spent += cost
            self.tally.add(cost * share, now)
        else:
            self._running += cost

    def returned(self, now: int, share: int) -> None:
        """The store is back: what was spent without it, and is not yet paid off, is to be reported."""
        if self.limit.drains:
            self._spent = min(self._spent, max(0, self.tally.used(now) - self._known(now)) // share)

    def standing(self, now: int) -> Standing:
        """As far as is known here."""
        limit = self.limit
        if not limit.drains:
            return standing(limit, self._free + self._held if now < self._until else limit.room - self._running, 0)
        held = self._held if now < self._until else 0
        free = min(limit.room, self._available(now) + held - min(0, self._spent))
        return standing(limit, free, limit.room - free)
