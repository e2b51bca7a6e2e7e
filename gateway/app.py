"""The wiring: which objects make a gateway, which path leads where, and how it starts and stops."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from random import Random
from secrets import token_hex

from gateway import assembly, entitled, poolmetrics
from gateway.client import Buffers, Client
from gateway.config import Config
from gateway.dispatch import Dispatcher
from gateway.doors import Doors
from gateway.errors import INTERNAL_ERROR, SHUTTING_DOWN, GatewayError, Unavailable
from gateway.exchange import Exchange
from gateway.fleet import Fleet
from gateway.jobs import Jobs
from gateway.ledger import Ledger
from gateway.metrics import Family, Gauge
from gateway.proxy import proxy
from gateway.quota import Quota
from gateway.rest import cors
from gateway.roster import Search
from gateway.shadows import Shadows
from gateway.telemetry import Telemetry
from gateway.turn import Turn
from gateway.upstream import Upstream
from gateway.vitals import Vitals

REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")  # a client's own id that may stand in logs and headers
TIDY_S = 1.0  # how often it is looked whether a pool that was taken out is done

logger = logging.getLogger("headrace")


class Gateway:
    """Everything that one process serves with. `async with gateway` runs what must run beside the requests."""

    def __init__(
        self, settings: Config, log: Callable[[bytes], None], also: Callable[[], Iterable[Family]] = tuple
    ) -> None:
        """`log` takes the lines of requests; `also` yields the metrics of what lies around the gateway."""
        self._also = also
        self.clock = time.monotonic
        jobs = Jobs(entitled.seeds(settings))
        self.dispatcher = Dispatcher(jobs, self.clock)
        self.quota = Quota(assembly.store(settings, self.clock), jobs, self.clock)
        self.upstream = Upstream(self.clock)
        self.fleet = Fleet(
            self.dispatcher.pools,
            self.upstream,
            self.clock,
            Random(),  # noqa: S311 (jitter)
            log,
            time.time,
        )
        self.tracer = assembly.tracer(settings, Random())  # noqa: S311 (ids need not be secret)
        self.telemetry = Telemetry(log, self.tracer, time.time, Random())  # noqa: S311 (samples)
        self._tell(settings)
        self.vitals = Vitals(self.clock, time.time)
        self.vitals.on_strain = self._strained
        self.ledger = Ledger(time.time, self.telemetry.label)
        self.buffers = Buffers(settings.server.max_buffered)
        self.doors = Doors()
        self.shadows = Shadows(
            self.dispatcher,
            self.upstream,
            self.buffers,
            self.clock,
            Random(),  # noqa: S311 (samples)
        )
        self.leaving = False
        self.draining = False
        self.active: set[Exchange] = set()
        self.request_ids = (f"req_{prefix}{number:08x}" for prefix in [token_hex(8)] for number in count(1))
        self._rng = Random()  # noqa: S311 (ties and jitter)
        self._created = int(time.time())
        self._used: dict[bytes, float] = {}  # keys
        self._leaving: dict[str, int] = {}  # pools, each with the first generation that knows nothing of it
        self._tidying: asyncio.TimerHandle | None = None
        self.generation = entitled.generation(1, settings, self._created, self._used)
        self.telemetry.versions.configure(self.generation.catalog.canaries())
        assembly.fit(self.dispatcher.pools, settings, self.clock, self._rng)

    def __repr__(self) -> str:
        return f"<Gateway {len(self.active)} requests, {self.upstream!r}>"

    async def __aenter__(self) -> Gateway:
        await self.upstream.__aenter__()
        await self.quota.__aenter__()
        await self.vitals.__aenter__()
        if self.tracer is not None:
            await self.tracer.__aenter__()
        await self.fleet.__aenter__()
        await self.shadows.__aenter__()
        self._plan(self.settings, assembly.searches(self.settings, self._rng))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
        await self.shadows.__aexit__(*exc)
        await self.fleet.__aexit__(*exc)
        self.dispatcher.close()
        await self.vitals.__aexit__(*exc)
        if self.tracer is not None:
            await self.tracer.__aexit__(*exc)
        await self.quota.__aexit__(*exc)
        await self.upstream.__aexit__(*exc)

    @property
    def settings(self) -> Config:
        """The configuration that holds now."""
        return self.generation.settings

    def apply(self, settings: Config) -> None:
        """What begins from now on is judged by `settings`. Whatever is under way keeps its place: running answers,
        queues, what was learned, connections. A pool that is not named any more serves those who began before. Raises
        OSError or Undiscoverable, and changes nothing, where backends cannot be looked for as `settings` say."""
        searches = assembly.searches(settings, self._rng)
        now = entitled.generation(self.generation.number + 1, settings, self._created, self._used)
        pools = self.dispatcher.pools
        assembly.fit(pools, settings, self.clock, self._rng)
        self.dispatcher.jobs.reseed(entitled.seeds(settings))
        self._tell(settings)
        self.telemetry.versions.configure(now.catalog.canaries())
        self.shadows.keep(settings.pools)
        self.buffers.budget = settings.server.max_buffered
        self._leaving = {name: self._leaving.get(name, now.number) for name in pools if name not in settings.pools}
        self.generation = now
        self._plan(settings, searches)
        if self._tidying is None:
            self._tidy()

    def _tell(self, settings: Config) -> None:
        self.telemetry.configure(settings)
        self.dispatcher.shed = frozenset(name for name, told in settings.classes.items() if told.ceiling < 1.0)
        self.quota.apply(entitled.limits(settings), self.telemetry.tenants)

    def _plan(self, settings: Config, searches: Mapping[str, Search]) -> None:
        make = partial(assembly.backend, settings)
        self.fleet.plan(assembly.plans(settings), assembly.found(settings), searches, make)

    def _tidy(self) -> None:
        """Pools go when everybody has left who began while a configuration named them."""
        oldest = min((x.generation for x in self.active), default=self.generation.number)
        gone = [name for name, number in self._leaving.items() if number <= oldest]
        self.upstream.forget(self.dispatcher.drop(gone))
        for name in gone:
            del self._leaving[name]
        self._tidying = asyncio.get_running_loop().call_later(TIDY_S, self._tidy) if self._leaving else None

    def _strained(self, strained: bool) -> None:
        """The event loop is too slow for all that is asked: work that nobody watches is refused first."""
        self.dispatcher.strained = strained

    def not_ready(self) -> str:
        """Why no request should be sent here; empty when all is well."""
        return "draining" if self.leaving or self.draining else ""

    def metrics(self) -> Iterator[Family]:
        """What each part tells of itself, when somebody scrapes."""
        yield from self.telemetry.metrics(self.dispatcher.alive())
        yield self.dispatcher.fallbacks
        yield from poolmetrics.metrics(self.dispatcher.pools, self.clock())
        yield from poolmetrics.costs(self.dispatcher.pools, self.clock())
        yield from self.ledger.metrics()
        yield from self.quota.metrics()
        yield from self.fleet.metrics()
        if self.tracer is not None:
            yield from self.tracer.metrics()
        yield from self.upstream.metrics()
        yield from self.buffers.metrics()
        yield from self.vitals.metrics()
        yield from self.shadows.metrics()
        streams = sum(x.call is not None and x.call.stream for x in self.active)
        yield from self._also()
        under_way = Gauge("headrace_open_requests", "Requests under way, in whatever phase.", total="sum")
        yield under_way.of({(): len(self.active)})
        yield Gauge("headrace_open_streams", "Those of them that asked for a stream.", total="sum").of({(): streams})

    async def wait_idle(self) -> None:
        """Returns when no request is under way."""
        while self.active:  # noqa: ASYNC110 (an event would cost every request a little, for one drain in a life)
            await asyncio.sleep(0.02)

    def leave(self) -> None:
        """Nobody should come here any more. Who does is served, and told to come by another connection next time."""
        self.leaving = True

    def stop_queueing(self) -> None:
        """From now on no request is taken, and those that wait are refused. Running ones go on."""
        self.draining = True
        self.shadows.close()
        self.dispatcher.refuse_waiting(shutting_down())

    def stop_running(self) -> None:
        """The time is up: running answers end with an error frame."""
        self.upstream.fail_all(shutting_down())

    async def infer(self, turn: Turn) -> None:
        """One request of the path: whatever happens to it, it is answered, settled and recorded once."""
        began = self.generation
        x = Exchange(next(self.request_ids), self.clock(), turn.endpoint, generation=began.number)
        told = began.settings.server
        client = Client(turn, buffers=self.buffers, max_body=told.max_body, body_s=told.body_timeout, clock=self.clock)
        error: GatewayError | None = None
        self.active.add(x)
        try:
            with client:
                self._greet(client, x)
                await proxy(self, client, x)
        except GatewayError as refused:
            error = refused
        except Exception:  # a bug of ours must not cost its client an answer, nor anybody the record of it
            logger.exception("request %s failed", x.request_id)
            error = GatewayError(INTERNAL_ERROR, "The gateway failed. The fault is logged under the request id.")
        except asyncio.CancelledError:
            error = shutting_down()
            raise
        finally:
            if error is not None:
                client.refuse(error, x)
                error.__traceback__ = None  # its frames hold the error and the body: both would stay till a collection
            x.end(self.clock(), error)
            self.active.discard(x)
            self.telemetry.record(x)
            self.ledger.record(x)
            if began.catalog.shadows:
                self.shadows.cast(x, began.catalog.shadows)
            x.let_go()

    def _greet(self, client: Client, x: Exchange) -> None:
        sent_id = client.headers.get(b"x-request-id")
        if sent_id is not None and REQUEST_ID.fullmatch(sent_id):
            x.request_id = sent_id.decode()
        if self.tracer is not None:
            x.trace = self.tracer.begin(*client.trace_context())
        if self.leaving:
            client.say_goodbye()
        origins = self.generation.origins
        if origins and (origin := client.headers.get(b"origin")) and not origins.isdisjoint((origin, b"*")):
            x.answer_headers += cors(origin)
        if self.draining:
            raise shutting_down()


def shutting_down() -> Unavailable:
    return Unavailable(SHUTTING_DOWN, "The gateway is shutting down.", retry_after=1.0)
