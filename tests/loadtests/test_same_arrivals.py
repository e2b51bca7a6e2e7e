"""The same arrivals give the same dispatch log in the simulator and in the running gateway.

The simulator drives a router and the engines. Here it drives the scheduler once as it always does, and once what the
gateway has around it: `Inside` is a router that hands every call to a real `Dispatcher`, with real requests that are
parsed, real jobs made of their bytes, pools, slots, futures, timers and meters that read real events, on an event loop
whose time is the simulator's. Engines, arrivals and the moments at which signals arrive are then the same by
construction, and whatever the gateway adds or forgets shows as another line in the log: who went where, and when.

Exact, to the nanosecond and line by line, is the log of streamed calls when the gateway counts tokens at once: every
dispatch, its backend and its moment, every refusal and its reason. The gateway asks what is due more often than the
simulator does, at one moment too, and that may change nothing.

Not exact is the gateway's own pace. The simulator tells of every token as it comes; the gateway counts tokens every 10
to 20 ms, since a call for each would cost too much, and ends the prefill of an answer that does not stream when it next
looks. With these the runs must still agree in nearly all that matters. Failures, retries, clients that leave and other
gateways are not in these runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from gateway import pool as gateway_pool
from gateway import wire
from gateway.backend import Backend, Timeouts
from gateway.catalog import Catalog, Model, Tenant
from gateway.dispatch import Dispatcher
from gateway.errors import Unavailable
from gateway.exchange import Dialect, Exchange
from gateway.isolation import Seeds
from gateway.jobs import Jobs
from gateway.pool import Pool
from gateway.reading import BodyMeter
from gateway.sse import Meter
from loadtests.engine import Step
from loadtests.fleet import Fleet, Replica
from loadtests.gateways import scheduler
from loadtests.profiles import S
from loadtests.router import Router
from loadtests.scenario import Scenario
from loadtests.simulation import Simulation
from loadtests.traces import Request
from loadtests.workload import Call
from policies.prefix import digests
from policies.retry import RetryBudget
from policies.scheduler import Scheduler
from policies.types import BackendView, Dispatch, Drop, Ending, Job, Reason, RemoteLoad, Usage
from tests.faults.fakes import completion, event

PIECE = 256  # tokens, of four bytes each: the gateway's own digests then stand where the simulator's do
CALLS = 400
SECRET = b"of the test"
CHAT = wire.ENDPOINTS["/v1/chat/completions"]
HEAD, TAIL = '[{"role":"user","content":"', '"}]'


def prompt(talk: int, tokens: int) -> str:
    """The messages of a conversation that has grown to so many tokens, as JSON."""
    text = "".join(f"{talk}/{line}".ljust(64, ".") for line in range(tokens // 16 + 1))
    return HEAD + text[: tokens * 4 - len(HEAD) - len(TAIL)] + TAIL


def calls(seed: int, *, streamed: float) -> tuple[list[Call], dict[int, str]]:
    """Conversations that grow, from two tenants, faster than four replicas can serve them; and what each says. The
    digests are the gateway's, since they choose the favourite of equal replicas."""
    rng = Random(seed)
    prompts: dict[int, str] = {}
    digest_seed = Seeds(SECRET).seed("m", "all")
    turns: dict[int, int] = {}
    made, at_s = [], 0.0
    for number in range(CALLS):
        at_s += rng.expovariate(9.0)
        talk = rng.randrange(60)
        turns[talk] = turns.get(talk, 0) + rng.choice((600, 2000, 6000))
        tokens = min(turns[talk], 40_000)
        prompts[number + 1] = prompt(talk, tokens)
        request = Request(
            at_s, tokens, rng.randint(1, 300), digests([prompts[number + 1].encode()], digest_seed), PIECE
        )
        limit_s = rng.choice((2.0, 5.0, 30.0))
        tenant, class_ = rng.choice(("t0", "t1", "t1")), rng.choice(("interactive", "interactive", "batch"))
        made.append(Call(number + 1, request, int(at_s * S), limit_s, tenant, class_, streamed=rng.random() < streamed))
    return made, prompts


class Fixed:
    """Given calls, each of them fresh."""

    def __init__(self, made: list[Call]) -> None:
        self._calls = made

    def start(self) -> Iterator[Call]:
        return iter([replace(call) for call in self._calls])

    def after(self, call: Call, now_ps: int) -> Call | None:
        return None


class OneByOne(Simulation):
    """A router is asked what is due after each thing that an engine's step shows: the gateway reads one stream after
    the other."""

    def _hear(self, now_ps: int, argument: tuple[Replica, Step]) -> None:
        replica, step = argument
        for sequence in step.first:
            super()._hear(now_ps, (replica, replace(step, first=(sequence,), finished=())))
        for sequence in step.finished:
            super()._hear(now_ps, (replica, replace(step, first=(), finished=(sequence,))))


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop that is told what time it is, and never waits."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Run everything that can run at this moment."""
        while True:
            self.stop()
            self.run_forever()
            if not self._ready and not (self._scheduled and self._scheduled[0].when() <= self.now):  # type: ignore[attr-defined]
                return

    def next_timer(self) -> float | None:
        """When something will want to run."""
        return min((t.when() for t in self._scheduled if not t.cancelled()), default=None)  # type: ignore[attr-defined]


class Inside:
    """The gateway as a router: it is told of tokens as bytes, and decides by letting its requests through."""

    def __init__(self, loop: SimulatedTime, inner: Scheduler, backends: Sequence[str], prompts: dict[int, str]) -> None:
        self.prompts = prompts
        clock = loop.time
        timeouts = Timeouts(1.0, None, 60.0, 30.0, 900.0)
        known = [Backend(name, "p", name, 80, b"", b"", None, None, timeouts) for name in backends]
        self.loop = loop
        self.pool = Pool("p", known, inner, RetryBudget(rng=Random(1)), clock)
        self.pool.see(
            BackendView(name, concurrency=SCENARIO.max_seqs, kv_tokens=SCENARIO.kv_tokens) for name in backends
        )
        self.dispatcher = Dispatcher(Jobs(Seeds(SECRET)), clock)
        self.dispatcher.pools["p"] = self.pool
        self.catalog = Catalog([Model("m", "p")], 0)
        self.exchanges: dict[int, Exchange] = {}
        self.ends: dict[int, asyncio.Future[None]] = {}
        self.streams: dict[str, list[int]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.decided: list[Dispatch | Drop] = []
        self.jobs: dict[int, Job] = {}

    def submit(self, job: Job, now: float) -> Reason | None:
        self._run(now)
        self.jobs[job.id] = job
        task = self.loop.create_task(self._request(job, now))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        self._run(now)
        return None

    async def _request(self, job: Job, now: float) -> None:
        x = self.exchanges[job.id] = self._exchange(job, now)
        made = self.dispatcher.jobs.job(x, job.id)
        for name in ("tenant", "arrived", "class_", "prompt_tokens", "output_tokens", "piece_tokens", "streamed"):
            assert getattr(made, name) == getattr(job, name), name
        assert (made.deadline, made.prefix) == (job.deadline, job.prefix)
        try:
            async with self.dispatcher.slot(x) as attempt:
                self.decided.append(replace(attempt.decision, job=job))
                x.meter = (
                    Meter(Dialect.CHAT, on_first_token=attempt.on_first_token, tally=attempt.tally)
                    if job.streamed
                    else BodyMeter(Dialect.CHAT)
                )
                self.ends[job.id] = self.loop.create_future()
                await self.ends[job.id]
        except Unavailable as refused:
            reason = next(each for each in Reason if each.value == refused.refusal.reason)
            self.decided.append(Drop(job, reason, 1.0))

    def _exchange(self, job: Job, now: float) -> Exchange:
        x = Exchange(f"r{job.id}", now, CHAT)
        tenant = Tenant(job.tenant, trust_group="all")
        body = f'{{"model":"m","stream":{json.dumps(job.streamed)},"messages":{self.prompts[job.id]}}}'
        call = wire.parse(CHAT, b"application/json", body.encode(), self.catalog, tenant)
        call.class_ = job.class_
        call.deadline_s = None if job.deadline is None else job.deadline - job.arrived
        x.identify(tenant, call)
        assert call.prompt_bytes == 4 * job.prompt_tokens
        return x

    def first_token(self, job_id: int, now: float) -> None:
        self.streams.setdefault(self._backend(job_id), []).append(job_id)
        self._feed(job_id, event("t"), now)

    def tokens(self, job_id: int, n: int, now: float) -> bool:
        """The simulator tells the sum of a replica's streams, which get one token each in a step."""
        streams = self.streams[self._backend(job_id)]
        for each in streams:
            self._feed(each, event("t") * (n // len(streams)), now)
        assert n % len(streams) == 0
        return True

    def _backend(self, job_id: int) -> str:
        return self.exchanges[job_id].attempts[-1].backend.name

    def _feed(self, job_id: int, data: bytes, now: float) -> None:
        self._run(now)
        meter = self.exchanges[job_id].meter
        assert meter is not None
        self.loop.call_soon(meter.feed, data, now)  # type: ignore[attr-defined]
        self._run(now)

    def leave(self, job_id: int, now: float, ending: Ending, usage: Usage | None = None) -> None:
        assert usage is not None and ending is Ending.SUCCESS
        told = {"prompt_tokens": usage.prompt, "completion_tokens": usage.output}
        told["prompt_tokens_details"] = {"cached_tokens": usage.cached}  # type: ignore[assignment]
        if self.jobs[job_id].streamed:
            self.streams[self._backend(job_id)].remove(job_id)
            last = {"choices": [], "usage": told}
            self._feed(job_id, event(finish="stop") + b"data: " + json.dumps(last).encode() + b"\n\n", now)
        else:
            whole = json.loads(completion()) | {"usage": told}
            self._feed(job_id, json.dumps(whole).encode(), now)
        self.exchanges[job_id].meter.end(now)  # type: ignore[union-attr]
        self.ends.pop(job_id).set_result(None)
        self._run(now)

    def due(self, now: float) -> list[Dispatch | Drop]:
        self._run(now)
        if self.pool.waiting:
            self.loop.call_soon(self.pool._pump, now)  # as its timer does: a token may be worth it
            self._run(now)
        decided, self.decided = self.decided, []
        return decided

    def next_deadline(self) -> float | None:
        return self.loop.next_timer()

    def publish(self, now: float) -> tuple[RemoteLoad, ...]:
        return ()

    def observe_remote(self, gateway: str, loads: Sequence[RemoteLoad], now: float) -> None:
        raise AssertionError("there is one gateway")

    def _run(self, now: float) -> None:
        self.loop.now = max(self.loop.now, now)
        self.loop.settle()


class Log:
    """A router that notes what another decides."""

    def __init__(self, inner: Router) -> None:
        self.inner = inner
        self.lines: list[tuple[float, int, str]] = []

    def submit(self, job: Job, now: float) -> Reason | None:
        reason = self.inner.submit(job, now)
        if reason is not None:
            self.lines.append((round(now, 9), job.id, reason))
        return reason

    def due(self, now: float) -> list[Dispatch | Drop]:
        found = self.inner.due(now)
        for each in found:
            what = each.backend if isinstance(each, Dispatch) else each.reason
            self.lines.append((round(now, 9), each.job.id, what))
        return found

    def tokens(self, job_id: int, n: int, now: float) -> bool:
        """Ask what is due at every token, as the gateway does: that it was not worth it may not change anything."""
        self.inner.tokens(job_id, n, now)
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


SCENARIO = Scenario(index="approximate", replicas=4, signal_delay_s=0.01)


def run(made: list[Call], around: Callable[[Scheduler, Fleet], Router]) -> tuple[list[Any], list[Call]]:
    """The dispatch log of one run, and its calls."""
    fleet = Fleet(SCENARIO)
    log = Log(around(scheduler(SCENARIO, fleet, 1, 0, PIECE), fleet))
    done = OneByOne(SCENARIO, Fixed(made), fleet, [log]).run()
    return sorted(log.lines), done


def compare(
    made: list[Call], prompts: dict[int, str]
) -> tuple[tuple[list[Any], list[Call]], tuple[list[Any], list[Call]]]:
    """The logs and calls of the simulator alone, and of the gateway inside it."""
    loop = SimulatedTime()

    def inside(inner: Scheduler, fleet: Fleet) -> Router:
        return Inside(loop, inner, [replica.name for replica in fleet.replicas], prompts)

    try:
        return run(made, lambda inner, fleet: inner), run(made, inside)
    finally:
        loop.close()


@pytest.mark.parametrize("seed", range(1, 7))
def test_the_gateway_decides_as_the_simulator_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dispatch and every refusal, to the nanosecond, of a run past saturation with waiting, warm and cold
    prompts, deadlines, two classes and two tenants."""
    monkeypatch.setattr(gateway_pool, "COUNT_S", 0.0)
    (simulated, _), (lived, _) = compare(*calls(seed, streamed=1.0))
    assert len(simulated) == CALLS
    assert len({what for _, _, what in simulated}) > 4  # all replicas, and somebody was refused
    assert lived == simulated


@pytest.mark.parametrize("streamed", [1.0, 0.7])
def test_the_gateways_own_pace_changes_little(streamed: float) -> None:
    """Tokens counted every 10 to 20 ms instead of at once, and prefills of whole answers ended when somebody waits
    instead of when they should have: as many calls are served, as soon. Of three seeds together: one call that goes
    elsewhere moves hundreds after it."""
    runs = [compare(*calls(seed, streamed=streamed)) for seed in (1, 2, 3)]
    ttfts = [sorted(call.ttft_s for run in runs for call in run[side][1] if call.ttft_s is not None) for side in (0, 1)]
    assert abs(len(ttfts[0]) - len(ttfts[1])) <= 0.02 * len(runs) * CALLS
    for share in (0.5, 0.75):
        alone, inside = (each[int(share * len(each))] for each in ttfts)
        assert abs(alone - inside) <= 0.25 * max(alone, inside) + 0.05, (
            share,
            alone,
            inside,
            len(ttfts[0]),
            len(ttfts[1]),
        )
    assert all(len(log) == CALLS for run in runs for log, _ in run)
