"""Who waits, how long, and whether shares are fair."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import NUMBER, PER_SECOND, SECONDS, SHARE, Row, board, series
from deploy.grafana.terms import POOL, QUEUE, ROOM, WHOSE, R, quantiles, rate, rates

WAIT = "headrace_queue_wait_seconds"


def waiting() -> Row:
    each = "{{pool}} {{class}}"
    requests, tokens = (f"sum by (pool, class) (headrace_queued_{what}{QUEUE})" for what in ("requests", "tokens"))
    drain = f"sum by (pool) (headrace_drain_tokens_per_second{POOL})", "{{pool}}"
    refused = rates("headrace_refusals_total", "class, reason", ROOM)
    return "Queues", [
        series("Waiting", "Requests.", NUMBER, (requests, each)),
        series("Tokens", "Of their prompts.", NUMBER, (tokens, each)),
        series("Wait by pool", "Of all that came.", SECONDS, *quantiles(WAIT, "pool", QUEUE, 0.5, 0.95, 0.99)),
        series("Wait by class", "Of all that came, p95.", SECONDS, *quantiles(WAIT, "class", QUEUE, 0.95)),
        series("Drain", "Prompt tokens that leave the queue per second.", NUMBER, drain),
        series("Refused for want of room", "Per second.", PER_SECOND, refused, stacked=True),
    ]


def fairness() -> Row:
    used = '{direction!="cached",model=~"$model"}'
    share = f"{rate('headrace_tokens_total', 'tenant', used)} / scalar(sum(rate(headrace_tokens_total{used}{R})))"
    good, bad = (rate(f"headrace_{name}_total", "tenant", WHOSE) for name in ("goodput", "slo_misses"))
    served = f"{good} / ({good} + ({bad} or 0 * {good}))"
    classes = rates("headrace_goodput_total", "class", WHOSE)
    return "Fairness", [
        series(
            "Share of the tokens",
            "In a full pool it follows weights.",
            SHARE,
            (share, "{{tenant}}"),
            stacked=True,
            most=1,
        ),
        series("Goodput by tenant", "Share of its own requests.", SHARE, (served, "{{tenant}}"), most=1),
        series("Good requests by class", "Per second.", PER_SECOND, classes, stacked=True),
    ]


def queues() -> Dashboard:
    """Requests wait in the gateway."""
    text = "Requests wait in the gateway. Who, how long, and what becomes of them."
    return board("queues", "Queues and fairness", text, waiting(), fairness())
