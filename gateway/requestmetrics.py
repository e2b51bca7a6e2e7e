"""What is counted of requests: read from the Exchange of each, once, at its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import product

from gateway.errors import Fault
from gateway.exchange import Attempt, Exchange, Metered
from gateway.metrics import Counter, Family, Gauge, Histogram
from gateway.oneshotmetrics import OneShotMetrics
from gateway.reading import GAP_BOUNDS_S
from gateway.timeline import Objective, Parts, Verdict, phase, tpot_s
from policies.types import Usage, Wait

UNKNOWN = "unknown"  # the label of what was refused before it was known
RESULTS = ("missed", "met")
PARTS = ("gateway", "queue", "connect", "backend")


class RequestMetrics:
    """Families about requests. Distributions are kept by model and class, sums by tenant too."""

    def __init__(self) -> None:
        which, whose = ("model", "class"), ("model", "tenant", "class")
        self.requests = Counter("headrace_requests_total", "Requests by what became of them.", *whose, "outcome")
        self.tokens = Counter(
            "headrace_tokens_total",
            "Tokens of answered requests as the engines report them; counted here where they do not.",
            *("model", "tenant", "direction"),
        )
        self.refusals = Counter(
            "headrace_refusals_total",
            "Requests refused before a backend was asked, by whose doing it was: caller or capacity.",
            *("model", "class", "reason", "fault"),
        )
        self.cancelled = Counter(
            "headrace_cancelled_total", "Clients that left, by how far their requests were.", *which, "phase"
        )
        self.good = Counter(
            "headrace_goodput_total", "Requests that were answered and met all objectives of their model.", *whose
        )
        self.misses = Counter(
            "headrace_slo_misses_total",
            "Requests that were not good, by what took longest or went wrong. Callers' faults are in neither.",
            *(*whose, "cause"),
        )
        self.objectives = Counter(
            "headrace_objectives_total",
            "Requests by objective (ttft, itl, availability) and whether it was met.",
            *(*which, "objective", "result"),
        )
        self.bounds = Gauge(
            "headrace_objective_seconds",
            "What an objective asks for, as configured.",
            *("model", "objective"),
            total="max",
        )
        self.request = Histogram(
            "headrace_request_seconds", "From accept to the last byte, where tokens are made.", *which
        )
        self.ttft = Histogram(
            "headrace_ttft_seconds", "From accept to the first token of a stream, with all waiting.", *which
        )
        self.ttft_parts = Histogram(
            "headrace_ttft_part_seconds",
            "What the time to the first token consists of: gateway, queue, connect, backend.",
            *(*which, "part"),
        )
        self.gaps = Histogram(
            "headrace_inter_token_seconds",
            "Gaps between tokens of streams: n that come together after g seconds are n gaps of g/n.",
            *which,
            bounds=GAP_BOUNDS_S,
        )
        self.tpot = Histogram(
            "headrace_tpot_seconds",
            "Time per output token of one stream, after the first; only of those that ended well.",
            *which,
            bounds=GAP_BOUNDS_S,
        )
        self.oneshot = OneShotMetrics()
        self._series: dict[tuple[str, str], Series] = {}

    def metrics(self) -> Iterator[Family]:
        """All of them."""
        yield from (self.requests, self.tokens, self.refusals, self.cancelled)
        yield from (self.good, self.misses, self.objectives, self.bounds)
        yield from (self.request, self.ttft, self.ttft_parts, self.gaps, self.tpot)
        yield from self.oneshot.metrics()

    def begin(self, objectives: Mapping[str, Objective], classes: Iterable[str]) -> None:
        """Objectives are told from the start, with nothing met or missed: a rate needs a first value."""
        self.bounds.values.clear()
        for model, objective in objectives.items():
            bounds = {"ttft": objective.ttft_s, "itl": objective.itl_s}
            self.bounds.values.update({(model, name): bound for name, bound in bounds.items() if bound is not None})
            told = {"availability": True, "ttft": objective.ttft_s is not None, "itl": objective.itl_s is not None}
            for key in product((model,), classes, (name for name, there in told.items() if there), RESULTS):
                self.objectives.values[key] += 0

    def count(
        self,
        x: Exchange,
        usage: Usage | None,
        tenant: str,
        spent: Parts,
        verdict: Verdict | None,
        trace: tuple[str, float],
    ) -> None:
        """A request has ended. `trace` is the id of the trace that is kept of it, or nothing, and the wall clock."""
        model = x.call.label if x.call is not None else UNKNOWN
        key = (model, x.class_)
        self.requests.values[(model, tenant, x.class_, x.outcome)] += 1
        if x.fault in (Fault.CALLER, Fault.CAPACITY) and not x.attempts:
            self.refusals.values[(model, x.class_, x.outcome, x.fault)] += 1
        elif x.fault is Fault.LEFT:
            self.cancelled.values[(*key, phase(x))] += 1
        if verdict is not None:
            self._judge(verdict, key, tenant)
        if not x.endpoint.generates:
            self.oneshot.count(x, model)
            return
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series(self, key)
        series.request.observe(x.ended_at - x.received_at)
        meter = x.meter
        if meter is not None:
            self._count_tokens(meter, usage, model, tenant)
            if meter.first_token_at is not None:
                series.count(x, meter, spent)
        if trace[0]:
            series.show(x, trace)

    def _judge(self, verdict: Verdict, key: tuple[str, str], tenant: str) -> None:
        model, class_ = key
        if verdict.cause is None:
            self.good.values[(model, tenant, class_)] += 1
        else:
            self.misses.values[(model, tenant, class_, verdict.cause)] += 1
        objectives = self.objectives.values
        objectives[(*key, "availability", RESULTS[verdict.available])] += 1
        if verdict.ttft is not None:
            objectives[(*key, "ttft", RESULTS[verdict.ttft])] += 1
        if verdict.itl is not None:
            objectives[(*key, "itl", RESULTS[verdict.itl])] += 1

    def _count_tokens(self, meter: Metered, usage: Usage | None, model: str, tenant: str) -> None:
        tokens = self.tokens.values
        if usage is None:
            tokens[(model, tenant, "output")] += meter.tokens
            return
        tokens[(model, tenant, "input")] += usage.prompt
        tokens[(model, tenant, "output")] += usage.output
        if usage.cached:
            tokens[(model, tenant, "cached")] += usage.cached


class Series:
    """The distributions of one model and class."""

    __slots__ = ("gaps", "parts", "request", "tpot", "ttft")

    def __init__(self, families: RequestMetrics, key: tuple[str, str]) -> None:
        self.request = families.request.child(key)
        self.ttft = families.ttft.child(key)
        self.parts = [families.ttft_parts.child((*key, part)) for part in PARTS]
        self.gaps = families.gaps.child(key)
        self.tpot = families.tpot.child(key)

    def count(self, x: Exchange, meter: Metered, spent: Parts) -> None:
        """A stream has ended that had begun."""
        self.ttft.observe(sum(spent))
        for part, seconds in zip(self.parts, spent, strict=True):
            part.observe(seconds)
        self.gaps.add(meter.gap_counts, meter.gap_sum)
        if not x.fault and (pace := tpot_s(meter)) is not None:
            self.tpot.observe(pace)

    def show(self, x: Exchange, trace: tuple[str, float]) -> None:
        """It can be looked up as a trace."""
        self.request.show(x.ended_at - x.received_at, *trace)
        if x.ttft_s is not None:
            self.ttft.show(x.ttft_s, *trace)


class PoolMetrics:
    """Families about pools and backends, as far as requests tell of them."""

    def __init__(self) -> None:
        backend = ("pool", "backend")
        self.queue_wait = Histogram(
            "headrace_queue_wait_seconds", "Time spent waiting for a backend, all tries together.", "pool", "class"
        )
        self.failures = Counter("headrace_upstream_failures_total", "Attempts that failed.", *backend, "reason")
        self.retries = Counter("headrace_retries_total", "Attempts made again elsewhere.", "pool", "reason")
        self.hedges = Counter(
            "headrace_hedges_total",
            "Second attempts beside slow first ones: won, lost, failed, or cancelled with their request.",
            *("pool", "outcome"),
        )
        self.parse_errors = Counter("headrace_parse_errors_total", "Events and answers that are no JSON.", *backend)
        self.predicted = Counter(
            "headrace_prefix_predicted_tokens_total",
            "Prompt tokens expected in a backend's prefix cache, where the engine then said what was there.",
            "pool",
        )
        self.confirmed = Counter(
            "headrace_prefix_confirmed_tokens_total", "Prompt tokens that engines found in their prefix cache.", "pool"
        )
        self.prompt = Counter(
            "headrace_prefix_prompt_tokens_total", "Prompt tokens of the same answers, cached or not.", "pool"
        )
        self.affinity = Counter(
            "headrace_affinity_total",
            "First dispatches: hit (the warmest backend), wait (for it), spill (to a colder one), cold (none is warm).",
            *("pool", "result"),
        )

    def metrics(self, alive: Collection[tuple[str, str]]) -> Iterator[Family]:
        """All of them; backends that are not `alive`, each by its pool and name, are forgotten."""
        for family in (self.failures, self.parse_errors):
            family.retain(_among(alive))
        yield from (self.queue_wait, self.failures, self.retries, self.hedges, self.parse_errors)
        yield from (self.predicted, self.confirmed, self.prompt, self.affinity)

    def count(self, x: Exchange, usage: Usage | None, queue_s: float) -> None:
        """A request has ended that had been read and had waited so long."""
        if x.call is None or not x.queued_at:
            return
        pool = x.call.pool
        self.queue_wait.child((pool, x.class_)).observe(queue_s)
        if not x.attempts:
            return
        last = x.attempts[-1]
        self.affinity.values[(pool, _affinity(x))] += 1
        if len(x.attempts) > 1 or x.fault:
            self._count_failures(x)
        meter = x.meter
        if meter is None:
            return
        if meter.parse_errors:
            self.parse_errors.values[(pool, last.backend.name)] += meter.parse_errors
        if usage is not None and usage.cached is not None and not x.fault:
            self.predicted.values[(pool,)] += last.decision.cached_tokens
            self.confirmed.values[(pool,)] += usage.cached
            self.prompt.values[(pool,)] += usage.prompt

    def _count_failures(self, x: Exchange) -> None:
        for attempt in x.attempts:
            if attempt.failed:
                self.failures.values[(attempt.backend.pool, attempt.backend.name, attempt.failure)] += 1
            if attempt.hedge:
                self.hedges.values[(attempt.backend.pool, _hedged(x, attempt))] += 1
        for failed in [attempt for attempt in x.in_order if not attempt.hedge][:-1]:
            self.retries.values[(failed.backend.pool, failed.failure)] += 1


def _hedged(x: Exchange, hedge: Attempt) -> str:
    """What became of the second of two attempts at once."""
    if hedge.lost or any(attempt.lost for attempt in x.attempts):
        return "lost" if hedge.lost else "won"
    if hedge.failed:
        return "failed"
    return "won" if hedge is x.attempts[-1] and x.fault is not Fault.LEFT else "cancelled"


def _affinity(x: Exchange) -> str:
    decision = x.in_order[0].decision
    if decision.waited_for is Wait.WARM:
        return "wait"
    if decision.missed_tokens > 0:
        return "spill"
    return "hit" if decision.cached_tokens else "cold"


def _among(alive: Collection[tuple[str, str]]) -> Callable[[tuple[str, ...]], bool]:
    return lambda key: key[:2] in alive
