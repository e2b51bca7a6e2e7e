"""Copies of requests for a pool on trial: sent when the original is over, in the batch class, their answers dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from random import Random

from gateway.catalog import Shadow
from gateway.client import Buffers
from gateway.dispatch import Dispatcher
from gateway.errors import UPSTREAM_TRUNCATED, GatewayError, Phase, UpstreamFailed
from gateway.exchange import REJECTED, Attempt, Exchange
from gateway.metrics import Counter, Family, Histogram
from gateway.reading import BodyMeter
from gateway.relay import RETRYABLE
from gateway.reply import Clock, Reply
from gateway.sse import Meter
from gateway.upstream import Upstream

WAIT_S = 60.0  # longer a copy does not wait for its first token: it holds a body
CLASS = "batch"
NAME = "(shadow)"  # shares the pool as one tenant: what copies use there is nobody's debt
SKIPPED = "skipped"


class Shadows:
    """`async with shadows` ends the copies that are under way. They take no part in limits, bills, logs, traces or the
    metrics of requests, and no more than half of the memory for bodies."""

    def __init__(self, dispatcher: Dispatcher, upstream: Upstream, buffers: Buffers, clock: Clock, rng: Random) -> None:
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._buffers = buffers
        self._clock = clock
        self._rng = rng
        self._running: dict[asyncio.Task[None], Exchange] = {}
        self._closed = False
        self.copies = Counter(
            "headrace_shadow_requests_total",
            "Copies of requests by what became of them; skipped: there was no room for it.",
            *("model", "outcome"),
        )
        self.ttft = Histogram(
            "headrace_shadow_ttft_seconds",
            "From dispatch to the first token of streams that were copied: of the original and of the copy.",
            *("model", "version"),
        )

    def __repr__(self) -> str:
        return f"<Shadows {len(self._running)} under way>"

    async def __aenter__(self) -> Shadows:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End those that are under way, and begin no more."""
        self._closed = True
        self.keep(())

    def keep(self, pools: Collection[str]) -> None:
        """Only these pools are there."""
        for task, x in self._running.items():
            if x.call is not None and x.call.pool not in pools:
                task.cancel()

    def metrics(self) -> Iterator[Family]:
        """All of them."""
        yield from (self.copies, self.ttft)

    def cast(self, x: Exchange, shadows: Mapping[str, Shadow]) -> None:
        """A request is over, and its body still there: one in so many of those that were answered has a shadow."""
        shadow = shadows.get(x.call.label) if x.call is not None else None
        if shadow is None or x.fault or self._closed or self._rng.random() >= shadow.sample:
            return
        assert x.call is not None
        buffers, length = self._buffers, x.call.length
        running = sum(each.call is not None and each.call.pool == shadow.pool for each in self._running.values())
        if running >= shadow.at_once or buffers.used + length > buffers.budget // 2:
            self.copies.values[(x.call.label, SKIPPED)] += 1
            return
        buffers.used += length
        copy = self._copy(x, shadow)
        task = asyncio.get_running_loop().create_task(self._run(copy, _since_dispatch(x)))
        self._running[task] = copy
        task.add_done_callback(lambda task: self._over(task, length))

    def _over(self, task: asyncio.Task[None], length: int) -> None:
        self._running.pop(task).let_go()
        self._buffers.give(length)

    def _copy(self, x: Exchange, shadow: Shadow) -> Exchange:
        assert x.tenant is not None
        assert x.call is not None
        call = replace(
            x.call,
            pool=shadow.pool,
            body=list(x.call.body),
            prompt=list(x.call.prompt),
            fallback=(),
            canary=None,
            among=None,
            deadline_s=WAIT_S,
            again=False,
        )
        tenant = replace(x.tenant, name=NAME, operator=False)
        return Exchange(x.request_id, self._clock(), x.endpoint, tenant=tenant, call=call, class_=CLASS)

    async def _run(self, x: Exchange, original_s: float | None) -> None:
        """One copy, tried once."""
        assert x.call is not None
        label = x.call.label
        try:
            async with self._dispatcher.slot(x) as attempt, self._upstream.open(attempt, x.call) as reply:
                outcome = await self._read(reply, attempt, x)
        except GatewayError as error:
            outcome = error.refusal.reason
        self.copies.values[(label, outcome)] += 1
        copy_s = _since_dispatch(x)
        if copy_s is not None and original_s is not None:  # pairs: the same requests on both sides
            self.ttft.child((label, "original")).observe(original_s)
            self.ttft.child((label, "shadow")).observe(copy_s)

    async def _read(self, reply: Reply, attempt: Attempt, x: Exchange) -> str:
        """The answer to its end; returns the word for it. Raises UpstreamFailed."""
        stream = dict(reply.headers).get(b"content-type", b"").startswith(b"text/event-stream")
        dialect, heard = x.endpoint.dialect, _hearing(reply, attempt)
        meter = Meter(dialect, on_first_token=heard, tally=attempt.tally) if stream else BodyMeter(dialect)
        x.meter = reply.meter = meter
        reply.waits_for_token = stream
        await reply.pump(meter.feed, _drop)
        meter.end(self._clock())
        if reply.status >= 500 or reply.status in RETRYABLE:
            raise UpstreamFailed(f"The model backend answered {reply.status}.", Phase.SENT)
        if reply.status >= 400:
            return REJECTED
        if not meter.complete:
            raise UpstreamFailed("The answer is not complete.", Phase.STREAMING, refusal=UPSTREAM_TRUNCATED)
        return "ok"


def _hearing(reply: Reply, attempt: Attempt) -> Callable[[float], None]:
    def heard(now: float) -> None:
        reply.waits_for_token = False
        attempt.on_first_token(now)

    return heard


def _drop(data: bytes) -> None:
    """Nobody asked for it."""


def _since_dispatch(x: Exchange) -> float | None:
    """Seconds that its last backend took to the first token."""
    if x.meter is None or x.meter.first_token_at is None or not x.attempts:
        return None
    return x.meter.first_token_at - x.attempts[-1].dispatched_at
