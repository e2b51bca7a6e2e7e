"""What backends carry, how they fail, what their caches are worth."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import NUMBER, PER_SECOND, SECONDS, SHARE, Row, board, listing, series
from deploy.grafana.terms import ANY_CLASS, POOL, R, quantiles, rates

EACH = "{{backend}}"


def load() -> Row:
    prefill = f"avg by (pool) (headrace_prefill_tokens_per_second{POOL})", "{{pool}}"
    gates = f"sum by (pool, gate) (headrace_gate{POOL})", "{{pool}} {{gate}}"
    kv = [
        (f"sum by (backend) (headrace_kv_tokens{POOL})", EACH),
        (f"max by (backend) (headrace_engine_kv_tokens{POOL})", f"{EACH} holds"),
    ]
    running, tokens = (f"sum by (backend) (headrace_in_flight_{what}{POOL})" for what in ("requests", "tokens"))
    return "Load", [
        series("In flight", "Requests.", NUMBER, (running, EACH)),
        series("Prefills", "Uncached tokens under way.", NUMBER, (tokens, EACH)),
        series("KV memory", "Tokens, by the gateway's own count, and what it holds.", NUMBER, *kv),
        series("Prefill rate", "Tokens per second of one backend, as learned.", NUMBER, prefill),
        series(
            "Gates",
            "Backends by the rule that admits or holds back, as each gateway sees them.",
            NUMBER,
            gates,
            stacked=True,
        ),
        listing("Gates now", "Which rule holds which backend.", f"headrace_gate{POOL}"),
    ]


def engines() -> Row:
    seen = f"max by (pool, backend, state) (headrace_backend_state{POOL})"
    states = f"count by (pool, state) ({seen})", "{{pool}} {{state}}"
    kv, age, cost = (
        (f"max by (backend) (headrace_{name}{POOL})", EACH)
        for name in ("engine_kv_ratio", "signal_age_seconds", "scrape_seconds")
    )
    waits = [
        (f"max by (backend) (headrace_engine_{what}_requests{POOL})", f"{EACH} {what}")
        for what in ("running", "waiting")
    ]
    return "Engines", [
        series(
            "States",
            "Backends by what any gateway sees; only `up`, `new` and `trial` serve.",
            NUMBER,
            states,
            stacked=True,
        ),
        series("KV memory, as engines say", "Share in use.", SHARE, kv, most=1),
        series("In the engines", "Requests that run and wait there, others' too.", NUMBER, *waits),
        series("Age of signals", "Since an engine's metrics were read.", SECONDS, age),
        series("Cost of signals", "Time of the loop that reading them once takes.", SECONDS, cost),
        listing("States now", "What each backend is.", seen),
    ]


def failures() -> Row:
    failed = rates("headrace_upstream_failures_total", "backend, reason", POOL)
    retried = rates("headrace_retries_total", "pool, reason", POOL)
    hedged = rates("headrace_hedges_total", "pool, outcome", POOL)
    budget = f"sum by (pool) (headrace_retry_budget{POOL})", "{{pool}}"
    out = f"sum by (backend, reason) (increase(headrace_ejections_total{POOL}[1h]))", "{{backend}} {{reason}}"
    broken = rates("headrace_parse_errors_total", "backend", POOL)
    elsewhere = rates("headrace_fallbacks_total", "pool, to", POOL)
    return "Failures", [
        series("Failed attempts", "Per second.", PER_SECOND, failed),
        series("Retries", "Per second, by what made them necessary.", PER_SECOND, retried),
        series(
            "Hedges", "Second attempts beside slow first ones, per second, by what became of them.", PER_SECOND, hedged
        ),
        series("Retry budget", "Retries that may be made now.", NUMBER, budget),
        series("Ejections", "Of the last hour, by reason.", NUMBER, out),
        series("Unreadable", "Events and answers that are no JSON, per second.", PER_SECOND, broken),
        series("Fallbacks", "Requests handed on to another pool, per second.", PER_SECOND, elsewhere),
    ]


def caches() -> Row:
    found, prompt, expected = (
        f"sum by (pool) (rate(headrace_prefix_{name}_tokens_total{POOL}{R}))"
        for name in ("confirmed", "prompt", "predicted")
    )
    cached, kept = (f"{found} / ({prompt} > 0)", "{{pool}}"), (f"{found} / ({expected} > 0)", "{{pool}}")
    went = rates("headrace_affinity_total", "result", POOL)
    index = f"sum by (pool) (headrace_prefix_index_pieces{POOL})", "{{pool}}"
    trusted = f"avg by (backend) (headrace_prefix_accuracy{POOL})", EACH
    return "Prefix caches", [
        series("Prompt tokens cached", "As engines report.", SHARE, cached, most=1),
        series("Found of what was expected", "Below one half for long: caches are colder than thought.", SHARE, kept),
        series("First dispatches", "To the warmest, after a wait, elsewhere, or cold.", PER_SECOND, went, stacked=True),
        series("Index", "Pieces of prompts remembered.", NUMBER, index),
        series("Trust in the index", "Share of what is expected that decisions count on.", SHARE, trusted),
    ]


def trials() -> Row:
    made = rates("headrace_version_attempts_total", "model, version, outcome", ANY_CLASS)
    first = quantiles("headrace_version_ttft_seconds", "version", ANY_CLASS, 0.5, 0.95)
    gaps = quantiles("headrace_version_inter_token_seconds", "version", ANY_CLASS, 0.5, 0.95)
    copies = rates("headrace_shadow_requests_total", "model, outcome", ANY_CLASS)
    pairs = quantiles("headrace_shadow_ttft_seconds", "version", ANY_CLASS, 0.5, 0.95)
    return "Canaries and shadows", [
        series("Attempts by version", "Per second; whether it differs: headrace canary status.", PER_SECOND, made),
        series("First token by version", "All waiting included.", SECONDS, *first),
        series("Between tokens by version", "Gaps of all streams.", SECONDS, *gaps),
        series("Copies", "Of answered requests, per second, by what became of them.", PER_SECOND, copies),
        series("First token of copies", "From dispatch, beside that of their originals.", SECONDS, *pairs),
    ]


def capacity() -> Row:
    wanted, held = (
        (f"max by (pool) (headrace_{name}{POOL})", f"{{{{pool}}}} {text}")
        for name, text in (("wakeup_wanted", "wanted"), ("held_requests", "held"))
    )
    busy = f"max by (backend) (rate(headrace_backend_busy_seconds_total{POOL}{R}))", EACH
    spent = (
        f"sum by (pool) (rate(headrace_backend_busy_seconds_total{POOL}{R})"
        f" * on (instance, pool, backend) headrace_backend_cost_per_hour{POOL})",
        "{{pool}}",
    )
    return "Capacity", [
        series(
            "Pools that are called",
            "1 while a pool without backends is asked for; who waits for it.",
            NUMBER,
            wanted,
            held,
        ),
        series("Busy", "Share of the time in which anything of the busiest gateway ran there.", SHARE, busy, most=1),
        series("Cost of the busy time", "Per hour, in the currency of `cost_per_hour`.", NUMBER, spent),
    ]


def pools() -> Dashboard:
    """Backend by backend."""
    text = "What each backend carries, how it fails, and what its prefix cache is worth."
    return board("pools", "Pools and backends", text, load(), engines(), failures(), caches(), trials(), capacity())
