"""A second attempt beside one that is slow to begin: whichever has its first event first is the answer, and the other
is given up at once.

The first attempt runs in the request's own task, and costs one timer. The second, if it comes to that, has a task of
its own, which is over when `run` returns.

    first    second    what follows
    wins     runs      the second is cancelled: its connection closes, its place is given back
    runs     wins      the first is cancelled, and the second goes on
    runs     fails     as if there had been no second one
    fails    runs      the second goes on
    fails    fails     the failure that came last is the request's: it may be tried again
    fails    no place  the first one's failure is the request's

One that fails in phase STREAMING has won before: its failure is the request's, even where the other does not know yet
that it has lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gateway.dispatch import Dispatcher, Slot
from gateway.errors import Phase, Unavailable, UpstreamFailed
from gateway.exchange import Attempt, Exchange
from policies.retry import Hedging


class Hedge:
    """Of one try of a request. `attempt` makes it in a slot, and commits the exchange to it before its client sees
    anything of it."""

    def __init__(
        self, dispatcher: Dispatcher, x: Exchange, rule: Hedging, attempt: Callable[[Slot], Awaitable[None]]
    ) -> None:
        self._dispatcher = dispatcher
        self._exchange = x
        self._after_s = rule.after_s
        self._attempt = attempt
        self._first: Attempt | None = None
        self._second: Attempt | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beside: asyncio.Task[None] | None = None
        self._task: asyncio.Task[object] | None = None

    def __repr__(self) -> str:
        return f"<Hedge of {self._exchange.request_id}, {'alone' if self._second is None else 'two'}>"

    async def run(self) -> None:
        """Raises GatewayError, as the attempt does that counts."""
        x, failure = self._exchange, None
        x.race = self
        self._task = asyncio.current_task()
        try:
            try:
                return await self._attempt(self._dispatcher.slot(x))
            except asyncio.CancelledError:
                if self._first is None or not self._first.lost or self._interrupted():
                    raise
            except UpstreamFailed as failed:
                if failed.phase is Phase.STREAMING or self._beside is None or self._beside.done():
                    raise
                failure = failed
                if self._second is not None:
                    x.turn_to(self._second)
            assert self._beside is not None
            await self._beside
            if self._second is None and failure is not None:
                raise failure
        finally:
            await self._end()

    # -- told by the attempts -----------------------------------------------------------------------------------

    def began(self, attempt: Attempt) -> None:
        """An attempt has its place."""
        if self._first is None:
            self._first = attempt
            self._timer = asyncio.get_running_loop().call_later(self._after_s, self._hedge)
        else:
            self._second = attempt

    def won(self, attempt: Attempt) -> None:
        """An attempt answers: the other, if it runs, has lost."""
        assert self._first is not None
        assert self._timer is not None
        assert self._task is not None
        self._timer.cancel()
        self._exchange.turn_to(attempt)
        other = self._second if attempt is self._first else self._first
        if other is not None:
            other.lost = not other.ended_at
        if attempt is self._second and self._first.lost:
            self._task.cancel()
        elif attempt is self._first and self._beside is not None:
            self._beside.cancel()

    # -- the second ---------------------------------------------------------------------------------------------

    def _hedge(self) -> None:
        self._beside = asyncio.get_running_loop().create_task(self._try_beside())

    async def _try_beside(self) -> None:
        """The second attempt; none where there is no place for it."""
        try:
            await self._attempt(self._dispatcher.beside(self._exchange))
        except Unavailable:
            if self._second is not None:
                raise
        except UpstreamFailed as failed:
            if failed.phase is not Phase.STREAMING and self._first is not None and not self._first.ended_at:
                self._exchange.turn_to(self._first)
            raise

    def _interrupted(self) -> bool:
        """Takes back the cancellation of the first attempt. Whether somebody else has cancelled the request, too."""
        assert self._task is not None
        return self._task.uncancel() > 0

    async def _end(self) -> None:
        """Nothing of it goes on."""
        self._exchange.race = None
        if self._timer is not None:
            self._timer.cancel()
        beside, cancelled = self._beside, None
        if beside is None:
            return
        beside.cancel()
        while not beside.done():
            try:
                await asyncio.wait((beside,))
            except asyncio.CancelledError as again:  # it ends at its next step all the same
                cancelled = again
        if not beside.cancelled():
            beside.exception()  # whatever counted of it was raised
        if cancelled is not None:
            raise cancelled
