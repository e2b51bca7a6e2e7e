"""What backends carry, how they fail, what their caches are worth."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import NUMBER, PER_SECOND, SHARE, Row, board, listing, series
from deploy.grafana.terms import POOL, R, rates

EACH = "{{backend}}"


def load() -> Row:
    prefill = f"headrace_prefill_tokens_per_second{POOL}", "{{pool}}"
    gates = f"sum by (pool, gate) (headrace_gate{POOL})", "{{pool}} {{gate}}"
    return "Load", [
        series("In flight", "Requests.", NUMBER, (f"headrace_in_flight_requests{POOL}", EACH)),
        series("Prefills", "Uncached tokens under way.", NUMBER, (f"headrace_in_flight_tokens{POOL}", EACH)),
        series("KV memory", "Tokens, by the gateway's own count.", NUMBER, (f"headrace_kv_tokens{POOL}", EACH)),
        series("Prefill rate", "Tokens per second of one backend, as learned.", NUMBER, prefill),
        series("Gates", "Backends by the rule that admits or holds back.", NUMBER, gates, stacked=True),
        listing("Gates now", "Which rule holds which backend.", f"headrace_gate{POOL}"),
    ]


def failures() -> Row:
    failed = rates("headrace_upstream_failures_total", "backend, reason", POOL)
    retried = rates("headrace_retries_total", "pool, reason", POOL)
    budget = f"headrace_retry_budget{POOL}", "{{pool}}"
    return "Failures", [
        series("Failed attempts", "Per second.", PER_SECOND, failed),
        series("Retries", "Per second, by what made them necessary.", PER_SECOND, retried),
        series("Retry budget", "Retries that may be made now.", NUMBER, budget),
    ]


def caches() -> Row:
    found, prompt, expected = (
        f"sum by (pool) (rate(headrace_prefix_{name}_tokens_total{POOL}{R}))"
        for name in ("confirmed", "prompt", "predicted")
    )
    cached, kept = (f"{found} / ({prompt} > 0)", "{{pool}}"), (f"{found} / ({expected} > 0)", "{{pool}}")
    went = rates("headrace_affinity_total", "result", POOL)
    index = f"headrace_prefix_index_pieces{POOL}", "{{pool}}"
    return "Prefix caches", [
        series("Prompt tokens cached", "As engines report.", SHARE, cached, most=1),
        series("Found of what was expected", "Below one half for long: caches are colder than thought.", SHARE, kept),
        series("First dispatches", "To the warmest, after a wait, elsewhere, or cold.", PER_SECOND, went, stacked=True),
        series("Index", "Pieces of prompts remembered.", NUMBER, index),
    ]


def pools() -> Dashboard:
    """Backend by backend."""
    text = "What each backend carries, how it fails, and what its prefix cache is worth."
    return board("pools", "Pools and backends", text, load(), failures(), caches())
