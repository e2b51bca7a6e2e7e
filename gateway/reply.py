"""One answer of a backend while it is being read, and the clocks that run meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway.backend import Timeouts
from gateway.errors import (
    UPSTREAM_ERROR,
    UPSTREAM_TRUNCATED,
    ClientGone,
    GatewayError,
    Phase,
    Refusal,
    Unanswered,
    UpstreamFailed,
    UpstreamTimeout,
)
from gateway.http1 import BadResponse, Header, ResponseReader
from gateway.link import Link

HIGH_WATER = 64 * 1024  # bytes read ahead of a consumer before the socket is paused
CLIENT_STALL_S = 60.0  # nginx's send_timeout: how long a client may take nothing of a waiting answer

Clock = Callable[[], float]
Feed = Callable[[bytes, float], bytes]
Write = Callable[[bytes], None]


class Progress(Protocol):
    """What a meter tells of the pace of an answer."""

    @property
    def finish(self) -> str | None: ...
    @property
    def last_data_at(self) -> float | None: ...


class Reply:
    """An answer: wait for the head, then `read` it piece by piece or `pump` it into a sink.

    All waiting is done by the one coroutine that opened it. `phase` tells how far it got; whoever commits the
    answer to the client sets it to STREAMING. `meter`, if given, says what counts as progress once the answer has its
    finish reason: heartbeats behind it do not.
    """

    def __init__(self, link: Link, timeouts: Timeouts, *, stream: bool, clock: Clock) -> None:
        self.reader = ResponseReader()
        self.phase = Phase.SENT
        self.waits_for_token = stream
        self.meter: Progress | None = None
        self.began_at = self.sent_at = self.active_at = clock()
        self._link = link
        self._timeouts = timeouts
        self._headers_s = timeouts.headers_for(stream=stream)
        self._clock = clock
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: GatewayError | None = None
        self._paused_for_client = False
        link.on_data, link.on_lost = self.received, self.lost

    def __repr__(self) -> str:
        state = "complete" if self.reader.complete else "reading" if self.reader.head_done else "waiting"
        return f"<Reply {self.reader.status} {state}, {self.phase.name.lower()}>"

    @property
    def status(self) -> int:
        return self.reader.status

    @property
    def headers(self) -> list[Header]:
        """Names in lower case, values as sent, in order."""
        return self.reader.headers

    @property
    def length(self) -> int | None:
        """Body bytes as declared, None where the end of the body declares itself."""
        return next((int(value) for name, value in self.reader.headers if name == b"content-length"), None)

    def awaited(self) -> bool:
        """More of the request was sent: the answer is not late yet. False once any byte of it came."""
        self.sent_at = self._clock()
        return not self.reader.started

    @property
    def complete(self) -> bool:
        """Whether every byte of the body is here."""
        return self.reader.complete

    async def wait_head(self) -> None:
        """Returns once status and headers stand. Raises UpstreamFailed."""
        while not self.reader.head_done:
            await self._wait()

    def whole(self) -> bytes | None:
        """All that has not been read, if nothing more comes."""
        return self._taken() if self.reader.complete else None

    async def read(self) -> bytes:
        """The next body bytes; empty at the end. Raises UpstreamFailed where the body breaks off."""
        while not self._pieces and not self.reader.complete:
            await self._wait()
        self._link.resume()
        return self._taken()

    async def pump(self, feed: Feed, write: Write) -> None:
        """Everything that is still to come, through `feed` into `write`, from the socket's own callback: no task wakes
        for it. Returns at the end."""
        held = self._taken()
        if held and (out := feed(held, self._clock())):
            write(out)
        self._link.on_data = self._relay(feed, write)
        if not self._paused_for_client:
            self._link.resume()
        while not self.reader.complete:
            await self._wait()

    def _relay(self, feed: Feed, write: Write) -> Callable[[bytes], None]:
        """The way of a chunk. A closure, since a name of its own is found faster than one of an object's."""
        reader, clock = self.reader, self._clock

        def relay(data: bytes) -> None:
            try:
                body = reader.feed(data)
            except BadResponse as error:
                body = self._spoilt(error)
            self.active_at = now = clock()
            if body and (out := feed(body, now)):
                write(out)
            if reader.complete:
                self._wake()

        return relay

    def pause(self) -> None:
        """The client is slow: stop reading from the backend's socket."""
        self._paused_for_client = True
        self.active_at = self._clock()
        self._link.pause()

    def resume(self) -> None:
        self._paused_for_client = False
        self.active_at = self._clock()
        self._link.resume()

    def sweep(self, now: float) -> None:
        """Fail if one of the clocks ran out."""
        limit = self._timeouts
        if now - self.began_at > limit.total:
            self.fail(UpstreamTimeout("total", limit.total, self.phase))
        elif not self.reader.head_done:
            if now - self.sent_at > self._headers_s:
                self.fail(UpstreamTimeout("headers", self._headers_s, self.phase))
        elif self._paused_for_client:
            if now - self.active_at > CLIENT_STALL_S:
                self.fail(ClientGone("The client took nothing of its answer for too long.", "client_stalled"))
        elif self.waits_for_token:
            if now - self.sent_at > limit.first_token:
                self.fail(UpstreamTimeout("first_token", limit.first_token, self.phase))
        elif now - self._progress_at() > limit.idle:
            self.fail(UpstreamTimeout("idle", limit.idle, self.phase))

    def excuse(self, lag_s: float) -> None:
        """The gateway was too busy to read for so long: that is not the backend's time."""
        self.sent_at += lag_s
        self.active_at += lag_s

    def _progress_at(self) -> float:
        meter = self.meter
        return self.active_at if meter is None or meter.finish is None else meter.last_data_at or self.active_at

    # -- called by the connection -------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        reader = self.reader
        try:
            body = reader.feed(data)
        except BadResponse as error:
            body = self._spoilt(error)
        self.active_at = self._clock()
        self._link.go_on()  # a backend that refuses a request need not read it to its end
        if body:
            self._pieces.append(body)
            if sum(map(len, self._pieces)) > HIGH_WATER:
                self._link.pause()
        self._wake()

    def _taken(self) -> bytes:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return data

    def lost(self) -> None:
        """The connection closed."""
        if self.reader.eof() or self._failure is not None:
            self._wake()
        elif not self.reader.started:
            self.fail(Unanswered("The model backend closed the connection without an answer.", self.phase))
        else:
            self._broken(UPSTREAM_TRUNCATED, "The model backend broke off its answer.")

    def _spoilt(self, error: BadResponse) -> bytes:
        """The rest will make no sense; what came before that does."""
        self._broken(UPSTREAM_ERROR, f"The model backend answered badly: {error}.")
        return error.body

    def _broken(self, refusal: Refusal, message: str) -> None:
        self.fail(UpstreamFailed(message, self.phase, refusal=refusal))

    def fail(self, failure: GatewayError) -> None:
        """End it: whoever reads it gets `failure` as soon as what has come in is read."""
        if self._failure is None and not self.reader.complete:
            self._failure = failure
            self._link.abort()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None and not self.reader.complete:
            if isinstance(self._failure, UpstreamFailed):
                self._failure.phase = self.phase
            raise self._failure
