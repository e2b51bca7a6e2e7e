"""The tickets that wait, class by class: bounds, deadlines, whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from policies.admission import Admission
from policies.backend import Backend, Slot, Ticket
from policies.queues import FairShare, Key
from policies.rules import Rules
from policies.types import ClassPolicy, Ending, Job, Reason, Usage, Wait


@dataclass(slots=True, eq=False)
class Tier:
    """One class at work: its policy, its queue, and the tokens that it is owed of its floor."""

    policy: ClassPolicy
    queue: FairShare
    owed: float = 0.0

    def full(self, job: Job) -> bool:
        """Whether one more would exceed a bound: of the class, or of the tenant's share of it. One job always fits
        an empty queue, and one of each tenant its share, however small the bounds."""
        policy, queue = self.policy, self.queue
        own_requests, own_tokens = queue.of(job.tenant)
        tokens = policy.max_queued_tokens
        return (
            queue.requests >= policy.max_queued or (queue.requests > 0 and queue.tokens + job.prompt_tokens > tokens)
        ) or (
            own_requests > 0
            and (
                own_requests + 1 > policy.tenant_share * policy.max_queued
                or own_tokens + job.prompt_tokens > policy.tenant_share * tokens
            )
        )


class WaitingRoom:
    """All tickets of a pool."""

    def __init__(self, rules: Rules, classes: Sequence[ClassPolicy], queue: Callable[[], FairShare]) -> None:
        self.rules = rules
        self.tiers = {policy.name: Tier(policy, queue()) for policy in classes}
        self.tickets: dict[int, Ticket] = {}
        self._queue = queue
        self._timers: list[tuple[float, int, Ticket]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self.tickets)

    def configure(self, classes: Sequence[ClassPolicy], key: Key, latest: Callable[[Ticket], float]) -> None:
        """These are the classes from now on, in this order, and this is the order inside them. A class that is not
        among them stays behind the others, for the jobs that name it still."""
        tiers: dict[str, Tier] = {}
        for policy in classes:
            tier = tiers[policy.name] = self.tiers.get(policy.name) or Tier(policy, self._queue())
            tier.policy = policy
        self.tiers = tiers | {name: tier for name, tier in self.tiers.items() if name not in tiers}
        for tier in self.tiers.values():
            tier.queue.key = key
        for ticket in self.tickets.values():
            ticket.latest = latest(ticket)
            if not ticket.parked:
                self._wake(ticket, ticket.latest)
            self.requeue(ticket)

    def tier(self, ticket: Ticket) -> Tier:
        """The class that the ticket waits in."""
        return self.tiers[ticket.job.class_]

    def latest(self, job: Job, prefill_s: float) -> float:
        """Until when the job may wait: its class's patience, or its deadline less what its prefill takes."""
        longest = job.arrived + self.tiers[job.class_].policy.max_wait_s
        if job.deadline is None or not self.rules.refuse:
            return longest
        return min(longest, job.deadline - prefill_s)

    def holds(self, ticket: Ticket) -> bool:
        """Whether the ticket still waits."""
        return self.tickets.get(ticket.job.id) is ticket

    def too_late(self, ticket: Ticket, now: float) -> Reason:
        """Why the ticket may wait no longer."""
        waited_long = now >= ticket.job.arrived + self.tier(ticket).policy.max_wait_s
        return Reason.WAITED if waited_long else Reason.DEADLINE

    def add(self, ticket: Ticket) -> None:
        """The ticket begins to wait."""
        self.tickets[ticket.job.id] = ticket
        self.tier(ticket).queue.add(ticket)
        self._wake(ticket, ticket.latest)

    def remove(self, ticket: Ticket) -> None:
        """The ticket waits no more."""
        del self.tickets[ticket.job.id]
        tier = self.tier(ticket)
        tier.queue.remove(ticket)
        if not tier.queue.requests:
            tier.owed = 0.0

    def park(self, ticket: Ticket, until: float) -> None:
        """Let the ticket wait for a backend of its lanes, until then."""
        ticket.parked, ticket.patient, ticket.waited_for = True, False, Wait.WARM
        self.requeue(ticket)
        self._wake(ticket, until)

    def hold(self, ticket: Ticket, why: Wait, latest: float) -> None:
        """Pass over the ticket, which is not shown until the queue is told to. It may wait until `latest`: sooner than
        it once seemed, if prefills have proved slower or its prompt is no longer cached."""
        self.tier(ticket).queue.hide(ticket)
        ticket.waited_for = why
        if latest < ticket.wake:
            self._wake(ticket, latest)

    def requeue(self, ticket: Ticket) -> None:
        """Put the ticket into its lanes anew, after its tokens or lanes have changed."""
        queue = self.tier(ticket).queue
        queue.hide(ticket)
        if ticket.parked and not ticket.lanes:
            ticket.parked = False
            self._wake(ticket, ticket.latest)
        queue.show(ticket)

    def ripe(self, now: float, latest: Callable[[Ticket], float]) -> list[Ticket]:
        """Tickets whose time is up. Parked ones whose patience is up go back to all lanes."""
        up: list[Ticket] = []
        while self._timers and self._timers[0][0] <= now:
            when, _, ticket = heappop(self._timers)
            if not self._awake(ticket, when):
                continue
            if ticket.parked:
                ticket.parked = False
                self.requeue(ticket)
            ticket.latest = latest(ticket)
            if ticket.latest <= now:
                up.append(ticket)
            else:
                self._wake(ticket, ticket.latest)
        return up

    def next_deadline(self) -> float:
        """When `ripe` will have something to say; infinity if never."""
        while self._timers and not self._awake(self._timers[0][2], self._timers[0][0]):
            heappop(self._timers)
        return self._timers[0][0] if self._timers else inf

    def first(
        self, spare: Collection[Backend], pool: Collection[Backend], admission: Admission
    ) -> tuple[Tier, Ticket, list[Backend]] | None:
        """Whose turn it is, and the backends that may be used for it. A class that is owed its floor goes before the
        others and under no ceiling."""
        tiers = [tier for tier in self.tiers.values() if tier.queue.requests]
        tiers.sort(key=lambda tier: tier.owed <= 0.0)
        for tier in tiers:
            usable = list(spare)
            if tier.policy.ceiling < 1.0 and tier.owed <= 0.0:
                usable = admission.below_ceiling(tier.policy, spare, pool)
            if usable and (ticket := tier.queue.first(backend.name for backend in usable)) is not None:
                return tier, ticket, usable
        return None

    def dispatched(self, ticket: Ticket, cost: int) -> None:
        """The ticket goes to a backend, for `cost` tokens of service: its tenant has had them, other classes are owed
        their floors. It may never have waited."""
        own = self.tier(ticket)
        expected = self._expected(ticket.job)
        if ticket.job.id not in self.tickets:
            own.queue.serve(ticket, cost, expected)
            return
        own.queue.charge(ticket, cost, expected)
        own.owed = max(own.owed, 0.0) - cost
        for tier in self.tiers.values():
            if tier.queue.requests:
                tier.owed = min(tier.owed + tier.policy.floor * cost, self.rules.quantum_tokens)
        self.remove(ticket)

    def settle(self, slot: Slot, ending: Ending, usage: Usage | None) -> None:
        """The slot has ended: its tenant is charged what it really cost. What a failed backend had of it is given
        back; of a client that left, what had come until then is kept."""
        if ending is Ending.DROPPED:
            cost = 0
        elif usage is not None:
            cached = slot.job.prompt_tokens - slot.uncached if usage.cached is None else usage.cached
            cost = max(1, usage.prompt - cached) + self.rules.output_weight * usage.output
        else:
            cost = slot.uncached + self.rules.output_weight * slot.output
        self.tiers[slot.job.class_].queue.settle(slot.job, cost - slot.cost, self._expected(slot.job))

    def _expected(self, job: Job) -> int:
        """What is charged for an answer before it has come."""
        return self.rules.output_weight * job.output_tokens

    def ahead(self, ticket: Ticket) -> tuple[int, int]:
        """How many tickets of its class go before this one by their order alone, and the prompt tokens of those and
        of the classes above."""
        tokens = 0
        for name, tier in self.tiers.items():
            if name == ticket.job.class_:
                place = tier.queue.key(ticket.job, ticket.least), ticket.seq
                others = [t for t in self.tickets.values() if t.job.class_ == name and t is not ticket]
                before = [t.job.prompt_tokens for t in others if (tier.queue.key(t.job, t.least), t.seq) < place]
                return len(before), tokens + sum(before)
            tokens += tier.queue.tokens
        return 0, tokens

    def forget(self, backend: str) -> None:
        """The backend is gone."""
        for tier in self.tiers.values():
            tier.queue.forget(backend)

    def _wake(self, ticket: Ticket, when: float) -> None:
        ticket.wake = when
        if when < inf:
            heappush(self._timers, (when, next(self._serial), ticket))
        if len(self._timers) > 2 * len(self.tickets) + 64:
            self._timers = [timer for timer in self._timers if self._awake(timer[2], timer[0])]
            heapify(self._timers)

    def _awake(self, ticket: Ticket, when: float) -> bool:
        return ticket.wake == when and self.holds(ticket)
