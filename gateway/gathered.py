"""What several workers say of the same things, as one answer: amounts add up, and of what all of them see the latest or
the worst stands for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from gateway.board import ROWS, used

Row = dict[str, Any]
Join = Callable[[Sequence[Any]], Any]

LOADS = ("running", "uncached_tokens", "uncached_budget", "held_tokens", "concurrency")
SEEN = ("models", "engine_running", "engine_waiting", "kv_share", "kv_tokens", "signal_age_s")
AMOUNTS = ("requests", "successful", "input_tokens", "output_tokens", "cached_tokens", "cost")


def most(values: Sequence[Any]) -> Any:
    """The largest; None where nobody knows any."""
    return max((value for value in values if value is not None), default=None)


def all_of(values: Sequence[Any]) -> Any:
    """The sum; None where nobody knows any."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def merged(lists: Iterable[Iterable[Row]], by: Sequence[str], joins: Mapping[str, Join]) -> list[Row]:
    """Rows that agree on `by`, as one, in the order in which they come first. What is not joined is the first's."""
    groups: dict[Hashable, list[Row]] = {}
    for rows in lists:
        for row in rows:
            groups.setdefault(tuple(row.get(name) for name in by), []).append(row)
    return [
        group[0] | {name: join([row[name] for row in group]) for name, join in joins.items()}
        for group in groups.values()
    ]


def tenants(lists: Iterable[Iterable[Row]]) -> list[Row]:
    """What `/admin/tenants` lists. Limits are counted in the store: who has heard of the most knows best."""
    joins: dict[str, Join] = {"running": all_of, "waiting": all_of, "limits": _limits}
    lists = [list(rows) for rows in lists]
    if all("keys" in row for rows in lists for row in rows):  # a picture shows less of them
        joins |= {"connections": all_of, "keys": _keys}
    return merged(lists, ("tenant",), joins)


def _limits(lists: Sequence[Sequence[Row]]) -> list[Row]:
    joins: dict[str, Join] = {"used": most, "remaining": min, "reset_s": most}
    return merged(lists, ("kind", "model"), joins)


def _keys(lists: Sequence[Sequence[Row]]) -> list[Row]:
    return merged(lists, ("id",), {"last_used": most})


def backends(lists: Iterable[Iterable[Row]]) -> list[Row]:
    """What `/admin/backends` lists. What engines say is taken from who asked last; where workers see different states,
    most of them are right, and `why` tells of the others."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for rows in lists:
        for row in rows:
            groups.setdefault((row["pool"], row["backend"]), []).append(row)
    return [_backend(group) for group in groups.values()]


def _backend(group: Sequence[Row]) -> Row:
    states = Counter(row["state"] for row in group)
    state, _ = max(states.items(), key=lambda each: (each[1], each[0] != "up"))
    first = next(row for row in group if row["state"] == state)
    others = [f"{number} of {len(group)} workers: {other}" for other, number in states.items() if other != state]
    ages = [row for row in group if row["signal_age_s"] is not None]
    latest = min(ages, key=lambda row: row["signal_age_s"]) if ages else first
    sums = {name: sum(row[name] for row in group) for name in LOADS}
    why = "; ".join(filter(None, (first["why"], *others)))
    return first | {name: latest[name] for name in SEEN} | sums | {"why": why}


def usage(answers: Sequence[Row]) -> Row:
    """What `/admin/usage` says. A worker's books end with it: from the latest `since` on they are complete."""
    sums: dict[str, Join] = dict.fromkeys(AMOUNTS, sum)
    rows = merged((each["rows"] for each in answers), ("hour", "tenant", "model"), sums)
    for row in rows:
        row["cost"] = round(row["cost"], 6)
        row["cost_per_successful_request"] = round(row["cost"] / row["successful"], 6) if row["successful"] else None
    rows.sort(key=lambda row: (row.get("hour", ""), row["tenant"], row["model"]))
    return {"since": max(each["since"] for each in answers), "rows": rows}


def picture(pictures: Mapping[int, Row], seats: int) -> Row:
    """What `/admin/live` shows, of the workers by their seats; figures, history and refusals are not gathered from
    them. Requests are numbered by seat, too: `seat_of` finds them."""
    told = list(pictures.values())
    first = max(told, key=lambda each: float(each["at"]))
    modes = Counter(each["limiter"] for each in told if each["limiter"] != "shared")
    joins: dict[str, Join] = {"waiting": sum, "tokens": sum, "oldest_s": most, "wait_s": most}
    waiting = merged(
        (each["waiting"] for each in told), ("tenant", "pool", "class"), {"waiting": sum, "oldest_s": most}
    )
    rows = tenants(each["tenants"] for each in told)
    recent = [
        row | {"number": row["number"] * seats + seat} for seat, each in pictures.items() for row in each["recent"]
    ]
    return first | {
        "uptime_s": most([each["uptime_s"] for each in told]),
        "draining": any(each["draining"] for each in told),
        "limiter": next(iter(modes), "shared"),
        "open_requests": sum(each["open_requests"] for each in told),
        "open_streams": sum(each["open_streams"] for each in told),
        "backends": backends(each["backends"] for each in told),
        "queues": merged((each["queues"] for each in told), ("pool", "class"), joins),
        "waiting": sorted(waiting, key=lambda row: -row["waiting"])[:ROWS],
        "more_waiting": sum(each["more_waiting"] for each in told) + len(waiting[ROWS:]),
        "tenants": sorted(rows, key=lambda row: -used(row))[:ROWS],
        "more_tenants": most([each["more_tenants"] for each in told]) + len(rows[ROWS:]),
        "recent": sorted(recent, key=lambda row: -row["at"])[:ROWS],
    }


def seat_of(number: int, seats: int) -> tuple[int, int]:
    """The seat of a request in a picture, and its number there."""
    return number % seats, number // seats
