"""Figures of the last seconds, from counters that only grow."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics import SECONDS, Histogram
from gateway.pulse import KEPT, Pulse, quantile
from gateway.requestmetrics import RequestMetrics


@pytest.fixture
def counted() -> RequestMetrics:
    return RequestMetrics()


@pytest.fixture
def pulse(counted: RequestMetrics) -> Pulse:
    return Pulse(counted, Histogram("lag", "Late."))


def test_rates_are_of_the_window_not_of_the_life(counted: RequestMetrics, pulse: Pulse) -> None:
    """A hundred requests before anybody looked are none a second; twenty in ten seconds are two."""
    counted.requests.values[("m", "t", "c", "ok")] = 100
    assert pulse.look(0.0, queued=0, running=0)["requests_s"] is None
    assert pulse.look(1.0, queued=0, running=0)["requests_s"] == 0.0
    for second in range(2, 12):
        counted.requests.values[("m", "t", "c", "ok")] += 2
        told = pulse.look(float(second), queued=0, running=0)
    assert told["requests_s"] == 2.0


def test_goodput_is_of_those_that_were_judged(counted: RequestMetrics, pulse: Pulse) -> None:
    """None without any."""
    pulse.look(0.0, queued=0, running=0)
    assert pulse.look(1.0, queued=0, running=0)["goodput"] is None
    counted.good.values[("m", "t", "c")] += 3
    counted.misses.values[("m", "t", "c", "queue")] += 1
    assert pulse.look(2.0, queued=0, running=0)["goodput"] == 0.75


def test_refusals_are_told_by_reason(counted: RequestMetrics, pulse: Pulse) -> None:
    """Since the start, and lately."""
    counted.refusals.values[("m", "c", "queue_full", "capacity")] = 5
    pulse.look(0.0, queued=0, running=0)
    counted.refusals.values[("m", "d", "queue_full", "capacity")] = 2
    pulse.look(1.0, queued=0, running=0)
    assert pulse.refused() == {"queue_full": (7, 2)}


def test_after_a_pause_it_begins_anew(counted: RequestMetrics, pulse: Pulse) -> None:
    """Nobody looked for a minute: there is no rate to tell, and the history has a hole that is not drawn."""
    for second in range(3):
        pulse.look(float(second), queued=1, running=1)
    assert pulse.look(60.0, queued=0, running=0)["requests_s"] is None
    assert list(pulse.history["queued"]) == [0]


def test_the_history_is_bounded(pulse: Pulse) -> None:
    """However long somebody looks."""
    for second in range(3 * KEPT):
        pulse.look(float(second), queued=second, running=0)
    assert {len(values) for values in pulse.history.values()} == {KEPT}


@given(st.lists(st.floats(0.0, 700.0), min_size=1, max_size=50), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_class_of_the_exact_one(values: list[float], share: float) -> None:
    """It is no farther from the truth than the classes are wide."""
    counts = [0] * (len(SECONDS) + 1)
    for value in values:
        counts[bisect_left(SECONDS, value)] += 1
    found = quantile(SECONDS, counts, share)
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    at = bisect_left(SECONDS, exact)
    low, high = (0.0, *SECONDS)[at], (*SECONDS, SECONDS[-1])[at]
    assert found is not None and low - 1e-9 <= found <= high + 1e-9


def test_without_observations_there_is_no_quantile() -> None:
    """Not a zero."""
    assert quantile(SECONDS, [0] * (len(SECONDS) + 1), 0.5) is None
    assert quantile(SECONDS, [], 0.5) is None
