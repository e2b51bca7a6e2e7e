"""What may hold a gateway's work back: hypotheses, each with the evidence for and against it, and a rank.

Every piece of evidence is a number from the metrics, how strongly it speaks (0 to 1, by a ramp between a value that
says nothing and one that says all), and its weight. A hypothesis' score is that of independent witnesses who may err:
what speaks for it adds up as 1 - (1 - a)(1 - b)..., and what speaks against it takes its share off. A score ranks; it
is no probability, and no hypothesis is a fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from gateway.facts import Facts

FEW = 20  # requests below which a share says nothing
WEAK, STRONG = 0.3, 0.65
WORTH = 0.15  # a hypothesis with a lower score is not told


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation. `strength` is its weight in [0, 1], negative where it speaks against."""

    text: str
    strength: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """`name` is the key of what can be done about it (see `experiments`)."""

    name: str
    score: float
    evidence: tuple[Evidence, ...]

    @property
    def word(self) -> str:
        """How far the evidence goes."""
        return "strong" if self.score >= STRONG else "moderate" if self.score >= WEAK else "weak"


def ramp(value: float | None, none: float, full: float) -> float:
    """0 at `none` and beyond, 1 at `full` and beyond, straight in between; 0 for what is not known."""
    return 0.0 if value is None else min(1.0, max(0.0, (value - none) / (full - none)))


def hypotheses(facts: Facts) -> list[Hypothesis]:
    """The leading first; nothing that speaks of less than `WORTH`."""
    found = []
    few = ramp(facts.requests, 0.0, FEW)
    for name, witness in WITNESSES.items():
        heard = tuple(each for each in witness(facts) if abs(each.strength) >= 0.05)
        doubt = prod(1.0 - each.strength for each in heard if each.strength > 0)
        trust = prod(1.0 + each.strength for each in heard if each.strength < 0)
        found.append(Hypothesis(name, round((1.0 - doubt) * trust * few, 3), heard))
    return sorted((each for each in found if each.score >= WORTH), key=lambda each: -each.score)


# -- witnesses ---------------------------------------------------------------------------------------------------


def _missed(facts: Facts, cause: str, what: str, weight: float) -> Evidence:
    """A twentieth of the requests missed by one cause is worth a look, a quarter is the matter."""
    share = facts.missed.get(cause, 0.0)
    return Evidence(
        f"{share:.1%} of the judged requests were not good because of {what}", weight * ramp(share, 0.01, 0.2)
    )


def _late(facts: Facts) -> float:
    """How far first tokens are from what was promised."""
    kept = facts.kept("ttft")
    return 0.0 if kept is None else ramp(1.0 - kept, 0.01, 0.2)


def _slow(facts: Facts) -> float:
    """How far the following tokens are."""
    kept = facts.kept("itl")
    return 0.0 if kept is None else ramp(1.0 - kept, 0.01, 0.2)


def _against(text: str, strength: float) -> Evidence:
    return Evidence(text, -strength)


def _stalled(facts: Facts, weight: float) -> Evidence:
    """What a gateway that stands still measures of others is its own lateness, too."""
    told = f"the gateway's event loop is late ({_ms(facts.loop_lag_s)} p99), and with it what it measures of others"
    return _against(told, weight * ramp(facts.loop_lag_s, 0.03, 0.2))


def _cold_share(facts: Facts) -> float:
    return ramp(1.0 - facts.found_share, 0.3, 0.6) if facts.found_share is not None else 0.0


def prefill(facts: Facts) -> Iterator[Evidence]:
    """High time to the first token, normal gaps, and the backend has the time."""
    yield _missed(facts, "prefill", "how long their backends took to the first token", 0.7)
    part = facts.part("backend")
    yield Evidence(f"{part:.0%} of the time to the first token passes on the backends", 0.5 * _late(facts) * part)
    if facts.kept("itl") is not None:
        yield _against(f"gaps between tokens miss their objective, too ({_kept(facts, 'itl')})", 0.4 * _slow(facts))
    told = "a large part of the prompts expected in caches is not found there"
    yield _against(told, 0.6 * _cold_share(facts))
    yield _stalled(facts, 0.8)


def cold(facts: Facts) -> Iterator[Evidence]:
    """Prefixes that should be cached are not; or backends have only come."""
    fresh = facts.states.get("new", 0) + facts.states.get("trial", 0)
    if facts.found_share is not None:
        told = f"engines found {facts.found_share:.0%} of the {facts.expected_tokens:.0f} prompt tokens expected cached"
        enough = ramp(facts.expected_tokens / facts.seconds, 10, 100)
        yield Evidence(told, 0.85 * _cold_share(facts) * enough)
    if fresh:
        yield Evidence(f"{fresh} backends are new or on trial", 0.3 * ramp(fresh / facts.backends, 0.0, 0.5))
    if fresh or _cold_share(facts):  # by themselves late tokens say nothing of caches
        told = f"first tokens are late: their objective is kept by {_kept(facts, 'ttft')}"
        yield Evidence(told, 0.15 * _late(facts))


def queue(facts: Facts) -> Iterator[Evidence]:
    """There is more work than the backends take: it waits here, or is refused."""
    yield _missed(facts, "queue", "waiting", 0.7)
    told = f"{facts.overloaded:.1%} of the requests were refused for want of room or time"
    yield Evidence(told, 0.7 * ramp(facts.overloaded, 0.0, 0.05))
    part = facts.part("queue")
    yield Evidence(f"{part:.0%} of the time to the first token is waiting for a backend", 0.5 * ramp(part, 0.2, 0.7))
    yield Evidence(f"{facts.queued:.0f} requests wait now", 0.3 * ramp(facts.queued, 2, 20))
    yield _stalled(facts, 0.6)


def decode(facts: Facts) -> Iterator[Evidence]:
    """Normal first tokens, slow ones after it."""
    yield _missed(facts, "decode", "slow tokens", 0.7)
    told = f"gaps between tokens: p95 {_ms(facts.itl_s['p95'])}, objective kept by {_kept(facts, 'itl')}"
    yield Evidence(told, 0.5 * _slow(facts))
    if facts.kv_share is not None:
        yield Evidence(f"KV memory is {facts.kv_share:.0%} full", 0.2 * _slow(facts) * ramp(facts.kv_share, 0.8, 0.95))
    yield _against(f"first tokens miss theirs, too ({_kept(facts, 'ttft')})", 0.3 * _late(facts))
    yield _stalled(facts, 0.8)


def saturation(facts: Facts) -> Iterator[Evidence]:
    """First tokens and gaps both miss, while much runs: the engines have too much at once."""
    both = min(_late(facts), _slow(facts))
    yield Evidence(f"both objectives miss: first tokens {_kept(facts, 'ttft')}, gaps {_kept(facts, 'itl')}", 0.5 * both)
    if facts.kv_share is not None:
        yield Evidence(f"KV memory is {facts.kv_share:.0%} full", 0.4 * ramp(facts.kv_share, 0.85, 0.98))
    if facts.engine_waiting:
        told = f"{facts.engine_waiting:.1f} requests wait inside each engine, where nobody can reorder them"
        yield Evidence(told, 0.4 * ramp(facts.engine_waiting, 0.5, 5))
    yield _stalled(facts, 0.8)


def gateway(facts: Facts) -> Iterator[Evidence]:
    """The gateway's own processor: one loop, one core."""
    told = f"timers of the event loop come {_ms(facts.loop_lag_s)} late (p99)"
    yield Evidence(told, 0.85 * ramp(facts.loop_lag_s, 0.03, 0.2))
    if facts.cores is not None:
        yield Evidence(
            f"a gateway process uses {facts.cores:.2f} of the one core it can", 0.6 * ramp(facts.cores, 0.7, 1)
        )
    yield _missed(facts, "gateway", "time in the gateway itself", 0.6)
    part = facts.part("gateway")
    yield Evidence(f"{part:.0%} of the time to the first token passes in the gateway", 0.4 * ramp(part, 0.2, 0.6))


def network(facts: Facts) -> Iterator[Evidence]:
    """Connecting takes long."""
    yield _missed(facts, "connect", "connecting", 0.6)
    part, mean = facts.part("connect"), facts.parts.get("connect")
    told = f"connecting takes {_ms(mean)} on average, {part:.0%} of the time to the first token"
    yield Evidence(told, 0.5 * ramp(mean, 0.02, 0.2) * ramp(part, 0.1, 0.4))
    yield _stalled(facts, 0.8)


def failing(facts: Facts) -> Iterator[Evidence]:
    """Backends fail, or are out."""
    yield _missed(facts, "upstream", "a failing backend", 0.6)
    failed = sum(facts.failures.values())
    if failed and facts.attempts:
        worst = next(iter(facts.failures))
        told = f"{failed:.0f} of {facts.attempts:.0f} attempts failed, most with {worst}"
        yield Evidence(told, 0.5 * ramp(failed / facts.attempts, 0.01, 0.1))
    out = facts.states.get("down", 0) + facts.states.get("ejected", 0)
    if out:
        yield Evidence(f"{out} of {facts.backends} backends are out", 0.6 * ramp(out / facts.backends, 0.0, 0.5))
    nobody = facts.refused.get("no_backend", 0.0)
    if nobody and facts.requests:
        told = f"{nobody:.0f} requests found no backend"
        yield Evidence(told, 0.7 * ramp(nobody / facts.requests, 0.0, 0.05))


def crowding(facts: Facts) -> Iterator[Evidence]:
    """One tenant has most of the traffic while the tail misses and the median does not."""
    if len(facts.tenants) < 2:
        return
    name, most = next(iter(facts.tenants.items()))
    share = most / facts.requests if facts.requests else 0.0
    p50, p99, bound = facts.ttft_s["p50"], facts.ttft_s["p99"], facts.bound_s("ttft")
    if p50 is None or p99 is None or bound is None or p50 > bound:
        return
    told = f"{name} has {share:.0%} of the requests; first tokens: median {_ms(p50)}, p99 {_ms(p99)}"
    yield Evidence(told, 0.4 * ramp(share, 0.5, 0.9) * ramp(p99 / bound, 1.0, 3.0))


def idle(facts: Facts) -> Iterator[Evidence]:
    """Engines have little to do while requests are late: something before them holds the work back."""
    if facts.engine_running is None or not facts.backends:
        return
    late = max(_late(facts), ramp(facts.overloaded, 0.0, 0.05))
    told = f"{facts.engine_running:.1f} requests run in an engine on average, while others are late or refused"
    before = facts.part("queue") + facts.part("gateway") + facts.part("connect")
    yield Evidence(told, 0.45 * late * before * (1.0 - ramp(facts.engine_running, 0.5, 4)))


WITNESSES: dict[str, Callable[[Facts], Iterator[Evidence]]] = {
    "gateway": gateway,
    "cold": cold,
    "prefill": prefill,
    "queue": queue,
    "decode": decode,
    "saturation": saturation,
    "failing": failing,
    "network": network,
    "crowding": crowding,
    "idle": idle,
}


def _ms(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds * 1000:.0f} ms"


def _kept(facts: Facts, name: str) -> str:
    kept = facts.kept(name)
    return "unknown" if kept is None else f"{kept:.1%}"
