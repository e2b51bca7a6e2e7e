"""The way of spans to the collector."""

from __future__ import annotations

from random import Random

import pytest

from gateway.exchange import Dialect, Endpoint, Exchange
from gateway.metrics import Counter
from gateway.spans import Finished
from gateway.tracing import Collector, Tracer
from tests.faults.sink import Sink

pytestmark = pytest.mark.anyio

CHAT = Endpoint("/v1/chat/completions", Dialect.CHAT, generates=True)


async def test_a_request_that_cannot_be_written_as_spans_is_not_the_end_of_traces() -> None:
    """It is counted, and those beside it and after it arrive."""
    async with Sink() as sink:
        tracer = Tracer(Collector(sink.url, {}), 1.0, Random(1))
        async with tracer:
            for number, status in enumerate((200, -(2**80), 200)):
                x = Exchange(f"req_{number}", 0.0, CHAT, trace=tracer.begin(b"", b""), status=status)
                x.end(1.0)
                assert tracer.keep(Finished(x, 100.0, "t"))
        assert len(sink.spans) == 2
    traces = next(family for family in tracer.metrics() if isinstance(family, Counter))
    assert traces.values == {("exported",): 2, ("failed",): 1}
