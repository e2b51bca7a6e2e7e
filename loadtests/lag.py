"""What the machine itself adds to every time that is measured on it."""

from __future__ import annotations

import asyncio
import time
from math import inf

from loadtests.judgement import at_share

BEAT_S = 0.02
SLOW_MS = 50.0  # a machine where timers are so late by p99 starves a gateway that would not be busy


class Lag:
    """`async with` listens how late this program's own timers come: what the machine adds to every time measured."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, float]] = []  # when, and how late

    async def __aenter__(self) -> Lag:
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()

    async def _listen(self) -> None:
        while True:
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.heard.append((due, time.monotonic() - due))

    def p99(self, begin: float = 0.0, end: float = inf) -> float:
        """Milliseconds, between two moments."""
        return at_share([late_s for at, late_s in self.heard if begin <= at < end], 0.99) * 1e3
