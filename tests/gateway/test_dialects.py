"""What events and answers mean, dialect by dialect, and the frames that say that a stream broke."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects import error_frame, glimpse, glimpse_answer, read, read_answer
from gateway.exchange import Dialect
from gateway.usage import Counts, counts_in, last_counts

CHAT_USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}


def event(body: Any, name: str = "") -> Any:
    return read(name.encode(), json.dumps(body).encode())


def delta(**members: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": members, "finish_reason": None}]}


@pytest.mark.parametrize(
    "body",
    [
        delta(content="Hi"),
        delta(role="assistant", content="Hi"),
        delta(content=None, reasoning_content="Hm"),
        delta(reasoning="Hm"),
        delta(refusal="No"),
        delta(content=[{"type": "text", "text": "Hi"}]),
        delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]),
        delta(function_call={"name": "f", "arguments": ""}),
        {"choices": [{"index": 0, "text": "Hi"}]},
        {"choices": [{"index": 0, "delta": {"content": ""}}, {"index": 1, "delta": {"content": "x"}}]},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": "{"}},
        {"type": "response.output_text.delta", "delta": "Hi", "sequence_number": 4},
        {"type": "response.function_call_arguments.delta", "delta": '{"a'},
        {"type": "response.reasoning_text.delta", "delta": "Hm"},
        {"type": "transcript.text.delta", "delta": "Hi"},
        {"type": "speech.audio.delta", "audio": "UklGRg=="},
    ],
)
def test_content_is_what_the_model_generated(body: dict[str, Any]) -> None:
    """Text, thoughts, refusals and tool calls of every dialect."""
    assert event(body).content


@pytest.mark.parametrize(
    "body",
    [
        delta(role="assistant", content=""),
        delta(role="assistant", content=None),
        delta(),
        delta(content="", reasoning_content=None, tool_calls=[], refusal=None),
        {"choices": [{"index": 0, "text": "", "finish_reason": None}]},
        {"choices": [{}]},
        {"choices": [None, 7, "x"]},
        {"choices": [{"delta": None}]},
        {"choices": []},
        {"choices": None},
        {"id": "x"},
        {"error": {"message": "no"}},
        {"type": "ping"},
        {"type": "message_start", "message": {"content": []}},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": ""}},
        {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "EqQ"}},
        {"type": "content_block_delta", "delta": None},
        {"type": "response.created", "response": {"output": []}},
        {"type": "response.output_text.delta", "delta": ""},
        {"type": "response.output_text.done", "text": "Hi"},
        {"type": ["response.output_text.delta"], "delta": "Hi"},
    ],
)
def test_what_is_not_content(body: dict[str, Any]) -> None:
    """Roles, empty pieces, frames around content and oddities are no token."""
    assert not event(body).content


def test_the_name_stands_in_for_a_missing_type() -> None:
    """Some engines name the event only."""
    assert event({"delta": "Hi"}, "response.output_text.delta").content


@pytest.mark.parametrize("text", ["[DONE]", "[DONE] ", " [DONE]", "[DONE]\n"])
def test_done_is_no_json_and_no_error(text: str) -> None:
    """The terminator of OpenAI streams."""
    got = read(b"", text.encode())
    assert (got.done, got.broken, got.content, got.finish) == (True, False, False, None)


@pytest.mark.parametrize("data", [b'{"choices":[{"delta":{"con', b"\xff\xfe", b"null", b"[1]", b'"x"', b"[" * 50_000])
def test_what_is_not_a_json_object_is_broken(data: bytes) -> None:
    """It is counted, whatever it is; it is no error event."""
    got = read(b"", data)
    assert (got.broken, got.error, got.content) == (True, False, False)


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[{"delta":{"content":"\\ud83d"},"finish_reason":"stop"}]}',
        b'{"choices":[{"delta":{"content":"\xff"},"finish_reason":"stop"}]}',
        b'{"choices":[{"delta":{"content":"x"},"logprobs":-Infinity,"finish_reason":"stop"}]}',
        b'{"choices":[{"delta":{"content":"x"},"logprobs":1e400,"finish_reason":"stop"}]}',
    ],
)
def test_json_that_clients_forgive_is_read(data: bytes) -> None:
    """Half a surrogate pair, invalid UTF-8, numbers that are none: Python's and Node's clients read on."""
    got = read(b"", data)
    assert (got.broken, got.content, got.finish) == (False, True, "stop")


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("", {"error": {"message": "queue full", "code": 503}}),
        ("", {"error": "queue full"}),
        ("error", {"message": "queue full"}),
        ("error", {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}),
        ("", {"type": "error", "code": "server_error", "message": "busy", "param": None, "sequence_number": 3}),
        ("", {"type": "response.failed", "response": {"status": "failed", "error": {"code": "server_error"}}}),
        ("", {"object": "error", "message": "busy", "code": 500}),
    ],
)
def test_error_events_of_every_dialect(name: str, body: dict[str, Any]) -> None:
    """By a member, by the name of the event, or by its type."""
    assert event(body, name).error


def test_a_named_error_need_not_be_json() -> None:
    """`event: error` says enough."""
    got = read(b"error", b"engine died")
    assert (got.error, got.broken) == (True, True)


@pytest.mark.parametrize("value", [None, False, "", {}])
def test_an_empty_error_member_is_no_error(value: object) -> None:
    """The SDKs ask whether it is true."""
    assert not event({**delta(content="x"), "error": value}).error


@pytest.mark.parametrize(
    ("body", "finish", "done"),
    [
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, "stop", False),
        ({"choices": [{"finish_reason": None}, {"finish_reason": "length"}]}, "length", False),
        ({"choices": [{"delta": {}, "finish_reason": 3}]}, None, False),
        ({"choices": [{"delta": {}, "finish_reason": "x" * 1000}]}, "x" * 64, False),
        ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, "end_turn", False),
        ({"type": "message_stop"}, None, True),
        ({"type": "response.completed", "response": {"status": "completed"}}, "completed", True),
        (
            {"type": "response.completed", "response": {"incomplete_details": {"reason": "max_output_tokens"}}},
            "max_output_tokens",
            True,
        ),
        ({"type": "response.incomplete", "response": None}, "incomplete", True),
        ({"type": "response.failed", "response": {"status": "failed"}}, "failed", True),
        ({"type": "transcript.text.done", "text": "Hi"}, "done", True),
    ],
)
def test_finish_reasons(body: dict[str, Any], finish: str | None, done: bool) -> None:
    """The word that the engine gives, or the last word of the event's type."""
    got = event(body)
    assert (got.finish, got.done) == (finish, done)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (CHAT_USAGE, Counts(9, 3)),
        ({**CHAT_USAGE, "prompt_tokens_details": {"cached_tokens": 8}}, Counts(9, 3, 8)),
        ({**CHAT_USAGE, "prompt_tokens_details": None}, Counts(9, 3)),
        ({"prompt_tokens": 9, "total_tokens": 9}, Counts(9)),
        ({"total_tokens": 9}, Counts(9)),
        ({"input_tokens": 9, "output_tokens": 3}, Counts(9, 3)),
        ({"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}, Counts(9, 3, 4)),
        (
            {"input_tokens": 2, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 1, "output_tokens": 3},
            Counts(9, 3, 6),
        ),
        ({"output_tokens": 3}, Counts(None, 3)),
        ({}, None),
        (None, None),
        ([], None),
        ("x", None),
        ({"type": "duration", "seconds": 3}, None),
        ({"prompt_tokens": "9"}, None),
        ({"prompt_tokens": -9}, None),
        ({"prompt_tokens": 10**40}, None),
    ],
)
def test_usage_of_every_dialect(usage: object, counts: Counts | None) -> None:
    """The prompt includes what came from the cache, as OpenAI counts; Anthropic leaves that out of `input_tokens`."""
    assert counts_in(usage) == counts


def test_later_usage_wins_and_earlier_usage_fills() -> None:
    """Anthropic gives the prompt at the start and the output at the end."""
    assert Counts(None, 3).over(Counts(9, None, 4)) == Counts(9, 3, 4)
    assert Counts(10, 5).over(Counts(9, 3)) == Counts(10, 5)
    assert Counts(9).over(None) == Counts(9)


def test_usage_of_a_message_start_counts_the_prompt_only() -> None:
    """Its output tokens are where the count begins."""
    got = event({"type": "message_start", "message": {"usage": {"input_tokens": 13, "output_tokens": 1}}})
    assert got.counts == Counts(13)


def test_the_last_usage_is_found_among_properties_of_that_name() -> None:
    """Tool schemas stand in Responses objects as raw JSON and may have a property `usage`, even after the real one."""
    schema = b'{"properties":{"usage":{"type":"string"}}}'
    assert last_counts(b'x,"usage": {"input_tokens":9,"output_tokens":3},"tools":[' + schema + b"]}") == Counts(9, 3)
    assert last_counts(b"[" + schema + b',{"usage":{"input_tokens":9,"output_tokens":3}},' + schema) == Counts(9, 3)
    assert last_counts(b'"content":"\\"usage\\":{\\"input_tokens\\":1}"') is None
    assert last_counts(b'"usage":{"input_tokens":') is None


@pytest.mark.parametrize(
    ("body", "surplus"),
    [
        ({"choices": [], "usage": CHAT_USAGE}, True),
        ({"id": "x", "choices": [], "usage": CHAT_USAGE, "timings": {"predicted_n": 3}}, True),
        ({"choices": [{"index": 0, "delta": {}}], "usage": CHAT_USAGE}, False),
        ({"choices": [], "usage": None}, False),
        ({"choices": [], "prompt_filter_results": []}, False),
        ({"usage": CHAT_USAGE}, False),
        ({"choices": None, "usage": CHAT_USAGE}, False),
        ({"choices": [], "usage": CHAT_USAGE, "error": {"message": "no"}}, False),
    ],
)
def test_only_the_usage_only_chunk_is_surplus(body: dict[str, Any], surplus: bool) -> None:
    """An empty list of choices together with usage, and no error."""
    assert event(body).surplus is surplus


@pytest.mark.parametrize(
    ("body", "finish", "counts", "error"),
    [
        ({"choices": [{"message": {}, "finish_reason": "stop"}], "usage": CHAT_USAGE}, "stop", Counts(9, 3), False),
        ({"choices": [{"text": "x", "finish_reason": "length"}], "usage": CHAT_USAGE}, "length", Counts(9, 3), False),
        ({"object": "list", "data": [], "usage": {"prompt_tokens": 5, "total_tokens": 5}}, None, Counts(5), False),
        (
            {"type": "message", "stop_reason": "tool_use", "usage": {"input_tokens": 9, "output_tokens": 3}},
            "tool_use",
            Counts(9, 3),
            False,
        ),
        (
            {"object": "response", "status": "completed", "error": None, "incomplete_details": None},
            "completed",
            None,
            False,
        ),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "max_output_tokens",
            None,
            False,
        ),
        ({"error": {"message": "no"}}, None, None, True),
    ],
)
def test_whole_answers(body: dict[str, Any], finish: str | None, counts: Counts | None, error: bool) -> None:
    """Chat, completions, embeddings, Messages, Responses and an error that came with status 200."""
    got = read_answer(json.dumps(body).encode())
    assert (got.finish, got.counts, got.error) == (finish, counts, error)


@pytest.mark.parametrize(
    ("name", "head", "tail", "finish", "content", "error"),
    [
        ("", b'{"choices":[{"delta":{"content":"AA', b'AA"},"finish_reason": "stop"}]}', "stop", True, False),
        ("response.output_item.done", b'{"item":{', b'"status":"completed"}}', None, False, False),
        ("response.output_item.done", b'{"item":{', b'"finish_reason":"x"}}', None, False, False),
        ("response.completed", b'{"response":{', b'"x":1}}\n\n', "completed", False, False),
        ("", b'{"response":{', b'"type":"response.completed"}\r\n\r\n', "completed", False, False),
        ("", b'{"type":"response.incomplete",', b'"incomplete_details":{"reason":"x"}}', "x", False, False),
        ("response.created", b'{"response":{"tools":[{"choices":1}', b'"usage":null}}', None, False, False),
        ("", b'{"type": "response.image.delta","delta":"AA', b'AA"}', None, True, False),
        ("content_block_delta", b'{"delta":{"text":"AA', b'AA"}}', None, True, False),
        ("", b'{"error":{"message":"AA', b'AA"}}', None, False, True),
        ("error", b"{", b"}", None, False, True),
    ],
)
def test_glimpses_of_long_events(
    name: str, head: bytes, tail: bytes, finish: str | None, content: bool, error: bool
) -> None:
    """The two ends of an event tell what is needed of it."""
    got = glimpse(name.encode(), head, tail)
    assert (got.finish, got.content, got.error) == (finish, content, error)


def test_glimpses_of_long_answers() -> None:
    """Usage at either end, and the finish reason."""
    assert glimpse_answer(b'{"usage":{"total_tokens":7},"results":[', b"]}").counts == Counts(7)
    got = glimpse_answer(b"{", b'"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":3}}')
    assert (got.finish, got.counts) == ("stop", Counts(9, 3))
    assert glimpse_answer(b'{"object":"response","status":"completed",', b"}").finish == "completed"


MESSAGE = 'Say "no":\nline\u2028two \ud800 é'


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETIONS, Dialect.OTHER])
def test_openai_error_frame(dialect: Dialect) -> None:
    """All four keys, in one event, in ASCII."""
    frame = error_frame(dialect, MESSAGE, "api_error", "upstream_error")
    assert frame.startswith(b'data: {"error":{') and frame.endswith(b"}}\n\n") and frame.count(b"\n") == 2
    error = {"message": MESSAGE, "type": "api_error", "param": None, "code": "upstream_error"}
    assert json.loads(frame[6:]) == {"error": error}
    assert frame.isascii()


def test_error_frames_as_clients_expect_them() -> None:
    """To the byte, for each dialect."""
    lost = ("The upstream connection was lost.", "server_error", "upstream_error")
    assert error_frame(Dialect.CHAT, *lost) == (
        b'data: {"error":{"message":"The upstream connection was lost.","type":"server_error","param":null,'
        b'"code":"upstream_error"}}\n\n'
    )
    assert error_frame(Dialect.RESPONSES, *lost, sequence_number=7) == (
        b'event: error\ndata: {"type":"error","code":"upstream_error","message":"The upstream connection was lost.",'
        b'"param":null,"sequence_number":7}\n\n'
    )
    assert error_frame(Dialect.MESSAGES, "The upstream connection was lost.", "api_error", "upstream_error") == (
        b'event: error\ndata: {"type":"error","error":{"type":"api_error",'
        b'"message":"The upstream connection was lost."}}\n\n'
    )


@pytest.mark.parametrize("dialect", list(Dialect))
def test_error_frames_are_read_as_errors(dialect: Dialect) -> None:
    """What this gateway sends, another one in front of it understands."""
    lines = error_frame(dialect, "m", "api_error", "c").split(b"\n")
    name = lines[0][7:] if lines[0].startswith(b"event: ") else b""
    assert read(name, lines[-3][6:]).error
