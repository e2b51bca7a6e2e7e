"""A place on a backend for every request: the futures and the one timer around the pools' schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import count
from math import inf, isfinite

from gateway.backend import Backend
from gateway.blame import found, rest_s, suspected
from gateway.errors import (
    DEADLINE_UNREACHABLE,
    GATEWAY_BUSY,
    NO_BACKEND,
    QUEUE_FULL,
    QUEUE_TIMEOUT,
    GatewayError,
    Phase,
    Refusal,
    Unavailable,
    UpstreamFailed,
)
from gateway.exchange import Attempt, Exchange
from gateway.jobs import Jobs
from gateway.metrics import Counter
from gateway.pool import Placed, Pool
from gateway.reply import Clock
from policies.retry import Hedging
from policies.shares import TimeShare
from policies.types import Drop, Ending, Explanation, Job, Reason, Statistics, Usage
from policies.verdicts import Found

REFUSALS: Mapping[Reason, tuple[Refusal, str]] = {
    Reason.QUEUE_FULL: (QUEUE_FULL, "The queue for this model is full"),
    Reason.DEADLINE: (DEADLINE_UNREACHABLE, "The request cannot be served before its deadline"),
    Reason.WAITED: (QUEUE_TIMEOUT, "The request waited as long as its class may"),
    Reason.NO_BACKEND: (NO_BACKEND, "No backend is able to serve this model now"),
}


class Dispatcher:
    """All pools."""

    def __init__(self, jobs: Jobs, clock: Clock) -> None:
        self.pools: dict[str, Pool] = {}
        self.jobs = jobs
        self._clock = clock
        self._ids = count(1)
        self.strained = False  # the gateway itself has too much to do
        self.shed: frozenset[str] = frozenset()  # classes that are refused then
        self.fallbacks = Counter("headrace_fallbacks_total", "Requests handed on to another pool.", "pool", "to")

    def __repr__(self) -> str:
        return f"<Dispatcher {list(self.pools.values())}>"

    def slot(self, x: Exchange) -> Slot:
        """`async with dispatcher.slot(x) as attempt`: entered when a backend is free for it, left when the place is
        given back. Raises Unavailable."""
        assert x.call is not None
        if self.strained and x.class_ in self.shed and not x.attempts:
            raise Unavailable(GATEWAY_BUSY, "The gateway is overloaded: urgent work goes first.", retry_after=2.0)
        return Slot(self, self.pools[x.call.pool], x, next(self._ids), self._clock)

    def hedging(self, x: Exchange) -> Hedging | None:
        """How long a first attempt may be alone, where it may be slow to begin: it is a stream with a short prompt."""
        assert x.call is not None
        rule = self.pools[x.call.pool].hedging
        if rule is None or not (x.call.stream and x.call.endpoint.generates):
            return None
        return rule if self.jobs.prompt_tokens(x.call) <= rule.prompt_tokens else None

    def beside(self, x: Exchange) -> Slot:
        """A `slot` for a second attempt beside the one that runs: free at once on another backend, or none. Raises
        Unavailable, also where the gateway itself has too much to do."""
        if self.strained:
            raise Unavailable(GATEWAY_BUSY, "The gateway is overloaded.")
        return Slot(self, self.pools[x.attempts[-1].backend.pool], x, next(self._ids), self._clock, beside=True)

    def explain(self, x: Exchange) -> Explanation:
        """Where the request would go now, or why it would not. Nothing is changed."""
        assert x.call is not None
        pool = self.pools[x.call.pool]
        return pool.explain(self.job(pool, x, 0))

    def job(self, pool: Pool, x: Exchange, number: int, *, beside: bool = False) -> Job:
        """What the scheduler of the pool sees of the request: a job that may go where its tenant's prompts may, and
        where its model is served."""
        job = self.jobs.job(x, number)
        job.candidates = pool.usable(x, beside=beside)
        return job

    def retry_pause(self, failure: UpstreamFailed, x: Exchange) -> float | None:
        """Seconds until the request may try another backend; None where it may not. After a try in vain the client's
        own library is told not to try again either: its retries would multiply ours."""
        assert x.call is not None
        pool = self.pools[x.call.pool]
        pause = None
        replayable = failure.replayable or suspected(failure, pool.health, x.attempts[-1].backend.name)
        in_time = x.call.deadline_s is None or self._clock() < x.received_at + x.call.deadline_s
        if replayable and in_time and failure.phase is not Phase.STREAMING and self._untried(x):
            unsent = failure.phase is Phase.CONNECT
            pause = pool.retries.after(len(x.attempts), self._clock(), unsent=unsent)
        if pause is None and len(x.attempts) > 1:
            failure.retry = False
        return pause

    def _untried(self, x: Exchange) -> bool:
        """Whether there is a backend, in its pool or those that it may fall back on, where the request may go yet."""
        assert x.call is not None
        names = (x.call.pool, *x.call.fallback)
        return any(self.pools[name].untried(x) for name in names if name in self.pools)

    def hand_on(self, x: Exchange) -> Pool | None:
        """The next pool that may serve the request, which is its pool from now on; None: there is none. Before that its
        own is asked as a whole, where only one version in it could not."""
        assert x.call is not None
        if x.call.among is not None and not x.attempts:
            x.call.among = None
            return self.pools[x.call.pool]
        if not x.call.fallback or x.call.fallback[0] not in self.pools:
            return None
        before = x.call.pool
        x.call.pool, *rest = x.call.fallback
        x.call.fallback = tuple(rest)
        self.fallbacks.values[before, x.call.pool] += 1
        return self.pools[x.call.pool]

    def drop(self, names: Iterable[str]) -> list[Backend]:
        """Pools that nobody will use any more are gone. Returns their backends."""
        gone = [self.pools.pop(name) for name in names]
        for pool in gone:
            pool.close()
        return [backend for pool in gone for backend in pool.backends.values()]

    def alive(self) -> set[tuple[str, str]]:
        """Every backend there is, by its pool and name."""
        return {(name, backend) for name, pool in self.pools.items() for backend in pool.backends}

    def refuse_waiting(self, error: GatewayError) -> None:
        """Everybody who waits, or would have to from now on, in all pools, is told `error`."""
        for pool in self.pools.values():
            pool.refuse_waiting(error)

    def close(self) -> None:
        """Stop the timers."""
        for pool in self.pools.values():
            pool.close()


class Slot:
    """The `async with` of one place."""

    __slots__ = (
        *("_attempt", "_beside", "_clock", "_dispatcher", "_entered", "_exchange", "_id", "_pool", "_share"),
        "_woken_at",
    )

    def __init__(
        self, dispatcher: Dispatcher, pool: Pool, x: Exchange, job_id: int, clock: Clock, *, beside: bool = False
    ) -> None:
        self._beside = beside
        self._dispatcher = dispatcher
        self._pool = pool
        self._exchange = x
        self._id = job_id
        self._clock = clock
        self._attempt: Attempt | None = None
        self._share: TimeShare | None = None
        self._entered = 0.0
        self._woken_at = 0.0

    async def __aenter__(self) -> Attempt:
        pool, x = self._pool, self._exchange
        assert x.call is not None
        if not x.queued_at:
            x.queued_at = self._clock()
            pool.retries.spend() if x.call.again else pool.retries.deposit()
        placed = await self._placed()
        while isinstance(placed, Drop):
            pool = self._pool = await self._elsewhere(placed)
            placed = await self._placed()
        decision, backend = placed
        attempt = Attempt(
            backend,
            decision,
            self._clock(),
            on_first_token=self._first_token,
            tally=pool.tallies[backend.name],
            number=len(x.attempts) + 1,
            hedge=self._beside,
        )
        x.turn_to(attempt)
        if x.trace is not None:
            attempt.trace_headers = x.trace.headers(attempt.number)
        self._attempt = attempt
        pool.began(self._id, attempt, stream=x.call.stream)
        if backend.cost_per_hour:
            self._share = pool.share(backend)
            self._entered = self._share.enter(attempt.dispatched_at)
        if x.race is not None:
            x.race.began(attempt)
        return attempt

    async def _elsewhere(self, placed: Drop) -> Pool:
        """The pool to ask next: another, or the same once it has woken. Raises Unavailable."""
        pool, x = self._pool, self._exchange
        if self._beside:
            raise self._refused(placed)
        refusal, asleep = self._refused(placed), pool.waking if placed.reason is Reason.NO_BACKEND else None
        if asleep is not None:
            asleep.ask()
        following = self._dispatcher.hand_on(x)
        if following is None and asleep is not None and not x.attempts:
            assert x.call is not None
            deadline = inf if x.call.deadline_s is None else x.received_at + x.call.deadline_s
            self._woken_at = await asleep.wait(x.queued_at, deadline, refusal)
            return pool
        if following is None:
            raise refusal
        return following

    async def _placed(self) -> Placed | Drop:
        """What its pool decides about the request. Its wait for a turn begins when the pool wakes."""
        pool, x = self._pool, self._exchange
        job = self._dispatcher.job(pool, x, self._id, beside=self._beside)
        if self._beside:
            return pool.beside(job, len(x.attempts)) or Drop(job, Reason.NO_BACKEND, 1.0)
        if self._woken_at:
            job.arrived = self._woken_at
        placed = self._pool.submit(job)
        if isinstance(placed, asyncio.Future):
            try:
                placed = await placed
            except BaseException:
                self._pool.leave(self._id, Ending.IGNORED)
                raise
        return placed

    async def __aexit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        assert self._attempt is not None
        now = self._attempt.ended_at = self._clock()
        if self._share is not None:
            had_s = self._share.leave(self._entered, now)
            self._attempt.cost = had_s * self._attempt.backend.cost_per_hour / 3600
        meter = None if self._attempt.lost else self._exchange.meter
        if exc is not None and meter is not None and meter.error is not None:
            exc = UpstreamFailed("The stream ended with an error.", Phase.STREAMING)  # whoever hung up first
        ending = Ending.SUCCESS
        if exc is not None:
            self._attempt.failed = isinstance(exc, UpstreamFailed)
            ending = Ending.DROPPED if self._attempt.failed else Ending.IGNORED
            given_up = "hedge_lost" if self._attempt.lost else "cancelled"
            self._attempt.failure = exc.refusal.reason if isinstance(exc, GatewayError) else given_up
        usage = meter.usage if meter is not None else None
        if usage is not None and exc is None:
            self._dispatcher.jobs.learn(self._exchange, usage)
        self._judge(exc, usage)
        seen_tokens = 0 if meter is None else meter.tokens
        self._pool.leave(self._id, ending, usage, seen_tokens, self._attempt.backend.name)

    def _judge(self, exc: BaseException | None, usage: Usage | None) -> None:
        """Before the place is given back: it must not be given to the next one if the backend is to blame."""
        attempt = self._attempt
        assert attempt is not None
        if exc is None and attempt.status < 400 and not attempt.late:
            self._pool.judge(attempt, Found.GOOD, tokens=usage.prompt + usage.output if usage is not None else 1)
        else:
            self._pool.judge(attempt, found(exc), rests_s=rest_s(exc))

    def _first_token(self, now: float) -> None:
        attempt = self._attempt
        assert attempt is not None
        self._pool.answered(self._id, attempt, now)
        self._pool.first_token(self._id, attempt.backend.name, now)

    def _refused(self, drop: Drop) -> Unavailable:
        refusal, message = REFUSALS[drop.reason]
        if drop.reason is Reason.NO_BACKEND and isfinite(self._pool.change_at):
            wait_s = min(60.0, max(1.0, self._pool.change_at - self._clock()))
            return Unavailable(refusal, message + ".", retry_after=wait_s)
        if drop.reason is not Reason.NO_BACKEND:
            message += f": {_crowd(self._pool.statistics(), drop.job.class_)}"
        return Unavailable(refusal, message + ".", retry_after=drop.retry_after)


def _crowd(known: Statistics, class_: str) -> str:
    """Who waits in a class, and the work in it and above. Nothing is searched for: refusals come by the thousand."""
    tokens = 0
    for name, queued in known.queued_tokens.items():
        tokens += queued
        if name == class_:
            break
    return f"{known.queued[class_]} requests wait, some {tokens / known.drain_rate:.0f} s of work"
