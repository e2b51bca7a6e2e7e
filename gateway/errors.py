"""Everything that can go wrong, as one tree and one table.

GatewayError             what the client is told: status, type, code, and one word of reason
├── Refused              the caller's doing; no backend is blamed
├── Unavailable          ours: no room, no backend, shutting down
├── UpstreamFailed       a backend's doing; `phase` says how far the attempt got
│   ├── UpstreamTimeout  one of the five clocks ran out
│   └── Unanswered       the connection closed before any byte of an answer
└── ClientGone           nobody is left to be told
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import ClassVar

from gateway.http1 import Answer


@dataclass(frozen=True, slots=True)
class Refusal:
    """One row of the table: what is sent, and the low-cardinality word for headers and metrics."""

    status: int
    type: str
    code: str
    reason: str


def _invalid(status: int, code: str) -> Refusal:
    return Refusal(status, "invalid_request_error", code, code)


INVALID_BODY = _invalid(400, "invalid_body")
INVALID_REQUEST = _invalid(400, "invalid_request")
INVALID_API_KEY = _invalid(401, "invalid_api_key")
UNKNOWN_URL = _invalid(404, "unknown_url")
MODEL_NOT_FOUND = _invalid(404, "model_not_found")
METHOD_NOT_ALLOWED = _invalid(405, "method_not_allowed")
REQUEST_TIMEOUT = _invalid(408, "request_timeout")
REQUEST_TOO_LARGE = _invalid(413, "request_too_large")
UNSUPPORTED_ENCODING = _invalid(415, "unsupported_encoding")
HEADERS_TOO_LARGE = _invalid(431, "headers_too_large")

REQUESTS_LIMIT = Refusal(429, "requests", "rate_limit_exceeded", "requests_limit")
TOKENS_LIMIT = Refusal(429, "tokens", "rate_limit_exceeded", "tokens_limit")
CONCURRENCY_LIMIT = Refusal(429, "requests", "rate_limit_exceeded", "concurrency_limit")
CONNECTIONS_LIMIT = Refusal(429, "requests", "rate_limit_exceeded", "connections_limit")
REQUEST_EXCEEDS_LIMIT = Refusal(429, "tokens", "request_exceeds_limit", "request_exceeds_limit")

QUEUE_FULL = Refusal(503, "service_unavailable_error", "server_is_overloaded", "queue_full")
DEADLINE_UNREACHABLE = Refusal(503, "service_unavailable_error", "server_is_overloaded", "deadline_unreachable")
QUEUE_TIMEOUT = Refusal(503, "service_unavailable_error", "server_is_overloaded", "queue_timeout")
BUFFERS_FULL = Refusal(503, "service_unavailable_error", "server_is_overloaded", "buffers_full")
LIMITS_UNAVAILABLE = Refusal(503, "service_unavailable_error", "server_is_overloaded", "limits_unavailable")
GATEWAY_BUSY = Refusal(503, "service_unavailable_error", "server_is_overloaded", "gateway_busy")
NO_BACKEND = Refusal(503, "service_unavailable_error", "no_backend_available", "no_backend")
SHUTTING_DOWN = Refusal(503, "service_unavailable_error", "server_shutting_down", "shutting_down")

INTERNAL_ERROR = Refusal(500, "api_error", "internal_error", "internal_error")
UPSTREAM_ERROR = Refusal(502, "api_error", "upstream_error", "upstream_error")
UPSTREAM_TRUNCATED = Refusal(502, "api_error", "upstream_error", "upstream_truncated")
BACKEND_LOST = Refusal(502, "api_error", "upstream_error", "backend_lost")
UPSTREAM_TIMEOUT = Refusal(504, "api_error", "upstream_timeout", "upstream_timeout")
CONNECT_TIMEOUT = Refusal(502, "api_error", "upstream_connect_timeout", "connect_timeout")


class Fault(StrEnum):
    """Whose doing it is that a request did not end well."""

    NONE = ""
    CALLER = "caller"
    LEFT = "left"  # the client went away
    CAPACITY = "capacity"  # ours: no room, no backend, shutting down
    GATEWAY = "gateway"  # ours: a bug
    BACKEND = "backend"


class GatewayError(Exception):
    """What the client is told. `retry_after` is in seconds; `retry` overrules the SDK's own rule."""

    fault: ClassVar[Fault] = Fault.GATEWAY

    def __init__(
        self,
        refusal: Refusal,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.retry = retry


class Refused(GatewayError):
    """The caller's doing."""

    fault = Fault.CALLER


class Unavailable(GatewayError):
    """Ours: the request was sound but cannot be served now."""

    fault = Fault.CAPACITY


class Phase(IntEnum):
    """How far an upstream attempt got."""

    CONNECT = 0  # nothing was sent: always safe to try elsewhere
    SENT = 1  # the backend may have started
    STREAMING = 2  # the client has seen bytes of it: never tried again


class UpstreamFailed(GatewayError):
    """A backend's doing. `replayable`: another backend may be asked, as far as the failure goes. `answer` is what the
    backend said, for the client to see if nothing better comes."""

    fault = Fault.BACKEND

    def __init__(
        self,
        message: str,
        phase: Phase,
        *,
        refusal: Refusal = UPSTREAM_ERROR,
        replayable: bool = True,
        retry_after: float | None = None,
        answer: Answer | None = None,
    ) -> None:
        super().__init__(refusal, message, retry_after=retry_after)
        self.phase = phase
        self.replayable = replayable
        self.answer = answer


class UpstreamTimeout(UpstreamFailed):
    """One of the five clocks ran out: connect, headers, first_token, idle or total."""

    def __init__(self, clock: str, limit_s: float, phase: Phase) -> None:
        refusal = CONNECT_TIMEOUT if clock == "connect" else UPSTREAM_TIMEOUT
        message = f"The model backend exceeded its {clock} limit of {limit_s:g} s."
        super().__init__(message, phase, refusal=refusal, replayable=clock == "connect")
        self.clock = clock


class Unanswered(UpstreamFailed):
    """The connection closed before any byte of an answer."""


class ClientGone(GatewayError):
    """The client left, or takes nothing any more. Status 499 stands in logs and metrics; nothing is sent."""

    fault = Fault.LEFT

    def __init__(self, message: str = "The client left.", reason: str = "client_disconnect") -> None:
        super().__init__(Refusal(499, "client_error", reason, reason), message)
