"""From the configuration to who may use what: keys, tenants, limits, models."""

from __future__ import annotations

import time
from collections.abc import Iterable

from gateway import consistency, schema
from gateway.auth import Key, KeyRing
from gateway.catalog import ANY, Canary, Catalog, Model, Shadow, Tenant, label
from gateway.generation import Generation
from gateway.isolation import Seeds, salt
from gateway.reply import Clock
from policies.limits import Kind, Limit
from policies.rollout import seed

ANONYMOUS = "anonymous"
UNKEYED = b"headrace"


def generation(number: int, settings: schema.Config, created: int, used: dict[bytes, float]) -> Generation:
    """What requests are judged by under this configuration. `used` is what key rings know of earlier use."""
    return Generation(
        number,
        settings,
        key_ring(settings, time.time, used),
        catalog(settings, created),
        frozenset(origin.encode() for origin in settings.server.cors),
    )


def catalog(settings: schema.Config, created: int) -> Catalog:
    """All models, with how their pools' engines are to be spoken to."""
    return Catalog(
        (
            Model(
                name,
                model.pool,
                model.upstream_name or (None if name == ANY else name),
                tuple(model.aliases),
                takes_salt=settings.pools[model.pool].isolates,
                ignores_case=any(settings.pools[pool].engine.ignores_case for pool in model.pools),
                fallback=tuple(model.fallback),
                canary=_canary(settings, name, model),
                shadow=_shadow(model),
            )
            for name, model in settings.models.items()
        ),
        created,
    )


def _canary(settings: schema.Config, name: str, model: schema.Model) -> Canary | None:
    told = model.canary
    if told is None:
        return None
    return Canary(
        model.pool,
        told.weight,
        seed(_secret(settings) or UNKEYED, name),
        told.pool,
        frozenset(told.backends),
        by_conversation=told.sticky == "conversation",
    )


def _shadow(model: schema.Model) -> Shadow | None:
    told = model.shadow
    return None if told is None else Shadow(told.pool, told.sample, told.at_once)


def key_ring(settings: schema.Config, wall_clock: Clock, used: dict[bytes, float]) -> KeyRing:
    """The keys of all tenants; the configuration guarantees that there is an anonymous one on loopback only."""
    if not settings.tenants:
        return KeyRing([], Tenant(ANONYMOUS, classes=tuple(settings.classes)), wall_clock)
    return KeyRing(_keys(settings), None, wall_clock, used)


def _keys(settings: schema.Config) -> Iterable[Key]:
    secret = _secret(settings)
    shared = [pool for pool, groups in consistency.groups(settings).items() if len(groups) > 1]
    for name, told in settings.tenants.items():
        group = told.trust_group or name
        tenant = Tenant(
            name,
            tuple(told.models),
            tuple(told.classes),
            told.weight,
            trust_group=group,
            salt=salt(secret, group) if secret else "",
            operator=told.operator,
            residency=tuple(told.residency),
            content=told.content,
            connections=told.limits.connections,
            apart=frozenset(shared if told.isolation else ()),
        )
        for number, key in enumerate(told.keys, 1):
            expires = key.expires.timestamp() if key.expires else None
            yield Key(key.id or f"{name}-{number}", bytes.fromhex(key.sha256), tenant, expires)


def limits(settings: schema.Config) -> dict[str, list[Limit]]:
    """The limits of each tenant, those for all its models together first; models go by their labels."""
    return {
        name: [
            *_limits("", tenant.limits),
            *(each for model, told in tenant.limits.models.items() for each in _limits(label(model), told)),
        ]
        for name, tenant in settings.tenants.items()
    }


def _limits(model: str, told: schema.Limits) -> Iterable[Limit]:
    for kind, amount in (
        (Kind.REQUESTS, told.requests_per_minute),
        (Kind.TOKENS, told.tokens_per_minute),
    ):
        if amount is not None:
            yield Limit(kind, amount, max(1, round(amount * told.burst)), model)
    if told.concurrent is not None:
        yield Limit(Kind.CONCURRENT, told.concurrent, model=model)


def seeds(settings: schema.Config) -> Seeds:
    """Keyed by the configured secret. Without one there is nobody to keep apart, and replicas and restarts must still
    agree on whose favourite a prompt is."""
    return Seeds(_secret(settings) or UNKEYED)


def _secret(settings: schema.Config) -> bytes:
    secret = settings.security.secret
    return secret.reveal().encode() if secret is not None else b""
