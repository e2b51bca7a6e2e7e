"""The configuration file as frozen types: every key, its default and its meaning.

The tables of docs/configuration.md are made from here. What only several keys together can get wrong is in
consistency.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import model_validator

from gateway.address import Address, BackendUrl, Listener, Origin
from gateway.poolschema import Discovery, Health, Retries, Signals, Timeouts, Wake
from gateway.rolloutschema import Canary, Shadow
from gateway.secret import CollectorUrl, PemFile, Secret, SecretText, StoreUrl
from gateway.section import KeyHash, Name, Names, Section, if_empty, option
from gateway.units import Bytes, Count, Flag, Instant, Number, Seconds, Share

ANY_MODEL = "*"
"""The model that stands for every name that no other model has; such names are forwarded as they are."""

# The two classes that always exist, most urgent first. Tokens: what a pool of some 8 GPUs prefills in `max_wait`.
_CLASSES: dict[str, dict[str, object]] = {
    "interactive": {"max_queued": 256, "max_queued_tokens": 2_000_000, "max_wait": 10.0, "ceiling": 1.0},
    "batch": {
        "max_queued": 4096,
        "max_queued_tokens": 32_000_000,
        "max_wait": 900.0,
        "ceiling": 0.7,
        "floor": 0.05,
    },
}


def matches(glob: str, name: str) -> bool:
    """Whether a pattern of a tenant's `models` means this name; a name with `[` or `*` in it means itself, too."""
    return name == glob or fnmatchcase(name, glob)


def _with(defaults: Mapping[str, object], values: Any) -> Any:
    return {**defaults, **(values or {})} if isinstance(values or {}, dict) else values


class Tls(Section):
    """The certificate of the API."""

    cert: PemFile = option(..., "certificate chain, a PEM file")
    key: PemFile = option(..., "its private key, a PEM file")


class Server(Section):
    """The two listeners and what they accept."""

    listen: Listener = option(Address("127.0.0.1", 8080), "the API")
    admin: Listener = option(Address("127.0.0.1", 9090), "health, metrics, console and admin")
    admin_token: SecretText | None = option(
        None, "what the admin API asks for; without it only health and metrics answer"
    )
    tls: Annotated[Tls | None, if_empty(None)] = option(None, "serve the API over TLS")
    cors: Annotated[tuple[Origin, ...], if_empty(())] = option((), "origins whose pages may call the API")
    max_body: Bytes = option(64 * 2**20, "largest request body", ge=1)
    max_buffered: Bytes = option(256 * 2**20, "request bodies held at once, all together", ge=1)
    max_connections: Count = option(10_000, "open client connections", ge=1)
    max_header_bytes: Bytes = option(64 * 2**10, "request line and headers of one request", ge=1024)
    header_timeout: Seconds = option(10.0, "from the connection to the end of the headers", gt=0)
    body_timeout: Seconds = option(300.0, "from the headers to the end of the body, which may pause for 30s", gt=0)
    keep_alive: Seconds = option(75.0, "an idle connection is kept so long; longer than the load balancer's own", gt=0)
    linger: Seconds = option(0.0, "requests are still served so long after SIGTERM, until balancers have noticed")
    drain: Seconds = option(30.0, "then running requests may go on so long")


class Engine(StrEnum):
    """What runs on the backends of a pool."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TGI = "tgi"
    LLAMACPP = "llamacpp"
    OLLAMA = "ollama"
    TRTLLM = "trtllm"
    OPENAI = "openai"

    @property
    def isolates(self) -> bool:
        """Whether a salt in the request keeps one tenant's cached prefixes from another."""
        return self in (Engine.VLLM, Engine.SGLANG, Engine.TRTLLM)

    @property
    def ignores_case(self) -> bool:
        """Whether keys may mean the same in any case: they do to Go's JSON decoder, and so to Ollama."""
        return self in (Engine.OLLAMA, Engine.OPENAI)


class Backend(Section):
    """One engine."""

    url: BackendUrl = option(..., "base URL, http or https; a final `/v1` is dropped")
    concurrency: Count = option(1024, "most requests in flight there: the engine's own limit", ge=1)
    region: Name | None = option(None, "where it stands, for `residency`")
    cost_per_hour: Number = option(0.0, "its price, for the usage report")
    revision: Name | None = option(None, "revision of the model there, for traces; the pool's if left out")
    speed: Number = option(1.0, "prefill speed relative to the other backends of the pool", gt=0)


class Pool(Section):
    """Backends that can stand in for each other."""

    engine: Engine = option(Engine.OPENAI, "what runs there; `openai` for anything that speaks its API")
    backends: Annotated[tuple[Backend, ...], if_empty(())] = option((), "the backends")
    discovery: Annotated[Discovery | None, if_empty(None)] = option(None, "or where to find them")
    revision: Name | None = option(None, "revision of the model that they serve, for traces")
    api_key: SecretText | None = option(None, "sent to the backends; the caller's own key never is")
    routing: Literal["round_robin", "least_tokens", "prefix_affinity", "price"] = option(
        "price", "which backend is next"
    )
    isolation: Flag | None = option(
        None, "a salt keeps tenants' caches apart there; if left out, so on vllm, sglang, trtllm"
    )
    health: Health = option(Health(), "who gets no work")
    signals: Signals = option(Signals(), "what the engines tell of themselves")
    timeouts: Timeouts = option(Timeouts(), "the five clocks")
    retries: Retries = option(Retries(), "tries on other backends")
    wake: Annotated[Wake | None, if_empty(None)] = option(None, "it may be scaled to zero; refused at once if left out")

    @property
    def isolates(self) -> bool:
        """`isolation` as declared, or as the engine is known to be."""
        return self.engine.isolates if self.isolation is None else self.isolation

    @property
    def health_path(self) -> str:
        """`health.path` as declared, or what the engine answers without a token once it can serve."""
        known = {Engine.OLLAMA: "/", Engine.OPENAI: "/v1/models"}
        return self.health.path or known.get(self.engine, "/health")


class Slo(Section):
    """What counts as good."""

    ttft: Seconds | None = option(None, "time to the first token", gt=0)
    itl: Seconds | None = option(
        None,
        "time between two tokens; the strictest in a pool paces its prefills (100ms if left out)",
        gt=0,
    )


class Model(Section):
    """A name that clients may ask for. `*` forwards every other name as it is."""

    pool: str = option("", "who serves it; may be left out while there is one pool")
    upstream_name: Name | None = option(None, "its name on the backends, if another")
    aliases: Names = option((), "further names for clients")
    slo: Slo = option(Slo(), "objectives")
    fallback: Names = option((), "pools that serve it too, in this order, when its own cannot")
    canary: Annotated[Canary | None, if_empty(None)] = option(None, "a new version that gets a part of its requests")
    shadow: Annotated[Shadow | None, if_empty(None)] = option(None, "a pool on trial that gets copies of some")

    @property
    def pools(self) -> tuple[str, ...]:
        """Every pool where its requests, or copies of them, may go."""
        new = (self.canary.pool,) if self.canary is not None and self.canary.pool else ()
        copied = (self.shadow.pool,) if self.shadow is not None else ()
        return (self.pool, *self.fallback, *new, *copied)


class Class(Section):
    """A class of requests. The order in the file is the order of urgency."""

    max_queued: Count = option(256, "requests that may wait in a pool; 4096 for `batch`", ge=1)
    max_queued_tokens: Count = option(2_000_000, "prompt tokens that may wait in a pool; 32M for `batch`", ge=1)
    max_wait: Seconds = option(10.0, "longest wait; 15m for `batch`", gt=0)
    ceiling: Share = option(1.0, "share of a pool that the class may fill; 70% for `batch`", gt=0)
    floor: Share = option(0.0, "share of the tokens that it gets although others could use all; 5% for `batch`")


class Key(Section):
    """A key, known only by its hash."""

    sha256: KeyHash = option(..., "lower-case hexadecimal SHA-256 of the key as sent")
    id: Name | None = option(None, "its name in logs; unique in the tenant")
    expires: Instant | None = option(None, "from then on it is refused")


class Limits(Section):
    """What may be used. A key that is left out sets no limit."""

    requests_per_minute: Count | None = option(None, "requests started", ge=1)
    tokens_per_minute: Count | None = option(None, "prompt and output tokens", ge=1)
    concurrent: Count | None = option(None, "requests at once", ge=1)
    burst: Share = option(1.0, "share of a minute's limit that may be used at one moment", gt=0)


class TenantLimits(Limits):
    """The limits of a tenant, in all and for single models."""

    connections: Count | None = option(None, "client connections open at once, of one gateway", ge=1)
    models: Annotated[Mapping[Name, Limits], if_empty({})] = option({}, "further limits by model")


class Tenant(Section):
    """Who pays. With no tenants at all everybody on this machine is one, called anonymous."""

    keys: Annotated[tuple[Key, ...], if_empty(())] = option((), "keys of the tenant; without one nobody is it")
    models: Names = option(("*",), "models it may use; names, aliases or patterns with `*` and `?`")
    classes: Names = option(("interactive", "batch"), "classes it may use", min_length=1)
    weight: Number = option(1.0, "its share of a full pool, relative to other tenants", gt=0)
    limits: TenantLimits = option(TenantLimits(), "limits")
    trust_group: Name | None = option(None, "tenants of one group share cached prefixes; alone if left out")
    isolation: Flag = option(False, "never serve it where another tenant's cache cannot be kept apart")
    residency: Names = option((), "only backends of these regions; any if left out")
    content: Flag = option(False, "its prompts stand in traces; nobody's do otherwise")
    operator: Flag = option(False, "its answers tell which backend served them and why")

    def allows(self, *names: str) -> bool:
        """Whether a model that goes by these names is one that the tenant may use."""
        return any(matches(glob, name) for glob in self.models for name in names)


class State(Section):
    """Where limits are counted."""

    url: StoreUrl = option(Secret("memory", "memory"), "`memory` (one process) or redis://host:6379/0, rediss://...")
    on_failure: Literal["local_share", "deny", "allow"] = option("local_share", "what holds while the store is away")
    replicas: Count = option(1, "gateways that share the store: each one's part until they have met there", ge=1)


class Security(Section):
    """Isolation of tenants."""

    secret: SecretText | None = option(None, "keys the cache salts; required once two tenants share a pool")


class Telemetry(Section):
    """What is told to the outside."""

    otlp: CollectorUrl | None = option(None, "OTLP collector over HTTP; no traces if left out")
    sample: Share = option(0.05, "share of the good requests that are traced; bad ones always are")
    log: Literal["json", "text", "off"] = option("json", "one line per request on stderr")
    log_sample: Share = option(1.0, "share of the good requests that get a line; bad ones always do")
    tenants: Count = option(200, "tenants, from the first in the file, with series of their own; the rest is `other`")


class Config(Section):
    """The whole file."""

    server: Server = option(Server(), "listeners")
    pools: Annotated[Mapping[Name, Pool], if_empty({})] = option({}, "backends, by name of the pool")
    models: Annotated[Mapping[Name, Model], if_empty({})] = option({}, "models, by name")
    classes: Annotated[Mapping[Name, Class], if_empty({})] = option(
        {}, "classes; `interactive` and `batch` always exist"
    )
    tenants: Annotated[Mapping[Name, Tenant], if_empty({})] = option({}, "tenants, by name")
    state: State = option(State(), "where limits are counted")
    security: Security = option(Security(), "isolation of tenants")
    telemetry: Telemetry = option(Telemetry(), "logs and traces")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Fills in what depends on names: the defaults of the known classes, and the pool if there is one."""
        if not isinstance(data, dict):
            return data
        full = dict(data)
        pools, models, classes = (data.get(name) or {} for name in ("pools", "models", "classes"))
        if isinstance(classes, dict):
            first = () if "interactive" in classes else ("interactive",)
            order = dict.fromkeys((*first, *classes, "batch"))
            full["classes"] = {name: _with(_CLASSES.get(name, {}), classes.get(name)) for name in order}
        if isinstance(models, dict) and isinstance(pools, dict) and len(pools) == 1:
            full["models"] = {name: _with({"pool": next(iter(pools))}, values) for name, values in models.items()}
        return full
