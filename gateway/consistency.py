"""What only several keys together can get wrong. Each rule yields its findings: where, and what is wrong there."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Set

from gateway.catalog import OTHER
from gateway.problem import Loc, dotted, shown, suggestion
from gateway.schema import ANY_MODEL, Config, Tenant, matches

Finding = tuple[Loc, str]
Rule = Callable[[Config], Iterator[Finding]]


def inconsistencies(config: Config, unread: Set[Loc] = frozenset()) -> Iterator[Finding]:
    """All findings, but none that could be owed to the parts in `unread`, which stand at their defaults."""
    if any(len(loc) == 1 for loc in unread):
        return  # a whole section: nearly everything that names something in it would be a finding
    torn = {str(loc[0]) for loc in unread}
    for sections, rule in _RULES:
        if torn.isdisjoint(sections):
            yield from (found for found in rule(config) if not any(_related(found[0], loc) for loc in unread))


def _related(one: Loc, other: Loc) -> bool:
    return one[: len(other)] == other or other[: len(one)] == one


def _required(config: Config) -> Iterator[Finding]:
    if not config.pools:
        yield ("pools",), "is required: name at least one pool with its backends"
    if not config.models:
        yield ("models",), f"is required: name at least one model ({shown(ANY_MODEL)} stands for any)"


def _pool_of_each_model(config: Config) -> Iterator[Finding]:
    for name, model in config.models.items():
        loc = ("models", name, "pool")
        if not model.pool and config.pools:
            yield loc, "is required, as there are several pools" + suggestion("", config.pools, "pools")
        elif model.pool and model.pool not in config.pools:
            yield loc, f"there is no pool {shown(model.pool)}" + suggestion(model.pool, config.pools, "pools")


def _fallbacks(config: Config) -> Iterator[Finding]:
    for name, model in config.models.items():
        for index, pool in enumerate(model.fallback):
            loc = ("models", name, "fallback", index)
            if pool not in config.pools:
                yield loc, f"there is no pool {shown(pool)}" + suggestion(pool, config.pools, "pools")
            elif pool in model.pools[: index + 1]:
                yield loc, "stands there already: name each pool once"
            elif model.pool in config.pools and config.pools[pool].isolates != config.pools[model.pool].isolates:
                yield loc, f"keeps tenants' caches apart in another way than {shown(model.pool)}: choose one alike"


def _canaries(config: Config) -> Iterator[Finding]:
    for name, model in config.models.items():
        canary, loc, own = model.canary, ("models", name, "canary"), config.pools.get(model.pool)
        if canary is None or own is None:
            continue
        if bool(canary.pool) == bool(canary.backends):
            yield loc, "needs either pool or backends: what runs the new version"
        elif canary.pool and canary.pool not in config.pools:
            yield (
                (*loc, "pool"),
                f"there is no pool {shown(canary.pool)}" + suggestion(canary.pool, config.pools, "pools"),
            )
        elif canary.pool in (model.pool, *model.fallback):
            yield (*loc, "pool"), "serves the model already: the new version needs a pool of its own"
        elif canary.pool and config.pools[canary.pool].isolates != own.isolates:
            yield (*loc, "pool"), f"keeps tenants' caches apart in another way than {shown(model.pool)}"
        elif canary.backends and not own.discovery:
            known = [backend.url for backend in own.backends]
            for index, url in enumerate(canary.backends):
                if url not in known:
                    yield (
                        (*loc, "backends", index),
                        f"is no backend of {shown(model.pool)}" + suggestion(url, known, "backends"),
                    )
            if set(known) <= set(canary.backends):
                yield (*loc, "backends"), f"are all backends of {shown(model.pool)}: the old version needs some, too"


def _shadows(config: Config) -> Iterator[Finding]:
    for name, model in config.models.items():
        shadow, loc, own = model.shadow, ("models", name, "shadow", "pool"), config.pools.get(model.pool)
        if shadow is None or own is None:
            continue
        if shadow.pool not in config.pools:
            yield loc, f"there is no pool {shown(shadow.pool)}" + suggestion(shadow.pool, config.pools, "pools")
        elif shadow.pool in (model.pool, *model.fallback, model.canary and model.canary.pool):
            yield loc, "serves the model already: copies would be in its way"
        elif config.pools[shadow.pool].isolates != own.isolates:
            yield loc, f"keeps tenants' caches apart in another way than {shown(model.pool)}"


def _aliases(config: Config) -> Iterator[Finding]:
    owners: dict[str, str] = {}
    for name, model in config.models.items():
        for index, alias in enumerate(model.aliases):
            loc = ("models", name, "aliases", index)
            if alias in config.models:
                fix = "remove the alias" if alias == name else "remove the alias or rename the model"
                yield loc, f"is the name of a model: {fix}"
            elif alias in owners:
                yield loc, f"is an alias of {shown(owners[alias])} already: an alias belongs to one model"
            owners.setdefault(alias, name)
        if name == ANY_MODEL and (model.aliases or model.upstream_name):
            yield ("models", name), "stands for any name, so it has neither aliases nor an upstream_name"
        if name == OTHER and ANY_MODEL in config.models:
            yield ("models", name), f"is what limits and metrics call the models of {ANY_MODEL}: choose another name"


def _backends(config: Config) -> Iterator[Finding]:
    for name, pool in config.pools.items():
        if bool(pool.backends) == bool(pool.discovery):
            yield ("pools", name), "needs either backends (such as [{url: http://10.0.0.11:8000}]) or discovery"
        if pool.discovery and bool(pool.discovery.dns) == bool(pool.discovery.kubernetes):
            yield ("pools", name, "discovery"), "needs either dns (such as vllm.models.svc:8000) or kubernetes"
        first: dict[str, int] = {}
        for index, backend in enumerate(pool.backends):
            if first.setdefault(backend.url, index) != index:
                loc = ("pools", name, "backends", index, "url")
                yield loc, f"is the same backend as backends[{first[backend.url]}]: keep one"


def _clocks(config: Config) -> Iterator[Finding]:
    # Only what is contradictory as written: a short `total` beside the other clocks' defaults is legal.
    for name, pool in config.pools.items():
        clocks = pool.timeouts
        if {"connect", "total"} <= clocks.model_fields_set and clocks.connect >= clocks.total:
            yield ("pools", name, "timeouts", "connect"), "must be shorter than total"


def _hedges(config: Config) -> Iterator[Finding]:
    for name, pool in config.pools.items():
        if pool.retries.hedge is not None and not pool.retries.attempts:
            yield ("pools", name, "retries", "hedge"), "is a retry, and attempts is 0: allow at least one"


def _keys(config: Config) -> Iterator[Finding]:
    owners: dict[str, Loc] = {}
    for name, tenant in config.tenants.items():
        ids: dict[str, int] = {}
        for index, key in enumerate(tenant.keys):
            loc = ("tenants", name, "keys", index)
            if (owner := owners.setdefault(key.sha256, loc)) != loc:
                yield (*loc, "sha256"), f"is the same key as {dotted(owner)}: a key belongs to one tenant, once"
            if key.id is not None and ids.setdefault(key.id, index) != index:
                yield (*loc, "id"), f"is also the id of keys[{ids[key.id]}]: ids are unique in a tenant"


def _classes(config: Config) -> Iterator[Finding]:
    for name in config.classes:
        if not re.fullmatch(r"[!-~]+", name):
            yield ("classes", name), "stands in headers of requests and answers: write it in ASCII, without blanks"
    for name, tenant in config.tenants.items():
        for index, label in enumerate(tenant.classes):
            if label not in config.classes:
                loc = ("tenants", name, "classes", index)
                yield loc, f"there is no class {shown(label)}" + suggestion(label, config.classes, "classes")


def _models_of_each_tenant(config: Config) -> Iterator[Finding]:
    names = [*config.models, *(alias for model in config.models.values() for alias in model.aliases)]
    for tenant_name, tenant in config.tenants.items():
        for index, glob in enumerate(tenant.models):
            if ANY_MODEL not in config.models and not any(matches(glob, known) for known in names):
                unmatched = f"matches no model: {shown(glob)}" + suggestion(glob, names, "models")
                yield ("tenants", tenant_name, "models", index), unmatched
        for name in tenant.limits.models:
            if name not in config.models:
                unknown = "there is no such model (aliases share its limits)" + suggestion(
                    name, config.models, "models"
                )
                yield ("tenants", tenant_name, "limits", "models", name), unknown


def _pools_of(config: Config, tenant: Tenant) -> dict[str, None]:
    """The pools whose models the tenant may use, in the order of the file."""
    known = {*config.models, *(alias for model in config.models.values() for alias in model.aliases)}
    reaches_any = any(glob not in known or "*" in glob or "?" in glob for glob in tenant.models)
    pools: dict[str, None] = {}
    for name, model in config.models.items():
        if reaches_any if name == ANY_MODEL else tenant.allows(name, *model.aliases):
            pools.update(dict.fromkeys(pool for pool in model.pools if pool in config.pools))
    return pools


def _residency(config: Config) -> Iterator[Finding]:
    for name, tenant in config.tenants.items():
        pools = [config.pools[pool] for pool in _pools_of(config, tenant)]
        regions = {backend.region for pool in pools for backend in pool.backends if backend.region is not None}
        for index, region in enumerate(tenant.residency):
            if region not in regions and not any(pool.discovery for pool in pools):
                loc = ("tenants", name, "residency", index)
                missing = f"no backend that the tenant may use is in region {shown(region)}"
                yield loc, missing + suggestion(region, regions, "regions")


def _trust_groups(config: Config) -> Iterator[Finding]:
    for name, tenant in config.tenants.items():
        other = config.tenants.get(tenant.trust_group or "")
        if other and tenant.trust_group != name and other.trust_group is None:
            message = "is the name of a tenant that is in no group: name the group there too, or choose another name"
            yield ("tenants", name, "trust_group"), message


def _shared_pools(config: Config) -> Iterator[Finding]:
    users: dict[str, list[str]] = {}
    for name, tenant in config.tenants.items():
        for pool in _pools_of(config, tenant):
            users.setdefault(pool, []).append(name)
    for pool, names in users.items():
        if len(names) > 1 and config.security.secret is None:
            who = f"tenants {shown(names[0])} and {shown(names[1])} share the pool {shown(pool)}"
            yield ("security", "secret"), f"is required, as {who}: write secret: env:HEADRACE_SECRET"
            break
    for pool, names in users.items():
        if not config.pools[pool].isolates:
            yield from _mixed(config, pool, names)


def groups(config: Config) -> dict[str, set[str]]:
    """The trust groups whose tenants may use each pool."""
    found: dict[str, set[str]] = {}
    for name, tenant in config.tenants.items():
        for pool in _pools_of(config, tenant):
            found.setdefault(pool, set()).add(tenant.trust_group or name)
    return found


def _mixed(config: Config, pool: str, names: list[str]) -> Iterator[Finding]:
    """The tenants that require isolation on a pool that has none and also serves another trust group."""
    groups: dict[str, str] = {}
    for name in names:
        groups.setdefault(config.tenants[name].trust_group or name, name)
    for name in names:
        own = config.tenants[name].trust_group or name
        neighbour = next((first for group, first in groups.items() if group != own), None)
        if config.tenants[name].isolation and neighbour:
            what = f"the pool {shown(pool)} cannot keep it apart from {shown(neighbour)}"
            yield ("tenants", name, "isolation"), f"{what}: give the tenant models of a pool of its own"


def _listeners(config: Config) -> Iterator[Finding]:
    server = config.server
    if server.listen.clashes(server.admin):
        yield ("server", "admin"), f"cannot share its port with listen ({server.listen}): choose another port"
    token = server.admin_token.reveal() if server.admin_token is not None else ""
    if not token.isascii() or token != token.strip():
        yield ("server", "admin_token"), "no header can carry it: take ASCII letters and signs, no blanks at its ends"
    if not config.tenants and not server.listen.loopback:
        fix = "add tenants with keys, or listen on 127.0.0.1"
        yield ("server", "listen"), f"without tenants everybody who reaches {server.listen} could use the models: {fix}"


def _certificate(config: Config) -> Iterator[Finding]:
    """Tried as the server will: a pair that does not fit would be noticed only by a gateway that cannot start."""
    tls = config.server.tls
    if tls is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key, password="")  # never ask for one
    except OSError as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            yield ("server", "tls"), "the key is another certificate's: name the one that cert was issued for"
        else:
            yield ("server", "tls"), "these are no certificate and its key: both as PEM, the key without a password"


# Beside each rule the sections that must have been read whole for its findings to be true.
_RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    ((), _required),
    ((), _pool_of_each_model),
    ((), _fallbacks),
    ((), _canaries),
    ((), _shadows),
    ((), _aliases),
    ((), _backends),
    ((), _clocks),
    ((), _hedges),
    ((), _keys),
    ((), _classes),
    (("models",), _models_of_each_tenant),
    (("pools", "models", "tenants"), _residency),
    (("tenants",), _trust_groups),
    (("pools", "models", "tenants", "security"), _shared_pools),
    (("server",), _listeners),
    (("server",), _certificate),
)
