"""Health: who is out, for how long, and how it returns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.health import Health
from policies.verdicts import Found, HealthRules, State

RULES = HealthRules()
NAMES = ("a", "b", "c", "d")


def pool(count: int = 4, *, probed: bool = False, rules: HealthRules = RULES) -> Health:
    health = Health(rules)
    for name in NAMES[:count]:
        health.enter(name, 0.0, probed=probed, cold=False)
    return health


def state(health: Health, name: str, now: float) -> State:
    return health.verdicts(now)[name].state


def test_two_refused_connections_eject_one_does_not() -> None:
    """Connect failures are fast and sure; one may be chance."""
    health = pool()
    assert not health.ended("a", Found.REFUSED, 1.0)
    health.ended("a", Found.GOOD, 1.1)
    assert not health.ended("a", Found.REFUSED, 1.2)
    assert health.ended("a", Found.REFUSED, 1.3)
    assert state(health, "a", 1.3) is State.EJECTED
    assert not health.verdicts(1.3)["a"].open


def test_four_faults_in_a_row_eject() -> None:
    """From a clean record."""
    health = pool()
    assert [health.ended("a", Found.FAULT, now) for now in (1.0, 1.1, 1.2, 1.3)] == [False, False, False, True]


@pytest.mark.parametrize(("every", "ejected"), [(5, False), (3, False), (2, True), (1, True)])
def test_a_rate_of_faults_ejects(every: int, ejected: bool) -> None:
    """Every third request is not yet a broken backend; every second is."""
    health = pool()
    for number in range(200):
        health.ended("a", Found.FAULT if number % every == 0 else Found.GOOD, number * 0.01)
    assert (state(health, "a", 2.0) in (State.EJECTED, State.TRIAL)) is ejected


def test_faults_that_lie_far_apart_are_forgotten() -> None:
    """A fault a minute never adds up."""
    health = pool()
    assert not any(health.ended("a", Found.FAULT, 60.0 * number) for number in range(100))


def test_what_tells_nothing_changes_nothing() -> None:
    """4xx, 429 and clients that leave."""
    health = pool()
    assert not any(health.ended("a", None, 0.01 * number) for number in range(1000))
    assert health.verdicts(10.0)["a"].open


def test_at_most_half_of_a_pool_is_ejected_while_the_rest_serves() -> None:
    """The third that fails goes on after a moment's rest, and at once if nobody else is left: a pool must not eject
    itself over a poisonous request."""
    health = pool()
    for name in "abc":
        for number in range(20):
            health.ended(name, Found.FAULT, 0.01 * number)
    assert [state(health, name, 0.2) for name in NAMES] == [State.EJECTED, State.EJECTED, State.RESTING, State.UP]
    assert [verdict.open for verdict in health.verdicts(0.2).values()] == [False, False, False, True]
    rested = 0.2 + health.rules.first_s
    assert 0.2 < health.next_change(0.2) <= rested and state(health, "c", rested) is State.UP
    for _ in range(health.rules.unhealthy_after):
        health.probed("d", False, 0.3)
    assert health.verdicts(0.3)["c"].open


def test_the_only_backend_stays_for_its_faults_and_goes_when_nobody_is_there() -> None:
    """What it answers tells a client more than that it is out; where nothing answers there is nothing to tell."""
    health = pool(1)
    assert not any(health.ended("a", Found.FAULT, 0.1 * number) for number in range(20))
    assert health.verdicts(2.0)["a"].open
    health.ended("a", Found.REFUSED, 2.1)
    assert health.ended("a", Found.REFUSED, 2.2)
    assert not health.verdicts(2.2)["a"].open


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_are_ejected_when_all_fail(count: int) -> None:
    """Then it is really all down, and who asks is told so at once."""
    health = pool(count)
    for number in range(4):
        for name in NAMES[:count]:
            health.ended(name, Found.FAULT, 0.1 * number)
    assert not any(verdict.open for verdict in health.verdicts(0.4).values())


def test_a_trial_is_one_request_and_decides() -> None:
    """Nothing before the time, then one request; good: back, and slowly; bad: out for longer."""
    health = pool()
    for now in (0.0, 0.1):
        health.ended("a", Found.REFUSED, now)
    until = health.next_change(0.1)
    assert until == pytest.approx(0.1 + RULES.first_s)
    assert not health.started("a", until - 0.01)
    assert health.verdicts(until)["a"].room == 1
    assert health.started("a", until)
    assert not health.verdicts(until)["a"].open
    assert not health.started("a", until)
    health.ended("a", Found.GOOD, until)  # of a request from before
    assert not health.verdicts(until)["a"].open
    health.ended("a", Found.FAULT, until, trial=True)
    assert state(health, "a", until + 1.5) is State.EJECTED
    again = health.next_change(until)
    assert again == pytest.approx(until + 2.0 * RULES.first_s)
    assert health.started("a", again)
    assert health.ended("a", Found.GOOD, again, trial=True, tokens=10)
    verdict = health.verdicts(again)["a"]
    assert verdict.open
    assert verdict.room == RULES.ramp_requests


def test_a_trial_that_told_nothing_is_held_again() -> None:
    """Its client left."""
    health = pool()
    for now in (0.0, 0.1):
        health.ended("a", Found.REFUSED, now)
    assert health.started("a", 2.0)
    assert health.ended("a", None, 2.1, trial=True)
    assert health.started("a", 2.2)


def test_ejections_grow_and_are_capped() -> None:
    """1, 2, 4, 4 seconds for what fails at once; what cost 20 s is asked again after 40; nothing beyond the worst."""
    health = pool()
    for now in (0.0, 0.0):
        health.ended("a", Found.REFUSED, now)
    now, lengths = 0.0, []
    for cost_s in (0.0, 0.0, 0.0, 20.0, 500.0):
        until = health.next_change(now)
        lengths.append(round(until - now, 6))
        now = until
        health.started("a", now)
        health.ended("a", Found.FAULT, now, trial=True, cost_s=cost_s)
    lengths.append(health.next_change(now) - now)
    assert lengths == [1.0, 2.0, 4.0, 4.0, 40.0, 60.0]


def test_good_probes_refute_refused_connections_but_not_faults() -> None:
    """A health endpoint says that a server is there, not that its engine works."""
    health = pool(probed=True)
    for name in NAMES:
        health.probed(name, True, 0.0)
        health.probed(name, True, 0.0)
    for _ in range(2):
        health.ended("a", Found.REFUSED, 1.0)
    for _ in range(4):
        health.ended("b", Found.FAULT, 1.0)
    for name in "ab":
        health.probed(name, True, 1.1)
        health.probed(name, True, 1.2)
    assert state(health, "a", 1.2) is State.UP
    assert state(health, "b", 1.2) is State.EJECTED


def test_three_bad_probes_in_a_row_take_out_and_two_good_ones_bring_back() -> None:
    """A slow probe now and then does not."""
    health = pool(probed=True)
    for name in NAMES:
        health.probed(name, True, 0.0)
        health.probed(name, True, 0.0)
    assert not any(health.probed("a", number % 3 > 0, float(number)) for number in range(60))
    assert [health.probed("a", False, 60.0 + number) for number in range(3)] == [False, False, True]
    assert state(health, "a", 64.0) is State.DOWN
    assert [health.probed("a", True, 64.0 + number) for number in range(2)] == [False, True]
    assert health.verdicts(66.0)["a"].room is not None


def test_the_cap_does_not_hold_for_probes() -> None:
    """Three of four that answer no probe are out."""
    health = pool(probed=True)
    for name in "abc":
        health.probed(name, False, 0.0)
    health.probed("d", True, 0.0)
    health.probed("d", True, 0.0)
    assert [name for name, verdict in health.verdicts(0.0).items() if verdict.open] == ["d"]


def test_silence_everywhere_at_once_is_not_believed() -> None:
    """It is our own network or machine, most likely. Of one backend it is believed, of refusals always."""
    health = pool(probed=True)
    for name in NAMES:
        health.probed(name, False, 0.0, silent=True)
    assert all(verdict.open and verdict.state is State.DOWN for verdict in health.verdicts(0.0).values())
    for name in "ab":
        health.probed(name, True, 0.1)
    assert all(verdict.open for verdict in health.verdicts(0.1).values())  # the first good probe shuts nobody out
    for name in "ab":
        health.probed(name, True, 0.1)
    assert [verdict.open for verdict in health.verdicts(0.1).values()] == [True, True, False, False]
    for name in NAMES:
        for _ in range(3):
            health.probed(name, False, 0.2)
    assert not any(verdict.open for verdict in health.verdicts(0.2).values())
    alone = pool(1, probed=True)
    alone.probed("a", False, 0.0, silent=True)
    assert not alone.verdicts(0.0)["a"].open


def test_unknown_backends_serve_only_while_nobody_better_does() -> None:
    """A pool that has just been started tries all; one that joins a running pool waits for its probes."""
    health = pool(2, probed=True)
    assert all(verdict.open for verdict in health.verdicts(0.0).values())
    for _ in range(2):
        health.probed("a", True, 0.0)
    assert [verdict.open for verdict in health.verdicts(0.0).values()] == [True, False]
    assert health.verdicts(0.0)["a"].room is None  # it is the gateway that has just been started


def test_who_is_shut_is_nobody_better() -> None:
    """One that is drained keeps neither the resting nor the silent from work."""
    health = pool(2)
    health.rest("b", 10.0)
    assert not health.verdicts(0.0)["b"].open
    assert health.verdicts(0.0, {"a"})["b"].open
    health = pool(3, probed=True)
    for _ in range(2):
        health.probed("a", True, 0.0)
    for name in "bc":
        health.probed(name, False, 0.0, silent=True)
    assert not health.verdicts(0.0)["b"].open
    assert health.verdicts(0.0, {"a"})["b"].open


def test_a_newcomer_starts_slowly_and_by_tokens() -> None:
    """More tokens served, more room; after the ramp no limit."""
    health = pool(2)
    health.enter("n", 5.0, probed=True, cold=True)
    for _ in range(2):
        health.probed("n", True, 6.0)
    rooms = []
    for _ in range(5):
        rooms.append(health.verdicts(7.0)["n"].room or 0)
        health.ended("n", Found.GOOD, 7.0, tokens=2 * RULES.ramp_tokens)
    assert rooms[0] == RULES.ramp_requests
    assert [b - a for a, b in pairwise(rooms)] == [2, 2, 2, 2]
    assert health.verdicts(6.0 + RULES.ramp_s)["n"].room is None


def test_a_backend_that_asks_for_rest_gets_it_while_others_serve() -> None:
    """A later time replaces an earlier one, not the other way round."""
    health = pool(2)
    assert health.rest("a", 10.0)
    assert not health.rest("a", 5.0)
    assert [verdict.open for verdict in health.verdicts(9.0).values()] == [False, True]
    assert health.rest("b", 20.0)
    assert [verdict.open for verdict in health.verdicts(9.0).values()] == [True, True]
    assert state(health, "a", 10.0) is State.UP


def test_a_failure_is_suspicious_from_the_second_in_a_row_on() -> None:
    """The first may be its request's own doing."""
    health = pool()
    seen = []
    for number in range(3):
        health.ended("a", Found.FAULT, 0.1 * number)
        seen.append(health.suspicious("a"))
    assert seen == [False, True, True]


def test_nothing_is_ejected_when_that_is_off() -> None:
    """`eject: false`."""
    health = pool(rules=HealthRules(eject=False))
    assert not any(health.ended("a", Found.REFUSED, 0.0) for _ in range(100))


def test_a_restart_wipes_the_record() -> None:
    """Clean counters, and a slow start."""
    health = pool()
    for _ in range(4):
        health.ended("a", Found.FAULT, 0.0)
    health.rest("a", 10.0)
    assert health.restarted("a", 0.5)
    verdict = health.verdicts(0.5)["a"]
    assert (verdict.state, verdict.room) == (State.UP, RULES.ramp_requests)


STEP = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from([*Found, None, "probe+", "probe-", "start", "rest", "restart", "leave", "enter"]),
    st.floats(0.0, 3.0),
)


def step(health: Health, name: str, what: Any, now: float, trials: dict[str, bool]) -> None:
    match what:
        case "probe+" | "probe-":
            health.probed(name, what == "probe+", now)
        case "start":
            trials[name] = (health.records.get(name) is not None and health.started(name, now)) or trials[name]
        case "rest":
            health.rest(name, now + 1.0)
        case "restart":
            health.restarted(name, now)
        case "leave":
            health.leave(name)
        case "enter":
            health.enter(name, now, probed=True, cold=True)
        case _:
            health.ended(name, what, now, trial=trials[name], cost_s=0.1, tokens=100)
            trials[name] = False


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=120))
def test_whatever_happens(steps: list[tuple[str, Any, float]]) -> None:
    """At most half is ejected while anybody is blameless; no ejection outlasts the worst; an open backend on trial has
    no trial under way; `next_change` is never late; and after a good while with good endings all serve again."""
    health = pool(probed=True)
    trials = dict.fromkeys(NAMES, False)
    now = 0.0
    for name, what, pause in steps:
        before = {each: health.records[each].ejected_until for each in health.records}
        soon = health.next_change(now)
        told = health.verdicts(now)
        if soon > now + pause:
            assert health.verdicts(now + pause) == told
        now += pause
        step(health, name, what, now, trials)
        records = health.records
        out = [each for each in records.values() if each.ejected_until is not None]
        fresh = [each for each in records if records[each].ejected_until not in (None, before.get(each))]
        blameless = [r for r in records.values() if r.probed is not False and r.ejected_until is None]
        if fresh and isinstance(what, Found) and before.get(name) is None and blameless:
            assert len(out) <= len(records) // 2
        for record in out:
            assert record.ejected_until is not None
            assert record.ejected_until <= now + RULES.worst_s
        for each, verdict in health.verdicts(now).items():
            assert not (verdict.state is State.TRIAL and verdict.open and records[each].trial)
            assert verdict.room is None or verdict.room >= 1
    for _ in range(40):
        now += 5.0
        for name in health.records:
            health.probed(name, True, now)
            trial = health.started(name, now) or trials[name]
            trials[name] = False
            health.ended(name, Found.GOOD, now, trial=trial, tokens=100)
    assert all(verdict.open for verdict in health.verdicts(now + 2 * RULES.ramp_s).values())


def test_a_witness_that_is_not_asked_any_more_has_said_nothing() -> None:
    """Without probes nobody is down, without ejection nobody is on trial. What the other one said holds."""
    health = pool(probed=True)
    for name in NAMES:
        health.probed(name, name != "a", 0.5)
        health.probed(name, name != "a", 0.6)
    for now in (1.0, 1.1):
        health.ended("b", Found.REFUSED, now)
    assert [state(health, name, 1.2) for name in "abc"] == [State.DOWN, State.EJECTED, State.UP]
    health.configure(RULES, probed=False)
    assert [state(health, name, 1.2) for name in "abc"] == [State.UP, State.EJECTED, State.UP]
    health.started("b", 9.0)
    health.configure(HealthRules(eject=False), probed=False)
    assert [state(health, name, 9.0) for name in "abc"] == [State.UP] * 3
    assert not health.ended("b", Found.FAULT, 9.1, trial=True)
    assert state(health, "b", 9.1) is State.UP
