"""What the samples of a metrics page say together."""

from __future__ import annotations

from tests.faults.process import Samples


def series(samples: Samples) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Names and labels."""
    return set(samples)


def buckets(samples: Samples, name: str) -> dict[float, float]:
    """A histogram over all its labels: observations up to each bound."""
    found: dict[float, float] = {}
    for (sample, labels), value in samples.items():
        if sample == f"{name}_bucket":
            bound = float(dict(labels)["le"])
            found[bound] = found.get(bound, 0.0) + value
    return found


def within(samples: Samples, name: str, low: float, high: float) -> float:
    """Observations in (low, high], which must be bounds."""
    found = buckets(samples, name)
    return found[high] - found[low] if found else 0.0


def total(samples: Samples, name: str) -> float:
    """The sum of all samples of one name."""
    return sum(value for (sample, _), value in samples.items() if sample == name)
