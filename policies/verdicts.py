"""The words of health: how attempts end, what a backend is to its pool, and when it becomes something else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Found(StrEnum):
    """How an attempt ended, as far as it tells of its backend. What a client caused (4xx, leaving) and a full engine
    (429) tell nothing."""

    GOOD = "good"
    REFUSED = "refused"  # no connection
    FAULT = "fault"  # 5xx, an answer that broke off or made no sense, one of the clocks
    LATE = "late"  # others were served long before


class State(StrEnum):
    """What a backend is to the pool."""

    UP = "up"
    NEW = "new"  # not probed often enough yet
    DOWN = "down"  # by its probes
    EJECTED = "ejected"  # by how its requests ended
    TRIAL = "trial"  # one request decides
    RESTING = "resting"  # it is left alone for a while: it asked for it, or failed while half of the pool was ejected


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a backend is out and when it returns. Seconds and tokens."""

    unhealthy_after: int = 3
    healthy_after: int = 2
    eject: bool = True
    refusals: int = 2  # connection failures in a row
    # Four faults from a clean record, or some two of three in a mixture, within about `fade_s`.
    weight: float = 1.0 / 6.0
    limit: float = 0.5
    fade_s: float = 10.0
    # A trial of a backend that fails at once costs a retry, so it may come often: recovery is seen within `longest_s`.
    # One that hung for 30 s costs a client that long: so the ejection lasts `worth` times what the attempt did.
    first_s: float = 1.0
    longest_s: float = 4.0
    worth: float = 2.0
    worst_s: float = 60.0
    forget_s: float = 60.0  # a backend that was fine for so long starts from the first ejection again
    # Slow start: so many requests at once, one more for each `ramp_tokens` served, no limit after `ramp_s`.
    ramp_requests: int = 4
    ramp_tokens: int = 1000
    ramp_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`open`: whether it takes work. `room`: how many requests it may run; None: as many as it can."""

    state: State
    open: bool
    room: int | None = None
