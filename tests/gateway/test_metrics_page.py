"""docs/metrics.md lists what a gateway tells. `python -m tests.gateway.test_metrics_page` renews it."""

from __future__ import annotations

import re
import time
from pathlib import Path

from gateway.app import Gateway
from gateway.config import parse
from gateway.logs import LogWriter
from gateway.metrics import Family
from gateway.reload import Reloader
from gateway.workers import metrics as crewed

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
MARK = "## Every metric\n"
EVERYTHING = "pools: {p: {backends: [{url: 'http://b'}]}}\nmodels: {m: {}}\ntelemetry: {otlp: 'http://c'}\n"


def families() -> list[Family]:
    """All there are, with every part configured."""
    gateway = Gateway(parse(EVERYTHING, environ={}), lambda line: None, LogWriter(2).metrics)
    return [*gateway.metrics(), *Reloader(None, gateway, time.time).metrics(), *crewed(up=0, restarts=0)]


def table() -> str:
    """The generated part of the page."""
    rows = [
        f"| `{family.name}` | {family.kind} | {', '.join(f'`{label}`' for label in family.labels)} | {family.total} "
        f"| {family.text} |\n"
        for family in families()
    ]
    return MARK + "\n| metric | type | labels | over workers | meaning |\n|---|---|---|---|---|\n" + "".join(rows)


def test_the_page_lists_every_metric() -> None:
    """No name, type, label or meaning is missing or stale. If this fails: python -m tests.gateway.test_metrics_page"""
    page = PAGE.read_text()
    assert page[page.index(MARK) :] == table()


def test_names_follow_the_rules_of_prometheus() -> None:
    """One prefix, units spelled out, counters end in _total and nothing else does, no name twice."""
    names = [family.name for family in families()]
    assert len(set(names)) == len(names)
    for family in families():
        assert re.fullmatch(r"(headrace|process)(_[a-z]+)+", family.name), family
        assert family.name.endswith("_total") == (family.kind == "counter"), family
        assert family.text.endswith("."), family
        assert not re.search(r"_(ms|millis|minutes|kb|mb)\b", family.name), family
        assert all(re.fullmatch(r"[a-z]+", label) for label in family.labels), family


def test_amounts_add_up_over_workers_and_states_do_not() -> None:
    """What is told of engines, of the configuration, or as 0 or 1 is the same in all; what one has, it has alone."""
    states = r"_(state|mode|info|gate|wanted|age_seconds|hour|ratio|accuracy|pending|generation|successful|per_second)$"
    states += r"|^headrace_(engine|config|objective|scrape|tenant)_|time_seconds$"
    for family in families():
        alike = bool(re.search(states, family.name)) and family.name != "headrace_drain_tokens_per_second"
        assert family.total == ("max" if family.kind == "gauge" and alike else "sum"), family


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + table())
