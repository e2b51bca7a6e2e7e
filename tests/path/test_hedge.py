"""A second attempt beside one that is slow to begin: who answers, what becomes of the other, and when there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.metrics import Numbers
from tests.faults.fakes import DONE, Fake, FakeConnection, Script, event, healthy, silent, usage_event
from tests.faults.process import DIGEST, KEY, pool
from tests.faults.rawclient import chat
from tests.path.house import House, Wire

pytestmark = pytest.mark.anyio

AFTER_S = 0.02
TENANT = {"t": {"keys": [{"sha256": DIGEST}], "operator": True}}
AUTH = f"Authorization: Bearer {KEY}"


async def muted(connection: FakeConnection) -> None:
    """Its head comes at once, and then nothing."""
    await connection.request()
    await connection.stream_head()
    await connection.wait_closed()


async def failing(connection: FakeConnection) -> None:
    await connection.request()
    await connection.answer(b"{}", "503 Service Unavailable")


async def dying(connection: FakeConnection) -> None:
    """Answers 200 and says in its first event that it is dead."""
    await connection.request()
    await connection.stream_head()
    await connection.chunk(b'data: {"error":{"message":"EngineCore died","code":500}}\n\n' + DONE)
    await connection.last_chunk()


async def telling(connection: FakeConnection) -> None:
    """Three tokens by its own count of 11 and 7."""
    await connection.request()
    await connection.stream_head()
    for text in ("a", "b", "c"):
        await connection.chunk(event(text))
    await connection.chunk(event(finish="stop") + usage_event() + DONE)
    await connection.last_chunk()


class Cast:
    """What the connections play, in the order in which they come, whichever fakes they reach. One that stands behind
    `when_two` waits until two are there."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.two = asyncio.Event()
        self.came = 0

    async def __call__(self, connection: FakeConnection) -> None:
        self.came += 1
        if self.came > 1:
            self.two.set()
        await (self.scripts.pop(0) if self.scripts else healthy)(connection)

    def when_two(self, script: Script) -> Script:
        async def waits(connection: FakeConnection) -> None:
            await self.two.wait()
            await script(connection)

        return waits


def hedging(
    *fakes: Fake, after_s: float = AFTER_S, retries: dict[str, Any] | None = None, **told: Any
) -> dict[str, Any]:
    hedge = {"hedge": {"after": f"{after_s * 1000:g}ms", "prompt_tokens": 1000}}
    return pool(*(fake.url for fake in fakes), retries=hedge | (retries or {}), **told)


@asynccontextmanager
async def fleet(script: Script, count: int = 2) -> AsyncIterator[list[Fake]]:
    """Backends that play one script."""
    async with Fake(script) as a, Fake(script) as b, Fake(script) as c:
        yield [a, b, c][:count]


async def asked(house: House, *headers: str, **told: Any) -> tuple[Wire, dict[str, Any]]:
    """A request to its end, and its line; nothing is left of it."""
    wire = house.connect()
    wire.feed(chat(*headers, **({"stream": True} | told)))
    await house.eventually(lambda: house.lines, "its line")
    await house.eventually(lambda: not house.remains(), "everything is given back")
    assert house.faults == []
    return wire, house.lines[-1]


def metric(house: House, name: str) -> dict[tuple[str, ...], float]:
    """The values of one family."""
    return {
        key: value
        for family in house.gateway.metrics()
        if isinstance(family, Numbers) and family.name == name
        for key, value in family.values.items()
    }


def hedges(house: House) -> dict[str, float]:
    return {outcome: number for (_, outcome), number in metric(house, "headrace_hedges_total").items()}


def whole(wire: Wire) -> bool:
    response = wire.response()
    return response.status == 200 and response.complete and response.body.endswith(DONE)


async def test_a_second_attempt_that_is_faster_is_the_answer() -> None:
    """The first is closed at once. Its backend is not blamed, the answer tells who gave it, one retry is spent, and
    what the tenant used is counted once."""
    async with fleet(Cast(muted, telling)) as fakes, House(hedging(*fakes, tenants=TENANT), fakes) as house:
        budget = house.gateway.dispatcher.pools["p"].retries
        before = budget.balance(house.gateway.clock())
        wire, line = await asked(house, AUTH)
        assert whole(wire) and wire.response().body.count(b'"content"') == 3
        (slow,) = [fake for fake in fakes if fake.closed]
        (fast,) = [fake for fake in fakes if fake is not slow]
        assert (line["outcome"], line["attempts"], line["backend"]) == ("ok", 2, fast.url)
        assert wire.response().header("x-headrace-backend") == fast.url
        assert (line["tokens_in"], line["tokens_out"]) == (11, 7)
        assert metric(house, "headrace_tokens_total")["m", "t", "output"] == 7
        assert hedges(house) == {"won": 1}
        assert not metric(house, "headrace_upstream_failures_total") and not metric(house, "headrace_retries_total")
        budget.allows(1, house.gateway.clock())
        assert before - 1.2 < budget.balance(house.gateway.clock()) < before - 0.8
        assert line["ttft_ms"] >= AFTER_S * 1000 and line["queue_ms"] < AFTER_S * 1000


async def test_a_second_attempt_that_is_slower_is_given_up() -> None:
    """At the first event of the first, however long that goes on."""
    cast, given_up = Cast(), asyncio.Event()

    async def going_on(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        await connection.chunk(event("a"))
        await given_up.wait()
        await connection.chunk(event(finish="stop") + DONE)
        await connection.last_chunk()

    async def closed(connection: FakeConnection) -> None:
        await muted(connection)
        given_up.set()

    cast.scripts += [cast.when_two(going_on), closed]
    patient = {"headers": "1m", "first_token": "1m"}
    async with fleet(cast) as fakes, House(hedging(*fakes, tenants=TENANT, timeouts=patient), fakes) as house:
        wire, line = await asked(house, AUTH)
        assert whole(wire)
        (slow,) = [fake for fake in fakes if fake.closed]
        assert (line["outcome"], line["attempts"]) == ("ok", 2)
        assert line["backend"] != slow.url == next(fake.url for fake in fakes if fake.closed)
        assert wire.response().header("x-headrace-backend") == line["backend"]
        assert hedges(house) == {"lost": 1}


@pytest.mark.parametrize("bad", [failing, dying])
async def test_a_first_attempt_that_fails_leaves_it_to_the_second(bad: Script) -> None:
    """No client sees anything of the failure; the second counts as the hedge that it is, and as no retry."""
    cast = Cast()
    cast.scripts += [cast.when_two(bad), cast.when_two(telling)]
    async with fleet(cast) as fakes, House(hedging(*fakes), fakes) as house:
        wire, line = await asked(house)
        assert whole(wire) and (line["outcome"], line["attempts"]) == ("ok", 2)
        assert sum(metric(house, "headrace_hedges_total").values()) == 1
        assert not metric(house, "headrace_retries_total")


async def test_a_second_attempt_that_fails_harms_nothing() -> None:
    """The first goes on as if there had been no other."""
    gone = asyncio.Event()

    async def patient(connection: FakeConnection) -> None:
        await gone.wait()
        await telling(connection)

    async with fleet(Cast(patient, failing)) as fakes, House(hedging(*fakes), fakes) as house:
        wire = house.connect()
        wire.feed(chat(stream=True))
        pool_ = house.gateway.dispatcher.pools["p"]
        await house.eventually(lambda: [fake for fake in fakes if fake.hits], "the second has been asked")
        busy = lambda: sum(each.running for each in pool_.statistics().backends.values())  # noqa: E731
        await house.eventually(lambda: busy() == 1, "the second has failed")
        gone.set()
        await house.eventually(lambda: house.lines, "its line")
        (failed,) = [key for key, number in metric(house, "headrace_upstream_failures_total").items() if number]
        assert whole(wire) and house.lines[0]["backend"] != failed[1]
        assert hedges(house) == {"failed": 1}
        await house.eventually(lambda: not house.remains(), "everything is given back")


async def test_when_both_fail_a_third_may_be_asked() -> None:
    """Two retries are what a request has; with none left the failure of the last is told, and not to try again."""
    for count, status, attempts in ((3, 200, 3), (2, 503, 2)):
        cast = Cast()
        cast.scripts += [cast.when_two(failing), cast.when_two(failing)]
        async with fleet(cast, count) as fakes, House(hedging(*fakes), fakes) as house:
            wire, line = await asked(house)
            assert (wire.response().status, line["attempts"]) == (status, attempts)
            assert hedges(house) == {"failed": 1}
            assert status == 200 or wire.response().header("x-should-retry") == "false"
            assert sorted(fake.hits for fake in fakes) == [1] * count


async def test_a_client_that_leaves_takes_both_along() -> None:
    """Both connections are closed, and both places free."""
    async with fleet(Cast(muted, silent)) as fakes, House(hedging(*fakes), fakes) as house:
        wire = house.connect()
        wire.feed(chat(stream=True))
        await house.eventually(lambda: all(fake.hits for fake in fakes), "both run")
        wire.leave()
        await house.eventually(lambda: not house.remains(), "everything is given back")
        await house.eventually(lambda: all(fake.closed for fake in fakes), "both are closed")
        assert (house.lines[0]["outcome"], hedges(house)) == ("client_disconnect", {"cancelled": 1})


async def alone(house: House, fakes: Sequence[Fake], *headers: str, **told: Any) -> bool:
    """Whether a request that waits many times as long as it takes to hedge stays on the one backend that has it."""
    before, others = sum(fake.hits for fake in fakes), set(house.gateway.active)
    wire = house.connect()
    wire.feed(chat(*headers, **({"stream": True} | told)))
    await house.eventually(lambda: sum(fake.hits for fake in fakes) > before, "it is sent")
    await asyncio.sleep(AFTER_S * 5)
    hits = sum(fake.hits for fake in fakes)
    wire.leave()
    await house.eventually(lambda: house.gateway.active == others, "it has left")
    return hits == before + 1


async def test_there_is_none_unless_it_is_asked_for() -> None:
    """Nor where the budget is spent, or the gateway has too much to do itself."""
    async with fleet(silent) as fakes:
        async with House(pool(*(fake.url for fake in fakes)), fakes) as house:
            assert await alone(house, fakes)
        async with House(hedging(*fakes), fakes) as house:
            dispatcher = house.gateway.dispatcher
            assert not await alone(house, fakes)
            dispatcher.strained = True
            assert await alone(house, fakes)
            dispatcher.strained = False
            assert not await alone(house, fakes)
            for _ in range(100):
                dispatcher.pools["p"].retries.spend()
            assert await alone(house, fakes)


@pytest.mark.parametrize("slow", [0, 1])
async def test_an_answer_that_breaks_with_its_first_event_is_the_request_s_failure(slow: int) -> None:
    """Before the other attempt could even be told that it has lost: the client gets the error frame, and the request is
    the failure of the backend that answered."""
    cast = Cast()

    async def breaking(connection: FakeConnection) -> None:
        await connection.request()
        await connection.head(content_type="text/event-stream", content_length=str(len(event("a"))))
        await connection.send(event("a"))
        connection.finish()
        await connection.wait_closed()

    cast.scripts += [muted, breaking] if slow == 0 else [cast.when_two(breaking), muted]
    async with fleet(cast) as fakes, House(hedging(*fakes), fakes) as house:
        wire, line = await asked(house)
        assert b'data: {"error"' in wire.response().body and wire.response().complete
        (failed,) = [key for key, number in metric(house, "headrace_upstream_failures_total").items() if number]
        assert (line["outcome"], line["backend"], line["attempts"]) == ("upstream_truncated", failed[1], 2)
        assert hedges(house) == {"won": 1} if slow == 0 else {"lost": 1}


async def test_only_streams_with_short_prompts_have_one() -> None:
    """A whole answer comes when it is done; a long prompt takes its time everywhere."""
    async with fleet(silent) as fakes, House(hedging(*fakes), fakes) as house:
        assert await alone(house, fakes, stream=False)
        assert await alone(house, fakes, path="/v1/embeddings", input="text")
        assert await alone(house, fakes, messages=[{"role": "user", "content": "words " * 4000}])
        assert not await alone(house, fakes, messages=[{"role": "user", "content": "words " * 40}])


async def test_there_is_none_on_a_pool_without_a_free_place_elsewhere() -> None:
    """One backend only; or the other one is full."""
    async with fleet(silent) as fakes:
        async with House(hedging(fakes[0]), fakes) as house:
            assert await alone(house, fakes)
        async with House(hedging(*fakes, concurrency=1), fakes) as house:
            holder = house.connect()
            holder.feed(chat())  # a whole answer, which has no second attempt itself
            await house.eventually(lambda: any(fake.open_requests for fake in fakes), "a place is taken")
            assert await alone(house, fakes)
            holder.leave()
            await house.eventually(lambda: not house.remains(), "it has left")
            assert not await alone(house, fakes)


async def test_none_leaves_the_regions_of_its_tenant() -> None:
    """With one backend in `eu` there is none; with two it goes to the other one."""
    for count, hits in ((2, [1, 0]), (3, [1, 0, 1])):
        async with fleet(silent, count) as fakes:
            config = hedging(*fakes, tenants={"t": TENANT["t"] | {"residency": ["eu"]}})
            for each, region in zip(config["pools"]["p"]["backends"], ("eu", "us", "eu"), strict=False):
                each["region"] = region
            async with House(config, fakes) as house:
                assert await alone(house, fakes, AUTH) is (count == 2)
                assert [fake.hits for fake in fakes] == hits


async def test_there_is_none_while_somebody_waits_in_the_pool() -> None:
    """Even for a place that who waits may not use: the free backend does not serve the model that is waited for."""
    models = {"m": {"pool": "p"}, "n": {"pool": "p"}}
    async with fleet(silent, 3) as fakes, House(hedging(*fakes, models=models, concurrency=1), fakes) as house:
        for fake in fakes[1:]:
            house.gateway.dispatcher.pools["p"].eligible.serves(fake.url, frozenset("m"))
        holder, waiting = house.connect(), house.connect()
        holder.feed(chat(model="n"))
        await house.eventually(lambda: fakes[0].hits, "the only place of the other model is taken")
        waiting.feed(chat(model="n"))
        await house.eventually(lambda: house.gateway.dispatcher.pools["p"].waiting, "another waits for it")
        assert await alone(house, fakes)
        waiting.leave()
        await house.eventually(lambda: len(house.gateway.active) == 1, "nobody waits")
        assert not await alone(house, fakes)
        holder.leave()
        await house.eventually(lambda: not house.remains(), "all have left")


async def test_it_stays_with_the_version_and_with_who_serves_the_model() -> None:
    """Of three backends one runs a new version: an old one is never hedged with it, nor with one that has not got the
    model."""
    async with fleet(silent, 3) as fakes:
        models = {"m": {"pool": "p", "canary": {"backends": [fakes[1].url], "weight": "0%"}}}
        async with House(hedging(*fakes, models=models), fakes) as house:
            for _ in range(8):
                assert not await alone(house, fakes)
            assert [fake.hits for fake in fakes] == [8, 0, 8]
        for fake in fakes:
            await fake.play(silent)
        async with House(hedging(*fakes), fakes) as house:
            house.gateway.dispatcher.pools["p"].eligible.serves(fakes[1].url, frozenset(["another"]))
            for _ in range(8):
                assert not await alone(house, fakes)
            assert [fake.hits for fake in fakes] == [8, 0, 8]
