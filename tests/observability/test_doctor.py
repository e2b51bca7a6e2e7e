"""`headrace doctor` on real processes: each injected fault is named first, from two scrapes of a gateway; and from a
Prometheus. Half a minute each: only with `make test-observability`."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.observability.tools import NEEDED, ROOT, running_prometheus, tool
from tests.service import Service, emulating, run, started, tenant

pytestmark = [
    pytest.mark.skipif(not NEEDED, reason="slow: make test-observability"),
    pytest.mark.timeout(300),
]
ENGINE = "--engine=llama-3-8b-h100"
WINDOW_S = 15
FREE: dict[str, Any] = {"ttft": "20s", "itl": "2s"}


def gateway(stack: ExitStack, folder: Path, engines: list[str], slo: dict[str, Any], **backend: Any) -> Service:
    told = {
        "pools": {"p": {"engine": "vllm", "backends": [{"url": url, **backend} for url in engines]}},
        "models": {"m": {"pool": "p", "slo": slo}},
        "tenants": {"acme": tenant("key")},
    }
    return started(stack, folder, told)


def ask(http: httpx.Client, number: int, *, words: int, tokens: int) -> None:
    """A streamed request with a prompt of its own."""
    prompt = f"Number {number}. " + f"word{number} " * words
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True}
    headers = {"authorization": "Bearer key"}
    http.post("/v1/chat/completions", json=body | {"max_tokens": tokens, "ignore_eos": True}, headers=headers)


@contextmanager
def loading(service: Service, clients: int, **asked: int) -> Iterator[None]:
    """So many clients ask one after another, each with its own prompts, as long as the block lasts."""
    stopped, numbers = threading.Event(), iter(range(10**9))

    def go_on(http: httpx.Client) -> None:
        while not stopped.is_set():
            ask(http, next(numbers), **asked)

    with httpx.Client(base_url=service.api, timeout=90) as http, ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(go_on, http) for _ in range(clients)]
        try:
            yield
        finally:
            stopped.set()
            for each in running:
                each.result(timeout=120)


def examined(url: str, window_s: float = WINDOW_S) -> dict[str, Any]:
    done = run("doctor", url, "--window", f"{window_s:g}s", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def leading(told: dict[str, Any]) -> str:
    assert told["hypotheses"], told["facts"]
    return str(told["hypotheses"][0]["name"])


def test_slow_prefill(tmp_path: Path) -> None:
    """Slow engines get long prompts that should be answered within 300 ms."""
    with ExitStack() as stack:
        engines = [emulating(stack, tmp_path, "--model=m", ENGINE, "--speed=0.03") for _ in range(2)]
        service = gateway(stack, tmp_path, engines, FREE | {"ttft": "300ms"})
        with loading(service, 2, words=600, tokens=8):
            told = examined(service.admin)
    assert leading(told) == "prefill", told


def test_slow_decode(tmp_path: Path) -> None:
    """Engines at a tenth of their speed should give a token every 25 ms."""
    with ExitStack() as stack:
        engines = [emulating(stack, tmp_path, "--model=m", ENGINE, "--speed=0.1") for _ in range(2)]
        service = gateway(stack, tmp_path, engines, FREE | {"itl": "25ms"})
        with loading(service, 2, words=10, tokens=30):
            told = examined(service.admin)
    assert leading(told) == "decode", told


def test_a_saturated_queue(tmp_path: Path) -> None:
    """Ten clients for two places."""
    with ExitStack() as stack:
        engines = [emulating(stack, tmp_path, "--model=m", ENGINE) for _ in range(2)]
        service = gateway(stack, tmp_path, engines, FREE | {"ttft": "500ms"}, concurrency=1)
        with loading(service, 10, words=20, tokens=60):
            told = examined(service.admin)
    assert leading(told) == "queue", told


def test_a_cold_backend(tmp_path: Path) -> None:
    """Conversations were cached on an engine that nobody watches, and it came back with nothing in its memory."""
    with ExitStack() as stack:
        arguments = ("--model=m", ENGINE, "--speed=0.1")
        with ExitStack() as first:
            url = emulating(first, tmp_path, *arguments)
            unwatched = {"engine": "openai", "backends": [{"url": url}], "health": {"interval": "0s"}}
            told: dict[str, Any] = {
                "pools": {"p": unwatched},
                "models": {"m": {"pool": "p", "slo": FREE | {"ttft": "300ms"}}},
            }
            service = started(stack, tmp_path, told | {"tenants": {"acme": tenant("key")}})
            with httpx.Client(base_url=service.api, timeout=90) as http:
                for number in range(30):
                    ask(http, number, words=600, tokens=2)
        emulating(stack, tmp_path, *arguments, f"--port={url.rsplit(':', 1)[1]}")
        with loading(service, 1, words=600, tokens=2):
            found = examined(service.admin)
    assert leading(found) == "cold", found


def test_a_stall_of_the_gateway(tmp_path: Path) -> None:
    """Its process is stopped for a third of a second in every one."""
    with ExitStack() as stack:
        engines = [emulating(stack, tmp_path, "--model=m", ENGINE) for _ in range(2)]
        service = gateway(stack, tmp_path, engines, {"ttft": "250ms", "itl": "30ms"})
        with loading(service, 3, words=20, tokens=30), repeatedly(lambda: stall(service.process.pid)):
            told = examined(service.admin)
    assert leading(told) == "gateway", told


def stall(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.6)


@contextmanager
def repeatedly(act: Callable[[], None]) -> Iterator[None]:
    """Again and again, beside the block."""
    stopped = threading.Event()

    def go_on() -> None:
        while not stopped.is_set():
            act()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def test_a_prometheus_says_the_same(tmp_path: Path) -> None:
    """Of the queue, from what is stored; with the report for people in its order."""
    program = tool("prometheus")
    with ExitStack() as stack:
        engines = [emulating(stack, tmp_path, "--model=m", ENGINE) for _ in range(2)]
        service = gateway(stack, tmp_path, engines, FREE | {"ttft": "500ms"}, concurrency=1)
        told = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        told["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        told["rule_files"] = []
        told["scrape_configs"][0]["static_configs"][0]["targets"] = [service.admin.removeprefix("http://")]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(told))
        url = stack.enter_context(running_prometheus(program, tmp_path))
        with loading(service, 10, words=20, tokens=60):
            time.sleep(12)
            found = examined(url, 10)
            shown = run("doctor", url, "--window", "10s").stdout
    assert leading(found) == "queue", found
    heads = [line for line in shown.splitlines() if line[:2] in ("1.", "2.", "3.", "4.")]
    assert [line.split()[1] for line in heads] == ["Workload", "Objectives", "Hypotheses,", "Experiments,"]
