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
    return "Process", [
        series("Processor", "Cores used; one is all.", NUMBER, (f"rate(process_cpu_seconds_total{OURS}{R})", EACH)),
        series("Memory", "Resident.", BYTES, (f"process_resident_memory_bytes{OURS}", EACH)),
        series("Descriptors", "Open.", NUMBER, (f"process_open_fds{OURS}", EACH)),
        series("Loop lag", "How late timers come: so late is every stream.", SECONDS, *lag),
        series("Open", "Requests and streams.", NUMBER, *opened),
        series("Buffered", "Request bodies.", BYTES, ("headrace_buffered_bytes", EACH)),
    ]


def around() -> Row:
    links = "sum by (instance, state) (headrace_upstream_connections)", "{{instance}} {{state}}"
    scrapes = quantiles("headrace_exposition_seconds", "instance", "", 0.99)
    traces = rates("headrace_traces_total", "result", "")
    lost = f"rate(headrace_log_lines_dropped_total{R})", EACH
    return "Around it", [
        series("Connections", "To backends.", NUMBER, links),
        series("Scrapes", "Time of the loop.", SECONDS, *scrapes),
        series("Traces", "Per second, by what became of them.", PER_SECOND, traces),
        series("Log lines lost", "Per second.", NUMBER, lost),
        listing("Builds", "What runs where.", "headrace_build_info"),
    ]


def internals() -> Dashboard:
    """One process is one core."""
    text = "One process is one core: whether it keeps up, and whether what it tells arrives."
    return board("internals", "Gateway internals", text, process(), around())
