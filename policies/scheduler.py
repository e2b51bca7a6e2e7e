"""The one stateful core: jobs come, backends open, and it says which goes where and which goes nowhere.

Single writer, no await, no clock, no I/O. Whatever happens is told to it; `due` says what is to be done about it.
Everything that `due` returns is already counted, so no two calls give the same place away.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import inf
from random import Random

from policies.backend import Backend, Ticket
from policies.choice import Choice, Considered
from policies.forecast import Forecast
from policies.pool import Pool
from policies.queues import FairShare, Key, aged_shortest, by_arrival
from policies.rules import Rules
from policies.running import Running
from policies.types import (
    BATCH,
    INTERACTIVE,
    BackendView,
    ClassPolicy,
    Dispatch,
    Drop,
    Ending,
    Explanation,
    Gate,
    Job,
    Place,
    Reason,
    RemoteLoad,
    Statistics,
    Usage,
    Wait,
)
from policies.waiting import WaitingRoom


class Scheduler:
    """Decides for one pool. Times are seconds on the caller's clock and never go back.

    After `submit`, `first_token`, `leave`, `configure`, `observe` and `observe_remote`, after `tokens` if it returned
    True, and at `next_deadline`, call `due` and do what it says.

    `routing` names the rule that chooses a backend. "price" goes with the prefill gate, shortest-first order and
    waiting for warm backends; the others with a plain limit on concurrency and arrival order. Tenants share fairly
    unless `shares` is False. `piece_tokens` is what a digest of a job's prefix stands for on average.
    """

    def __init__(
        self,
        rng: Random,
        *,
        routing: str = "price",
        classes: Sequence[ClassPolicy] = (INTERACTIVE, BATCH),
        rules: Rules | None = None,
        shares: bool = True,
        piece_tokens: float = 256.0,
    ) -> None:
        self.rules = rules = rules or Rules()
        self._gated = routing == "price"
        self._pool = Pool(rules, piece_tokens, gated=self._gated)
        self._admission = self._pool.admission
        quantum = (rules.quantum_tokens, rules.quantum_requests) if shares else (inf, inf)
        self._room = WaitingRoom(rules, classes, lambda: FairShare(self._key(), *quantum))
        self._choice = Choice(routing, self._pool, self._room, rng)
        self._running = Running(self._pool, self._room)
        self._unseen = self._running.unseen
        self._rng = rng
        self._lost: list[Ticket] = []
        self._forecast = Forecast(self._pool, self._room)
        self._drain = self._forecast.drain
        self._serial = count(1)

    def __repr__(self) -> str:
        backends = ", ".join(map(repr, self._pool.backends.values()))
        return f"<Scheduler [{len(self._running.slots)} running, {len(self._room)} waiting | {backends}]>"

    # What happens.

    def submit(self, job: Job, now: float) -> Reason | None:
        """Queue the job. Returns None, or why it is refused at once."""
        if job.id in self._room.tickets or job.id in self._running.slots:
            raise ValueError(f"job {job.id} is already here")
        ticket = self._ticket(job, now)
        if (refused := self._refused(ticket, now)) is not None:
            return refused
        self._room.add(ticket)
        self._drain.waiting(now)
        return None

    def at_once(self, job: Job, now: float) -> Dispatch | None:
        """The dispatch of a job that need not wait while nothing else does: what `submit` and `due` would come to, the
        queue left out. None where the decision is theirs."""
        if self._room or self._pool.heard or job.id in self._running.slots:
            return None
        self._unseen.end(now)
        ticket = self._ticket(job, now)
        usable, policy = self._pool.spare(), self._room.tier(ticket).policy
        if policy.ceiling < 1.0:
            usable = self._admission.below_ceiling(policy, usable, self._pool.backends.values())
        fits = self._admission.fitting(ticket, usable, now)
        if not fits or now > ticket.latest or not policy.max_queued:
            return None
        if ticket.lanes and not {backend.name for backend in fits}.issuperset(ticket.lanes):
            return None
        chosen, considered = self._choice.cheapest(ticket, fits, self._pool.load(now))
        return self._dispatch(ticket, chosen, considered, now)

    def first_token(self, job_id: int, now: float) -> None:
        """The first token of a stream has come: its prefill is over."""
        self._running.first_token(job_id, now)

    def tokens(self, job_id: int, n: int, now: float) -> bool:
        """A stream got `n` more tokens after its first.

        Returns True when `due` should be called: the streams there can afford now what something waits for, an unseen
        prefill has ended there, or the first token had not been told.
        """
        return self._running.tokens(job_id, n, now)

    def streamed(self, backend: str, n: int, now: float) -> bool:
        """The same, of all streams on a backend together: they got `n` more tokens after the first of each."""
        return self._running.streamed(backend, n, now)

    def leave(self, job_id: int, now: float, ending: Ending, usage: Usage | None = None, seen_tokens: int = 0) -> None:
        """The job is over, or gone from the queue. One that is not here is ignored: twice is harmless. `seen_tokens` of
        output are what its tenant is charged where no usage was reported, if that is more than `tokens` was told of."""
        if (ticket := self._room.tickets.get(job_id)) is not None:
            self._room.remove(ticket)
            if not self._room:
                self._drain.empty()
        else:
            self._running.end(job_id, now, ending, usage, seen_tokens)

    def configure(self, routing: str, classes: Sequence[ClassPolicy]) -> None:
        """These rules hold from now on, for those who wait, too. What was learned and who has had how much stays."""
        self._gated = routing == "price"
        self._admission = self._pool.admit(gated=self._gated)
        self._choice = Choice(routing, self._pool, self._room, self._rng)
        self._room.configure(classes, self._key(), self._latest)

    def observe(self, views: Sequence[BackendView], now: float, *, moved: bool = False) -> None:
        """These are the pool's backends now. One with a new incarnation starts from nothing. `moved`: there are jobs
        whose `candidates` have changed."""
        if not (changed := self._pool.observe(views, now)) and not moved:
            return
        for name in changed:
            if name not in self._pool.backends:
                self._room.forget(name)
        for ticket in self._room.tickets.values():
            if self._pool.serves(ticket.job):
                self._pool.assess(ticket)
                self._pool.enlane(ticket)
                self._room.requeue(ticket)
            else:
                self._lost.append(ticket)

    def observe_remote(self, gateway: str, loads: Sequence[RemoteLoad], now: float) -> None:
        """This is what another gateway has on the pool's backends now."""
        self._pool.hear(gateway, loads, now)

    # What is to be done.

    def due(self, now: float) -> list[Dispatch | Drop]:
        """Everything that should happen now, in order."""
        self._pool.forget_silent(now)
        self._unseen.end(now)
        late = self._room.ripe(now, self._latest)
        out: list[Dispatch | Drop] = []
        lost, self._lost = dict.fromkeys(self._lost), []
        gone = [ticket for ticket in lost if self._room.holds(ticket) and not self._pool.serves(ticket.job)]
        out += [self._drop(ticket, Reason.NO_BACKEND, now) for ticket in gone]
        self._pump(now, out)
        if hopeless := dict.fromkeys(filter(self._room.holds, late)):  # of one that was parked there may be two timers
            out += [self._drop(ticket, self._room.too_late(ticket, now), now) for ticket in hopeless]
            self._pump(now, out)  # a backend may have been reserved for one of them
        if not self._room:
            self._drain.empty()
        return out

    def next_deadline(self) -> float | None:
        """When `due` must be called next even if nothing else happens."""
        soonest = min(self._room.next_deadline(), self._unseen.next_end())
        if self._room:
            soonest = min(soonest, self._pool.next_silence(), *(b.open_at for b in self._pool.backends.values()))
        return None if soonest == inf else soonest

    # What can be asked.

    def retry_after(self, now: float) -> float:
        """Seconds until what waits now will have been served, from 1 to 60: when a new try is worth it."""
        return self._forecast.retry_after(now)

    def place(self, job: Job, now: float) -> Place:
        """Where the job stands among those of its class, waiting or not; O(waiting)."""
        return self._forecast.place(self._room.tickets.get(job.id) or self._ticket(job, now), now)

    def explain(self, job: Job, now: float) -> Explanation:
        """What would happen to the job if it were submitted now. Nothing is changed."""
        ticket = self._ticket(job, now)
        return self._choice.explain(ticket, self._refused(ticket, now), self.place(job, now), now)

    def statistics(self, now: float) -> Statistics:
        """A snapshot."""
        return self._forecast.statistics(now)

    def publish(self, now: float) -> tuple[RemoteLoad, ...]:
        """What this gateway has on each backend, and what it would send there next: to be told to the others."""
        queue = next(iter(self._room.tiers.values())).queue
        loads = []
        for name, backend in self._pool.backends.items():
            head = queue.head(name) if self._gated else None
            loads.append(backend.own(now, None if head is None else head - now / self.rules.ageing_s))
        return tuple(loads)

    def _pump(self, now: float, out: list[Dispatch | Drop]) -> None:
        while self._room and self._round(now, out):
            pass

    def _round(self, now: float, out: list[Dispatch | Drop]) -> bool:
        """Dispatches what can be. Returns whether to look again after some were held: a dispatch may have changed whose
        turn it is, or opened a backend to small prefills, and what has become shorter may go before them."""
        again = False
        load = self._pool.load(now)
        spare = self._pool.spare()
        held: list[Ticket] = []
        while spare and (found := self._room.first(spare, self._pool.backends.values(), self._admission)) is not None:
            tier, ticket, usable = found
            if self._pool.assess(ticket):  # the caches have changed since it was put there: another may be first
                self._room.requeue(ticket)
                again = bool(held)
                continue
            latest = self._latest(ticket)
            if now > latest:
                out.append(self._drop(ticket, self._room.too_late(ticket, now), now))
                continue
            if ticket.parked:  # its warm backend may be open to others, and still not have the credit for this one
                usable = [backend for backend in usable if backend.name in ticket.lanes]
            fits = self._admission.fitting(ticket, usable, now)
            if not fits:
                self._room.hold(ticket, Wait.ROOM, latest)
                held.append(ticket)
                drained = [backend for backend in usable if ticket.job.allows(backend.name)]
                if self.rules.reserve and drained:
                    spare.remove(min(drained, key=lambda backend: (backend.in_flight, -backend.credit(now))))
                continue
            chosen, considered = self._choice.cheapest(ticket, fits, load)
            if ticket.patient and self._choice.worth_waiting(ticket, chosen, fits, load):
                continue
            if self._choice.peer_first(tier, ticket, chosen):
                self._room.hold(ticket, Wait.PEER, latest)
                held.append(ticket)
                continue
            out.append(self._dispatch(ticket, chosen, considered, now))
            again = bool(held)
            load = self._pool.load(now)
            if self._admission.gate(chosen) is not Gate.OPEN:
                spare.remove(chosen)
        for ticket in held:
            self._room.tier(ticket).queue.show(ticket)
        return again

    def _dispatch(self, ticket: Ticket, backend: Backend, considered: Considered, now: float) -> Dispatch:
        job, uncached = ticket.job, ticket.uncached(backend.name)
        self._running.start(ticket, backend, now)
        backend.turn = next(self._serial)
        self._drain.served(job.prompt_tokens, now)
        waited = now - job.arrived
        why = (ticket.waited_for or Wait.TURN) if now > ticket.since else None
        saved = job.prompt_tokens - uncached
        missed, prices = uncached - ticket.least, tuple(considered)
        return Dispatch(job, backend.name, max(0, saved), uncached, waited, why, prices, missed)

    def _drop(self, ticket: Ticket, reason: Reason, now: float) -> Drop:
        self._room.remove(ticket)
        return Drop(ticket.job, reason, self.retry_after(now), now - ticket.job.arrived)

    def _key(self) -> Key:
        return aged_shortest(self.rules.ageing_s) if self._gated else by_arrival

    def _ticket(self, job: Job, now: float) -> Ticket:
        ticket = Ticket(job, next(self._serial), now, job.candidates is not None or bool(job.tried))
        self._pool.assess(ticket)
        self._pool.enlane(ticket)
        ticket.latest = self._latest(ticket)
        return ticket

    def _latest(self, ticket: Ticket) -> float:
        return self._room.latest(ticket.job, self._pool.known_time(ticket.least, ticket.job.prompt_tokens))

    def _refused(self, ticket: Ticket, now: float) -> Reason | None:
        if not self._pool.serves(ticket.job):
            return Reason.NO_BACKEND
        if self._room.tier(ticket).full(ticket.job):
            return Reason.QUEUE_FULL
        return self._room.too_late(ticket, now) if now > ticket.latest else None
