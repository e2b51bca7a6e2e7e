"""Another configuration for a gateway that works: real processes. Cases of the public collection by their id."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import started
from tests.faults.fakes import DONE, Fake, FakeConnection, event, healthy
from tests.faults.process import BAD_WORDS, DIGEST, KEY, GatewayProcess, pool, times
from tests.faults.rawclient import RawClient, Response, ask, chat
from tests.faults.sink import SERVER, Sink, attributes

pytestmark = pytest.mark.anyio

STREAMS, QUEUED = 200, 50
AUTH = f"Authorization: Bearer {KEY}".encode()
ADMIN = {"admin_token": "env:ADMIN_TOKEN"}


BAD = """\
pools:
  p: {backends: [{url: http://127.0.0.1:1}]}
models:
  m: {pool: q}
"""


class Gate:
    """A backend whose streams begin at once and end when it is let."""

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


@pytest.fixture
async def a() -> AsyncIterator[Fake]:
    async with Fake(healthy) as fake:
        yield fake


@pytest.fixture
async def b() -> AsyncIterator[Fake]:
    async with Fake(healthy) as fake:
        yield fake


def served(response: Response) -> bool:
    return response.status == 200 and response.complete and response.body.endswith(DONE)


async def busy(stack: AsyncExitStack, gateway: GatewayProcess, fakes: list[Fake]) -> list[RawClient]:
    """200 streams that run and a queue that takes no more."""
    clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(STREAMS + QUEUED)]
    for client in clients[:STREAMS]:
        await client.send(chat(stream=True))
    await gateway.eventually(lambda: sum(fake.hits for fake in fakes) == STREAMS, "all run", timeout_s=30)
    for client in clients[STREAMS:]:
        await client.send(chat(stream=True))

    async def full() -> bool:
        return await gateway.metric("headrace_queued_requests") == QUEUED

    await gateway.eventually(full, "all wait", timeout_s=30)
    refused = await ask(gateway.port, chat(stream=True))
    assert (refused.status, refused.header("x-headrace-reason")) == (503, "queue_full")
    return clients


async def answered(clients: list[RawClient]) -> list[bool]:
    """Whether each got its whole stream. They leave."""
    responses = await asyncio.gather(*(client.response(60) for client in clients))
    for client in clients:
        client.close()
    return [served(response) for response in responses]


def before(*urls: str) -> dict[str, Any]:
    """A pool of 200 places, and a queue of 100, of which one tenant may have half."""
    classes = {"interactive": {"max_queued": 2 * QUEUED, "max_wait": "2m"}}
    clocks = {"first_token": "2m", "headers": "2m", "idle": "2m", "total": "5m"}
    return pool(
        *urls,
        routing="least_tokens",
        concurrency=STREAMS // len(urls),
        classes=classes,
        timeouts=clocks,
        server=ADMIN,
    )


async def test_a_reload_loses_no_stream_and_nobody_who_waits(tmp_path: Path) -> None:
    """200 streams run and the queue is full while one backend is taken out, a new one comes, and every bound changes:
    all 250 are answered whole, and so is who comes afterwards."""
    gate = Gate()
    async with AsyncExitStack() as stack:
        a, b, c = [await stack.enter_async_context(Fake(gate.script)) for _ in range(3)]
        gateway = await stack.enter_async_context(GatewayProcess(before(a.url, b.url), tmp_path))
        clients = await busy(stack, gateway, [a, b])
        later = before(b.url, c.url)
        later["classes"] = {"batch": {}, "interactive": {"max_queued": 1, "max_wait": "1m"}}
        later["pools"]["p"] |= {"routing": "price", "retries": {"attempts": 0}}
        answer = await gateway.reloaded(later)
        assert (answer["result"], answer["generation"]) == ("applied", 2)
        gate.open.set()
        assert await answered(clients) == [True] * (STREAMS + QUEUED)
        assert a.hits == STREAMS // 2
        assert served(await ask(gateway.port, chat(stream=True)))
        assert a.hits == STREAMS // 2
        await gateway.settled([b, c], outcomes={"ok": STREAMS + QUEUED + 1, "queue_full": 1})


async def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    """In the same situation: no stream ends, nobody loses the place in the queue, what held goes on to hold; the file
    is told with its line, in the log, in the answer and in the admin API, and a metric says that it is bad."""
    gate = Gate()
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(Fake(gate.script))
        gateway = await stack.enter_async_context(GatewayProcess(before(a.url), tmp_path))
        clients = await busy(stack, gateway, [a])
        held = (await gateway.admin("/admin/config")).json()["configuration"]
        answer = await gateway.reloaded(BAD)
        assert (answer["result"], answer["generation"]) == ("failed", 1)
        (problem,) = answer["problems"]
        assert (problem["file"], problem["line"], problem["key"]) == (str(gateway.path), 4, "models.m.pool")
        now = (await gateway.admin("/admin/config")).json()
        assert (now["configuration"], now["problems"], now["generation"]) == (held, [problem], 1)
        assert await gateway.metric("headrace_config_last_reload_successful") == 0
        assert await gateway.metric("headrace_config_generation") == 1
        await gateway.eventually(lambda: f"{gateway.path}:4:" in gateway.log, "it is logged")
        first, *rest = gateway.log.splitlines()
        assert first.startswith("headrace serves ") and {json.loads(line)["event"] for line in rest} >= {"log"}
        assert (await gateway.get("/readyz")).status_code == 200
        assert await gateway.metric("headrace_queued_requests") == QUEUED
        gate.open.set()
        assert await answered(clients) == [True] * (STREAMS + QUEUED)
        gateway.write(gateway.config)
        await gateway.settled([a], outcomes={"ok": STREAMS + QUEUED, "queue_full": 1})


async def generation(gateway: GatewayProcess, number: int, timeout_s: float = 10.0) -> float:
    """Seconds until this generation holds."""
    begun = time.monotonic()

    async def holds() -> bool:
        return await gateway.metric("headrace_config_generation") == number

    await gateway.eventually(holds, f"generation {number}", timeout_s)
    return time.monotonic() - begun


async def test_a_file_that_asks_for_what_is_not_here_changes_nothing(tmp_path: Path, a: Fake) -> None:
    """It is sound, but this is no cluster. Nothing of it is taken, it is told, and the file is read on."""
    elsewhere = pool(a.url, server=ADMIN, classes={"night": {}})
    elsewhere["pools"]["k"] = {"discovery": {"kubernetes": {"service": "vllm", "port": 8000}}}
    elsewhere["models"] = {name: {"pool": "p"} for name in ("m", "n")} | {"o": {"pool": "k"}}
    async with GatewayProcess(pool(a.url, server=ADMIN), tmp_path) as gateway:
        gateway.write(elsewhere)
        await gateway.eventually(lambda: "works in a cluster only" in gateway.log, "the log tells it")
        assert await gateway.metric("headrace_config_last_reload_successful") == 0
        assert await gateway.metric("headrace_config_generation") == 1
        assert (await ask(gateway.port, chat(model="n"))).status == 404
        gateway.write(pool(a.url, server=ADMIN, classes={"night": {}}))

        async def good() -> bool:
            return await gateway.metric("headrace_config_last_reload_successful") == 1

        await gateway.eventually(good, "the next one is taken")
        assert await gateway.metric("headrace_config_generation") == 2


async def test_a_pipe_in_place_of_the_file_holds_nothing_up(tmp_path: Path, a: Fake) -> None:
    """It is refused like a bad file; the next good file is taken, and the process ends when it should."""
    async with GatewayProcess(pool(a.url, server=ADMIN), tmp_path) as gateway:
        gateway.path.unlink()
        os.mkfifo(gateway.path)
        answer = (await gateway.admin("/admin/reload", "POST")).json()
        assert (answer["result"], answer["problems"][0]["message"]) == (
            "failed",
            "is a pipe, which can be read at the start only",
        )
        assert (await gateway.reloaded(pool(a.url, server=ADMIN, classes={"night": {}})))["result"] == "applied"


async def test_a_file_that_changes_is_taken(tmp_path: Path, a: Fake, b: Fake) -> None:
    """Replaced, written in place, and behind the symbolic links of a Kubernetes ConfigMap that are swapped; a signal
    reads it, too. A bad one is told, and the same good one again is no new generation."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    async with GatewayProcess(pool(a.url, server=ADMIN), tmp_path) as gateway:
        gateway.write(pool(b.url, server=ADMIN))
        await generation(gateway, 2)
        assert (await ask(gateway.port, chat())).status == 200
        assert (a.hits, b.hits) == (0, 1)
        text = gateway.path.read_text().replace(b.url, a.url)
        gateway.path.write_text(text)
        await generation(gateway, 3)
        gateway.path.write_text("pools: [")
        await gateway.eventually(lambda: f"{gateway.path}:1:" in gateway.log, "it is told")
        gateway.path.write_text(text)

        async def good() -> bool:
            return await gateway.metric("headrace_config_last_reload_successful") == 1

        await gateway.eventually(good, "it is good again")
        assert await gateway.metric("headrace_config_generation") == 3
        gateway.path.write_text(text.replace(a.url, b.url))
        gateway.signal(signal.SIGHUP)
        await generation(gateway, 4)
        await gateway.settled([b], sent=1)


async def test_a_configmap_is_taken_when_its_links_are_swapped(tmp_path: Path, a: Fake, b: Fake) -> None:
    """As the kubelet does it: headrace.yaml -> ..data/headrace.yaml, ..data -> ..2026_1, and then -> ..2026_2."""
    gateway = GatewayProcess(pool(a.url, server=ADMIN), tmp_path)
    for number, url in ((1, a.url), (2, b.url)):
        (tmp_path / f"..2026_{number}").mkdir()
        text = json.dumps(gateway.config).replace(a.url, url)
        (tmp_path / f"..2026_{number}" / "headrace.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..2026_1")
    gateway.path.symlink_to("..data/headrace.yaml")
    async with gateway:
        assert (await ask(gateway.port, chat())).status == 200
        (tmp_path / "..data_tmp").symlink_to("..2026_2")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        await generation(gateway, 2)
        assert (await ask(gateway.port, chat())).status == 200
        assert (a.hits, b.hits) == (1, 1)
        await gateway.settled([a, b], sent=2)


async def test_what_only_a_restart_brings_is_named(tmp_path: Path, a: Fake) -> None:
    """The rest of the file is taken; the answer, the admin API and a metric go on telling what waits."""
    async with GatewayProcess(pool(a.url, server=ADMIN), tmp_path) as gateway:
        server = ADMIN | {"listen": "127.0.0.1:1", "drain": "7s"}
        answer = await gateway.reloaded(pool(a.url, server=server))
        assert answer["restart_needed"] == ["~ server.listen: 127.0.0.1:0 -> 127.0.0.1:1"]
        assert "~ server.drain: 30s -> 7s" in answer["changes"]
        assert (await ask(gateway.port, chat())).status == 200
        answer = await gateway.reloaded(pool(a.url, server=server | {"drain": "8s"}))
        assert answer["restart_needed"] == ["~ server.listen: 127.0.0.1:0 -> 127.0.0.1:1"]
        assert answer["changes"] == ["~ server.drain: 7s -> 8s"]
        assert await gateway.metric("headrace_config_restart_pending") == 1
        answer = await gateway.reloaded(pool(a.url, server=ADMIN))
        assert answer["restart_needed"] == []
        await gateway.settled([a], sent=1)


@pytest.mark.parametrize("again", [False, True])
async def test_b162_a_stream_without_end_holds_nothing_up(tmp_path: Path, again: bool) -> None:
    """B162: it runs, and another client keeps a connection open, when the process is told to end: it does within its
    drain, or at once when it is told again. The span of the stream has gone out, and the tenant's place in the shared
    store is free for the next process."""

    async def endless(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        while True:
            await connection.chunk(event("x"))
            await asyncio.sleep(0.05)

    drain_s = 30 if again else 1
    (tmp_path / "next").mkdir()
    with started("valkey", tmp_path) as store:
        async with Sink() as sink, Fake(endless) as a:
            tenants = {"t": {"keys": [{"sha256": DIGEST}], "limits": {"concurrent": 1}}}
            config = pool(a.url, tenants=tenants, server={"drain": f"{drain_s}s"})
            config |= {"state": {"url": store.url}, "telemetry": {"otlp": sink.url, "sample": "100%"}}
            async with GatewayProcess(config, tmp_path) as gateway, RawClient(gateway.port) as idle:
                assert (await idle.ask(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + AUTH + b"\r\n\r\n")).status == 200
                async with RawClient(gateway.port) as client:
                    await client.send(chat(AUTH.decode(), stream=True))
                    await client.response(until=b"x")
                    assert (await ask(gateway.port, chat(AUTH.decode()))).status == 429
                    gateway.signal(signal.SIGTERM)
                    told = time.monotonic()
                    if again:
                        await gateway.eventually(lambda: not_ready(gateway), "it drains")
                        gateway.signal(signal.SIGTERM)
                    assert await gateway.wait(drain_s + 5) == 0
                    assert time.monotonic() - told < min(drain_s, 10) + 5
                assert [line["outcome"] for line in gateway.lines] == ["concurrency_limit", "shutting_down"]
                assert not any(word in gateway.log for word in BAD_WORDS)
            streams = [span for span in sink.of_kind(SERVER) if attributes(span)["headrace.outcome"] == "shutting_down"]
            assert len(streams) == 1
            await a.play(healthy)
            async with GatewayProcess(config, tmp_path / "next") as gateway:
                assert (await ask(gateway.port, chat(AUTH.decode()))).status == 200


async def not_ready(gateway: GatewayProcess) -> bool:
    return (await gateway.get("/readyz")).status_code == 503


async def test_b165_nothing_is_left_of_a_configuration_that_is_gone(tmp_path: Path, a: Fake, b: Fake) -> None:
    """B165: many reloads, backend sets in turn, optional keys left out, every fifth file no YAML. Who was taken out is
    asked for nothing any more and its connections are closed; descriptors and threads stay; a bad file is counted, and
    the gateway stays ready."""
    full = pool(a.url, server=ADMIN, routing="round_robin")
    bare = {
        "server": ADMIN,
        "pools": {"p": {"backends": [{"url": b.url, "concurrency": 16}]}},
        "models": {"m": {"pool": "p"}},
    }
    async with GatewayProcess(full, tmp_path) as gateway:
        number, bad = 1, 0
        fds: list[int] = []
        for turn in times(50, 20):
            told = bare if turn % 2 == 0 else full
            answer = await gateway.reloaded(told)
            number += 1
            assert (answer["result"], answer["generation"]) == ("applied", number)
            assert (await ask(gateway.port, chat())).status == 200
            if turn % 5 == 4:
                answer = await gateway.reloaded("pools: {p: [\n")
                bad += 1
                assert (answer["result"], answer["generation"]) == ("failed", number)
                assert (await gateway.get("/readyz")).status_code == 200
                assert (await ask(gateway.port, chat())).status == 200
            fds.append(gateway.fds)
        assert await gateway.metric("headrace_config_reloads_total", result="failed") == bad
        assert max(fds[5:]) - min(fds[5:]) <= 5
        assert len(os.listdir(f"/proc/{gateway.pid}/task")) < 40  # noqa: PTH208
        gateway.write(bare)
        assert (await gateway.reloaded(bare))["problems"] == []
        await gateway.eventually(lambda: not a.tasks, "the connections to who was taken out are closed")
        hits = a.hits
        await asyncio.gather(*(ask(gateway.port, chat()) for _ in range(8)))
        assert (a.hits, len(a.tasks)) == (hits, 0)
        await gateway.settled([b])


async def test_reloads_at_once_are_taken_one_after_the_other(tmp_path: Path, a: Fake) -> None:
    """Four answers, none of them older than the file that was there when it was asked for."""
    async with GatewayProcess(pool(a.url, server=ADMIN), tmp_path) as gateway:
        gateway.write(pool(a.url, server=ADMIN, concurrency=3))
        answers = await asyncio.gather(*(gateway.admin("/admin/reload", "POST") for _ in range(4)))
        found = [answer.json() for answer in answers]
        assert sorted(each["result"] for each in found) == ["applied"] + ["unchanged"] * 3
        assert {each["generation"] for each in found} == {2}
        await gateway.settled([a])


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_a_reload_is_asked_for_by_post(tmp_path: Path, a: Fake, method: str) -> None:
    """Nothing that fetches addresses sets it off."""
    async with GatewayProcess(pool(a.url, server=ADMIN), tmp_path) as gateway:
        gateway.path.write_text("nothing")
        assert (await gateway.admin("/admin/reload", method)).status_code == 405
        await gateway.settled([a])
