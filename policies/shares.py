"""What a request had of a backend's time, when many run on it at once."""

from __future__ import annotations


class TimeShare:
    """Shares out the time of one backend: at each moment everything that runs there has an equal part of it
    (processor sharing, kept as in generalised processor sharing by one virtual clock, so that coming and going is
    O(1)). The parts add up to `busy_s`, the seconds in which anything ran. Times never go back.
    """

    __slots__ = ("_at", "_each", "_running", "busy_s")

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._each = 0.0  # seconds that one who has been here from the beginning would have had
        self._at = 0.0
        self._running = 0

    def __repr__(self) -> str:
        return f"<TimeShare {self._running} running, {self.busy_s:.1f} s>"

    def enter(self, now: float) -> float:
        """Something begins to run. Returns what `leave` must be given."""
        self._move(now)
        self._running += 1
        return self._each

    def leave(self, entered: float, now: float) -> float:
        """It has ended. Returns its seconds."""
        self._move(now)
        self._running -= 1
        return self._each - entered

    def busy(self, now: float) -> float:
        """`busy_s` up to now."""
        self._move(now)
        return self.busy_s

    def _move(self, now: float) -> None:
        if self._running:
            passed = now - self._at
            self.busy_s += passed
            self._each += passed / self._running
        self._at = now
