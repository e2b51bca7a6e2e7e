"""One backend under observation: probes of its health, what it serves, what its engine says of itself, and whether it
is still the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random

import msgspec

from gateway.backend import Backend
from gateway.errand import ErrandFailed, Errands
from gateway.reply import Clock
from gateway.signals import Signals, Vocabulary

LIMIT_S = 1.0  # for a probe: Kubernetes' own default
SCRAPE_LIMIT_S = 0.5
SOON_S = 0.2  # until the next probe while the last two do not agree: what is dead is known dead within 2 s
LAG_S = 0.2
RESTART_S = 10.0  # no engine loads its model faster: counters that went back twice in this time tell of a wrong clock
MODELS_S = 10.0  # how often it is asked what it serves
UNKNOWN = (401, 403, 404, 405, 501)  # somebody is there who does not know the path that engines have, or whom it is for
NO_METRICS_S = 30.0  # SGLang answers 404 without --enable-metrics; somebody may restart it with them


@dataclass(frozen=True, slots=True)
class Plan:
    """How the backends of a pool are watched. Seconds; an interval of 0 turns its part off. `strict`: the engine
    refuses models that it does not list; llama.cpp and TGI serve their one model under any name. `guessed`: nobody
    configured the path."""

    path: str = "/health"
    interval_s: float = 2.0
    scrape_s: float = 0.25
    vocabulary: Vocabulary | None = None
    metrics_path: str = ""
    strict: bool = True
    guessed: bool = False

    @property
    def scrapes(self) -> bool:
        """Whether engines are asked for their metrics."""
        return self.vocabulary is not None and self.scrape_s > 0.0


class Models(msgspec.Struct):
    """What `/v1/models` answers, as far as it matters."""

    class Model(msgspec.Struct):
        id: str

    data: list[Model]


@dataclass(slots=True)
class Sight:
    """What is known of a backend, whoever watches it. `models` None: it does not say. When it was last asked, nobody
    listened there (`gone`), or nothing came (`silent`). `ended`: its process is known to be no more."""

    why: str = ""
    gone: bool = False
    silent: bool = False
    ended: bool = False
    incarnation: int = 0
    models: frozenset[str] | None = None
    signals: Signals = field(default_factory=Signals)
    signals_at: float = 0.0
    restarted_at: float = -inf
    scrapes: int = 0
    scrape_s: float = 0.0  # of the loop's time, all scrapes together

    def follow(self, plan: Plan) -> None:
        """It is watched so from now on. What nobody asks for any more is not known."""
        if not plan.interval_s:
            self.why, self.gone, self.silent, self.models = "", False, False, None
        if not plan.scrapes:
            self.signals, self.signals_at = Signals(), 0.0


class Watch:
    """Asks one backend, by one task and on one connection. `told` is called after each probe and each scrape; the next
    probe comes soon while `settled` is False."""

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        clock: Clock,
        rng: Random,
        sight: Sight,
        *,
        probed: Callable[[bool], bool],
        seen: Callable[[bool], None],
    ) -> None:
        self.backend = backend
        self.sight = sight
        self._plan = plan
        self._clock = clock
        self._rng = rng
        self._probed = probed
        self._seen = seen
        self._errands = Errands(backend, clock)
        self._probe_at = self._scrape_at = self._models_at = 0.0

    def __repr__(self) -> str:
        return f"<Watch {self.backend.name} {self.sight.why or 'well'}>"

    def ask(self, backend: Backend) -> None:
        """The same backend, with other settings: they hold from the next question on."""
        self.backend = self._errands.backend = backend

    async def run(self) -> None:
        """For ever."""
        try:
            while True:
                await self._round()
                wait_s = min(self._probe_at, self._scrape_at) - self._clock()
                await asyncio.sleep(max(0.01, wait_s))
        finally:
            self._errands.close()

    async def _round(self) -> None:
        plan, now = self._plan, self._clock()
        if not plan.interval_s:
            self._probe_at = now + 3600.0
        elif now >= self._probe_at:
            await self._probe()
        if plan.vocabulary is None or not plan.scrape_s:
            self._scrape_at = now + 3600.0
        elif self._clock() >= self._scrape_at:
            if self.sight.why:
                self._scrape_at = self._probe_at + 0.01  # it is asked nothing more before it answers a probe
            else:
                await self._scrape(plan.vocabulary)

    async def _probe(self) -> None:
        plan, sight = self._plan, self.sight
        sight.gone, sight.silent, sight.why = False, False, ""
        began, limit_s = self._clock(), min(LIMIT_S, plan.interval_s)
        try:
            answer = await self._errands.get(plan.path, limit_s)
            if not (200 <= answer.status < 300 or (plan.guessed and answer.status in UNKNOWN)):
                sight.why = f"{plan.path} answered {answer.status}"
            elif self._clock() >= self._models_at or plan.path == "/v1/models":
                await self._ask_models()
        except ErrandFailed as failed:
            if self._clock() - began > limit_s + LAG_S:  # this process stood still itself, and knows nothing
                self._probe_at = self._clock()
                return
            sight.why, sight.gone, sight.silent = str(failed), failed.gone, failed.silent
            self._models_at = 0.0
        settled = self._probed(not sight.why)
        self._probe_at = self._clock() + (self._jittered(plan.interval_s) if settled else min(SOON_S, plan.interval_s))

    async def _ask_models(self) -> None:
        """Raises ErrandFailed. An answer that makes no sense means that it does not say."""
        answer = await self._errands.get("/v1/models", LIMIT_S)
        models = served(answer.body) if answer.status == 200 else None
        if models is not None and not models:
            self.sight.why = "it serves no model yet"
            return
        self.sight.models = models if self._plan.strict else None
        self._models_at = self._clock() + self._jittered(MODELS_S)

    async def _scrape(self, vocabulary: Vocabulary) -> None:
        sight = self.sight
        self._scrape_at = self._clock() + self._jittered(self._plan.scrape_s)
        try:
            answer = await self._errands.get(self._plan.metrics_path or vocabulary.path, SCRAPE_LIMIT_S)
        except ErrandFailed:
            self._probe_at = 0.0  # a probe will tell
            return
        if answer.status != 200:
            self._scrape_at = self._clock() + self._jittered(NO_METRICS_S)
            return
        began = self._clock()
        signals = vocabulary.read(answer.body)
        restarted = signals.restarted_since(sight.signals) and began - sight.restarted_at > RESTART_S
        sight.signals, sight.signals_at = signals, self._clock()
        sight.restarted_at = began if restarted else sight.restarted_at
        sight.scrapes += 1
        sight.scrape_s += sight.signals_at - began
        self._seen(restarted)

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.9, 1.1)


def served(body: bytes) -> frozenset[str] | None:
    """The ids of a list of models; None where it is none. Ollama's `name:latest` goes by `name`, too."""
    try:
        told = msgspec.json.decode(body, type=Models)
    except msgspec.DecodeError:
        return None
    ids = [model.id for model in told.data]
    return frozenset([*ids, *(each.removesuffix(":latest") for each in ids)])
