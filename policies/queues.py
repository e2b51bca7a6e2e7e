"""Who is next: fair shares between tenants, and a static order inside them.

A ticket stands in one lane that every backend reads (COLD), and in a lane of each backend where it would be much
cheaper; one that may not go everywhere stands only in the lanes of the backends that it may use. So a backend that
opens sees at once all that it could take, in the order that holds *there*, and nothing that it could not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf, log1p

from policies.backend import COLD, Ticket
from policies.lanes import Flow, Item, Lane, Place
from policies.types import Job

Key = Callable[[Job, int], float]


def by_arrival(job: Job, uncached: int) -> float:
    """First come, first served."""
    return job.arrived


def aged_shortest(ageing_s: float) -> Key:
    """Shortest prefill first, with exponential ageing: a key that never changes, so a heap can hold it."""
    return lambda job, uncached: job.arrived / ageing_s + log1p(uncached)


class FairShare:
    """Weighted fair service of tenants by virtual time (VTC, Sheng et al., OSDI 2024), with room for order.

    A tenant is charged at dispatch and settled at the end; who comes back from idle is lifted to the service of the
    tenant last served, so that nobody saves up, but not by what that one will be given back if it was only expected.
    Among the tenants within a quantum of the least served one the ticket with the lowest key is next. With an infinite
    quantum there are no shares, only the order.
    """

    def __init__(self, key: Key, quantum_tokens: float = inf, quantum_requests: float = inf) -> None:
        self.key = key
        self.requests = 0
        self.tokens = 0
        self._quantum_tokens = quantum_tokens
        self._quantum_requests = quantum_requests
        self._mean_cost = 0.0
        self._samples = 0
        self._flows: dict[str, Flow] = {}
        self._places: dict[str, Place] = {COLD: Place()}
        self._by_service: list[tuple[float, int, Flow]] = []
        self._serial = count()

    def __len__(self) -> int:
        return self.requests

    def __repr__(self) -> str:
        flows = ", ".join(
            f"{name} {flow.tickets}@{flow.served:.0f}" for name, flow in self._flows.items() if flow.tickets
        )
        return f"<FairShare [{flows}]>"

    def of(self, tenant: str) -> tuple[int, int]:
        """Requests and tokens that the tenant has in this queue."""
        flow = self._flows.get(tenant)
        return (0, 0) if flow is None else (flow.tickets, flow.tokens)

    def served(self, tenant: str) -> float:
        """The tenant's virtual time, in tokens over its weight."""
        flow = self._flows.get(tenant)
        return 0.0 if flow is None else flow.served

    @property
    def quantum(self) -> float:
        """How far a tenant's service may run ahead of the least served one's before it loses its turn, in tokens."""
        return min(self._quantum_tokens, self._quantum_requests * max(1.0, self._mean_cost))

    def add(self, ticket: Ticket) -> None:
        """The ticket begins to wait."""
        flow = self._flow(ticket)
        flow.tickets += 1
        if flow.tickets == 1:
            self._rank(flow)
        flow.tokens += ticket.job.prompt_tokens
        self.requests += 1
        self.tokens += ticket.job.prompt_tokens
        self.show(ticket)

    def remove(self, ticket: Ticket) -> None:
        """The ticket no longer waits."""
        self.hide(ticket)
        flow = self._flows[ticket.job.tenant]
        flow.tickets -= 1
        flow.tokens -= ticket.job.prompt_tokens
        self.requests -= 1
        self.tokens -= ticket.job.prompt_tokens
        if not flow.tickets:
            flow.lanes = {}

    def show(self, ticket: Ticket) -> None:
        """Put the ticket into the lanes where it may be found."""
        flow = self._flows[ticket.job.tenant]
        for name in ticket.lanes if ticket.parked else ticket.places:
            if (lane := flow.lanes.get(name)) is None:
                if name not in self._places:
                    self._places[name] = Place(self._places[COLD].floor)
                lane = flow.lanes[name] = Lane(flow, self._places[name])
            key = self.key(ticket.job, ticket.cold if name == COLD else ticket.uncached(name))
            lane.push(Item(key, ticket.seq, next(self._serial), ticket.stamp, ticket, lane))

    def hide(self, ticket: Ticket) -> None:
        """Take the ticket out of all lanes; it still waits."""
        ticket.stamp += 1

    def first(self, backends: Iterable[str]) -> Ticket | None:
        """Who is next, of those that the given backends could take."""
        places = [self._places[COLD]]
        places += [self._places[name] for name in backends if name in self._places]
        item = self._first(places, self._least() + self.quantum)
        while item is None:
            # Every visible tenant is ahead of one that cannot go anywhere now: do not let the backends idle.
            least = min(place.least(self._serial) for place in places)
            if least == inf:
                return None
            item = self._first(places, least + self.quantum)
        return item.ticket

    def head(self, backend: str) -> float | None:
        """The key of whatever would go first to that backend."""
        ticket = self.first((backend,))
        return None if ticket is None else self.key(ticket.job, ticket.uncached(backend))

    def charge(self, ticket: Ticket, cost: int, expected: int = 0) -> None:
        """The ticket was dispatched: its tenant has had `cost` tokens of service, `expected` of them yet to come."""
        flow = self._flows[ticket.job.tenant]
        for name in ticket.places:
            if (place := self._places.get(name)) is not None:
                place.floor = max(place.floor, flow.served - flow.expected)
        self._samples += 1
        self._mean_cost += (cost - self._mean_cost) * self._step
        flow.expected += expected / ticket.job.weight
        self._serve(flow, cost / ticket.job.weight)

    def serve(self, ticket: Ticket, cost: int, expected: int = 0) -> None:
        """The ticket is dispatched without having waited."""
        self._flow(ticket)
        self.charge(ticket, cost, expected)

    def settle(self, job: Job, difference: int, expected: int = 0) -> None:
        """The tenant's service was really `difference` tokens more (or less) than it was charged when so many were
        `expected`."""
        if (flow := self._flows.get(job.tenant)) is not None:
            flow.expected -= expected / job.weight
            self._mean_cost += difference * self._step
            self._serve(flow, difference / job.weight)

    @property
    def _step(self) -> float:
        """The weight of a request in the mean: equal ones at first, then a memory of fifty."""
        return max(0.02, 1.0 / max(1, self._samples))

    def forget(self, backend: str) -> None:
        """The backend is gone; what stood in its lanes must be shown anew."""
        if self._places.pop(backend, None) is not None:
            for flow in self._flows.values():
                flow.lanes.pop(backend, None)

    def _serve(self, flow: Flow, service: float) -> None:
        flow.served += service
        if flow.tickets:
            self._rank(flow)
        if service < 0:
            for lane in flow.lanes.values():
                if lane.later:
                    heappush(lane.place.later, (flow.served, next(self._serial), lane))

    def _first(self, places: list[Place], limit: float) -> Item | None:
        found = [item for place in places if (item := place.first(limit, self._serial)) is not None]
        return min(found, default=None)

    def _flow(self, ticket: Ticket) -> Flow:
        """The tenant's flow; if nothing of it waits, lifted to whoever was served last."""
        if (flow := self._flows.get(ticket.job.tenant)) is None:
            flow = self._flows[ticket.job.tenant] = Flow()
        if not flow.tickets:
            flow.served = max(flow.served, self._floor(ticket))
        return flow

    def _floor(self, ticket: Ticket) -> float:
        """The service of whoever was served last where the ticket may go. Lanes do not count: few are served there."""
        cold = self._places[COLD]
        if not ticket.restricted:
            return cold.floor
        return min(((self._places.get(name) or cold).floor for name in ticket.places), default=0.0)

    def _rank(self, flow: Flow) -> None:
        """Note how much the flow has had. While one that waits for long has had least, nothing stale comes to the top:
        it goes when there is too much of it."""
        heappush(self._by_service, (flow.served, next(self._serial), flow))
        if len(self._by_service) > 2 * len(self._flows) + 64:
            waiting = (each for each in self._flows.values() if each.tickets)
            self._by_service = [(each.served, next(self._serial), each) for each in waiting]
            heapify(self._by_service)

    def _least(self) -> float:
        heap = self._by_service
        while heap and not (heap[0][2].tickets and heap[0][2].served == heap[0][0]):
            heappop(heap)
        return heap[0][0] if heap else 0.0
