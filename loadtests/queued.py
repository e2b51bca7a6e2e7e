"""Published policies that hold requests in one queue before the replicas: fair orders, and Dynamo's router queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import inf
from random import Random

from loadtests.fleet import Fleet
from loadtests.immediate import block_costs, least
from loadtests.router import Omniscient
from policies.types import Dispatch, Drop, Ending, Job, Reason, Usage

OUTPUT_WEIGHT = 2.0  # of VTC and DLPM, against 1 for a prompt token


class FirstCome:
    """First come, first served. Other orders extend it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.waiting: dict[int, Job] = {}

    def add(self, job: Job) -> None:
        """`job` begins to wait."""
        self.waiting[job.id] = job

    def first(self, now: float) -> Job:
        """The next of at least one."""
        return next(iter(self.waiting.values()))

    def start(self, job: Job, uncached: int) -> None:
        """`job` goes to a replica."""
        del self.waiting[job.id]

    def end(self, job_id: int) -> None:
        """It has ended."""


class _Matches:
    """The least uncached tokens of waiting jobs on any replica, looked up anew after a second."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[int, tuple[float, int]] = {}

    def least(self, job: Job, now: float) -> int:
        when, uncached = self._known.get(job.id, (-inf, 0))
        if when < now - 1.0:
            uncached = min(self._fleet.uncached(job.id))
            self._known[job.id] = now, uncached
        return uncached


class ShortestFirst(FirstCome):
    """Dynamo's `--router-queue-policy wspt`: Smith's rule, (1 + priority) / uncached tokens on the best worker."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._matches = _Matches(fleet)

    def first(self, now: float) -> Job:
        return min(self.waiting.values(), key=lambda job: self._matches.least(job, now))


class VirtualTokens(FirstCome):
    """VTC (Sheng et al., OSDI 2024): the tenant with the least counter; w_p = 1 per prompt token at admission, w_q = 2
    per output token as it comes; a tenant that returns is lifted to the least of those that wait."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.counters: dict[str, float] = defaultdict(float)
        self.queues: dict[str, dict[int, Job]] = {}  # of the tenants that have something waiting
        self._running: dict[int, tuple[str, int]] = {}  # tenant, and output tokens already counted
        self._last = 0.0

    def add(self, job: Job) -> None:
        super().add(job)
        if job.tenant not in self.queues:
            self.lift(job.tenant)
        self.queues.setdefault(job.tenant, {})[job.id] = job

    def lift(self, tenant: str) -> None:
        floor = min((self.counters[other] for other in self.queues), default=self._last)
        self.counters[tenant] = max(self.counters[tenant], floor)

    def first(self, now: float) -> Job:
        self._count_output()
        tenant = min(self.queues, key=lambda tenant: self.counters[tenant])
        return next(iter(self.queues[tenant].values()))

    def start(self, job: Job, uncached: int) -> None:
        super().start(job, uncached)
        del self.queues[job.tenant][job.id]
        if not self.queues[job.tenant]:
            del self.queues[job.tenant]
        self._last = self.counters[job.tenant]
        self._running[job.id] = (job.tenant, 0)
        self.charge(job, uncached)

    def charge(self, job: Job, uncached: int) -> None:
        self.counters[job.tenant] += job.prompt_tokens

    def end(self, job_id: int) -> None:
        self._count_output()
        self._running.pop(job_id, None)

    def _count_output(self) -> None:
        for job_id, (tenant, counted) in self._running.items():
            if (emitted := self.fleet.emitted(job_id)) > counted:
                self.counters[tenant] += OUTPUT_WEIGHT * (emitted - counted)
                self._running[job_id] = tenant, emitted


class PrefixDeficit(VirtualTokens):
    """DLPM (arXiv 2501.14312): the longest match first, among the tenants with a positive deficit; when none of those
    that wait has one, each gets a quantum. Uncached prompt tokens and output tokens are taken off. The deficits are
    kept as their negatives, in `counters`."""

    QUANTUM_TOKENS = 20_000

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._matches = _Matches(fleet)

    def lift(self, tenant: str) -> None:
        """A tenant that returns keeps its deficit."""

    def first(self, now: float) -> Job:
        self._count_output()
        while not (able := [tenant for tenant in self.queues if self.counters[tenant] < 0.0]):
            for tenant in self.queues:
                self.counters[tenant] -= self.QUANTUM_TOKENS
        jobs = (job for tenant in able for job in self.queues[tenant].values())
        return max(jobs, key=lambda job: job.prompt_tokens - self._matches.least(job, now))

    def charge(self, job: Job, uncached: int) -> None:
        self.counters[job.tenant] += uncached


Place = Callable[[Job], int | None]


class Queued(Omniscient):
    """One queue in `order`; its first goes where `place` says, and keeps all others waiting while that is nowhere."""

    POLL_S = 0.02  # an engine empties its own queue without a sign

    def __init__(self, fleet: Fleet, order: FirstCome, place: Place) -> None:
        self._fleet = fleet
        self._order = order
        self._place = place
        self._next: float | None = None

    def submit(self, job: Job, now: float) -> Reason | None:
        self._order.add(job)
        return None

    def leave(self, job_id: int, now: float, ending: Ending, usage: Usage | None = None) -> None:
        self._order.end(job_id)

    def due(self, now: float) -> list[Dispatch | Drop]:
        out: list[Dispatch | Drop] = []
        taken: set[int] = set()
        waiting = self._order.waiting
        while waiting:
            job = self._order.first(now)
            chosen = self._place(job)
            if chosen is None or chosen in taken:
                break
            taken.add(chosen)
            self._order.start(job, self._fleet.uncached(job.id)[chosen])
            out.append(Dispatch(job, self._fleet.replicas[chosen].name))
        self._next = now + self.POLL_S if waiting and (taken or any(self._fleet.waiting())) else None
        return out

    def next_deadline(self) -> float | None:
        return self._next


def in_memory(fleet: Fleet, rng: Random, *, by_prefix: bool = False) -> Place:
    """As engines admit: a replica with nothing in its own queue, and KV memory for the prompt and its expected answer.
    The one with most memory free, or (`by_prefix`) with most of the prompt."""

    def place(job: Job) -> int | None:
        need = job.prompt_tokens + job.output_tokens
        held, waiting = fleet.kv_usage(), fleet.waiting()
        whole = fleet.scenario.kv_tokens
        able = [i for i, w in enumerate(waiting) if not w and (1.0 - held[i]) * whole >= min(need, whole)]
        if not able:
            return None
        return least(fleet.uncached(job.id) if by_prefix else held, rng, able)

    return place


def below_threshold(fleet: Fleet, rng: Random, *, chunks: float = 2.0) -> Place:
    """Dynamo's `--router-queue-threshold` (2.0 when it was introduced, 4 and 16 later): requests are held while every
    worker has more prefill tokens than so many times `max_num_batched_tokens`; then the block cost decides."""

    def place(job: Job) -> int | None:
        if min(fleet.queued()) > chunks * fleet.scenario.chunk:
            return None
        return least(block_costs(fleet, job), rng)

    return place
