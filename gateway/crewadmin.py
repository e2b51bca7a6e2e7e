"""The one admin port of several workers: what they say together, and what all of them are told.

It asks for the token itself; the workers' sockets are private and ask for none. What cannot be added up is one worker's
word: `?worker=SEAT` says whose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway import gathered, page
from gateway.errors import INVALID_REQUEST, GatewayError, Refused
from gateway.exposition import content_type, exposed
from gateway.feed import Events, Feed
from gateway.guard import check_query, guarded, outcome, refused, standing, told, write, written
from gateway.ledger import QUERY, as_csv
from gateway.metrics import Family, Histogram, Numbers
from gateway.orders import Orders
from gateway.pulse import Pulse
from gateway.reload import Reloader
from gateway.reply import Clock
from gateway.requestmetrics import RequestMetrics
from gateway.vitals import Vitals
from gateway.workers import Crew

SCRAPE_S = 0.25  # how long a scrape waits for workers: Prometheus waits for it, and a worker may hang


class CrewAdmin:
    """The routes. `look` keeps what is shown up to date, and is called once a second."""

    def __init__(self, crew: Crew, orders: Orders, reloader: Reloader, clock: Clock) -> None:
        self._crew = crew
        self._orders = orders
        self._reloader = reloader
        self._clock = clock
        self._requests = RequestMetrics()
        self._lag = Vitals(clock, time.time).lag
        self._pulse = Pulse(self._requests, self._lag)
        self._picture: gathered.Row = {}
        self._beat()
        self.feed = Feed(lambda: write(self._picture))

    def application(self) -> Starlette:
        """The ASGI application of the admin port."""
        guard = partial(guarded, lambda: self._orders.generation.settings)
        routes = [
            Route("/healthz", self.healthz),
            Route("/livez", self.healthz),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
            Route("/admin/explain", guard(self.one), methods=["POST"]),
            Route("/admin/canary", guard(self.one)),
            Route("/admin/tenants", guard(self.tenants)),
            Route("/admin/backends", guard(self.backends)),
            Route("/admin/backends/{action}", guard(self.change_backends), methods=["POST"]),
            Route("/admin/usage", guard(self.usage)),
            Route("/admin/config", guard(self.config)),
            Route("/admin/reload", guard(self.reload), methods=["POST"]),
            Route("/admin/live", guard(self.live)),
            Route("/admin/recent/{number:int}", guard(self.recent)),
            *page.routes(),
        ]
        return Starlette(routes=routes, exception_handlers={GatewayError: refused})

    async def look(self) -> None:
        """Hear what the workers count, and see what they show while anybody watches."""
        await self._crew.hear_all(SCRAPE_S)
        self._beat()
        if self.feed.watched:
            await self._see()

    def _beat(self) -> None:
        """A second has passed: who comes because something is wrong sees how it came."""
        told = self._crew.sum.family
        for mine in self._pulse.families:
            _follow(mine, told(mine.name))
        queued, running = (_amount(told(f"headrace_{name}_requests")) for name in ("queued", "in_flight"))
        self._figures = self._pulse.look(self._clock(), queued=queued, running=running)

    async def _see(self) -> None:
        answers = await self._crew.ask_all("GET", "/picture")
        pictures = {seat: answer.json() for seat, answer in answers.items() if answer.status_code == httpx.codes.OK}
        if not pictures:
            return
        now = gathered.picture(pictures, self._crew.count)
        self._picture = now | {
            "generation": self._orders.generation.number,
            "workers": len(pictures),
            "figures": self._figures,
            "history": {name: list(values) for name, values in self._pulse.history.items()},
            "refusals": [
                {"reason": reason, "total": total, "lately": lately}
                for reason, (total, lately) in self._pulse.refused().items()
            ],
        }

    async def healthz(self, _: Request) -> Response:
        """The supervisor lives."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """Whether requests should be sent here: whether any worker would take them."""
        answers = [answer.json() for answer in (await self._crew.ask_all("GET", "/readyz")).values()]
        ready = sum(answer["ready"] for answer in answers)
        reason = None if ready else next((answer["reason"] for answer in answers), "no worker serves")
        told = {"ready": ready > 0, "reason": reason, "workers": self._crew.count, "workers_ready": ready}
        return JSONResponse(told, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus, in the format that it asks for: the sum of the workers, and the supervisor's own."""
        kind = content_type(request.headers.get("accept", ""))
        await self._crew.hear_all(SCRAPE_S)
        told = chain(self._crew.sum.families(), self._crew.metrics(), self._reloader.metrics())
        return Response(exposed(told, kind), headers={"content-type": kind})

    async def one(self, request: Request) -> Response:
        """What one worker answers: `?worker=SEAT`, or else the first."""
        crew, seat = self._crew, request.query_params.get("worker")
        worker = crew.up.get(int(seat)) if seat and seat.isdecimal() else next(iter(crew.up.values()), None)
        if worker is None:
            raise Refused(INVALID_REQUEST, f"There is no such worker: {sorted(crew.up)} serve.", param="worker")
        kind, body = request.headers.get("content-type", ""), await request.body()
        told = await worker.ask(request.method, _target(request), content=body, headers={"content-type": kind})
        return _passed(told)

    async def tenants(self, _: Request) -> Response:
        """`GET /admin/tenants`: what each may use, and what it uses of it now."""
        return await self._listed("tenants", gathered.tenants)

    async def backends(self, _: Request) -> Response:
        """`GET /admin/backends`: what each is now and why, and what its engine says."""
        return await self._listed("backends", gathered.backends)

    async def _listed(
        self, what: str, gather: Callable[[Iterable[list[gathered.Row]]], list[gathered.Row]]
    ) -> Response:
        answers = (await self._crew.ask_all("GET", f"/admin/{what}")).values()
        lists = [answer.json()[what] for answer in answers if answer.status_code == httpx.codes.OK]
        return written({what: gather(lists)}) if lists else _passed(None)

    async def change_backends(self, request: Request) -> Response:
        """`POST /admin/backends/add|remove|drain|undrain` with `{"url": URL, "pool": NAME}`: in every worker, and in
        those that are started later. A worker that refuses what another one did has it already."""
        answers = list((await self._crew.ask_all("POST", _target(request), content=await request.body())).values())
        done = next((answer for answer in answers if answer.status_code == httpx.codes.OK), None)
        if done is not None:
            now = done.json()
            self._orders.change(request.path_params["action"], now["pool"], now["backend"])
        return _passed(done or next(iter(answers), None))

    async def usage(self, request: Request) -> Response:
        """`GET /admin/usage[?from=TIME][&to=TIME][&by=hour][&format=csv]`: what tenants used of which models, by the
        books of the workers that serve now."""
        check_query(request, QUERY)
        query = {name: value for name, value in request.query_params.items() if name != "format"}
        answers = list((await self._crew.ask_all("GET", "/admin/usage", params=query)).values())
        bad = next((answer for answer in answers if answer.status_code != httpx.codes.OK), None)
        if bad is not None or not answers:
            return _passed(bad)
        found = gathered.usage([answer.json() for answer in answers])
        if request.query_params.get("format") == "csv" or "text/csv" in request.headers.get("accept", ""):
            return Response(as_csv(found["rows"], hourly=query.get("by") == "hour"), media_type="text/csv")
        return written(found)

    async def config(self, _: Request) -> Response:
        """`GET /admin/config`: what holds, and what came of the last attempt to change it. Secrets are references."""
        return written(standing(self._reloader.last, self._orders.generation.settings))

    async def reload(self, _: Request) -> Response:
        """`POST /admin/reload`: read the file now. 422, and everything as it was, if it is bad; else all workers have
        it when this answers."""
        report = await self._reloader.reload("admin")
        if not report.problems:
            await self._crew.spread()
        return written(outcome(report), 422 if report.problems else 200)

    async def live(self, _: Request) -> Response:
        """`GET /admin/live`: what the console shows, as one server-sent event a second."""
        if self.feed.full:
            return told(503, "Too many watch already, or the gateway stops.", "too_many_viewers")
        if not self.feed.watched:
            await self._see()
        return Events(self.feed) if self._picture else _passed(None)  # type: ignore[return-value]

    async def recent(self, request: Request) -> Response:
        """`GET /admin/recent/NUMBER`: one slow or failed request with its timeline and the decisions about it."""
        seat, number = gathered.seat_of(request.path_params["number"], self._crew.count)
        worker = self._crew.up.get(seat)
        return _passed(await worker.ask("GET", f"/admin/recent/{number}") if worker is not None else None)


def _amount(family: Family | None) -> int:
    return round(sum(family.values.values())) if isinstance(family, Numbers) else 0


def _follow(mine: Family, theirs: Family | None) -> None:
    """A family that figures are made of shows the numbers of the sum."""
    if isinstance(mine, Numbers) and isinstance(theirs, Numbers):
        mine.values = theirs.values
    elif isinstance(mine, Histogram) and isinstance(theirs, Histogram):
        mine.children = theirs.children


def _target(request: Request) -> str:
    return f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path


def _passed(answer: httpx.Response | None) -> Response:
    if answer is None:
        return told(503, "No worker answers now.", "no_worker")
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
