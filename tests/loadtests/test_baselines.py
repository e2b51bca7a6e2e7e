"""Each published policy does what was published, on fleets whose state is known."""

from __future__ import annotations

from random import Random

import pytest

from loadtests import baselines
from loadtests.engine import Sequence
from loadtests.fleet import Fleet
from loadtests.profiles import S
from loadtests.scenario import Scenario
from loadtests.simulate import simulate
from policies.types import Dispatch, Drop, Ending, Job


class World:
    """A fleet that a test fills by hand. Prompts named alike begin alike, in pieces of 512 tokens."""

    def __init__(self, replicas: int, policy: str, **settings: object) -> None:
        self.fleet = Fleet(Scenario(policy=policy, replicas=replicas, **settings))  # type: ignore[arg-type]
        self.router = baselines.baseline(policy, self.fleet, Random(1))
        self._ids = 0

    def sequence(self, name: str, tokens: int, output: int) -> Sequence:
        self._ids += 1
        digests = [f"{name} {i}".encode() for i in range(tokens // 512)]
        return Sequence(self._ids, tokens, output, digests, 512)

    def put(self, replica: int, name: str, tokens: int, *, output: int = 5000, run_s: float = 0.0) -> int:
        """A request on a replica, which has worked for so long since."""
        sequence, target = self.sequence(name, tokens, output), self.fleet.replicas[replica]
        self.fleet.sequences[self._ids] = sequence
        self.fleet.homes[self._ids] = target
        target.dispatched(sequence)
        for step in target.advance(target.engine.clock_ps + int(run_s * S)):
            for first in step.first:
                target.prefilled(first)
        return self._ids

    def ask(self, name: str = "new", tokens: int = 1000, *, tenant: str = "t", limit_s: float = 9.0) -> Job:
        sequence = self.sequence(name, tokens, 10)
        self.fleet.sequences[self._ids] = sequence
        job = Job(
            self._ids,
            tenant,
            0.0,
            prompt_tokens=tokens,
            output_tokens=10,
            prefix=tuple(sequence.digests),
            deadline=limit_s,
        )
        self.router.submit(job, 0.0)
        return job

    def sent(self, *args: object, **kwargs: object) -> str:
        """Where one more request goes."""
        self.ask(*args, **kwargs)  # type: ignore[arg-type]
        (decision,) = self.router.due(0.0)
        return decision.backend if isinstance(decision, Dispatch) else decision.reason.value


def test_round_robin_takes_turns() -> None:
    """Four requests go to four replicas, whatever is there."""
    world = World(4, "round-robin")
    world.put(0, "x", 50_000)
    assert {world.sent() for _ in range(4)} == {"r0", "r1", "r2", "r3"}


def test_power_of_two_never_takes_the_busiest() -> None:
    """Of any two replicas the fullest of all is never the emptier one; counts, not tokens, decide."""
    world = World(3, "power-of-two")
    for _ in range(3):
        world.put(2, "small", 10)
    world.put(0, "large", 100_000)
    assert {world.sent() for _ in range(40)} == {"r0", "r1"}


def test_least_tokens_counts_what_the_cache_saves() -> None:
    """Queued tokens and this prompt's own uncached ones are added up."""
    world = World(2, "least-tokens")
    world.put(0, "warm", 8192, output=1, run_s=2.0)
    world.put(0, "x", 3000)
    assert world.sent("warm", 8192) == "r0"
    assert world.sent("cold", 8192) == "r1"


def test_cache_aware_follows_the_prefix_until_out_of_balance() -> None:
    """More than half matched and balanced: the warm one. 33 requests apart: the emptier one."""
    world = World(2, "cache-aware")
    world.put(0, "warm", 8192, output=1, run_s=2.0)
    assert world.sent("warm", 8192 + 4000) == "r0"
    assert {world.sent("warm", 2 * 8192 + 600) for _ in range(20)} == {"r1"}  # less than half: fewest requests
    for _ in range(40):
        world.put(0, "small", 10)
    assert world.sent("warm", 8192) == "r1"


def test_bounded_hash_sticks_and_spills_over() -> None:
    """One key goes to one replica until that has a quarter more than the mean."""
    world = World(4, "bounded-hash")
    home = world.sent("key", 600)
    assert {world.sent("key", 600) for _ in range(5)} == {home}
    for _ in range(8):
        world.put(int(home[1]), "x", 10)
    assert world.sent("key", 600) != home


def test_blend_weighs_prefix_queue_and_memory() -> None:
    """A full match (3) outweighs the longest queue (2), but not that and memory that is nearly full (2)."""
    world = World(2, "blend")
    world.put(0, "warm", 8192, output=1, run_s=2.0)
    world.put(0, "x", 30_000, output=1000, run_s=0.01)
    world.put(0, "y", 10_000)
    assert world.fleet.waiting() == [1, 0]
    assert world.sent("warm", 8200) == "r0"
    full = World(2, "blend")
    full.put(0, "warm", 8192, output=1, run_s=2.0)
    full.put(0, "x", 220_000, output=20_000, run_s=90.0)
    full.put(0, "y", 10_000)
    full.put(0, "z", 10_000)
    assert full.fleet.waiting()[0]
    assert full.fleet.kv_usage()[0] > 0.85
    assert full.sent("warm", 8200) == "r1"


@pytest.mark.parametrize(("policy", "queued", "expected"), [("sticky", 60_000, "r0"), ("sticky-2s", 60_000, "r1")])
def test_sticky_stays_until_tau_behind(policy: str, queued: int, expected: str) -> None:
    """60k tokens are less than 18 s of prefill, and more than 2 s."""
    world = World(2, policy)
    world.put(0, "warm", 8192, output=1, run_s=2.0)
    world.put(0, "x", queued)
    assert world.sent("warm", 9000) == expected


def test_product_multiplies_tokens_with_the_batch() -> None:
    """1,000 tokens beside 9 others cost more than 5,000 on an idle replica."""
    world = World(2, "product")
    for _ in range(9):
        world.put(0, "x", 16, run_s=0.2)
    world.put(1, "y", 4000, run_s=0.0)
    assert world.fleet.requests() == [9, 1]
    assert world.sent("new", 1000) == "r0"  # 1,000 x 10 = 10,000 against 5,000 x 2: equal, either
    world.put(0, "x", 16, run_s=0.2)
    assert {world.sent("new", 1000) for _ in range(10)} == {"r1"}


def test_min_ttft_rejects_what_would_be_late() -> None:
    """100k queued tokens everywhere are 16 s: a deadline of 15 s cannot be met, one of 17 s can."""
    world = World(2, "min-ttft-reject")
    for replica in (0, 1):
        world.put(replica, "x", 100_000)
    assert world.sent(limit_s=15.0) == "deadline_unreachable"
    assert world.sent(limit_s=17.0) in ("r0", "r1")


def test_block_cost_adds_held_memory() -> None:
    """20k held tokens weigh as much as 20k queued ones."""
    world = World(2, "block-cost")
    world.put(0, "x", 20_000, run_s=5.0)
    world.put(1, "y", 10_000)
    assert world.fleet.queued() == [0, 10_000]
    assert world.sent() == "r1"


def test_dynamo_queue_holds_while_all_are_above_the_threshold() -> None:
    """Two chunks of 2,048 tokens queued on every worker: the request waits; below on one: it goes there."""
    world = World(2, "block-cost-queue")
    world.put(0, "x", 9000)
    world.put(1, "y", 5000)
    world.ask()
    assert world.router.due(0.0) == []
    world.fleet.replicas[1].advance(3 * S)
    world.fleet.replicas[1].queued_tokens = 0
    (decision,) = world.router.due(0.0)
    assert isinstance(decision, Dispatch)
    assert decision.backend == "r1"


def test_fcfs_holds_the_line_and_wspt_does_not() -> None:
    """One place: first come first served gives it to the large prompt, Smith's rule to the small one."""
    for policy, first in (("block-cost-queue", 30_000), ("block-cost-wspt", 100)):
        world = World(1, policy)
        world.ask("large", 30_000)
        world.ask("small", 100)
        (decision, *_) = world.router.due(0.0)
        assert decision.job.prompt_tokens == first


def test_vtc_serves_who_had_least_and_lifts_who_returns() -> None:
    """Two tenants take turns by tokens; one that was away gets no credit for it."""
    world = World(1, "vtc", kv_tokens=100_000)
    order = world.router._order  # type: ignore[attr-defined]
    for _ in range(4):
        world.ask(tenant="heavy", tokens=1000)
    world.ask(tenant="light", tokens=10)
    world.ask(tenant="light", tokens=10)
    served = []
    while order.waiting:
        job = order.first(0.0)
        order.start(job, job.prompt_tokens)
        served.append(job.tenant)
    assert served == ["heavy", "light", "light", "heavy", "heavy", "heavy"]
    world.ask(tenant="heavy", tokens=1000)
    world.ask(tenant="away", tokens=10)
    assert order.counters["away"] == order.counters["heavy"] == 4000


def test_vtc_charges_output_as_it_comes() -> None:
    """Two per output token, while the answer is still being made."""
    world = World(1, "vtc")
    order = world.router._order  # type: ignore[attr-defined]
    job = world.ask(tokens=100)
    order.start(job, 100)
    number = world.put(0, "x", 100, output=50, run_s=0.3)
    order._running[number] = ("t", 0)
    world.ask(tenant="other")
    order.first(0.0)
    emitted = world.fleet.emitted(number)
    assert emitted > 5
    assert order.counters["t"] == 100 + 2 * emitted


def test_dlpm_prefers_prefixes_within_the_deficit() -> None:
    """The longest match goes first until its tenant's deficit is spent."""
    world = World(1, "dlpm")
    world.put(0, "warm", 16_384, output=1, run_s=5.0)
    world.fleet.replicas[0].running = 0
    world.ask("cold", 15_000, tenant="a")
    world.ask("warm", 16_384, tenant="b")
    order = world.router._order  # type: ignore[attr-defined]
    assert order.first(0.0).tenant == "b"
    order.counters["b"] = 1.0
    assert order.first(0.0).tenant == "a"


def test_queued_policies_admit_by_memory() -> None:
    """One request for a replica at a time, and none for one without memory for it."""
    world = World(1, "fcfs", kv_tokens=32_000)
    world.put(0, "x", 30_000, output=500, run_s=5.0)
    world.ask(tokens=5000)
    assert world.router.due(0.0) == []
    world.fleet.replicas[0].engine.cancel(1)
    world.fleet.replicas[0].advance(S)
    world.router.leave(1, 0.0, Ending.SUCCESS)
    assert len(world.router.due(0.0)) == 1


@pytest.mark.parametrize("policy", baselines.names())
def test_every_policy_serves_or_refuses_everything(policy: str) -> None:
    """A short overload ends with each call served or refused, none lost."""
    scenario = Scenario(load=3.0, limit=150, replicas=2, policy=policy, tenants=5)
    calls = simulate(scenario, 1)
    assert len(calls) == 150
    assert all((call.last_ps is not None) != bool(call.refused) for call in calls)


def test_an_unknown_policy_is_named() -> None:
    """The message lists what there is."""
    with pytest.raises(ValueError, match=r"unknown policy 'nope'; there are headrace, round-robin, .*dlpm"):
        baselines.baseline("nope", Fleet(Scenario()), Random(1))


def test_refusals_are_drops() -> None:
    """A rejected request comes back as a Drop with its reason."""
    world = World(1, "min-ttft-reject")
    world.put(0, "x", 200_000)
    world.ask(limit_s=1.0)
    (decision,) = world.router.due(0.0)
    assert isinstance(decision, Drop)
