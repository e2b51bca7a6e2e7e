"""How a process ends while it serves, and what its probes say while others fail: cases of the public collection."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import started
from tests.faults.fakes import DONE, Fake, FakeConnection, event, healthy, well
from tests.faults.process import DIGEST, FULL, KEY, GatewayProcess, busy, pool
from tests.faults.rawclient import RawClient, Response, ask, chat
from tests.faults.sink import Sink

pytestmark = pytest.mark.anyio

LEFT_S, DRAIN_S = (6.0, 10) if FULL else (1.5, 3)
NOTICE_S, LINGER_S = (3.0, 5.0) if FULL else (1.0, 2.5)
PER_S, CLIENTS = 100, 10


def streams(seconds: float) -> Any:
    """A backend whose streams take so long."""

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await connection.stream_head()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                await connection.chunk(event("x"))
                await asyncio.sleep(0.1)
            await connection.chunk(event(finish="stop") + DONE)
            await connection.last_chunk()

    return script


async def running(stack: AsyncExitStack, gateway: GatewayProcess, fake: Fake) -> list[RawClient]:
    """Twenty streams that have begun, and five requests that wait behind them."""
    clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(25)]
    for client in clients[:20]:
        await client.send(chat(stream=True))
    await gateway.eventually(lambda: fake.hits == 20, "all run", timeout_s=20)
    for client in clients[20:]:
        await client.send(chat(stream=True))

    async def wait() -> bool:
        return await gateway.metric("headrace_queued_requests") == 5

    await gateway.eventually(wait, "five wait")
    gateway.signal(signal.SIGTERM)
    return clients


async def unready(gateway: GatewayProcess) -> float:
    """Seconds until it says that nobody should come any more."""
    begun = time.monotonic()
    while (await gateway.get("/readyz")).status_code != 503:
        assert time.monotonic() - begun < 5.0
    return time.monotonic() - begun


async def refused(clients: list[RawClient]) -> None:
    """Those who waited are told to come again, at once."""
    for response in await asyncio.gather(*(client.response(2) for client in clients)):
        assert (response.status, response.error()["code"]) == (503, "server_shutting_down")
        assert response.header("retry-after") == "1"


@pytest.mark.parametrize("in_time", [True, False])
async def test_b161_a_drain_is_as_long_as_configured(tmp_path: Path, in_time: bool) -> None:
    """B161: streams that end within it end well, and the process right behind the last of them; others are told by an
    error frame when the time is up, and their upstream connections are closed. Who waits is refused at once."""
    config = pool("", concurrency=20, server={"drain": f"{DRAIN_S}s"})
    async with Fake(streams(LEFT_S if in_time else 20.0)) as a, AsyncExitStack() as stack:
        config["pools"]["p"]["backends"][0]["url"] = a.url
        gateway = await stack.enter_async_context(GatewayProcess(config, tmp_path))
        clients = await running(stack, gateway, a)
        told = time.monotonic()
        assert await unready(gateway) < 0.2 * busy()
        await refused(clients[20:])
        assert time.monotonic() - told < 1.0 * busy()
        answers = await asyncio.gather(*(client.response(30) for client in clients[:20]))
        ended = time.monotonic()
        assert await gateway.wait(DRAIN_S + 5) == 0
        if in_time:
            assert all(answer.complete and answer.body.endswith(DONE) for answer in answers)
            assert time.monotonic() - ended < 1.5 * busy()
        else:
            assert DRAIN_S - 0.5 < ended - told < DRAIN_S + 2.0
            assert all(b'"server_shutting_down"' in answer.body and DONE not in answer.body for answer in answers)
            assert time.monotonic() - told < DRAIN_S + 5
        await gateway.eventually(lambda: not a.tasks, "its upstream connections are closed")
        wanted = ["shutting_down"] * (5 if in_time else 25) + ["ok"] * (20 if in_time else 0)
        assert sorted(line["outcome"] for line in gateway.lines) == sorted(wanted)


async def piped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()


class Balancer:
    """Connections in turn to its `ports`."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.port = 0
        self._turn = 0

    async def __aenter__(self) -> Balancer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn += 1
        behind, before = await asyncio.open_connection("127.0.0.1", self.ports[self._turn % len(self.ports)])
        await asyncio.gather(piped(reader, before), piped(behind, writer))


async def test_b163_a_replica_leaves_behind_a_slow_balancer(tmp_path: Path) -> None:
    """B163: for as long as the balancer needs to notice the replica serves on, and tells each client to come by another
    connection; none of 100 requests a second on kept connections fails, and the process ends well."""
    answers: list[Response] = []
    over = asyncio.Event()

    async def client(balancer: Balancer) -> None:
        while not over.is_set():
            async with RawClient(balancer.port) as one:
                while not over.is_set():
                    answers.append(await one.ask(chat()))
                    if answers[-1].header("connection") == "close":
                        break
                    await asyncio.sleep(CLIENTS / PER_S)

    async with Fake(healthy) as a, AsyncExitStack() as stack:
        config = pool(a.url, concurrency=64, server={"linger": f"{LINGER_S}s", "drain": "5s"})
        first, second = [
            await stack.enter_async_context(GatewayProcess(config, folder))
            for folder in (tmp_path / "1", tmp_path / "2")
            if folder.mkdir() is None
        ]
        async with Balancer([first.port, second.port]) as balancer:
            clients = [asyncio.create_task(client(balancer)) for _ in range(CLIENTS)]
            await first.eventually(lambda: len(first.lines) > 20 and len(second.lines) > 20, "both serve")
            first.signal(signal.SIGTERM)
            await unready(first)
            served = len(first.lines)
            await asyncio.sleep(NOTICE_S)
            assert len(first.lines) > served
            balancer.ports = [second.port]
            assert await first.wait(LINGER_S + 10) == 0
            after = len(second.lines)
            await second.eventually(lambda: len(second.lines) > after + 20, "the other goes on")
            over.set()
            await asyncio.gather(*clients)
        assert {answer.status for answer in answers} == {200}
        assert any(answer.header("connection") == "close" for answer in answers)
        assert all(line["outcome"] == "ok" for gateway in (first, second) for line in gateway.lines)


async def test_b164_probes_depend_on_nobody(tmp_path: Path) -> None:
    """B164: the store is killed, then every backend, then the collector: the process lives and says so in time, and is
    ready all the while, since with it gone nobody would be served any better; metrics tell what is wrong."""
    async with Fake(healthy, control=well) as a, Sink() as sink:
        tenants = {"t": {"keys": [{"sha256": DIGEST}], "limits": {"requests_per_minute": 100_000}}}
        watched = {"health": {"interval": "1s", "unhealthy_after": 2, "healthy_after": 1}}
        config = pool(a.url, tenants=tenants, **watched)
        config["telemetry"] = {"otlp": sink.url, "sample": "100%"}
        auth = f"Authorization: Bearer {KEY}"
        with started("valkey", tmp_path) as store:
            config["state"] = {"url": store.url}
            async with GatewayProcess(config, tmp_path) as gateway:

                async def probed(seconds: float) -> None:
                    until = time.monotonic() + seconds
                    while time.monotonic() < until:
                        for path in ("/livez", "/readyz"):
                            begun = time.monotonic()
                            assert (await gateway.get(path)).status_code == 200
                            assert time.monotonic() - begun < 0.05 * 2 * busy()
                        await asyncio.sleep(0.02)

                assert (await ask(gateway.port, chat(auth))).status == 200
                probing = asyncio.create_task(probed(1.0))
                store.kill()
                assert (await ask(gateway.port, chat(auth))).status == 200
                await probing

                async def degraded() -> bool:
                    return await gateway.metric("headrace_limiter_mode", mode="local_share") == 1

                await gateway.eventually(degraded, "it is told that limits are counted here")
                await a.stop()
                await probed(3.0)
                assert (await ask(gateway.port, chat(auth))).status == 503
                await sink.__aexit__()
                await probed(1.5)
                await a.start()

                async def served() -> bool:
                    return (await ask(gateway.port, chat(auth))).status == 200

                await gateway.eventually(served, "it serves again", timeout_s=10)
