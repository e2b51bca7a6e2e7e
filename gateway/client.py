"""The client of one request: its head and body coming in, its leaving, and what it is told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from gateway import answers
from gateway.errors import (
    BUFFERS_FULL,
    INVALID_REQUEST,
    REQUEST_TIMEOUT,
    REQUEST_TOO_LARGE,
    UNSUPPORTED_ENCODING,
    ClientGone,
    GatewayError,
    Refused,
    Unavailable,
    UpstreamFailed,
)
from gateway.exchange import Attempt, Call, Exchange
from gateway.http1 import HOP_BY_HOP, Answer, nominated
from gateway.metrics import Family, Gauge
from gateway.relay import Relay, send
from gateway.reply import Clock, Reply
from gateway.turn import Turn

BODY_STALL_S = 30.0  # how long an upload may pause
SMALL_BODY = 1024 * 1024  # a long conversation without images

# Framing, credentials, and what addresses the gateway itself or steers other routers: none of it reaches a backend.
NOT_FORWARDED = HOP_BY_HOP | frozenset(
    (
        b"accept-encoding",
        b"api-key",
        b"authorization",
        b"content-length",
        b"cookie",
        b"endpoint-load-metrics-format",
        b"expect",
        b"forwarded",
        b"host",
        b"priority",
        b"x-api-key",
        b"x-custom-labels",
        b"x-goog-api-key",
        b"x-priority",
        b"x-real-ip",
        b"x-request-id",
    )
)
NOT_FORWARDED_PREFIXES = (
    b"x-headrace-",
    b"x-stainless-",
    b"x-forwarded-",
    b"x-gateway-",
    b"x-envoy-",
    b"x-llm-d-",
    b"x-smg-",
    b"x-dynamo-",
    # Whom an engine's sidecar (llm-d's) is to connect to, prompt and all.
    b"x-data-parallel-",
    b"x-encoder-host",
    b"x-kv-cache-source-",
    b"x-prefiller-",
)
PATIENCE = (b"x-headrace-deadline", b"x-stainless-read-timeout", b"x-stainless-timeout")
TRACE_CONTEXT = (b"traceparent", b"tracestate")
DURATION = re.compile(rb"(\d{1,6}(?:\.\d{1,6})?)(ms|s|m)?")
UNITS = {b"ms": 0.001, b"s": 1.0, b"m": 60.0, None: 1.0}
SECRET_PARAMETERS = frozenset((b"key", b"api_key", b"api-key", b"access_token", b"token"))
SINGULAR = (b"content-encoding", b"content-length", b"content-type", b"host")  # of two, who reads which?


class Buffers:
    """The sum of all request bodies in memory against one budget: large requests must not add up to a crash. A quarter
    of it is kept for the small ones: whoever uploads much must not keep others from asking."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0

    def __repr__(self) -> str:
        return f"<Buffers {self.used}/{self.budget} bytes>"

    def take(self, count: int, size: int) -> None:
        """`count` bytes more, for a body of `size` so far. Raises Unavailable where the budget would be passed."""
        if self.used + count > (self.budget if size <= SMALL_BODY else self.budget * 3 // 4):
            message = "The gateway holds as much request data as it may at a time."
            raise Unavailable(BUFFERS_FULL, message, retry_after=1.0)
        self.used += count

    def give(self, count: int) -> None:
        self.used -= count

    def metrics(self) -> Iterator[Family]:
        """What is held, and may be."""
        yield Gauge("headrace_buffered_bytes", "Request bodies in memory.", total="sum").of({(): self.used})
        yield Gauge("headrace_buffered_limit_bytes", "Most that they may be.", total="sum").of({(): self.budget})


class Client:
    """`with client` holds what its body takes of the buffers."""

    def __init__(self, turn: Turn, *, buffers: Buffers, max_body: int, body_s: float, clock: Clock) -> None:
        self.raw_headers = turn.headers
        self.headers = dict(turn.headers)
        self.turn = turn
        self._buffers = buffers
        self._max_body = max_body
        self._body_s = body_s
        self._clock = clock
        self._held = 0

    @property
    def content_type(self) -> bytes:
        """As sent; empty where the client names none."""
        return self.headers.get(b"content-type", b"")

    def trace_context(self) -> tuple[bytes, bytes]:
        """The traceparent and tracestate that came, taken out of what is forwarded: a backend is told of our own."""
        parent, state = self.headers.get(b"traceparent", b""), self.headers.get(b"tracestate", b"")
        if parent or state:
            self.raw_headers = [header for header in self.raw_headers if header[0] not in TRACE_CONTEXT]
            self.headers = dict(self.raw_headers)
        return parent, state

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._buffers.give(self._held)
        self._held = 0

    async def body(self) -> bytes:
        """The whole body. Raises Refused before reading what is declared too large or encoded, and at the byte that
        crosses the limit otherwise; Unavailable where the buffers are full; ClientGone."""
        headers = self.headers
        if len(headers) < len(self.raw_headers):
            self._check_singular()
        if b"content-encoding" in headers and headers[b"content-encoding"].strip().lower() != b"identity":
            raise Refused(UNSUPPORTED_ENCODING, "Compressed request bodies are not accepted: send it as it is.")
        declared = headers.get(b"content-length", b"0")
        self._admit(int(declared) if declared.isdigit() else 0)
        body = self.turn.whole()
        if body is None:
            body = await self._read()
        else:
            self._hold(len(body))
        return body

    def _check_singular(self) -> None:
        names = [name for name, _ in self.raw_headers]
        for name in SINGULAR:
            if names.count(name) > 1:
                raise Refused(INVALID_REQUEST, f"The header {name.decode()} stands there more than once.")

    async def _read(self) -> bytes:
        pieces: list[bytes] = []
        size = 0
        until = self._clock() + self._body_s
        left_s = self._body_s
        try:
            while True:
                left_s = until - self._clock()
                async with asyncio.timeout(min(BODY_STALL_S, left_s)):
                    piece = await self.turn.piece()
                if self.turn.gone:
                    raise ClientGone
                if self.turn.broken:
                    raise Refused(INVALID_REQUEST, "The request body is not valid HTTP/1.1.")
                if not piece:
                    return b"".join(pieces)
                pieces.append(piece)
                size += len(piece)
                self._hold(size)
        except TimeoutError:
            paused = left_s > BODY_STALL_S
            told = (
                f"paused for more than {BODY_STALL_S:g} s" if paused else f"was not complete after {self._body_s:g} s"
            )
            raise Refused(REQUEST_TIMEOUT, f"The body {told}.") from None

    def _admit(self, size: int) -> None:
        if size > self._max_body:
            raise Refused(REQUEST_TOO_LARGE, f"The body has {size} bytes or more; the limit is {self._max_body}.")

    def _hold(self, size: int) -> None:
        self._admit(size)
        self._buffers.take(size - self._held, size)
        self._held = size

    def address(self, call: Call, request_id: str) -> Call:
        """The call with its path, query and headers for the backend, whose credential is not the client's to give."""
        named = nominated(self.raw_headers) if b"connection" in self.headers else ()
        call.headers = [
            header
            for header in self.raw_headers
            if header[0] not in NOT_FORWARDED
            and header[0] not in named
            and not (header[0][:2] == b"x-" and header[0].startswith(NOT_FORWARDED_PREFIXES))
        ]
        call.headers += [(b"accept-encoding", b"identity"), (b"x-request-id", request_id.encode())]
        call.target = self._target() if self.turn.query else self.turn.endpoint.target
        call.class_ = self.headers.get(b"x-headrace-class", b"").decode("latin-1")
        call.deadline_s = self._patience_s()
        call.again = self.headers.get(b"x-stainless-retry-count", b"0") != b"0"
        return call

    def _patience_s(self) -> float | None:
        """Seconds that the client will wait: the least of what it asks for and what its SDK tells of its own clocks."""
        least: float | None = None
        for name in PATIENCE:
            if name in self.headers and (wait_s := _seconds(self.headers[name])) is not None:
                least = wait_s if least is None else min(least, wait_s)
        return least

    def _target(self) -> bytes:
        """Path and query for the backend, as sent but for keys that some clients put there."""
        path = self.turn.endpoint.path.encode()
        kept = [item for item in self.turn.query.split(b"&") if _parameter(item) not in SECRET_PARAMETERS]
        return b"%b?%b" % (path, b"&".join(kept)) if kept and kept != [b""] else path

    def present(self) -> Presence:
        """`async with client.present()`: the block is cancelled when the client leaves, and raises ClientGone."""
        return Presence(self.turn)

    async def relay(self, reply: Reply, attempt: Attempt, exchange: Exchange) -> None:
        """The backend's answer goes to the client. Raises UpstreamFailed; in phase STREAMING it has been told."""
        await Relay(reply, attempt, self.turn, exchange, self._clock).run()

    def say_goodbye(self) -> None:
        """The connection closes behind the answer."""
        self.turn.keep_alive = False

    def refuse(self, error: GatewayError, exchange: Exchange) -> None:
        """Tell the client why there is no answer. One that has begun and cannot end as it should is cut off."""
        if exchange.status and not self.turn.response_complete:
            self.turn.cut()
        if exchange.status or isinstance(error, ClientGone):
            return
        answer = error.answer if isinstance(error, UpstreamFailed) else None
        if answer is None:
            answer = Answer(*answers.refusal(error, exchange.endpoint.dialect, exchange.request_id))
        elif error.retry is not None:  # the backend's own words, and ours on what to do about them
            told = [header for header in answer.headers if header[0] != b"x-should-retry"]
            retry = (b"x-should-retry", b"true" if error.retry else b"false")
            answer = answer._replace(headers=[*told, retry])
        send(answer, self.turn, exchange)


def _parameter(item: bytes) -> bytes:
    """The name in one item of a query, in lower case."""
    return unquote_to_bytes(item.partition(b"=")[0]).lower()


class Presence:
    """Cancels its block when the client leaves. The cancellation is its own only if nobody else asked for one."""

    __slots__ = ("_cancelled", "_task", "_turn")

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._task = turn.task
        self._cancelled = False

    async def __aenter__(self) -> None:
        if self._turn.gone:
            raise ClientGone
        self._turn.on_gone = self._leave

    async def __aexit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        self._turn.on_gone = None
        alone = self._cancelled and self._task is not None and self._task.uncancel() == 0
        if alone and isinstance(exc, asyncio.CancelledError | None):
            raise ClientGone from exc

    def _leave(self) -> None:
        if self._task is not None:
            self._cancelled = True
            self._task.cancel()


def _seconds(value: bytes) -> float | None:
    """`1500ms`, `2s`, `1m`, or plain seconds; None for zero and for what is none of these."""
    match = DURATION.fullmatch(value.strip())
    return (float(match[1]) * UNITS[match[2]] or None) if match is not None else None
