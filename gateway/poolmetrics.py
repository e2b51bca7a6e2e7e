"""What the metrics say of the pools: what waits and what runs, how backends are held shut, what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway import waking
from gateway.metrics import Counter, Family, Gauge, Total
from gateway.pool import Pool
from policies.types import Statistics

# name, text, the field of the scheduler's statistics that it shows, and what it is over several processes
BACKENDS: tuple[tuple[str, str, str, Total], ...] = (
    ("headrace_in_flight_requests", "Requests on a backend.", "running", "sum"),
    (
        "headrace_in_flight_tokens",
        "Uncached prompt tokens whose prefill is under way there.",
        "in_flight_tokens",
        "sum",
    ),
    ("headrace_kv_tokens", "Tokens in its KV memory by the gateway's own count.", "kv_tokens", "sum"),
    ("headrace_prefix_accuracy", "Share of the cached tokens expected there that are found.", "hit_accuracy", "max"),
)
QUEUES = (
    ("headrace_queued_requests", "Requests that wait for a backend.", "queued"),
    ("headrace_queued_tokens", "Their prompt tokens, as estimated.", "queued_tokens"),
)
RATES: tuple[tuple[str, str, str, Total], ...] = (
    ("headrace_prefill_tokens_per_second", "Prefill rate of one backend, as learned.", "prefill_rate", "max"),
    ("headrace_drain_tokens_per_second", "Prompt tokens that leave the queue, lately.", "drain_rate", "sum"),
    ("headrace_prefix_index_pieces", "Entries of the index of prompt prefixes.", "index_pieces", "sum"),
)


def metrics(named: Mapping[str, Pool], now: float) -> Iterator[Family]:
    """What waits and what runs, pool by pool."""
    yield from waking.metrics({name: pool.waking for name, pool in named.items()})
    pools = {name: pool.statistics() for name, pool in named.items()}
    yield from _queues(pools)
    for name, text, field, total in BACKENDS:
        values = {
            (pool, backend): getattr(told, field)
            for pool, all_told in pools.items()
            for backend, told in all_told.backends.items()
        }
        yield Gauge(name, text, "pool", "backend", total=total).of(values)
    gates = {(pool, name, of.gate): 1 for pool, told in pools.items() for name, of in told.backends.items()}
    text = "1 for the rule that admits or holds back now."
    yield Gauge("headrace_gate", text, "pool", "backend", "gate", total="max").of(gates)
    yield Gauge("headrace_retry_budget", "Retries that may be made now.", "pool", total="sum").of(
        {(name,): pool.retries.balance(now) for name, pool in named.items()}
    )


def costs(named: Mapping[str, Pool], now: float) -> Iterator[Family]:
    """How long backends that have a price were busy, and the price."""
    busy = Counter("headrace_backend_busy_seconds_total", "Time in which anything ran there.", "pool", "backend")
    price = Gauge("headrace_backend_cost_per_hour", "As configured.", "pool", "backend", total="max")
    for name, pool in named.items():
        for backend in pool.backends.values():
            if backend.cost_per_hour:
                price.values[(name, backend.name)] = backend.cost_per_hour
                busy.values[(name, backend.name)] = round(pool.share(backend).busy(now), 3)
    yield busy
    yield price


def _queues(pools: Mapping[str, Statistics]) -> Iterator[Family]:
    for name, text, field in QUEUES:
        values = {(pool, class_): n for pool, told in pools.items() for class_, n in getattr(told, field).items()}
        yield Gauge(name, text, "pool", "class", total="sum").of(values)
    for name, text, field, total in RATES:
        yield Gauge(name, text, "pool", total=total).of({(pool,): getattr(told, field) for pool, told in pools.items()})
