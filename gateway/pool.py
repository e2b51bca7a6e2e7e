"""Backends that serve the same models, their scheduler, who waits for it, and who runs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from math import inf

from gateway.backend import Backend
from gateway.eligible import Eligible
from gateway.errors import GatewayError
from gateway.exchange import Attempt, Exchange, Tally
from gateway.reply import Clock
from gateway.waking import Waking
from policies.health import Health
from policies.retry import Hedging, RetryBudget
from policies.scheduler import Scheduler
from policies.shares import TimeShare
from policies.types import BackendView, ClassPolicy, Dispatch, Drop, Ending, Explanation, Job, Statistics, Usage
from policies.verdicts import Found, State

Placed = tuple[Dispatch, Backend]

COUNT_S = 0.01  # at most so often are all tokens counted, however fast requests come
TICK_S = 0.02  # how often the scheduler is told of tokens while somebody waits: its debt is counted in tokens of 60 ms
MOST = 1_000_000  # requests at once where nobody says anything


class Pool:
    """Around one scheduler. Everything here is a plain `def`: no wait comes between a decision and its counting."""

    def __init__(
        self,
        name: str,
        backends: Iterable[Backend],
        scheduler: Scheduler,
        retries: RetryBudget,
        clock: Clock,
        health: Health | None = None,
        *,
        probed: bool = False,
    ) -> None:
        self.name = name
        self.health = health or Health()
        self.probed = probed  # whether somebody probes the backends, so that new ones are waited for
        self.served: defaultdict[str, float] = defaultdict(float)  # the latest dispatch that got its first token there
        self.trials: frozenset[str] = frozenset()
        self.change_at = inf
        self.eligible = Eligible()
        self.waking: Waking | None = None  # where the pool may be scaled to zero
        self.hedging: Hedging | None = None
        self.backends: dict[str, Backend] = {}
        self.scheduler = scheduler
        self.retries = retries
        self.waiting: dict[int, asyncio.Future[Placed | Drop]] = {}
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.shares: dict[str, TimeShare] = {}
        self.unanswered: dict[int, Attempt] = {}  # streams without a first token
        self._views: dict[str, BackendView] = {}
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

    def explain(self, job: Job) -> Explanation:
        """What would happen to the job. Nothing is changed."""
        now = self._clock()
        self._count_all(now)
        return self.scheduler.explain(job, now)

    def observe(self, backends: Iterable[Backend]) -> list[Backend]:
        """These are the pool's backends now. Who stays (by name) keeps its load and what is known of it; who is new is
        taken to be open; who goes ends what runs there and gets no more. Returns those that go, to close what idles."""
        before = self.backends
        self.backends = {backend.name: backend for backend in backends}
        gone = [backend for name, backend in before.items() if name not in self.backends]
        now = self._clock()
        for backend in gone:
            self.health.leave(backend.name)
        for book in (self.tallies, self._told, self.served, self.shares):  # what still runs there is counted by itself
            for name in book.keys() - self.backends.keys():
                book.pop(name)
        judged = self.probed or self.health.rules.eject  # where nobody judges, nobody holds back either
        for name in self.backends.keys() - before.keys():
            self.health.enter(name, now, probed=self.probed, cold=bool(before) and judged)
        self._views = {name: self._views.get(name, BackendView(name, concurrency=MOST)) for name in self.backends}
        self.eligible.observe(self.backends.values())
        self.refresh()
        return gone

    def configure(self, routing: str, classes: Sequence[ClassPolicy], *, retries: int, share: float) -> None:
        """These rules hold from now on, for those who wait, too."""
        self.retries.configure(retries=retries, share=share)
        self.scheduler.configure(routing, classes)
        self._pump(self._clock())

    def see(self, views: Iterable[BackendView]) -> None:
        """What was found out about some of the backends. Of the configuration's bounds and theirs the narrower holds.
        Others are ignored."""
        self._views |= {view.name: view for view in views if view.name in self._views}
        self.refresh()

    def share(self, backend: Backend) -> TimeShare:
        """Who has how much of a backend's time."""
        return self.shares.setdefault(backend.name, TimeShare())

    def usable(self, x: Exchange, *, beside: bool = False) -> Set[str] | None:
        """The backends that a request may use; None: any. After a failure no version is better than the other; `beside`
        another attempt it is."""
        assert x.tenant is not None
        assert x.call is not None
        among = None if x.attempts and not beside else x.call.among
        return self.eligible.backends(x.call.label, x.tenant.residency, among, x.call.model)

    def untried(self, x: Exchange) -> bool:
        """Whether there is one among them where it has not been yet."""
        usable, tried = self.usable(x), {attempt.backend.name for attempt in x.attempts}
        return not tried.issuperset(self.backends if usable is None else usable)

    def refresh(self) -> None:
        """Something about a backend has changed, or the time has come: the scheduler is shown all of them anew."""
        now = self._clock()
        verdicts = self.health.verdicts(now, {name for name, view in self._views.items() if not view.open})
        self.change_at = self.health.next_change(now)
        self.trials = frozenset([name for name, verdict in verdicts.items() if verdict.state is State.TRIAL])
        runs = self.scheduler.statistics(now).backends if self.trials else {}
        shown = []
        for name, view in self._views.items():
            told, verdict = self.backends[name], verdicts[name]
            most = min(view.concurrency, told.concurrency, MOST if verdict.room is None else verdict.room)
            if name in self.trials:
                most = 1 + runs[name].running if name in runs else 1  # beside what runs there from before
            shown.append(
                replace(view, concurrency=most, speed=told.speed, region=told.region, open=view.open and verdict.open)
            )
        self.scheduler.observe(shown, now, moved=self.eligible.changed())
        self._pump(now)
        if self.waking is not None:
            self.waking.see(any(view.open for view in shown))

    def judge(self, attempt: Attempt, found: Found | None, *, tokens: int = 0, rests_s: float = 0.0) -> None:
        """How an attempt ended, or that it is late. `rests_s`: so long its backend asked to be left alone."""
        name, now = attempt.backend.name, self._clock()
        changed = self.health.ended(
            name, found, now, trial=attempt.trial, cost_s=now - attempt.dispatched_at, tokens=tokens
        )
        attempt.trial = False
        if found is Found.GOOD:
            self.served[name] = max(self.served[name], attempt.dispatched_at)
        if rests_s > 0.0:
            changed = self.health.rest(name, now + rests_s) or changed
        if changed:
            self.refresh()

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

    def beside(self, job: Job, attempts: int) -> Placed | None:
        """A place for one more attempt of a request if one is free, nobody waits and the retries allow it."""
        wanted = self.hedging is not None and not self.waiting and self._refusal is None
        if not wanted or not self.retries.allows(attempts, self._clock()):
            return None
        placed = self.submit(job)
        if isinstance(placed, asyncio.Future):
            self.leave(job.id, Ending.IGNORED)
        if not isinstance(placed, tuple):
            return None
        self.retries.spend()
        return placed

    def began(self, job_id: int, attempt: Attempt, *, stream: bool) -> None:
        """A request was sent to its backend."""
        if stream:
            self.unanswered[job_id] = attempt
        if attempt.backend.name in self.trials and self.health.started(attempt.backend.name, self._clock()):
            attempt.trial = True
            self.refresh()

    def answered(self, job_id: int, attempt: Attempt, now: float) -> None:
        """Its first token is there."""
        name = attempt.backend.name
        self.unanswered.pop(job_id, None)
        self.served[name] = max(self.served[name], attempt.dispatched_at)
        if attempt.trial and not attempt.late:
            self.judge(attempt, Found.GOOD)

    def leave(
        self, job_id: int, ending: Ending, usage: Usage | None = None, seen_tokens: int = 0, backend: str = ""
    ) -> None:
        """A job ended, or its client did before it began. `seen_tokens` of output came, whatever its usage says."""
        self.unanswered.pop(job_id, None)
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
        if self.waking is not None:
            self.waking.refuse(error)
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
