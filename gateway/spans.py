"""A finished request as OpenTelemetry spans: one for the request, one for each wait, one for each attempt.

Names and attributes are those of the semantic conventions for HTTP and for generative AI; what they have no word for is
called `headrace.*`. No prompt, no output, no header is among them, but the prompt of a tenant that is configured so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.errors import Fault
from gateway.exchange import Attempt, Dialect, Exchange
from gateway.timeline import Cause, phase, tpot_s
from gateway.tracecontext import Trace

Value = str | int | float | bool | list[str] | None

OPERATIONS = {
    Dialect.CHAT: "chat",
    Dialect.COMPLETIONS: "text_completion",
    Dialect.RESPONSES: "chat",
    Dialect.MESSAGES: "chat",
}
API_TYPES = {Dialect.CHAT: "chat_completions", Dialect.RESPONSES: "responses"}


class Finished(NamedTuple):
    """A request that is over: `wall` is when, in seconds since the epoch; `cause` why it was not good; `prompt` its
    prompt where it may be shown."""

    exchange: Exchange
    wall: float
    tenant: str
    cause: Cause | None = None
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the configuration tells: the engine of each pool, and what backends call each model."""

    engines: Mapping[str, str] = field(default_factory=dict)
    upstream_names: Mapping[str, str] = field(default_factory=dict)


def spans(finished: Finished, setting: Setting) -> Iterator[Span]:
    """The request's own span first."""
    x = finished.exchange
    assert x.trace is not None
    yield _request(finished, x.trace)
    for number, times in enumerate(x.waits(), len(x.attempts) + 1):
        yield _span(finished, x.trace, number, "queue", times)
    for attempt in x.attempts:
        yield _attempt(finished, x.trace, setting, attempt)


def _request(finished: Finished, trace: Trace) -> Span:
    x = finished.exchange
    span = _span(finished, trace, 0, f"POST {x.endpoint.path}", (x.received_at, x.ended_at), Span.SPAN_KIND_SERVER)
    span.parent_span_id = trace.parent_id.to_bytes(8, "big") if trace.parent_id else b""
    put(
        span,
        {
            "http.request.method": "POST",
            "http.route": x.endpoint.path,
            "url.path": x.endpoint.path,
            "url.scheme": "http",
            "http.response.status_code": x.status or None,
            "error.type": x.outcome if x.fault else None,
            "headrace.request.id": x.request_id,
            "headrace.tenant": finished.tenant,
            "headrace.class": x.class_,
            "headrace.outcome": x.outcome,
            "headrace.slo.cause": finished.cause,
            "headrace.cancel.phase": phase(x) if x.fault is Fault.LEFT else None,
            "headrace.attempts": len(x.attempts),
            "headrace.queue_s": x.queue_wait_s,
            "headrace.config.generation": x.generation,
            "gen_ai.input.messages": finished.prompt or None,
        },
    )
    put(span, _generation(x))
    if x.queued_at:
        _event(span, finished, "queued", x.queued_at)
    for attempt in x.attempts:
        _event(span, finished, "dispatched", attempt.dispatched_at, {"headrace.backend": attempt.backend.name})
    if x.meter is not None and x.meter.first_token_at is not None:
        _event(span, finished, "first_token", x.meter.first_token_at)
    _event(span, finished, "ended", x.ended_at, {"headrace.outcome": x.outcome})
    if x.fault in (Fault.BACKEND, Fault.CAPACITY, Fault.GATEWAY):
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=x.outcome))
    return span


def _attempt(finished: Finished, trace: Trace, setting: Setting, attempt: Attempt) -> Span:
    x, number, backend, decision = finished.exchange, attempt.number, attempt.backend, attempt.decision
    assert x.call is not None
    last = attempt is x.attempts[-1]
    name = f"{_operation(x)} {x.call.label}"
    span = _span(finished, trace, number, name, (attempt.dispatched_at, attempt.ended_at), Span.SPAN_KIND_CLIENT)
    put(
        span,
        {
            "http.request.method": "POST",
            "http.request.resend_count": number - 1 or None,
            "http.response.status_code": attempt.status or None,
            "server.address": backend.host,
            "server.port": backend.port,
            "url.full": backend.name + x.endpoint.path,
            "error.type": attempt.failure or None,
            "gen_ai.provider.name": setting.engines.get(backend.pool, "openai"),
            "openai.api.type": API_TYPES.get(x.endpoint.dialect),
            "headrace.pool": backend.pool,
            "headrace.backend": backend.name,
            "headrace.model.upstream_name": setting.upstream_names.get(x.call.label),
            "headrace.model.revision": backend.revision,
            "headrace.prefix.expected_tokens": decision.cached_tokens,
            "headrace.prefix.uncached_tokens": decision.uncached_tokens,
            "headrace.waited_for": decision.waited_for,
            "headrace.candidates": len(decision.considered),
            "headrace.hedge": attempt.hedge or None,
        },
    )
    if last:
        put(span, _generation(x))
    moments = {"connected": attempt.connected_at, "response_head": attempt.head_at}
    if last and x.meter is not None:
        moments["first_token"] = x.meter.first_token_at or 0.0
    for event, at in moments.items():
        if at:
            _event(span, finished, event, at)
    rejected = last and attempt.status >= 400
    if rejected or (attempt.failure and not attempt.lost and x.fault is not Fault.LEFT):
        message = attempt.failure or f"status {attempt.status}"
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=message))
    return span


def _generation(x: Exchange) -> dict[str, Value]:
    """What the conventions for generative AI want of a request and its answer."""
    call, meter = x.call, x.meter
    if call is None:
        return {}
    told: dict[str, Value] = {
        "gen_ai.operation.name": _operation(x),
        "gen_ai.request.model": call.label,
        "gen_ai.request.stream": call.stream,
        "gen_ai.request.max_tokens": call.max_tokens,
    }
    if meter is None:
        return told
    usage, dispatched = meter.usage, x.attempts[-1].dispatched_at
    if meter.first_token_at is not None:
        told["gen_ai.response.time_to_first_chunk"] = meter.first_token_at - dispatched
        told["headrace.ttft_s"] = x.ttft_s
        told["headrace.tpot_s"] = tpot_s(meter)
    told["gen_ai.response.finish_reasons"] = [meter.finish] if meter.finish else None
    told["gen_ai.usage.input_tokens"] = usage.prompt if usage is not None else None
    told["gen_ai.usage.output_tokens"] = usage.output if usage is not None else meter.tokens
    told["gen_ai.usage.cache_read.input_tokens"] = usage.cached if usage is not None else None
    return told


def _operation(x: Exchange) -> str:
    return OPERATIONS.get(x.endpoint.dialect) or x.endpoint.path.rpartition("/")[2]


def _span(
    finished: Finished,
    trace: Trace,
    number: int,
    name: str,
    times: tuple[float, float],
    kind: Span.SpanKind.ValueType = Span.SPAN_KIND_INTERNAL,
) -> Span:
    """Number 0 is the request's own; the others are its children."""
    return Span(
        trace_id=trace.trace_id.to_bytes(16, "big"),
        span_id=trace.child_id(number).to_bytes(8, "big") if number else trace.span_id.to_bytes(8, "big"),
        parent_span_id=trace.span_id.to_bytes(8, "big") if number else b"",
        trace_state=trace.state.decode("latin-1"),
        name=name,
        kind=kind,
        start_time_unix_nano=_nanoseconds(finished, times[0]),
        end_time_unix_nano=_nanoseconds(finished, times[1]),
    )


def _event(span: Span, finished: Finished, name: str, at: float, attributes: Mapping[str, Value] | None = None) -> None:
    put(span.events.add(time_unix_nano=_nanoseconds(finished, at), name=name), attributes or {})


def put(told: Span | Span.Event | Resource, attributes: Mapping[str, Value]) -> None:
    """Those that have a value. Messages are made where they are to stand: each that is copied costs thrice as much."""
    add = told.attributes.add
    for key, value in attributes.items():
        if value is None:
            continue
        pair = add()
        pair.key = key
        if isinstance(value, str):
            pair.value.string_value = _text(value)
        elif isinstance(value, bool):
            pair.value.bool_value = value
        elif isinstance(value, int):
            pair.value.int_value = value
        elif isinstance(value, float):
            pair.value.double_value = value
        else:
            pair.value.array_value.values.extend(AnyValue(string_value=_text(item)) for item in value)


def _text(value: str) -> str:
    """As UTF-8 can have it: an engine's JSON may hold half of a surrogate pair."""
    return value.encode("utf-8", "replace").decode()


def _nanoseconds(finished: Finished, at: float) -> int:
    """A time on the gateway's monotonic clock as nanoseconds since the epoch."""
    return round((finished.wall - (finished.exchange.ended_at - at)) * 1e9)
