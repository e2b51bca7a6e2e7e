"""What the metrics say of the backends: what they are, what their engines tell, and how old that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from gateway.metrics import Family, Gauge, Key
from gateway.reply import Clock
from gateway.roster import Roster
from gateway.watch import Sight

Pick = Callable[[Sight, float], float | None]
PICKS: Mapping[str, tuple[str, Pick]] = {
    "engine_running_requests": ("Requests that the engine computes.", lambda sight, _: sight.signals.running),
    "engine_waiting_requests": ("Requests that wait in the engine.", lambda sight, _: sight.signals.waiting),
    "engine_kv_ratio": ("Share of the KV memory in use.", lambda sight, _: sight.signals.kv_share),
    "engine_kv_tokens": ("Tokens that the KV memory holds.", lambda sight, _: sight.signals.kv_tokens),
    "signal_age_seconds": (
        "Since the engine's metrics were read.",
        lambda sight, now: now - sight.signals_at if sight.signals_at else None,
    ),
    "scrape_seconds": (
        "Time of the loop that reading them once costs.",
        lambda sight, _: sight.scrape_s / sight.scrapes if sight.scrapes else None,
    ),
}


def metrics(rosters: Iterable[Roster], clock: Clock) -> Iterator[Family]:
    """Of all pools. What an engine does not say has no sample."""
    now, rosters = clock(), list(rosters)
    states: dict[Key, float] = {
        (roster.pool.name, backend.name, state): 1.0 for roster in rosters for backend, state in roster.states(now)
    }
    yield Gauge("headrace_backend_state", "1 for what it is now.", "pool", "backend", "state", total="max").of(states)
    for name, (text, pick) in PICKS.items():
        found: dict[Key, float] = {
            (roster.pool.name, each): value
            for roster in rosters
            for each, sight in roster.sights.items()
            if (value := pick(sight, now)) is not None
        }
        yield Gauge(f"headrace_{name}", text, "pool", "backend", total="max").of(found)
