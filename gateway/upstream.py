"""The way to the backends: a pool of HTTP/1.1 connections, five clocks, and no connection lost or poisoned by a
cancellation, whenever it comes."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gateway.backend import Backend
from gateway.errors import GatewayError, Phase, Unanswered, UpstreamFailed, UpstreamTimeout
from gateway.exchange import Attempt, Call
from gateway.http1 import request_head
from gateway.link import SLICE, Link
from gateway.metrics import Family, Gauge
from gateway.reply import Clock, Reply

SWEEP_S = 0.25
STALE_S = 1.0  # a connection that was closed while it was idle says so within a round trip
LAG_S = 0.05  # a sweep that comes later than that tells of a busy event loop


class Connecting:
    """A connection on its way, and the task that waits for it."""

    __slots__ = ("began_at", "expired", "limit_s", "task")

    def __init__(self, task: asyncio.Task[Any] | None, limit_s: float, now: float) -> None:
        self.task = task
        self.limit_s = limit_s
        self.began_at = now
        self.expired = False

    def sweep(self, now: float) -> None:
        if now - self.began_at > self.limit_s and not self.expired and self.task is not None:
            self.expired = True
            self.task.cancel()

    def excuse(self, lag_s: float) -> None:
        self.began_at += lag_s


class Upstream:
    """Connections to all backends. `async with upstream` runs the sweep that watches clocks and idle connections."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._idle: defaultdict[str, deque[Link]] = defaultdict(deque)  # by name: a backend outlives its settings
        self._replies: dict[Reply, str] = {}  # and the names of their backends
        self._connecting: set[Connecting] = set()
        self._sweeper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        idle = sum(map(len, self._idle.values()))
        return f"<Upstream [{len(self._replies)} replies, {idle} idle connections]>"

    def open(self, attempt: Attempt, call: Call) -> Opening:
        """`async with upstream.open(attempt, call) as reply`: the request is sent and its head read on entry."""
        return Opening(self, attempt, call)

    async def __aenter__(self) -> Upstream:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._sweeper is not None
        self._sweeper.cancel()
        for links in self._idle.values():
            for link in links:
                link.abort()
        self._idle.clear()

    def metrics(self) -> Iterator[Family]:
        """Connections to backends, by what they do."""
        idle = sum(map(len, self._idle.values()))
        states = {("idle",): idle, ("busy",): len(self._replies), ("connecting",): len(self._connecting)}
        yield Gauge("headrace_upstream_connections", "Connections to backends.", "state", total="sum").of(states)

    def fail_all(self, error: GatewayError) -> None:
        """End every answer that is still being read."""
        for reply in tuple(self._replies):
            reply.fail(error)

    def busy(self, backend: str) -> bool:
        """Whether any answer of a backend is awaited or being read."""
        return backend in self._replies.values()

    def fail(self, backend: str, error: Callable[[], UpstreamFailed], *, started: bool) -> None:
        """End the answers of one backend that no client has seen anything of, and with `started` the others, too."""
        for reply in [reply for reply, name in self._replies.items() if name == backend]:
            if started or reply.phase is not Phase.STREAMING:
                reply.fail(error())

    def forget(self, backends: Iterable[Backend]) -> None:
        """Close their idle connections. What is under way there goes on."""
        for backend in backends:
            for link in self._idle.pop(backend.name, ()):
                link.abort()

    def take(self, backend: Backend) -> Link | None:
        """The connection used last: the warmest, and the others get to expire."""
        idle = self._idle.get(backend.name)
        while idle:
            link = idle.pop()
            if not link.closed and self._clock() - link.idle_since < link.idle_limit_s:
                return link
            link.abort()
        return None

    async def connect(self, backend: Backend) -> Link:
        """A fresh connection. Raises UpstreamFailed in phase CONNECT."""
        link = Link()
        limit_s = backend.timeouts.connect
        connecting = Connecting(asyncio.current_task(), limit_s, self._clock())
        self._connecting.add(connecting)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: link,
                backend.host,
                backend.port,
                ssl=backend.tls,
                server_hostname=backend.host if backend.tls else None,
            )
        except OSError as error:
            link.abort()
            raise UpstreamFailed("The model backend refused the connection.", Phase.CONNECT) from error
        except asyncio.CancelledError:
            link.abort()
            if connecting.expired and connecting.task is not None and connecting.task.uncancel() == 0:
                raise UpstreamTimeout("connect", limit_s, Phase.CONNECT) from None
            raise
        finally:
            self._connecting.discard(connecting)
        return link

    def was_stale(self, attempt: Attempt) -> bool:
        """Whether a link that broke now was dead before the attempt was sent; later the backend may have run it."""
        return self._clock() - attempt.connected_at < STALE_S

    def begin(self, link: Link, backend: Backend, call: Call) -> Reply:
        """The answer that is expected on a link."""
        reply = Reply(link, backend.timeouts, stream=call.stream, clock=self._clock)
        self._replies[reply] = backend.name
        return reply

    def release(self, reply: Reply, link: Link, backend: Backend) -> None:
        """The link goes back into the pool if the answer ended as it should, and is closed if not. No await: a
        cancellation cannot come between."""
        self._replies.pop(reply, None)
        if not reply.reader.reusable:
            link.abort()
        elif link.rest(self._clock(), reply.reader.keep_alive_hint):
            self._idle[backend.name].append(link)

    async def _sweep(self) -> None:
        """All clocks but none per request: one look at everything that is under way, four times a second. Time in
        which this loop itself was too busy to look is nobody's fault but its own, and not counted."""
        due = self._clock() + SWEEP_S
        while True:
            await asyncio.sleep(max(0.0, due - self._clock()))
            now = self._clock()
            lag_s = now - due
            under_way: list[Connecting | Reply] = [*self._connecting, *self._replies]
            for waited in under_way:
                if lag_s > LAG_S:
                    waited.excuse(lag_s)
                waited.sweep(now)
            self._expire(now)
            due = now + SWEEP_S

    def _expire(self, now: float) -> None:
        for name, idle in tuple(self._idle.items()):
            while idle and (idle[0].closed or now - idle[0].idle_since > idle[0].idle_limit_s):
                idle.popleft().abort()
            if not idle:
                del self._idle[name]


class Opening:
    """The `async with` of one attempt: entered when the head is read, left when the connection is given back."""

    __slots__ = ("_attempt", "_call", "_link", "_reply", "_upstream")

    def __init__(self, upstream: Upstream, attempt: Attempt, call: Call) -> None:
        self._upstream = upstream
        self._attempt = attempt
        self._call = call
        self._reply: Reply | None = None
        self._link: Link

    async def __aenter__(self) -> Reply:
        attempt, call = self._attempt, self._call
        backend = attempt.backend
        headers = call.headers
        if attempt.trace_headers:
            headers = [*headers, *attempt.trace_headers]
        if backend.authorization is not None:
            headers = [*headers, (b"authorization", backend.authorization)]
        head = request_head(b"POST", backend.prefix + call.target, backend.host_header, headers, call.length)
        link = self._upstream.take(backend)
        if link is not None:
            try:
                return await self._try(link, head)
            except Unanswered:  # it had been closed while it was idle: sending again duplicates nothing
                if not self._upstream.was_stale(attempt):
                    raise
        return await self._try(await self._upstream.connect(backend), head)

    async def __aexit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if self._reply is not None:
            self._upstream.release(self._reply, self._link, self._attempt.backend)

    async def _try(self, link: Link, head: bytes) -> Reply:
        attempt, call = self._attempt, self._call
        reply = self._upstream.begin(link, attempt.backend, call)
        attempt.connected_at = reply.began_at
        try:
            if call.length <= SLICE:
                link.send(head, call.body)
            else:
                await link.send_large(head, call.body, reply.awaited)
            await reply.wait_head()
        except BaseException:
            self._upstream.release(reply, link, attempt.backend)
            raise
        self._reply, self._link = reply, link
        attempt.head_at = reply.active_at
        attempt.status = reply.status
        return reply
