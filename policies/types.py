"""The words that the policies speak: who asks for a place, where it may go, what was decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


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


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens really used, as the engine reported them. `cached` is None where the engine does not say."""

    prompt: int
    output: int
    cached: int | None = None


@dataclass(slots=True)
class Job:
    """One request as the scheduler sees it. Times are seconds on the caller's monotonic clock.

    `prompt_tokens` and `output_tokens` are estimates; `prefix` holds the digests of the prompt's
    leading pieces, shortest first. `tried` names the backends that must not be used again.
    """

    id: int
    tenant: str
    arrived: float
    class_: str = "interactive"
    weight: float = 1.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix: tuple[bytes, ...] = ()
    streamed: bool = True
    deadline: float | None = None
    candidates: frozenset[str] | None = None
    tried: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class BackendView:
    """A backend as the fleet last saw it. `incarnation` changes when it restarts or returns."""

    name: str
    incarnation: int = 0
    concurrency: int = 256
    kv_tokens: int | None = None
    speed: float = 1.0
    open: bool = True


@dataclass(frozen=True, slots=True)
class Dispatch:
    """`job` goes to `backend` now; it already counts there."""

    job: Job
    backend: str


@dataclass(frozen=True, slots=True)
class Drop:
    """`job` leaves the queue unserved. `retry_after` is seconds until a new try is worth it."""

    job: Job
    reason: Reason
    retry_after: float
