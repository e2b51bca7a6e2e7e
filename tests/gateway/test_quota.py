"""Quotas on the path: what is charged, what comes back, and what clients are told."""

from __future__ import annotations

import asyncio
import re
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.catalog import Tenant
from gateway.errors import QUEUE_TIMEOUT, ClientGone, Phase, Unavailable, UpstreamFailed
from gateway.exchange import Exchange
from gateway.isolation import Seeds
from gateway.jobs import Jobs
from gateway.limitmetrics import Where
from gateway.metrics import Gauge, Key
from gateway.quota import Plan, Quota, duration, refused, used
from gateway.stores import MemoryStore
from gateway.wire import ENDPOINTS
from policies.limits import Denied, Kind, Limit, Standing
from policies.types import Usage
from tests.faults.fakes import Fake, FakeConnection, completion, event, healthy, streaming, usage_event
from tests.faults.process import BEARER, DIGEST, pool
from tests.faults.rawclient import Response, chat
from tests.path.house import House

GO = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?|(\d+)ms")  # of OpenAI's clients
BACK = 10  # tokens that come back while a test runs, at a hundred a second


@given(st.integers(0, 10**11))
def test_durations_are_read_as_they_are_meant(us: int) -> None:
    """By the grammar that clients use; never shorter than it is, and not a millisecond longer."""
    found = GO.fullmatch(duration(us))
    assert found
    hours, minutes, seconds, ms = found.groups()
    told = Fraction(ms or 0) / 1000 + Fraction(seconds or 0) + 60 * int(minutes or 0) + 3600 * int(hours or 0)
    assert 0 <= told - Fraction(us, 10**6) < Fraction(1, 1000)


@pytest.mark.parametrize(
    ("us", "told"),
    [(0, "0ms"), (1, "1ms"), (12_000, "12ms"), (1_000_000, "1s"), (90_951_000, "1m30.951s"), (360_000_000, "6m0s")],
)
def test_durations_look_as_openai_writes_them(us: int, told: str) -> None:
    assert duration(us) == told


def exchange(**told: Any) -> Exchange:
    x = Exchange("r", 0.0, ENDPOINTS["/v1/chat/completions"], tenant=Tenant("acme"))
    for name, value in told.items():
        setattr(x, name, value)
    return x


def meter(usage: Usage | None = None, tokens: int = 0) -> Any:
    return SimpleNamespace(usage=usage, tokens=tokens)


SENT, UNSENT, LOST, VAIN = (
    [SimpleNamespace(connected_at=connected_at, failed=failed)]
    for failed in (False, True)
    for connected_at in (1.0, 0.0)
)
FAILED = UpstreamFailed("failed", Phase.SENT)


@pytest.mark.parametrize(
    ("told", "exc", "charged"),
    [
        ({"attempts": []}, None, (0, 0)),
        ({"attempts": VAIN}, UpstreamFailed("refused", Phase.CONNECT), (0, 0)),
        ({"attempts": VAIN}, Unavailable(QUEUE_TIMEOUT, "waited"), (0, 0)),
        ({"attempts": UNSENT}, ClientGone(), (0, 0)),
        ({"attempts": SENT, "status": 200, "meter": meter(Usage(11, 7, 5))}, None, (1, 18)),
        ({"attempts": SENT, "status": 200, "meter": meter(Usage(0, 7))}, None, (1, 107)),
        ({"attempts": SENT, "status": 200, "meter": meter(Usage(11, 7))}, FAILED, (1, 18)),
        ({"attempts": SENT, "status": 200, "meter": meter(tokens=9)}, FAILED, (1, 109)),
        ({"attempts": SENT, "status": 200, "meter": meter(tokens=9)}, ClientGone(), (1, 109)),
        ({"attempts": SENT, "status": 200, "meter": meter()}, None, (1, 100)),
        ({"attempts": SENT}, ClientGone(), (1, 100)),
        ({"attempts": LOST}, FAILED, (1, 0)),
        ({"attempts": LOST, "meter": meter()}, FAILED, (1, 0)),
        ({"attempts": LOST}, Unavailable(QUEUE_TIMEOUT, "waited"), (1, 0)),
        ({"attempts": LOST}, asyncio.CancelledError(), (1, 0)),
        ({"attempts": [*LOST, *SENT]}, asyncio.CancelledError(), (1, 100)),
        ({"attempts": [*LOST, *UNSENT]}, asyncio.CancelledError(), (1, 0)),
        ({"attempts": SENT, "status": 400}, None, (1, 0)),
        ({"attempts": [*LOST, *VAIN]}, UpstreamFailed("refused", Phase.CONNECT), (1, 0)),
    ],
)
def test_what_is_charged_in_the_end(told: dict[str, Any], exc: BaseException | None, charged: tuple[int, int]) -> None:
    """For every way in which a request can end; its prompt was estimated at a hundred tokens."""
    assert used(exchange(**told), exc, 100) == charged


def test_a_refusal_tells_the_limit_and_the_wait() -> None:
    """In OpenAI's words."""
    limit = Limit(Kind.TOKENS, 10_000, 10_000)
    error = refused(Denied(limit, 9_500, 1_000, 3_000_000), exchange())
    assert error.message == (
        "Rate limit reached of tenant 'acme' on tokens per min (TPM): Limit 10000, Used 9500, Requested 1000. "
        "Please try again in 3s."
    )
    assert (error.retry_after, error.retry, error.refusal.reason) == (3.0, None, "tokens_limit")


@pytest.mark.parametrize(("wait_us", "retry", "after"), [(None, False, None), (61_000_000, False, 61.0)])
def test_what_is_not_worth_another_try_says_so(wait_us: int | None, retry: bool, after: float | None) -> None:
    """It can never fit, or the wait is longer than any client's."""
    limit = Limit(Kind.REQUESTS, 10, 5, "m")
    error = refused(Denied(limit, 5, 6, wait_us), exchange())
    assert (error.retry, error.retry_after) == (retry, after)
    assert "for model 'm'" in error.message
    assert "Limit 10 (5 at one moment)" in error.message


def test_headers_are_of_the_tightest_limit_of_each_kind() -> None:
    """A tenant's and its model's limits, of requests and of tokens."""
    wide, narrow = Limit(Kind.REQUESTS, 600, 600), Limit(Kind.REQUESTS, 60, 60, "m")
    tokens = Limit(Kind.TOKENS, 1000, 1000)
    account = MemoryStore(lambda: 0).account("t", [wide, narrow, tokens, Limit(Kind.REQUESTS, 1, 1, "other")], None)
    assert account.take([(0, wide.cost(10)), (1, narrow.cost(55)), (2, tokens.cost(1))]) is None
    told = Plan(account).of("m").headers()
    assert told == [
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"5"),
        (b"x-ratelimit-reset-requests", b"55s"),
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"999"),
        (b"x-ratelimit-reset-tokens", b"60ms"),
    ]


def test_other_limits_go_on_from_what_is_used() -> None:
    """Of a tenant whose limits change; those of others are the same objects."""
    limit, other, kept = Limit(Kind.REQUESTS, 10, 10), Limit(Kind.REQUESTS, 20, 20), Limit(Kind.TOKENS, 5, 5)
    quota = Quota(MemoryStore(lambda: 0), Jobs(Seeds(b"x" * 32)), lambda: 0.0)
    quota.apply({"a": [limit], "b": [kept], "c": []})
    assert quota.usage().keys() == {"a", "b"}
    account = quota._plans["a"].account
    assert account.take([(0, limit.cost(4))]) is None
    before = quota._plans["b"]
    quota.apply({"a": [other], "b": [kept]})
    assert quota.usage()["a"] == [Standing(other, 4, 16, 12_000_000)]
    assert quota._plans["b"] is before


def test_metrics_tell_what_tenants_use_of_their_limits() -> None:
    """Of those that have series, each limit by its kind and model; of the others the sum. What is not used any more is
    nothing again, and other limits are told as they are."""
    now_us = 0
    quota = Quota(MemoryStore(lambda: now_us), Jobs(Seeds(b"x" * 32)), lambda: 0.0)
    every, one = Limit(Kind.REQUESTS, 60, 30), Limit(Kind.CONCURRENT, 4, model="m")
    told = {name: [every, one] for name in ("a", "b", "c")}
    quota.apply(told, ("a",))
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        plan = quota._plans[name]
        plan.touched = True
        assert plan.account.take([(0, every.cost(number)), (1, number)]) is None
    keys = [(tenant, *which) for tenant in ("a", "other") for which in (("", "requests"), ("m", "concurrent"))]
    assert series(quota, "headrace_tenant_limit") == dict(zip(keys, (30, 4, 60, 8), strict=True))
    assert series(quota, "headrace_tenant_used") == dict(zip(keys, (1, 1, 5, 5), strict=True))
    now_us = 60_000_000
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        quota._plans[name].account.give(1, number)
    for _ in range(2):
        assert series(quota, "headrace_tenant_used") == dict.fromkeys(keys, 0)
    assert not any(plan.touched for plan in quota._plans.values())
    quota.apply({"a": [every]}, ())
    assert series(quota, "headrace_tenant_limit") == {("other", "", "requests"): 30}


def series(quota: Quota, name: str) -> dict[Key, float]:
    """What the family of this name tells."""
    (found,) = (family for family in quota.metrics() if family.name == name)
    assert isinstance(found, Gauge)
    return dict(found.values)


# -- through the whole gateway ------------------------------------------------------------------------------------


def limited(*urls: str, concurrency: int = 16, **limits: Any) -> dict[str, Any]:
    limits = limits or {"requests_per_minute": 60, "tokens_per_minute": 6000, "concurrent": 4}
    config = pool(*urls, concurrency=concurrency, tenants={"t": {"keys": [{"sha256": DIGEST}], "limits": limits}})
    return config | {"classes": {"interactive": {"max_wait": "100ms", "max_queued": 1}}}


def spent(house: House) -> dict[str, int]:
    """What the tenant has used of its limits."""
    return {str(each.limit.kind): each.used for each in house.gateway.quota.usage()["t"]}


async def asked(house: House, *lines: str, **fields: Any) -> Response:
    return await house.ask(chat(BEARER, *lines, **fields))


async def refusing(connection: FakeConnection) -> None:
    """Blames the gateway's own request."""
    while True:
        await connection.request()
        await connection.answer(b'{"error":{"message":"no","type":"t","param":null,"code":"c"}}', "400 Bad Request")


@pytest.mark.anyio
async def test_an_answer_is_settled_to_its_usage() -> None:
    """Whole or streamed, with or without a limit of its own; and the answer tells what is left."""
    async with Fake(healthy) as fake, House(limited(fake.url), [fake]) as house:
        response = await asked(house, max_tokens=1000)
        assert 18 - BACK <= spent(house)["tokens"] <= 18
        assert response.header("x-ratelimit-limit-tokens") == "6000"
        assert 6000 - 1000 - 50 <= int(response.header("x-ratelimit-remaining-tokens") or "") < 5000
        assert response.header("x-ratelimit-remaining-requests") == "59"
        await asked(house, stream=True)
        now = spent(house)
        assert (now["requests"], now["concurrent"]) == (2, 0)
        assert 18 + 16 - BACK <= now["tokens"] <= 18 + 16


@pytest.mark.anyio
async def test_every_decision_is_timed_once() -> None:
    """Whether the request is let through or refused; without limits there is none."""
    async with Fake(healthy) as fake:
        async with House(limited(fake.url, requests_per_minute=1), [fake]) as house:
            assert [(await asked(house)).status for _ in range(3)] == [200, 429, 429]
            decided = house.gateway.quota.told.decided
            assert (sum(decided[Where.HERE].counts), sum(decided[Where.STORE].counts)) == (3, 0)
            assert 0.0 < decided[Where.HERE].sum < 0.1
        async with House(pool(fake.url), [fake]) as house:
            await house.ask(chat())
            assert not any(sum(each.counts) for each in house.gateway.quota.told.decided.values())


@pytest.mark.anyio
async def test_a_refusal_of_ours_gives_everything_back() -> None:
    """The queue is full, or the wait too long; the backend was never asked."""
    async with Fake(healthy) as fake, House(limited(fake.url, concurrency=1), [fake]) as house:
        holder = house.connect()

        async def holding(connection: FakeConnection) -> None:
            await connection.request()
            await connection.wait_closed()

        await fake.play(holding)
        holder.feed(chat(BEARER, stream=True))
        await house.eventually(lambda: fake.open_requests, "the only place is taken")
        before = spent(house)
        response = await asked(house)
        assert response.status == 503
        after = spent(house)
        assert (after["requests"], after["concurrent"]) == (1, 1)
        assert before["tokens"] - 10 * BACK <= after["tokens"] <= before["tokens"]
        holder.leave()
        await house.eventually(lambda: not house.remains(), "it has left")
        assert spent(house)["concurrent"] == 0


@pytest.mark.anyio
async def test_a_backend_that_cannot_be_reached_costs_nothing() -> None:
    """Nor does one that refuses cost tokens."""
    async with Fake(refusing) as fake, House(limited(fake.url), [fake]) as house:
        assert (await asked(house)).status == 400
        assert spent(house) == {"requests": 1, "tokens": 0, "concurrent": 0}
        await fake.stop()
        assert (await asked(house)).status == 502
        assert spent(house) == {"requests": 1, "tokens": 0, "concurrent": 0}


@pytest.mark.anyio
async def test_a_stream_that_breaks_is_charged_as_far_as_it_came() -> None:
    """By the usage that was seen, or else by the tokens that were."""

    async def cutting(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        for _ in range(30):
            await connection.chunk(event("x"))
        connection.fin()

    async with Fake(cutting) as fake, House(limited(fake.url), [fake]) as house:
        await asked(house, stream=True)
        await house.eventually(lambda: not house.remains(), "it has ended")
        assert 30 <= spent(house)["tokens"] < 50
        await fake.play(streaming(event("x"), usage_event(500, 500), event("y")))
        await asked(house, stream=True)
        await house.eventually(lambda: not house.remains(), "it has ended")
        assert 1030 - 10 * BACK < spent(house)["tokens"] < 1050


@pytest.mark.anyio
async def test_refusals_look_the_same_in_anthropics_dialect() -> None:
    """A rate_limit_error, with the same headers."""
    async with Fake(healthy) as fake, House(limited(fake.url, requests_per_minute=1), [fake]) as house:
        assert (await asked(house, path="/v1/messages")).status == 200
        response = await asked(house, path="/v1/messages")
        assert (response.status, response.json()["error"]["type"]) == (429, "rate_limit_error")
        assert response.header("retry-after") == "60"
        assert response.header("x-headrace-reason") == "requests_limit"
        assert response.header("x-ratelimit-remaining-requests") == "0"
        assert house.lines[-1]["outcome"] == "requests_limit"


@pytest.mark.anyio
async def test_a_tenant_without_limits_is_told_of_none() -> None:
    """No header, and nothing is counted."""
    config = pool("http://127.0.0.1:1", tenants={"t": {"keys": [{"sha256": DIGEST}]}})
    async with Fake(healthy) as fake:
        config["pools"]["p"]["backends"][0]["url"] = fake.url
        async with House(config, [fake]) as house:
            response = await asked(house)
            assert response.status == 200
            assert not [name for name, _ in response.headers if name.startswith("x-ratelimit")]
            assert house.gateway.quota.usage() == {}


@pytest.mark.anyio
async def test_a_model_may_have_limits_of_its_own() -> None:
    """Its requests count for both; others only for the tenant's."""

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await connection.answer(completion())

    async with Fake(script) as fake:
        config = limited(fake.url, requests_per_minute=10, models={"small": {"requests_per_minute": 2}})
        config["models"]["small"] = {"pool": "p", "aliases": ["tiny"]}
        async with House(config, [fake]) as house:
            found = [(await asked(house, model=name)).status for name in ("small", "tiny", "small", "m")]
            assert found == [200, 200, 429, 200]
            assert [each.used for each in house.gateway.quota.usage()["t"]] == [3, 2]


@pytest.mark.anyio
async def test_models_without_a_name_here_may_have_limits_of_their_own() -> None:
    """All of them together: a limit for `*` holds for whatever clients call their models."""
    async with Fake(healthy) as fake:
        config = limited(fake.url, requests_per_minute=10, models={"*": {"requests_per_minute": 2}})
        config["models"]["*"] = {"pool": "p"}
        async with House(config, [fake]) as house:
            found = [(await asked(house, model=name)).status for name in ("x", "y", "z", "m")]
            assert found == [200, 200, 429, 200]


@pytest.mark.anyio
@pytest.mark.parametrize("digits", [20, 4300])
async def test_a_number_of_tokens_without_end_never_fits(digits: int) -> None:
    """However long it is to write: no fault of the gateway."""
    async with Fake(healthy) as fake, House(limited(fake.url), [fake]) as house:
        head, _, body = chat(BEARER, max_tokens=123456).partition(b"\r\n\r\n")
        longer = b"content-length: %d" % (len(body) - 6 + digits)
        head = re.sub(rb"content-length: \d+", longer, head, flags=re.IGNORECASE)
        response = await house.ask(head + b"\r\n\r\n" + body.replace(b"123456", b"9" * digits))
        assert (response.status, response.header("x-headrace-reason")) == (429, "request_exceeds_limit")
