"""Who gets a new version, and what two samples say of each other."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.rollout import Times, excess, place, ratio, seed, share

SEED = seed(b"secret", "m")


def times(values: list[float]) -> Times:
    made = Times()
    for value in values:
        made.add(value)
    return made


def test_the_weight_is_the_share_of_callers() -> None:
    """Of 20,000 tenants as many as the weight says stand below it, within what chance allows."""
    places = [place(SEED, b"tenant-%d" % number) for number in range(20_000)]
    for weight in (0.01, 0.1, 0.5):
        expected, spread = 20_000 * weight, (20_000 * weight * (1 - weight)) ** 0.5
        assert abs(sum(found < weight for found in places) - expected) < 4 * spread


@given(st.lists(st.binary(max_size=8), max_size=3), st.lists(st.binary(max_size=8), max_size=3))
def test_a_place_is_kept_and_is_one_callers_own(one: list[bytes], other: list[bytes]) -> None:
    """The same for the same, between 0 and 1, and fields do not run together."""
    assert 0.0 <= place(SEED, *one) < 1.0
    assert (place(SEED, *one) == place(SEED, *other)) is (one == other)


def test_models_and_secrets_draw_their_own_lots() -> None:
    """Who is early for one model is not for another, nor under another secret."""
    seeds = [SEED, seed(b"secret", "n"), seed(b"other", "m")]
    early = [{number for number in range(5000) if place(each, b"%d" % number) < 0.1} for each in seeds]
    for one, other in ((0, 1), (0, 2)):
        assert len(early[one] & early[other]) < 100  # 50 by chance


@pytest.mark.parametrize(
    ("new", "old", "low", "high"),
    [((56, 70), (48, 80), 0.0524, 0.3339), ((9, 10), (3, 10), 0.1705, 0.8090), ((10, 10), (0, 10), 0.6075, 1.0)],
)
def test_differences_of_shares_are_those_that_were_published(
    new: tuple[int, int], old: tuple[int, int], low: float, high: float
) -> None:
    """Newcombe 1998, table II, method 10: cases (a), (b) and (h)."""
    found = excess(new, old)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """In 95 of 100 samples; with few values and with many, of shares and of times."""
    rng = Random(7)
    held = {"few": 0, "many": 0, "share": 0}
    for _ in range(2000):
        for name, n in (("few", 6), ("many", 60)):
            new, old = (times([rng.lognormvariate(mu, 0.8) for _ in range(n)]) for mu in (0.2, 0.0))
            found = ratio(new, old)
            assert found is not None
            held[name] += found.low <= 1.2214 <= found.high
        bad_new, bad_old = (sum(rng.random() < rate for _ in range(80)) for rate in (0.1, 0.05))
        more = excess((bad_new, 80), (bad_old, 80))
        assert more is not None
        held["share"] += more.low <= 0.05 <= more.high
    assert all(0.935 <= count / 2000 <= 0.975 for count in held.values()), held


def test_nothing_is_said_of_too_few() -> None:
    """No trials, no difference; a handful of times, no ratio; and equal ones differ by nothing."""
    assert excess((0, 0), (1, 9)) is None
    assert ratio(times([1.0] * 4), times([1.0] * 99)) is None
    assert share(0, 0).high == 1.0
    found = ratio(times([0.0] * 5), times([0.0] * 5))
    assert found is not None
    assert (found.low, found.high) == (1.0, 1.0)
