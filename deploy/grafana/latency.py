"""TTFT split, ITL heat map, slow requests by exemplar."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import BYTES, PER_SECOND, SECONDS, Row, board, heat, series
from deploy.grafana.terms import ANY_CLASS, MODEL, R, quantiles, rates

USUAL = (0.5, 0.95, 0.99)


def first_token() -> Row:
    parts = f"sum by (part) (rate(headrace_ttft_part_seconds_sum{MODEL}{R}))"
    mean = f"{parts} / scalar(sum(rate(headrace_ttft_seconds_count{MODEL}{R})))", "{{part}}"
    slowest = quantiles("headrace_ttft_part_seconds", "part", MODEL, 0.95)
    firsts = f"sum by (le) (rate(headrace_ttft_seconds_bucket{MODEL}{R}))"
    gaps = f"sum by (le) (rate(headrace_inter_token_seconds_bucket{MODEL}{R}))"
    return "First token", [
        series("What it consists of", "The means of its parts, which add up.", SECONDS, mean, stacked=True),
        series(
            "First token", "All waiting included.", SECONDS, *quantiles("headrace_ttft_seconds", "model", MODEL, *USUAL)
        ),
        series("Parts, p95", "Of each part by itself; they do not add up.", SECONDS, *slowest),
        heat("First tokens", "Requests per second by the time to their first token.", firsts),
        heat("Gaps", "Tokens per second by the gap before them.", gaps),
    ]


def whole() -> Row:
    gaps, paces, all_of = (
        quantiles(f"headrace_{name}_seconds", "model", MODEL, *USUAL) for name in ("inter_token", "tpot", "request")
    )
    oneshot = quantiles("headrace_oneshot_seconds", "endpoint", ANY_CLASS, *USUAL)
    asked, told = (
        quantiles(f"headrace_oneshot_{name}_bytes", "endpoint", ANY_CLASS, 0.95) for name in ("request", "response")
    )
    left = rates("headrace_cancelled_total", "phase", MODEL)
    return "Streams and whole requests", [
        series("Between tokens", "Gaps of all streams.", SECONDS, *gaps),
        series("Time per token", "The mean of each stream.", SECONDS, *paces),
        series("Duration", "From accept to the last byte.", SECONDS, *all_of),
        series("Work without tokens", "Embeddings, rerank, audio, images: the duration.", SECONDS, *oneshot),
        series("Its size", "Bodies of requests and answers, p95.", BYTES, *asked, *told),
        series("Clients that left", "Per second, by how far they were.", PER_SECOND, left, stacked=True),
    ]


def latency() -> Dashboard:
    """Where time goes."""
    text = "Where time goes. Dots on the lines are exemplars: requests that can be opened as traces."
    return board("latency", "Latency", text, first_token(), whole())
