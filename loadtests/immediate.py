"""Published routing policies that send each request somewhere the moment it arrives."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random

from loadtests.fleet import Fleet
from loadtests.profiles import S
from loadtests.router import Omniscient
from policies.types import Dispatch, Drop, Job, Reason

Choose = Callable[[Job, float], int | None]


class Immediate(Omniscient):
    """Every request goes somewhere (or is rejected) the moment it arrives. `choose` gives the replica's number."""

    def __init__(self, fleet: Fleet, choose: Choose) -> None:
        self._fleet = fleet
        self._choose = choose
        self._arrived: list[Job] = []

    def submit(self, job: Job, now: float) -> Reason | None:
        self._arrived.append(job)
        return None

    def due(self, now: float) -> list[Dispatch | Drop]:
        arrived, self._arrived = self._arrived, []
        return [self._decide(job, now) for job in arrived]

    def _decide(self, job: Job, now: float) -> Dispatch | Drop:
        chosen = self._choose(job, now)
        if chosen is None:
            return Drop(job, Reason.DEADLINE, 1.0)
        return Dispatch(job, self._fleet.replicas[chosen].name)


def least(costs: Sequence[float], rng: Random, among: Sequence[int] | None = None) -> int:
    """The number of the lowest cost, ties at random."""
    numbers = range(len(costs)) if among is None else among
    best = min(costs[i] for i in numbers)
    return rng.choice([i for i in numbers if costs[i] == best])


def round_robin(fleet: Fleet, rng: Random) -> Choose:
    """Each in turn."""
    turn = rng.randrange(len(fleet.replicas))

    def choose(job: Job, now: float) -> int:
        nonlocal turn
        turn = (turn + 1) % len(fleet.replicas)
        return turn

    return choose


def power_of_two(fleet: Fleet, rng: Random) -> Choose:
    """Of two at random the one with fewer requests (Mitzenmacher 2001; Envoy's least_request, choice_count 2)."""

    def choose(job: Job, now: float) -> int:
        return least(fleet.requests(), rng, rng.sample(range(len(fleet.replicas)), 2))

    return choose


def least_tokens(fleet: Fleet, rng: Random) -> Choose:
    """Least outstanding uncached tokens, this request's included."""

    def choose(job: Job, now: float) -> int:
        return least([q + u for q, u in zip(fleet.queued(), fleet.uncached(job.id), strict=True)], rng)

    return choose


def cache_aware(fleet: Fleet, rng: Random, *, threshold: float, absolute: int, relative: float) -> Choose:
    """SGLang's router (sgl-model-gateway policies/cache_aware.rs): by requests when these are out of balance, else the
    longest match if it is more than `threshold` of the prompt, else fewest requests. Defaults of the code 0.5 / 32 /
    1.1, of the command line 0.3 / 64 / 1.5. Matches are exact here, the original keeps an approximate tree."""

    def choose(job: Job, now: float) -> int:
        loads = fleet.requests()
        uncached = fleet.uncached(job.id)
        low, high = min(loads), max(loads)
        balanced = high - low <= absolute or high <= relative * low
        if balanced and 1.0 - min(uncached) / job.prompt_tokens > threshold:
            best = min(uncached)
            return least(loads, rng, [i for i, u in enumerate(uncached) if u == best])
        return least(loads, rng)

    return choose


def bounded_hash(fleet: Fleet, rng: Random) -> Choose:
    """KubeAI's PrefixHash: consistent hashing with bounded loads (Mirrokni et al. 2018) over the start of the prompt,
    256 points per replica, load factor 1.25; where no load is within the bound, the key's own replica. The key is the
    first piece of the trace (the original: 100 characters); prompts without digests hash by themselves."""
    replicas = len(fleet.replicas)
    ring = sorted((_point(b"%d/%d" % (i, point)), i) for i in range(replicas) for point in range(256))
    points = [point for point, _ in ring]

    def choose(job: Job, now: float) -> int:
        loads = fleet.requests()
        limit = 1.25 * (sum(loads) + 1) / replicas
        start = bisect(points, _point(job.prefix[0] if job.prefix else b"%d" % job.id))
        walk = (ring[(start + step) % len(ring)][1] for step in range(len(ring)))
        own = next(walk)
        if loads[own] + 1 <= limit or not any(loads):
            return own
        return next((i for i in walk if loads[i] + 1 <= limit), own)

    return choose


def _point(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


def blend(fleet: Fleet, rng: Random) -> Choose:
    """llm-d's weighted sum until mid-2026: 3 x matched share of the prompt + 2 x queue + 2 x KV, the highest wins;
    `queue` is the engine's own queue scaled between the least and the most of all, `kv` the free share."""

    def choose(job: Job, now: float) -> int:
        waiting, kv = fleet.waiting(), fleet.kv_usage()
        most, spread = max(waiting), max(waiting) - min(waiting)
        costs = [
            3 * u / job.prompt_tokens - 2 * ((most - w) / spread if spread else 1.0) + 2 * k
            for u, w, k in zip(fleet.uncached(job.id), waiting, kv, strict=True)
        ]
        return least(costs, rng)

    return choose


def sticky(fleet: Fleet, rng: Random, *, longest_s: float) -> Choose:
    """llm-d's "sticky until saturated" (default since August 2026): among the replicas that hold at least 80 % of the
    prompt, unless the least loaded of them is tau tokens behind the least loaded of the others; then argmin Q + u.
    tau = peak prefill rate x `longest_s` (published: 18 s)."""
    tau = peak_rate(fleet) * longest_s

    def choose(job: Job, now: float) -> int:
        queued, uncached = fleet.queued(), fleet.uncached(job.id)
        costs = [q + u for q, u in zip(queued, uncached, strict=True)]
        warm = [i for i, u in enumerate(uncached) if 1.0 - u / job.prompt_tokens >= 0.8]
        cold = [i for i in range(len(uncached)) if i not in warm]
        if warm and (not cold or min(queued[i] for i in warm) - min(queued[i] for i in cold) <= tau):
            return least(costs, rng, warm)
        return least(costs, rng)

    return choose


def product(fleet: Fleet, rng: Random) -> Choose:
    """LMETRIC (arXiv 2603.15202): least (new prefill tokens if sent there) x (batch size there). No parameters; one is
    added to the batch, or an idle replica would win whatever it must compute."""

    def choose(job: Job, now: float) -> int:
        parts = zip(fleet.queued(), fleet.uncached(job.id), fleet.requests(), strict=True)
        return least([(q + u) * (b + 1) for q, u, b in parts], rng)

    return choose


def min_ttft(fleet: Fleet, rng: Random, *, reject: bool) -> Choose:
    """Mooncake's Conductor (FAST 2025, Algorithm 1) for one kind of replica and no cache transfer: least predicted
    TTFT = T_queue + T_prefill, the queue being the sum of its prefills; early rejection of what would be late."""
    profile, chunk = fleet.scenario.engine, fleet.scenario.chunk

    def choose(job: Job, now: float) -> int | None:
        whole = job.prompt_tokens
        costs = [
            queued_s + profile.prefill_ps(whole, chunk, whole - u) / S
            for queued_s, u in zip(fleet.queued_s(), fleet.uncached(job.id), strict=True)
        ]
        best = least(costs, rng)
        late = reject and job.deadline is not None and now + costs[best] > job.deadline
        return None if late else best

    return choose


def block_cost(fleet: Fleet, rng: Random) -> Choose:
    """NVIDIA Dynamo's KV router (lib/kv-router selector/default.rs): least prefill blocks (queued and of this prompt,
    less those that overlap) plus active decode blocks; overlap credit 1, prefill scale 1, temperature 0."""

    def choose(job: Job, now: float) -> int:
        return least(block_costs(fleet, job), rng)

    return choose


def block_costs(fleet: Fleet, job: Job) -> list[float]:
    parts = zip(fleet.queued(), fleet.uncached(job.id), fleet.replicas, strict=True)
    return [(q + u) / 16 + replica.engine.pool.held for q, u, replica in parts]


def peak_rate(fleet: Fleet) -> float:
    """Tokens per second of one full chunk: the single calibration that these policies ask for."""
    return fleet.scenario.chunk / fleet.scenario.isolated_s(fleet.scenario.chunk)
