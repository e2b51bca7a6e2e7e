"""The gateway's own process, and what lies around it."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import BYTES, NUMBER, PER_SECOND, SECONDS, Row, board, listing, series
from deploy.grafana.terms import R, quantiles, rates

EACH = "{{instance}}"
OURS = '{job="headrace"}'


def process() -> Row:
    lag = quantiles("headrace_loop_lag_seconds", "instance", "", 0.5, 0.99)
    opened = [(f"headrace_open_{what}", f"{EACH} {what}") for what in ("requests", "streams")]
    parts = [
        ("headrace_tasks", f"{EACH} tasks"),
        ("headrace_workers", f"{EACH} workers"),
        (f"increase(headrace_worker_restarts_total{R})", f"{EACH} restarts"),
    ]
    bodies = [(f"headrace_buffered_{what}", f"{EACH} {what}") for what in ("bytes", "limit_bytes")]
    cores = f"rate(process_cpu_seconds_total{OURS}{R})"
    return "Process", [
        series("Processor", "Cores used; each worker has one.", NUMBER, (cores, EACH)),
        series("Memory", "Resident.", BYTES, (f"process_resident_memory_bytes{OURS}", EACH)),
        series("Descriptors", "Open.", NUMBER, (f"process_open_fds{OURS}", EACH)),
        series("Tasks and workers", "Of the event loops; of `serve --workers`, with their restarts.", NUMBER, *parts),
        series("Loop lag", "How late timers come: so late is every stream.", SECONDS, *lag),
        series("Open", "Requests and streams.", NUMBER, *opened),
        series("Buffered", "Request bodies, and most that they may be.", BYTES, *bodies),
    ]


def limiter() -> Row:
    took = quantiles("headrace_limiter_decision_seconds", "where", "", 0.5, 0.99)
    decided = rates("headrace_limiter_decision_seconds_count", "where", "")
    mode = "sum by (mode) (headrace_limiter_mode)", "{{mode}}"
    calls = rates("headrace_limiter_calls_total", "outcome", "")
    return "Limiter", [
        series("Decisions", "How long they take: here, or with a round trip to the store.", SECONDS, *took),
        series("Decided", "Per second, and where.", PER_SECOND, decided, stacked=True),
        series("Mode", "Gateways by how they count limits.", NUMBER, mode, stacked=True),
        series("Calls to the store", "Per second.", PER_SECOND, calls),
    ]


def configuration() -> Row:
    taken, good = "headrace_config_generation", "headrace_config_last_reload_successful"
    read = "sum by (result) (increase(headrace_config_reloads_total[1h]))", "{{result}}"
    held = "count by (hash) (headrace_config_info)"
    return "Configuration", [
        series("Taken", "Configurations since the start.", NUMBER, (taken, EACH)),
        series("Readings", "Of the file in the last hour, by what came of them.", NUMBER, read),
        series(
            "Good",
            "Whether the file was good when it was read last; changes that wait for a restart.",
            NUMBER,
            (good, f"{EACH} good"),
            ("headrace_config_restart_pending", f"{EACH} pending"),
        ),
        listing("Held", "Gateways by the configuration that they hold: one row is right.", held),
    ]


def around() -> Row:
    links = "sum by (instance, state) (headrace_upstream_connections)", "{{instance}} {{state}}"
    scrapes = quantiles("headrace_exposition_seconds", "instance", "", 0.99)
    traces = rates("headrace_traces_total", "result", "")
    waiting = "headrace_traces_waiting", EACH
    lost = f"rate(headrace_log_lines_dropped_total{R})", EACH
    return "Around it", [
        series("Connections", "To backends.", NUMBER, links),
        series("Scrapes", "Time of the loop.", SECONDS, *scrapes),
        series("Traces", "Per second, by what became of them.", PER_SECOND, traces),
        series("Traces waiting", "On their way to the collector.", NUMBER, waiting),
        series("Log lines lost", "Per second.", NUMBER, lost),
        listing("Builds", "What runs where.", "headrace_build_info"),
    ]


def internals() -> Dashboard:
    """One process is one core."""
    text = "One process is one core: whether it keeps up, and whether what it tells arrives."
    return board("internals", "Gateway internals", text, process(), limiter(), around(), configuration())
