"""SLO, goodput, refusals, saturation."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import NUMBER, PER_SECOND, SECONDS, SHARE, Row, board, number, series
from deploy.grafana.terms import MODEL, OWNED, POOL, QUEUE, ROOM, WHOSE, R, quantiles, rates, total

GOOD, BAD = total("headrace_goodput_total", WHOSE), total("headrace_slo_misses_total", WHOSE)
ASKED = f"sum(rate(headrace_requests_total{WHOSE}{R}))"
LAG = f"max(histogram_quantile(0.99, sum by (instance, le) (rate(headrace_loop_lag_seconds_bucket{R}))))"


def now() -> Row:
    good, refused = f"{GOOD} / ({GOOD} + {BAD})", f"{total('headrace_refusals_total', ROOM)} / {ASKED}"
    return "Now", [
        number("Requests", "Per second, whatever became of them.", PER_SECOND, ASKED),
        number("Goodput", "Good requests, of all that are owed an answer.", SHARE, good, good=0.95),
        number("Refused for want of room", "Of all requests.", SHARE, refused, bad=0.01),
        number("Waiting", "Requests in all queues.", NUMBER, f"sum(headrace_queued_requests{QUEUE})"),
        number("In flight", "Requests on backends.", NUMBER, f"sum(headrace_in_flight_requests{POOL})"),
        number("Loop lag, p99", "How late the worst gateway's event loop comes.", SECONDS, LAG, bad=0.05),
    ]


def objectives() -> Row:
    missed = 'model:headrace_objective_missed:ratio_rate1h{model=~"$model"}', "{{model}} {{objective}}"
    good, causes = (
        rates("headrace_goodput_total", "model", WHOSE),
        rates("headrace_slo_misses_total", "cause", WHOSE),
    )
    outcomes = rates("headrace_requests_total", "outcome", WHOSE)
    first = quantiles("headrace_ttft_seconds", "model", MODEL, 0.5, 0.95, 0.99)
    gaps = quantiles("headrace_inter_token_seconds", "model", MODEL, 0.5, 0.95, 0.99)
    return "Objectives", [
        series("Objectives missed, 1 h", "Share of the requests, batch left out; alerts go by it.", SHARE, missed),
        series("Goodput", "Good requests per second.", PER_SECOND, good, stacked=True),
        series("Why requests are not good", "Misses per second, by cause.", PER_SECOND, causes, stacked=True),
        series("First token", "All waiting included.", SECONDS, *first),
        series("Between tokens", "Gaps of all streams.", SECONDS, *gaps),
        series("Outcomes", "Requests per second.", PER_SECOND, outcomes, stacked=True),
    ]


def saturation() -> Row:
    reasons = rates("headrace_refusals_total", "reason", MODEL)
    waiting, drain = f"headrace_queued_tokens{POOL}", f"headrace_drain_tokens_per_second{POOL}"
    ahead = f"sum by (pool) ({waiting}) / (sum by (pool) ({drain}) > 0)", "{{pool}}"
    tokens = rates("headrace_tokens_total", "direction", OWNED)
    return "Saturation", [
        series("Refusals", "Per second, by reason.", PER_SECOND, reasons, stacked=True),
        series("Queue, as time", "Seconds that the waiting prompts take at the present drain.", SECONDS, ahead),
        series("Tokens", "Per second, by direction.", NUMBER, tokens),
    ]


def overview() -> Dashboard:
    """The first to look at."""
    text = "Whether users get what they should, and how near the fleet is to its limits."
    return board("overview", "Overview", text, now(), objectives(), saturation())
