"""From the configuration to the objects that serve it."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterable
from functools import partial
from random import Random
from secrets import token_hex
from urllib.parse import urlsplit

from gateway import schema
from gateway.auth import Key, KeyRing
from gateway.backend import Backend, Timeouts
from gateway.catalog import ANY, Catalog, Model, Tenant
from gateway.discovery import ACCOUNT, Cluster, Dns, Kubernetes, Source
from gateway.generation import Generation
from gateway.isolation import Seeds, salt
from gateway.pool import Pool
from gateway.poolschema import Discovery
from gateway.reply import Clock
from gateway.roster import Search
from gateway.sharedstore import SharedStore
from gateway.signals import Vocabulary, vocabularies
from gateway.stores import MemoryStore, Store
from gateway.tracing import Collector, Tracer
from gateway.vitals import installed_version
from gateway.watch import Plan
from policies.limits import Kind, Limit
from policies.retry import RetryBudget
from policies.rules import Rules
from policies.scheduler import Scheduler
from policies.types import BATCH, ClassPolicy
from policies.verdicts import HealthRules

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
                fallback=tuple(model.fallback),
            )
            for name, model in settings.models.items()
        ),
        created,
    )


def key_ring(settings: schema.Config, wall_clock: Clock, used: dict[bytes, float]) -> KeyRing:
    """The keys of all tenants; the configuration guarantees that there is an anonymous one on loopback only."""
    if not settings.tenants:
        return KeyRing([], Tenant(ANONYMOUS, classes=tuple(settings.classes)), wall_clock)
    return KeyRing(_keys(settings), None, wall_clock, used)


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
            content=told.content,
        )
        for number, key in enumerate(told.keys, 1):
            expires = key.expires.timestamp() if key.expires else None
            yield Key(key.id or f"{name}-{number}", bytes.fromhex(key.sha256), tenant, expires)


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


def seeds(settings: schema.Config) -> Seeds:
    """Keyed by the configured secret. Without one there is nobody to keep apart, and replicas and restarts must still
    agree on whose favourite a prompt is."""
    return Seeds(_secret(settings) or UNKEYED)


def _secret(settings: schema.Config) -> bytes:
    secret = settings.security.secret
    return secret.reveal().encode() if secret is not None else b""


def fit(pools: dict[str, Pool], settings: schema.Config, clock: Clock, rng: Random) -> None:
    """Make the pools what the configuration says: those that it names are changed, or made with their backends; others
    stay as they are. Which backends a pool has later is the fleet's to say."""
    classes = [_class(label, told) for label, told in settings.classes.items()]
    for name, told in settings.pools.items():
        pool = pools.get(name)
        if pool is None:
            scheduler = Scheduler(rng, routing=told.routing, classes=classes, rules=_rules(settings, name))
            retries = RetryBudget(retries=told.retries.attempts, share=told.retries.budget, rng=rng)
            pool = pools[name] = Pool(name, (), scheduler, retries, clock)
            _judging(pool, settings, told)
            pool.observe(backends(name, told))
        else:
            pool.configure(told.routing, classes, retries=told.retries.attempts, share=told.retries.budget)
            _judging(pool, settings, told)


def _judging(pool: Pool, settings: schema.Config, told: schema.Pool) -> None:
    """How the pool judges its backends from now on."""
    rules = told.health
    pool.probed = rules.interval > 0
    pool.health.configure(HealthRules(rules.unhealthy_after, rules.healthy_after, rules.eject), probed=pool.probed)
    if not pool.probed:
        pool.eligible.forget()  # nobody asks any more what they serve
    pool.eligible.want(_wanted(settings, pool.name))


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


def _wanted(settings: schema.Config, pool: str) -> dict[str, str]:
    """By label, what the backends of a pool call its models; those that clients name as they like are not known."""
    return {
        name: told.upstream_name or name for name, told in settings.models.items() if pool in told.pools and name != ANY
    }


def found(settings: schema.Config) -> dict[str, list[Backend]]:
    """The backends of each pool that names them itself."""
    return {name: backends(name, told) for name, told in settings.pools.items() if told.discovery is None}


def _scrape_s(interval_s: float, vocabulary: Vocabulary | None) -> float:
    """The configured pace, unless the engine needs more rest."""
    return max(interval_s, vocabulary.rest_s) if interval_s and vocabulary is not None else interval_s


def plans(settings: schema.Config) -> dict[str, Plan]:
    """How the backends of each pool are watched."""
    known = vocabularies()
    return {
        name: Plan(
            told.health_path,
            told.health.interval,
            _scrape_s(told.signals.interval, known.get(told.engine)),
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


def backend(settings: schema.Config, pool: str, url: str) -> Backend:
    """A backend of a pool that its configuration does not name."""
    return next(iter(backends(pool, settings.pools[pool].model_copy(update={"backends": (schema.Backend(url=url),)}))))


def searches(settings: schema.Config, rng: Random) -> dict[str, Search]:
    """Where the pools that do not name their backends look for them. Raises Undiscoverable."""
    found = {}
    for name, told in settings.pools.items():
        if told.discovery is not None:
            found[name] = Search(_source(told.discovery, rng), partial(backend, settings, name), told.discovery)
    return found


def _source(told: Discovery, rng: Random) -> Source:
    if told.dns is not None:
        host, _, port = told.dns.rpartition(":")
        return Dns(host, int(port))
    assert told.kubernetes is not None
    known = told.kubernetes
    cluster = Cluster.inside()
    namespace = known.namespace or (ACCOUNT / "namespace").read_text().strip()
    return Kubernetes(cluster, namespace, known.service, known.port, rng)


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
        speed=each.speed,
        region=each.region,
        cost_per_hour=each.cost_per_hour,
        bounds_itself="concurrency" not in each.model_fields_set,
    )
