"""What operators ask a running gateway: how tenants stand, what they used and what it cost. With real processes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from pytest import approx

from tests.service import Service, emulating, run, started, tenant

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "How?"}], "max_tokens": 5}
TOKEN = "admin-token-of-the-tests"
ADMIN = {"authorization": f"Bearer {TOKEN}"}
PRICE = 3600.0  # an hour: a second costs 1


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two tenants, one of them with limits, before an emulated backend that has a price."""
    folder = tmp_path_factory.mktemp("gateway")
    with ExitStack() as stack:
        backend = {"url": emulating(stack, folder), "cost_per_hour": PRICE}
        limits = {"requests_per_minute": 100, "concurrent": 4, "models": {"m": {"tokens_per_minute": 100_000}}}
        told = {
            "server": {"admin_token": "file:token"},
            "pools": {"p": {"engine": "vllm", "backends": [backend]}},
            "models": {"m": {}},
            "tenants": {"acme": tenant("one", limits=limits, weight=2), "[globex]": tenant("two")},
            "security": {"secret": "file:secret"},
        }
        yield started(stack, folder, told, secret="s" * 64, token=TOKEN)


def ask(gateway: Service, key: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{gateway.api}/v1/chat/completions", json=CHAT | more, headers=headers, timeout=60)


def admin(gateway: Service, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{gateway.admin}/admin/{path}", headers=ADMIN | headers)


def usage(gateway: Service) -> dict[str, dict[str, Any]]:
    return {row["tenant"]: row for row in admin(gateway, "usage").json()["rows"]}


def test_tenants_stand_as_they_use(gateway: Service) -> None:
    """Limits with what is used of them, a stream that runs, keys; the command's table and its JSON say the same."""
    assert ask(gateway, "one").status_code == 200
    long = {"stream": True, "max_tokens": 50_000, "ignore_eos": True}
    headers = {"authorization": "Bearer one"}
    with httpx.stream(
        "POST", f"{gateway.api}/v1/chat/completions", json=CHAT | long, headers=headers, timeout=60
    ) as answer:
        lines = answer.iter_lines()  # kept: httpx closes what nobody reads
        assert next(lines)
        acme, globex = admin(gateway, "tenants").json()["tenants"]
        assert (acme["tenant"], acme["running"], acme["waiting"], acme["weight"]) == ("acme", 1, 0, 2.0)
        limits = {(limit["kind"], limit["model"]): limit for limit in acme["limits"]}
        assert set(limits) == {("requests", None), ("concurrent", None), ("tokens", "m")}
        assert (limits["concurrent", None]["used"], limits["concurrent", None]["limit"]) == (1, 4)
        assert 1 <= limits["requests", None]["used"] <= 2
        assert limits["tokens", "m"]["used"] > 0
        assert (acme["keys"][0]["state"], acme["keys"][0]["expires"]) == ("good", None)
        assert acme["keys"][0]["last_used"] and not globex["keys"][0]["last_used"]
        assert (globex["tenant"], globex["running"], globex["limits"]) == ("[globex]", 0, [])
        ended = run("tenants", "--admin", gateway.admin, HEADRACE_ADMIN_TOKEN=TOKEN)
        rows = [line.split() for line in ended.stdout.splitlines()]
        assert ended.returncode == 0, ended.stderr
        assert next(row for row in rows if row[:1] == ["acme"])[:3] == ["acme", "1", "0"]
        assert "1/4 (25%)" in ended.stdout
        assert ["[globex]", "0", "0", "-", "-", "-", "1", "good"] in rows
        shown = json.loads(run("tenants", "--admin", gateway.admin, "--json", HEADRACE_ADMIN_TOKEN=TOKEN).stdout)
        assert [each["running"] for each in shown["tenants"]] == [1, 0]
    gateway.eventually(gateway.settled)
    acme = admin(gateway, "tenants").json()["tenants"][0]
    assert acme["running"] == 0
    assert next(limit["used"] for limit in acme["limits"] if limit["kind"] == "concurrent") == 0


def test_the_command_says_why_not(gateway: Service) -> None:
    """A wrong token, and none."""
    for token, words in (("wrong", "does not take this token"), ("", "asks for its token")):
        ended = run("tenants", "--admin", gateway.admin, HEADRACE_ADMIN_TOKEN=token)
        assert ended.returncode == 1
        assert words in ended.stderr and "set HEADRACE_ADMIN_TOKEN" in ended.stderr


def test_usage_and_cost_are_told_as_they_were(gateway: Service) -> None:
    """The report grows by what the answers say that they used; the cost is the time in which the backend was busy,
    and the metrics say the same."""
    gateway.eventually(gateway.settled)
    before = usage(gateway)
    busy = gateway.metric("headrace_backend_busy_seconds_total")
    answers = [ask(gateway, "two").json()["usage"] for _ in range(3)]
    assert ask(gateway, "two", model="none").status_code == 404
    row = gateway.eventually(lambda: (found := usage(gateway)).get("[globex]", {}).get("requests") == 3 and found)[
        "[globex]"
    ]
    assert row["successful"] == 3
    assert row["input_tokens"] == sum(used["prompt_tokens"] for used in answers)
    assert row["output_tokens"] == sum(used["completion_tokens"] for used in answers)
    spent = gateway.metric("headrace_backend_busy_seconds_total") - busy
    assert row["cost"] == approx(spent * PRICE / 3600, abs=0.002)
    assert row["cost"] > 0.0
    assert row["cost_per_successful_request"] == approx(row["cost"] / 3, abs=1e-6)
    assert gateway.metric("headrace_cost_total", tenant="[globex]") == approx(row["cost"], abs=1e-6)
    assert usage(gateway).get("acme") == before.get("acme")


def test_usage_comes_as_a_spreadsheet_and_by_time(gateway: Service) -> None:
    """CSV by its name or by Accept; nothing of the future; times as dates or seconds, and a bad one is told."""
    gateway.eventually(lambda: ask(gateway, "two").status_code == 200 and "[globex]" in usage(gateway))
    for answer in (admin(gateway, "usage?format=csv&by=hour"), admin(gateway, "usage?by=hour", accept="text/csv")):
        assert answer.headers["content-type"].startswith("text/csv")
        rows = list(csv.DictReader(io.StringIO(answer.text)))
        assert "[globex]" in {row["tenant"] for row in rows}
        assert all(row["hour"].endswith(":00:00Z") for row in rows)
    assert admin(gateway, "usage?from=2999-01-01").json()["rows"] == []
    assert admin(gateway, "usage?to=2000-01-01").json()["rows"] == []
    assert admin(gateway, "usage?from=946684800&to=2999-01-01T00:00:00Z").json()["rows"] != []
    bad = admin(gateway, "usage?from=yesterday")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "from")


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("fro=2026-11-01", "There is no parameter 'fro'; there are from, to, by, format."),
        ("by=day", "by may be hour, not 'day'."),
        ("format=xml", "format may be csv or json, not 'xml'."),
        ("from=2026-12-01&to=2026-12-01", "Nothing lies from `from` on and before `to`: give a later `to`."),
    ],
)
def test_usage_refuses_what_it_would_not_heed(gateway: Service, query: str, what: str) -> None:
    """A bill for all time is not what somebody meant who mistyped a month."""
    bad = admin(gateway, f"usage?{query}")
    assert (bad.status_code, bad.json()["error"]["message"]) == (400, what)


def test_secrets_are_not_told(gateway: Service) -> None:
    """Neither the admin token nor the secret, in no answer of the admin API; their references are."""
    texts = [admin(gateway, path).text for path in ("config", "tenants", "usage")]
    assert all(TOKEN not in text and "s" * 64 not in text for text in texts)
    assert "file:token" in texts[0] and "file:secret" in texts[0]
    assert TOKEN not in gateway.log.read_text()
