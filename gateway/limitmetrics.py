"""What the metrics say of tenants' limits: how much of each is used, and how long it takes to decide by them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from gateway.metrics import Family, Gauge, Histogram, Key
from policies.limits import Limit, Standing

OTHER = "other"  # the label of tenants beyond the cap, all together
# Seconds: a decision in memory takes microseconds, a round trip a millisecond, a store that is away its time limit.
DECISION_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0),
)
LABELS = ("tenant", "model", "kind")


class Where(StrEnum):
    """Who decided."""

    HERE = "here"
    STORE = "store"


class LimitMetrics:
    """`begin` says what the limits are; of what is used only the tenants who use anything have to be told."""

    def __init__(self) -> None:
        decisions = Histogram(
            "headrace_limiter_decision_seconds",
            "Time to decide whether a request is within its limits: here, or with a round trip to the store.",
            "where",
            bounds=DECISION_S,
        )
        self.decided = {where: decisions.child((where,)) for where in Where}
        self._decisions = decisions
        self._named: Collection[str] = ()
        self.begin({}, ())

    def begin(self, limits: Mapping[str, Sequence[Limit]], named: Collection[str]) -> None:
        """These limits hold now. Tenants that are not `named` are counted together."""
        self._named = named
        self._limits = Gauge(
            "headrace_tenant_limit",
            "What a tenant may use: requests or tokens at one moment (the burst), which comes back within a minute, or "
            "requests at once. Without a model: of all together.",
            *LABELS,
            total="max",
        )
        self._used = Gauge(
            "headrace_tenant_used", "What of it is used now, as far as is known here.", *LABELS, total="max"
        )
        for tenant, told in limits.items():
            for limit in told:
                self._limits.values[self._key(tenant, limit)] += limit.units(limit.room)
        self._used.of(dict.fromkeys(self._limits.values, 0))

    def metrics(self, in_use: Iterable[tuple[str, Sequence[Standing]]]) -> Iterator[Family]:
        """All of them. Who is not `in_use` uses nothing."""
        used = self._used.values
        used.update(dict.fromkeys(used, 0))
        for tenant, standings in in_use:
            for standing in standings:
                used[self._key(tenant, standing.limit)] += standing.used
        yield from (self._limits, self._used, self._decisions)

    def _key(self, tenant: str, limit: Limit) -> Key:
        return (tenant if tenant in self._named else OTHER, limit.model, limit.kind)
