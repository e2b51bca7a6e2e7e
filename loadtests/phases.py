"""The phases of one arm's turn: JSON requests, streams, memory. Each takes a Rig and returns figures.

CPU is read over a steady window only: the clients are connected and served before it opens and go on after it closes.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass

from loadtests import machine
from loadtests.loadgen import Caller, Client, Clock, Crowd, LoadFailed, Reader, Sleeper, Tally, request
from loadtests.peers import KEY

CALLERS = 16
# While the streams run, these ask for short ones: the time to first token under load.
PROBES = 4
PROBE_PAUSE_S = 0.02
WARM_S = 0.5
WARM_REQUESTS = 256
SLEEPERS = 8
# Never-read clients are given this long until the buffers on the way to them are full.
FILL_S = 2.0


@dataclass(frozen=True, slots=True)
class Rig:
    """The processes of one turn. `proxy_pid` is None when the client speaks to the origin itself."""

    clock: Clock
    cores: tuple[int, int]
    port: int
    origin_port: int
    origin_pid: int
    proxy_pid: int | None

    def proxy(self) -> list[int]:
        return machine.tree(self.proxy_pid) if self.proxy_pid is not None else []

    async def steps(self, order: str) -> None:
        """Tell the origin: on, off, or end (all streams)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.origin_port)
        writer.write(f"GET /steps/{order} HTTP/1.1\r\nhost: origin\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.close()


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds in one window of `wall_s`; `others_s` is what processes that are not ours took of our cores."""

    wall_s: float
    proxy_s: float
    origin_s: float
    client_s: float
    others_s: float

    def shares(self) -> dict[str, float]:
        """The share of a core that each used."""
        parts = {"proxy": self.proxy_s, "origin": self.origin_s, "client": self.client_s, "others": self.others_s}
        return {f"{name}_cpu": seconds / self.wall_s for name, seconds in parts.items()}


async def window(rig: Rig, tally: Tally, seconds: float) -> Spent:
    """Record for `seconds`. The collector is off meanwhile: its pauses would be the client's, not the proxy's."""
    groups = [rig.proxy(), [rig.origin_pid], [os.getpid()]]
    cores = set(rig.cores)
    gc.collect()
    gc.disable()
    try:
        before, busy = [machine.cpu_ns(pids) for pids in groups], sum(map(machine.core_busy_s, cores))
        start = tally.clock()
        tally.recording = True
        await asyncio.sleep(seconds)
        tally.recording = False
        wall_s = tally.clock() - start
        after, busy = [machine.cpu_ns(pids) for pids in groups], sum(map(machine.core_busy_s, cores)) - busy
    finally:
        gc.enable()
    proxy_s, origin_s, client_s = (machine.spent_s(a, b) for a, b in zip(before, after, strict=True))
    return Spent(wall_s, proxy_s, origin_s, client_s, max(0.0, busy - proxy_s - origin_s - client_s))


def quantile(values: list[float], share: float) -> float | None:
    """The value that `share` of the values lie at or below; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def in_ms(values: list[float], prefix: str) -> dict[str, float]:
    """Median and 99th percentile in milliseconds, where there are any."""
    found = {f"{prefix}_p{share}_ms": quantile(values, share / 100) for share in (50, 99)}
    return {name: value * 1e3 for name, value in found.items() if value is not None}


def require_clean(tally: Tally) -> None:
    """Failed requests are cheap ones; a turn with any is no result."""
    if tally.failures:
        raise LoadFailed(", ".join(f"{number} x {why}" for why, number in tally.failures.most_common(3)))


async def json_requests(rig: Rig, seconds: float) -> dict[str, float]:
    """CALLERS closed loops on kept connections."""
    tally = Tally(rig.clock)
    async with Crowd(rig.port) as crowd:
        await crowd.join(CALLERS, lambda: Caller(request(KEY), tally))
        await asyncio.sleep(WARM_S)
        spent = await window(rig, tally, seconds)
        require_clean(tally)
    done = len(tally.latencies)
    if not done:
        raise LoadFailed("no request was completed in the window")
    return {
        "us_per_request": spent.proxy_s / done * 1e6,
        "requests_per_s": done / spent.wall_s,
        **in_ms(tally.latencies, "request"),
        **spent.shares(),
    }


async def streams(rig: Rig, number: int, seconds: float) -> dict[str, float]:
    """`number` long streams, a token each in every step of their engine, and short ones beside them."""
    tally, probed = Tally(rig.clock), Tally(rig.clock)
    steady, probe = request(KEY, "steady"), request(KEY, "short")
    async with Crowd(rig.port) as crowd:
        await crowd.join(number, lambda: Reader(steady, tally))
        await rig.steps("on")
        await crowd.join(PROBES, lambda: Reader(probe, probed, pause_s=PROBE_PAUSE_S))
        await asyncio.sleep(WARM_S)
        probed.recording = True
        spent = await window(rig, tally, seconds)
        probed.recording = False
        require_clean(tally)
        require_clean(probed)
        await rig.steps("end")
        await asyncio.sleep(WARM_S)
    chunks = tally.events + probed.events
    if not chunks:
        raise LoadFailed("no chunk came in the window")
    return {
        "streams": number,
        "us_per_chunk": spent.proxy_s / chunks * 1e6,
        "chunks_per_s": chunks / spent.wall_s,
        **in_ms(probed.first_tokens, "ttft"),
        **in_ms(tally.all_gaps(), "gap"),
        **spent.shares(),
    }


async def idle_memory(rig: Rig, number: int) -> dict[str, float]:
    """Resident memory per open stream on which nothing happens."""
    await warm(rig)
    idle, tally = request(KEY, "steady"), Tally(rig.clock)
    grown = await growth(rig, number, lambda: Reader(idle, tally), WARM_S)
    await rig.steps("end")
    return {"kb_per_idle_stream": grown / 1e3}


async def unread_memory(rig: Rig) -> dict[str, float]:
    """Resident memory per client that asks for an endless stream and never reads it."""
    await warm(rig)
    flood, tally = request(KEY, "flood"), Tally(rig.clock)
    return {"kb_per_unread_stream": await growth(rig, SLEEPERS, lambda: Sleeper(flood, tally), FILL_S) / 1e3}


async def warm(rig: Rig) -> None:
    """Enough requests that the proxy has allocated what it keeps anyway."""
    tally = Tally(rig.clock, recording=True)
    async with Crowd(rig.port) as crowd:
        await crowd.join(CALLERS, lambda: Caller(request(KEY), tally))
        while len(tally.latencies) < WARM_REQUESTS:
            await asyncio.sleep(0.05)
            require_clean(tally)
    await asyncio.sleep(WARM_S)


async def growth(rig: Rig, number: int, make: Callable[[], Client], settle_s: float) -> float:
    """Bytes of resident memory that each of `number` such clients adds, `settle_s` after all have begun."""
    before = machine.rss_bytes(rig.proxy())
    async with Crowd(rig.port) as crowd:
        await crowd.join(number, make)
        await asyncio.sleep(settle_s)
        return (machine.rss_bytes(rig.proxy()) - before) / number
