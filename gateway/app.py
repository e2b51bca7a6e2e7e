"""The wiring: which objects make a gateway, which path leads where, and how it starts and stops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from itertools import count
from random import Random
from secrets import token_hex
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from gateway import answers, assembly
from gateway.client import Buffers, Client
from gateway.config import Config
from gateway.dispatch import Dispatcher
from gateway.errors import (
    INTERNAL_ERROR,
    METHOD_NOT_ALLOWED,
    SHUTTING_DOWN,
    UNKNOWN_URL,
    GatewayError,
    Refused,
    Unavailable,
)
from gateway.exchange import Dialect, Endpoint, Exchange, Header
from gateway.models import Models
from gateway.proxy import proxy
from gateway.telemetry import Telemetry
from gateway.upstream import Upstream
from gateway.wire import ENDPOINTS

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

SHOWN = 200  # characters of a path that are told back
EXPOSED = b"x-request-id, x-headrace-class, x-headrace-reason, retry-after, retry-after-ms, x-should-retry"

logger = logging.getLogger("headrace")


class Gateway:
    """Everything that one process serves with. `async with gateway` runs what must run beside the requests."""

    def __init__(self, settings: Config, log: Callable[[bytes], None]) -> None:
        self.settings = settings
        self.clock = time.monotonic
        self.catalog = assembly.catalog(settings, int(time.time()))
        self.keys = assembly.key_ring(settings, time.time)
        self.dispatcher = Dispatcher(assembly.pools(settings, self.clock, Random()), self.clock)  # noqa: S311 (ties)
        self.upstream = Upstream(self.clock)
        self.telemetry = Telemetry(self.dispatcher, log, time.time)
        self.buffers = Buffers(settings.server.max_buffered)
        self.draining = False
        self.active: set[Exchange] = set()
        self.request_ids = (f"req_{prefix}{number:08x}" for prefix in [token_hex(8)] for number in count(1))
        self.origins = frozenset(origin.encode() for origin in settings.server.cors)

    def __repr__(self) -> str:
        return f"<Gateway {len(self.active)} requests, {self.upstream!r}>"

    async def __aenter__(self) -> Gateway:
        await self.upstream.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.dispatcher.close()
        await self.upstream.__aexit__(*exc)

    def not_ready(self) -> str:
        """Why no request should be sent here; empty when all is well."""
        return "draining" if self.draining else ""

    async def wait_idle(self) -> None:
        """Returns when no request is under way."""
        while self.active:  # noqa: ASYNC110 (an event would cost every request a little, for one drain in a life)
            await asyncio.sleep(0.02)

    def stop_queueing(self) -> None:
        """From now on no request is taken, and those that wait are refused. Running ones go on."""
        self.draining = True
        self.dispatcher.refuse_waiting(shutting_down())

    def stop_running(self) -> None:
        """The time is up: running answers end with an error frame."""
        self.upstream.fail_all(shutting_down())

    async def infer(self, endpoint: Endpoint, scope: Scope, receive: Receive) -> None:
        """One request of the path: whatever happens to it, it is answered, settled and recorded once."""
        x = Exchange(next(self.request_ids), self.clock(), endpoint)
        self.active.add(x)
        client = Client(scope, receive, buffers=self.buffers, max_body=self.settings.server.max_body, clock=self.clock)
        error: GatewayError | None = None
        try:
            with client:
                self._greet(client, x)
                await proxy(self, client, endpoint, x)
        except GatewayError as refused:
            error = refused
        except Exception:
            logger.exception("request %s failed", x.request_id)
            error = GatewayError(INTERNAL_ERROR, "The gateway failed. The fault is logged under the request id.")
        except asyncio.CancelledError:
            error = shutting_down()
            raise
        finally:
            if error is not None:
                client.refuse(error, x)
            x.end(self.clock(), error)
            self.active.discard(x)
            self.telemetry.record(x)

    def _greet(self, client: Client, x: Exchange) -> None:
        x.request_id = client.request_id or x.request_id
        origin = client.headers.get(b"origin")
        if origin is not None and not self.origins.isdisjoint((origin, b"*")):
            x.answer_headers += cors(origin)
        if self.draining:
            raise shutting_down()


def shutting_down() -> Unavailable:
    return Unavailable(SHUTTING_DOWN, "The gateway is shutting down.", retry_after=1.0)


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


def api(gateway: Gateway) -> Application:
    """The ASGI application of the API: inference on the short way, everything else through Starlette."""

    async def refused(request: Request, error: Exception) -> Response:
        more: list[Header] = []
        if isinstance(error, HTTPException):
            error, more = unknown(request, error)
        assert isinstance(error, GatewayError)
        request_id = next(gateway.request_ids)
        status, headers, body = answers.refusal(error, Dialect.OTHER, request_id)
        headers += [*more, (b"x-request-id", request_id.encode())]
        return Response(body, status, {name.decode(): value.decode() for name, value in headers})

    rest: Any = Starlette(
        routes=Models(gateway.catalog, gateway.keys, gateway.request_ids).routes(),
        exception_handlers={404: refused, 405: refused, GatewayError: refused},
    )
    if gateway.origins:
        allowed, exposed = gateway.settings.server.cors, EXPOSED.decode().split(", ")
        rest = CORSMiddleware(rest, allowed, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = ENDPOINTS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await rest(scope, receive, send)
        else:
            await gateway.infer(endpoint, scope, receive)

    return application
