"""Random streams, cut at random, against a plain reading of the standard; and recorded streams of real engines."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway import frames, sse
from gateway.exchange import Dialect
from gateway.sse import Meter
from policies.types import Usage

CAPTURES = Path(__file__).parent.parent / "captures"

# -- the oracle: no bytes are saved, nothing is clever ----------------------------------------------------------------


class Block(NamedTuple):
    raw: bytes
    name: bytes
    data: bytes | None


def blocks(stream: bytes) -> tuple[list[Block | bytes], bytes]:
    """Blocks and the blank lines between them, and what is unfinished at the end."""
    found: list[Block | bytes] = []
    raw, name, data = b"", b"", []
    for text, end in re.findall(rb"([^\r\n]*)(\r\n|\r|\n|\Z)", stream):
        if text == b"" and raw == b"":
            found += [end] if end else []
        elif text == b"" and end:
            found.append(Block(raw + end, name, b"\n".join(data) if data else None))
            raw, name, data = b"", b"", []
        else:
            field, colon, value = (text[3:] if raw == b"" and text[:3] == b"\xef\xbb\xbf" else text).partition(b":")
            value = value[1:] if value[:1] == b" " else value
            if field == b"data":
                data.append(value)
            if field == b"event" and colon:
                name = value
            raw += text + end
    if raw:
        found.append(Block(raw, name, b"\n".join(data) if data else None))
    return found, raw


def oracle(stream: bytes) -> dict[str, Any]:
    """What a meter should know after `stream`: `kept` goes out without surplus usage, `passed` with it."""
    got: dict[str, Any] = {"events": 0, "tokens": 0, "content": 0, "finish": None, "error": None, "done": False}
    got |= {"parse_errors": 0, "prompt": None, "output": None, "cached": None, "number": None}
    got |= {"kept": b"", "passed": b"", "begun": set(), "over": set()}
    found, rest = blocks(stream)
    unfinished = rest != b"" or stream.endswith(b"\n\r")  # LF may follow: the CR alone does not end the event yet
    for at, block in enumerate(found):
        surplus = torn = False
        raw = block if isinstance(block, bytes) else block.raw
        if isinstance(block, Block) and block.data:
            errors = got["parse_errors"]
            surplus = note(got, block.name.decode(), block.data)
            torn = at == len(found) - 1 and unfinished and got["parse_errors"] > errors
            torn = torn and not whole(got)
        got["kept"] += b"" if surplus or torn else raw
        got["passed"] += b"" if torn else raw
    return got


def whole(got: dict[str, Any]) -> bool:
    """Whether no choice lacks its end."""
    every = got["done"] or got["begun"] <= got["over"]
    return got["finish"] is not None and got["error"] is None and every


def note(got: dict[str, Any], name: str, data: bytes) -> bool:
    """Adds one event; returns whether it is the surplus usage chunk."""
    got["events"] += 1
    if data.strip()[:6] == b"[DONE]":
        got["done"] = True
        return False
    try:
        body = json.loads(data.decode("utf-8", "replace"))
    except ValueError:
        body = None
    broken = not isinstance(body, dict)
    body = {} if broken else body
    kind = "" if broken else body.get("type") or name
    failed = name == "error" or kind in ("error", "response.failed") or bool(body.get("error"))
    if failed and got["error"] is None:
        got["error"] = data[:4096]
    content = note_choices(got, body) or note_kind(got, kind, body)
    got["parse_errors"] += broken
    got["tokens"] += content
    got["content"] += content
    usage = body.get("usage")
    if kind == "message_start":
        usage = {**body["message"]["usage"], "output_tokens": None}
    if kind in FINAL:
        usage = body["response"].get("usage")
    if usage:
        note_usage(got, usage)
    got["number"] = body.get("sequence_number", got["number"])
    return body.get("choices") == [] and bool(usage) and not failed


FINAL = ("response.completed", "response.incomplete", "response.failed")


def note_choices(got: dict[str, Any], body: dict[str, Any]) -> bool:
    content = False
    for choice in body.get("choices") or []:
        delta = choice.get("delta") or {}
        content |= any(delta.get(key) for key in ("content", "reasoning", "reasoning_content", "refusal", "tool_calls"))
        content |= bool(choice.get("text"))
        got["finish"] = choice.get("finish_reason") or got["finish"]
        got["begun"].add(choice.get("index", 0))
        got["over"] |= {choice.get("index", 0)} if choice.get("finish_reason") else set()
    return content


def note_kind(got: dict[str, Any], kind: str, body: dict[str, Any]) -> bool:
    if kind == "message_delta":
        got["finish"] = body["delta"]["stop_reason"] or got["finish"]
    if kind in FINAL:
        got["finish"] = (body["response"].get("incomplete_details") or {}).get("reason") or body["response"]["status"]
    if kind == "message_stop" or kind in FINAL:
        got["done"] = True
    if kind == "content_block_delta":
        return any(body["delta"].get(key) for key in ("text", "partial_json", "thinking"))
    return kind.endswith(".delta") and bool(body.get("delta"))


def note_usage(got: dict[str, Any], usage: dict[str, Any]) -> None:
    prompt = usage.get("prompt_tokens")
    if usage.get("input_tokens") is not None:
        prompt = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    output = usage.get("completion_tokens", usage.get("output_tokens"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
    for key, value in (("prompt", prompt), ("output", output), ("cached", cached)):
        got[key] = got[key] if value is None else value
    if output is not None:
        got["tokens"] = output


def measures(meter: Meter) -> dict[str, Any]:
    return {
        "events": meter.events,
        "tokens": meter.tokens,
        "content": 0 if meter.first_token_at is None else sum(meter.gap_counts) + 1,
        "finish": meter.finish,
        "error": meter.error,
        "done": meter.done,
        "whole": meter.complete,
        "parse_errors": meter.parse_errors,
        "usage": meter.usage,
        "number": meter.last_sequence_number,
    }


def expected(stream: bytes) -> dict[str, Any]:
    got = oracle(stream)
    prompt, output, cached = got.pop("prompt"), got.pop("output"), got.pop("cached")
    got["whole"] = whole(got)
    del got["kept"], got["passed"], got["begun"], got["over"]
    known = (prompt, output, cached) != (None, None, None)
    usage = Usage(prompt or 0, got["tokens"] if output is None else output, cached) if known else None
    return {**got, "usage": usage}


# -- random streams ---------------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    [
        "data: x",
        '"},"finish_reason":"stop"',
        "response.output_text.delta",
        "\t\0",
        "Hi",
        " a",
        " b",
        "c",
        "",
        "content",
        "m",
        "stop",
        "text_delta",
        'q"',
        "\\",
        "\n",
        "\r\n\r\n",
        "你好🙂é",
        "\ud83d",
    ]
)
COUNTS = st.integers(0, 50)


def chat_bodies() -> st.SearchStrategy[Any]:
    def body(choices: Any, **more: Any) -> dict[str, Any]:
        return {"id": "c", "model": "m", "choices": choices, **more}

    def choice(finish: str | None = None, index: int = 0, **delta: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": finish}

    usage = st.builds(
        lambda p, o, c: {"prompt_tokens": p, "completion_tokens": o, "prompt_tokens_details": c},
        COUNTS,
        COUNTS,
        st.none() | st.builds(lambda n: {"cached_tokens": n}, COUNTS),
    )
    content = st.builds(lambda text: body([choice(content=text)]), TEXTS)
    return st.one_of(
        content,
        content,
        content,
        st.builds(lambda a, b: body([choice(content=a), choice(None, 1, content=b)]), TEXTS, TEXTS),
        st.builds(lambda text, i: body([choice(None, i, content=text)]), TEXTS, st.integers(0, 3)),
        st.builds(lambda text: body([choice(role="assistant", content=text)]), TEXTS),
        st.builds(lambda text: body([choice(content=None, reasoning_content=text)]), TEXTS),
        st.builds(lambda text: body([choice(tool_calls=[{"index": 0, "function": {"arguments": text}}])]), TEXTS),
        st.builds(lambda text: body([{"index": 0, "text": text, "finish_reason": None}]), TEXTS),
        st.builds(lambda text, word: body([choice(word, content=text)]), TEXTS, st.sampled_from(["stop", "length"])),
        st.builds(lambda text, u: body([choice(content=text)], usage=u), TEXTS, usage),
        st.builds(lambda u: body([], usage=u), usage | st.none()),
        st.builds(lambda u: {"id": "c", "usage": u}, usage),
        st.sampled_from([body(None), body([{}]), body([]), {}, body([{"delta": None}])]),
        st.builds(lambda text: {"error": {"message": text}}, TEXTS),
    )


def messages_bodies() -> st.SearchStrategy[Any]:
    usage = st.builds(
        lambda i, c: {"input_tokens": i, "output_tokens": 1, "cache_read_input_tokens": c}, COUNTS, COUNTS
    )
    delta = st.builds(
        lambda key, text: {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", key: text}},
        st.sampled_from(["text", "text", "text", "thinking", "partial_json", "signature"]),
        TEXTS,
    )
    return st.one_of(
        delta,
        delta,
        st.builds(lambda u: {"type": "message_start", "message": {"usage": u}}, usage),
        st.builds(
            lambda word, n: {"type": "message_delta", "delta": {"stop_reason": word}, "usage": {"output_tokens": n}},
            st.sampled_from([None, "end_turn"]),
            COUNTS,
        ),
        st.sampled_from([{"type": "ping"}, {"type": "message_stop"}, {"type": "content_block_stop", "index": 0}]),
        st.builds(lambda text: {"type": "error", "error": {"type": "api_error", "message": text}}, TEXTS),
    )


def responses_bodies() -> st.SearchStrategy[Any]:
    kinds = st.sampled_from(["response.output_text", "response.output_text", "response.function_call_arguments"])
    ends = st.sampled_from(["response.completed", "response.incomplete", "response.failed"])
    usage = st.builds(
        lambda i, o: {"input_tokens": i, "output_tokens": o, "input_tokens_details": {"cached_tokens": 1}},
        COUNTS,
        COUNTS,
    )
    delta = st.builds(lambda kind, text: {"delta": text, "item_id": "i", "type": f"{kind}.delta"}, kinds, TEXTS)
    return st.one_of(
        delta,
        delta,
        st.builds(lambda kind, text: {"text": text, "type": f"{kind}.done"}, kinds, TEXTS),
        st.builds(lambda kind, u: {"type": kind, "response": {"status": kind[9:], "usage": u}}, ends, usage),
        st.builds(lambda text: {"type": "error", "message": text, "code": "c"}, TEXTS),
    )


BODIES = {Dialect.CHAT: chat_bodies(), Dialect.MESSAGES: messages_bodies(), Dialect.RESPONSES: responses_bodies()}
STYLES: list[dict[str, Any]] = [{"separators": (",", ":")}, {"separators": (",", ":"), "ensure_ascii": False}, {}]
STYLES += [{"indent": 1}]
ODD_BLOCKS = [": note", "retry: 1000", "id: 7", "event: ping", "data:", "data", "", "\n", "data: [DONE]", "data:[DONE]"]
ODD_BLOCKS += ['data: {"choices":[{"delta":{"con', "data: null", "data: \ud800\ud801", "event: error\ndata: died"]


@st.composite
def streams(draw: st.DrawFn, ends: st.SearchStrategy[str]) -> tuple[Dialect, bytes]:
    """A stream of one dialect in one style of JSON; each line end is drawn from `ends`."""
    dialect = draw(st.sampled_from(list(BODIES)))
    style = draw(st.sampled_from(STYLES))
    space = draw(st.sampled_from([" ", ""]))
    named = dialect is not Dialect.CHAT and draw(st.booleans())
    wild = draw(st.booleans())
    lines = []
    for number in range(draw(st.integers(0, 8))):
        if wild and draw(st.integers(0, 3)) == 0:
            lines += draw(st.sampled_from(ODD_BLOCKS)).split("\n")
        else:
            body = draw(BODIES[dialect])
            if dialect is Dialect.RESPONSES and draw(st.integers(0, 9)):
                body["sequence_number"] = number
            lines += [f"event:{space}{body['type']}"] if named else []
            lines += [f"data:{space}{line}" for line in json.dumps(body, **style).split("\n")]
        lines.append("")
    text = "".join(line + draw(ends) for line in lines)
    stream = ("\ufeff" * draw(st.booleans()) + text).encode("utf-8", "surrogatepass")
    return dialect, stream[: len(stream) - draw(st.sampled_from([0, 0, 0, 1, 2, 3, 9]))]


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    points = sorted({0, len(stream), *(at % (len(stream) + 1) for at in cuts)})
    return [stream[low:high] for low, high in pairwise(points)]


CUTS = st.lists(st.integers(0, 10**6), max_size=12)
ANY_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
STEADY = settings(derandomize=True, deadline=None, max_examples=200)
ONE_END = ANY_ENDS.flatmap(lambda end: streams(st.just(end)))


@STEADY
@given(streams(ANY_ENDS) | ONE_END, CUTS)
@example((Dialect.CHAT, b"data: a\r\n\r\ndata: b\n\r\n\r\r"), list(range(30)))
def test_streams_pass_unchanged_on_boundaries_and_are_measured(drawn: tuple[Dialect, bytes], cuts: list[int]) -> None:
    """Any line ends, cut anywhere: all bytes, whole events only, and the oracle's measures."""
    dialect, stream = drawn
    meter = Meter(dialect)
    out = b""
    for at, data in enumerate(cut(stream, cuts)):
        out += meter.feed(data, float(at))
        assert stream.startswith(out)
        assert blocks(out)[1] == b""
    assert out + meter.end(1e3) == oracle(stream)["passed"]
    assert measures(meter) == expected(stream)
    assert meter.bytes_in == len(stream)


@STEADY
@given(streams(ANY_ENDS))
def test_streams_cut_into_bytes_are_measured_alike(drawn: tuple[Dialect, bytes]) -> None:
    """One byte at a time: characters, line ends and keys all cut (B001, B002)."""
    dialect, stream = drawn
    meter = Meter(dialect)
    out = b"".join(meter.feed(stream[at : at + 1], float(at)) for at in range(len(stream)))
    assert out + meter.end(1e6) == oracle(stream)["passed"]
    assert measures(meter) == expected(stream)


@STEADY
@given(ONE_END, CUTS)
def test_only_usage_chunks_are_taken_out(drawn: tuple[Dialect, bytes], cuts: list[int]) -> None:
    """The rest passes byte for byte, and everything is measured as before."""
    dialect, stream = drawn
    meter = Meter(dialect, strip_usage=True)
    out = b"".join(meter.feed(data, float(at)) for at, data in enumerate(cut(stream, cuts)))
    assert out + meter.end(1e3) == oracle(stream)["kept"]
    assert measures(meter) == expected(stream)


@STEADY
@given(streams(ANY_ENDS), CUTS)
def test_a_break_anywhere_leaves_an_event_boundary(drawn: tuple[Dialect, bytes], cuts: list[int]) -> None:
    """After the end of the bytes, or in the middle of them, an error frame can follow."""
    dialect, stream = drawn
    for ended in (False, True):
        meter = Meter(dialect)
        out = b"".join(meter.feed(data, float(at)) for at, data in enumerate(cut(stream, cuts)))
        out += meter.end(1e3) if ended else b""
        assert blocks(out + meter.broken())[1] == b""
        assert stream.startswith(out)


EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(list(b'"\\,:{}[]x \n\r\0u0\xff'))), max_size=4)


@STEADY
@given(
    st.sampled_from(list(BODIES)).flatmap(lambda d: st.tuples(st.just(d), st.lists(BODIES[d]))),
    EDITS,
    st.lists(st.integers(0, 10**6), max_size=1),
)
def test_the_pattern_changes_no_measure(drawn: tuple[Dialect, list[Any]], edits: list[Any], cuts: list[int]) -> None:
    """Streams damaged byte by byte: the same with the pattern and with every event parsed."""
    dialect, bodies = drawn
    numbered = [
        body | {"sequence_number": n} if dialect is Dialect.RESPONSES else body for n, body in enumerate(bodies)
    ]
    text = "".join(f"data: {json.dumps(body, separators=(',', ':'))}\n\n" for body in numbered for _ in range(2))
    damaged = bytearray(text.encode())
    for at, byte in edits:
        if damaged:
            damaged[at % len(damaged)] = byte
    stream = bytes(damaged)
    meter, plain = Meter(dialect), Meter(dialect)
    pieces = cut(stream, [*cuts, *(blank.end() for blank in re.finditer(b"\n\n", stream))])
    out = b"".join(meter.feed(data, 1.0) for data in pieces) + meter.end(1.0)
    with mock.patch.object(sse, "PATTERN_BYTES", 0):
        assert plain.feed(stream, 1.0) + plain.end(1.0) == out
    assert measures(meter) == measures(plain)


@STEADY
@given(ONE_END, CUTS, st.integers(8, 200))
def test_oversize_events_are_measured_alike_however_they_are_cut(
    drawn: tuple[Dialect, bytes], cuts: list[int], cap: int
) -> None:
    """With a cap so small that events exceed it, all bytes pass, and the measures do not depend on the cuts."""
    dialect, stream = drawn
    with (
        mock.patch.object(sse, "HOLD_BYTES", cap),
        mock.patch.object(frames, "HEAD_BYTES", cap // 2),
        mock.patch.object(frames, "TAIL_BYTES", max(4, cap // 2)),
    ):
        whole, meter = Meter(dialect), Meter(dialect)
        passed = whole.feed(stream, 1.0) + whole.end(2.0)
        out = [meter.feed(data, float(at)) for at, data in enumerate(cut(stream, cuts))]
        assert b"".join(out) + meter.end(1e3) == passed
        assert stream.startswith(passed) and len(stream) - len(passed) <= cap
    assert measures(meter) == measures(whole)


# -- recorded streams -------------------------------------------------------------------------------------------------

RECORDED = [
    ("dynamo-chat", Dialect.CHAT, 4, "length", Usage(13, 4, 0), "complete"),
    ("llamacpp-chat", Dialect.CHAT, 4, "length", Usage(23, 4, 0), "complete"),
    ("vllm-0.32-chat", Dialect.CHAT, 4, "length", Usage(13, 4, 0), "complete"),
    ("vllm-0.32-engine-death", Dialect.CHAT, 0, None, None, "error"),
    ("vllm-0.32-messages", Dialect.MESSAGES, 3, "max_tokens", Usage(13, 3, 0), "complete"),
    ("vllm-0.32-responses", Dialect.RESPONSES, 3, "max_output_tokens", Usage(13, 3, 0), "complete"),
]
CONTENT = {"dynamo-chat": 4, "llamacpp-chat": 4, "vllm-0.32-chat": 4, "vllm-0.32-messages": 3, "vllm-0.32-responses": 2}
FIRST = {"llamacpp-chat": 1, "vllm-0.32-chat": 1, "vllm-0.32-messages": 2, "vllm-0.32-responses": 4}


def recorded(name: str) -> bytes:
    data = (CAPTURES / f"{name}-stream.txt").read_bytes()
    return data.partition(b"\r\n\r\n")[2] if data.startswith(b"HTTP/") else data


@pytest.mark.parametrize(("name", "dialect", "tokens", "finish", "usage", "ending"), RECORDED)
def test_recorded_streams_pass_and_are_measured_right(
    name: str, dialect: Dialect, tokens: int, finish: str | None, usage: Usage | None, ending: str
) -> None:
    """Streams of real engines, an event per read, whole, in pieces and in bytes."""
    stream = recorded(name)
    for size in (1, 2, 3, 7, 50, 333, len(stream)):
        meter = Meter(dialect)
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert b"".join(meter.feed(data, 1.0) for data in pieces) + meter.end(2.0) == stream
        assert (meter.tokens, meter.finish, meter.usage, meter.ending) == (tokens, finish, usage, ending)
        assert (meter.done, meter.parse_errors) == (True, 0)
        assert sum(meter.gap_counts) == max(0, CONTENT.get(name, 0) - 1)
        assert measures(meter) == expected(stream)


@pytest.mark.parametrize("name", [row[0] for row in RECORDED])
def test_the_first_token_of_recorded_streams(name: str) -> None:
    """An event per read: roles and frames around the content come before it."""
    meter = Meter({row[0]: row[1] for row in RECORDED}[name])
    for at, event in enumerate(re.findall(rb".*?\n\n", recorded(name), re.DOTALL)):
        assert meter.feed(event, float(at)) == event
    assert meter.first_token_at == (FIRST.get(name, 0) if name in CONTENT else None)


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("prefix", [b"data: ", b"data:"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_one_stream_in_all_legal_forms_is_measured_alike(ends: bytes, prefix: bytes, bom: bytes) -> None:
    """Line ends, the optional space and a byte order mark change nothing (B003)."""
    plain = recorded("vllm-0.32-chat")
    stream = bom + plain.replace(b"data: ", prefix).replace(b"\n", ends)
    meter, reference = Meter(Dialect.CHAT), Meter(Dialect.CHAT)
    reference.feed(plain, 1.0)
    for at in range(0, len(stream), 100):
        meter.feed(stream[at : at + 100], 1.0)
    assert measures(meter) == measures(reference)


def test_the_death_of_an_engine_is_seen_in_its_first_event() -> None:
    """vLLM answers 200 and then says that its core is gone: known before anything is committed."""
    death = recorded("vllm-0.32-engine-death")
    verdicts = [sse.sniff(death[:size]) for size in range(len(death) + 1)]
    first = death.index(b"\n\n") + 2
    assert set(verdicts[:first]) == {sse.Sniff.PENDING}
    assert set(verdicts[first:]) == {sse.Sniff.ERROR}
    assert all(sse.sniff(recorded(row[0])) is sse.Sniff.FINE for row in RECORDED if row[5] == "complete")
