"""Which trace a request belongs to: the W3C Trace Context headers, in and out (https://www.w3.org/TR/trace-context/).

The caller's trace is joined, but whether it is sampled is our own decision: at a public edge anybody could ask for it.
"""

from __future__ import annotations

import re
from random import Random
from typing import NamedTuple

TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
HIGH = 2**64


class Trace(NamedTuple):
    """The ids of a request's span, and of the caller's, 0 if there is none. `sampled`: kept whatever comes of it."""

    trace_id: int
    span_id: int
    parent_id: int = 0
    state: bytes = b""
    sampled: bool = False

    @property
    def text(self) -> str:
        """The trace's id as logs and exemplars have it."""
        return f"{self.trace_id:032x}"

    def child_id(self, number: int) -> int:
        """The id of the span of attempt `number`, or of another child."""
        return self.span_id + number

    def headers(self, number: int) -> list[tuple[bytes, bytes]]:
        """What tells a backend that attempt `number` is its parent."""
        parent = b"00-%032x-%016x-%02x" % (self.trace_id, self.child_id(number), self.sampled)
        return [(b"traceparent", parent), *([(b"tracestate", self.state)] if self.state else [])]


def begin(traceparent: bytes, tracestate: bytes, share: float, rng: Random) -> Trace:
    """The trace of a request that came with these headers, either of them perhaps empty. A traceparent that is not
    well-formed is as good as none, and its tracestate with it. Of the same traces every replica samples the same."""
    trace_id, parent_id = _parent(traceparent.strip()) if traceparent else (0, 0)
    if not trace_id:
        trace_id, tracestate = rng.getrandbits(128) or 1, b""
    sampled = trace_id % HIGH < round(share * HIGH)
    span_id = rng.getrandbits(63) or 1  # a bit is left for the children, whose ids follow
    return Trace(trace_id, span_id, parent_id, tracestate, sampled)


def _parent(value: bytes) -> tuple[int, int]:
    found = TRACEPARENT.fullmatch(value)
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[4]):
        return 0, 0
    trace_id, parent_id = int(found[2], 16), int(found[3], 16)
    return (trace_id, parent_id) if trace_id and parent_id else (0, 0)
