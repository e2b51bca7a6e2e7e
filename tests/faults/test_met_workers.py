"""The metrics of several workers, some of which die. The test is named by its public case."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

import pytest

from tests.contract.servers import started
from tests.faults.fakes import DONE, Fake, FakeConnection, event
from tests.faults.process import (
    BEARER,
    DIGEST,
    FULL,
    GROWING,
    GatewayProcess,
    Samples,
    busy,
    pool,
    samples_of,
)
from tests.faults.rawclient import RawClient, Response, chat

pytestmark = pytest.mark.anyio


def served_by(pids: Iterable[int], port: int) -> dict[int, int]:
    """By the port of the client: which of these processes has its connection to `port`."""
    clients: dict[str, int] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, _, _, _, _, _, inode, *_ = line.split()
        if int(local.rpartition(":")[2], 16) == port:
            clients[f"socket:[{inode}]"] = int(remote.rpartition(":")[2], 16)
    found = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if (client := clients.get(str(link.readlink()))) is not None:
                    found[client] = pid
    return found


@dataclass
class Held:
    """A stream that goes on, read as it comes."""

    port: int
    response: Response
    reading: asyncio.Task[None]

    @property
    def last_at(self) -> float:
        return self.response.pieces[-1][0]


async def trickling(connection: FakeConnection) -> None:
    """Tokens without an end, or three of them."""
    while True:
        short = (await connection.request()).json()["user"] == "short"
        await connection.stream_head()
        for number in count():
            await connection.chunk(event("t"))
            await asyncio.sleep(0.1)
            if short and number == 2:
                break
        await connection.chunk(event(finish="stop") + DONE)
        await connection.last_chunk()


@dataclass
class Crowd:
    """Who looks at a gateway, asks it, and holds streams of it open, all at once."""

    gateway: GatewayProcess
    stack: AsyncExitStack
    scrapes: list[tuple[float, Samples]] = field(default_factory=list)

    async def scrape(self) -> None:
        while True:
            begun = time.monotonic()
            text = (await self.gateway.get("/metrics")).text
            self.scrapes.append((time.monotonic() - begun, samples_of(text)))
            await asyncio.sleep(0.1)

    async def load(self) -> None:
        while True:
            with suppress(OSError, TimeoutError):
                async with RawClient(self.gateway.port) as raw:
                    await raw.ask(chat(BEARER, stream=True, user="short"))
            await asyncio.sleep(0.02)

    async def hold(self) -> Held:
        """A stream that has begun; a tenant that has too many is asked to wait."""
        deadline = time.monotonic() + 20 * busy()
        while True:
            raw, response = await self.stack.enter_async_context(RawClient(self.gateway.port)), Response()
            with suppress(OSError):
                await raw.send(chat(BEARER, stream=True, user="held"))
                await raw.read(response, until=b'"t"')
            if response.status == 200:
                return Held(raw.port, response, asyncio.create_task(raw.read(response, 3600.0)))
            assert time.monotonic() < deadline, response
            await asyncio.sleep(0.1)

    async def bear(self, streams: list[Held], victim: int, a: Fake) -> list[Held]:
        """A worker is killed. Returns the streams of the others, which go on."""
        owners = served_by(self.gateway.workers, self.gateway.port)
        lost = [stream.reading for stream in streams if owners[stream.port] == victim]
        kept = [stream for stream in streams if owners[stream.port] != victim]

        async def true() -> bool:
            return await self.gateway.metric("headrace_in_flight_requests") == a.open_requests

        os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        await self.gateway.eventually(true, "the gauge is what is in flight", timeout_s=5 * busy())
        assert not lost or not (await asyncio.wait(lost, timeout=5 * busy()))[1]
        while not all(stream.last_at > killed_at + 0.2 for stream in kept):
            assert time.monotonic() < killed_at + 10 * busy()
            await asyncio.sleep(0.05)
        return kept

    def shrunk(self) -> set[str]:
        """Names of what only grows, and did not."""
        return {
            key[0]
            for (_, before), (_, after) in pairwise(self.scrapes)
            for key, value in before.items()
            if key[0].endswith(GROWING) and after.get(key, -1.0) < value
        }


async def test_b149_the_metrics_of_workers_that_die(tmp_path: Path) -> None:
    """One of the workers is killed again and again, under load: scrapes come in time, no counter shrinks, what was in
    flight in the dead is not any more, files do not pile up, the streams of the others know nothing of it, and what
    the dead had of a tenant's limit comes back."""
    workers, kills, pause_s = (4, 60, 5.0) if FULL else (3, 4, 1.0)
    held, asking, places = 12, 4, 40
    (scratch := tmp_path / "scratch").mkdir()
    async with Fake(trickling) as a, AsyncExitStack() as stack:
        store = stack.enter_context(started("valkey", tmp_path))
        tenants = {"t": {"keys": [{"sha256": DIGEST}], "limits": {"concurrent": places}}}
        config = pool(a.url, concurrency=1000, tenants=tenants) | {"state": {"url": store.url}}
        starting = GatewayProcess(config, tmp_path, {"TMPDIR": str(scratch)}, workers=workers)
        gateway = await stack.enter_async_context(starting)
        crowd = Crowd(gateway, stack)

        async def whole() -> bool:
            return await gateway.metric("headrace_workers") == workers

        streams = [await crowd.hold() for _ in range(held)]
        beside = [asyncio.create_task(each) for each in (crowd.scrape(), *(crowd.load() for _ in range(asking)))]
        bounds = []
        for number in range(kills):
            await gateway.eventually(whole, "all workers serve", timeout_s=30 * busy())
            bounds.append((len(list(scratch.rglob("*"))), gateway.fds))
            streams = await crowd.bear(streams, gateway.workers[number % workers], a)
            streams += [await crowd.hold() for _ in range(held - len(streams))]
            await asyncio.sleep(pause_s)
        await gateway.eventually(whole, "all workers serve", timeout_s=30 * busy())
        streams += [await crowd.hold() for _ in range(places - held - asking)]
        for task in (*beside, *(stream.reading for stream in streams)):
            assert not task.done()
            task.cancel()
        assert await gateway.metric("headrace_worker_restarts_total") == kills
        assert max(took for took, _ in crowd.scrapes) < 0.5 * busy()
        assert crowd.shrunk() == set()
        files, fds = zip(*bounds, strict=True)
        assert max(files) == min(files) == 1 + workers
        assert max(fds) - min(fds) < 20
