"""Where a job may go can change while it waits."""

from __future__ import annotations

from random import Random

import pytest

from policies.scheduler import Scheduler
from policies.types import BackendView, Dispatch, Drop, Ending, Job, Reason

VIEWS = [BackendView("a", concurrency=1), BackendView("b", concurrency=1)]


def full(routing: str, candidates: set[str]) -> Scheduler:
    """Both backends run a job, 1 and 2, and job 3 waits for one of its candidates."""
    scheduler = Scheduler(Random(1), routing=routing)
    scheduler.observe(VIEWS, 0.0)
    for number, where in ((1, {"a"}), (2, {"b"}), (3, candidates)):
        assert scheduler.submit(Job(number, "t", 0.0, prompt_tokens=100, candidates=where), 0.0) is None
        assert len(scheduler.due(0.0)) == (number < 3)
    return scheduler


@pytest.mark.parametrize("routing", ["price", "round_robin"])
@pytest.mark.parametrize("told", [True, False])
def test_a_backend_that_it_may_not_use_any_more_does_not_get_it(routing: str, told: bool) -> None:
    """Though it is free: whether the scheduler has been told already or not."""
    candidates = {"a", "b"}
    scheduler = full(routing, candidates)
    candidates.remove("b")
    if told:
        scheduler.observe(VIEWS, 0.5, moved=True)
    scheduler.leave(2, 1.0, Ending.SUCCESS)
    assert scheduler.due(1.0) == []
    scheduler.leave(1, 2.0, Ending.SUCCESS)
    (dispatch,) = scheduler.due(2.0)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.backend == "a"


@pytest.mark.parametrize("routing", ["price", "round_robin"])
def test_a_backend_that_it_may_use_now_gets_it(routing: str) -> None:
    """Nothing else has to change."""
    candidates = {"a"}
    scheduler = full(routing, candidates)
    scheduler.leave(2, 1.0, Ending.SUCCESS)
    assert scheduler.due(1.0) == []
    candidates.add("b")
    scheduler.observe(VIEWS, 2.0, moved=True)
    (dispatch,) = scheduler.due(2.0)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.backend == "b"


def test_a_job_that_may_go_nowhere_any_more_is_dropped() -> None:
    """At once."""
    candidates = {"a"}
    scheduler = full("price", candidates)
    candidates.clear()
    scheduler.observe(VIEWS, 1.0, moved=True)
    (drop,) = scheduler.due(1.0)
    assert isinstance(drop, Drop)
    assert drop.reason is Reason.NO_BACKEND
