"""The admin port: liveness, readiness and metrics for everybody, the rest for who has the admin token.

None of it waits for anything but the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway import assembly, page, wire
from gateway.board import Board, Shown
from gateway.errors import INVALID_REQUEST, UNKNOWN_URL, GatewayError, Refused
from gateway.exchange import Exchange
from gateway.exposition import content_type, exposed
from gateway.feed import Events, Feed
from gateway.fleetadmin import change, listed
from gateway.guard import Handler, check_query, guarded, outcome, refused, standing, told, write, written
from gateway.ledger import QUERY, Ledger, as_csv, iso
from gateway.metrics import Family
from gateway.overview import overview
from gateway.reload import Reloader
from gateway.summed import packed
from gateway.units import instant

MAX_BODY = 8 * 2**20  # of a request to be explained
LAST = 2**40  # seconds: later than anything
Change = tuple[str, str, str]
"""Of a pool's backends: an action, the pool, the URL."""


class Named(msgspec.Struct):
    """A backend, as a request names it."""

    url: str
    pool: str | None = None


class Subject(Shown, Protocol):
    """What is administered."""

    ledger: Ledger

    def not_ready(self) -> str: ...
    def metrics(self) -> Iterable[Family]: ...


class Admin:
    """The routes. Without a token in the configuration, what needs one answers 403, on loopback too."""

    def __init__(self, subject: Subject, reloader: Reloader) -> None:
        self._subject = subject
        self._reloader = reloader
        self.board = Board(subject, time.time)
        self.feed = Feed(lambda: write(self.board.look()))

    def application(self) -> Starlette:
        """The ASGI application of the admin port."""
        guard = partial(guarded, lambda: self._subject.generation.settings)
        routes = [
            Route("/healthz", self.healthz),
            Route("/livez", self.healthz),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
            *self._inner(guard),
            Route("/admin/config", guard(self.config)),
            Route("/admin/reload", guard(self.reload), methods=["POST"]),
            Route("/admin/live", guard(self.live)),
            *page.routes(),
        ]
        return Starlette(routes=routes, exception_handlers={GatewayError: refused})

    def private(self) -> Starlette:
        """The ASGI application of a socket that nobody but a worker's supervisor can reach: it asks for no token."""
        routes = [
            Route("/readyz", self.readyz),
            Route("/families", self.families),
            Route("/picture", self.picture),
            Route("/take", self.take, methods=["POST"]),
            *self._inner(lambda handler: handler),
        ]
        return Starlette(routes=routes, exception_handlers={GatewayError: refused})

    def _inner(self, guard: Callable[[Handler], Handler]) -> list[Route]:
        """What one process can say of itself, and do."""
        return [
            Route("/admin/explain", guard(self.explain), methods=["POST"]),
            Route("/admin/tenants", guard(self.tenants)),
            Route("/admin/backends", guard(self.backends)),
            Route("/admin/backends/{action}", guard(self.change_backends), methods=["POST"]),
            Route("/admin/canary", guard(self.canary)),
            Route("/admin/usage", guard(self.usage)),
            Route("/admin/recent/{number:int}", guard(self.recent)),
        ]

    async def healthz(self, _: Request) -> Response:
        """The process lives."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """Whether requests should be sent here."""
        reason = self._subject.not_ready()
        return JSONResponse({"ready": not reason, "reason": reason or None}, 503 if reason else 200)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus, in the format that it asks for."""
        subject, kind = self._subject, content_type(request.headers.get("accept", ""))
        began_at = subject.clock()
        body = exposed(chain(subject.metrics(), self._reloader.metrics()), kind)
        subject.vitals.scraped(subject.clock() - began_at)
        return Response(body, headers={"content-type": kind})

    async def explain(self, request: Request) -> Response:
        """`POST /admin/explain?tenant=NAME[&path=/v1/chat/completions]` with a request body: where it would go and
        why. Nothing is sent."""
        subject = self._subject
        path = request.query_params.get("path", "/v1/chat/completions")
        endpoint = wire.ENDPOINTS.get(path)
        tenant = subject.generation.keys.tenant(request.query_params.get("tenant", "anonymous"))
        if endpoint is None or tenant is None:
            what = f"path {path!r}" if endpoint is None else "tenant: name one that has a key, ?tenant=NAME"
            raise Refused(INVALID_REQUEST, f"There is no such {what}.")
        if int(request.headers.get("content-length", "0")) > MAX_BODY:
            raise Refused(INVALID_REQUEST, f"Only requests up to {MAX_BODY} bytes are explained.")
        body, kind = await request.body(), request.headers.get("content-type", "").encode()
        x = Exchange("explained", subject.clock(), endpoint)
        x.identify(tenant, wire.parse(endpoint, kind, body, subject.generation.catalog, tenant))
        assert x.call is not None
        told = {"pool": x.call.pool, "model": x.call.label, "class": x.class_, "prompt_bytes": x.call.prompt_bytes}
        answer = write({**told, "decision": subject.dispatcher.explain(x)})
        return Response(answer, media_type="application/json")

    async def tenants(self, _: Request) -> Response:
        """`GET /admin/tenants`: what each may use, and what it uses of it now."""
        subject = self._subject
        told = overview(subject.generation, subject.quota, subject.doors, subject.active, time.time())
        return written({"tenants": told})

    async def backends(self, _: Request) -> Response:
        """`GET /admin/backends`: what each is now and why, and what its engine says."""
        return written({"backends": listed(self._subject.fleet, self._subject.clock())})

    async def change_backends(self, request: Request) -> Response:
        """`POST /admin/backends/add|remove|drain|undrain` with `{"url": URL, "pool": NAME}`."""
        action = request.path_params["action"]
        if action not in ("add", "remove", "drain", "undrain"):
            raise Refused(UNKNOWN_URL, f"A backend can be added, removed, drained or undrained, not {action!r}.")
        try:
            named = msgspec.json.decode(await request.body(), type=Named)
        except msgspec.DecodeError as error:
            raise Refused(INVALID_REQUEST, f"The body names a backend: {error}.") from error
        return written(self._change(action, named.pool, named.url))

    def _change(self, action: str, pool: str | None, url: str) -> dict[str, Any]:
        subject = self._subject
        make = partial(assembly.backend, subject.generation.settings)
        return change(subject.fleet, action, pool, url, make, subject.clock())

    def replay(self, changes: Iterable[Change]) -> None:
        """Make changes again that were made before this process began. What they need not change is passed over."""
        for each in changes:
            with suppress(Refused):
                self._change(*each)

    async def canary(self, _: Request) -> Response:
        """`GET /admin/canary`: how each canary compares with what it would replace, as far as this process saw."""
        return written({"canaries": self._subject.telemetry.versions.told()})

    async def usage(self, request: Request) -> Response:
        """`GET /admin/usage[?from=TIME][&to=TIME][&by=hour][&format=csv]`: what tenants used of which models, in whole
        hours, and what it cost."""
        check_query(request, QUERY)
        asked, ledger = request.query_params, self._subject.ledger
        begin, end = _moment(asked.get("from"), "from", 0.0), _moment(asked.get("to"), "to", float(LAST))
        if begin >= end:
            raise Refused(
                INVALID_REQUEST, "Nothing lies from `from` on and before `to`: give a later `to`.", param="to"
            )
        hourly = asked.get("by") == "hour"
        rows = ledger.rows(begin, end, hourly=hourly)
        if asked.get("format") == "csv" or "text/csv" in request.headers.get("accept", ""):
            return Response(as_csv(rows, hourly=hourly), media_type="text/csv")
        return written({"since": iso(ledger.since), "rows": rows})

    async def config(self, _: Request) -> Response:
        """`GET /admin/config`: what holds, and what came of the last attempt to change it. Secrets are references."""
        return written(standing(self._reloader.last, self._subject.generation.settings))

    async def reload(self, _: Request) -> Response:
        """`POST /admin/reload`: read the file now. 422, and everything as it was, if it is bad."""
        report = await self._reloader.reload("admin")
        return written(outcome(report), 422 if report.problems else 200)

    async def live(self, _: Request) -> Response:
        """`GET /admin/live`: what the console shows, as one server-sent event a second."""
        if self.feed.full:
            return told(503, "Too many watch already, or the gateway stops.", "too_many_viewers")
        return Events(self.feed)  # type: ignore[return-value]  # any ASGI application is answer enough

    async def families(self, _: Request) -> Response:
        """`GET /families`: the metrics, for adding up."""
        subject, began_at = self._subject, self._subject.clock()
        body = packed(subject.metrics())
        subject.vitals.scraped(subject.clock() - began_at)
        return Response(body, media_type="application/octet-stream")

    async def picture(self, _: Request) -> Response:
        """`GET /picture`: one event of `/admin/live`."""
        return written(self.board.look())

    async def take(self, request: Request) -> Response:
        """`POST /take`: the body is what holds from now on."""
        report = await self._reloader.reload("supervisor", (await request.body()).decode())
        return written(outcome(report), 422 if report.problems else 200)

    async def recent(self, request: Request) -> Response:
        """`GET /admin/recent/NUMBER`: one slow or failed request with its timeline and the decisions about it."""
        seen = self._subject.telemetry.recent.find(request.path_params["number"])
        if seen is None:
            return told(404, "It is not kept any more.", "not_found")
        pool = self._subject.generation.settings.pools.get(seen.pool)
        return written(msgspec.to_builtins(seen) | {"routing": pool.routing if pool is not None else None})


def _moment(text: str | None, name: str, default: float) -> float:
    """Seconds since the epoch. Raises Refused."""
    if text is None:
        return default
    try:
        return float(text) if text.isdigit() else instant(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise Refused(INVALID_REQUEST, f"{name}: {error}", param=name) from error
