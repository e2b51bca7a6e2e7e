"""The simulation against closed forms, against itself step by step, and what it hides from a policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from loadtests import baselines
from loadtests.engine import Engine
from loadtests.fleet import Fleet
from loadtests.gateways import scheduler
from loadtests.profiles import S
from loadtests.results import figures
from loadtests.scenario import Scenario
from loadtests.simulate import simulate
from loadtests.simulation import Simulation
from loadtests.traces import Request
from loadtests.workload import Call, OpenLoop
from policies.types import Dispatch, Drop, Job

REALISTIC = Scenario(
    load=2.4,
    limit=400,
    signal_delay_s=0.01,
    estimate_error=0.3,
    estimate_bias=1.25,
    index="approximate",
    non_streamed=0.3,
)


class SteppingEngine(Engine):
    """Takes every step by itself."""

    def _stretch(self, until_ps: int | None = None) -> int:
        return 0


class Fixed:
    """Given calls."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def start(self) -> Iterator[Call]:
        return iter(self.calls)

    def after(self, call: Call, now_ps: int) -> Call | None:
        return None


def outcome(calls: list[Call]) -> list[tuple[object, ...]]:
    return sorted((c.id, c.backend, c.dispatched_ps, c.first_ps, c.last_ps, c.cached_tokens, c.refused) for c in calls)


@pytest.mark.parametrize("policy", ["headrace", "min-ttft-reject", "vtc"])
@pytest.mark.parametrize("trace", ["conversation", "azure-chat"])
def test_leaps_and_single_steps_give_the_same_run(trace: str, policy: str) -> None:
    """Every dispatch and every token falls on the same picosecond when engines take each step by itself."""
    scenario = replace(REALISTIC, trace=trace, load=2.4 if trace == "conversation" else 24.0, policy=policy, limit=250)
    runs = []
    for stepping in (False, True):
        fleet = Fleet(scenario)
        if stepping:
            for replica in fleet.replicas:
                replica.engine = SteppingEngine(scenario.engine, kv_tokens=scenario.kv_tokens)
        workload = OpenLoop(scenario, 1)
        if policy == "headrace":
            router = scheduler(scenario, fleet, 1, 0, workload.piece_tokens)
        else:
            router = baselines.baseline(policy, fleet, Random(1))
        simulation = Simulation(scenario, workload, fleet, [router], exact=policy != "headrace")
        runs.append(outcome(simulation.run()))
    assert runs[0] == runs[1]
    assert any(dispatched for _, _, dispatched, *_ in runs[0])


def test_a_seed_determines_a_run() -> None:
    """Equal seeds, equal runs to the picosecond; another seed, another run."""
    runs = [outcome(simulate(REALISTIC, seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_waiting_is_that_of_an_m_d_1_queue() -> None:
    """Poisson arrivals of equal prompts, one per step, before one replica: mean wait = rho D / (2 (1 - rho))."""
    scenario = Scenario(policy="round-robin", replicas=1)
    service_s = scenario.isolated_s(2048)
    rng = Random(7)
    for load in (0.5, 0.8):
        at_s, calls = 0.0, []
        for number in range(20_000):
            at_s += rng.expovariate(load / service_s)
            calls.append(Call(number, Request(at_s, 2048, 1), int(at_s * S), 1.0))
        fleet = Fleet(scenario)
        router = baselines.baseline("round-robin", fleet, Random(1))
        done = Simulation(scenario, Fixed(calls), fleet, [router], exact=True).run()
        waited = sum(call.ttft_s or 0.0 for call in done) / len(done) - service_s
        assert waited == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.06)


class Recorder:
    """A router that sends all to one replica, and keeps what it is told."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.told: list[tuple[str, int, float]] = []
        self.tokens_seen = 0
        self._new: list[Job] = []

    def submit(self, job: Job, now: float) -> None:
        self.jobs.append(job)
        self._new.append(job)

    def first_token(self, job_id: int, now: float) -> None:
        self.told.append(("first", job_id, now))

    def tokens(self, job_id: int, n: int, now: float) -> bool:
        self.tokens_seen += n
        return False

    def leave(self, job_id: int, now: float, ending: object, usage: object = None) -> None:
        self.told.append(("last", job_id, now))

    def due(self, now: float) -> list[Dispatch | Drop]:
        new, self._new = self._new, []
        return [Dispatch(job, "r0") for job in new]

    def next_deadline(self) -> float | None:
        return None

    def publish(self, now: float) -> tuple[()]:
        return ()

    def observe_remote(self, gateway: str, loads: object, now: float) -> None:
        raise AssertionError("there is one gateway")


def test_a_router_is_told_late_and_never_the_length_of_an_answer() -> None:
    """First tokens and ends come after the delay; tokens add up to those after the first; estimates are off."""
    scenario = Scenario(replicas=1, signal_delay_s=0.05)
    requests = [(3000, 400), (500, 1), (800, 700)]
    calls = [Call(i, Request(0.0, p, o), i * S, 9.0, error=1.25) for i, (p, o) in enumerate(requests)]
    router = Recorder()
    done = Simulation(scenario, Fixed(calls), Fleet(scenario), [router]).run()
    for call in done:
        assert ("first", call.id, (call.first_ps + S // 20) / S) in router.told
        assert ("last", call.id, (call.last_ps + S // 20) / S) in router.told
    assert router.tokens_seen == sum(o - 1 for _, o in requests)
    assert [job.prompt_tokens for job in router.jobs] == [3750, 625, 1000]
    assert [job.output_tokens for job in router.jobs] == [200, 200, 1]  # a prior, then the mean of what has ended


def test_calls_that_are_not_streamed_show_nothing_before_their_end() -> None:
    """No first token and no tokens are reported for them."""
    scenario = Scenario(replicas=1)
    call = Call(1, Request(0.0, 3000, 40), 0, 9.0, streamed=False)
    router = Recorder()
    Simulation(scenario, Fixed([call]), Fleet(scenario), [router]).run()
    assert [what for what, _, _ in router.told] == ["last"]
    assert router.tokens_seen == 0


def test_two_gateways_hear_of_each_other() -> None:
    """With news in 5 ms two schedulers do nearly as well as one; in a second much worse."""
    scenario = replace(REALISTIC, load=3.0, limit=700)
    one, two, deaf = (
        figures(simulate(other, 3), other)["goodput"]
        for other in (scenario, replace(scenario, gateways=2), replace(scenario, gateways=2, gateway_delay_s=5.0))
    )
    assert two > one - 0.06
    assert deaf < two


def test_salted_tenants_share_no_cache() -> None:
    """Five tenants with one cache hit each other's prompts; with salts only their own."""
    scenario = Scenario(trace="synthetic", limit=800, tenants=5, policy="round-robin", replicas=2)
    shared, apart = (figures(simulate(s, 1), s)["hit_rate"] for s in (scenario, replace(scenario, salted=True)))
    assert 0 < apart < shared


def test_prompts_that_no_replica_could_hold_are_refused() -> None:
    """They count as arrivals that were not served."""
    scenario = Scenario(kv_tokens=32_000, limit=200, policy="round-robin")
    calls = simulate(scenario, 1)
    refused = [call for call in calls if call.refused]
    assert refused
    assert all(call.request.prompt_tokens + call.request.output_tokens > 32_000 for call in refused)
    assert len(calls) == 200


def test_leaving_out_a_tenant_leaves_the_others_as_they_were() -> None:
    """`without` removes calls and moves nothing."""
    scenario = Scenario(limit=300, tenants=5, aggressor=10.0, policy="round-robin")
    whole = {c.id: (c.arrived_ps, c.tenant) for c in OpenLoop(scenario, 1).start()}
    rest = {c.id: (c.arrived_ps, c.tenant) for c in OpenLoop(replace(scenario, without="tenant-3"), 1).start()}
    assert rest == {name: what for name, what in whole.items() if what[1] != "tenant-3"}
    assert 0 < len(rest) < len(whole)


def test_a_burst_squeezes_arrivals_for_a_minute() -> None:
    """Three times the arrivals in the minute in the middle, as many as before in all."""
    scenario = Scenario(trace="azure-chat", load=8.0)
    workload = OpenLoop(replace(scenario, burst=3.0), 1)
    calm = [call.arrived_ps / S for call in OpenLoop(scenario, 1).start()]
    burst = [call.arrived_ps / S for call in workload.start()]
    assert len(calm) == len(burst)
    middle = sum(workload.burst_s <= at < workload.burst_s + 60 for at in burst)
    assert middle == sum(workload.burst_s <= at < workload.burst_s + 180 for at in calm)


def test_sessions_wait_for_their_answers() -> None:
    """A user's next request comes its pause after the answer to the one before."""
    scenario = Scenario(trace="agentic", sessions=3, policy="round-robin")
    by_user: dict[int, list[Call]] = {}
    for call in sorted(simulate(scenario, 1), key=lambda call: call.arrived_ps):
        by_user.setdefault(call.user, []).append(call)
    assert len(by_user) == 3
    for calls in by_user.values():
        assert all(a.last_ps is not None and a.last_ps <= b.arrived_ps for a, b in pairwise(calls))
