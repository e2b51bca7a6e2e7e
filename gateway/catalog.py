"""Who may use what: tenants, models and their aliases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from policies.rollout import place

ANY = "*"
OTHER = "other"  # what metrics and limits call all models that have no name here
MAX_NAME = 1024  # characters of a name that is looked for; patterns take their time with longer ones


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays. `models` are names of models or shell globs over them; `classes` the service classes it may use, the
    first being its default. Tenants of one `trust_group` share cached prefixes; `salt` is what engines get to keep the
    group's apart, empty where there is nobody to keep apart from. An `operator` sees where its requests went;
    the prompts of one with `content` stand in traces. `residency` are the regions whose backends may see its prompts;
    empty: any backend may. It may have so many `connections` open at once; None: any number. `apart` are the pools that
    it shares with other groups though nothing of its may be cached where they could notice."""

    name: str
    models: tuple[str, ...] = (ANY,)
    classes: tuple[str, ...] = ("interactive", "batch")
    weight: float = 1.0
    trust_group: str = ""
    salt: str = field(default="", repr=False)
    operator: bool = False
    residency: tuple[str, ...] = ()
    content: bool = False
    connections: int | None = None
    apart: frozenset[str] = frozenset()

    def may_use(self, model: str) -> bool:
        """Whether a name is one that the tenant's `models` mean. A name with `[` or `*` in it means itself, too."""
        return ANY in self.models or any(glob == model or fnmatchcase(model, glob) for glob in self.models)


@dataclass(frozen=True, slots=True)
class Canary:
    """A new version of what serves a model: `pool`, or these `backends` of its own pool, which is `stable`. It gets the
    share `weight` of the tenants, or else of their conversations, by their place under `seed`."""

    stable: str
    weight: float
    seed: bytes = field(repr=False)
    pool: str = ""
    backends: frozenset[str] = frozenset()
    by_conversation: bool = False

    def takes(self, tenant: str, conversation: bytes) -> bool:
        """Whether the new version is the one to ask first."""
        who = (tenant.encode(), conversation) if self.by_conversation else (tenant.encode(),)
        return place(self.seed, *who) < self.weight


@dataclass(frozen=True, slots=True)
class Shadow:
    """A pool on trial that gets copies of a share `sample` of a model's requests, so many `at_once`."""

    pool: str
    sample: float
    at_once: int


@dataclass(frozen=True, slots=True)
class Model:
    """A name that clients use. `upstream_name` is what the backends call it; None forwards the client's word.
    `counts_usage`: whether the backends understand `stream_options.include_usage`; `takes_salt`: whether they keep
    caches apart by `cache_salt`; `ignores_case`: whether any of them may take `Model` for `model`. `fallback`: the
    pools to ask when its own cannot serve it; `canary`: what gets a part of its requests; `shadow`: what gets copies
    of some."""

    name: str
    pool: str
    upstream_name: str | None = None
    aliases: tuple[str, ...] = ()
    counts_usage: bool = True
    takes_salt: bool = False
    ignores_case: bool = False
    fallback: tuple[str, ...] = ()
    canary: Canary | None = None
    shadow: Shadow | None = None

    @property
    def pools(self) -> tuple[str, ...]:
        """All that a request for it may get to."""
        more = [each.pool for each in (self.canary, self.shadow) if each is not None and each.pool]
        return (self.pool, *self.fallback, *more)

    @property
    def label(self) -> str:
        """The value of the metrics' `model` label: never a word of the caller's."""
        return label(self.name)


def label(name: str) -> str:
    """The label of a model of the configuration."""
    return OTHER if name == ANY else name


class Catalog:
    """All models, looked up by name or alias as one tenant sees them."""

    def __init__(self, models: Iterable[Model], created: int) -> None:
        self._models = {model.name: model for model in models}
        self._any = self._models.pop(ANY, None)
        self.any_pool = self._any.pool if self._any is not None else ""  # who serves what has no name here
        self._names = {alias: model for model in self._models.values() for alias in model.aliases} | self._models
        self.created = created
        self.shadows = {model.label: model.shadow for model in self._all() if model.shadow is not None}

    def canaries(self) -> dict[str, Canary]:
        """By the labels of their models."""
        return {model.label: model.canary for model in self._all() if model.canary is not None}

    def _all(self) -> list[Model]:
        return [*self._models.values(), *([self._any] if self._any is not None else [])]

    def find(self, tenant: Tenant, name: str) -> Model | None:
        """None both for a model that does not exist and for one that the tenant may not see."""
        model = self._names.get(name, self._any)
        if model is None or len(name) > MAX_NAME:
            return None
        by_name = model is not self._any and tenant.may_use(model.name)
        return model if by_name or tenant.may_use(name) else None

    def default(self, tenant: Tenant) -> Model | None:
        """The one model there is, for endpoints whose requests need not name any."""
        models = {model.name: model for name in self._names if (model := self.find(tenant, name))}
        if not models and self._any is not None:
            return self.find(tenant, ANY)
        return next(iter(models.values())) if len(models) == 1 else None

    def visible(self, tenant: Tenant, offered: Iterable[str] = ()) -> list[str]:
        """Every name and alias that the tenant may use, in the order of the configuration, and then those that are
        `offered` by who serves any name."""
        named = [name for model in self._models.values() for name in (model.name, *model.aliases)]
        names = dict.fromkeys((*named, *(offered if self._any is not None else ())))
        return [name for name in names if self.find(tenant, name)]
