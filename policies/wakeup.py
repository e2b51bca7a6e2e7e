"""Whether a pool that has nobody to serve should be given somebody, and who may wait for that."""

from __future__ import annotations

from math import inf

# A want is told for so long after the last request that was refused: autoscalers look every 15 to 30 s.
LINGER_S = 60.0


class Wakeup:
    """Of one pool. At most `most` requests are held at once, each at most `hold_s` seconds."""

    def __init__(self, hold_s: float, most: int) -> None:
        self.hold_s = hold_s
        self.most = most
        self.held = 0
        self._asked_at: float | None = None

    def __repr__(self) -> str:
        return f"<Wakeup {self.held}/{self.most} held>"

    def ask(self, now: float) -> None:
        """A request came that nobody can serve."""
        self._asked_at = now

    def woken(self) -> None:
        """The pool has somebody: nothing more is wanted."""
        self._asked_at = None

    def enter(self, since: float, now: float, deadline: float = inf) -> float | None:
        """One more is held, whose waiting began at `since`, and is worth nothing after its `deadline`. Returns for how
        many seconds at most; None where it may not be, or not any more. Whoever got a number is to `leave`."""
        left_s = min(since + self.hold_s, deadline) - now
        if self.held >= self.most or left_s <= 0.0:
            return None
        self.held += 1
        return left_s

    def leave(self) -> None:
        """It is held no more."""
        self.held -= 1

    def wanted(self, now: float) -> bool:
        """Whether capacity is called for."""
        return self.held > 0 or (self._asked_at is not None and now - self._asked_at < LINGER_S)
