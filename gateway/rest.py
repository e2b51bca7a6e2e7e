"""Everything on the API's port that is not inference: models, and telling what is not there."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from gateway import answers
from gateway.errors import METHOD_NOT_ALLOWED, UNKNOWN_URL, GatewayError, Refused
from gateway.exchange import Dialect, Header
from gateway.models import Gateway, Models
from gateway.wire import ENDPOINTS

SHOWN = 200  # characters of a path that are told back
EXPOSED = (
    b"x-request-id, x-headrace-class, x-headrace-reason, retry-after, retry-after-ms, x-should-retry, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)


def cors(origin: bytes) -> list[Header]:
    """What a page of an allowed origin must see to read an answer; errors carry it too."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"origin"),
    ]


def unknown(request: Request, error: HTTPException) -> tuple[Refused, list[Header]]:
    """A path that leads nowhere, or a method that it does not take and the headers that say which it does."""
    path: str = request.scope["path"]
    shown = path if len(path) <= SHOWN else path[:SHOWN] + "..."
    allowed = "POST" if path in ENDPOINTS else (error.headers or {}).get("Allow")
    if allowed is None:
        return Refused(UNKNOWN_URL, f"Unknown request URL: {request.method} {shown}."), []
    message = f"{shown} takes {allowed}, not {request.method}."
    return Refused(METHOD_NOT_ALLOWED, message), [(b"allow", allowed.encode())]


def api(gateway: Gateway) -> Any:
    """Its ASGI application."""

    async def refused(request: Request, error: Exception) -> Response:
        more: list[Header] = []
        if isinstance(error, HTTPException):
            error, more = unknown(request, error)
        assert isinstance(error, GatewayError)
        request_id = next(gateway.request_ids)
        status, headers, body = answers.refusal(error, Dialect.OTHER, request_id)
        headers += [*more, (b"x-request-id", request_id.encode())]
        return Response(body, status, {name.decode(): value.decode() for name, value in headers})

    rest = Starlette(
        routes=Models(gateway).routes(),
        exception_handlers={404: refused, 405: refused, GatewayError: refused},
    )

    async def application(scope: Any, receive: Any, send: Any) -> None:
        allowed, exposed = gateway.generation.settings.server.cors, EXPOSED.decode().split(", ")
        called: Any = rest
        if allowed:
            called = CORSMiddleware(rest, allowed, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)
        await called(scope, receive, send)

    return application
