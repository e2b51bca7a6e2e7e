"""The shapes of what clients are told when something is wrong, in the dialect of the endpoint they called."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from gateway import envelope
from gateway.errors import GatewayError
from gateway.exchange import Dialect, Header

_write = msgspec.json.Encoder().encode
_text = msgspec.json.Decoder(str).decode
_any = msgspec.json.Decoder().decode

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
NULL = msgspec.Raw(b"null")


def refusal(error: GatewayError, dialect: Dialect, request_id: str) -> tuple[int, list[Header], bytes]:
    """Status, headers and body of a refusal made by the gateway."""
    row = error.refusal
    status = 529 if dialect is Dialect.MESSAGES and row.code == "server_is_overloaded" else row.status
    headers = [(b"content-type", b"application/json"), (b"x-headrace-reason", row.reason.encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after is not None:
        headers += retry_after(error.retry_after)
    if error.retry is not None:
        headers.append((b"x-should-retry", b"true" if error.retry else b"false"))
    if dialect is Dialect.MESSAGES:
        return status, headers, anthropic_error(status, error.message, request_id)
    return status, headers, openai_error(row.type, row.code, error.message, error.param)


def retry_after(wait_s: float) -> list[Header]:
    """Whole seconds within 1..60, which every SDK obeys, and the exact wait in milliseconds beside it."""
    exact_s = min(60.0, max(0.001, wait_s))
    return [(b"retry-after", b"%d" % math.ceil(exact_s)), (b"retry-after-ms", b"%d" % math.ceil(exact_s * 1000))]


def openai_error(type_: str, code: str | None, message: str, param: str | None = None) -> bytes:
    """All four keys are required by OpenAI's specification."""
    return _write({"error": {"message": message, "type": type_, "param": param, "code": code}})


def anthropic_error(status: int, message: str, request_id: str) -> bytes:
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return _write({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})


def normalised(body: bytes, content_type: bytes, status: int, dialect: Dialect, request_id: str) -> bytes | None:
    """An engine's error body in the endpoint's shape; None where it has that shape already, or none that is known.

    1. `{"error": {...}}` (vLLM, llama.cpp): only what deviates is spliced, such as an integer code.
    2. `{"error": "text"}` (TGI, Ollama), 3. a flat object with a message (SGLang, Dynamo), 4. `{"detail": ...}`
    (FastAPI) and 5. plain text (a crashed server) are wrapped.
    """
    kind = content_type.split(b";")[0].strip().lower()
    if kind == b"text/plain":
        text = body[:2000].decode("utf-8", "replace").strip()
        return _wrapped({"message": msgspec.Raw(_write(text))}, status, dialect, request_id) if text else None
    try:
        sent = envelope.read(body)
    except envelope.BadBody:
        return None
    members = {name: raw for name, raw in sent.members.items() if raw != NULL}
    inner = members.get("error")
    if inner is not None and bytes(inner)[:1] == b"{":
        return _mended(sent, bytes(inner), status, dialect, request_id)
    if inner is not None:
        return _wrapped({"message": inner, "type": members.get("error_type", NULL)}, status, dialect, request_id)
    if "message" in members and members.keys() & {"object", "type", "code"}:
        return _wrapped(members, status, dialect, request_id)
    if "detail" in members:
        return _wrapped({"message": members["detail"]}, status, dialect, request_id)
    return None


def error_code(body: bytes) -> int:
    """The number that an error body gives as its code, 0 where it gives none."""
    try:
        code = _any(body)["error"]["code"]
        return int(code)
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError):
        return 0


def _mended(sent: envelope.Envelope, inner: bytes, status: int, dialect: Dialect, request_id: str) -> bytes | None:
    try:
        error = envelope.read(inner)
    except envelope.BadBody:
        return None
    members = error.members
    if dialect is Dialect.MESSAGES:
        return None if "type" in sent.members else _wrapped(members, status, dialect, request_id)
    right = {
        "message": _write(_said(members.get("message")) or ""),
        "type": _write(_type(status)),
        "param": b"null",
        "code": _write(_code(members.get("code"))),
    }
    edits = {name: value for name, value in right.items() if not _fits(name, members.get(name))}
    return b"".join(sent.splice({"error": b"".join(error.splice(edits))})) if edits else None


def _fits(name: str, value: msgspec.Raw | None) -> bool:
    """Whether a member of an error object is a string or, where that is allowed, null."""
    return value is not None and (bytes(value)[:1] == b'"' or (value == NULL and name in ("param", "code")))


def _wrapped(fields: Mapping[str, msgspec.Raw], status: int, dialect: Dialect, request_id: str) -> bytes:
    message = _said(fields.get("message")) or ""
    if dialect is Dialect.MESSAGES:
        return anthropic_error(status, message, request_id)
    kind, param = fields.get("type"), fields.get("param")
    return openai_error(
        (_said(kind) if _fits("type", kind) else None) or _type(status),
        _code(fields.get("code")),
        message,
        _said(param) if _fits("param", param) else None,
    )


def _code(value: msgspec.Raw | None) -> str | None:
    """A word, or a whole number as a word."""
    return _said(value) if value is not None and (_fits("type", value) or bytes(value).isdigit()) else None


def _said(value: msgspec.Raw | None) -> str | None:
    """The text of a string; None for null or nothing; anything else as it stands."""
    if value is None or value == NULL:
        return None
    try:
        return _text(value)
    except msgspec.DecodeError:
        return bytes(value).decode("utf-8", "replace")


def _type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "api_error"
