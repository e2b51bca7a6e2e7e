"""An engine in real time: its steps end when the clock says so, and every token goes to the voice that waits for it.

A step is decided when it begins and its tokens are given out when it ends. What is submitted or cancelled meanwhile
counts from the next one, as in an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from loadtests.engine import Engine, Sequence, Step
from loadtests.gauges import Gauges
from loadtests.profiles import S

# Behind the clock by more than this, the engine becomes slower instead of hurrying after it: the machine is too small.
MOST_LATE_S = 0.05


class Voice(Protocol):
    """Who waits for the tokens of one sequence."""

    def token(self, sequence: Sequence) -> None:
        """The next token is out."""

    def finished(self, sequence: Sequence) -> str:
        """There is no further token. Returns vLLM's word for how it ended."""


@dataclass(slots=True)
class Place:
    """A sequence in the engine, and when (seconds, of the clock) it came."""

    sequence: Sequence
    voice: Voice
    came_s: float


class LiveEngine:
    """Runs an Engine `speed` times as fast as it says. The clock counts seconds."""

    def __init__(self, engine: Engine, gauges: Gauges, speed: float, clock: Callable[[], float]) -> None:
        self.engine, self.gauges, self.speed, self.clock = engine, gauges, speed, clock
        self.started_s = clock()
        self.places: dict[int, Place] = {}
        self.queued: list[Place] = []
        self.work = asyncio.Event()
        self.submitted = 0

    def __repr__(self) -> str:
        return f"<LiveEngine x{self.speed:g} {self.engine!r}>"

    def next_id(self) -> int:
        self.submitted += 1
        return self.submitted

    def submit(self, sequence: Sequence, voice: Voice) -> None:
        """Queue it; its id must come from `next_id`. Raises ValueError if it could never run."""
        if self.engine.idle:
            self.engine.advance(int((self.clock() - self.started_s) * self.speed * S))
        self.engine.submit(sequence)
        assert isinstance(sequence.id, int)
        place = self.places[sequence.id] = Place(sequence, voice, self.clock())
        self.queued.append(place)
        self.work.set()

    def cancel(self, sequence: Sequence) -> None:
        """Forget it; nothing happens if it has ended."""
        assert isinstance(sequence.id, int)
        if self.places.pop(sequence.id, None) is not None:
            self.engine.cancel(sequence.id)
            self.gauges.finished["abort"] += 1

    async def run(self) -> None:
        """Step for ever; sleeps while there is nothing to do."""
        while True:
            if self.engine.idle:
                self.work.clear()
                await self.work.wait()
            step = self.engine.step()
            self.note_scheduled()
            await asyncio.sleep(self.until(step.end_ps))
            self.deliver(step)

    def until(self, end_ps: int) -> float:
        """Seconds from now until the engine's clock shows `end_ps`; the clocks are put together again if it is late."""
        now = self.clock()
        wait_s = self.started_s + end_ps / S / self.speed - now
        if wait_s < -MOST_LATE_S:
            self.started_s -= wait_s
        return max(0.0, wait_s)

    def note_scheduled(self) -> None:
        """Take the time in the queue of those that the step has taken up."""
        now = self.clock()
        waiting = [place for place in self.queued if not (place.sequence.computed or place.sequence.emitted)]
        for place in self.queued:
            if place.sequence.computed or place.sequence.emitted:
                self.gauges.queued.observe(now - place.came_s)
        self.queued = [place for place in waiting if place.sequence.id in self.places]

    def deliver(self, step: Step) -> None:
        """Give out the tokens of a step that has just ended."""
        now = self.clock()
        self.gauges.token.observe(step.duration_s / self.speed, max(0, step.batch - len(step.first)))
        for sequence in step.first:
            if place := self.place(sequence):
                self.gauges.first.observe(now - place.came_s)
                self.gauges.prompt.observe(sequence.prompt_tokens)
        places = self.places
        for number in list(self.engine.decoding):
            if place := places.get(number):  # type: ignore[call-overload]
                place.voice.token(place.sequence)
        for sequence in step.finished:
            if place := self.place(sequence):
                place.voice.token(sequence)
                if self.place(sequence) is None:
                    continue  # the last token made its voice let go of it
                del places[sequence.id]  # type: ignore[arg-type]
                self.gauges.finished[place.voice.finished(sequence)] += 1
                self.gauges.whole.observe(now - place.came_s)
                self.gauges.output.observe(sequence.output_tokens)

    def place(self, sequence: Sequence) -> Place | None:
        """Where it stands, unless it was cancelled."""
        return self.places.get(sequence.id)  # type: ignore[call-overload,no-any-return]
