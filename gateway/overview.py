"""How tenants stand now: what they may use, what they use of it, and which of their keys are good."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.doors import Doors
from gateway.exchange import Exchange
from gateway.generation import Generation
from gateway.ledger import iso
from gateway.quota import Quota
from gateway.schema import Tenant
from policies.limits import Standing


def overview(
    now: Generation, quota: Quota, doors: Doors, active: Iterable[Exchange], wall: float
) -> list[dict[str, Any]]:
    """One record for each tenant, in the order of the configuration. `wall` is in seconds since the epoch."""
    running: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for x in active:
        if x.tenant is not None:
            placed = bool(x.attempts) and not x.attempts[-1].ended_at
            count = running if placed else waiting
            count[x.tenant.name] = count.get(x.tenant.name, 0) + 1
    standings = quota.usage()
    told = now.settings.tenants or {"anonymous": Tenant(classes=tuple(now.settings.classes))}
    return [
        {
            "tenant": name,
            "running": running.get(name, 0),
            "waiting": waiting.get(name, 0),
            "connections": None if tenant.limits.connections is None else doors.open[name],
            "limits": [_limit(each) for each in standings.get(name, ())],
            "weight": tenant.weight,
            "classes": list(tenant.classes),
            "models": list(tenant.models),
            "trust_group": tenant.trust_group or name,
            "residency": list(tenant.residency),
            "keys": _keys(now, name, wall),
        }
        for name, tenant in told.items()
    ]


def _limit(standing: Standing) -> dict[str, Any]:
    limit = standing.limit
    return {
        "kind": str(limit.kind),
        "model": limit.model or None,
        "limit": limit.amount,
        "used": standing.used,
        "remaining": standing.remaining,
        "reset_s": round(standing.reset_us / 1e6, 3),
    }


def _keys(now: Generation, tenant: str, wall: float) -> list[dict[str, Any]]:
    return [
        {
            "id": key.id,
            "state": "expired" if key.expired(wall) else "good",
            "expires": None if key.expires is None else iso(key.expires),
            "last_used": None if used is None else iso(used),
        }
        for key, used in now.keys.keys(tenant)
    ]
