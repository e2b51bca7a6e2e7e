"""The rules of Prometheus: current, documented, and each alert fires for what it is meant for, and alone.

The alerts are evaluated by promtool; without it only the structure is tested.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.prometheus.build import FILE, text
from tests.gateway.test_metrics_page import families
from tests.observability.tools import ROOT, tool

RULES = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RUNBOOKS = ROOT / "docs" / "runbooks"

Series = dict[str, str]


def always(value: float) -> str:
    """A gauge that stays."""
    return f"{value}x300"


def rate(per_minute: float) -> str:
    """A counter that grows evenly, over five hours."""
    return f"0+{per_minute}x300"


KEY = 'model="m",class="interactive"'
WHERE = 'instance="gw:9090",job="headrace"'


def lag(seconds_ok: float, slower: float) -> Series:
    """Of 600 beats a minute so many are within 1 ms, and the others within a second."""
    name = "headrace_loop_lag_seconds_bucket"
    bounds = {"0.001": seconds_ok, "0.05": seconds_ok, "1.0": seconds_ok + slower, "+Inf": seconds_ok + slower}
    return {f'{name}{{{WHERE},le="{bound}"}}': rate(number) for bound, number in bounds.items()}


def objective(name: str, missed: float) -> Series:
    """600 requests a minute, of which so many miss it."""
    told = f'headrace_objectives_total{{{KEY},objective="{name}"'
    return {f'{told},result="met"}}': rate(600 - missed), f'{told},result="missed"}}': rate(missed)}


def misses(cause: str, number: float) -> Series:
    """600 requests a minute, of which so many are not good."""
    return {
        f'headrace_goodput_total{{{KEY},tenant="t"}}': rate(600 - number),
        f'headrace_slo_misses_total{{{KEY},tenant="t",cause="{cause}"}}': rate(number),
    }


def refused(reason: str, number: float) -> Series:
    """So many refusals a minute."""
    return {f'headrace_refusals_total{{{KEY},reason="{reason}",fault="capacity"}}': rate(number)}


HEALTHY: Series = {
    f'headrace_requests_total{{{KEY},tenant="t",outcome="ok"}}': rate(600),
    f"up{{{WHERE}}}": always(1),
    f'headrace_limiter_mode{{{WHERE},mode="shared"}}': always(1),
    f'headrace_limiter_mode{{{WHERE},mode="local_share"}}': always(0),
    f"headrace_config_last_reload_successful{{{WHERE}}}": always(1),
    f'headrace_traces_total{{{WHERE},result="exported"}}': rate(30),
    'headrace_backend_state{pool="p",backend="http://a",state="up"}': always(1),
    'headrace_backend_state{pool="p",backend="http://b",state="up"}': always(1),
    'headrace_signal_age_seconds{pool="p",backend="http://a"}': always(2),
    'headrace_retry_budget{pool="p"}': always(10),
    'headrace_prefix_predicted_tokens_total{pool="p"}': rate(60_000),
    'headrace_prefix_confirmed_tokens_total{pool="p"}': rate(54_000),
    **objective("availability", 0),
    **objective("ttft", 1),
    **objective("itl", 1),
    **misses("prefill", 2),
    **lag(600, 0),
}
M, PAGE, TICKET = {"model": "m"}, {"severity": "page"}, {"severity": "ticket"}
GW = {"instance": "gw:9090"}
A = {"pool": "p", "backend": "http://a"}


def burn(name: str, *severities: dict[str, str], **labels: str) -> dict[str, list[dict[str, str]]]:
    return {name: [M | labels | severity for severity in severities]}


# what happens: the series that are different, and the alerts that fire, with their labels
CASES: dict[str, tuple[Series, dict[str, list[dict[str, str]]]]] = {
    "all is well": ({}, {}),
    "slow prefill": (
        objective("ttft", 150) | misses("prefill", 150),
        {"HeadracePrefillSlow": [M | TICKET]}
        | burn("HeadraceFirstTokenLate", PAGE, TICKET, objective="ttft")
        | burn("HeadraceGoodputLow", TICKET, objective="goodput"),
    ),
    "slow decode": (
        objective("itl", 150) | misses("decode", 150),
        {"HeadraceDecodeSlow": [M | TICKET]}
        | burn("HeadraceTokensSlow", PAGE, TICKET, objective="itl")
        | burn("HeadraceGoodputLow", TICKET, objective="goodput"),
    ),
    "long queue": (
        objective("ttft", 40) | misses("queue", 40),
        {"HeadraceQueueSlow": [M | TICKET]}
        | burn("HeadraceFirstTokenLate", PAGE, TICKET, objective="ttft")
        | burn("HeadraceGoodputLow", TICKET, objective="goodput"),
    ),
    "no room": (
        objective("availability", 20) | misses("refused", 20) | refused("queue_full", 20),
        {"HeadraceQueueSaturated": [M | {"class": "interactive"} | PAGE]}
        | burn("HeadraceUnavailable", PAGE, TICKET, objective="availability"),
    ),
    "slow connections": (misses("connect", 15), {"HeadraceConnectSlow": [M | TICKET]}),
    "a gateway that takes its time": (misses("gateway", 15), {"HeadraceGatewaySlow": [M | TICKET]}),
    "backends that fail": (
        misses("upstream", 15) | objective("availability", 15),
        {"HeadraceUpstreamFailing": [M | TICKET]} | burn("HeadraceUnavailable", PAGE, TICKET, objective="availability"),
    ),
    "goodput lost": (
        misses("refused", 500),
        burn("HeadraceGoodputLow", PAGE, TICKET, objective="goodput"),
    ),
    "batch misses its objectives": (
        {
            'headrace_objectives_total{model="m",class="batch",objective="ttft",result="missed"}': rate(600),
            'headrace_objectives_total{model="m",class="batch",objective="ttft",result="met"}': rate(1),
        },
        {},
    ),
    "a stall of the processor": (lag(500, 100), {"HeadraceLoopLag": [GW | PAGE]}),
    "no backend": (refused("no_backend", 1), {"HeadraceNoBackend": [M | PAGE]}),
    "no backend, no traffic": (
        {
            'headrace_backend_state{pool="q",backend="http://c",state="down"}': always(1),
        },
        {
            "HeadraceNoBackend": [{"pool": "q"} | PAGE],
            "HeadraceBackendOut": [{"pool": "q", "backend": "http://c", "state": "down"} | TICKET],
        },
    ),
    "an ejected backend": (
        {'headrace_backend_state{pool="p",backend="http://a",state="ejected"}': always(1)},
        {"HeadraceBackendOut": [A | {"state": "ejected"} | TICKET]},
    ),
    "a cold backend": (
        {'headrace_prefix_confirmed_tokens_total{pool="p"}': rate(6_000)},
        {"HeadraceCacheCold": [{"pool": "p"} | TICKET]},
    ),
    "a cache that nobody uses": (
        {
            'headrace_prefix_predicted_tokens_total{pool="p"}': rate(60),
            'headrace_prefix_confirmed_tokens_total{pool="p"}': rate(0),
        },
        {},
    ),
    "signals that do not come": (
        {'headrace_signal_age_seconds{pool="p",backend="http://a"}': always(90)},
        {"HeadraceSignalsStale": [A | TICKET]},
    ),
    "retries all spent": (
        {'headrace_retry_budget{pool="p"}': always(0.2)},
        {"HeadraceRetriesSpent": [{"pool": "p"} | TICKET]},
    ),
    "the store of the limits is away": (
        {
            f'headrace_limiter_mode{{{WHERE},mode="shared"}}': always(0),
            f'headrace_limiter_mode{{{WHERE},mode="local_share"}}': always(1),
        },
        {"HeadraceLimiterDegraded": [GW | {"mode": "local_share"} | TICKET]},
    ),
    "a bad file": (
        {f"headrace_config_last_reload_successful{{{WHERE}}}": always(0)},
        {"HeadraceReloadFailed": [GW | TICKET]},
    ),
    "no collector": (
        {f'headrace_traces_total{{{WHERE},result="failed"}}': rate(30)},
        {"HeadraceTracesLost": [GW | TICKET]},
    ),
    "a gateway that is down": (
        {f"up{{{WHERE}}}": always(0)},
        {"HeadraceDown": [GW | {"job": "headrace"} | PAGE]},
    ),
}


def expected(name: str, labels: dict[str, str]) -> dict[str, Any]:
    """What promtool has to find of an alert that fires with these labels."""
    severity = labels["severity"]
    rule = next(rule for rule in ALERTS if rule["alert"] == name and rule["labels"]["severity"] == severity)
    told = rule["annotations"]
    summary = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels.get(found[1], ""), told["summary"])
    return {"exp_labels": labels, "exp_annotations": told | {"summary": summary}}


@pytest.mark.parametrize("case", list(CASES))
def test_each_fault_fires_the_alerts_meant_for_it_and_no_other(case: str, tmp_path: Path) -> None:
    """promtool over four hours of a fault, with every alert asked for."""
    promtool = tool("promtool")
    series, fires = CASES[case]
    asked = [
        {"eval_time": "4h", "alertname": name, "exp_alerts": [expected(name, labels) for labels in fires.get(name, ())]}
        for name in {rule["alert"] for rule in ALERTS}
    ]
    given = [{"series": name, "values": values} for name, values in (HEALTHY | series).items()]
    test = {
        "rule_files": [str(FILE)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, "alert_rule_test": asked}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_every_alert_has_a_case() -> None:
    """Each severity of each alert is seen to fire."""
    fired = {
        (name, labels["severity"]) for _, fires in CASES.values() for name, all_of in fires.items() for labels in all_of
    }
    assert fired == {(rule["alert"], rule["labels"]["severity"]) for rule in ALERTS}


def test_rules_are_current() -> None:
    """If this fails: python -m deploy.prometheus.build"""
    assert FILE.read_text() == text()


TIMED = re.compile(r"(?<=\[)(\d+)(ms|[smhd])(?=\])|(?<=for: )(\d+)(ms|[smhd])$|(?<=interval: )(\d+)(ms|[smhd])$", re.M)
MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def durations(rules: str) -> list[int]:
    """In milliseconds."""
    found = (list(filter(None, each)) for each in TIMED.findall(rules))
    return [int(number) * MS[unit] for number, unit in found]


def test_faster_rules_differ_in_durations_alone() -> None:
    """Every window, wait and interval is a thirtieth; names, thresholds, labels and texts are the same."""
    as_is, fast = (each.partition("\n")[2] for each in (text(), text(30)))
    assert TIMED.sub("", as_is) == TIMED.sub("", fast)
    assert [each / 30 for each in durations(as_is)] == durations(fast)
    assert len(durations(as_is)) > 100


@pytest.mark.parametrize("times", [1.0, 30.0])
def test_rules_are_valid(times: float, tmp_path: Path) -> None:
    """promtool finds no fault in them, as they are or faster."""
    path = tmp_path / FILE.name
    path.write_text(text(times))
    done = subprocess.run([tool("promtool"), "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_use_what_the_gateway_tells() -> None:
    """No name is mistyped, and no label."""
    known = {family.name: set(family.labels) for family in families()}
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    for rule in RULES:
        for name in re.findall(r"\bheadrace_\w+", rule["expr"]):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert base in known or any(name in record for record in recorded), name


def test_every_alert_has_a_runbook() -> None:
    """Symptom, meaning, first commands, remedies; and no runbook is of an alert that is no more."""
    names = {rule["alert"] for rule in ALERTS}
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"} == names
    for rule in ALERTS:
        page = (ROOT / rule["annotations"]["runbook"]).read_text()
        parts = re.findall(r"^## (.+)$", page, re.MULTILINE)
        assert parts == ["Symptom", "Meaning", "First commands", "Remedies"], rule["alert"]
        assert page.startswith(f"# {rule['alert']}\n")
        assert "```sh\n" in page
