"""Backend time is shared out: all of it, once, in equal parts of each moment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from policies.shares import TimeShare


def test_who_is_alone_has_all_of_it() -> None:
    """And nobody pays for the time in which nothing runs."""
    share = TimeShare()
    first = share.enter(10.0)
    assert share.leave(first, 13.0) == approx(3.0)
    second = share.enter(100.0)
    assert share.leave(second, 101.0) == approx(1.0)
    assert share.busy(200.0) == approx(4.0)


def test_together_each_has_half() -> None:
    """Of the time that they are together."""
    share = TimeShare()
    long = share.enter(0.0)
    short = share.enter(4.0)
    assert share.leave(short, 6.0) == approx(1.0)
    assert share.leave(long, 10.0) == approx(9.0)
    assert share.busy_s == approx(10.0)


EVENTS = st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 5)), min_size=1, max_size=60)


@given(EVENTS)
def test_the_parts_add_up_to_the_time_in_which_anything_ran(events: list[tuple[float, int]]) -> None:
    """However they come and go; nobody has less than nothing or more than the time of the stay."""
    share, now, busy = TimeShare(), 0.0, 0.0
    here: dict[int, tuple[float, float]] = {}
    had: list[float] = []
    for passed, who in events:
        busy += passed if here else 0.0
        now += passed
        if who in here:
            entered, since = here.pop(who)
            part = share.leave(entered, now)
            assert -1e-6 <= part <= now - since + 1e-6
            had.append(part)
        else:
            here[who] = (share.enter(now), now)
    had += [share.leave(entered, now) for entered, _ in here.values()]
    assert sum(had) == approx(busy, abs=1e-6)
    assert share.busy_s == approx(busy, abs=1e-6)
