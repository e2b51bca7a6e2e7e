"""The log line of a request."""

from __future__ import annotations

import msgspec

from gateway.exchange import Exchange, Metered
from gateway.timeline import Cause
from policies.types import Usage

_write = msgspec.json.Encoder().encode


class RequestLine(msgspec.Struct, gc=False):
    """The log line of one request. MEANINGS tells what each field is."""

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
    cause: str
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
    trace_id: str
    event: str = "request"


MEANINGS = {
    "time": "when it ended, in seconds since the epoch",
    "level": "`info` if all went well, else `warning`",
    "request_id": "the id that the client sent or was given, in `x-request-id`",
    "path": "the endpoint",
    "tenant": "who asked; empty where no key was recognised, or the request was refused before",
    "model": "the configured name, `other` for one that only `*` stands for; empty where there is none",
    "class": "the class it ran in",
    "stream": "whether a stream was asked for",
    "status": "the HTTP status; 499 for a client that left",
    "outcome": "`ok`, or the word of `x-headrace-reason`; the label of `headrace_requests_total`",
    "cause": "why it was not good by the objectives of its model, see docs/metrics.md; empty if it was",
    "backend": "the URL of the last one that was tried; empty where none was",
    "attempts": "how many were tried",
    "queue_ms": "spent waiting for backends",
    "ttft_ms": "until the first token of a stream, all waiting included; null for whole answers",
    "itl_ms": "the mean gap between two tokens; null where there were no two",
    "total_ms": "from accept to the last byte",
    "tokens_in": "tokens of the prompt as the engine reports them; null where it does not",
    "tokens_cached": "how many of them were in its prefix cache",
    "tokens_out": "tokens of the answer, counted by the gateway where the engine does not report them",
    "bytes_in": "length of the request's body",
    "bytes_out": "length of the answer's body",
    "upstream_request_id": "the `x-request-id` of the backend's answer",
    "trace_id": "of the trace it belongs to, where there is a collector; whether that was kept is the share's to say",
    "event": "always `request`",
}


def request_line(x: Exchange, usage: Usage | None, wall: float, cause: Cause | None, queue_s: float) -> bytes:
    """One line of JSON about a request that ended at `wall`: `usage` is its meter's, `cause` why it was not good,
    `queue_s` what it has waited."""
    call, meter, ttft_s = x.call, x.meter, x.ttft_s
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
        cause or "",
        x.attempts[-1].backend.name if x.attempts else "",
        len(x.attempts),
        round(queue_s * 1000, 3),
        None if ttft_s is None else round(ttft_s * 1000, 3),
        None if ttft_s is None or meter is None else _mean_gap_ms(meter),
        round((x.ended_at - x.received_at) * 1000, 3),
        usage.prompt if usage is not None else None,
        usage.cached if usage is not None else None,
        usage.output if usage is not None else meter.tokens if meter is not None else None,
        call.length if call is not None else 0,
        x.bytes_out or (meter.bytes_in if meter is not None else 0),
        x.upstream_request_id,
        x.trace.text if x.trace is not None else "",
    )
    return _write(line) + b"\n"


def _mean_gap_ms(meter: Metered) -> float | None:
    """Between two tokens of a stream, on average; None where there were no two."""
    gaps = sum(meter.gap_counts)
    return round(meter.gap_sum / gaps * 1000, 3) if gaps else None
