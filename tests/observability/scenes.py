"""Faults that are brought about on real processes: a gateway before emulated engines, under a load, watched by a real
Prometheus with the shipped rules. Each says what the doctor has to name first and which alerts have to fire."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.prometheus.build import FILE, text
from tests.observability.tools import ROOT, running_prometheus, tool
from tests.service import Service, emulating, started, tenant

FASTER = 30.0  # the rules: their five minutes are ten seconds, their hour is two minutes
BEAT_S, LATE_S = 0.1, 0.05  # as the gateway listens to its loop, and what the alert on its lag calls late
ENGINE = "--engine=llama-3-8b-h100"
FREE: dict[str, Any] = {"ttft": "20s", "itl": "2s"}


@dataclass(frozen=True)
class Up:
    """A gateway, the Prometheus that watches it, and who sees whether the machine leaves it in peace."""

    service: Service
    prometheus: str
    witness: Witness


@dataclass(frozen=True)
class Scene:
    """`play` brings a fault about and keeps it up as long as the stack stands. `hypothesis` is the doctor's word for
    it; `reason` the one alert that names it; `budgets` those on the objectives that suffer from it."""

    play: Callable[[ExitStack, Path], Up]
    hypothesis: str
    reason: str
    budgets: frozenset[str] = field(default_factory=frozenset)
    calm_s: float = 0.04  # loop lag that says that the machine does something else

    @property
    def alerts(self) -> set[str]:
        return {self.reason, *self.budgets} - {""}


def slow_prefill(stack: ExitStack, folder: Path) -> Up:
    """Engines at a thirtieth of their speed get prompts that should be answered within 300 ms."""
    engines = [emulating(stack, folder, "--model=m", ENGINE, "--speed=0.03") for _ in range(2)]
    up = watched(stack, folder, engines, FREE | {"ttft": "300ms"})
    stack.enter_context(loading(up.service, 2, words=250, tokens=4))
    return up


def slow_decode(stack: ExitStack, folder: Path) -> Up:
    """Engines at a tenth of their speed should give a token every 25 ms."""
    engines = [emulating(stack, folder, "--model=m", ENGINE, "--speed=0.1") for _ in range(2)]
    up = watched(stack, folder, engines, FREE | {"itl": "25ms"})
    stack.enter_context(loading(up.service, 3, words=10, tokens=20))
    return up


def saturated_queue(stack: ExitStack, folder: Path) -> Up:
    """Five clients for two places, where one may wait."""
    engines = [emulating(stack, folder, "--model=m", ENGINE) for _ in range(2)]
    up = watched(stack, folder, engines, FREE, concurrency=1, max_queued=1)
    stack.enter_context(loading(up.service, 5, words=20, tokens=60))
    return up


def long_queue(stack: ExitStack, folder: Path) -> Up:
    """Six clients for two places, where all may wait."""
    engines = [emulating(stack, folder, "--model=m", ENGINE) for _ in range(2)]
    up = watched(stack, folder, engines, FREE | {"ttft": "500ms"}, concurrency=1)
    stack.enter_context(loading(up.service, 6, words=20, tokens=60))
    return up


def cold_backend(stack: ExitStack, folder: Path) -> Up:
    """Conversations were cached on an engine that nobody probes, and it came back with nothing in its memory."""
    arguments = ("--model=m", ENGINE, "--speed=0.1")
    with ExitStack() as first:
        url = emulating(first, folder, *arguments)
        up = watched(stack, folder, [url], FREE, engine="openai", health={"interval": "0s"})
        with httpx.Client(base_url=up.service.api, timeout=90) as http:
            for number in range(60):
                ask(http, number, words=600, tokens=2)
    emulating(stack, folder, *arguments, f"--port={url.rsplit(':', 1)[1]}")
    stack.enter_context(loading(up.service, 1, words=600, tokens=8))
    return up


def stalled_gateway(stack: ExitStack, folder: Path) -> Up:
    """Its process is stopped for a third of a second in every one."""
    engines = [emulating(stack, folder, "--model=m", ENGINE) for _ in range(2)]
    up = watched(stack, folder, engines, FREE)
    stack.enter_context(loading(up.service, 3, words=20, tokens=30))
    stack.enter_context(repeatedly(lambda: stall(up.service.process.pid)))
    return up


def healthy(stack: ExitStack, folder: Path) -> Up:
    """A load that two engines carry, with objectives that they keep."""
    engines = [emulating(stack, folder, "--model=m", ENGINE) for _ in range(2)]
    up = watched(stack, folder, engines, {"ttft": "3s", "itl": "250ms"})
    stack.enter_context(loading(up.service, 3, words=100, tokens=30))
    return up


LATE, LOW = "HeadraceFirstTokenLate", "HeadraceGoodputLow"
SCENES = {
    "slow prefill": Scene(slow_prefill, "prefill", "HeadracePrefillSlow", frozenset({LATE, LOW})),
    "slow decode": Scene(slow_decode, "decode", "HeadraceDecodeSlow", frozenset({"HeadraceTokensSlow", LOW})),
    "saturated queue": Scene(
        saturated_queue, "queue", "HeadraceQueueSaturated", frozenset({"HeadraceUnavailable", LOW})
    ),
    "long queue": Scene(long_queue, "queue", "HeadraceQueueSlow", frozenset({LATE, LOW})),
    "cold backend": Scene(cold_backend, "cold", "HeadraceCacheCold"),
    "stalled gateway": Scene(stalled_gateway, "gateway", "HeadraceLoopLag", calm_s=9.0),
}


# -- the parts -----------------------------------------------------------------------------------------------------


def watched(
    stack: ExitStack,
    folder: Path,
    engines: list[str],
    slo: dict[str, Any],
    *,
    concurrency: int = 64,
    max_queued: int = 256,
    **pool: Any,
) -> Up:
    """A gateway before these engines, with these objectives, and a Prometheus that scrapes it every second."""
    backends = [{"url": url, "concurrency": concurrency} for url in engines]
    told = {
        "pools": {"p": {"engine": "vllm", "backends": backends} | pool},
        "models": {"m": {"pool": "p", "slo": slo}},
        "classes": {"interactive": {"max_queued": max_queued}},
        "tenants": {"acme": tenant("key")},
    }
    service = started(stack, folder, told)
    witness = stack.enter_context(Witness(service.process.pid))
    (folder / FILE.name).write_text(text(FASTER))
    scrapes = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    scrapes["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    scrapes["scrape_configs"][0]["static_configs"][0]["targets"] = [service.admin.removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(scrapes))
    return Up(service, stack.enter_context(running_prometheus(tool("prometheus"), folder)), witness)


def fired(prometheus: str) -> set[str]:
    """Every alert that has fired since the start."""
    asked = {"query": 'max_over_time(ALERTS{alertstate="firing"}[1h])'}
    found = httpx.get(f"{prometheus}/api/v1/query", params=asked).json()["data"]["result"]
    return {each["metric"]["alertname"] for each in found}


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
            stopped.wait(0.1)  # who is refused does not come again at once

    with httpx.Client(base_url=service.api, timeout=90) as http, ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(go_on, http) for _ in range(clients)]
        try:
            yield
        finally:
            stopped.set()
            for each in running:
                each.result(timeout=120)


class Witness:
    """`with Witness(pid) as witness`: how long the kernel lets a process wait for a processor, beat by beat. A loop
    that is late for that reason is late because the machine does something else."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/schedstat")  # of its main thread: time run, time waited in ns, slices
        self._waits_s: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _listen(self) -> None:
        before = self._waited_s()
        while not self._stopped.wait(BEAT_S):
            now = self._waited_s()
            self._waits_s.append(now - before)
            before = now

    def _waited_s(self) -> float:
        return int(self._path.read_text().split()[1]) / 1e9

    @property
    def disturbed(self) -> bool:
        """Whether it waited for half of what the alert on loop lag calls late, as often in any ten seconds as makes the
        alert fire."""
        beats = round(10 / BEAT_S)
        late = [wait_s > LATE_S / 2 for wait_s in self._waits_s]
        return any(sum(late[at : at + beats]) > beats / 100 for at in range(len(late)))


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
