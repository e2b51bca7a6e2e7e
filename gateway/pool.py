"""Backends that serve the same models, their scheduler, who waits for it, and who runs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from gateway.backend import Backend
from gateway.errors import GatewayError
from gateway.exchange import Exchange
from gateway.reply import Clock
from policies.retry import RetryBudget
from policies.scheduler import Scheduler
from policies.types import BackendView, Dispatch, Drop, Ending, Explanation, Job, Place, Statistics, Usage

Placed = tuple[Dispatch, Backend]

TICK_S = 0.02  # how often the scheduler is told of tokens while somebody waits: its debt is counted in tokens of 60 ms
COUNT_S = 0.01  # and at most, when requests come faster than that


class Pool:
    """Around one scheduler. Everything here is a plain `def`: no wait comes between a decision and its counting."""

    def __init__(
        self, name: str, backends: Iterable[Backend], scheduler: Scheduler, retries: RetryBudget, clock: Clock
    ) -> None:
        self.name = name
        self.backends: dict[str, Backend] = {}
        self.scheduler = scheduler
        self.retries = retries
        self.waiting: dict[int, asyncio.Future[Placed | Drop]] = {}
        self._views: dict[str, BackendView] = {}
        self._running: dict[int, Exchange] = {}
        self._counted: dict[int, int] = {}
        self._counted_at = 0.0
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: GatewayError | None = None
        self.observe(backends)

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

    def observe(self, backends: Iterable[Backend]) -> list[Backend]:
        """These are the pool's backends now. Who stays (by name) keeps its load and what is known of it; who is new is
        taken to be open; who goes ends what runs there and gets no more. Returns those that go: nobody needs their idle
        connections any more."""
        before = self.backends
        self.backends = {backend.name: backend for backend in backends}
        self._show(self._views.get(name, BackendView(name)) for name in self.backends)
        return [backend for name, backend in before.items() if name not in self.backends]

    def see(self, views: Iterable[BackendView]) -> None:
        """What was found out about some of the backends; what the configuration says of them holds, whatever a view
        says. Others are ignored."""
        self._show((self._views | {view.name: view for view in views}).values())

    def _show(self, views: Iterable[BackendView]) -> None:
        told = self.backends
        self._views = {
            view.name: replace(view, concurrency=told[view.name].concurrency, speed=told[view.name].speed)
            for view in views
            if view.name in told
        }
        now = self._clock()
        self.scheduler.observe(list(self._views.values()), now)
        self._pump(now)

    def submit(self, job: Job) -> Placed | Drop | asyncio.Future[Placed | Drop]:
        """What is decided about a job at once, or else the future of it. Raises what those who wait were told, once
        nobody may wait any more."""
        now = self._clock()
        self._count(now)
        if (dispatch := self.scheduler.at_once(job, now)) is not None:
            return dispatch
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
        """A job ended, or its client did before it began."""
        self.waiting.pop(job_id, None)
        self._running.pop(job_id, None)
        self._counted.pop(job_id, None)
        now = self._clock()
        self.scheduler.leave(job_id, now, ending, usage)
        if self.waiting:
            self._pump(now)

    def first_token(self, job_id: int, now: float) -> None:
        """The backend is done with a job's prompt."""
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

    def _pump(self, now: float, own_id: int = 0) -> Placed | Drop | None:
        """Let the scheduler decide, and hand out its decisions but the caller's own, which is returned. Each comes with
        its backend, which may have left the pool when whoever waits for it wakes up."""
        self._count(now)
        own: Placed | Drop | None = None
        for decision in self.scheduler.due(now):
            made = decision if isinstance(decision, Drop) else (decision, self.backends[decision.backend])
            waiter = self.waiting.pop(decision.job.id, None)
            if decision.job.id == own_id:
                own = made
            elif waiter is not None and not waiter.done():
                waiter.set_result(made)
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
                fresh[backend] += meter.tokens - self._counted.get(job_id, 1)  # the first token is told by itself
                speaker[backend] = job_id
                self._counted[job_id] = meter.tokens
        for backend, tokens in fresh.items():
            if tokens > 0:
                self.scheduler.tokens(speaker[backend], tokens, now)

    def _set_timer(self, now: float) -> None:
        if self._timer is None and self.waiting:
            deadline = self.scheduler.next_deadline()
            wait_s = TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - now))
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        now = self._clock()
        self._pump(now)
        self._set_timer(now)
