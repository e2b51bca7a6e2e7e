"""How the pool stands, and how long those who wait will wait: from how fast the queue has drained."""

from __future__ import annotations

from policies.backend import Ticket
from policies.estimate import Drain
from policies.pool import Pool
from policies.types import Place, Statistics
from policies.waiting import WaitingRoom

SHORTEST_S, LONGEST_S = 1.0, 60.0  # of what refused clients are told


class Forecast:
    """Of one pool and its queue."""

    def __init__(self, pool: Pool, room: WaitingRoom) -> None:
        self.drain = Drain()
        self._pool = pool
        self._room = room

    def rate(self, now: float) -> float:
        """Tokens per second that leave the queue; before that was measured, what all backends should prefill."""
        return self.drain.rate(now, self._pool.times.rate * max(1, len(self._pool.backends)))

    def retry_after(self, now: float) -> float:
        """Seconds until what waits now will have been served, from 1 to 60: when a new try is worth it."""
        queued = sum(tier.queue.tokens for tier in self._room.tiers.values())
        return min(LONGEST_S, max(SHORTEST_S, queued / self.rate(now)))

    def place(self, ticket: Ticket, now: float) -> Place:
        """Where the ticket stands among those of its class, waiting or not; O(waiting)."""
        ahead, tokens = self._room.ahead(ticket)
        return Place(ahead + 1, tokens / self.rate(now))

    def statistics(self, now: float) -> Statistics:
        """A snapshot."""
        tiers = self._room.tiers
        return Statistics(
            queued={name: tier.queue.requests for name, tier in tiers.items()},
            queued_tokens={name: tier.queue.tokens for name, tier in tiers.items()},
            backends=self._pool.statistics(now),
            prefill_rate=self._pool.times.rate,
            drain_rate=self.rate(now),
            index_pieces=len(self._pool.index),
        )
