"""What tenants have used, hour by hour, and what it has cost: kept in memory, within bounds, for the usage report.

A request is booked when it ends, whole, in the hour of its end. The cost of a request is its part of the price of the
time in which its backend was busy; what an idle backend costs is nobody's. Everything here ends with the process: for
longer, let a time series database keep the metrics, which say the same.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.catalog import Tenant
from gateway.exchange import Exchange
from gateway.metrics import Counter, Family

HOUR_S = 3600
KEPT_HOURS = 35 * 24  # a month, and some days to fetch it in
MOST_ROWS = 50_000  # some 10 MB; with 100 pairs of tenant and model in use at all hours, three weeks
COLUMNS = ("requests", "successful", "input_tokens", "output_tokens", "cached_tokens", "cost")
QUERY: dict[str, tuple[str, ...]] = {"from": (), "to": (), "by": ("hour",), "format": ("csv", "json")}

Key = tuple[str, str]
"""Tenant and model."""


@dataclass(slots=True)
class Row:
    """Sums of requests. `successful` of them were answered well; `cost` in the currency of `cost_per_hour`."""

    requests: int = 0
    successful: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0

    def add(self, other: Row) -> None:
        self.requests += other.requests
        self.successful += other.successful
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cached_tokens += other.cached_tokens
        self.cost += other.cost


class Ledger:
    """The hours that are kept, oldest first. `label` is what stands for a tenant in metrics."""

    def __init__(
        self,
        wall_clock: Callable[[], float],
        label: Callable[[Tenant], str],
        *,
        kept_hours: int = KEPT_HOURS,
        most: int = MOST_ROWS,
    ) -> None:
        self._wall_clock = wall_clock
        self._label = label
        self._kept_hours = kept_hours
        self._most = most
        self._hours: dict[int, dict[Key, Row]] = {}
        self._rows = 0
        self._cost = Counter("headrace_cost_total", "Price of the backend time that requests had.", "tenant", "model")
        self.since = wall_clock()

    def __repr__(self) -> str:
        return f"<Ledger {self._rows} rows in {len(self._hours)} hours>"

    def record(self, x: Exchange) -> None:
        """Book a request that has ended. One whose tenant or model never became known is not booked."""
        if x.tenant is None or x.call is None:
            return
        row = self._row(int(self._wall_clock() // HOUR_S), (x.tenant.name, x.call.label))
        row.requests += 1
        row.successful += x.outcome == "ok"
        meter = x.meter
        if meter is not None:
            usage = meter.usage
            if usage is None:
                row.output_tokens += meter.tokens
            else:
                row.input_tokens += usage.prompt
                row.output_tokens += usage.output
                row.cached_tokens += usage.cached or 0
        for attempt in x.attempts:
            if attempt.cost:
                row.cost += attempt.cost
                self._cost.values[(self._label(x.tenant), x.call.label)] += attempt.cost

    def _row(self, hour: int, key: Key) -> Row:
        rows = self._hours.get(hour)
        if rows is None:
            rows = self._hours[hour] = {}
        row = rows.get(key)
        if row is None:
            row = rows[key] = Row()
            self._rows += 1
            self._forget(hour)
        return row

    def _forget(self, now: int) -> None:
        """Hours that are too old, or for which there is no room, from the oldest on; never the one at work."""
        while (oldest := min(self._hours)) < now and (oldest <= now - self._kept_hours or self._rows > self._most):
            self._rows -= len(self._hours.pop(oldest))
            self.since = max(self.since, float((oldest + 1) * HOUR_S))

    def rows(self, begin: float, end: float, *, hourly: bool = False) -> list[dict[str, object]]:
        """What was used in the hours that begin from `begin` on and before `end` (seconds since the epoch), by tenant
        and model, and by hour, too, if that is wanted."""
        sums: dict[tuple[int, str, str], Row] = {}
        for hour, rows in self._hours.items():
            if begin <= hour * HOUR_S < end:
                for (tenant, model), row in rows.items():
                    sums.setdefault((hour if hourly else 0, tenant, model), Row()).add(row)
        return [self._shown(*key, row) for key, row in sorted(sums.items(), key=lambda item: item[0])]

    @staticmethod
    def _shown(hour: int, tenant: str, model: str, row: Row) -> dict[str, object]:
        told: dict[str, object] = {"hour": iso(hour * HOUR_S)} if hour else {}
        told |= {"tenant": tenant, "model": model} | {name: getattr(row, name) for name in COLUMNS}
        told["cost"] = round(row.cost, 6)
        told["cost_per_successful_request"] = round(row.cost / row.successful, 6) if row.successful else None
        return told

    def metrics(self) -> Iterator[Family]:
        """What the requests of each tenant and model have cost."""
        yield self._cost


def as_csv(rows: list[dict[str, object]], *, hourly: bool) -> str:
    """The rows under a line of names."""
    names = ["hour"] * hourly + ["tenant", "model", *COLUMNS, "cost_per_successful_request"]
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:  # a spreadsheet that reads no 4.6e-05 would take it for a text, and leave it out of its sums
        writer.writerow({name: f"{value:.6f}" if isinstance(value, float) else value for name, value in row.items()})
    return out.getvalue()


def iso(wall: float) -> str:
    """`2026-11-30T16:00:00Z`"""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
