"""Backends that come, go, hang and lie. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from gateway import assembly
from gateway.discovery import Cluster, Dns, Kubernetes, Source
from gateway.metrics import Histogram
from gateway.roster import Search
from loadtests.nameserver import Mood, name_server
from tests.faults.fakes import DONE, Fake, FakeConnection, Request, completion, event, healthy, silent, well
from tests.faults.process import FULL, GatewayProcess, pool, times
from tests.faults.rawclient import Response, ask, chat
from tests.gateway.test_discovery import ApiServer, at, piece
from tests.path.house import House

pytestmark = pytest.mark.anyio

WATCHED: dict[str, Any] = {
    "health": {"interval": "1s", "unhealthy_after": 3, "healthy_after": 2},
    "signals": {"interval": "250ms"},
    "routing": "round_robin",
    "concurrency": 64,
}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class Load:
    """Requests at a rate, from many clients. `answers` are in the order of their sending, with what each took."""

    def __init__(self, gateway: GatewayProcess, per_s: float = 50.0, **fields: Any) -> None:
        self.answers: list[tuple[float, float, Response]] = []
        self._gateway = gateway
        self._request = chat(**fields)
        self._pause_s = 1.0 / per_s

    async def run(self, seconds: float) -> list[Response]:
        """For so long. Returns the answers of this time."""
        begun, number, asked = time.monotonic(), 0, []
        while time.monotonic() < begun + seconds:
            asked.append(asyncio.create_task(self._one()))
            number += 1
            await asyncio.sleep(max(0.0, begun + number * self._pause_s - time.monotonic()))
        return list(await asyncio.gather(*asked))

    async def _one(self) -> Response:
        sent = time.monotonic()
        response = await ask(self._gateway.port, self._request)
        self.answers.append((sent, time.monotonic() - sent, response))
        return response


def statuses(answers: list[Response]) -> dict[int, int]:
    return dict(Counter(answer.status for answer in answers))


async def up(gateway: GatewayProcess, *fakes: Fake) -> None:
    """Until every backend has passed its probes."""

    async def found() -> bool:
        states = [await gateway.metric("headrace_backend_state", backend=fake.url, state="up") for fake in fakes]
        return all(state == 1 for state in states)

    await gateway.eventually(found, "all backends are up", timeout_s=10)


async def test_b057_a_dead_backend_leaves_and_returns(tmp_path: Path) -> None:
    """Killed under load: no client sees it; it gets a few connects and then only probes; back again it has its share
    within two probe intervals."""
    async with (
        Fake(healthy, control=well) as a,
        Fake(healthy, control=well) as b,
        GatewayProcess(pool(a.url, b.url, **WATCHED), tmp_path) as gateway,
    ):
        await up(gateway, a, b)
        load = Load(gateway)
        await load.run(1.0)
        await a.stop()
        assert set(statuses(await load.run(4.0))) == {200}
        assert await gateway.metric("headrace_backend_state", backend=a.url, state="down") == 1
        assert await gateway.metric("headrace_upstream_failures_total", backend=a.url) <= 2 + 2
        await a.start()
        await load.run(2.0 + 1.0)
        before = a.hits, b.hits
        assert set(statuses(await load.run(2.0))) == {200}
        share = (a.hits - before[0]) / (a.hits - before[0] + b.hits - before[1])
        assert 0.4 <= share <= 0.6
        await gateway.settled([a, b])


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


async def test_a_backend_that_is_down_is_told_once(tmp_path: Path) -> None:
    """A reload that changes how it is watched finds it as it was: no second line, and no second ejection."""
    async with Fake(healthy, control=well) as a, Fake(healthy, control=well) as b:
        await b.stop()
        config, http = await administered(tmp_path, a.url, b.url)
        async with http, GatewayProcess(config, tmp_path) as gateway:
            await up(gateway, a)
            await gateway.eventually(lambda: (b.url, "down") in gateway.states, "it is told")
            config["pools"]["p"] |= {"health": WATCHED["health"] | {"interval": "500ms"}}
            gateway.write(config)
            answer = await http.post(f"http://127.0.0.1:{gateway.admin_port}/admin/reload")
            assert answer.json()["result"] == "applied"
            probes = len(a.probes)
            await gateway.eventually(lambda: len(a.probes) > probes + 4, "it is watched on")
            assert gateway.states.count((b.url, "down")) == 1
            assert await gateway.metric("headrace_ejections_total", backend=b.url) == 1
            await b.start()
            await up(gateway, b)


async def test_b059_a_backend_that_is_loading_gets_nothing(tmp_path: Path) -> None:
    """Its port is open, its health is 503, then it serves no model yet: no request before two good probes."""
    ready, listed = False, False

    def loading(request: Request) -> tuple[int, bytes] | None:
        if request.target == "/health" and not ready:
            return 503, b""
        return well(request) if listed or request.target != "/v1/models" else (200, b'{"object":"list","data":[]}')

    async with (
        Fake(healthy, control=well) as a,
        Fake(healthy, control=loading) as b,
        GatewayProcess(pool(a.url, b.url, **WATCHED), tmp_path) as gateway,
    ):
        await up(gateway, a)
        load = Load(gateway)
        assert set(statuses(await load.run(len(times(18, 2))))) == {200}
        ready = True
        assert set(statuses(await load.run(2.0))) == {200}
        assert b.hits == 0
        listed = True
        assert set(statuses(await load.run(3.0))) == {200}
        assert b.hits > 20
        good = [probe.at for probe in b.probes if probe.target == "/health"]
        assert len([at for at in good if at < b.requests[0].at]) >= 2
        await gateway.settled([a, b])


async def test_b061_a_slow_probe_now_and_then_changes_nothing(tmp_path: Path) -> None:
    """Every third probe is never answered while requests are: it stays. Three in a row take it out, two bring it
    back."""
    asked, dead = 0, False

    def slow(request: Request) -> tuple[int, bytes] | None:
        nonlocal asked
        if request.target != "/health":
            return well(request)
        asked += 1
        return None if dead or asked % 3 == 0 else well(request)

    health = {"interval": "300ms", "unhealthy_after": 3, "healthy_after": 2}
    async with (
        Fake(healthy, control=slow) as a,
        GatewayProcess(pool(a.url, **WATCHED | {"health": health}), tmp_path) as gateway,
    ):
        await up(gateway, a)
        await gateway.begin()
        load = Load(gateway, 20)
        assert set(statuses(await load.run(len(times(60, 5))))) == {200}
        assert asked >= 10
        assert gateway.states == []
        dead = True
        await gateway.eventually(lambda: (a.url, "down") in gateway.states, "it is out")
        assert (await ask(gateway.port, chat())).status == 503
        dead = False
        await up(gateway, a)
        assert (await ask(gateway.port, chat())).status == 200


async def failing(connection: FakeConnection) -> None:
    """Answers every request with 500 at once."""
    while True:
        await connection.request()
        await connection.answer(b'{"error":{"message":"x"}}', "500 Internal Server Error")


async def test_b062_a_broken_backend_that_prefixes_prefer_is_avoided(tmp_path: Path) -> None:
    """All prompts share a prefix that the broken one holds: five clients may see it, no more, and later only trials go
    there."""
    prompt = [{"role": "user", "content": "word " * 2000}]
    async with Fake(healthy, control=well) as a, Fake(healthy, control=well) as b:
        config = pool(a.url, b.url, **WATCHED | {"routing": "prefix_affinity"})
        async with GatewayProcess(config, tmp_path) as gateway:
            await up(gateway, a, b)
            request = chat(messages=prompt)
            await ask(gateway.port, request)
            broken, other = (a, b) if a.hits else (b, a)
            await broken.play(failing)
            begun = time.monotonic()
            answers = [await ask(gateway.port, request) for _ in range(200)]
            took = time.monotonic() - begun
            assert len([answer for answer in answers[:5] if answer.status != 200]) <= 5
            assert {answer.status for answer in answers[5:]} == {200}
            assert broken.hits <= 5 + 1 + took / 1.0
            assert other.hits >= 195


async def test_b063_it_starts_whatever_is_down(tmp_path: Path) -> None:
    """With one backend down the other serves; with both down it is up and says so; each joins without a restart."""
    async with Fake(healthy, control=well) as a, Fake(healthy, control=well) as b:
        await a.stop()
        await b.stop()
        begun = time.monotonic()
        async with GatewayProcess(pool(a.url, b.url, **WATCHED), tmp_path) as gateway:
            assert (await gateway.get("/livez")).status_code == 200
            assert time.monotonic() - begun < 10.0
            await gateway.eventually(lambda: len(gateway.states) >= 2, "both are known to be down")
            begun = time.monotonic()
            answer = await ask(gateway.port, chat())
            assert time.monotonic() - begun < 0.1 + 0.2
            assert (answer.status, answer.error()["code"]) == (503, "no_backend_available")
            assert 1 <= int(answer.header("retry-after") or "0") <= 60
            await b.start()
            await up(gateway, b)
            assert (await ask(gateway.port, chat())).status == 200
            await a.start()
            await up(gateway, a)


async def test_b064_models_are_told_whoever_is_down(tmp_path: Path) -> None:
    """One backend is silent, one refuses: the list comes at once, always the same, and nobody is asked for it."""
    async with Fake(silent) as a, Fake(healthy, control=well) as b, Fake(healthy) as c:
        await c.stop()
        async with GatewayProcess(pool(a.url, b.url, c.url, **WATCHED), tmp_path) as gateway:
            await up(gateway, b)
            asked = len(b.probes)
            begun = time.monotonic()
            listed = []
            for _ in range(20):
                began = time.monotonic()
                listed.append(await ask(gateway.port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"))
                assert time.monotonic() - began < 0.5
            assert {answer.status for answer in listed} == {200}
            assert len({answer.body for answer in listed}) == 1
            assert len(b.probes) - asked <= 2 + 10 * (time.monotonic() - begun)


async def test_b065_all_ejected_at_once_recover_at_once(tmp_path: Path) -> None:
    """Both answer 500 for a while: 503 with Retry-After, soon, and no stampede of trials; both recover: served within
    an ejection and a second."""
    broken = True

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            if broken:
                await connection.answer(b"{}", "500 Internal Server Error")
            else:
                await connection.answer(completion())

    async with (
        Fake(script, control=well) as a,
        Fake(script, control=well) as b,
        GatewayProcess(pool(a.url, b.url, **WATCHED), tmp_path) as gateway,
    ):
        await up(gateway, a, b)
        load = Load(gateway, 100)
        seconds = len(times(5, 3))
        answers = await load.run(seconds)
        refused = [answer for answer in answers if answer.status == 503]
        assert set(statuses(answers)) == {500, 503}
        assert len(refused) > 0.9 * len(answers)
        assert all(1 <= int(answer.header("retry-after") or "0") <= 60 for answer in refused)
        took = sorted(took for _, took, answer in load.answers if answer.status == 503)
        assert took[len(took) // 2] < 0.05
        assert max(a.hits, b.hits) <= 5 + 1 + seconds  # a trial a second at most
        broken = False
        recovered = time.monotonic()
        await load.run(5.0)
        first = min(sent for sent, _, answer in load.answers if answer.status == 200 and sent > recovered - 1)
        assert first - recovered < 4.0 + 1.0
        assert statuses([answer for sent, _, answer in load.answers if sent > first + 1.0]).keys() == {200}


async def test_a_backend_that_is_stopped_is_out_within_seconds(tmp_path: Path) -> None:
    """It accepts and says nothing, like a stopped process: requests that wait there are served elsewhere as soon as its
    probes have failed; nobody sees an error, streams or not."""
    silence = False
    entered: list[FakeConnection] = []

    async def script(connection: FakeConnection) -> None:
        if silence:
            await connection.wait_closed()
        while True:
            await connection.request()
            if silence:
                entered.append(connection)
                await connection.wait_closed()
                return
            await connection.answer(completion())

    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(Fake(script, control=lambda request: None if silence else well(request)))
        b = await stack.enter_async_context(Fake(healthy, control=well))
        config = pool(a.url, b.url, **WATCHED | {"timeouts": {"headers": "30s", "first_token": "30s"}})
        gateway = await stack.enter_async_context(GatewayProcess(config, tmp_path))
        await up(gateway, a, b)
        load = Load(gateway, 20, stream=True)
        await load.run(3.0)
        silence = True
        answers = await load.run(8.0)
        assert set(statuses(answers)) == {200}
        last = max(request.at for request in a.requests)
        stopped = min(sent for sent, took, _ in load.answers if took > 0.5)
        assert last - stopped < 4.0
        assert all(took < 5.0 for _, took, _ in load.answers)


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


async def test_engines_are_asked_at_leisure_and_on_one_connection(tmp_path: Path) -> None:
    """Four times a second, never in step, all on the connection that the probes use; what it costs is told. A backend
    that is busy with requests is asked all the same, and none of it waits."""

    def engine(request: Request) -> tuple[int, bytes] | None:
        return well(request) if request.target != "/metrics" else (200, b"vllm:num_requests_running 3\n")

    async with (
        Fake(healthy, control=engine) as a,
        GatewayProcess(pool(a.url, engine="vllm", **WATCHED), tmp_path) as gateway,
    ):
        await up(gateway, a)

        def scrapes() -> list[float]:
            return [request.at for request in a.probes if request.target == "/metrics"]

        await gateway.eventually(lambda: len(scrapes()) > 12, "a dozen of them", timeout_s=20)
        assert a.accepts == 1
        gaps = [later - sooner for sooner, later in pairwise(scrapes())]
        assert 0.2 < sorted(gaps)[len(gaps) // 2] < 0.5
        assert len({round(gap, 3) for gap in gaps}) > 3
        assert await gateway.metric("headrace_scrape_seconds", backend=a.url) > 0
        assert await gateway.metric("headrace_engine_running_requests", backend=a.url) == 3


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


async def administered(tmp_path: Path, *urls: str, **told: Any) -> tuple[dict[str, Any], httpx.AsyncClient]:
    (tmp_path / "token").write_text("of-the-admin")
    config = pool(*urls, **WATCHED | {"server": {"admin_token": f"file:{tmp_path}/token"}} | told)
    return config, httpx.AsyncClient(timeout=10, headers={"authorization": "Bearer of-the-admin"})


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
