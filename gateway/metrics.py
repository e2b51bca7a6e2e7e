"""Counts as plain numbers, family by family, until somebody scrapes them.

A part of the gateway that has something to tell keeps its families and yields them from `metrics()`; counting is an
addition to a dictionary, and observing one to a list. Names are whole, as operators see them. A key holds the values
of a family's labels in their order; they come from the configuration and from enums, never from a caller.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from typing import ClassVar, Literal, TypeVar

Key = tuple[str, ...]
K = TypeVar("K", bound=Key)
Total = Literal["sum", "max"]
"""What the numbers of several processes are together."""

# Bounds in seconds. Objectives lie at 0.1 to 10 s: they are bounds there, so that a share of requests is exact.
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
BYTES = tuple(float(4**power) for power in range(4, 14))  # 256 B to 64 MiB


class Family:
    """What all samples of one name have in common."""

    kind: ClassVar[str]
    total: Total = "sum"

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name = name
        self.text = text
        self.labels = labels

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def retain(self, keep: Callable[[Key], bool]) -> None:
        """Forget what is told of things that are no more."""
        raise NotImplementedError


class Numbers(Family):
    """One number for each key. `texts` is the exposition's memory of how their lines begin."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(name, text, *labels)
        self.values: defaultdict[Key, float] = defaultdict(int)
        self.texts: dict[Key, str] = {}

    def retain(self, keep: Callable[[Key], bool]) -> None:
        for key in [key for key in self.values if not keep(key)]:
            del self.values[key]
            self.texts.pop(key, None)


class Counter(Numbers):
    """Numbers that only grow: `refusals.values[(tenant, reason)] += 1`. The name ends in `_total`."""

    kind = "counter"


class Gauge(Numbers):
    """Numbers that come and go. Most are read off when they are asked for: `Gauge(...).of(values)`. `total`: amounts of
    several processes add up; of what each of them knows, or is, the largest stands for all."""

    kind = "gauge"

    def __init__(self, name: str, text: str, *labels: str, total: Total) -> None:
        super().__init__(name, text, *labels)
        self.total = total

    def of(self, values: Mapping[K, float]) -> Gauge:
        """The same family, with these values."""
        self.values.update((key, value) for key, value in values.items())
        return self


class Buckets:
    """Observations of one key, in classes up to fixed bounds and one for what is above them. `exemplars` holds the
    last one of each class that has a trace: its id, value, and time in seconds since the epoch."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, tuple[str, float, float]] = {}

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, counts: Iterable[int], total: float) -> None:
        """Many observations, already counted in classes of the same bounds."""
        self.counts = list(map(add, self.counts, counts))
        self.sum += total

    def show(self, value: float, trace_id: str, wall: float) -> None:
        """The observation of `value` can be looked up as a trace."""
        self.exemplars[bisect_left(self.bounds, value)] = (trace_id, value, wall)


class Histogram(Family):
    """Distributions: `waits.child((pool, class_)).observe(seconds)`. A child may be kept by who observes often, where
    nothing is ever forgotten. `beginnings` is the exposition's memory of how their lines begin."""

    kind = "histogram"

    def __init__(self, name: str, text: str, *labels: str, bounds: Sequence[float] = SECONDS) -> None:
        super().__init__(name, text, *labels)
        self.bounds = bounds
        self.children: dict[Key, Buckets] = {}
        self.beginnings: dict[Key, list[str]] = {}

    def child(self, key: Key) -> Buckets:
        """The observations of one key."""
        child = self.children.get(key)
        if child is None:
            child = self.children[key] = Buckets(self.bounds)
        return child

    def retain(self, keep: Callable[[Key], bool]) -> None:
        for key in [key for key in self.children if not keep(key)]:
            del self.children[key]
            self.beginnings.pop(key, None)
