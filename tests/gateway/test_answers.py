"""What clients are told: refusals and engines' errors, always in the shape of the dialect they speak."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway import errors
from gateway.answers import error_code, normalised, refusal, retry_after
from gateway.errors import GatewayError, Refusal
from gateway.exchange import Dialect

OPENAI = [Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES, Dialect.OTHER]
ROWS = [row for row in vars(errors).values() if isinstance(row, Refusal)]
JSON = b"application/json"


def openai(body: bytes) -> dict[str, Any]:
    """The error of an OpenAI body; fails if it has not the one right shape."""
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def anthropic(body: bytes) -> dict[str, Any]:
    """The same of an Anthropic body."""
    whole = json.loads(body)
    assert (whole["type"], whole["request_id"]) == ("error", "req_1")
    error: dict[str, Any] = whole["error"]
    assert set(error) == {"type", "message"}
    assert isinstance(error["type"], str) and isinstance(error["message"], str)
    return error


# Bodies of engines as captured or documented, with what a client of OpenAI's must read in them.
ENGINES = {
    "vllm-404": (
        404,
        b'{"error":{"message":"The model `nope` does not exist. Valid aliases: tiny.","type":"NotFoundError",'
        b'"param":"model","code":404}}',
        ("The model `nope` does not exist. Valid aliases: tiny.", "NotFoundError", "model", "404"),
    ),
    "vllm-400": (
        400,
        b'{"error":{"message":"max_tokens=100000 cannot be greater than max_model_len=4096. Please request fewer output'
        b' tokens. (parameter=max_tokens, value=100000)","type":"BadRequestError","param":"max_tokens","code":400}}',
        (
            "max_tokens=100000 cannot be greater than max_model_len=4096. Please request fewer output tokens. "
            "(parameter=max_tokens, value=100000)",
            "BadRequestError",
            "max_tokens",
            "400",
        ),
    ),
    "vllm-temperature": (
        400,
        b'{"error":{"message":"temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",'
        b'"type":"BadRequestError","param":"temperature","code":400}}',
        (
            "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
            "BadRequestError",
            "temperature",
            "400",
        ),
    ),
    "vllm-json": (
        400,
        b"""{"error":{"message":"1 validation error:\\n  {'type': 'json_invalid'}","type":"Bad Request","""
        b'"param":"body.1","code":400}}',
        ("1 validation error:\n  {'type': 'json_invalid'}", "Bad Request", "body.1", "400"),
    ),
    "vllm-old": (
        400,
        b'{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}',
        ("too long", "BadRequestError", None, "400"),
    ),
    "sglang": (
        400,
        b'{"object":"error","message":"Input is too long","type":"BadRequest","param":null,"code":400}',
        ("Input is too long", "BadRequest", None, "400"),
    ),
    "sglang-full": (
        503,
        b'{"object":"error","message":"The request queue is full.","type":"ServiceUnavailable",'
        b'"param":null,"code":503}',
        ("The request queue is full.", "ServiceUnavailable", None, "503"),
    ),
    "dynamo": (
        404,
        b'{"message":"Model not found","type":"Not Found","code":404}',
        ("Model not found", "Not Found", None, "404"),
    ),
    "tgi-overloaded": (
        429,
        b'{"error":"Model is overloaded","error_type":"overloaded"}',
        ("Model is overloaded", "overloaded", None, None),
    ),
    "tgi-validation": (
        422,
        b'{"error":"Input validation error: `inputs` must have less than 1000 tokens","error_type":"validation"}',
        ("Input validation error: `inputs` must have less than 1000 tokens", "validation", None, None),
    ),
    "llamacpp": (
        500,
        b'{"error":{"code":500,"message":"context shift is disabled","type":"server_error"}}',
        ("context shift is disabled", "server_error", None, "500"),
    ),
    "llamacpp-loading": (
        503,
        b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}',
        ("Loading model", "unavailable_error", None, "503"),
    ),
    "ollama-native": (
        503,
        b'{"error":"server busy, please try again"}',
        ("server busy, please try again", "api_error", None, None),
    ),
    "ollama": (
        404,
        b'{"error":{"message":"model \\"x\\" not found, try pulling it first","type":"not_found_error","param":null,'
        b'"code":null}}',
        ('model "x" not found, try pulling it first', "not_found_error", None, None),
    ),
    "fastapi": (404, b'{"detail":"Not Found"}', ("Not Found", "invalid_request_error", None, None)),
    "fastapi-422": (
        422,
        b'{"detail":[{"type":"missing","loc":["body","model"],"msg":"Field required"}]}',
        ('[{"type":"missing","loc":["body","model"],"msg":"Field required"}]', "invalid_request_error", None, None),
    ),
    "empty-object": (500, b'{"error":{}}', ("", "api_error", None, None)),
    "nothing-right": (
        500,
        b'{"error":{"message":{"a":1},"type":null,"param":["x"],"code":{"n":1}}}',
        ('{"a":1}', "api_error", None, None),
    ),
    "bare": (400, b'{"error":{"message":"m"}}', ("m", "invalid_request_error", None, None)),
    "fraction": (400, b'{"error":{"message":"m","type":"t","param":"p","code":4.5}}', ("m", "t", "p", None)),
    "odd-numbers": (
        500,
        b'{"error":{"message":17,"type":"t","param":"p","code":1e400}}',
        ("17", "t", "p", None),
    ),
    "half-a-pair": (500, b'{"error":"\\ud83d"}', ("\ufffd", "api_error", None, None)),
}


@pytest.mark.parametrize("dialect", OPENAI)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_errors_in_the_openai_shape(engine: str, dialect: Dialect) -> None:
    """All four keys, the code a string, and the engine's own words in them."""
    status, body, expected = ENGINES[engine]
    shaped = normalised(body, JSON, status, dialect, "req_1")
    error = openai(body if shaped is None else shaped)
    assert (error["message"], error["type"], error["param"], error["code"]) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_errors_in_the_anthropic_shape(engine: str) -> None:
    """The engine's message under the type that Anthropic has for the status."""
    status, body, (message, *_) = ENGINES[engine]
    shaped = normalised(body, JSON, status, Dialect.MESSAGES, "req_1")
    assert shaped is not None
    error = anthropic(shaped)
    types = {400: "invalid_request_error", 404: "not_found_error", 422: "invalid_request_error"}
    types |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
    assert error == {"type": types[status], "message": message}


@pytest.mark.parametrize(
    ("body", "dialect"),
    [
        (b'{"error":{"message":"m","type":"t","param":null,"code":null}}', Dialect.CHAT),
        (b'{ "error" : {"code":"c", "message":"m","type":"t","param":"p", "extra":[1e400]}, "x":1}', Dialect.CHAT),
        (b'{"type":"error","error":{"type":"overloaded_error","message":"m"},"request_id":"r"}', Dialect.MESSAGES),
        (b"<html>502</html>", Dialect.CHAT),
        (b"", Dialect.CHAT),
        (b'{"error":{"message":"cut', Dialect.CHAT),
        (b'{"choices":[]}', Dialect.CHAT),
        (b"[1]", Dialect.CHAT),
        (b"\xff\xfe", Dialect.CHAT),
    ],
)
def test_what_is_right_or_unknown_stays_as_it_is(body: bytes, dialect: Dialect) -> None:
    """An error that has its shape already is not touched, nor is what nobody can read."""
    assert normalised(body, JSON, 500, dialect, "req_1") is None


def test_only_what_deviates_is_spliced() -> None:
    """Order, white space, numbers and unknown fields of the engine's own body stay."""
    body = b'{ "error": {"code": 404 , "message":"m", "x": 1.0, "type":"t","param":null}, "n":18446744073709551617 }'
    assert normalised(body, JSON, 404, Dialect.CHAT, "r") == body.replace(b"404", b'"404"')


@pytest.mark.parametrize("kind", [b"text/plain", b"Text/Plain; charset=utf-8"])
def test_plain_text_becomes_a_message(kind: bytes) -> None:
    """What a crashed server says; not more than 2,000 bytes of it; nothing where it says nothing."""
    assert openai(normalised(b"Internal Server Error", kind, 500, Dialect.CHAT, "r") or b"") == {
        "message": "Internal Server Error",
        "type": "api_error",
        "param": None,
        "code": None,
    }
    assert len(openai(normalised(b"\xff" * 5000, kind, 500, Dialect.CHAT, "r") or b"")["message"]) == 2000
    assert normalised(b" \n", kind, 500, Dialect.CHAT, "r") is None


def written(members: dict[bytes, bytes]) -> bytes:
    return b"{" + b",".join(b'"%b":%b' % item for item in members.items()) + b"}"


SCALARS = [b"null", b"true", b"-1", b"400", b"1e400", b"1" * 4000, b'"a"', b'""', b'"\\ud83d"', b'"\\u0000"']
VALUES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: b"[" + b",".join(items) + b"]")
        | st.dictionaries(st.sampled_from([b"message", b"code"]), inner, max_size=2).map(written)
    ),
    max_leaves=4,
) | st.sampled_from([b"[" * 400 + b"]" * 400, b'{"a":' * 400 + b"1" + b"}" * 400])
ERRORS = st.dictionaries(st.sampled_from([b"message", b"type", b"param", b"code", b"x"]), VALUES, max_size=5)
BODIES = st.dictionaries(
    st.sampled_from([b"error", b"error_type", b"message", b"type", b"object", b"code", b"param", b"detail"]),
    VALUES | ERRORS.map(lambda members: written(members)),
    max_size=4,
)


@settings(max_examples=400)
@given(BODIES, st.sampled_from(list(Dialect)), st.sampled_from([400, 404, 429, 500, 503]))
def test_any_error_body_gets_its_shape_or_stays(members: dict[bytes, bytes], dialect: Dialect, status: int) -> None:
    """Never an exception; what comes out has the shape; an OpenAI error object never stays deformed."""
    body = written(members)
    shaped = normalised(body, JSON, status, dialect, "req_1")
    if shaped is not None:
        anthropic(shaped) if dialect is Dialect.MESSAGES else openai(shaped)
    elif dialect is not Dialect.MESSAGES and members.get(b"error", b"")[:1] == b"{":
        openai(body)


@given(st.binary(max_size=100), st.sampled_from([JSON, b"text/plain", b"text/html", b""]))
def test_any_bytes_get_a_shape_or_stay(body: bytes, kind: bytes) -> None:
    """Never an exception."""
    shaped = normalised(body, kind, 500, Dialect.CHAT, "r")
    assert shaped is None or openai(shaped)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error":{"code":429}}', 429),
        (b'{"error":{"code":"400"}}', 400),
        (b'{"error":{"code":"rate_limit"}}', 0),
        (b'{"error":{}}', 0),
        (b'{"error":[]}', 0),
        (b'{"error":"x"}', 0),
        (b"[]", 0),
        (b'{"error":{"code":1e400}}', 0),
        (b'{"error":{"code":' + b"[" * 3000, 0),
        (b"", 0),
    ],
)
def test_the_code_of_an_error_event(body: bytes, code: int) -> None:
    """The number that it gives, 0 where it gives none."""
    assert error_code(body) == code


@given(st.binary(max_size=60) | BODIES.map(written))
@example(b'{"error":{"code":"' + b"9" * 5000 + b'"}}')
def test_any_bytes_have_a_code(body: bytes) -> None:
    """Never an exception."""
    assert isinstance(error_code(body), int)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.status}-{row.reason}")
@pytest.mark.parametrize("dialect", list(Dialect))
def test_refusals_have_the_shape_of_the_dialect(row: Refusal, dialect: Dialect) -> None:
    """Status, code and reason as in the table; Anthropic's overload is 529; a retry-after stands where there is one."""
    error = GatewayError(row, "Why.", param="p", retry_after=2.5, retry=False)
    status, headers, body = refusal(error, dialect, "req_1")
    told = dict(headers)
    assert told[b"content-type"] == JSON
    assert told[b"x-headrace-reason"] == row.reason.encode()
    assert (told[b"retry-after"], told[b"retry-after-ms"], told[b"x-should-retry"]) == (b"3", b"2500", b"false")
    assert (told.get(b"www-authenticate") == b"Bearer") == (status == 401)
    if dialect is Dialect.MESSAGES:
        assert status == (529 if row.code == "server_is_overloaded" else row.status)
        assert anthropic(body)["message"] == "Why."
    else:
        assert status == row.status
        assert openai(body) == {"message": "Why.", "type": row.type, "param": "p", "code": row.code}


@given(st.floats(min_value=-10, max_value=1e6))
def test_retry_after_stays_where_every_sdk_obeys(wait_s: float) -> None:
    """Whole seconds within 1..60 and not before the exact wait, which stands beside it in milliseconds."""
    told = dict(retry_after(wait_s))
    seconds, exact_ms = int(told[b"retry-after"]), int(told[b"retry-after-ms"])
    assert 1 <= seconds <= 60
    assert 1 <= exact_ms <= seconds * 1000 <= exact_ms + 1000
    assert exact_ms >= min(60_000, wait_s * 1000)
