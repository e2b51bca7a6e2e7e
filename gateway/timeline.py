"""Where the time of a request went, and whether it was good: worked out from its Exchange when it is over."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gateway.errors import Fault
from gateway.exchange import Exchange, Metered


class Parts(NamedTuple):
    """Seconds until the first token, or the end, and what took them: they add up. `gateway` is reading, parsing and
    deciding; `queue` waiting for a backend, pauses before another try included; `connect` and `backend` are summed
    over all attempts, the time of two at once once."""

    gateway: float
    queue: float
    connect: float
    backend: float


class Phase(StrEnum):
    """How far a request was when its client left."""

    BODY = "body"
    QUEUE = "queue"  # before a first try or another one
    CONNECT = "connect"
    BACKEND = "backend"  # it was sent, and nothing of the answer has gone out
    ANSWER = "answer"


class Cause(StrEnum):
    """Why a request was not good."""

    GATEWAY = "gateway"  # its own time
    QUEUE = "queue"
    CONNECT = "connect"
    PREFILL = "prefill"
    DECODE = "decode"
    UPSTREAM = "upstream"
    REFUSED = "refused"  # no room, no backend, shutting down
    INTERNAL = "internal"  # a bug of the gateway


@dataclass(frozen=True, slots=True)
class Objective:
    """What counts as good, in seconds: until the first token, and between two tokens on average. None: anything."""

    ttft_s: float | None = None
    itl_s: float | None = None


class Verdict(NamedTuple):
    """What became of the objectives: None where there is none, or it does not apply. `cause` is None if all went
    well."""

    ttft: bool | None
    itl: bool | None
    cause: Cause | None

    @property
    def available(self) -> bool:
        """Whether there was an answer, however slow."""
        return self.cause not in FAULTS.values()


FAULTS = {Fault.BACKEND: Cause.UPSTREAM, Fault.CAPACITY: Cause.REFUSED, Fault.GATEWAY: Cause.INTERNAL}
GOOD = Verdict(None, None, None)  # no objective applied, or none but the whole
TIMES = (Cause.GATEWAY, Cause.QUEUE, Cause.CONNECT, Cause.PREFILL)  # in the order of Parts


def parts(x: Exchange) -> Parts:
    """Until the first token of a stream, else until the end."""
    first = x.meter.first_token_at if x.meter is not None else None
    until = x.ended_at if first is None else first
    connect = backend = since = 0.0
    for attempt in x.in_order:
        ended = min(attempt.ended_at or until, until)
        began = max(since, attempt.dispatched_at)
        connected = max(began, attempt.connected_at or ended)
        connect += connected - began
        backend += max(0.0, ended - connected)
        since = max(since, ended)
    queue = x.queue_wait_s
    return Parts(max(0.0, until - x.received_at - queue - connect - backend), queue, connect, backend)


def tpot_s(meter: Metered) -> float | None:
    """Seconds from a token to the next on average: from the first to the last, by the engine's count where it tells.
    None where there were no two; 0 where all came at once."""
    tokens = meter.tokens - 1
    return meter.gap_sum / tokens if tokens > 0 else None


def phase(x: Exchange) -> Phase:
    """How far it got."""
    if x.call is None:
        return Phase.BODY
    if not x.attempts or x.attempts[-1].failed:
        return Phase.QUEUE
    if not x.attempts[-1].connected_at:
        return Phase.CONNECT
    return Phase.ANSWER if x.status and x.meter is not None else Phase.BACKEND


def verdict(x: Exchange, spent: Parts, objective: Objective) -> Verdict | None:
    """None for a request that says nothing of the service: its caller was at fault, or left.

    A whole answer has no first token: it is good if it came in the time that a good stream of its length takes. What
    the backend took too much then counts as whichever of prefill and decode may take longer.
    """
    if x.fault in (Fault.CALLER, Fault.LEFT):
        return None
    if x.fault:
        return Verdict(None, None, FAULTS[x.fault])
    meter, ttft, itl = x.meter, objective.ttft_s, objective.itl_s
    if meter is None or meter.first_token_at is None:
        if ttft is None or (x.endpoint.generates and itl is None):
            return GOOD
        decode = (itl or 0.0) * (meter.tokens - 1) if meter is not None and x.endpoint.generates else 0.0
        if sum(spent) <= ttft + decode:
            return GOOD
        slowest = _slowest(spent)
        return Verdict(None, None, Cause.DECODE if slowest is Cause.PREFILL and decode > ttft else slowest)
    in_time = None if ttft is None else sum(spent) <= ttft
    pace = tpot_s(meter) if itl is not None else None
    in_pace = None if pace is None or itl is None else pace <= itl
    cause = _slowest(spent) if in_time is False else Cause.DECODE if in_pace is False else None
    return Verdict(in_time, in_pace, cause)


def _slowest(spent: Parts) -> Cause:
    return TIMES[spent.index(max(spent))]
