"""The jobs that run: what each was charged and expects, what its tokens tell, what its end teaches."""

from __future__ import annotations

from math import inf

from policies.backend import Backend, Slot, Ticket
from policies.pool import Pool
from policies.types import Ending, Usage
from policies.unseen import Unseen
from policies.waiting import WaitingRoom


class Running:
    """One slot per job that is on a backend. It is counted from its start, wherever it came from."""

    def __init__(self, pool: Pool, room: WaitingRoom) -> None:
        self.slots: dict[int, Slot] = {}
        self.unseen = Unseen(pool.rules)
        self._pool = pool
        self._room = room

    def start(self, ticket: Ticket, backend: Backend, now: float) -> None:
        """The ticket's job goes to `backend`: it waits no more, and its tenant is charged for it."""
        job, uncached = ticket.job, ticket.uncached(backend.name)
        cost = uncached + self._pool.rules.output_weight * job.output_tokens
        took = self._pool.times.expect(uncached, job.prompt_tokens) / backend.view.speed
        paced = self._room.tier(ticket).policy.paced and job.output_tokens > 0
        slot = Slot(job, backend, uncached, ticket.matched(backend.name), cost, took, paced)
        self._room.dispatched(ticket, cost)
        self.slots[job.id] = slot
        self.unseen.start(slot, now)
        self._pool.index.insert(job.prefix, backend.name)

    def first_token(self, job_id: int, now: float) -> None:
        """The first token of a stream has come: its prefill is over."""
        if (slot := self.slots.get(job_id)) is not None:
            if slot.prefilling:
                self._pool.timed(slot, now)
            slot.backend.prefilled(slot, now)
            slot.backend.stream(slot, now)

    def tokens(self, job_id: int, n: int, now: float) -> bool:
        """A stream got `n` more tokens after its first. Returns whether something that waits may go now."""
        slot = self.slots.get(job_id)
        if slot is None:
            return False
        backend, begins = slot.backend, not slot.streaming
        if begins:
            self.first_token(job_id, now)
        slot.output += n
        return self._advance(backend, n, now) or begins

    def streamed(self, backend: str, n: int, now: float) -> bool:
        """The same, of all streams on a backend together."""
        known = self._pool.backends.get(backend)
        return known is not None and known.streams > 0 and self._advance(known, n, now)

    @staticmethod
    def _advance(backend: Backend, n: int, now: float) -> bool:
        busy = backend.in_flight > 0
        backend.advance(n, now)
        if busy and not backend.in_flight:
            return True
        if backend.need_s == inf or backend.credit(now) < backend.need_s:
            return False
        backend.need_s = inf
        return True

    def end(self, job_id: int, now: float, ending: Ending, usage: Usage | None, seen_tokens: int) -> None:
        """The job is over; one that does not run is ignored."""
        if (slot := self.slots.pop(job_id, None)) is not None:
            if ending is Ending.SUCCESS and slot.prefilling and slot.one_shot:
                self._pool.timed(slot, now)
            slot.output = max(slot.output, seen_tokens)
            slot.backend.end(slot, now)
            self._pool.learn(slot, ending, usage)
            self._room.settle(slot, ending, usage)
