"""Whether a failed attempt is tried again: few times, early, elsewhere, and only as a share of the traffic.

The budget is a token bucket fed by requests, not by time (Finagle's RetryBudget, Linkerd): when everything fails,
retries add their share to the load and no more. A floor per second lets quiet pools retry at all.
"""

from __future__ import annotations

from random import Random

WINDOW_S = 10.0  # how long unused budget is worth something (Finagle and Linkerd: 10 s)
BACKOFF_S = 0.025  # the second try comes soon, since it goes elsewhere; later ones wait twice as long each


class RetryBudget:
    """Budget of one pool. `retries` is the most that one request may have, `share` what each adds to the budget."""

    def __init__(self, *, retries: int = 2, share: float = 0.1, floor_per_s: float = 1.0, rng: Random) -> None:
        self.retries = retries
        self.share = share
        self.floor_per_s = floor_per_s
        self._rng = rng
        self._balance = floor_per_s * WINDOW_S
        self._requests_per_s = 0.0
        self._updated = 0.0

    def __repr__(self) -> str:
        return f"<RetryBudget {self._balance:.1f} of {self._capacity():.1f} retries>"

    @property
    def balance(self) -> float:
        """Retries that may be made now."""
        return self._balance

    def deposit(self, now: float) -> None:
        """A request came."""
        self._refill(now)
        self._requests_per_s += 1.0 / WINDOW_S
        self._balance = min(self._capacity(), self._balance + self.share)

    def after(self, attempt: int, now: float) -> float | None:
        """Seconds to wait before try number `attempt + 1`; None: there is none. Takes from the budget."""
        self._refill(now)
        if attempt > self.retries or self._balance < 1.0:
            return None
        self._balance -= 1.0
        return BACKOFF_S * 2.0 ** (attempt - 1) * self._rng.random()

    def _capacity(self) -> float:
        return (self.floor_per_s + self.share * self._requests_per_s) * WINDOW_S

    def _refill(self, now: float) -> None:
        elapsed = max(0.0, now - self._updated)
        self._updated = now
        self._requests_per_s *= max(0.0, 1.0 - elapsed / WINDOW_S)
        self._balance = min(self._capacity(), self._balance + elapsed * self.floor_per_s)
