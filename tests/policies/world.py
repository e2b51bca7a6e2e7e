"""A pool in a bottle: schedulers in lock-step, a plain model of what they may do, and everything that must hold.

A `World` is told what happens (jobs come and go, tokens come, backends appear and vanish, peers speak, time passes). It
tells its schedulers, does what they say, and checks every decision and every counter against its own books, which are
sums over lists. The schedulers have one seed and must decide alike, though each is used in a way of its own:

primary   as the contract says: `due` after every event and at `next_deadline`, and at no other time
twin      the same once more: a seed determines every decision
curious   asked everything that can be asked, all the time: questions change nothing
slow      something waits in it at all times that can never go anywhere, so no short cut for an empty queue is taken
eager     `due` is called far too often: `next_deadline` is honest, nothing would have happened before it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf, log, log1p
from random import Random

from policies.backend import Ticket
from policies.queues import FairShare
from policies.rules import Rules
from policies.scheduler import Scheduler
from policies.types import (
    BackendView,
    ClassPolicy,
    Dispatch,
    Drop,
    Ending,
    Job,
    Reason,
    RemoteLoad,
    Usage,
    Wait,
)

INTERACTIVE = ClassPolicy("interactive", 12, 120_000, max_wait_s=10.0)
BATCH = ClassPolicy("batch", 20, 400_000, 0.6, 40.0, paced=False, ceiling=0.5, kv_ceiling=0.6, floor=0.05)
NEVER = ClassPolicy("never", max_wait_s=inf, ceiling=0.0)  # no backend is ever below its ceiling
WEIGHTS = {"t0": 1.0, "t1": 1.0, "t2": 2.0, "t3": 0.5}
CLOSE = 1e-6  # relative: sums of floats in another order


@dataclass(frozen=True, slots=True)
class Plan:
    """What a world is like. `tardy`: nobody keeps to `next_deadline`. Without `deadlines` and if not `tardy`, an eager
    scheduler runs along (a job that became hopeless since its timer was set may be refused before it is time)."""

    seed: int = 0
    routing: str = "price"
    shares: bool = True
    deadlines: bool = False
    tardy: bool = False
    alone: bool = False
    rules: Rules = Rules()  # noqa: RUF009 (frozen)


@dataclass(slots=True)
class Run:
    """A job on a backend, in our own books."""

    job: Job
    backend: str
    uncached: int
    cost: int
    began: float
    prefilling: bool = True
    streaming: bool = False
    output: int = 0


class World:
    """One pool. Every method is an event; the checks are in all of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rules = plan.rules
        self.now = 0.0
        self.classes = {policy.name: policy for policy in (INTERACTIVE, BATCH, NEVER)}
        names = ["primary"] if plan.alone else ["primary", "twin", "curious", "slow"]
        if not (plan.alone or plan.deadlines or plan.tardy):
            names.append("eager")
        self.all = {name: self._scheduler() for name in names}
        self.primary = self.all["primary"]
        self.whims = Random(f"{plan.seed} whims")
        self.ids = count(1)
        self.waiting: dict[int, Job] = {}
        self.runs: dict[int, Run] = {}
        self.views: dict[str, BackendView] = {}
        self.here: dict[str, set[int]] = {}  # jobs that count on the present incarnation
        self.peers: dict[str, dict[str, RemoteLoad]] = {}
        self.heard: dict[str, float] = {}
        self.idle_since: dict[str, float] = {}
        self.served: dict[tuple[str, str], float] = {}
        self.floors = dict.fromkeys(self.classes, 0.0)  # service of whoever was served last, and may go everywhere
        self.tops = dict.fromkeys(self.classes, 0.0)  # and of whoever was served last
        self.owed = dict.fromkeys(self.classes, 0.0)
        self.mean_cost = dict.fromkeys(self.classes, 0.0)
        self.charges = dict.fromkeys(self.classes, 0)
        self.log: list[str] = []
        self.finished: set[int] = set()
        self.unsettled = False
        self._blocker = -1
        self.observe([BackendView("b0"), BackendView("b1")])

    def _scheduler(self) -> Scheduler:
        plan = self.plan
        classes = tuple(self.classes.values())
        return Scheduler(Random(plan.seed), routing=plan.routing, rules=plan.rules, shares=plan.shares, classes=classes)

    @property
    def gated(self) -> bool:
        return self.plan.routing == "price"

    # What happens.

    def submit(self, job: Job) -> None:
        """A job comes."""
        full = self._full(job)
        key = (job.class_, job.tenant)
        idle = not any((j.class_, j.tenant) == key for j in self.waiting.values())
        reasons = {name: scheduler.submit(job, self.now) for name, scheduler in self.all.items()}
        reason = reasons["primary"]
        assert set(reasons.values()) == {reason}, reasons
        self.log.append(f"{self.now:.9f} submit {job.id} {reason}")
        longest = job.arrived + self.classes[job.class_].max_wait_s
        if not any(view.open and job.allows(name) for name, view in self.views.items()):
            assert reason is Reason.NO_BACKEND
        elif full:
            assert reason is Reason.QUEUE_FULL
        elif reason is not None:
            self._check_refusal(job, reason, strictly=True)
        else:
            assert self.now <= longest
            self.waiting[job.id] = job
            if idle:
                self._check_lift(job)
        self.settle()

    def first_token(self, job_id: int) -> None:
        """The first token of a stream comes."""
        self._tell(lambda scheduler: scheduler.first_token(job_id, self.now))
        if (run := self.runs.get(job_id)) is not None:
            run.prefilling, run.streaming = False, True
        self._note_idle()
        self.settle()

    def tokens(self, job_id: int, n: int) -> None:
        """More tokens come; `due` is called only if that is asked for."""
        if self.unsettled:
            self.settle()
        wanted = {name: scheduler.tokens(job_id, n, self.now) for name, scheduler in self.all.items()}
        if (run := self.runs.get(job_id)) is not None:
            run.prefilling, run.streaming = False, True
            run.output += n
        self._note_unseen()
        self._note_idle()
        self.check()
        if wanted["primary"]:
            self.settle()
        elif "eager" in self.all and not self._reserved:
            assert self.all["eager"].due(self.now) == [], "tokens() did not say that something can be done"

    def leave(self, job_id: int, ending: Ending, usage: Usage | None = None, *, quietly: bool = False) -> None:
        """A job ends, or leaves the queue; one that is neither here nor there is ignored. `quietly`: `due` comes later,
        with another event."""
        self._tell(lambda scheduler: scheduler.leave(job_id, self.now, ending, usage))
        if (job := self.waiting.pop(job_id, None)) is not None:
            self._left_queue(job)
        elif (run := self.runs.pop(job_id, None)) is not None:
            self.here.get(run.backend, set()).discard(job_id)
            self._settle_cost(run, ending, usage)
            self.finished.add(job_id)
        self._note_idle()
        self.check()
        self.unsettled = True
        if not quietly:
            self.settle()

    def observe(self, views: Sequence[BackendView]) -> None:
        """The backends are these now."""
        for view in views:
            known = self.views.get(view.name)
            if known is None or known.incarnation != view.incarnation:
                self.here[view.name] = set()
                self.idle_since[view.name] = 0.0
                for said in self.peers.values():
                    said.pop(view.name, None)
        gone = self.views.keys() - {view.name for view in views}
        for name in gone:
            del self.here[name], self.idle_since[name]
            for said in self.peers.values():
                said.pop(name, None)
        self.views = {name: view for name in self._order(views) for view in views if view.name == name}
        self._tell(lambda scheduler: scheduler.observe(views, self.now))
        self.settle()
        self._block()

    def hear(self, gateway: str, loads: Sequence[RemoteLoad]) -> None:
        """Another gateway speaks."""
        self._tell(lambda scheduler: scheduler.observe_remote(gateway, loads, self.now))
        self.peers[gateway] = {load.backend: load for load in loads if load.backend in self.views}
        self.heard[gateway] = self.now
        self._note_idle()
        self.settle()

    def pass_time(self, seconds: float) -> None:
        """Nothing happens for a while but what the schedulers wake up for."""
        self.settle()
        until = self.now + seconds
        for _ in range(0 if self.plan.tardy else 10_000):
            deadline = self.primary.next_deadline()
            stop = until if deadline is None else min(until, deadline)
            # who has no waiters need not know at once that a peer has fallen silent, and so does not ask to be woken
            if "eager" in self.all and not self._reserved and (self.waiting or not self.heard):
                for share in sorted(self.whims.random() for _ in range(2)):
                    found = self.all["eager"].due(self.now + share * (stop - self.now))
                    assert found == [], f"{found} before {deadline}, at {self.now}"
            self.now = stop
            if deadline is None or deadline > until:
                break
            self.settle()
        self.now = until

    def settle(self) -> list[Dispatch | Drop]:
        """Do what is due."""
        self.unsettled = False
        quanta = {name: self._quantum(name) for name in self.classes}
        found = {name: self._due(name, scheduler) for name, scheduler in self.all.items()}
        decisions = found["primary"]
        for name, other in found.items():
            assert other == decisions, f"{name} decides {other}, primary {decisions}"
        for gateway, at in list(self.heard.items()):
            if self.now - at > self.rules.peer_silence_s - 1e-9:
                self._forget(gateway)
        self._note_unseen()
        self._note_idle()
        for decision in decisions:
            self._apply(decision, quanta)
        self._note_idle()
        self._check_rest({each.backend for each in decisions if isinstance(each, Dispatch)})
        self.check()
        return decisions

    def drain(self) -> None:
        """Nobody comes any more: all that waits is served or refused in the end, and nothing of it is left."""
        self.observe([replace(view, open=True, kv_used=None) for view in self.views.values()] or [BackendView("b0")])
        for gateway in list(self.heard):
            self.hear(gateway, ())
        for _ in range(500):
            if not self.runs and not self.waiting:
                break
            for job_id in list(self.runs)[:3]:
                self.leave(job_id, Ending.SUCCESS, Usage(10, 10, 0))
            if not self.runs and self.waiting:
                self.pass_time(0.5)
        assert not self.waiting and not self.runs, f"{self.primary!r} does not drain"
        for scheduler in self.all.values():
            self._check_empty(scheduler)

    # Checks.

    def check(self) -> None:
        """The books agree, whatever just happened."""
        for name, scheduler in self.all.items():
            stats = scheduler.statistics(self.now)
            assert stats.backends.keys() == self.views.keys()
            for backend, told in stats.backends.items() if name != "eager" else ():  # it forgets silent peers sooner
                ours = (self.running(backend), self.in_flight(backend), self.kv(backend))
                assert (told.running, told.in_flight_tokens, told.kv_tokens) == ours, f"{name}, {backend}"
            for class_ in ("interactive", "batch"):
                jobs = [job for job in self.waiting.values() if job.class_ == class_]
                tokens = sum(job.prompt_tokens for job in jobs)
                assert (stats.queued[class_], stats.queued_tokens[class_]) == (len(jobs), tokens), name
                policy = self.classes[class_]
                assert len(jobs) <= policy.max_queued
                assert tokens <= policy.max_queued_tokens or len(jobs) == 1
            assert 1.0 <= scheduler.retry_after(self.now) <= 60.0
        for (class_, tenant), served in self.served.items():
            told_served = self._queue(class_).served(tenant)
            assert abs(told_served - served) <= CLOSE * max(1.0, abs(served)), f"{tenant} had {served}"

    def _check_rest(self, opened: set[str]) -> None:
        """After `due`: nobody waits too long, or for nothing, and the next deadline is in the future. Where it has just
        `opened` a backend to small prefills, those that were held before that get their turn with the next event."""
        deadline = self.primary.next_deadline()
        assert deadline is None or deadline >= self.now
        assert "twin" not in self.all or self.all["twin"].next_deadline() == deadline
        for job in self.waiting.values():
            latest = job.arrived + self.classes[job.class_].max_wait_s
            assert self.now < latest, f"{job} waits for ever"
            assert job.deadline is None or not self.rules.refuse or self.now < job.deadline
            assert deadline is not None and deadline <= latest
            assert any(view.open and job.allows(name) for name, view in self.views.items())
        able: set[str] = set()
        heads = stuck = 0
        for job in self.waiting.values():
            ticket = self._ticket(job)
            heads += ticket.waited_for is Wait.ROOM
            if ticket.parked:
                assert ticket.lanes, "parked for nothing"
                patience = (1.0 - self.rules.patience) * self.classes[job.class_].max_wait_s
                assert self.now < job.arrived + patience + CLOSE, "parked for ever"
                stuck += ticket.waited_for is Wait.ROOM
                continue
            fits = {name for name in self.views if self._surely_fits(job, name) and self._below_ceiling(job, name)}
            if fits and self._peer_may_hold(job):
                continue
            if ticket.waited_for is Wait.ROOM:
                fits -= opened
            able |= fits
            stuck += not fits and ticket.waited_for is Wait.ROOM
        idle = f"{sorted(able)} idle: {self.primary!r}"
        assert not able or (stuck and self.rules.reserve), idle
        assert len(able) <= heads, idle  # each has one backend reserved at most

    def _check_refusal(self, job: Job, reason: Reason, *, strictly: bool = False) -> None:
        """A job is refused for a reason. `strictly`: not at the very moment at which its time is up."""
        up = self.now > job.arrived + self.classes[job.class_].max_wait_s - (0.0 if strictly else CLOSE)
        if reason is Reason.WAITED:
            assert up
        elif reason is Reason.DEADLINE:
            assert job.deadline is not None
            assert self.now >= job.deadline or self.primary._pool.times.samples >= self.rules.samples
        else:
            assert reason is Reason.NO_BACKEND
            assert not any(view.open and job.allows(name) for name, view in self.views.items())

    def _apply(self, decision: Dispatch | Drop, quanta: dict[str, float]) -> None:
        job = self.waiting[decision.job.id]
        assert decision.job is job and decision.waited_s == self.now - job.arrived
        self.log.append(f"{self.now:.9f} {job.id} {getattr(decision, 'backend', None) or decision.reason}")
        if isinstance(decision, Drop):
            del self.waiting[job.id]
            self._left_queue(job)
            self._check_refusal(job, decision.reason)
            return
        self._check_capacity(decision)
        self._check_order(decision, quanta)
        policy = self.classes[job.class_]
        owed = self.owed[policy.name]
        assert self._below_ceiling(job, decision.backend), f"{policy.name} is over its ceiling"
        cost = decision.uncached_tokens + self.rules.output_weight * job.output_tokens
        self.owed[policy.name] = max(owed, 0.0) - cost
        for name, other in self.classes.items():
            if any(each.class_ == name for each in self.waiting.values()):
                self.owed[name] = min(self.owed[name] + other.floor * cost, self.rules.quantum_tokens)
        key = (policy.name, job.tenant)
        self.tops[policy.name] = max(self.tops[policy.name], self.served.get(key, 0.0))
        if not self._restricted(job):
            runs = [run.job for run in self.runs.values() if (run.job.class_, run.job.tenant) == key]
            expected = sum(self.rules.output_weight * run.output_tokens / run.weight for run in runs)
            self.floors[policy.name] = max(self.floors[policy.name], self.served.get(key, 0.0) - expected)
        self.served[key] = self.served.get(key, 0.0) + cost / job.weight
        self.charges[policy.name] += 1
        step = max(0.02, 1.0 / self.charges[policy.name])
        self.mean_cost[policy.name] += (cost - self.mean_cost[policy.name]) * step
        quanta[policy.name] = self._quantum(policy.name)
        del self.waiting[job.id]
        self._left_queue(job)
        self.runs[job.id] = Run(job, decision.backend, decision.uncached_tokens, cost, self.now)
        self.here[decision.backend].add(job.id)

    def _check_capacity(self, decision: Dispatch) -> None:
        """There was a place there: as far as we know, of every kind."""
        job, name = decision.job, decision.backend
        view = self.views[name]
        assert job.id not in self.runs and job.id not in self.finished, "dispatched twice"
        assert view.open and job.allows(name)
        assert self.running(name) < view.concurrency
        assert 1 <= decision.uncached_tokens <= max(1, job.prompt_tokens)
        assert decision.cached_tokens == max(0, job.prompt_tokens - decision.uncached_tokens)
        assert name in [backend for _, backend in decision.considered]
        if self.gated:
            flight = self.in_flight(name)
            assert not flight or flight + decision.uncached_tokens <= self.rules.budget_tokens, "the gate is shut"
            if view.kv_tokens is not None:
                assert max(self.kv(name), view.kv_used or 0) <= self.rules.kv_share * view.kv_tokens

    def _check_order(self, decision: Dispatch, quanta: dict[str, float]) -> None:
        """Nobody was passed over who could have gone there and had the better right to."""
        job, name = decision.job, decision.backend
        order = list(self.classes)
        mine = self.served.get((job.class_, job.tenant), 0.0)
        for rival in self.waiting.values():
            ticket = self.primary._room.tickets.get(rival.id)
            if rival is job or ticket is None or ticket.parked or self._peer_may_hold(rival):
                continue
            if not self._surely_fits(rival, name):
                continue
            if order.index(rival.class_) < order.index(job.class_):
                assert self.owed[job.class_] > 0.0, f"{job} goes before {rival} of a class above"
            if rival.class_ != job.class_:
                continue
            theirs = self.served.get((rival.class_, rival.tenant), 0.0)
            assert mine <= theirs + quanta[job.class_] + CLOSE * max(1.0, mine), f"{job.tenant} is ahead of its share"
            if rival.tenant == job.tenant:
                assert not self._aged(rival, job), f"{rival} starves behind {job}"

    def _aged(self, old: Job, young: Job) -> bool:
        """Whether the old job goes first however short the young one is."""
        if not self.gated:
            return old.arrived < young.arrived
        if not old.prefix and not young.prefix:  # nothing of them is cached anywhere
            keys = [job.arrived / self.rules.ageing_s + log1p(max(1, job.prompt_tokens)) for job in (old, young)]
            return keys[0] < keys[1] - CLOSE
        shortest = young.arrived / self.rules.ageing_s + log(2.0)
        return old.arrived / self.rules.ageing_s + log1p(max(1, old.prompt_tokens)) < shortest - CLOSE

    def _check_lift(self, job: Job) -> None:
        """A tenant that was away is not owed anything for that time, nor charged for it."""
        key = (job.class_, job.tenant)
        before = self.served.get(key, 0.0)
        after = self._queue(job.class_).served(job.tenant)
        assert before <= after <= max(self.tops[job.class_], before) + CLOSE
        if not self._restricted(job):
            floor = self.floors[job.class_]
            assert after >= floor - CLOSE * max(1.0, floor), f"{job.tenant} saved {floor - after} up"
        self.served[key] = after

    def _settle_cost(self, run: Run, ending: Ending, usage: Usage | None) -> None:
        """A failed job cost its tenant nothing, any other what was really used."""
        job = run.job
        weight = self.rules.output_weight
        if ending is Ending.DROPPED:
            cost = 0
        elif usage is not None:
            cached = job.prompt_tokens - run.uncached if usage.cached is None else usage.cached
            cost = max(1, usage.prompt - cached) + weight * usage.output
        else:
            cost = run.uncached + weight * run.output
        self.served[job.class_, job.tenant] += (cost - run.cost) / job.weight
        self.mean_cost[job.class_] += (cost - run.cost) * max(0.02, 1.0 / self.charges[job.class_])

    def _check_empty(self, scheduler: Scheduler) -> None:
        """Every counter is exactly where it was in the beginning."""
        for backend in scheduler._pool.backends.values():
            assert (backend.running, backend.in_flight, backend.kv, backend.streams) == (0, 0, 0, 0)
            assert backend.in_flight_s == 0.0 and backend.marks == [] and backend.unwatched_since is not None
        assert scheduler._running.slots == {}
        assert all(ticket.job.class_ == "never" for ticket in scheduler._room.tickets.values())
        for name in ("interactive", "batch"):
            tier = scheduler._room.tiers[name]
            assert (tier.queue.requests, tier.queue.tokens, tier.owed) == (0, 0, 0.0)
            assert all(tier.queue.of(tenant) == (0, 0) for tenant in WEIGHTS)

    # Our own books.

    def running(self, name: str) -> int:
        return len(self.here[name]) + sum(load.running for load in self._said(name))

    def in_flight(self, name: str) -> int:
        own = sum(self.runs[i].uncached for i in self.here[name] if self.runs[i].prefilling)
        return own + sum(load.in_flight_tokens for load in self._said(name))

    def kv(self, name: str) -> int:
        own = sum(self.runs[i].job.prompt_tokens + self.runs[i].job.output_tokens for i in self.here[name])
        return own + sum(load.kv_tokens for load in self._said(name))

    def _said(self, name: str) -> list[RemoteLoad]:
        return [said[name] for said in self.peers.values() if name in said]

    def _full(self, job: Job) -> bool:
        """Whether one more would be too many, of its class or of its tenant in it."""
        policy = self.classes[job.class_]
        queued = [each for each in self.waiting.values() if each.class_ == job.class_]
        own = [each for each in queued if each.tenant == job.tenant]
        share, most = policy.tenant_share, policy.max_queued_tokens
        return (
            len(queued) >= policy.max_queued
            or (bool(queued) and sum(each.prompt_tokens for each in queued) + job.prompt_tokens > most)
            or (bool(own) and len(own) + 1 > share * policy.max_queued)
            or (bool(own) and sum(each.prompt_tokens for each in own) + job.prompt_tokens > share * most)
        )

    def _surely_fits(self, job: Job, name: str) -> bool:
        """Whether the job could go there now, by the rules alone. False where that depends on what is learned."""
        view = self.views[name]
        if not view.open or not job.allows(name) or self.running(name) >= view.concurrency:
            return False
        if not self.gated:
            return True
        if view.kv_tokens is not None and max(self.kv(name), view.kv_used or 0) > self.rules.kv_share * view.kv_tokens:
            return False
        uncached, flight = self._uncached(job, name), self.in_flight(name)
        if flight:
            return flight + uncached <= self.rules.budget_tokens
        streams = any(self.runs[i].streaming for i in self.here[name])
        if not streams and all(load.credit_s == inf for load in self._said(name)):
            return True
        takes = self.primary._pool.times.expect(uncached, job.prompt_tokens)
        return self.now > self.idle_since[name] + self.rules.longest_break * takes + CLOSE

    def _below_ceiling(self, job: Job, name: str) -> bool:
        policy = self.classes[job.class_]
        if policy.ceiling >= 1.0 or self.owed[policy.name] > 0.0:
            return True
        view = self.views[name]
        if not self.gated:
            return self.running(name) < policy.ceiling * view.concurrency
        busy = sum(1 for each in self.views if self.in_flight(each))
        kv = max(self.kv(name), view.kv_used or 0)
        fits = not view.kv_tokens or kv < policy.kv_ceiling * view.kv_tokens
        return busy < policy.ceiling * len(self.views) and not self.in_flight(name) and fits

    def _uncached(self, job: Job, name: str) -> int:
        pool = self.primary._pool
        common, more = pool.index.match(job.prefix)
        cold = max(1, job.prompt_tokens - int(common * job.piece_tokens * pool.trust))
        if name not in more:
            return cold
        return min(cold, max(1, job.prompt_tokens - int(more[name] * job.piece_tokens * pool.backends[name].trust)))

    def _peer_may_hold(self, job: Job) -> bool:
        """Whether another gateway's head may be the reason that it waits."""
        heads = any(load.head is not None for said in self.peers.values() for load in said.values())
        return heads and job.prompt_tokens > self.rules.budget_tokens

    @property
    def _reserved(self) -> bool:
        """Whether a backend may be reserved for a head of the queue, ours or a peer's. Whose head that is may change in
        the same `due` in which it was reserved, and which of equal backends is meant is drawn: the next one then has
        something to do though nothing happened."""
        return _reserves(self.primary)

    def _quantum(self, class_: str) -> float:
        if not self.plan.shares:
            return inf
        requests = self.rules.quantum_requests * max(1.0, self.mean_cost[class_])
        return min(self.rules.quantum_tokens, requests)

    def _queue(self, class_: str) -> FairShare:
        return self.primary._room.tiers[class_].queue

    def _ticket(self, job: Job) -> Ticket:
        return self.primary._room.tickets[job.id]

    @staticmethod
    def _restricted(job: Job) -> bool:
        return job.candidates is not None or bool(job.tried)

    def _prefilling(self, run: Run) -> bool:
        slot = self.primary._running.slots[run.job.id]
        return slot.prefilling

    def _left_queue(self, job: Job) -> None:
        if not any(each.class_ == job.class_ for each in self.waiting.values()):
            self.owed[job.class_] = 0.0

    def _note_unseen(self) -> None:
        """Prefills that nobody sees may have ended, for their time or for the pace of the streams."""
        for run in self.runs.values():
            if run.prefilling and not run.job.streamed and not self._prefilling(run):
                assert run.job.output_tokens, "the prefill of one-shot work ended before its end"
                run.prefilling = False

    def _note_idle(self) -> None:
        for name in self.views:
            busy = self.in_flight(name) > 0
            if busy:
                self.idle_since[name] = inf
            elif self.idle_since[name] == inf:
                self.idle_since[name] = self.now

    def _forget(self, gateway: str) -> None:
        if gateway not in self.primary._pool.heard:
            del self.peers[gateway], self.heard[gateway]

    def _order(self, views: Sequence[BackendView]) -> list[str]:
        known = [name for name in self.views if any(view.name == name for view in views)]
        return known + [view.name for view in views if view.name not in known]

    def _tell(self, event: object) -> None:
        for scheduler in self.all.values():
            event(scheduler)  # type: ignore[operator]

    def _due(self, name: str, scheduler: Scheduler) -> list[Dispatch | Drop]:
        if name == "curious":
            self._ask(scheduler)
        found = scheduler.due(self.now)
        if name == "eager" and not _reserves(scheduler):
            assert scheduler.due(self.now) == [], "due() is not done when it returns"
        if name == "curious":
            self._ask(scheduler)
        kept = [each for each in found if each.job.class_ != "never"]
        return [self._comparable(each) for each in kept]

    def _comparable(self, decision: Dispatch | Drop) -> Dispatch | Drop:
        """Without what may differ: estimates for whom to tell, and turns, which are counted with questions."""
        if isinstance(decision, Drop):
            return replace(decision, retry_after=0.0)
        if self.plan.routing == "round_robin":
            return replace(decision, considered=tuple((0.0, name) for _, name in decision.considered))
        return decision

    def _ask(self, scheduler: Scheduler) -> None:
        deadline = scheduler.next_deadline()
        for job in [*list(self.waiting.values())[:2], Job(0, "t9", self.now, prompt_tokens=9000, output_tokens=10)]:
            explained = scheduler.explain(job, self.now)
            assert (explained.backend is None) == (explained.waits is not None or explained.refused is not None)
            scheduler.place(job, self.now)
        scheduler.publish(self.now)
        repr(scheduler)
        assert scheduler.next_deadline() == deadline

    def _block(self) -> None:
        """Something waits in the slow scheduler at all times."""
        if (slow := self.all.get("slow")) is not None and not slow._room.tiers["never"].queue.requests:
            self._blocker -= 1
            slow.submit(Job(self._blocker, "nobody", self.now, "never"), self.now)


def _reserves(scheduler: Scheduler) -> bool:
    waiting = [ticket for ticket in scheduler._room.tickets.values() if ticket.job.class_ != "never"]
    return any(each.waited_for is Wait.PEER for each in waiting)
