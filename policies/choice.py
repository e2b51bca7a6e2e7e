"""What becomes of one ticket now: where it goes, or which backend it waits for, and the account of that."""

from __future__ import annotations

from random import Random

from policies.backend import Backend, Ticket
from policies.pool import Pool
from policies.routing import PRICES, Load, pick, warmer
from policies.types import Explanation, Gate, Place, Reason, Wait
from policies.waiting import Tier, WaitingRoom

Considered = list[tuple[float, str]]


class Choice:
    """Chooses among backends that could take a ticket, by the price that `routing` names. "price" also waits for warm
    backends, and lets another gateway's job go first."""

    def __init__(self, routing: str, pool: Pool, room: WaitingRoom, rng: Random) -> None:
        self._price = PRICES[routing]
        self._gated = routing == "price"
        self._pool = pool
        self._room = room
        self._rules = pool.rules
        self._rng = rng

    def cheapest(self, ticket: Ticket, fits: list[Backend], load: Load) -> tuple[Backend, Considered]:
        """The backend to take of `fits`, none of which may be missing, and what each would cost."""
        price = self._price
        considered = [(price(ticket, backend, load), backend.name) for backend in fits]
        return self._pool.backends[pick(considered, ticket.novel, self._rng)], considered

    def worth_waiting(self, ticket: Ticket, chosen: Backend, fits: list[Backend], load: Load) -> bool:
        """Parks the ticket if a shut backend of its lanes is worth waiting for, and there is time."""
        if self._warmer(ticket, chosen, fits, load) is None:
            return False
        self._room.park(ticket, self._patience(ticket, chosen))
        return True

    def peer_first(self, tier: Tier, ticket: Ticket, chosen: Backend) -> bool:
        """Whether another gateway's head goes before a large prefill of ours there."""
        uncached = ticket.uncached(chosen.name)
        if chosen.remote_head == float("inf") or uncached <= self._rules.budget_tokens:
            return False
        ours = tier.queue.key(ticket.job, uncached)
        return tier.policy.ceiling < 1.0 or ours > chosen.remote_head + self._rules.peer_margin

    def explain(self, ticket: Ticket, refused: Reason | None, place: Place, now: float) -> Explanation:
        """What would be done. Nothing is changed, nor is any chance used up."""
        load = self._pool.load(now)
        candidates = self._pool.candidates(ticket, self._price, load)
        priced = [(candidate.price, candidate.backend) for candidate in candidates if candidate.price is not None]
        if refused or not priced:
            return Explanation(None, None if refused else Wait.TURN, refused, place, candidates)
        unmoved = Random(0)  # noqa: S311
        chosen = self._pool.backends[pick(priced, ticket.novel, unmoved)]
        fits = [self._pool.backends[name] for _, name in priced]
        if self._warmer(ticket, chosen, fits, load) is not None:
            return Explanation(None, Wait.WARM, None, place, candidates)
        return Explanation(chosen.name, None, None, place, candidates)

    def _warmer(self, ticket: Ticket, chosen: Backend, fits: list[Backend], load: Load) -> Backend | None:
        if not (self._gated and self._rules.wait_for_warm and ticket.lanes):
            return None
        if load.now >= self._patience(ticket, chosen):
            return None
        lanes = [self._pool.backends[name] for name in ticket.lanes]
        waitable = (Gate.OPEN, Gate.PREFILL)
        shut = [b for b in lanes if b not in fits and self._pool.admission.gate(b) in waitable]
        return warmer(ticket, chosen, shut, load)

    def _patience(self, ticket: Ticket, chosen: Backend) -> float:
        """Until when the ticket may wait for a warm backend instead of going to `chosen`."""
        job = ticket.job
        latest = self._room.latest(job, self._pool.known_time(ticket.uncached(chosen.name), job.prompt_tokens))
        return latest - self._rules.patience * (latest - job.arrived)
