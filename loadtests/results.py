"""What a run comes to: one flat record of figures per seed, and means with confidence intervals over seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev

from loadtests.profiles import S
from loadtests.scenario import Scenario
from loadtests.workload import Call

Figures = dict[str, float]

# Prompts of which "long" figures speak: the longest tenth of the conversations and of the synthetic trace.
LONG_TOKENS = 32_768
# Output tokens weigh twice (VTC, Sheng et al., OSDI 2024).
OUTPUT_WEIGHT = 2
# Two-sided 95 % quantiles of Student's t for 1 .. 9 degrees of freedom.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def good(call: Call, scenario: Scenario, *, strict: bool = False) -> bool:
    """Whether the call met both objectives; `strict` counts only the tokens that are new in its session."""
    limit_s = call.strict_s if strict and call.strict_s is not None else call.limit_s
    ttft_s, tpot_s = call.ttft_s, call.tpot_s
    return ttft_s is not None and tpot_s is not None and ttft_s <= limit_s and tpot_s <= scenario.slo_tpot_s


def summary(calls: Sequence[Call], scenario: Scenario) -> Figures:
    """Goodput is a share of all calls given, served or not. Latencies are of the served, in seconds."""
    if not calls:
        raise ValueError("no calls")
    interactive = [call for call in calls if call.class_ == "interactive"] or list(calls)
    fine = [call for call in interactive if good(call, scenario)]
    served = [call for call in interactive if call.ttft_s is not None]
    ttfts = sorted(call.ttft_s or 0.0 for call in served)
    long = sorted(call.ttft_s or 0.0 for call in served if call.request.prompt_tokens > LONG_TOKENS)
    tpots = sorted(call.tpot_s for call in served if call.tpot_s is not None)
    waits = sorted((call.dispatched_ps - call.arrived_ps) / S for call in served if call.dispatched_ps is not None)
    figures = {
        "requests": float(len(calls)),
        "goodput": len(fine) / len(interactive),
        "goodput_tokens": _tokens(fine) / _tokens(interactive),
        "goodput_strict": sum(good(call, scenario, strict=True) for call in interactive) / len(interactive),
        "ttft_met": sum((call.ttft_s or 0.0) <= call.limit_s for call in served) / len(interactive),
        "tpot_met": sum(t <= scenario.slo_tpot_s for t in tpots) / len(interactive),
        "ttft_p50": quantile(ttfts, 0.5),
        "ttft_p90": quantile(ttfts, 0.9),
        "ttft_p99": quantile(ttfts, 0.99),
        "ttft_p99_long": quantile(long, 0.99),
        "tpot_p50": quantile(tpots, 0.5),
        "tpot_p99": quantile(tpots, 0.99),
        "wait_p99": quantile(waits, 0.99),
        "hit_rate": sum(c.cached_tokens for c in served) / max(1, sum(c.request.prompt_tokens for c in served)),
        "rejected": sum(bool(call.refused) for call in interactive) / len(interactive),
        "wasted": _wasted(interactive, fine),
        "preemptions": float(sum(call.preemptions for call in calls)),
        "jain": jain(calls, scenario),
    }
    figures |= _batch(calls)
    return figures


def by_tenant(calls: Iterable[Call], scenario: Scenario) -> dict[str, Figures]:
    """The same for each tenant alone."""
    groups: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.tenant].append(call)
    return {tenant: summary(group, scenario) for tenant, group in sorted(groups.items())}


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


def ttft_by_minute(calls: Iterable[Call], *, bin_s: float = 10.0) -> dict[int, float]:
    """Median TTFT of the calls that arrived in each bin of `bin_s` seconds; refused ones count as infinite."""
    bins: dict[int, list[float]] = defaultdict(list)
    for call in calls:
        bins[int(call.arrived_ps / S / bin_s)].append(float("inf") if call.ttft_s is None else call.ttft_s)
    return {i: quantile(sorted(ttfts), 0.5) for i, ttfts in sorted(bins.items())}


def mean_ci(values: Sequence[float]) -> tuple[float, float]:
    """Mean and the half width of its 95 % confidence interval (Student's t); 0 for a single value."""
    if len(values) < 2:
        return values[0], 0.0
    t = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else 1.96
    return fmean(values), t * stdev(values) / sqrt(len(values))


def pooled(runs: Sequence[Mapping[str, float]], combine: Callable[[Sequence[float]], float] = fmean) -> Figures:
    """One figure per name over all runs."""
    return {name: combine([run[name] for run in runs]) for name in runs[0]}


def _tokens(calls: Iterable[Call]) -> int:
    return sum(call.request.prompt_tokens + call.request.output_tokens for call in calls)


def _wasted(calls: Sequence[Call], fine: Sequence[Call]) -> float:
    """Share of the computed prompt tokens that went to requests that missed their objectives."""
    total = sum(c.request.prompt_tokens - c.cached_tokens for c in calls if c.first_ps is not None)
    useful = sum(c.request.prompt_tokens - c.cached_tokens for c in fine)
    return 1.0 - useful / total if total else 0.0


def _batch(calls: Sequence[Call]) -> Figures:
    """Of the batch class: the share of its tokens that were out when the arrivals ended."""
    batch = [call for call in calls if call.class_ == "batch"]
    if not batch:
        return {}
    end_ps = max(call.arrived_ps for call in calls)
    return {"batch_served": _tokens(c for c in batch if c.last_ps is not None and c.last_ps <= end_ps) / _tokens(batch)}
