"""Backends that are found, changed and replaced at run time. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway import assembly
from gateway.discovery import Cluster, Dns, Kubernetes, Source
from gateway.metrics import Histogram
from gateway.roster import Search
from loadtests.nameserver import Mood, name_server
from tests.faults.fakes import DONE, Fake, FakeConnection, Request, event, healthy, well
from tests.faults.process import FULL, GatewayProcess, pool
from tests.faults.rawclient import ask, chat
from tests.faults.watched import WATCHED, Load, administered, statuses, up
from tests.gateway.test_discovery import ApiServer, at, piece
from tests.path.house import House

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def in_dns(port: int, folder: Path) -> AsyncIterator[tuple[Source, Callable[[bool, list[str]], None]]]:
    """A name that may be asked for its addresses, and what sets them and whether the name server answers."""
    async with name_server() as server:

        def tell(answers: bool, addresses: list[str]) -> None:
            server.mood = Mood.ANSWERS if answers else Mood.SILENT
            server.zone = {("vllm.svc", "A"): (1, addresses)}

        yield Dns("vllm.svc", port, server.address), tell


@asynccontextmanager
async def in_kubernetes(port: int, folder: Path) -> AsyncIterator[tuple[Source, Callable[[bool, list[str]], None]]]:
    """The same of a service. Who is taken out while nobody may watch leaves an endpoint without an address behind."""
    server = ApiServer()
    (folder / "token").write_text("secret")
    async with server.serve() as url:

        def tell(answers: bool, addresses: list[str]) -> None:
            server.token = "secret" if answers else "another"
            server.quiet("MODIFIED", piece("s1", at("", ready=True), *(at(each, ready=True) for each in addresses)))
            server.drop()

        yield Kubernetes(Cluster(url, folder / "token"), "models", "vllm", port, Random(1)), tell


def told_of(house: House, url: str) -> list[str]:
    """The metrics that have a series of a backend."""
    return [
        family.name
        for family in house.gateway.metrics()
        if any(url in key for key in (family.children if isinstance(family, Histogram) else vars(family)["values"]))
    ]


@pytest.mark.parametrize("found_in", [in_dns, in_kubernetes])
async def test_b058_who_was_removed_while_nobody_could_ask_is_no_ghost(
    tmp_path: Path, found_in: Callable[[int, Path], AbstractAsyncContextManager[Any]]
) -> None:
    """B058: the source fails, one of two goes meanwhile, the source is back: within its interval no request, no probe
    and no gauge is the one's that went. When it names nobody nobody is asked, and who asks is told so."""
    async with (
        Fake(healthy, control=well) as a,
        Fake(healthy, control=well, host="127.0.0.2", port=a.port) as b,
        found_in(a.port, tmp_path) as (source, tell),
        House(pool(a.url, **WATCHED), [a, b]) as house,
    ):
        gateway, settings = house.gateway, house.gateway.settings
        tell(True, ["127.0.0.1", "127.0.0.2"])
        make = partial(assembly.backend, settings)
        search = Search(source, partial(make, "p"), "source")
        gateway.fleet.plan(assembly.plans(settings), {}, {"p": search}, make)
        watched = gateway.dispatcher.pools["p"]
        await house.eventually(lambda: len(watched.backends) == 2 and a.probes and b.probes, "both are found")
        assert told_of(house, a.url)
        tell(False, ["127.0.0.2"])
        await asyncio.sleep(5.0 if FULL else 1.0)
        assert len(watched.backends) == 2, "who is known stays known while nobody can be asked"
        assert gateway.not_ready() == "" and (await house.ask(chat())).status == 200
        tell(True, ["127.0.0.2"])
        back = time.monotonic()
        await house.eventually(lambda: list(watched.backends) == [b.url], "the one is gone")
        assert time.monotonic() - back < 6.0  # a look that was under way, and the next one
        hits, probes = a.hits, len(a.probes)
        for _ in range(10):
            assert (await house.ask(chat())).status == 200
        await asyncio.sleep(1.2)  # more than the interval of the probes
        assert (a.hits, len(a.probes), told_of(house, a.url)) == (hits, probes, [])
        assert gateway.not_ready() == ""
        tell(True, [])
        await house.eventually(lambda: not watched.backends, "nobody is left")
        refused = await house.ask(chat())
        assert (refused.status, refused.error()["code"]) == (503, "no_backend_available")
        assert told_of(house, b.url) == []
        assert house.faults == []


async def test_a_backend_that_does_not_serve_the_model_gets_no_traffic_for_it(tmp_path: Path) -> None:
    """And the metrics say why."""
    async with (
        Fake(healthy, control=lambda request: well(request, "other")) as a,
        Fake(healthy, control=well) as b,
        GatewayProcess(pool(a.url, b.url, **WATCHED), tmp_path) as gateway,
    ):
        await up(gateway, b)
        await gateway.eventually(lambda: len(a.probes) >= 4, "it was asked")
        assert set(statuses(await Load(gateway).run(1.0))) == {200}
        assert a.hits == 0
        assert await gateway.metric("headrace_backend_state", backend=a.url, state="wrong_model") == 1
        await gateway.settled([b])


async def test_an_adapter_is_asked_of_who_has_loaded_it(tmp_path: Path) -> None:
    """Two backends with one base model, of which one lists an adapter, too: its requests go there, those of the base
    model to both; when the other has loaded it as well it takes a part."""
    loaded = ["m"]
    models = {"m": {"pool": "p"}, "m-sql": {"pool": "p", "upstream_name": "sql-adapter"}}
    async with (
        Fake(healthy, control=lambda request: well(request, "m", "sql-adapter")) as a,
        Fake(healthy, control=lambda request: well(request, *loaded)) as b,
        GatewayProcess(pool(a.url, b.url, models=models, engine="openai", **WATCHED), tmp_path) as gateway,
    ):
        await up(gateway, a, b)
        for model, hits in (("m-sql", (8, 0)), ("m", (4, 4))):
            before = a.hits, b.hits
            assert statuses([await ask(gateway.port, chat(model=model)) for _ in range(8)]) == {200: 8}
            assert (a.hits - before[0], b.hits - before[1]) == hits, model
        loaded.append("sql-adapter")

        async def shared() -> bool:
            before = b.hits
            await asyncio.gather(*(ask(gateway.port, chat(model="m-sql")) for _ in range(4)))
            return b.hits > before

        await gateway.eventually(shared, "the other takes a part", timeout_s=10)
        await gateway.settled([a, b])


async def test_where_any_name_is_forwarded_the_backends_say_which_there_are(tmp_path: Path) -> None:
    """`/v1/models` is the sum of theirs; a request goes to who lists its model, or to anybody where nobody does."""
    models = {"*": {"pool": "p"}}

    async def listed(gateway: GatewayProcess) -> list[str]:
        answer = await ask(gateway.port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        return [each["id"] for each in answer.json()["data"]]

    async with (
        Fake(healthy, control=lambda request: well(request, "x", "both")) as a,
        Fake(healthy, control=lambda request: well(request, "y", "both")) as b,
        GatewayProcess(pool(a.url, b.url, models=models, engine="openai", **WATCHED), tmp_path) as gateway,
    ):
        await up(gateway, a, b)
        assert await listed(gateway) == ["both", "x", "y"]
        one = await ask(gateway.port, b"GET /v1/models/x HTTP/1.1\r\nHost: x\r\n\r\n")
        assert one.json()["id"] == "x"
        for model, hits in (("x", (8, 0)), ("y", (0, 8)), ("both", (4, 4)), ("z", (4, 4))):
            before = a.hits, b.hits
            assert statuses([await ask(gateway.port, chat(model=model)) for _ in range(8)]) == {200: 8}
            assert (a.hits - before[0], b.hits - before[1]) == hits, model
        await b.stop()
        await gateway.eventually(lambda: (b.url, "down") in gateway.states, "one is down")
        assert "y" in await listed(gateway)
        assert (await ask(gateway.port, chat(model="y"))).status == 503


async def test_b066_requests_on_a_vanished_backend_do_not_wait_for_ever(tmp_path: Path) -> None:
    """Twenty are in flight when it falls silent and is taken out: whoever has seen nothing is served elsewhere, whoever
    has gets an error frame, all within seconds."""
    silence = False

    async def begun(connection: FakeConnection) -> None:
        await connection.request()
        if a.hits % 2:
            await connection.stream_head()
            await connection.chunk(event("t0"))
        await connection.wait_closed()

    async with Fake(begun, control=lambda request: None if silence else well(request)) as a:
        config, http = await administered(tmp_path, a.url)
        config["pools"]["p"] |= {"timeouts": {"headers": "60s", "first_token": "60s", "idle": "60s"}}
        config["pools"]["p"]["retries"] = {"budget": "100%"}
        async with http, GatewayProcess(config, tmp_path) as gateway, Fake(healthy, control=well) as b:
            await up(gateway, a)
            admin = f"http://127.0.0.1:{gateway.admin_port}/admin/backends"
            asked = [asyncio.create_task(ask(gateway.port, chat(stream=True))) for _ in range(20)]
            await gateway.eventually(lambda: a.hits == 20, "all are in flight")
            assert (await http.post(f"{admin}/add", json={"url": b.url})).status_code == 200
            await up(gateway, b)
            silence = True
            removed = time.monotonic()
            assert (await http.post(f"{admin}/remove", json={"url": a.url})).json()["state"] == "removed"
            answers = await asyncio.gather(*asked)
            assert time.monotonic() - removed < 2.0 + 2.0
            framed = [answer for answer in answers if b'data: {"error"' in answer.body]
            whole = [answer for answer in answers if DONE in answer.body]
            assert (len(framed), len(whole)) == (10, 10)
            assert await gateway.metric("headrace_backend_state", backend=a.url) == 0
            await gateway.eventually(lambda: not a.open_requests, "nothing is left open there")


async def test_backends_are_changed_at_run_time(tmp_path: Path) -> None:
    """One is added, drained, put back and removed; a reload of the file changes none of that; the gauges of who is gone
    are gone."""
    async with Fake(healthy, control=well) as a, Fake(healthy, control=well) as b:
        config, http = await administered(tmp_path, a.url)
        async with http, GatewayProcess(config, tmp_path) as gateway:
            await up(gateway, a)
            admin = f"http://127.0.0.1:{gateway.admin_port}/admin"
            refused = await http.post(f"{admin}/backends/add", json={"url": "ftp://x"})
            assert refused.status_code == 400
            assert (await gateway.get("/admin/backends")).status_code == 401
            assert (await http.post(f"{admin}/backends/add", json={"url": b.url})).json()["backend"] == b.url
            await up(gateway, a, b)
            await Load(gateway).run(0.5)
            assert a.hits and b.hits
            assert (await http.post(f"{admin}/backends/drain", json={"url": a.url})).json()["state"] == "draining"
            assert (await http.post(f"{admin}/reload")).status_code == 200
            before = a.hits
            assert statuses(await Load(gateway).run(0.5)).keys() == {200}
            assert a.hits == before
            told = {each["backend"]: each for each in (await http.get(f"{admin}/backends")).json()["backends"]}
            assert {url: each["state"] for url, each in told.items()} == {a.url: "draining", b.url: "up"}
            assert told[b.url]["models"] == ["m"]
            await http.post(f"{admin}/backends/undrain", json={"url": a.url})
            assert (await http.post(f"{admin}/backends/remove", json={"url": b.url})).json()["state"] == "removed"
            before = b.hits
            assert statuses(await Load(gateway).run(0.5)).keys() == {200}
            assert (b.hits, a.hits > 0) == (before, True)
            assert b.url not in (await gateway.get("/metrics")).text
            probes = len(b.probes)
            await asyncio.sleep(1.5)
            assert len(b.probes) == probes


async def test_a_restarted_engine_is_another_backend(tmp_path: Path) -> None:
    """Its metrics say that the process is younger: what it held is forgotten; its memory bounds what it may run."""
    started = 1000.0

    def engine(request: Request) -> tuple[int, bytes] | None:
        if request.target != "/metrics":
            return well(request)
        told = f"process_start_time_seconds {started}\nvllm:num_requests_running 3\nvllm:kv_cache_usage_perc 0.5\n"
        return 200, told.encode() + b'vllm:cache_config_info{block_size="16",num_gpu_blocks="2048"} 1\n'

    async with Fake(healthy, control=engine) as a:
        config, http = await administered(tmp_path, a.url)
        del config["pools"]["p"]["backends"][0]["concurrency"]
        async with http, GatewayProcess(config, tmp_path) as gateway:
            await up(gateway, a)
            admin = f"http://127.0.0.1:{gateway.admin_port}/admin/backends"

            async def told() -> dict[str, Any]:
                found: dict[str, Any] = (await http.get(admin)).json()["backends"][0]
                return found

            async def heard() -> bool:
                return (await told())["kv_tokens"] is not None

            await gateway.eventually(heard, "it was scraped")
            first = await told()
            assert (first["kv_tokens"], first["kv_share"], first["engine_running"]) == (32_768, 0.5, 3.0)
            assert first["signal_age_s"] < 2.0
            assert await gateway.metric("headrace_engine_kv_tokens") == 32_768
            started = 2000.0
            await gateway.eventually(lambda: (a.url, "restarted") in gateway.states, "the restart is seen")
            assert (await told())["incarnation"] == first["incarnation"] + 1
            assert (await ask(gateway.port, chat())).status == 200


async def test_counters_that_go_back_again_and_again_are_no_restarts(tmp_path: Path) -> None:
    """One that fails every request and whose clock is wrong would be acquitted with every look at its metrics."""
    looks = 0

    def engine(request: Request) -> tuple[int, bytes] | None:
        nonlocal looks
        if request.target != "/metrics":
            return well(request)
        looks += 1
        return 200, b"vllm:num_requests_running 0\nvllm:generation_tokens_total %d\n" % (1000 - looks)

    async with Fake(healthy, control=engine) as a:
        config, http = await administered(tmp_path, a.url)
        async with http, GatewayProcess(config, tmp_path) as gateway:
            await up(gateway, a)
            await gateway.eventually(lambda: looks > 8, "its metrics were read again and again")
            assert gateway.states.count((a.url, "restarted")) == 1
