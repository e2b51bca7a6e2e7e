"""What Prometheus reads: both formats by the library's own parsers, hostile labels, and the cost of a series."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from gateway.exposition import OPENMETRICS, TEXT, content_type, exposed
from gateway.metrics import Counter, Family, Gauge, Histogram

FORMATS: list[Any] = [pytest.param(TEXT, read_text, id="text"), pytest.param(OPENMETRICS, read_openmetrics, id="om")]
Reader = Callable[[str], Iterable[Any]]


def parsed(family: Family, kind: str, read: Reader) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = read(exposed([family], kind).decode())
    return {(s.name, frozenset(s.labels.items())): s.value for each in found for s in each.samples}


@pytest.mark.parametrize(("kind", "read"), FORMATS)
def test_what_was_counted_is_read(kind: str, read: Reader) -> None:
    """A counter, a gauge and a histogram, by their names and labels."""
    counter = Counter("x_total", "Text.", "model")
    counter.values[("m",)] += 3
    assert parsed(counter, kind, read) == {("x_total", frozenset({("model", "m")})): 3}
    gauge = Gauge("g", "Text.", total="sum").of({(): inf})
    assert parsed(gauge, kind, read) == {("g", frozenset()): inf}
    histogram = Histogram("h", "Text.", bounds=(0.5, 1.0))
    for value in (0.5, 0.7, 9.0):
        histogram.child(()).observe(value)
    assert parsed(histogram, kind, read) == {
        ("h_bucket", frozenset({("le", "0.5")})): 1,
        ("h_bucket", frozenset({("le", "1.0")})): 2,
        ("h_bucket", frozenset({("le", "+Inf")})): 3,
        ("h_count", frozenset()): 3,
        ("h_sum", frozenset()): 10.2,
    }


@pytest.mark.parametrize(("kind", "read"), FORMATS)
@pytest.mark.parametrize("name", ['a"b\\c', "m\nx", "a\u2028b\x1b", 'le="1"} 5', "\\n"])
def test_names_of_any_characters_stay_one_label(kind: str, read: Reader, name: str) -> None:
    """Quotes, line ends and what looks like syntax are part of the value."""
    counter = Counter("x_total", 'Says "hi"\\.', "model", "tenant")
    counter.values[(name, "t")] += 1
    assert parsed(counter, kind, read) == {("x_total", frozenset({("model", name), ("tenant", "t")})): 1}


def test_exemplars_stand_in_openmetrics_only() -> None:
    """The trace of an observation, in the class of its value."""
    histogram = Histogram("h", "Text.", bounds=(0.5, 1.0))
    histogram.child(()).observe(0.7)
    histogram.child(()).show(0.7, "ab" * 16, 1_700_000_000.25)
    (family,) = read_openmetrics(exposed([histogram], OPENMETRICS).decode())
    shown = {sample.labels.get("le"): sample.exemplar for sample in family.samples if sample.exemplar}
    assert list(shown) == ["1.0"]
    assert shown["1.0"].labels == {"trace_id": "ab" * 16} and shown["1.0"].value == 0.7
    assert float(shown["1.0"].timestamp) == 1_700_000_000.25
    assert b"trace_id" not in exposed([histogram], TEXT)


def test_what_is_no_more_is_forgotten() -> None:
    """A removed backend takes its series with it, and may come back at zero."""
    counter = Counter("x_total", "Text.", "backend")
    histogram = Histogram("h", "Text.", "backend")
    for backend in ("a", "b"):
        counter.values[(backend,)] += 1
        histogram.child((backend,)).observe(1.0)
    exposed([counter, histogram], TEXT)
    for family in (counter, histogram):
        family.retain(lambda key: key[0] == "a")
    assert b'"b"' not in exposed([counter, histogram], TEXT)
    counter.values[("b",)] += 1
    assert b'x_total{backend="b"} 1\n' in exposed([counter, histogram], TEXT)


def test_prometheus_gets_the_format_it_asks_for() -> None:
    """Prometheus asks for OpenMetrics first; a browser gets text."""
    asked = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain"
    assert content_type(asked) == OPENMETRICS
    assert content_type("text/html,*/*;q=0.8") == content_type("") == TEXT
