"""What a run comes to: one flat record of figures per seed, and means with confidence intervals over seeds."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf, sqrt
from statistics import fmean, stdev

from loadtests.profiles import S
from loadtests.scenario import Scenario
from loadtests.workload import BURST_S, Call

Figures = dict[str, float]

# Prompts of which "long" figures speak: the longest tenth of the conversations and of the synthetic trace.
LONG_TOKENS = 32_768
AGGRESSOR = "tenant-3"
# Output tokens weigh twice (VTC, Sheng et al., OSDI 2024).
OUTPUT_WEIGHT = 2
# Two-sided 95 % quantiles of Student's t for 1 .. 9 degrees of freedom.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def good(call: Call, scenario: Scenario, *, strict: bool = False) -> bool:
    """Whether the call met both objectives; `strict` counts only the tokens that are new in its session."""
    limit_s = call.strict_s if strict and call.strict_s is not None else call.limit_s
    ttft_s, tpot_s = call.ttft_s, call.tpot_s
    return ttft_s is not None and tpot_s is not None and ttft_s <= limit_s and tpot_s <= scenario.slo_tpot_s


def figures(calls: Sequence[Call], scenario: Scenario) -> Figures:
    """All figures of a run: the summary, and what the scenario asks about besides."""
    found = summary(calls, scenario)
    if scenario.tenants > 0:
        others = summary([call for call in calls if call.tenant != AGGRESSOR], scenario)
        found |= {f"others_{name}": others[name] for name in ("goodput", "ttft_p99")}
    if scenario.burst > 1.0:
        found["recovery_s"] = recovery_s(calls)
    if scenario.tenants < 0:
        found["service_gap"] = service_gap(calls)
    return found


def summary(calls: Sequence[Call], scenario: Scenario) -> Figures:
    """Goodput is a share of all calls given, served or not. Latencies are of the served, in seconds.

    All but `requests`, `preemptions`, `served_tokens` (out when the arrivals end) and `batch_served` (share of the
    batch class's tokens out by then) speak of the interactive class.
    """
    interactive = [call for call in calls if call.class_ == "interactive"] or list(calls)
    fine = [call for call in interactive if good(call, scenario)]
    served = [call for call in interactive if call.ttft_s is not None]
    ttfts = sorted(call.ttft_s or 0.0 for call in served)
    long = sorted(call.ttft_s or 0.0 for call in served if call.request.prompt_tokens > LONG_TOKENS)
    tpots = sorted(call.tpot_s for call in served if call.tpot_s is not None)
    waits = sorted((call.dispatched_ps - call.arrived_ps) / S for call in served if call.dispatched_ps is not None)
    end_ps = max((call.arrived_ps for call in calls), default=0)
    out = [call for call in calls if call.last_ps is not None and call.last_ps <= end_ps]
    batch = [call for call in calls if call.class_ == "batch"]
    of = max(1, len(interactive))
    return {
        "requests": float(len(calls)),
        "goodput": len(fine) / of,
        "goodput_tokens": _tokens(fine) / max(1, _tokens(interactive)),
        "goodput_strict": sum(good(call, scenario, strict=True) for call in interactive) / of,
        "ttft_met": sum((call.ttft_s or 0.0) <= call.limit_s for call in served) / of,
        "tpot_met": sum(tpot_s <= scenario.slo_tpot_s for tpot_s in tpots) / of,
        "ttft_p50": quantile(ttfts, 0.5),
        "ttft_p90": quantile(ttfts, 0.9),
        "ttft_p99": quantile(ttfts, 0.99),
        "ttft_p99_long": quantile(long, 0.99),
        "tpot_p50": quantile(tpots, 0.5),
        "tpot_p99": quantile(tpots, 0.99),
        "wait_p99": quantile(waits, 0.99),
        "hit_rate": sum(c.cached_tokens for c in served) / max(1, sum(c.request.prompt_tokens for c in served)),
        "rejected": sum(bool(call.refused) for call in interactive) / of,
        "wasted": _wasted(interactive, fine),
        "preemptions": float(sum(call.preemptions for call in calls)),
        "jain": jain(calls, scenario),
        "served_tokens": float(_tokens(out)),
        "batch_served": _tokens(call for call in out if call.class_ == "batch") / max(1, _tokens(batch)),
    }


def recovery_s(calls: Sequence[Call], *, window_s: float = 30.0) -> float:
    """Seconds from the end of a burst until TTFT is normal again: its median and 90th percentile over a window no
    more than half as much again as in the five minutes before the burst. The burst is where arrivals are densest."""
    calls = sorted(calls, key=lambda call: call.arrived_ps)
    arrivals = [call.arrived_ps / S for call in calls]
    begins_s = max(arrivals, key=lambda at_s: bisect_left(arrivals, at_s + BURST_S) - bisect_left(arrivals, at_s))

    def ttfts(start_s: float, end_s: float) -> list[float]:
        some = calls[bisect_left(arrivals, start_s) : bisect_left(arrivals, end_s)]
        return sorted(inf if call.ttft_s is None else call.ttft_s for call in some)

    normal = ttfts(begins_s - 300.0, begins_s)
    after_s = begins_s + BURST_S
    while after_s < arrivals[-1]:
        now = ttfts(after_s, after_s + window_s)
        if all(quantile(now, share) <= 1.5 * quantile(normal, share) for share in (0.5, 0.9)):
            break
        after_s += 5.0
    return after_s - begins_s - BURST_S


def service_gap(calls: Iterable[Call]) -> float:
    """The largest difference in service between two tenants over any time in which both always had something
    waiting (VTC's measure, Sheng et al., OSDI 2024): prompt tokens at dispatch, output tokens twice at the end."""
    events: list[tuple[int, int, str, float]] = []  # time, arrivals less departures, tenant, service
    for call in calls:
        gone_ps = call.dispatched_ps if call.dispatched_ps is not None else call.arrived_ps
        events.append((call.arrived_ps, 1, call.tenant, 0.0))
        events.append((gone_ps, -1, call.tenant, 0.0 if call.refused else float(call.request.prompt_tokens)))
        if call.last_ps is not None:
            events.append((call.last_ps, 0, call.tenant, float(OUTPUT_WEIGHT * call.request.output_tokens)))
    events.sort(key=lambda event: event[0])
    waiting: dict[str, int] = defaultdict(int)
    service: dict[str, float] = defaultdict(float)
    ranges: dict[tuple[str, str], tuple[float, float]] = {}  # of the difference, of pairs that both wait now
    worst = 0.0
    for _, change, tenant, tokens in events:
        waiting[tenant] += change
        service[tenant] += tokens
        for other in [name for name, number in waiting.items() if name != tenant]:
            pair = (min(tenant, other), max(tenant, other))
            if not (waiting[tenant] and waiting[other]):
                ranges.pop(pair, None)
                continue
            difference = service[pair[0]] - service[pair[1]]
            low, high = ranges.get(pair, (difference, difference))
            ranges[pair] = low, high = min(low, difference), max(high, difference)
            worst = max(worst, high - low)
    return worst


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def jain(calls: Iterable[Call], scenario: Scenario) -> float:
    """Jain's index over the tenants' shares, each limited by its demand.

    Service is what met its objectives, in weighted tokens; the yardstick is the max-min fair division of the same
    total, which gives nobody more than it asked for. 1 = everyone has exactly its fair part.
    """
    asked: dict[str, float] = defaultdict(float)
    got: dict[str, float] = defaultdict(float)
    for call in calls:
        work = call.request.prompt_tokens + OUTPUT_WEIGHT * call.request.output_tokens
        asked[call.tenant] += work
        got[call.tenant] += work * good(call, scenario)
    fair = max_min(asked, sum(got.values()))
    shares = [got[tenant] / part for tenant, part in fair.items() if part > 0]
    squares = len(shares) * sum(share**2 for share in shares)
    return sum(shares) ** 2 / squares if squares else 1.0


def max_min(demands: Mapping[str, float], total: float) -> dict[str, float]:
    """The max-min fair division of `total`: the smallest demands are met first, the rest share alike."""
    fair: dict[str, float] = {}
    left = total
    for i, (name, demand) in enumerate(sorted(demands.items(), key=lambda item: item[1])):
        fair[name] = min(demand, left / (len(demands) - i))
        left -= fair[name]
    return fair


def mean_ci(values: Sequence[float]) -> tuple[float, float]:
    """Mean and the half width of its 95 % confidence interval (Student's t); 0 for a single value."""
    if len(values) < 2:
        return values[0], 0.0
    t = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else 1.96
    return fmean(values), t * stdev(values) / sqrt(len(values))


def _tokens(calls: Iterable[Call]) -> int:
    return sum(call.request.prompt_tokens + call.request.output_tokens for call in calls)


def _wasted(calls: Sequence[Call], fine: Sequence[Call]) -> float:
    """Share of the computed prompt tokens that went to requests that missed their objectives."""
    total = sum(c.request.prompt_tokens - c.cached_tokens for c in calls if c.first_ps is not None)
    useful = sum(c.request.prompt_tokens - c.cached_tokens for c in fine)
    return 1.0 - useful / total if total else 0.0
