"""Prefills whose end nobody sees, because their answers do not stream: they end when they should have."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf

from policies.backend import Slot
from policies.rules import Rules


class Unseen:
    """When each of them is taken to have ended, at the latest: the pace of the streams beside it may tell earlier."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._ends: list[tuple[float, int, Slot]] = []
        self._serial = count()

    def start(self, slot: Slot, now: float) -> None:
        """The slot starts on its backend. Nothing is noted if its end will be seen."""
        backend = slot.backend
        expected_s = backend.left(now) + slot.prefill_s
        backend.start(slot, now)
        if slot.unseen:
            bound = self._rules.unseen_bound if backend.watched else 1.0
            heappush(self._ends, (now + bound * expected_s, next(self._serial), slot))

    def end(self, now: float) -> None:
        """Those that should have ended have."""
        while self._ends and self._ends[0][0] <= now:
            slot = heappop(self._ends)[2]
            slot.backend.prefilled(slot, now)

    def next_end(self) -> float:
        """When there will be something to end; infinity if never."""
        while self._ends and not self._ends[0][2].prefilling:
            heappop(self._ends)
        return self._ends[0][0] if self._ends else inf
