"""Which requests are traced, and the way of their spans to a collector: OTLP over HTTP.

Nothing on the path waits for it. A finished request that is to be kept goes into a bounded queue; a task builds its
spans a few at a time and sends them together. What finds no room, and what no collector takes, is counted and gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from gateway.metrics import Counter, Family, Gauge
from gateway.spans import Finished, Setting, put, spans
from gateway.tracecontext import Trace, begin

# OpenTelemetry's batch processor: 2048 spans, 512 a batch, 5 s. A trace is about three spans; twice a second bounds
# both what a storm of refusals may cost the loop and how long a trace is waited for.
MAX_WAITING = 2048
BATCH = 512
EXPORT_S = 0.5
SLICE = 16  # requests whose spans are built between two looks of the loop at its streams, about a millisecond
TIMEOUT_S = 5.0
FLUSH_S = 2.0
TRIES = 3
TRANSIENT = (429, 502, 503, 504)  # OTLP 1.9, "Retryable Response Codes"
PATH = "/v1/traces"

logger = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Collector:
    """Where spans go, and as whose: `resource` holds the attributes of this process."""

    url: str
    resource: dict[str, str]

    @property
    def target(self) -> str:
        """The URL of the traces: an endpoint is a base to which their path is added, unless it ends in it."""
        base = self.url.rstrip("/")
        return base if base.endswith(PATH) else base + PATH


class Tracer:
    """`async with tracer` runs the export. Of good requests `share` is kept, of all others everything."""

    def __init__(self, collector: Collector, share: float, rng: Random) -> None:
        self.share = share
        self.setting = Setting()
        self._collector = collector
        self._rng = rng
        self._waiting: deque[Finished] = deque()
        self._task: asyncio.Task[None] | None = None
        self._traces = Counter(
            "headrace_traces_total",
            "Traces by what became of them: exported, dropped (no room), failed (not written, or not taken).",
            "result",
        )

    def __repr__(self) -> str:
        return f"<Tracer {len(self._waiting)} waiting>"

    async def __aenter__(self) -> Tracer:
        self._task = asyncio.get_running_loop().create_task(self._export())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        async with httpx.AsyncClient(timeout=FLUSH_S) as http:
            try:
                async with asyncio.timeout(FLUSH_S):
                    while self._waiting:
                        await self._send_batch(http, tries=1)
            except TimeoutError:
                pass
        self._count("failed", len(self._waiting))
        self._waiting.clear()

    def begin(self, traceparent: bytes, tracestate: bytes) -> Trace:
        """The trace of a request that came with these headers."""
        return begin(traceparent, tracestate, self.share, self._rng)

    def keep(self, finished: Finished) -> bool:
        """Whether a request that is over is going to be seen as a trace."""
        x = finished.exchange
        if x.trace is None or not (x.trace.sampled or x.fault or finished.cause is not None):
            return False
        if len(self._waiting) >= MAX_WAITING:
            self._count("dropped", 1)
            return False
        self._waiting.append(finished)
        return True

    def metrics(self) -> Iterator[Family]:
        """What came of the traces."""
        yield self._traces
        waiting = Gauge("headrace_traces_waiting", "Traces on their way to the collector.", total="sum")
        yield waiting.of({(): len(self._waiting)})

    def _count(self, result: str, number: int) -> None:
        if number:
            self._traces.values[(result,)] += number

    async def _export(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
            while True:
                await asyncio.sleep(EXPORT_S)
                if self._waiting:
                    await self._send_batch(http, TRIES)

    async def _send_batch(self, http: httpx.AsyncClient, tries: int) -> None:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        taken, lost = False, 0
        try:
            built = await self._built(batch)
            lost = built.count([])
            taken = await self._sent(http, self._request(list(chain(*built))), tries)
        finally:
            self._count("failed", lost)
            self._count("exported" if taken else "failed", len(batch) - lost)

    async def _built(self, batch: Sequence[Finished]) -> list[list[Span]]:
        """Those of each; none where they hold what OTLP cannot, which must not be the end of all traces."""
        built: list[list[Span]] = []
        rest = iter(batch)
        while some := list(islice(rest, SLICE)):
            for finished in some:
                try:
                    built.append(list(spans(finished, self.setting)))
                except (ValueError, TypeError) as error:
                    logger.error("request %s cannot be traced: %s", finished.exchange.request_id, error)
                    built.append([])
            await asyncio.sleep(0)
        return built

    def _request(self, built: list[Span]) -> bytes:
        whole = ResourceSpans(scope_spans=[ScopeSpans(spans=built)])
        whole.scope_spans[0].scope.name = "headrace"
        put(whole.resource, self._collector.resource)
        body: bytes = ExportTraceServiceRequest(resource_spans=[whole]).SerializeToString()
        return body

    async def _sent(self, http: httpx.AsyncClient, body: bytes, tries: int) -> bool:
        for number in range(tries):
            if number:
                await asyncio.sleep(EXPORT_S * 2**number)
            try:
                answer = await http.post(
                    self._collector.target, content=body, headers={"content-type": "application/x-protobuf"}
                )
            except httpx.HTTPError:
                continue
            if answer.status_code not in TRANSIENT:
                return answer.is_success
        return False
