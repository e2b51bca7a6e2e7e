"""A place on a backend for every request: the futures and the one timer around the pools' schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import count

from gateway.backend import Backend
from gateway.errors import (
    DEADLINE_UNREACHABLE,
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
from gateway.reply import Clock
from policies.retry import RetryBudget
from policies.scheduler import Scheduler
from policies.types import Dispatch, Drop, Ending, Job, Reason, Statistics, Usage

REFUSALS: Mapping[Reason, tuple[Refusal, str]] = {
    Reason.QUEUE_FULL: (QUEUE_FULL, "The queue for this model is full."),
    Reason.DEADLINE: (DEADLINE_UNREACHABLE, "The request cannot be served before its deadline."),
    Reason.WAITED: (QUEUE_TIMEOUT, "The request waited as long as its class may for a free backend."),
    Reason.NO_BACKEND: (NO_BACKEND, "No backend is able to serve this model now."),
}


class Pool:
    """Backends that serve the same models, their scheduler, who waits for it, and the budget for second tries."""

    def __init__(
        self, name: str, backends: Iterable[Backend], scheduler: Scheduler, retries: RetryBudget, clock: Clock
    ) -> None:
        self.name = name
        self._clock = clock
        self.backends = {backend.name: backend for backend in backends}
        self.scheduler = scheduler
        self.retries = retries
        self.waiting: dict[int, asyncio.Future[Dispatch | Drop]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Pool {self.name} {self.scheduler!r}>"

    def statistics(self) -> Statistics:
        """What the scheduler knows, for the metrics."""
        return self.scheduler.statistics(self._clock())

    def submit(self, job: Job) -> Dispatch | Drop | asyncio.Future[Dispatch | Drop]:
        """What is decided about a job at once, or else the future of it."""
        now = self._clock()
        reason = self.scheduler.submit(job, now)
        if reason is not None:
            return Drop(job, reason, self.scheduler.retry_after(now))
        decision = self._pump(now, job.id)
        if decision is not None:
            return decision
        waiter = self.waiting[job.id] = asyncio.get_running_loop().create_future()
        return waiter

    def leave(self, job_id: int, ending: Ending, usage: Usage | None) -> None:
        """A job ended, or its client did before it began."""
        self.waiting.pop(job_id, None)
        now = self._clock()
        self.scheduler.leave(job_id, now, ending, usage)
        if self.waiting:
            self._pump(now)

    def first_token(self, job_id: int, now: float) -> None:
        """The backend is done with a job's prompt."""
        self.scheduler.first_token(job_id, now)
        if self.waiting:
            self._pump(now)

    def _pump(self, now: float, own_id: int = 0) -> Dispatch | Drop | None:
        """Let the scheduler decide, hand out its decisions but the caller's own, and set the timer for the next one."""
        own: Dispatch | Drop | None = None
        for decision in self.scheduler.due(now):
            waiter = self.waiting.pop(decision.job.id, None)
            if decision.job.id == own_id:
                own = decision
            elif waiter is not None and not waiter.done():
                waiter.set_result(decision)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.waiting or own is None:
            self._set_timer(now)
        return own

    def _set_timer(self, now: float) -> None:
        deadline = self.scheduler.next_deadline()
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, deadline - now), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._pump(self._clock())

    def refuse_waiting(self, error: GatewayError) -> None:
        """Everybody who waits is told `error`."""
        for waiter in self.waiting.values():
            if not waiter.done():
                waiter.set_exception(error)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Dispatcher:
    """All pools."""

    def __init__(self, pools: Iterable[Pool], clock: Clock) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self._clock = clock
        self._ids = count(1)

    def refuse_waiting(self, error: GatewayError) -> None:
        """Everybody who waits, in all pools, is told `error`."""
        for pool in self.pools.values():
            pool.refuse_waiting(error)

    def close(self) -> None:
        """Stop the timers."""
        for pool in self.pools.values():
            pool.close()

    def slot(self, exchange: Exchange) -> Slot:
        """`async with dispatcher.slot(exchange) as attempt`: entered when a backend is free for it, left when the
        place is given back. Raises Unavailable."""
        assert exchange.call is not None
        return Slot(self.pools[exchange.call.pool], exchange, next(self._ids), self._clock)

    def retry_pause(self, failure: UpstreamFailed, exchange: Exchange) -> float | None:
        """Seconds until the request may try another backend; None where it may not. After a try in vain the client's
        own library is told not to try again either: its retries would multiply ours."""
        assert exchange.call is not None
        pool = self.pools[exchange.call.pool]
        tried = {attempt.backend.name for attempt in exchange.attempts}
        pause = None
        if failure.replayable and failure.phase is not Phase.STREAMING and not tried.issuperset(pool.backends):
            pause = pool.retries.after(len(exchange.attempts), self._clock())
        if pause is None and len(exchange.attempts) > 1:
            failure.retry = False
        return pause


class Slot:
    """The `async with` of one place."""

    __slots__ = ("_attempt", "_clock", "_exchange", "_id", "_pool")

    def __init__(self, pool: Pool, exchange: Exchange, job_id: int, clock: Clock) -> None:
        self._pool = pool
        self._exchange = exchange
        self._id = job_id
        self._clock = clock
        self._attempt: Attempt | None = None

    async def __aenter__(self) -> Attempt:
        pool, exchange = self._pool, self._exchange
        if not exchange.queued_at:
            exchange.queued_at = self._clock()
            pool.retries.deposit()
        decision = pool.submit(exchange.job(self._id))
        if isinstance(decision, asyncio.Future):
            try:
                decision = await decision
            except BaseException:
                pool.leave(self._id, Ending.IGNORED, None)
                raise
        if isinstance(decision, Drop):
            refusal, message = REFUSALS[decision.reason]
            raise Unavailable(refusal, message, retry_after=decision.retry_after)
        attempt = Attempt(pool.backends[decision.backend], self._clock(), on_first_token=self._first_token)
        exchange.attempts.append(attempt)
        self._attempt = attempt
        return attempt

    async def __aexit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        assert self._attempt is not None
        self._attempt.ended_at = self._clock()
        ending = Ending.SUCCESS
        if exc is not None:
            ending = Ending.DROPPED if isinstance(exc, UpstreamFailed) else Ending.IGNORED
            self._attempt.failure = exc.refusal.reason if isinstance(exc, GatewayError) else "cancelled"
        meter = self._exchange.meter
        self._pool.leave(self._id, ending, meter.usage if meter is not None else None)

    def _first_token(self, now: float) -> None:
        self._pool.first_token(self._id, now)
