"""The dashboards: current, sound, and every query of every panel returns data from a real Prometheus that scraped a
real gateway under a load with faults."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.build import DIR, texts
from deploy.grafana.panels import VARIABLES
from deploy.prometheus.build import FILE
from tests.contract.servers import started as shared
from tests.gateway.test_metrics_page import families
from tests.observability.tools import ROOT, running_prometheus, tool
from tests.service import emulating, started, tenant

BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(DIR.glob("*.json"))}
QUERIES = [
    (board, panel["title"], target["expr"])
    for board, told in BOARDS.items()
    for panel in told["panels"]
    for target in panel.get("targets", ())
]
SCRAPE_S = 1


def plain(expr: str) -> str:
    """With what Grafana would put in."""
    expr = expr.replace("$__rate_interval", f"{SCRAPE_S * 8}s")
    return re.sub(r"\$\w+", ".*", expr)


def test_dashboards_are_current() -> None:
    """If this fails: python -m deploy.grafana.build"""
    assert {path.name: path.read_text() for path in DIR.iterdir()} == texts()


@pytest.mark.parametrize("name", list(BOARDS))
def test_a_dashboard_is_sound(name: str) -> None:
    """The SDK reads it back; ids are unique; panels say what they show, in a unit, from the chosen data source."""
    board = BOARDS[name]
    assert Dashboard.from_json(board).uid == name
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", *VARIABLES]
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs) and all(refs)
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        assert panel["type"] in ("heatmap", "table") or panel["fieldConfig"]["defaults"]["unit"]


def test_panels_do_not_overlap() -> None:
    """Each place of the grid is taken once."""
    for board in BOARDS.values():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken and at["x"] + at["w"] <= 24, (board["title"], panel["title"])
            taken |= cells


@pytest.mark.parametrize(("board", "panel", "expr"), QUERIES)
def test_a_query_asks_for_what_there_is(board: str, panel: str, expr: str) -> None:
    """It parses, and no metric is mistyped."""
    promql_parser.parse(plain(expr))
    known = {family.name for family in families()}
    records = {rule.get("record") for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]}
    for name in re.findall(r"(?:\w+:)?(?:headrace|process)_[\w:]+", expr):
        assert re.sub(r"_(bucket|sum|count)$", "", name) in known or name in records, name


def test_what_is_told_is_shown() -> None:
    """No metric is on no dashboard, but those that are for machines or for alerts alone."""
    unseen = {"headrace_objective_seconds", "headrace_objectives_total", "process_start_time_seconds"}
    unseen |= {"process_max_fds", "headrace_config_last_reload_success_timestamp_seconds"}
    shown = " ".join(expr for _, _, expr in QUERIES)
    missing = {f.name for f in families() if not re.search(rf"\b{f.name}(_bucket|_sum|_count)?\b", shown)}
    assert missing <= unseen


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that has seen a gateway, emulated backends, and a load with faults for a while."""
    program = tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with ExitStack() as stack:
        engines = [emulating(stack, folder, "--model=m", "--engine=llama-3-8b-h100") for _ in range(2)]
        engines.append(emulating(stack, folder, "--model=m", "--fault=429:1@0.5", "--fault=plain:200@0.5"))
        store = stack.enter_context(shared("valkey", folder))
        service = started(stack, folder, configuration(engines, store.url), "--workers=2", salt="x" * 32)
        rules = yaml.safe_load(FILE.read_text())
        for group in rules["groups"]:
            group["interval"] = f"{SCRAPE_S}s"
        (folder / FILE.name).write_text(yaml.safe_dump(rules))
        told = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        told["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
        told["scrape_configs"][0]["static_configs"][0]["targets"] = [service.admin.removeprefix("http://")]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(told))
        url = stack.enter_context(running_prometheus(program, folder))
        until = time.monotonic() + 15
        while time.monotonic() < until:
            load(service.api)
        yield url


def configuration(engines: list[str], store: str) -> dict[str, Any]:
    """Objectives that some requests miss, a backend that is often busy, one that is not there, a queue that is soon
    full, limits that are soon used up, a version and a pool on trial, a pool that sleeps, no collector. What is slow is
    tried a second time."""
    priced = [{"url": url, "cost_per_hour": 2.5} for url in engines[:2]]
    gone = {"url": "http://127.0.0.1:1"}
    pools = {
        "good": {"engine": "vllm", "backends": priced, "retries": {"hedge": {"after": "5ms", "prompt_tokens": "10k"}}},
        "torn": {"engine": "vllm", "backends": [{"url": engines[2]}, {"url": engines[0]}], "routing": "round_robin"},
        "full": {"engine": "vllm", "backends": [{"url": engines[1], "concurrency": 1}]},
        "next": {"engine": "vllm", "backends": [{"url": engines[1]}]},
        "asleep": {"engine": "vllm", "backends": [gone], "wake": {"hold": "1s"}, "health": {"interval": "100ms"}},
    }
    canary = {"pool": "next", "weight": "50%", "sticky": "conversation"}
    models = {
        "m": {"pool": "good", "slo": {"ttft": "5s", "itl": "1s"}, "shadow": {"pool": "next", "sample": "100%"}},
        "new": {"pool": "good", "upstream_name": "m", "canary": canary},
        "strict": {"pool": "good", "upstream_name": "m", "slo": {"ttft": "1ms", "itl": "1ms"}},
        "torn": {"pool": "torn", "upstream_name": "m"},
        "full": {"pool": "full", "upstream_name": "m"},
        "asleep": {"pool": "asleep", "upstream_name": "m", "fallback": ["good"]},
    }
    return {
        "pools": pools,
        "models": models,
        "classes": {"interactive": {"max_queued": 1}},
        "tenants": {"acme": tenant("key-a"), "beta": tenant("key-b", limits={"requests_per_minute": 60})},
        "security": {"secret": "file:salt"},
        "state": {"url": store},
        "telemetry": {"otlp": "http://127.0.0.1:9", "sample": "100%"},
    }


def load(api: str) -> None:
    """A few requests of each kind at once."""
    kinds = ["m", "m", "new", "strict", "torn", "torn", "full", "full", "full", "asleep", "embeddings", "leave"]
    with ThreadPoolExecutor(len(kinds)) as pool, httpx.Client(base_url=api, timeout=30) as http:
        for _ in pool.map(lambda each: one(http, *each), enumerate(kinds)):
            pass


def one(http: httpx.Client, number: int, kind: str) -> None:
    headers = {"authorization": f"Bearer key-{'ab'[number % 2]}"}
    prompt = "The same beginning of many prompts, long enough to be remembered. " * 60
    said = f"{prompt} {time.monotonic()}" if kind == "new" else prompt
    asked: dict[str, Any] = {"model": "m" if kind in ("embeddings", "leave") else kind}
    if kind == "embeddings":
        http.post("/v1/embeddings", json=asked | {"input": prompt}, headers=headers)
        return
    asked |= {"messages": [{"role": "user", "content": said}], "stream": True, "max_tokens": 24}
    with http.stream("POST", "/v1/chat/completions", json=asked, headers=headers) as answer:
        for _ in answer.iter_raw():
            if kind == "leave":
                break


@pytest.mark.parametrize(("board", "panel", "expr"), QUERIES)
def test_a_query_returns_data(prometheus: str, board: str, panel: str, expr: str) -> None:
    """From what was really scraped; a number, not NaN, in one sample at least."""
    now = time.time()
    asked = {"query": plain(expr), "start": now - 12, "end": now, "step": 1}
    answer = httpx.get(f"{prometheus}/api/v1/query_range", params=asked).json()
    assert answer["status"] == "success", answer
    values = [float(value) for found in answer["data"]["result"] for _, value in found["values"]]
    assert any(value == value for value in values), f"{board} / {panel}: no data for {asked['query']}"


def test_exemplars_are_kept(prometheus: str) -> None:
    """The trace of a slow request is found from its bucket."""
    asked = {"query": "headrace_ttft_seconds_bucket", "start": time.time() - 60, "end": time.time()}
    found = httpx.get(f"{prometheus}/api/v1/query_exemplars", params=asked).json()["data"]
    assert any(len(each["labels"]["trace_id"]) == 32 for series in found for each in series["exemplars"])


def test_commands_of_the_runbooks_can_be_asked(prometheus: str) -> None:
    """Each query in a runbook is one that Prometheus understands."""
    for page in (ROOT / "docs/runbooks").glob("*.md"):
        for expr in re.findall(r"^promtool query instant \$PROMETHEUS '(.*)'$", page.read_text(), re.MULTILINE):
            answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expr}).json()
            assert answer["status"] == "success", (page.name, expr, answer)


def test_the_configuration_of_prometheus_is_valid() -> None:
    """promtool finds no fault in it, nor in the rules that it names."""
    path = ROOT / "deploy/prometheus/prometheus.yml"
    done = subprocess.run([tool("promtool"), "check", "config", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_provisioning_names_what_there_is() -> None:
    """The folder of the dashboards, and a data source with exemplars."""
    folder = ROOT / "deploy/grafana/provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards/headrace.yaml").read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"].endswith("/headrace")
    (source,) = yaml.safe_load((folder / "datasources/headrace.yaml").read_text())["datasources"]
    assert source["jsonData"]["exemplarTraceIdDestinations"][0]["name"] == "trace_id"
