"""How the process itself is: how late its event loop comes, what it uses, which build it is."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gateway.metrics import Counter, Family, Gauge, Histogram

BEAT_S = 0.1
WEIGHT = 0.3
STRAIN_S, RELIEF_S = 0.2, 0.05  # mean lag: from the one on the loop is strained, below the other it is not any more
MOST_S = 0.5  # of a beat counts: who was stopped for a minute and goes on has no more to do than before
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Vitals:
    """`async with vitals` listens to the loop: a timer that comes late has waited for whatever else ran, and so has
    every stream. `clock` is the loop's own, in seconds."""

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._clock = clock
        self.began_at = wall_clock()
        self.lag = Histogram("headrace_loop_lag_seconds", "How late timers of the event loop come.", bounds=LAG_S)
        self._scrape = Histogram(
            "headrace_exposition_seconds", "Time of the event loop that answering a scrape took.", bounds=LAG_S
        )
        self._task: asyncio.Task[None] | None = None
        self._strain_s = 0.0  # lag, the latest counting most
        self.strained = False
        self.on_strain: Callable[[bool], object] | None = None

    async def __aenter__(self) -> Vitals:
        self._task = asyncio.get_running_loop().create_task(self._listen())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()

    def scraped(self, seconds: float) -> None:
        """A scrape has been answered."""
        self._scrape.child(()).observe(seconds)

    def metrics(self) -> Iterator[Family]:
        """The loop, then what Prometheus' own libraries tell of every process, by the same names."""
        yield from (self.lag, self._scrape)
        labels = {"version": installed_version(), "python": platform.python_version()}
        yield Gauge("headrace_build_info", "1, with what is running as labels.", *labels, total="max").of(
            {tuple(labels.values()): 1}
        )
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = Counter("process_cpu_seconds_total", "Processor time used.")
        cpu.values[()] = used.ru_utime + used.ru_stime
        yield cpu
        began = Gauge("process_start_time_seconds", "When the process began, since the epoch.", total="max")
        yield began.of({(): self.began_at})
        yield Gauge("process_resident_memory_bytes", "Memory in use.", total="sum").of({(): _resident_bytes()})
        yield Gauge("process_open_fds", "Open file descriptors.", total="sum").of(
            {(): sum(1 for _ in Path("/proc/self/fd").iterdir())}
        )
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield Gauge("headrace_tasks", "Tasks of the event loop.", total="sum").of({(): self._tasks()})
        yield Gauge("process_max_fds", "Most descriptors that may be open.", total="sum").of({(): most})

    def _tasks(self) -> int:
        return len(asyncio.all_tasks(self._task.get_loop())) if self._task is not None else 0

    async def _listen(self) -> None:
        lag = self.lag.child(())
        while True:
            due = self._clock() + BEAT_S
            await asyncio.sleep(BEAT_S)
            late_s = max(0.0, self._clock() - due)
            lag.observe(late_s)
            self._weigh(late_s)

    def _weigh(self, late_s: float) -> None:
        """A loop that comes late again and again has more to do than it can; one late beat is nothing."""
        self._strain_s += WEIGHT * (min(late_s, MOST_S) - self._strain_s)
        strained = self._strain_s > (RELIEF_S if self.strained else STRAIN_S)
        if strained is not self.strained:
            self.strained = strained
            if self.on_strain is not None:
                self.on_strain(strained)


def installed_version() -> str:
    """Of the distribution; a source tree that is not installed has none."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
