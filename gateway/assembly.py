"""From the configuration to the objects that serve it."""

from __future__ import annotations

import os
import socket
import ssl
from functools import partial
from random import Random
from secrets import token_hex
from urllib.parse import urlsplit

from gateway import schema
from gateway.backend import Backend, Timeouts
from gateway.catalog import ANY
from gateway.discovery import ACCOUNT, Cluster, Dns, Kubernetes, Source
from gateway.pool import Pool
from gateway.poolschema import Discovery
from gateway.reply import Clock
from gateway.roster import Search
from gateway.sharedstore import SharedStore
from gateway.signals import Vocabulary, vocabularies
from gateway.stores import MemoryStore, Store
from gateway.tracing import Collector, Tracer
from gateway.vitals import installed_version
from gateway.waking import Waking
from gateway.watch import Plan
from policies.retry import Hedging, RetryBudget
from policies.rules import Rules
from policies.scheduler import Scheduler
from policies.types import BATCH, ClassPolicy
from policies.verdicts import HealthRules


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
            _judging(pool, settings, told, clock)
            pool.observe(backends(name, told))
        else:
            pool.configure(told.routing, classes, retries=told.retries.attempts, share=told.retries.budget)
            _judging(pool, settings, told, clock)


def _judging(pool: Pool, settings: schema.Config, told: schema.Pool, clock: Clock) -> None:
    """How the pool judges its backends and waits for them from now on, and how long for one of them."""
    rules, hedge = told.health, told.retries.hedge
    pool.hedging = Hedging(hedge.after, hedge.prompt_tokens) if hedge is not None else None
    pool.probed = rules.interval > 0
    pool.health.configure(HealthRules(rules.unhealthy_after, rules.healthy_after, rules.eject), probed=pool.probed)
    if not pool.probed:
        pool.eligible.forget()  # nobody asks any more what they serve
    pool.eligible.want(_wanted(settings, pool.name))
    if told.wake is None:
        if pool.waking is not None:
            pool.waking.see(awake=True)  # who is held asks once more, and is refused
        pool.waking = None
    elif pool.waking is None:
        pool.waking = Waking(told.wake.hold, told.wake.max_held, clock)
    else:
        pool.waking.configure(told.wake.hold, told.wake.max_held)


def _rules(settings: schema.Config, pool: str) -> Rules:
    """The scheduler's constants, with the strictest promise that a model of the pool makes its streams."""
    promised = [
        model.slo.itl
        for model in settings.models.values()
        if model.slo.itl and pool in (model.pool, model.canary and model.canary.pool)
    ]
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
        return Dns(host, int(port), told.nameserver)
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
        revision=each.revision or told.revision,
        bounds_itself="concurrency" not in each.model_fields_set,
    )
