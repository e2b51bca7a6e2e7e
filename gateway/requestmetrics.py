"""What is counted of requests: read from the Exchange of each, once, at its end."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.exchange import Exchange, Metered
from gateway.metrics import Counter, Family, Histogram
from gateway.reading import GAP_BOUNDS_S

UNKNOWN = "unknown"  # the label of what was refused before it was known


class RequestMetrics:
    """Families about requests."""

    def __init__(self) -> None:
        self.requests = Counter(
            "headrace_requests_total", "Requests by what became of them.", "model", "tenant", "class", "outcome"
        )
        self.tokens = Counter(
            "headrace_tokens_total", "Tokens as the engines reported them.", "model", "tenant", "direction"
        )
        self.failures = Counter(
            "headrace_upstream_failures_total", "Attempts that failed.", "pool", "backend", "reason"
        )
        self.retries = Counter("headrace_retries_total", "Attempts made again elsewhere.", "pool", "reason")
        self.parse_errors = Counter(
            "headrace_parse_errors_total", "Events and answers that are no JSON.", "pool", "backend"
        )
        labels = ("model", "class")
        self.request = Histogram("headrace_request_seconds", "From accept to the last byte.", *labels)
        self.ttft = Histogram("headrace_ttft_seconds", "From accept to the first token of a stream.", *labels)
        self.gaps = Histogram(
            "headrace_inter_token_seconds", "Gaps between the tokens of streams.", *labels, bounds=GAP_BOUNDS_S
        )
        self.queue_wait = Histogram("headrace_queue_wait_seconds", "From the body to a backend.", "pool", "class")

    def metrics(self) -> Iterator[Family]:
        """All of them."""
        yield from (self.requests, self.tokens, self.failures, self.retries, self.parse_errors)
        yield from (self.request, self.queue_wait, self.ttft, self.gaps)

    def count(self, x: Exchange) -> None:
        """A request has ended."""
        model = x.call.label if x.call is not None else UNKNOWN
        tenant = x.tenant.name if x.tenant is not None else UNKNOWN
        self.requests.values[(model, tenant, x.class_, x.outcome)] += 1
        key = (model, x.class_)
        self.request.child(key).observe(x.ended_at - x.received_at)
        if x.queued_at and x.call is not None:
            self.queue_wait.child((x.call.pool, x.class_)).observe(x.queue_wait_s)
        if x.meter is not None:
            self._count_answer(x, x.meter, model, tenant)
        if len(x.attempts) > 1 or x.outcome != "ok":
            self._count_attempts(x)

    def _count_answer(self, x: Exchange, meter: Metered, model: str, tenant: str) -> None:
        if x.ttft_s is not None:
            key = (model, x.class_)
            self.ttft.child(key).observe(x.ttft_s)
            self.gaps.child(key).add(meter.gap_counts, meter.gap_sum)
        if meter.parse_errors:
            backend = x.attempts[-1].backend
            self.parse_errors.values[(backend.pool, backend.name)] += meter.parse_errors
        usage = meter.usage
        if usage is None:
            self.tokens.values[(model, tenant, "output")] += meter.tokens
            return
        self.tokens.values[(model, tenant, "input")] += usage.prompt
        self.tokens.values[(model, tenant, "output")] += usage.output
        self.tokens.values[(model, tenant, "cached")] += usage.cached or 0

    def _count_attempts(self, x: Exchange) -> None:
        for attempt in x.attempts:
            if attempt.failure:
                self.failures.values[(attempt.backend.pool, attempt.backend.name, attempt.failure)] += 1
        for failed in x.attempts[:-1]:
            self.retries.values[(failed.backend.pool, failed.failure)] += 1
