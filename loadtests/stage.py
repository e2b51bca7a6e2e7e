"""What a run with faults needs: four emulated backends, each behind a relay that can misbehave, a name server that
lists them, a Valkey that counts the limits, and one gateway before them all; and somebody who watches it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from pathlib import Path

import httpx

from gateway.processes import Running, StartFailed, running
from loadtests.faultrelay import FaultRelay
from loadtests.nameserver import NameServer, name_server
from loadtests.valkey import Valkey

KEY = "chaos"
ENGINE = "llama-3-8b-h100"
SERVICE, ZONE, TTL_S = "_engine._tcp.chaos.test", "chaos.test", 1
READY_S = 30.0
LOOK_S = 0.5
SETTLES_S = 15.0
POOL = {
    "engine": "vllm",
    "health": {"interval": "1s"},
    "retries": {"attempts": 3},  # three may be ill at once, the fourth never is
    "timeouts": {"headers": "20s", "first_token": "20s", "idle": "10s"},
}
# The index of prefixes mirrors the engines' caches, and fills over them: with small ones it is full within a minute
KV_TOKENS = 32_768
# So high that nobody meets them: what is counted is what a failing store costs, not what limits refuse.
LIMITS = {"requests_per_minute": "10M", "tokens_per_minute": "10000M", "concurrent": "100k"}
# What has to be zero when nobody asks any more.
CONNECTIONS = "headrace_upstream_connections"  # idle ones close after four seconds
REQUESTS = ("headrace_in_flight_requests", "headrace_queued_requests", "headrace_held_requests")
USED = (*REQUESTS, CONNECTIONS, "headrace_in_flight_tokens", "headrace_queued_tokens", "headrace_kv_tokens")


@dataclass(frozen=True, slots=True)
class Size:
    """Of the gateway, while nobody asks."""

    descriptors: int
    tasks: int
    resident_bytes: int
    cpu_s: float  # that it has had since it began


@dataclass
class Stage:
    """What is running. `lies` are the invariants that did not hold, as they were seen."""

    folder: Path
    relays: list[FaultRelay]
    names: NameServer
    store: Valkey
    gateway: Running
    unlisted: set[int] = field(default_factory=set)  # numbers of relays
    lies: list[str] = field(default_factory=list)
    retries: float = inf  # that were left at the worst moment

    @property
    def api_port(self) -> int:
        return int(self.gateway.announced["api"].rsplit(":", 1)[1])

    @property
    def spared(self) -> FaultRelay:
        """The backend that is never touched, so that every request could have been served."""
        return self.relays[-1]

    @property
    def log(self) -> str:
        return (self.folder / "gateway.log").read_text()

    def tries(self) -> dict[str, int]:
        """How many backends each request was sent to, by its id, as the gateway's log says."""
        lines = (json.loads(line) for line in self.log.splitlines() if line.startswith('{"') and line.endswith("}"))
        return {line["request_id"]: line["attempts"] for line in lines if line.get("event") == "request"}

    def publish(self) -> None:
        """Let the name server list the relays where they are."""
        listed = [n for n in range(len(self.relays)) if n not in self.unlisted]
        self.names.zone = {(f"b{n}.{ZONE}", "A"): (TTL_S, ["127.0.0.1"]) for n in listed}
        ports = [f"0 0 {self.relays[n].port} b{n}.{ZONE}." for n in listed]
        self.names.zone[SERVICE, "SRV"] = (TTL_S, ports)

    async def samples(self) -> dict[str, float]:
        """What the gateway's metrics say, by name and labels. Raises httpx.HTTPError."""
        async with httpx.AsyncClient(timeout=5) as http:
            text = (await http.get(f"{self.gateway.announced['admin']}/metrics")).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    async def size(self) -> Size:
        tasks = int((await self.samples())["headrace_tasks"])
        proc = Path(f"/proc/{self.gateway.process.pid}")
        pages = int((proc / "statm").read_text().split()[1])
        ticks = sum(map(int, (proc / "stat").read_text().rpartition(")")[2].split()[11:13]))  # proc(5): utime, stime
        descriptors = len(list((proc / "fd").iterdir()))
        return Size(descriptors, tasks, pages * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK"))

    @asynccontextmanager
    async def watched(self, waiting: Callable[[], int]) -> AsyncIterator[None]:
        """The invariants hold at every moment of the block. `waiting`: how many clients have no end yet."""
        watching = asyncio.create_task(self._watch(waiting))
        try:
            yield
        finally:
            watching.cancel()
            (end,) = await asyncio.gather(watching, return_exceptions=True)
            if not isinstance(end, asyncio.CancelledError):
                self.lies.append(f"nobody watched any more: {end!r}")

    async def _watch(self, waiting: Callable[[], int]) -> None:
        unclaimed = 0
        while True:
            before = waiting()
            try:
                samples = await self.samples()
            except (httpx.HTTPError, ValueError) as error:
                self.lies.append(f"metrics did not answer: {error!r}")
            else:
                self.lies += [f"negative: {name}" for name, value in samples.items() if value < 0 and counts(name)]
                self.retries = min(self.retries, samples['headrace_retry_budget{pool="p"}'])
                held = sum(samples[name] for name in samples if name.startswith(REQUESTS))
                unclaimed = unclaimed + 1 if held > max(before, waiting()) else 0
                if unclaimed == 5:  # one that left may not have been noticed at a single look
                    self.lies.append("more requests in the gateway than there are clients")
            await asyncio.sleep(LOOK_S)

    async def settled(self) -> list[str]:
        """What is left in the gateway though nobody asks any more."""
        left: list[str] = []
        for _ in range(int(SETTLES_S / 0.1)):
            samples = await self.samples()
            left = [f"{name} {value:g}" for name, value in samples.items() if value and name.startswith(USED)]
            if not left and samples['headrace_limiter_mode{mode="shared"}'] != 1:
                left = ["limits are not shared again"]
            if not left:
                break
            await asyncio.sleep(0.1)
        return left

    async def _ready(self) -> None:
        """Every backend serves. Raises StartFailed."""
        for _ in range(int(READY_S / 0.1)):
            up = [name for name, value in (await self.samples()).items() if value and is_up(name)]
            if len(up) == len(self.relays):
                return
            await asyncio.sleep(0.1)
        raise StartFailed(f"not all backends are up:\n{self.log[-2000:]}")


def counts(name: str) -> bool:
    """Whether a metric may never be negative."""
    return name.partition("{")[0].endswith(("_requests", "_tokens", "_total", "_connections", "_tasks"))


def is_up(name: str) -> bool:
    return name.startswith("headrace_backend_state{") and 'state="up"' in name


def configuration(folder: Path, names: NameServer, store: Valkey) -> Path:
    """The gateway's file."""
    (folder / "secret").write_text("a-secret-of-the-chaos")
    key = {"sha256": sha256(KEY.encode()).hexdigest()}
    whole = {
        "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "pools": {"p": POOL | {"discovery": {"dns": f"{SERVICE}:1", "nameserver": names.address}}},
        "models": {"m": {"pool": "p"}},
        "tenants": {"crowd": {"keys": [key], "operator": True, "limits": LIMITS}},
        "state": {"url": f"redis://127.0.0.1:{store.port}/0"},
        "security": {"secret": f"file:{folder}/secret"},
    }
    path = folder / "headrace.yaml"
    path.write_text(json.dumps(whole))
    return path


@asynccontextmanager
async def stage(folder: Path, backends: int = 4, engine: str = ENGINE) -> AsyncIterator[Stage]:
    """Everything is up, and ends with the block. `engine`: whose times the backends have, one of `PROFILES`."""
    async with name_server() as names:
        with ExitStack() as stack:
            relays = [await _backend(stack, folder, number, engine) for number in range(backends)]
            store = Valkey(folder / "valkey.log")
            stack.callback(store.close)
            await store.start()
            told = ["serve", "--json", "-c", str(configuration(folder, names, store))]
            log = folder / "gateway.log"
            gateway = await asyncio.to_thread(stack.enter_context, running("gateway.cli", told, log))
            here = Stage(folder, relays, names, store, gateway)
            here.publish()
            await here._ready()
            yield here


async def _backend(stack: ExitStack, folder: Path, number: int, engine: str) -> FaultRelay:
    told = ["emulate", "--port=0", "--json", f"--engine={engine}", f"--seed={number}", f"--kv-tokens={KV_TOKENS}"]
    log = folder / f"emulator-{number}.log"
    up = await asyncio.to_thread(stack.enter_context, running("gateway.cli", told, log))
    relay = FaultRelay(int(up.announced["url"].rsplit(":", 1)[1]))
    await relay.start()
    stack.callback(relay.stop)
    return relay


def tracebacks(log: str) -> Iterator[str]:
    """One line for each."""
    for part in log.split("Traceback (most recent call last)")[1:]:
        yield f"a traceback in the log: {part.strip().splitlines()[-1][:100]}"
