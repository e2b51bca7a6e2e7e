"""What was used, by tenant, model and hour: all of it while it is kept, and no more kept than there is room for."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.backend import Backend
from gateway.catalog import Tenant
from gateway.exchange import Attempt, Call, Endpoint, Exchange
from gateway.ledger import HOUR_S, Ledger, as_csv
from policies.types import Dispatch, Job, Usage

ENDPOINT = Endpoint("/v1/chat/completions")
NEVER = float(2**40)
NAMED = attrgetter("name")


@dataclass
class Clock:
    """Seconds since the epoch."""

    now: float = 500_000 * HOUR_S

    def __call__(self) -> float:
        return self.now


@dataclass
class Meter:
    """What is known of an answer."""

    usage: Usage | None = None
    tokens: int = 0
    first_token_at: float | None = None
    bytes_in: int = 0
    gap_counts: list[int] = field(default_factory=list)
    gap_sum: float = 0.0
    parse_errors: int = 0
    complete: bool = True


def exchange(tenant: str = "t", model: str = "m", outcome: str = "ok", *costs: float, **meter: Any) -> Exchange:
    """One that has ended."""
    x = Exchange("r", 0.0, ENDPOINT, outcome=outcome)
    x.tenant, x.call = Tenant(tenant), Call(ENDPOINT, model, model, "p", [])
    for cost in costs:
        x.attempts.append(
            Attempt(Backend("b", "p", "h", 1, b"h"), Dispatch(Job(1, "t", 0.0), "b"), 0.0, print, cost=cost)
        )
    x.meter = Meter(**meter) if meter else None
    return x


def test_requests_are_summed_by_tenant_and_model() -> None:
    """What the engine reported; of one that broke off, the tokens that were seen; every attempt's cost."""
    ledger = Ledger(Clock(), NAMED)
    ledger.record(exchange("a", "m", "ok", 0.5, usage=Usage(100, 20, 60)))
    ledger.record(exchange("a", "m", "ok", 0.25, 0.25, usage=Usage(10, 2)))
    ledger.record(exchange("a", "m", "client_disconnect", 0.2, tokens=7))
    ledger.record(exchange("a", "m", "queue_full"))
    ledger.record(exchange("b", "m", "queue_full"))
    assert ledger.rows(0, NEVER) == [
        {
            "tenant": "a",
            "model": "m",
            "requests": 4,
            "successful": 2,
            "input_tokens": 110,
            "output_tokens": 29,
            "cached_tokens": 60,
            "cost": 1.2,
            "cost_per_successful_request": 0.6,
        },
        {
            "tenant": "b",
            "model": "m",
            "requests": 1,
            "successful": 0,
            "input_tokens": 0,
            "output_tokens": 0,
            "cached_tokens": 0,
            "cost": 0.0,
            "cost_per_successful_request": None,
        },
    ]


def test_strangers_are_not_booked() -> None:
    """Whoever has no key or asks for no model that there is."""
    ledger = Ledger(Clock(), NAMED)
    ledger.record(Exchange("r", 0.0, ENDPOINT, outcome="invalid_api_key"))
    assert ledger.rows(0, NEVER) == []


def test_hours_are_told_apart() -> None:
    """By when a request ended; the report begins with a whole hour and ends before one."""
    clock = Clock()
    ledger = Ledger(clock, NAMED)
    start = clock.now
    for hour in range(3):
        clock.now = start + hour * HOUR_S + 60
        for _ in range(hour + 1):
            ledger.record(exchange())
    assert [row["requests"] for row in ledger.rows(0, NEVER, hourly=True)] == [1, 2, 3]
    assert next(row["hour"] for row in ledger.rows(0, NEVER, hourly=True)) == "2027-01-15T08:00:00Z"
    assert [row["requests"] for row in ledger.rows(start, start + HOUR_S, hourly=True)] == [1]
    assert [row["requests"] for row in ledger.rows(start + 1, NEVER)] == [5]
    assert ledger.rows(start + 3 * HOUR_S, NEVER) == []


def test_old_hours_go() -> None:
    """And the report says since when it is complete."""
    clock = Clock()
    ledger = Ledger(clock, NAMED, kept_hours=3)
    begun = ledger.since
    for _ in range(3):
        ledger.record(exchange())
        clock.now += HOUR_S
    assert ledger.since == begun
    ledger.record(exchange())
    assert ledger.since == begun + HOUR_S
    assert [row["requests"] for row in ledger.rows(0, NEVER)] == [3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), max_size=200))
def test_memory_is_bounded_and_nothing_is_booked_twice(events: list[tuple[int, int, int]]) -> None:
    """Never more rows than allowed beside those of the hour at work; what is kept of an hour is all of it."""
    clock, most = Clock(), 20
    ledger = Ledger(clock, NAMED, kept_hours=5, most=most)
    booked: dict[int, int] = {}
    for passed, tenant, model in events:
        clock.now += passed * HOUR_S
        hour = int(clock.now // HOUR_S)
        ledger.record(exchange(str(tenant), str(model)))
        booked[hour] = booked.get(hour, 0) + 1
        rows = ledger.rows(0, NEVER, hourly=True)
        current = ledger.rows(hour * HOUR_S, NEVER, hourly=True)
        assert len(rows) <= max(most, len(current))
        kept = {each for each in booked if each * HOUR_S >= ledger.since}
        assert sum(row["requests"] for row in rows) == sum(booked[each] for each in kept)  # type: ignore[misc]


def test_a_spreadsheet_reads_it() -> None:
    """Names with commas, quotes and line breaks stay one field, and small amounts are written out."""
    ledger = Ledger(Clock(), NAMED)
    ledger.record(exchange('a,"b"\n', "m", "ok", 0.000046))
    for hourly in (False, True):
        text = as_csv(ledger.rows(0, NEVER, hourly=hourly), hourly=hourly)
        (row,) = csv.DictReader(io.StringIO(text))
        assert (row["tenant"], row["cost"], row["cost_per_successful_request"]) == ('a,"b"\n', "0.000046", "0.000046")
        assert ("hour" in row) is hourly
