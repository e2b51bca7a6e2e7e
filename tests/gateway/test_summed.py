"""The metrics of several processes, added up."""

from __future__ import annotations

from fractions import Fraction
from math import fsum

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from gateway.exposition import OPENMETRICS, TEXT, exposed
from gateway.metrics import Counter, Family, Gauge, Histogram, Numbers
from gateway.summed import Sum, exact, packed, unpacked

STEADY = settings(deadline=None, derandomize=True)
NUMBERS = st.lists(st.floats(0, 1e12) | st.integers(0, 10**9), max_size=8)
BOUNDS = (0.1, 1.0)


def families(count: float, seconds: float, running: float, mode: str, trace: str = "") -> list[Family]:
    """What one process might tell."""
    requests, waits = Counter("requests_total", "Requests.", "t"), Histogram("wait_seconds", "Waits.", bounds=BOUNDS)
    requests.values[("a",)] = count
    waits.child(()).observe(seconds)
    if trace:
        waits.child(()).show(seconds, trace, float(len(trace)))
    flight = Gauge("running", "Running.", total="sum").of({(): running})
    return [requests, waits, flight, Gauge("mode", "Mode.", "mode", total="max").of({(mode,): 1, ("other",): 0})]


def told(total: Sum) -> dict[str, float]:
    """Each sample of numbers."""
    return {
        f"{family.name}{list(key)}": value
        for family in total.families()
        if isinstance(family, Numbers)
        for key, value in family.values.items()
    }


def test_amounts_add_up_and_states_do_not() -> None:
    """Counters, distributions and loads are sums; of a state the largest stands for all."""
    total = Sum()
    total.tell("a", families(2, 0.05, 3, "shared"))
    total.tell("b", families(5, 0.5, 4, "alone"))
    expected = {"requests_total['a']": 7, "running[]": 7, "mode['shared']": 1, "mode['alone']": 1, "mode['other']": 0}
    assert told(total) == expected
    text = exposed(total.families(), TEXT).decode()
    assert text.count("# TYPE") == text.count("# HELP") == 4
    assert (
        'wait_seconds_bucket{le="0.1"} 1\nwait_seconds_bucket{le="1.0"} 2\nwait_seconds_bucket{le="+Inf"} 2\n' in text
    )
    assert "wait_seconds_count 2\nwait_seconds_sum 0.55\n" in text
    assert 'requests_total{t="a"} 7\n' in text, "whole numbers stay whole"


def test_the_dead_leave_what_they_counted_and_nothing_else() -> None:
    """Also when all are dead, and when another one comes in their place."""
    total = Sum()
    total.tell("a", families(2, 0.05, 3, "shared"))
    total.end("a")
    assert told(total) == {"requests_total['a']": 2}
    assert "wait_seconds_count 1\n" in exposed(total.families(), TEXT).decode()
    total.tell("b", families(1, 0.5, 1, "alone"))
    total.end("c")
    assert told(total)["requests_total['a']"] == 3 and told(total)["running[]"] == 1


def test_what_a_process_forgets_is_forgotten_of_the_dead() -> None:
    """A backend that is gone has no series, whoever counted it; as long as one knows it, it has."""
    total = Sum()
    for who in ("dead", "a", "b"):
        total.tell(who, families(1, 0.1, 0, "m"))
    total.end("dead")
    for who, left in (("a", {"requests_total['a']": 2}), ("b", {})):
        gone = families(0, 0.1, 0, "m")
        gone[0].retain(lambda _: False)
        total.tell(who, gone)
        assert {name: value for name, value in told(total).items() if name.startswith("requests")} == left
        assert 't="a"' in exposed(total.families(), TEXT).decode() or not left


def test_the_latest_exemplar_of_a_class_is_shown() -> None:
    """In OpenMetrics, where alone there are any."""
    total = Sum()
    total.tell("a", families(1, 0.05, 0, "m", trace="ffff"))
    total.tell("b", families(1, 0.06, 0, "m", trace="abcdef"))
    text = exposed(unpacked(packed(total.families())), OPENMETRICS).decode()
    samples = [sample for family in read_openmetrics(text) for sample in family.samples if sample.exemplar]
    assert [(sample.labels["le"], sample.exemplar.labels["trace_id"]) for sample in samples] == [("0.1", "abcdef")]


def test_families_arrive_as_they_were_sent() -> None:
    """Names, kinds, labels of any characters, infinities, whole and broken numbers."""
    sent = families(3, 0.3, float("inf"), 'm"\n\u2028')
    for kind in (TEXT, OPENMETRICS):
        assert exposed(unpacked(packed(sent)), kind) == exposed(sent, kind)
    assert [family.total for family in unpacked(packed(sent))] == ["sum", "sum", "sum", "max"]


@STEADY
@given(NUMBERS)
def test_few_parts_have_the_very_same_sum(numbers: list[float]) -> None:
    """To the last bit, which rounding would take."""
    assert sum(map(Fraction, exact(numbers)), Fraction()) == sum(map(Fraction, numbers), Fraction())


@STEADY
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e9), st.booleans()), max_size=30))
def test_nothing_that_was_shown_ever_shrinks(steps: list[tuple[int, float, bool]]) -> None:
    """Processes count on and die in any order: the sum is what was counted in all, and never less than before."""
    total, counted, born, shown = Sum(), [0.0] * 4, [0] * 4, 0.0
    everything: list[float] = []
    for who, more, dies in steps:
        counted[who] += more
        total.tell(f"{who}/{born[who]}", families(counted[who], counted[who], 0, "m"))
        if dies:
            total.end(f"{who}/{born[who]}")
            everything.append(counted[who])
            counted[who], born[who] = 0.0, born[who] + 1
        value = told(total)["requests_total['a']"]
        assert value == fsum([*everything, *counted]) >= shown
        shown = value
