"""From the configuration to the objects that serve it."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from random import Random
from secrets import token_bytes
from urllib.parse import urlsplit

from gateway import schema
from gateway.auth import Key, KeyRing
from gateway.backend import Backend, Timeouts
from gateway.catalog import ANY, Catalog, Model, Tenant
from gateway.isolation import Seeds, salt
from gateway.pool import Pool
from gateway.reply import Clock
from gateway.signals import vocabularies
from gateway.watch import Plan
from policies.health import Health, HealthRules
from policies.retry import RetryBudget
from policies.scheduler import Scheduler
from policies.types import ClassPolicy

ANONYMOUS = "anonymous"


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
            )
            for name, model in settings.models.items()
        ),
        created,
    )


def key_ring(settings: schema.Config, wall_clock: Clock) -> KeyRing:
    """The keys of all tenants; the configuration guarantees that there is an anonymous one on loopback only."""
    if not settings.tenants:
        return KeyRing([], Tenant(ANONYMOUS, classes=tuple(settings.classes)), wall_clock)
    return KeyRing(_keys(settings), None, wall_clock)


def _keys(settings: schema.Config) -> Iterable[Key]:
    secret = _secret(settings)
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
        )
        for number, key in enumerate(told.keys, 1):
            expires = key.expires.timestamp() if key.expires else None
            yield Key(key.id or f"{name}-{number}", bytes.fromhex(key.sha256), tenant, expires)


def seeds(settings: schema.Config) -> Seeds:
    """Keyed by the configured secret, so that replicas agree, or by one of this process."""
    return Seeds(_secret(settings) or token_bytes(32))


def _secret(settings: schema.Config) -> bytes:
    secret = settings.security.secret
    return secret.reveal().encode() if secret is not None else b""


def pools(settings: schema.Config, clock: Clock, rng: Random) -> Iterable[Pool]:
    """Every pool with its backends, all taken to be open."""
    classes = [
        ClassPolicy(
            name,
            told.max_queued,
            told.max_queued_tokens,
            max_wait_s=told.max_wait,
            ceiling=told.ceiling,
        )
        for name, told in settings.classes.items()
    ]
    for name, told in settings.pools.items():
        scheduler = Scheduler(rng, routing=told.routing, classes=classes)
        retries = RetryBudget(retries=told.retries.attempts, share=told.retries.budget, rng=rng)
        rules = HealthRules(told.health.unhealthy_after, told.health.healthy_after, told.health.eject)
        probed = told.health.interval > 0
        pool = Pool(name, backends(name, told), scheduler, retries, clock, Health(rules), probed=probed)
        pool.eligible.want(_wanted(settings, name))
        yield pool


def _wanted(settings: schema.Config, pool: str) -> dict[str, str]:
    """By label, what the backends of a pool call its models; those that clients name as they like are not known."""
    return {
        name: told.upstream_name or name for name, told in settings.models.items() if told.pool == pool and name != ANY
    }


def plans(settings: schema.Config) -> dict[str, Plan]:
    """How the backends of each pool are watched."""
    known = vocabularies()
    return {
        name: Plan(
            told.health_path,
            told.health.interval,
            told.signals.interval,
            known.get(told.engine),
            told.signals.path or "",
            guessed=told.health.path is None,
            strict=told.engine not in (schema.Engine.LLAMACPP, schema.Engine.TGI),
        )
        for name, told in settings.pools.items()
    }


def backends(pool: str, told: schema.Pool) -> list[Backend]:
    """The backends that a pool names."""
    tls = ssl.create_default_context() if any(each.url.startswith("https:") for each in told.backends) else None
    return [_backend(pool, each, told, tls) for each in told.backends]


def _backend(pool: str, each: schema.Backend, told: schema.Pool, tls: ssl.SSLContext | None) -> Backend:
    parts = urlsplit(each.url)
    clocks = told.timeouts
    return Backend(
        name=each.url,
        pool=pool,
        host=parts.hostname or "",
        port=parts.port or (443 if parts.scheme == "https" else 80),
        host_header=parts.netloc.encode(),
        prefix=parts.path.rstrip("/").encode(),
        tls=tls if parts.scheme == "https" else None,
        authorization=b"Bearer " + told.api_key.reveal().encode() if told.api_key else None,
        timeouts=Timeouts(clocks.connect, clocks.headers, clocks.first_token, clocks.idle, clocks.total),
        concurrency=each.concurrency,
        bounds_itself="concurrency" not in each.model_fields_set,
        speed=each.speed,
        region=each.region,
        cost_per_hour=each.cost_per_hour,
    )
