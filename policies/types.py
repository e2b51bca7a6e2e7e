"""The words that the policies speak: who asks for a place, where it may go, what was decided."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple


class Reason(StrEnum):
    """Why a job was not served. The same word is the metric label and the `x-headrace-reason` header."""

    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline_unreachable"
    WAITED = "queue_timeout"
    NO_BACKEND = "no_backend"


class Ending(StrEnum):
    """How a job's stay on a backend ended, as far as the policies may learn from it."""

    SUCCESS = "success"  # learn from it
    DROPPED = "dropped"  # the backend is to blame
    IGNORED = "ignored"  # the client left: learn nothing


class Gate(StrEnum):
    """Whether a backend takes work now, and if not, which rule holds it shut."""

    OPEN = "open"
    PREFILL = "prefill"  # enough uncached tokens are in flight
    DEBT = "debt"  # a prefill would put its streams behind their objective
    KV = "kv"  # its KV memory is spoken for
    FULL = "full"  # as many requests as it may run
    CLOSED = "closed"  # ejected, draining or gone


class Wait(StrEnum):
    """Why a job was not dispatched at once."""

    TURN = "turn"  # others came first, or no backend was open
    WARM = "warm"  # a backend that holds its prefix was worth waiting for
    ROOM = "room"  # first in order, but it fitted nowhere: a backend is being drained for it
    PEER = "peer"  # another gateway holds a job that comes first


class Usage(NamedTuple):
    """Tokens really used, as the engine reported them. `cached` is None where the engine does not say."""

    prompt: int
    output: int
    cached: int | None = None


@dataclass(slots=True)
class Job:
    """One request as the scheduler sees it. Times are seconds on the caller's monotonic clock.

    `prompt_tokens` and `output_tokens` are estimates; `prefix` holds the digests of the prompt's leading
    pieces, shortest first, of `piece_tokens` each. `deadline` is when the first token is due. Only `candidates`
    may be used, where they are given: a set that may change while the job waits, of which `Scheduler.observe` is told.
    `tried` names the backends that must not be used again. A job that is not streamed and has no output is one-shot
    work (embeddings, scoring): its prefill ends with it.
    """

    id: int
    tenant: str
    arrived: float
    class_: str = "interactive"
    weight: float = 1.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix: tuple[bytes, ...] = field(default=(), repr=False)
    piece_tokens: float = 256.0
    streamed: bool = True
    deadline: float | None = None
    candidates: Set[str] | None = None
    tried: frozenset[str] = field(default_factory=frozenset)

    def allows(self, backend: str) -> bool:
        """Whether this job may run there."""
        return backend not in self.tried and (self.candidates is None or backend in self.candidates)


@dataclass(frozen=True, slots=True)
class BackendView:
    """A backend as the fleet last saw it. `incarnation` changes when it restarts or returns.

    `kv_tokens` is the engine's KV memory; `kv_used` what its own metrics last said is in use (None: unknown or
    too old), which matters only where others use the engine too. `speed` is relative to the pool's others.
    Who may go there can depend on its `region`: that is in the jobs' `candidates`.
    """

    name: str
    incarnation: int = 0
    concurrency: int = 256
    kv_tokens: int | None = None
    kv_used: int | None = None
    speed: float = 1.0
    open: bool = True
    region: str | None = None


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """How the jobs of one class wait. A scheduler serves its classes strictly in the order they are given.

    A class with a `ceiling` below 1 starts work only on a backend without a prefill, while less than that share
    of the backends prefill and less than `kv_ceiling` of the backend's KV memory is taken. `floor` is the share
    of the dispatched tokens that it gets while it has work even if the classes above could use them all: without
    it a saturating class above starves it for ever. `tenant_share` bounds what one tenant may queue. Streams of a
    class that is not `paced` have no objective for their time per token.
    """

    name: str
    max_queued: int = 256
    max_queued_tokens: int = 4_000_000
    tenant_share: float = 0.5
    max_wait_s: float = 10.0
    paced: bool = True
    ceiling: float = 1.0
    kv_ceiling: float = 1.0
    floor: float = 0.0


# Nine tenths of the backends and 70 % of the KV cost interactive work under one point of goodput and leave batch nine
# tenths of what is left over, far past saturation six (simulated; half and 60 % leave a third to three quarters).
INTERACTIVE = ClassPolicy("interactive")
BATCH = ClassPolicy("batch", 4096, 64_000_000, max_wait_s=900.0, paced=False, ceiling=0.9, kv_ceiling=0.7, floor=0.05)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """`job` goes to `backend` now; it already counts there. The rest is the record of the decision."""

    job: Job
    backend: str
    cached_tokens: int = 0  # expected in the backend's prefix cache
    uncached_tokens: int = 0
    waited_s: float = 0.0
    waited_for: Wait | None = None
    considered: tuple[tuple[float, str], ...] = ()  # (price, backend) of each that could take it
    missed_tokens: int = 0  # what the warmest backend holds of the prompt beyond this one


@dataclass(frozen=True, slots=True)
class Drop:
    """`job` leaves the queue unserved. `retry_after` is seconds until a new try is worth it."""

    job: Job
    reason: Reason
    retry_after: float
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job stands: how many of its class come before it, and the seconds that they will take."""

    position: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend in the eyes of one job: what it would have to compute there, the prefills that are `left_s` before
    it, how far the poorest stream is ahead of its objective; `price` is None where it cannot go now."""

    backend: str
    gate: Gate
    cached_tokens: int
    uncached_tokens: int
    left_s: float
    running: int
    credit_s: float
    price: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would happen to a job now: to which backend it would go, or why it would wait or be refused."""

    backend: str | None
    waits: Wait | None
    refused: Reason | None
    place: Place
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class RemoteLoad:
    """What another gateway has on one backend, as it last said.

    `head` is the order of the job that it would send there next, as of the moment of saying (lower goes
    first; see `queues`); clocks of two machines do not compare, so its age is added on receipt.
    """

    backend: str
    in_flight_tokens: int = 0
    in_flight_s: float = 0.0
    credit_s: float = inf
    running: int = 0
    kv_tokens: int = 0
    head: float | None = None


@dataclass(frozen=True, slots=True)
class BackendStatistics:
    """One backend's counters: own and, where gateways share a pool, the others'."""

    gate: Gate
    running: int
    in_flight_tokens: int
    credit_s: float
    kv_tokens: int
    hit_accuracy: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot for metrics and the console. `prefill_rate` and `drain_rate` are tokens per second."""

    queued: Mapping[str, int]
    queued_tokens: Mapping[str, int]
    backends: Mapping[str, BackendStatistics]
    prefill_rate: float
    drain_rate: float
    index_pieces: int
