"""From the configuration to the objects that serve it."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterable
from random import Random
from secrets import token_hex
from urllib.parse import urlsplit

from gateway import schema
from gateway.auth import Key, KeyRing
from gateway.backend import Backend, Timeouts
from gateway.catalog import ANY, Catalog, Model, Tenant
from gateway.isolation import Seeds, salt
from gateway.pool import Pool
from gateway.reply import Clock
from gateway.sharedstore import SharedStore
from gateway.stores import MemoryStore, Store
from gateway.tracing import Collector, Tracer
from gateway.vitals import installed_version
from policies.limits import Kind, Limit
from policies.retry import RetryBudget
from policies.rules import Rules
from policies.scheduler import Scheduler
from policies.types import BATCH, BackendView, ClassPolicy

ANONYMOUS = "anonymous"
UNKEYED = b"headrace"


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
            content=told.content,
        )
        for number, key in enumerate(told.keys, 1):
            expires = key.expires.timestamp() if key.expires else None
            yield Key(key.id or f"{name}-{number}", bytes.fromhex(key.sha256), tenant, expires)


def tracer(settings: schema.Config, rng: Random) -> Tracer | None:
    """None where the configuration names no collector."""
    told = settings.telemetry
    if told.otlp is None:
        return None
    resource = {
        "service.name": "headrace",
        "service.version": installed_version(),
        "service.instance.id": f"{socket.gethostname()}:{settings.server.listen.port}:{os.getpid()}",
    }
    return Tracer(Collector(told.otlp.reveal(), resource), told.sample, rng)


def limits(settings: schema.Config) -> dict[str, list[Limit]]:
    """The limits of each tenant, those for all its models together first."""
    return {
        name: [
            *_limits("", tenant.limits),
            *(each for model, told in tenant.limits.models.items() for each in _limits(model, told)),
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


def store(settings: schema.Config, clock: Clock) -> Store:
    """Where limits are counted."""
    told, url = settings.state, settings.state.url.reveal()

    def clock_us() -> int:
        return int(clock() * 1e6)

    if url == "memory":
        return MemoryStore(clock_us)
    return SharedStore(url, told.on_failure, clock_us, replica=token_hex(8), replicas=told.replicas)


def seeds(settings: schema.Config) -> Seeds:
    """Keyed by the configured secret. Without one there is nobody to keep apart, and replicas and restarts must still
    agree on whose favourite a prompt is."""
    return Seeds(_secret(settings) or UNKEYED)


def _secret(settings: schema.Config) -> bytes:
    secret = settings.security.secret
    return secret.reveal().encode() if secret is not None else b""


def pools(settings: schema.Config, clock: Clock, rng: Random) -> Iterable[Pool]:
    """Every pool with its backends, all taken to be open."""
    classes = [_class(name, told) for name, told in settings.classes.items()]
    for name, told in settings.pools.items():
        scheduler = Scheduler(rng, routing=told.routing, classes=classes, rules=_rules(settings, name))
        views = [BackendView(each.url, concurrency=each.concurrency, speed=each.speed) for each in told.backends]
        scheduler.observe(views, clock())
        retries = RetryBudget(retries=told.retries.attempts, share=told.retries.budget, rng=rng)
        yield Pool(name, [_backend(name, each.url, told) for each in told.backends], scheduler, retries, clock)


def _rules(settings: schema.Config, pool: str) -> Rules:
    """The scheduler's constants, with the strictest promise that a model of the pool makes its streams."""
    promised = [model.slo.itl for model in settings.models.values() if model.pool == pool and model.slo.itl]
    return Rules(objective_s=min(promised)) if promised else Rules()


def _class(name: str, told: schema.Class) -> ClassPolicy:
    """What may fill only a part of a pool is work that nobody watches: its streams have no objective."""
    background = told.ceiling < 1.0
    return ClassPolicy(
        name,
        told.max_queued,
        told.max_queued_tokens,
        max_wait_s=told.max_wait,
        paced=not background,
        ceiling=told.ceiling,
        kv_ceiling=BATCH.kv_ceiling if background else 1.0,
        floor=told.floor,
    )


def _backend(pool: str, url: str, told: schema.Pool) -> Backend:
    parts = urlsplit(url)
    clocks = told.timeouts
    return Backend(
        name=url,
        pool=pool,
        host=parts.hostname or "",
        port=parts.port or (443 if parts.scheme == "https" else 80),
        host_header=parts.netloc.encode(),
        prefix=parts.path.rstrip("/").encode(),
        tls=ssl.create_default_context() if parts.scheme == "https" else None,
        authorization=b"Bearer " + told.api_key.reveal().encode() if told.api_key else None,
        timeouts=Timeouts(clocks.connect, clocks.headers, clocks.first_token, clocks.idle, clocks.total),
    )
