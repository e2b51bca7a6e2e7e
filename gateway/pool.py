"""Backends that serve the same models, their scheduler, who waits for it, and who runs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from gateway.backend import Backend
from gateway.errors import GatewayError
from gateway.exchange import Exchange
from gateway.reply import Clock
from policies.retry import RetryBudget
from policies.scheduler import Scheduler
from policies.types import Dispatch, Drop, Ending, Explanation, Job, Place, Statistics, Usage

TICK_S = 0.02  # how often the scheduler is told of tokens while somebody waits: its debt is counted in tokens of 60 ms
COUNT_S = 0.01  # and at most, when requests come faster than that


class Pool:
    """Around one scheduler. Everything here is a plain `def`: no wait comes between a decision and its counting."""

    def __init__(
        self, name: str, backends: Iterable[Backend], scheduler: Scheduler, retries: RetryBudget, clock: Clock
    ) -> None:
        self.name = name
        self.backends = {backend.name: backend for backend in backends}
        self.scheduler = scheduler
        self.retries = retries
        self.waiting: dict[int, asyncio.Future[Dispatch | Drop]] = {}
        self._running: dict[int, Exchange] = {}
        self._counted: dict[int, int] = {}
        self._counted_at = 0.0
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0
        self._refusal: GatewayError | None = None

    def __repr__(self) -> str:
        return f"<Pool {self.name} {self.scheduler!r}>"

    def statistics(self) -> Statistics:
        """What the scheduler knows, for the metrics."""
        return self.scheduler.statistics(self._clock())

    def place(self, job: Job) -> Place:
        """Where the job stands, or would."""
        return self.scheduler.place(job, self._clock())

    def explain(self, job: Job) -> Explanation:
        """What would happen to the job. Nothing is changed."""
        now = self._clock()
        self._count(now)
        return self.scheduler.explain(job, now)

    def submit(self, job: Job) -> Dispatch | Drop | asyncio.Future[Dispatch | Drop]:
        """What is decided about a job at once, or else the future of it. Raises what those who wait were told, once
        nobody may wait any more."""
        now = self._clock()
        reason = self.scheduler.submit(job, now)
        if reason is not None:
            return Drop(job, reason, self.scheduler.retry_after(now))
        decision = self._pump(now, job.id)
        if decision is not None:
            return decision
        if self._refusal is not None:
            self.leave(job.id, Ending.IGNORED, None)
            raise self._refusal
        waiter = self.waiting[job.id] = asyncio.get_running_loop().create_future()
        self._set_timer(now)
        return waiter

    def run(self, job_id: int, x: Exchange) -> None:
        """The job is on its backend: its tokens count from now on."""
        self._running[job_id] = x

    def leave(self, job_id: int, ending: Ending, usage: Usage | None) -> None:
        """A job ended, or its client did before it began. Tokens are shared among the streams that are there, so those
        that came until now are counted before their number changes."""
        now = self._clock()
        self._count(now)
        self.waiting.pop(job_id, None)
        self._running.pop(job_id, None)
        self._counted.pop(job_id, None)
        self.scheduler.leave(job_id, now, ending, usage)
        if self.waiting:
            self._pump(now)

    def first_token(self, job_id: int, now: float) -> None:
        """The backend is done with a job's prompt."""
        self._count(now)
        self.scheduler.first_token(job_id, now)
        if self.waiting:
            self._pump(now)

    def refuse_waiting(self, error: GatewayError) -> None:
        """Everybody who waits, or would have to from now on, is told `error`."""
        self._refusal = error
        for waiter in self.waiting.values():
            if not waiter.done():
                waiter.set_exception(error)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _pump(self, now: float, own_id: int = 0) -> Dispatch | Drop | None:
        """Let the scheduler decide, and hand out its decisions but the caller's own, which is returned."""
        self._count(now)
        own: Dispatch | Drop | None = None
        for decision in self.scheduler.due(now):
            waiter = self.waiting.pop(decision.job.id, None)
            if decision.job.id == own_id:
                own = decision
            elif waiter is not None and not waiter.done():
                waiter.set_result(decision)
        self._set_timer(now)
        return own

    def _count(self, now: float) -> None:
        """Tell the scheduler of the tokens that the streams got since the last time, backend by backend."""
        if now - self._counted_at < COUNT_S:
            return
        self._counted_at = now
        fresh: defaultdict[str, int] = defaultdict(int)
        speaker: dict[str, int] = {}
        for job_id, x in self._running.items():
            meter = x.meter
            if meter is not None and meter.first_token_at is not None:
                backend = x.attempts[-1].backend.name
                if (gained := meter.tokens - self._counted.get(job_id, 1)) > 0:  # the first token is told by itself
                    fresh[backend] += gained
                    speaker[backend] = job_id
                    self._counted[job_id] = meter.tokens
        for backend, tokens in fresh.items():
            self.scheduler.tokens(speaker[backend], tokens, now)

    def _set_timer(self, now: float) -> None:
        """Wakes when the scheduler wants to be, or sooner; what has happened may bring that moment forward."""
        if not self.waiting:
            return
        deadline = self.scheduler.next_deadline()
        wakes_at = now + TICK_S if deadline is None else min(now + TICK_S, max(now, deadline))
        if self._timer is not None:
            if self._wakes_at <= wakes_at:
                return
            self._timer.cancel()
        self._wakes_at = wakes_at
        self._timer = asyncio.get_running_loop().call_later(wakes_at - now, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._pump(self._clock())
