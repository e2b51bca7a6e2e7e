"""Who may wait for a pool that sleeps, and how long it is called."""

from __future__ import annotations

from policies.wakeup import LINGER_S, Wakeup


def test_so_many_are_held_and_so_long() -> None:
    """Places come back; waiting that began before counts; so does a deadline."""
    of = Wakeup(hold_s=10.0, most=2)
    assert of.enter(since=5.0, now=7.0) == 8.0
    assert of.enter(since=7.0, now=7.0, deadline=9.0) == 2.0
    assert of.enter(since=7.0, now=7.0) is None
    of.leave()
    assert of.enter(since=7.0, now=7.0) == 10.0
    of.leave()
    assert of.enter(since=7.0, now=17.0) is None


def test_a_want_is_told_while_it_lasts_and_long_enough_to_be_seen() -> None:
    """Held requests are a want for as long as they are held, refused ones for a while, until somebody serves."""
    of = Wakeup(hold_s=600.0, most=1)
    assert not of.wanted(0.0)
    of.ask(0.0)
    assert of.wanted(LINGER_S - 0.1)
    assert not of.wanted(LINGER_S)
    assert of.enter(0.0, 0.0) is not None
    assert of.wanted(500.0)
    of.leave()
    of.ask(1.0)
    of.woken()
    assert not of.wanted(1.0)
