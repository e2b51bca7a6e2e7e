"""A scheduler whose rules change while jobs wait and run."""

from __future__ import annotations

from itertools import count
from random import Random

from policies.scheduler import Scheduler
from policies.types import BackendView, ClassPolicy, Dispatch, Drop, Ending, Job, Reason

NOW = 100.0
IDS = count(1)
FAST, SLOW = ClassPolicy("fast", max_wait_s=10.0), ClassPolicy("slow", max_wait_s=100.0)


def scheduler(routing: str = "round_robin", *classes: ClassPolicy, backends: int = 1) -> Scheduler:
    made = Scheduler(Random(1), routing=routing, classes=classes or (FAST, SLOW))
    made.observe([BackendView(f"b{number}", concurrency=1) for number in range(backends)], NOW)
    return made


def job(class_: str = "fast", arrived: float = NOW, prompt: int = 100) -> Job:
    return Job(next(IDS), "t", arrived, class_, prompt_tokens=prompt, output_tokens=10)


def put(made: Scheduler, *jobs: Job) -> list[int]:
    """Submit them; the ids of those that are dispatched at once."""
    out = []
    for each in jobs:
        assert made.submit(each, NOW) is None
        out += served(made)
    return out


def served(made: Scheduler, now: float = NOW) -> list[int]:
    return [decision.job.id for decision in made.due(now) if isinstance(decision, Dispatch)]


def drained(made: Scheduler, running: int) -> list[int]:
    """The ids of all that wait, in the order in which they are served by the one backend."""
    order = []
    while True:
        made.leave(running, NOW, Ending.SUCCESS)
        if not (ids := served(made)):
            return order
        (running,) = ids
        order.append(running)


def test_a_new_order_of_classes_holds_for_who_waits() -> None:
    """Who was behind comes first now; nobody is lost."""
    made = scheduler()
    running, fast, slow = job(), job("fast"), job("slow")
    put(made, running, fast, slow)
    made.configure("round_robin", [SLOW, FAST])
    assert drained(made, running.id) == [slow.id, fast.id]


def test_a_class_that_is_gone_serves_those_who_name_it() -> None:
    """Behind all others: who waits in it, and who comes late with a word from before."""
    made = scheduler()
    running, slow = job(), job("slow")
    put(made, running, slow)
    made.configure("round_robin", [FAST])
    late, fast = job("slow"), job("fast")
    put(made, late, fast)
    assert drained(made, running.id) == [fast.id, slow.id, late.id]


def test_a_new_class_is_there_at_once() -> None:
    """In its place among the others."""
    made = scheduler()
    running, fast = job(), job("fast")
    put(made, running, fast)
    made.configure("round_robin", [ClassPolicy("urgent"), FAST, SLOW])
    urgent = job("urgent")
    put(made, urgent)
    assert drained(made, running.id) == [urgent.id, fast.id]


def test_a_shorter_patience_holds_for_who_waits() -> None:
    """And a longer one, too: nobody is dropped before or after the time that holds now."""
    made = scheduler()
    put(made, job(), job("fast"), job("slow"))
    made.configure("round_robin", [ClassPolicy("fast", max_wait_s=50.0), ClassPolicy("slow", max_wait_s=5.0)])
    assert made.next_deadline() == NOW + 5.0
    assert [type(each) for each in made.due(NOW + 4.9)] == []
    (dropped,) = made.due(NOW + 5.0)
    assert isinstance(dropped, Drop)
    assert (dropped.job.class_, dropped.reason) == ("slow", Reason.WAITED)
    assert made.due(NOW + 49.9) == []
    assert len(made.due(NOW + 50.0)) == 1


def test_smaller_bounds_lose_nobody() -> None:
    """Who waits already may go on; the next one finds the queue full."""
    made = scheduler()
    running, first, second = job(), job(), job()
    put(made, running, first, second)
    made.configure("round_robin", [ClassPolicy("fast", max_queued=1), SLOW])
    assert made.submit(job(), NOW) is Reason.QUEUE_FULL
    assert drained(made, running.id) == [first.id, second.id]


def test_another_routing_orders_who_waits_anew() -> None:
    """By arrival without the gate, the shortest first with it, and back again."""
    made = scheduler()
    running, long, short = job(), job(prompt=9000), job(prompt=10)
    put(made, running, long, short)
    made.configure("price", [FAST, SLOW])
    made.configure("round_robin", [FAST, SLOW])
    made.configure("price", [FAST, SLOW])
    assert drained(made, running.id) == [short.id, long.id]


def test_what_was_learned_and_what_runs_stays() -> None:
    """Counters return to zero through a change of everything; the index knows what it knew."""
    made = scheduler("price", backends=2)
    prefix = tuple(bytes([number]) * 16 for number in range(20))
    first = Job(next(IDS), "t", NOW, "fast", prompt_tokens=5000, output_tokens=10, prefix=prefix)
    put(made, first)
    pieces = made.statistics(NOW).index_pieces
    made.configure("least_tokens", [SLOW])
    made.configure("price", [FAST, SLOW])
    assert made.statistics(NOW).index_pieces == pieces == 20
    made.first_token(first.id, NOW + 1.0)
    made.leave(first.id, NOW + 2.0, Ending.SUCCESS)
    now = made.statistics(NOW + 2.0)
    assert all(each.running == each.in_flight_tokens == each.kv_tokens == 0 for each in now.backends.values())
    assert now.prefill_rate != scheduler("price").statistics(NOW).prefill_rate
