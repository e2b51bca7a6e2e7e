"""Everything that can be done to a stage, and a seeded mixture of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random

from loadtests.faultrelay import FaultRelay, Weather
from loadtests.nameserver import Mood
from loadtests.stage import Stage

QUIET_S, LASTS_S = (2.0, 10.0), (0.5, 6.0)  # between two faults of one victim, and how long each lasts


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that can go wrong. `shuns`: requests must stop going to the backend that has it."""

    kind: str
    strike: Callable[[], Awaitable[None]]
    heal: Callable[[], Awaitable[None]]
    shuns: bool = False


# Weathers that a gateway has to see through; the others let some requests pass, or all of them.
SHUNNED = (Weather.KILL, Weather.STOP, Weather.SLOW, Weather.ERROR, Weather.GARBAGE, Weather.HEADERS, Weather.HALF_OPEN)


def of_backend(stage: Stage, number: int) -> list[Fault]:
    """What can happen to one backend, its address in DNS included."""
    relay = stage.relays[number]

    async def fair() -> None:
        await relay.turn(Weather.FAIR)

    async def unlist() -> None:
        stage.unlisted.add(number)
        stage.publish()

    async def list_again() -> None:
        stage.unlisted.discard(number)
        stage.publish()

    async def move() -> None:
        await relay.move()
        stage.publish()

    def weather(each: Weather) -> Fault:
        return Fault(each.value, lambda: relay.turn(each), fair, each in SHUNNED)

    found = [weather(each) for each in Weather if each is not Weather.FAIR]
    return [*found, Fault("dns-unlisted", unlist, list_again, shuns=True), Fault("dns-moved", move, fair)]


def of_store(stage: Stage) -> list[Fault]:
    """The Valkey is gone, with all it counted; or does not answer."""
    store = stage.store
    return [Fault("redis-kill", store.kill, store.start), Fault("redis-stop", store.stop, store.go_on)]


def of_names(stage: Stage) -> list[Fault]:
    """Nobody knows where the backends are."""

    def mood(told: Mood) -> Callable[[], Awaitable[None]]:
        async def turn() -> None:
            stage.names.mood = told

        return turn

    return [Fault(f"dns-{told}", mood(told), mood(Mood.ANSWERS)) for told in (Mood.SILENT, Mood.FAILS)]


def kinds() -> list[str]:
    """The names of all faults."""
    of_names = [f"dns-{told}" for told in (Mood.SILENT, Mood.FAILS)]
    weathers = [each.value for each in Weather if each is not Weather.FAIR]
    return [*weathers, "dns-unlisted", "dns-moved", *of_names, "redis-kill", "redis-stop"]


def fault(stage: Stage, kind: str) -> Fault:
    """The fault of that name; what concerns a backend happens to the first."""
    return next(each for each in [*of_backend(stage, 0), *of_store(stage), *of_names(stage)] if each.kind == kind)


class Storm:
    """Each victim suffers one fault after the other: what, when and how long is decided by the seed alone. The last
    backend is left alone."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.count: Counter[str] = Counter()
        self._stage = stage
        self._over = asyncio.Event()
        backends = [of_backend(stage, number) for number in range(len(stage.relays) - 1)]
        victims = [*backends, of_store(stage), of_names(stage)]
        self._victims = [(faults, Random(f"{seed} {number}")) for number, faults in enumerate(victims)]

    def __repr__(self) -> str:
        return f"<Storm {dict(self.count)}>"

    async def rage(self, seconds: float) -> None:
        """For so long; afterwards everything is well again."""
        self._over.clear()
        suffering = [asyncio.create_task(self._suffer(*victim)) for victim in self._victims]
        await asyncio.sleep(seconds)
        self._over.set()
        results = await asyncio.gather(*suffering, return_exceptions=True)
        self._stage.lies += [f"the storm broke: {each!r}" for each in results if isinstance(each, BaseException)]

    async def _suffer(self, faults: Sequence[Fault], rng: Random) -> None:
        while await self._goes_on(rng.uniform(*QUIET_S)):
            fault = rng.choice(faults)
            self.count[fault.kind] += 1
            await fault.strike()
            await self._goes_on(rng.uniform(*LASTS_S))
            await fault.heal()

    async def _goes_on(self, seconds: float) -> bool:
        """Whether the storm is not over after so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return True
        return False


def requests_to(relays: Sequence[FaultRelay]) -> int:
    """How many requests reached the backends."""
    return sum(len(relay.posts) for relay in relays)
