"""The admin port: liveness, readiness and metrics for everybody, the rest for who has the admin token.

None of it waits for anything but the event loop.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway import wire
from gateway.answers import openai_error
from gateway.auth import KeyRing
from gateway.catalog import Catalog
from gateway.dispatch import Dispatcher
from gateway.errors import INVALID_REQUEST, GatewayError, Refused
from gateway.exchange import Exchange
from gateway.exposition import content_type, exposed
from gateway.metrics import Family
from gateway.reply import Clock

MAX_BODY = 8 * 2**20  # of a request to be explained
Handler = Callable[[Request], Awaitable[Response]]

_write = msgspec.json.Encoder().encode


class Subject(Protocol):
    """What is administered."""

    keys: KeyRing
    catalog: Catalog
    dispatcher: Dispatcher
    clock: Clock

    def not_ready(self) -> str: ...
    def metrics(self) -> Iterable[Family]: ...


class Admin:
    """The routes. Without a token in the configuration, what needs one answers 403."""

    def __init__(self, subject: Subject, token: str | None) -> None:
        self._subject = subject
        self._token = token

    def application(self) -> Starlette:
        """The ASGI application of the admin port."""
        return Starlette(
            routes=[
                Route("/healthz", self.healthz),
                Route("/livez", self.healthz),
                Route("/readyz", self.readyz),
                Route("/metrics", self.metrics),
                Route("/admin/explain", self._guarded(self.explain), methods=["POST"]),
            ],
            exception_handlers={GatewayError: _refused},
        )

    async def healthz(self, _: Request) -> Response:
        """The process lives."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """Whether requests should be sent here."""
        reason = self._subject.not_ready()
        return JSONResponse({"ready": not reason, "reason": reason or None}, 503 if reason else 200)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus, in the format that it asks for."""
        kind = content_type(request.headers.get("accept", ""))
        return Response(exposed(self._subject.metrics(), kind), headers={"content-type": kind})

    async def explain(self, request: Request) -> Response:
        """`POST /admin/explain?tenant=NAME[&path=/v1/chat/completions]` with a request body: where it would go and
        why. Nothing is sent."""
        subject = self._subject
        path = request.query_params.get("path", "/v1/chat/completions")
        endpoint = wire.ENDPOINTS.get(path)
        tenant = subject.keys.tenant(request.query_params.get("tenant", "anonymous"))
        if endpoint is None or tenant is None:
            what = f"path {path!r}" if endpoint is None else "tenant: name one that has a key, ?tenant=NAME"
            raise Refused(INVALID_REQUEST, f"There is no such {what}.")
        if int(request.headers.get("content-length", "0")) > MAX_BODY:
            raise Refused(INVALID_REQUEST, f"Only requests up to {MAX_BODY} bytes are explained.")
        body, kind = await request.body(), request.headers.get("content-type", "").encode()
        x = Exchange("explained", subject.clock(), endpoint)
        x.identify(tenant, wire.parse(endpoint, kind, body, subject.catalog, tenant))
        assert x.call is not None
        told = {"pool": x.call.pool, "model": x.call.label, "class": x.class_, "prompt_bytes": x.call.prompt_bytes}
        answer = _write({**told, "decision": subject.dispatcher.explain(x)})
        return Response(answer, media_type="application/json")

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            if self._token is None:
                return _told(403, "server.admin_token is not configured, so there is no way in here.")
            scheme, _, sent = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode(), self._token.encode()):
                return _told(401, "The admin token is missing or wrong: send Authorization: Bearer TOKEN.")
            return await handler(request)

        return guarded


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    row = error.refusal
    body = openai_error(row.type, row.code, error.message, error.param)
    return Response(body, row.status, media_type="application/json")


def _told(status: int, message: str) -> Response:
    body = openai_error("invalid_request_error", "admin_token_required", message)
    return Response(body, status, media_type="application/json", headers={"www-authenticate": "Bearer"})
