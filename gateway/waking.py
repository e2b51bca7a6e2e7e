"""Pools that may be scaled to zero: they call for capacity while it is wanted, and hold requests until it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

from gateway.errors import GatewayError
from gateway.metrics import Family, Gauge
from policies.wakeup import Wakeup


class Waking:
    """Those who wait for one pool to wake."""

    def __init__(self, hold_s: float, most: int, clock: Callable[[], float]) -> None:
        self.wakeup = Wakeup(hold_s, most)
        self._clock = clock
        self._held: set[asyncio.Future[None]] = set()
        self._refusal: GatewayError | None = None

    def __repr__(self) -> str:
        return f"<Waking {self.wakeup!r}>"

    def configure(self, hold_s: float, most: int) -> None:
        """These bounds hold from now on."""
        self.wakeup.hold_s, self.wakeup.most = hold_s, most

    def ask(self) -> None:
        """A request came that nobody can serve."""
        self.wakeup.ask(self._clock())

    async def wait(self, since: float, deadline: float, refusal: GatewayError) -> float:
        """Returns when the pool has somebody, and what time it is then. Raises `refusal` where there are too many who
        wait already, or it took too long from `since`, when the request began to wait, or its `deadline` came; and what
        everybody is told once nobody may wait any more."""
        if self._refusal is not None:
            raise self._refusal
        left_s = self.wakeup.enter(since, self._clock(), deadline)
        if left_s is None:
            raise refusal
        woken = asyncio.get_running_loop().create_future()
        self._held.add(woken)
        try:
            async with asyncio.timeout(left_s):
                await woken
        except TimeoutError:
            raise refusal from None
        finally:
            self._held.discard(woken)
            self.wakeup.leave()
        return self._clock()

    def see(self, awake: bool) -> None:
        """Whether the pool has somebody."""
        if not awake:
            return
        self.wakeup.woken()
        for each in self._held:
            if not each.done():
                each.set_result(None)

    def refuse(self, error: GatewayError) -> None:
        """Everybody who is held, or would be from now on, is told `error`."""
        self._refusal = error
        for each in self._held:
            if not each.done():
                each.set_exception(error)

    def wanted(self) -> bool:
        """Whether capacity is called for."""
        return self.wakeup.wanted(self._clock())


def metrics(pools: Mapping[str, Waking | None]) -> Iterator[Family]:
    """Of the pools that may be scaled to zero."""
    known = {name: waking for name, waking in pools.items() if waking is not None}
    yield Gauge("headrace_wakeup_wanted", "1 while a pool without backends is asked for.", "pool", total="max").of(
        {(name,): int(waking.wanted()) for name, waking in known.items()}
    )
    yield Gauge("headrace_held_requests", "Requests that wait for a pool to wake.", "pool", total="sum").of(
        {(name,): waking.wakeup.held for name, waking in known.items()}
    )
