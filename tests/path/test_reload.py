"""Another configuration while requests run, wait and arrive: what holds for whom, and that nothing is lost."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from gateway import assembly
from gateway.config import parse
from gateway.discovery import Endpoint, Undiscoverable
from gateway.fleetadmin import change
from tests.faults.fakes import DONE, Fake, FakeConnection, event, healthy
from tests.faults.process import DIGEST, KEY, pool
from tests.faults.rawclient import Response, chat
from tests.path.house import House, Wire

pytestmark = pytest.mark.anyio
BEARER = f"Authorization: Bearer {KEY}"


class Gate:
    """A backend that begins each stream at once and ends them all when it is let."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def script(self, connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await connection.stream_head()
            await connection.chunk(event("t0"))
            await self.open.wait()
            await connection.chunk(event(finish="stop") + DONE)
            await connection.last_chunk()


def apply(house: House, config: dict[str, Any]) -> None:
    house.gateway.apply(parse(json.dumps(config)))


async def begun(house: House, *lines: str, model: str = "m") -> Wire:
    """A stream that runs."""
    wire = house.connect()
    wire.feed(chat(*lines, stream=True, model=model))
    await house.eventually(lambda: b"t0" in wire.sent, "it runs")
    return wire


async def waiting(house: House, *lines: str, model: str = "m") -> Wire:
    """A stream that waits for a place."""
    turns = house.turns
    wire = house.connect()
    wire.feed(chat(*lines, stream=True, model=model))
    await house.eventually(lambda: house.turns > turns, "it has come")
    assert not wire.sent
    return wire


async def ended(house: House, *wires: Wire) -> list[Response]:
    await house.eventually(lambda: all(wire.response().complete for wire in wires), "all end")
    return [wire.response() for wire in wires]


async def test_streams_and_queues_survive_a_change_of_everything() -> None:
    """Two run, three wait: another backend set, other bounds, another order of classes. All are answered; those who
    wait go to the new backend at once."""
    gate = Gate()
    async with Fake(gate.script) as a, Fake(gate.script) as b, House(pool(a.url, concurrency=2), [a, b]) as house:
        running = [await begun(house) for _ in range(2)]
        queued = [await waiting(house) for _ in range(3)]
        later = pool(
            b.url, concurrency=9, routing="least_tokens", classes={"batch": {}, "interactive": {"max_queued": 1}}
        )
        apply(house, later)
        await house.eventually(lambda: b.hits == 3, "who waited runs on the new backend")
        assert a.hits == 2
        gate.open.set()
        answers = await ended(house, *running, *queued)
        assert all(answer.status == 200 and answer.body.endswith(DONE) for answer in answers)
        assert [line["outcome"] for line in house.lines] == ["ok"] * 5
        assert not house.remains()


async def test_a_pool_that_is_gone_serves_those_who_began_before() -> None:
    """Who waits there waits on; the pool goes when the last of them has ended, and its connections with it."""
    gate = Gate()
    async with Fake(gate.script) as a, Fake(healthy) as b, House(pool(a.url, concurrency=1), [a, b]) as house:
        running, queued = await begun(house), await waiting(house)
        later = pool(b.url)
        later["pools"] = {"q": later["pools"]["p"]}
        later["models"] = {"n": {"pool": "q"}}
        apply(house, later)
        assert (await house.ask(chat(model="n"))).status == 200
        assert (await house.ask(chat(model="m"))).error()["code"] == "model_not_found"
        assert set(house.gateway.dispatcher.pools) == {"p", "q"}
        gate.open.set()
        answers = await ended(house, running, queued)
        assert [answer.status for answer in answers] == [200, 200]
        await house.eventually(lambda: set(house.gateway.dispatcher.pools) == {"q"}, "the pool goes")
        await house.eventually(lambda: not a.tasks, "its connections go")
        assert not house.remains()


async def test_a_pool_that_returns_is_the_same_pool() -> None:
    """Taken out and back while a stream runs there: its load still counts, so no place is given twice."""
    gate = Gate()
    async with Fake(gate.script) as a:
        before = pool(a.url, concurrency=1)
        other = json.loads(json.dumps(before).replace('"p"', '"q"').replace(a.url, "http://127.0.0.1:1"))
        async with House(before, [a]) as house:
            running = await begun(house)
            apply(house, other)
            apply(house, before)
            queued = await waiting(house)
            assert a.hits == 1
            gate.open.set()
            assert [answer.status for answer in await ended(house, running, queued)] == [200, 200]
            await house.eventually(lambda: set(house.gateway.dispatcher.pools) == {"p"}, "the other pool goes")
            assert not house.remains()


async def test_whoever_began_is_judged_by_what_held_then() -> None:
    """Key taken away, model renamed, body bound lowered while a body is being sent: it is answered. The next one meets
    what holds now."""
    tenants = {"t": {"keys": [{"sha256": DIGEST}]}}
    async with Fake(healthy) as a, House(pool(a.url, tenants=tenants), [a]) as house:
        slow = house.connect()
        request = chat(BEARER)
        slow.feed(request[:-5])
        await house.eventually(lambda: house.turns == 1, "its body is read")
        (x,) = house.gateway.active
        assert x.generation == 1
        strangers = {"t": {"keys": [{"sha256": "0" * 64}]}}
        later = pool(a.url, tenants=strangers, models={"other": {"pool": "p"}}, server={"max_body": "10B"})
        apply(house, later)
        assert (await house.ask(chat(BEARER))).status == 401
        slow.feed(request[-5:])
        assert (await ended(house, slow))[0].status == 200
        assert not house.remains()


async def test_a_class_that_is_gone_still_takes_who_chose_it_before() -> None:
    """Its body arrives when the class is no longer configured."""
    gate = Gate()
    classes: dict[str, Any] = {"interactive": {}, "batch": {}, "night": {}}
    tenants = {"t": {"keys": [{"sha256": DIGEST}], "classes": ["interactive", "night"]}}
    async with Fake(gate.script) as a:
        config = pool(a.url, concurrency=1, classes=classes, tenants=tenants)
        async with House(config, [a]) as house:
            running = await begun(house, BEARER)
            queued = await waiting(house, BEARER, "x-headrace-class: night")
            slow = house.connect()
            request = chat(BEARER, "x-headrace-class: night", stream=True)
            slow.feed(request[:-5])
            await house.eventually(lambda: house.turns == 3, "its body is read")
            tenants["t"]["classes"] = ["interactive"]
            apply(house, pool(a.url, concurrency=1, tenants=tenants))
            slow.feed(request[-5:])
            gate.open.set()
            answers = await ended(house, running, queued, slow)
            assert [answer.header("x-headrace-class") for answer in answers] == ["interactive", "night", "night"]
            assert [answer.status for answer in answers] == [200] * 3
            assert not house.remains()


async def test_what_was_learned_outlives_a_reload() -> None:
    """The index of prompts, the estimates of lengths, and the connections to a backend that stays."""
    async with Fake(healthy) as a, House(pool(a.url), [a]) as house:
        long = "x" * 5000
        assert (await house.ask(chat(messages=[{"role": "user", "content": long}]))).status == 200
        known = house.gateway.dispatcher.pools["p"].statistics()
        assert known.index_pieces == 4
        apply(house, pool(a.url, concurrency=3, timeouts={"total": "30s"}, api_key="env:HOME"))
        assert house.gateway.dispatcher.pools["p"].statistics().index_pieces == 4
        assert (await house.ask(chat())).status == 200
        assert a.accepts == 1
        assert a.requests[1].header("authorization")
        assert not house.remains()


async def test_other_limits_get_back_what_was_held_under_those_before() -> None:
    """A place that was taken before the change is free when its stream ends, and its rates are settled."""
    gate = Gate()
    async with Fake(gate.script) as fake:
        limits = {"requests_per_minute": 60, "tokens_per_minute": 6000, "concurrent": 1}
        config = pool(fake.url, tenants={"t": {"keys": [{"sha256": DIGEST}], "limits": limits}})
        async with House(config, [fake]) as house:
            running = await begun(house, BEARER)
            limits |= {"tokens_per_minute": 12_000, "concurrent": 2}
            apply(house, config)
            held = {str(each.limit.kind): each.used for each in house.gateway.quota.usage()["t"]}
            assert held["concurrent"] == 1
            gate.open.set()
            await ended(house, running)
            await house.eventually(lambda: not house.remains(), "it has left")
            left = {str(each.limit.kind): each.used for each in house.gateway.quota.usage()["t"]}
            assert left["concurrent"] == 0
            assert left["tokens"] < min(50, held["tokens"])


async def test_backends_are_back_when_nobody_asks_for_their_health_any_more() -> None:
    """A path that answers nothing good took them out; without probes nothing would ever bring them back."""
    async with Fake(healthy, control=lambda _: (404, b"{}")) as fake:
        config = pool(fake.url)
        config["pools"]["p"]["health"] = {"path": "/nowhere", "interval": "100ms"}
        async with House(config, [fake]) as house:
            await house.eventually(lambda: len(fake.probes) > 3, "it is probed")
            assert (await house.ask(chat())).status == 503
            config["pools"]["p"]["health"] = {"interval": "0s"}
            apply(house, config)
            assert (await house.ask(chat())).status == 200


async def test_what_cannot_be_done_here_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discovery by Kubernetes where there is none: no part of such a configuration holds."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = pool("http://127.0.0.1:1")
    async with House(config, []) as house:
        gateway = house.gateway
        before, pools = gateway.generation, gateway.dispatcher.pools.copy()
        config["pools"]["k"] = {"discovery": {"kubernetes": {"service": "vllm", "port": 8000}}}
        config["models"] = {"m": {"pool": "p"}, "k": {"pool": "k"}}
        with pytest.raises(Undiscoverable):
            apply(house, config)
        assert gateway.generation is before
        assert gateway.dispatcher.pools == pools


async def test_backends_that_were_found_or_added_get_the_settings_of_their_pool() -> None:
    """As those do that stand in the file: they are the same backends, with other clocks."""
    config = pool("http://127.0.0.1:1")
    told = config["pools"]["p"]
    config["pools"]["q"] = {name: told[name] for name in ("engine", "timeouts", "health", "signals")}
    config["pools"]["q"]["discovery"] = {"dns": "nowhere.invalid:1"}
    config["models"] = {"m": {"pool": "p"}, "n": {"pool": "q"}}
    async with House(config, []) as house:
        fleet, settings = house.gateway.fleet, house.gateway.settings
        change(fleet, "add", "p", "http://127.0.0.1:2", partial(assembly.backend, settings), 0.0)
        fleet.discovered(fleet.rosters["q"], [Endpoint("127.0.0.1", 3)])
        told["timeouts"]["idle"] = "7s"
        apply(house, config)
        found = {name: each for rest in house.gateway.dispatcher.pools.values() for name, each in rest.backends.items()}
        assert {name[-1]: backend.timeouts.idle for name, backend in found.items()} == {"1": 7.0, "2": 7.0, "3": 7.0}


async def test_residency_is_kept() -> None:
    """Retries included: a tenant of one region is served there or not at all, whoever else could."""
    tenants = {"t": {"keys": [{"sha256": DIGEST}], "residency": ["eu"]}}

    async def broken(connection: FakeConnection) -> None:
        await connection.request()
        connection.reset()

    async with Fake(broken) as a, Fake(healthy) as b:
        config = pool(a.url, b.url, tenants=tenants)
        first, second = config["pools"]["p"]["backends"]
        first["region"], second["region"] = "eu", "us"
        async with House(config, [a, b]) as house:
            answer = await house.ask(chat(BEARER))
            assert (answer.status, answer.error()["code"]) == (502, "upstream_error")
            assert (a.hits, b.hits) == (1, 0)
            second["region"] = "eu"
            apply(house, config)
            assert (await house.ask(chat(BEARER))).status == 200
            assert b.hits == 1
            assert not house.remains()


async def test_nobody_of_a_region_is_served_elsewhere() -> None:
    """However often, and whoever is idle there; other tenants are served anywhere."""
    tenants = {"t": {"keys": [{"sha256": DIGEST}], "residency": ["eu"]}}
    async with Fake(healthy) as a, Fake(healthy) as b:
        config = pool(a.url, b.url, tenants=tenants, routing="round_robin")
        first, second = config["pools"]["p"]["backends"]
        first["region"], second["region"] = "eu", "us"
        async with House(config, [a, b]) as house:
            for _ in range(4):
                assert (await house.ask(chat(BEARER))).status == 200
            assert (a.hits, b.hits) == (4, 0)
            del tenants["t"]["residency"]
            apply(house, config)
            for _ in range(4):
                assert (await house.ask(chat(BEARER))).status == 200
            assert b.hits == 2
            assert not house.remains()


async def test_a_decision_that_was_made_is_carried_out() -> None:
    """Who waits gets a place, and before it wakes up the backend of that place is taken out: it is served there."""
    gate = Gate()
    async with Fake(gate.script) as a, Fake(healthy) as b, House(pool(a.url, concurrency=1), [a, b]) as house:
        running, queued = await begun(house), await waiting(house)
        apply(house, pool(a.url, concurrency=2))
        apply(house, pool(b.url))
        await house.eventually(lambda: a.hits == 2, "it goes where it was sent")
        gate.open.set()
        assert [answer.status for answer in await ended(house, running, queued)] == [200, 200]
        assert b.hits == 0
        assert not house.remains()
