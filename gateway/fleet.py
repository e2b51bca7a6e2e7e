"""All backends under observation: who is there, who is watched, and what the pools are told of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from random import Random

import msgspec

from gateway.backend import Backend
from gateway.discovery import Endpoint
from gateway.errors import BACKEND_LOST, Phase, UpstreamFailed
from gateway.fleetmetrics import metrics
from gateway.lateness import late
from gateway.metrics import Counter, Family
from gateway.pool import Pool
from gateway.reply import Clock
from gateway.roster import Member, Roster, Search
from gateway.signals import Signals
from gateway.upstream import Upstream
from gateway.watch import Plan, Sight, Watch
from policies.verdicts import Found, State

TICK_S = 0.1  # how soon an ejection ends when its time has come

logger = logging.getLogger("headrace")


class BackendLine(msgspec.Struct, gc=False):
    """The log line of one backend that is something else now. `time` in seconds since the epoch."""

    time: float
    pool: str
    backend: str
    state: str
    why: str
    level: str = "warning"
    event: str = "backend"


_write = msgspec.json.Encoder().encode


class Fleet:
    """`async with fleet` watches. Whatever changes, the pools are told at once; this is the only writer of views."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        upstream: Upstream,
        clock: Clock,
        rng: Random,
        log: Callable[[bytes], object],
        wall_clock: Clock,
    ) -> None:
        self.rosters: dict[str, Roster] = {}
        self._pools = pools
        self._upstream = upstream
        self._clock = clock
        self._rng = rng
        self._log = log
        self._wall_clock = wall_clock
        self._tasks: set[asyncio.Task[None]] = set()
        self.ejections = Counter("headrace_ejections_total", "Backends taken out.", "pool", "backend", "reason")

    def __repr__(self) -> str:
        return f"<Fleet {[member.watch for roster in self.rosters.values() for member in roster.members.values()]}>"

    async def __aenter__(self) -> Fleet:
        self.start(self._tick())
        return self

    async def __aexit__(self, *exc: object) -> None:
        for roster in self.rosters.values():
            for member in roster.members.values():
                self._tasks.add(member.task)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, work: object) -> asyncio.Task[None]:
        """Run something for as long as the fleet stands, or until it is cancelled."""
        assert asyncio.iscoroutine(work)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_complain)
        return task

    # -- who is there -------------------------------------------------------------------------------------------

    def plan(
        self,
        plans: Mapping[str, Plan],
        found: Mapping[str, Iterable[Backend]],
        searches: Mapping[str, Search],
        make: Callable[[str, str], Backend],
    ) -> None:
        """These are the pools, how they are watched, and the backends of those that name them; `make` makes others of
        the name of a pool and a URL. Called again when they have changed; what was said at run time of a pool that
        stays holds on."""
        for name in self.rosters.keys() - plans.keys():
            gone = self.rosters.pop(name)
            self._search(gone, None)
            self._dismiss(gone, keep=())
        for name, plan in plans.items():
            roster = self.rosters.get(name)
            if roster is None:
                roster = self.rosters[name] = Roster(self._pools[name], plan)
            elif roster.plan != plan:
                self._follow(roster, plan)
            # Those that were found or added before are made anew: their pool may have other clocks or another key.
            known = found[name] if name in found else [make(name, url) for url in roster.found]
            roster.found = {backend.name: backend for backend in known}
            roster.added = {url: make(name, url) for url in roster.added}
            self.settle(name)
            self._search(roster, searches.get(name))

    def _search(self, roster: Roster, search: Search | None) -> None:
        """Look for its backends there from now on."""
        before, roster.search = roster.search, search
        if roster.searching is not None and (search is None or before is None or search.key != before.key):
            roster.searching.cancel()
            roster.searching = None
        if search is not None and roster.searching is None:
            roster.searching = self.start(search.source.watch(partial(self.discovered, roster)))

    def discovered(self, roster: Roster, endpoints: Sequence[Endpoint]) -> None:
        """These are the backends of a pool, as far as its source knows. Those that stay are not made anew."""
        assert roster.search is not None
        known, make = roster.found, roster.search.make
        urls = [endpoint.url for endpoint in endpoints]
        roster.found = {url: known[url] if url in known else make(url) for url in urls}
        roster.leaving = frozenset(endpoint.url for endpoint in endpoints if not endpoint.ready)
        self.settle(roster.pool.name)

    def settle(self, name: str) -> None:
        """Bring a pool and its watches in line with its roster."""
        roster = self.rosters[name]
        present = {backend.name: backend for backend in roster.present()}
        if any(roster.pool.backends.get(each) is not backend for each, backend in present.items()) or len(
            present
        ) != len(roster.pool.backends):
            self._upstream.forget(roster.pool.observe(present.values()))
        self._dismiss(roster, keep=present)
        roster.sights = {each: roster.sights.get(each) or Sight() for each in present}
        roster.told = {each: state for each, state in roster.told.items() if each in present}
        for each, backend in present.items():
            member = roster.members.get(each)
            if member is None:
                self._watch(roster, backend)
            else:
                member.backend = backend
                member.watch.ask(backend)
        self._show(roster)

    def _follow(self, roster: Roster, plan: Plan) -> None:
        """They are watched by another plan from now on. What is known of them stays."""
        roster.plan = plan
        for member in roster.members.values():
            member.task.cancel()
        roster.members.clear()
        for sight in roster.sights.values():
            sight.follow(plan)

    def _watch(self, roster: Roster, backend: Backend) -> None:
        if not (roster.plan.interval_s or roster.plan.scrapes):
            return
        watch = Watch(
            backend,
            roster.plan,
            self._clock,
            self._rng,
            roster.sights[backend.name],
            probed=partial(self._probed, roster, backend.name),
            seen=partial(self._seen, roster, backend.name),
        )
        roster.members[backend.name] = Member(backend, watch, self.start(watch.run()))

    def _dismiss(self, roster: Roster, keep: Iterable[str]) -> None:
        """Who has gone is watched no more, unless requests are still there: if it falls silent they must know."""
        for name in roster.members.keys() - set(keep):
            member = roster.members.pop(name)
            member.task.cancel()
            if self._upstream.busy(name):
                self.start(self._see_off(member.backend, roster.plan))

    async def _see_off(self, backend: Backend, plan: Plan) -> None:
        """Nobody else tells its requests that its machine is gone. An answer of whatever kind is a sign of life; a
        process that ends is seen on its connections, and one that ends in order only listens no more."""
        silences, sight = 0, Sight()

        def probed(good: bool) -> bool:
            nonlocal silences
            silences = silences + 1 if sight.silent else 0
            return good

        def seen(restarted: bool) -> None:
            """What its engine says matters to nobody any more."""

        hasty = Plan(plan.path, min(plan.interval_s or 1.0, 0.5), 0.0, strict=False)
        watch = Watch(backend, hasty, self._clock, self._rng, sight, probed=probed, seen=seen)
        task = self.start(watch.run())
        while self._upstream.busy(backend.name) and silences < 3:  # noqa: ASYNC110 (once in a backend's life)
            await asyncio.sleep(TICK_S)
        task.cancel()
        if silences:
            self._upstream.fail(backend.name, _lost, started=True)

    # -- what is known of them ----------------------------------------------------------------------------------

    def _probed(self, roster: Roster, name: str, good: bool) -> bool:
        """Returns whether the last probes agree with what is believed of it."""
        health = roster.pool.health
        if name not in roster.members:
            return True
        sight = roster.sights[name]
        before = health.records[name].probed
        changed = health.probed(name, good, self._clock(), silent=sight.silent)
        after = health.records[name].probed
        if after is False and before is not False and any(v.open for v in health.verdicts(self._clock()).values()):
            self._upstream.fail(name, _lost, started=False)  # they are better off elsewhere
        if sight.gone and after is False and not sight.ended:
            self._replaced(roster, name)  # whoever listens there later is another process
            sight.signals = Signals()
        sight.ended = sight.gone and after is False
        changed |= roster.pool.eligible.serves(name, sight.models)
        if changed:
            self._show(roster)
        return good is after and (good or before is False)

    def _seen(self, roster: Roster, name: str, restarted: bool) -> None:
        if name not in roster.members:
            return
        if restarted:
            self._replaced(roster, name)
            self._tell(roster, name, "restarted", "")
        self._show(roster)

    def _replaced(self, roster: Roster, name: str) -> None:
        roster.sights[name].incarnation += 1
        roster.pool.health.restarted(name, self._clock())

    def _show(self, roster: Roster) -> None:
        """Tell the pool what is known of its backends, and the log of what has become of them."""
        now = self._clock()
        roster.pool.see(roster.views(now))
        self._report(roster, now)

    def _report(self, roster: Roster, now: float) -> None:
        for name, sight in roster.sights.items():
            state = roster.pool.health.state(name, now)
            was = roster.told.get(name, State.NEW)
            if state is was:
                continue
            roster.told[name] = state
            if state in (State.DOWN, State.EJECTED) and was is not State.TRIAL:
                self.ejections.values[(roster.pool.name, name, state.value)] += 1
            if was is not State.NEW or state is not State.UP:
                self._tell(roster, name, state.value, sight.why)

    def _tell(self, roster: Roster, name: str, state: str, why: str) -> None:
        line = BackendLine(round(self._wall_clock(), 3), roster.pool.name, name, state, why)
        self._log(_write(line) + b"\n")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            for roster in self.rosters.values():
                pool = roster.pool
                for attempt in late(pool, now):
                    attempt.late = True
                    pool.judge(attempt, Found.LATE)
                if now >= pool.change_at:
                    pool.refresh()
                self._report(roster, now)

    def metrics(self) -> Iterator[Family]:
        """What is known of the backends, and how often they were taken out."""
        yield from metrics(self.rosters.values(), self._clock)
        self.ejections.retain(lambda key: key[0] in self.rosters and key[1] in self.rosters[key[0]].sights)
        for pool, roster in self.rosters.items():
            for name, state in product(roster.sights, (State.DOWN, State.EJECTED)):
                self.ejections.values[(pool, name, state.value)] += 0  # the first one is an increase, too
        yield self.ejections


def _lost() -> UpstreamFailed:
    return UpstreamFailed("The model backend stopped answering.", Phase.SENT, refusal=BACKEND_LOST)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the fleet's %s has failed", task.get_name(), exc_info=error)
