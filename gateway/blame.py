"""What the end of an attempt tells of its backend."""

from __future__ import annotations

from gateway.errors import Phase, UpstreamFailed, UpstreamTimeout
from policies.health import Health
from policies.verdicts import Found

MOST_REST_S = 10.0


def found(exc: BaseException | None) -> Found | None:
    """What the end of an attempt tells of its backend. Nothing: what its client caused, that it is full, and that an
    answer took longer in all than its pool allows."""
    if not isinstance(exc, UpstreamFailed):
        return None
    if exc.phase is Phase.CONNECT:
        return Found.REFUSED
    if exc.answer is not None and exc.answer.status < 500:
        return None
    return None if isinstance(exc, UpstreamTimeout) and exc.clock == "total" else Found.FAULT


def rest_s(exc: BaseException | None) -> float:
    """So long a backend asked to be left alone; at most `MOST_REST_S`, or it might be forgotten."""
    told = exc.retry_after if isinstance(exc, UpstreamFailed) else None
    return min(told, MOST_REST_S) if told is not None else 0.0


def suspected(failure: UpstreamFailed, health: Health, backend: str) -> bool:
    """A 500 may be the request's own doing, and would then come from everywhere; but a backend that has just failed
    others, too, is the likelier cause."""
    return failure.answer is not None and failure.answer.status == 500 and health.suspicious(backend)
