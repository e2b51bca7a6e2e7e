"""Metrics as somebody read them: Prometheus' text or the answer of its API, and what happened between two readings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

Labels = tuple[tuple[str, str], ...]
Samples = dict[str, dict[Labels, float]]
"""By name, then by labels in the order of their names."""

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
NONE: Mapping[Labels, float] = {}


def read(text: str, **also: str) -> Samples:
    """A text exposition (version 0.0.4). `also`: labels that every sample gets, as Prometheus adds `instance`."""
    found: Samples = {}
    for name, labels, value in _LINE.findall(text):
        told = {key: re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), raw) for key, raw in _LABEL.findall(labels)}
        found.setdefault(name, {})[tuple(sorted((told | also).items()))] = float(value)
    return found


def answered(results: Iterable[Mapping[str, Any]]) -> Samples:
    """The `result` of an instant query to Prometheus' HTTP API."""
    found: Samples = {}
    for each in results:
        labels = dict(each["metric"])
        name = labels.pop("__name__")
        found.setdefault(name, {})[tuple(sorted(labels.items()))] = float(each["value"][1])
    return found


@dataclass(frozen=True, slots=True)
class Window:
    """Two readings, `seconds` apart. A counter that is smaller than before began anew in between. Labels are selected
    by their value, or by a collection of values."""

    first: Samples
    last: Samples
    seconds: float

    def has(self, name: str) -> bool:
        """Whether anything is told of it."""
        return bool(self.last.get(name))

    def increase(self, name: str, **labels: str | Collection[str]) -> float:
        """How much a counter grew, all matching series together; 0 where there are none."""
        return sum(grown for _, grown in self._grown(name, labels))

    def increases(self, name: str, by: str, **labels: str | Collection[str]) -> dict[str, float]:
        """The same by the values of one label; what did not grow is left out."""
        found: dict[str, float] = {}
        for told, grown in self._grown(name, labels):
            if grown:
                value = told.get(by, "")
                found[value] = found.get(value, 0.0) + grown
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def mean(self, name: str, **labels: str | Collection[str]) -> float | None:
        """Of what a histogram observed in the window; None where that is nothing."""
        count = self.increase(f"{name}_count", **labels)
        return self.increase(f"{name}_sum", **labels) / count if count else None

    def quantile(self, name: str, share: float, **labels: str | Collection[str]) -> float | None:
        """As Prometheus' `histogram_quantile`: within a bucket observations are taken as evenly spread. None without
        any; the highest finite bound where they are above it."""
        buckets: dict[float, float] = {0.0: 0.0}
        for told, grown in self._grown(f"{name}_bucket", labels):
            bound = float(told["le"])
            buckets[bound] = buckets.get(bound, 0.0) + grown
        rank = share * buckets.get(inf, 0.0)
        if not rank:
            return None
        for (low, below), (high, up_to) in pairwise(sorted(buckets.items())):
            if up_to >= rank:
                return low if high == inf else low + (high - low) * (rank - below) / (up_to - below)
        return None

    def gauges(self, name: str, **labels: str | Collection[str]) -> list[float]:
        """The last values."""
        return [value for _, value in self._matching(self.last.get(name, NONE), labels)]

    def labels(self, name: str, label: str) -> dict[str, float]:
        """The last values, added up by one label."""
        found: dict[str, float] = {}
        for told, value in self._matching(self.last.get(name, NONE), {}):
            key = dict(told).get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found

    def distinct(self, name: str, *by: str) -> set[tuple[str, ...]]:
        """What these labels are, together, of the last values that are not 0: once, however many gateways say it."""
        told = (dict(labels) for labels, value in self.last.get(name, NONE).items() if value)
        return {tuple(labels.get(label, "") for label in by) for labels in told}

    def _grown(self, name: str, wanted: Mapping[str, str | Collection[str]]) -> Iterator[tuple[dict[str, str], float]]:
        before = self.first.get(name, NONE)
        for labels, value in self._matching(self.last.get(name, NONE), wanted):
            old = before.get(labels, 0.0)
            yield dict(labels), value - old if value >= old else value

    @staticmethod
    def _matching(
        series: Mapping[Labels, float], wanted: Mapping[str, str | Collection[str]]
    ) -> Iterator[tuple[Labels, float]]:
        for labels, value in series.items():
            told = dict(labels)
            if all(
                told.get(key) == want if isinstance(want, str) else told.get(key) in want
                for key, want in wanted.items()
            ):
                yield labels, value
