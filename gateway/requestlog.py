"""The log line of a request."""

from __future__ import annotations

import msgspec

from gateway.exchange import Exchange, Metered
from gateway.timeline import Cause

_write = msgspec.json.Encoder().encode


class RequestLine(msgspec.Struct, gc=False):
    """The log line of one request. Times in milliseconds, `time` in seconds since the epoch."""

    time: float
    level: str
    request_id: str
    path: str
    tenant: str
    model: str
    class_: str = msgspec.field(name="class")
    stream: bool
    status: int
    outcome: str
    backend: str
    attempts: int
    queue_ms: float
    ttft_ms: float | None
    itl_ms: float | None
    total_ms: float
    tokens_in: int | None
    tokens_cached: int | None
    tokens_out: int | None
    bytes_in: int
    bytes_out: int
    upstream_request_id: str
    cause: str
    trace_id: str
    event: str = "request"


def request_line(x: Exchange, wall: float, cause: Cause | None) -> bytes:
    """What happened to a request that ended at `wall` and was not good for a `cause`, as one line of JSON."""
    call, meter, ttft_s = x.call, x.meter, x.ttft_s
    usage = meter.usage if meter is not None else None
    line = RequestLine(
        round(wall, 3),
        "info" if x.outcome == "ok" else "warning",
        x.request_id,
        x.endpoint.path,
        x.tenant.name if x.tenant is not None else "",
        call.label if call is not None else "",
        x.class_,
        call.stream if call is not None else False,
        x.status,
        x.outcome,
        x.attempts[-1].backend.name if x.attempts else "",
        len(x.attempts),
        round(x.queue_wait_s * 1000, 3),
        None if ttft_s is None else round(ttft_s * 1000, 3),
        None if ttft_s is None or meter is None else _mean_gap_ms(meter),
        round((x.ended_at - x.received_at) * 1000, 3),
        usage.prompt if usage is not None else None,
        usage.cached if usage is not None else None,
        usage.output if usage is not None else meter.tokens if meter is not None else None,
        call.length if call is not None else 0,
        x.bytes_out or (meter.bytes_in if meter is not None else 0),
        x.upstream_request_id,
        cause or "",
        x.trace.text if x.trace is not None else "",
    )
    return _write(line) + b"\n"


def _mean_gap_ms(meter: Metered) -> float | None:
    """Between two tokens of a stream, on average; None where there were no two."""
    gaps = sum(meter.gap_counts)
    return round(meter.gap_sum / gaps * 1000, 3) if gaps else None
