"""A pool whose backends come and go while requests run and wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from gateway.backend import Backend
from gateway.errors import SHUTTING_DOWN, Unavailable
from gateway.exchange import Attempt
from gateway.pool import Placed, Pool
from policies.retry import RetryBudget
from policies.scheduler import Scheduler
from policies.types import BackendView, Dispatch, Drop, Ending, Job, Reason
from policies.verdicts import Found

pytestmark = pytest.mark.anyio
IDS = count(1)


def backend(name: str, concurrency: int = 1, region: str | None = None) -> Backend:
    return Backend(name, "p", "127.0.0.1", 1, b"h", concurrency=concurrency, region=region)


@pytest.fixture
def pool() -> Iterator[Pool]:
    """One backend with one place, requests in the order of their arrival, and a clock that stands."""
    scheduler = Scheduler(Random(1), routing="round_robin")
    made = Pool("p", [backend("a")], scheduler, RetryBudget(rng=Random(1)), lambda: 1.0)
    yield made
    made.close()


def job(**told: object) -> Job:
    return replace(Job(next(IDS), "t", 1.0, prompt_tokens=10, output_tokens=10), **told)  # type: ignore[arg-type]


def run(pool: Pool, asked: Job | None = None) -> Job:
    """A job that is on a backend at once."""
    asked = asked or job()
    assert isinstance(pool.submit(asked), tuple)
    return asked


def wait(pool: Pool, asked: Job | None = None) -> tuple[Job, asyncio.Future[Placed | Drop]]:
    """A job that has to wait."""
    asked = asked or job()
    waiter = pool.submit(asked)
    assert isinstance(waiter, asyncio.Future)
    assert not waiter.done()
    return asked, waiter


def running(pool: Pool) -> dict[str, int]:
    return {name: each.running for name, each in pool.statistics().backends.items()}


async def test_a_new_backend_serves_who_waits(pool: Pool) -> None:
    """At once, in their order; whoever finds no place still waits."""
    run(pool)
    waiters = [wait(pool)[1] for _ in range(3)]
    assert pool.observe([backend("a"), backend("b", 2)]) == []
    assert [waiter.done() for waiter in waiters] == [True, True, False]
    for waiter in waiters[:2]:
        placed = waiter.result()
        assert isinstance(placed, tuple)
        assert placed[0].backend == placed[1].name == "b"
    assert running(pool) == {"a": 1, "b": 2}


async def test_who_stays_keeps_its_load(pool: Pool) -> None:
    """Its place is not given away again, neither at the change nor afterwards."""
    first = run(pool)
    _, waiter = wait(pool)
    pool.observe([backend("a")])
    assert running(pool) == {"a": 1}
    assert not waiter.done()
    pool.leave(first.id, Ending.SUCCESS)
    assert waiter.done()
    assert running(pool) == {"a": 1}


async def test_more_room_is_used_at_once(pool: Pool) -> None:
    """A backend that stays may run more from now on, or less."""
    jobs = [run(pool)]
    asked, waiter = wait(pool)
    pool.observe([backend("a", 2)])
    assert waiter.done()
    pool.observe([backend("a", 1)])
    _, later = wait(pool)
    pool.leave(jobs[0].id, Ending.SUCCESS)
    assert not later.done()
    pool.leave(asked.id, Ending.SUCCESS)
    assert later.done()


async def test_who_goes_ends_what_runs_and_gets_no_more(pool: Pool) -> None:
    """It is returned; what runs there ends without a trace in the counts."""
    first = run(pool)
    a = pool.backends["a"]
    assert pool.observe([backend("b")]) == [a]
    assert running(pool) == {"b": 0}
    second = run(pool)
    assert running(pool) == {"b": 1}
    pool.first_token(first.id, "a", 1.0)
    pool.leave(first.id, Ending.SUCCESS)
    pool.leave(second.id, Ending.SUCCESS)
    assert running(pool) == {"b": 0}


async def test_nothing_stays_of_who_is_gone(pool: Pool) -> None:
    """Each start of a backend may have an address of its own. What ran there ends after it went, and is remembered
    until the next change at most."""
    for number in range(100):
        first, name = run(pool), next(iter(pool.backends))
        pool.tallies[name].tokens += 1
        attempt = Attempt(pool.backends[name], Dispatch(first, name, 0, 10, 0.0), 1.0, lambda now: None)
        pool.observe([backend(str(number))])
        pool.answered(first.id, attempt, 1.0)
        pool.judge(attempt, Found.GOOD)
        pool.leave(first.id, Ending.SUCCESS, backend=name)
    pool.observe([backend("last")])
    kept = (pool.served, pool.tallies, pool.shares, pool.health.records, pool.unanswered)
    assert [len(each) for each in kept] == [0, 0, 0, 1, 0]


async def test_who_was_served_last_is_who_was_sent_last(pool: Pool) -> None:
    """A long prompt that gets its first token after a short one, which was sent later, changes nothing."""
    place = pool.backends["a"]
    for sent_at in (2.0, 1.0):
        pool.answered(0, Attempt(place, Dispatch(job(), "a"), sent_at, lambda now: None), 3.0)
    assert pool.served == {"a": 2.0}


async def test_a_decision_outlives_its_backend(pool: Pool) -> None:
    """It was made before the backend went, and who waits wakes up afterwards: it goes there all the same."""
    first = run(pool)
    asked, waiter = wait(pool)
    pool.leave(first.id, Ending.SUCCESS)
    a = pool.backends["a"]
    pool.observe([])
    placed = waiter.result()
    assert isinstance(placed, tuple)
    assert placed[1] is a
    pool.leave(asked.id, Ending.SUCCESS)


async def test_without_any_backend_those_who_wait_are_told(pool: Pool) -> None:
    """And so is whoever comes later."""
    run(pool)
    _, waiter = wait(pool)
    pool.observe([])
    dropped = waiter.result()
    assert isinstance(dropped, Drop)
    assert dropped.reason is Reason.NO_BACKEND
    assert isinstance(pool.submit(job()), Drop)


async def test_what_was_found_out_stays_known(pool: Pool) -> None:
    """A backend that is shut stays shut when the others change, keeps its configured bounds, and opens again."""
    pool.see([BackendView("a", open=False, concurrency=9), BackendView("stranger")])
    assert isinstance(pool.submit(job()), Drop)
    pool.observe([backend("a"), backend("b")])
    run(pool)
    assert running(pool) == {"a": 0, "b": 1}
    _, waiter = wait(pool)
    pool.see([BackendView("a", concurrency=9)])
    assert waiter.done()
    wait(pool)


async def test_one_that_goes_and_returns_starts_anew(pool: Pool) -> None:
    """Whatever was known of it."""
    pool.see([BackendView("a", open=False)])
    pool.observe([])
    pool.observe([backend("a")])
    run(pool)


async def test_after_a_stop_a_change_wakes_nobody_twice(pool: Pool) -> None:
    """Those who wait have been told already."""
    run(pool)
    asked, waiter = wait(pool)
    pool.refuse_waiting(Unavailable(SHUTTING_DOWN, "stop"))
    pool.observe([backend("a"), backend("b")])
    with pytest.raises(Unavailable):
        waiter.result()
    pool.leave(asked.id, Ending.IGNORED)
    assert running(pool) == {"a": 1, "b": 0}


async def test_regions_are_kept_to_while_backends_change(pool: Pool) -> None:
    """Who waits for a region gets the backend that comes there, or moves there, and never another one."""
    eu = pool.eligible.backends("m", ("eu",))
    assert isinstance(pool.submit(job(candidates=eu)), Drop)
    pool.observe([backend("a"), backend("b", region="eu")])
    run(pool, job(candidates=eu))
    assert running(pool) == {"a": 0, "b": 1}
    _, waiter = wait(pool, job(candidates=eu))
    _, other = wait(pool, job(candidates=eu))
    pool.observe([backend("a"), backend("b", region="eu"), backend("c", region="us"), backend("d", region="eu")])
    assert running(pool) == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert waiter.done() and not other.done()
    pool.observe([backend("a", region="eu"), backend("b"), backend("c", region="us"), backend("d", region="eu")])
    assert running(pool) == {"a": 1, "b": 1, "c": 0, "d": 1}
    assert other.done()


async def test_what_backends_serve_may_change_while_requests_wait(pool: Pool) -> None:
    """An adapter is unloaded here and loaded there, and nothing else changes: who waits for it goes where it is."""
    names = ("a", "b", "c")
    pool.observe([backend(name) for name in names])
    pool.eligible.want({"m": "m", "n": "n"})
    for name in names:
        pool.eligible.serves(name, frozenset("mn" if name != "c" else "n"))
        run(pool, job(candidates=frozenset([name])))
    asked, waiter = wait(pool, job(candidates=pool.eligible.backends("m", ())))
    assert pool.eligible.serves("b", frozenset("n"))
    pool.see([BackendView(name) for name in names])
    pool.observe([backend("a"), backend("b", 2), backend("c")])
    assert not waiter.done()
    assert pool.eligible.serves("a", frozenset("n"))
    assert pool.eligible.serves("b", frozenset("mn"))
    pool.see([BackendView(name) for name in names])
    placed = waiter.result()
    assert isinstance(placed, tuple)
    assert placed[0].backend == "b"
    assert placed[0].job is asked


async def test_a_model_that_no_backend_serves_any_more_is_told(pool: Pool) -> None:
    """Who waits for it is refused at once."""
    pool.eligible.want({"m": "m", "n": "n"})
    pool.observe([backend("a"), backend("b")])
    pool.eligible.serves("b", frozenset("n"))
    run(pool, job(candidates=frozenset("a")))
    _, waiter = wait(pool, job(candidates=pool.eligible.backends("m", ())))
    pool.eligible.serves("a", frozenset("n"))
    pool.see([BackendView("a"), BackendView("b")])
    dropped = waiter.result()
    assert isinstance(dropped, Drop)
    assert dropped.reason is Reason.NO_BACKEND


async def test_a_region_without_backends_is_told(pool: Pool) -> None:
    """Its last backend moves away: who waits there is refused, and nobody else."""
    pool.observe([backend("a", region="eu"), backend("b", region="us")])
    eu = pool.eligible.backends("m", ("eu",))
    run(pool, job(candidates=eu))
    _, waiter = wait(pool, job(candidates=eu))
    pool.observe([backend("a", region="us"), backend("b", region="us")])
    dropped = waiter.result()
    assert isinstance(dropped, Drop)
    assert dropped.reason is Reason.NO_BACKEND
