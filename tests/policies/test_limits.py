"""Limits as arithmetic: what they let through is what a token bucket lets through, and never more."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hypothesis import assume, given
from hypothesis import strategies as st

from policies.limits import MINUTE_US, Book, Denied, Kind, Limit, Tally

RATES = st.sampled_from([Kind.REQUESTS, Kind.TOKENS])
AMOUNTS = st.integers(1, 10_000_000)
STEPS = st.lists(st.tuples(st.integers(0, 20_000_000), st.integers(1, 2_000)), min_size=1, max_size=60)


@st.composite
def limits(draw: st.DrawFn) -> Limit:
    kind, amount = draw(RATES), draw(AMOUNTS)
    return Limit(kind, amount, draw(st.integers(1, 2 * amount)))


def taken(book: Book, limit: Limit, steps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """When what was let through, of requests that come so many microseconds after each other."""
    now, let = 1_000_000, []
    for pause, units in steps:
        now += pause
        if book.take([(0, limit.cost(units))], now) is None:
            let.append((now, units))
    return let


def most(limit: Limit, span_us: int) -> Fraction:
    """What may be used within a span: the burst, and what comes back meanwhile. A microsecond is rounded away."""
    return limit.burst + Fraction(limit.amount * (span_us + 1), MINUTE_US)


@given(limits(), STEPS)
def test_no_window_lets_through_more_than_the_burst_and_what_came_back(
    limit: Limit, steps: list[tuple[int, int]]
) -> None:
    """In any span between two requests."""
    let = taken(Book([limit]), limit, steps)
    for first in range(len(let)):
        total = 0
        for now, units in let[first:]:
            total += units
            assert total <= most(limit, now - let[first][0])


@given(limits(), STEPS)
def test_a_rate_is_a_token_bucket(limit: Limit, steps: list[tuple[int, int]]) -> None:
    """A bucket of exact fractions agrees on every request that is not within rounding of its edge."""
    book, level, last, now = Book([limit]), Fraction(limit.burst), 1_000_000, 1_000_000
    charges = 0
    for pause, units in steps:
        now += pause
        level = min(Fraction(limit.burst), level + Fraction(limit.amount * (now - last), MINUTE_US))
        last = now
        edge = Fraction(limit.amount * (charges + 2) * (units if limit.kind is Kind.REQUESTS else 1), MINUTE_US)
        edge = edge * 2000 if limit.kind is Kind.REQUESTS else edge
        assume(abs(level - units) > edge)
        let = book.take([(0, limit.cost(units))], now) is None
        assert let == (level >= units)
        if let:
            level -= units
            charges += 1


@given(limits(), STEPS)
def test_who_waits_as_long_as_told_is_let_through_and_no_earlier(limit: Limit, steps: list[tuple[int, int]]) -> None:
    """The wait is the real one, to the microsecond."""
    now, tally = 1_000_000, Tally(limit)
    for pause, units in steps:
        now += pause
        no = tally.denies(limit.cost(units), now)
        if no is None:
            tally.add(limit.cost(units), now)
        elif no.wait_us is None:
            assert limit.cost(units) > limit.room
        else:
            assert no.wait_us > 0
            assert tally.denies(limit.cost(units), now + no.wait_us) is None
            assert tally.denies(limit.cost(units), now + no.wait_us - 1) is not None


@given(limits(), limits(), STEPS)
def test_a_refusal_consumes_nothing(one: Limit, two: Limit, steps: list[tuple[int, int]]) -> None:
    """Of no limit, not even of those that had room: all or nothing."""
    book, now = Book([one, two, Limit(Kind.CONCURRENT, 5)]), 1_000_000
    for pause, units in steps:
        now += pause
        before = repr(book)
        if book.take([(0, one.cost(1)), (1, two.cost(units)), (2, 1)], now) is not None:
            assert repr(book) == before


@given(limits(), st.integers(1, 5_000), st.integers(0, 10_000), st.integers(0, 50_000_000))
def test_a_settled_reservation_is_as_if_the_real_use_had_been_charged(
    limit: Limit, held: int, used: int, later: int
) -> None:
    """More or less than was reserved, as long as the limit was not unused in between."""
    book, plain = Book([limit]), Book([limit])
    assume(book.take([(0, limit.cost(held))], 1_000_000) is None)
    assume(later <= min(limit.cost(held), limit.cost(used)))
    book.give(0, limit.cost(held) - limit.cost(used), 1_000_000 + later)
    plain.give(0, -limit.cost(used), 1_000_000)
    assert book.standing(0, 1_000_000 + later) == plain.standing(0, 1_000_000 + later)


def test_what_comes_back_late_is_nothing() -> None:
    """A bucket that is full again does not run over."""
    limit = Limit(Kind.TOKENS, 1000, 1000)
    book = Book([limit])
    assert book.take([(0, limit.cost(500))], 0) is None
    book.give(0, limit.cost(500), MINUTE_US)
    assert book.standing(0, MINUTE_US).remaining == 1000
    assert book.take([(0, limit.cost(1001))], MINUTE_US) == Denied(limit, 0, 1001, None)


def test_more_than_was_held_is_a_debt() -> None:
    """Nothing is left until it is paid off."""
    limit = Limit(Kind.TOKENS, 1000, 1000)
    book = Book([limit])
    assert book.take([(0, limit.cost(100))], 0) is None
    book.give(0, limit.cost(100) - limit.cost(1500), 0)
    assert book.take([(0, limit.cost(1))], 0) == Denied(limit, 1000, 1, limit.cost(501))
    assert book.standing(0, 0).remaining == 0


def test_a_burst_of_requests_fits_whatever_the_rate() -> None:
    """Exactly the burst, also where an interval is no whole number of microseconds."""
    for amount in (1, 3, 7, 30, 59, 77, 601, 9_999):
        limit = Limit(Kind.REQUESTS, amount, amount)
        book = Book([limit])
        assert sum(book.take([(0, limit.cost(1))], 0) is None for _ in range(amount + 5)) == amount


def test_tokens_that_cost_less_than_a_microsecond_are_not_rounded_away() -> None:
    """One by one no more of them fit than together."""
    for amount in (40_000_000, 59_999_999, 900_000_000):
        limit = Limit(Kind.TOKENS, amount, 100)
        book = Book([limit])
        assert sum(book.take([(0, limit.cost(1))], 0) is None for _ in range(300)) <= 100


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 8))
def test_requests_at_once_never_pass_their_number(steps: list[bool], most_at_once: int) -> None:
    """Each that ends makes room for one."""
    limit = Limit(Kind.CONCURRENT, most_at_once)
    book, running = Book([limit]), 0
    for comes in steps:
        if comes:
            let = book.take([(0, 1)], 0) is None
            assert let == (running < most_at_once)
            running += let
        elif running:
            book.give(0, 1, 0)
            running -= 1
        assert book.standing(0, 0).used == running


@given(limits(), st.integers(1, 99), STEPS)
def test_who_waits_as_long_as_told_by_a_share_is_let_through_and_no_earlier(
    limit: Limit, share: int, steps: list[tuple[int, int]]
) -> None:
    """A replica that is alone with its part of the limit tells the truth of it, too."""
    tally, now = Tally(limit), 1_000_000
    for pause, units in steps:
        now, cost = now + pause, limit.cost(units)
        no = tally.denies(cost, now, share)
        if no is not None and no.wait_us is not None:
            assert tally.denies(cost, now + no.wait_us - 1, share) is not None
            now += no.wait_us
            assert tally.denies(cost, now, share) is None
        if no is None or no.wait_us is not None:
            tally.add(cost * share, now)


@given(limits(), st.integers(1, 9), STEPS)
def test_shares_add_up_to_the_limit(limit: Limit, share: int, steps: list[tuple[int, int]]) -> None:
    """Replicas that do not know of each other let through the limit together, and at most one request more each."""
    tallies, now, let = [Tally(limit) for _ in range(share)], 1_000_000, 0
    for pause, _ in steps:
        now += pause
        for tally in tallies:
            if tally.denies(limit.cost(1), now, share) is None:
                tally.add(limit.cost(1) * share, now)
                let += 1
    assert let <= most(limit, now - 1_000_000) + share


def test_a_changed_limit_goes_on_from_what_was_used() -> None:
    """As many requests are used of the new limit as were of the old one."""
    old, new = Limit(Kind.REQUESTS, 100, 100), Limit(Kind.REQUESTS, 200, 200)
    before, after = Book([old]), Book([new, Limit(Kind.TOKENS, 10, 10)])
    for _ in range(60):
        assert before.take([(0, old.cost(1))], 0) is None
    after.inherit(before, 0)
    assert (after.standing(0, 0).used, after.standing(0, 0).remaining) == (60, 140)
    assert after.standing(1, 0).used == 0


def test_what_was_charged_before_a_change_comes_back_after_it() -> None:
    """Places and rates, over several changes; a limit that was away meanwhile knows of nothing."""
    places, rate = Limit(Kind.CONCURRENT, 2), Limit(Kind.TOKENS, 100, 100)
    first = Book([places, rate])
    assert first.take([(0, 1), (1, rate.cost(60))], 0) is None
    second, third = Book([Limit(Kind.TOKENS, 200, 200), Limit(Kind.CONCURRENT, 5)]), Book([Limit(Kind.CONCURRENT, 1)])
    second.inherit(first, 0)
    assert (second.standing(0, 0).used, second.standing(1, 0).used) == (60, 1)
    first.give(1, rate.cost(50), 0)
    assert second.standing(0, 0).used == 10
    third.inherit(second, 0)
    first.give(0, 1, 0)
    assert third.standing(0, 0).used == 0
    assert third.take([(0, 1)], 0) is None
    fourth, fifth = Book([]), Book([places])
    fourth.inherit(third, 0)
    fifth.inherit(fourth, 0)
    third.give(0, 1, 0)
    assert fifth.standing(0, 0).used == 0


def test_of_several_refusals_the_longest_is_told() -> None:
    """Who waits for it has waited for the others."""
    one, two = Limit(Kind.REQUESTS, 60, 1), Limit(Kind.TOKENS, 60, 10)
    book = Book([one, two])
    assert book.take([(0, one.cost(1)), (1, two.cost(10))], 0) is None
    no = book.take([(0, one.cost(1)), (1, two.cost(10))], 0)
    assert no == Denied(two, 10, 10, 10_000_000)
