"""Backends that come, go, hang and lie. Each test is named by its public case."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.fakes import Fake, FakeConnection, Request, completion, healthy, silent, well
from tests.faults.process import GatewayProcess, pool, times
from tests.faults.rawclient import ask, chat
from tests.faults.watched import WATCHED, Load, administered, statuses, up

pytestmark = pytest.mark.anyio


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
