"""The recording and alert rules, written to `headrace.rules.yml` beside this file.

    python -m deploy.prometheus.build
    python -m deploy.prometheus.build --faster 30 --to /tmp/headrace.rules.yml

With --faster every window, wait and interval is so many times as short, and nothing else is different: the same rules
for a test, or for the rehearsal of an alarm, which cannot wait for minutes. Names keep the windows that they stand for;
thresholds stay, those in seconds and in requests, too.

Alerts on objectives are multi-window and multi-burn-rate (The Site Reliability Workbook, chapter 5): a page where the
budget of 30 days would be gone in two or five days, a ticket where it would in ten or thirty. Batch work is left out.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "headrace.rules.yml"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
# objective: share of the requests that should meet it, and how its alert is called
OBJECTIVES = {
    "ttft": (0.99, "HeadraceFirstTokenLate"),
    "itl": (0.99, "HeadraceTokensSlow"),
    "availability": (0.999, "HeadraceUnavailable"),
    "goodput": (0.95, "HeadraceGoodputLow"),
}
BURNS = {  # severity: (factor, long window, short window)
    "page": ((14.4, "1h", "5m"), (6.0, "6h", "30m")),
    "ticket": ((3.0, "1d", "2h"), (1.0, "3d", "6h")),
}
ENOUGH = {"page": ("1h", 50), "ticket": ("1d", 200)}  # requests below which a share says nothing
MISSED = "model:headrace_objective_missed:ratio_rate"

# cause of misses: the name of its alert, the share of requests from which it is worth a look, what that says
CAUSES = {
    "queue": ("HeadraceQueueSlow", 0.05, "wait too long for a backend"),
    "connect": ("HeadraceConnectSlow", 0.02, "wait too long for a connection to their backend"),
    "prefill": ("HeadracePrefillSlow", 0.05, "wait too long for a backend's first token"),
    "decode": ("HeadraceDecodeSlow", 0.05, "get their tokens too slowly from the backend"),
    "gateway": ("HeadraceGatewaySlow", 0.02, "lose their time in the gateway itself"),
    "upstream": ("HeadraceUpstreamFailing", 0.02, "fail at their backend"),
}


def rule(record: str, expr: str, **labels: str) -> dict[str, Any]:
    """A recording rule."""
    return {"record": record, "expr": expr} | ({"labels": labels} if labels else {})


def alert(name: str, expr: str, severity: str, wait: str, summary: str) -> dict[str, Any]:
    """An alert, with the page that says what to do."""
    return {
        "alert": name,
        "expr": expr,
        "for": wait,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "runbook": f"docs/runbooks/{name}.md"},
    }


def recordings() -> list[dict[str, Any]]:
    """Shares of missed objectives over every window, and the quantities that the dashboards show most."""
    rules = []
    for window in WINDOWS:
        told = f'headrace_objectives_total{{class!="batch"}}[{window}]'
        missed = f'headrace_objectives_total{{class!="batch",result="missed"}}[{window}]'
        by = "sum by (model, objective)"
        rules.append(rule(f"{MISSED}{window}", f"{by} (rate({missed})) / {by} (rate({told}))"))
        good, bad = (
            f'sum by (model) (rate(headrace_{name}_total{{class!="batch"}}[{window}]))'
            for name in ("goodput", "slo_misses")
        )
        rules.append(rule(f"{MISSED}{window}", f"{bad} / ({bad} + ({good} or 0 * {bad}))", objective="goodput"))
    for quantile in (0.5, 0.95, 0.99):
        for name in ("ttft", "inter_token", "request", "queue_wait"):
            labels = "pool, class" if name == "queue_wait" else "model, class"
            buckets = f"sum by ({labels}, le) (rate(headrace_{name}_seconds_bucket[5m]))"
            record = f"{labels.split(',')[0]}_class:headrace_{name}_seconds:p{round(quantile * 100)}_5m"
            rules.append(rule(record, f"histogram_quantile({quantile}, {buckets})"))
    return rules


def burning(objective: str, target: float, severity: str) -> str:
    """Whether a budget burns in both windows of any pair, and enough requests say so."""
    pairs = [
        f'({MISSED}{long}{{objective="{objective}"}} > {factor} * {1 - target:.3g}'
        f' and {MISSED}{short}{{objective="{objective}"}} > {factor} * {1 - target:.3g})'
        for factor, long, short in BURNS[severity]
    ]
    window, number = ENOUGH[severity]
    asked = f'increase(headrace_objectives_total{{objective="availability",class!="batch"}}[{window}])'
    return f"({' or '.join(pairs)}) and on (model) sum by (model) ({asked}) > {number}"


def objectives() -> list[dict[str, Any]]:
    """Two alerts for each objective."""
    return [
        alert(
            name,
            burning(objective, target, severity),
            severity,
            "2m" if severity == "page" else "15m",
            f"{{{{ $labels.model }}}} burns its budget for {objective} ({target:.1%} of the requests).",
        )
        for objective, (target, name) in OBJECTIVES.items()
        for severity in BURNS
    ]


def causes() -> list[dict[str, Any]]:
    """Why requests are not good, one alert for each cause, so that a page is read together with its reason."""
    judged = "sum by (model) (rate(headrace_goodput_total[5m]))", "sum by (model) (rate(headrace_slo_misses_total[5m]))"
    found = []
    for cause, (name, share, what) in CAUSES.items():
        missed = f'sum by (model) (rate(headrace_slo_misses_total{{cause="{cause}"}}[5m]))'
        expr = f"{missed} / (({judged[0]} or 0 * {judged[1]}) + {judged[1]}) > {share}"
        found.append(alert(name, expr, "ticket", "5m", f"Requests for {{{{ $labels.model }}}} {what}."))
    return found


REFUSED = 'headrace_refusals_total{reason=~"queue_full|queue_timeout|deadline_unreachable"}[5m]'
LAG = "histogram_quantile(0.99, sum by (instance, le) (rate(headrace_loop_lag_seconds_bucket[5m])))"
USABLE = 'headrace_backend_state{state=~"up|new|trial"}'
NONE_USABLE = f"count by (pool) (headrace_backend_state) unless count by (pool) ({USABLE})"
FOUND = "sum by (pool) (rate(headrace_prefix_confirmed_tokens_total[15m]))"
EXPECTED = "sum by (pool) (rate(headrace_prefix_predicted_tokens_total[15m]))"

# What is wrong whether or not requests have noticed: name, expression, severity, how long, what to say.
STATES = (
    (
        "HeadraceQueueSaturated",
        f"sum by (model, class) (rate({REFUSED})) / sum by (model, class) (rate(headrace_requests_total[5m])) > 0.01",
        *("page", "2m"),
        "More than 1% of the {{ $labels.class }} requests for {{ $labels.model }} find no room.",
    ),
    (
        "HeadraceNoBackend",
        f'sum by (model) (rate(headrace_refusals_total{{reason="no_backend"}}[2m])) > 0 or ({NONE_USABLE})',
        *("page", "1m", "No backend serves {{ $labels.model }}{{ $labels.pool }}."),
    ),
    (
        "HeadraceBackendOut",
        'max by (pool, backend, state) (headrace_backend_state{state=~"down|ejected"}) == 1',
        *("ticket", "2m", "{{ $labels.backend }} of {{ $labels.pool }} is {{ $labels.state }}."),
    ),
    (
        "HeadraceCacheCold",
        f"{FOUND} / ({EXPECTED} > 100) < 0.5",
        *("ticket", "10m", "Engines of {{ $labels.pool }} find less than half of the prefixes expected there."),
    ),
    (
        "HeadraceSignalsStale",
        "max by (pool, backend) (headrace_signal_age_seconds) > 60",
        *("ticket", "5m", "The metrics of {{ $labels.backend }} cannot be read."),
    ),
    (
        "HeadraceRetriesSpent",
        "min by (pool) (headrace_retry_budget) < 1",
        *("ticket", "5m", "Backends of {{ $labels.pool }} fail more often than its retry budget allows."),
    ),
    (
        "HeadraceLimiterDegraded",
        'max by (instance, mode) (headrace_limiter_mode{mode=~"local_share|deny|allow"}) == 1',
        *("ticket", "1m", "{{ $labels.instance }} decides limits without the store ({{ $labels.mode }})."),
    ),
    (
        "HeadraceLoopLag",
        f"{LAG} > 0.05",
        *("page", "5m", "The event loop of {{ $labels.instance }} is late by more than 50 ms: so is every stream."),
    ),
    (
        "HeadraceReloadFailed",
        "min by (instance) (headrace_config_last_reload_successful) == 0",
        *("ticket", "1m", "{{ $labels.instance }} keeps an old configuration: the new one is bad."),
    ),
    (
        "HeadraceTracesLost",
        'sum by (instance) (rate(headrace_traces_total{result!="exported"}[10m])) > 0',
        *("ticket", "15m", "{{ $labels.instance }} loses traces."),
    ),
    (
        "HeadraceDown",
        'up{job="headrace"} == 0',
        *("page", "1m", "{{ $labels.instance }} does not answer its scrapes."),
    ),
)


def groups() -> dict[str, Any]:
    """The whole file."""
    return {
        "groups": [
            {"name": "headrace-recordings", "interval": "30s", "rules": recordings()},
            {"name": "headrace-objectives", "rules": objectives()},
            {"name": "headrace-causes", "rules": causes()},
            {"name": "headrace-states", "rules": [alert(*told) for told in STATES]},
        ]
    }


UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
WINDOW = re.compile(r"(?<=\[)(\d+)([smhd])(?=\])")
DURATION = re.compile(r"(\d+)([smhd])")


def faster(told: dict[str, Any], times: float) -> dict[str, Any]:
    """The same groups with durations that are so many times as short, to a millisecond."""

    def shorter(found: re.Match[str]) -> str:
        return f"{round(int(found[1]) * UNIT_MS[found[2]] / times)}ms"

    def hurried(each: dict[str, Any]) -> dict[str, Any]:
        waits = {key: DURATION.sub(shorter, each[key]) for key in ("for", "interval") if key in each}
        return each | waits | ({"expr": WINDOW.sub(shorter, each["expr"])} if "expr" in each else {})

    return {"groups": [hurried(group | {"rules": list(map(hurried, group["rules"]))}) for group in told["groups"]]}


def text(times: float = 1.0) -> str:
    """As it stands in the file; or so many times as fast."""
    told = groups() if times == 1.0 else faster(groups(), times)
    how = "" if times == 1.0 else f" --faster {times:g}"
    return f"# Made by python -m deploy.prometheus.build{how}\n" + yaml.safe_dump(told, sort_keys=False, width=1000)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faster", type=float, default=1.0, metavar="TIMES")
    parser.add_argument("--to", type=Path, default=FILE, metavar="FILE")
    asked = parser.parse_args()
    if asked.faster != 1.0 and asked.to == FILE:
        parser.error("rules that are faster go elsewhere: --to FILE")
    asked.to.write_text(text(asked.faster))
