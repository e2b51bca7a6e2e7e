"""What is told of a finished request: metrics and one log line, both read from its Exchange, once, at the end.

Counts are kept here as plain numbers and given to prometheus_client as families when somebody scrapes: observing a
histogram object costs two microseconds, adding to a list a tenth of one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway.dispatch import Dispatcher
from gateway.exchange import Exchange, Metered
from gateway.quota import Quota
from gateway.reading import GAP_BOUNDS_S
from policies.types import Usage

UNKNOWN = "unknown"  # the label of what was refused before it was known
MODES = ("memory", "shared", "local_share", "deny", "allow")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_write = msgspec.json.Encoder().encode


class Histogram:
    """Observations of one label set, in classes up to fixed bounds and one for what is above them."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, counts: Iterable[int], total: float) -> None:
        """Many observations, already counted in classes of the same bounds."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.sum += total

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus has them."""
        bounds = [*map(str, map(float, self.bounds)), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class Series:
    """The histograms of one model, tenant and class."""

    __slots__ = ("gaps", "queue_wait", "request", "ttft")

    def __init__(self) -> None:
        self.request = Histogram(SECONDS)
        self.queue_wait = Histogram(SECONDS)
        self.ttft = Histogram(SECONDS)
        self.gaps = Histogram(GAP_BOUNDS_S)


class RequestLine(msgspec.Struct, gc=False):
    """The log line of one request. Times in milliseconds, `time` in seconds since the epoch."""

    time: float
    level: str
    request_id: str
    path: str
    tenant: str
    model: str
    class_: str = msgspec.field(name="class")
    stream: bool
    status: int
    outcome: str
    backend: str
    attempts: int
    queue_ms: float
    ttft_ms: float | None
    itl_ms: float | None
    total_ms: float
    tokens_in: int | None
    tokens_cached: int | None
    tokens_out: int | None
    bytes_in: int
    bytes_out: int
    upstream_request_id: str
    event: str = "request"


class Telemetry:
    """A prometheus_client collector, and the writer of the request log."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        quota: Quota,
        write_log: Callable[[bytes], object],
        wall_clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._quota = quota
        self._write_log = write_log
        self._wall_clock = wall_clock
        self._series: dict[tuple[str, str, str], Series] = {}
        self._requests: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
        self._tokens: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._failures: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._retries: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._parse_errors: defaultdict[tuple[str, str], int] = defaultdict(int)

    def record(self, x: Exchange) -> None:
        """The one place where a request is counted and logged."""
        model = x.call.label if x.call is not None else UNKNOWN
        tenant = x.tenant.name if x.tenant is not None else UNKNOWN
        usage = x.meter.usage if x.meter is not None else None
        self._requests[(model, tenant, x.class_, x.outcome)] += 1
        key = (model, tenant, x.class_)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series()
        series.request.observe(x.ended_at - x.received_at)
        if x.queued_at:
            series.queue_wait.observe(x.queue_wait_s)
        if x.meter is not None:
            self._count_answer(x, x.meter, usage, series, model, tenant)
        if len(x.attempts) > 1 or x.outcome != "ok":
            self._count_attempts(x)
        self._write_log(self._line(x, usage))

    def _count_answer(
        self, x: Exchange, meter: Metered, usage: Usage | None, series: Series, model: str, tenant: str
    ) -> None:
        if x.ttft_s is not None:
            series.ttft.observe(x.ttft_s)
            series.gaps.add(meter.gap_counts, meter.gap_sum)
        if meter.parse_errors:
            backend = x.attempts[-1].backend
            self._parse_errors[(backend.pool, backend.name)] += meter.parse_errors
        if usage is None:
            self._tokens[(model, tenant, "output")] += meter.tokens
            return
        self._tokens[(model, tenant, "input")] += usage.prompt
        self._tokens[(model, tenant, "output")] += usage.output
        self._tokens[(model, tenant, "cached")] += usage.cached or 0

    def _count_attempts(self, x: Exchange) -> None:
        for attempt in x.attempts:
            if attempt.failure:
                self._failures[(attempt.backend.pool, attempt.backend.name, attempt.failure)] += 1
        for failed in x.attempts[:-1]:
            self._retries[(failed.backend.pool, failed.failure)] += 1

    def _line(self, x: Exchange, usage: Usage | None) -> bytes:
        call, meter, ttft_s = x.call, x.meter, x.ttft_s
        line = RequestLine(
            round(self._wall_clock(), 3),
            "info" if x.outcome == "ok" else "warning",
            x.request_id,
            x.endpoint.path,
            x.tenant.name if x.tenant is not None else "",
            call.label if call is not None else "",
            x.class_,
            call.stream if call is not None else False,
            x.status,
            x.outcome,
            x.attempts[-1].backend.name if x.attempts else "",
            len(x.attempts),
            round(x.queue_wait_s * 1000, 3),
            None if ttft_s is None else round(ttft_s * 1000, 3),
            None if ttft_s is None or meter is None else _mean_gap_ms(meter),
            round((x.ended_at - x.received_at) * 1000, 3),
            usage.prompt if usage is not None else None,
            usage.cached if usage is not None else None,
            usage.output if usage is not None else meter.tokens if meter is not None else None,
            call.length if call is not None else 0,
            x.bytes_out or (meter.bytes_in if meter is not None else 0),
            x.upstream_request_id,
        )
        return _write(line) + b"\n"

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at each scrape."""
        yield _counter("requests", "Requests by what became of them.", "model tenant class outcome", self._requests)
        yield _counter("tokens", "Tokens as the engines reported them.", "model tenant direction", self._tokens)
        yield _counter("upstream_failures", "Attempts that failed.", "pool backend reason", self._failures)
        yield _counter("retries", "Attempts made again elsewhere.", "pool reason", self._retries)
        yield _counter("parse_errors", "Events and answers that are no JSON.", "pool backend", self._parse_errors)
        calls = {(outcome,): count for outcome, count in self._quota.store.calls.items()}
        yield _counter("limiter_calls", "Calls to the store of the limits, by what came of them.", "outcome", calls)
        yield self._histogram("request_seconds", "From accept to the last byte.", lambda series: series.request)
        yield self._histogram("queue_wait_seconds", "From the body to a backend.", lambda series: series.queue_wait)
        yield self._histogram("ttft_seconds", "From accept to the first token of a stream.", lambda series: series.ttft)
        yield self._histogram("inter_token_seconds", "Gaps between the tokens of streams.", lambda series: series.gaps)
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily("headrace_in_flight_requests", "Requests on it.", labels=["pool", "backend"])
        queued = GaugeMetricFamily("headrace_queued_requests", "Requests that wait.", labels=["pool", "class"])
        for name, pool in self._dispatcher.pools.items():
            now = pool.statistics()
            for backend, state in now.backends.items():
                in_flight.add_metric([name, backend], state.running)
            for class_, waiting in now.queued.items():
                queued.add_metric([name, class_], waiting)
        yield in_flight
        yield queued
        mode = GaugeMetricFamily("headrace_limiter_mode", "How limits are counted: 1 for the mode.", labels=["mode"])
        for name in MODES:
            mode.add_metric([name], name == self._quota.store.mode)
        yield mode

    def _histogram(self, name: str, text: str, pick: Callable[[Series], Histogram]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"headrace_{name}", text, labels=["model", "tenant", "class"])
        for labels, series in self._series.items():
            histogram = pick(series)
            family.add_metric(labels, histogram.buckets(), histogram.sum)
        return family


def _counter(name: str, text: str, labels: str, counts: Mapping[Any, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"headrace_{name}", text, labels=labels.split())
    for key, count in counts.items():
        family.add_metric(key, count)
    return family


def _mean_gap_ms(meter: Metered) -> float | None:
    """Between two tokens of a stream, on average; None where there were no two."""
    gaps = sum(meter.gap_counts)
    return round(meter.gap_sum / gaps * 1000, 3) if gaps else None
