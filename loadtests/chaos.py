"""Faults at random under load, and what came of them: `python -m loadtests.chaos` (make chaos).

Four emulated backends, each behind a relay that can misbehave, before one gateway. A seed decides which backend suffers
what, when and for how long; one backend is always left alone, so that every request could have been served. Judged all
the time: nobody is lied to, nobody is lost who could have been served before his first byte, counts are never negative;
and at the end everything has been given back and nothing has grown.

`--only kill --seconds 20` does one fault to one backend and reports how soon traffic stops and returns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random

import httpx

from gateway.processes import Running, running
from loadtests.crowd import Crowd, Told
from loadtests.faultrelay import FaultRelay, Weather

WARM_S = 5.0
KEY = "chaos"
GROWN = 0.01  # of the resident memory, after the first quarter of a soak
CALM_S = 8.0  # after the last fault
POOL = {
    "engine": "vllm",
    "health": {"interval": "1s"},
    "retries": {"attempts": 3},  # three may be ill at once, the fourth never is
    "timeouts": {"headers": "20s", "first_token": "20s", "idle": "10s"},
}


@dataclass
class Stage:
    """What is running."""

    relays: list[FaultRelay]
    gateway: Running
    api_port: int
    admin: str
    lies: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.gateway.process.pid

    def size(self) -> tuple[int, int]:
        """Open descriptors and resident bytes of the gateway."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def stage(folder: Path, backends: int = 4, speed: float = 1.0) -> AsyncIterator[Stage]:
    """Emulators, relays and a gateway."""
    with ExitStack() as stack:
        relays = []
        for number in range(backends):
            told = ["emulate", "--port=0", "--json", f"--seed={number}", f"--speed={speed:g}"]
            up = await asyncio.to_thread(
                stack.enter_context, running("gateway.cli", told, folder / f"emulator-{number}.log")
            )
            relay = FaultRelay(int(up.announced["url"].rsplit(":", 1)[1]))
            await relay.start()
            stack.callback(relay.stop)
            relays.append(relay)
        pool = POOL | {"backends": [{"url": relay.url} for relay in relays]}
        server = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
        path = folder / "headrace.yaml"
        key = {"sha256": sha256(KEY.encode()).hexdigest()}
        tenants = {"crowd": {"keys": [key], "operator": True}}
        whole = {"server": server, "pools": {"p": pool}, "models": {"m": {"pool": "p"}}, "tenants": tenants}
        path.write_text(json.dumps(whole))
        gateway = await asyncio.to_thread(
            stack.enter_context,
            running("gateway.cli", ["serve", "--json", "-c", str(path)], folder / "gateway.log"),
        )
        port = int(gateway.announced["api"].rsplit(":", 1)[1])
        yield Stage(relays, gateway, port, gateway.announced["admin"])


async def watch(stage: Stage) -> None:
    """The invariants that hold at every moment."""
    async with httpx.AsyncClient(timeout=5) as http:
        while True:
            try:
                text = (await http.get(f"{stage.admin}/metrics")).text
            except httpx.HTTPError as error:
                stage.lies.append(f"metrics did not answer: {error!r}")
            else:
                gauges = [line for line in text.splitlines() if "_requests{" in line and " -" in line]
                stage.lies += [f"negative: {line}" for line in gauges]
            await asyncio.sleep(0.5)


async def settled(stage: Stage) -> list[str]:
    """What is left in the gateway when nobody asks any more."""
    left: list[str] = []
    async with httpx.AsyncClient(timeout=5) as http:
        for _ in range(100):
            text = (await http.get(f"{stage.admin}/metrics")).text
            names = ("headrace_in_flight_requests{", "headrace_queued_requests{")
            left = [line for line in text.splitlines() if line.startswith(names) and float(line.rsplit(" ", 1)[1])]
            if not left:
                return []
            await asyncio.sleep(0.1)
    return left


async def storm(stage: Stage, rng: Random, seconds: float) -> Counter[str]:
    """Faults at random, for so long; the last relay stays as it is."""
    count: Counter[str] = Counter()
    kinds = [weather for weather in Weather if weather is not Weather.FAIR]

    async def suffer(relay: FaultRelay) -> None:
        while True:
            await asyncio.sleep(rng.uniform(2.0, 10.0))
            weather = rng.choice(kinds)
            count[weather.value] += 1
            await relay.turn(weather)
            await asyncio.sleep(rng.uniform(0.5, 6.0))
            await relay.turn(Weather.FAIR)

    tasks = [asyncio.create_task(suffer(relay)) for relay in stage.relays[:-1]]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    stage.lies += [f"the storm broke: {each!r}" for each in results if isinstance(each, Exception)]
    for relay in stage.relays:
        await relay.turn(Weather.FAIR)
    return count


def lost(told: Sequence[Told]) -> list[Told]:
    """Who was refused or failed before the first byte, though a backend was well all the time."""
    return [each for each in told if not each.left and each.status != 200]


def at_share(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def ttft(told: Sequence[Told]) -> list[float]:
    return [each.first_at - each.sent_at for each in told if each.begun]


async def chaos(seconds: float, seed: int, rate: float) -> int:
    """One run. Returns the exit code."""
    rng = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        async with stage(Path(folder)) as here:
            crowd = Crowd(here.api_port, rate, rng, KEY)
            watching = asyncio.create_task(watch(here))
            await crowd.run(WARM_S)
            _, storms = await asyncio.gather(crowd.run(seconds / 2), storm(here, rng, seconds / 2))
            middle = here.size()
            _, more = await asyncio.gather(crowd.run(seconds / 2), storm(here, rng, seconds / 2))
            await crowd.run(CALM_S)
            await crowd.finish()
            left = await settled(here)
            end = here.size()
            watching.cancel()
            posts = sum(len(relay.posts) for relay in here.relays)
            log = (Path(folder) / "gateway.log").read_text()
    told = crowd.told
    lies = here.lies + [each.lie for each in told if each.lie] + left
    lies += ["a traceback in the log"] * log.count("Traceback")
    dropped = [each for each in lost(told) if each.status != 500]  # a backend's own word, passed on
    frames = [each for each in told if each.code == "error frame"]
    print(f"seed {seed}: {len(told)} requests in {seconds:g} s, {posts} attempts ({posts / len(told):.3f} each)")
    print(f"  faults: {', '.join(f'{count} {name}' for name, count in sorted((storms + more).items()))}")
    print(f"  lost before the first byte: {len(dropped)} {dict(Counter((e.status, e.reason) for e in dropped))}")
    print(f"  answered by a backend with 500: {len(lost(told)) - len(dropped)}")
    print(f"  streams that broke, and said so: {len(frames)}; clients that left: {sum(e.left for e in told)}")
    print(f"  TTFT p50 {at_share(ttft(told), 0.5):.3f} s, p99 {at_share(ttft(told), 0.99):.3f} s")
    print(f"  descriptors {middle[0]} -> {end[0]}, resident MiB {middle[1] / 2**20:.1f} -> {end[1] / 2**20:.1f}")
    print(f"  violations: {len(lies)} {lies[:5]}")
    if dropped:
        spared = here.relays[-1].url
        events = [line for line in log.splitlines() if '"event":"backend"' in line]
        print(f"  the spared backend, {spared}, and the others:", *events, sep="\n    ")
    return 1 if lies else 0


async def soak(seconds: float, seed: int, rate: float) -> int:
    """A steady load. Nothing may have grown by more than `GROWN` between a quarter of the time and its end."""
    with tempfile.TemporaryDirectory() as folder:
        async with stage(Path(folder)) as here:
            crowd = Crowd(here.api_port, rate, Random(seed), KEY)
            watching = asyncio.create_task(watch(here))
            sizes = []
            for _ in range(4):
                await crowd.run(seconds / 4)
                await crowd.finish()
                sizes.append(here.size())
                crowd.count()
            left = await settled(here)
            watching.cancel()
    grown = [last / first - 1.0 for first, last in zip(sizes[0], sizes[-1], strict=True)]
    print(f"{crowd.sent} requests in {seconds:g} s, {crowd.failed} of them failed")
    print(f"  descriptors, resident bytes by quarters: {sizes}; grown {grown[0]:+.2%}, {grown[1]:+.2%}")
    lies = here.lies + crowd.lies + left
    print(f"  violations: {len(lies)} {lies[:5]}")
    return 1 if lies or crowd.failed or grown[1] > GROWN else 0


async def all_die(seconds: float, seed: int, rate: float) -> int:
    """All backends are killed; then the first one returns."""
    with tempfile.TemporaryDirectory() as folder:
        async with stage(Path(folder)) as here:
            crowd = Crowd(here.api_port, rate, Random(seed), KEY, leave=0.0)
            await crowd.run(WARM_S)
            struck = time.monotonic()
            for relay in here.relays:
                await relay.turn(Weather.KILL)
            await crowd.run(seconds)
            healed = time.monotonic()
            await here.relays[0].turn(Weather.FAIR)
            await crowd.run(CALM_S)
            await crowd.finish()
            left = await settled(here)
    refused = [each for each in crowd.told if each.status == 503 and each.sent_at < healed]
    took = [each.ended_at - each.sent_at for each in refused]
    served = [each.first_at for each in crowd.told if each.whole and each.first_at > healed]
    since = [each for each in crowd.told if struck <= each.sent_at < healed and not each.begun]
    print(f"all killed: {len(since)} requests in {seconds:g} s, {dict(Counter((e.status, e.reason) for e in since))}")
    print(f"  503 after p50 {at_share(took, 0.5) * 1e3:.1f} ms, p99 {at_share(took, 0.99) * 1e3:.1f} ms")
    print(f"  served {min(served, default=float('inf')) - healed:.2f} s after the first was back")
    lies = [each.lie for each in crowd.told if each.lie] + left
    print(f"  violations: {len(lies)} {lies[:5]}")
    return 1 if lies else 0


async def single(weather: Weather, seconds: float, seed: int, rate: float) -> int:
    """One fault to one of four backends, and everything that the rest must bear."""
    with tempfile.TemporaryDirectory() as folder:
        async with stage(Path(folder)) as here:
            crowd = Crowd(here.api_port, rate, Random(seed), KEY, leave=0.0)
            bad = here.relays[0]
            await crowd.run(2 * WARM_S)
            struck = time.monotonic()
            await bad.turn(weather)
            await crowd.run(seconds)
            healed = time.monotonic()
            await bad.turn(Weather.FAIR)
            await crowd.run(10.0)
            await crowd.finish()
            left = await settled(here)
    before = [each for each in crowd.told if each.sent_at < struck - 0.5]
    during = [each for each in crowd.told if struck - 0.5 <= each.sent_at < healed]
    failed = lost(during)
    posts = [at for relay in here.relays for at in relay.posts]
    hits = [at - struck for at in bad.posts if struck + 2.0 < at < healed]
    back = min((at - healed for at in bad.posts if at > healed), default=float("inf"))
    others = [each for each in during if each.backend != bad.url]
    ratios = [at_share(ttft(others), s) / max(1e-9, at_share(ttft(before), s)) for s in (0.5, 0.95, 0.99)]
    broken = [each for each in during if each.code == "error frame"]
    print(f"{weather.value}: {len(during)} requests during {seconds:g} s, {len(failed)} failed before the first byte")
    print(f"  {dict(Counter((each.status, each.reason) for each in failed))}; streams broken {len(broken)}")
    per_s = len(hits) / max(1.0, seconds - 2.0)
    print(f"  requests to it later than 2 s: {len(hits)} ({per_s:.2f}/s); it is back {back:.1f} s after it is well")
    print(f"  attempts per request {len(posts) / len(crowd.told):.3f}; TTFT p99 {at_share(ttft(during), 0.99):.3f} s;")
    print(f"  of the others p50, p95, p99 x{ratios[0]:.2f}, x{ratios[1]:.2f}, x{ratios[2]:.2f} of before")
    lies = [each.lie for each in crowd.told if each.lie] + left
    print(f"  violations: {len(lies)} {lies[:5]}")
    return 1 if lies else 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--soak", action="store_true", help="no faults; report what has grown")
    parser.add_argument("--all", action="store_true", help="kill all backends")
    parser.add_argument("--only", choices=[each.value for each in Weather], help="this fault, to one backend")
    asked = parser.parse_args()
    code = 0
    for seed in asked.seeds:
        if asked.soak:
            code |= asyncio.run(soak(asked.seconds, seed, asked.rate))
        elif asked.all:
            code |= asyncio.run(all_die(asked.seconds, seed, asked.rate))
        elif asked.only:
            code |= asyncio.run(single(Weather(asked.only), asked.seconds, seed, asked.rate))
        else:
            code |= asyncio.run(chaos(asked.seconds, seed, asked.rate))
    sys.exit(code)


if __name__ == "__main__":
    main()
