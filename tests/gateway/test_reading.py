"""JSON answers pass as they come and are read at their end."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise

import pytest

from gateway.exchange import Dialect
from gateway.reading import GAP_BOUNDS_S, BodyMeter, StreamEnding
from policies.types import Usage

CHAT = {
    "id": "c",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}},
}


def metered(dialect: Dialect, body: bytes, piece: int = 1000) -> BodyMeter:
    meter = BodyMeter(dialect)
    for at in range(0, len(body), piece):
        data = body[at : at + piece]
        assert meter.feed(data, float(at)) is data
    assert meter.end(1e6) == b""
    return meter


@pytest.mark.parametrize("piece", [1, 7, 10**6])
def test_a_chat_answer_is_read_at_its_end(piece: int) -> None:
    """Usage and finish reason, however the bytes were cut; only a stream has a first token."""
    body = json.dumps(CHAT).encode()
    meter = metered(Dialect.CHAT, body, piece)
    assert meter.usage == Usage(9, 3, 8)
    assert (meter.tokens, meter.finish, meter.ending) == (3, "stop", StreamEnding.COMPLETE)
    assert (meter.first_token_at, sum(meter.gap_counts), meter.gap_sum) == (None, 0, 0.0)
    assert meter.bytes_in == len(body)
    assert repr(meter) == "<BodyMeter chat [1 events, 3 tokens | complete]>"


def test_nothing_is_known_before_the_end() -> None:
    """Bytes that are not all here are a truncated answer, and none at all an empty one."""
    meter = BodyMeter(Dialect.CHAT)
    assert meter.ending is StreamEnding.EMPTY
    meter.feed(json.dumps(CHAT).encode(), 1.0)
    assert (meter.ending, meter.usage, meter.last_data_at) == (StreamEnding.TRUNCATED, None, 1.0)
    assert meter.broken() == b""
    assert meter.ending is StreamEnding.TRUNCATED


@pytest.mark.parametrize(
    ("dialect", "body", "ending"),
    [
        (Dialect.CHAT, b"", StreamEnding.EMPTY),
        (Dialect.CHAT, b"null", StreamEnding.TRUNCATED),
        (Dialect.CHAT, b'{"choices":[{"mess', StreamEnding.TRUNCATED),
        (Dialect.CHAT, b'{"error":{"message":"no"}}', StreamEnding.ERROR),
        (Dialect.MESSAGES, b'{"input_tokens":12}', StreamEnding.COMPLETE),
        (Dialect.OTHER, b"plain transcript", StreamEnding.COMPLETE),
        (Dialect.OTHER, b"[[0.5]]", StreamEnding.COMPLETE),
    ],
)
def test_endings_of_whole_answers(dialect: Dialect, body: bytes, ending: StreamEnding) -> None:
    """An answer that is not the JSON object its dialect promises is not complete; other dialects may hold anything."""
    assert metered(dialect, body).ending is ending


def test_a_large_embeddings_answer_has_its_usage_at_the_end() -> None:
    """Five megabytes pass in constant memory, and their last bytes tell the usage."""
    vector = ",".join(["0.0123456789"] * 400_000)
    body = f'{{"object":"list","data":[{{"embedding":[{vector}]}}],"usage":{{"prompt_tokens":6,"total_tokens":6}}}}'
    pieces = [body[at : at + 16_384].encode() for at in range(0, len(body), 16_384)]
    meter = BodyMeter(Dialect.OTHER)
    tracemalloc.start()
    for piece in pieces:
        meter.feed(piece, 1.0)
    meter.end(1.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (meter.usage, meter.ending) == (Usage(6, 0), StreamEnding.COMPLETE)
    assert meter.bytes_in == len(body) > 5_000_000
    assert peak < 300_000


def test_a_large_chat_answer_is_read_from_its_end() -> None:
    """Beyond the size that is kept, the finish reason and the usage are still found."""
    body = json.dumps({**CHAT, "choices": [{"message": {"content": "x" * 200_000}, "finish_reason": "length"}]})
    meter = metered(Dialect.CHAT, body.encode().replace(b'"usage"', b'"service_tier":null,"usage"'))
    assert (meter.usage, meter.finish) == (Usage(9, 3, 8), "length")


def test_bounds_of_gaps_rise_and_hold_usual_objectives() -> None:
    """An objective can only be judged by counts where it is a bound itself."""
    assert all(low < high for low, high in pairwise(GAP_BOUNDS_S))
    assert (GAP_BOUNDS_S[0], GAP_BOUNDS_S[-1]) == (0.001, 10.0)
    assert {0.02, 0.03, 0.05, 0.06, 0.1, 0.2} <= set(GAP_BOUNDS_S)
