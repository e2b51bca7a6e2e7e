"""The mutable records: a ticket per job that waits, a slot per job that runs, and what each backend carries.

Tokens are whole numbers, so that counters return to exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from policies.estimate import Ratio
from policies.rules import Rules
from policies.types import BackendView, Job, RemoteLoad, Wait

COLD = ""  # the place of tickets that any backend may take


@dataclass(slots=True, eq=False)
class Ticket:
    """A job in the queue, and what the backends' caches would save it.

    `cold` is its uncached tokens where no backend is better than another, `warm` those on the backends that hold
    more of it; `lanes` are the few backends that save enough to be waited for. `places` is where the queue shows it:
    to all and in its lanes, or, if it may not go everywhere, only where it may.
    """

    job: Job
    seq: int
    restricted: bool = False
    places: tuple[str, ...] = (COLD,)
    cold: int = 0
    warm: dict[str, int] = field(default_factory=dict)
    lanes: tuple[str, ...] = ()
    common: int = 0  # leading pieces that every backend holds, and
    held: dict[str, int] = field(default_factory=dict)  # those of the backends that hold more
    version: int = -1  # of the index that told so
    novel: bytes | None = None  # digest of the first piece that no backend holds
    stamp: int = 0  # raised whenever its entries in the queue become stale
    latest: float = inf  # when waiting becomes hopeless or too long
    wake: float = inf  # when somebody must look at it
    parked: bool = False  # it waits in its lanes only, for a warm backend
    patient: bool = True  # it may still be parked, once
    waited_for: Wait | None = None

    def uncached(self, backend: str) -> int:
        """Tokens that a prefill on `backend` would have to compute."""
        return self.warm.get(backend, self.cold)

    def matched(self, backend: str) -> int:
        """Tokens that the index found on `backend`, taken at face value."""
        return int(self.held.get(backend, self.common) * self.job.piece_tokens)

    @property
    def least(self) -> int:
        """The same on the best backend."""
        return min(self.warm.values(), default=self.cold)


@dataclass(slots=True, eq=False)
class Slot:
    """A job on a backend, from dispatch to its end. `cost` is what its tenant was charged, `matched` the tokens that
    the index found there (before they were scaled by what such findings are worth)."""

    job: Job
    backend: Backend
    uncached: int
    matched: int
    cost: int
    prefilling: bool = True
    streaming: bool = False
    output: int = 0

    @property
    def one_shot(self) -> bool:
        """Whether there is nothing after the prefill."""
        return not self.job.streamed and not self.job.output_tokens

    @property
    def kv(self) -> int:
        """KV tokens that it is expected to hold."""
        return self.job.prompt_tokens + self.job.output_tokens


class Backend:
    """What one incarnation of a backend carries. A returned backend is a new object: late endings of the old one
    change only the old one. Counts include what other gateways have there (`peers`).

    Token debt: a prefill takes token time from the streams that run beside it. While there are any, a clock counts
    the tokens that each was due since the cycle began (one in each `rules.pace_s`) and those that each got; the
    difference is the debt. A cycle begins with a prefill on an empty, debt-free backend, or with the first stream.
    Tokens of k streams advance the count by 1/k each, so a stalled stream slows it only in proportion, and a sum of
    many streams' tokens may be reported on any one of them.
    """

    def __init__(self, view: BackendView, rules: Rules) -> None:
        self.view = view
        self.name = view.name
        self.rules = rules
        self.running = 0
        self.in_flight = 0  # uncached tokens of the prefills under way
        self.kv = 0
        self.began = 0.0  # when the prefill now at work began
        self.idle_since = 0.0  # when the last prefill ended
        self.streams = 0
        self.cycle = 0.0  # when the debt's clock began
        self.steps = 0.0
        self.turn = 0  # number of the dispatch that came here last
        self.accuracy = Ratio(2000.0, 2000.0, keep=0.98)
        self.trust = 1.0  # its value: what a found token is worth
        self.peers: dict[str, tuple[RemoteLoad, float]] = {}
        self.remote_debt = 0.0
        self.remote_head = inf

    def __repr__(self) -> str:
        return f"{self.name} {self.running}/{self.view.concurrency}"

    def debt(self, now: float) -> float:
        """Tokens that each stream is owed; zero or less when there is nothing to wait for."""
        if not self.streams or (not self.in_flight and now >= self.forgiven):
            return self.remote_debt
        return max((now - self.cycle) / self.rules.pace_s - self.steps, self.remote_debt)

    @property
    def forgiven(self) -> float:
        """When the break after the last prefill is over at the latest."""
        return self.idle_since + self.rules.longest_break * (self.idle_since - self.cycle)

    def left(self, now: float, rate: float) -> float:
        """Tokens of the prefills under way that are still to be computed, at `rate` tokens per second."""
        return max(0.0, self.in_flight - rate * self.view.speed * (now - self.began)) if self.in_flight else 0.0

    def start(self, slot: Slot, now: float) -> None:
        """`slot` is dispatched: it counts from this moment."""
        self._fly(slot.uncached, now)
        self.running += 1
        self.kv += slot.kv

    def prefilled(self, slot: Slot, now: float) -> None:
        """The prefill of `slot` has ended."""
        if slot.prefilling:
            slot.prefilling = False
            self._fly(-slot.uncached, now)

    def stream(self, slot: Slot, now: float) -> None:
        """The first token of `slot` has come."""
        if not slot.streaming:
            slot.streaming = True
            self.streams += 1
            if self.streams == 1:
                self.cycle, self.steps = now, 0.0

    def advance(self, slot: Slot, tokens: int) -> None:
        """The streams here, of which `slot` is one, got `tokens` more."""
        self.steps += tokens / max(1, self.streams)
        slot.output += tokens

    def end(self, slot: Slot, now: float) -> None:
        """`slot` is over, however it ended."""
        self.prefilled(slot, now)
        self.running -= 1
        self.kv -= slot.kv
        if slot.streaming:
            self.streams -= 1

    def hear(self, gateway: str, load: RemoteLoad | None, now: float) -> None:
        """What another gateway has here from now on; None: nothing, or it is silent."""
        old, _ = self.peers.pop(gateway, (RemoteLoad(self.name), 0.0))
        new = load or RemoteLoad(self.name)
        if load is not None:
            self.peers[gateway] = (load, inf if load.head is None else load.head + now / self.rules.ageing_s)
        if new.in_flight_tokens != old.in_flight_tokens:
            self._fly(new.in_flight_tokens - old.in_flight_tokens, now)
        self.running += new.running - old.running
        self.kv += new.kv_tokens - old.kv_tokens
        self.remote_debt = max((load.debt_tokens for load, _ in self.peers.values()), default=0.0)
        self.remote_head = min((head for _, head in self.peers.values()), default=inf)

    def own(self, now: float, head: float | None) -> RemoteLoad:
        """What this gateway alone has here, to be told to others."""
        remote, self.remote_debt = self.remote_debt, 0.0
        debt, self.remote_debt = self.debt(now), remote
        others = [load for load, _ in self.peers.values()]
        return RemoteLoad(
            self.name,
            self.in_flight - sum(load.in_flight_tokens for load in others),
            debt,
            self.running - sum(load.running for load in others),
            self.kv - sum(load.kv_tokens for load in others),
            head,
        )

    def _fly(self, tokens: int, now: float) -> None:
        if not self.in_flight:
            self.began = now
            if self.debt(now) <= 0.0:
                self.cycle, self.steps = now, 0.0
        elif tokens < 0:
            self.began = now
        self.in_flight += tokens
        if not self.in_flight:
            self.idle_since = now
