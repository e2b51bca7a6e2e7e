"""What several workers say, as one answer."""

from __future__ import annotations

from typing import Any

from gateway.gathered import backends, picture, seat_of, tenants, usage

BACKEND: dict[str, Any] = {
    "pool": "p",
    "backend": "http://b",
    "state": "up",
    "why": "",
    "region": None,
    "incarnation": 1,
    "gate": "open",
    "running": 1,
    "uncached_tokens": 10,
    "uncached_budget": 100,
    "held_tokens": 5,
    "concurrency": 8,
    "models": ["m"],
    "engine_running": 1,
    "engine_waiting": 0,
    "kv_share": 0.1,
    "kv_tokens": 9,
    "signal_age_s": 0.5,
}


def test_loads_add_up_and_engines_are_heard_once() -> None:
    """Two gateways may send there twice what one may; what the engine says is taken from who asked last."""
    (told,) = backends([[BACKEND], [BACKEND | {"running": 2, "kv_share": 0.3, "signal_age_s": 0.1}]])
    assert (told["running"], told["uncached_budget"], told["concurrency"]) == (3, 200, 16)
    assert (told["kv_share"], told["signal_age_s"], told["state"], told["why"]) == (0.3, 0.1, "up", "")
    silent = BACKEND | {"signal_age_s": None, "kv_share": None}
    assert backends([[silent], [silent]])[0]["kv_share"] is None


def test_where_workers_disagree_the_most_are_shown_and_the_others_named() -> None:
    """A tie is a reason to look: the state that is not `up` is shown."""
    ejected = BACKEND | {"state": "ejected", "why": "5 failures"}
    (told,) = backends([[BACKEND], [ejected], [BACKEND]])
    assert (told["state"], told["why"]) == ("up", "1 of 3 workers: ejected")
    (told,) = backends([[BACKEND], [ejected]])
    assert (told["state"], told["why"]) == ("ejected", "5 failures; 1 of 2 workers: up")


def test_tenants_use_what_all_workers_run_and_what_the_store_counts() -> None:
    """What runs adds up; a shared limit is as used as whoever knows most says."""

    def tenant(running: int, used: int, seen: str | None) -> dict[str, Any]:
        limit = {"kind": "rpm", "model": None, "limit": 10, "used": used, "remaining": 10 - used, "reset_s": used / 2}
        row = {"tenant": "t", "running": running, "waiting": 0, "connections": running, "limits": [limit]}
        return row | {"keys": [{"id": "k", "last_used": seen}]}

    (told,) = tenants([[tenant(1, 3, None)], [tenant(2, 5, "2026-11-30T16:00:00Z")]])
    assert (told["running"], told["connections"]) == (3, 3)
    (limit,) = told["limits"]
    assert (limit["used"], limit["remaining"], limit["reset_s"], limit["limit"]) == (5, 5, 2.5, 10)
    assert told["keys"][0]["last_used"] == "2026-11-30T16:00:00Z"


def test_usage_adds_up_by_hour_tenant_and_model() -> None:
    """A price per success is of the sums; the books are whole from the youngest worker's beginning on."""

    def row(hour: str, requests: int, cost: float) -> dict[str, Any]:
        amounts = {"requests": requests, "successful": requests, "input_tokens": 1, "output_tokens": 2}
        amounts |= {"cached_tokens": 0, "cost": cost, "cost_per_successful_request": 9.0}
        return {"hour": hour, "tenant": "t", "model": "m"} | amounts

    told = usage(
        [
            {"since": "2026-11-30T10:00:00Z", "rows": [row("11", 1, 1.0), row("10", 1, 0.5)]},
            {"since": "2026-11-30T11:30:00Z", "rows": [row("11", 3, 1.0)]},
        ]
    )
    assert told["since"] == "2026-11-30T11:30:00Z"
    assert [(each["hour"], each["requests"], each["cost"]) for each in told["rows"]] == [("10", 1, 0.5), ("11", 4, 2.0)]
    assert told["rows"][1]["cost_per_successful_request"] == 0.5


def test_a_picture_is_of_all_workers() -> None:
    """Queues and tenants add up; requests are by time, each under a number that leads back to its worker."""

    def seen(seat: int, limiter: str) -> dict[str, Any]:
        queue = {"pool": "p", "class": "c", "waiting": 1 + seat, "tokens": 10, "oldest_s": float(seat), "wait_s": None}
        waiting = {"tenant": "t", "pool": "p", "class": "c", "waiting": 1 + seat, "oldest_s": float(seat)}
        return {
            "at": 10.0 + seat,
            "uptime_s": 5 - seat,
            "draining": False,
            "limiter": limiter,
            "open_requests": 2,
            "open_streams": 1,
            "backends": [BACKEND],
            "queues": [queue],
            "waiting": [waiting],
            "more_waiting": 0,
            "tenants": [{"tenant": "t", "running": 1, "waiting": 0, "limits": []}],
            "more_tenants": 0,
            "recent": [{"number": 7, "at": 100.0 + seat}],
        }

    told = picture({0: seen(0, "shared"), 2: seen(2, "local_share")}, seats=3)
    assert (told["open_requests"], told["uptime_s"], told["limiter"]) == (4, 5, "local_share")
    assert told["queues"] == [{"pool": "p", "class": "c", "waiting": 4, "tokens": 20, "oldest_s": 2.0, "wait_s": None}]
    assert told["waiting"][0]["waiting"] == 4 and told["tenants"][0]["running"] == 2
    assert [seat_of(row["number"], 3) for row in told["recent"]] == [(2, 7), (0, 7)]
