"""Whether a failed attempt is tried again: few times, early, elsewhere, and only as a share of the traffic.

A second attempt beside one that is slow to begin (a hedge: Dean and Barroso, The Tail at Scale, 2013) is a retry like
another.

The budget is a token bucket fed by requests, not by time (Finagle's RetryBudget, Linkerd): when everything fails,
retries add their share to the load and no more. A floor per second lets quiet pools retry at all. What never reached a
backend adds no load when it goes to another one, and takes nothing (gRPC's transparent retries, proposal A6).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

WINDOW_S = 10.0  # how long unused budget is worth something (Finagle and Linkerd: 10 s)
BACKOFF_S = 0.025  # the second try comes soon, since it goes elsewhere; later ones wait twice as long each


@dataclass(frozen=True, slots=True)
class Hedging:
    """A stream of at most `prompt_tokens` that has no event `after_s` seconds from its dispatch may be tried elsewhere,
    too."""

    after_s: float
    prompt_tokens: int


class RetryBudget:
    """Budget of one pool. `retries` is the most that one request may have, `share` what each adds to the budget."""

    def __init__(self, *, retries: int = 2, share: float = 0.1, floor_per_s: float = 1.0, rng: Random) -> None:
        self.retries = retries
        self.share = share
        self.floor_per_s = floor_per_s
        self._rng = rng
        self._balance = floor_per_s * WINDOW_S
        self._recent = 0.0  # requests of the last window, older ones fading
        self._deposits = 0
        self._spent = 0
        self._settled_at = 0.0

    def __repr__(self) -> str:
        return f"<RetryBudget {self._balance:.1f} retries>"

    def configure(self, *, retries: int, share: float) -> None:
        """These rules hold from now on; what was saved is kept."""
        self.retries, self.share = retries, share

    def balance(self, now: float) -> float:
        """Retries that may be made now. Looking changes nothing."""
        return self._settled(now)[0]

    def deposit(self) -> None:
        """A request came. Counted only when somebody asks for a retry: this is on every request's way."""
        self._deposits += 1

    def spend(self) -> None:
        """One retry of the budget is used up, whoever makes it: the client's own library, or a hedge."""
        self._spent += 1

    def allows(self, attempt: int, now: float) -> bool:
        """Whether try number `attempt + 1` may be made. Takes nothing."""
        self._settle(now)
        return attempt <= self.retries and self._balance >= 1.0

    def after(self, attempt: int, now: float, *, unsent: bool = False) -> float | None:
        """Seconds to wait before try number `attempt + 1`; None: there is none. Takes from the budget, unless the last
        one was `unsent`: nobody was there to take it."""
        if attempt > self.retries or not (unsent or self.allows(attempt, now)):
            return None
        if not unsent:
            self._balance -= 1.0
        return BACKOFF_S * 2.0 ** (attempt - 1) * self._rng.random()

    def _settle(self, now: float) -> None:
        self._balance, self._recent = self._settled(now)
        self._settled_at = now
        self._deposits = self._spent = 0

    def _settled(self, now: float) -> tuple[float, float]:
        """The balance, and the requests of the last window: they are worth `share` retries each, time is worth the
        floor; no more is kept."""
        elapsed = max(0.0, now - self._settled_at)
        recent = self._recent * max(0.0, 1.0 - elapsed / WINDOW_S) + self._deposits
        limit = self.floor_per_s * WINDOW_S + self.share * recent
        earned = elapsed * self.floor_per_s + self.share * self._deposits
        return max(0.0, min(limit, self._balance + earned) - self._spent), recent
