"""What the counters say of the last seconds: rates, shares and quantiles between two looks at them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.metrics import Buckets, Histogram
from gateway.requestmetrics import RequestMetrics

WINDOW_S = 10.0  # long enough for quantiles of a few requests a second, short enough to see what happens
KEPT = 120  # looks that a sparkline shows
LOST_S = 5.0  # nobody looked for so long: rates over it would say nothing
FIGURES = ("requests_s", "refused_s", "goodput", "ttft_p50_ms", "ttft_p95_ms", "itl_p95_ms", "loop_lag_p99_ms")


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at one moment, `at` seconds on the gateway's clock. Distributions are counts by class."""

    at: float
    requests: float
    good: float
    missed: float
    refused: Counter[str]
    ttft: tuple[int, ...]
    gaps: tuple[int, ...]
    lag: tuple[int, ...]


class Pulse:
    """Looks and remembers; `look` costs a pass over the series of its `families`."""

    def __init__(self, metrics: RequestMetrics, lag: Histogram) -> None:
        self._metrics = metrics
        self._lag = lag
        counted = (metrics.requests, metrics.good, metrics.misses, metrics.refusals)
        self.families = (*counted, metrics.ttft, metrics.gaps, lag)
        self._samples: deque[Sample] = deque()
        self.history: dict[str, deque[float | None]] = {}
        self._forget()

    def _forget(self) -> None:
        self._samples.clear()
        self.history = {name: deque(maxlen=KEPT) for name in (*FIGURES, "queued", "running")}

    def look(self, now: float, **also: float) -> dict[str, float | None]:
        """The figures of the window that ends now; None where it has nothing to say. `also`: what goes to the
        history beside them."""
        if self._samples and now - self._samples[-1].at > LOST_S:
            self._forget()
        new = self._sample(now)
        self._samples.append(new)
        while len(self._samples) > 2 and now - self._samples[1].at >= WINDOW_S:
            self._samples.popleft()
        told = self._between(self._samples[0], new)
        for name, value in (told | also).items():
            self.history[name].append(value)
        return told

    def refused(self) -> dict[str, tuple[int, int]]:
        """By reason: since the start, and within the window; up to now."""
        now = self._refused()
        first = self._samples[0].refused if self._samples else now
        return {reason: (number, number - first[reason]) for reason, number in now.most_common()}

    def _refused(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (_, _, reason, _), number in self._metrics.refusals.values.items():
            found[reason] += int(number)
        return found

    def _sample(self, now: float) -> Sample:
        told = self._metrics
        return Sample(
            now,
            sum(told.requests.values.values()),
            sum(told.good.values.values()),
            sum(told.misses.values.values()),
            self._refused(),
            added(told.ttft.children.values()),
            added(told.gaps.children.values()),
            added(self._lag.children.values()),
        )

    def _between(self, first: Sample, last: Sample) -> dict[str, float | None]:
        seconds = last.at - first.at
        good, missed = last.good - first.good, last.missed - first.missed
        ttft, gaps, lag = self._metrics.ttft.bounds, self._metrics.gaps.bounds, self._lag.bounds
        new_ttft, new_gaps = less(last.ttft, first.ttft), less(last.gaps, first.gaps)
        refused = last.refused.total() - first.refused.total()
        return {
            "requests_s": round((last.requests - first.requests) / seconds, 2) if seconds else None,
            "refused_s": round(refused / seconds, 2) if seconds else None,
            "goodput": round(good / (good + missed), 4) if good + missed else None,
            "ttft_p50_ms": _ms(quantile(ttft, new_ttft, 0.5)),
            "ttft_p95_ms": _ms(quantile(ttft, new_ttft, 0.95)),
            "itl_p95_ms": _ms(quantile(gaps, new_gaps, 0.95)),
            "loop_lag_p99_ms": _ms(quantile(lag, less(last.lag, first.lag), 0.99)),
        }


def added(children: Iterable[Buckets]) -> tuple[int, ...]:
    """The counts of several series of one family, class by class; empty where there are none."""
    return tuple(map(sum, zip(*(child.counts for child in children), strict=True)))


def less(last: Sequence[int], first: Sequence[int]) -> list[int]:
    """What came between two looks."""
    return [new - old for new, old in zip(last, first or [0] * len(last), strict=True)]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of the observations lie, taken as evenly spread within a class, as by Prometheus'
    `histogram_quantile`; None without observations. Above the last bound it is that bound."""
    rank, below = share * sum(counts), 0
    if not rank:
        return None
    for low, high, count in zip((0.0, *bounds), bounds, counts, strict=False):
        if below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below += count
    return bounds[-1]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
