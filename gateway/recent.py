"""The latest requests that were slow or failed, each with its timeline and why it went where it went: for who asks what
is wrong now. No prompts, no answers, no keys."""

from __future__ import annotations

from collections import deque
from itertools import count, islice

import msgspec

from gateway.exchange import Attempt, Exchange
from gateway.timeline import Cause, Parts

OF_A_KIND = 20  # the same thing that goes wrong a thousand times must not push out what went wrong once
APART_S = 0.05  # and then costs nothing: so long after one of a kind no other of it is kept
CONSIDERED = 16  # backends of a decision that are shown


class Considered(msgspec.Struct, frozen=True):
    """A backend that could take the request when it was decided, and its price by the routing of its pool (by default
    seconds of prefill: its own, and what is left of those before it)."""

    backend: str
    price: float


class Try(msgspec.Struct, frozen=True):
    """One attempt. Milliseconds since the request came in, or None for what did not happen. `cached_tokens` were
    expected in the backend's prefix cache, `missed_tokens` in another one's beyond those."""

    backend: str
    dispatched_ms: float
    connected_ms: float | None
    first_token_ms: float | None
    ended_ms: float | None
    status: int
    failure: str
    waited_for: str
    cached_tokens: int
    uncached_tokens: int
    missed_tokens: int
    considered: list[Considered]


class Seen(msgspec.Struct, frozen=True):
    """One request. `at` is its end in seconds since the epoch; the parts of `timeline`, in milliseconds, add up to
    `total_ms`."""

    number: int
    at: float
    request_id: str
    trace_id: str
    path: str
    tenant: str
    model: str
    pool: str
    class_: str = msgspec.field(name="class")
    stream: bool
    status: int
    outcome: str
    cause: str
    ttft_ms: float | None
    total_ms: float
    tokens_in: int | None
    tokens_out: int | None
    timeline: dict[str, float]
    attempts: list[Try]

    def row(self) -> dict[str, object]:
        """What a list shows of it."""
        return {
            "number": self.number,
            "at": self.at,
            "tenant": self.tenant,
            "model": self.model,
            "class": self.class_,
            "status": self.status,
            "outcome": self.outcome,
            "cause": self.cause,
            "backend": self.attempts[-1].backend if self.attempts else "",
            "ttft_ms": self.ttft_ms,
            "total_ms": self.total_ms,
            "timeline": self.timeline,
        }


class Recent:
    """A few of each kind: what became of them, and why they were not good. Both are words of enums."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], deque[Seen]] = {}
        self._numbers = count(1)

    def __repr__(self) -> str:
        kept = {"/".join(kind): len(seen) for kind, seen in self._kinds.items()}
        return f"<Recent {kept}>"

    def note(self, x: Exchange, spent: Parts, cause: Cause | None, wall: float) -> None:
        """A request has ended at `wall`, in seconds since the epoch. Good ones are passed over."""
        if not x.fault and cause is None:
            return
        kind = (x.outcome, cause or "")
        seen = self._kinds.get(kind)
        if seen is None:
            seen = self._kinds[kind] = deque(maxlen=OF_A_KIND)
        if not seen or not 0.0 <= wall - seen[-1].at < APART_S:
            seen.append(_seen(next(self._numbers), x, spent, cause, wall))

    def latest(self, most: int) -> list[Seen]:
        """The latest first."""
        everything = (each for seen in self._kinds.values() for each in seen)
        return list(islice(sorted(everything, key=lambda each: -each.number), most))

    def find(self, number: int) -> Seen | None:
        """One of them, as long as it is kept."""
        return next((each for seen in self._kinds.values() for each in seen if each.number == number), None)


def _seen(number: int, x: Exchange, spent: Parts, cause: Cause | None, wall: float) -> Seen:
    call, meter, ttft_s = x.call, x.meter, x.ttft_s
    usage = meter.usage if meter is not None else None
    timeline = {"gateway": spent.gateway, "queue": spent.queue, "connect": spent.connect, "prefill": spent.backend}
    timeline["decode"] = x.ended_at - x.received_at - ttft_s if ttft_s is not None else 0.0
    return Seen(
        number,
        round(wall, 3),
        x.request_id,
        x.trace.text if x.trace is not None else "",
        x.endpoint.path,
        x.tenant.name if x.tenant is not None else "",
        call.label if call is not None else "",
        call.pool if call is not None else "",
        x.class_,
        call.stream if call is not None else False,
        x.status,
        x.outcome,
        cause or "",
        None if ttft_s is None else _ms(ttft_s),
        _ms(x.ended_at - x.received_at),
        usage.prompt if usage is not None else None,
        usage.output if usage is not None else meter.tokens if meter is not None else None,
        {name: _ms(seconds) for name, seconds in timeline.items()},
        [_try(x, attempt) for attempt in x.in_order],
    )


def _try(x: Exchange, attempt: Attempt) -> Try:
    decision, began_at = attempt.decision, x.received_at
    told = x.meter.first_token_at if x.meter is not None and attempt is x.attempts[-1] else None
    times = (attempt.connected_at, told, attempt.ended_at)
    connected, first, ended = (_ms(at - began_at) if at else None for at in times)
    return Try(
        attempt.backend.name,
        _ms(attempt.dispatched_at - began_at),
        connected,
        first,
        ended,
        attempt.status,
        attempt.failure,
        decision.waited_for or "",
        decision.cached_tokens,
        decision.uncached_tokens,
        decision.missed_tokens,
        [Considered(name, float(f"{price:.4g}")) for price, name in sorted(decision.considered)[:CONSIDERED]],
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
