"""What the gateway knows of its backends, and what it makes of that: over reloads, while they load, when they go."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any

import pytest

from gateway import assembly
from gateway.errors import Refused
from gateway.fleetadmin import change, listed
from gateway.metrics import Numbers
from policies.verdicts import Found
from tests.faults.fakes import DONE, Fake, Request, healthy, well
from tests.faults.process import pool
from tests.faults.rawclient import chat
from tests.path.house import House
from tests.path.test_reload import Gate, apply, begun, ended

pytestmark = pytest.mark.anyio

HEALTH = {"interval": "100ms", "healthy_after": 1}


def watched(*urls: str, interval: str = "100ms", **told: Any) -> dict[str, Any]:
    return pool(*urls, **{"health": HEALTH | {"interval": interval}, "signals": {"interval": "100ms"}} | told)


def known(house: House) -> dict[str, dict[str, Any]]:
    """Each backend as the admin port shows it."""
    return {each["backend"]: each for each in listed(house.gateway.fleet, house.gateway.clock())}


def states(house: House) -> set[str]:
    return {each["state"] for each in known(house).values()}


class Engine:
    """The control of a vLLM that says when it began, and of what kind its health is."""

    def __init__(self, health: int = 200) -> None:
        self.health = health
        self.started = 1000.0

    def __call__(self, request: Request) -> tuple[int, bytes] | None:
        if request.target == "/metrics":
            capacity = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="2048"} 1\n'
            return 200, capacity + b"process_start_time_seconds %f\n" % self.started
        return (self.health, b"") if request.target == "/health" else well(request)


@pytest.mark.parametrize("interval", ["100ms", "200ms"])
async def test_a_reload_forgets_nothing_of_a_backend_that_stays(interval: str) -> None:
    """It has been restarted once. Whether it is watched as before or otherwise: what runs there still counts, it is the
    same process, and what its engine said is known."""
    gate, engine = Gate(), Engine()
    async with Fake(gate.script, control=engine) as a, House(watched(a.url), [a]) as house:
        await house.eventually(lambda: known(house)[a.url]["kv_tokens"], "it is scraped")
        engine.started = 2000.0
        await house.eventually(lambda: known(house)[a.url]["incarnation"] == 1, "it was restarted")
        running = await begun(house)
        apply(house, watched(a.url, interval=interval))
        told = known(house)[a.url]
        assert (told["running"], told["incarnation"], told["kv_tokens"]) == (1, 1, 32_768)
        probes = len(a.probes)
        await house.eventually(lambda: len(a.probes) > probes + 4, "it is watched on")
        assert known(house)[a.url]["incarnation"] == 1
        gate.open.set()
        assert (await ended(house, running))[0].body.endswith(DONE)


async def test_a_stream_survives_a_change_of_its_backend_s_watch() -> None:
    """On an engine that does not know the path which others have for their health, and is taken for well."""
    gate = Gate()
    async with Fake(gate.script, control=Engine(404)) as a, House(watched(a.url), [a]) as house:
        await house.eventually(lambda: states(house) == {"up"}, "it is up")
        running = await begun(house)
        apply(house, watched(a.url, interval="110ms"))
        probes = len(a.probes)
        await house.eventually(lambda: len(a.probes) > probes + 10, "it is watched on")
        assert not running.response().complete
        gate.open.set()
        assert (await ended(house, running))[0].body.endswith(DONE)


@pytest.mark.parametrize("drains", ["answers 503", "listens no more"])
async def test_a_backend_that_was_taken_out_finishes_what_it_has(drains: str) -> None:
    """Also while it says that it is not well, or takes no new connections: so does whoever ends in order."""
    gate, engine = Gate(), Engine()
    async with (
        Fake(gate.script, control=engine) as a,
        Fake(healthy, control=well) as b,
        House(watched(a.url), [a, b]) as house,
    ):
        await house.eventually(lambda: states(house) == {"up"}, "it is up")
        running = await begun(house)
        apply(house, watched(b.url))
        engine.health = 503
        if drains == "listens no more":
            assert a._server is not None
            a._server.close()
        await asyncio.sleep(1.0)  # three times as long as a silent one would have
        assert not running.response().complete
        gate.open.set()
        assert (await ended(house, running))[0].body.endswith(DONE)


async def test_backends_that_load_get_nothing_though_nobody_else_is_there() -> None:
    """They say so, and are not silent."""
    async with (
        Fake(healthy, control=Engine(503)) as a,
        Fake(healthy, control=Engine(503)) as b,
        House(watched(a.url, b.url), [a, b]) as house,
    ):
        await house.eventually(lambda: states(house) == {"down"}, "both are down")
        assert (await house.ask(chat())).error()["code"] == "no_backend_available"
        assert a.hits == b.hits == 0


async def test_another_process_is_not_blamed_for_what_the_one_before_did() -> None:
    """It hung, was ejected for a minute, ended and was started again: it serves as soon as its probes are good, and
    counts as one other process, however long it was away."""
    async with (
        Fake(healthy, control=well) as a,
        Fake(healthy, control=well) as b,
        House(watched(a.url, b.url), [a, b]) as house,
    ):
        await house.eventually(lambda: states(house) == {"up"}, "both are up")
        watched_pool = house.gateway.dispatcher.pools["p"]
        for _ in range(4):
            watched_pool.health.ended(a.url, Found.FAULT, house.gateway.clock(), cost_s=30.0)
        watched_pool.refresh()
        assert known(house)[a.url]["state"] == "ejected"
        await a.stop()
        await house.eventually(lambda: known(house)[a.url]["state"] == "down", "it is down")
        await asyncio.sleep(0.5)  # and asked again and again
        await a.start()
        await house.eventually(lambda: states(house) == {"up"}, "it is up")
        assert known(house)[a.url]["incarnation"] == 1


async def test_a_machine_that_cannot_be_reached_is_not_known_to_have_ended() -> None:
    """No route there, as when the network is down: it is the same process that is silent, with all that it holds."""
    unreachable = "http://255.255.255.255:9"
    async with Fake(healthy, control=well) as a, House(watched(a.url, unreachable), [a]) as house:
        sights = house.gateway.fleet.rosters["p"].sights
        await house.eventually(lambda: known(house)[unreachable]["state"] == "down", "it is down")
        assert (sights[unreachable].gone, sights[unreachable].silent) == (False, True)
        assert known(house)[unreachable]["incarnation"] == 0


async def test_who_rests_serves_where_the_others_are_drained() -> None:
    """One of two is drained, and the other asks to be left alone: nobody better is there."""
    async with Fake(healthy) as a, Fake(healthy) as b, House(pool(a.url, b.url), [a, b]) as house:
        fleet, settings, now = house.gateway.fleet, house.gateway.settings, house.gateway.clock()
        change(fleet, "drain", "p", a.url, partial(assembly.backend, settings), now)
        watched_pool = house.gateway.dispatcher.pools["p"]
        watched_pool.health.rest(b.url, now + 60.0)
        watched_pool.refresh()
        assert (await house.ask(chat())).status == 200
        assert (a.hits, b.hits) == (0, 1)


async def test_an_ejection_is_told_where_nobody_watches() -> None:
    """Without probes and without metrics of the engine: in the log, and in the count."""
    async with Fake(healthy) as a, Fake(healthy) as b, House(pool(a.url, b.url), [a, b]) as house:
        config = pool(a.url, b.url)
        config["pools"]["p"]["health"] = {"interval": "0s"}
        apply(house, config)
        for _ in range(4):
            house.gateway.dispatcher.pools["p"].health.ended(a.url, Found.FAULT, house.gateway.clock())
        await house.eventually(lambda: house.lines, "it is told")
        told = house.lines[0]
        assert (told["event"], told["backend"], told["state"]) == ("backend", a.url, "ejected")
        found = {family.name: family for family in house.gateway.metrics()}["headrace_ejections_total"]
        assert isinstance(found, Numbers) and found.values["p", a.url, "ejected"] == 1


async def test_a_backend_is_changed_without_its_pool_where_only_one_has_it() -> None:
    """Else the pools are named, or what was given for one is told to be none."""
    async with Fake(healthy, control=well) as a, Fake(healthy, control=well) as b:
        config = watched(a.url)
        config["pools"]["q"] = watched(b.url)["pools"]["p"]
        async with House(config, [a, b]) as house:
            fleet, now = house.gateway.fleet, house.gateway.clock()
            make = partial(assembly.backend, house.gateway.settings)
            told = change(fleet, "drain", None, b.url, make, now)
            assert (told["pool"], told["state"]) == ("q", "draining")
            for action, pool, url, words in (
                ("add", None, "http://127.0.0.1:9", "Name the pool: one of p, q"),
                ("drain", None, "http://127.0.0.1:9", "Name the pool: one of p, q"),
                ("drain", "r", b.url, "There is no pool 'r': it is one of p, q"),
                ("drain", "p", b.url, f"is not in the pool: there are {a.url}"),
            ):
                with pytest.raises(Refused, match=re.escape(words)):
                    change(fleet, action, pool, url, make, now)
