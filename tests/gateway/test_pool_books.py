"""A pool's books: what the scheduler is told of tokens, and when."""

from __future__ import annotations

from random import Random

import pytest

from gateway.backend import Backend
from gateway.pool import Pool
from policies.retry import RetryBudget
from policies.scheduler import Scheduler
from policies.types import Ending, Job

NAME = "http://127.0.0.1:1"


class Clock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> Pool:
    """One backend that takes all."""
    scheduler = Scheduler(Random(1))
    backend = Backend(NAME, "pool", "127.0.0.1", 1, b"127.0.0.1:1")
    return Pool("pool", [backend], scheduler, RetryBudget(rng=Random(1)), clock)


def start(pool: Pool, clock: Clock, number: int) -> None:
    """A stream that has its first token."""
    decision = pool.submit(Job(number, "tenant", clock(), prompt_tokens=10, output_tokens=100))
    assert isinstance(decision, tuple) and decision[0].backend == NAME
    pool.first_token(number, NAME, clock())


def credit_s(pool: Pool) -> float:
    return pool.scheduler.statistics(pool._clock()).backends[NAME].credit_s


def test_tokens_are_parts_of_steps_of_the_streams_that_got_them(pool: Pool, clock: Clock) -> None:
    """Two streams got ten tokens each and one of them ends: ten steps were made, not the twenty that the same tokens
    would be to the one that is left."""
    start(pool, clock, 1)
    start(pool, clock, 2)
    clock.now += 0.5
    pool.tallies[NAME].tokens += 20
    pool.leave(1, Ending.SUCCESS, backend=NAME)
    assert credit_s(pool) == pytest.approx(10 * pool.scheduler.rules.objective_s - 0.5)


def test_tokens_are_told_once(pool: Pool, clock: Clock) -> None:
    """However often a decision is made."""
    start(pool, clock, 1)
    clock.now += 0.5
    pool.tallies[NAME].tokens += 10
    for number in (2, 3, 4):
        clock.now += 0.1
        pool.explain(Job(number, "tenant", clock(), prompt_tokens=10))
    assert credit_s(pool) == pytest.approx(10 * pool.scheduler.rules.objective_s - 0.8)


def test_tokens_of_a_backend_without_streams_make_no_steps(pool: Pool, clock: Clock) -> None:
    """A last token that comes with the end is nobody's step."""
    start(pool, clock, 1)
    pool.leave(1, Ending.SUCCESS, backend=NAME)
    pool.tallies[NAME].tokens += 5
    start(pool, clock, 2)
    assert credit_s(pool) == pytest.approx(0.0)
