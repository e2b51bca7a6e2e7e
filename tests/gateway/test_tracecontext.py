"""W3C trace context: what is joined, what is ignored, what is passed on."""

from __future__ import annotations

from random import Random

import pytest

from gateway.tracecontext import Trace, begin

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01".encode()


def test_the_callers_trace_is_joined() -> None:
    """Its ids become trace and parent; our span has an id of its own."""
    trace = begin(VALID, b"a=1", 0.0, Random(1))
    assert trace.text == TRACE and f"{trace.parent_id:016x}" == SPAN
    assert trace.span_id not in (0, trace.parent_id) and trace.state == b"a=1"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"nonsense",
        VALID[:-1],
        VALID.upper(),
        b"ff" + VALID[2:],
        VALID + b"-more",
        b"00-" + b"0" * 32 + VALID[35:],
        VALID[:36] + b"0" * 16 + b"-01",
    ],
)
def test_what_is_malformed_is_no_parent(sent: bytes) -> None:
    """A new trace begins, and the state that came with it is dropped (W3C Trace Context, 3.2.2 and 4.3)."""
    trace = begin(sent, b"a=1", 0.0, Random(1))
    assert trace.parent_id == 0 and trace.state == b"" and trace.trace_id and trace.text != TRACE


def test_a_later_version_may_say_more() -> None:
    """What follows the flags is not ours to read."""
    assert begin(b"cc" + VALID[2:] + b"-what-the-future-brings", b"", 0.0, Random(1)).text == TRACE


def test_replicas_sample_the_same_traces() -> None:
    """By the id: whoever draws, and whatever the caller's flag says."""
    rng = Random(3)
    heads = [f"00-{rng.getrandbits(128):032x}-{SPAN}-01".encode() for _ in range(2000)]
    chosen = [begin(head, b"", 0.25, Random(1)).sampled for head in heads]
    assert chosen == [begin(head[:-1] + b"0", b"", 0.25, Random(2)).sampled for head in heads]
    assert 440 < sum(chosen) < 560
    assert not any(begin(head, b"", 0.0, rng).sampled for head in heads)
    assert all(begin(head, b"", 1.0, rng).sampled for head in heads)


def test_each_attempt_is_a_parent_of_its_own() -> None:
    """The backend is told of the attempt's span, under our trace, and whether it is kept."""
    trace = Trace(int(TRACE, 16), 2**63 - 1, 7, b"a=1", True)
    first, second, third = (dict(trace.headers(number))[b"traceparent"] for number in (1, 2, 3))
    assert first == f"00-{TRACE}-8000000000000000-01".encode()
    assert len({first, second, third}) == 3 and {len(each) for each in (first, second, third)} == {55}
    assert trace.headers(1)[1] == (b"tracestate", b"a=1")
