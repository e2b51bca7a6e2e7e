"""Traces: what a collector gets of every request. Each test of a public case is named by it."""

from __future__ import annotations

import asyncio
import re
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from gateway.wire import MOST_TOKENS
from tests.faults.fakes import DONE, Fake, FakeConnection, event, healthy, silent, usage_event
from tests.faults.process import DIGEST, KEY, GatewayProcess, pool, times
from tests.faults.rawclient import RawClient, ask, chat
from tests.faults.sink import CLIENT, INTERNAL, SERVER, Sink, attributes, seconds

pytestmark = pytest.mark.anyio

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STREAM_S = 1.0  # a case says 5


def traced(sink: Sink, *urls: str, **settings: Any) -> dict[str, Any]:
    """A pool whose requests are all traced."""
    return pool(*urls, **settings) | {"telemetry": {"otlp": sink.url, "sample": "100%"}}


async def slow_stream(connection: FakeConnection) -> None:
    """Ten tokens over `STREAM_S`, with usage."""
    while True:
        await connection.request()
        await connection.stream_head()
        for number in range(10):
            await connection.chunk(event(f"t{number} "))
            await asyncio.sleep(STREAM_S / 10)
        await connection.chunk(event(finish="stop"))
        await connection.chunk(usage_event(prompt=11, output=10))
        await connection.chunk(DONE)
        await connection.last_chunk()


async def torn_stream(connection: FakeConnection) -> None:
    """The same, but it breaks after `STREAM_S`."""
    await connection.request()
    await connection.stream_head()
    for number in range(10):
        await connection.chunk(event(f"t{number} "))
        await asyncio.sleep(STREAM_S / 10)
    connection.reset()


async def open_stream(connection: FakeConnection) -> None:
    """A token, and then nothing."""
    await connection.request()
    await connection.stream_head()
    await connection.chunk(event("t"))
    await connection.wait_closed()


async def test_b153_every_stream_that_was_left_is_one_ended_span(tmp_path: Path) -> None:
    """Dropped in the middle or before the head: one server span each, soon, with why, and each its own trace."""
    count = len(times(500, 60))
    async with Sink() as sink, Fake(open_stream) as a, Fake(silent) as b:
        config = traced(sink, a.url, concurrency=1024, models={"m": {"pool": "p"}, "mute": {"pool": "mute"}})
        config["pools"]["mute"] = pool(b.url, concurrency=1024)["pools"]["p"]
        async with GatewayProcess(config, tmp_path) as gateway:

            async def dropped() -> None:
                async with RawClient(gateway.port) as client:
                    await client.send(chat(stream=True))
                    await client.response(30, until=b'"t"')

            async def cancelled(hits: int) -> None:
                async with RawClient(gateway.port) as client:
                    await client.send(chat(model="mute"))
                    await gateway.eventually(lambda: b.hits >= hits, "all of them are at the backend", timeout_s=30)

            for start in range(0, count, 20):
                some = min(20, count - start)
                leaving = (cancelled(start + some) for _ in range(some))
                await asyncio.gather(*(dropped() for _ in range(some)), *leaving)
            begun = time.monotonic()
            await gateway.eventually(lambda: len(sink.of_kind(SERVER)) >= 2 * count, "all spans", timeout_s=20)
            assert time.monotonic() - begun < 4.0
            await gateway.settled([a, b], sent=2 * count, outcomes={"client_disconnect": 2 * count})
        spans = sink.of_kind(SERVER)
        assert len(spans) == 2 * count == len({span.trace_id for span in spans})
        assert not any(span.parent_span_id for span in spans)
        told = [attributes(span) for span in spans]
        assert {each["error.type"] for each in told} == {"client_disconnect"}
        # 4xx leaves a server span's status unset, and leaving is no error of an attempt
        assert {span.status.code for span in sink.spans} == {Status.STATUS_CODE_UNSET}
        phases = [each["headrace.cancel.phase"] for each in told]
        assert phases.count("answer") == phases.count("backend") == count
        roots = {span.trace_id: span.span_id for span in spans}
        children = sink.of_kind(CLIENT) + sink.of_kind(INTERNAL)
        assert len(children) == 4 * count
        assert all(child.parent_span_id == roots[child.trace_id] for child in children)


@pytest.mark.parametrize("broken", [False, True])
async def test_b154_the_span_of_a_stream_ends_with_the_stream(tmp_path: Path, broken: bool) -> None:
    """Its duration is the stream's, with the first token, the tokens, and its children inside; at a break too."""
    async with Sink() as sink, Fake(torn_stream if broken else slow_stream) as a:
        async with GatewayProcess(traced(sink, a.url), tmp_path) as gateway:
            begun = time.time()
            answer = await ask(gateway.port, chat(stream=True))
            took = time.time() - begun
            assert (b"[DONE]" in answer.body) is not broken
            await gateway.eventually(lambda: sink.spans, "spans")
            await gateway.settled([a], sent=1)
        (server,), (queue,), (attempt,) = (sink.of_kind(kind) for kind in (SERVER, INTERNAL, CLIENT))
        assert STREAM_S <= seconds(server) <= took + 0.01
        assert begun <= server.start_time_unix_nano / 1e9 + 0.01 < begun + 0.2
        for child in (queue, attempt):
            assert server.start_time_unix_nano <= child.start_time_unix_nano
            assert child.end_time_unix_nano <= server.end_time_unix_nano
        first = next(event for event in server.events if event.name == "first_token")
        assert 0 <= first.time_unix_nano - attempt.start_time_unix_nano < STREAM_S * 0.5e9
        told = attributes(server)
        assert told["gen_ai.usage.output_tokens"] == 10
        assert told.get("gen_ai.usage.input_tokens") == (None if broken else 11)
        assert (server.status.code == Status.STATUS_CODE_ERROR) is broken
        assert told.get("error.type") == ("upstream_truncated" if broken else None)


async def flaky(connection: FakeConnection) -> None:
    """No time now."""
    while True:
        await connection.request()
        await connection.answer(b'{"error":{"message":"busy"}}', "503 Service Unavailable")


async def test_a_retry_is_a_second_client_span_of_the_callers_trace(tmp_path: Path) -> None:
    """One server span under the caller's, one client span per attempt, and each backend was told of its own."""
    async with Sink() as sink, Fake(flaky) as a, Fake(healthy) as b:
        config = traced(sink, a.url, b.url, routing="round_robin")
        config["models"]["m"]["upstream_name"] = "meta/m"
        config["pools"]["p"]["revision"] = "2026-11"
        config["pools"]["p"]["backends"][0]["revision"] = "2026-10"
        async with GatewayProcess(config, tmp_path) as gateway:
            headers = (f"traceparent: {CALLER}", "tracestate: vendor=1", "x-headrace-class: batch")
            begun = time.time_ns()
            answer = await ask(gateway.port, chat(*headers, max_tokens=5))
            if not a.hits:
                answer = await ask(gateway.port, chat(*headers, max_tokens=5))
            assert answer.status == 200
            await gateway.eventually(lambda: sink.spans, "spans")
            await gateway.settled([a, b])
        servers = sink.of_kind(SERVER)
        server = servers[-1]
        attempts = [span for span in sink.of_kind(CLIENT) if span.parent_span_id == server.span_id]
        assert server.trace_id.hex() == CALLER[3:35] and server.parent_span_id.hex() == CALLER[36:52]
        assert begun <= server.start_time_unix_nano <= server.end_time_unix_nano <= time.time_ns()
        assert server.name == "POST /v1/chat/completions" and server.status.code == Status.STATUS_CODE_UNSET
        assert [span.name for span in attempts] == ["chat m", "chat m"]
        first, second = map(attributes, attempts)
        assert attempts[0].status.code == Status.STATUS_CODE_ERROR and first["http.response.status_code"] == 503
        assert attempts[1].status.code == Status.STATUS_CODE_UNSET and second["http.request.resend_count"] == 1
        assert (first["headrace.backend"], second["headrace.backend"]) == (a.url, b.url)
        assert (first["headrace.model.revision"], second["headrace.model.revision"]) == ("2026-10", "2026-11")
        assert [event.name for event in server.events] == ["queued", "dispatched", "dispatched", "ended"]
        times = [event.time_unix_nano for event in server.events]
        assert times == sorted(times) and times[-1] == server.end_time_unix_nano
        assert (
            second
            | {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": "m",
                "gen_ai.request.max_tokens": 5,
                "gen_ai.usage.input_tokens": 11,
                "gen_ai.usage.output_tokens": 7,
                "gen_ai.response.finish_reasons": ["stop"],
                "headrace.model.upstream_name": "meta/m",
                "headrace.pool": "p",
                "headrace.prefix.expected_tokens": 0,
                "headrace.candidates": 1,
                "server.address": "127.0.0.1",
                "server.port": b.port,
                "url.full": b.url + "/v1/chat/completions",
            }
            == second
        )
        told = attributes(server)
        assert second["headrace.prefix.uncached_tokens"] > 0 and first["headrace.candidates"] == 2
        assert told["headrace.class"] == "batch" and told["headrace.config.generation"] == 1
        assert sink.resources[0]["service.name"] == "headrace"


async def test_engines_are_told_of_the_span_that_they_work_for(tmp_path: Path) -> None:
    """The traceparent that reaches a backend is its attempt's; a malformed one is dropped with its tracestate."""
    async with Sink() as sink, Fake(healthy) as a:
        async with GatewayProcess(traced(sink, a.url), tmp_path) as gateway:
            await ask(gateway.port, chat(f"traceparent: {CALLER}", "tracestate: vendor=1"))
            await ask(gateway.port, chat("traceparent: 00-nonsense", "tracestate: vendor=1"))
            kept, begun = a.requests[0], a.requests[1]
            await gateway.eventually(lambda: len(sink.of_kind(CLIENT)) == 2, "spans")
            await gateway.settled([a], sent=2)
        for request, span in zip((kept, begun), sink.of_kind(CLIENT), strict=True):
            assert request.header("traceparent") == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
        assert kept.header("tracestate") == "vendor=1" and begun.header("tracestate") is None
        assert CALLER[3:35] in str(kept.header("traceparent")) not in str(begun.header("traceparent"))


async def test_without_a_collector_the_callers_context_passes_through(gateway: GatewayProcess, a: Fake) -> None:
    """The gateway is then no part of the trace."""
    await ask(gateway.port, chat(f"traceparent: {CALLER}", "tracestate: vendor=1"))
    assert a.requests[0].header("traceparent") == CALLER and a.requests[0].header("tracestate") == "vendor=1"
    await gateway.settled([a], sent=1)


async def test_errors_refusals_and_misses_are_traced_whatever_the_share(tmp_path: Path) -> None:
    """With a share of nothing, good requests leave no span, all others do."""

    async def slow(connection: FakeConnection) -> None:
        await connection.request()
        await asyncio.sleep(0.1)
        await connection.stream_head()
        for each in (event("t"), event(finish="stop"), DONE):
            await connection.chunk(each)
        await connection.last_chunk()

    async with Sink() as sink, Fake(healthy) as a, Fake(slow) as b:
        config = traced(sink, a.url, models={"m": {"pool": "p"}, "strict": {"pool": "slow", "slo": {"ttft": "50ms"}}})
        config["telemetry"]["sample"] = "0%"
        config["pools"]["slow"] = {"backends": [{"url": b.url}]}
        config["pools"]["dead"] = {"backends": [{"url": "http://127.0.0.1:1"}]}
        config["models"]["dead"] = {"pool": "dead"}
        async with GatewayProcess(config, tmp_path) as gateway:
            for model in ("m", "nobody", "dead", "strict"):
                await ask(gateway.port, chat(model=model, stream=model == "strict"))
            await gateway.eventually(lambda: len(sink.of_kind(SERVER)) >= 3, "three traces")
            counted = await gateway.metric("headrace_traces_total", result="exported")
            assert counted == 3
        told = {attributes(span)["headrace.outcome"]: attributes(span) for span in sink.of_kind(SERVER)}
        failed = set(told) - {"model_not_found", "ok"}
        assert failed <= {"upstream_error", "no_backend"} and len(told) == 3  # by whether a probe was there first
        assert told["ok"]["headrace.slo.cause"] == "prefill"


@pytest.mark.parametrize("status", [None, 500, 503])
async def test_a_collector_that_fails_costs_nothing_but_its_traces(tmp_path: Path, status: int | None) -> None:
    """Silent, broken or overloaded: requests are served as fast as ever, and what is lost is counted."""
    async with Sink(status) as sink, Fake(healthy) as a, GatewayProcess(traced(sink, a.url), tmp_path) as gateway:
        await ask(gateway.port, chat())
        await gateway.eventually(lambda: sink.posts, "the collector was asked")
        begun = time.monotonic()
        for _ in range(20):
            assert (await ask(gateway.port, chat())).status == 200
        assert time.monotonic() - begun < 3.0
        lost = 20 if status == 500 else 1

        async def counted() -> bool:
            return await gateway.metric("headrace_traces_total", result="failed") >= lost

        await gateway.eventually(counted, "lost traces are counted", timeout_s=25)
        await gateway.settled([a], sent=21)


async def test_no_number_or_word_ends_the_traces(tmp_path: Path) -> None:
    """A limit of 4,000 digits from a client, half a character as the finish reason of a backend: every request is seen
    by the collector, and so are those that follow."""
    odd = event(finish="odd").replace(b'"odd"', b'"\\ud83d"')

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await connection.stream_head()
            for each in (event("t"), odd, DONE):
                await connection.chunk(each)
            await connection.last_chunk()

    async with Sink() as sink, Fake(script) as a, GatewayProcess(traced(sink, a.url), tmp_path) as gateway:
        for number, limit in enumerate((1, 10**30, 10**4000, 2), start=1):
            assert (await ask(gateway.port, chat(stream=True, max_tokens=limit))).status == 200
            await gateway.eventually(lambda n=number: len(sink.of_kind(SERVER)) == n, "its span is there")  # type: ignore[misc]
        told = attributes(sink.of_kind(SERVER)[1])
        assert told["gen_ai.request.max_tokens"] == MOST_TOKENS
        assert told["gen_ai.response.finish_reasons"] == ["?"]
        await gateway.settled([a])


async def test_prompts_are_in_no_span_but_where_a_tenant_is_configured_so(tmp_path: Path) -> None:
    """The secret word is seen in the traces of one tenant, in its input only."""
    other = "hr-another-key"
    async with Sink() as sink, Fake(healthy) as a:
        digest = sha256(other.encode()).hexdigest()
        config = traced(sink, a.url) | {
            "security": {"secret": "env:SALT"},
            "tenants": {"shy": {"keys": [{"sha256": DIGEST}]}, "open": {"keys": [{"sha256": digest}], "content": True}},
        }
        async with GatewayProcess(config, tmp_path, {"SALT": "x" * 32}) as gateway:
            for key in (KEY, other):
                body = chat(f"Authorization: Bearer {key}", messages=[{"role": "user", "content": "xyzzy"}])
                assert (await ask(gateway.port, body)).status == 200
            await gateway.eventually(lambda: len(sink.of_kind(SERVER)) == 2, "two traces")
        shown = [span for span in sink.spans if b"xyzzy" in span.SerializeToString()]
        assert [attributes(span)["headrace.tenant"] for span in shown] == ["open"]
        assert "xyzzy" in attributes(shown[0])["gen_ai.input.messages"]
        assert not any(key.encode() in span.SerializeToString() for span in sink.spans for key in (KEY, other))


async def test_logs_and_exemplars_lead_to_the_trace(tmp_path: Path) -> None:
    """The id in the log line, and beside the bucket of the histogram, is the trace's."""
    async with Sink() as sink, Fake(healthy) as a, GatewayProcess(traced(sink, a.url), tmp_path) as gateway:
        await ask(gateway.port, chat(stream=True))
        await gateway.eventually(lambda: sink.spans, "spans")
        trace_id = sink.spans[0].trace_id.hex()
        assert [line["trace_id"] for line in gateway.lines] == [trace_id]
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        text = (await gateway._http.get(f"http://127.0.0.1:{gateway.admin_port}/metrics", headers=accept)).text
        shown = re.findall(r'headrace_ttft_seconds_bucket\{[^}]*\} 1 # \{trace_id="(\w+)"\}', text)
        assert shown == [trace_id]
        await gateway.settled([a], sent=1)
