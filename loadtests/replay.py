"""A slice of a public trace, replayed over HTTP in real time through several proxies before emulated engines.

    python -m loadtests.replay [--quick] [--arms nginx,headrace,...] [--times 1 --times 2] [--seconds S] [--out DIR]

Each arm is real processes: a proxy, and emulated backends of its own. All arms run at once and get the same requests at
the same moments, so that what disturbs the machine disturbs all alike. Nobody is told how long an answer will be.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import shake_128
from pathlib import Path
from typing import cast

import click
import uvloop

from loadtests import machine, peers, replayed
from loadtests.loadgen import FIRST_TOKEN_EVENT, Clock, LoadFailed
from loadtests.origin import LAST_CHUNK, MODEL
from loadtests.prose import TOKEN_BYTES
from loadtests.replayed import Outcome, Row
from loadtests.scenario import Scenario
from loadtests.traces import Request, load, names

RESULTS = Path(__file__).parent / "results"
ENGINE = "qwen3-32b-h100"
# Answers have exactly `min_tokens` tokens, or this if that is more: the emulator draws hardly anything on top.
SHORTEST = 4
# Routers register backends one by one after they have answered for the first.
SETTLE_S = 3.0
# Proxies that the table is about: one round robin, nginx, and each peer in its cache-aware mode.
ARMS = ("nginx", "vllm-router rr", "vllm-router cache", "sglang-router cache", "smg cache", "headrace")


@dataclass(frozen=True, slots=True)
class Plan:
    """Which requests come how fast. Seconds are the engines' own, which pass `speed` times as fast as the clock's.

    `capacity`: times the trace's pace that the pool carries; `times` multiplies it.
    """

    trace: str
    seed: int
    start_s: float
    seconds: float
    capacity: float
    times: float
    speed: float
    replicas: int
    drain_s: float = 60.0

    @property
    def scenario(self) -> Scenario:
        return Scenario(trace=self.trace, load=self.times * self.capacity, replicas=self.replicas)


@dataclass(frozen=True, slots=True)
class Call:
    """One request: when it comes (seconds by the clock from the start), its bytes, and the answer's tokens."""

    at_s: float
    limit_s: float
    output_tokens: int
    sent: bytes


def prompt(request: Request, number: int) -> str:
    """As many tokens as the request has, alike with another's as far as the trace says that their prefixes are."""
    pieces = -(-request.prompt_tokens // request.piece_tokens)
    own = (b"%d/%d" % (number, piece) for piece in range(len(request.digests), pieces))
    text = "".join(
        shake_128(name).hexdigest(request.piece_tokens * TOKEN_BYTES // 2) for name in (*request.digests, *own)
    )
    return text[: request.prompt_tokens * TOKEN_BYTES]


def calls(plan: Plan) -> list[Call]:
    """The slice as requests, in the order of arrival. Each says how long its client will wait for a first token."""
    scenario, rate = plan.scenario, plan.times * plan.capacity
    made: list[Call] = []
    for number, request in enumerate(load(plan.trace, plan.seed)):
        at_s = (request.at_s - plan.start_s) / rate
        if not 0.0 <= at_s < plan.seconds or request.prompt_tokens + request.output_tokens > scenario.kv_tokens:
            continue
        tokens, limit_s = max(SHORTEST, request.output_tokens), scenario.ttft_limit_s(request.prompt_tokens)
        messages = [{"role": "user", "content": prompt(request, number)}]
        body = json.dumps({"model": MODEL, "stream": True, "min_tokens": tokens, "messages": messages}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {peers.KEY}\r\n"
        head += f"x-headrace-deadline: {limit_s / plan.speed:.3f}s\r\ncontent-type: application/json\r\n"
        sent = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        made.append(Call(at_s / plan.speed, limit_s / plan.speed, tokens, sent))
    return made


class Listener(asyncio.Protocol):
    """Sends one request and takes the times of its answer. `over` is done when there is nothing more to come."""

    def __init__(self, sent: bytes, clock: Clock) -> None:
        self.sent, self.clock = sent, clock
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = b""
        self.events = 0
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self.transport.write(self.sent)

    def data_received(self, data: bytes) -> None:
        self.status = self.status or data[9:12]
        self.events += data.count(b"\n\n")
        if self.first_s is None and self.events >= FIRST_TOKEN_EVENT:
            self.first_s = self.clock()
        self.tail = (self.tail + data)[-64:]
        if self.status != b"200" or self.tail.endswith(LAST_CHUNK):
            if self.status == b"200" and b"[DONE]" in self.tail:
                self.last_s = self.clock()
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def ask(call: Call, port: int, clock: Clock, start: float, outcome: Outcome) -> None:
    """Send the call when its time has come, and note in `outcome` what became of it."""
    await asyncio.sleep(max(0.0, start + call.at_s - clock()))
    due = start + call.at_s
    outcome.lag_s = clock() - due
    try:
        made = partial(Listener, call.sent, clock)
        _, listener = await asyncio.get_running_loop().create_connection(made, "127.0.0.1", port)
    except OSError:
        outcome.status = "no connection"
        return
    try:
        await listener.over
    finally:
        listener.transport.abort()
        outcome.status = listener.status.decode("latin-1")
        if listener.first_s is not None:
            outcome.ttft_s = listener.first_s - due
            if listener.last_s is not None:
                outcome.tpot_s = (listener.last_s - listener.first_s) / max(1, call.output_tokens - 1)


async def play(made: Sequence[Call], port: int, clock: Clock, start: float, end: float) -> list[Outcome]:
    """All calls through one proxy, until the clock shows `end`: what is open then has not been answered."""
    outcomes = [Outcome(call.limit_s) for call in made]
    tasks = [
        asyncio.create_task(ask(call, port, clock, start, outcome))
        for call, outcome in zip(made, outcomes, strict=True)
    ]
    _, late = await asyncio.wait(tasks, timeout=end - clock())
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return outcomes


@asynccontextmanager
async def served(arm: peers.Arm, plan: Plan, clock: Clock, folder: Path) -> AsyncIterator[int]:
    """The port of an arm's proxy, with fresh backends behind it. Raises LoadFailed where the arm cannot run."""
    scenario = plan.scenario
    ports = [peers.free_port() for _ in range(plan.replicas)]
    site = peers.Site(peers.free_port(), tuple(ports), folder, scenario.slo_tpot_s / plan.speed)
    launch = arm.launch(site)  # before anything is started, since it may not be installed
    options = {"model": MODEL, "engine": ENGINE, "speed": plan.speed, "chunk": scenario.chunk}
    options |= {"max-seqs": scenario.max_seqs, "kv-tokens": scenario.kv_tokens, "mean-output-tokens": 0.001}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    async with AsyncExitStack() as stack:
        logs = [folder / f"backend-{port}.log" for port in ports]
        backends = [
            await stack.enter_async_context(
                peers.running(peers.headrace_command("emulate", "--port", str(port), *flags), log)
            )
            for port, log in zip(ports, logs, strict=True)
        ]
        for process, port, log in zip(backends, ports, logs, strict=True):
            await peers.wait_ready(process, port, clock, log)
        log = folder / "proxy.log"
        proxy = await stack.enter_async_context(peers.running(launch, log))
        await peers.wait_ready(proxy, site.port, clock, log)
        yield site.port


async def replay(arms: Sequence[peers.Arm], plan: Plan, clock: Clock, folder: Path) -> list[Row]:
    """One row of figures per arm, all played at once."""
    made = await asyncio.to_thread(calls, plan)
    rows: list[Row] = []
    ports: dict[str, int] = {}
    async with AsyncExitStack() as stack:
        for arm in arms:
            own = Path(tempfile.mkdtemp(dir=folder))
            try:
                ports[arm.name] = await stack.enter_async_context(served(arm, plan, clock, own))
            except LoadFailed as failure:
                rows.append(Row(arm.name, plan.times, skipped=str(failure)))
        await asyncio.sleep(SETTLE_S)
        start = clock()
        end = start + (plan.seconds + plan.drain_s) / plan.speed
        played = await asyncio.gather(*(play(made, port, clock, start, end) for port in ports.values()))
    for name, outcomes in zip(ports, played, strict=True):
        rows.append(Row(name, plan.times, replayed.figures(outcomes, plan.speed, plan.scenario.slo_tpot_s)))
    return rows


async def replay_all(arms: Sequence[peers.Arm], plans: Sequence[Plan], clock: Clock, folder: Path) -> list[Row]:
    """One plan after the other. SIGTERM ends it in order, so that no backend and no proxy is left behind."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    rows: list[Row] = []
    for plan in plans:
        print(f"{plan.trace} at {plan.times:g} times the capacity", file=sys.stderr)
        rows += await replay(arms, plan, clock, folder)
    return rows


@click.command(context_settings={"show_default": True})
@click.option("--quick", is_flag=True, help="Half a minute with two backends, to see that it works; writes nothing.")
@click.option("--arms", default=",".join(ARMS), help="Comma-separated.")
@click.option("--trace", type=click.Choice(names()), default="conversation")
@click.option("--times", type=float, multiple=True, default=(1.0, 2.0), help="Of the capacity; each is a run.")
@click.option("--seconds", type=float, default=240.0, help="How much is sent, in the engines' time.")
@click.option("--start", type=float, default=600.0, help="Where in the trace the slice begins, in seconds.")
@click.option("--capacity", type=float, default=0.75, help="Times the trace's pace that the pool carries.")
@click.option("--speed", type=float, default=1.0, help="Times as fast as the engines would be.")
@click.option("--replicas", type=int, default=4, help="Backends of each arm.")
@click.option("--seed", type=int, default=1)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.option("--out", type=click.Path(path_type=Path), help=f"[default: {RESULTS.name}, with --quick nowhere]")
def main(quick: bool, arms: str, times: Sequence[float], as_json: bool, out: Path | None, **options: object) -> None:
    """Replay a slice of a trace over HTTP through several proxies at once."""
    if quick:
        arms, times = "nginx,headrace", times[-1:]
        options |= {"seconds": 40.0, "speed": 4.0, "replicas": 2, "capacity": 0.375}
    options["start_s"] = options.pop("start")
    wanted = [name.strip() for name in arms.split(",")]
    chosen = [arm for arm in peers.arms() if arm.name in wanted]
    if unknown := set(wanted) - {arm.name for arm in chosen}:
        raise click.BadParameter(f"there is no {', '.join(sorted(unknown))}", param_hint="--arms")
    machine.allow_many_files()
    plans = [Plan(**options, times=each) for each in times]  # type: ignore[arg-type]  # click has checked the types
    with tempfile.TemporaryDirectory(prefix="headrace-replay-") as folder:
        rows = uvloop.run(replay_all(chosen, plans, time.perf_counter, Path(folder)))
    print(json.dumps([row.document() for row in rows]) if as_json else replayed.markdown(rows))
    if out := out or (None if quick else RESULTS):
        about = ", ".join(f"{name} {value}" for name, value in options.items())
        replayed.write(rows, out, f"{about}; {peers.about(wanted)}")


if __name__ == "__main__":
    main()
