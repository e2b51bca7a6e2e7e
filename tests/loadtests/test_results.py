"""Figures from calls whose fate is written by hand."""

from __future__ import annotations

import pytest

from loadtests.profiles import S
from loadtests.results import figures, jain, max_min, mean_ci, recovery_s, service_gap, summary
from loadtests.scenario import Scenario
from loadtests.traces import Request
from loadtests.workload import Call

SCENARIO = Scenario()


def call(number: int, at_s: float, ttft_s: float | None, tpot_s: float = 0.01, **more: object) -> Call:
    """100 prompt tokens and 11 output tokens, TTFT due in 2 s; no TTFT: refused."""
    made = Call(number, Request(at_s, 100, 11), int(at_s * S), 2.0, **more)  # type: ignore[arg-type]
    if ttft_s is None:
        made.refused = "deadline_unreachable"
    else:
        made.dispatched_ps = made.arrived_ps
        made.first_ps = int((at_s + ttft_s) * S)
        made.last_ps = made.first_ps + int(10 * tpot_s * S)
    return made


def test_goodput_is_a_share_of_all_arrivals() -> None:
    """Refused, late and slow calls all count in the denominator and none in the numerator."""
    found = summary([call(1, 0, 1.0), call(2, 1, 3.0), call(3, 2, 1.0, 0.2), call(4, 3, None)], SCENARIO)
    assert found["goodput"] == 0.25
    assert found["rejected"] == 0.25
    assert found["ttft_met"] == found["tpot_met"] == 0.5
    assert found["ttft_p50"] == pytest.approx(1.0)
    assert found["wasted"] == pytest.approx(2 / 3)


def test_batch_calls_have_no_objective() -> None:
    """Goodput speaks of interactive calls; batch counts by what is out when the arrivals end."""
    calls = [call(1, 0, 1.0), call(2, 1, 50.0, class_="batch"), call(3, 2, 1.0, class_="batch"), call(4, 10, 1.0)]
    found = summary(calls, SCENARIO)
    assert found["goodput"] == 1.0
    assert found["batch_served"] == 0.5


def test_the_strict_limit_counts_new_tokens_only() -> None:
    """A turn that meets the limit of its whole prompt may miss that of its new tokens."""
    found = summary([call(1, 0, 1.5, strict_s=1.2), call(2, 0, 1.1, strict_s=1.2)], SCENARIO)
    assert (found["goodput"], found["goodput_strict"]) == (1.0, 0.5)


def test_max_min_gives_nobody_more_than_it_asks() -> None:
    """The smallest demand is met, the others share alike."""
    assert max_min({"a": 1.0, "b": 10.0, "c": 20.0}, 13.0) == {"a": 1.0, "b": 6.0, "c": 6.0}
    assert max_min({"a": 1.0, "b": 2.0}, 9.0) == {"a": 1.0, "b": 2.0}


def test_jain_is_one_when_a_light_tenant_gets_all_and_heavy_ones_share() -> None:
    """Demand-limited: ten calls served of thirty asked are fair beside ten of ten, five of thirty are not."""
    light = [call(i, 0, 1.0, tenant="light") for i in range(10)]
    heavy = [call(i, 0, 1.0 if i < 110 else None, tenant="heavy") for i in range(100, 130)]
    assert jain(light + heavy, SCENARIO) == pytest.approx(1.0)
    greedy = [call(i, 0, 1.0 if i < 5 else None, tenant="light") for i in range(10)]
    more = [call(i, 0, 1.0 if i < 115 else None, tenant="heavy") for i in range(100, 130)]
    assert jain(greedy + more, SCENARIO) == pytest.approx(0.8)


def test_service_gap_counts_only_while_both_wait() -> None:
    """Service given while the other has nothing waiting is no injustice."""
    calls = [call(i, i / 10, 1.0, tenant="a") for i in range(5)]
    for number, one in enumerate(calls):
        one.dispatched_ps = 10 * S + number * S  # a waits until 14 s
    late = call(9, 12.5, 1.0, tenant="b")
    late.dispatched_ps = late.first_ps = 20 * S
    late.last_ps = 21 * S
    for one in calls:
        one.first_ps = one.last_ps = 30 * S
    assert service_gap([*calls, late]) == 100.0  # the dispatch at 13 s; the one at 14 s ends a's wait


def test_recovery_is_counted_from_the_end_of_the_burst() -> None:
    """Ten seconds of trouble after a minute of burst."""
    calls, number = [], 0
    for second in range(1000):
        busy = 500 <= second < 560
        for part in range(6 if busy else 2):
            ttft_s = 1.9 if 505 <= second < 570 else 0.5
            calls.append(call(number, second + part / 6, ttft_s))
            number += 1
    assert recovery_s(calls) == pytest.approx(10.0, abs=5.0)


def test_a_mean_has_the_interval_of_student() -> None:
    """Five values: t = 2.78."""
    assert mean_ci([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, pytest.approx(2.78 * (2.5**0.5) / 5**0.5))
    assert mean_ci([2.0]) == (2.0, 0.0)


def test_what_a_scenario_asks_for_is_there() -> None:
    """Victims of an aggressor, and the recovery from a burst, are figures of their own."""
    calls = [
        call(1, 0, 1.0, tenant="tenant-3"),
        call(2, 1, None, tenant="tenant-0"),
        call(3, 400, 1.0, tenant="tenant-1"),
    ]
    assert figures(calls, Scenario(tenants=5))["others_goodput"] == 0.5
    assert "recovery_s" in figures(calls, Scenario(burst=3.0))
    assert "service_gap" in figures(calls, Scenario(tenants=-1))
