"""One answer on its way from a backend's reply to its client: committed late, passed on at once, and never ended in a
way that hides a break."""

from __future__ import annotations

from http import HTTPStatus

from gateway import answers
from gateway.dialects import error_frame
from gateway.errors import UPSTREAM_TRUNCATED, GatewayError, Phase, Unavailable, UpstreamFailed
from gateway.exchange import REJECTED, Attempt, Dialect, Exchange, Header
from gateway.http1 import HOP_BY_HOP, Answer, nominated
from gateway.reading import BodyMeter, StreamEnding
from gateway.reply import Clock, Reply
from gateway.sse import Meter, Sniff, first_event, sniff
from gateway.turn import Turn

HOLD = 64 * 1024  # a JSON answer up to this size is committed only when it is whole, so that a break can be a status
MAX_ERROR = 256 * 1024  # engines quote the prompt in their 400s; what is larger is no error body
RETRYABLE = frozenset((429, 502, 503, 504))  # not 500: the request may have caused it, and would do so elsewhere
BODILESS = (204, 304)  # they have no body, and a length would say something else (RFC 9110, 8.6)
ENDINGS = {
    StreamEnding.EMPTY: "The model backend ended its stream without an event.",
    StreamEnding.ERROR: "The model backend reported an error in its stream.",
    StreamEnding.TRUNCATED: "The model backend ended its stream before its answer was complete.",
}

NOT_RELAYED = HOP_BY_HOP | {b"content-length", b"server", b"date", b"x-request-id"}
STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}


def head(answer_status: int, headers: list[Header], exchange: Exchange, turn: Turn) -> bytes:
    """Status line and header lines without framing: the backend's end-to-end headers, then the gateway's own."""
    lines = [STATUS_LINES.get(answer_status) or b"HTTP/1.1 %d \r\n" % answer_status]
    lines += [b"%b: %b\r\n" % header for header in turn.date]
    named = nominated(headers)
    request_id = exchange.request_id.encode()
    for name, value in headers:
        if name not in NOT_RELAYED and name not in named:
            lines.append(b"%b: %b\r\n" % (name, value))
        elif name == b"x-request-id":
            exchange.upstream_request_id = value.decode("latin-1")
            request_id = value
    lines.append(b"x-request-id: %b\r\n" % request_id)
    if exchange.endpoint.dialect is Dialect.MESSAGES and b"request-id" not in dict(headers):
        lines.append(b"request-id: %b\r\n" % request_id)  # Anthropic's name for it
    lines += [b"%b: %b\r\n" % header for header in exchange.answer_headers]
    return b"".join(lines)


def send(answer: Answer, turn: Turn, exchange: Exchange) -> None:
    """A whole answer."""
    exchange.status = answer.status
    exchange.bytes_out = len(answer.body)
    turn.answer(head(answer.status, answer.headers, exchange, turn), answer.body, sized=answer.status not in BODILESS)


class Relay:
    """Carries one answer. Raises UpstreamFailed; in phase STREAMING the client has been told already."""

    def __init__(self, reply: Reply, attempt: Attempt, turn: Turn, exchange: Exchange, clock: Clock) -> None:
        assert exchange.call is not None
        self._reply = reply
        self._attempt = attempt
        self._turn = turn
        self._exchange = exchange
        self._dialect = exchange.call.endpoint.dialect
        self._strip_usage = exchange.call.strip_usage
        self._clock = clock
        self._fields = dict(reply.headers)
        self._type = self._fields.get(b"content-type", b"").split(b";")[0].strip().lower()

    async def run(self) -> None:
        if self._reply.status >= 400:
            await self._error()
        elif self._type == b"text/event-stream":
            await self._events()
        else:
            await self._body()

    async def _error(self) -> None:
        reply, status = self._reply, self._reply.status
        body = await self._hold(MAX_ERROR)
        if not reply.complete:
            raise UpstreamFailed("The model backend's error answer has no end.", Phase.SENT)
        kind = self._fields.get(b"content-type", b"")
        headers = reply.headers
        shaped = None
        if self._fields.get(b"content-encoding", b"identity") == b"identity":
            shaped = answers.normalised(body, kind, status, self._dialect, self._exchange.request_id)
        if shaped is not None:
            headers = [header for header in headers if header[0] != b"content-type"]
            headers.append((b"content-type", b"application/json"))
        answer = Answer(status, headers, body if shaped is None else shaped)
        if status < 500 and status not in RETRYABLE:
            self._exchange.commit(self._attempt)
            self._exchange.outcome = REJECTED
            send(answer, self._turn, self._exchange)
            return
        raise UpstreamFailed(
            f"The model backend answered {status}.",
            Phase.SENT,
            replayable=status in RETRYABLE,
            retry_after=_seconds(self._fields.get(b"retry-after", b"")),
            answer=answer,
        )

    async def _body(self) -> None:
        reply, turn = self._reply, self._turn
        reply.waits_for_token = False
        meter = BodyMeter(self._dialect)
        held = await self._hold(HOLD) if self._type == b"application/json" else b""
        self._exchange.commit(self._attempt, meter)
        if reply.complete:
            held += await reply.read()
            meter.feed(held, self._clock())
            send(Answer(reply.status, reply.headers, held), turn, self._exchange)
        else:
            self._commit(meter.feed(held, self._clock()), reply.length)
            await self._pump(meter)
            turn.end()
        meter.end(self._clock())
        if not meter.complete:
            self._exchange.outcome = "upstream_bad_response"

    async def _events(self) -> None:
        turn = self._turn
        began, tally = await self._first_event(), self._attempt.tally
        meter = Meter(self._dialect, strip_usage=self._strip_usage, on_first_token=self._first_token, tally=tally)
        self._exchange.commit(self._attempt, meter)
        self._commit(meter.feed(began, self._clock()), None)
        failure: GatewayError | None = None
        try:
            await self._pump(meter)
            rest = meter.end(self._clock())
        except (UpstreamFailed, Unavailable) as broken:
            failure = broken
            rest = b""
        if meter.complete:
            turn.end(rest)  # a break after the finish reason took nothing from the answer
            return
        if meter.ending is StreamEnding.ERROR:  # it has told the client itself
            failure = UpstreamFailed(ENDINGS[StreamEnding.ERROR], Phase.STREAMING)
        elif failure is None:
            failure = UpstreamFailed(ENDINGS[meter.ending], Phase.STREAMING, refusal=UPSTREAM_TRUNCATED)
        if meter.error is None and not meter.done:
            row = failure.refusal
            number = 0 if meter.last_sequence_number is None else meter.last_sequence_number + 1
            rest += meter.broken() + error_frame(self._dialect, failure.message, row.type, row.code, number)
        turn.end(rest)
        raise failure

    async def _first_event(self) -> bytes:
        """What came up to the first whole event. An engine that died says so there, under a status of 200."""
        began = b""
        while True:
            data = await self._reply.read()
            began += data
            match sniff(began):
                case Sniff.FINE:
                    return began
                case Sniff.ERROR:
                    raise self._failed_at_once(began)
            if not data and not began.strip():
                raise UpstreamFailed(ENDINGS[StreamEnding.EMPTY], Phase.SENT, refusal=UPSTREAM_TRUNCATED)
            if not data:
                return began

    def _failed_at_once(self, began: bytes) -> UpstreamFailed:
        """What can still be told by a status is: the engine's own where it blames the request, else 502."""
        _, body = first_event(began) or (b"", b"")
        code = answers.error_code(body)
        status = code if 400 <= code < 500 else 502
        shaped = answers.normalised(body, b"application/json", status, self._dialect, self._exchange.request_id)
        answer = Answer(status, [(b"content-type", b"application/json")], shaped or body)
        return UpstreamFailed(ENDINGS[StreamEnding.ERROR], Phase.SENT, replayable=status == 502, answer=answer)

    async def _hold(self, limit: int) -> bytes:
        """The body while it is incomplete and not longer than `limit`."""
        whole = self._reply.whole()
        if whole is not None:
            return whole
        pieces: list[bytes] = []
        size = 0
        while size <= limit and (data := await self._reply.read()):
            pieces.append(data)
            size += len(data)
        return b"".join(pieces)

    def _commit(self, first: bytes, length: int | None) -> None:
        reply = self._reply
        reply.phase = Phase.STREAMING
        self._exchange.status = reply.status
        headers = reply.headers if self._type != b"text/event-stream" else unbuffered(reply.headers)
        self._turn.begin(head(reply.status, headers, self._exchange, self._turn), length, first)

    async def _pump(self, meter: Meter | BodyMeter) -> None:
        self._reply.meter = meter
        self._turn.feed_from(self._reply)
        await self._reply.pump(meter.feed, self._turn.writer())

    def _first_token(self, now: float) -> None:
        self._reply.waits_for_token = False
        self._attempt.on_first_token(now)


def _seconds(value: bytes) -> float | None:
    """A Retry-After in seconds; a date, or nonsense, is not worth a retry that waits for it."""
    return float(value) if value.isdigit() and len(value) < 6 else None


def unbuffered(headers: list[Header]) -> list[Header]:
    """The headers of an event stream, so that no intermediary holds it back (RFC 10036; nginx; RFC 9111)."""
    names = dict(headers)
    added: list[Header] = [(b"incremental", b"?1")] if b"incremental" not in names else []
    if b"x-accel-buffering" not in names:
        added.append((b"x-accel-buffering", b"no"))
    if b"cache-control" not in names:
        added.append((b"cache-control", b"no-cache"))
    return [*headers, *added]
