"""The scheduler's rules one by one, each in the smallest scene that shows it. Times are seconds, prefills take what
`RATE` says until something else was learned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from math import inf, log1p
from random import Random
from typing import Any

from policies.rules import Rules
from policies.scheduler import Scheduler
from policies.types import (
    BATCH,
    INTERACTIVE,
    BackendView,
    ClassPolicy,
    Dispatch,
    Drop,
    Ending,
    Gate,
    Job,
    Reason,
    RemoteLoad,
    Usage,
    Wait,
)

RATE = 10_000.0  # tokens per second, of Rules
PATIENT = replace(INTERACTIVE, max_queued=10_000, max_queued_tokens=1 << 40, max_wait_s=1e6)
LATER = replace(BATCH, max_wait_s=1e6, ceiling=0.5, kv_ceiling=0.6)


class Scene:
    """A scheduler before backends b0, b1, ..., and a clock."""

    def __init__(
        self,
        backends: int = 1,
        *,
        classes: Iterable[ClassPolicy] = (PATIENT, LATER),
        view: BackendView = BackendView(""),  # noqa: B008 (frozen)
        **options: Any,
    ) -> None:
        self.scheduler = Scheduler(Random(1), classes=tuple(classes), **options)
        self.now = 0.0
        self.ids = count(1)
        self.view = view
        self.backends(backends)

    def backends(self, number: int) -> list[Dispatch | Drop]:
        self.scheduler.observe([replace(self.view, name=f"b{i}") for i in range(number)], self.now)
        return self.due()

    def due(self) -> list[Dispatch | Drop]:
        return self.scheduler.due(self.now)

    def job(self, tokens: int, tenant: str = "t", **fields: Any) -> Job:
        fields = {"output_tokens": 100, "prompt_tokens": tokens} | fields
        return Job(next(self.ids), tenant, self.now, **fields)

    def submit(self, tokens: int, tenant: str = "t", **fields: Any) -> tuple[int, str]:
        """The job's number, and the backend that it went to at once, or why it was refused; empty if it waits."""
        job = self.job(tokens, tenant, **fields)
        reason = self.scheduler.submit(job, self.now)
        where = [each.backend for each in self.due() if isinstance(each, Dispatch) and each.job is job]
        return job.id, reason or "".join(where)

    def first(self, job_id: int) -> list[Dispatch | Drop]:
        self.scheduler.first_token(job_id, self.now)
        return self.due()

    def leave(self, job_id: int, ending: Ending = Ending.SUCCESS, usage: Usage | None = None) -> list[Dispatch | Drop]:
        self.scheduler.leave(job_id, self.now, ending, usage)
        return self.due()

    def at(self, now: float) -> list[Dispatch | Drop]:
        self.now = now
        return self.due()

    def gate(self, name: str = "b0") -> Gate:
        return self.scheduler.statistics(self.now).backends[name].gate


def numbers(found: list[Dispatch | Drop]) -> list[int]:
    return [each.job.id for each in found]


def prefix(name: str, pieces: int) -> tuple[bytes, ...]:
    return tuple(b"%b/%d" % (name.encode(), i) for i in range(pieces))


def test_a_second_prefill_waits_for_the_first_unless_both_are_small() -> None:
    """4,096 uncached tokens in flight on a backend, or one prefill of any size."""
    scene = Scene()
    assert scene.submit(20_000)[1] == "b0"
    assert scene.submit(10)[1] == ""
    scene = Scene()
    assert [scene.submit(tokens)[1] for tokens in (2000, 2000, 97, 96)] == ["b0", "b0", "", "b0"]


def test_the_first_token_lets_the_next_one_in() -> None:
    """And so does an end, of every kind: a gate that an upstream error left shut would never open again."""
    for ending in (None, *Ending):
        scene = Scene()
        running, _ = scene.submit(20_000, output_tokens=0 if ending else 100, streamed=ending is None)
        waiting, _ = scene.submit(20_000)
        scene.now = 1.0
        found = scene.first(running) if ending is None else scene.leave(running, ending)
        assert numbers(found) == [waiting], ending


def test_streams_get_a_break_that_ends_when_it_is_said_to() -> None:
    """A stream on its objective cannot afford a prefill; one that gets no tokens is waited for as long as the prefill
    would take, and the scheduler says until when."""
    scene = Scene()
    running, _ = scene.submit(8000)
    scene.now = 0.8
    scene.first(running)
    scene.scheduler._pool.losses.add(8000, 4000, 0.5)  # prefills like this cost a stream half a second
    waiting, where = scene.submit(10_000)
    assert where == ""
    deadline = scene.scheduler.next_deadline()
    assert deadline is not None
    assert abs(deadline - (0.8 + scene.scheduler._pool.times.expect(10_000, 10_000))) < 1e-9
    assert scene.at(deadline - 1e-6) == []
    assert numbers(scene.at(deadline)) == [waiting]


def test_streams_that_have_saved_enough_end_the_break() -> None:
    """Tokens that come faster than promised are a credit; the one that suffices says so, and none before it."""
    scene = Scene()
    running, _ = scene.submit(8000)
    scene.now = 0.8
    scene.first(running)
    scene.scheduler._pool.losses.add(8000, 4000, 0.5)
    waiting, _ = scene.submit(10_000)
    said = [scene.scheduler.tokens(running, 1, scene.now) for _ in range(20)]
    assert said.count(True) == 1
    loss = 1.2 * scene.scheduler._pool.losses.expect(10_000, 10_000)
    assert said.index(True) == -(-loss // 0.1) - 1  # a token is a tenth of a second
    assert numbers(scene.due()) == [waiting]


def test_a_stream_that_ends_takes_its_debt_along() -> None:
    """When all streams have ended nobody is owed a break."""
    scene = Scene()
    whole, _ = scene.submit(10, streamed=False)
    scene.at(0.1)
    running, _ = scene.submit(8000)
    scene.now = 0.9
    scene.first(running)
    scene.scheduler._pool.losses.add(8000, 4000, 0.5)
    waiting, where = scene.submit(10_000)
    assert where == ""
    assert numbers(scene.leave(running)) == [waiting]
    assert scene.scheduler.statistics(scene.now).backends["b0"].running == 2, f"{whole} still runs"


def test_a_prompt_waits_for_the_backend_that_holds_it_and_not_for_ever() -> None:
    """One backend holds most of the prompt and computes, something large or too much for it to fit beside; the other is
    free. It waits for the first, goes there when it opens, and to the other once seven tenths of its time are gone."""
    for opens, beside in ((True, 22_000), (False, 22_000), (True, 26_000), (False, 26_000)):
        scene = Scene(2, classes=[replace(PATIENT, max_wait_s=10.0)])
        first, where = scene.submit(20_000, prefix=prefix("x", 78))
        assert scene.submit(20_000)[1]  # keeps the other one busy
        scene.now = 2.0
        for number in (first, first + 1):
            scene.first(number)
            scene.leave(number, Ending.IGNORED)
        again, back = scene.submit(beside, prefix=prefix("x", 78) + prefix("z", 7), output_tokens=0)
        assert back == where
        waiting, nowhere = scene.submit(23_000, prefix=prefix("x", 78) + prefix("w", 7))
        assert nowhere == ""
        scene.now += 0.5
        if opens:
            (found,) = scene.leave(again, Ending.IGNORED)
            assert isinstance(found, Dispatch)
            assert (found.backend, found.job.id) == (where, waiting)
            assert found.waited_for is (Wait.WARM if beside > 25_000 else Wait.ROOM)
        else:
            assert scene.scheduler.next_deadline() == 9.0
            assert scene.at(8.999) == []
            (found,) = scene.at(9.0)
            assert isinstance(found, Dispatch)
            assert found.backend != where


def test_small_prompts_do_not_overtake_for_ever() -> None:
    """The first in order fits nowhere beside a flood of small ones: a backend is drained for it."""
    scene = Scene()
    running = [scene.submit(1000)[0] for _ in range(4)]
    large, _ = scene.submit(6000)
    scene.now = 400.0  # by now it comes before what is new
    small = [scene.submit(900)[0] for _ in range(8)]
    order: list[int] = []
    for number in running:
        order += numbers(scene.first(number))
    assert order == [large]
    assert numbers(scene.first(large))[0] in small


def test_a_long_prompt_ages_into_the_first_place() -> None:
    """The order is arrival / 80 s + ln(1 + tokens): whoever comes later than that allows goes behind."""
    scene = Scene(rules=Rules(ageing_s=80.0))
    running, _ = scene.submit(20_000)
    large, _ = scene.submit(30_000)
    bound = 80.0 * (log1p(30_000) - log1p(100))
    scene.now = bound - 1.0
    early, _ = scene.submit(100)
    scene.now = bound + 1.0
    late, _ = scene.submit(100)
    assert numbers(scene.first(running)) == [early]
    assert numbers(scene.first(early)) == [large]
    assert numbers(scene.first(large)) == [late]


def test_tenants_get_their_weights_within_the_bound() -> None:
    """Backlogged tenants' service never differs by more than the quantum and one job (VTC, Sheng et al., theorem 4.4),
    however many requests one of them has waiting; over a while each gets its weight."""
    scene = Scene(4, rules=Rules(quantum_tokens=8000.0), classes=[replace(PATIENT, tenant_share=1.0)])
    rng = Random(3)
    weights = {"a": 1.0, "b": 2.0, "c": 1.0}
    had, waiting = dict.fromkeys(weights, 0), dict.fromkeys(weights, 0)
    queue = scene.scheduler._room.tiers["interactive"].queue
    running: list[int] = []
    for _ in range(1000):
        for tenant, weight in weights.items():
            while waiting[tenant] < (40 if tenant == "a" else 3):
                waiting[tenant] += 1
                scene.scheduler.submit(scene.job(3000, tenant, weight=weight), scene.now)
        for each in scene.due():
            waiting[each.job.tenant] -= 1
            had[each.job.tenant] += 1
            running.append(each.job.id)
        served = [queue.served(tenant) for tenant in weights]
        assert max(served) - min(served) <= 8000 + 3400 + 4 * 200  # and what four running jobs may still be settled by
        scene.now += 0.05
        number = running.pop(rng.randrange(len(running)))
        scene.scheduler.leave(number, scene.now, Ending.SUCCESS, Usage(3000, rng.randrange(200), 0))
    assert abs(had["b"] - 2 * had["a"]) <= 8 and abs(had["a"] - had["c"]) <= 8


def test_whoever_returns_has_saved_nothing_up() -> None:
    """A tenant that was away gets its share from now on, even where it stands in the lane of one backend."""
    scene = Scene(2)
    scene.submit(3000, "away", prefix=prefix("x", 11))
    for _ in range(400):
        number, where = scene.submit(3000, "there")
        assert where
        scene.first(number)
        scene.leave(number)
    blocked = [scene.submit(30_000, "there")[0] for _ in range(2)]
    for _ in range(20):
        scene.submit(3000, "away", prefix=prefix("x", 11))
    theirs = [scene.submit(3000, "there")[0] for _ in range(20)]
    order: list[int] = []
    for _ in range(20):
        for number in blocked:
            scene.scheduler.first_token(number, scene.now)
        found = numbers(scene.due())
        order += found
        blocked = found
    assert sum(number in theirs for number in order[:20]) >= 3


def test_a_flood_above_leaves_batch_its_floor() -> None:
    """Interactive work could use everything; batch still gets a twentieth of the tokens, and no more than that."""
    scene = Scene(2, classes=[PATIENT, replace(LATER, floor=0.05)])
    for _ in range(50):
        scene.submit(2000, class_="batch", output_tokens=0, streamed=False)
    tokens = {"interactive": 0, "batch": 0}
    running: list[int] = []
    for _ in range(600):
        while sum(scene.scheduler.statistics(scene.now).queued.values()) < 90:
            scene.scheduler.submit(scene.job(3000, output_tokens=0, streamed=False), scene.now)
        for each in scene.due():
            tokens[each.job.class_] += each.job.prompt_tokens
            running.append(each.job.id)
        scene.now += 0.3
        scene.scheduler.leave(running.pop(0), scene.now, Ending.IGNORED)
    assert 0.04 < tokens["batch"] / sum(tokens.values()) < 0.07


def test_batch_stays_under_its_ceiling() -> None:
    """With nobody else there batch starts on half of the backends, and nowhere beside a prefill."""
    scene = Scene(4)
    assert sorted(scene.submit(100, class_="batch")[1] for _ in range(4))[:2] == ["", ""]
    assert sum(backend.running for backend in scene.scheduler.statistics(0.0).backends.values()) == 2
    assert scene.submit(100)[1]


def test_what_cannot_be_served_in_time_is_refused_and_nothing_on_a_guess() -> None:
    """A deadline nearer than the prefill takes is hopeless, once it is known what prefills take."""
    scene = Scene()
    assert scene.submit(20_000, deadline=0.5)[1] == "b0"
    scene.leave(1, Ending.IGNORED)
    for _ in range(8):
        number, _ = scene.submit(10_000)
        scene.now += 1.0
        scene.first(number)
        scene.leave(number)
    assert scene.submit(20_000, deadline=scene.now + 1.0)[1] == Reason.DEADLINE
    number, where = scene.submit(20_000, deadline=scene.now + 3.0)
    assert where == "b0"
    waiting, _ = scene.submit(10_000, deadline=scene.now + 3.0)
    start = scene.now
    assert scene.at(start + 1.9) == []
    (found,) = scene.at(start + 2.1)
    assert isinstance(found, Drop)
    assert (found.job.id, found.reason) == (waiting, Reason.DEADLINE)


def test_a_place_that_is_not_taken_goes_to_the_next_at_once() -> None:
    """The client left between the decision and its hand-over."""
    scene = Scene()
    running, _ = scene.submit(20_000)
    second, third = (scene.submit(20_000)[0] for _ in range(2))
    assert numbers(scene.leave(running)) == [second]
    assert numbers(scene.leave(second, Ending.IGNORED)) == [third]
    assert scene.leave(second, Ending.IGNORED) == []


def test_a_restarted_backend_begins_with_nothing() -> None:
    """What ran on the old one may still end, and changes nothing on the new one."""
    scene = Scene(view=BackendView("", concurrency=1))
    running, _ = scene.submit(20_000)
    waiting, _ = scene.submit(20_000)
    scene.scheduler.observe([BackendView("b0", 1, 1)], 1.0)
    assert numbers(scene.due()) == [waiting]
    scene.leave(running, Ending.DROPPED)
    assert scene.scheduler.statistics(1.0).backends["b0"].running == 1


def test_waiters_that_nobody_can_serve_any_more_are_told() -> None:
    """Their backends have gone; told once, however often that was observed."""
    scene = Scene(2)
    scene.submit(20_000, candidates=frozenset(["b0"]))
    waiting, _ = scene.submit(20_000, candidates=frozenset(["b0"]))
    scene.scheduler.observe([BackendView("b1")], 1.0)
    scene.scheduler.observe([BackendView("b1", open=False)], 1.0)
    found = scene.at(1.0)
    assert [(each.job.id, each.reason) for each in found if isinstance(each, Drop)] == [(waiting, Reason.NO_BACKEND)]


def test_a_prompt_that_is_no_longer_warm_loses_its_turn() -> None:
    """It stood before a shorter one for what was cached of it. It may not keep that place, nor may a second look at the
    same moment be needed to see it, when the streams can afford the shorter prefill alone."""
    scene = Scene()
    running, _ = scene.submit(100)
    scene.first(running)
    holder, _ = scene.submit(9000, prefix=prefix("p", 32))
    scene.submit(9000, prefix=prefix("p", 32))
    shorter, _ = scene.submit(5000)
    scene.scheduler._pool.losses.add(9000, 4500, 9.0)
    scene.scheduler.tokens(running, 70, scene.now)  # seven seconds saved; nine times 5/9 and a margin are six
    assert numbers(scene.leave(holder, Ending.DROPPED)) == [shorter]
    assert scene.due() == []


def test_a_prompt_that_has_become_warm_goes_before_the_one_that_was_held() -> None:
    """The backend that was kept for the one before it is its own, and no second look is needed to see that."""
    scene = Scene(2)
    first, second = ({"candidates": frozenset({name})} for name in ("b0", "b1"))
    running, _ = scene.submit(20_000, prefix=prefix("p", 10), **first)
    other, _ = scene.submit(20_000, **second)
    warmer, _ = scene.submit(5000, prefix=prefix("p", 19), **first)
    becomes, _ = scene.submit(9000, prefix=prefix("p", 19))  # 6,440 tokens at first, 4,136 after the warmer
    scene.submit(5500)
    small, _ = scene.submit(100, **second)  # keeps b1 open, to small prefills alone
    assert numbers(scene.first(running)) == [warmer]
    scene.scheduler._pool.losses.add(9000, 4500, 9.0)
    scene.scheduler.tokens(running, 45, scene.now)  # enough for 4,136 tokens, not for 5,500
    scene.scheduler.tokens(other, 5, scene.now)
    assert numbers(scene.leave(warmer)) == [small, becomes]
    assert scene.due() == []


def test_the_timer_follows_what_prefills_are_found_to_take() -> None:
    """A job that was held is refused when its deadline is out of reach, though it once seemed to be so later only; and
    not before the scheduler asked to be called."""
    scene = Scene(rules=Rules(samples=1))
    running, _ = scene.submit(100)
    scene.first(running)
    scene.scheduler._pool.losses.add(10_000, 5000, 99.0)
    scene.scheduler._pool.times.add(10_000, 5000, 1.0)
    late, _ = scene.submit(10_000, deadline=5.0)
    scene.scheduler._pool.times.add(10_000, 5000, 9.0)
    assert scene.due() == []
    deadline = scene.scheduler.next_deadline()
    assert deadline is not None
    assert abs(deadline - (5.0 - scene.scheduler._pool.times.expect(10_000, 10_000))) < 1e-9
    assert scene.at(deadline - 1e-6) == []
    assert [(each.job.id, each.reason) for each in scene.at(deadline) if isinstance(each, Drop)] == [
        (late, Reason.DEADLINE)
    ]


def test_a_new_backend_is_not_taken_for_a_warm_one() -> None:
    """What every backend held is not held by one that has just come."""
    scene = Scene(view=BackendView("", concurrency=1))
    scene.submit(20_000, prefix=prefix("x", 78))
    waiting, _ = scene.submit(20_000, prefix=prefix("x", 78))
    (found,) = scene.backends(2)
    assert isinstance(found, Dispatch)
    assert (found.job.id, found.backend, found.cached_tokens) == (waiting, "b1", 0)


def test_a_gateway_that_falls_silent_wakes_those_who_waited_for_it() -> None:
    """Its load is forgotten after three seconds, and the scheduler says when."""
    scene = Scene()
    scene.scheduler.observe_remote("other", [RemoteLoad("b0", 8000, 0.8, inf, 1)], 0.0)
    waiting, where = scene.submit(2000)
    assert where == ""
    assert scene.scheduler.next_deadline() == 3.0
    assert numbers(scene.at(3.0)) == [waiting]


def test_a_failed_backend_is_not_credited_with_the_prompt() -> None:
    """After a failure the next try of the same prompt is not drawn to where it failed."""
    scene = Scene(2)
    first, where = scene.submit(3000, prefix=prefix("x", 11))
    scene.leave(first, Ending.DROPPED)
    for _ in range(2):
        candidates = scene.scheduler.explain(scene.job(3000, prefix=prefix("x", 11)), 0.0).candidates
        assert {each.cached_tokens for each in candidates} == {0}
    assert where


def test_retry_after_is_the_backlog_over_the_measured_rate() -> None:
    """One waiter of 1,000 tokens leaves every two seconds: with 10,000 tokens queued that makes 20 s."""
    scene = Scene(view=BackendView("", concurrency=1))
    for _ in range(300):  # at first nobody waits, which tells nothing of how fast a queue drains
        number, where = scene.submit(1000)
        assert where
        scene.now += 5.0
        scene.leave(number)
    number, _ = scene.submit(1000)
    for _ in range(10):
        scene.submit(1000)
    for _ in range(100):
        scene.now += 2.0
        (found,) = scene.leave(number)
        number = found.job.id
        scene.submit(1000)
    assert abs(scene.scheduler.retry_after(scene.now) - 20.0) < 1.0
    place = scene.scheduler.place(scene.job(1000), scene.now)
    assert (place.position, round(place.wait_s)) == (11, 20)


def test_a_queue_that_was_left_is_not_a_queue_that_is_stuck() -> None:
    """The last waiter leaves; the hour until the next one does not count as waiting."""
    scene = Scene(view=BackendView("", concurrency=1))
    number, _ = scene.submit(1000)
    for _ in range(20):
        scene.submit(1000)
        scene.now += 1.0
        number = scene.leave(number)[0].job.id
    waiting, _ = scene.submit(1000)
    scene.scheduler.leave(waiting, scene.now, Ending.IGNORED)
    scene.now += 3600.0
    for _ in range(5):
        scene.submit(1000)
    assert scene.scheduler.retry_after(scene.now) < 10.0


def test_an_explanation_changes_nothing() -> None:
    """Neither a wish is noted nor chance used; the decision is the one that was foretold."""
    scene = Scene(2)
    running, _ = scene.submit(8000)
    scene.now = 0.8
    scene.first(running)
    before = (scene.scheduler.next_deadline(), scene.scheduler._choice._rng.getstate(), scene.scheduler.statistics(0.8))
    job = scene.job(3000)
    explained = scene.scheduler.explain(job, 0.8)
    assert before == (
        scene.scheduler.next_deadline(),
        scene.scheduler._choice._rng.getstate(),
        scene.scheduler.statistics(0.8),
    )
    assert scene.submit(3000)[1] == explained.backend


def test_a_job_cannot_come_twice() -> None:
    """Neither while it waits nor while it runs: that is a fault of the caller."""
    scene = Scene()
    for _ in range(2):
        job = scene.job(20_000)
        scene.scheduler.submit(job, 0.0)
        scene.due()
        try:
            scene.scheduler.submit(job, 0.0)
        except ValueError:
            continue
        raise AssertionError("it was taken twice")
