"""The admin port: liveness, readiness and metrics, none of which waits for anything but the event loop."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway.telemetry import Telemetry


def admin(telemetry: Telemetry, not_ready: Callable[[], str]) -> Starlette:
    """`not_ready` gives the reason why no request should be sent here, or nothing."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(telemetry)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reason = not_ready()
        return JSONResponse({"ready": not reason, "reason": reason or None}, 503 if reason else 200)

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/livez", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
        ]
    )
