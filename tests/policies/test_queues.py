"""The books of a queue are as large as what waits in it, however long that takes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from policies.scheduler import Scheduler
from policies.types import INTERACTIVE, BackendView, Dispatch, Ending, Job


def test_a_tenant_that_waits_for_long_costs_no_memory() -> None:
    """It may only go where somebody else runs, while thousands of others are served beside it."""
    scheduler = Scheduler(Random(1), classes=[replace(INTERACTIVE, max_wait_s=1e6)])
    scheduler.observe([BackendView("a", concurrency=1), BackendView("b", concurrency=1)], 0.0)
    for number, tenant, where in ((1, "holder", "b"), (2, "waits", "b"), (3, "busy", "a")):
        scheduler.submit(Job(number, tenant, 0.0, prompt_tokens=100, candidates={where}), 0.0)
        assert len(scheduler.due(0.0)) == (tenant != "waits")
    for number in range(4, 3000):
        now = number / 100
        scheduler.submit(Job(number, "busy", now, prompt_tokens=100, candidates={"a"}), now)
        scheduler.leave(number - 1, now, Ending.SUCCESS)
        (dispatch,) = scheduler.due(now)
        assert isinstance(dispatch, Dispatch)
        assert dispatch.job.id == number
    queue = scheduler._room.tiers["interactive"].queue
    assert len(queue._by_service) < 100
    scheduler.leave(1, 40.0, Ending.SUCCESS)
    (dispatch,) = scheduler.due(40.0)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.job.tenant == "waits"
