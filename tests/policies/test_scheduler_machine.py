"""The scheduler as a state machine: whatever happens in whatever order, the promises of `tests.policies.world` hold.

Hypothesis looks for short histories that break one; random walks of one seed each go further. Both run schedulers in
lock-step that must decide alike, one of which never sees its queue empty.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from policies.rules import Rules
from policies.types import BackendView, Dispatch, Ending, Job, RemoteLoad, Usage
from tests.policies.chance import PLANS, Chance, digest
from tests.policies.world import WEIGHTS, Plan, World

ROOT = Path(__file__).parents[2]
FULL = bool(os.environ.get("HEADRACE_FULL_TESTS"))  # with it ten times as many histories, which takes minutes
NAMES = st.sampled_from(["b0", "b1", "b2"])
MOMENTS = st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 3.0, 11.0])
PROMPTS = st.sampled_from([0, 1, 40, 1000, 2048, 4095, 4096, 4097, 9000, 60_000])


def job(number: int, now: float, draw: dict[str, Any]) -> Job:
    """A job of what hypothesis drew."""
    family, tokens = draw["family"], draw["tokens"]
    prefix = tuple(b"%d/%d" % (family, i) for i in range(tokens // 256)) if family else ()
    return Job(
        number,
        draw["tenant"],
        now - draw["late_s"],
        draw["class_"],
        WEIGHTS[draw["tenant"]],
        tokens,
        draw["output"],
        prefix,
        streamed=draw["streamed"] and draw["output"] > 0,
        deadline=None if draw["patience_s"] is None else now + draw["patience_s"],
        candidates=draw["candidates"],
        tried=frozenset(draw["tried"]),
    )


JOBS = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(list(WEIGHTS)),
        "class_": st.sampled_from(["interactive", "batch"]),
        "tokens": PROMPTS,
        "output": st.sampled_from([0, 1, 100]),
        "family": st.integers(0, 2),
        "streamed": st.booleans(),
        "late_s": st.sampled_from([0.0, 0.0, 0.5]),
        "patience_s": st.sampled_from([None, None, 0.5, 5.0]),
        "candidates": st.none() | st.frozensets(NAMES, min_size=1),
        "tried": st.lists(NAMES, max_size=1),
    }
)
VIEWS = st.builds(
    BackendView,
    NAMES,
    st.integers(0, 1),
    st.sampled_from([1, 2, 256]),
    st.sampled_from([None, 20_000, 200_000]),
    st.sampled_from([None, 5000]),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([True, True, True, False]),
)
LOADS = st.builds(
    RemoteLoad,
    NAMES,
    st.sampled_from([0, 500, 8000]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([float("inf"), 0.5, -1.0]),
    st.integers(0, 2),
    st.sampled_from([0, 5000]),
    st.sampled_from([None, 8.0]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Any history. Jobs are addressed by their age, so that examples shrink."""

    world: World

    @initialize(
        routing=st.sampled_from(["price", "price", "price", "prefix_affinity", "round_robin"]),
        shares=st.booleans(),
        tardy=st.booleans(),
        rules=st.sampled_from([Rules(), Rules(samples=1, quantum_requests=1.0), Rules(reserve=False)]),
    )
    def begin(self, routing: str, shares: bool, tardy: bool, rules: Rules) -> None:
        deadlines = tardy or not rules.reserve
        self.deadlines = deadlines
        self.world = World(Plan(7, routing, shares, deadlines=deadlines, tardy=tardy, rules=rules))

    def _job(self, draw: dict[str, Any]) -> Job:
        if not self.deadlines:
            draw = draw | {"patience_s": None}
        return job(next(self.world.ids), self.world.now, draw)

    def _pick(self, known: list[int], n: int) -> int:
        return known[n % len(known)]

    @rule(draws=st.lists(JOBS, min_size=1, max_size=4))
    def submit(self, draws: list[dict[str, Any]]) -> None:
        for draw in draws:
            self.world.submit(self._job(draw))

    @rule(draw=JOBS)
    def cancel_at_hand_over(self, draw: dict[str, Any]) -> None:
        """A place is given, and before it is taken its owner has gone: it is the next one's at once."""
        before = set(self.world.runs)
        self.world.submit(self._job(draw))
        for number in sorted(self.world.runs.keys() - before):
            self.world.leave(number, Ending.IGNORED)

    @precondition(lambda self: self.world.runs)
    @rule(n=st.integers(0, 5))
    def first_token(self, n: int) -> None:
        number = self._pick(list(self.world.runs), n)
        if self.world.runs[number].job.streamed:
            self.world.first_token(number)

    @precondition(lambda self: self.world.runs)
    @rule(n=st.integers(0, 5), count=st.sampled_from([1, 20]))
    def tokens(self, n: int, count: int) -> None:
        number = self._pick(list(self.world.runs), n)
        if self.world.runs[number].job.streamed:
            self.world.tokens(number, count)

    @precondition(lambda self: self.world.runs)
    @rule(n=st.integers(0, 5), ending=st.sampled_from(Ending), cached=st.sampled_from([None, 0]), quietly=st.booleans())
    def end(self, n: int, ending: Ending, cached: int | None, quietly: bool) -> None:
        number = self._pick(list(self.world.runs), n)
        usage = Usage(self.world.runs[number].job.prompt_tokens, 50, cached) if ending is Ending.SUCCESS else None
        self.world.leave(number, ending, usage, quietly=quietly)

    @precondition(lambda self: self.world.waiting)
    @rule(n=st.integers(0, 5), quietly=st.booleans())
    def leave_the_queue(self, n: int, quietly: bool) -> None:
        number = self._pick(list(self.world.waiting), n)
        self.world.leave(number, Ending.IGNORED, quietly=quietly)
        self.world.leave(number, Ending.IGNORED)

    @rule(views=st.lists(VIEWS, max_size=3, unique_by=lambda view: view.name))
    def observe(self, views: list[BackendView]) -> None:
        self.world.observe(views)

    @rule(gateway=st.sampled_from(["g1", "g2"]), loads=st.lists(LOADS, max_size=3, unique_by=lambda load: load.backend))
    def hear(self, gateway: str, loads: list[RemoteLoad]) -> None:
        self.world.hear(gateway, loads)

    @rule(seconds=MOMENTS)
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=600 if FULL else 60,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.routing}-{plan.seed}")
@pytest.mark.timeout(900)
def test_random_histories_keep_every_promise(plan: Plan) -> None:
    """Hundreds of events at random (thousands in the full suite), in worlds of every kind."""
    for seed in range(20 if FULL else 1):
        world = Chance(replace(plan, seed=plan.seed + 100 * seed)).run(600 if FULL else 150)
        assert len(world.finished) > 10  # it was a busy one


def test_asking_does_not_change_whose_turn_it_is() -> None:
    """A history in which a tenant that was ahead of its share had left entries in the queue: they set the bound for the
    others until somebody looked, as whoever publishes does."""
    assert len(Chance(replace(PLANS[2], seed=303)).run(400).finished) > 10


def test_chance_reaches_what_is_promised_about() -> None:
    """The random histories are not idle: every word for why a job waited or was refused comes up, and most jobs run."""
    words: set[str] = set()
    for plan in PLANS[:3]:
        chance = Chance(replace(plan, alone=True))
        settle = chance.world.settle

        def noted(settle: Any = settle) -> list[Any]:
            found: list[Any] = settle()
            for each in found:
                words.add(str(each.waited_for) if isinstance(each, Dispatch) else str(each.reason))
            return found

        chance.world.settle = noted  # type: ignore[method-assign]
        words.update(line.split()[-1] for line in chance.run(1200).log)
    assert {"turn", "warm", "room", "queue_full", "queue_timeout", "deadline_unreachable", "no_backend"} <= words


def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    """Processes with other hash seeds decide the same from the same seed: sets are never walked through."""
    digests = set()
    for hash_seed in ("0", "1", "77"):
        environ = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "tests.policies.chance", "60"]
        digests.add(subprocess.run(command, env=environ, cwd=ROOT, check=True, capture_output=True).stdout)
    assert digests == {f"{digest(60)}\n".encode()}
