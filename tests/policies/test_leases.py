"""Replicas that share a limit through leases: together they let through what one would, whatever gets lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from policies.leases import LEASE_US, USABLE_US, Lease
from policies.limits import MINUTE_US, Kind, Limit
from tests.policies.storemodel import StoreModel

RATE, PLACES = Limit(Kind.TOKENS, 6000, 300), Limit(Kind.CONCURRENT, 12)


@dataclass
class Replica:
    """One gateway, with what runs on it. `lost`: the store gets its calls, but it gets no replies."""

    name: str
    leases: list[Lease] = field(default_factory=lambda: [Lease(RATE), Lease(PLACES)])
    running: int = 0
    calls: int = 0
    lost: bool = False

    def ask(self, store: StoreModel, now: int, replicas: int, tokens: int = 1) -> bool:
        """Whether a request is let through."""
        costs = [RATE.cost(tokens), 1]
        if all(lease.holds(cost, now) for lease, cost in zip(self.leases, costs, strict=True)):
            for lease, cost in zip(self.leases, costs, strict=True):
                lease.spend(cost)
        elif not self.sync(store, now, replicas, costs):
            return False
        self.running += 1
        return True

    def sync(self, store: StoreModel, now: int, replicas: int, costs: list[int] | None = None) -> bool:
        asked = [
            0 if not costs or lease.holds(cost, now) else cost
            for lease, cost in zip(self.leases, costs or [0, 0], strict=True)
        ]
        reports = [lease.report(now, cost) for lease, cost in zip(self.leases, asked, strict=True)]
        told, verdicts = store.run(now, self.name, 2 * replicas, reports, [costs] if costs else [])
        self.calls += 1
        if self.lost:
            return False
        for lease, (free, used, extra) in zip(self.leases, told, strict=True):
            lease.renewed(free, used, extra, now)
        if verdicts and verdicts[0]:
            for lease, cost in zip(self.leases, costs or [], strict=True):
                lease.admitted(cost)
        return bool(verdicts and verdicts[0])

    def end(self, now: int, replicas: int, unused: int = 0) -> None:
        self.running -= 1
        self.leases[0].give(RATE.cost(unused), now, replicas)
        self.leases[1].give(1, now, replicas)


@pytest.mark.parametrize("seed", range(40))
def test_replicas_together_never_pass_a_limit(seed: int) -> None:
    """Requests at random, some of whose tokens come back, with replies lost, replicas that stand still for longer than
    a lease, and dead ones."""
    rng, store, now = Random(seed), StoreModel([RATE, PLACES], LEASE_US), 10_000_000
    replicas = [Replica(f"r{number}") for number in range(4)]
    let: list[int] = []
    beats = {replica.name: now for replica in replicas}
    pace_us, most_unused = rng.choice([2_000, 8_000, 40_000]), rng.choice([0, 4])
    for step in range(4_000):
        now += rng.randrange(2 * pace_us) if rng.random() > 0.001 else rng.randrange(2 * LEASE_US)
        replica = rng.choice(replicas)
        replica.lost = rng.random() < 0.01
        if now - beats[replica.name] > 2_000_000:
            beats[replica.name] = now
            replica.sync(store, now, len(replicas))
        if rng.random() < 0.5 and replica.running:
            replica.end(now, len(replicas), most_unused)
        elif replica.ask(store, now, len(replicas), tokens=1 + most_unused):
            let.append(now)
        if rng.random() < 0.0005:  # it dies; another one comes
            replicas[replicas.index(replica)] = newcomer = Replica(f"r{step}")
            beats[newcomer.name] = now
    late = PLACES.amount * most_unused  # of requests from before a window, may come back within it
    for first in range(len(let)):
        for last in range(first, len(let), 7):
            assert last - first + 1 <= RATE.burst + RATE.amount * (let[last] - let[first] + 1) / MINUTE_US + late


@pytest.mark.parametrize("seed", range(20))
def test_requests_at_once_never_pass_their_number(seed: int) -> None:
    """While the replicas live and renew in time."""
    rng, store, now = Random(seed), StoreModel([RATE, PLACES], LEASE_US), 10_000_000
    replicas = [Replica(f"r{number}") for number in range(3)]
    refused = 0
    for step in range(3_000):
        now += 10_000
        if step % 200 == 0:
            for replica in replicas:
                replica.sync(store, now, len(replicas))
        replica = rng.choice(replicas)
        if rng.random() < 0.4 and replica.running:
            replica.end(now, len(replicas))
        else:
            refused += not replica.ask(store, now, len(replicas))
        assert sum(each.running for each in replicas) <= PLACES.amount
    assert refused  # it was tried


def test_the_common_request_asks_nobody() -> None:
    """Far from the limit, where ten requests come per renewal or more."""
    limit, store, now = RATE, StoreModel([RATE, PLACES], LEASE_US), 10_000_000
    replica = Replica("r")
    for _ in range(1_000):
        now += 20_000  # half of the rate
        assert replica.ask(store, now, 4)
        replica.end(now, 4)
    assert replica.calls < 100, limit


def test_near_the_limit_nothing_is_leased() -> None:
    """Each request is the store's to decide, and the last one of the burst is let through."""
    store, now = StoreModel([RATE, PLACES], LEASE_US), 10_000_000
    replicas = [Replica(f"r{number}") for number in range(4)]
    let = 0
    for number in range(400):
        let += replicas[number % 4].ask(store, now, 4)
        for replica in replicas:
            while replica.running:
                replica.end(now, 4)
                replica.sync(store, now, 4)
    assert let == RATE.burst
    assert all(replica.leases[0].report(now, 0).kept == 0 for replica in replicas)


def test_a_dead_replicas_requests_at_once_come_back_with_its_lease() -> None:
    """Not before, and not later."""
    store, now = StoreModel([RATE, PLACES], LEASE_US), 10_000_000
    dead, alive = Replica("dead"), Replica("alive")
    assert sum(dead.ask(store, now, 1) for _ in range(20)) == PLACES.amount
    assert not alive.ask(store, now + LEASE_US - 1, 2)
    assert alive.ask(store, now + LEASE_US + 60_000, 2)


def test_a_dead_replicas_lease_on_a_rate_counts_as_spent() -> None:
    """Nobody can tell what became of it."""
    store, now = StoreModel([RATE, PLACES], LEASE_US), 10_000_000
    dead, alive = Replica("dead"), Replica("alive")
    assert dead.ask(store, now, 1)
    (amount, expiry) = store.kept[0].leases["dead"]
    assert amount > 0
    alive.sync(store, expiry - 1, 1)
    before = alive.leases[0].standing(expiry - 1).reset_us
    alive.sync(store, expiry, 1)
    assert alive.leases[0].standing(expiry).reset_us >= min(before, amount)
    assert store.kept[0].mark == expiry + amount


def test_a_lease_is_not_spent_after_its_time() -> None:
    """The replica stood still: by then the store may have given it to others."""
    store, now = StoreModel([RATE, PLACES], LEASE_US), 10_000_000
    replica = Replica("r")
    assert replica.ask(store, now, 1)
    cost = RATE.cost(1)
    assert replica.leases[0].holds(cost, now + USABLE_US - 1)
    assert not replica.leases[0].holds(cost, now + USABLE_US)
    assert now + USABLE_US < store.kept[0].leases["r"][1]


def test_a_store_that_forgot_is_told_what_was_used() -> None:
    """Restarted with nothing, it would let everybody have a whole burst again."""
    store, now = StoreModel([RATE, PLACES], LEASE_US), 10_000_000
    replica = Replica("r")
    while replica.ask(store, now, 1):
        replica.end(now, 1)
    store.forget()
    replica.ask(store, now + 300_000, 1)
    used = store.kept[0].mark
    assert used is not None
    assert used - now > RATE.room * 0.9


def test_idle_replicas_give_everything_back() -> None:
    """One report after the last request; then there is nothing to tell any more."""
    store, now = StoreModel([RATE, PLACES], LEASE_US), 10_000_000
    replica = Replica("r")
    for _ in range(50):
        assert replica.ask(store, now, 1)
        replica.end(now, 1)
    for _ in range(2):
        now += 2_000_000
        replica.sync(store, now, 1)
    assert not any(lease.active() for lease in replica.leases)
    assert all(not kept.leases for kept in store.kept)
