"""Human quantities: what is read, what is refused with which words, and that showing is the inverse of reading."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import units

STEADY = settings(deadline=None, derandomize=True)

READ: list[tuple[Callable[[object], Any], str, Any]] = [
    (units.seconds, "500ms", 0.5),
    (units.seconds, "2s", 2.0),
    (units.seconds, "10m", 600.0),
    (units.seconds, "1h30m", 5400.0),
    (units.seconds, "1.5s", 1.5),
    (units.seconds, "1d", 86400.0),
    (units.seconds, "0s", 0.0),
    (units.seconds, "1m5ms", 60.005),
    (units.size, "512B", 512),
    (units.size, "64KB", 64_000),
    (units.size, "64 kb", 64_000),
    (units.size, "1MiB", 2**20),
    (units.size, "1.5GiB", 3 * 2**29),
    (units.count, "64", 64),
    (units.count, "200k", 200_000),
    (units.count, "200K", 200_000),
    (units.count, "1.5M", 1_500_000),
    (units.share, "10%", 0.1),
    (units.share, "0.1", 0.1),
    (units.share, "100%", 1.0),
    (units.share, "1", 1.0),
    (units.share, "0", 0.0),
    (units.number, "2", 2.0),
    (units.number, "2.50", 2.5),
    (units.number, "1e-3", 0.001),
    (units.flag, "true", True),
    (units.flag, "False", False),
    (units.instant, "2027-01-31", datetime(2027, 1, 31, tzinfo=UTC)),
    (units.instant, "2027-01-31T18:00:00Z", datetime(2027, 1, 31, 18, tzinfo=UTC)),
    (units.instant, "2027-01-31 18:00+01:00", datetime(2027, 1, 31, 18, tzinfo=timezone(timedelta(hours=1)))),
]

REFUSED: list[tuple[Callable[[object], Any], list[str], str]] = [
    (units.seconds, ["", "5", "1.5", "s", "5 s", "-1s", "1h 30m", "1e3s", "٣s", "1mm", "2sec"], units.A_DURATION),
    (units.seconds, ["367d", "999999999999999s"], "no clock may be longer than a year"),
    (units.size, ["", "64", "64K", "64M", "1.5B", "-1KB", "1 MiBs", "9" * 16 + "B"], units.A_SIZE),
    (units.count, ["", "-1", "1.5", "1_000", "0x10", "1e3", "2kk", "1,000", "1.0001k"], units.A_COUNT),
    (units.count, ["5m"], "millions are written with a capital M, such as 1.5M"),
    (units.share, ["", "-1%", "101%", "200", "ten", "10 % of it"], units.A_SHARE),
    (units.share, ["10"], units.A_SHARE + "; did you mean 10%?"),
    (units.number, ["", "-1", "nan", "inf", "1e999", "two"], units.A_NUMBER),
    (units.flag, ["", "yes", "on", "1"], "true or false was expected"),
    (
        units.instant,
        ["", "soon", "2027-13-01", "31.01.2027", "9999-12-31T23:59:59-01:00", "0001-01-01T00:00+01:00"],
        units.AN_INSTANT,
    ),
]


@pytest.mark.parametrize(("read", "text", "value"), READ)
def test_reads_human_quantities(read: Callable[[object], Any], text: str, value: Any) -> None:
    """Every example of the documentation, and its neighbours."""
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "words"), [(read, text, words) for read, texts, words in REFUSED for text in texts]
)
def test_refusal_says_what_was_read_and_what_is_accepted(read: Callable[[object], Any], text: str, words: str) -> None:
    """A wrong quantity is answered with itself and with examples."""
    with pytest.raises(ValueError) as caught:
        read(text)
    assert str(caught.value) == f"read {text!r}: {words}"


@pytest.mark.parametrize("text", ["sk-" + "x" * 40, "a@b", "redis://:pw@host"])
def test_refusal_repeats_nothing_that_could_be_a_secret(text: str) -> None:
    """Long texts may be keys, and texts with @ may hold a password."""
    with pytest.raises(ValueError) as caught:
        units.seconds(text)
    assert str(caught.value) == f"read a text of {len(text)} characters: {units.A_DURATION}"


@STEADY
@given(st.integers(0, units.LONGEST_S * 1_000_000))
def test_durations_round_trip(micros: int) -> None:
    """What is shown reads back as the same float."""
    assert units.seconds(units.show_seconds(micros / 1e6)) == micros / 1e6


@STEADY
@given(st.floats(1e-9, units.LONGEST_S))
def test_any_duration_round_trips(value: float) -> None:
    """Even floats that no human would write."""
    assert units.seconds(units.show_seconds(value)) == value


@STEADY
@given(st.integers(0, units.LARGEST))
def test_sizes_and_counts_round_trip(value: int) -> None:
    """Whole numbers stay exact."""
    assert units.size(units.show_size(value)) == value
    assert units.count(str(units.show_count(value))) == value


@STEADY
@given(st.floats(1e-9, 1))
def test_shares_round_trip(value: float) -> None:
    """A share reads back as the same float, as a percentage and as a fraction."""
    assert units.share(units.show_share(value)) == value
    assert units.share(f"{value:.40f}"[:32]) == pytest.approx(value, abs=1e-28)


@STEADY
@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing but ValueError comes out of a reader."""
    for read in (units.seconds, units.size, units.count, units.share, units.number, units.flag, units.instant):
        try:
            read(text)
        except ValueError as exc:
            assert str(exc).startswith("read ")
