"""The lanes in which tickets wait: per place and tenant, the one with the lowest key first.

Per place and tenant there is a heap (`Lane`). Its head stands in the place's heap of heads while the tenant is within
a quantum of the least served one, and in a second heap, ordered by service, while it is not. Nothing is searched for:
what became stale is dropped when it comes to the top, so every operation is O(log n), amortised.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from policies.backend import Ticket


class Item(NamedTuple):
    """A ticket's entry in one lane; stale once the ticket's stamp has moved on. Ordered by its first three fields."""

    key: float
    seq: int
    serial: int
    stamp: int
    ticket: Ticket
    lane: Lane

    @property
    def live(self) -> bool:
        return self.stamp == self.ticket.stamp


class Flow:
    """One tenant's waiting tickets and the service it has had (virtual time, in weighted tokens), of which some is only
    `expected` of what runs."""

    __slots__ = ("expected", "lanes", "served", "tickets", "tokens")

    def __init__(self) -> None:
        self.served = 0.0
        self.expected = 0.0
        self.tickets = 0
        self.tokens = 0
        self.lanes: dict[str, Lane] = {}


class Lane:
    """One tenant's tickets at one place. `shown` is the entry that stands for it among the place's heads."""

    __slots__ = ("flow", "heap", "later", "place", "shown")

    def __init__(self, flow: Flow, place: Place) -> None:
        self.flow = flow
        self.place = place
        self.heap: list[Item] = []
        self.shown: Item | None = None
        self.later = False

    def push(self, item: Item) -> None:
        heappush(self.heap, item)
        if len(self.heap) > 2 * self.flow.tickets + 16:
            self.heap = [item for item in self.heap if item.live]
            heapify(self.heap)
        if not self.later and (self.shown is None or item < self.shown):
            self.shown = item
            heappush(self.place.heads, item)

    def empty(self) -> bool:
        while self.heap and not self.heap[0].live:
            heappop(self.heap)
        return not self.heap

    def show(self) -> None:
        self.shown = None
        if not self.empty():
            self.shown = self.heap[0]
            heappush(self.place.heads, self.shown)


class Place:
    """The lanes of all tenants at one place: the heads of those in turn, and those that had more than their share."""

    __slots__ = ("floor", "heads", "later")

    def __init__(self, floor: float = 0.0) -> None:
        self.heads: list[Item] = []
        self.later: list[tuple[float, int, Lane]] = []
        self.floor = floor  # service of the tenant last served here

    def first(self, limit: float, serial: count[int]) -> Item | None:
        """The first entry among the tenants served no more than `limit`."""
        later, heads = self.later, self.heads
        while later and later[0][0] <= limit:
            lane = heappop(later)[2]
            if lane.later and lane.flow.served > limit:
                heappush(later, (lane.flow.served, next(serial), lane))
            elif lane.later:
                lane.later = False
                lane.show()
        while heads:
            item = heads[0]
            lane = item.lane
            if lane.shown is item and item.live and lane.flow.served <= limit:
                return item
            heappop(heads)
            if lane.shown is item and item.live:
                lane.shown, lane.later = None, True
                heappush(later, (lane.flow.served, next(serial), lane))
            elif lane.shown is item:
                lane.show()
        return None

    def least(self, serial: count[int]) -> float:
        """What the least served of the tenants that had more than their share has had; infinity if there is none."""
        later = self.later
        while later:
            served, _, lane = later[0]
            if lane.later and lane.empty():
                lane.later = False
            if lane.later and lane.flow.served == served:
                return served
            heappop(later)
            if lane.later and lane.flow.served > served:
                heappush(later, (lane.flow.served, next(serial), lane))
        return inf
