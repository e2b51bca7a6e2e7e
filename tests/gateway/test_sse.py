"""The meter lets every byte through, whole events at a time, and measures what passes."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest

from gateway.dialects import error_frame
from gateway.exchange import Dialect
from gateway.frames import HOLD_BYTES
from gateway.reading import GAP_BOUNDS_S, StreamEnding
from gateway.sse import NO_PATTERN, SNIFF_BYTES, Meter, Sniff, sniff
from policies.types import Usage


def frame(body: Any, name: str = "", ends: str = "\n") -> bytes:
    head = f"event: {name}{ends}" if name else ""
    return f"{head}data: {json.dumps(body)}{ends}{ends}".encode()


def chunk(finish: str | None = None, index: int = 0, **delta: Any) -> bytes:
    return frame({"id": "c", "model": "m", "choices": [{"index": index, "delta": delta, "finish_reason": finish}]})


def numbered(kind: str, number: int, **members: Any) -> bytes:
    body = {**members, "sequence_number": number, "type": kind}
    return f"event: {kind}\ndata: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


ROLE = chunk(role="assistant", content="")
TOKENS = [chunk(content=word) for word in ("One", " two", " three")]
STOP = chunk(finish="stop")
USAGE = frame({"id": "c", "choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}})
DONE = b"data: [DONE]\n\n"
STREAM = b"".join([ROLE, *TOKENS, STOP, USAGE, DONE])


def metered(stream: bytes, dialect: Dialect = Dialect.CHAT, strip_usage: bool = False) -> Meter:
    meter = Meter(dialect, strip_usage=strip_usage)
    assert meter.feed(stream, 1.0) + meter.end(2.0) == stream or strip_usage
    return meter


# -- what goes out, and when --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_whole_events_go_out_as_the_same_object(ends: str) -> None:
    """Nothing is copied where nothing is held: one event, several, content or not."""
    meter = Meter(Dialect.CHAT, strip_usage=True)
    events = [frame({"choices": [{"delta": {"content": word}}]}, ends=ends) for word in ("a", "b", "c")]
    for data in [
        *events,
        events[0] + ends.encode(),
        ends.encode(),
        f": note{ends * 5}".encode(),
        b"".join(events),
        f": note{ends}{ends}".encode(),
        events[0] + f"data: [DONE]{ends * 2}".encode(),
    ]:
        assert meter.feed(data, 1.0) is data
    assert (meter.events, meter.tokens) == (9, 8)


def test_an_unfinished_event_is_held_back_until_it_is_whole() -> None:
    """What goes out always ends on an event boundary."""
    meter = Meter(Dialect.CHAT)
    first, second = TOKENS[0], TOKENS[1]
    assert meter.feed(first + second[:10], 1.0) == first
    assert meter.feed(second[10:20], 2.0) == b""
    assert meter.feed(second[20:] + b"da", 3.0) == second
    assert meter.feed(b"ta: [DONE]\n", 4.0) == b""
    assert meter.feed(b"\n", 5.0) == DONE
    assert (meter.tokens, meter.bytes_in, meter.done) == (2, len(first + second + DONE), True)


def test_a_crlf_is_never_taken_for_two_line_ends() -> None:
    """Cut between CR and LF, an event waits for the LF; what follows begins cleanly."""
    meter = Meter(Dialect.CHAT, strip_usage=True)
    usage = USAGE.replace(b"\n", b"\r\n")
    assert meter.feed(usage[:-3], 1.0) == b""
    assert meter.feed(usage[-3:-1], 1.0) == b""
    assert meter.feed(b"\n" + DONE, 1.0) == DONE


def test_an_event_without_its_blank_line_goes_out_at_the_end() -> None:
    """It is metered as if it were whole, and an error frame could still follow."""
    meter = Meter(Dialect.CHAT)
    assert meter.feed(STOP[:-1], 1.0) == b""
    assert meter.end(2.0) == STOP[:-1]
    assert meter.finish == "stop"
    assert meter.broken() == b"\n\n"


@pytest.mark.parametrize(("before", "passes"), [(TOKENS[0], False), (STOP, True)])
def test_the_beginning_of_an_event_at_the_end_is_dropped_where_the_answer_is_not_complete(
    before: bytes, passes: bool
) -> None:
    """A crash looks like a clean end where the length is not known; the error frame must be the next thing read."""
    meter = Meter(Dialect.CHAT)
    meter.feed(before + TOKENS[1][:30], 1.0)
    assert meter.end(2.0) == (TOKENS[1][:30] if passes else b"")
    assert meter.broken() == (b"\n\n" if passes else b"")


def test_a_break_drops_what_was_held_back() -> None:
    """So that the error frame stands on an event boundary."""
    meter = Meter(Dialect.CHAT)
    assert meter.feed(TOKENS[0] + TOKENS[1][:30], 1.0) == TOKENS[0]
    assert meter.broken() == b""
    assert (meter.tokens, meter.ending) == (1, StreamEnding.TRUNCATED)


def test_a_break_inside_an_event_that_went_out_in_part_closes_it() -> None:
    """A blank line ends the torn event, and the error frame is an event of its own."""
    meter = Meter(Dialect.CHAT)
    data = b'data: {"choices":[{"delta":{"content":"' + b"A" * HOLD_BYTES
    assert meter.feed(data, 1.0) == data
    assert meter.broken() == b"\n\n"
    assert meter.broken() == b""


@pytest.mark.parametrize("piece", [1024, 4096, 10**9])
def test_a_huge_event_passes_as_it_comes(piece: int) -> None:
    """Eight megabytes in one event: unchanged, nothing held longer than the cap, what follows metered as ever."""
    big = b'data: {"choices":[{"delta":{"content":"' + b"QUJD" * 2**21 + b'"},"finish_reason":null}]}\n\n'
    stream = ROLE + big + b"".join(TOKENS) + STOP + DONE
    meter = Meter(Dialect.CHAT)
    passed = 0
    out = []
    for at in range(0, len(stream), piece):
        out.append(meter.feed(stream[at : at + piece], 1.0))
        passed += len(out[-1])
        assert passed >= min(at + piece, len(stream)) - HOLD_BYTES - piece
    assert b"".join(out) == stream
    assert meter.end(2.0) == b""
    assert (meter.events, meter.tokens, meter.finish, meter.parse_errors) == (7, 4, "stop", 0)


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_a_huge_event_ends_at_its_blank_line_however_that_is_cut(ends: str) -> None:
    """The event behind it is an event of its own."""
    big = frame({"choices": [{"delta": {"content": "A" * HOLD_BYTES}}]}, ends=ends)
    stream = big + frame({"choices": [{"delta": {"content": "x"}}]}, ends=ends)
    for back in range(-2, 6):
        meter = Meter(Dialect.CHAT)
        cut = len(big) - back
        assert meter.feed(stream[:cut], 1.0) + meter.feed(stream[cut:], 2.0) == stream
        assert (meter.events, meter.tokens) == (2, 2)


def test_a_huge_event_costs_constant_memory_and_linear_time() -> None:
    """Ten megabytes in pieces of 1 KiB cost twice what five cost (B155)."""

    def feed(megabytes: int) -> float:
        meter = Meter(Dialect.RESPONSES)
        piece = b"A" * 1024
        meter.feed(b'event: response.completed\ndata: {"response":{"output":"', 1.0)
        start = time.process_time()
        for _ in range(megabytes * 1024):
            meter.feed(piece, 1.0)
        cost = time.process_time() - start
        meter.feed(b'","usage":{"input_tokens":9,"output_tokens":4}},"sequence_number":8}\n\n', 1.0)
        assert (meter.usage, meter.finish, meter.done) == (Usage(9, 4), "completed", True)
        assert meter.last_sequence_number == 8
        return cost

    assert min(feed(10) for _ in range(3)) < 2.6 * min(feed(5) for _ in range(3))
    tracemalloc.start()
    feed(5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * HOLD_BYTES


def test_a_trickle_below_the_cap_costs_linear_time() -> None:
    """One byte at a time, up to the size that is held back."""

    def feed(size: int) -> float:
        meter = Meter(Dialect.CHAT)
        meter.feed(b"data: ", 1.0)
        start = time.process_time()
        for _ in range(size):
            meter.feed(b"A", 1.0)
        return time.process_time() - start

    assert min(feed(60_000) for _ in range(3)) < 2.6 * min(feed(30_000) for _ in range(3))


# -- the usage chunk ----------------------------------------------------------------------------------------------


def test_the_usage_chunk_that_the_gateway_asked_for_is_taken_out() -> None:
    """Only that chunk, wherever the bytes are cut (B002, B009)."""
    expected = STREAM.replace(USAGE, b"")
    for cut in range(len(STREAM)):
        meter = Meter(Dialect.CHAT, strip_usage=True)
        out = meter.feed(STREAM[:cut], 1.0) + meter.feed(STREAM[cut:], 2.0) + meter.end(3.0)
        assert out == expected
        assert (meter.usage, meter.tokens) == (Usage(11, 7), 7)


def test_the_usage_chunk_that_the_client_asked_for_stays() -> None:
    """It is counted and passes."""
    assert metered(STREAM).usage == Usage(11, 7)


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {"id": "c", "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {"choices": None, "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {"choices": [], "usage": None},
        {"choices": []},
    ],
)
def test_other_chunks_with_usage_stay(body: dict[str, Any]) -> None:
    """What carries anything else, or is no usage chunk, is not the gateway's to remove (B010)."""
    meter = Meter(Dialect.CHAT, strip_usage=True)
    data = frame(body)
    assert meter.feed(data, 1.0) is data
    assert meter.usage == (Usage(1, 1) if body.get("usage") else None)


def test_a_usage_chunk_without_its_blank_line_is_taken_out_too() -> None:
    """At the end of the stream, and then nothing needs to be closed."""
    meter = Meter(Dialect.CHAT, strip_usage=True)
    assert meter.feed(STOP + USAGE[:-2], 1.0) == STOP
    assert meter.end(2.0) == b""
    assert (meter.usage, meter.broken()) == (Usage(11, 7), b"")


def test_usage_on_every_chunk_counts_as_it_goes() -> None:
    """With `continuous_usage_stats` the last report wins, and a broken stream knows what was delivered."""
    meter = Meter(Dialect.CHAT)
    for n in range(1, 5):
        body = {"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 2 * n}}
        meter.feed(frame(body), float(n))
    assert (meter.tokens, meter.usage) == (8, Usage(9, 8))
    assert sum(meter.gap_counts) == 3


def test_usage_that_never_changes_is_no_pattern() -> None:
    """A report wins over the count of events, on every chunk that carries it."""
    meter = Meter(Dialect.CHAT)
    for text in "abc":
        body = {"choices": [{"delta": {"content": text}}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}
        meter.feed(frame(body), 1.0)
    assert (meter.events, meter.tokens) == (3, 1)


def test_the_last_finish_reason_counts_though_it_was_seen_before() -> None:
    """An event with a finish reason is no pattern either."""
    meter = Meter(Dialect.CHAT)
    for finish, text in (("stop", "a"), ("length", "\t"), ("stop", "b")):
        meter.feed(chunk(finish, content=text), 1.0)
    assert meter.finish == "stop"


def test_output_is_counted_where_the_engine_did_not_get_to_report_it() -> None:
    """A Messages stream that breaks has told the prompt only."""
    meter = Meter(Dialect.MESSAGES)
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 13, "output_tokens": 1}}}
    delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}}
    meter.feed(frame(start, "message_start") + frame(delta, "content_block_delta") * 3, 1.0)
    meter.broken()
    assert (meter.tokens, meter.usage) == (3, Usage(13, 3))


# -- the clocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [{"content": "x"}, {"reasoning_content": "x"}, {"reasoning": "x"}, {"tool_calls": [{"index": 0}]}]
)
def test_the_first_token_is_the_first_content(content: dict[str, Any]) -> None:
    """Not the role, a comment, a control block, an empty event or an error (B006, B007, B147)."""
    calls: list[float] = []
    meter = Meter(Dialect.CHAT, on_first_token=calls.append)
    before = [b": queued\n\n", b"retry: 1000\n\n", b"id: 7\n\n", b"event: ping\n\n", b"data:\n\n", ROLE]
    for at, data in enumerate([*before, frame({"error": {"message": "no"}})]):
        meter.feed(data, float(at))
    assert (meter.first_token_at, calls) == (None, [])
    meter.feed(chunk(**content), 10.0)
    meter.feed(chunk(**content), 11.0)
    assert (meter.first_token_at, calls) == (10.0, [10.0])
    assert (meter.events, meter.tokens, meter.parse_errors) == (4, 2, 0)


def bucket(gap_s: float) -> int:
    return next((i for i, bound in enumerate(GAP_BOUNDS_S) if gap_s <= bound), len(GAP_BOUNDS_S))


def test_gaps_between_tokens_are_counted() -> None:
    """A hundred events 20 ms apart have 99 gaps (B148)."""
    meter = Meter(Dialect.CHAT)
    for n in range(100):
        meter.feed(chunk(content=str(n)), n / 64)
    assert meter.gap_counts[bucket(1 / 64)] == sum(meter.gap_counts) == 99
    assert meter.gap_sum == 99 / 64


def test_tokens_that_come_together_share_their_gap() -> None:
    """Five events in a read after 50 ms are five gaps of 10 ms; those beside the first token have none (B148)."""
    meter = Meter(Dialect.CHAT)
    for n in range(20):
        meter.feed(b"".join(chunk(content=f"{n}.{i}") for i in range(5)), n / 16)
    expected = [0] * len(meter.gap_counts)
    expected[0], expected[bucket(1 / 80)] = 4, 95
    assert meter.gap_counts == expected
    assert meter.gap_sum == 19 / 16


def test_gaps_are_shared_over_all_kinds_of_reads() -> None:
    """Parsed events, events that fit the pattern and the end of a held one count alike."""
    meter = Meter(Dialect.CHAT)
    meter.feed(TOKENS[0], 1.0)
    meter.feed(TOKENS[1] + TOKENS[2][:20], 2.0)
    meter.feed(TOKENS[2][20:] + chunk(reasoning="Hm") + TOKENS[0] + STOP, 2.75)
    assert meter.gap_counts[bucket(1.0)] == 1
    assert meter.gap_counts[bucket(0.25)] == 3
    assert (meter.tokens, meter.gap_sum) == (5, 1.75)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (3.0, 2.0, 1.0), (1.0, 0.5, 1.0)])
def test_gaps_are_never_negative(times: tuple[float, ...]) -> None:
    """Time that stands still or runs back makes gaps of nothing."""
    meter = Meter(Dialect.CHAT)
    for now, data in zip(times, TOKENS, strict=True):
        meter.feed(data, now)
    assert (meter.gap_counts[0], sum(meter.gap_counts), meter.gap_sum) == (2, 2, 0.0)


def test_one_token_has_no_gap() -> None:
    """Nor has none."""
    for stream in (TOKENS[0], ROLE, b""):
        meter = metered(stream)
        assert (sum(meter.gap_counts), meter.gap_sum) == (0, 0.0)


def test_long_gaps_fall_into_the_last_class() -> None:
    """Beyond the last bound."""
    meter = Meter(Dialect.CHAT)
    meter.feed(TOKENS[0], 0.0)
    meter.feed(TOKENS[1], 60.0)
    assert meter.gap_counts[-1] == 1


def test_comments_after_the_finish_reason_are_no_progress() -> None:
    """An upstream that only beats its heart after the answer is over can be closed (B017)."""
    meter = Meter(Dialect.CHAT)
    meter.feed(TOKENS[0], 1.0)
    meter.feed(b": hb\n\n", 2.0)
    assert meter.last_data_at == 2.0
    meter.feed(TOKENS[1][:9], 3.0)
    assert meter.last_data_at == 3.0
    meter.feed(TOKENS[1][9:] + STOP, 4.0)
    meter.feed(b": hb\n\n", 5.0)
    meter.feed(b": h", 6.0)
    meter.feed(b"b", 6.5)
    meter.feed(b"\n\n", 7.0)
    assert (meter.last_data_at, meter.complete) == (4.0, True)
    meter.feed(USAGE, 8.0)
    assert meter.last_data_at == 8.0


# -- how it ended -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "ending"),
    [
        (STREAM, StreamEnding.COMPLETE),
        (ROLE + TOKENS[0] + STOP, StreamEnding.COMPLETE),
        (ROLE + TOKENS[0], StreamEnding.TRUNCATED),
        (ROLE + TOKENS[0] + DONE, StreamEnding.TRUNCATED),
        (b"", StreamEnding.EMPTY),
        (b": hb\n\n", StreamEnding.EMPTY),
        (TOKENS[0] + frame({"error": {"message": "queue full", "code": 503}}) + DONE, StreamEnding.ERROR),
        (STOP + frame({"error": {"message": "late"}}), StreamEnding.ERROR),
        (error_frame(Dialect.MESSAGES, "m", "api_error", "c"), StreamEnding.ERROR),
    ],
)
def test_endings(stream: bytes, ending: StreamEnding) -> None:
    """A finish reason and no error is an answer, with or without [DONE] (B019, B020, B022)."""
    meter = metered(stream)
    assert meter.ending is ending
    assert meter.complete is (ending is StreamEnding.COMPLETE)


def test_other_dialects_are_complete_when_they_end() -> None:
    """They give no finish reason; a break is a break all the same."""
    speech = frame({"type": "speech.audio.delta", "audio": "UklGRg=="})
    assert metered(speech, Dialect.OTHER).ending is StreamEnding.COMPLETE
    meter = Meter(Dialect.OTHER)
    meter.feed(speech, 1.0)
    assert meter.ending is StreamEnding.TRUNCATED


def test_the_first_error_is_kept_up_to_a_cap() -> None:
    """For the log; the event itself passes whole."""
    first = frame({"error": {"message": "x" * 10_000}})
    meter = metered(TOKENS[0] + first + frame({"error": {"message": "second"}}))
    assert meter.error == first[6:][:4096]
    assert metered(frame({"message": "busy"}, "error")).error == b'{"message": "busy"}'


def test_broken_events_are_counted_and_pass() -> None:
    """Half a JSON text, invalid UTF-8 (B026)."""
    broken = b'data: {"choices":[{"delta":{"con\n\n' + b"data: \xff\xfe\n\n"
    meter = metered(TOKENS[0] + broken + TOKENS[1] + STOP + DONE)
    assert (meter.parse_errors, meter.tokens, meter.events, meter.complete) == (2, 2, 6, True)


def test_choices_that_take_turns_are_all_counted() -> None:
    """n=2: the answer is finished when the last choice is, and any reason will do."""
    parts = [chunk(index=i % 2, content=str(i)) for i in range(6)]
    meter = metered(b"".join([*parts, chunk("stop", 0), chunk("length", 1)]))
    assert (meter.tokens, meter.finish, sum(meter.gap_counts)) == (6, "length", 5)


def test_a_stream_that_breaks_with_one_choice_of_two_is_truncated() -> None:
    """However much the other one has; but [DONE] is the engine's word for it, and a repeated choice is over still."""
    both = [chunk(index=0, content="a"), chunk(index=1, content="b")]
    half = b"".join([*both, chunk("stop", 0), chunk(index=1, content="c")])
    assert metered(half).ending is StreamEnding.TRUNCATED
    assert metered(half + DONE).complete
    assert metered(half + chunk("stop", 1) + chunk(index=0)).complete
    big = frame({"choices": [{"index": 1, "delta": {"content": "x" * HOLD_BYTES}, "finish_reason": "stop"}]})
    assert metered(half + big).complete
    for odd in (-1, None, "1", 2**40):
        assert metered(half.replace(b'"index": 1', b'"index": ' + json.dumps(odd).encode())).complete


def test_state_is_visible() -> None:
    """For tests, consoles and debuggers."""
    assert repr(metered(STREAM)) == "<Meter chat [7 events, 7 tokens | complete]>"


# -- the pattern of content events ----------------------------------------------------------------------------------


def test_content_events_are_parsed_once() -> None:
    """Those that differ in their text only fit the pattern, whatever the text is."""
    meter = Meter(Dialect.CHAT)
    meter.feed(chunk(content="Hi"), 1.0)
    pattern = meter._pattern
    for text in ("a", " b", 'say "x"', "\\", "tail\\", "\n", "é", "🙂", "\0", '"', "</s>", "data: x"):
        meter.feed(chunk(content=text), 1.0)
        meter.feed(chunk(content=text).replace(b"\\u", b"\\u") * 3, 1.0)
    assert meter._pattern is pattern
    assert meter.tokens == meter.events == 49


@pytest.mark.parametrize(
    ("data", "tokens", "finish"),
    [
        (chunk(content=""), 1, None),
        (chunk("stop", content="x"), 2, "stop"),
        (chunk(content="x", role="assistant"), 2, None),
        (chunk(content='x"}, "finish_reason": "stop'), 2, None),
        (chunk(content="x").replace(b'"x"', b'"x", "y": "z"'), 2, None),
        (chunk(content="x").replace(b'"x"', b'"x'), 1, None),
        (chunk(content="x").replace(b'"x"', b'"\\q"'), 1, None),
        (chunk(content="x").replace(b'"x"', b'"a\tb"'), 1, None),
        (chunk(content="x").replace(b'"x"', b'"a\ndata: b"'), 1, None),
        (chunk(content="x").replace(b'"x"', b'"a\n\nb"'), 1, None),
        (chunk(content="x").replace(b'"x"', b"null"), 1, None),
        (frame({"error": {"message": "x"}}), 1, None),
        (DONE, 1, None),
    ],
)
def test_only_plain_content_fits_the_pattern(data: bytes, tokens: int, finish: str | None) -> None:
    """The same stream read with and without a pattern gives the same measures."""
    meter, fresh = Meter(Dialect.CHAT), Meter(Dialect.CHAT)
    meter.feed(chunk(content="Hi"), 1.0)
    assert meter.feed(data, 1.0) == data
    fresh.feed(data, 1.0)
    assert (meter.tokens, meter.finish) == (tokens, finish)
    assert (meter.events - 1, meter.parse_errors, meter.error) == (fresh.events, fresh.parse_errors, fresh.error)


def test_a_pattern_leaves_open_nothing_but_the_text() -> None:
    """A text that equals the type of its event makes no pattern that would let another type through."""
    kind = "response.output_text.delta"
    meter = Meter(Dialect.RESPONSES)
    meter.feed(frame({"type": kind, "delta": kind}), 1.0)
    meter.feed(frame({"type": "response.output_text.done", "delta": kind}), 1.0)
    assert (meter.events, meter.tokens) == (2, 1)


def test_nothing_fits_before_there_is_a_pattern() -> None:
    """Not even bytes that no engine sends."""
    meter = Meter(Dialect.CHAT)
    for data in (b"\0x\n\n", b'\0x"\n\n', b"\0x y\n\n", b"\0 \n\n"):
        assert meter.feed(data, 1.0) is data
    assert (meter.events, meter.tokens) == (0, 0)


def test_a_long_event_makes_no_pattern() -> None:
    """Every open stream would have to keep it."""
    meter = Meter(Dialect.CHAT)
    meter.feed(chunk(content="x", padding="y" * 5000), 1.0)
    assert meter._pattern is NO_PATTERN


@pytest.mark.parametrize("order", [("delta", "sequence_number", "type"), ("type", "sequence_number", "delta")])
def test_numbered_events_fit_the_pattern_of_the_next_number(order: tuple[str, ...]) -> None:
    """Responses events differ in their number too, before or behind the text."""
    meter = Meter(Dialect.RESPONSES)
    for number in range(98, 120):
        body = {"delta": f" w{number}", "sequence_number": number, "type": "response.output_text.delta"}
        before, after, _ = meter._pattern
        ordered = json.dumps({key: body[key] for key in order}, separators=(",", ":"))
        meter.feed(f"event: response.output_text.delta\ndata: {ordered}\n\n".encode(), float(number))
        assert meter.last_sequence_number == number
        assert number == 98 or b'"sequence_number":%d' % number in before + after
    assert meter.tokens == 22


def test_the_last_sequence_number_is_that_of_the_last_event() -> None:
    """With and without the pattern, over gaps in the numbers and events without one."""
    kind = "response.output_text.delta"
    meter = Meter(Dialect.RESPONSES)
    assert meter.last_sequence_number is None
    meter.feed(numbered("response.created", 0, response={"usage": None}), 1.0)
    assert meter.last_sequence_number == 0
    for number in (1, 2, 3, 9, 10, 12):
        meter.feed(numbered(kind, number, delta="x"), 1.0)
        assert meter.last_sequence_number == number
    meter.feed(numbered(kind, 13, delta="x") + numbered(kind, 14, delta="y") + numbered("response.x", 15), 1.0)
    assert meter.last_sequence_number == 15
    for _ in range(3):
        meter.feed(frame({"type": kind, "delta": "x"}, kind), 1.0)
    assert (meter.last_sequence_number, meter.tokens, meter.events) == (15, 11, 13)
    for _ in range(3):  # spaced JSON, and a number that does not rise
        meter.feed(frame({"type": kind, "delta": "x", "sequence_number": 16}, kind), 1.0)
        assert meter.last_sequence_number == 16
    meter.feed(numbered(kind, 20, delta="x"), 1.0)
    meter.feed(numbered("response.x", 21), 1.0)
    meter.feed(numbered(kind, 21, delta="x"), 1.0)
    assert (meter.last_sequence_number, meter.tokens, meter.events) == (21, 16, 19)


# -- the first event ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", Sniff.PENDING),
        (b"\n", Sniff.PENDING),
        (frame({"error": {"message": "EngineCore"}})[:-1], Sniff.PENDING),
        (frame({"error": {"message": "EngineCore"}}), Sniff.ERROR),
        (frame({"error": {"message": "EngineCore"}}, ends="\r\n"), Sniff.ERROR),
        (b"\xef\xbb\xbf" + frame({"error": {"message": "EngineCore"}}), Sniff.ERROR),
        (b"\n\n" + frame({"error": {"message": "EngineCore"}}) + DONE, Sniff.ERROR),
        (frame({"type": "overloaded_error"}, "error"), Sniff.ERROR),
        (ROLE, Sniff.FINE),
        (ROLE + frame({"error": {"message": "late"}}), Sniff.FINE),
        (b": queued\n\n" + frame({"error": {"message": "late"}}), Sniff.FINE),
        (b"retry: 1000\n\n", Sniff.FINE),
        (b"event: error\n\n", Sniff.FINE),
        (DONE, Sniff.FINE),
        (b"data: {broken\n\n", Sniff.FINE),
        (b"data: " + b"x" * (SNIFF_BYTES - 6), Sniff.PENDING),
        (b"data: " + b"x" * (SNIFF_BYTES - 5), Sniff.FINE),
    ],
)
def test_the_first_event_is_judged_before_anything_is_committed(data: bytes, expected: Sniff) -> None:
    """Engines that died answer 200 and then say so; a comment is a sign of life."""
    assert sniff(data) is expected
