"""Backends that serve the same models, their scheduler, who waits for it, and who runs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from gateway.backend import Backend
from gateway.errors import GatewayError
from gateway.exchange import Tally
from gateway.reply import Clock
from policies.retry import RetryBudget
from policies.scheduler import Scheduler
from policies.types import Dispatch, Drop, Ending, Explanation, Job, Place, Statistics, Usage

COUNT_S = 0.01  # at most so often are all tokens counted, however fast requests come
TICK_S = 0.02  # how often the scheduler is told of tokens while somebody waits: its debt is counted in tokens of 60 ms


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
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self._told: dict[str, int] = {}  # how much of each tally
        self._told_at = 0.0
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
        self._count_all(now)
        return self.scheduler.explain(job, now)

    def submit(self, job: Job) -> Dispatch | Drop | asyncio.Future[Dispatch | Drop]:
        """What is decided about a job at once, or else the future of it. Raises what those who wait were told, once
        nobody may wait any more."""
        now = self._clock()
        self._count_all(now)
        if (dispatch := self.scheduler.at_once(job, now)) is not None:
            return dispatch
        reason = self.scheduler.submit(job, now)
        if reason is not None:
            return Drop(job, reason, self.scheduler.retry_after(now))
        decision = self._pump(now, job.id)
        if decision is not None:
            return decision
        if self._refusal is not None:
            self.leave(job.id, Ending.IGNORED)
            raise self._refusal
        waiter = self.waiting[job.id] = asyncio.get_running_loop().create_future()
        self._set_timer(now)
        return waiter

    def leave(
        self, job_id: int, ending: Ending, usage: Usage | None = None, seen_tokens: int = 0, backend: str = ""
    ) -> None:
        """A job ended, or its client did before it began. `seen_tokens` of output came, whatever its usage says."""
        self.waiting.pop(job_id, None)
        now = self._clock()
        if backend:
            self._count(backend, now)
        self.scheduler.leave(job_id, now, ending, usage, seen_tokens)
        if self.waiting:
            self._pump(now)

    def first_token(self, job_id: int, backend: str, now: float) -> None:
        """The backend is done with a job's prompt."""
        self._count(backend, now)
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
        self._count_all(now)
        own: Dispatch | Drop | None = None
        for decision in self.scheduler.due(now):
            waiter = self.waiting.pop(decision.job.id, None)
            if decision.job.id == own_id:
                own = decision
            elif waiter is not None and not waiter.done():
                waiter.set_result(decision)
        self._set_timer(now)
        return own

    def _count_all(self, now: float) -> None:
        """Before a decision: whether the streams of a backend can afford a prefill shows in their tokens."""
        if now - self._told_at >= COUNT_S:
            self._told_at = now
            for backend in self.tallies:
                self._count(backend, now)

    def _count(self, backend: str, now: float) -> None:
        """Tell the scheduler of the tokens that a backend's streams got since the last time; also before their number
        changes, since it takes each for an equal part of a step."""
        tokens = self.tallies[backend].tokens
        fresh = tokens - self._told.get(backend, 0)
        if fresh:
            self._told[backend] = tokens
            self.scheduler.streamed(backend, fresh, now)

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
