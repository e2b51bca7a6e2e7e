"""What a scrape and a record of the metrics cost: the time of the loop, for many tenants and models.

    python -m loadtests.scrape [--tenants 200] [--models 20] [--rounds 20]

Every tenant has three limits and has asked every model in both classes, some in vain. Prints the medians beside those
of prometheus_client writing the same families in the same run: only their ratio is independent of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway.app import Gateway
from gateway.backend import Backend
from gateway.config import parse
from gateway.errors import QUEUE_FULL, Unavailable
from gateway.exchange import Attempt, Call, Dialect, Endpoint, Exchange, Tally
from gateway.exposition import OPENMETRICS, TEXT, exposed
from gateway.metrics import Family, Histogram, Numbers
from gateway.sse import Meter
from gateway.summed import packed
from policies.types import Dispatch, Job

CHAT = Endpoint("/v1/chat/completions", Dialect.CHAT, generates=True)
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":3,"total_tokens":103}}\n\n'


def configuration(tenants: int, models: int) -> str:
    """A file with so many of each."""
    limits = {"requests_per_minute": 600, "tokens_per_minute": 100_000, "concurrent": 32}
    keys = {f"tenant-{n}": {"keys": [{"sha256": f"{n:064x}"}], "limits": limits} for n in range(tenants)}
    goal = {"ttft": "1s", "itl": "50ms"}
    names = {f"model-{n}": {"pool": f"pool-{n % 4}", "slo": goal} for n in range(models)}
    pools = {f"pool-{n}": {"backends": [{"url": f"http://b{n}-{k}"} for k in range(8)]} for n in range(4)}
    salted = {"isolation": True}
    told = {"pools": {name: pool | salted for name, pool in pools.items()}, "models": names, "tenants": keys}
    return json.dumps(told | {"security": {"secret": "env:SALT"}})


def exchanges(gateway: Gateway, tenants: int, models: int) -> Iterator[Exchange]:
    """A good stream and a refusal of every tenant at every model, in both classes."""
    for n in range(tenants):
        tenant = gateway.generation.keys.tenant(f"tenant-{n}")
        assert tenant is not None
        for m in range(models):
            for class_ in ("interactive", "batch"):
                for good in (True, False):
                    call = Call(CHAT, f"model-{m}", f"model-{m}", f"pool-{m % 4}", [], stream=True, class_=class_)
                    x = Exchange("r", 100.0, CHAT, queued_at=100.001)
                    x.identify(tenant, call)
                    gateway.quota.hold(x)
                    if good:
                        answer(x, f"http://b{m % 4}-{n % 8}")
                    x.end(100.9, None if good else Unavailable(QUEUE_FULL, "full"))
                    yield x


def answer(x: Exchange, url: str) -> None:
    """Three tokens with usage."""
    assert x.call is not None
    backend = Backend(url, x.call.pool, "b", 80, b"b")
    attempt = Attempt(backend, Dispatch(Job(1, "t", 0.0), url), 100.1, lambda now: None, Tally())
    attempt.connected_at, attempt.ended_at = 100.11, 100.9
    x.attempts.append(attempt)
    meter = x.meter = Meter(Dialect.CHAT)
    for at, data in ((100.3, TOKEN), (100.35, TOKEN), (100.39, TOKEN), (100.4, LAST), (100.4, USAGE)):
        meter.feed(data, at)
    meter.end(100.41)


def library(families: Iterable[Family]) -> Iterator[Metric]:
    """The same as objects of prometheus_client."""
    for family in families:
        if isinstance(family, Histogram):
            told = HistogramMetricFamily(family.name, family.text, labels=family.labels)
            for key, child in family.children.items():
                sums = [sum(child.counts[: n + 1]) for n in range(len(child.counts))]
                bounds = [*map(str, child.bounds), "+Inf"]
                told.add_metric(key, list(zip(bounds, map(float, sums), strict=True)), child.sum)
            yield told
        elif isinstance(family, Numbers):
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            numbers = kind(family.name.removesuffix("_total"), family.text, labels=family.labels)
            for key, value in family.values.items():
                numbers.add_metric(key, value)
            yield numbers


def median_ms(work: Callable[[], object], rounds: int) -> float:
    """Of so many rounds, in milliseconds of processor time."""
    times = []
    for _ in range(rounds):
        begun = time.process_time()
        work()
        times.append((time.process_time() - begun) * 1000)
    return statistics.median(times)


class Library:
    """A collector of prometheus_client."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        yield from library(self._gateway.metrics())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    told = parser.parse_args(argv)
    settings = parse(configuration(told.tenants, told.models), environ={"SALT": "x" * 32})
    gateway = Gateway(settings, lambda line: None)
    requests = list(exchanges(gateway, told.tenants, told.models))
    begun = time.process_time()
    for x in requests:
        gateway.telemetry.record(x)
    record_us = (time.process_time() - begun) / len(requests) * 1e6
    begun = time.process_time()
    for x in requests:
        gateway.telemetry.record(x)
    warm_us = (time.process_time() - begun) / len(requests) * 1e6
    page = exposed(gateway.metrics(), TEXT)
    lines, size = len(page.splitlines()), len(page) / 2**20
    print(f"{told.tenants} tenants x {told.models} models: {lines:,} lines, {size:.1f} MiB")
    print(f"record, with the log line: {warm_us:.1f} us a request ({record_us:.1f} us while series are made)")
    for kind in (TEXT, OPENMETRICS):
        scrape_ms = median_ms(lambda kind=kind: exposed(gateway.metrics(), kind), told.rounds)  # type: ignore[misc]
        print(f"scrape: {scrape_ms:.1f} ms ({kind.partition(';')[0]})")
    numbers_ms = median_ms(lambda: packed(gateway.metrics()), told.rounds)
    print(f"as numbers, for the sum of several workers: {numbers_ms:.1f} ms")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Library(gateway))
    print(f"by prometheus_client: {median_ms(lambda: generate_latest(registry), max(3, told.rounds // 5)):.1f} ms")


if __name__ == "__main__":
    main()
