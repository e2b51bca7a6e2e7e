"""Prefills whose end nobody sees: what tells that they are over, and what long ones are expected to take."""

from __future__ import annotations

from random import Random

import pytest

from policies.estimate import Prefills
from policies.scheduler import Scheduler
from policies.types import BackendView, Dispatch, Job

DECODE_S, MIXED_S = 0.02, 0.09


def with_a_stream() -> Scheduler:
    """One backend on which one answer streams, at DECODE_S a token."""
    scheduler = Scheduler(Random(1))
    scheduler.observe([BackendView("a")], 0.0)
    scheduler.submit(Job(1, "t", 0.0, prompt_tokens=100, output_tokens=500, deadline=100.0), 0.0)
    assert [type(action) for action in scheduler.due(0.0)] == [Dispatch]
    scheduler.first_token(1, 0.1)
    for step in range(1, 200):
        scheduler.tokens(1, 1, 0.1 + step * DECODE_S)
    return scheduler


def test_short_steps_of_the_streams_end_an_unseen_prefill() -> None:
    """Steps are long while the prefill lasts, and short again when it is over: then `due` is wanted, not before."""
    scheduler, now = with_a_stream(), 5.0
    scheduler.submit(Job(2, "t", now, prompt_tokens=20_000, output_tokens=50, streamed=False, deadline=99.0), now)
    assert [type(action) for action in scheduler.due(now)] == [Dispatch]
    assert scheduler.statistics(now).backends["a"].in_flight_tokens == 20_000
    for _ in range(8):
        now += MIXED_S
        assert not scheduler.tokens(1, 1, now)
    assert scheduler.statistics(now).backends["a"].in_flight_tokens == 20_000
    told = []
    for _ in range(4):
        now += DECODE_S
        told.append(scheduler.tokens(1, 1, now))
    assert any(told)
    assert scheduler.statistics(now).backends["a"].in_flight_tokens == 0


def test_without_streams_an_unseen_prefill_ends_when_it_should() -> None:
    """Nothing tells there: it is taken to have ended after what it was expected to take."""
    scheduler = Scheduler(Random(1))
    scheduler.observe([BackendView("a")], 0.0)
    scheduler.submit(Job(1, "t", 0.0, prompt_tokens=20_000, output_tokens=50, streamed=False, deadline=99.0), 0.0)
    scheduler.due(0.0)
    ends = scheduler.next_deadline()
    assert ends == pytest.approx(2.0, rel=0.01)
    scheduler.due(ends)
    assert scheduler.statistics(ends).backends["a"].in_flight_tokens == 0


def test_short_prompts_tell_little_of_long_ones() -> None:
    """Noise among prompts of a few hundred tokens is no slope for those of sixty thousand."""
    times, rng = Prefills(1e-4, 5000.0, keep=0.99), Random(2)
    for _ in range(300):
        tokens = rng.randrange(100, 900)
        times.add(tokens, tokens / 2, tokens * 1e-4 * rng.uniform(0.5, 2.5))
    assert 3.0 < times.expect(60_000, 60_000) < 30.0
