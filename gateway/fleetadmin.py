"""The fleet as the admin API shows and changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.address import backend_url
from gateway.backend import Backend
from gateway.errors import INVALID_REQUEST, Refused
from gateway.fleet import Fleet
from gateway.roster import Roster
from policies.types import BackendStatistics

Make = Callable[[str, str], Backend]  # of a pool's name and a URL


def listed(fleet: Fleet, now: float) -> list[dict[str, Any]]:
    """Every backend of every pool."""
    found = []
    for roster in fleet.rosters.values():
        loads = roster.pool.statistics().backends
        room = {view.name: view.concurrency for view in roster.views(now)}
        for backend, state in roster.states(now):
            told = _shown(roster, backend, state, now)
            found.append(told | _loaded(roster, loads.get(backend.name)) | {"concurrency": room[backend.name]})
    return found


def _loaded(roster: Roster, load: BackendStatistics | None) -> dict[str, Any]:
    """What the gateway itself counts there."""
    return {
        "running": load.running if load is not None else 0,
        "gate": load.gate if load is not None else "closed",
        "uncached_tokens": load.in_flight_tokens if load is not None else 0,
        "uncached_budget": roster.pool.scheduler.rules.budget_tokens,
        "held_tokens": load.kv_tokens if load is not None else 0,
    }


def _shown(roster: Roster, backend: Backend, state: str, now: float) -> dict[str, Any]:
    sight = roster.sights[backend.name]
    signals, lacks = sight.signals, roster.pool.eligible.lacks(backend.name)
    return {
        "pool": roster.pool.name,
        "backend": backend.name,
        "state": state,
        "why": sight.why or (f"does not serve {', '.join(lacks)}" if lacks else ""),
        "region": backend.region,
        "revision": backend.revision,
        "incarnation": sight.incarnation,
        "models": sorted(sight.models) if sight.models is not None else None,
        "engine_running": signals.running,
        "engine_waiting": signals.waiting,
        "kv_share": signals.kv_share,
        "kv_tokens": signals.kv_tokens,
        "signal_age_s": round(now - sight.signals_at, 3) if sight.signals_at else None,
    }


def _roster(fleet: Fleet, pool: str | None, name: str) -> Roster:
    """That of the pool; where none is named, of the only one, or the only one that has the backend."""
    names = ", ".join(fleet.rosters)
    if pool is not None:
        if pool not in fleet.rosters:
            raise Refused(INVALID_REQUEST, f"There is no pool {pool!r}: it is one of {names}.", param="pool")
        return fleet.rosters[pool]
    found = [each for each in fleet.rosters.values() if len(fleet.rosters) == 1 or name in each.pool.backends]
    if len(found) != 1:
        raise Refused(INVALID_REQUEST, f"Name the pool: one of {names}.", param="pool")
    return found[0]


def change(fleet: Fleet, action: str, pool: str | None, url: str, make: Make, now: float) -> dict[str, Any]:
    """Add, remove, drain or undrain one backend. Returns what it is then. Raises Refused."""
    try:
        name = backend_url(url)
    except ValueError as error:
        raise Refused(INVALID_REQUEST, f"url: {error}", param="url") from error
    roster = _roster(fleet, pool, "" if action == "add" else name)
    known = name in roster.pool.backends
    if known is (action == "add"):
        what = "is there already" if known else f"is not in the pool: there are {', '.join(roster.pool.backends)}"
        raise Refused(INVALID_REQUEST, f"{name} {what}.", param="url")
    match action:
        case "add":
            roster.removed.discard(name)
            if name not in roster.found:
                roster.added[name] = make(roster.pool.name, name)
        case "remove":
            roster.removed.add(name)
            roster.added.pop(name, None)
            roster.drained.discard(name)
        case "drain":
            roster.drained.add(name)
        case _:
            roster.drained.discard(name)
    fleet.settle(roster.pool.name)
    state = next((state for backend, state in roster.states(now) if backend.name == name), "removed")
    return {"pool": roster.pool.name, "backend": name, "state": state}
