"""`/v1/models`: what the caller's tenant may use, aliases included."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.auth import KeyRing
from gateway.catalog import Catalog
from gateway.errors import MODEL_NOT_FOUND, Refused
from gateway.wire import not_found


class Models:
    """The two routes. Both raise Refused."""

    def __init__(self, catalog: Catalog, keys: KeyRing, request_ids: Iterator[str]) -> None:
        self._catalog = catalog
        self._keys = keys
        self._request_ids = request_ids

    def routes(self) -> list[Route]:
        """A name may hold slashes and colons, so it is a path."""
        return [Route("/v1/models", self.list), Route("/v1/models/{name:path}", self.get)]

    async def list(self, request: Request) -> Response:
        """`GET /v1/models`"""
        tenant = self._keys.identify(request.headers.raw)
        data = [self._object(name) for name in self._catalog.visible(tenant)]
        return self._answer({"object": "list", "data": data})

    async def get(self, request: Request) -> Response:
        """`GET /v1/models/{name}`"""
        tenant = self._keys.identify(request.headers.raw)
        name: str = request.path_params["name"]
        if name not in self._catalog.visible(tenant):
            raise Refused(MODEL_NOT_FOUND, not_found(name), param="model")
        return self._answer(self._object(name))

    def _object(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._catalog.created, "owned_by": "headrace"}

    def _answer(self, body: dict[str, object]) -> Response:
        return JSONResponse(body, headers={"x-request-id": next(self._request_ids)})
