"""Backends that serve the same models, their scheduler, who waits for it, and who runs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from gateway.backend import Backend
from gateway.errors import GatewayError
from gateway.exchange import Tally
from gateway.reply import Clock
from policies.retry import RetryBudget
from policies.scheduler import Scheduler
from policies.shares import TimeShare
from policies.types import (
    BackendView,
    ClassPolicy,
    Dispatch,
    Drop,
    Ending,
    Explanation,
    Job,
    Place,
    Statistics,
    Usage,
)

Placed = tuple[Dispatch, Backend]

COUNT_S = 0.01  # at most so often are all tokens counted, however fast requests come
TICK_S = 0.02  # how often the scheduler is told of tokens while somebody waits: its debt is counted in tokens of 60 ms


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
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.shares: dict[str, TimeShare] = {}
        self._views: dict[str, BackendView] = {}
        self._within: dict[tuple[str, ...], set[str]] = {}
        self._told: dict[str, int] = {}  # how much of each tally
        self._told_at = 0.0
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0
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
        self._count_all(now)
        return self.scheduler.explain(job, now)

    def observe(self, backends: Iterable[Backend]) -> list[Backend]:
        """These are the pool's backends now. Who stays (by name) keeps its load and what is known of it; who is new is
        taken to be open; who goes ends what runs there and gets no more. Returns those that go: nobody needs their idle
        connections any more."""
        before = self.backends
        self.backends = {backend.name: backend for backend in backends}
        for name in before.keys() - self.backends.keys():  # what still runs there is counted by itself
            self.tallies.pop(name, None)
            self._told.pop(name, None)
        self.shares = {name: share for name, share in self.shares.items() if name in self.backends}
        for regions, names in self._within.items():
            names.clear()
            names.update(self._found(regions))
        self._show(self._views.get(name, BackendView(name)) for name in self.backends)
        return [backend for name, backend in before.items() if name not in self.backends]

    def configure(self, routing: str, classes: Sequence[ClassPolicy], *, retries: int, share: float) -> None:
        """These rules hold from now on, for those who wait, too."""
        self.retries.configure(retries=retries, share=share)
        self.scheduler.configure(routing, classes)
        self._pump(self._clock())

    def see(self, views: Iterable[BackendView]) -> None:
        """What was found out about some of the backends; what the configuration says of them holds, whatever a view
        says. Others are ignored."""
        self._show((self._views | {view.name: view for view in views}).values())

    def share(self, backend: Backend) -> TimeShare:
        """Who has how much of a backend's time."""
        return self.shares.setdefault(backend.name, TimeShare())

    def within(self, regions: tuple[str, ...]) -> Set[str]:
        """The names of the backends in these regions: one set, which changes when they do. A backend that is not said
        to be anywhere is in no region."""
        names = self._within.get(regions)
        if names is None:
            names = self._within[regions] = self._found(regions)
        return names

    def _found(self, regions: tuple[str, ...]) -> set[str]:
        return {name for name, backend in self.backends.items() if backend.region in regions}

    def _show(self, views: Iterable[BackendView]) -> None:
        told = self.backends
        self._views = {
            view.name: replace(view, concurrency=known.concurrency, speed=known.speed, region=known.region)
            for view in views
            if (known := told.get(view.name)) is not None
        }
        now = self._clock()
        self.scheduler.observe(list(self._views.values()), now)
        self._pump(now)

    def submit(self, job: Job) -> Placed | Drop | asyncio.Future[Placed | Drop]:
        """What is decided about a job at once, or else the future of it. Raises what those who wait were told, once
        nobody may wait any more."""
        now = self._clock()
        self._count_all(now)
        if (dispatch := self.scheduler.at_once(job, now)) is not None:
            return dispatch, self.backends[dispatch.backend]
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

    def _pump(self, now: float, own_id: int = 0) -> Placed | Drop | None:
        """Let the scheduler decide, and hand out its decisions but the caller's own, which is returned. Each comes with
        its backend, which may have left the pool when whoever waits for it wakes up."""
        self._count_all(now)
        own: Placed | Drop | None = None
        for decision in self.scheduler.due(now):
            made = decision if isinstance(decision, Drop) else (decision, self.backends[decision.backend])
            waiter = self.waiting.pop(decision.job.id, None)
            if decision.job.id == own_id:
                own = made
            elif waiter is not None and not waiter.done():
                waiter.set_result(made)
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
