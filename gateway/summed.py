"""The metrics of several processes as one: carried as numbers, added up family by family.

Counters and distributions never shrink when a process ends: what it told last goes on to count. Sums of floats are
exact before they are rounded (Shewchuk's, as in `math.fsum`): added up in another order they might be smaller by their
last bit, which Prometheus takes for a counter that began anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from operator import add

import msgspec

from gateway.metrics import Buckets, Counter, Family, Gauge, Histogram, Key, Numbers, Total

Distribution = tuple[list[int], float, dict[int, tuple[str, float, float]]]
"""Counts by class, sum, exemplars: what `Buckets` holds."""


class Packed(msgspec.Struct, array_like=True):
    """One family on its way."""

    kind: str
    name: str
    text: str
    labels: tuple[str, ...]
    total: Total
    values: dict[Key, int | float]
    bounds: tuple[float, ...]
    children: dict[Key, Distribution]


_decoder = msgspec.msgpack.Decoder(list[Packed])


def packed(families: Iterable[Family]) -> bytes:
    """For `unpacked` in another process. Much less work than writing them as text."""
    return msgspec.msgpack.encode([_packed(family) for family in families])


def unpacked(data: bytes) -> list[Family]:
    """Raises msgspec.DecodeError."""
    return [_unpacked(told) for told in _decoder.decode(data)]


def _packed(family: Family) -> Packed:
    values: dict[Key, int | float] = {}
    children: dict[Key, Distribution] = {}
    bounds: tuple[float, ...] = ()
    if isinstance(family, Histogram):
        bounds = tuple(family.bounds)
        children = {key: (child.counts, child.sum, child.exemplars) for key, child in family.children.items()}
    elif isinstance(family, Numbers):
        values = family.values
    return Packed(family.kind, family.name, family.text, family.labels, family.total, values, bounds, children)


def _unpacked(told: Packed) -> Family:
    if told.kind == "histogram":
        found = Histogram(told.name, told.text, *told.labels, bounds=told.bounds)
        for key, (counts, total, exemplars) in told.children.items():
            child = found.child(key)
            child.counts, child.sum, child.exemplars = counts, total, exemplars
        return found
    numbers = _alike(told)
    numbers.values.update(told.values)
    return numbers


def _alike(told: Packed | Family) -> Numbers:
    if told.kind == "counter":
        return Counter(told.name, told.text, *told.labels)
    return Gauge(told.name, told.text, *told.labels, total=told.total)


class Sum:
    """What processes tell, each under a name, and what those told that are no more."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, Family]] = {}
        self._past: dict[str, dict[Key, Past]] = {}
        self._sums: dict[str, Family] = {}  # in the order in which they became known

    def __repr__(self) -> str:
        return f"<Sum of {', '.join(self._told)}; {len(self._sums)} families>"

    def tell(self, who: str, families: Iterable[Family]) -> None:
        """`who` says so now. What it does not know any more and nobody else knows is forgotten."""
        before, now = self._told.get(who, {}), {family.name: family for family in families}
        self._told[who] = now
        for name, past in self._past.items():
            known = {key for told in self._told.values() if name in told for key in _keys(told[name])}
            for key in _keys(before[name]) if name in before else ():
                if key not in known:
                    past.pop(key, None)
        for name, family in now.items():
            if name not in self._sums:
                self._sums[name] = _empty(family)

    def end(self, who: str) -> None:
        """It is no more: what it counted stays, what it measured is gone."""
        for name, family in self._told.pop(who, {}).items():
            past = self._past.setdefault(name, {})
            if isinstance(family, Histogram):
                for key, child in family.children.items():
                    past[key] = past.get(key, NOTHING).with_(child.sum, child.counts)
            elif isinstance(family, Counter):
                for key, value in family.values.items():
                    past[key] = past.get(key, NOTHING).with_(value, ())

    def families(self) -> list[Family]:
        """All of them, each once. They are the same objects each time."""
        for total in self._sums.values():
            self._add_up(total)
        return list(self._sums.values())

    def family(self, name: str) -> Family | None:
        """One of them, without the work for the others."""
        total = self._sums.get(name)
        if total is not None:
            self._add_up(total)
        return total

    def _add_up(self, total: Family) -> None:
        told = [each[total.name] for each in self._told.values() if total.name in each]
        past = self._past.get(total.name, {})
        if isinstance(total, Histogram):
            _add_distributions(total, [each for each in told if isinstance(each, Histogram)], past)
        elif isinstance(total, Numbers):
            _add_numbers(total, [each for each in told if isinstance(each, Numbers)], past)


class Past:
    """What the dead counted under one key: as few parts as have its exact sum, and counts by class."""

    __slots__ = ("counts", "parts")

    def __init__(self, parts: Sequence[float] = (), counts: Sequence[int] = ()) -> None:
        self.parts = parts
        self.counts = counts

    def with_(self, value: float, counts: Sequence[int]) -> Past:
        return Past(exact([*self.parts, value]), list(map(add, self.counts, counts)) if self.counts else counts)


NOTHING = Past()


def exact(numbers: Sequence[float]) -> list[float]:
    """Few numbers whose sum is the very same: what rounding leaves over is the next of them."""
    total = sum(numbers)
    if isinstance(total, int):
        return [total]
    parts: list[float] = []
    while left := fsum([*numbers, *(-part for part in parts)]):
        parts.append(left)
    return parts


def added(numbers: Sequence[float]) -> float:
    """Their sum, rounded once: it does not depend on their order, and grows when one of them grows."""
    total = sum(numbers)
    return total if isinstance(total, int) else fsum(numbers)


def _add_numbers(total: Numbers, told: Sequence[Numbers], past: Mapping[Key, Past]) -> None:
    keys = dict.fromkeys([*past, *(key for each in told for key in each.values)])
    join = max if total.total == "max" else added
    total.retain(keys.__contains__)
    for key in keys:
        parts = past[key].parts if key in past else ()
        total.values[key] = join([*parts, *(each.values[key] for each in told if key in each.values)])


def _add_distributions(total: Histogram, told: Sequence[Histogram], past: Mapping[Key, Past]) -> None:
    keys = dict.fromkeys([*past, *(key for each in told for key in each.children)])
    total.retain(keys.__contains__)
    for key in keys:
        children = [each.children[key] for each in told if key in each.children]
        before = past.get(key, NOTHING)
        counts = [child.counts for child in children] + ([list(before.counts)] if before.counts else [])
        child = total.child(key)
        child.counts = list(map(sum, zip(*counts, strict=True)))
        child.sum = added([*before.parts, *(each.sum for each in children)])
        child.exemplars = _latest(children)


def _latest(children: Iterable[Buckets]) -> dict[int, tuple[str, float, float]]:
    """The last exemplar of each class; `[2]` is its time."""
    found: dict[int, tuple[str, float, float]] = {}
    for child in children:
        for index, exemplar in child.exemplars.items():
            if index not in found or found[index][2] < exemplar[2]:
                found[index] = exemplar
    return found


def _empty(family: Family) -> Family:
    if isinstance(family, Histogram):
        return Histogram(family.name, family.text, *family.labels, bounds=family.bounds)
    return _alike(family)


def _keys(family: Family) -> Iterable[Key]:
    return family.children if isinstance(family, Histogram) else family.values if isinstance(family, Numbers) else ()
