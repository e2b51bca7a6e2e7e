"""The mutable records: a ticket per job that waits, a slot per job that runs, and what each backend carries.

Tokens are whole numbers, so that counters return to exactly zero.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from math import inf

from policies.estimate import Ratio
from policies.rules import Rules
from policies.types import BackendView, Job, RemoteLoad, Wait

# Steps over which the streams' pace is taken: the first after a dispatch may still be one without a prefill.
PACE_STEPS = 2

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
    since: float
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
    the index found there (before they were scaled by what such findings are worth), `prefill_s` what its prefill was
    expected to take, `mark` how far `ahead` its backend was when its answer began, if that is `paced`."""

    job: Job
    backend: Backend
    uncached: int
    matched: int
    cost: int
    prefill_s: float = 0.0
    paced: bool = True
    mark: float = 0.0
    prefilling: bool = True
    streaming: bool = False
    output: int = 0

    @property
    def one_shot(self) -> bool:
        """Whether there is nothing after the prefill."""
        return not self.job.streamed and not self.job.output_tokens

    @property
    def unseen(self) -> bool:
        """Whether nobody will see the prefill end."""
        return not self.job.streamed and not self.one_shot

    @property
    def kv(self) -> int:
        """KV tokens that it is expected to hold."""
        return self.job.prompt_tokens + self.job.output_tokens


class Backend:
    """What one incarnation of a backend carries. A returned backend is a new object: late endings of the old one
    change only the old one. Counts include what other gateways have there (`peers`).

    Credit: a prefill makes the steps of an engine longer than the objective of the streams beside it; between prefills
    steps are shorter. `ahead` counts what all of them gain and lose alike: the objective for each step less the
    time that passed. A stream's credit is what was gained since its first token, so the poorest stream is the one that
    began at the highest mark. Tokens of k streams make 1/k of a step each: a stalled stream slows the count only in
    proportion, and a sum of many streams' tokens may be reported on any one of them. Without streams nothing is
    counted.
    """

    def __init__(self, view: BackendView, rules: Rules) -> None:
        self.view = view
        self.name = view.name
        self.rules = rules
        self.running = 0
        self.in_flight = 0  # uncached tokens of the prefills under way
        self.in_flight_s = 0.0  # the seconds that they were expected to take
        self.began = 0.0  # when the prefill now at work began
        self.began_ahead: float | None = None  # and how far ahead the streams were then
        self.idle_since = 0.0  # when the last prefill ended
        self.kv = 0
        self.streams = 0
        self.steps = 0.0
        self.unseen: list[Slot] = []  # prefills under way of answers that do not stream
        self.window: tuple[float, float] | None = None  # when the pace began to be taken, and the steps then
        self.decode_s: float | None = None  # a step without a prefill
        self.unwatched_s = 0.0  # time without streams
        self.unwatched_since: float | None = 0.0
        self.marks: list[float] = []  # `ahead` at the first token of each answer that has an objective, sorted
        self.need_s = inf  # the least credit that something waits for, and
        self.open_at = inf  # the moment at which it stops waiting for it
        self.turn = 0  # number of the dispatch that came here last
        self.accuracy = Ratio(2000.0, 2000.0, keep=0.98)
        self.trust = 1.0  # its value: what a found token is worth
        self.peers: dict[str, tuple[RemoteLoad, float, float]] = {}  # what each said; its head, and its mark
        self.remote_head = inf
        self.remote_mark = -inf

    def __repr__(self) -> str:
        return f"{self.name} {self.running}/{self.view.concurrency}"

    def ahead(self, now: float) -> float:
        """Seconds that a stream has gained on its objective since the beginning of time."""
        unwatched = 0.0 if self.unwatched_since is None else now - self.unwatched_since
        return self.rules.objective_s * self.steps - (now - self.unwatched_s - unwatched)

    def credit(self, now: float) -> float:
        """Seconds that the poorest answer is ahead of its objective; infinite where none can be seen."""
        poorest = max(self.marks[-1] if self.marks and self.streams else -inf, self.remote_mark)
        return self.ahead(now) - poorest

    def left(self, now: float) -> float:
        """Seconds until the prefills under way should have ended."""
        return max(0.0, self.in_flight_s - (now - self.began)) if self.in_flight else 0.0

    def start(self, slot: Slot, now: float) -> None:
        """`slot` is dispatched: it counts from this moment."""
        self._fly(slot.uncached, slot.prefill_s, now)
        if slot.unseen:
            self.unseen.append(slot)
        self.running += 1
        self.kv += slot.kv

    def prefilled(self, slot: Slot, now: float) -> None:
        """The prefill of `slot` has ended, and its answer begins."""
        if slot.prefilling:
            slot.prefilling = False
            if slot.unseen:
                self.unseen.remove(slot)
            self._fly(-slot.uncached, -slot.prefill_s, now)
            if slot.paced:
                slot.mark = self.ahead(now)
                insort(self.marks, slot.mark)

    def stream(self, slot: Slot, now: float) -> None:
        """The first token of `slot` has come."""
        if not slot.streaming:
            slot.streaming = True
            self.streams += 1
            if self.unwatched_since is not None:
                self.unwatched_s += now - self.unwatched_since
                self.unwatched_since = None

    def advance(self, tokens: int, now: float) -> None:
        """The streams here got `tokens` more, all together."""
        self.steps += tokens / max(1, self.streams)
        if self.window is None:
            self.window = now, self.steps
            return
        since, steps = self.window
        if self.steps - steps >= PACE_STEPS:
            pace = (now - since) / (self.steps - steps)
            self.window = now, self.steps
            if not self.in_flight:
                self.decode_s = pace if self.decode_s is None else self.decode_s + 0.1 * (pace - self.decode_s)
            elif self.watched and pace < self.rules.unseen_pace * (self.decode_s or 0.0):
                for unseen in tuple(self.unseen):
                    self.prefilled(unseen, now)

    @property
    def watched(self) -> bool:
        """Whether the pace of the streams will tell when the prefills under way have ended."""
        alone = sum(slot.uncached for slot in self.unseen) == self.in_flight
        return alone and self.streams > 0 and self.decode_s is not None

    def end(self, slot: Slot, now: float) -> None:
        """`slot` is over, however it ended."""
        if slot.prefilling:
            slot.paced = False
            self.prefilled(slot, now)
        elif slot.paced:
            del self.marks[bisect_left(self.marks, slot.mark)]
        self.running -= 1
        self.kv -= slot.kv
        if slot.streaming:
            self.streams -= 1
            if not self.streams:
                self.unwatched_since = now

    def hear(self, gateway: str, load: RemoteLoad | None, now: float) -> None:
        """What another gateway has here from now on; None: nothing, or it is silent."""
        old = self.peers.pop(gateway)[0] if gateway in self.peers else RemoteLoad(self.name)
        new = load or RemoteLoad(self.name)
        if load is not None:
            head = inf if load.head is None else load.head + now / self.rules.ageing_s
            self.peers[gateway] = (load, head, self.ahead(now) - load.credit_s)
        if new.in_flight_tokens != old.in_flight_tokens:
            self._fly(new.in_flight_tokens - old.in_flight_tokens, new.in_flight_s - old.in_flight_s, now)
        self.running += new.running - old.running
        self.kv += new.kv_tokens - old.kv_tokens
        self.remote_head = min((head for _, head, _ in self.peers.values()), default=inf)
        self.remote_mark = max((mark for _, _, mark in self.peers.values()), default=-inf)

    def own(self, now: float, head: float | None) -> RemoteLoad:
        """What this gateway alone has here, to be told to others."""
        credit = self.ahead(now) - self.marks[-1] if self.streams and self.marks else inf
        others = [load for load, _, _ in self.peers.values()]
        return RemoteLoad(
            self.name,
            self.in_flight - sum(load.in_flight_tokens for load in others),
            self.in_flight_s - sum(load.in_flight_s for load in others),
            credit,
            self.running - sum(load.running for load in others),
            self.kv - sum(load.kv_tokens for load in others),
            head,
        )

    def _fly(self, tokens: int, seconds: float, now: float) -> None:
        if not self.in_flight or tokens < 0:
            self.began = now
            self.began_ahead = self.ahead(now) if self.streams else None
        self.window = None
        self.in_flight += tokens
        self.in_flight_s = self.in_flight_s + seconds if self.in_flight else 0.0
        if not self.in_flight:
            self.idle_since = now
