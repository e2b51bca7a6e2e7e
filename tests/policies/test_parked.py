"""A ticket that waits for a warm backend waits for that one, whatever keeps it."""

from __future__ import annotations

from random import Random

import pytest

from policies.rules import Rules
from policies.scheduler import Scheduler
from policies.types import BackendView, Dispatch, Job

HEAD = tuple(bytes([i]) * 16 for i in range(40))  # of 256 tokens each
ONLY_A = frozenset({"a"})


def with_a_poor_stream(rules: Rules | None = None) -> Scheduler:
    """`a` holds HEAD and streams two answers, of which the second has just begun; that its prefill cost the first a
    second has been learned. `b` has nothing. It is 1.1 s."""
    scheduler = Scheduler(Random(1), rules=rules)
    scheduler.observe([BackendView("a"), BackendView("b")], 0.0)
    scheduler.submit(Job(1, "t", 0.0, prompt_tokens=100, output_tokens=500, candidates=ONLY_A), 0.0)
    scheduler.due(0.0)
    scheduler.first_token(1, 0.1)
    job = Job(2, "t", 0.1, prompt_tokens=10_240, output_tokens=500, prefix=HEAD, candidates=ONLY_A)
    scheduler.submit(job, 0.1)
    scheduler.due(0.1)
    scheduler.first_token(2, 1.1)
    return scheduler


def turn(now: float) -> Job:
    """What follows job 2: a thousand tokens more."""
    return Job(3, "t", now, prompt_tokens=11_240, output_tokens=500, prefix=HEAD, deadline=now + 60.0)


def places(scheduler: Scheduler, now: float) -> list[str]:
    return [action.backend for action in scheduler.due(now) if isinstance(action, Dispatch)]


def test_a_parked_ticket_is_not_sent_elsewhere_while_its_backend_only_lacks_credit() -> None:
    """`a` is open to what costs its streams nothing, `b` to all: the ticket still waits, until they can afford it."""
    scheduler = with_a_poor_stream()
    assert scheduler.submit(turn(1.1), 1.1) is None
    for now in (1.1, 1.11, 1.12):
        assert places(scheduler, now) == []
    now = 1.12
    while not scheduler.tokens(1, 2, now := now + 0.01):  # a step for both streams
        assert now < 1.3
    assert places(scheduler, now) == ["a"]


@pytest.mark.parametrize(("displacement", "expected"), [(0.0, ["b"]), (2.0, [])])
def test_computing_anew_costs_what_it_displaces(displacement: float, expected: list[str]) -> None:
    """Behind a prefill that lasts a little longer than computing the prompt elsewhere would, a ticket goes elsewhere,
    unless what it would displace there is counted."""
    scheduler = with_a_poor_stream(Rules(displacement=displacement, protect_streams=False))
    long = Job(4, "t", 1.1, prompt_tokens=16_000, output_tokens=500, candidates=ONLY_A)
    scheduler.submit(long, 1.1)
    assert places(scheduler, 1.1) == ["a"]
    scheduler.submit(turn(1.2), 1.2)
    assert places(scheduler, 1.2) == expected
