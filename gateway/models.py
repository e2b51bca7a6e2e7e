"""`/v1/models`: what the caller's tenant may use, aliases included; and where any name is forwarded, what the backends
list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.dispatch import Dispatcher
from gateway.errors import MODEL_NOT_FOUND, Refused
from gateway.generation import Generation
from gateway.wire import not_found


class Gateway(Protocol):
    """Whose models these are."""

    generation: Generation
    dispatcher: Dispatcher

    @property
    def request_ids(self) -> Iterator[str]: ...


class Models:
    """The two routes. Both raise Refused."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        """A name may hold slashes and colons, so it is a path."""
        return [Route("/v1/models", self.list), Route("/v1/models/{name:path}", self.get)]

    async def list(self, request: Request) -> Response:
        """`GET /v1/models`"""
        data = [self._object(name) for name in self._visible(request)]
        return self._answer({"object": "list", "data": data})

    async def get(self, request: Request) -> Response:
        """`GET /v1/models/{name}`"""
        name: str = request.path_params["name"]
        if name not in self._visible(request):
            raise Refused(MODEL_NOT_FOUND, not_found(name), param="model")
        return self._answer(self._object(name))

    def _visible(self, request: Request) -> Sequence[str]:
        now = self._gateway.generation
        tenant, pool = now.keys.identify(request.headers.raw), self._gateway.dispatcher.pools.get(now.catalog.any_pool)
        return now.catalog.visible(tenant, pool.eligible.offered(tenant.residency) if pool is not None else ())

    def _object(self, name: str) -> dict[str, object]:
        created = self._gateway.generation.catalog.created
        return {"id": name, "object": "model", "created": created, "owned_by": "headrace"}

    def _answer(self, body: dict[str, object]) -> Response:
        return JSONResponse(body, headers={"x-request-id": next(self._gateway.request_ids)})
