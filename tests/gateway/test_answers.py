"""Engines' error bodies in the shape that the endpoint's SDK reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.answers import error_code, normalised
from gateway.exchange import Dialect

JSON = b"application/json; charset=utf-8"
WHOLE = {"message": "m", "type": "t", "param": "p", "code": "c"}


def told(body: object, status: int = 400, dialect: Dialect = Dialect.CHAT, kind: bytes = JSON) -> Any:
    """The body that the client gets, parsed; None where it gets the engine's own bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    shaped = normalised(data, kind, status, dialect, "req_1")
    return None if shaped is None else json.loads(shaped)


@pytest.mark.parametrize(
    "body", [{"error": WHOLE}, {"error": WHOLE, "extra": 1}, {"error": {**WHOLE, "code": None}}, {"message": "x"}]
)
def test_what_has_the_shape_or_none_that_is_known_passes(body: object) -> None:
    """Nothing is touched that an SDK can read, nor what nobody knows."""
    assert told(body) is None


@pytest.mark.parametrize(
    ("engine", "body", "error"),
    [
        ("vllm", {"error": {**WHOLE, "code": 404}}, {**WHOLE, "code": "404"}),
        ("a float", {"error": {**WHOLE, "code": 4.5}}, {**WHOLE, "code": None}),
        ("llama.cpp", {"error": {"code": 400, "message": "m", "type": "t"}}, {**WHOLE, "code": "400", "param": None}),
        ("bare", {"error": {"message": "m"}}, {"message": "m", "type": "invalid_request_error"}),
        ("tgi", {"error": "m", "error_type": "overloaded"}, {"message": "m", "type": "overloaded"}),
        ("ollama", {"error": "m"}, {"message": "m", "type": "invalid_request_error"}),
        (
            "sglang",
            {"object": "error", "message": "m", "type": "t", "code": 400},
            {**WHOLE, "code": "400", "param": None},
        ),
        ("fastapi", {"detail": "m"}, {"message": "m", "type": "invalid_request_error"}),
        (
            "fastapi",
            {"detail": [{"loc": ["body"]}]},
            {"message": '[{"loc":["body"]}]', "type": "invalid_request_error"},
        ),
    ],
)
def test_engines_errors_become_openai_errors(engine: str, body: object, error: dict[str, Any]) -> None:
    """All four keys, and a code that is a string or null."""
    assert told(body) == {"error": {"param": None, "code": None, **error}}


def test_plain_text_becomes_the_message() -> None:
    """What a crashed server says."""
    assert told(b"Internal Server Error\n", 500, kind=b"text/plain")["error"]["message"] == "Internal Server Error"
    assert told(b" \n", 500, kind=b"text/plain") is None
    assert told(b"<html>", 500, kind=b"text/html") is None


def test_splicing_leaves_the_rest_as_sent() -> None:
    """Only the code is replaced: white space and unknown keys stay."""
    body = b'{ "error" : {"message":"\\u00e9", "type":"t","param":null, "code": 404 ,"x":1.50}, "y":2 }'
    shaped = normalised(body, JSON, 404, Dialect.CHAT, "req_1")
    assert shaped == body.replace(b"404", b'"404"')


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error"), (500, "api_error")]
)
@pytest.mark.parametrize("body", [{"error": {"message": "m"}}, {"error": "m"}, {"detail": "m"}])
def test_messages_get_anthropic_errors(status: int, kind: str, body: object) -> None:
    """The Anthropic SDK reads another shape."""
    assert told(body, status, Dialect.MESSAGES) == {
        "type": "error",
        "error": {"type": kind, "message": "m"},
        "request_id": "req_1",
    }
    assert told({"type": "error", "error": {"type": "x", "message": "m"}}, status, Dialect.MESSAGES) is None


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error":{"code":503}}', 503),
        (b'{"error":{"code":"429"}}', 429),
        (b'{"error":{"code":"full"}}', 0),
        (b"[]", 0),
        (b"{", 0),
    ],
)
def test_the_code_of_an_error(body: bytes, code: int) -> None:
    """A number, or 0 where there is none."""
    assert error_code(body) == code
