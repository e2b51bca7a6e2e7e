"""The script of the shared store, retold: what gateway/quota.lua does, in Python and on a clock of the test's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.leases import Report
from policies.limits import Limit


@dataclass
class Kept:
    """What is kept of one limit: when it is unused again, and each replica's lease and its expiry."""

    mark: int | None = None
    leases: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class StoreModel:
    """`limits` of one tenant."""

    limits: Sequence[Limit]
    lease_us: int
    kept: list[Kept] = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, with nothing."""
        self.kept = [Kept() for _ in self.limits]

    def run(
        self, now: int, me: str, divisor: int, reports: Sequence[Report], requests: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, int, int]], list[bool]]:
        """Free, used and extra lease of each limit, and the verdict on each request."""
        used, free = [], []
        for limit, kept, report in zip(self.limits, self.kept, reports, strict=True):
            spent = report.spent
            for name, (amount, expiry) in list(kept.leases.items()):
                if name != me and expiry <= now:
                    del kept.leases[name]
                    spent += amount if limit.drains else 0
            if limit.drains:
                kept.mark = max(now + report.known if kept.mark is None else kept.mark, now) + spent
            used.append(max(0, (kept.mark or 0) - now) if limit.drains else spent)
            others = sum(amount for name, (amount, _) in kept.leases.items() if name != me)
            free.append(limit.room - used[-1] - others - report.kept)
        verdicts = [self._decide(now, costs, used, free) for costs in requests]
        told = []
        for i, (limit, kept, report) in enumerate(zip(self.limits, self.kept, reports, strict=True)):
            extra = max(0, min(report.wish, free[i] // divisor))
            extra = extra if extra >= report.least else 0
            kept.leases.pop(me, None)
            amount = report.kept + extra + (0 if limit.drains else used[i])
            if amount:
                kept.leases[me] = (amount, now + self.lease_us)
            told.append((free[i] - extra, used[i], extra))
        return told, verdicts

    def _decide(self, now: int, costs: Sequence[int], used: list[int], free: list[int]) -> bool:
        if any(cost > left for cost, left in zip(costs, free, strict=True) if cost):
            return False
        for i, cost in enumerate(costs):
            used[i] += cost
            free[i] -= cost
            if self.limits[i].drains:
                self.kept[i].mark = max(self.kept[i].mark or 0, now) + cost if cost else self.kept[i].mark
        return True
