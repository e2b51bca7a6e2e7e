"""What the console and `headrace top` show: one picture of the gateway, made of what its parts know anyway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from gateway.dispatch import Dispatcher
from gateway.doors import Doors
from gateway.exchange import Exchange
from gateway.fleet import Fleet
from gateway.fleetadmin import listed
from gateway.generation import Generation
from gateway.overview import overview
from gateway.pool import Pool
from gateway.pulse import Pulse
from gateway.quota import Quota
from gateway.reply import Clock
from gateway.telemetry import Telemetry
from gateway.vitals import Vitals, installed_version

BEAT_S = 1.0  # a point of the lines
ROWS = 50  # of a list; what is left out is counted
TENANT = ("tenant", "running", "waiting", "limits")


class Shown(Protocol):
    """What there is to see."""

    generation: Generation
    dispatcher: Dispatcher
    quota: Quota
    doors: Doors
    fleet: Fleet
    telemetry: Telemetry
    vitals: Vitals
    clock: Clock
    draining: bool

    @property
    def active(self) -> Collection[Exchange]: ...


class Board:
    """`look()` is one picture, as plain values, and costs a pass over what is under way. `async with board` counts
    beside it, a tenth of a millisecond each second, so that who comes because something is wrong sees how it came."""

    def __init__(self, gateway: Shown, wall_clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self._wall_clock = wall_clock
        self._pulse = Pulse(gateway.telemetry.requests, gateway.vitals.lag)
        self._task: asyncio.Task[None] | None = None
        self.beat()

    async def __aenter__(self) -> Board:
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.beat()

    def beat(self) -> None:
        """A second has passed."""
        told = [pool.statistics() for pool in self._gateway.dispatcher.pools.values()]
        queued = sum(sum(each.queued.values()) for each in told)
        running = sum(load.running for each in told for load in each.backends.values())
        self._figures = self._pulse.look(self._gateway.clock(), queued=queued, running=running)

    def look(self) -> dict[str, Any]:
        """Everything now. No prompts, answers or keys are in it."""
        gateway, wall, now = self._gateway, self._wall_clock(), self._gateway.clock()
        backends = listed(gateway.fleet, now)
        waiting = waits(gateway.active, now)
        queues = queued(gateway.dispatcher.pools, waiting)
        tenants = overview(gateway.generation, gateway.quota, gateway.doors, gateway.active, wall)
        tenants.sort(key=lambda each: -used(each))
        return {
            "at": round(wall, 3),
            "version": installed_version(),
            "generation": gateway.generation.number,
            "uptime_s": round(wall - gateway.vitals.began_at),
            "draining": gateway.draining,
            "limiter": gateway.quota.store.mode,
            "open_requests": len(gateway.active),
            "open_streams": sum(x.call is not None and x.call.stream for x in gateway.active),
            "figures": self._figures,
            "history": {name: list(values) for name, values in self._pulse.history.items()},
            "backends": backends,
            "queues": queues,
            "waiting": waiting[:ROWS],
            "more_waiting": len(waiting[ROWS:]),
            "refusals": [
                {"reason": reason, "total": total, "lately": lately}
                for reason, (total, lately) in self._pulse.refused().items()
            ],
            "tenants": [{name: each[name] for name in TENANT} for each in tenants[:ROWS]],
            "more_tenants": len(tenants[ROWS:]),
            "recent": [seen.row() for seen in gateway.telemetry.recent.latest(ROWS)],
        }


def queued(pools: Mapping[str, Pool], waiting: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What waits in each class of each pool; how long the oldest has, and how long whoever comes last might: the prompt
    tokens of its class and of those above, at the rate at which tokens leave the queue."""
    oldest: dict[tuple[str, str], float] = {}
    for row in waiting:
        key = row["pool"], row["class"]
        oldest[key] = max(oldest.get(key, 0.0), row["oldest_s"])
    found = []
    for name, pool in pools.items():
        told, tokens = pool.statistics(), 0
        for class_, number in told.queued.items():
            tokens += told.queued_tokens[class_]
            wait_s = round(tokens / told.drain_rate, 2) if told.drain_rate else None
            row = {"pool": name, "class": class_, "waiting": number, "tokens": told.queued_tokens[class_]}
            row |= {"oldest_s": oldest.get((name, class_), 0.0), "wait_s": wait_s if number else 0.0}
            found.append(row)
    return found


def waits(active: Iterable[Exchange], now: float) -> list[dict[str, Any]]:
    """Whose requests wait, and how long the oldest has; the most first."""
    since: dict[tuple[str, str, str], list[float]] = {}
    for x in active:
        if x.tenant is None or x.call is None or not x.queued_at:
            continue
        if not x.attempts or x.attempts[-1].ended_at:
            key = (x.tenant.name, x.call.pool, x.class_)
            since.setdefault(key, []).append(x.attempts[-1].ended_at if x.attempts else x.queued_at)
    rows = [
        {"tenant": tenant, "pool": pool, "class": class_, "waiting": len(times), "oldest_s": round(now - min(times), 2)}
        for (tenant, pool, class_), times in since.items()
    ]
    return sorted(rows, key=lambda row: (-row["waiting"], row["tenant"]))


def used(tenant: Mapping[str, Any]) -> float:
    """How near a tenant is to the nearest of its limits, then how much it has under way."""
    shares = [limit["used"] / limit["limit"] for limit in tenant["limits"] if limit["limit"]]
    return max(shares, default=0.0) + 1e-6 * float(tenant["running"] + tenant["waiting"])
