"""The budget of retries: a share of the traffic, with a floor, for whoever retries."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from policies.retry import BACKOFF_S, WINDOW_S, RetryBudget


def budget(**told: float) -> RetryBudget:
    return RetryBudget(rng=Random(1), **told)  # type: ignore[arg-type]


def test_when_everything_fails_retries_add_their_share_and_a_floor() -> None:
    """1,000 requests a second that all fail: a tenth more attempts."""
    of = budget()
    retried = 0
    for number in range(10_000):
        of.deposit()
        retried += of.after(1, number / 1000) is not None
    assert 1000 <= retried <= 1000 + WINDOW_S + 10 + 10


def test_no_request_has_more_than_its_own() -> None:
    """Two by default."""
    of = budget()
    assert [of.after(attempt, 0.0) is not None for attempt in (1, 2, 3)] == [True, True, False]


def test_what_was_not_sent_costs_nothing() -> None:
    """However empty the budget is; but no request is passed round for ever."""
    of = budget()
    while of.after(1, 0.0) is not None:
        pass
    before = of.balance(0.0)
    assert [of.after(attempt, 0.0, unsent=True) is not None for attempt in (1, 2, 3)] == [True, True, False]
    assert of.balance(0.0) == before


def test_a_retry_by_the_clients_library_is_one_of_ours() -> None:
    """It uses the budget up, and never below nothing."""
    of = budget()
    for _ in range(100):
        of.spend()
    assert of.after(1, 0.0) is None
    assert of.after(1, 1.1) is not None


def test_a_spent_budget_is_seen_to_come_back() -> None:
    """With time alone, though nobody asks for a retry; and looking at it changes nothing."""
    of, other = budget(), budget()
    for each in (of, other):
        while each.after(1, 100.0) is not None:
            pass
    assert of.balance(100.0) < 1.0
    assert of.balance(104.0) == of.balance(100.0) + 4.0
    assert of.balance(1000.0) == WINDOW_S
    assert (of.after(1, 100.5) is None) == (other.after(1, 100.5) is None)


def test_pauses_grow_and_are_jittered() -> None:
    """Each is some part of twice the one before."""
    of = budget(retries=5)
    pauses = [[of.after(attempt, 0.0) or 0.0 for _ in range(3)] for attempt in (1, 2, 3)]
    for number, few in enumerate(pauses):
        assert all(0.0 <= pause <= BACKOFF_S * 2.0**number for pause in few)
    assert len({pause for few in pauses for pause in few}) > 3


@given(st.lists(st.tuples(st.sampled_from(["deposit", "spend", "after"]), st.floats(0.0, 5.0)), max_size=80))
def test_whatever_happens_the_balance_has_bounds(steps: list[tuple[str, float]]) -> None:
    """Never negative, never more than the window's."""
    of, now, deposits = budget(), 0.0, 0
    for what, pause in steps:
        now += pause
        if what == "deposit":
            deposits += 1
            of.deposit()
        elif what == "spend":
            of.spend()
        else:
            of.after(1, now)
        assert 0.0 <= of.balance(now) <= WINDOW_S + 0.1 * deposits + 1e-9
